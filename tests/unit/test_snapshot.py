"""Snapshots of hand-made recordings, by value, and the file they go to."""

from __future__ import annotations

import dataclasses
import errno
import gc
import os
import pathlib
import pickle
from typing import Any

import pytest
from handmade import STACKS, START_US, Heap, busy_heap, deep_stack

from mlxmem.events import Action, Frame, Recording, decode, from_dicts
from mlxmem.snapshot import (
    BEFORE_ACTION,
    BEFORE_ENABLE,
    BEFORE_TRACE,
    LEAF,
    NO_STACK,
    build,
    write,
)

Entry = dict[str, Any]


def trace_of(recording: Recording) -> list[Entry]:
    trace: list[Entry] = build(recording)["device_traces"][0]
    return trace


def names(entries: list[Entry]) -> list[str]:
    return [entry["action"] for entry in entries]


def label(owner: Entry) -> str:
    """Return the name of a stack of one frame."""
    (frame,) = owner["frames"]
    name: str = frame["name"]
    return name


@pytest.mark.parametrize(
    ("action", "entries"),
    [
        (Action.AllocNew, ["segment_alloc", "alloc"]),
        (Action.AllocReuse, ["alloc"]),
        (Action.AllocMakeBuffer, ["segment_alloc", "alloc"]),
        (Action.FreeActiveToCache, ["free_requested", "free_completed"]),
        (Action.FreeActiveToOS, ["free_requested", "free_completed", "segment_free"]),
        (Action.Release, ["free_requested", "free_completed", "segment_free"]),
        (Action.FreeCacheToOS, ["segment_free"]),
    ],
)
def test_each_action_has_its_entries(action: Action, entries: list[str]) -> None:
    # GIVEN a buffer in the state that the action needs
    heap = Heap()
    if action in (Action.AllocNew, Action.AllocMakeBuffer):
        heap.new(100, action=action)
    else:
        addr = heap.new(100)
        if action in (Action.AllocReuse, Action.FreeCacheToOS):
            heap.free(addr)
        if action is Action.AllocReuse:
            heap.reuse(addr)
        else:
            heap.free(addr, action)
    before = {Action.AllocReuse: 4, Action.FreeCacheToOS: 4}.get(action, 2)

    # WHEN
    trace = trace_of(heap.recording())

    # THEN
    skip = 0 if action in (Action.AllocNew, Action.AllocMakeBuffer) else before
    assert names(trace[skip:]) == entries
    for entry in trace[skip:]:
        assert entry["user_metadata"]["action"] == action.name


def test_an_allocation_carries_everything_that_is_known() -> None:
    # GIVEN a buffer that is larger than what was asked for
    heap = Heap()
    addr = heap.new(4_096, requested=4_000, primitive=1, stack=1, stream=2, thread=7)
    heap.new(1)

    # WHEN
    segment, alloc, *_ = trace_of(heap.recording())

    # THEN innermost frame first, sizes as the readers read them
    assert alloc == {
        "action": "alloc",
        "addr": addr,
        "size": 4_000,
        "stream": 2,
        "time_us": START_US,
        "frames": [
            {"name": "Block.__call__", "filename": "/app/model.py", "line": 12},
            {"name": "<module>", "filename": "/app/train.py", "line": 40},
        ],
        "user_metadata": {
            "action": "AllocNew",
            "primitive": "Matmul",
            "thread": 7,
            "stream": 2,
            "buffer_size": 4_096,
        },
        "category": "Matmul",
        "pool_id": (0, 0),
    }
    assert segment["size"] == 4_096
    assert segment["frames"] is alloc["frames"]


def test_a_free_shows_who_allocated_and_who_freed() -> None:
    # GIVEN
    heap = Heap()
    addr = heap.new(100, primitive=1, stack=1, stream=2, thread=7)
    heap.free(addr)

    # WHEN
    _, alloc, requested, completed = trace_of(heap.recording())

    # THEN
    assert requested["frames"] is completed["frames"] is alloc["frames"]
    assert requested["stream"] == 2
    assert requested["size"] == 100
    assert requested["time_us"] == START_US + 10
    assert requested["user_metadata"] == {
        "action": "FreeActiveToCache",
        "primitive": "Matmul",
        "thread": 4712,
        "stream": 2,
    }


