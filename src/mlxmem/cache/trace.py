"""What a program asked of MLX's allocator, in the form that is replayed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mlxmem.cache._replay import CACHED, ROW
from mlxmem.cache.policies import NO_LIMIT, CpuPolicy, CudaPolicy, MetalPolicy, Policy
from mlxmem.cache.start import CacheStart, cache_at_start
from mlxmem.events import Action, Recording
from mlxmem.ledger import Ledger

Ints = npt.NDArray[np.int64]

# Op and Call of replay.h.
ALLOC, FREE, MAKE_BUFFER, RELEASE, EVICT, CALL_BEGINS, CALL_ENDS = range(7)
CALLS = ("clear_cache", "set_cache_limit", "set_memory_limit")
UNSEEN_CLEAR = len(CALLS)

# Indexed by action: the op, and whether it took from the cache or gave to it.
OPS = np.array([ALLOC, ALLOC, MAKE_BUFFER, FREE, FREE, RELEASE, EVICT], np.uint8)
RECORDED = np.array([0, 1, 0, 1, 0, 0, 0], np.uint8)


class TraceError(ValueError):
    """A recording says nothing about MLX's cache."""


class TracedCall(NamedTuple):
    """A call that bears on the cache; `number` counts the recording's calls."""

    number: int
    name: str
    value: int  # bytes
    seen: bool  # else only what it changed was
    began: int  # event before which it began
    ended: int


@dataclass(frozen=True)
class Trace:
    """The allocator's requests and what came of them.

    Attributes
    ----------
    rows : ndarray of ROW, shape (n,)
        Without allocations of 0 bytes, which no cache sees.
    event : ndarray of int64, shape (n,)
        Which event, or entry of a snapshot's trace, a row comes from; of a call, the
        one before which it began or ended.
    time_us : ndarray of int64, shape (n,)
        Microseconds since the session began.
    number : ndarray of int64, shape (n,)
        Of an allocation, which block of the history (which event of the recording) it
        is; of a call, which one of the recording's; -1 elsewhere.
    cached : ndarray of CACHED
        In the cache before the first row, oldest first.
    unknown : int
        Further cached bytes of which nothing is known but that they stayed.
    active : int
        Bytes in use before the first row.
    policy : Policy
        What it was recorded under: the backend's rules, the limits at the start.
    dropped : int
        Events that fell out of the ring before the first row; -1 = some.
    """

    rows: npt.NDArray[np.void]
    event: Ints
    time_us: Ints
    number: Ints
    cached: npt.NDArray[np.void]
    unknown: int
    active: int
    policy: Policy
    dropped: int

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.rows)

    @property
    def is_exact(self) -> bool:
        """Whether all is known of what was cached before the first row."""
        return not self.unknown and not self.dropped

    @property
    def allocations(self) -> Ints:
        """Which rows ask for memory."""
        return np.flatnonzero(self.rows["op"] == ALLOC)


def of_recording(recording: Recording) -> Trace:
    """Make a trace of what the recorder holds.

    Parameters
    ----------
    recording : Recording

    Raises
    ------
    TraceError
        It does not tell which MLX it was made on.
    """
    ledger = Ledger(recording)
    events = recording.events
    kept = np.flatnonzero(events["size"] > 0)
    rows = np.zeros(len(kept), ROW)
    action = events["action"][kept]
    rows["address"], rows["size"] = events["addr"][kept], events["size"][kept]
    made = action <= Action.AllocMakeBuffer
    rows["requested"] = np.where(made, events["requested_size"][kept], 0)
    rows["op"], rows["recorded"] = OPS[action], RECORDED[action]
    rows["after_look"] = events["after_look"][kept]
    place = np.full(len(events) + 1, -1, np.int64)
    place[kept] = np.arange(len(kept))
    owner = ledger.owner[kept]
    freed = (rows["op"] == FREE) | (rows["op"] == RELEASE)
    rows["owner"] = np.where(freed & (owner >= 0), place[owner], -1)
    start = cache_at_start(ledger)
    calls = [
        TracedCall(
            number,
            call.mark.name,
            call.value or 0,
            bool(call.stack),
            call.began - recording.dropped,
            call.mark.at - recording.dropped,
        )
        for number, call in enumerate(recording.calls)
        if bears_on_cache(call.mark.name, call.value)
    ]
    parts = Parts(
        rows=rows,
        event=kept,
        time_us=events["timestamp_us"][kept],
        number=np.where(made, kept, -1),
    )
    return with_calls(
        parts,
        calls,
        start,
        ledger.start_active,
        recording.settings,
        recording.dropped,
        0,
    )


