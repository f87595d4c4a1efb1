"""`mlxmem export`: a recording for other tools."""

from __future__ import annotations

import contextlib
import os
import pathlib
import sys
from typing import BinaryIO

import click

from mlxmem import dump_file
from mlxmem.commands import _report
from mlxmem.commands._help import examples
from mlxmem.export import CHOICES, FORMATS, ExportError, Options, format_of
from mlxmem.export.tables import ROWS
from mlxmem.export.trace_events import LARGEST
from mlxmem.reports.reading import SnapshotError
from mlxmem.units import format_bytes

_STDOUT = "-"

_HELP = f"""Write a recording in the format of another tool.

\b
Formats:
{os.linesep.join(f"  {name:<12} {kind.about}" for name, kind in FORMATS.items())}

""" + examples(
    "mlxmem export out.pickle --format speedscope",
    "mlxmem export out.pickle --format pprof --at end -o leak.pb.gz",
    "mlxmem export out.pickle -o out.trace.json.gz     the name says which format",
    "mlxmem export out.pickle --format collapsed -o - | flamegraph.pl > out.svg",
)


@click.command(help=_HELP, short_help="Write the format of another tool.")
@_report.FILE
@click.option(
    "-f",
    "--format",
    "name",
    type=click.Choice(list(FORMATS)),
    help="Kind of file; without it the name after -o says so.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(),
    help='Where to write, "-" for standard output; else beside FILE.',
)
@click.option(
    "--at",
    type=click.Choice(CHOICES),
    default=CHOICES[0],
    show_default=True,
    help="speedscope, collapsed, pprof: which blocks count.",
)
@click.option(
    "--largest",
    type=click.IntRange(min=0),
    default=LARGEST,
    show_default=True,
    metavar="N",
    help="trace: how many of the largest blocks are drawn as slices.",
)
@click.option(
    "--rows",
    type=click.Choice(ROWS),
    default=ROWS[0],
    show_default=True,
    help="csv, parquet: a row per block, or per entry with the totals after it.",
)
@click.option(
    "--full-stacks",
    is_flag=True,
    help="csv: add a column with the whole stack; makes large files.",
)
@click.option(
    "--device",
    type=click.IntRange(min=0),
    metavar="N",
    help="Which device; without it the first one with data.",
)
def command(
    file: str,
    name: str | None,
    output: str | None,
    at: str,
    largest: int,
    rows: str,
    full_stacks: bool,
    device: int | None,
) -> None:
    """See _HELP."""
    if name is None:
        name = format_of(output or "")
    if name is None:
        raise click.UsageError(
            f"which format? Say --format with one of {', '.join(FORMATS)}."
        )
    kind = FORMATS[name]
    target = _default(file, kind.suffixes[0]) if output is None else output
    if os.path.exists(target) and os.path.realpath(file) == os.path.realpath(target):
        raise click.UsageError(f"{target} is the recording itself; name another file.")
    options = Options(
        at=at,
        largest=largest,
        rows=rows,
        full_stacks=full_stacks,
        compress=target.endswith(".gz"),
    )
    if target == _STDOUT and kind.binary and sys.stdout.isatty():
        raise click.UsageError(
            f"{name} is binary and would spoil the terminal; redirect it or name a "
            "file with -o."
        )
    try:
        if target != _STDOUT:
            dump_file.check_target(target)
        history = _report.read(file, device)

        def fill(out: BinaryIO) -> None:
            kind.write(history, out, options)

        if target == _STDOUT:
            fill(sys.stdout.buffer)
            sys.stdout.buffer.flush()
            return
        dump_file.replace(target, fill)
    except BrokenPipeError:
        raise  # click ends quietly when the reader of a pipe has gone
    except (ExportError, SnapshotError) as error:
        raise click.ClickException(str(error)) from error
    except OSError as error:
        where = error.filename if error.filename is not None else target
        raise click.ClickException(f"{where}: {error.strerror or error}") from error
    size = ""
    with contextlib.suppress(OSError):
        size = f" ({format_bytes(os.path.getsize(target))})"
    click.echo(f"{name} -> {target}{size}")


def _default(file: str, suffix: str) -> str:
    path = pathlib.Path(file)
    return str(path.with_name(path.stem + suffix)) if path.name else file + suffix
