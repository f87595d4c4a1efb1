"""The books: recorded events replayed and compared with MLX's own counters.

The replay here is written apart from `mlxmem.ledger` on purpose: the two must agree
with each other and with MLX, to the byte. Every integration test goes through it.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

import mlxmem
from mlxmem import _hook, recorder
from mlxmem.events import Action, Nodes, Recording, Records, State
from mlxmem.ledger import Ledger

FIELDS = (
    "addr",
    "size",
    "requested_size",
    "timestamp_us",
    "action",
    "primitive_name",
    "traceback",
    "stream",
    "thread_id",
)
ALLOCS = (Action.AllocNew, Action.AllocReuse, Action.AllocMakeBuffer)
FREES = (Action.FreeActiveToCache, Action.FreeActiveToOS, Action.Release)
VERSION = tuple(int(part) for part in mx.__version__.split(".")[:3])
# The allocator is CUDA's on every device then, the CPU as well.
ON_CUDA: bool = hasattr(mx, "cuda") and mx.cuda.is_available()
PAGE = 16_384 if ON_CUDA else 4096  # unit of the allocator's reuse window, bytes
HAS_CPU_CACHE = VERSION >= (0, 32, 0)  # before, the CPU allocator kept nothing
# The allocator is followed by its mutex, on the CPU only to test that.
FOLLOWS_MUTEX: bool = ON_CUDA or "MLXMEM_FOLLOW_MUTEX" in os.environ


# Requested size, traceback id and primitive id: what a free keeps of its allocation.
_Owner = tuple[int, int, int]


class Counters(NamedTuple):
    """MLX's own counters at a quiet moment, in bytes."""

    active: int
    cache: int
    peak: int


def rounded(n: int) -> int:
    """Return the size of the buffer that MLX makes for n bytes."""
    if not ON_CUDA or n == 0:
        return n
    if n <= 8:
        return 8  # a piece of a slab
    if n < PAGE:
        return 1 << (n - 1).bit_length()
    return -(-n // PAGE) * PAGE


def read_counters() -> Counters:
    """Read MLX's counters now."""
    return Counters(mx.get_active_memory(), mx.get_cache_memory(), mx.get_peak_memory())


def settle() -> Counters:
    """Wait until nothing allocates or frees any more, and read the counters.

    Intermediates are freed by stream workers after `mx.eval` has returned, and
    `mx.synchronize` waits for one stream only: so look until nothing moves.
    """
    mx.synchronize()
    before, same = read_counters(), 0
    for _ in range(2_000):
        time.sleep(0.002)
        now = read_counters()
        same = same + 1 if now == before else 0
        if same == 5:
            return now
        before = now
    raise AssertionError(f"never quiet: {before}")


@dataclass
class _Replay:
    """State of the buffers while events are replayed one by one."""

    active: int
    cache: int
    live: dict[int, tuple[int, _Owner]] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)
    unknown_active: int = 0
    unknown_cache: int = 0
    curve: list[int] = field(default_factory=list)  # active after each event
    faults: list[str] = field(default_factory=list)

    def fault(self, index: int, what: str) -> None:
        self.faults.append(f"event {index}: {what}")

    def run(self, events: Records) -> None:
        """Replay all events; what is inconsistent goes to `faults`."""
        assert events.dtype.names is not None
        assert events.dtype.names[:4] == FIELDS[:4]
        last_us = 0
        for i, row in enumerate(events.tolist()):
            addr, size, asked, time_us, stack, op, action, _, stream, thread = row
            if action in ALLOCS:
                self.alloc(i, action, addr, size, (asked, stack, op))
                if (stream >= 0) != (op != 0):
                    self.fault(i, f"stream {stream} with primitive {op}")
            elif action in FREES:
                self.free(i, action, addr, size, (asked, stack, op))
                if stream != -1:
                    self.fault(i, f"a free has stream {stream}")
            else:
                self.shrink(i, addr, size)
            if addr:
                self.seen.add(addr)
            if time_us < last_us:
                self.fault(i, f"{time_us} us after {last_us} us")
            if thread == 0:
                self.fault(i, "no thread")
            last_us = time_us
            self.curve.append(self.active)

    def alloc(self, i: int, action: int, addr: int, size: int, owner: _Owner) -> None:
        asked = owner[0]
        if addr in self.live:
            self.fault(i, f"{addr:#x} is allocated twice")
        if action == Action.AllocReuse:
            if addr in self.cached:
                kept = self.cached.pop(addr)
                if kept != size:
                    self.fault(i, f"cached {kept}, reused {size} bytes")
            else:
                self.unknown_cache -= size
                if addr in self.seen:
                    self.fault(i, f"{addr:#x} is reused, not cached")
            least = rounded(asked)
            if not least <= size < min(2 * least, least + 2 * PAGE):
                self.fault(i, f"{size} bytes reused for {asked}")
            self.cache -= size
        else:
            if addr in self.cached:
                self.fault(i, f"{addr:#x} is new, yet cached")
            made = action == Action.AllocNew
            if size != (rounded(asked) if made else asked):
                self.fault(i, f"{size} bytes made for {asked}")
        self.live[addr] = (size, owner)
        self.active += size

    def free(self, i: int, action: int, addr: int, size: int, owner: _Owner) -> None:
        if addr in self.live:
            made = self.live.pop(addr)
            if made != (size, owner):
                self.fault(i, f"allocated as {made}, freed as {(size, owner)}")
        else:
            self.unknown_active -= size
            if addr in self.seen:
                self.fault(i, f"{addr:#x} is freed, yet not live")
        self.active -= size
        if action == Action.FreeActiveToCache:
            self.cached[addr] = size
            self.cache += size

    def shrink(self, i: int, addr: int, size: int) -> None:
        if addr in self.cached:
            kept = self.cached.pop(addr)
            if kept != size:
                self.fault(i, f"cached {kept}, returned {size} bytes")
        else:
            self.unknown_cache -= size
            if addr in self.seen:
                self.fault(i, f"{addr:#x} is returned, not cached")
        self.cache -= size


