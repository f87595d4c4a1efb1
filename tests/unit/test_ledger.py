"""The replay: totals, both ends, what was there before, and faults."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
from handmade import Heap, busy_heap, heaps, quick
from hypothesis import given, strategies as st

from mlxmem.events import Action, State, decode, from_dicts
from mlxmem.ledger import ABSENT, Ledger


@quick
@given(heaps(), st.integers(0, 12))
def test_a_ledger_agrees_with_the_allocator(heap: Heap, max_entries: int) -> None:
    # GIVEN a sound history, of which a ring keeps the end
    recording = heap.recording(max_entries)

    # WHEN
    ledger = Ledger(recording)

    # THEN the totals are those that the allocator had
    curve = heap.curve[recording.dropped :]
    assert ledger.faults == []
    assert list(zip(ledger.active, ledger.cache, strict=True)) == curve
    assert np.array_equal(ledger.reserved, ledger.active + ledger.cache)
    before = itertools.chain([heap.start], heap.curve)
    start = next(itertools.islice(before, recording.dropped, None))
    assert (ledger.start_active, ledger.start_cache) == start
    assert ledger.peak == max([start[0], *(active for active, _ in curve)])
    # THEN the buffers at the end are those that it has
    final = {
        (int(b["addr"]), int(b["size"]), bool(b["state"] == State.Cached))
        for b in ledger.final
    }
    touched = {
        (addr, b.size, b.cached) for addr, b in heap.buffers.items() if b.last >= 0
    }
    assert final == touched
    for b in ledger.final:
        buffer = heap.buffers[int(b["addr"])]
        assert b["traceback_id"] == buffer.stack
        assert b["primitive_id"] == buffer.primitive
        assert b["requested_size"] == buffer.requested
    # THEN known and unknown parts add up at both ends
    for buffers, cache in (
        (ledger.initial, ledger.before_cache),
        (ledger.final, ledger.before_cache_left),
    ):
        cached = buffers["state"] == State.Cached
        active_sum = int(buffers["size"][~cached].sum()) + ledger.before_active
        cache_sum = int(buffers["size"][cached].sum()) + cache
        is_start = buffers is ledger.initial
        assert (active_sum, cache_sum) == (start if is_start else heap.totals())


@quick
@given(heaps(), st.integers(0, 12))
def test_replay_moves_every_address_from_state_to_state(
    heap: Heap, max_entries: int
) -> None:
    # GIVEN
    ledger = Ledger(heap.recording(max_entries))
    states = {int(b["addr"]): int(b["state"]) for b in ledger.initial}

    # WHEN
    for change in ledger.replay():
        assert change == ledger.change(change.event)
        assert change.before == change.needed
        if change.addr:
            assert states.get(change.addr, ABSENT) == change.before
            states[change.addr] = change.after

    # THEN
    alive = {addr: state for addr, state in states.items() if state != ABSENT}
    assert alive == {int(b["addr"]): int(b["state"]) for b in ledger.final}


def test_the_first_event_of_an_address_tells_what_it_was_before() -> None:
    # GIVEN one buffer of each kind from before
    heap = Heap()
    freed, reused = heap.existing(100), heap.existing(200, cached=True)
    trimmed, released = heap.existing(300, cached=True), heap.existing(400)
    heap.free(freed)
    heap.reuse(reused, requested=150, primitive=1, stack=1)
    heap.trim(trimmed)
    heap.free(released, Action.Release)
    heap.new(500)

    # WHEN
    ledger = Ledger(heap.recording())

    # THEN the new owner of the reused one is not its old one
    found = {int(b["addr"]): b for b in ledger.initial}
    assert set(found) == {freed, reused, trimmed, released}
    assert found[freed]["state"] == found[released]["state"] == State.Active
    assert found[reused]["state"] == found[trimmed]["state"] == State.Cached
    assert found[reused]["traceback_id"] == 0
    assert found[reused]["requested_size"] == 200


def test_a_free_knows_its_allocation() -> None:
    # GIVEN an address that two owners had one after the other
    heap = Heap()
    addr = heap.new(100, stack=1)
    heap.free(addr)
    heap.reuse(addr, stack=2)
    heap.free(addr)
    heap.trim(addr)

    # WHEN
    ledger = Ledger(heap.recording())

    # THEN
    assert ledger.owner.tolist() == [0, 0, 2, 2, 2]
    assert ledger.previous.tolist() == [-1, 0, 1, 2, 3]


def test_the_remainder_from_before_stays_and_its_cache_shrinks() -> None:
    # GIVEN
    heap = Heap(active=1_000, cached=600)
    heap.new(50)
    heap.trim_nameless(200)

    # WHEN
    ledger = Ledger(heap.recording())

    # THEN
    assert ledger.before_active == 1_000
    assert (ledger.before_cache, ledger.before_cache_left) == (600, 400)
    assert ledger.nameless.tolist() == [1]


def test_buffers_whose_events_fell_out_are_known() -> None:
    # GIVEN a ring that lost the allocation of a live buffer
    heap = Heap()
    kept = heap.new(700, stack=1, primitive=1, stream=0)
    for _ in range(4):
        heap.free(heap.new(10), Action.FreeActiveToOS)

    # WHEN
    ledger = Ledger(heap.recording(max_entries=3))

    # THEN
    assert ledger.recording.dropped == 6
    assert kept in ledger.initial["addr"]
    assert kept in ledger.final["addr"]
    assert ledger.before_active == 0
    assert ledger.peak == 710


def test_without_events_everything_was_there_before() -> None:
    ledger = Ledger(Heap(active=10, cached=20).recording())
    assert (ledger.before_active, ledger.before_cache) == (10, 20)
    assert ledger.peak == 10
    assert list(ledger.replay()) == []
    assert ledger.faults == []


def test_faults_are_collected_and_name_the_event() -> None:
    # GIVEN an allocation of a live address, a second free, and another size
    heap = Heap()
    addr = heap.new(100)
    heap.free(addr)
    events = decode(heap.recording())
    twice = [events[0], {**events[0], "size": 300}, events[1], events[1]]

    # WHEN
    ledger = Ledger(from_dicts(twice))

    # THEN
    assert ledger.broken.tolist() == [1, 2, 3]
    assert "event 1: AllocNew of 300 bytes" in ledger.faults[0]
    assert "which is active with 100" in ledger.faults[0]
    assert "event 3: FreeActiveToCache" in ledger.faults[2]
    assert "which is cached" in ledger.faults[2]


def test_totals_that_leave_less_than_nothing_are_a_fault() -> None:
    # GIVEN counters that are lower than what the events add up to
    recording = dataclasses.replace(busy_heap().recording(), active=0, cache=0)

    # WHEN
    ledger = Ledger(recording)

    # THEN
    assert any("exceed active" in fault for fault in ledger.faults)
    assert any("exceed the cache" in fault for fault in ledger.faults)
    assert ledger.before_active == 0


def test_faults_do_not_grow_without_bound() -> None:
    # GIVEN
    heap = Heap()
    heap.new(100)
    event = decode(heap.recording())[0]

    # WHEN
    ledger = Ledger(from_dicts([event] * 1_000))

    # THEN
    assert len(ledger.broken) == 999
    assert len(ledger.faults) == 100
