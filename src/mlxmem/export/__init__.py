"""A recording in the formats of other tools: one module per kind of file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import BinaryIO

from mlxmem.export import collapsed, pprof, speedscope, tables, trace_events
from mlxmem.export.errors import ExportError
from mlxmem.export.weights import CHOICES
from mlxmem.reports.history import History

__all__ = ["CHOICES", "FORMATS", "ExportError", "Format", "Options", "format_of"]


@dataclass(frozen=True)
class Options:
    """What a format may be told; each uses what concerns it.

    Attributes
    ----------
    at : str
        Which blocks weigh, one of `CHOICES`.
    largest : int
        How many blocks of a trace are slices.
    rows : str
        What a row of a table is, "blocks" or "timeline".
    full_stacks : bool
        Whether csv has the whole stacks.
    compress : bool
        Whether a trace is compressed with gzip.
    """

    at: str = "peak"
    largest: int = trace_events.LARGEST
    rows: str = "blocks"
    full_stacks: bool = False
    compress: bool = False


@dataclass(frozen=True)
class Format:
    """A kind of file.

    Attributes
    ----------
    suffixes : tuple of str
        How its files' names end; the first is the default.
    binary : bool
        Whether a terminal can't show it.
    about : str
        For the help.
    write : callable
        Writes a history to a binary file.
    """

    suffixes: tuple[str, ...]
    binary: bool
    about: str
    write: Callable[[History, BinaryIO, Options], None]


FORMATS: Mapping[str, Format] = {
    "speedscope": Format(
        (".speedscope.json",),
        False,
        "flame graphs for speedscope.app",
        lambda history, file, options: speedscope.write(history, file, at=options.at),
    ),
    "collapsed": Format(
        (".collapsed.txt", ".collapsed", ".folded"),
        False,
        "one line per stack, for flamegraph.pl and inferno",
        lambda history, file, options: collapsed.write(history, file, at=options.at),
    ),
    "pprof": Format(
        (".pb.gz", ".pprof"),
        True,
        "heap profile for pprof and Pyroscope",
        lambda history, file, options: pprof.write(history, file, at=options.at),
    ),
    "trace": Format(
        (".trace.json.gz", ".trace.json"),
        False,
        "counters, ranges and blocks over time, for Perfetto and chrome://tracing",
        lambda history, file, options: trace_events.write(
            history, file, largest=options.largest, compress=options.compress
        ),
    ),
    "csv": Format(
        (".csv",),
        False,
        "a row per block (or per entry), as text",
        lambda history, file, options: tables.write_csv(
            history, file, rows=options.rows, full_stacks=options.full_stacks
        ),
    ),
    "parquet": Format(
        (".parquet",),
        True,
        "the same with types and whole stacks; needs pyarrow",
        lambda history, file, options: tables.write_parquet(
            history, file, rows=options.rows
        ),
    ),
}


def format_of(name: str) -> str | None:
    """Return the format that a file's name stands for, None if it doesn't say."""
    for key, kind in FORMATS.items():
        if name.endswith(kind.suffixes):
            return key
    return None