def test_a_free_finds_its_allocation_when_its_own_record_has_none() -> None:
    # GIVEN decoded events, whose frees say nothing about the allocation
    heap = Heap()
    heap.free(heap.new(100, primitive=1, stack=1, stream=2))

    # WHEN
    trace = trace_of(from_dicts(decode(heap.recording()), start_us=START_US))

    # THEN
    assert {id(entry["frames"]) for entry in trace} == {id(trace[0]["frames"])}
    assert [entry["stream"] for entry in trace] == [2] * 4
    assert trace[-1]["user_metadata"]["primitive"] == "Matmul"


def test_categories_tell_leaves_primitives_and_the_rest_apart() -> None:
    # GIVEN
    heap = Heap(active=1)
    heap.new(100, stack=1)
    heap.new(100, stack=1, primitive=2, stream=0)
    heap.new(100, thread=99)

    # WHEN
    trace = trace_of(heap.recording())

    # THEN
    allocs = [entry for entry in trace if entry["action"] == "alloc"]
    categories = [entry["category"] for entry in allocs]
    assert categories == ["unknown", LEAF, "Add", "unknown"]
    assert label(allocs[-1]) == NO_STACK
    # the leaf has no stream: the readers get the default one
    assert allocs[1]["stream"] == 0
    assert allocs[1]["user_metadata"]["stream"] == -1


def test_a_category_is_unknown_even_if_everything_is_known() -> None:
    heap = Heap()
    heap.new(100, primitive=1, stack=1, stream=0)
    trace = trace_of(heap.recording())
    assert [entry["category"] for entry in trace] == ["unknown", "Matmul"]


def test_each_buffer_is_a_segment_with_one_block() -> None:
    # GIVEN
    heap = Heap()
    live = heap.new(3 << 20, requested=2 << 20, primitive=1, stack=1, stream=1)
    idle = heap.new(64, stack=2)
    heap.free(idle)

    # WHEN
    first, second = build(heap.recording())["segments"]

    # THEN
    assert first["frames"] is first["blocks"][0]["frames"]
    assert [frame["line"] for frame in first["frames"]] == [12, 40]
    del first["frames"], first["blocks"][0]["frames"]
    assert first == {
        "device": 0,
        "address": live,
        "total_size": 3 << 20,
        "allocated_size": 3 << 20,
        "active_size": 3 << 20,
        "requested_size": 2 << 20,
        "stream": 1,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "blocks": [
            {
                "address": live,
                "size": 3 << 20,
                "requested_size": 2 << 20,
                "state": "active_allocated",
            }
        ],
    }
    assert second["address"] == idle
    assert second["segment_type"] == "small"
    assert second["allocated_size"] == second["active_size"] == 0
    assert second["blocks"][0]["state"] == "inactive"


def test_what_was_active_before_is_one_labelled_block_from_the_start() -> None:
    # GIVEN
    heap = Heap(active=5_000)
    heap.new(10, stack=1)

    # WHEN
    result = build(heap.recording())

    # THEN
    segment, alloc = result["device_traces"][0][:2]
    assert names([segment, alloc]) == ["segment_alloc", "alloc"]
    assert segment["size"] == alloc["size"] == 5_000
    assert segment["time_us"] == START_US
    (block,) = (
        block
        for part in result["segments"]
        for block in part["blocks"]
        if block["frames"][0]["name"] == BEFORE_ENABLE
    )
    assert block["size"] == 5_000
    assert block["state"] == "active_allocated"
    assert block["address"] == alloc["addr"]


def test_what_was_cached_before_goes_in_the_parts_that_went() -> None:
    # GIVEN two trims of a cache from before
    heap = Heap(cached=5_000)
    heap.trim_nameless(2_000)
    heap.trim_nameless(500)

    # WHEN
    result = build(heap.recording())

    # THEN
    trace = result["device_traces"][0]
    allocs, frees = trace[:3], trace[3:]
    assert names(allocs) == ["segment_alloc"] * 3
    assert [entry["size"] for entry in allocs] == [2_500, 2_000, 500]
    assert names(frees) == ["segment_free"] * 2
    assert [entry["addr"] for entry in frees] == [e["addr"] for e in allocs[1:]]
    (segment,) = result["segments"]
    assert segment["total_size"] == 2_500
    assert segment["blocks"][0]["state"] == "inactive"
    assert label(segment["blocks"][0]) == BEFORE_ENABLE


def test_a_buffer_from_before_is_there_until_its_free() -> None:
    # GIVEN
    heap = Heap()
    old = heap.existing(1_000)
    heap.new(10, stack=1)
    heap.free(old, Action.FreeActiveToOS)

    # WHEN
    trace = trace_of(heap.recording())

    # THEN
    of_old = [entry for entry in trace if entry["addr"] == old]
    assert names(trace[:2]) == names(of_old[:2]) == ["segment_alloc", "alloc"]
    assert len(of_old) == 5
    assert {label(entry) for entry in of_old} == {BEFORE_ENABLE}
    assert {entry["stream"] for entry in of_old} == {0}


