"""Snapshots as columns: mlxmem's own, and such as PyTorch writes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from handmade import THREAD, Heap, busy_heap, heaps, quick
from hypothesis import given

from mlxmem.events import (
    Action,
    AllocatorTimes,
    Context,
    Mark as At,
    Range as Span,
    SettingCall,
)
from mlxmem.reports import history
from mlxmem.reports.history import BEGINNING, History, from_snapshot
from mlxmem.reports.reading import SnapshotError
from mlxmem.snapshot import build, dump


def read(heap: Heap, max_entries: int = 0, **changes: Any) -> History:
    return from_snapshot(build(heap.recording(max_entries, **changes)))


@quick
@given(heaps())
def test_totals_are_those_of_the_allocator(heap: Heap) -> None:
    found = read(heap)

    active, cache = heap.totals()
    assert found.active_after(found.end) == active
    assert found.reserved_after(found.end) == active + cache
    assert found.peak == heap.peak


@quick
@given(heaps())
def test_live_blocks_add_up_at_every_entry(heap: Heap) -> None:
    found = read(heap)

    for at in range(-1, len(found)):
        live = found.live(at)
        assert found.blocks["size"][live].sum() == found.active_after(at)


@quick
@given(heaps())
def test_totals_hold_when_events_were_dropped(heap: Heap) -> None:
    kept = max(len(heap.rows) // 2, 1)
    found = read(heap, kept)

    active, cache = heap.totals()
    assert found.active_after(found.end) == active
    assert found.reserved_after(found.end) == active + cache
    assert found.dropped == max(len(heap.rows) - kept, 0)


def test_a_block_knows_whose_it_is() -> None:
    # GIVEN a buffer that is reused for less than it holds
    heap = Heap()
    first = heap.new(8192, stack=1, primitive=1, stream=2)
    heap.free(first)
    heap.reuse(first, requested=5000, stack=2, primitive=2, stream=1)

    found = read(heap)

    # THEN its second block has the buffer's size and the requested one
    old, new = found.blocks
    assert (old["size"], old["requested"]) == (8192, 8192)
    assert (new["size"], new["requested"]) == (8192, 5000)
    assert [found.primitives[b["primitive"]] for b in found.blocks] == ["Matmul", "Add"]
    actions = [found.actions[b["action"]] for b in found.blocks]
    assert actions == ["AllocNew", "AllocReuse"]
    assert [int(b["stream"]) for b in found.blocks] == [2, 1]
    assert [int(b["thread"]) for b in found.blocks] == [THREAD, THREAD]
    innermost = [found.stacks[b["stack"]][0] for b in found.blocks]
    assert [(f.filename, f.line) for f in innermost] == [
        ("/app/model.py", 12),
        ("/app/train.py", 41),
    ]
    # AND it lives from its alloc until its free was completed
    assert found.active[old["start"]] == 8192
    assert found.active[old["end"]] == 0
    assert new["end"] == len(found)


def test_each_entry_has_its_address_and_the_bytes_of_the_whole_buffer() -> None:
    heap = Heap()
    first = heap.new(8192)
    heap.free(first)
    heap.reuse(first, requested=5000)
    second = heap.new(64)
    heap.free(second, Action.FreeActiveToOS)

    found = read(heap)

    assert (found.addr.dtype, found.size.dtype) == (np.uint64, np.int64)
    assert [history.KINDS[kind] for kind in found.kind] == [
        *("segment_alloc", "alloc", "free_requested", "free_completed", "alloc"),
        *("segment_alloc", "alloc"),
        *("free_requested", "free_completed", "segment_free"),
    ]
    assert found.addr.tolist() == [first] * 5 + [second] * 5
    assert found.size.tolist() == [8192] * 5 + [64] * 5


def test_a_call_took_effect_between_two_entries() -> None:
    # GIVEN a call that began after the first event and was over after the second one
    heap = Heap()
    heap.new(100)
    heap.new(200)
    mark = At(2, 15, THREAD, "set_cache_limit")
    calls = [SettingCall(mark, 0, 9, (), began=1)]
    snapshot = build(heap.recording(calls=calls))

    (call,) = from_snapshot(snapshot).calls

    # THEN the second event's entries lie in between
    assert (call.from_at, call.at) == (2, 4)
    # AND in a file that does not know the beginning, nothing does
    del snapshot["mlxmem"]["calls"][0]["from_at"]
    (call,) = from_snapshot(snapshot).calls
    assert (call.from_at, call.at) == (4, 4)
    # AND dropped events are before the first entry
    (call,) = read(heap, 1, calls=calls).calls
    assert (call.from_at, call.at) == (2, 4)


def test_a_crossing_of_the_memory_limit_comes_right_after_its_block() -> None:
    # GIVEN two allocations, of which the second one crosses the limit
    heap = Heap()
    heap.free(heap.new(50, stack=2))
    heap.new(100, stack=1)
    crossing = At(3, 25, THREAD, "active above the memory limit, 99 B")
    snapshot = build(heap.recording(crossings=[crossing]))

    found = from_snapshot(snapshot)

    # THEN it is beside the marks, and names the block's line
    assert found.marks == []
    (mark,) = found.crossings
    assert mark == (crossing.name, len(found), found.start_us + 25, THREAD)
    assert found.active_after(mark.at - 1) == 100
    assert found.made_by(mark.at - 1)[0] == ("/app/model.py", 12, "Block.__call__")
    # AND an entry that makes no block has no line
    assert found.made_by(mark.at - 2) == found.made_by(-1) == found.made_by(99) == ()
    # AND a file without crossings reads
    del snapshot["mlxmem"]["crossings"]
    assert from_snapshot(snapshot).crossings == []


def test_what_the_allocators_calls_take_is_kept() -> None:
    times = AllocatorTimes(new=3, new_ns=4_000, reused=5, reused_ns=600)
    heap = Heap()
    heap.new(8)
    snapshot = build(heap.recording(times=times))

    assert from_snapshot(snapshot).times == times
    snapshot["mlxmem"]["times"] = None
    assert from_snapshot(snapshot).times is None
    del snapshot["mlxmem"]["times"]
    assert from_snapshot(snapshot).times is None


def test_marks_and_ranges_have_their_place() -> None:
    # GIVEN two allocations with a mark between them, the second one in ranges
    heap = Heap()
    heap.new(100, stack=1)
    heap.new(200, stack=2)
    outer = Span(At(1, 5, THREAD, "step"), At(2, 20, THREAD, "step"), ("step",))
    inner = Span(
        At(1, 6, THREAD, "load"), At(2, 19, THREAD, "load"), ("step", "load"), open=True
    )

    def context(traceback_id: int) -> Context:
        return Context(("fwd",), "layers.0") if traceback_id == 2 else Context()

    found = read(
        heap,
        marks=[At(1, 5, THREAD, "between")],
        ranges=[outer, inner],
        context=context,
    )

    (mark,) = found.marks
    first, second = found.blocks
    assert first["start"] < mark.at <= second["start"]
    assert found.ranges[second["range"]] == "fwd"
    assert found.modules[second["module"]] == "layers.0"
    assert found.ranges[first["range"]] == ""
    assert [(span.path, span.open) for span in found.spans] == [
        (("step",), False),
        (("step", "load"), True),
    ]
    assert found.spans[0].at <= second["start"] < found.spans[0].end_at
    built = build(heap.recording(ranges=[outer, inner], context=context))
    metadata = built["device_traces"][0][-1]["user_metadata"]
    assert (metadata["range"], metadata["during"]) == ("fwd", "step/load")
    assert metadata["module"] == "layers.0"
    stages = [(a["name"], a["stage"]) for a in built["external_annotations"]]
    assert stages == [("step", "START"), ("step/load", "START"), ("step", "END")]


def test_a_range_without_context_names_what_happened_in_it() -> None:
    heap = Heap()
    addr = heap.new(100, stack=1)
    heap.free(addr)
    span = Span(At(0, 0, THREAD, "eval"), At(1, 9, THREAD, "eval"), ("eval",))
    gc = Span(At(1, 9, THREAD + 1, "gc"), At(2, 30, THREAD + 1, "gc"), ("gc",))

    found = read(heap, ranges=[span, gc])

    (block,) = found.blocks
    assert found.ranges[block["range"]] == "eval"
    assert found.ranges[block["freed_during"]] == "gc"


def torch_entry(action: str, addr: int, size: int, **more: Any) -> dict[str, Any]:
    frame = {"filename": "/app/net.py", "line": 7, "name": "forward"}
    return {
        "action": action,
        "addr": addr,
        "size": size,
        "stream": 0,
        "time_us": 1_000 + addr,
        "frames": [frame],
    } | more


def torch_snapshot() -> dict[str, Any]:
    """Return what PyTorch writes: two blocks in one segment, and an old one."""
    trace = [
        torch_entry("segment_alloc", 1000, 4096),
        torch_entry("alloc", 1000, 512),
        torch_entry("alloc", 1512, 1024),
        torch_entry("free_requested", 1000, 512),
        torch_entry("free_completed", 1000, 512),
        torch_entry("free_completed", 90_000, 256),  # from before the trace
        torch_entry("alloc", 1000, 300),
        torch_entry("free_requested", 1512, 1024),
        torch_entry("oom", 0, 1 << 30, device_free=77),
        torch_entry("snapshot", 0, 0),
    ]
    del trace[8]["addr"]
    frames = [{"filename": "/app/old.py", "line": 3, "name": "load"}]
    segments = [
        {
            "device": 0,
            "address": 1000,
            "total_size": 4096,
            "allocated_size": 300,
            "active_size": 300,
            "stream": 0,
            "segment_type": "small",
            "blocks": [
                {"address": 1000, "size": 300, "state": "active_allocated"},
                {"address": 1300, "size": 3796, "state": "inactive"},
            ],
        },
        {
            "device": 0,
            "address": 50_000,
            "total_size": 2048,
            "allocated_size": 2048,
            "active_size": 2048,
            "stream": 3,
            "segment_type": "small",
            "blocks": [
                {
                    "address": 50_000,
                    "size": 2048,
                    "requested_size": 2000,
                    "state": "active_allocated",
                    "frames": frames,
                }
            ],
        },
    ]
    return {"segments": segments, "device_traces": [trace, []]}


def test_torch_snapshot_is_read() -> None:
    found = from_snapshot(torch_snapshot(), name="torch.pickle")

    assert (found.source, found.devices, found.device) == ("torch", 2, 0)
    # 2048 bytes of an old block, 256 of one that is freed in the trace.
    assert found.start_active == 2048 + 256
    changes = np.diff([found.start_active, *found.active.tolist()]).tolist()
    assert changes == [0, 512, 1024, 0, -512, -256, 300, -1024, 0, 0]
    assert found.peak == 2048 + 256 + 1536
    assert found.start_reserved == 2048
    assert found.reserved_after(found.end) == 4096 + 2048
    (oom,) = found.ooms
    assert (oom.size, oom.free, oom.stack[0].line) == (1 << 30, 77, 7)
    old = found.blocks[(found.blocks["start"] == BEGINNING) & found.live(found.end)]
    assert [(int(b["size"]), int(b["requested"])) for b in old] == [(2048, 2000)]
    assert found.stacks[old[0]["stack"]][0].filename == "/app/old.py"


def test_snapshot_without_a_trace_is_read() -> None:
    nothing = {**torch_snapshot(), "device_traces": []}

    found = from_snapshot(nothing)

    assert len(found) == 0
    assert found.peak == found.start_active == 300 + 2048
    assert found.peak_at == BEGINNING
    assert found.blocks["size"][found.live(found.end)].sum() == 2348


def test_a_device_is_chosen() -> None:
    with_two = torch_snapshot()
    with_two["device_traces"][1] = [torch_entry("alloc", 5, 60)]

    assert from_snapshot(with_two, device=1).peak == 60
    with pytest.raises(SnapshotError, match="no device 2, only 0 to 1"):
        from_snapshot(with_two, name="x", device=2)


def test_peak_of_nothing() -> None:
    found = from_snapshot({"segments": [], "device_traces": []})

    assert (len(found), found.peak, found.reserved_peak, found.end) == (0, 0, 0, -1)


def test_file_and_dict_give_the_same(tmp_path: Any) -> None:
    recording = busy_heap().recording()
    path = dump(recording, tmp_path / "out.pickle")

    one, other = history.read(path), from_snapshot(build(recording))

    assert np.array_equal(one.blocks, other.blocks)
    assert np.array_equal(one.active, other.active)
    assert one.stacks == other.stacks
    assert one.actions == other.actions
