"""The page in a browser: what it shows, by value."""

from __future__ import annotations

import time
from typing import Any

import pytest
from histories import BEGIN_US, DATA, MIB, MODEL, SPIKE, STEP_US, Story, busy

from mlxmem.reports.history import (
    Call,
    Frame,
    History,
    Mark,
    NodeLine,
    Nodes,
    NodeSample,
    Oom,
    Range,
)

MODEL_LINE = "/app/model.py:12 Block.__call__"
DATA_LINE = "/app/data.py:7 batches"
SPIKE_LINE = "/app/spike.py:99 attend"

_PLACE = """([x, y]) => {
    const chart = document.getElementById('chart');
    const { xaxis, yaxis } = chart._fullLayout;
    const box = chart.getBoundingClientRect();
    return [box.left + xaxis._offset + xaxis.c2p(x),
            box.top + yaxis._offset + yaxis.c2p(y)];
}"""
_WINDOW = "() => document.getElementById('chart')._fullLayout.xaxis.range"
_HIGHEST = """() => Math.max(...document.getElementById('chart').data
    .filter((trace) => trace.fill).map((trace) => Math.max(...trace.y)))"""


def hover(page: Any, x: float, y: float) -> str:
    """Move to a point of the chart and return what is shown there."""
    page.mouse.move(*page.evaluate(_PLACE, [x, y]))
    page.wait_for_timeout(100)
    return str(page.inner_text("#tip"))


def click(page: Any, x: float, y: float) -> None:
    """Click on a point of the chart."""
    page.mouse.click(*page.evaluate(_PLACE, [x, y]))


def zoom(page: Any, x0: float, x1: float) -> None:
    """Drag over a stretch of the chart."""
    left, top = page.evaluate(_PLACE, [x0, MIB])
    right, _ = page.evaluate(_PLACE, [x1, MIB])
    page.mouse.move(left, top)
    page.mouse.down()
    page.mouse.move((left + right) / 2, top + 2, steps=3)
    page.mouse.move(right, top + 2, steps=3)
    page.mouse.up()
    page.wait_for_function(
        f"""() => {{
            const [a, b] = ({_WINDOW})();
            return b - a < {2 * (x1 - x0)};
        }}"""
    )


def column(page: Any, place: int) -> list[str]:
    """Return the texts of one column of the table that is shown."""
    cells = page.query_selector_all(f"#table tbody td:nth-child({place})")
    return [cell.inner_text() for cell in cells]


def facts(page: Any) -> dict[str, str]:
    """Return what is said about the block that is shown."""
    names = page.locator("#block dt").all_inner_texts()
    values = page.locator("#block dd").all_inner_texts()
    return dict(zip(names, values, strict=True))


def three_steps() -> Story:
    """Tell of 3 MiB of the model, then twice 2 MiB of data of which one is freed."""
    story = Story()
    story.alloc(3 * MIB, MODEL, primitive="Matmul", thread=4711, stream=0)
    story.alloc(2 * MIB, DATA, primitive="Arange", thread=4712, stream=1)
    batch = story.alloc(
        2 * MIB,
        DATA,
        requested=2 * MIB - 100,
        primitive="Arange",
        range="forward",
        module="layers.0",
        action="AllocNew",
        thread=4712,
        stream=1,
    )
    story.free(batch, during="backward")
    return story


def test_the_head_has_peak_end_and_counts(show: Any) -> None:
    page = show(three_steps().history(reserved=9 * MIB))

    shown = page.inner_text("#facts").split("\n")
    assert shown == [
        *("Peak", "7.0 MiB", "entry 2 (2.00 ms)"),
        *("At the end", "5.0 MiB", "still active"),
        *("Reserved peak", "9.0 MiB", "active and cache"),
        *("Entries", "4", "3 blocks"),
    ]
    assert page.inner_text("h1") == "mlxmem out.pickle"


def test_hovering_shows_line_bytes_share_and_stack(show: Any) -> None:
    page = show(three_steps().history(reserved=9 * MIB))

    # GIVEN the peak, where the data (4 MiB) lies below the model (3 MiB)
    text = hover(page, 2.5, 1 * MIB)

    assert DATA_LINE in text
    assert "4.0 MiB (4,194,304 B), 57.1 % of active, 2 buffers" in text
    assert "entry 2 (2.00 ms): active 7.0 MiB, reserved 9.0 MiB, cache 2.0 MiB" in text
    assert "batches /app/data.py:7\nmain /app/train.py:41" in text

    # WHEN higher up, and then above all areas
    assert MODEL_LINE in hover(page, 2.5, 6 * MIB)
    text = hover(page, 2.5, 8.5 * MIB)

    assert text.startswith("entry 2 (2.00 ms): active 7.0 MiB")
    assert MODEL_LINE not in text


