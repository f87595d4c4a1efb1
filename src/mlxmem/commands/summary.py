"""`mlxmem summary`: totals, the peak, and the lines that matter."""

from __future__ import annotations

from typing import Any

import click
from rich.console import RenderableType
from rich.text import Text

from mlxmem.commands import _report
from mlxmem.commands._help import examples
from mlxmem.reports import render
from mlxmem.reports.summary import summary


@click.command(
    epilog=examples(
        "mlxmem summary out.pickle",
        "mlxmem summary out.pickle --by caller --top 5",
        "mlxmem summary out.pickle --by range",
        "mlxmem summary out.pickle --json | jq .peak.active",
    )
)
@_report.FILE
@_report.options(top=10)
@_report.one_line_errors
def command(file: str, by: str, top: int, device: int | None, as_json: bool) -> None:
    """Totals, the peak and who made it up, and the lines that matter."""
    report = summary(_report.read(file, device), by, top)
    _report.show(report, as_json, *parts(report))


def parts(report: dict[str, Any]) -> list[RenderableType]:
    """Return what is printed."""
    totals = report["totals"]
    by = report["by"]
    line = Text("Recorded: ", style="bold")
    line.append(
        f"{render.duration(totals['duration_us'])}, "
        f"{render.count(totals['allocations'])} allocations of "
        f"{render.size(totals['allocated_bytes'])} "
        f"({render.count(totals['reuses'])} reused from the cache), "
        f"{render.count(totals['frees'])} frees, {render.count(report['marks'])} marks",
        style="not bold",
    )
    found: list[RenderableType] = [
        render.title(report),
        line,
        render.moment("Peak", report["peak"]),
        *(
            [render.moment("Peak of reserved", report["reserved_peak"])]
            if report["reserved_peak"]["at"] != report["peak"]["at"]
            else []
        ),
        render.moment("End", report["end"]),
        *render.visible(report["visible"]),
        *_cache_hint(report),
        *render.crossing_line(report),
        *render.resource_line(report),
        *render.ooms(report["ooms"]),
    ]
    if report["peak"]["rows"]:
        rows = report["peak"]["rows"]
        found += [Text(), render.live_table("At the peak", rows, by, None)]
    else:
        found += [Text("Nothing of MLX's memory was used.")]
    for order, title in (
        ("allocated", "Most bytes allocated"),
        ("buffers", "Most buffers"),
        ("churn", "Most churn: bytes freed again"),
    ):
        if report["rows"][order]:
            found += [Text(), _table(title, report["rows"][order], by)]
    for key, title in (
        ("primitives", "By primitive"),
        ("threads", "By thread"),
        ("streams", "By stream"),
    ):
        if len(report[key]) > (key != "primitives"):  # one thread is no news
            found += [Text(), _table(title, report[key], key[:-1])]
    for part in (render.nodes(report["nodes"]), render.calls(report["calls"])):
        if part:
            found += [Text(), *part]
    return found


def _cache_hint(report: dict[str, Any]) -> list[RenderableType]:
    """Say who knows more where the cache holds more than the arrays do."""
    most = report["reserved_peak"]
    if report["source"] != "mlxmem" or most["cache"] <= most["active"]:
        return []
    text = (
        "MLX's cache then held more than the arrays: `mlxmem cache` says what for, and "
        "what a limit would do."
    )
    return [Text(text, style="yellow")]


def _table(title: str, rows: list[dict[str, Any]], by: str) -> RenderableType:
    cells = [
        (
            render.size(row["bytes"]),
            render.count(row["buffers"]),
            render.size(row["freed_bytes"]),
            render.size(row["live_bytes"]),
            render.name(row),
        )
        for row in rows
    ]
    return render.table(title, ("allocated", "buffers", "freed", "live", by), cells)