def _changes(events: Records) -> tuple[int, int]:
    """Sum what the events add to active and to the cache, in bytes."""
    size = events["size"].astype(np.int64)
    action = events["action"]

    def total(*kinds: Action) -> int:
        return int(size[np.isin(action, kinds)].sum())

    cache = total(Action.FreeActiveToCache)
    cache -= total(Action.AllocReuse, Action.FreeCacheToOS)
    return total(*ALLOCS) - total(*FREES), cache


def check(
    recording: Recording, counters: Counters, resets: Sequence[int] = ()
) -> Ledger:
    """Assert that a recording's events add up to MLX's counters.

    Parameters
    ----------
    recording : Recording
        What the recorder holds, taken at a quiet moment.
    counters : Counters
        MLX's counters of the same moment, bytes.
    resets : sequence of int
        How many events had been recorded, dropped ones included, at each
        `mx.reset_peak_memory()`.

    Returns
    -------
    Ledger
        The ledger of the recording, which agreed.

    Raises
    ------
    AssertionError
        The books do not balance.
    """
    events, dropped = recording.events, recording.dropped
    assert recording.max_entries == 0 or len(events) <= recording.max_entries
    assert dropped == 0 or len(events) == recording.max_entries

    # With an overflow the start is only known backwards from the end.
    active_delta, cache_delta = _changes(events)
    if dropped == 0:
        assert len(recording.buffers) == 0
        start = recording.active_at_enable, recording.cache_at_enable
    else:
        start = recording.active - active_delta, recording.cache - cache_delta
    replay = _Replay(*start, unknown_active=start[0], unknown_cache=start[1])
    if dropped:
        for row in recording.buffers:
            bytes_ = int(row["size"])
            if row["state"] == 0:
                replay.unknown_active -= bytes_
            else:
                replay.unknown_cache -= bytes_
    replay.run(events)

    assert replay.faults == [], replay.faults[:5]
    assert (replay.active, replay.cache) == (counters.active, counters.cache)
    assert (recording.active, recording.cache) == (counters.active, counters.cache)
    assert replay.unknown_active >= 0
    assert replay.unknown_cache >= 0

    # MLX raises its peak in malloc only, and a reset sets it to 0 whatever is live.
    is_alloc = np.isin(events["action"], ALLOCS)
    curve = np.array(replay.curve, dtype=np.int64)
    allocated = np.where(is_alloc, curve, 0)
    highest = max([recording.active_at_enable, *replay.curve])
    if dropped == 0:
        assert recording.peak == highest
    else:
        assert recording.peak >= highest
    if resets:
        after = resets[-1] - dropped
        if after >= 0:
            assert counters.peak == max([0, *allocated[after:].tolist()])
    elif dropped == 0:
        made = max([0, *allocated.tolist()])
        assert counters.peak == max(recording.peak_at_enable, made)

    ledger = Ledger(recording)
    _check_ledger(ledger, recording, replay, start)
    return ledger


def _check_ledger(
    ledger: Ledger, recording: Recording, replay: _Replay, start: tuple[int, int]
) -> None:
    assert ledger.faults == []
    assert (ledger.start_active, ledger.start_cache) == start
    assert np.array_equal(ledger.active, replay.curve)
    assert np.array_equal(ledger.reserved, ledger.active + ledger.cache)
    if len(recording.events):
        assert int(ledger.active[-1]) == recording.active
        assert int(ledger.cache[-1]) == recording.cache
    assert ledger.peak == max([start[0], *replay.curve])
    assert ledger.before_active == replay.unknown_active
    assert ledger.before_cache_left == replay.unknown_cache
    mine = {(addr, made[0], int(State.Active)) for addr, made in replay.live.items()}
    mine |= {(addr, size, int(State.Cached)) for addr, size in replay.cached.items()}
    names = ["addr", "size", "state"]
    mine |= set(recording.buffers[names].tolist())
    assert set(ledger.final[names].tolist()) == mine