def test_a_click_lists_blocks_and_a_block_tells_its_life(show: Any) -> None:
    page = show(three_steps().history())

    # WHEN the data's area is clicked at the peak
    click(page, 2.5, 1 * MIB)

    assert page.inner_text("#area") == DATA_LINE
    total = "4.0 MiB (4,194,304 B) in 2 buffers after entry 2 (2.00 ms)"
    assert page.inner_text("#area-total") == total
    rows = page.locator("#blocks .row").all_inner_texts()
    assert [row.split("\n") for row in rows] == [
        ["2.0 MiB", "entry 1 · Arange"],
        ["2.0 MiB", "entry 2 · Arange"],
    ]

    # WHEN its second block is clicked
    page.locator("#blocks .row").nth(1).click()

    assert facts(page) == {
        "Size": "2.0 MiB (2,097,152 B)",
        "Requested": "2.0 MiB (2,097,052 B)",
        "Made": "entry 2 (2.00 ms)",
        "Freed": "entry 3 (3.00 ms)",
        "Freed during": "backward",
        "Lived": "1 entries, 1.00 ms",
        "Primitive": "Arange",
        "Range": "forward",
        "Module": "layers.0",
        "Thread": "thread 4712",
        "Stream": "stream 1",
        "Action": "AllocNew",
        "Address": "0x7f0002000000",
    }
    assert page.inner_text("#panel ol").startswith("batches /app/data.py:7")
    life = page.evaluate(
        "() => document.getElementById('chart').layout.shapes"
        ".filter((shape) => shape.name === 'life').map((s) => [s.x0, s.x1])"
    )
    assert life == [[2, 3]]

    # WHEN going back twice
    page.click(".back")
    page.click(".back")

    areas = page.locator("#areas .name").all_inner_texts()
    assert areas == [DATA_LINE, MODEL_LINE]
    assert page.locator("#areas .bytes").all_inner_texts() == ["4.0 MiB", "3.0 MiB"]


def test_a_block_that_was_never_freed_and_one_from_before(show: Any) -> None:
    story = Story()
    story.before(5 * MIB, (Frame("", 0, "allocated before the recording"),))
    story.alloc(MIB)

    page = show(story.history())
    click(page, 0.5, 2 * MIB)
    page.click("#blocks .row")

    shown = facts(page)
    assert shown["Made"] == "before the recording"
    assert shown["Freed"] == "still live at the end"
    assert shown["Size"] == "5.0 MiB (5,242,880 B)"


def test_a_zoom_shows_a_spike_of_one_event_at_its_height(show: Any) -> None:
    # GIVEN 40,000 events, of which two make a spike
    story = Story()
    for _ in range(10_000):
        story.free(story.alloc(MIB, MODEL))
    spike = len(story)
    story.free(story.alloc(64 * MIB, SPIKE))
    for _ in range(10_000):
        story.free(story.alloc(MIB, DATA))
    page = show(story.history())

    # THEN it is there although 57 events share a bin
    assert page.evaluate(_HIGHEST) == 64 * MIB
    assert page.inner_text("#facts").split("\n")[1] == "64.0 MiB"

    # WHEN zooming in until every event is drawn
    zoom(page, spike - 3_000, spike + 3_000)
    zoom(page, spike - 200, spike + 200)
    zoom(page, spike - 20, spike + 20)

    assert page.evaluate(_HIGHEST) == 64 * MIB
    text = hover(page, spike + 0.5, 30 * MIB)
    assert SPIKE_LINE in text
    assert "64.0 MiB (67,108,864 B), 100.0 % of active, 1 buffer" in text
    text = hover(page, spike - 1.5, 0.3 * MIB)
    assert MODEL_LINE in text
    assert f"entry {spike - 2:,} " in text

    # WHEN going back
    page.click("#zoom-out")

    assert page.evaluate(_WINDOW) == [-1, len(story)]


def test_a_double_click_shows_the_whole_again(show: Any) -> None:
    page = show(busy(2_000))
    zoom(page, 500, 700)

    page.mouse.dblclick(*page.evaluate(_PLACE, [600, MIB]))

    page.wait_for_function(f"() => ({_WINDOW})()[1] === 2000")


