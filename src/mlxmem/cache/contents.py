"""What lies in the cache at a moment: how large it is, and for how long."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mlxmem.cache.trace import ALLOC, EVICT, FREE, Trace

Ints = npt.NDArray[np.int64]


class Contents(NamedTuple):
    """The cached buffers after a row.

    Attributes
    ----------
    sizes : ndarray of int64, shape (n,)
        Bytes.
    ages_us : ndarray of int64, shape (n,)
        Microseconds in the cache; of buffers from before the recording, since its
        start.
    unknown : int
        Bytes of further buffers from before the recording.
    """

    sizes: Ints
    ages_us: Ints
    unknown: int


def cached_bytes(trace: Trace) -> Ints:
    """Return the cached bytes after each row, shape (n,)."""
    given, taken = _given_and_taken(trace)
    start = int(trace.cached["size"].sum()) + trace.unknown
    return start + np.cumsum(trace.rows["size"] * (given.astype(np.int64) - taken))


def contents(trace: Trace, row: int) -> Contents:
    """Return what lies in the cache after a row, -1 = before the first one.

    Parameters
    ----------
    trace : Trace
    row : int
    """
    rows, count = trace.rows, len(trace)
    given, taken = _given_and_taken(trace)
    moves = np.flatnonzero(given | taken)
    # What was there before counts as given before the first row.
    address = np.concatenate([trace.cached["address"], rows["address"][moves]])
    at = np.concatenate([np.full(len(trace.cached), -1, np.int64), moves])
    size = np.concatenate([trace.cached["size"].astype(np.int64), rows["size"][moves]])
    gives = np.concatenate([np.ones(len(trace.cached), np.bool_), given[moves]])
    order = np.lexsort((at, address))
    address, at, size, gives = address[order], at[order], size[order], gives[order]
    until = np.full(len(order), count, np.int64)
    same = address[1:] == address[:-1]
    until[:-1][same] = at[1:][same]
    there = gives & (at <= row) & (until > row)
    now = int(trace.time_us[row]) if row >= 0 else 0
    since = np.where(at[there] >= 0, trace.time_us[at[there]], 0) if count else 0
    return Contents(size[there], now - since + 0 * size[there], trace.unknown)


def _given_and_taken(
    trace: Trace,
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    op, recorded = trace.rows["op"], trace.rows["recorded"] == 1
    return (op == FREE) & recorded, ((op == ALLOC) & recorded) | (op == EVICT)
