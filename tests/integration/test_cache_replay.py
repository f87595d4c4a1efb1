"""The model of the cache against MLX itself: what it decides, MLX decided.

Each recording is replayed twice: followed, with each of MLX's decisions compared, and
from its requests alone, which must come to the same. Where MLX has no cache, there is
little to decide, and that must be told, too.
"""

from __future__ import annotations

import functools
import gc
import random
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from books import FOLLOWS_MUTEX, HAS_CPU_CACHE, ON_CUDA, PAGE, Books, settle
from case_run import CASES, recorded, run_case

import mlxmem
from mlxmem import recorder
from mlxmem.cache.outcomes import Outcome
from mlxmem.cache.policies import NO_LIMIT
from mlxmem.cache.replay import Followed, follow, predict
from mlxmem.cache.trace import Trace, of_recording
from mlxmem.events import Action, Recording
from mlxmem.ledger import Ledger
from mlxmem.reports.cache_trace import of_history
from mlxmem.reports.history import from_snapshot

KiB, MiB = 1 << 10, 1 << 20
HUGE = 1 << 40
NAMES = sorted(path.stem for path in CASES.glob("case*.py"))


def followed(recording: Recording) -> Followed:
    """Assert that the model decides as MLX did, and adds up to the same.

    `replayed` asserts more, for what no two threads raced in.
    """
    trace = of_recording(recording)
    got = follow(trace)
    totals = got.totals
    assert got.mismatches == [], (got.mismatches[:5], totals)
    assert (totals["mismatches"], totals["unseen"]) == (0, 0)

    ledger = Ledger(recording)
    events = recording.events[recording.events["size"] > 0]
    size, action = events["size"].astype(np.int64), events["action"]
    new, gone = action == Action.AllocNew, action == Action.FreeCacheToOS
    assert got.hits == np.count_nonzero(action == Action.AllocReuse)
    slab = new & (size <= 8) if ON_CUDA else new & False  # the slab has its end, too
    made, bytes_made = np.count_nonzero(new), int(size[new].sum())
    assert 0 <= made - totals["system_allocations"] <= np.count_nonzero(slab)
    assert 0 <= bytes_made - totals["system_bytes"] <= size[slab].sum()
    assert totals["evictions"] == np.count_nonzero(gone)
    assert totals["evicted_bytes"] == size[gone].sum()
    assert totals["active"] == recording.active
    assert totals["cache"] == recording.cache
    assert totals["peak_active"] == ledger.peak
    reserved = [ledger.start_active + ledger.start_cache, *ledger.reserved.tolist()]
    if not totals["raced"]:
        assert totals["peak_reserved"] == max(reserved)
    kinds = np.array(got.outcomes)[trace.rows["op"] == 0]
    reused = action[action <= Action.AllocReuse] == Action.AllocReuse
    assert np.array_equal(kinds == Outcome.Hit, reused)
    assert trace.policy.has_cache is HAS_CPU_CACHE
    if not HAS_CPU_CACHE:
        assert got.hits == totals["evictions"] == totals["peak_cache"] == 0
    return got


def replayed(recording: Recording) -> Followed:
    """Assert the same, and that the requests alone lead to it as well."""
    got = followed(recording)
    free = predict(got.trace, fixed_limit=False, outcomes=True)
    assert free.outcomes is not None
    if FOLLOWS_MUTEX:  # the workers' frees race with allocations and calls
        assert abs(free.hits - got.hits) <= 2 + got.allocations // 100
        return got
    assert np.array_equal(free.outcomes, got.outcomes)
    # Counted only where there is a recording to compare with.
    apart = {"checked", "mismatches", "raced", "unseen"}
    one, other = dict(free.totals), dict(got.totals)
    assert {k: one[k] for k in one if k not in apart} == {
        k: other[k] for k in other if k not in apart
    }
    return got


def both_traces(books: Books) -> tuple[Trace, Trace]:
    """The trace of the recording and that of its snapshot, of one moment."""
    gc.disable()
    try:
        recording, _ = books.read()
        one = of_recording(recording)
        return one, of_history(from_snapshot(mlxmem.snapshot()))
    finally:
        gc.enable()


def edges(n: int) -> list[int]:
    """Sizes at the ends of the windows around n bytes."""
    near = (n - 1, n, n + 1, 2 * n - 1, 2 * n, n + 2 * PAGE - 1, n + 2 * PAGE)
    return [size for size in near if size > 0]


_zeros = np.zeros(2 * MiB + 4 * PAGE, np.uint8)


def leaf(size: int) -> mx.array:
    """Make an array of so many bytes, at once and on this thread."""
    return mx.array(_zeros[:size])


