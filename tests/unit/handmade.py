"""Recordings made by hand: a small allocator that writes down what it does.

`Heap` hands out addresses as malloc does, so that they come back with other sizes,
and keeps its own totals, apart from the ledger. `heaps()` draws random sound ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import settings, strategies as st

from mlxmem.events import RAW_BUFFER, RAW_EVENT, Action, Frame, Recording

# For @given tests: machines are shared, so no deadline.
quick = settings(deadline=None, max_examples=60)

PRIMITIVES = ("", "Matmul", "Add", "Reshape")
START_US = 1_750_000_000_000_000
BASE = 0x7F00_0000_0000
THREAD = 4711


def deep_stack(depth: int) -> list[Frame]:
    """Return a recursion, outermost first."""
    return [("/app/deep.py", "dive", 10 + level) for level in range(depth)]


# Indexed by traceback id - 1, outermost first. 4 and 5 are equal on purpose, and 3
# has names that the readers of snapshots hide.
STACKS: list[list[Frame]] = [
    [("/app/train.py", "<module>", 40), ("/app/model.py", "Block.__call__", 12)],
    [("/app/train.py", "<module>", 41)],
    [
        ("/app/Registers/ceval.c.py", "on_start", 3),
        ("/app/hooks.py", "PyEval_like.PyObject_PyFunction_", 9),
        ("/app/odd\nname;\udc80.py", "f", 1),
    ],
    [("/app/train.py", "<module>", 50), ("/app/data.py", "batches.<locals>.get", 7)],
    [("/app/train.py", "<module>", 50), ("/app/data.py", "batches.<locals>.get", 7)],
    deep_stack(32),
]


def resolve(traceback_id: int) -> list[Frame] | None:
    """Return the frames of an id of `STACKS`."""
    return list(STACKS[traceback_id - 1]) if traceback_id else None


@dataclass
class Buffer:
    """One buffer of a `Heap`."""

    size: int
    requested: int
    cached: bool = False
    stack: int = 0
    primitive: int = 0
    stream: int = -1
    thread: int = 0
    last: int = -1  # its last event


class Heap:
    """An allocator with a cache that records its events.

    Parameters
    ----------
    active, cached : int
        Bytes from before recording whose addresses no event will name.
    """

    backend = "cpu"

    def __init__(self, active: int = 0, cached: int = 0) -> None:
        self.nameless_active = active
        self.nameless_cache = cached
        self.buffers: dict[int, Buffer] = {}
        self.rows: list[dict[str, int]] = []
        self.curve: list[tuple[int, int]] = []  # (active, cache) after each event
        self.peak = 0
        self.start = (0, 0)
        self._recording = False

    def totals(self) -> tuple[int, int]:
        """Return active and cache, bytes."""
        active, cache = self.nameless_active, self.nameless_cache
        for buffer in self.buffers.values():
            if buffer.cached:
                cache += buffer.size
            else:
                active += buffer.size
        return active, cache

    def existing(self, size: int, cached: bool = False) -> int:
        """Make a buffer from before recording, and return its address."""
        assert not self.rows
        addr = self._place(size)
        self.buffers[addr] = Buffer(size, size, cached)
        return addr

    def new(
        self,
        size: int,
        *,
        requested: int | None = None,
        action: Action = Action.AllocNew,
        **owner: Any,
    ) -> int:
        """Get a buffer from the OS (or a foreign owner), and return its address."""
        addr = self._place(size)
        asked = size if requested is None else requested
        self.buffers[addr] = Buffer(size, asked, **{"thread": THREAD} | owner)
        self._record(action, addr)
        return addr

    def reuse(self, addr: int, requested: int | None = None, **owner: Any) -> int:
        """Hand a cached buffer out again."""
        size = self.buffers[addr].size
        assert self.buffers[addr].cached
        asked = size if requested is None else requested
        self.buffers[addr] = Buffer(size, asked, **{"thread": THREAD} | owner)
        self._record(Action.AllocReuse, addr)
        return addr

    def free(self, addr: int, action: Action = Action.FreeActiveToCache) -> None:
        """Free an active buffer, or return a cached one to the OS."""
        self._record(action, addr)

    def trim(self, addr: int) -> None:
        """Return a cached buffer to the OS."""
        self._record(Action.FreeCacheToOS, addr)

    def trim_nameless(self, size: int) -> None:
        """Return bytes to the OS that were cached before recording."""
        assert size <= self.nameless_cache
        self._begin()
        self.nameless_cache -= size
        self._append(Action.FreeCacheToOS, 0, Buffer(size, size))

    def recording(self, max_entries: int = 0, **changes: Any) -> Recording:
        """Return the recording, of the last `max_entries` events if not 0."""
        self._begin()
        rows = [tuple(row[name] for name in RAW_EVENT.names or ()) for row in self.rows]
        dropped = max(len(rows) - max_entries, 0) if max_entries else 0
        old = [
            (
                addr,
                b.size,
                b.requested,
                self.rows[b.last]["timestamp_us"],
                b.stack,
                b.primitive,
                int(b.cached),
                0,
                b.stream,
                b.thread,
            )
            for addr, b in self.buffers.items()
            if 0 <= b.last < dropped
        ]
        active, cache = self.totals()
        fields: dict[str, Any] = {
            "events": np.array(rows[dropped:], RAW_EVENT),
            "buffers": np.array(old, RAW_BUFFER),
            "primitives": PRIMITIVES,
            "active": active,
            "cache": cache,
            "peak": self.peak,
            "active_at_enable": self.start[0],
            "cache_at_enable": self.start[1],
            "peak_at_enable": self.start[0],
            "start_us": START_US,
            "dropped": dropped,
            "max_entries": max_entries,
            "resolve": resolve,
            "settings": {"backend": self.backend, "mlx_version": "0.0"},
        }
        return Recording(**{**fields, **changes})

    def _begin(self) -> None:
        if not self._recording:
            self._recording = True
            self.start = self.totals()
            self.peak = self.start[0]

    def _place(self, size: int) -> int:
        """Find the lowest gap, as malloc might: addresses come back."""
        addr = BASE
        for other in sorted(self.buffers):
            if addr + size + 16 <= other:
                break
            addr = max(addr, other + self.buffers[other].size + 16)
        return addr

    def _record(self, action: Action, addr: int) -> None:
        buffer = self.buffers[addr]
        if not self._recording:
            # The new buffer is no part of the start.
            if action <= Action.AllocMakeBuffer:
                fresh = self.buffers.pop(addr)
                if action is Action.AllocReuse:
                    self.buffers[addr] = Buffer(fresh.size, fresh.size, cached=True)
                self._begin()
                self.buffers[addr] = fresh
            self._begin()
        if action is Action.FreeActiveToCache:
            assert not buffer.cached
            buffer.cached = True
        elif action is Action.FreeCacheToOS:
            assert buffer.cached
            del self.buffers[addr]
        elif action >= Action.FreeActiveToOS:
            assert not buffer.cached
            del self.buffers[addr]
        buffer.last = len(self.rows)
        self._append(action, addr, buffer)

    def _append(self, action: Action, addr: int, buffer: Buffer) -> None:
        free = action >= Action.FreeActiveToCache
        self.rows.append(
            {
                "addr": addr,
                "size": buffer.size,
                "requested_size": buffer.requested,
                "timestamp_us": 10 * len(self.rows),
                "traceback_id": buffer.stack,
                "primitive_id": buffer.primitive,
                "action": int(action),
                "after_look": 0,
                "stream": -1 if free else buffer.stream,
                "thread_id": THREAD + 1 if free else buffer.thread,
            }
        )
        totals = self.totals()
        self.curve.append(totals)
        self.peak = max(self.peak, totals[0])


class PointerHeap(Heap):
    """A heap whose addresses are those of small objects that describe buffers.

    So it is on CUDA: the bytes behind an address are not the buffer's, and an address
    comes back at once, for whatever size.
    """

    backend = "cuda"

    def _place(self, size: int) -> int:
        addr = BASE
        while addr in self.buffers:
            addr += 32
        return addr


def busy_heap(kind: type[Heap] = Heap) -> Heap:
    """Return a heap that went through everything a buffer can go through."""
    heap = kind(active=5_000_000, cached=70_000)
    old = heap.existing(3_000_000)
    old_cached = heap.existing(4_096, cached=True)
    idle = heap.existing(512, cached=True)
    weights = heap.new(2 << 20, stack=1)
    scratch = heap.new(100, primitive=1, stack=0, thread=99)
    product = heap.new(53_492, primitive=1, stack=1, stream=0)
    heap.free(scratch, Action.FreeActiveToOS)
    heap.free(old)
    heap.trim_nameless(20_000)
    heap.free(product)
    heap.reuse(product, requested=40_000, primitive=2, stack=3, stream=1)
    heap.reuse(old_cached, requested=4_000, primitive=3, stack=6, stream=1)
    empty = heap.new(0, stack=2)
    foreign = heap.new(8_192, action=Action.AllocMakeBuffer, stack=4)
    heap.free(empty, Action.FreeActiveToOS)
    heap.free(product)
    heap.free(foreign, Action.Release)
    heap.trim(idle)
    heap.trim(product)
    heap.new(64, stack=5)
    heap.free(weights)
    heap.new(1_000, primitive=1, stack=2, stream=0)
    return heap


@st.composite
def heaps(draw: st.DrawFn, kind: type[Heap] = Heap) -> Heap:
    """Draw a heap with a random sound history."""
    sizes = st.one_of(st.integers(0, 64), st.integers(0, 1 << 22))
    some = st.integers(0, 1 << 20) | st.just(0)
    heap = kind(active=draw(some), cached=draw(some))
    for _ in range(draw(st.integers(0, 4))):
        heap.existing(draw(sizes.filter(bool)), cached=draw(st.booleans()))
    for _ in range(draw(st.integers(0, 25))):
        live = [a for a, b in heap.buffers.items() if not b.cached]
        idle = [a for a, b in heap.buffers.items() if b.cached]
        choices = ["new", "new"]
        choices += ["free", "free"] * bool(live) + ["reuse", "trim"] * bool(idle)
        choices += ["nameless"] * bool(heap.nameless_cache)
        choice = draw(st.sampled_from(choices))
        owner = {}
        if choice in ("new", "reuse"):
            primitive = draw(st.integers(0, len(PRIMITIVES) - 1))
            owner = {
                "stack": draw(st.integers(0, len(STACKS))),
                "primitive": primitive,
                "stream": draw(st.integers(0, 2)) if primitive else -1,
            }
        if choice == "new":
            new = draw(st.sampled_from([Action.AllocNew, Action.AllocMakeBuffer]))
            heap.new(draw(sizes), action=new, **owner)
        elif choice == "free":
            addr = draw(st.sampled_from(live))
            frees = [Action.FreeActiveToOS, Action.Release]
            # A buffer of 0 bytes is never cached.
            frees += [Action.FreeActiveToCache] * 2 * bool(heap.buffers[addr].size)
            heap.free(addr, draw(st.sampled_from(frees)))
        elif choice == "reuse":
            addr = draw(st.sampled_from(idle))
            size = heap.buffers[addr].size
            heap.reuse(addr, requested=draw(st.integers(size // 2 + 1, size)), **owner)
        elif choice == "trim":
            heap.trim(draw(st.sampled_from(idle)))
        else:
            heap.trim_nameless(draw(st.integers(1, heap.nameless_cache)))
    return heap
