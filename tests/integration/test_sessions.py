"""Sessions: what one knows ends with it, and no stack ever crosses over."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from books import HAS_CPU_CACHE, Books

import mlxmem
from mlxmem import recorder
from mlxmem._interner import resolve_traceback


def test_ids_of_an_old_session_never_resolve() -> None:
    with Books() as books:
        # GIVEN ids of a first session
        mx.eval(mx.exp(mx.ones((10,))), mx.array([1, 2]))
        ids = set(books.check().events["traceback_id"].tolist()) - {0}
        assert ids
        assert all(resolve_traceback(i) for i in ids)

        # WHEN a second one begins
        books.restart()
        mx.eval(mx.exp(mx.ones((10,))), mx.array([1, 2]))

        # THEN none of them means anything, and none is used again
        new = set(books.check().events["traceback_id"].tolist()) - {0}
        assert new
        assert not ids & new
        assert [resolve_traceback(i) for i in ids] == [None] * len(ids)


def test_an_old_array_never_gets_a_stack() -> None:
    # GIVEN arrays that were made in a session, and then without one, in heap blocks
    # that the allocator hands out again and again
    mlxmem.enable(max_entries=64)
    for round_ in range(2000):
        recorded = [mx.exp(mx.full((5,), 1.0)) for _ in range(8)]
        mlxmem.disable()
        del recorded
        silent = [mx.sin(mx.full((7,), 1.0)) for _ in range(8)]
        mlxmem.enable(max_entries=64)

        # WHEN those from the time without recording are evaluated in the next one
        mx.eval(silent)

        # THEN their allocations have no stack
        events = mlxmem.events()
        stacks = [e["traceback"] for e in events if e["primitive_name"] == "Sin"]
        stacks += [e["traceback"] for e in events if e["primitive_name"] == "Full"]
        assert len(stacks) >= 8
        assert stacks == [None] * len(stacks), round_
    mlxmem.disable()


def test_arrays_from_an_earlier_session_have_no_stack() -> None:
    with Books() as books:
        lazy = mx.exp(mx.ones((211,)))
        mlxmem.disable()
        other = mx.sin(mx.ones((223,)))
        books.restart()
        mx.eval(lazy, other)
        found = {e["requested_size"]: e["traceback"] for e in books.allocs()}
        assert found[4 * 211] is None
        assert found[4 * 223] is None


def test_arrays_from_before_enable_have_no_stack() -> None:
    lazy = mx.ones((227, 3)) @ mx.ones((3, 5))
    with Books() as books:
        mx.eval(lazy)
        (event,) = [e for e in books.allocs() if e["requested_size"] == 4 * 227 * 5]
        assert event["traceback"] is None
        assert event["primitive_name"] == "Matmul"


def test_new_arrays_on_old_inputs_have_a_stack() -> None:
    lazy = mx.exp(mx.ones((229, 2)))
    with Books() as books:
        mx.eval((lazy @ lazy.T).sum())
        (event,) = [e for e in books.allocs() if e["primitive_name"] == "Matmul"]
        assert event["traceback"][-1][1].endswith(
            "test_new_arrays_on_old_inputs_have_a_stack"
        )


def test_enable_clears_when_already_enabled(books: Books) -> None:
    mx.eval(mx.exp(mx.ones((100,))))
    assert books.events()
    books.restart()
    assert mlxmem.is_enabled()
    assert mlxmem.events() == []
    assert len(mlxmem.events_array()) == 0
    mx.eval(mx.exp(mx.ones((100,))))
    assert books.events()


def test_what_was_collected_stays_after_disable(books: Books) -> None:
    mx.eval(mx.exp(mx.ones((233,))))
    events = books.events()
    mlxmem.disable()
    assert not mlxmem.is_enabled()
    mx.eval(mx.exp(mx.ones((239,))))
    assert mlxmem.events() == events
    assert any(event["traceback"] for event in events)
    mlxmem.disable()  # a second one does nothing
    assert mlxmem.events() == events


def test_is_enabled() -> None:
    assert not mlxmem.is_enabled()
    mlxmem.enable()
    assert mlxmem.is_enabled()
    mlxmem.enable()
    assert mlxmem.is_enabled()
    mlxmem.disable()
    assert not mlxmem.is_enabled()


def test_a_ring_keeps_the_last_entries() -> None:
    with Books() as books:
        mx.eval([mx.array([n]) for n in range(100)])
        every = books.check()
    total = len(every.events)
    with Books(max_entries=30) as books:
        mx.eval([mx.array([n]) for n in range(100)])
        last = books.check()
        assert len(last.events) == 30
        assert last.dropped == total - 30
        assert mlxmem.stats()["events_dropped"] == total - 30
        settings = mlxmem.snapshot()["allocator_settings"]
        assert settings["trace_alloc_overflowed"] is True
        assert settings["trace_alloc_max_entries"] == 30


def test_an_exactly_full_ring_has_not_overflowed() -> None:
    with Books(max_entries=8) as books:
        keep = [mx.array([n]) for n in range(8)]
        recording = books.check()
        assert (len(recording.events), recording.dropped) == (8, 0)
        settings = mlxmem.snapshot()["allocator_settings"]
        assert settings["trace_alloc_overflowed"] is False
        keep.append(mx.array([9]))
        assert books.check().dropped == 1


def test_zero_means_unlimited() -> None:
    with Books(max_entries=0) as books:
        keep = [mx.array([n]) for n in range(100_001)]
        recording = books.check(readers=False)
        assert len(recording.events) == 100_001
        assert recording.dropped == 0
        del keep


def test_the_default_keeps_100_000() -> None:
    mlxmem.enable()
    assert recorder.recording().max_entries == 100_000
    mlxmem.disable()


def test_stats_count_what_happened(books: Books) -> None:
    for _ in range(4):
        mx.eval(mx.exp(mx.random.normal((1000,))))
    recording = books.check()
    action = recording.events["action"]
    stats = mlxmem.stats()
    assert stats["events_recorded"] == len(action)
    assert stats["events_dropped"] == 0
    assert stats["allocs"] == int(np.isin(action, (0, 1, 2)).sum())
    assert stats["reuses"] == int((action == 1).sum())
    assert stats["frees"] == int(np.isin(action, (3, 4, 5)).sum())
    assert (stats["reuses"] > 0) == HAS_CPU_CACHE


def test_what_existed_before_counts_from_the_first_event_on() -> None:
    # GIVEN 3 MiB of arrays from before enable(), one of them about to go
    old = [mx.random.normal((512, 512)) for _ in range(3)]
    mx.eval(old)
    with Books() as books:
        active = mx.get_active_memory()
        assert active >= 3 << 20
        old.pop()
        new = mx.array([1.0, 2.0])
        recording = books.check()

        # THEN the total is right at once and the free has its size
        assert recording.active_at_enable == active
        first = books.events()[0]
        assert first["action"].startswith("FreeActive")
        assert (first["size"], first["traceback"]) == (1 << 20, None)
        assert recording.active == active - (1 << 20) + 8

        # AND the snapshot shows what is left of it as one block
        blocks = [
            block
            for segment in mlxmem.snapshot()["segments"]
            for block in segment["blocks"]
            if block["state"] == "active_allocated"
        ]
        assert sum(block["size"] for block in blocks) == recording.active
        labelled = [
            block
            for block in blocks
            if any(
                "allocated before mlxmem.enable()" in frame["name"]
                for frame in block["frames"]
            )
        ]
        assert len(labelled) == 1
        assert labelled[0]["size"] == recording.active - 8
        del new


@pytest.mark.usefixtures("cpu_cache")
def test_buffers_cached_before_enable() -> None:
    # GIVEN two buffers in the cache before recording begins
    arrays = [mx.random.normal((512, 512)), mx.random.normal((700, 700))]
    mx.eval(arrays)
    arrays.clear()
    with Books() as books:
        cached = mx.get_cache_memory()
        assert cached >= 4 * (512 * 512 + 700 * 700)

        # WHEN one is used again and the rest is cleared
        again = mx.array(np.ones((512, 512), np.float32))
        recording = books.check()
        assert recording.cache_at_enable == cached
        event = books.events()[0]
        assert (event["action"], event["size"]) == ("AllocReuse", 1 << 20)
        mx.clear_cache()

        # THEN both are accounted for
        gone = [e for e in books.events() if e["action"] == "FreeCacheToOS"]
        assert sum(e["size"] for e in gone) == cached - (1 << 20)
        del again


def test_a_snapshot_while_recording_goes_on(books: Books) -> None:
    keep = [mx.array([1.0] * 251)]
    first = mlxmem.snapshot()
    keep.append(mx.array([1.0] * 257))
    second = mlxmem.snapshot()
    assert len(second["device_traces"][0]) > len(first["device_traces"][0])
    assert mlxmem.is_enabled()
    books.check()


def test_memory_for_the_log_runs_out() -> None:
    # In a process of its own, whose memory is limited.
    target = Path(__file__).parent / "targets" / "log_without_memory.py"
    done = subprocess.run(
        [sys.executable, str(target)], capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_timestamps_are_those_of_the_monotonic_clock() -> None:
    # GIVEN allocations over more than a second, after which the clocks are compared
    # again, and when each began and ended, in microseconds
    spans = []
    with Books() as books:
        end = time.monotonic() + 2.5
        while time.monotonic() < end:
            before = time.monotonic_ns()
            array = mx.array(1.0)
            spans.append((before / 1e3, time.monotonic_ns() / 1e3))
            del array
            time.sleep(0.005)
        times = [event["timestamp_us"] for event in books.allocs()]
    assert len(times) == len(spans) > 100

    # THEN there is one moment of enable() from which all of them were counted
    latest = min(after - t for (_, after), t in zip(spans, times, strict=True))
    earliest = max(before - t for (before, _), t in zip(spans, times, strict=True))
    slack = 5  # a microsecond of rounding, and what the two clocks differ by
    assert earliest <= latest + slack
    # AND they never run backwards
    assert times == sorted(times)