def churn(
    pick: random.Random, steps: int, keep: list[mx.array], largest: int = 300_000
) -> None:
    """Allocate and free all kinds of sizes, and turn the limits now and then."""
    kinds = [n for n in (1, 8, 100, 4096, 10_000, 70_000, 300_000) if n <= largest]
    bases = [pick.choice(kinds) for _ in range(3)]
    sizes = [size for n in bases for size in edges(n)]
    for _ in range(steps):
        chance = pick.random()
        if chance < 0.5:
            keep.append(leaf(pick.choice(sizes)))
        elif chance < 0.6:
            keep.append(mx.exp(mx.ones((pick.choice(sizes) // 4 + 1,))) * 2)
            mx.eval(keep[-1])
        elif chance < 0.99 and keep:
            keep.pop(pick.randrange(len(keep)))
        elif chance < 0.993:
            mx.clear_cache()
        elif chance < 0.998:
            mx.set_cache_limit(pick.choice([0, 1, 50_000, MiB, 5 * MiB, HUGE]))
        while len(keep) > 40:
            keep.pop(pick.randrange(len(keep)))


def generate(tokens: int, stepped: bool) -> None:
    """Generate token by token with a cache of keys that grows."""
    step = 16
    keys = mx.zeros((1, 4, step if stepped else 1, 32))
    for used in range(1, tokens):
        new = mx.random.normal((1, 4, 1, 32))
        if not stepped:
            keys = mx.concatenate([keys, new], axis=2)
        else:
            if used >= keys.shape[2]:
                more = mx.zeros((1, 4, step, 32))
                keys = mx.concatenate([keys, more], axis=2)
            keys[..., used : used + 1, :] = new
        scores = mx.softmax(new @ keys.transpose(0, 1, 3, 2), axis=-1)
        mx.eval(scores @ keys, keys)


@pytest.mark.parametrize("name", [n for n in NAMES if not n.startswith("case32")])
def test_every_case(name: str) -> None:
    run = recorded(name)

    # Threads may have raced, and then what one of them got depends on who was first.
    if followed(run.recording).totals["raced"] == 0:
        replayed(run.recording)


def test_a_ring_that_overflowed(tmp_path: Path) -> None:
    run = run_case("case42_event_flood", tmp_path, max_entries=10_000)
    assert run.recording.dropped > 30_000

    got = replayed(run.recording)

    assert got.trace.dropped == run.recording.dropped


def test_training(monkeypatch: pytest.MonkeyPatch) -> None:
    examples = Path(__file__).resolve().parents[2] / "examples"
    monkeypatch.syspath_prepend(str(examples))
    import train_transformer

    with Books() as books:
        trainer = train_transformer.Trainer(batch=2, context=32)
        for _ in range(4):
            trainer.step()
        recording, _ = books.read()
        got = replayed(recording)
        del trainer
    assert got.allocations > 1000
    sys.modules.pop("train_transformer")


@pytest.mark.parametrize("stepped", [False, True])
def test_generation(books: Books, stepped: bool) -> None:
    generate(200, stepped)
    recording, _ = books.read()

    got = replayed(recording)

    if HAS_CPU_CACHE:
        assert got.hit_rate > 0.5


@pytest.mark.parametrize("max_entries", [0, 500])
@pytest.mark.parametrize("seed", range(6))
def test_anything_with_arrays_and_a_cache_from_before(
    seed: int, max_entries: int
) -> None:
    # GIVEN arrays and cached buffers before anybody watched, and some limit
    pick = random.Random(seed)
    keep: list[mx.array] = []
    mx.set_cache_limit(pick.choice([100_000, MiB, HUGE]))
    churn(pick, 200, keep)
    for _ in range(5):
        keep.append(leaf(5000))
    del keep[-3:]

    # WHEN much happens, also more than the ring holds
    with Books(max_entries) as books:
        churn(pick, 3000, keep)
        recording, _ = books.read()

        # THEN
        assert (recording.dropped > 0) is (max_entries > 0)
        got = replayed(recording)
        assert got.trace.active > 0


def test_threads_while_the_cache_is_cleared_and_trimmed(books: Books) -> None:
    # GIVEN threads that evaluate on streams of their own
    stop = threading.Event()

    def work(seed: int) -> None:
        pick = random.Random(seed)
        with mx.stream(mx.new_stream(mx.default_device())):
            while not stop.is_set():
                mx.eval(mx.exp(mx.ones((pick.randrange(1, 20_000),))) + 1)
                leaf(pick.choice([100, 5000, 70_000]))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()

    # WHEN limits are set and the cache is cleared all the time
    pick = random.Random(9)
    for _ in range(600):
        mx.set_cache_limit(pick.choice([0, 50_000, MiB, HUGE]))
        leaf(pick.choice([100, 5000, 70_000]))
        mx.clear_cache()
    stop.set()
    for thread in threads:
        thread.join()

    # THEN each decision is explained, by another order of two threads at times
    recording, _ = books.read()
    got = followed(recording)
    assert got.totals["checked"] > 1000


def settled_program(seed: int) -> None:
    """A program that asks for the same in the same order each time it runs.

    A stream worker frees what an operation no longer needs, at its own time. So each
    operation is waited for, which leaves nothing to race with.
    """
    pick = random.Random(seed)
    keep: list[mx.array] = []
    sizes = [s for n in (100, 5000, 70_000, 400_000, MiB) for s in edges(n)]
    for step in range(1500):
        chance = pick.random()
        if chance < 0.4:
            keep.append(leaf(pick.choice(sizes)))
        elif chance < 0.55 and keep:
            keep.append(keep[pick.randrange(len(keep))] + 1)
            mx.eval(keep[-1])
            mx.synchronize()
        elif keep:
            keep.pop(pick.randrange(len(keep)))
        while len(keep) > 50:
            keep.pop(pick.randrange(len(keep)))
        if step in (700, 1100):
            mx.clear_cache()


def record_settled(limit: int, seed: int) -> Trace:
    """Record that program under a cache limit, from an empty cache on."""
    gc.collect()
    mx.set_cache_limit(limit)
    mx.synchronize()
    mx.clear_cache()
    with Books() as books:
        gc.disable()  # what it would free is not the program's
        try:
            settled_program(seed)
            recording, _ = books.read()
        finally:
            gc.enable()
    followed(recording)
    return of_recording(recording)


@pytest.mark.usefixtures("cpu_cache")
@pytest.mark.parametrize("recorded_under", [0, 8 * MiB, HUGE])
def test_what_another_limit_would_do_is_what_it_does(recorded_under: int) -> None:
    # GIVEN a program recorded under one limit
    trace = record_settled(recorded_under, seed=5)
    hits = []
    for limit in (0, MiB, 8 * MiB, 64 * MiB, HUGE):
        # WHEN it is predicted under another, and then really runs under it
        policy = trace.policy.with_limits(min(limit, NO_LIMIT))
        predicted = predict(trace, policy, outcomes=True)
        there = follow(record_settled(limit, seed=5))

        # THEN that is what was predicted, request by request
        assert there.mismatches == []
        assert predicted.outcomes is not None
        alloc, alloc_there = trace.allocations, there.trace.allocations
        assert np.array_equal(
            predicted.outcomes[alloc] == Outcome.Hit,
            there.outcomes[alloc_there] == Outcome.Hit,
        )
        expected: dict[str, Any] = dict(predicted.totals)
        found: dict[str, Any] = dict(there.totals)
        names = ["system_allocations", "system_bytes", "evictions", "evicted_bytes"]
        names += ["peak_active", "peak_cache", "peak_reserved", "waste", "cache"]
        assert {n: expected[n] for n in names} == {n: found[n] for n in names}
        assert expected["count"][Outcome.Hit] == found["count"][Outcome.Hit]
        hits.append(there.hits)
    assert hits[0] == 0 < hits[1] < hits[-1]


@pytest.mark.parametrize("max_entries", [0, 300])
def test_a_snapshot_gives_the_same_trace(max_entries: int) -> None:
    # GIVEN a recording with a past, with calls, threads and empty arrays
    pick = random.Random(3)
    keep: list[mx.array] = []
    churn(pick, 100, keep)
    with Books(max_entries) as books:
        churn(pick, 800, keep)
        mx.set_cache_limit(MiB)
        keep.append(mx.zeros((0,)))
        mx.eval(keep[-1])
        churn(pick, 60, keep)
        mx.clear_cache()

        # WHEN it is read in both forms
        one, other = both_traces(books)

    # THEN both say the same
    assert np.array_equal(one.rows, other.rows)
    assert np.array_equal(one.cached, other.cached)
    assert (one.unknown, one.active) == (other.unknown, other.active)
    assert one.policy == other.policy
    assert one.dropped == other.dropped
    assert follow(other).mismatches == []


@pytest.mark.slow
def test_a_million_events() -> None:
    # Many seeds of each, so that rare orders and sizes come up as well.
    events = 0

    def session(body: Callable[[], None]) -> None:
        nonlocal events
        mlxmem.enable(0, stacks=False)
        body()
        settle()
        recording = recorder.recording()
        mlxmem.disable()
        replayed(recording)
        events += len(recording.events)

    def mixed(seed: int) -> Callable[[], None]:
        def body() -> None:
            churn(random.Random(seed), 50_000, [], largest=10_000)

        return body

    session(lambda: generate(400, stepped=False))
    session(lambda: generate(400, stepped=True))
    seed = 0
    while events < 1_000_000:
        seed += 1
        if seed % 5 == 0:
            session(functools.partial(generate, 200, stepped=seed % 10 == 0))
        session(mixed(seed))
        mx.set_cache_limit(32 * MiB)