def test_the_axis_can_be_time(show: Any) -> None:
    page = show(three_steps().history())

    page.click("#axis-time")

    low, high = page.evaluate(_WINDOW)
    assert (low, high) == (0, 3 * STEP_US / 1e6)
    assert DATA_LINE in hover(page, 0.0025, 1 * MIB)
    assert "entry 2 (2.00 ms)" in hover(page, 0.0025, 1 * MIB)
    assert page.get_attribute("#axis-time", "aria-pressed") == "true"


def test_without_times_there_is_no_time_axis(show: Any) -> None:
    import numpy as np

    page = show(three_steps().history(time_us=np.zeros(4, np.int64)))

    assert page.is_disabled("#axis-time")
    assert page.inner_text("#facts").split("\n")[2] == "entry 2"


def test_areas_can_be_by_any_other_key(show: Any) -> None:
    page = show(three_steps().history())
    expected = {
        "primitive": ["Arange", "Matmul"],
        "range": ["no range", "forward"],
        "module": ["no module", "layers.0"],
        "thread": ["thread 4712", "thread 4711"],
        "stream": ["stream 1", "stream 0"],
        "file": ["/app/data.py", "/app/model.py"],
        "function": ["/app/data.py batches", "/app/model.py Block.__call__"],
        "stack": [f"{DATA_LINE} (stack 2)", f"{MODEL_LINE} (stack 1)"],
        "line": [DATA_LINE, MODEL_LINE],
    }

    for key, labels in expected.items():
        page.select_option("#by", key)

        assert page.locator("#areas .name").all_inner_texts() == labels, key
        assert column(page, 9) == labels, key


def test_the_key_of_the_command_line_is_where_it_starts(show: Any) -> None:
    page = show(three_steps().history(), "primitive")

    assert page.input_value("#by") == "primitive"
    assert page.locator("#areas .name").all_inner_texts() == ["Arange", "Matmul"]


def test_small_groups_are_one_area(show: Any) -> None:
    story = Story()
    for size in range(1, 21):
        story.alloc(size * MIB, (Frame("/app/many.py", size, "f"),))

    page = show(story.history())

    names = page.locator("#areas .name").all_inner_texts()
    assert "8 others" in names
    assert len(names) == 13
    at = names.index("8 others")
    assert page.locator("#areas .bytes").nth(at).inner_text() == "36.0 MiB"


def test_the_table_sorts_and_filters(show: Any) -> None:
    story = three_steps()
    story.alloc(512, SPIKE)
    page = show(story.history())

    # GIVEN: at the peak, buffers, moment, end, left, allocated, allocations, largest
    lines = [DATA_LINE, MODEL_LINE, SPIKE_LINE]
    assert column(page, 9) == lines
    assert column(page, 1) == ["4.0 MiB", "3.0 MiB", "0 B"]
    assert column(page, 2) == ["2", "1", "0"]
    assert column(page, 4) == ["2.0 MiB", "3.0 MiB", "512 B"]
    assert column(page, 6) == ["4.0 MiB", "3.0 MiB", "512 B"]
    assert column(page, 7) == ["2", "1", "1"]
    assert column(page, 8) == ["2.0 MiB", "3.0 MiB", "512 B"]

    # WHEN sorting by the end, and the other way round
    page.click("th:has-text('at the end')")
    assert column(page, 9) == [MODEL_LINE, DATA_LINE, SPIKE_LINE]
    page.click("th:has-text('at the end')")
    assert column(page, 9) == [SPIKE_LINE, DATA_LINE, MODEL_LINE]

    # WHEN filtering by words in any order
    page.fill("input[type=search]", "ATTEND spike")
    assert column(page, 9) == [SPIKE_LINE]
    assert page.inner_text("[role=status]") == "1 of 3"


def full_history() -> History:
    """Return a history with everything that one can have."""
    story = three_steps()

    def at(entry: float) -> int:
        return BEGIN_US + int(entry * STEP_US)

    spans = [
        Range("step", ("step",), 0, 4, at(0), at(3), 4711, False),
        Range("forward", ("step", "forward"), 1, 3, at(1), at(2.5), 4711, True),
    ]
    oom = Oom(4, at(3), 4711, 1 << 34, 1 << 30, 5 * MIB, 0, SPIKE, "Matmul", "no room")
    nodes = Nodes(
        live=7,
        pending=5,
        lines=[NodeLine(MODEL, "step", "layers.0", 6, 5), NodeLine(DATA, "", "", 1, 0)],
        samples=[NodeSample(1, at(0.5), 2, 1), NodeSample(4, at(3), 7, 5)],
    )
    return story.history(
        reserved=9 * MIB,
        marks=[Mark("step 1", 2, at(1.5), 4711)],
        spans=spans,
        ooms=[oom],
        calls=[Call("set_cache_limit", 1, at(0.5), 4711, 32 * MIB, None, DATA, 1)],
        crossings=[Mark("above the limit", 3, at(2), 4711)],
        nodes=nodes,
        settings={"cache_limit": 32 * MIB, "backend": "cpu", "trace_alloc_dropped": 12},
    )


