"""What the readers of snapshots need, checked one rule after the other.

Written from what PyTorch's `_memory_viz.py` and its web viewer do with a snapshot:
they walk it forwards for the timelines and backwards from the final segments for the
state history. `check_pickle` and `check_snapshot` raise AssertionError with the
entry that breaks a rule.
"""

from __future__ import annotations

import bisect
import itertools
import pickle
import pickletools
from typing import Any

Entry = dict[str, Any]

# What the web viewer's unpickler knows, in pickletools' names.
_KNOWN = """
    PROTO FRAME STOP MARK MEMOIZE BINGET LONG_BINGET BINPUT LONG_BINPUT
    NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT
    SHORT_BINUNICODE BINUNICODE EMPTY_LIST APPEND APPENDS LIST
    EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_DICT SETITEM SETITEMS DICT
"""
OPCODES = frozenset(_KNOWN.split())
MAX_INT = 2**53 - 1
HIDDEN_NAMES = (
    "unwind::unwind",
    "CapturedTraceback::gather",
    "gather_with_cpp",
    "_start",
    "PyEval_",
    "PyObject_",
    "PyFunction_",
)
HIDDEN_FILES = (
    "core/boxing",
    "/Register",
    "/Redispatch",
    "pythonrun.c",
    "Modules/main.c",
    "Objects/call.c",
    "Objects/methodobject.c",
    "ceval.c",
    "cpython/abstract.h",
)
TOP_KEYS = {
    "segments",
    "device_traces",
    "allocator_settings",
    "external_annotations",
    "mlxmem",  # no reader of PyTorch looks at it
}
SEGMENT_KEYS = {
    "device": int,
    "address": int,
    "total_size": int,
    "allocated_size": int,
    "active_size": int,
    "requested_size": int,
    "stream": int,
    "segment_type": str,
    "segment_pool_id": tuple,
    "is_expandable": bool,
    "frames": list,
    "blocks": list,
}
BLOCK_KEYS = {
    "address": int,
    "size": int,
    "requested_size": int,
    "state": str,
    "frames": list,
}
ENTRY_KEYS = {
    "action": str,
    "addr": int,
    "size": int,
    "stream": int,
    "time_us": int,
    "frames": list,
    "user_metadata": dict,
    "category": str,
    "pool_id": tuple,
}
# A failed allocation has no address; readers show what was free instead.
OOM_KEYS = {key: kind for key, kind in ENTRY_KEYS.items() if key != "addr"} | {
    "device_free": int
}
ACTIONS = {"alloc", "free_requested", "free_completed", "segment_alloc", "segment_free"}


def check_pickle(data: bytes, devices: int = 1) -> Entry:
    """Check a file's bytes and what they hold; return the snapshot.

    Raises
    ------
    AssertionError
        A reader would refuse or misdraw it.
    """
    protocols = []
    for opcode, argument, position in pickletools.genops(data):
        assert opcode.name in OPCODES, f"{opcode.name} at byte {position}"
        if opcode.name == "PROTO":
            protocols.append(argument)
        if opcode.name == "LONG1" and argument is not None:
            assert abs(argument) <= MAX_INT, f"{argument} at byte {position}"
    assert protocols == [4]
    snapshot: Entry = pickle.loads(data)
    check_snapshot(snapshot, devices)
    return snapshot


def check_snapshot(snapshot: Entry, devices: int = 1) -> None:
    """Check a snapshot against every rule of the format and of its readers.

    Raises
    ------
    AssertionError
        A reader would refuse or misdraw it.
    """
    _check_plain(snapshot, set())
    assert set(snapshot) == TOP_KEYS
    assert len(snapshot["device_traces"]) == devices
    settings = snapshot["allocator_settings"]
    assert type(settings["trace_alloc_overflowed"]) is bool
    assert type(settings["trace_alloc_max_entries"]) is int
    check_annotations(snapshot["external_annotations"])
    check_segments(snapshot["segments"], devices)
    check_frames(snapshot)
    for device, trace in enumerate(snapshot["device_traces"]):
        segments = [s for s in snapshot["segments"] if s["device"] == device]
        check_entries(trace)
        check_forwards(trace, segments)
        check_backwards(trace, segments)
        for plot in ("alloc", "segment_alloc"):
            peak, drawn = timeline_peaks(trace, segments, plot)
            assert drawn == peak, f"{plot}: the plot ends at {drawn}, peak is {peak}"


def _check_plain(value: Any, seen: set[int]) -> None:
    kind = type(value)
    if kind in (str, float, bool, type(None)):
        return
    if kind is int:
        assert abs(value) <= MAX_INT, f"{value} is not exact in JavaScript"
        return
    assert kind in (dict, list, tuple), f"{kind.__name__}: {value!r}"
    if id(value) in seen:
        return
    seen.add(id(value))
    if kind is dict:
        for key in value:
            assert type(key) is str, f"key {key!r}"
        value = value.values()
    for item in value:
        _check_plain(item, seen)


