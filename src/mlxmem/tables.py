"""Lists of equal dicts, held as columns.

A trace has millions of entries with the same keys. One description of them, a
`Table`, serves both the reader that wants dicts (`to_objects`) and the file
(`_pickle_writer`), which never makes any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Shared:
    """A column of objects that many rows share.

    Attributes
    ----------
    objects : list
        What the rows point to. May grow between tables; the writer knows it by
        its identity, so it must be the same list in all tables of one file.
    index : ndarray of int32, shape (n,)
        Each row's place in `objects`.
    """

    objects: list[Any]
    index: npt.NDArray[np.int32]


# Key -> array of integers of shape (n,), Shared, a Table whose row n is the only
# item of a list, or one plain value for all rows. At least one column is an array.
Table = Mapping[str, Any]


_AT_A_TIME = 1_000  # dicts that stay in the processor's cache


@dataclass(frozen=True)
class Rows:
    """A list of dicts that is made piece by piece.

    Attributes
    ----------
    count : int
        Number of dicts.
    tables : callable
        Returns an iterator of tables, the pieces of the list in order.
    """

    count: int
    tables: Callable[[], Iterator[Table]]


def to_objects(value: Any) -> Any:
    """Replace every `Rows` in nested dicts and lists by its list of dicts.

    Parameters
    ----------
    value : dict, list or other
        Anything but a dict, a list or `Rows` is returned as it is.

    Returns
    -------
    dict, list or other
        Rows share the objects of `Shared` columns and the values that are the same
        for all of them.
    """
    if isinstance(value, Rows):
        return [row for table in value.tables() for row in _dicts(table)]
    if isinstance(value, dict):
        return {key: to_objects(item) for key, item in value.items()}
    if isinstance(value, list):
        return [to_objects(item) for item in value]
    return value


def _dicts(table: Table) -> Iterator[dict[str, Any]]:
    count = row_count(table)
    for start in range(0, count, _AT_A_TIME):
        yield from _some_dicts(table, slice(start, min(start + _AT_A_TIME, count)))


def _some_dicts(table: Table, part: slice) -> list[dict[str, Any]]:
    # Copies of a dict and a loop per column take less than half of dict(zip(...)).
    template = dict(table)
    rows = [template.copy() for _ in range(part.stop - part.start)]
    for key, column in table.items():
        values: Iterable[Any]
        if isinstance(column, np.ndarray):
            values = column[part].tolist()
        elif isinstance(column, Shared):
            values = map(column.objects.__getitem__, column.index[part].tolist())
        elif isinstance(column, Mapping):
            values = ([row] for row in _some_dicts(column, part))
        else:
            continue  # the same in all rows
        for row, value in zip(rows, values, strict=True):
            row[key] = value
    return rows


def row_count(table: Table) -> int:
    """Return the number of rows of a table."""
    for column in table.values():
        if isinstance(column, np.ndarray):
            return len(column)
        if isinstance(column, Shared):
            return len(column.index)
    raise ValueError("a table needs a column that is an array")


def keys_of(table: Table) -> list[str]:
    """Return the keys of a table and of the tables inside it."""
    keys = list(table)
    for column in table.values():
        if isinstance(column, Mapping):
            keys += keys_of(column)
    return keys
