"""Every rule of the readers holds on hand-made and random recordings.

The second half breaks a good snapshot in one place each: the checker must notice, or
its silence would mean nothing.
"""

from __future__ import annotations

import copy
import dataclasses
import pathlib
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import viewer
from handmade import Heap, PointerHeap, busy_heap, heaps, quick
from hypothesis import given, strategies as st

from mlxmem.events import Action, Mark, OutOfMemory, State, decode, from_dicts
from mlxmem.ledger import Ledger
from mlxmem.snapshot import build, write

Entry = dict[str, Any]


@pytest.mark.parametrize("kind", [Heap, PointerHeap])
@pytest.mark.parametrize("max_entries", range(22))
def test_a_busy_recording_keeps_every_rule(
    tmp_path: pathlib.Path, max_entries: int, kind: type[Heap]
) -> None:
    # GIVEN rings that lose nothing, something and all but one event
    recording = busy_heap(kind).recording(max_entries)

    # WHEN
    path = write(build(recording), tmp_path / "out.pickle")

    # THEN
    viewer.check_pickle(path.read_bytes())


@quick
@given(heaps() | heaps(PointerHeap), st.integers(0, 12))
def test_random_recordings_keep_every_rule_and_the_totals(
    heap: Heap, max_entries: int
) -> None:
    # GIVEN
    recording = heap.recording(max_entries)

    # WHEN
    result = build(recording)

    # THEN
    viewer.check_pickle(pickle.dumps(result, 4))
    # THEN adding up the entries gives reserved after every event, to the byte
    curve = [a + c for a, c in heap.curve[recording.dropped :]]
    times = (recording.events["timestamp_us"] + recording.start_us).tolist()
    assert _reserved_at(result, times) == curve
    # THEN the segments add up to what the allocator has at the end
    segments = result["segments"]
    active, cache = heap.totals()
    assert sum(s["active_size"] for s in segments) == active
    assert sum(s["total_size"] for s in segments) == active + cache


def _reserved_at(result: Entry, times: list[int]) -> list[int]:
    """Add up the segments that are there after the last entry of each time."""
    trace = iter(result["device_traces"][0])
    entry = next(trace, None)
    total, totals = 0, []
    for time in times:
        while entry is not None and entry["time_us"] <= time:
            if entry["action"] == "segment_alloc":
                total += entry["size"]
            elif entry["action"] == "segment_free":
                total -= entry["size"]
            entry = next(trace, None)
        totals.append(total)
    return totals


def test_a_failed_allocation_keeps_every_rule(tmp_path: pathlib.Path) -> None:
    heap = Heap()
    heap.new(512, stack=1)
    failed = OutOfMemory(Mark(1, 20, 4711, "no"), 99, 5, 4, 3, traceback_id=1)
    recording = dataclasses.replace(heap.recording(), ooms=(failed,))

    path = write(build(recording), tmp_path / "out.pickle")
    snapshot = viewer.check_pickle(path.read_bytes())

    (entry,) = [e for e in snapshot["device_traces"][0] if e["action"] == "oom"]
    assert (entry["size"], entry["device_free"]) == (99, 5)
    assert entry["user_metadata"]["active"] == 4


@quick
@given(heaps(), st.data())
def test_events_with_holes_never_allocate_twice(
    heap: Heap, data: st.DataObject
) -> None:
    # GIVEN events of which some were taken out
    events = decode(heap.recording())
    some = st.sets(st.integers(0, max(len(events) - 1, 0)))
    lost = data.draw(some)
    events = [event for i, event in enumerate(events) if i not in lost]

    # WHEN
    result = build(from_dicts(events))

    # THEN all rules hold but the one that real memory keeps: no overlap
    trace, segments = result["device_traces"][0], result["segments"]
    viewer.check_entries(trace)
    viewer.check_segments(segments)
    viewer.check_frames(result)
    viewer.check_forwards(trace, segments)


@quick
@given(heaps(PointerHeap), st.data())
def test_events_of_pointers_with_holes_do_not_even_overlap(
    heap: Heap, data: st.DataObject
) -> None:
    # GIVEN events of which some were taken out
    recording = heap.recording()
    events = decode(recording)
    lost = data.draw(st.sets(st.integers(0, max(len(events) - 1, 0))))
    events = [event for i, event in enumerate(events) if i not in lost]

    # WHEN
    result = build(from_dicts(events, settings=recording.settings))

    # THEN
    trace, segments = result["device_traces"][0], result["segments"]
    viewer.check_entries(trace)
    viewer.check_segments(segments)
    viewer.check_frames(result)
    viewer.check_forwards(trace, segments)
    viewer.check_backwards(trace, segments)


def test_the_checker_sees_pointers_that_overlap() -> None:
    # GIVEN a recording of pointers, shown as if they were memory
    recording = busy_heap(PointerHeap).recording(settings={"backend": "cpu"})

    # WHEN / THEN
    with pytest.raises(AssertionError, match="segments overlap"):
        viewer.check_snapshot(build(recording))


def test_a_start_peak_is_not_cut_off() -> None:
    # GIVEN traces that start with the free of something large
    for action in (Action.FreeActiveToOS, Action.FreeActiveToCache):
        heap = Heap()
        addr = heap.existing(1 << 30)
        heap.free(addr, action)
        heap.new(10, stack=1)

        # WHEN
        result = build(heap.recording())

        # THEN
        trace, segments = result["device_traces"][0], result["segments"]
        for plot in ("alloc", "segment_alloc"):
            peak, drawn = viewer.timeline_peaks(trace, segments, plot)
            assert drawn == peak >= 1 << 30


