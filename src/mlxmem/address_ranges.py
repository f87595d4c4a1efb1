"""Which addresses a snapshot shows.

The readers of snapshots want segments that never overlap while they live. On the CPU an
event's address is that of the memory itself, so it is shown as it is. On CUDA and on
Metal it is that of a small object that describes the buffer: taken for the start of the
buffer's bytes, it would reach into its neighbours. There each segment gets a range of
made-up addresses for its life.

The rule for these ranges: a segment takes the free one that was given back first, or a
new one behind all others, and gives it back when it ends. Extents are powers of two
from 512 bytes on, so that segments of nearly the same size follow each other in a
range. Sizes that never come again then do not use up the numbers that JavaScript holds
exactly: all ranges of one extent take less than twice the highest reserved.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mlxmem.cache.start import CacheStart, cache_at_start
from mlxmem.ledger import ABSENT, Ledger

Addresses = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]

# Where MLX's address of a buffer is not that of its memory.
BACKENDS = ("cuda", "metal")

_FIRST = 1 << 30  # no range is at 0, which is no address
_SMALLEST = 9  # log2 of the smallest extent, as in PyTorch's allocator
_LARGEST = 52
# Moments: what ends before an event, begins with it, and ends with it.
_CLOSED_BEFORE, _OPENED, _CLOSED, _MOMENTS = range(4)
_BEFORE = -1
_NEVER = 2**62


class ShownAddresses(NamedTuple):
    """The addresses that a snapshot shows instead of MLX's.

    Attributes
    ----------
    events : ndarray of uint64, shape (n,)
        Of the recording's events; 0 where MLX's is 0.
    initial, final : ndarray of uint64
        Of the ledger's buffers of these names.
    cached : CacheStart
        What was cached before the first event, at the addresses shown.
    end : int
        First address behind all of these buffers.
    """

    events: Addresses
    initial: Addresses
    final: Addresses
    cached: CacheStart
    end: int


def shown_addresses(ledger: Ledger) -> ShownAddresses:
    """Return the addresses under which a recording's buffers are shown.

    The same recording always gives the same addresses.

    Parameters
    ----------
    ledger : Ledger
        Of the recording, whose `settings` name the backend.
    """
    recording, cached = ledger.recording, cache_at_start(ledger)
    if recording.settings.get("backend") in BACKENDS:
        return _ranges(ledger, cached)
    end = 0
    for rows in (recording.events, recording.buffers):
        if len(rows):
            end = max(end, int((rows["addr"] + rows["size"]).max()))
    events, initial, final = (
        rows["addr"] for rows in (recording.events, ledger.initial, ledger.final)
    )
    return ShownAddresses(events, initial, final, cached, end)


class _Lives(NamedTuple):
    """The lives of segments; a moment is `_MOMENTS` times an event, plus which."""

    addr: Addresses  # MLX's
    size: npt.NDArray[np.uint64]  # bytes
    begin: Ints  # moment, _BEFORE the first event
    end: Ints  # moment, _NEVER if it lives at the end


def _ranges(ledger: Ledger, cached: CacheStart) -> ShownAddresses:
    """Give each life of a segment a range of its own."""
    lives, of_event = _lives(ledger)
    kept = len(lives.addr)
    # What was cached at addresses that no event names stays, as far as is known.
    unnamed = ~np.isin(cached.addresses, lives.addr[lives.begin == _BEFORE])
    count = int(np.count_nonzero(unnamed))
    lives = _Lives(
        np.concatenate([lives.addr, cached.addresses[unnamed]]),
        np.concatenate([lives.size, cached.sizes[unnamed].astype(np.uint64)]),
        np.concatenate([lives.begin, np.full(count, _BEFORE, np.int64)]),
        np.concatenate([lives.end, np.full(count, _NEVER, np.int64)]),
    )
    start, end = _place(lives)
    events = np.zeros(len(of_event), np.uint64)
    named = of_event >= 0
    events[named] = start[of_event[named]]
    there_first = np.flatnonzero(lives.begin == _BEFORE)
    there_last = np.flatnonzero(lives.end[:kept] == _NEVER)

    def look_up(which: Ints, addr: Addresses) -> Addresses:
        # Buffers that are there at the same time have different addresses.
        which = which[np.argsort(lives.addr[which], kind="stable")]
        found: Addresses = start[which[np.searchsorted(lives.addr[which], addr)]]
        return found

    return ShownAddresses(
        events,
        look_up(there_first, ledger.initial["addr"]),
        look_up(there_last, ledger.final["addr"]),
        cached._replace(addresses=look_up(there_first, cached.addresses)),
        end,
    )


def _lives(ledger: Ledger) -> tuple[_Lives, Ints]:
    """Cut the events of each address into the lives of segments.

    Returns
    -------
    lives : _Lives
    of_event : ndarray of int64, shape (n,)
        Which life each event belongs to, -1 where it has no address.
    """
    events = ledger.recording.events
    every, order = np.arange(len(events)), ledger.order
    # Copies of the columns, since the next steps go to and fro in them.
    addr, size = events["addr"].copy(), events["size"].copy()
    needs_none = (ledger.needs(every) == ABSENT)[order]
    leaves_none = ledger.leaves(every) == ABSENT
    before = ledger.previous[order]
    follows = before >= 0
    begins = ~follows | needs_none | leaves_none[before] | (size[order] != size[before])
    of_event = np.full(len(events), -1, np.int64)
    of_event[order] = np.cumsum(begins) - 1

    at = np.flatnonzero(begins)
    first = order[at]
    is_older = ~follows[at] & ~needs_none[at]
    begin = np.where(is_older, _BEFORE, _MOMENTS * first + _OPENED)
    # What does not end with its last event ends before the next one of its address,
    # as the snapshot then fills in.
    stop = np.flatnonzero(np.append(begins[1:], len(order) > 0))
    last, following = order[stop], np.append(order, 0)[stop + 1]
    goes_on = np.append(follows, False)[stop + 1]
    end = np.where(goes_on, _MOMENTS * following + _CLOSED_BEFORE, _NEVER)
    end = np.where(leaves_none[last], _MOMENTS * last + _CLOSED, end)

    # Buffers that are older than the events, and that no event names.
    old = ledger.initial[~np.isin(ledger.initial["addr"], addr[first[is_older]])]
    count = len(old)
    lives = _Lives(
        np.concatenate([addr[first], old["addr"]]),
        np.concatenate([size[first], old["size"]]),
        np.concatenate([begin, np.full(count, _BEFORE, np.int64)]),
        np.concatenate([end, np.full(count, _NEVER, np.int64)]),
    )
    return lives, of_event


def _place(lives: _Lives) -> tuple[Addresses, int]:
    """Return where the range of each life begins, and the end of all ranges."""
    count = len(lives.begin)
    exponent = np.frexp(np.maximum(lives.size, 1).astype(np.float64) - 1)[1]
    exponent = np.clip(exponent, _SMALLEST, _LARGEST).astype(np.int64)
    follows = _followed(lives, exponent)
    # From each life back to the first one in its range, by twice the way each time.
    while True:
        further = follows[follows]
        if np.array_equal(further, follows):
            break
        follows = further
    fresh = np.flatnonzero(follows == np.arange(count))
    fresh = fresh[np.argsort(lives.begin[fresh], kind="stable")]
    extent = np.uint64(1) << exponent[fresh].astype(np.uint64)
    ends = np.uint64(_FIRST) + np.cumsum(extent, dtype=np.uint64)
    start = np.zeros(count, np.uint64)
    start[fresh] = ends - extent
    return start[follows], int(ends[-1]) if len(ends) else _FIRST


def _followed(lives: _Lives, exponent: Ints) -> Ints:
    """Tell after which life in the same range each one comes; itself for the first."""
    count = len(lives.begin)
    is_older = lives.begin == _BEFORE
    newer, over = np.flatnonzero(~is_older), np.flatnonzero(lives.end < _NEVER)
    # No two lives begin or end at the same moment, so that their places sort them.
    moments = np.concatenate([lives.begin[newer], lives.end[over]])
    step_at = np.full(int(moments.max(initial=-1)) + 1, -1, np.int64)
    step_at[moments] = np.concatenate([newer, over + count])
    steps = np.concatenate([np.flatnonzero(is_older), step_at[step_at >= 0]])
    is_begin = steps < count
    life = np.where(is_begin, steps, steps - count)
    order = np.argsort(exponent[life].astype(np.uint8), kind="stable")
    is_begin, life = is_begin[order], life[order]
    kind = exponent[life]
    # Ranges given back minus ranges taken. Where that is lower than ever before,
    # none was free. Each extent counts far below the one before: for itself.
    level = np.cumsum(np.where(is_begin, -1, 1))
    starts = _first_of_kind(kind)[kind]
    level -= np.where(starts > 0, level[starts - 1], 0)
    floor = -(2 * len(order) + 2) * kind
    level += floor
    lowest = np.minimum(np.append(1, np.minimum.accumulate(level)[:-1]), floor)
    takes = np.flatnonzero(is_begin & (level >= lowest))
    gives = np.flatnonzero(~is_begin)
    # The first range that was given back is the first to be taken.
    rank = np.arange(len(takes)) - _first_of_kind(kind[takes])[kind[takes]]
    source = _first_of_kind(kind[gives])[kind[takes]] + rank
    follows = np.arange(count)
    follows[life[takes]] = life[gives[source]]
    return follows


def _first_of_kind(kind: Ints) -> Ints:
    """Return where each exponent begins in a sorted array of them."""
    return np.searchsorted(kind, np.arange(_LARGEST + 1))
