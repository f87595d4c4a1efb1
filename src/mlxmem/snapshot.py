"""A recording as PyTorch's memory snapshot, and the file that its viewer opens.

The format is the one of `torch.cuda.memory._snapshot()`. Two programs read it:
`_memory_viz.py` in the torch wheel and the web viewer (MemoryViz.js). They differ in
what they accept; comments here name the reader that forces a choice.

How MLX's buffers map to it: every buffer is a segment of its own with one block, both
at the buffer's address or, where that is not the memory's, at one that is made up (see
`address_ranges`). What existed before the first retained event is allocated by extra
entries at the start of the trace, so that a reader that adds up the entries has the
right total at every event.

Trace and segments are made as columns, some ten thousand rows at a time: `build`
turns them into dicts, `dump` into a file.
"""

from __future__ import annotations

import itertools
import os
import pathlib
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from mlxmem import _pickle_writer, dump_file
from mlxmem.address_ranges import shown_addresses
from mlxmem.events import (
    RAW_BUFFER,
    Action,
    OutOfMemory,
    Recording,
    Records,
    Setting,
    State,
    no_collector,
)
from mlxmem.extras import Extras
from mlxmem.frames import Entry, Frames, text
from mlxmem.ledger import ABSENT, BEFORE, LOST, Ledger
from mlxmem.tables import Rows, Shared, Table, keys_of, row_count, to_objects

Ints = npt.NDArray[np.integer[Any]]
Places = npt.NDArray[np.int32]

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
_CHUNK = 1 << 16  # events or buffers at a time: their rows take some 10 MB

# Entries by number. Segment entries, the last two, have the buffer's size and the
# others the requested one.
_KINDS = ["alloc", "free_requested", "free_completed", "segment_alloc", "segment_free"]
_ALLOC, _ASK, _FREE, _OPEN, _CLOSE = range(5)
_NONE = -1
# A free is never the one entry without the other, and nothing comes between them.
_OF_ACTION = np.array(
    [
        [_OPEN, _ALLOC, _NONE],  # AllocNew
        [_ALLOC, _NONE, _NONE],  # AllocReuse
        [_OPEN, _ALLOC, _NONE],  # AllocMakeBuffer
        [_ASK, _FREE, _NONE],  # FreeActiveToCache
        [_ASK, _FREE, _CLOSE],  # FreeActiveToOS
        [_ASK, _FREE, _CLOSE],  # Release
        [_CLOSE, _NONE, _NONE],  # FreeCacheToOS
    ],
    np.int32,
)
_OF_STATE = np.array([[_OPEN, _ALLOC], [_OPEN, _NONE]], np.int32)  # what makes it so

_ACTIONS = [*(action.name for action in Action), BEFORE_ACTION, LOST_ACTION]
_BEFORE, _LOST = len(Action), len(Action) + 1
_SEGMENT_TYPES = ["small", "large"]
_BLOCK_STATES = ["active_allocated", "inactive"]  # indexed by State
_REMAINDER = -3  # an owner beside BEFORE and LOST: not known by address


def build(recording: Recording) -> dict[str, Any]:
    """Build the snapshot of a recording.

    Parameters
    ----------
    recording : Recording

    Returns
    -------
    dict
        `segments`, `device_traces` (one device), `allocator_settings`,
        `external_annotations`, and `mlxmem` (see `extras`), which PyTorch's readers
        do not look at. Sizes in bytes, times in microseconds since the Unix
        epoch, frames innermost first. Holds only dict, list, tuple, str, int, float,
        bool and None. Equal stacks share one list: treat it as read-only.

    Notes
    -----
    An entry's `size` is the requested size for allocations and frees and the buffer's
    size for segments; where they differ, `user_metadata` has `buffer_size`. On CUDA
    and Metal, addresses are made up and say only which buffers are one. Buffers
    of 0 bytes appear only as a count in `allocator_settings`, since a segment without
    extent is found by no reader.
    """
    with no_collector():
        snapshot: dict[str, Any] = to_objects(_Builder(recording).build())
    return snapshot


