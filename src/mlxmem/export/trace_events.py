"""A trace for Perfetto and chrome://tracing: what memory did over time.

The format is Chrome's JSON "Trace Event Format". Times are microseconds since the
first entry; entries of a snapshot without times lie a microsecond apart.
"""

from __future__ import annotations

import gzip
import heapq
import json
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np

from mlxmem._version import __version__
from mlxmem.reports.grouping import line_of
from mlxmem.reports.history import UNKNOWN, History, Ints, Stack

LARGEST = 1000  # blocks that are slices, unless told otherwise

_MEMORY, _BLOCKS = 1, 2  # process ids: one track group each
_CHUNK = 10_000


def write(
    history: History,
    file: BinaryIO,
    *,
    largest: int = LARGEST,
    compress: bool = False,
) -> None:
    """Write counters, marks, ranges, settings, failures and the largest blocks.

    Crossings of the memory limit are among the marks.

    Parameters
    ----------
    history : History
    file : binary file
    largest : int
        How many blocks are slices; they lie in lanes, so that none overlap.
    compress : bool
        Whether to compress with gzip.
    """
    if not compress:
        _write(history, file, largest)
        return
    with gzip.GzipFile("", "wb", 5, file, mtime=0) as packed:
        _write(history, packed, largest)


def _write(history: History, file: Any, largest: int) -> None:
    clock = _Clock(history)
    file.write(b'{"displayTimeUnit":"ms","otherData":')
    about = {
        "exporter": f"mlxmem {__version__}",
        "name": history.name,
        "time": "microseconds" if clock.known else "entries, for want of times",
    }
    file.write(json.dumps(about).encode() + b',"traceEvents":[\n')
    separator = ""
    lines: list[str] = []
    for line in _events(history, clock, largest):
        lines.append(line)
        if len(lines) == _CHUNK:
            file.write((separator + ",\n".join(lines)).encode())
            separator, lines = ",\n", []
    if lines:
        file.write((separator + ",\n".join(lines)).encode())
    file.write(b"\n]}\n")


class _Clock:
    """Where on the time axis an entry or a moment lies."""

    def __init__(self, history: History) -> None:
        times = history.time_us
        self.known = bool(len(times)) and bool((times > 0).all())
        self.zero = int(times.min()) if self.known else 0
        self.entries: Ints = times - self.zero if self.known else np.arange(len(times))
        self._last = int(self.entries.max()) if len(times) else 0

    @property
    def end(self) -> int:
        return self._last

    def entry(self, at: int) -> int:
        """Return the time of entry `at`, or of the beginning or the end."""
        if at < 0:
            return 0
        return int(self.entries[at]) if at < len(self.entries) else self._last

    def moment(self, at: int, time_us: int) -> int:
        """Return the time of something between entries, not before the first one."""
        if self.known and time_us > 0:
            return max(time_us - self.zero, 0)
        return self.entry(at)


def _events(history: History, clock: _Clock, largest: int) -> Iterator[str]:
    yield from _names(history)
    yield from _counters(history, clock)
    yield from _nodes(history, clock)
    yield from _moments(history, clock)
    yield from _blocks(history, clock, largest)


def _names(history: History) -> Iterator[str]:
    for pid, name in ((_MEMORY, "MLX memory"), (_BLOCKS, "largest blocks")):
        yield _event("M", "process_name", pid=pid, args={"name": name})
        yield _event("M", "process_sort_index", pid=pid, args={"sort_index": pid})
    threads = {span.thread for span in history.spans}
    threads |= {mark.thread for mark in history.marks}
    threads |= {mark.thread for mark in history.crossings}
    threads |= {call.thread for call in history.calls}
    threads |= {oom.thread for oom in history.ooms}
    for thread in sorted(threads):
        label = {"name": f"thread {thread}"}
        yield _event("M", "thread_name", pid=_MEMORY, tid=thread, args=label)


def _counters(history: History, clock: _Clock) -> Iterator[str]:
    """Yield the bytes wherever they change; active and cache add up to reserved."""
    active, reserved = history.active, history.reserved
    first = history.start_active, history.start_reserved
    yield _memory(0, first[0], first[1] - first[0]) + ",\n" + _reserved(0, first[1])
    before_active = np.concatenate([[first[0]], active[:-1]])
    before_reserved = np.concatenate([[first[1]], reserved[:-1]])
    where = np.flatnonzero((active != before_active) | (reserved != before_reserved))
    rows = zip(
        clock.entries[where].tolist(),
        active[where].tolist(),
        reserved[where].tolist(),
        before_reserved[where].tolist(),
        strict=True,
    )
    for time, now_active, now_reserved, was_reserved in rows:
        yield _memory(time, now_active, now_reserved - now_active)
        if now_reserved != was_reserved:
            yield _reserved(time, now_reserved)


