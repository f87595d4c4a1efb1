"""A recording as PyTorch's memory snapshot, and the file that its viewer opens.

The format is the one of `torch.cuda.memory._snapshot()`. Two programs read it:
`_memory_viz.py` in the torch wheel and the web viewer (MemoryViz.js). They differ in
what they accept; comments here name the reader that forces a choice.

How MLX's buffers map to it: every buffer is a segment of its own with one block, both
at the buffer's address. What existed before the first retained event is allocated by
extra entries at the start of the trace, so that a reader that adds up the entries
has the right total at every event.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import pickle
import re
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from mlxmem.events import (
    Action,
    Frame,
    Recording,
    Records,
    Setting,
    State,
    no_collector,
    primitive_ids,
)
from mlxmem.ledger import ABSENT, BEFORE, LOST, Ledger

Entry = dict[str, Any]

BEFORE_ENABLE = "allocated before mlxmem.enable()"
BEFORE_TRACE = "allocated before mlxmem.enable() or before the oldest kept event"
NO_STACK = "no Python stack: made on another thread, or while not recording"
NO_STACKS = "no Python stack: recorded with stacks=False"
LEAF = "leaf array"  # category of arrays that no primitive computes
UNKNOWN = "unknown"
LOST_FRAMES = "an event that is missing in the recording"
BEFORE_ACTION = "Before"  # action in the metadata of the extra entries at the start
LOST_ACTION = "Lost"  # action of entries put in where the events do not follow

_PROTOCOL = 4  # the web viewer reads 2 to 4
_MAX_INT = 2**53 - 1  # JavaScript numbers are exact up to here
_LARGE = 1 << 20  # torch's small pool ends at 1 MiB
_SYNTHETIC_ALIGN = 1 << 30
_POOL = (0, 0)

# Plain ints for the loop over the events.
_REUSE = int(Action.AllocReuse)
_LAST_ALLOC = int(Action.AllocMakeBuffer)
_TO_CACHE = int(Action.FreeActiveToCache)
_LAST_FREE = int(Action.Release)
_SKIP = len(Action)  # an event without entries

# Both readers hide frames whose name or file name contains one of these.
_HIDDEN_NAMES = re.compile(
    "unwind::unwind|CapturedTraceback::gather|gather_with_cpp|_start|"
    "PyEval_|PyObject_|PyFunction_"
)
_HIDDEN_FILES = re.compile(
    r"core/boxing|/Register|/Redispatch|pythonrun\.c|Modules/main\.c|Objects/call\.c|"
    r"Objects/methodobject\.c|pycore_ceval\.h|ceval\.c|cpython/abstract\.h"
)
_ZERO_WIDTH_SPACE = "\u200b"


def build(recording: Recording) -> dict[str, Any]:
    """Build the snapshot of a recording.

    Parameters
    ----------
    recording : Recording

    Returns
    -------
    dict
        `segments`, `device_traces` (one device), `allocator_settings` and
        `external_annotations`. Sizes in bytes, times in microseconds since the Unix
        epoch, frames innermost first. Holds only dict, list, tuple, str, int, float,
        bool and None. Equal stacks share one list: treat it as read-only.

    Notes
    -----
    An entry's `size` is the requested size for allocations and frees and the buffer's
    size for segments; where they differ, `user_metadata` has `buffer_size`. Buffers
    of 0 bytes appear only as a count in `allocator_settings`, since a segment without
    extent is found by no reader.
    """
    with no_collector():
        return _Builder(recording).build()


def write(snapshot: Mapping[str, Any], path: str | os.PathLike[str]) -> pathlib.Path:
    """Pickle a snapshot, so that no half-written file is ever at `path`.

    Parameters
    ----------
    snapshot : mapping
        What `build` returned.
    path : str or path-like
        The target; it is replaced if it exists. A device or pipe is written to.

    Returns
    -------
    pathlib.Path
        `path`.

    Raises
    ------
    TypeError
        `path` is no path.
    OSError
        The file can't be written; whatever was at `path` is untouched.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path must be a str or path-like, not {path!r}")
    target = pathlib.Path(path)
    real = pathlib.Path(os.path.realpath(target))  # a link keeps pointing there
    with contextlib.suppress(FileNotFoundError):
        mode = real.stat().st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(f"path is a directory: {str(target)!r}")
        if not stat.S_ISREG(mode):
            # A rename would put a plain file in the place of /dev/null.
            with open(real, "wb") as file:
                pickle.dump(snapshot, file, _PROTOCOL)
            return target
    temporary = real.with_name(f".{real.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with open(temporary, "xb") as file:
            pickle.dump(snapshot, file, _PROTOCOL)
        os.replace(temporary, real)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    return target


class _Frames:
    """Stacks as the readers want them, one object per distinct stack."""

    def __init__(self, resolve: Callable[[int], list[Frame] | None]) -> None:
        self._resolve = resolve
        self._frames: dict[Frame, Entry] = {}
        self._stacks: dict[tuple[Frame, ...], list[Entry]] = {}

    def stack(self, traceback_id: int) -> list[Entry] | None:
        """Return the frames of an id, innermost first, or None."""
        frames = self._resolve(traceback_id) if traceback_id else None
        if not frames:
            return None
        key = tuple(frames)
        known = self._stacks.get(key)
        if known is None:
            known = [self._frame(frame) for frame in reversed(key)]
            self._stacks[key] = known
        return known

    def label(self, text: str) -> list[Entry]:
        """Return a stack of one frame that says why there is no real one."""
        frame = ("mlxmem", text, 0)
        return self._stacks.setdefault((frame,), [self._frame(frame)])

    def _frame(self, frame: Frame) -> Entry:
        known = self._frames.get(frame)
        if known is None:
            filename, name, line = frame
            known = self._frames[frame] = {
                "name": _HIDDEN_NAMES.sub(_unhide, _text(name)),
                "filename": _HIDDEN_FILES.sub(_unhide, _text(filename)),
                "line": int(line),
            }
        return known


def _unhide(match: re.Match[str]) -> str:
    # Looks the same in the viewer, but its filter does not find it any more.
    return match[0][0] + _ZERO_WIDTH_SPACE + match[0][1:]


def _text(text: str) -> str:
    """Make a string that UTF-8 can encode and that stays on its line."""
    text = text.replace("\r", "\\r").replace("\n", "\\n")
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _setting(value: Setting) -> Setting:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, (float, np.floating)):
        return float(value)
    number = int(value)
    return number if abs(number) <= _MAX_INT else str(number)


