"""The model of CUDA's cache against MLX itself: what it decides, MLX decided."""

from __future__ import annotations

import functools
import gc
import random
import threading
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest
import workloads
from books import Books
from test_cache_replay import both_traces, churn, followed, generate, leaf, replayed

from mlxmem.cache.replay import Followed, follow
from mlxmem.cache.trace import of_recording

pytestmark = pytest.mark.cuda

MiB = 1 << 20


def agrees(books: Books) -> Followed:
    """Assert 0 mismatches under CUDA's rules, and the same from the requests alone."""
    recording, _ = books.read()
    policy = of_recording(recording).policy
    assert (policy.name, policy.page, policy.slab_size) == ("cuda", 16 << 10, 8)
    got = replayed(recording)
    print({name: value for name, value in got.totals.items() if isinstance(value, int)})
    return got


def many_leaves() -> None:
    churn(random.Random(1), 4000, [])


def train() -> None:
    step = workloads.training()
    for _ in range(5):
        step()


PROGRAMS: dict[str, Callable[[], object]] = {
    "leaves": many_leaves,
    "training": train,
    "generation": functools.partial(workloads.generate, 150),
    "stepped": functools.partial(generate, 100, True),
    "concatenated": functools.partial(generate, 100, False),
}


@pytest.mark.parametrize("limit", [None, 0, 300_000, 2 * MiB])
@pytest.mark.parametrize("program", PROGRAMS)
def test_single_threaded_programs(program: str, limit: int | None) -> None:
    # GIVEN MLX's own limit, or a small one
    if limit is not None:
        mx.set_cache_limit(limit)
    mx.clear_cache()

    # WHEN a program runs
    with Books() as books:
        PROGRAMS[program]()
        gc.collect()
        got = agrees(books)

    # THEN each decision was the model's
    assert got.allocations > 300
    if limit is None:
        assert got.hit_rate > 0.2, got.hit_rate


@pytest.mark.parametrize("max_entries", [0, 500])
@pytest.mark.parametrize("seed", range(3))
def test_arrays_and_a_cache_from_before(seed: int, max_entries: int) -> None:
    pick = random.Random(seed)
    keep: list[mx.array] = []
    mx.set_cache_limit(pick.choice([100_000, MiB, 1 << 40]))
    churn(pick, 200, keep)
    with Books(max_entries) as books:
        churn(pick, 2000, keep)
        agrees(books)


def test_a_memory_limit(books: Books) -> None:
    # GIVEN a limit that new buffers reach again and again
    mx.clear_cache()
    mx.set_memory_limit(mx.get_active_memory() + 3 * MiB)
    many_leaves()

    got = agrees(books)

    assert got.totals["evictions"] > 10


def test_threads(books: Books) -> None:
    stop = threading.Event()
    failed: list[BaseException] = []

    def work(seed: int) -> None:
        pick = random.Random(seed)
        try:
            with mx.stream(mx.new_stream(mx.default_device())):
                while not stop.is_set():
                    mx.eval(mx.exp(mx.ones((pick.randrange(1, 20_000),))) + 1)
                    leaf(pick.choice([100, 5000, 70_000]))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    pick = random.Random(9)
    for _ in range(300):
        mx.set_cache_limit(pick.choice([0, 50_000, MiB, 1 << 40]))
        leaf(pick.choice([100, 5000, 70_000]))
        mx.clear_cache()
    stop.set()
    for thread in threads:
        thread.join()
    assert failed == []

    recording, _ = books.read()
    got = followed(recording)
    print(dict(got.totals))
    assert got.totals["checked"] > 500


def test_a_snapshot_gives_the_same_trace() -> None:
    pick = random.Random(3)
    keep: list[mx.array] = []
    churn(pick, 100, keep)
    with Books() as books:
        churn(pick, 800, keep)
        mx.set_cache_limit(MiB)
        churn(pick, 60, keep)
        one, other = both_traces(books)

    assert one.policy == other.policy
    # A snapshot's addresses are ranges of its own.
    fields = ["size", "requested", "owner", "op", "recorded", "call", "after_look"]
    assert np.array_equal(one.rows[fields], other.rows[fields])
    assert np.array_equal(one.cached["size"], other.cached["size"])
    assert follow(other).mismatches == []
