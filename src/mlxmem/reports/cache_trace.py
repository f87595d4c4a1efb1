"""A snapshot's entries as what is replayed through the model of the cache."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mlxmem.cache._replay import ROW
from mlxmem.cache.trace import (
    OPS,
    RECORDED,
    Parts,
    Trace,
    TracedCall,
    TraceError,
    bears_on_cache,
    with_calls,
)
from mlxmem.events import Action
from mlxmem.reports.history import KINDS, History, Ints

# The one entry of a snapshot's trace that each event is sure to have.
_ENTRIES = (*["alloc"] * 3, *["free_completed"] * 3, "segment_free")


def of_history(history: History) -> Trace:
    """Make a trace of a snapshot.

    Parameters
    ----------
    history : History
        Of a file that mlxmem wrote.

    Raises
    ------
    TraceError
        It is PyTorch's, whose allocator works otherwise, or an older mlxmem's that does
        not tell what was cached at the start.
    """
    if history.source != "mlxmem":
        raise TraceError(
            f"{history.name}: PyTorch wrote it, and its allocator has other rules: "
            "the model is of MLX's cache"
        )
    event, action = _events_of(history)
    blocks = history.blocks
    made = action <= Action.AllocMakeBuffer
    freed = (action >= Action.FreeActiveToCache) & (action <= Action.Release)
    rows = np.zeros(len(event), ROW)
    rows["address"], rows["size"] = history.addr[event], history.size[event]
    rows["op"], rows["recorded"] = OPS[action], RECORDED[action]
    looks = history.looks[np.isin(history.looks[:, 0], event)]
    rows["after_look"][np.searchsorted(event, looks[:, 0])] = looks[:, 1]
    # Which block an entry made, or ended, and which row made a block.
    begins, ends = np.full((2, len(history) + 1), -1, np.int64)
    inside = np.flatnonzero(blocks["start"] >= 0)
    begins[blocks["start"][inside]] = inside
    ends[blocks["end"]] = np.arange(len(blocks))
    number = np.where(made, begins[event], -1)
    rows["requested"][made] = blocks["requested"][number[made]]
    row_of = np.full(len(blocks) + 1, -1, np.int64)
    row_of[number[made]] = np.flatnonzero(made)
    rows["owner"] = np.where(freed, row_of[ends[event]], -1)
    before = np.ones(len(blocks), np.bool_)
    before[number[made]] = False
    beginning = int(event[0]) if len(event) else 0
    parts = Parts(rows, event, history.time_us[event] - history.start_us, number)
    calls = [
        TracedCall(
            number, call.name, call.value or 0, bool(call.stack), call.from_at, call.at
        )
        for number, call in enumerate(history.calls)
        if bears_on_cache(call.name, call.value)
    ]
    start = history.cache_at_start
    if start is None:
        raise TraceError(
            f"{history.name}: it does not tell what was cached at its start; record "
            "again with this version"
        )
    return with_calls(
        parts,
        calls,
        start,
        int(blocks["size"][before].sum()),
        history.settings,
        history.dropped,
        beginning,
    )


def _events_of(history: History) -> tuple[Ints, npt.NDArray[np.uint8]]:
    """Return the entries of which each stands for one event, and their actions."""
    kind = np.array([KINDS.index(name) for name in _ENTRIES], np.uint8)
    codes = np.full(len(history.actions) + 1, -1, np.int64)
    for code, name in enumerate(history.actions):
        if name in Action.__members__:
            codes[code] = Action[name]
    action = codes[history.action]
    event = np.flatnonzero((action >= 0) & (history.kind == kind[action]))
    return event, action[event].astype(np.uint8)
