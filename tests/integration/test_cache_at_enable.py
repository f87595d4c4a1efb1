"""What lay in MLX's cache when a session began."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest
from books import HAS_CPU_CACHE, Books, settle

import mlxmem
from mlxmem import _hook, recorder
from mlxmem.events import RAW_CACHED, Action, Records

MiB = 1 << 20


@pytest.fixture(autouse=True)
def _empty_cache() -> None:
    """Begin with nothing in the cache, and room in it."""
    mx.set_cache_limit(64 * MiB)
    settle()
    mx.clear_cache()


def leave_in_cache(sizes: Sequence[int]) -> None:
    """Free one buffer of each of these sizes in bytes, in this order."""
    # All are made before the first is freed, which the next could take otherwise.
    arrays = [mx.array(np.zeros(size, np.uint8)) for size in sizes]
    arrays.reverse()
    while arrays:
        arrays.pop()
    settle()


def cache_at_start() -> Records:
    found = _hook.cache_at_start()
    assert found is not None
    assert found.dtype == RAW_CACHED
    return found


@pytest.mark.usefixtures("cpu_cache")
def test_the_cache_is_listed_oldest_first() -> None:
    # GIVEN buffers that were freed in this order
    sizes = [50_000, 1_000, 200_000, 1_000, 30_000, MiB]
    leave_in_cache(sizes)

    # WHEN a session begins, THEN it knows them
    with Books():
        found = cache_at_start()
        assert found["size"].tolist() == sizes
        assert len(set(found["addr"].tolist())) == len(sizes)
        assert found["size"].sum() == mx.get_cache_memory()


@pytest.mark.usefixtures("cpu_cache")
def test_a_buffer_that_was_used_again_is_the_newest() -> None:
    leave_in_cache([50_000, 1_000, 200_000])
    again = mx.array(np.zeros(50_000, np.uint8))
    del again
    settle()
    with Books():
        assert cache_at_start()["size"].tolist() == [1_000, 200_000, 50_000]


@pytest.mark.usefixtures("cpu_cache")
def test_the_addresses_are_those_of_the_events() -> None:
    # GIVEN a session that began with a cache
    leave_in_cache([50_000, 1_000, 200_000, 1_000])
    with Books() as books:
        found = cache_at_start()

        # WHEN the cache is emptied
        mx.clear_cache()

        # THEN the buffers that it returned are those that were found
        events = books.check().events
        events = events[events["action"] == Action.FreeCacheToOS]
        returned = events[["addr", "size"]].tolist()
        assert sorted(returned) == sorted(found.tolist())

        # AND the list stays as it was
        assert cache_at_start().tolist() == found.tolist()


@pytest.mark.usefixtures("cpu_cache")
def test_a_trim_returns_the_oldest() -> None:
    leave_in_cache([200_000, 1_000, 200_000, MiB])
    with Books() as books:
        found = cache_at_start()
        mx.set_cache_limit(MiB + 201_000)
        events = books.check().events
        assert events["action"].tolist() == [Action.FreeCacheToOS]
        assert events[["addr", "size"]].tolist() == found[:1].tolist()


@pytest.mark.usefixtures("cpu_cache")
def test_one_buffer_and_ten_thousand() -> None:
    leave_in_cache([1_000])
    with Books():
        assert cache_at_start()["size"].tolist() == [1_000]
    mx.clear_cache()
    sizes = np.random.default_rng(1).integers(1, 5_000, 10_000).tolist()
    leave_in_cache(sizes)
    with Books():
        assert cache_at_start()["size"].tolist() == sizes


def test_an_empty_cache_is_known() -> None:
    with Books() as books:
        assert len(cache_at_start()) == 0
        # What is cached in the session does not count.
        leave_in_cache([1_000, 50_000])
        assert len(cache_at_start()) == 0
        books.check()


def test_nothing_is_listed_where_mlx_has_no_cpu_cache() -> None:
    if HAS_CPU_CACHE:
        pytest.skip("this MLX has one")
    leave_in_cache([1_000, 50_000])
    with Books():
        assert len(cache_at_start()) == 0


@pytest.mark.usefixtures("cpu_cache")
def test_each_session_has_its_own() -> None:
    with Books() as books:
        # GIVEN a session whose buffers go to the cache
        leave_in_cache([1_000, 50_000])

        # WHEN it ends, THEN what it knows of its start stays
        mlxmem.disable()
        leave_in_cache([2_000])
        assert len(cache_at_start()) == 0

        # WHEN the next begins, THEN it finds them
        books.restart()
        assert cache_at_start()["size"].tolist() == [1_000, 50_000, 2_000]


@pytest.mark.usefixtures("cpu_cache")
@pytest.mark.parametrize("empties", [True, False])
def test_sessions_begin_while_threads_use_the_cache(empties: bool) -> None:
    # GIVEN threads that fill the cache, and others that empty and trim it
    leave_in_cache([100_000 + n for n in range(50)])
    done = threading.Event()

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        with mx.stream(mx.new_stream(mx.cpu)):
            while not done.is_set():
                n = int(rng.integers(1, 20_000))
                mx.eval(mx.full((n,), 1.0) + 1.0)

    def clear() -> None:
        while not done.is_set():
            mx.clear_cache()
            time.sleep(0.0002)

    def trim() -> None:
        while not done.is_set():
            mx.set_cache_limit(40_000)
            mx.set_cache_limit(64 * MiB)
            time.sleep(0.0002)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    if empties:
        threads += [threading.Thread(target=clear), threading.Thread(target=trim)]
    for thread in threads:
        thread.start()

    # WHEN sessions begin and end meanwhile
    known = filled = 0
    try:
        for _ in range(200):
            mlxmem.enable(stacks=False)
            mlxmem.disable()
            found = _hook.cache_at_start()
            recording = recorder.recording()
            assert _hook.totals().unexplained == 0

            # THEN what is known of the cache adds up
            if found is not None:
                known += 1
                filled += len(found) > 0
                assert np.all(found["size"] > 0)
                assert found["size"].sum() == recording.cache_at_enable
                assert len(np.unique(found["addr"])) == len(found)
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert known >= (1 if empties else 150)
    assert filled >= (0 if empties else 150)
