"""`mlxmem diff`: what changed between two recordings."""

from __future__ import annotations

from typing import Any

import click
from rich.console import RenderableType
from rich.text import Text

from mlxmem.commands import _report
from mlxmem.commands._help import examples
from mlxmem.reports import render
from mlxmem.reports.diff import MOMENTS, diff
from mlxmem.units import parse_bytes


@click.command(
    short_help="Show what changed between two recordings.",
    epilog=examples(
        "mlxmem diff yesterday.pickle today.pickle",
        "mlxmem diff a.pickle b.pickle --by function   lines have moved",
        "mlxmem diff a.pickle b.pickle --at end --threshold 1MiB --fail",
    ),
)
@click.argument("old", type=click.Path(dir_okay=False))
@click.argument("new", type=click.Path(dir_okay=False))
@_report.options(top=20)
@click.option(
    "--at",
    type=click.Choice(MOMENTS),
    default="peak",
    show_default=True,
    help="What is compared: live at the peak or the end, or all allocations.",
)
@click.option(
    "--threshold", default="0", help="Leave out smaller changes, such as 1MiB."
)
@click.option(
    "--fail", is_flag=True, help="Exit with code 3 when anything appeared or grew."
)
@_report.one_line_errors
def command(
    old: str,
    new: str,
    by: str,
    top: int,
    device: int | None,
    as_json: bool,
    at: str,
    threshold: str,
    fail: bool,
) -> None:
    """Show what appeared, went, grew and shrank between two recordings."""
    smallest = parse_bytes(threshold)
    report = diff(
        _report.read(old, device), _report.read(new, device), by, top, at, smallest
    )
    _report.show(report, as_json, *parts(report))
    if fail and report["grown"]:
        raise SystemExit(3)


def parts(report: dict[str, Any]) -> list[RenderableType]:
    """Return what is printed."""
    old, new = report["old"], report["new"]
    line = Text(f"{report['compared'].capitalize()}: ", style="bold")
    line.append(
        f"{render.size(old['bytes'])} in {render.count(old['buffers'])} buffers -> "
        f"{render.size(new['bytes'])} in {render.count(new['buffers'])} buffers "
        f"({render.signed(new['bytes'] - old['bytes'])})",
        style="not bold",
    )
    cells = [
        (
            row["change"],
            render.signed(row["bytes"]),
            f"{row['buffers']:+,}",
            render.size(row["old_bytes"]),
            render.size(row["new_bytes"]),
            render.name(row),
        )
        for row in report["rows"]
    ]
    columns = ("change", "bytes", "buffers", "old", "new", report["by"])
    return [
        Text(f"{old['file']} -> {new['file']}", style="bold"),
        line,
        Text(),
        render.table("Changes", columns, cells) if cells else Text("Nothing changed."),
        Text(f"{report['same']:,} others did not change" if cells else "", "dim"),
    ]
