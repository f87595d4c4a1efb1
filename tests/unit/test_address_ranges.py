"""Addresses of a snapshot where MLX's are of objects that describe buffers."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import pathlib
from typing import Any

import numpy as np
import pytest
from handmade import BASE, Heap, PointerHeap, busy_heap, heaps, quick
from hypothesis import given, strategies as st

from mlxmem import _hook, fork_api, recorder
from mlxmem.address_ranges import BACKENDS, ShownAddresses, shown_addresses
from mlxmem.cache.replay import follow
from mlxmem.cache.trace import of_recording
from mlxmem.events import (
    RAW_CACHED,
    RAW_NODE,
    RAW_NODE_SAMPLE,
    Action,
    Nodes,
    Recording,
    decode,
    from_dicts,
)
from mlxmem.ledger import ABSENT, Ledger
from mlxmem.reports.cache_trace import of_history
from mlxmem.reports.diff import diff
from mlxmem.reports.history import from_snapshot, read
from mlxmem.reports.leaks import leaks
from mlxmem.reports.peak import peak
from mlxmem.reports.summary import summary
from mlxmem.reports.timeline import timeline
from mlxmem.reports.tree import tree
from mlxmem.snapshot import build, dump

KiB, GiB = 1 << 10, 1 << 30


def shown(recording: Recording) -> ShownAddresses:
    return shown_addresses(Ledger(recording))


def as_cpu(recording: Recording) -> Recording:
    """Return the recording as it would be shown with MLX's own addresses."""
    settings = {**recording.settings, "backend": "cpu"}
    return dataclasses.replace(recording, settings=settings)


def listed(heap: Heap, *addresses: int) -> Any:
    """Return MLX's list of the cache, oldest first."""
    return np.array([(a, heap.buffers[a].size) for a in addresses], RAW_CACHED)


def test_live_buffers_stand_side_by_side() -> None:
    # GIVEN buffers whose pointers are 32 bytes apart
    heap = PointerHeap()
    addresses = [heap.new(16 * KiB), heap.new(300 * KiB), heap.new(8), heap.new(1)]

    # WHEN
    result = shown(heap.recording())

    # THEN each has the next power of two, and the smallest 512 bytes
    assert addresses == [BASE, BASE + 32, BASE + 64, BASE + 96]
    starts = [GiB, GiB + 16 * KiB, GiB + 528 * KiB, GiB + 528 * KiB + 512]
    assert result.events.tolist() == result.final.tolist() == starts
    assert result.end == starts[-1] + 512


@pytest.mark.parametrize("backend", [*BACKENDS, "cpu", "", None])
def test_where_addresses_are_of_memory_they_stay(backend: str | None) -> None:
    # GIVEN
    heap = PointerHeap()
    heap.new(64)
    settings = {} if backend is None else {"backend": backend}

    # WHEN
    result = shown(heap.recording(settings=settings))

    # THEN
    assert result.events.tolist() == [GiB if backend in BACKENDS else BASE]


def test_a_pointer_that_comes_back_is_another_segment() -> None:
    # GIVEN one pointer, used for two sizes, then for the first again
    heap = PointerHeap()
    for size in (64 * KiB, 16 * KiB, 50 * KiB):
        assert heap.new(size) == BASE
        heap.free(BASE, Action.FreeActiveToOS)

    # WHEN
    first, _, second, _, third, _ = shown(heap.recording()).events.tolist()

    # THEN what the first gave back serves the third, of nearly its size
    assert (first, second, third) == (GiB, GiB + 64 * KiB, GiB)


def test_a_buffer_keeps_its_range_in_the_cache() -> None:
    # GIVEN a cached buffer, while another one of its size is made
    heap = PointerHeap()
    addr = heap.new(1 * KiB)
    heap.free(addr)
    other = heap.new(1 * KiB)
    heap.reuse(addr)
    heap.free(addr, Action.Release)
    heap.free(other, Action.FreeActiveToOS)
    heap.new(1 * KiB)
    heap.new(1 * KiB)

    # WHEN
    result = shown(heap.recording()).events.tolist()

    # THEN what went first comes back first
    a, b = GiB, GiB + 1 * KiB
    assert result == [a, a, b, a, a, b, a, b]


