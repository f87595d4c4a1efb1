"""Limits that change unseen by the wrappers, and the time that allocations take."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest
from books import HAS_CPU_CACHE, Books

import mlxmem
from mlxmem import _hook
from mlxmem.events import Action, AllocatorTimes

MiB = 1 << 20
CACHE, MEMORY = 0, 1  # of RAW_LIMIT_CHANGE's which

# References from before enable(), as another module may hold: they go past mlxmem.
set_cache_limit = mx.set_cache_limit
set_memory_limit = mx.set_memory_limit


def cache_limit() -> int:
    """Return the cache limit, which MLX tells only who sets it."""
    limit = int(set_cache_limit(0))
    set_cache_limit(limit)
    return limit


def memory_limit() -> int:
    """Return the memory limit, for which MLX has a function since 0.32."""
    limit = int(set_memory_limit(8 << 30))
    set_memory_limit(limit)
    return limit


@pytest.fixture(autouse=True)
def _memory_limit() -> Iterator[None]:
    """Leave the memory limit as it was."""
    limit = memory_limit()
    yield
    set_memory_limit(limit)


def fill_cache(size: int, count: int) -> None:
    """Leave some buffers of these bytes in the cache."""
    keep = [mx.zeros((size,), mx.uint8) for _ in range(count)]
    mx.eval(keep)


def times() -> AllocatorTimes:
    found = _hook.allocator_times()
    assert found is not None
    return found


@pytest.mark.usefixtures("cpu_cache")
def test_a_cache_limit_that_is_set_past_mlxmem_is_seen(books: Books) -> None:
    # GIVEN three buffers in the cache
    set_cache_limit(32 * MiB)
    fill_cache(MiB, 3)
    books.check()
    seen = len(_hook.limit_changes())

    # WHEN the limit is set through an early reference, and something is allocated
    at, us = _hook.position()
    set_cache_limit(0)
    keep = mx.array([1.0])

    # THEN it is noted with both values, before the buffers that it pushed out
    (change,) = _hook.limit_changes()[seen:]
    assert (change["which"], change["previous"], change["value"]) == (
        CACHE,
        32 * MiB,
        0,
    )
    assert change["thread_id"] == threading.get_native_id()
    events = books.check().events
    assert change["at"] == at
    assert set(events["action"][at : at + 3].tolist()) == {Action.FreeCacheToOS}
    assert us <= change["timestamp_us"] <= events["timestamp_us"][at]
    del keep


@pytest.mark.usefixtures("cpu_cache")
def test_a_change_that_is_noticed_late_has_the_time_of_what_it_did(
    books: Books,
) -> None:
    # GIVEN buffers in the cache
    set_cache_limit(32 * MiB)
    fill_cache(MiB, 3)
    books.check()

    # WHEN the limit is set, and nobody looks for a while
    set_cache_limit(0)
    time.sleep(0.1)
    _hook.observe()

    # THEN its time and that of the buffers are from before that
    change = _hook.limit_changes()[-1]
    events = books.check().events
    assert change["timestamp_us"] <= events["timestamp_us"][change["at"]]
    assert _hook.position()[1] - events["timestamp_us"][-1] >= 90_000


@pytest.mark.usefixtures("cpu_cache")
def test_a_memory_limit_that_is_set_past_mlxmem_is_seen(books: Books) -> None:
    # GIVEN a memory limit at the session's start
    old = memory_limit()
    keep = mx.array([1.0])

    # WHEN another is set, and memory is freed
    set_memory_limit(old + MiB)
    del keep

    # THEN it is noted before that
    (change,) = _hook.limit_changes()
    assert (change["which"], change["previous"], change["value"]) == (
        MEMORY,
        old,
        old + MiB,
    )
    assert change["at"] == 1
    assert len(books.check().events) == 2


@pytest.mark.usefixtures("cpu_cache")
def test_both_limits_are_two_changes(books: Books) -> None:
    cache, memory = cache_limit(), memory_limit()
    set_cache_limit(cache + 1)
    set_memory_limit(memory + 1)
    books.check()
    changes = _hook.limit_changes()
    assert changes["which"].tolist() == [CACHE, MEMORY]
    assert changes["value"].tolist() == [cache + 1, memory + 1]
    assert len(set(changes["at"].tolist())) == 1


@pytest.mark.usefixtures("cpu_cache")
def test_a_wrapped_call_is_seen_too(books: Books) -> None:
    # Not after the position that the wrapper notes.
    old = cache_limit()
    mx.set_cache_limit(old + MiB)
    at, us = _hook.position()
    (change,) = _hook.limit_changes()
    assert (change["previous"], change["value"]) == (old, old + MiB)
    assert change["at"] <= at
    assert change["timestamp_us"] <= us


def test_no_change_is_noted_where_there_was_none(books: Books) -> None:
    mx.eval([mx.exp(mx.full((n,), 1.0)) for n in range(1, 200)])
    set_cache_limit(cache_limit())
    books.check()
    assert len(_hook.limit_changes()) == 0


def test_nothing_is_noted_where_mlx_has_no_cpu_cache(books: Books) -> None:
    if HAS_CPU_CACHE:
        pytest.skip("this MLX has one")
    set_cache_limit(cache_limit() + MiB)
    set_memory_limit(memory_limit() + MiB)
    mx.eval(mx.exp(mx.ones((10,))))
    books.check()
    assert len(_hook.limit_changes()) == 0
    assert _hook.limits_at_start()[0] is None


def test_the_limits_at_the_start_are_mlxs() -> None:
    # GIVEN limits that were set before enable()
    set_cache_limit(48 * MiB)
    memory = memory_limit()

    # WHEN a session begins and one changes
    with Books():
        start = _hook.limits_at_start()
        set_cache_limit(49 * MiB)

        # THEN those of its start are told
        assert start == (48 * MiB if HAS_CPU_CACHE else None, memory)
        assert _hook.limits_at_start() == start


@pytest.mark.usefixtures("cpu_cache")
def test_a_new_session_starts_clean() -> None:
    # GIVEN a session with a change and measured allocations
    with Books() as books:
        old = cache_limit()
        set_cache_limit(old + MiB)
        keep = [mx.array([float(n)]) for n in range(32)]
        books.check()
        assert len(_hook.limit_changes()) == 1
        assert times() != AllocatorTimes()

        # WHEN it ends, THEN what was noted stays, and later changes are not seen
        mlxmem.disable()
        set_cache_limit(old + 2 * MiB)
        keep.append(mx.array([1.0]))
        _hook.observe()
        (change,) = _hook.limit_changes()
        assert change["value"] == old + MiB
        assert times() != AllocatorTimes()

        # WHEN the next one begins, THEN it has none, and starts from the limits of now
        books.restart()
        assert len(_hook.limit_changes()) == 0
        assert times() == AllocatorTimes()
        assert _hook.limits_at_start()[0] == old + 2 * MiB
        keep.append(mx.array([1.0]))
        assert len(_hook.limit_changes()) == 0
        del keep


@pytest.mark.usefixtures("cpu_cache")
def test_the_last_ten_thousand_changes_are_kept(books: Books) -> None:
    first = cache_limit()
    for n in range(1, 10_002):
        set_cache_limit(first + n)
        _hook.position()
    changes = _hook.limit_changes()
    assert changes["value"].tolist() == [first + n for n in range(2, 10_002)]
    assert changes["previous"].tolist() == [first + n for n in range(1, 10_001)]
    assert np.all(np.diff(changes["timestamp_us"]) >= 0)


@pytest.mark.usefixtures("cpu_cache")
def test_limits_change_while_threads_allocate(books: Books) -> None:
    # GIVEN threads that fill the cache
    done = threading.Event()

    def work(seed: int) -> None:
        with mx.stream(mx.new_stream(mx.cpu)):
            while not done.is_set():
                mx.eval(mx.full((1000 + 500 * seed,), 1.0) + 1.0)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()

    # WHEN the limit goes up and down meanwhile
    start = cache_limit()
    for n in range(300):
        set_cache_limit(n % 2 * MiB)
        time.sleep(0.001)
    done.set()
    for thread in threads:
        thread.join()
    set_cache_limit(start)

    # THEN the books balance, and the changes follow from one another
    events = books.check(readers=False).events
    changes = _hook.limit_changes()
    assert len(changes) > 10
    assert changes["value"][-1] == start
    assert np.array_equal(changes["previous"][1:], changes["value"][:-1])
    assert np.all(changes["previous"] != changes["value"])
    assert np.all(np.diff(changes["at"].astype(np.int64)) >= 0)
    assert np.all(np.diff(changes["timestamp_us"]) >= 0)
    # None is later than the event that follows it.
    before = changes[changes["at"] < len(events)]
    assert np.all(before["timestamp_us"] <= events["timestamp_us"][before["at"]])


def test_one_of_sixteen_allocations_is_measured(books: Books) -> None:
    # GIVEN an empty cache
    set_cache_limit(32 * MiB)
    mx.clear_cache()
    assert times() == AllocatorTimes()

    # WHEN 4,800 buffers are made, THEN some 300 were measured
    keep = [mx.array([float(n)]) for n in range(4800)]
    new = times()
    assert 200 < new.new < 420
    assert new.reused == 0
    assert new.new_ns > 0

    # WHEN as many are made of those that went to the cache
    keep.clear()
    keep += [mx.array([float(n)]) for n in range(4800)]

    # THEN these are told apart
    all_ = times()
    if HAS_CPU_CACHE:
        assert all_.new == new.new
        assert 200 < all_.reused < 420
        assert all_.new_ns == new.new_ns
        assert all_.reused_ns > 0
    else:
        assert 400 < all_.new < 840
        assert (all_.reused, all_.reused_ns) == (0, 0)
        assert all_.new_ns > new.new_ns
    # The whole loop took longer than what was measured of it.
    _, us = _hook.position()
    assert all_.new_ns + all_.reused_ns <= 1000 * us
    assert len(books.check().events) == 14_400


@pytest.mark.usefixtures("cpu_cache")
@pytest.mark.parametrize("period", [2, 4, 16])
def test_a_periodic_program_is_measured_in_all_its_parts(
    books: Books, period: int
) -> None:
    # GIVEN a program that reuses buffers, but for every second, fourth or sixteenth,
    # which is too large for the cache
    set_cache_limit(MiB)
    mx.clear_cache()
    small, large = np.zeros(100, np.uint8), np.zeros(2 * MiB, np.uint8)
    mx.array(small)  # goes to the cache
    before = times()

    # WHEN it runs
    for n in range(4800):
        mx.array(small if n % period else large)

    # THEN of both kinds one of sixteen was measured
    events = books.check(readers=False).events
    action = events["action"]
    made = [int((action == a).sum()) for a in (Action.AllocNew, Action.AllocReuse)]
    assert made == [4800 // period + 1, 4800 - 4800 // period]
    all_ = times()
    measured = [all_.new - before.new, all_.reused - before.reused]
    assert 200 < sum(measured) < 420
    for count, of in zip(measured, made, strict=True):
        assert count > 0
        assert abs(count - of / 16) < 6 * (of / 16) ** 0.5


def test_allocations_of_no_bytes_are_not_measured(books: Books) -> None:
    keep = [mx.array([]) for _ in range(640)]
    assert times() == AllocatorTimes()
    keep += [mx.array([1.0]) for _ in range(62)]
    assert times().new + times().reused >= 1
    del keep


def test_each_thread_measures_its_own(books: Books) -> None:
    kept: list[list[mx.array]] = []

    def work() -> None:
        kept.append([mx.array([float(n)]) for n in range(1600)])

    # GIVEN new threads, WHEN all allocate at once
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    # THEN each measured one of sixteen
    assert 260 < times().new + times().reused < 560
    kept.clear()
    books.check()
