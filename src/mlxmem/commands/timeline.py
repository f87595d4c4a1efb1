"""`mlxmem timeline`: how memory went, and what happened between marks."""

from __future__ import annotations

import shutil
from typing import Any

import click
from rich.console import RenderableType
from rich.text import Text

from mlxmem.commands import _report
from mlxmem.commands._help import examples
from mlxmem.reports import render
from mlxmem.reports.timeline import timeline

_ENDS = 20  # steps at the beginning and at the end that the table shows


@click.command(
    short_help="Show memory over time, and from mark to mark.",
    epilog=examples(
        "mlxmem timeline out.pickle",
        "mlxmem timeline out.pickle --time",
        "mlxmem timeline out.pickle --slices 200 --json",
    ),
)
@_report.FILE
@_report.options(top=None)
@click.option(
    "--slices",
    type=click.IntRange(1, 10_000),
    help="Parts of the recording; as many as fit if left out.",
)
@click.option("--time", is_flag=True, help="Parts of equal time, not of equal events.")
@_report.one_line_errors
def command(
    file: str,
    by: str,
    device: int | None,
    as_json: bool,
    slices: int | None,
    time: bool,
) -> None:
    """Show how memory went, and what was allocated and freed between marks."""
    if slices is None:
        slices = max(20, min(shutil.get_terminal_size().columns - 24, 200))
    report = timeline(_report.read(file, device), by, slices, time)
    _report.show(report, as_json, *parts(report))


def parts(report: dict[str, Any]) -> list[RenderableType]:
    """Return what is printed."""
    found: list[RenderableType] = [render.title(report), Text()]
    slices = report["slices"]
    for key in ("reserved", "active", "cache", "pending"):
        values = [part[key] or 0 for part in slices]
        highest = max(values, default=0)
        if key == "pending" and not any(part[key] for part in slices):
            continue
        top = render.count(highest) if key == "pending" else render.size(highest)
        label = "pending" if key == "pending" else key
        found.append(Text(f"{label:>8} {top:>11} |{render.bars(values, highest)}|"))
    if slices:
        unit = "time" if report["axis"] == "time" else "entries"
        found.append(
            Text(
                f"{'':>8} {'highest':>11}  {len(slices)} parts of equal {unit}, "
                f"{render.duration(slices[-1]['time_us'])} in all",
                style="dim",
            )
        )
    if report["steps"]:
        found += [Text(), _steps(report)]
    if report["ranges"]:
        found += [Text(), _ranges(report)]
    for part in (
        render.calls(report["calls"]),
        render.crossings(report["crossings"]),
    ):
        if part:
            found += [Text(), *part]
    return [*found, *render.ooms(report["ooms"])]


def _steps(report: dict[str, Any]) -> RenderableType:
    cells = []
    steps = report["steps"]
    left_out = len(steps) - 2 * _ENDS
    if left_out > 1:
        steps = [*steps[:_ENDS], None, *steps[-_ENDS:]]
    for step in steps:
        if step is None:
            note = f"... {left_out:,} more, which --json has"
            cells.append(("", "", "", "", "", "", Text(note, style="dim")))
            continue
        text = Text(step["name"] or "(the beginning)", style="bold")
        for key, word in (("most_allocated", "made"), ("most_freed", "freed")):
            row = step[key]
            if row:
                text.append(f"\n  {word} {render.size(row['bytes'])} ", "not bold dim")
                text.append(render.name(row).plain.partition("\n")[0], "not bold dim")
        for name, freed in step["freed_during"].items():
            text.append(f"\n  freed {render.size(freed)} in {name}", "not bold dim")
        cells.append(
            (
                render.duration(step["time_us"]),
                render.size(step["active"]),
                render.size(step["cache"]),
                render.size(step["peak"]),
                f"{render.size(step['allocated_bytes'])} ({step['allocations']:,})",
                f"{render.size(step['freed_bytes'])} ({step['frees']:,})",
                text,
            )
        )
    columns = ("time", "active", "cache", "peak", "allocated", "freed", "from mark")
    return render.table("Between marks", columns, cells)


def _ranges(report: dict[str, Any]) -> RenderableType:
    """Sum the ranges of one path."""
    sums: dict[str, list[int]] = {}
    for span in report["ranges"]:
        sum_ = sums.setdefault(span["path"], [0, 0, 0, 0])
        sum_[0] += 1
        sum_[1] += span["duration_us"]
        sum_[2] += span["allocated_bytes"]
        sum_[3] = max(sum_[3], span["peak"] or 0)
    cells = [
        (
            render.count(times),
            render.duration(us),
            render.size(allocated),
            render.size(highest),
            Text(path),
        )
        for path, (times, us, allocated, highest) in sums.items()
    ]
    columns = ("times", "in all", "allocated", "peak inside", "range")
    return render.table("Ranges", columns, cells)