def test_synthetic_addresses_lie_beside_all_real_ones() -> None:
    # GIVEN
    recording = busy_heap().recording()

    # WHEN
    result = build(recording)

    # THEN
    real = recording.events["addr"] + recording.events["size"]
    made = {
        entry["addr"]
        for entry in result["device_traces"][0]
        if entry["addr"] not in recording.events["addr"]
    }
    assert len(made) == 3
    assert min(made) > int(real.max())
    assert max(made) < 2**53


def test_an_overflow_is_said_and_loses_no_stack_of_what_lives() -> None:
    # GIVEN a live buffer and a later freed one whose allocations fell out
    heap = Heap()
    kept = heap.new(700, stack=1, primitive=1, stream=1)
    later = heap.new(800, stack=4)
    bare = heap.new(900)
    for _ in range(4):
        heap.free(heap.new(10, stack=2), Action.FreeActiveToOS)
    heap.free(later)

    # WHEN
    result = build(heap.recording(max_entries=5))

    # THEN
    settings = result["allocator_settings"]
    assert settings["trace_alloc_overflowed"] is True
    assert settings["trace_alloc_max_entries"] == 5
    assert settings["trace_alloc_dropped"] == 7
    trace = result["device_traces"][0]
    at_start = {
        entry["addr"]: entry
        for entry in trace
        if entry["user_metadata"]["action"] == BEFORE_ACTION
        and entry["action"] == "alloc"
    }
    assert at_start[kept]["frames"][0]["line"] == 12
    assert at_start[kept]["category"] == "Matmul"
    assert at_start[kept]["time_us"] == START_US
    assert at_start[kept]["stream"] == 1
    assert at_start[later]["frames"][0]["line"] == 7
    assert at_start[later]["category"] == LEAF
    assert label(at_start[bare]) == BEFORE_TRACE
    (segment,) = (s for s in result["segments"] if s["address"] == kept)
    assert segment["frames"] is at_start[kept]["frames"]


def test_no_overflow_is_said_too() -> None:
    settings = build(Heap().recording(max_entries=9))["allocator_settings"]
    assert settings["trace_alloc_overflowed"] is False
    assert settings["trace_alloc_max_entries"] == 9
    assert settings["trace_alloc_dropped"] == 0


def test_settings_are_plain_and_exact_in_every_reader() -> None:
    # GIVEN a limit that JavaScript can't hold
    recording = Heap().recording(
        settings={"memory_limit": 2**63, "mlx": "0.32.4", "wired": None, "x": 0.5}
    )

    # WHEN
    settings = build(recording)["allocator_settings"]

    # THEN
    assert settings["memory_limit"] == str(2**63)
    assert settings["mlx"] == "0.32.4"
    assert settings["wired"] is None
    assert settings["x"] == 0.5


def test_empty_buffers_are_counted_and_not_drawn() -> None:
    # GIVEN
    heap = Heap()
    heap.free(heap.new(0, stack=1), Action.FreeActiveToOS)
    heap.new(0, stack=1)

    # WHEN
    result = build(heap.recording())

    # THEN
    assert result["device_traces"] == [[]]
    assert result["segments"] == []
    assert result["allocator_settings"]["zero_byte_allocs"] == 2


def test_frames_that_readers_hide_become_visible() -> None:
    # GIVEN names that the readers take for the interpreter's own
    heap = Heap()
    heap.new(10, stack=3)

    # WHEN
    frames = trace_of(heap.recording())[1]["frames"]

    # THEN what is seen is the same
    def seen(text: str) -> str:
        return text.replace("\u200b", "")

    assert len(frames) == len(STACKS[2])
    assert seen(frames[-1]["name"]) == "on_start"
    assert seen(frames[-1]["filename"]) == "/app/Registers/ceval.c.py"
    assert seen(frames[1]["name"]) == "PyEval_like.PyObject_PyFunction_"
    assert "_start" not in frames[-1]["name"]
    assert "/Register" not in frames[-1]["filename"]
    assert "ceval.c" not in frames[-1]["filename"]
    for part in ("PyEval_", "PyObject_", "PyFunction_"):
        assert part in seen(frames[1]["name"])
        assert part not in frames[1]["name"]
    assert frames[0]["filename"] == "/app/odd\\nname;\\udc80.py"