def check_annotations(annotations: list[Entry]) -> None:
    """Check the ranges: open and closed by name, with a device and a time."""
    for annotation in annotations:
        assert set(annotation) == {"name", "stage", "device", "time_us"}
        assert annotation["stage"] in ("START", "END")


def check_entries(trace: list[Entry]) -> None:
    """Check each trace entry and how free entries pair."""
    last = 0
    for number, entry in enumerate(trace):
        where = f"entry {number}: {entry}"
        failed = entry["action"] == "oom"
        keys = OOM_KEYS if failed else ENTRY_KEYS
        assert set(entry) == set(keys), where
        for key, kind in keys.items():
            assert type(entry[key]) is kind, where
        assert failed or entry["action"] in ACTIONS, where
        assert failed or entry["addr"] > 0, where
        assert entry["size"] >= 0, where
        assert entry["time_us"] >= last, f"{where} is older than the one before"
        last = entry["time_us"]
        assert len(entry["pool_id"]) == 2, where
        for value in entry["user_metadata"].values():
            assert type(value) in (str, int, float, bool), where
        after = trace[number + 1] if number + 1 < len(trace) else None
        if entry["action"] == "free_requested":
            assert after is not None, where
            assert after["action"] == "free_completed", where
            same = ("addr", "size", "stream", "time_us")
            assert [after[k] for k in same] == [entry[k] for k in same], where
            assert after["frames"] is entry["frames"], where
        if entry["action"] == "free_completed":
            assert number, where
            assert trace[number - 1]["action"] == "free_requested", where
    if any("category" in entry for entry in trace):
        assert any(entry["category"] == "unknown" for entry in trace)


def check_segments(segments: list[Entry], devices: int = 1) -> None:
    """Check that blocks tile their segments and that the sums are right."""
    for segment in segments:
        assert set(segment) == set(SEGMENT_KEYS), segment
        for key, kind in SEGMENT_KEYS.items():
            assert type(segment[key]) is kind, segment
        assert 0 <= segment["device"] < devices, segment
        assert segment["total_size"] > 0, segment
        assert segment["segment_type"] in ("small", "large"), segment
        assert segment["blocks"], segment
        address = segment["address"]
        allocated = requested = 0
        for block in segment["blocks"]:
            assert set(block) == set(BLOCK_KEYS), block
            for key, kind in BLOCK_KEYS.items():
                assert type(block[key]) is kind, block
            assert block["address"] == address, segment
            assert block["size"] > 0, block
            assert 0 <= block["requested_size"] <= block["size"], block
            assert block["state"] in ("active_allocated", "inactive"), block
            address += block["size"]
            if block["state"] == "active_allocated":
                allocated += block["size"]
                requested += block["requested_size"]
        assert address == segment["address"] + segment["total_size"], segment
        assert segment["allocated_size"] == segment["active_size"] == allocated
        assert segment["requested_size"] == requested, segment


def check_frames(snapshot: Entry) -> None:
    """Check every stack once, and that equal stacks are one object."""
    stacks = {}
    for entry in itertools.chain(*snapshot["device_traces"]):
        stacks[id(entry["frames"])] = entry["frames"]
    for segment in snapshot["segments"]:
        for owner in (segment, *segment["blocks"]):
            stacks[id(owner["frames"])] = owner["frames"]
    seen = set()
    for frames in stacks.values():
        # Readers call an empty stack "allocated before recording".
        assert frames, "a stack without frames"
        for frame in frames:
            assert set(frame) == {"name", "filename", "line"}, frame
            assert type(frame["name"]) is str, frame
            assert type(frame["filename"]) is str, frame
            assert type(frame["line"]) is int, frame
            for part in HIDDEN_NAMES:
                assert part not in frame["name"], f"hidden: {frame}"
            for part in HIDDEN_FILES:
                assert part not in frame["filename"], f"hidden: {frame}"
            text = frame["name"] + frame["filename"]
            text.encode("utf-8")
            assert "\n" not in text, frame
        key = tuple((f["filename"], f["line"], f["name"]) for f in frames)
        assert key not in seen, f"equal stacks are two objects: {key}"
        seen.add(key)