def _memory(time: int, active: int, cache: int) -> str:
    return (
        f'{{"ph":"C","name":"bytes","pid":{_MEMORY},"ts":{time},'
        f'"args":{{"active":{active},"cache":{cache}}}}}'
    )


def _reserved(time: int, reserved: int) -> str:
    return (
        f'{{"ph":"C","name":"reserved bytes","pid":{_MEMORY},"ts":{time},'
        f'"args":{{"reserved":{reserved}}}}}'
    )


def _nodes(history: History, clock: _Clock) -> Iterator[str]:
    for sample in history.nodes.samples if history.nodes else ():
        yield _event(
            "C",
            "array nodes",
            ts=clock.moment(sample.at, sample.time_us),
            args={
                "pending": sample.pending,
                "evaluated": sample.live - sample.pending,
            },
        )


def _moments(history: History, clock: _Clock) -> Iterator[str]:
    for mark in history.marks:
        time = clock.moment(mark.at, mark.time_us)
        yield _event("i", mark.name, tid=mark.thread, ts=time, s="p", cat="mark")
    for mark in history.crossings:
        yield _event(
            "i",
            mark.name,
            tid=mark.thread,
            ts=clock.moment(mark.at, mark.time_us),
            s="p",
            cat="limit",
            args={
                "active": history.active_after(mark.at - 1),
                "stack": _frames(history.made_by(mark.at - 1)),
            },
        )
    for span in history.spans:
        start = clock.moment(span.at, span.time_us)
        end = clock.moment(span.end_at, span.end_time_us)
        yield _event(
            "X",
            span.name,
            tid=span.thread,
            ts=start,
            dur=max(end - start, 0),
            cat="range",
            args={"path": "/".join(span.path), "open": span.open},
        )
    for call in history.calls:
        yield _event(
            "i",
            call.name,
            tid=call.thread,
            ts=clock.moment(call.at, call.time_us),
            s="p",
            cat="setting",
            args={
                "value": call.value,
                "previous": call.previous,
                "stack": _frames(call.stack),
            },
        )
    for oom in history.ooms:
        yield _event(
            "i",
            "out of memory",
            tid=oom.thread,
            ts=clock.moment(oom.at, oom.time_us),
            s="g",
            cat="oom",
            args={
                "size": oom.size,
                "free": oom.free,
                "primitive": oom.primitive,
                "message": oom.message,
                "stack": _frames(oom.stack),
            },
        )


def _blocks(history: History, clock: _Clock, largest: int) -> Iterator[str]:
    """Yield the largest blocks as slices, in lanes in which they don't overlap."""
    blocks = history.blocks
    order = np.argsort(-blocks["size"], kind="stable")[: max(largest, 0)]
    free_from: list[tuple[int, int]] = []  # end of the last slice of each lane
    lanes = 0
    for place in np.sort(order).tolist():
        block = blocks[place]
        start, end = int(block["start"]), int(block["end"])
        if free_from and free_from[0][0] <= start:
            lane = heapq.heappop(free_from)[1]
        else:
            lanes += 1
            lane = lanes
            yield _event(
                "M",
                "thread_name",
                pid=_BLOCKS,
                tid=lane,
                args={"name": f"lane {lane}"},
            )
        heapq.heappush(free_from, (end, lane))
        stack = history.stacks[block["stack"]]
        args = {
            "size": int(block["size"]),
            "requested": int(block["requested"]),
            "address": hex(block["addr"]),
            "primitive": history.primitives[block["primitive"]],
            "range": history.ranges[block["range"]],
            "module": history.modules[block["module"]],
            "action": history.actions[block["action"]],
            "stream": int(block["stream"]),
            "thread": int(block["thread"]),
            "stack": _frames(stack),
        }
        time = clock.entry(start)
        yield _event(
            "X",
            line_of(stack),
            pid=_BLOCKS,
            tid=lane,
            ts=time,
            dur=max(clock.entry(end) - time, 0),
            cat="block",
            args={k: v for k, v in args.items() if v not in ("", UNKNOWN)},
        )


def _frames(stack: Stack) -> str:
    return "\n".join(line_of(stack[at:]) for at in range(len(stack)))


def _event(phase: str, name: str, pid: int = _MEMORY, **fields: Any) -> str:
    event = {"ph": phase, "name": name, "pid": pid, **fields}
    return json.dumps(event, separators=(",", ":"))