def test_marks_ranges_failures_and_nodes_are_drawn(show: Any) -> None:
    page = show(full_history())

    layout = page.evaluate("() => document.getElementById('chart').layout")
    lines = [s for s in layout["shapes"] if s["type"] == "line"]
    # The mark, the call, the crossing, the failure, the moment.
    assert [(line["x0"], line["line"]["dash"]) for line in lines] == [
        *((1.5, "dot"), (0.5, "dashdot"), (2.5, "longdash")),
        *((3.5, "solid"), (2, "dash")),
    ]
    texts = [note["text"] for note in layout["annotations"]]
    assert texts == [
        *("step 1", "set_cache_limit 32.0 MiB", "above the limit"),
        "failed: 16.0 GiB",
    ]
    data = page.evaluate("() => document.getElementById('chart').data")
    bars = next(trace for trace in data if trace["type"] == "bar")
    assert bars["text"] == ["step", "forward"]
    assert bars["base"] == [-0.5, 0.5]
    assert bars["x"] == [4, 2]
    assert bars["y"] == [0, 1]
    pending = next(t for t in data if t.get("name", "").startswith("pending"))
    assert (pending["x"], pending["y"]) == ([0.5, 3.5], [1, 5])
    names = [trace.get("name") for trace in data]
    assert "reserved" in names
    assert "cache" in names


def test_each_kind_of_thing_has_a_table(show: Any) -> None:
    page = show(full_history())
    tabs = page.locator("#tabs button")

    assert tabs.all_inner_texts() == [
        *("By line", "Marks (1)", "Ranges (2)", "Array nodes"),
        *("Failed allocations (1)", "Calls (1)", "Crossings (1)"),
        "Settings",
    ]
    rows = {}
    for place, name in enumerate(tabs.all_inner_texts()):
        page.locator("#tabs button").nth(place).click()
        found = page.query_selector_all("#table tbody tr")
        rows[name] = [row.inner_text().split("\t") for row in found]
    assert rows["Marks (1)"] == [["2", "1.50 ms", "4,711", "5.0 MiB", "step 1"]]
    assert ["1", "1.00 ms", "4,711", "2", "1.50 ms"] in [
        row[:5] for row in rows["Ranges (2)"]
    ]
    assert rows["Array nodes"][0] == ["5", "6", MODEL_LINE, "step", "layers.0"]
    failed = rows["Failed allocations (1)"][0]
    assert failed[3:7] == ["16.0 GiB", "1.0 GiB", "5.0 MiB", "0 B"]
    assert failed[7:] == ["Matmul", SPIKE_LINE, "no room"]
    assert rows["Calls (1)"][0][3:5] == ["set_cache_limit", "32.0 MiB"]
    assert rows["Crossings (1)"] == [
        ["3", "2.00 ms", "4,711", "7.0 MiB", "above the limit", DATA_LINE]
    ]
    assert ["cache_limit", "32.0 MiB (33554432)"] in rows["Settings"]


def test_what_is_missing_or_failed_is_said_at_the_top(show: Any) -> None:
    page = show(full_history())

    assert page.locator(".notice").all_inner_texts() == [
        "12 older events fell out of the ring: the beginning is missing.",
        "An allocation of 16.0 GiB failed at entry 4.",
        "Above the limit: once, at entry 3.",
    ]


def tree_labels(page: Any) -> list[str]:
    trace = page.evaluate("() => document.getElementById('tree').data[0]")
    return [
        f"{text.split('<br>')[0]}: {value}"
        for text, value in zip(trace["hovertext"], trace["values"], strict=True)
    ]


def test_the_call_tree_is_of_the_peak_and_then_of_any_moment(show: Any) -> None:
    page = show(three_steps().history())

    assert sorted(tree_labels(page)) == [
        f"/app/data.py:7 batches: {4 * MIB}",
        f"/app/model.py:12 Block.__call__: {3 * MIB}",
        f"/app/train.py:40 main: {3 * MIB}",
        f"/app/train.py:41 main: {4 * MIB}",
        f"all live buffers: {7 * MIB}",
    ]
    assert page.inner_text("#tree-moment") == "at the peak, after entry 2 (2.00 ms)"

    # WHEN the end is chosen, and then the first event by a click
    page.click("#go-end")
    assert f"/app/data.py:7 batches: {2 * MIB}" in tree_labels(page)
    click(page, 0.5, 1 * MIB)

    assert tree_labels(page)[0] == f"all live buffers: {3 * MIB}"
    assert page.inner_text("#tree-moment") == "after entry 0 (0 µs)"


