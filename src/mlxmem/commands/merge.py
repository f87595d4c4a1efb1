"""`mlxmem merge`: the recordings of several ranks as one file."""

from __future__ import annotations

import os
from collections.abc import Sequence

import click

from mlxmem.commands import _report
from mlxmem.commands._help import examples
from mlxmem.merging import Merged, merge_files
from mlxmem.units import format_bytes


@click.command(
    short_help="Join the files of several ranks.",
    epilog=examples(
        "mlxmem merge out.rank*.pickle -o out.pickle",
        "mlxmem summary out.pickle --device 1            what rank 1 did",
    ),
)
@click.argument(
    "files", nargs=-1, required=True, type=click.Path(dir_okay=False), metavar="FILE..."
)
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(dir_okay=False),
    help="Where to write; an existing file is replaced.",
)
@click.option(
    "--different-runs",
    is_flag=True,
    help="Join recordings that are not of one run, too.",
)
@_report.one_line_errors
def command(files: tuple[str, ...], output: str, different_runs: bool) -> None:
    """Join the recordings of a distributed program's ranks, a device for each.

    The number of a device is its rank. Recordings without a rank become devices in
    the order in which they are named.
    """
    try:
        merged = merge_files(files, output, different_runs=different_runs)
    except OSError as error:
        where = error.filename or output
        raise click.ClickException(f"{where}: {error.strerror or error}") from None
    _print(merged)


def _print(merged: Merged) -> None:
    for device in merged.devices:
        rank = "" if device.rank is None else f" (rank {device.rank})"
        click.echo(
            f"device {device.number}{rank}: {device.entries:,} entries of {device.file}"
        )
    path = os.fspath(merged.path)
    click.echo(f"{path}: {format_bytes(os.path.getsize(path))}")
    if merged.missing:
        click.echo(_without_files(merged.missing), err=True)


def _without_files(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"There is no file of rank {ranks[0]}."
    some = list(map(str, ranks[:10]))
    more = len(ranks) - len(some)
    last = f"{more:,} more" if more else some.pop()
    return f"There are no files of ranks {', '.join(some)} and {last}."
