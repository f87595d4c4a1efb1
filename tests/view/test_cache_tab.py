"""The tab "Cache": what it shows, against the report."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from histories import DATA, MIB, Story, cached

from mlxmem.reports.cache import MISS_REASONS, cache
from mlxmem.reports.history import Frame, History
from mlxmem.units import format_bytes
from mlxmem.view.payload import describe

_DATA = "() => document.getElementById('cache-chart').data"
_LAYOUT = "() => document.getElementById('cache-chart').layout"
_PLACE = """(limit) => {
    const chart = document.getElementById('cache-chart');
    chart.scrollIntoView({ block: 'center' });
    const { xaxis, yaxis } = chart._fullLayout;
    const box = chart.getBoundingClientRect();
    return [box.left + xaxis._offset + xaxis.d2p(limit),
            box.top + yaxis._offset + yaxis._length / 2];
}"""


def opened(page: Any) -> Any:
    """Open the tab and wait for its chart."""
    page.click("#tabs button:text-is('Cache')")
    page.wait_for_selector("#cache-chart .annotation")
    return page


def rows(page: Any, caption: str) -> list[list[str]]:
    """Return the texts of a table's cells."""
    found = page.query_selector_all(f"#cache table[aria-label='{caption}'] tbody tr")
    return [row.inner_text().split("\t") for row in found]


def rate(value: float) -> str:
    return f"{value:.1%}"


def tabs(page: Any) -> list[str]:
    return list(page.locator("#tabs button").all_inner_texts())


def of_torch() -> History:
    return cached(source="torch")


def not_told() -> History:
    return cached(cache_at_start=None)


def without_requests() -> History:
    nothing = np.zeros(0, np.int64)
    story = Story()
    story.free(story.before(MIB))
    return story.history(
        settings={"backend": "cpu", "mlx_version": "0.32.4"},
        cache_at_start=(nothing, nothing, 0),
    )


WITHOUT = (of_torch, not_told, without_requests, Story().history)


def test_the_payload_is_the_report_without_the_rows_of_other_limits() -> None:
    history = cached()

    description, _ = describe(history, "caller")

    expected = cache(history, "caller", 20)
    del expected["what_if"]["rows"]
    assert expected["agreement"]["mismatches"] == 0
    found = json.loads(json.dumps(description["cacheReport"]))
    assert found.pop("words")["reasons"] == MISS_REASONS
    assert found == expected


@pytest.mark.parametrize("make", WITHOUT)
def test_there_is_no_payload_without_anything_to_tell(make: Any) -> None:
    description, _ = describe(make())

    assert description["cacheReport"] is None


@pytest.mark.parametrize("make", WITHOUT)
def test_there_is_no_tab_without_anything_to_tell(show: Any, make: Any) -> None:
    assert "Cache" not in tabs(show(make()))


def test_the_chart_has_the_points_of_the_report(show: Any) -> None:
    history = cached()
    points = cache(history)["what_if"]["curve"]

    page = show(history)
    assert page.locator("#cache-chart").count() == 0  # made when the tab is opened
    requests, sizes, reserved = opened(page).evaluate(_DATA)

    assert len(points) > 10
    assert requests["y"] == [point["hit_rate"] for point in points]
    assert sizes["y"] == [point["hit_rate_bytes"] for point in points]
    assert reserved["y"] == [point["peak_reserved"] for point in points]
    assert reserved["yaxis"] == "y2"
    # 0 has a place of its own on the logarithmic axis.
    assert requests["x"][1:] == [point["cache_limit"] for point in points[1:]]
    assert points[0]["cache_limit"] == 0
    assert 0 < requests["x"][0] < requests["x"][1]
    axis = page.evaluate(_LAYOUT)["xaxis"]
    assert (axis["tickvals"][0], axis["ticktext"][0]) == (requests["x"][0], "0")


def test_hovering_shows_a_point(show: Any) -> None:
    history = cached()
    point = cache(history)["what_if"]["curve"][-3]
    page = opened(show(history))

    page.mouse.move(*page.evaluate(_PLACE, point["cache_limit"]))
    page.wait_for_selector("#cache-chart .hovertext")

    text = page.locator("#cache-chart .hovertext").text_content()
    assert f"cache limit {format_bytes(point['cache_limit'])}" in text
    assert f"{rate(point['hit_rate'])} of requests" in text
    assert f"{rate(point['hit_rate_bytes'])} of bytes" in text
    assert f"peak reserved {format_bytes(point['peak_reserved'])}" in text


def test_limits_that_were_and_the_recommended_one_are_lines(show: Any) -> None:
    history = cached()
    limit = cache(history)["what_if"]["recommendation"]["cache_limit"]

    layout = opened(show(history)).evaluate(_LAYOUT)

    texts = [note["text"] for note in layout["annotations"]]
    assert sorted(texts) == [
        "at the start: 32.0 MiB",
        f"recommended: {format_bytes(limit)}",
        "set by the program: 8.0 MiB",
    ]
    lines = dict(zip(texts, layout["shapes"], strict=True))
    assert lines["at the start: 32.0 MiB"]["x0"] == 32 * MIB
    assert lines[f"recommended: {format_bytes(limit)}"]["x0"] == limit


