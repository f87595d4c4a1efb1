"""Limits over a recording, and when active rose above the memory limit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from handmade import STACKS, THREAD, Heap, heaps, quick
from hypothesis import given, strategies as st

from mlxmem import limits
from mlxmem.events import Action, Mark, SettingCall


def call(
    name: str,
    value: int | None,
    previous: int | None,
    at: int,
    began: int | None = None,
    stack: Any = (),
) -> SettingCall:
    mark = Mark(at, 10 * at - 5, THREAD, name)
    return SettingCall(mark, value, previous, stack, at if began is None else began)


def find(
    heap: Heap, calls: Any = (), limit: int | None = None, max_entries: int = 0
) -> tuple[list[tuple[int, str]], int]:
    recording = heap.recording(max_entries)
    marks, count = limits.crossings(
        recording.events,
        calls,
        active=recording.active,
        peak=recording.peak,
        limit=limit,
        dropped=recording.dropped,
    )
    return [(mark.at, mark.name) for mark in marks], count


def above(size: str) -> str:
    return f"active above the memory limit, {size}"


def up_and_down() -> Heap:
    """Return a heap whose active is 600, 1100, 600, 1200, 1300 bytes."""
    heap = Heap(active=100)
    heap.new(500)
    second = heap.new(500)
    heap.free(second)
    heap.new(600)
    heap.new(100)
    return heap


def test_each_rise_above_the_limit_is_a_mark_after_its_event() -> None:
    heap = up_and_down()

    marks, count = limits.crossings(
        heap.recording().events, (), active=1300, peak=1300, limit=1000
    )

    assert [(m.at, m.timestamp_us, m.thread_id, m.name) for m in marks] == [
        (2, 10, THREAD, above("1000 B")),
        (4, 30, THREAD, above("1000 B")),
    ]
    assert count == 2


def test_as_much_as_the_limit_is_not_above_it() -> None:
    assert find(up_and_down(), limit=1300) == ([], 0)
    assert find(up_and_down(), limit=1299) == ([(5, above("1.3 KiB"))], 1)
    assert find(Heap(), limit=0) == ([], 0)


def test_without_a_limit_nothing_is_above_it() -> None:
    assert find(up_and_down()) == ([], 0)
    assert find(up_and_down(), [call("set_cache_limit", 0, 9, 1)]) == ([], 0)


def test_a_call_changes_the_limit_for_the_events_after_it() -> None:
    # GIVEN a limit that is set after two events, below what is active, and raised
    # above it after four
    heap = up_and_down()
    calls = [
        call("set_memory_limit", 700, None, 2),
        call("clear_cache", 0, 5, 3),
        call("set_memory_limit", 1250, 700, 4),
    ]

    # THEN being above it is no crossing, but rising above it again is
    assert find(heap, calls) == ([(4, above("700 B")), (5, above("1.2 KiB"))], 2)
    # AND the first events had the one from before
    assert find(heap, calls, limit=650)[0][0] == (2, above("650 B"))


def test_calls_that_were_noted_out_of_order_count_in_order() -> None:
    calls = [
        call("set_memory_limit", 2000, 700, 4),
        call("set_memory_limit", 700, None, 0),
    ]

    assert find(up_and_down(), calls)[0] == [(2, above("700 B")), (4, above("700 B"))]


def test_dropped_events_count_in_the_place_of_a_mark() -> None:
    # GIVEN the last two of five events, before which 600 bytes were active
    heap = up_and_down()

    assert find(heap, limit=1000, max_entries=2) == ([(4, above("1000 B"))], 1)


def test_a_limit_of_any_size_is_read() -> None:
    calls = [call("set_memory_limit", 2**64 - 1, 0, 1)]

    assert find(up_and_down(), calls, limit=599) == ([(1, above("599 B"))], 1)


def test_the_first_thousand_are_kept_and_all_counted() -> None:
    heap = Heap()
    for _ in range(1_200):
        heap.free(heap.new(8), Action.FreeActiveToOS)

    marks, count = find(heap, limit=4)

    assert (len(marks), count) == (1_000, 1_200)
    assert marks[-1][0] == 2 * 999 + 1


@quick
@given(heaps(), st.integers(0, 1 << 21), st.data())
def test_crossings_are_those_of_the_allocators_own_totals(
    heap: Heap, limit: int, data: st.DataObject
) -> None:
    kept = data.draw(st.integers(0, len(heap.rows)))
    dropped = len(heap.rows) - kept if kept else 0

    found, count = find(heap, limit=limit, max_entries=kept)

    before = [heap.start[0], *(active for active, _ in heap.curve)]
    expected = [
        at
        for at in range(1, len(before))
        if at > dropped and before[at - 1] <= limit < before[at]
    ]
    assert [at for at, _ in found] == expected
    assert count == len(expected)


def at_start(
    calls: Any,
    dropped: int,
    begin: int | None = None,
    end: int | None = None,
    name: str = "set_cache_limit",
) -> int | None:
    return limits.limit_at_start(calls, name, dropped=dropped, begin=begin, end=end)


def test_a_limit_is_walked_back_through_the_calls() -> None:
    calls = [
        call("set_cache_limit", 5, 1, 2),
        call("set_memory_limit", 50, None, 3),
        call("set_cache_limit", 9, 5, 6),
    ]

    found = [at_start(calls, dropped, end=9) for dropped in (0, 1, 2, 5, 6)]
    assert found == [1, 1, 5, 5, 9]
    # AND where MLX gave no value back, only the later ones are known
    memory = [at_start(calls, at, end=50, name="set_memory_limit") for at in (0, 3)]
    assert memory == [50, 50]
    assert at_start(calls, 0, name="set_wired_limit") is None


def test_a_limit_that_nobody_set_is_the_one_of_the_beginning() -> None:
    assert at_start((), 0, begin=7, end=8) == 7
    assert at_start((), 3, begin=7, end=None) == 7
    assert at_start((), 3, begin=None, end=8) == 8


def test_a_call_before_the_first_event_counts_unless_events_are_missing() -> None:
    calls = [call("set_cache_limit", 5, 1, 0)]

    assert at_start(calls, 0, end=5) == 1
    assert at_start(calls, 0, begin=1, end=5) == 1
    assert at_start(calls, 3, begin=1, end=5) == 5


CHANGE = np.dtype(
    [
        ("at", "u8"),
        ("timestamp_us", "i8"),
        ("previous", "u8"),
        ("value", "u8"),
        ("thread_id", "u4"),
        ("which", "u4"),
    ]
)


def test_a_change_that_no_call_explains_becomes_a_call() -> None:
    # GIVEN a call during which its change was noticed, one that changed nothing, and
    # two changes that nobody called for
    known = call("set_cache_limit", 4, 0, at=7, began=5)
    idle = call("set_cache_limit", 8, 8, at=20, began=20)
    changes = np.array(
        [(6, 55, 0, 4, 1, 0), (20, 210, 4, 8, 77, 0), (30, 300, 9, 2**64 - 1, 77, 1)],
        CHANGE,
    )

    found = limits.with_unseen((known, idle), changes)

    assert found == (
        known,
        idle,
        SettingCall(Mark(20, 210, 77, "set_cache_limit"), 8, 4, (), 20),
        SettingCall(Mark(30, 300, 77, "set_memory_limit"), 2**64 - 1, 9, (), 30),
    )


def test_a_call_explains_one_change_of_its_own_function_and_value() -> None:
    known = call("set_memory_limit", 4, 0, at=7, began=5)
    row = (6, 55, 0, 4, 1, 1)
    for other in (
        (4, 55, 0, 4, 1, 1),  # before it began
        (6, 55, 0, 4, 1, 0),
        (6, 55, 0, 5, 1, 1),
    ):
        assert len(limits.with_unseen([known], np.array([other], CHANGE))) == 2
    assert limits.with_unseen([known], np.array([row], CHANGE)) == (known,)
    assert len(limits.with_unseen([known], np.array([row, row], CHANGE))) == 2


def settings(calls: Any) -> dict[str, Any]:
    return limits.settings(calls, at_start=(1, 60), at_end=(9, None), crossing_count=3)


def test_settings_tell_the_limits_and_the_last_calls() -> None:
    many = [call("clear_cache", 0, n, n, stack=STACKS[0]) for n in range(30)]
    calls = [
        call("set_wired_limit", 1 << 29, 0, 2, stack=STACKS[0]),
        call("set_wired_limit", 1 << 30, 0, 3, stack=STACKS[0]),
        *many,
    ]

    found = settings(calls)

    assert {name: found.pop(name) for name in list(found)[:7]} == {
        "memory_limit": None,
        "cache_limit": 9,
        "memory_limit_at_start": 60,
        "cache_limit_at_start": 1,
        "wired_limit": 1 << 30,
        "limit_crossings": 3,
        "settings_calls": 32,
    }
    assert list(found) == [f"call {number}" for number in range(13, 33)]
    assert found["call 32"] == (
        f"clear_cache: 29 B -> 0 B at model.py:12, 0.000 s, thread {THREAD}"
    )
    assert settings(())["wired_limit"] is None


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (
            SettingCall(
                Mark(9, 1_234_000, 123, "set_cache_limit"),
                4 << 30,
                0,
                [("/w/main.py", "<module>", 3), ("/w/case16.py", "encode", 17)],
            ),
            "set_cache_limit: 0 B -> 4.0 GiB at case16.py:17, 1.234 s, thread 123",
        ),
        (
            SettingCall(Mark(9, 2_000, 5, "set_memory_limit"), 64, None),
            "set_memory_limit: unknown -> 64 B by a call that was not seen: C++ code, "
            "or a reference from before enable(), 0.002 s, thread 5",
        ),
    ],
)
def test_a_call_is_one_line(found: SettingCall, text: str) -> None:
    assert limits.describe(found) == text
