"""`mlxmem tree`: the call tree of the peak."""

from __future__ import annotations

from typing import Any

import click
from rich.console import RenderableType
from rich.text import Text

from mlxmem.commands import _report
from mlxmem.commands._help import examples
from mlxmem.reports import render
from mlxmem.reports.tree import tree


@click.command(
    short_help="Show the calls that led to the peak.",
    epilog=examples(
        "mlxmem tree out.pickle",
        "mlxmem tree out.pickle --threshold 5",
        "mlxmem tree out.pickle --allocated",
    ),
)
@_report.FILE
@_report.options(top=None, by=False)
@click.option("--at", type=int, help="After this entry of the trace, not at the peak.")
@click.option("--allocated", is_flag=True, help="Count all allocations instead.")
@click.option(
    "--threshold",
    default=1.0,
    show_default=True,
    type=click.FloatRange(0, 100),
    help="Leave out what has less than this share, in percent.",
)
@_report.one_line_errors
def command(
    file: str,
    device: int | None,
    as_json: bool,
    at: int | None,
    allocated: bool,
    threshold: float,
) -> None:
    """Show the calls that led to the memory of the peak, outermost first."""
    report = tree(_report.read(file, device), at, threshold / 100, allocated)
    _report.show(report, as_json, *parts(report, _report.moment_name(at)))


def parts(report: dict[str, Any], name: str) -> list[RenderableType]:
    """Return what is printed; `name` is that of the moment."""
    if report["moment"] is None:
        label: RenderableType = Text("All allocations", style="bold")
    else:
        label = render.moment(name, report["moment"])
    return [render.title(report), label, render.call_tree(report["root"])]