def test_equal_stacks_are_one_object() -> None:
    # GIVEN ids 4 and 5, which read the same
    heap = Heap()
    heap.new(10, stack=4)
    heap.new(10, stack=5)

    # WHEN
    result = build(heap.recording())

    # THEN
    stacks = {id(entry["frames"]) for entry in result["device_traces"][0]}
    assert len(stacks) == 1
    assert {id(s["blocks"][0]["frames"]) for s in result["segments"]} == stacks


def test_32_frames_arrive_innermost_first() -> None:
    heap = Heap()
    heap.new(10, stack=6)
    frames = trace_of(heap.recording())[1]["frames"]
    lines = [line for _, _, line in deep_stack(32)]
    assert [frame["line"] for frame in frames] == lines[::-1]


def test_ids_of_an_old_session_show_no_stack() -> None:
    # GIVEN
    heap = Heap()
    heap.new(10, stack=1)

    def forgotten(traceback_id: int) -> list[Frame] | None:
        return None

    # WHEN
    (_, alloc) = trace_of(dataclasses.replace(heap.recording(), resolve=forgotten))

    # THEN
    assert label(alloc) == NO_STACK


@pytest.mark.parametrize("lost", range(4))
def test_a_hole_in_the_events_is_filled_and_counted(lost: int) -> None:
    # GIVEN events of which somebody took one out
    heap = Heap()
    addr = heap.new(100, stack=1)
    heap.free(addr)
    heap.reuse(addr, stack=2)
    heap.free(addr, Action.FreeActiveToOS)
    heap.new(60, stack=4)
    events = decode(heap.recording())
    del events[lost]

    # WHEN
    result = build(from_dicts(events))

    # THEN no block is allocated twice, or freed twice
    live: set[int] = set()
    for entry in result["device_traces"][0]:
        if entry["action"] == "alloc":
            assert entry["addr"] not in live
            live.add(entry["addr"])
        if entry["action"] == "free_completed":
            live.remove(entry["addr"])
    broken = result["allocator_settings"]["inconsistent_events"]
    assert broken == (0 if lost == 0 else 1)


def test_building_leaves_the_collector_as_it_was() -> None:
    assert gc.isenabled()
    build(busy_heap().recording())
    assert gc.isenabled()
    gc.disable()
    try:
        build(busy_heap().recording())
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_write_returns_the_path_and_leaves_one_file(tmp_path: pathlib.Path) -> None:
    # GIVEN
    result = build(busy_heap().recording())
    target = tmp_path / "out.pickle"
    target.write_text("old")

    # WHEN
    written = write(result, str(target))

    # THEN
    assert written == target
    assert pickle.loads(target.read_bytes()) == result
    assert os.listdir(tmp_path) == ["out.pickle"]


def test_write_gives_the_rights_of_a_plain_new_file(tmp_path: pathlib.Path) -> None:
    (tmp_path / "plain").write_text("")
    write({}, tmp_path / "out.pickle")
    mode = (tmp_path / "plain").stat().st_mode
    assert (tmp_path / "out.pickle").stat().st_mode == mode


def test_write_follows_a_link(tmp_path: pathlib.Path) -> None:
    # GIVEN
    (tmp_path / "link").symlink_to(tmp_path / "out.pickle")

    # WHEN
    write({}, tmp_path / "link")

    # THEN
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "out.pickle").exists()


def test_a_failed_write_leaves_what_was_there(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN a disk that is full before the end
    target = tmp_path / "out.pickle"
    target.write_text("old")

    def full(snapshot: Any, file: Any, protocol: int) -> None:
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pickle, "dump", full)

    # WHEN
    with pytest.raises(OSError, match="No space left"):
        write({}, target)

    # THEN
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["out.pickle"]


def test_write_says_which_path_is_missing(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError):
        write({}, tmp_path / "missing" / "out.pickle")
    with pytest.raises(IsADirectoryError, match="Is a directory"):
        write({}, tmp_path)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("path", [None, 3, b"out.pickle"])
def test_write_wants_a_path(path: Any) -> None:
    with pytest.raises(TypeError, match="path must be a str or path-like, not"):
        write({}, path)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full (Linux)")
def test_a_full_device_is_an_error_and_stays_a_device() -> None:
    with pytest.raises(OSError, match="No space left"):
        write(build(busy_heap().recording()), "/dev/full")
    assert not pathlib.Path("/dev/full").is_file()
    write({}, "/dev/null")
    assert not pathlib.Path("/dev/null").is_file()