def check_readers(recording: Recording) -> None:
    """Assert that the public readers show what the raw recording holds.

    Call it while nothing records anything new.

    Raises
    ------
    AssertionError
        `events()`, `events_array()` or `stats()` disagrees with the recording.
    """
    raw = recording.events
    public, array, stats = mlxmem.events(), mlxmem.events_array(), mlxmem.stats()
    assert len(public) == len(array) == len(raw)
    assert {tuple(event) for event in public} <= {FIELDS}
    columns = {name: [event[name] for event in public] for name in FIELDS}
    for name in ("addr", "size", "requested_size", "timestamp_us"):
        assert columns[name] == array[name].tolist() == raw[name].tolist()
    for name in ("stream", "thread_id"):
        assert columns[name] == array[name].tolist() == raw[name].tolist()
    assert columns["action"] == [Action(a).name for a in raw["action"].tolist()]
    assert array["action"].tolist() == raw["action"].tolist()

    # Whose they are is shown of allocations alone.
    is_alloc = np.isin(raw["action"], ALLOCS)
    ops = np.where(is_alloc, raw["primitive_id"], 0).tolist()
    names = [recording.primitives[op] for op in ops]
    assert columns["primitive_name"] == array["primitive_name"].tolist() == names
    ids = np.where(is_alloc, raw["traceback_id"], 0)
    stacks = {i: recording.resolve(i) for i in np.unique(ids).tolist()}
    assert stacks.get(0) is None
    assert all(s is None or 1 <= len(s) <= 32 for s in stacks.values())
    assert columns["traceback"] == [stacks[i] for i in ids.tolist()]

    assert stats["active"] == recording.active
    assert stats["cache"] == recording.cache
    assert stats["reserved"] == recording.active + recording.cache
    assert stats["peak"] == recording.peak
    assert stats["events_recorded"] == len(raw) + recording.dropped
    assert stats["events_dropped"] == recording.dropped
    assert _hook.totals().unexplained == 0


def check_nodes() -> Nodes:
    """Assert that the running totals of array nodes are those of the nodes found.

    Call it at a quiet moment.

    Returns
    -------
    Nodes
    """
    nodes = _hook.copy_nodes()
    assert nodes is not None
    pending = int(nodes.live["pending"].sum())
    last = nodes.samples[-1]
    assert (last["live"], last["pending"]) == (len(nodes.live), pending)
    assert np.all(np.diff(nodes.samples["timestamp_us"]) >= 0)
    return nodes


class Books:
    """One recording session under test, whose books are checked on the way out.

    Parameters
    ----------
    max_entries : int
        Handed to `mlxmem.enable`; 0 = unlimited.
    stacks : bool
        Handed to `mlxmem.enable`.
    """

    def __init__(self, max_entries: int = 0, stacks: bool = True) -> None:
        self.max_entries = max_entries
        self.stacks = stacks
        self.resets: list[int] = []
        self._reset_peak: Callable[[], None] = mx.reset_peak_memory

    def __enter__(self) -> Books:
        # The peak of earlier work would hide this session's.
        gc.collect()
        settle()
        mx.reset_peak_memory()
        self._reset_peak = mx.reset_peak_memory
        # MLX tells nobody of a reset, which the peak of the books has to allow for.
        mx.reset_peak_memory = self.reset_peak_memory
        try:
            mlxmem.enable(self.max_entries, stacks=self.stacks)
        except BaseException:
            mx.reset_peak_memory = self._reset_peak
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if kind is None and mlxmem.is_enabled():
                self.check()
        finally:
            mlxmem.disable()
            mx.reset_peak_memory = self._reset_peak

    def restart(self) -> None:
        """Begin a new session, as a second enable() does."""
        mlxmem.enable(self.max_entries, stacks=self.stacks)
        self.resets.clear()

    def reset_peak_memory(self) -> None:
        """Reset MLX's peak and note where in the events that was."""
        settle()
        self.resets.append(mlxmem.stats()["events_recorded"])
        self._reset_peak()

    def read(self) -> tuple[Recording, Counters]:
        """Take the recording and MLX's counters of one quiet moment."""
        for _ in range(20):
            before = settle()
            recording = recorder.recording()
            if read_counters() == before:
                return recording, before
        raise AssertionError("never quiet while the recording was read")

    def check(self, readers: bool = True) -> Recording:
        """Assert that the books balance now, and return the recording.

        Parameters
        ----------
        readers : bool
            Compare the public readers with the raw events too.
        """
        # A garbage collection in between would free arrays.
        collects = gc.isenabled()
        gc.disable()
        try:
            recording, counters = self.read()
            check(recording, counters, self.resets)
            check_nodes()
            if readers:
                check_readers(recording)
        finally:
            if collects:
                gc.enable()
        return recording

    def events(self) -> list[dict[str, Any]]:
        """Check the books and return the public events."""
        self.check()
        return mlxmem.events()

    def allocs(self) -> list[dict[str, Any]]:
        """Check the books and return the public events that are allocations."""
        names = {action.name for action in ALLOCS}
        return [event for event in self.events() if event["action"] in names]
