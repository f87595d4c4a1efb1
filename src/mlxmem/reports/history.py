"""A snapshot as columns: the one thing that every report, export and view reads.

The axis is the entry of the trace, counted from 0; after entry `i` so many bytes are
active and reserved. A block is one allocation: it lives from the entry that made it
until the one that freed it. mlxmem's own snapshots name operation, thread, range and
module of each block; those of PyTorch are read as far as they have these.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mlxmem import _columns
from mlxmem.cache.start import CacheStart
from mlxmem.events import AllocatorTimes, no_collector
from mlxmem.frames import shown, text
from mlxmem.reports.reading import DAMAGE, SnapshotError, damaged, load

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Places = npt.NDArray[np.int32]
Entry = Mapping[str, Any]

_FILE = -(2**31)  # instead of a stream: the entry's own is right
_MOST_BYTES = 2**60
_MOST_TRAFFIC = 2**62  # of all entries together, so that no sum leaves 64 bits
_MOST_AFTER = 255  # events after a look, as in csrc/event.h
_MOST_FRAMES = 256  # of a stack; the outer ones of a deeper one are left out
BEGINNING = -1  # `start` of a block that is older than the trace
UNKNOWN = "unknown"

# What a trace entry does; torch's other actions are `_OTHER`.
KINDS = (
    "alloc",
    "free_requested",
    "free_completed",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
    "oom",
)
_ALLOC, _ASK, _FREE, _OPEN, _CLOSE, _MAP, _UNMAP, _OOM = range(len(KINDS))
_OTHER = len(KINDS)
_TO_RESERVED = np.array([0, 0, 0, 1, -1, 1, -1, 0, 0], np.int64)

BLOCK = np.dtype(
    [
        ("start", "i8"),  # entry that made it, BEGINNING if none did
        ("end", "i8"),  # entry that freed it, len(history) while it lives
        ("addr", "u8"),
        ("size", "i8"),  # of the buffer, bytes
        ("requested", "i8"),  # bytes
        ("visible", "i8"),  # of these, bytes that arrays show at the end; -1 = unknown
        ("stack", "i4"),  # these six: place in the lists of History
        ("primitive", "i4"),
        ("action", "i4"),
        ("range", "i4"),
        ("module", "i4"),
        ("freed_during", "i4"),  # of `ranges`: where the thread was that freed it
        ("stream", "i4"),
        ("thread", "i8"),  # of the operating system, 0 = not known
    ]
)


class Frame(NamedTuple):
    """One frame of a stack."""

    filename: str
    line: int
    function: str


Stack = tuple[Frame, ...]  # innermost first


class Mark(NamedTuple):
    """A named moment: before entry `at`; time in microseconds (Unix epoch)."""

    name: str
    at: int
    time_us: int
    thread: int


class Range(NamedTuple):
    """A named stretch of one thread's entries, [at, end_at)."""

    name: str
    path: tuple[str, ...]
    at: int
    end_at: int
    time_us: int
    end_time_us: int
    thread: int
    open: bool


class Oom(NamedTuple):
    """An allocation that failed; bytes, `free` and `active` -1 where not known."""

    at: int
    time_us: int
    thread: int
    size: int
    free: int
    active: int
    cache: int
    stack: Stack
    primitive: str
    message: str


class Call(NamedTuple):
    """A call that changed a setting of MLX's allocator; bytes, None where none.

    It began before entry `from_at` and was over before entry `at`.
    """

    name: str
    at: int
    time_us: int
    thread: int
    value: int | None
    previous: int | None
    stack: Stack
    from_at: int


class NodeLine(NamedTuple):
    """Live array nodes that one stack made; pending ones are not evaluated."""

    stack: Stack
    range: str
    module: str
    live: int
    pending: int


class NodeSample(NamedTuple):
    """Totals of array nodes before entry `at`."""

    at: int
    time_us: int
    live: int
    pending: int


@dataclass(frozen=True)
class Nodes:
    """Live array nodes at the end, and their totals over time."""

    live: int
    pending: int
    lines: Sequence[NodeLine]
    samples: Sequence[NodeSample]