def test_a_hole_ends_the_life_before_the_next_begins() -> None:
    # GIVEN a free to the OS that is missing, before the pointer comes back twice
    heap = PointerHeap()
    for size in (2 * KiB, 2 * KiB, 4 * KiB):
        heap.free(heap.new(size), Action.FreeActiveToOS)
    events = decode(heap.recording())
    del events[1]

    # WHEN
    result = shown(from_dicts(events, settings={"backend": "cuda"}))

    # THEN
    assert result.events.tolist() == [GiB, GiB, GiB, GiB + 2 * KiB, GiB + 2 * KiB]


def test_older_buffers_have_ranges_from_the_start() -> None:
    # GIVEN buffers from before the session, one of which no kept event names
    heap = PointerHeap()
    active, cached = heap.existing(8 * KiB), heap.existing(8 * KiB, cached=True)
    silent = heap.new(8 * KiB, stack=1)
    heap.free(active, Action.FreeActiveToOS)
    heap.reuse(cached)
    heap.new(8 * KiB)

    # WHEN
    recording = heap.recording(3)
    result, ledger = shown(recording), Ledger(recording)

    # THEN
    first, second, third = result.events.tolist()
    assert third == first
    assert ledger.initial["addr"].tolist() == [silent, active, cached]
    assert result.initial[1:].tolist() == [first, second]
    at_start = sorted(result.initial.tolist())
    assert at_start == [GiB, GiB + 8 * KiB, GiB + 16 * KiB]
    at_end = dict(zip(ledger.final["addr"], result.final, strict=True))
    assert at_end == {silent: result.initial[0], cached: second, active: first}


def test_nothing_recorded_needs_no_range() -> None:
    for heap in (PointerHeap(), PointerHeap(active=100, cached=50)):
        result = shown(heap.recording())
        assert len(result.events) == len(result.initial) == len(result.final) == 0
        assert result.end == GiB


def test_events_without_an_address_have_none() -> None:
    # GIVEN
    heap = PointerHeap(cached=1_000)
    heap.trim_nameless(400)
    heap.new(10)

    # WHEN / THEN
    assert shown(heap.recording()).events.tolist() == [0, GiB]


def test_growing_sizes_take_little_more_than_the_peak() -> None:
    # GIVEN keys and values that grow in steps, each size new
    heap = PointerHeap()
    for step in range(1, 500):
        heap.free(heap.new(step * 16 * KiB), Action.FreeActiveToOS)

    # WHEN
    result = shown(heap.recording())

    # THEN one range for each power of two from 16 KiB to 8 MiB
    assert result.end - GiB == 16 * KiB * (2**10 - 1)
    assert result.end - GiB < 4 * heap.peak