def test_a_click_in_the_tree_goes_deeper(show: Any) -> None:
    page = show(three_steps().history())

    page.locator("#tree .slice:has-text('train.py:40')").click()

    assert sorted(tree_labels(page)) == [
        f"/app/model.py:12 Block.__call__: {3 * MIB}",
        f"/app/train.py:40 main: {3 * MIB}",
        f"all live buffers: {3 * MIB}",
    ]

    page.locator("#tree .slice").first.click()

    assert len(tree_labels(page)) == 5


def test_arrow_keys_go_from_event_to_event(show: Any) -> None:
    page = show(three_steps().history())

    page.focus("#chart")
    page.keyboard.press("ArrowLeft")

    assert "after entry 1 " in page.inner_text("#panel")
    assert page.inner_text("#panel h2") == "Active: 5.0 MiB"


def test_dark_and_light(show: Any) -> None:
    page = show(three_steps().history(), color_scheme="dark")
    back = "() => getComputedStyle(document.body).backgroundColor"

    assert page.evaluate(back) == "rgb(18, 22, 29)"
    page.click("#theme")
    assert page.evaluate(back) == "rgb(243, 245, 248)"


def test_hostile_names_are_shown_and_do_not_run(show: Any) -> None:
    evil = "</script><img src=x onerror=\"alert('run')\"><b>&amp;"
    link = "<a href='javascript:alert(1)'>x</a>"
    story = Story()
    stack = (Frame(f"/{evil}.py", 1, evil), Frame("/app/a.py", 2, link))
    for field in ("primitive", "range", "module", "action"):
        story.alloc(MIB, stack, **{field: evil})
    history = story.history(
        name=evil,
        marks=[Mark(evil, 1, BEGIN_US, 0)],
        spans=[Range(evil, (evil,), 0, 3, BEGIN_US, BEGIN_US + 2000, 1, False)],
        ooms=[Oom(2, BEGIN_US, 0, 1, -1, -1, -1, stack, evil, evil)],
        nodes=Nodes(
            1, 1, [NodeLine(stack, evil, evil, 1, 1)], [NodeSample(1, 0, 1, 1)]
        ),
        settings={evil: evil},
    )

    # WHEN everything is looked at
    page = show(history)
    text = hover(page, 3.5, MIB)
    click(page, 3.5, MIB)
    page.click("#blocks .row")
    for place in range(page.locator("#tabs button").count()):
        page.locator("#tabs button").nth(place).click()
        assert evil in page.inner_text("#table")
    for key in ("primitive", "range", "module", "stack"):
        page.select_option("#by", key)

    # THEN it is there as text; the fixture checks that nothing ran
    assert evil in text
    assert page.title() == f"{evil} - mlxmem"
    assert page.inner_text("#name") == evil
    assert page.locator("img").count() == 0
    assert page.locator("a[href^=javascript]").count() == 0
    assert evil in page.locator("#tree").text_content()
    assert page.locator("#chart .annotation-text").first.text_content().startswith("</")


def test_an_empty_recording_has_a_page(show: Any) -> None:
    page = show(Story().history())

    assert "There is no entry in this recording." in page.inner_text("#notices")


@pytest.mark.parametrize("events", [1_000, 100_000, 1_000_000])
def test_it_opens_quickly_with_many_events(show: Any, events: int) -> None:
    history = busy(events)

    begin = time.monotonic()
    page = show(history)
    took = time.monotonic() - begin

    # Rendering and browser together; far more than it takes, machines are shared.
    assert took < 60
    assert page.inner_text("#facts").split("\n")[9] == "Entries"
    size = page.evaluate("() => document.documentElement.outerHTML.length")
    assert size < 25_000_000
    entry = page.evaluate("() => mlxmemPage.model.peakAt")
    assert entry == history.peak_at
    total = page.evaluate("() => mlxmemPage.areas.valuesAt(mlxmemPage.entry)")
    assert sum(total) == history.peak
    active = page.evaluate("() => mlxmemPage.model.active.at(-1)")
    assert active == int(history.active[-1])
    # Any moment, against numpy.
    middle = events // 2 + 1
    shown = page.evaluate(f"() => mlxmemPage.areas.valuesAt({middle})")
    assert sum(shown) == history.active_after(middle)