@dataclass(frozen=True)
class History:
    """What one device's memory did.

    Attributes
    ----------
    name : str
        File name or other label, for titles.
    source : str
        "mlxmem" or "torch".
    start_us : int
        When the recording began, microseconds since the Unix epoch; of the first
        entry where that is not known.
    device, devices : int
        Which device this is, and how many the snapshot has.
    time_us : ndarray of int64, shape (n,)
        Time of each entry, microseconds since the Unix epoch; 0 where unknown.
    kind : ndarray of uint8, shape (n,)
        Place in `KINDS`; len(KINDS) for other actions.
    addr : ndarray of uint64, shape (n,)
        Address of each entry's block or segment, 0 where it has none.
    size : ndarray of int64, shape (n,)
        Its bytes; those of the whole buffer where less was asked for.
    action : ndarray of int32, shape (n,)
        Place in `actions` of the event that each entry belongs to.
    active, reserved : ndarray of int64, shape (n,)
        Bytes after each entry.
    start_active, start_reserved : int
        Bytes before the first entry.
    blocks : ndarray of BLOCK
        In the order of `start`.
    stacks, primitives, actions, ranges, modules : sequence
        What the fields of a block count in; `actions` has those of `mlxmem.Action`,
        "Before" for what existed before the recording, or "alloc".
    marks, spans, ooms, calls : sequence of Mark, Range, Oom, Call
    crossings : sequence of Mark
        Where active rose above the memory limit: right after the entry that did it.
    times : AllocatorTimes or None
        What the allocator's calls take, None where that was not measured.
    nodes : Nodes or None
    settings : mapping
        `allocator_settings` of the snapshot.
    cache_at_start : CacheStart or None
        What was cached before the first entry; None where the file does not tell.
    looks : ndarray of int64, shape (n, 2)
        Entries that made a new buffer, and how many events of other threads came after
        MLX had looked into the cache for it.
    """

    name: str
    source: str
    device: int
    devices: int
    start_us: int
    time_us: Ints
    kind: npt.NDArray[np.uint8]
    addr: npt.NDArray[np.uint64]
    size: Ints
    action: Places
    active: Ints
    reserved: Ints
    start_active: int
    start_reserved: int
    blocks: npt.NDArray[np.void]
    stacks: Sequence[Stack]
    primitives: Sequence[str]
    actions: Sequence[str]
    ranges: Sequence[str]
    modules: Sequence[str]
    marks: Sequence[Mark] = ()
    spans: Sequence[Range] = ()
    ooms: Sequence[Oom] = ()
    calls: Sequence[Call] = ()
    crossings: Sequence[Mark] = ()
    times: AllocatorTimes | None = None
    nodes: Nodes | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    cache_at_start: CacheStart | None = None
    looks: Ints = field(default_factory=lambda: np.zeros((0, 2), np.int64))

    def __len__(self) -> int:
        """Return the number of entries."""
        return len(self.kind)

    @property
    def peak(self) -> int:
        """The highest active, bytes."""
        highest = int(self.active.max()) if len(self) else self.start_active
        return max(highest, self.start_active)

    @property
    def peak_at(self) -> int:
        """The first entry after which active is highest; BEGINNING if none is."""
        if not len(self) or self.start_active >= int(self.active.max()):
            return BEGINNING
        return int(self.active.argmax())

    @property
    def reserved_peak(self) -> int:
        """The highest reserved, bytes."""
        highest = int(self.reserved.max()) if len(self) else self.start_reserved
        return max(highest, self.start_reserved)

    @property
    def end(self) -> int:
        """The last entry, BEGINNING without any."""
        return len(self) - 1

    def active_after(self, at: int) -> int:
        """Return the active bytes after entry `at`."""
        return self.start_active if at < 0 else int(self.active[at])

    def reserved_after(self, at: int) -> int:
        """Return the reserved bytes after entry `at`."""
        return self.start_reserved if at < 0 else int(self.reserved[at])

    def cache_after(self, at: int) -> int:
        """Return the bytes that are reserved but not active after entry `at`."""
        return max(self.reserved_after(at) - self.active_after(at), 0)

    def time_after(self, at: int) -> int:
        """Return microseconds from the start to entry `at`; 0 before the first."""
        return int(self.time_us[at]) - self.start_us if at >= 0 else 0

    def live(self, at: int) -> Mask:
        """Tell which blocks live after entry `at`, shape (len(blocks),)."""
        mask: Mask = (self.blocks["start"] <= at) & (self.blocks["end"] > at)
        return mask

    def made_by(self, at: int) -> Stack:
        """Return the stack of the block that entry `at` made, () if it made none."""
        place = int(np.searchsorted(self.blocks["start"], at))
        if at < 0 or place == len(self.blocks) or self.blocks["start"][place] != at:
            return ()
        stack: Stack = self.stacks[self.blocks["stack"][place]]
        return stack

    @property
    def older(self) -> Mask:
        """Which blocks are older than the recording, shape (len(blocks),)."""
        older: Mask = self.blocks["start"] < 0
        if "Before" in self.actions:
            older |= self.blocks["action"] == self.actions.index("Before")
        return older

    @property
    def dropped(self) -> int:
        """How many events fell out of the ring; -1 = some, but not how many."""
        if "trace_alloc_dropped" in self.settings:
            return _as_int(self.settings["trace_alloc_dropped"])
        return -1 if self.settings.get("trace_alloc_overflowed") else 0


