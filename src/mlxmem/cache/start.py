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

    Nobody saw in which order these were cached. Of equal sizes MLX takes the oldest,
    and it gives back the oldest, so that they left in the order of their age as far as
    it can be told: those that left are put first, in that order, then those that
    stayed.

    Parameters
    ----------
    ledger : Ledger
    """
    events = ledger.recording.events
    first = np.flatnonzero((ledger.previous < 0) & (events["addr"] > 0))
    left = first[ledger.needs(first) == State.Cached]
    cached = ledger.initial[ledger.initial["state"] == State.Cached]
    stayed = cached[~np.isin(cached["addr"], events["addr"][left])]
    stayed = stayed[np.argsort(stayed["timestamp_us"], kind="stable")]
    return CacheStart(
        np.concatenate([events["addr"][left], stayed["addr"]]),
        np.concatenate([events["size"][left], stayed["size"]]).astype(np.int64),
        ledger.before_cache_left,
    )
