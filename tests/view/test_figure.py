"""The chart for notebooks."""

from __future__ import annotations

from histories import DATA, MIB, MODEL, SPIKE, Story, busy

from mlxmem.reports.history import Call, Frame, Mark
from mlxmem.view import figure, fragment


def test_areas_add_up_to_active_at_every_drawn_event() -> None:
    history = busy(20_000)

    chart = figure(history, areas=5, bins=100)

    *areas, reserved = chart.data
    assert len(areas) == 6
    assert areas[-1].name == "295 others"
    assert reserved.name == "reserved"
    for k, entry in enumerate(areas[0].x[:-1]):
        assert sum(area.y[k] for area in areas) == history.active_after(entry)


def test_a_narrow_spike_is_drawn() -> None:
    story = Story()
    for _ in range(5_000):
        story.free(story.alloc(MIB, MODEL))
    spike = story.alloc(64 * MIB, SPIKE)
    story.free(spike)
    for _ in range(5_000):
        story.free(story.alloc(MIB, DATA))

    chart = figure(story.history(), bins=50)

    assert chart.data[0].name == "/app/spike.py:99 attend"
    assert max(chart.data[0].y) == 64 * MIB


def test_names_are_text() -> None:
    story = Story()
    story.alloc(MIB, (Frame("/a.py", 3, "<lambda>"),))
    history = story.history(marks=[Mark("<b>step</b>", 1, 0, 0)])

    chart = figure(history)

    assert chart.data[0].name == "/a.py:3 &lt;lambda&gt;"
    assert chart.layout.annotations[0].text == "&lt;b&gt;step&lt;/b&gt;"


def test_calls_and_crossings_are_lines_of_other_dashes() -> None:
    story = Story()
    story.alloc(MIB)
    story.alloc(MIB)
    call = Call("clear_cache", 1, 0, 0, 0, 9, (), 1)
    history = story.history(
        marks=[Mark("m", 1, 0, 0)], calls=[call], crossings=[Mark("over", 2, 0, 0)]
    )

    lines = [(line.x0, line.line.dash) for line in figure(history).layout.shapes]

    assert lines == [(0.5, "dot"), (0.5, "dashdot"), (1.5, "longdash")]


def test_an_empty_history_has_a_figure() -> None:
    assert figure(Story().history()).data[0].name == "reserved"


def test_a_fragment_brings_plotly_along() -> None:
    story = Story()
    story.alloc(MIB)

    html = fragment(story.history())

    assert html.lstrip().startswith("<div")
    assert "cdn.plot.ly/plotly" not in html
