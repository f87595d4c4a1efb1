"""What lay in MLX's cache before the first retained event."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mlxmem.events import State
from mlxmem.ledger import Ledger

Ints = npt.NDArray[np.int64]


class CacheStart(NamedTuple):
    """The cache at the start.

    Attributes
    ----------
    addresses : ndarray of uint64, shape (n,)
    sizes : ndarray of int64, shape (n,)
        Bytes, oldest buffer first.
    unknown : int
        Bytes of buffers that no event names: they stayed where they were.
    """

    addresses: npt.NDArray[np.uint64]
    sizes: Ints
    unknown: int


def cache_at_start(ledger: Ledger) -> CacheStart:
    """Return what was cached before a recording's first retained event.

    MLX's own list, read when the session began, tells it. Where events were dropped
    since, nobody saw in which order the others were cached. Of equal sizes MLX takes
    the oldest, and it gives back the oldest, so that they left in the order of their
    age as far as it can be told: those that left are put first, in that order, then
    those that stayed.

    Parameters
    ----------
    ledger : Ledger
    """
    recording = ledger.recording
    events, listed = recording.events, recording.cached_at_enable
    if listed is not None and not recording.dropped:
        sizes = listed["size"].astype(np.int64)
        if int(sizes.sum()) == ledger.start_cache:
            return CacheStart(listed["addr"], sizes, 0)
    first = np.flatnonzero((ledger.previous < 0) & (events["addr"] > 0))
    left = first[ledger.needs(first) == State.Cached]
    cached = ledger.initial[ledger.initial["state"] == State.Cached]
    stayed = cached[~np.isin(cached["addr"], events["addr"][left])]
    stayed = stayed[np.argsort(stayed["timestamp_us"], kind="stable")]
    addresses = [events["addr"][left], stayed["addr"]]
    sizes_of = [events["size"][left], stayed["size"]]
    unknown = ledger.before_cache_left
    if listed is not None and unknown:
        # Those of the list that no event named since: older than all others.
        named = np.concatenate([events["addr"], recording.buffers["addr"]])
        old = listed[~np.isin(listed["addr"], named)]
        if int(old["size"].sum()) == unknown:
            addresses.insert(0, old["addr"])
            sizes_of.insert(0, old["size"])
            unknown = 0
    return CacheStart(
        np.concatenate(addresses),
        np.concatenate(sizes_of).astype(np.int64),
        unknown,
    )
