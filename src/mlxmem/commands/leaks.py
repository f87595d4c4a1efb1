"""`mlxmem leaks`: what grows, and what was never freed."""

from __future__ import annotations

from typing import Any

import click
from rich.console import RenderableType
from rich.text import Text

from mlxmem.commands import _report
from mlxmem.commands._help import examples
from mlxmem.reports import render
from mlxmem.reports.leaks import leaks


@click.command(
    epilog=examples(
        "mlxmem leaks out.pickle",
        "mlxmem leaks out.pickle --marks 'step *'",
        "mlxmem leaks out.pickle --from 'step 10' --to 'step 20' --fail",
    )
)
@_report.FILE
@_report.options(top=20)
@click.option("--marks", default="*", help="Count steps between marks like this.")
@click.option("--from", "first", help="The mark where the first step begins.")
@click.option("--to", "last", help="The mark where the last step ends.")
@click.option(
    "--fail",
    is_flag=True,
    help="Exit with code 3 when anything grows, for scripts.",
)
@_report.one_line_errors
def command(
    file: str,
    by: str,
    top: int,
    device: int | None,
    as_json: bool,
    marks: str,
    first: str | None,
    last: str | None,
    fail: bool,
) -> None:
    """Show what grows from step to step, and what was never freed.

    A step goes from one mlxmem.mark() to the next. A recording without marks is cut
    into ten equal parts.
    """
    report = leaks(_report.read(file, device), by, top, marks, first, last)
    _report.show(report, as_json, *parts(report))
    pending = report["pending"]
    if fail and (report["growing"] or (pending and pending["growing"])):
        raise SystemExit(3)


def parts(report: dict[str, Any]) -> list[RenderableType]:
    """Return what is printed."""
    by = report["by"]
    steps = report["steps"]
    how = "marks" if report["from_marks"] else "equal parts (set mlxmem.mark(name)!)"
    line = Text("Steps: ", style="bold")
    line.append(
        f"{report['step_count']} between {how}, from {steps[0]['name']!r} to "
        f"{steps[-1]['name']!r}; active {render.size(steps[0]['active'])} -> "
        f"{render.size(steps[-1]['active'])}",
        style="not bold",
    )
    growing = [
        (
            render.signed(row["growth_bytes"]),
            f"{row['growth_buffers']:+,}",
            render.signed(row["bytes_per_step"]),
            f"{row['buffers_per_step']:+,}",
            render.size(row["bytes"]),
            Text(row["until"]),
            render.name(row),
        )
        for row in report["growing"]
    ]
    columns = (
        "grew by",
        "buffers",
        "a step",
        "buffers a step",
        "left",
        "until",
        by,
    )
    live = [
        (
            render.size(row["bytes"]),
            render.count(row["buffers"]),
            render.size(row["visible_bytes"]),
            "grows" if row["growing"] else "",
            render.name(row),
        )
        for row in report["live"]
    ]
    found: list[RenderableType] = [render.title(report), line]
    found += render.visible(report["visible"])
    found += [Text()]
    pending = report["pending"]
    waits = bool(pending and pending["growing"])
    if waits:
        found.append(
            Text(
                f"Pending nodes grow by {pending['growth']:+,} until "
                f"{pending['until']!r}, {pending['per_step']:+,} a step: a graph that "
                "nobody evaluates.\n",
                style="bold",
            )
        )
    if growing:
        found += [render.table("Growing", columns, growing)]
    else:
        found += [Text(f"Nothing {'else ' * waits}grows from step to step.")]
    found += [
        Text(),
        render.table("Live at the end", ("bytes", "buffers", "visible", "", by), live),
    ]
    before = report["before"]
    if before["buffers"]:
        found.append(
            Text(
                f"and {render.size(before['bytes'])} from before the recording",
                style="dim",
            )
        )
    graph = render.nodes(report["nodes"])
    return [*found, Text(), *graph] if graph else found