def test_a_million_events_end_far_below_what_javascript_counts() -> None:
    # GIVEN a trillion bytes at a time, in sizes that never come again
    count = 1_000_000
    heap = PointerHeap()
    heap.free(heap.new(1), Action.FreeActiveToOS)
    events = np.tile(heap.recording().events, count // 2)
    events["size"] = 10**12 - np.arange(count) // 2
    recording = heap.recording()

    # WHEN
    result = shown(dataclasses.replace(recording, events=events))

    # THEN
    assert set(result.events.tolist()) == {GiB}
    assert result.end == GiB + 2**40


def test_the_cache_at_the_start_is_shown_with_the_same_addresses() -> None:
    # GIVEN MLX's list of the cache: one is taken, one is trimmed without a name
    heap = PointerHeap()
    taken, silent = (heap.existing(4 * KiB, cached=True) for _ in range(2))
    old = listed(heap, silent, taken)
    heap.reuse(taken)
    recording = heap.recording(cached_at_enable=old)

    # WHEN
    result = shown(recording)

    # THEN
    assert result.cached.sizes.tolist() == [4 * KiB, 4 * KiB]
    assert result.cached.addresses[1] == result.events[0] == GiB
    assert result.cached.addresses[0] == GiB + 4 * KiB
    assert result.end == GiB + 8 * KiB


def test_a_slice_is_found_by_its_buffer() -> None:
    # GIVEN a buffer of which an array shows a part, by MLX's pointer
    heap = PointerHeap()
    heap.new(4_000)
    parent = heap.new(4_000)
    live = np.array([(4, parent, 1, 0)], RAW_NODE)
    nodes = Nodes(live, np.array([(2, 1, 1, 0)], RAW_NODE_SAMPLE))

    # WHEN
    snapshot = build(heap.recording(nodes=nodes))

    # THEN
    hidden = snapshot["mlxmem"]["hidden"]
    assert hidden == {"addresses": [GiB + 4 * KiB], "visible": [4]}
    blocks = from_snapshot(snapshot).blocks
    assert blocks["visible"].tolist() == [4_000, 4]


class _Model:
    """The rule of the ranges, event by event."""

    def __init__(self) -> None:
        self.free: dict[int, collections.deque[int]] = {}
        self.held: dict[int, tuple[int, int]] = {}  # by pointer: size, start
        self.end = GiB

    def begin(self, addr: int, size: int) -> None:
        extent = max(512, 1 << (size - 1).bit_length())
        free = self.free.setdefault(extent, collections.deque())
        if not free:
            free.append(self.end)
            self.end += extent
        self.held[addr] = size, free.popleft()

    def stop(self, addr: int) -> None:
        size, start = self.held.pop(addr)
        self.free[max(512, 1 << (size - 1).bit_length())].append(start)

    def check_apart(self) -> None:
        held = sorted((start, size) for size, start in self.held.values())
        for (start, size), (after, _) in itertools.pairwise(held):
            assert start + size <= after


@quick
@given(heaps(PointerHeap), st.integers(0, 12), st.data())
def test_random_histories_follow_the_rule(
    heap: Heap, max_entries: int, data: st.DataObject
) -> None:
    # GIVEN a ring of a sound history, and events of which some were taken out
    sound = heap.recording(max_entries)
    events = decode(heap.recording())
    lost = data.draw(st.sets(st.integers(0, max(len(events) - 1, 0))))
    events = [e for i, e in enumerate(events) if i not in lost]
    for recording in (sound, from_dicts(events, settings=sound.settings)):
        ledger = Ledger(recording)

        # WHEN
        result = shown_addresses(ledger)

        # THEN it is the same each time, and what a model of one event after the
        # other has, but for the order of what was there first
        again = shown_addresses(ledger)
        for one, other in zip(result[:3], again[:3], strict=True):
            assert np.array_equal(one, other)
        model = _Model()
        initial = zip(result.initial.tolist(), ledger.initial.tolist(), strict=True)
        for _, (addr, size, *_) in sorted(initial):
            model.begin(addr, size)
        for change, start in zip(ledger.replay(), result.events.tolist(), strict=True):
            _, addr, size, needed, before, after = change
            if not addr:
                assert start == 0
                continue
            if addr in model.held and (
                ABSENT in (before, needed) or model.held[addr][0] != size
            ):
                model.stop(addr)
            if addr not in model.held:
                model.begin(addr, size)
            assert model.held[addr] == (size, start)
            model.check_apart()
            if after == ABSENT:
                model.stop(addr)
        final = {
            addr: (size, start)
            for (addr, size, *_), start in zip(
                ledger.final.tolist(), result.final.tolist(), strict=True
            )
        }
        assert final == model.held


# Reports of a file do not depend on the addresses.


@quick
@given(heaps(PointerHeap), st.integers(0, 12))
def test_reports_are_those_of_the_pointers(heap: Heap, max_entries: int) -> None:
    # GIVEN the same events, shown with ranges and with MLX's own pointers
    recording = heap.recording(max_entries)
    ranges = from_snapshot(build(recording))
    pointers = from_snapshot(build(as_cpu(recording)))

    # WHEN / THEN
    for name in ("kind", "size", "active", "reserved", "time_us"):
        assert np.array_equal(getattr(ranges, name), getattr(pointers, name)), name
    fields = [name for name in ranges.blocks.dtype.names or () if name != "addr"]
    mine, theirs = ranges.blocks[fields].tolist(), pointers.blocks[fields].tolist()
    assert sorted(mine) == sorted(theirs)
    for report in (leaks, peak, summary, timeline, tree):
        assert _by_value(report(ranges)) == _by_value(report(pointers))
    assert diff(ranges, pointers) == diff(pointers, pointers)


def _by_value(report: dict[str, Any]) -> str:
    """Return a report without what may differ: the backend, the order of equals."""
    settings = report.get("settings", {})
    settings.pop("backend", None)
    return str(report)


@quick
@given(heaps(PointerHeap), st.integers(0, 12))
def test_the_cache_is_replayed_from_a_file_as_from_the_recording(
    heap: Heap, max_entries: int
) -> None:
    # GIVEN
    settings = {"backend": "cuda", "mlx_version": "0.32.4"}
    recording = heap.recording(max_entries, settings=settings)

    # WHEN
    live = of_recording(recording)
    filed = of_history(from_snapshot(build(recording)))

    # THEN every reuse finds the buffer that was freed: the same decisions
    names = ["size", "requested", "owner", "op", "recorded"]
    assert filed.rows[names].tolist() == live.rows[names].tolist()
    assert follow(filed).totals == follow(live).totals
    assert follow(filed).outcomes.tolist() == follow(live).outcomes.tolist()
    assert follow(filed).mismatches == follow(live).mismatches


def test_a_reuse_is_seen_in_a_file(tmp_path: pathlib.Path) -> None:
    # GIVEN pointers that come back, between reuses of the same buffer
    heap = PointerHeap()
    kept = heap.new(16 * KiB, stack=1)
    for _ in range(5):
        heap.free(kept)
        heap.reuse(kept, stack=1)
        heap.free(heap.new(32 * KiB, stack=2), Action.FreeActiveToOS)
        heap.free(heap.new(64 * KiB, stack=2), Action.FreeActiveToOS)

    # WHEN
    history = read(dump(heap.recording(), tmp_path / "out.pickle"))

    # THEN
    assert follow(of_history(history)).hits == 5
    ranges = history.blocks["addr"].tolist()
    large, larger = GiB + 16 * KiB, GiB + 48 * KiB
    assert ranges == [GiB, *[GiB, large, larger] * 5]
    assert history.peak == 80 * KiB


def test_the_file_has_the_same_addresses_each_time(tmp_path: pathlib.Path) -> None:
    # GIVEN
    recording = busy_heap(PointerHeap).recording(15)

    # WHEN
    first = dump(recording, tmp_path / "first.pickle").read_bytes()
    second = dump(recording, tmp_path / "second.pickle").read_bytes()

    # THEN
    assert first == second


def test_events_of_this_process_are_of_its_backend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # GIVEN decoded events, which do not name their backend
    heap = PointerHeap()
    heap.new(64)
    events = decode(heap.recording())

    # WHEN a session knows it, and when there was none
    monkeypatch.setattr(recorder, "session_start_us", lambda: 5)
    monkeypatch.setattr(_hook, "backend", lambda: "cuda")
    known = fork_api.to_snapshot(events)["segments"]
    monkeypatch.setattr(recorder, "session_start_us", lambda: 0)
    unknown = fork_api.to_snapshot(events)["segments"]

    # THEN
    assert [s["address"] for s in known] == [GiB]
    assert [s["address"] for s in unknown] == [BASE]


def test_made_up_blocks_lie_behind_the_ranges() -> None:
    # GIVEN memory from before of which no event tells
    heap = PointerHeap(active=5_000, cached=700)
    heap.new(64 * KiB)

    # WHEN
    segments = build(heap.recording())["segments"]

    # THEN
    places = {s["total_size"]: s["address"] for s in segments}
    assert places == {5_000: 3 * GiB, 700: 4 * GiB, 64 * KiB: GiB}