def _small_int(value: int) -> int:
    return min(int(value), _MAX_INT)


class _Builder:
    """One snapshot in the making."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.ledger = Ledger(recording)
        self.frames = _Frames(recording.resolve)
        self.primitives = [_text(name) for name in recording.primitives]
        self.trace: list[Entry] = []
        self.segments: list[Entry] = []
        # Ids without a stack mean "before" only as long as nothing was dropped.
        self.before = self.frames.label(BEFORE_ENABLE)
        self.dropped = self.frames.label(BEFORE_TRACE) if recording.dropped else None
        used = np.any(recording.events["traceback_id"]) or np.any(
            recording.buffers["traceback_id"]
        )
        self.no_stack = self.frames.label(NO_STACK if used else NO_STACKS)
        self.lost = self.frames.label(LOST_FRAMES)
        self._stacks: dict[int, list[Entry] | None] = {0: None}
        self._metadata: dict[tuple[int | str, int, int, int, int], Entry] = {}
        self._synthetic = self._first_synthetic_address()

    def build(self) -> dict[str, Any]:
        recording, ledger = self.recording, self.ledger
        events = recording.events
        self._add_before()
        columns = self._columns()
        done = 0
        for index in ledger.broken.tolist():
            self._add_events(itertools.islice(columns, index - done))
            self._add_implied(index)
            done = index
        self._add_events(columns)
        self._add_segments()
        self._name_unknown()
        settings = {_text(k): _setting(v) for k, v in recording.settings.items()}
        empty = (events["size"] == 0) & (events["action"] <= Action.AllocMakeBuffer)
        settings |= {
            "trace_alloc_overflowed": recording.dropped > 0,
            "trace_alloc_max_entries": _small_int(recording.max_entries),
            "trace_alloc_dropped": _small_int(recording.dropped),
            "zero_byte_allocs": int(np.count_nonzero(empty)),
            "inconsistent_events": len(ledger.broken),
        }
        return {
            "segments": self.segments,
            "device_traces": [self.trace],
            "allocator_settings": settings,
            "external_annotations": [],
        }

    # What is there at the start.

    def _add_before(self) -> None:
        """Allocate what existed before the first retained event."""
        recording, ledger = self.recording, self.ledger
        start = recording.start_us
        if ledger.before_active:
            self._add_remainder(ledger.before_active, State.Active, start)
        if ledger.before_cache_left:
            self._add_remainder(ledger.before_cache_left, State.Cached, start)
        # A part of the cache that went to the OS needs a segment to be freed.
        self.chunks: dict[int, int] = {}
        for index in ledger.nameless.tolist():
            size = int(recording.events["size"][index])
            if size:
                self.chunks[index] = addr = self._synthetic_address(size)
                self._open(addr, size, size, State.Cached, start, self.before)

        buffers = ledger.initial
        buffers = buffers[buffers["size"] > 0]
        if recording.dropped and len(recording.events):
            latest = int(recording.events["timestamp_us"][0])
            times = np.minimum(buffers["timestamp_us"], latest)
        else:
            times = np.zeros(len(buffers), np.int64)
        order = np.argsort(times, kind="stable")
        for row, time in zip(
            _rows(buffers[order], len(self.primitives)),
            times[order].tolist(),
            strict=True,
        ):
            self._open(
                row.addr,
                row.size,
                row.requested,
                row.state,
                start + time,
                self._owned_stack(row.traceback, BEFORE),
                self._category(row.primitive, row.traceback),
                row.primitive,
                row.thread,
                row.stream,
            )

    def _add_remainder(self, size: int, state: State, time: int) -> None:
        addr = self._synthetic_address(size)
        self._open(addr, size, size, state, time, self.before)
        self._segment(addr, size, size, state, self.before, 0)

    def _open(
        self,
        addr: int,
        size: int,
        requested: int,
        state: int,
        time: int,
        frames: list[Entry],
        category: str = UNKNOWN,
        primitive: int = 0,
        thread: int = 0,
        stream: int = -1,
    ) -> None:
        """Add the entries that make a segment and, if it is active, its block."""
        entry = {
            "action": "segment_alloc",
            "addr": addr,
            "size": size,
            "stream": max(stream, 0),
            "time_us": time,
            "frames": frames,
            "user_metadata": self._meta(
                BEFORE_ACTION,
                primitive,
                thread,
                stream,
                size if requested != size else 0,
            ),
            "category": category,
            "pool_id": _POOL,
        }
        self.trace.append(entry)
        if state == State.Active:
            self.trace.append({**entry, "action": "alloc", "size": requested})

    def _first_synthetic_address(self) -> int:
        """Find an address above every real one."""
        end = 0
        for rows in (self.recording.events, self.recording.buffers):
            if len(rows):
                end = max(end, int((rows["addr"] + rows["size"]).max()))
        return (end // _SYNTHETIC_ALIGN + 2) * _SYNTHETIC_ALIGN

    def _synthetic_address(self, size: int) -> int:
        addr = self._synthetic
        self._synthetic += (size // _SYNTHETIC_ALIGN + 1) * _SYNTHETIC_ALIGN
        return addr

    # The events.

    def _columns(self) -> Iterator[tuple[Any, ...]]:
        """Return what the entries of each event are made of.

        Yields
        ------
        tuple
            action (or _SKIP), address, buffer size, requested size, stream, time,
            frames, metadata, category.
        """
        recording, ledger = self.recording, self.ledger
        events = recording.events
        # Frees show who allocated; where that is not in the trace, the free knows.
        source = np.where(ledger.owner >= 0, ledger.owner, np.arange(len(events)))
        size = events["size"]
        asked = np.minimum(events["requested_size"][source], size)
        ids = events["traceback_id"][source].astype(np.int64)
        primitive = primitive_ids(recording)[source].astype(np.int64)
        stream = events["stream"][source]

        addr = events["addr"].copy()
        for index, chunk in self.chunks.items():
            addr[index] = chunk
        action = np.where((size == 0) | (addr == 0), _SKIP, events["action"])

        frames = self._per_key(
            (ids, np.minimum(ledger.owner, 0)), lambda key: self._owned_stack(*key)
        )
        category = self._per_key(
            2 * primitive + (ids != 0), lambda key: self._category(key >> 1, key & 1)
        )
        meta = self._per_key(
            (events["action"], primitive, events["thread_id"], stream),
            lambda key: self._meta(*key),
        )
        for index in np.flatnonzero(asked != size).tolist():
            meta[index] = self._meta(
                int(events["action"][index]),
                int(primitive[index]),
                int(events["thread_id"][index]),
                int(stream[index]),
                int(size[index]),
            )
        return zip(
            action.tolist(),
            addr.tolist(),
            size.tolist(),
            asked.tolist(),
            np.maximum(stream, 0).tolist(),
            (events["timestamp_us"] + recording.start_us).tolist(),
            frames,
            meta,
            category,
            strict=True,
        )

    @staticmethod
    def _per_key(keys: Any, make: Callable[[Any], Any]) -> list[Any]:
        """Make one value per distinct key and return them in the keys' order."""
        if isinstance(keys, tuple):
            rows = list(zip(*(column.tolist() for column in keys), strict=True))
        else:
            rows = keys.tolist()
        made = {key: make(key) for key in set(rows)}
        return list(map(made.__getitem__, rows))

    def _add_events(self, columns: Iterator[tuple[Any, ...]]) -> None:
        """Add the entries of events, by the table of the seven actions."""
        add = self.trace.append
        for action, addr, size, asked, stream, time, frames, meta, category in columns:
            if action == _SKIP:
                continue
            entry = {
                "action": "alloc",
                "addr": addr,
                "size": asked,
                "stream": stream,
                "time_us": time,
                "frames": frames,
                "user_metadata": meta,
                "category": category,
                "pool_id": _POOL,
            }
            if action <= _LAST_ALLOC:
                if action != _REUSE:
                    segment = entry.copy()
                    segment["action"] = "segment_alloc"
                    segment["size"] = size
                    add(segment)
                add(entry)
                continue
            if action <= _LAST_FREE:
                # Never the one without the other, and nothing between them.
                entry["action"] = "free_requested"
                add(entry)
                entry = entry.copy()
                entry["action"] = "free_completed"
                add(entry)
                if action == _TO_CACHE:
                    continue
                entry = entry.copy()
            entry["action"] = "segment_free"
            entry["size"] = size
            add(entry)

    def _add_implied(self, index: int) -> None:
        """Add what must have happened before an event that does not follow.

        Without it an address would be allocated twice, and the viewer draws the
        first block for ever.
        """
        events, ledger = self.recording.events, self.ledger
        previous = int(ledger.previous[index])
        change = ledger.change(index)
        addr, time = change.addr, int(events["timestamp_us"][index])
        time += self.recording.start_us
        held, size = change.before, int(events["size"][previous])
        needed, new_size = change.needed, change.size
        if size == 0:
            held = ABSENT
        if new_size == 0:
            needed = ABSENT
        if held == State.Active and (needed != State.Active or size != new_size):
            asked = min(int(events["requested_size"][previous]), size)
            for action in ("free_requested", "free_completed"):
                self._add_plain(action, addr, asked, time)
            held = State.Cached
        if held != ABSENT and (needed == ABSENT or size != new_size):
            self._add_plain("segment_free", addr, size, time)
            held = ABSENT
        if held == ABSENT and needed != ABSENT:
            self._add_plain("segment_alloc", addr, new_size, time)
            held = State.Cached
        if held == State.Cached and needed == State.Active:
            asked = min(int(events["requested_size"][index]), new_size)
            self._add_plain("alloc", addr, asked, time)

    def _add_plain(self, action: str, addr: int, size: int, time: int) -> None:
        self.trace.append(
            {
                "action": action,
                "addr": addr,
                "size": size,
                "stream": 0,
                "time_us": time,
                "frames": self.lost,
                "user_metadata": self._meta(LOST_ACTION, 0, 0, -1),
                "category": UNKNOWN,
                "pool_id": _POOL,
            }
        )

    # What is there at the end.

    def _add_segments(self) -> None:
        """Add the segments of the buffers known by address, lowest first."""
        ledger = self.ledger
        order = np.argsort(ledger.final["addr"], kind="stable")
        order = order[ledger.final["size"][order] > 0]
        order = order[ledger.final["addr"][order] > 0]
        owners = ledger.final_owner[order].tolist()
        for row, owner in zip(
            _rows(ledger.final[order], len(self.primitives)), owners, strict=True
        ):
            self._segment(
                row.addr,
                row.size,
                row.requested,
                row.state,
                self._owned_stack(row.traceback, owner),
                max(row.stream, 0),
            )

    def _segment(
        self,
        addr: int,
        size: int,
        requested: int,
        state: int,
        frames: list[Entry],
        stream: int,
    ) -> None:
        active = state == State.Active
        # A cached block counts as whole, or the flame graphs would lose its frames.
        block = {
            "address": addr,
            "size": size,
            "requested_size": requested if active else size,
            "state": "active_allocated" if active else "inactive",
            "frames": frames,
        }
        self.segments.append(
            {
                "device": 0,
                "address": addr,
                "total_size": size,
                "allocated_size": size if active else 0,
                "active_size": size if active else 0,
                "requested_size": requested if active else 0,
                "stream": stream,
                "segment_type": "large" if size > _LARGE else "small",
                "segment_pool_id": _POOL,
                "is_expandable": False,
                "frames": frames,
                "blocks": [block],
            }
        )

    def _name_unknown(self) -> None:
        """Make sure that one entry has the category that the web viewer needs."""
        trace = self.trace
        if trace and all(entry["category"] != UNKNOWN for entry in trace):
            trace[0]["category"] = UNKNOWN

    # Shared objects, which the pickle then stores once.

    def _stack(self, traceback_id: int) -> list[Entry] | None:
        try:
            return self._stacks[traceback_id]
        except KeyError:
            stack = self._stacks[traceback_id] = self.frames.stack(traceback_id)
            return stack

    def _owned_stack(self, traceback_id: int, owner: int) -> list[Entry]:
        """Return the frames of an id, or the reason why it has none."""
        stack = self._stack(traceback_id)
        if stack is not None:
            return stack
        if owner == LOST:
            return self.lost
        return (self.dropped or self.before) if owner < 0 else self.no_stack

    def _category(self, primitive: int, traceback_id: int) -> str:
        # Scratch memory of worker threads has neither primitive nor stack.
        if primitive:
            return self.primitives[primitive]
        return LEAF if traceback_id else UNKNOWN

    def _meta(
        self,
        action: int | str,
        primitive: int,
        thread: int,
        stream: int,
        buffer_size: int = 0,
    ) -> Entry:
        key = (action, primitive, thread, stream, buffer_size)
        meta = self._metadata.get(key)
        if meta is None:
            name = action if isinstance(action, str) else Action(action).name
            meta = self._metadata[key] = {
                "action": name,
                "primitive": self.primitives[primitive],
                "thread": thread,
                "stream": stream,
            }
            if buffer_size:
                meta["buffer_size"] = buffer_size
        return meta


class _Row(NamedTuple):
    """One known buffer as plain Python numbers."""

    addr: int
    size: int
    requested: int
    traceback: int
    primitive: int
    state: int
    thread: int
    stream: int


def _rows(buffers: Records, primitives: int) -> Iterator[_Row]:
    primitive = buffers["primitive_id"]
    size = buffers["size"]
    columns = (
        buffers["addr"],
        size,
        np.minimum(buffers["requested_size"], size),
        buffers["traceback_id"],
        np.where(primitive < primitives, primitive, 0),
        buffers["state"],
        buffers["thread_id"],
        buffers["stream"],
    )
    return map(_Row._make, zip(*(c.tolist() for c in columns), strict=True))
