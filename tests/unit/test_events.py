"""Decoding of raw events, and the way back."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from handmade import PRIMITIVES, STACKS, Heap, busy_heap, heaps, quick
from hypothesis import given, strategies as st

from mlxmem.events import (
    EVENT,
    FIELDS,
    RAW_BUFFER,
    RAW_EVENT,
    Action,
    Recording,
    decode,
    from_dicts,
    to_array,
)


def test_raw_records_take_48_bytes() -> None:
    assert RAW_EVENT.itemsize == 48
    assert RAW_BUFFER.itemsize == 48


def test_decode_shows_an_allocation_with_primitive_and_stack() -> None:
    # GIVEN a matmul output with the stack of the line that made it
    heap = Heap()
    addr = heap.new(53_492, primitive=1, stack=1, stream=2)

    # WHEN
    (event,) = decode(heap.recording())

    # THEN
    assert event == {
        "addr": addr,
        "size": 53_492,
        "requested_size": 53_492,
        "timestamp_us": 0,
        "action": "AllocNew",
        "primitive_name": "Matmul",
        "traceback": STACKS[0],
        "stream": 2,
        "thread_id": 4711,
    }
    assert tuple(event) == FIELDS


def test_decode_hides_the_owner_of_a_free() -> None:
    # GIVEN a free whose raw record says who allocated
    heap = Heap()
    heap.free(heap.new(10, primitive=1, stack=1, stream=0))
    recording = heap.recording()
    assert recording.events["traceback_id"].tolist() == [1, 1]

    # WHEN
    free = decode(recording)[1]

    # THEN
    assert free["action"] == "FreeActiveToCache"
    assert free["primitive_name"] == ""
    assert free["traceback"] is None
    assert free["stream"] == -1


def test_decode_shares_the_list_of_equal_ids() -> None:
    # GIVEN
    heap = Heap()
    for _ in range(3):
        heap.new(10, stack=2)

    # WHEN
    first, *others = decode(heap.recording())

    # THEN
    assert all(event["traceback"] is first["traceback"] for event in others)


def test_decode_without_events_is_empty() -> None:
    assert decode(Heap(active=5).recording()) == []
    assert len(to_array(Heap(active=5).recording())) == 0


def test_an_id_without_a_name_is_no_primitive() -> None:
    # GIVEN a primitive id that came after the names were read
    heap = Heap()
    heap.new(10, primitive=1)
    recording = dataclasses.replace(heap.recording(), primitives=("",))

    # WHEN / THEN
    assert decode(recording)[0]["primitive_name"] == ""
    assert to_array(recording)["primitive_name"].tolist() == [""]


def test_to_array_has_the_columns_of_the_events() -> None:
    # GIVEN
    recording = busy_heap().recording()

    # WHEN
    array = to_array(recording)

    # THEN
    assert array.dtype == EVENT
    dicts = decode(recording)
    for name in ("addr", "size", "requested_size", "timestamp_us", "stream"):
        assert array[name].tolist() == [event[name] for event in dicts]
    assert array["primitive_name"].tolist() == [e["primitive_name"] for e in dicts]
    assert [Action(a).name for a in array["action"]] == [e["action"] for e in dicts]
    assert np.count_nonzero(array["action"] == Action.Release) == 1


@quick
@given(heaps())
def test_from_dicts_is_the_inverse_of_decode(heap: Heap) -> None:
    # GIVEN
    events = decode(heap.recording())

    # WHEN
    recording = from_dicts(events)

    # THEN
    assert decode(recording) == events
    assert (recording.active, recording.cache) == _known_totals(heap)


def _known_totals(heap: Heap) -> tuple[int, int]:
    """Sum the buffers that events name; nobody else is known to from_dicts."""
    active = sum(b.size for b in heap.buffers.values() if b.last >= 0 and not b.cached)
    cache = sum(b.size for b in heap.buffers.values() if b.last >= 0 and b.cached)
    return active, cache


def test_from_dicts_knows_what_must_have_been_there_before() -> None:
    # GIVEN a free and a reuse of buffers from before, and a rise in between
    heap = Heap()
    old, idle = heap.existing(1_000), heap.existing(500, cached=True)
    heap.new(300)
    heap.free(old)
    heap.reuse(idle)

    # WHEN
    recording = from_dicts(decode(heap.recording()))

    # THEN
    assert (recording.active_at_enable, recording.cache_at_enable) == (1_000, 500)
    assert recording.peak == 1_300
    assert (recording.active, recording.cache) == (800, 1_000)


def test_from_dicts_takes_what_other_tools_may_hand_over() -> None:
    # GIVEN lists for tuples, numpy numbers and extra keys
    event: dict[str, Any] = decode(busy_heap().recording())[0]
    loose = {
        **event,
        "traceback": [list(frame) for frame in event["traceback"]],
        "size": np.uint64(event["size"]),
        "note": "mine",
    }

    # WHEN / THEN
    assert decode(from_dicts(iter([loose]))) == [event]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"action": "Alloc"}, ValueError, r"\[0\]\['action'\] is 'Alloc'"),
        ({"action": []}, ValueError, r"\[0\]\['action'\] is \[\]"),
        ({"size": "big"}, TypeError, r"\[0\]\['size'\] must be an int, not 'big'"),
        ({"size": 1.5}, TypeError, r"\[0\]\['size'\] must be an int, not 1.5"),
        ({"size": -1}, ValueError, r"\[0\]\['size'\] is out of range: -1"),
        ({"stream": 2**31}, ValueError, r"\['stream'\] is out of range"),
        ({"traceback": ["main.py"]}, ValueError, r"\['traceback'\] must be None or"),
    ],
)
def test_from_dicts_names_what_is_wrong(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    event = decode(busy_heap().recording())[0]
    with pytest.raises(error, match=message):
        from_dicts([{**event, **change}])


@pytest.mark.parametrize("name", FIELDS)
def test_from_dicts_names_a_missing_field(name: str) -> None:
    event = decode(busy_heap().recording())[0]
    del event[name]
    with pytest.raises(ValueError, match=rf"events\[0\] has no '{name}'"):
        from_dicts([event])


def test_from_dicts_wants_mappings() -> None:
    with pytest.raises(TypeError, match=r"events\[0\] must be a dict, not 3"):
        from_dicts([3])  # type: ignore[list-item]


@quick
@given(st.integers(0, 30))
def test_a_recording_needs_no_more_than_events(count: int) -> None:
    recording = Recording(np.zeros(count, RAW_EVENT), primitives=PRIMITIVES)
    assert len(decode(recording)) == count
