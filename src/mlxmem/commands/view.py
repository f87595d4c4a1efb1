"""`mlxmem view`: a recording as one HTML file, opened in the browser."""

from __future__ import annotations

import os
import pathlib
import webbrowser

import click

from mlxmem import dump_file
from mlxmem.commands import _report
from mlxmem.commands._help import examples
from mlxmem.reports import grouping
from mlxmem.units import format_bytes

_HELP = """Show a recording in the browser.

The page is one HTML file that needs neither network nor server, so that it can be kept
and passed on. All events are in it: a zoom shows more.

""" + examples(
    "mlxmem view out.pickle                          write out.html and open it",
    "mlxmem view out.pickle -o page.html --no-open",
    "mlxmem view out.pickle --by module              areas by nn.Module",
)


@click.command(help=_HELP)
@_report.FILE
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False),
    help="Where the page goes; without it beside FILE, with .html at the end.",
)
@click.option("--no-open", is_flag=True, help="Only write the page.")
@click.option(
    "--by",
    type=click.Choice(grouping.KEYS),
    default="line",
    show_default=True,
    help="What an area stands for when the page opens.",
)
@click.option("--device", type=click.IntRange(min=0), help="Which device of the file.")
@_report.one_line_errors
def command(
    file: str, output: str | None, by: str, device: int | None, no_open: bool
) -> None:
    """See _HELP."""
    # Plotly takes its time to load; `mlxmem view --help` does without.
    from mlxmem.view import render

    source = pathlib.Path(file)
    target = pathlib.Path(output) if output else source.with_suffix(".html")
    if target == source:
        raise click.UsageError(f"{target} would be overwritten; name another with -o")
    try:
        dump_file.check_target(target)
        history = _report.read(file, device)
        with _report.working(f"writing {target}"):
            page = render(history, by).encode("utf-8", "backslashreplace")
            dump_file.replace(target, lambda out: out.write(page))
    except OSError as error:
        where = error.filename or target
        raise click.ClickException(f"{where}: {error.strerror or error}") from None
    click.echo(f"{target}: {format_bytes(len(page))}, {len(history):,} entries")
    if no_open:
        return
    address = pathlib.Path(os.path.realpath(target)).as_uri()
    if not webbrowser.open(address):
        click.echo(f"No browser was found; open {address} yourself.", err=True)