def bears_on_cache(name: str, value: int | None) -> bool:
    """Tell whether a call changes what the cache does."""
    return name == "clear_cache" or (name in CALLS and value is not None)


class Parts(NamedTuple):
    """The events of a trace, with the fields of `Trace`."""

    rows: npt.NDArray[np.void]
    event: Ints
    time_us: Ints
    number: Ints


def with_calls(
    parts: Parts,
    calls: Sequence[TracedCall],
    start: CacheStart,
    active: int,
    settings: Mapping[str, Any],
    dropped: int,
    beginning: int,
) -> Trace:
    """Put the calls among the rows, and tell under which policy it all began."""
    count = len(parts.rows)
    policy = policy_of(settings)
    # What was called before the oldest event has left its traces in the start.
    inside = [call for call in calls if not dropped or call.ended > beginning]
    extra = np.zeros(2 * len(inside), ROW)
    event = np.zeros(2 * len(inside), np.int64)
    number = np.zeros(2 * len(inside), np.int64)
    for k, call in enumerate(inside):
        pair = slice(2 * k, 2 * k + 2)
        extra["size"][pair] = min(call.value, NO_LIMIT)
        extra["call"][pair] = CALLS.index(call.name)
        extra["op"][pair] = CALL_BEGINS, CALL_ENDS
        event[pair] = min(call.began, call.ended), call.ended
        number[pair] = call.number
    key = np.searchsorted(parts.event, event, side="left")
    # A change of a limit was noticed before the evictions that belong to it.
    for k, call in enumerate(inside):
        while not call.seen and _is_eviction(parts.rows, key[2 * k + 1]):
            key[2 * k + 1] += 1
    extra["owner"] = -1
    order = np.argsort(
        np.concatenate([2 * np.arange(count) + 1, 2 * key]), kind="stable"
    )
    rows = np.concatenate([parts.rows, extra])[order]
    placed = np.argsort(order)
    owned = rows["owner"] >= 0
    rows["owner"][owned] = placed[rows["owner"][owned]]
    begins, ends = placed[count::2], placed[count + 1 :: 2]
    rows["owner"][ends] = begins
    times = parts.time_us[np.minimum(key, max(count - 1, 0))] if count else key * 0
    cached = np.zeros(len(start.sizes), CACHED)
    cached["address"], cached["size"] = start.addresses, start.sizes
    return Trace(
        rows=rows,
        event=np.concatenate([parts.event, event])[order],
        time_us=np.concatenate([parts.time_us, times])[order],
        number=np.concatenate([parts.number, number])[order],
        cached=cached,
        unknown=start.unknown,
        active=max(active, 0),
        policy=policy,
        dropped=dropped,
    )


def _is_eviction(rows: npt.NDArray[np.void], place: int) -> bool:
    return place < len(rows) and int(rows["op"][place]) == EVICT


def policy_of(settings: Mapping[str, Any]) -> Policy:
    """Return the policy under which something was recorded, with its first limits.

    Parameters
    ----------
    settings : mapping
        `allocator_settings`: backend, MLX's version, and the limits at the start (or at
        the end, in files that don't tell them).

    Raises
    ------
    TraceError
        Backend or version are missing.
    """
    backend, version = settings.get("backend"), settings.get("mlx_version")
    limits: dict[str, int | None] = {}
    for name in ("cache_limit", "memory_limit"):
        known = settings.get(f"{name}_at_start", settings.get(name))
        limits[name] = known if isinstance(known, int) and known >= 0 else None
    if backend == "cpu" and isinstance(version, str):
        parts = tuple(int(part) for part in re.findall(r"\d{1,9}", version)[:2])
        return CpuPolicy(has_cache=parts >= (0, 32)).with_limits(**limits)
    # MLX has no getter of the cache limit; it begins as the memory limit.
    memory_limit = limits["memory_limit"]
    if memory_limit is None:
        memory_limit = NO_LIMIT
    if limits["cache_limit"] is None:
        limits["cache_limit"] = memory_limit
    device = max(memory_limit, 1)
    if backend == "cuda":
        return CudaPolicy(device).with_limits(**limits)
    if backend == "metal":
        names = "max_recommended_working_set_size", "memory_size"
        numbers = [settings.get(name) for name in names]
        # Of recordings that tell them not, the limits are all that is known.
        recommended, memory = (n if type(n) is int else 0 for n in numbers)
        if not 0 < recommended <= memory:
            recommended = memory = device
        return MetalPolicy(recommended, memory).with_limits(**limits)
    raise TraceError("the recording does not tell on which backend and MLX it was made")