def test_the_ledger_and_the_snapshot_end_alike() -> None:
    # GIVEN
    recording = busy_heap().recording()
    ledger = Ledger(recording)

    # WHEN
    segments = build(recording)["segments"]

    # THEN
    active = {int(b["addr"]) for b in ledger.final if b["state"] == State.Active}
    shown = {s["address"] for s in segments if s["active_size"]}
    assert active <= shown
    assert len(shown - active) == 1  # the remainder


# The checker notices.


def _trace(snapshot: Entry) -> list[Entry]:
    trace: list[Entry] = snapshot["device_traces"][0]
    return trace


def _find(snapshot: Entry, action: str) -> int:
    return next(i for i, e in enumerate(_trace(snapshot)) if e["action"] == action)


def _drop(action: str) -> Callable[[Entry], None]:
    def change(snapshot: Entry) -> None:
        del _trace(snapshot)[_find(snapshot, action)]

    return change


def _double(action: str) -> Callable[[Entry], None]:
    def change(snapshot: Entry) -> None:
        index = _find(snapshot, action)
        _trace(snapshot).insert(index, _trace(snapshot)[index])

    return change


def _set(action: str, key: str, value: Any) -> Callable[[Entry], None]:
    def change(snapshot: Entry) -> None:
        _trace(snapshot)[_find(snapshot, action)][key] = value

    return change


def _known_categories(snapshot: Entry) -> None:
    for entry in _trace(snapshot):
        entry["category"] = "Matmul"


def _part_the_frees(snapshot: Entry) -> None:
    trace = _trace(snapshot)
    trace.append(trace.pop(_find(snapshot, "free_completed")))


def _copy_a_stack(snapshot: Entry) -> None:
    entry = _trace(snapshot)[_find(snapshot, "alloc")]
    entry["frames"] = list(entry["frames"])


def _overlap(snapshot: Entry) -> None:
    first, second = snapshot["segments"][:2]
    grow = second["address"] - first["address"] + 1
    for entry in _trace(snapshot):
        if (entry["addr"], entry["action"]) == (first["address"], "segment_alloc"):
            entry["size"] = grow
    first["blocks"][0]["size"] = first["total_size"] = grow
    first["active_size"] = first["allocated_size"] = grow * bool(first["active_size"])


def _shift_a_block(snapshot: Entry) -> None:
    snapshot["segments"][0]["blocks"][0]["address"] += 8


def _no_segments(snapshot: Entry) -> None:
    snapshot["segments"] = []


def _frame(**changes: Any) -> list[Entry]:
    return [{"name": "f", "filename": "f.py", "line": 1, **changes}]


@pytest.mark.parametrize(
    "change",
    [
        _drop("alloc"),
        _drop("segment_alloc"),
        _drop("segment_free"),
        _drop("free_requested"),
        _drop("free_completed"),
        _double("alloc"),
        _double("segment_alloc"),
        _part_the_frees,
        _known_categories,
        _copy_a_stack,
        _overlap,
        _shift_a_block,
        _no_segments,
        _set("alloc", "addr", 2**53),
        _set("alloc", "addr", None),
        _set("alloc", "size", True),
        _set("alloc", "frames", None),
        _set("alloc", "frames", []),
        _set("alloc", "frames", _frame(name="on_start")),
        _set("alloc", "frames", _frame(name="PyObject_Call")),
        _set("alloc", "frames", _frame(filename="/x/Registers.py")),
        _set("alloc", "frames", _frame(line=None)),
        _set("alloc", "frames", [{"name": "f", "line": 1}]),
        _set("alloc", "user_metadata", {"a": {"b": 1}}),
        _set("alloc", "user_metadata", {1, 2}),
        _set("alloc", "category", b"Matmul"),
        _set("alloc", "action", Action.AllocNew),
        _set("segment_free", "size", 1),
        _set("segment_free", "time_us", 0),
    ],
)
def test_the_checker_notices(change: Callable[[Entry], None]) -> None:
    # GIVEN
    good = build(busy_heap().recording())
    viewer.check_snapshot(good)
    bad = copy.deepcopy(good)

    # WHEN
    change(bad)

    # THEN
    with pytest.raises((AssertionError, KeyError)):
        viewer.check_snapshot(bad)


@pytest.mark.parametrize("protocol", [2, 3, 5])
def test_the_checker_wants_protocol_4(protocol: int) -> None:
    with pytest.raises(AssertionError):
        viewer.check_pickle(pickle.dumps(build(Heap().recording()), protocol))


@pytest.mark.parametrize("value", [b"x", {1}, frozenset(), 2**70, Action.AllocNew])
def test_the_checker_refuses_what_no_reader_unpickles(value: Any) -> None:
    result = build(Heap().recording())
    result["allocator_settings"]["x"] = value
    with pytest.raises(AssertionError):
        viewer.check_pickle(pickle.dumps(result, 4))


def test_the_checker_sees_a_cut_peak() -> None:
    # GIVEN a free without its allocation, before anything smaller
    trace = [
        {"action": "free_requested", "addr": 1, "size": 100},
        {"action": "free_completed", "addr": 1, "size": 100},
        {"action": "alloc", "addr": 2, "size": 10},
    ]

    # WHEN / THEN
    assert viewer.timeline_peaks(trace, []) == (100, 10)