def read(path: str | os.PathLike[str], device: int | None = None) -> History:
    """Read a snapshot file.

    Parameters
    ----------
    path : str or path-like
    device : int, optional
        Which device; without it the first that has entries or segments.

    Returns
    -------
    History

    Raises
    ------
    SnapshotError
        The file is no snapshot, is damaged, or has no such device.
    """
    name = text(os.fspath(path))
    with no_collector():
        return from_snapshot(load(path), name=name, device=device)


def from_snapshot(
    snapshot: Entry, *, name: str = "now", device: int | None = None
) -> History:
    """Turn a snapshot dict, as `mlxmem.snapshot()` returns it, into columns.

    Parameters
    ----------
    snapshot : dict
    name : str
        For titles and errors.
    device : int, optional
        Which device; without it the first that has entries or segments.

    Returns
    -------
    History

    Raises
    ------
    SnapshotError
        The dict is no snapshot, or has no such device.
    """
    try:
        return _Reader(snapshot, name, device).history()
    except SnapshotError:
        raise
    except DAMAGE as error:
        raise damaged(name, error) from error


class _Reader:
    """One snapshot on its way into a History."""

    def __init__(self, snapshot: Entry, name: str, device: int | None) -> None:
        self.snapshot, self.name = snapshot, name
        traces, segments = snapshot["device_traces"], snapshot["segments"]
        used = {_as_int(segment["device"]) for segment in segments}
        self.devices = max([len(traces), *(number + 1 for number in used), 1])
        if device is None:
            used |= {number for number, trace in enumerate(traces) if trace}
            device = min(used, default=0)
        if not 0 <= device < self.devices:
            raise SnapshotError(
                f"{name}: it has no device {device}, only 0 to {self.devices - 1}"
            )
        self.device = device
        self.trace: list[Entry] = traces[device] if device < len(traces) else []
        self.segments = [s for s in segments if s["device"] == device]
        extra = snapshot.get("mlxmem")
        self.extra: Entry = extra if isinstance(extra, dict) else {}
        self.settings = _settings(snapshot.get("allocator_settings"))
        if "devices" in self.extra:
            self._choose_rank()
        self.stacks = _Distinct()

    def _choose_rank(self) -> None:
        """Take the device's part of what `mlxmem merge` put together."""
        self.extra = self.extra["devices"][self.device]
        if self.extra is None:
            raise SnapshotError(
                f"{self.name}: the file of rank {self.device} was not merged into it"
            )
        own = self.snapshot["allocator_settings"]["ranks"][self.device]
        self.settings |= _settings(own)

    def history(self) -> History:
        trace, count = self.trace, len(self.trace)
        kind = self._kinds()
        addr = _columns.numbers(trace, "addr", unsigned=True)
        size = _columns.numbers(trace, "size")
        time_us = _columns.numbers(trace, "time_us")
        own = _by_identity(trace, "user_metadata", _Metadata.read)
        meta, metas = own
        # The file's size is what was asked for; memory is taken by the buffer.
        buffer_size = np.array([m.buffer_size for m in metas] or [0], np.int64)[meta]
        real = np.where((buffer_size > 0) & (kind <= _FREE), buffer_size, size)

        blocks, starts, ends = self._blocks(kind, addr, real, size)
        made = starts >= 0
        source = np.where(made, starts, np.minimum(ends, count - 1))
        self._describe(blocks, source, made, own)
        left = self._left_over(blocks)
        blocks = np.concatenate([blocks, left])
        self._find_visible(blocks)
        blocks = blocks[np.argsort(blocks["start"], kind="stable")]

        start_active = int(blocks["size"][blocks["start"] < 0].sum())
        change = np.zeros(count, np.int64)
        begun = blocks["start"] >= 0
        np.add.at(change, blocks["start"][begun], blocks["size"][begun])
        over = blocks["end"] < count
        np.subtract.at(change, blocks["end"][over], blocks["size"][over])
        reserved = np.cumsum(_reserved_changes(kind, addr, real))
        total = sum(_as_int(segment["total_size"]) for segment in self.segments)
        start_reserved = total - (int(reserved[-1]) if count else 0)
        if size.size and int(size.min()) < 0:
            raise ValueError("a size is negative")
        if real.size and real.astype(float).sum() >= _MOST_TRAFFIC:
            raise ValueError("the sizes add up to more than could ever be moved")
        if int(np.abs(blocks["size"]).astype(float).sum()) >= _MOST_BYTES:
            raise ValueError("the sizes add up to more than any device has")
        start_us = self.extra.get("start_us", int(min(time_us, default=0)))
        if not -_MOST_TRAFFIC < _as_int(start_us) < _MOST_TRAFFIC:
            raise ValueError("start_us is out of range")
        return History(
            name=self.name,
            source="mlxmem" if "format" in self.extra else "torch",
            device=self.device,
            devices=self.devices,
            start_us=start_us,
            time_us=time_us,
            kind=kind,
            addr=addr,
            size=real,
            active=np.cumsum(change) + start_active,
            reserved=reserved + start_reserved,
            start_active=start_active,
            start_reserved=start_reserved,
            action=self._entry_actions,
            blocks=blocks,
            stacks=self.stacks.objects,
            primitives=self._primitives.objects,
            actions=self._actions.objects,
            ranges=self._ranges.objects,
            modules=self._modules.objects,
            marks=self._marks("marks"),
            spans=self._spans(),
            ooms=self._ooms(kind),
            calls=self._calls(),
            crossings=self._marks("crossings"),
            times=self._times(),
            nodes=self._nodes(),
            settings=self.settings,
            cache_at_start=self._cache_at_start(),
            looks=self._looks(),
        )

    def _kinds(self) -> npt.NDArray[np.uint8]:
        codes = {name: code for code, name in enumerate(KINDS)}
        index, names = _columns.distinct(self.trace, "action")
        if not all(isinstance(name, str) for name in names):
            raise TypeError("an entry has no action")
        return np.array([codes.get(name, _OTHER) for name in names] or [0], np.uint8)[
            index
        ]

    def _blocks(
        self, kind: npt.NDArray[np.uint8], addr: Any, real: Ints, asked: Ints
    ) -> tuple[npt.NDArray[np.void], Ints, Ints]:
        """Match each allocation with the entry that freed it.

        Returns
        -------
        blocks : ndarray of BLOCK
            With start, end, addr, size and requested.
        starts, ends : ndarray of int64
        """
        count = len(kind)
        entries = np.flatnonzero(kind <= _FREE)
        order = entries[np.argsort(addr[entries], kind="stable")]
        what, where = kind[order], addr[order]
        last = len(order)
        place = np.arange(last)
        follows = np.zeros(last, np.bool_)  # the next one is of the same address
        follows[:-1] = where[1:] == where[:-1]
        after = np.minimum(place + 1, max(last - 1, 0))
        # A request to free with its completion right behind it ends nothing itself.
        doubled = (what == _ASK) & follows & (what[after] == _FREE)
        ends_here = (what == _FREE) | ((what == _ASK) & ~doubled)

        alloc = np.flatnonzero(what == _ALLOC)
        stop = np.full(len(alloc), count, np.int64)
        next_place = after[alloc]
        has_next = follows[alloc]
        shifted = np.where(doubled[next_place], after[next_place], next_place)
        stop[has_next] = order[shifted[has_next]]
        used = np.zeros(last, np.bool_)
        used[shifted[has_next]] = True

        orphan = np.flatnonzero(ends_here & ~used)
        starts = np.concatenate(
            [order[alloc], np.full(len(orphan), BEGINNING, np.int64)]
        )
        ends = np.concatenate([stop, order[orphan]])
        at = np.concatenate([order[alloc], order[orphan]])
        blocks = np.zeros(len(starts), BLOCK)
        blocks["start"], blocks["end"] = starts, ends
        blocks["addr"], blocks["size"] = addr[at], real[at]
        blocks["requested"] = asked[at]
        return blocks, starts, ends

    def _describe(
        self,
        blocks: npt.NDArray[np.void],
        source: Ints,
        made: Mask,
        own: tuple[Places, list[_Metadata]],
    ) -> None:
        """Fill in whose the blocks are, from the entries at `source`."""
        meta, metas = own
        count = len(self.trace)
        frames, stacks = _by_identity(self.trace, "frames", _stack)
        names = np.array([self.stacks.place(s) for s in stacks] or [0], np.int32)
        before = self.stacks.place((Frame("", 0, "allocated before the recording"),))
        categories, words = _by_identity(self.trace, "category", _word)
        self._primitives, self._actions = _Distinct(), _Distinct()
        self._ranges, self._modules = _Distinct(), _Distinct()
        for first in (self._primitives, self._actions, self._ranges, self._modules):
            first.place(UNKNOWN if first is self._primitives else "")
        streams = _columns.numbers(self.trace, "stream")

        def column(values: Iterable[Any], seen: _Distinct) -> Places:
            return np.array([seen.place(v) for v in values] or [0], np.int32)

        primitive = column((word or UNKNOWN for word in words), self._primitives)
        action = column((m.action for m in metas), self._actions)
        self._entry_actions = action[meta]
        in_range = column((m.range for m in metas), self._ranges)
        module = column((m.module for m in metas), self._modules)
        thread = np.array([m.thread for m in metas] or [0], np.int64)
        if not count:
            return
        blocks["stack"] = np.where(made, names[frames[source]], before)
        blocks["primitive"] = primitive[categories[source]]
        blocks["action"] = action[meta[source]]
        blocks["range"] = in_range[meta[source]]
        blocks["module"] = module[meta[source]]
        over = blocks["end"] < count
        during = column((m.during for m in metas), self._ranges)
        blocks["freed_during"][over] = during[meta[blocks["end"][over]]]
        blocks["thread"] = np.where(made, thread[meta[source]], 0)
        # A free's stream is its allocation's, and -1 stands as 0 in the file.
        own_stream = np.array([m.stream for m in metas] or [_FILE], np.int64)
        own_stream = own_stream[meta[source]]
        blocks["stream"] = np.where(own_stream == _FILE, streams[source], own_stream)

    def _left_over(self, blocks: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
        """Return the live blocks of the segments that no entry made."""
        count = len(self.trace)
        open_now = set(blocks["addr"][blocks["end"] >= count].tolist())
        rows = []
        for segment in self.segments:
            address = _as_int(segment.get("address", 0))
            for block in segment["blocks"]:
                addr = _as_int(block.get("address", address))
                size = _as_int(block["size"])
                address = addr + size
                if not str(block["state"]).startswith("active") or addr in open_now:
                    continue
                row = np.zeros(1, BLOCK)
                row["start"], row["end"], row["addr"] = BEGINNING, count, addr
                row["size"] = size
                row["requested"] = _as_int(block.get("requested_size", size))
                row["stack"] = self.stacks.place(_stack(block.get("frames")))
                row["stream"] = _as_int(segment.get("stream", 0))
                rows.append(row)
        return np.concatenate(rows) if rows else np.zeros(0, BLOCK)

    def _marks(self, key: str) -> list[Mark]:
        count = len(self.trace)
        marks = [
            Mark(
                _word(mark["name"]),
                _as_int(mark["at"]),
                _as_int(mark["time_us"]),
                _as_int(mark["thread"]),
            )
            for mark in self.extra.get(key, ())
        ]
        return sorted(
            (mark._replace(at=min(max(mark.at, 0), count)) for mark in marks),
            key=lambda mark: mark.at,
        )

    def _spans(self) -> list[Range]:
        count = len(self.trace)
        spans = [
            Range(
                _word(span["name"]),
                tuple(_word(part) for part in span["path"]),
                _as_int(span["at"]),
                _as_int(span["end_at"]),
                _as_int(span["time_us"]),
                _as_int(span["end_time_us"]),
                _as_int(span["thread"]),
                bool(span["open"]),
            )
            for span in self.extra.get("ranges", ())
        ]
        return [
            span._replace(
                at=min(max(span.at, 0), count),
                end_at=min(max(span.end_at, span.at, 0), count),
            )
            for span in spans
        ]

    def _ooms(self, kind: npt.NDArray[np.uint8]) -> list[Oom]:
        if "ooms" in self.extra:
            return [
                Oom(
                    _as_int(oom["at"]),
                    _as_int(oom["time_us"]),
                    _as_int(oom["thread"]),
                    _as_int(oom["size"]),
                    _as_int(oom["free"]),
                    _as_int(oom["active"]),
                    _as_int(oom["cache"]),
                    _stack(oom["frames"]),
                    _word(oom["primitive"]),
                    _word(oom["name"]),
                )
                for oom in self.extra["ooms"]
            ]
        found = []
        for at in np.flatnonzero(kind == _OOM).tolist():
            entry = self.trace[at]
            found.append(
                Oom(
                    at,
                    _as_int(entry.get("time_us", 0)),
                    0,
                    _as_int(entry["size"]),
                    _as_int(entry.get("device_free", -1)),
                    -1,
                    -1,
                    _stack(entry.get("frames")),
                    UNKNOWN,
                    "",
                )
            )
        return found

    def _calls(self) -> list[Call]:
        count = len(self.trace)
        calls = [
            Call(
                _word(call["name"]),
                _as_int(call["at"]),
                _as_int(call["time_us"]),
                _as_int(call["thread"]),
                None if call["value"] is None else _as_int(call["value"]),
                None if call["previous"] is None else _as_int(call["previous"]),
                _stack(call["frames"]),
                _as_int(call.get("from_at", call["at"])),
            )
            for call in self.extra.get("calls", ())
        ]
        for call in calls:
            for number in (call.value, call.previous):
                if number is not None and not 0 <= number < 2**64:
                    raise ValueError(f"{call.name} has a value out of range")
        return [
            call._replace(
                at=min(max(call.at, 0), count),
                from_at=min(max(call.from_at, 0), max(call.at, 0), count),
            )
            for call in calls
        ]

    def _times(self) -> AllocatorTimes | None:
        times = self.extra.get("times")
        if not isinstance(times, dict):
            return None
        names = [field.name for field in fields(AllocatorTimes)]
        return AllocatorTimes(**{name: _as_int(times[name]) for name in names})

    def _cache_at_start(self) -> CacheStart | None:
        start = self.extra.get("cache_at_start")
        if not isinstance(start, dict):
            return None
        addresses = [_as_int(value) for value in start["addresses"]]
        sizes = [_as_int(value) for value in start["sizes"]]
        if len(addresses) != len(sizes):
            raise ValueError("cache_at_start names more or fewer buffers than sizes")
        unknown = _as_int(start["unknown"])
        if min([unknown, *(size - 1 for size in sizes)], default=0) < 0:
            raise ValueError("a size in cache_at_start is negative")
        if sum(sizes) + unknown >= _MOST_BYTES:
            raise ValueError("cache_at_start has more than any device")
        return CacheStart(
            np.array(addresses, np.uint64),
            np.array(sizes, np.int64),
            unknown,
        )

    def _looks(self) -> Ints:
        looks = self.extra.get("looks", {"at": [], "after": []})
        at, after = ([_as_int(value) for value in looks[k]] for k in ("at", "after"))
        if len(at) != len(after):
            raise ValueError("looks names more or fewer entries than events after them")
        if min([*at, *after], default=0) < 0 or max(after, default=0) > _MOST_AFTER:
            raise ValueError("a number in looks is out of range")
        if max(at, default=0) >= _MOST_BYTES:
            raise ValueError("a number in looks is out of range")
        return np.stack([np.array(at, np.int64), np.array(after, np.int64)], axis=1)

    def _find_visible(self, blocks: npt.NDArray[np.void]) -> None:
        """Fill in how much of the blocks that live at the end arrays show."""
        blocks["visible"] = -1
        hidden = self.extra.get("hidden")
        if not isinstance(hidden, dict):
            return
        live = np.flatnonzero(blocks["end"] >= len(self.trace))
        blocks["visible"][live] = blocks["requested"][live]
        short = dict(
            zip(
                map(_as_int, hidden["addresses"]),
                map(_as_int, hidden["visible"]),
                strict=True,
            )
        )
        for at in live[
            np.isin(blocks["addr"][live], np.fromiter(short, np.uint64, len(short)))
        ].tolist():
            blocks["visible"][at] = short[int(blocks["addr"][at])]

    def _nodes(self) -> Nodes | None:
        nodes = self.extra.get("nodes")
        if not isinstance(nodes, dict):
            return None
        lines = [
            NodeLine(
                _stack(line["frames"]),
                _word(line["range"]),
                _word(line["module"]),
                _as_int(line["live"]),
                _as_int(line["pending"]),
            )
            for line in nodes["lines"]
        ]
        samples = [NodeSample(*map(_as_int, sample)) for sample in nodes["samples"]]
        return Nodes(_as_int(nodes["live"]), _as_int(nodes["pending"]), lines, samples)


def _reserved_changes(kind: npt.NDArray[np.uint8], addr: Any, size: Ints) -> Ints:
    """Return what each entry adds to reserved.

    A segment that is made for one block, or goes with it, takes two entries for one
    step of the allocator: between them its bytes would look like cache.
    """
    change = size * _TO_RESERVED[kind]
    pair = addr[1:] == addr[:-1]
    opens = np.flatnonzero(pair & (kind[:-1] == _OPEN) & (kind[1:] == _ALLOC))
    change[opens + 1] += change[opens]
    change[opens] = 0
    closes = np.flatnonzero(pair & (kind[:-1] == _FREE) & (kind[1:] == _CLOSE))
    change[closes] += change[closes + 1]
    change[closes + 1] = 0
    return change


class _Metadata(NamedTuple):
    """What mlxmem keeps in an entry's user_metadata."""

    action: str = ""
    thread: int = 0
    buffer_size: int = 0
    range: str = ""
    module: str = ""
    during: str = ""  # in which range it happened
    stream: int = _FILE

    @classmethod
    def read(cls, value: Any) -> _Metadata:
        if not isinstance(value, dict):
            return cls()
        return cls(
            _word(value.get("action")),
            _as_int(value.get("thread", 0)),
            _as_int(value.get("buffer_size", 0)),
            _word(value.get("range")),
            _word(value.get("module")),
            _word(value.get("during")),
            _as_int(value.get("stream", _FILE)),
        )


class _Distinct:
    """A list without repetitions."""

    def __init__(self) -> None:
        self.objects: list[Any] = []
        self._places: dict[Any, int] = {}

    def place(self, key: Any) -> int:
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = len(self.objects)
            self.objects.append(key)
        return place


def _by_identity(
    trace: list[Any], key: str, make: Callable[[Any], Any]
) -> tuple[Places, list[Any]]:
    """Make one object per distinct value of a key.

    Entries share their frames and metadata, so that identity finds most equal ones
    without looking inside.
    """
    index, values = _columns.distinct(trace, key)
    return index, [make(value) for value in values]


def _stack(frames: Any) -> Stack:
    if not isinstance(frames, list):
        return ()
    return tuple(
        Frame(_word(f["filename"]), _as_int(f["line"]), _word(f["name"]))
        for f in frames[:_MOST_FRAMES]
    )


def _settings(value: Any) -> dict[str, Any]:
    """Return the settings that are plain values under plain names."""
    if not isinstance(value, dict):
        return {}
    found: dict[str, Any] = {}
    for key, item in value.items():
        if not isinstance(key, str):
            raise TypeError(f"a setting is named {key!r}"[:80])
        if item is None or type(item) in (bool, int):
            found[shown(key)] = item
        elif isinstance(item, str):
            found[shown(key)] = shown(item)
        elif isinstance(item, float):
            found[shown(key)] = item if math.isfinite(item) else None
        # PyTorch has lists and dicts there, too; no report reads them.
    dropped = found.get("trace_alloc_dropped", 0)
    if type(dropped) is not int:
        raise TypeError(f"trace_alloc_dropped is {dropped!r}"[:80])
    return found


def _word(value: Any) -> str:
    return shown(value) if isinstance(value, str) else ""


def _as_int(value: Any) -> int:
    # bool and float could pass for numbers, and numpy's would not be JSON.
    if type(value) is not int:
        raise TypeError(f"a number is a {type(value).__name__}: {value!r}"[:80])
    return value