def test_a_limit_far_beyond_the_curve_is_at_the_right_edge(show: Any) -> None:
    settings = {
        "backend": "cpu",
        "mlx_version": "0.32.4",
        "cache_limit_at_start": 2**43,
    }

    layout = opened(show(cached(calls=[], settings=settings))).evaluate(_LAYOUT)

    note = next(n for n in layout["annotations"] if n["text"].startswith("at the"))
    assert note["text"] == "at the start: 8.0 TiB →"
    assert note["x"] == pytest.approx(layout["xaxis"]["range"][1])
    assert 10 ** layout["xaxis"]["range"][1] < 2**30


def test_totals_and_the_recommendation_are_said(show: Any) -> None:
    history = cached()
    report = cache(history)
    totals, found = report["totals"], report["what_if"]["recommendation"]

    page = opened(show(history))

    assert page.inner_text("#cache-totals") == (
        f"Hits: {rate(totals['hit_rate'])} of 19 requests, "
        f"{rate(totals['hit_rate_bytes'])} of {format_bytes(totals['requested_bytes'])}"
        f" · 14 new buffers, {format_bytes(totals['system_bytes'])}"
        f" · peak reserved {format_bytes(totals['peak_reserved'])}"
    )
    text = page.inner_text("#cache-recommended")
    assert text.startswith(f"Recommended: mx.set_cache_limit({found['cache_limit']})")
    assert text.endswith(found["reason"])


def test_the_tables_have_the_rows_of_the_report(show: Any) -> None:
    history = cached()
    report = cache(history)

    page = opened(show(history))

    assert rows(page, "Misses") == [
        [
            rate(row["share"]),
            str(row["count"]),
            format_bytes(row["bytes"]),
            f"{row['kind']}: {MISS_REASONS[row['kind']]}",
        ]
        for row in report["misses"]
        if row["count"]
    ]
    assert rows(page, "Buffers that were lost") == [
        ["1", "1.0 MiB", "clear_cache() at /app/spike.py:99 attend"]
    ]
    assert rows(page, "By missed bytes") == [
        [
            format_bytes(row["missed_bytes"]),
            rate(row["hit_rate"]),
            str(row["allocations"]),
            str(row["sizes"]),
            f"{format_bytes(row['smallest'])} - {format_bytes(row['largest'])}",
            max(row["misses"], key=row["misses"].get),
            "jump" if row["jumps"] else "",
            row["label"],
        ]
        for row in report["lines"]
    ]
    assert [row["jumps"] for row in report["lines"]] == [True, False, False]
    steps = report["what_if"]["rounding"]["steps"]
    assert [row[:4] for row in rows(page, "Where sizes jump, rounded up")] == [
        [
            rate(row["hit_rate"]),
            rate(row["hit_rate_bytes"]),
            str(row["system_allocations"]),
            format_bytes(row["peak_reserved"]),
        ]
        for row in steps
    ]
    most = report["contents"]["most"]
    assert [row[:3] for row in rows(page, "Cache at its fullest")] == [
        [
            format_bytes(row["from_bytes"]),
            str(row["buffers"]),
            format_bytes(row["bytes"]),
        ]
        for row in most["sizes"]
    ]
    widths = page.evaluate(
        "() => [...document.querySelectorAll('.bar')].map((bar) => bar.style.width)"
    )
    assert "100%" in widths


def test_an_mlx_without_a_cache_has_no_chart(show: Any) -> None:
    settings = {"backend": "cpu", "mlx_version": "0.31.2"}
    page = show(cached(settings=settings))

    page.click("#tabs button:text-is('Cache')")

    assert page.locator("#cache-chart").count() == 0
    assert "Nothing was ever cached" in page.inner_text("#cache")
    assert "caches nothing" in page.inner_text("#cache")


def test_the_tab_stays_and_follows_the_theme(show: Any) -> None:
    page = opened(show(cached(), color_scheme="light"))
    page.evaluate("() => { window.kept = document.getElementById('cache'); }")
    before = page.evaluate(_DATA)[0]["line"]["color"]

    page.click("#go-end")
    page.click("#theme")
    page.wait_for_function(f"() => ({_DATA})()[0].line.color !== '{before}'")

    assert page.evaluate("() => window.kept === document.getElementById('cache')")

    # WHEN another tab is opened and this one again
    page.click("#tabs button:text-is('Settings')")
    opened(page)

    assert page.evaluate("() => window.kept === document.getElementById('cache')")
    assert (
        page.evaluate("() => document.querySelectorAll('#cache-chart .trace').length")
        > 0
    )


def test_hostile_names_stay_text(show: Any) -> None:
    evil = "</script><img src=x onerror=\"alert('run')\"><b>&amp;"
    page = opened(show(cached((Frame(f"/{evil}.py", 1, evil), *DATA))))

    assert evil in page.inner_text("#cache table[aria-label='By missed bytes']")
    assert page.locator("img").count() == 0
