"""Replay a recording: what lived and was cached, from the first event to the last.

Every reader (snapshot, reports, tests) uses this one replay.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mlxmem.events import (
    RAW_BUFFER,
    Action,
    Recording,
    Records,
    State,
    is_alloc,
    primitive_ids,
)

Bytes = npt.NDArray[np.int64]
Indices = npt.NDArray[np.int64]

ABSENT = 2  # beside State.Active and State.Cached
BEFORE, LOST = -1, -2  # owners without an event
_A, _C, _N = int(State.Active), int(State.Cached), ABSENT

# Indexed by action: the state that it needs, the state that it leaves, and what it
# adds to active and to the cache in units of the buffer's size.
_NEEDS = np.array([_N, _C, _N, _A, _A, _A, _C], np.uint8)
_LEAVES = np.array([_A, _A, _A, _C, _N, _N, _N], np.uint8)
_TO_ACTIVE = np.array([1, 1, 1, -1, -1, -1, 0], np.int64)
_TO_CACHE = np.array([0, -1, 0, 1, 0, 0, -1], np.int64)
_STATE_NAMES = ("active", "cached", "absent")
_MAX_FAULTS = 100


class Change(NamedTuple):
    """What one event did; the last three are a `State` or `ABSENT`.

    `needed` is what the action needs and `before` what the address really held: they
    differ only where the events are inconsistent.
    """

    event: int
    addr: int
    size: int
    needed: int
    before: int
    after: int


class Ledger:
    """State of the buffers before, during and after a recording's events.

    The totals are counted back from the end of the recording, so they are right
    also when the oldest events fell out of the ring.

    Parameters
    ----------
    recording : Recording

    Attributes
    ----------
    recording : Recording
        What was replayed.
    active, cache, reserved : ndarray of int64, shape (n,)
        Bytes after each event; reserved = active + cache.
    start_active, start_cache : int
        Bytes before the first retained event.
    peak : int
        Highest active from the first retained event on, bytes.
    initial, final : ndarray of RAW_BUFFER
        Buffers known by address before the first event and after the last one.
    final_owner : ndarray of int64
        For each of `final`, the index of the event that allocated it, BEFORE or LOST.
    before_active : int
        Bytes that were active all along at addresses never seen.
    before_cache, before_cache_left : int
        Bytes cached at addresses never seen, before the first event and after the
        last one; FreeCacheToOS events with address 0 release them.
    owner : ndarray of int64, shape (n,)
        Index of the event that last allocated the event's buffer (itself for an
        allocation); BEFORE where that was before the first event, LOST where it is
        missing in between.
    order : ndarray of int64
        Indices of the events that have an address: by address, then by time.
    previous : ndarray of int64, shape (n,)
        Index of the event before at the same address, -1 for the first one.
    broken : ndarray of int64
        Indices of events that do not follow from the one before at their address.
    faults : list of str
        What is inconsistent, at most 100 lines; empty for a sound recording.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.faults: list[str] = []
        events = recording.events
        action = events["action"]
        size = events["size"].astype(np.int64)

        active = np.cumsum(size * _TO_ACTIVE[action])
        cache = np.cumsum(size * _TO_CACHE[action])
        self.start_active = recording.active - (int(active[-1]) if len(active) else 0)
        self.start_cache = recording.cache - (int(cache[-1]) if len(cache) else 0)
        self.active: Bytes = active + self.start_active
        self.cache: Bytes = cache + self.start_cache
        self.reserved: Bytes = self.active + self.cache
        highest = int(self.active.max()) if len(active) else self.start_active
        self.peak = max(self.start_active, highest)

        self._link(events, size)
        self._find_buffers(events, size)
        self._find_remainder(events, size)

    def _link(self, events: Records, size: Bytes) -> None:
        """Chain the events of each address and check every transition."""
        count = len(events)
        addr, action = events["addr"], events["action"]
        order = np.argsort(addr, kind="stable")
        order = order[np.searchsorted(addr[order], 1) :]  # 0 is no address
        self.order: Indices = order
        sorted_addr = addr[order]
        same = np.zeros(len(order), np.bool_)
        same[1:] = sorted_addr[1:] == sorted_addr[:-1]
        self._firsts: Indices = order[~same]
        lasts = np.ones(len(order), np.bool_)
        lasts[:-1] = ~same[1:]
        self._lasts: Indices = order[lasts]

        self.previous: Indices = np.full(count, -1, np.int64)
        later = np.flatnonzero(same)
        self.previous[order[later]] = order[later - 1]

        now, then = order[later], order[later - 1]
        needs, left = _NEEDS[action[now]], _LEAVES[action[then]]
        wrong = (needs != left) | ((needs != ABSENT) & (size[now] != size[then]))
        self.broken: Indices = np.sort(now[wrong])

        # The latest allocation at the address, but not from before a hole.
        place = np.arange(len(order))
        restart = ~same
        restart[later[wrong]] = True
        start = np.maximum.accumulate(np.where(restart, place, 0))
        latest = np.maximum.accumulate(np.where(is_alloc(action[order]), place, -1))
        found = latest >= start
        self.owner: Indices = np.full(count, BEFORE, np.int64)
        self.owner[order[found]] = order[latest[found]]
        self.owner[order[~found & same[start]]] = LOST

        for index in self.broken[:_MAX_FAULTS].tolist():
            before = int(self.previous[index])
            self._fault(
                f"event {index}: {Action(int(action[index])).name} of "
                f"{int(size[index])} bytes at {int(addr[index]):#x}, which is "
                f"{_STATE_NAMES[_LEAVES[action[before]]]} with {int(size[before])}"
            )

    def _find_buffers(self, events: Records, size: Bytes) -> None:
        """Collect the buffers known by address at both ends."""
        recording = self.recording
        action = events["action"]
        primitives = primitive_ids(recording)
        asked = np.minimum(events["requested_size"], events["size"])

        buffers = recording.buffers
        if len(buffers):
            known = np.isin(buffers["addr"], events["addr"][self._firsts])
            for addr in buffers["addr"][known][:_MAX_FAULTS].tolist():
                self._fault(f"buffer {addr:#x} is older than the events and has some")
            buffers = buffers[~known]

        first = self._firsts[_NEEDS[action[self._firsts]] != ABSENT]
        initial = np.zeros(len(first), RAW_BUFFER)
        for name in ("addr", "size"):
            initial[name] = events[name][first]
        # A reuse carries what the new owner asked for, not the old one.
        reused = action[first] == Action.AllocReuse
        initial["requested_size"] = np.where(
            reused, events["size"][first], asked[first]
        )
        initial["traceback_id"] = np.where(reused, 0, events["traceback_id"][first])
        initial["primitive_id"] = np.where(reused, 0, primitives[first])
        initial["timestamp_us"] = events["timestamp_us"][0] if len(first) else 0
        initial["state"] = _NEEDS[action[first]]
        initial["stream"] = -1
        self.initial: Records = np.concatenate([buffers, initial])

        last = self._lasts[_LEAVES[action[self._lasts]] != ABSENT]
        made = self.owner[last]
        source = np.where(made >= 0, made, last)
        final = np.zeros(len(last), RAW_BUFFER)
        for name in ("addr", "size", "timestamp_us"):
            final[name] = events[name][last]
        final["requested_size"] = asked[source]
        final["traceback_id"] = events["traceback_id"][source]
        final["primitive_id"] = primitives[source]
        final["state"] = _LEAVES[action[last]]
        final["stream"] = events["stream"][source]
        final["thread_id"] = np.where(made >= 0, events["thread_id"][source], 0)
        self.final: Records = np.concatenate([buffers, final])
        self.final_owner: Indices = np.concatenate(
            [np.full(len(buffers), BEFORE, np.int64), made]
        )

    def _find_remainder(self, events: Records, size: Bytes) -> None:
        """Work out what was there at addresses that no event names."""
        active = self.initial["state"] == State.Active
        known = self.initial["size"].astype(np.int64)
        before_active = self.start_active - int(known[active].sum())
        before_cache = self.start_cache - int(known[~active].sum())
        self._nameless: Indices = np.flatnonzero(
            (events["addr"] == 0) & (events["action"] == Action.FreeCacheToOS)
        )
        left = before_cache - int(size[self._nameless].sum())
        if before_active < 0:
            self._fault(f"known buffers exceed active at the start by {-before_active}")
        if left < 0:
            self._fault(f"known buffers exceed the cache at the start by {-left}")
        others = (events["addr"] == 0) & (events["action"] != Action.FreeCacheToOS)
        others &= size > 0  # Metal's empty buffer is a null pointer
        for index in np.flatnonzero(others)[:_MAX_FAULTS].tolist():
            self._fault(f"event {index}: no address")
        self.before_active = max(before_active, 0)
        self.before_cache_left = max(left, 0)
        self.before_cache = self.before_cache_left + int(size[self._nameless].sum())

    @property
    def nameless(self) -> Indices:
        """Indices of the FreeCacheToOS events with address 0."""
        return self._nameless

    def needs(self, index: Indices) -> npt.NDArray[np.uint8]:
        """Return the states that the events at `index` need, shape (n,) -> (n,)."""
        states: npt.NDArray[np.uint8] = _NEEDS[self.recording.events["action"][index]]
        return states

    def leaves(self, index: Indices) -> npt.NDArray[np.uint8]:
        """Return the states that the events at `index` leave, shape (n,) -> (n,)."""
        states: npt.NDArray[np.uint8] = _LEAVES[self.recording.events["action"][index]]
        return states

    def change(self, index: int) -> Change:
        """Return what the event at `index` did."""
        event = self.recording.events[index]
        action = int(event["action"])
        needed = before = int(_NEEDS[action])
        previous = int(self.previous[index])
        if previous >= 0:
            before = int(_LEAVES[self.recording.events["action"][previous]])
        addr, size = int(event["addr"]), int(event["size"])
        return Change(index, addr, size, needed, before, int(_LEAVES[action]))

    def replay(self) -> Iterator[Change]:
        """Walk through the events.

        Returns
        -------
        iterator of Change
            One per event, oldest first.
        """
        events = self.recording.events
        needed = _NEEDS[events["action"]]
        left = _LEAVES[events["action"]]
        before = np.where(self.previous >= 0, left[self.previous], needed)
        columns = zip(
            range(len(events)),
            events["addr"].tolist(),
            events["size"].tolist(),
            needed.tolist(),
            before.tolist(),
            left.tolist(),
            strict=True,
        )
        return map(Change._make, columns)

    def _fault(self, text: str) -> None:
        if len(self.faults) < _MAX_FAULTS:
            self.faults.append(text)
