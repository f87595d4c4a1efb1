"""`mlxmem peak`: what lived when active memory was highest."""

from __future__ import annotations

from typing import Any

import click
from rich.console import RenderableType
from rich.text import Text

from mlxmem.commands import _report
from mlxmem.commands._help import examples
from mlxmem.reports import render
from mlxmem.reports.peak import peak


@click.command(
    epilog=examples(
        "mlxmem peak out.pickle",
        "mlxmem peak out.pickle --by primitive",
        "mlxmem peak out.pickle --by module     after mlxmem.track_modules(model)",
    )
)
@_report.FILE
@_report.options(top=20)
@click.option("--at", type=int, help="After this entry of the trace, not at the peak.")
@_report.one_line_errors
def command(
    file: str, by: str, top: int, device: int | None, as_json: bool, at: int | None
) -> None:
    """Show what lived when active memory was highest."""
    report = peak(_report.read(file, device), by, top, at)
    _report.show(report, as_json, *parts(report, _report.moment_name(at)))


def parts(report: dict[str, Any], name: str) -> list[RenderableType]:
    """Return what is printed; `name` is that of the moment."""
    cells = [
        (
            render.size(block["size"]),
            block["primitive"],
            str(block["thread"] or ""),
            Text(render.where(block["frames"])),
        )
        for block in report["largest"]
    ]
    return [
        render.title(report),
        render.moment(name, report["moment"]),
        Text(),
        render.live_table(
            f"By {report['by']}", report["rows"], report["by"], report["rest"]
        ),
        Text(),
        render.table("Largest buffers", ("size", "primitive", "thread", "line"), cells),
    ]