def check_forwards(trace: list[Entry], segments: list[Entry]) -> None:
    """Check that entries open and close what they should, oldest first."""
    blocks: dict[int, int] = {}
    held: dict[int, int] = {}
    for number, entry in enumerate(trace):
        where = f"entry {number}: {entry}"
        if entry["action"] == "oom":
            continue
        addr, size = entry["addr"], entry["size"]
        match entry["action"]:
            case "segment_alloc":
                assert addr not in held, f"{where}: segment is there already"
                held[addr] = size
            case "segment_free":
                assert held.pop(addr, None) == size, f"{where}: no such segment"
                assert addr not in blocks, f"{where}: its block is active"
            case "alloc":
                assert addr not in blocks, f"{where}: allocated twice"
                assert addr in held, f"{where}: no segment"
                assert size <= held[addr], f"{where}: larger than its segment"
                blocks[addr] = size
            case "free_completed":
                assert blocks.pop(addr, None) == size, f"{where}: no such block"
    assert held == {s["address"]: s["total_size"] for s in segments}
    assert blocks == {
        b["address"]: b["requested_size"]
        for s in segments
        for b in s["blocks"]
        if b["state"] == "active_allocated"
    }


class _Ranges:
    """Address ranges that must not overlap."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.sizes: dict[int, int] = {}

    def add(self, start: int, size: int, where: str) -> None:
        place = bisect.bisect_left(self.starts, start)
        if place:
            before = self.starts[place - 1]
            assert before + self.sizes[before] <= start, f"{where}: segments overlap"
        if place < len(self.starts):
            after = self.starts[place]
            assert start + size <= after, f"{where}: segments overlap"
        self.starts.insert(place, start)
        self.sizes[start] = size

    def remove(self, start: int, where: str) -> None:
        assert start in self.sizes, f"{where}: no segment begins there"
        del self.sizes[start]
        del self.starts[bisect.bisect_left(self.starts, start)]

    def around(self, addr: int) -> tuple[int, int] | None:
        place = bisect.bisect_right(self.starts, addr) - 1
        if place < 0 or addr >= self.starts[place] + self.sizes[self.starts[place]]:
            return None
        return self.starts[place], self.sizes[self.starts[place]]


def check_backwards(trace: list[Entry], segments: list[Entry]) -> None:
    """Undo the trace from the final segments, as the state history does.

    At every step each block must lie in a segment, and segments must not overlap.
    """
    ranges = _Ranges()
    blocks: dict[int, int] = {}
    for segment in segments:
        ranges.add(segment["address"], segment["total_size"], f"{segment}")
        for block in segment["blocks"]:
            if block["state"] != "inactive":
                blocks[block["address"]] = block["requested_size"]
    for addr in blocks:
        assert ranges.around(addr)
    for number in range(len(trace) - 1, -1, -1):
        entry = trace[number]
        where = f"before entry {number}: {entry}"
        if entry["action"] == "oom":
            continue
        addr, size = entry["addr"], entry["size"]
        match entry["action"]:
            case "free_completed":
                assert addr not in blocks, f"{where}: block is there already"
                segment_range = ranges.around(addr)
                assert segment_range is not None, f"{where}: block in no segment"
                start, extent = segment_range
                assert addr + size <= start + extent, f"{where}: block sticks out"
                blocks[addr] = size
            case "alloc":
                assert blocks.pop(addr, None) == size, f"{where}: no such block"
            case "segment_free":
                ranges.add(addr, size, where)
            case "segment_alloc":
                ranges.remove(addr, where)
                assert addr not in blocks, f"{where}: block loses its segment"
    # What is left would be drawn as there from the start, without a stack.
    assert not blocks
    assert not ranges.starts


def timeline_peaks(
    trace: list[Entry], segments: list[Entry], plot: str = "alloc"
) -> tuple[int, int]:
    """Return the highest total of a timeline and the highest that is drawn.

    The viewer takes the height of its plot after each action only, so what is there
    before the first one can be cut off.

    Parameters
    ----------
    trace, segments : list of dict
        Of the snapshot.
    plot : str
        "alloc" for active memory, "segment_alloc" for segments.

    Returns
    -------
    tuple of int
        Peak and drawn peak, bytes.
    """
    close = "free_completed" if plot == "alloc" else "segment_free"
    open_: dict[int, int] = {}
    steps = []
    start = 0
    for entry in trace:
        if entry["action"] == plot:
            open_[entry["addr"]] = entry["size"]
            steps.append(entry["size"])
        elif entry["action"] == close:
            if open_.pop(entry["addr"], None) is None:
                start += entry["size"]
            steps.append(-entry["size"])
    for segment in segments:
        if plot == "segment_alloc":
            if segment["address"] not in open_:
                start += segment["total_size"]
            continue
        for block in segment["blocks"]:
            if block["state"] == "inactive" or block["address"] in open_:
                continue
            start += block["requested_size"]
    totals = [start]
    for step in steps:
        totals.append(totals[-1] + step)
    return max(totals), max(totals[1:], default=start)