def dump(recording: Recording, path: str | os.PathLike[str]) -> pathlib.Path:
    """Write `build(recording)` as a pickle without making its dicts.

    Shows on a terminal how far it is when it takes longer than a second.

    Parameters
    ----------
    recording : Recording
    path : str or path-like
        As for `write`.

    Returns
    -------
    pathlib.Path
        `path`.

    Raises
    ------
    TypeError, OSError
        As for `write`.
    """

    def fill(file: BinaryIO) -> None:
        with no_collector(), dump_file.Progress(path) as progress:
            builder = _Builder(recording)
            snapshot = builder.build()
            rows = (snapshot["segments"], *snapshot["device_traces"])
            progress.total = sum(part.count for part in rows)
            _pickle_writer.dump(
                snapshot, file.write, first=builder.common(), on_rows=progress.add
            )

    return dump_file.replace(path, fill)


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
    return dump_file.replace(
        path, lambda file: pickle.dump(snapshot, file, protocol=_PROTOCOL)
    )


def _setting(value: Setting) -> Setting:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return text(value)
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
        self._shown = shown_addresses(self.ledger)
        self.primitives = [text(name) for name in recording.primitives]
        frames = self._frames = Frames(recording.resolve)
        # Ids without a stack mean "before" only as long as nothing was dropped.
        before = frames.label(BEFORE_ENABLE)
        dropped = frames.label(BEFORE_TRACE) if recording.dropped else before
        self._no_stack = {
            0: frames.label(NO_STACK if recording.stacks else NO_STACKS),
            BEFORE: dropped,
            LOST: frames.label(LOST_FRAMES),
            _REMAINDER: before,
        }
        self._extras = Extras(recording, frames)
        self._stacks = _Made(self._stack)
        self._categories = _Made(self._category)
        self._metadata = _Made(self._meta)
        self._add_remainder()

    def build(self) -> dict[str, Any]:
        """Return the snapshot, with `Rows` for segments and trace."""
        recording, events = self.recording, self.recording.events
        settings = {text(k): _setting(v) for k, v in recording.settings.items()}
        empty = (events["size"] == 0) & (events["action"] <= Action.AllocMakeBuffer)
        settings |= {
            "trace_alloc_overflowed": recording.dropped > 0,
            "trace_alloc_max_entries": _small_int(recording.max_entries),
            "trace_alloc_dropped": _small_int(recording.dropped),
            "zero_byte_allocs": int(np.count_nonzero(empty)),
            "inconsistent_events": len(self.ledger.broken),
        }
        trace = self._trace()
        return {
            "segments": self._segments(),
            "device_traces": [trace],
            "allocator_settings": settings,
            "external_annotations": self._extras.annotations(),
            "mlxmem": self._extras.build(self._entry_of, self.ledger, self._shown),
        }

    def common(self) -> list[str | tuple[int, ...]]:
        """Return what the rows of a file mention most often."""
        nothing = np.empty(0, RAW_BUFFER)
        some = [
            *keys_of(self._before_table(nothing, _owners(nothing, BEFORE))),
            *keys_of(self._segment_table(nothing, _owners(nothing, BEFORE))),
            *_KINDS,
            *_BLOCK_STATES,
            *_SEGMENT_TYPES,
            *self.primitives[1:100],
        ]
        return [*dict.fromkeys(some), _POOL]

    def _trace(self) -> Rows:
        """Return the entries: what is there at the start, then the events."""
        ledger, events = self.ledger, self.recording.events
        buffers = _moved(ledger.initial, self._shown.initial)
        buffers = buffers[buffers["size"] > 0]
        if self.recording.dropped and len(events):
            latest = events["timestamp_us"][0]
            buffers["timestamp_us"] = np.minimum(buffers["timestamp_us"], latest)
        else:
            buffers["timestamp_us"] = 0
        buffers = buffers[np.argsort(buffers["timestamp_us"], kind="stable")]
        rows = np.concatenate([self._remainder, self._cached_parts, buffers])
        owner = _owners(rows, BEFORE)
        owner[: len(rows) - len(buffers)] = _REMAINDER
        implied = self._implied()

        shown = _OF_ACTION[events["action"]]
        shown[self._hidden()] = _NONE
        per_event = np.count_nonzero(shown != _NONE, axis=1)
        del shown
        for kinds in implied:
            per_event[ledger.broken] += np.count_nonzero(kinds != _NONE, axis=1)
        before = int(np.count_nonzero(_OF_STATE[rows["state"]] != _NONE))
        failed = [self._extras.event_of(oom.mark) for oom in self.recording.ooms]
        self._set_positions(before, per_event, failed)
        count = before + int(per_event.sum()) + len(failed)

        def tables() -> Iterator[Table]:
            for part in _parts(len(rows)):
                yield self._before_table(rows[part], owner[part])
            done = 0
            for number, stop in enumerate([*failed, len(events)]):
                for part in _parts(stop, done):
                    yield self._event_table(part, implied)
                done = stop
                if number < len(failed):
                    yield self._oom_table(self.recording.ooms[number])

        def with_unknown() -> Iterator[Table]:
            # The web viewer throws if entries have categories but none this one.
            missing = not self._is_any_unknown(rows, implied)
            for table in tables():
                if missing and row_count(table):
                    table["category"].index[0] = self._categories.place(0, 0)
                    missing = False
                yield table

        return Rows(count, with_unknown)

    def _set_positions(self, before: int, per_event: Ints, failed: list[int]) -> None:
        """Remember which entry comes first after so many events."""
        first = np.zeros(len(per_event) + 1, np.int64)
        np.cumsum(per_event, out=first[1:])
        self._first_entry = first + before
        for at in failed:
            self._first_entry[at + 1 :] += 1

    def _entry_of(self, event: int) -> int:
        return int(self._first_entry[event])

    def _segments(self) -> Rows:
        """Return the segments of the buffers known by address, lowest first."""
        known = self.ledger.final["addr"] > 0
        final = _moved(self.ledger.final, self._shown.final)
        order = np.argsort(final["addr"], kind="stable")
        order = order[(final["size"][order] > 0) & known[order]]
        rows = np.concatenate([self._remainder, final[order]])
        owner = np.concatenate(
            [_owners(self._remainder, _REMAINDER), self.ledger.final_owner[order]]
        )

        def tables() -> Iterator[Table]:
            for part in _parts(len(rows)):
                yield self._segment_table(rows[part], owner[part])

        return Rows(len(rows), tables)

    # What is not known by address.

    def _add_remainder(self) -> None:
        """Make buffers of what was there at addresses that no event names.

        A part of that cache that went to the OS needs a segment to be freed.
        """
        ledger, events = self.ledger, self.recording.events
        sizes = events["size"][ledger.nameless]
        self._nameless = ledger.nameless[sizes > 0]
        sizes = np.concatenate(
            [
                np.array([ledger.before_active, ledger.before_cache_left], np.uint64),
                sizes[sizes > 0],
            ]
        )
        rows = np.zeros(len(sizes), RAW_BUFFER)
        rows["size"] = rows["requested_size"] = sizes
        rows["state"][1:] = State.Cached
        rows["stream"] = -1
        rows = rows[sizes > 0]
        align = np.uint64(_SYNTHETIC_ALIGN)
        extent = (rows["size"] // align + np.uint64(1)) * align
        first = np.uint64(self._first_synthetic_address())
        rows["addr"] = first + np.cumsum(extent) - extent
        parts = len(self._nameless)
        self._remainder, self._cached_parts = np.split(rows, [len(rows) - parts])

    def _first_synthetic_address(self) -> int:
        """Find an address above every other one."""
        end = self._shown.end
        # No real address is that high.
        return min((end // _SYNTHETIC_ALIGN + 2) * _SYNTHETIC_ALIGN, 2**63)

    # Pieces of the trace.

    def _entries(
        self,
        kinds: Places,
        addr: Ints,
        size: Ints,
        asked: Ints,
        stream: Ints,
        time: Ints,
        frames: Places,
        meta: Places,
        category: Places,
    ) -> tuple[Table, Ints]:
        """Spread what is known of n events over their entries.

        Parameters
        ----------
        kinds : ndarray of int32, shape (n, at most so many entries of one)
            The entries of each, or _NONE.
        size, asked : ndarray, shape (n,)
            Bytes of the buffer, and those that were requested.
        others : ndarray, shape (n,)

        Returns
        -------
        table : Table
        which : ndarray of int64
            For each entry, which of the n it comes from.
        """
        which, slot = np.nonzero(kinds != _NONE)
        kind = kinds[which, slot]
        table = {
            "action": Shared(_KINDS, kind),
            "addr": addr[which],
            "size": np.where(kind >= _OPEN, size[which], asked[which]),
            "stream": np.maximum(stream, 0)[which],
            "time_us": time[which] + self.recording.start_us,
            "frames": Shared(self._stacks.objects, frames[which]),
            "user_metadata": Shared(self._metadata.objects, meta[which]),
            "category": Shared(self._categories.objects, category[which]),
            "pool_id": _POOL,
        }
        return table, which

    def _before_table(self, rows: Records, owner: Ints) -> Table:
        """Return the entries that make buffers that existed before the first event."""
        size = rows["size"]
        asked = np.minimum(rows["requested_size"], size)
        ids, primitive = rows["traceback_id"], self._primitive(rows)
        table, _ = self._entries(
            _OF_STATE[rows["state"]],
            rows["addr"],
            size,
            asked,
            rows["stream"],
            rows["timestamp_us"],
            self._stacks.places(ids, owner),
            self._metadata.places(
                np.full(len(rows), _BEFORE),
                primitive,
                rows["thread_id"],
                rows["stream"],
                np.where(asked != size, size, 0),
                self._extras.contexts(ids),
                np.zeros(len(rows), np.int64),
            ),
            self._categories.places(primitive, self._is_known(rows, owner)),
        )
        return table

    def _oom_table(self, oom: OutOfMemory) -> Table:
        """Return the one entry of an allocation that failed."""
        primitive = oom.primitive_id if oom.primitive_id < len(self.primitives) else 0
        stack = self._stacks.place(oom.traceback_id, 0)
        category = self._categories.place(primitive, int(oom.traceback_id > 0))
        one = np.zeros(1, np.int32)
        about = {
            "action": "oom",
            "primitive": self.primitives[primitive],
            "thread": oom.mark.thread_id,
            "active": oom.active,
            "cache": oom.cache,
        }
        return {
            "action": "oom",
            "size": np.array([oom.size], np.int64),
            "device_free": max(oom.free, 0),
            "stream": max(oom.stream, 0),
            "time_us": oom.mark.timestamp_us + self.recording.start_us,
            "frames": Shared(self._stacks.objects, one + stack),
            "user_metadata": Shared([about], one),
            "category": Shared(self._categories.objects, one + category),
            "pool_id": _POOL,
        }

    def _event_table(self, part: slice, implied: tuple[Places, Places]) -> Table:
        """Return the entries of some events, by the table of the seven actions."""
        events, owner = self.recording.events[part], self.ledger.owner[part]
        source = self._source(part)
        size = events["size"]
        asked = np.minimum(source["requested_size"], size)
        ids, primitive = source["traceback_id"], self._primitive(source)
        kinds = _OF_ACTION[events["action"]]
        kinds[self._hidden(part)] = _NONE
        addr = self._shown.events[part].copy()
        first, last = np.searchsorted(self._nameless, (part.start, part.stop))
        addr[self._nameless[first:last] - part.start] = self._cached_parts["addr"][
            first:last
        ]
        table, which = self._entries(
            kinds,
            addr,
            size,
            asked,
            source["stream"],
            events["timestamp_us"],
            self._stacks.places(ids, np.minimum(owner, 0)),
            self._metadata.places(
                events["action"],
                primitive,
                events["thread_id"],
                source["stream"],
                np.where(asked != size, size, 0),
                self._extras.contexts(ids),
                self._extras.during(part),
            ),
            self._categories.places(primitive, self._is_known(source, owner)),
        )
        first, last = np.searchsorted(self.ledger.broken, (part.start, part.stop))
        if first == last:
            return table
        broken = self.ledger.broken[first:last]
        closes, opens = (kinds[first:last] for kinds in implied)
        previous = self.ledger.previous[broken]
        before, of_before = self._lost_entries(closes, broken, previous)
        middle, of_middle = self._lost_entries(opens, broken, broken)
        place = 3 * np.concatenate(
            [broken[of_before], broken[of_middle], which + part.start]
        )
        place[len(of_before) :] += 1
        place[len(of_before) + len(of_middle) :] += 1
        return _merge((before, middle, table), np.argsort(place, kind="stable"))

    def _source(self, part: slice) -> Records:
        """Return the records that know whose the buffers of some events are."""
        # Frees show who allocated; where that is not in the trace, the free knows.
        owner = self.ledger.owner[part]
        here = np.arange(part.start, part.start + len(owner))
        return self.recording.events[np.where(owner >= 0, owner, here)]

    def _hidden(self, part: slice = slice(None)) -> npt.NDArray[np.bool_]:
        """Tell which events have no entries: empty buffers, and no address."""
        events = self.recording.events[part]
        hidden: npt.NDArray[np.bool_] = (events["size"] == 0) | (
            (events["addr"] == 0) & (events["action"] != Action.FreeCacheToOS)
        )
        return hidden

    # What the events leave out.

    def _implied(self) -> tuple[Places, Places]:
        """Find what must have happened before the events that do not follow.

        Without it an address would be allocated twice, and the viewer draws the
        first block for ever.

        Returns
        -------
        closes, opens : ndarray of int32, shape (len(ledger.broken), 3)
            Entries that end what the event before left, and that make what the
            event needs.
        """
        events, ledger = self.recording.events, self.ledger
        broken = ledger.broken
        previous = ledger.previous[broken]
        old, size = events["size"][previous], events["size"][broken]
        held = np.where(old > 0, ledger.leaves(previous), ABSENT)
        needed = np.where(size > 0, ledger.needs(broken), ABSENT)
        closes = np.full((len(broken), 3), _NONE, np.int32)
        opens = closes.copy()
        frees = (held == State.Active) & ((needed != State.Active) | (old != size))
        closes[frees, :2] = _ASK, _FREE
        held[frees] = State.Cached
        gone = (held != ABSENT) & ((needed == ABSENT) | (old != size))
        closes[gone, 2] = _CLOSE
        held[gone] = ABSENT
        comes = (held == ABSENT) & (needed != ABSENT)
        opens[comes, 0] = _OPEN
        held[comes] = State.Cached
        opens[(held == State.Cached) & (needed == State.Active), 1] = _ALLOC
        return closes, opens

    def _lost_entries(
        self, kinds: Places, index: Ints, sizes: Ints
    ) -> tuple[Table, Ints]:
        """Return entries before the events at `index`, of the buffers at `sizes`."""
        events = self.recording.events
        count = len(index)
        size = events["size"][sizes]
        return self._entries(
            kinds,
            self._shown.events[sizes],
            size,
            np.minimum(events["requested_size"][sizes], size),
            np.zeros(count, np.int32),
            events["timestamp_us"][index],
            np.full(count, self._stacks.place(0, LOST), np.int32),
            np.full(count, self._metadata.place(_LOST, 0, 0, -1, 0, 0, 0), np.int32),
            np.full(count, self._categories.place(0, 0), np.int32),
        )

    def _is_any_unknown(self, rows: Records, implied: tuple[Places, Places]) -> bool:
        if not np.all(self._is_known(rows, np.full(len(rows), BEFORE))):
            return True
        if any(np.any(kinds != _NONE) for kinds in implied):
            return True
        for part in _parts(len(self.recording.events)):
            known = self._is_known(self._source(part), self.ledger.owner[part])
            if not np.all((known > 0) | self._hidden(part)):
                return True
        return False

    # What is there at the end.

    def _segment_table(self, rows: Records, owner: Ints) -> Table:
        active = rows["state"] == State.Active
        size = rows["size"]
        asked = np.minimum(rows["requested_size"], size)
        frames = Shared(
            self._stacks.objects,
            self._stacks.places(rows["traceback_id"], np.minimum(owner, 0)),
        )
        active_size = np.where(active, size, 0)
        # A cached block counts as whole, or the flame graphs would lose its frames.
        block = {
            "address": rows["addr"],
            "size": size,
            "requested_size": np.where(active, asked, size),
            "state": Shared(_BLOCK_STATES, rows["state"].astype(np.int32)),
            "frames": frames,
        }
        return {
            "device": 0,
            "address": rows["addr"],
            "total_size": size,
            "allocated_size": active_size,
            "active_size": active_size,
            "requested_size": np.where(active, asked, 0),
            "stream": np.maximum(rows["stream"], 0),
            "segment_type": Shared(_SEGMENT_TYPES, (size > _LARGE).astype(np.int32)),
            "segment_pool_id": _POOL,
            "is_expandable": False,
            "frames": frames,
            "blocks": block,
        }

    # Objects that many rows share, which the file then stores once.

    def _primitive(self, rows: Records) -> Ints:
        """Return the primitive ids of records, 0 where the id has no name."""
        ids = rows["primitive_id"]
        return np.where(ids < len(self.primitives), ids, 0)

    def _stack(self, traceback_id: int, owner: int) -> list[Entry]:
        """Return the frames of an id, or the reason why it has none."""
        return self._frames.stack(traceback_id) or self._no_stack[owner]

    def _is_known(self, rows: Records, owner: Ints) -> npt.NDArray[np.uint8]:
        """Tell which records can have a category.

        Scratch memory of worker threads has neither primitive nor stack, nor has
        what existed before. Without stacks what no primitive made counts as a leaf.
        """
        known = (self._primitive(rows) > 0) | (rows["traceback_id"] > 0)
        if not self.recording.stacks:
            known |= owner >= 0
        return known.astype(np.uint8)

    def _category(self, primitive: int, known: int) -> str:
        if primitive:
            return self.primitives[primitive]
        return LEAF if known else UNKNOWN

    def _meta(
        self,
        action: int,
        primitive: int,
        thread: int,
        stream: int,
        buffer_size: int,
        context: int,
        during: int,
    ) -> Entry:
        meta = {
            "action": _ACTIONS[action],
            "primitive": self.primitives[primitive],
            "thread": thread,
            "stream": stream,
        }
        if buffer_size:
            meta["buffer_size"] = buffer_size
        return meta | self._extras.metadata(context, during)


class _Made:
    """Objects made once per key of integers, for `Shared` columns."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self.objects: list[Any] = []
        self._make = make
        self._places: dict[tuple[int, ...], int] = {}

    def place(self, *key: int) -> int:
        """Return where the object of a key is."""
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = len(self.objects)
            self.objects.append(self._make(*key))
        return place

    def places(self, *columns: npt.NDArray[Any]) -> Places:
        """Return where the object of each row is; columns have shape (n,)."""
        if not len(columns[0]):
            return np.empty(0, np.int32)
        codes, limit = _codes(columns)
        # Any row of each code will do.
        rows = np.full(limit, -1, np.int32)
        rows[codes] = np.arange(len(codes), dtype=np.int32)
        used = np.flatnonzero(rows >= 0)
        keys = list(zip(*(c[rows[used]].tolist() for c in columns), strict=True))
        new = list(itertools.filterfalse(self._places.__contains__, keys))
        self._places.update(zip(new, itertools.count(len(self.objects)), strict=False))
        self.objects.extend(itertools.starmap(self._make, new))
        rows[used] = list(map(self._places.__getitem__, keys))
        return rows[codes]


def _codes(columns: tuple[npt.NDArray[Any], ...]) -> tuple[Ints, int]:
    """Give equal rows equal numbers.

    Returns
    -------
    codes : ndarray of int64, shape (n,)
    limit : int
        One more than the highest code; a few times n at most.
    """
    count = len(columns[0])
    codes = np.zeros(count, np.int64)
    limit = 1
    for column in columns:
        low = column.min()
        span = int(column.max()) - int(low) + 1
        more = column - low
        if span > 4 * count + 1024:
            span, more = _rank(column)
        codes = codes * span + more.astype(np.int64)
        limit *= span
        if limit > 4 * count + 1024:
            limit, codes = _rank(codes)
    return codes, limit


def _rank(column: npt.NDArray[Any]) -> tuple[int, npt.NDArray[Any]]:
    values, codes = np.unique(column, return_inverse=True)
    return len(values), codes


def _moved(rows: Records, addr: Ints) -> Records:
    """Copy records, with other addresses."""
    rows = rows.copy()
    rows["addr"] = addr
    return rows


def _owners(rows: Records, owner: int) -> Ints:
    return np.full(len(rows), owner, np.int64)


def _parts(count: int, first: int = 0) -> Iterator[slice]:
    for start in range(first, count, _CHUNK):
        yield slice(start, min(start + _CHUNK, count))


def _merge(tables: tuple[Table, ...], order: Ints) -> Table:
    """Join tables of the same columns and sort their rows."""
    merged: dict[str, Any] = {}
    for key, column in tables[0].items():
        columns = [table[key] for table in tables]
        if isinstance(column, Shared):
            index = np.concatenate([c.index for c in columns])[order]
            merged[key] = Shared(column.objects, index)
        elif isinstance(column, np.ndarray):
            merged[key] = np.concatenate(columns)[order]
        else:
            merged[key] = column
    return merged
