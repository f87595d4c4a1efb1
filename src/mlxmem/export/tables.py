"""Tables: a row per block, or per entry of the trace."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from mlxmem.export.errors import ExportError
from mlxmem.export.weights import outermost_first
from mlxmem.reports.grouping import line_of
from mlxmem.reports.history import KINDS, History, Ints

ROWS = ("blocks", "timeline")

_CHUNK = 50_000


@dataclass(frozen=True)
class _Words:
    """A column of text: few distinct ones, and which each row has; -1 = none."""

    words: Sequence[str]
    index: npt.NDArray[np.integer[Any]]


@dataclass(frozen=True)
class _Numbers:
    """A column of numbers; `known` tells where there is one."""

    values: npt.NDArray[Any]
    known: npt.NDArray[np.bool_] | None = None


_Column = _Words | _Numbers


def block_columns(history: History, *, full_stacks: bool) -> dict[str, _Column]:
    """Return the columns of a table with a row per block.

    Parameters
    ----------
    history : History
    full_stacks : bool
        Whether to add the column `stack`.

    Returns
    -------
    dict
        `start`, `end`: entries that made and freed the block, none if that is older
        than the trace, or the block lives at the end. `start_us`, `end_us`: their
        times, microseconds since the Unix epoch. `address`; `size` of the buffer and
        `requested`, bytes; `visible`, those of it that arrays show at the end.
        `action`, `primitive`, `stream`, `thread`, `range`, `module`, and
        `freed_during`, the range that freed it: none where unknown. `line`:
        "file:line function" of the innermost frame. `stack_id`: equal stacks have
        equal numbers. `live_at_peak`, `live_at_end`. `stack`: as `line`, outermost
        first, separated by ";".
    """
    blocks = history.blocks
    start, end = blocks["start"], blocks["end"]
    begun, over = start >= 0, end < len(history)
    lines = [line_of(stack) for stack in history.stacks]
    stack = blocks["stack"]
    columns: dict[str, _Column] = {
        "start": _Numbers(start, begun),
        "end": _Numbers(end, over),
        "start_us": _times(history, start, begun),
        "end_us": _times(history, end, over),
        "address": _Numbers(blocks["addr"]),
        "size": _Numbers(blocks["size"]),
        "requested": _Numbers(blocks["requested"]),
        "visible": _Numbers(blocks["visible"], blocks["visible"] >= 0),
        "action": _words(history.actions, blocks["action"]),
        "primitive": _words(history.primitives, blocks["primitive"]),
        "stream": _Numbers(blocks["stream"]),
        "thread": _Numbers(blocks["thread"], blocks["thread"] > 0),
        "range": _words(history.ranges, blocks["range"]),
        "module": _words(history.modules, blocks["module"]),
        "freed_during": _words(history.ranges, blocks["freed_during"]),
        "line": _Words(lines, stack),
        "stack_id": _Numbers(stack),
        "live_at_peak": _Numbers(history.live(history.peak_at)),
        "live_at_end": _Numbers(history.live(history.end)),
    }
    if full_stacks:
        columns["stack"] = _Words(
            [
                ";".join(line_of((frame,)) for frame in outermost_first(stack))
                for stack in history.stacks
            ],
            stack,
        )
    return columns


def timeline_columns(history: History) -> dict[str, _Column]:
    """Return the columns of a table with a row per entry of the trace.

    Returns
    -------
    dict
        `entry`, counted from 0; `time_us`, microseconds since the Unix epoch, none
        where unknown; `action`, as in the snapshot; `active`, `cache` and `reserved`
        after it, bytes.
    """
    count = len(history)
    return {
        "entry": _Numbers(np.arange(count)),
        "time_us": _Numbers(history.time_us, history.time_us > 0),
        "action": _Words([*KINDS, "other"], history.kind),
        "active": _Numbers(history.active),
        "cache": _Numbers(history.reserved - history.active),
        "reserved": _Numbers(history.reserved),
    }


def write_csv(
    history: History,
    file: BinaryIO,
    *,
    rows: str = "blocks",
    full_stacks: bool = False,
) -> None:
    """Write comma-separated values with a line of names; nothing where unknown.

    Parameters
    ----------
    history : History
    file : binary file
    rows : str
        "blocks" or "timeline", see `block_columns` and `timeline_columns`.
    full_stacks : bool
        Whether blocks have their whole stacks, some kilobytes a row.
    """
    columns = _columns(history, rows, full_stacks)
    count = _row_count(columns)
    text = io.TextIOWrapper(file, "utf-8", newline="", write_through=True)
    try:
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(columns)
        for first in range(0, count, _CHUNK):
            part = slice(first, first + _CHUNK)
            cells = [_cells(column, part) for column in columns.values()]
            writer.writerows(zip(*cells, strict=True))
    finally:
        text.detach()


def write_parquet(history: History, file: BinaryIO, *, rows: str = "blocks") -> None:
    """Write a Parquet file; text is stored once per distinct value.

    Parameters
    ----------
    history : History
    file : binary file
    rows : str
        As for `write_csv`. Blocks have their whole stacks.

    Raises
    ------
    ExportError
        pyarrow is not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ExportError(
            "parquet needs pyarrow, which is not installed: pip install pyarrow"
        ) from error

    def array(column: _Column) -> Any:
        if isinstance(column, _Numbers):
            mask = None if column.known is None else ~column.known
            return pyarrow.array(column.values, mask=mask)
        index = column.index.astype(np.int32)
        return pyarrow.DictionaryArray.from_arrays(
            pyarrow.array(index, mask=index < 0),
            pyarrow.array(list(column.words), pyarrow.string()),
        )

    columns = _columns(history, rows, full_stacks=True)
    table = pyarrow.table({name: array(column) for name, column in columns.items()})
    pyarrow.parquet.write_table(table, file, compression="zstd")


def _columns(history: History, rows: str, full_stacks: bool) -> dict[str, _Column]:
    if rows == "blocks":
        return block_columns(history, full_stacks=full_stacks)
    if rows == "timeline":
        return timeline_columns(history)
    raise ValueError(f"rows must be one of {', '.join(ROWS)}, not {rows!r}")


def _row_count(columns: dict[str, _Column]) -> int:
    column = next(iter(columns.values()))
    return len(column.index if isinstance(column, _Words) else column.values)


def _words(words: Sequence[str], index: npt.NDArray[np.integer[Any]]) -> _Words:
    """Make a column in which "" is none."""
    known = np.array([bool(word) for word in words] or [False])
    return _Words(words, np.where(known[index], index, -1))


def _times(history: History, at: Ints, known: npt.NDArray[np.bool_]) -> _Numbers:
    if not len(history):
        return _Numbers(np.zeros(len(at), np.int64), np.zeros(len(at), np.bool_))
    times = history.time_us[np.clip(at, 0, len(history) - 1)]
    return _Numbers(times, known & (times > 0))


def _cells(column: _Column, part: slice) -> list[Any]:
    if isinstance(column, _Words):
        words = [*column.words, ""]  # -1 is the last
        return [words[place] for place in column.index[part].tolist()]
    values = column.values[part]
    if values.dtype == np.bool_:
        values = values.astype(np.int8)
    cells: list[Any] = values.tolist()
    if column.known is None:
        return cells
    known = column.known[part].tolist()
    return [cell if k else "" for cell, k in zip(cells, known, strict=True)]
