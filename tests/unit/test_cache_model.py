"""The model of the cache against the slow one of cache_reference.py."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from cache_reference import (
    ALLOC,
    BEGINS,
    CACHE_LIMIT,
    CLEAR as CLEAR_CACHE,
    ENDS,
    EVICT,
    FREE,
    Machine,
    Step,
    make_trace,
    sums_of,
)
from hypothesis import HealthCheck, assume, given, settings, strategies as st

from mlxmem.cache._replay import ROW
from mlxmem.cache.outcomes import Outcome
from mlxmem.cache.policies import CpuPolicy, CudaPolicy, MetalPolicy, Policy
from mlxmem.cache.replay import Followed, follow, predict
from mlxmem.cache.trace import Trace, policy_of

KiB, MiB, GiB = 1 << 10, 1 << 20, 1 << 30

thorough = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def altered(policy: Policy, **values: int) -> Policy:
    """The same policy with smaller numbers, so that its rules bite."""
    made = policy.with_limits()
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


def policies(kind: str) -> st.SearchStrategy[Policy]:
    """Policies whose limits small programs run into."""
    small = st.sampled_from([0, 1, 100, 5000, 20_000, 100_000, 300_000, MiB, 4 * MiB])
    if kind == "no cache":
        return st.builds(lambda n: CpuPolicy(n, has_cache=False), small)
    if kind == "cpu":
        return st.builds(CpuPolicy, small | st.just(32 * MiB))
    sizes = st.sampled_from([60_000, 200_000, 777_777, 3 * MiB])
    limits = st.none() | small
    slab = st.sampled_from([0, 1, 2, 5000])
    if kind == "metal":
        return st.builds(
            lambda size, cache, memory, slabs, count: altered(
                MetalPolicy(size, 2 * size).with_limits(cache, memory),
                slab_blocks=slabs,
                resource_limit=count,
            ),
            sizes,
            limits,
            limits,
            slab,
            st.sampled_from([3, 8, 499_000]),
        )
    return st.builds(
        lambda size, cache, memory, slabs: altered(
            CudaPolicy(size).with_limits(cache, memory), slab_blocks=slabs
        ),
        sizes,
        limits,
        limits,
        slab,
    )


KINDS = ("cpu", "no cache", "metal", "cuda")

BASES = (1, 8, 100, 255, 1000, 4096, 6000, 8192, 16_384, 20_000, 32_768, 70_000)


def edges(n: int, page: int) -> list[int]:
    """Sizes of which some serve a request for n bytes, and some just don't."""
    near = {n, n - 1, n + 1, 2 * n - 1, 2 * n, n + 2 * page - 1, n + 2 * page}
    return sorted(size for size in near if size > 0)


EDGES = sorted({e for n in BASES for page in (4096, 16_384) for e in edges(n, page)})
sizes = st.sampled_from(BASES) | st.sampled_from(EDGES) | st.integers(1, 100_000)
small_limits = st.sampled_from([0, 1, 4000, 30_000, 100_000, 250_000, MiB, 1 << 40])


@st.composite
def programs(draw: st.DrawFn, kind: str, live: int = 0, length: int = 45) -> list[Step]:
    """Programs that free only what they have, in any order."""
    here = list(range(-live, 0))
    steps: list[Step] = []
    foreign: dict[int, bool] = {}
    whats = ["alloc"] * 8 + ["free"] * 7
    whats += ["cache limit", "memory limit", "clear"]
    whats += ["make"] * (kind not in ("cpu", "no cache"))
    for number in range(draw(st.integers(0, length))):
        what = draw(st.sampled_from(whats))
        if what == "free" and here:
            which = here.pop(draw(st.integers(0, len(here) - 1)))
            steps.append(Step("free", which))
        elif what in ("alloc", "free"):
            steps.append(Step("alloc", draw(sizes)))
            here.append(number)
        elif what == "make":
            steps.append(Step("make", draw(st.integers(1, 4)) * 16 * KiB))
            here.append(number)
            foreign[number] = True
        elif what == "clear":
            steps.append(Step("clear"))
        else:
            steps.append(Step(what, draw(small_limits)))
    return steps


@st.composite
def runs(draw: st.DrawFn, kind: str) -> tuple[Policy, list[int], list[int], list[Step]]:
    """A policy, what was cached and in use before, and a program."""
    policy = draw(policies(kind))
    cached = draw(st.lists(sizes, max_size=5)) if policy.has_cache else []
    live = draw(st.lists(st.integers(300, 70_000), max_size=3))
    return policy, cached, live, draw(programs(kind, len(live)))


def check_prediction(asked: Machine, decided: Machine, steps: Sequence[Step]) -> None:
    """Assert that the model makes of one machine's requests what another made."""
    trace = asked.trace()
    fixed = decided.fixed_limit
    got = predict(trace, decided.policy, fixed_limit=fixed, outcomes=True, curve=True)

    assert got.outcomes is not None
    assert got.reserved is not None
    rows = asked.row_of_step
    hits = [Outcome.Hit == got.outcomes[row] for row in rows]
    asked_for = [got.outcomes[row] != Outcome.NotAsked for row in rows]
    assert asked_for == [step.what == "alloc" for step in steps]
    assert hits == [bool(hit) for hit in decided.hit]
    assert got.reserved[rows].tolist() == decided.reserved
    assert sums_of(got) == decided.sums
    # What is asked for by the way changes nothing.
    bare = predict(trace, decided.policy, fixed_limit=fixed)
    assert sums_of(bare) == decided.sums


@pytest.mark.parametrize("kind", KINDS)
@thorough
@given(data=st.data())
def test_each_decision_of_a_prediction(kind: str, data: st.DataObject) -> None:
    # GIVEN a program that ran under a policy
    policy, cached, live, steps = data.draw(runs(kind))
    ran = Machine(policy, cached, live).run(steps)

    # WHEN it is predicted under the same one, THEN all is as it was
    check_prediction(ran, ran, steps)


@pytest.mark.parametrize("kind", KINDS)
@thorough
@given(data=st.data())
def test_each_decision_under_another_policy(kind: str, data: st.DataObject) -> None:
    # GIVEN a program that ran on some backend, with nothing there before
    first = data.draw(policies(data.draw(st.sampled_from(KINDS[:2]))))
    steps = data.draw(programs("cpu"))
    ran = Machine(first).run(steps)

    # WHEN it is predicted on another, THEN what happens there is what was predicted
    second = data.draw(policies(kind))
    fixed = data.draw(st.booleans())
    there = Machine(second, fixed_limit=fixed).run(steps)
    check_prediction(ran, there, steps)


@pytest.mark.parametrize("kind", KINDS)
@thorough
@given(data=st.data())
def test_a_recording_is_followed_without_a_mismatch(
    kind: str, data: st.DataObject
) -> None:
    policy, cached, live, steps = data.draw(runs(kind))
    ran = Machine(policy, cached, live).run(steps)

    got = follow(ran.trace())

    assert_followed(got, ran)


def assert_followed(got: Followed, ran: Machine) -> None:
    totals = got.totals
    assert got.mismatches == []
    assert (totals["mismatches"], totals["unseen"], totals["raced"]) == (0, 0, 0)
    assert sums_of(got) == ran.sums
    hits = [got.outcomes[row] == Outcome.Hit for row in ran.row_of_step]
    assert hits == [bool(hit) for hit in ran.hit]


def long_program(seed: int, kind: str, length: int) -> list[Step]:
    """A program that uses few sizes again and again, as real ones do."""
    pick = random.Random(seed)
    some = pick.sample(EDGES, 12)
    here: list[int] = []
    steps: list[Step] = []
    for number in range(length):
        chance = pick.random()
        if chance < 0.48 and len(here) < 60:
            steps.append(Step("alloc", pick.choice(some)))
            here.append(number)
        elif chance < 0.97 and here:
            steps.append(Step("free", here.pop(pick.randrange(len(here)))))
        elif chance < 0.98 and kind in ("metal", "cuda"):
            steps.append(Step("make", 16 * KiB))
            here.append(number)
        elif chance < 0.985:
            steps.append(Step("clear"))
        else:
            limit = pick.choice([0, 10_000, 200_000, MiB, 1 << 40])
            steps.append(Step(pick.choice(["cache limit", "memory limit"]), limit))
    return steps


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "policy",
    [
        CpuPolicy(300_000),
        CpuPolicy(has_cache=False),
        altered(MetalPolicy(MiB, 2 * MiB), resource_limit=70, slab_blocks=5),
        MetalPolicy(3 * MiB, 4 * MiB).with_limits(200_000),
        altered(CudaPolicy(MiB), slab_blocks=5),
        CudaPolicy(2 * MiB).with_limits(150_000),
    ],
    ids=lambda policy: f"{policy.name}-{policy.cache_limit}",
)
def test_long_programs(policy: Policy, seed: int) -> None:
    # Long enough that each rule is used many times over.
    steps = long_program(seed, policy.name, 3000)
    ran = Machine(policy, [5000, 5000, 70_000], [9000]).run(steps)
    if policy.has_cache:
        assert ran.sums.hits > 50
        assert ran.sums.evictions > 50

    check_prediction(ran, ran, steps)
    assert_followed(follow(ran.trace()), ran)


# ---- a recording that a decision was falsified in ----------------------------


def swapped(trace: Trace, after: int, one: int, other: int) -> Trace:
    """Exchange two addresses from a row on."""
    rows = trace.rows.copy()
    tail = rows["address"][after:]
    is_one, is_other = tail == one, tail == other
    tail[is_one], tail[is_other] = other, one
    return dataclasses.replace(trace, rows=rows)


def cached_addresses(trace: Trace, upto: int) -> dict[int, int]:
    """Address and size of what is cached before a row."""
    cached = {int(c["address"]): int(c["size"]) for c in trace.cached}
    for row in trace.rows[:upto]:
        if row["op"] == FREE and row["recorded"]:
            cached[int(row["address"])] = int(row["size"])
        elif row["op"] == EVICT or (row["op"] == ALLOC and row["recorded"]):
            del cached[int(row["address"])]
    return cached


def falsified(trace: Trace, kind: str, pick: random.Random) -> tuple[Trace, set[int]]:
    """A trace with one false decision of a kind, and the rows where it can show."""
    rows = trace.rows
    op, recorded = rows["op"], rows["recorded"].astype(bool)
    rounded = np.array(
        [Machine(trace.policy).allocator.round(int(n)) for n in rows["requested"]]
    )
    if kind == "another one reused":
        places = np.flatnonzero((op == ALLOC) & recorded).tolist()
        pick.shuffle(places)
        for place in places:
            mine = int(rows["address"][place])
            size = int(rows["size"][place])
            others = [
                address
                for address, bytes_ in cached_addresses(trace, place).items()
                if address != mine and bytes_ == size
            ]
            if others:
                return swapped(trace, place, mine, pick.choice(others)), {place}
        return trace, set()
    if kind == "evicted in another order":
        pairs = np.flatnonzero((op[1:] == EVICT) & (op[:-1] == EVICT)).tolist()
        if not pairs:
            return trace, set()
        place = pick.choice(pairs)
        changed = rows.copy()
        changed[[place, place + 1]] = rows[[place + 1, place]]
        return dataclasses.replace(trace, rows=changed), {place, place + 1}
    what = {
        "kept, said to be returned": (op == FREE) & recorded,
        "returned, said to be kept": (op == FREE) & ~recorded,
        "a hit, said to be new": (op == ALLOC) & recorded,
        "new, said to be a hit": (op == ALLOC) & ~recorded,
        "a size that is not rounded": (op == ALLOC) & ~recorded,
    }[kind]
    places = np.flatnonzero(what).tolist()
    if not places:
        return trace, set()
    place = pick.choice(places)
    changed = rows.copy()
    if kind == "a size that is not rounded":
        changed["size"][place] += 1
    else:
        changed["recorded"][place] ^= 1
        if kind == "a hit, said to be new":
            changed["size"][place] = rounded[place]
    return dataclasses.replace(trace, rows=changed), {place}


def something_of_all(first: int) -> list[Step]:
    """The end of a program, with each kind of decision, from step `first` on."""
    there = first + 2
    return [
        Step("cache limit", GiB),
        Step("memory limit", GiB),
        alloc(5000),
        alloc(5000),
        free(there),
        free(there + 1),
        alloc(5000),  # there are two
        alloc(30_000),
        free(there + 5),
        Step("cache limit", 0),
        alloc(100),
        free(there + 4),  # is not kept
    ]


LIES = (
    "another one reused",
    "kept, said to be returned",
    "returned, said to be kept",
    "evicted in another order",
    "a hit, said to be new",
    "new, said to be a hit",
    "a size that is not rounded",
)


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("kind", ["cpu", "metal", "cuda"])
@thorough
@given(data=st.data())
def test_a_false_decision_shows_at_its_row(
    kind: str, lie: str, data: st.DataObject
) -> None:
    # GIVEN a recording, of which one decision is false
    policy, cached, live, steps = data.draw(runs(kind))
    steps = [*steps, *something_of_all(len(steps))]
    true = Machine(policy, cached, live).run(steps).trace()
    pick = random.Random(data.draw(st.integers(0, 1000)))
    trace, where = falsified(true, lie, pick)
    assume(where)  # hypothesis complains if hardly any has it

    # WHEN
    got = follow(trace)

    # THEN
    found = where & set(got.mismatches)
    assert found, (where, got.mismatches, got.totals)


def test_a_hit_on_what_the_request_itself_gives_back() -> None:
    # GIVEN a damaged file: the cache gives back a block, and then reuses it
    policy = CudaPolicy(200_000).with_limits(memory_limit=100_000)
    rows = recording(
        (0x100, 16_384, 0, -1, EVICT, 0, 0),
        (0x100, 98_304, 98_304, -1, ALLOC, 1, 0),
        (0x200, 32_768, 32_768, -1, ALLOC, 0, 0),
        (0x100, 98_304, 0, 1, FREE, 1, 0),
        (0x200, 32_768, 0, 2, FREE, 1, 0),
    )

    # WHEN, THEN it is told, and does not mix up the blocks
    got = follow(make_trace(rows, [(0x100, 16_384)], 0, policy))
    assert 1 in got.mismatches
    assert (got.totals["active"], got.totals["cache"]) == (0, 131_072)


def test_a_free_of_another_thread_after_the_look() -> None:
    # GIVEN a new buffer for which MLX had looked into the cache two events earlier, one
    # of which was another thread's free of what would have served
    rows = recording(
        (0x100, 100, 100, -1, ALLOC, 0, 0),
        (0x200, 4000, 4000, -1, ALLOC, 0, 0),
        (0x100, 100, 0, 0, FREE, 1, 0),
        (0x200, 4000, 0, 1, FREE, 1, 0),
        (0x300, 100, 100, -1, ALLOC, 0, 0),
    )

    # WHEN it is followed, THEN the free did not serve; one event earlier it had
    for after_look, mismatches in ((2, []), (1, [4]), (0, [4])):
        rows["after_look"][4] = after_look
        assert follow(make_trace(rows, [], 0, CpuPolicy())).mismatches == mismatches


def test_room_that_was_made_before_another_threads_free() -> None:
    # GIVEN a new buffer for which a cached one went, and after that another thread's
    # free, with which the model would have made more room
    policy = CudaPolicy(MiB).with_limits(memory_limit=65_536)
    rows = recording(
        (0x100, 16_384, 16_384, -1, ALLOC, 0, 0),
        (0x200, 32_768, 32_768, -1, ALLOC, 0, 0),
        (0x100, 16_384, 0, 0, FREE, 1, 0),
        (0x100, 16_384, 0, -1, EVICT, 0, 0),
        (0x200, 32_768, 0, 1, FREE, 1, 0),
        (0x300, 65_536, 65_536, -1, ALLOC, 0, 0),
    )
    rows["after_look"][5] = 1

    got = follow(make_trace(rows, [], 0, policy))

    # THEN each decision is explained, though the limit is passed
    totals = got.totals
    assert (got.mismatches, totals["unseen"], totals["evictions"]) == ([], 0, 1)
    assert (totals["active"], totals["cache"]) == (65_536, 32_768)


def test_nothing_to_make_room_with_when_mlx_looked() -> None:
    # GIVEN a new buffer beyond the memory limit, for which the cache was empty when MLX
    # looked; another thread's free came before it counted
    policy = CudaPolicy(MiB).with_limits(memory_limit=65_536)
    rows = recording(
        (0x100, 16, 16, -1, ALLOC, 0, 0),
        (0x100, 16, 0, 0, FREE, 1, 0),
        (0x200, 65_536, 65_536, -1, ALLOC, 0, 0),
        (0x200, 65_536, 0, 2, FREE, 1, 0),
    )

    # WHEN it is followed, THEN nothing had to go; if MLX had looked later it had
    for after_look, mismatches in ((1, []), (0, [2])):
        rows["after_look"][2] = after_look
        assert follow(make_trace(rows, [], 0, policy)).mismatches == mismatches


def test_a_limit_that_another_thread_sets_trims_before_its_call_is_over() -> None:
    # GIVEN a cache limit of 0 that holds at an allocation within its call
    rows = recording(
        (0x100, 16, 16, -1, ALLOC, 0, 0),
        (0x100, 16, 0, 0, FREE, 1, 0),
        (0, 0, 0, -1, BEGINS, 0, CACHE_LIMIT),
        (0x200, 64, 64, -1, ALLOC, 0, 0),
        (0x100, 16, 0, -1, EVICT, 0, 0),
        (0, 0, 0, 2, ENDS, 0, CACHE_LIMIT),
        (0x200, 64, 0, 3, FREE, 0, 0),
    )

    got = follow(make_trace(rows, [], 0, CudaPolicy(MiB)))

    assert (got.mismatches, got.totals["raced"], got.totals["evictions"]) == ([], 1, 1)


@pytest.mark.parametrize("backend", ["cuda", "metal"])
def test_limits_of_0_are_limits(backend: str) -> None:
    settings = {"backend": backend, "mlx_version": "0.32.4"}
    policy = policy_of({**settings, "cache_limit_at_start": 0, "memory_limit": MiB})
    assert (policy.name, policy.cache_limit, policy.memory_limit) == (backend, 0, MiB)
    policy = policy_of({**settings, "memory_limit_at_start": 0})
    assert (policy.cache_limit, policy.memory_limit) == (0, 0)


# ---- by hand ----------------------------------------------------------------


def recording(*rows: tuple[int, ...]) -> npt.NDArray[np.void]:
    """Rows of (address, size, requested, owner, op, recorded, call)."""
    return np.array([(*row, 0, [0] * 4) for row in rows], ROW)


def alloc(n: int) -> Step:
    return Step("alloc", n)


def free(of: int) -> Step:
    return Step("free", of)


def test_a_larger_limit_can_have_fewer_hits() -> None:
    # Why no single pass tells the hits of all limits, as it does for a cache of pages:
    # with room for both blocks of 100 bytes it keeps both, and one that nobody asks
    # for takes the place of the 150 bytes that are.
    steps = [alloc(100), alloc(100), free(0), free(1)]
    steps += [alloc(150), alloc(100), free(4), alloc(150)]
    trace = Machine(CpuPolicy()).run(steps).trace()

    def hits(limit: int) -> int:
        really: int = Machine(CpuPolicy(limit)).run(steps).sums.hits
        assert predict(trace, CpuPolicy(limit)).hits == really
        return really

    assert [hits(n) for n in (0, 100, 150, 200, 250)] == [0, 1, 2, 1, 2]


CPU = CpuPolicy()
# Too little for 16 KiB and 48 KiB at a time.
SMALL_CUDA = CudaPolicy(MiB).with_limits(memory_limit=50_000)
METAL = MetalPolicy(8 * MiB, 16 * MiB)
KEPT_100 = [alloc(100), free(0)]  # rows 0 and 1
CLEAR, LIMIT_0 = Step("clear"), Step("cache limit", 0)


@pytest.mark.parametrize(
    ("policy", "steps", "outcome", "cause"),
    [
        (CPU, [*KEPT_100, alloc(51)], Outcome.Hit, -1),
        (CPU, [*KEPT_100, alloc(101)], Outcome.Cold, -1),
        (CPU, [alloc(100), alloc(51)], Outcome.InUse, -1),
        (CPU, [alloc(100), alloc(50)], Outcome.Cold, -1),
        (CPU, [*KEPT_100, alloc(50)], Outcome.Window, -1),
        (CPU, [*KEPT_100, CLEAR, alloc(51)], Outcome.Cleared, 2),
        (CPU, [*KEPT_100, CLEAR, alloc(50)], Outcome.Cold, -1),
        # One that went explains one miss.
        (CPU, [*KEPT_100, CLEAR, alloc(100), alloc(100)], Outcome.InUse, -1),
        (CPU, [*KEPT_100, LIMIT_0, alloc(51)], Outcome.Trimmed, 2),
        # On a GPU the next allocation trims, and the call is to blame all the same.
        (METAL, [*KEPT_100, LIMIT_0, alloc(5), alloc(51)], Outcome.Trimmed, 2),
        (
            SMALL_CUDA,
            [alloc(16_384), free(0), alloc(49_152), alloc(9000)],
            Outcome.Reclaimed,
            -1,
        ),
        (CpuPolicy(99), [*KEPT_100, alloc(100)], Outcome.NotKept, -1),
        (
            CPU,
            [Step("cache limit", 99), alloc(100), free(1), alloc(100)],
            Outcome.NotKept,
            0,
        ),
        (CpuPolicy(has_cache=False), [*KEPT_100, alloc(100)], Outcome.NotKept, -1),
    ],
)
def test_outcomes(
    policy: Policy, steps: list[Step], outcome: Outcome, cause: int
) -> None:
    trace = Machine(policy).run(steps).trace()

    guessed = predict(trace, fixed_limit=False, outcomes=True)
    seen = follow(trace)

    assert seen.mismatches == []
    assert guessed.outcomes is not None
    assert guessed.causes is not None
    assert (seen.outcomes[-1], seen.causes[-1]) == (outcome, cause)
    assert (guessed.outcomes[-1], guessed.causes[-1]) == (outcome, cause)
    assert seen.totals["count"][outcome] >= 1
    assert sum(seen.totals["count"]) == seen.allocations


def test_nothing_at_all() -> None:
    trace = Machine(CPU).trace()
    got = follow(trace)
    assert (got.allocations, got.hit_rate, got.hit_rate_bytes) == (0, 0.0, 0.0)
    assert got.mismatches == []
    assert predict(trace).totals["peak_reserved"] == 0


def test_two_threads_that_raced() -> None:
    # GIVEN a clear in one thread. Another's free is written before its evictions, and
    # yet came after it: what it freed is reused later.
    freed_before = recording(
        (0x200, 50, 50, -1, ALLOC, 0, 0),
        (0, 0, 0, -1, BEGINS, 0, CLEAR_CACHE),
        (0x200, 50, 0, 0, FREE, 1, 0),
        (0x100, 1000, 0, -1, EVICT, 0, 0),
        (0, 0, 0, 1, ENDS, 0, CLEAR_CACHE),
        (0x200, 50, 50, -1, ALLOC, 1, 0),
    )
    # Or another's request took its block before the clear, and is written after it.
    taken_after = recording(
        (0, 0, 0, -1, BEGINS, 0, CLEAR_CACHE),
        (0x100, 1000, 0, -1, EVICT, 0, 0),
        (0x300, 50, 50, -1, ALLOC, 1, 0),
        (0, 0, 0, 0, ENDS, 0, CLEAR_CACHE),
    )
    for rows, cached in (
        (freed_before, [(0x100, 1000)]),
        (taken_after, [(0x100, 1000), (0x300, 50)]),
    ):
        # WHEN, THEN it is no mismatch, but counted
        got = follow(make_trace(rows, cached, 0, CPU))
        assert got.mismatches == []
        assert (got.totals["raced"], got.totals["unseen"]) == (1, 0)
        assert (got.hits, got.totals["active"], got.totals["cache"]) == (1, 50, 0)


def test_under_a_fixed_limit_the_start_is_trimmed() -> None:
    # GIVEN 10 MiB in the cache, and a program that asks for them
    rows = Machine(CpuPolicy(32 * MiB), [10 * MiB]).run([Step("alloc", 10 * MiB)])

    # WHEN a limit of 0 is said to hold all along
    got = predict(rows.trace(), CpuPolicy(0), outcomes=True)

    # THEN they were not kept, and no eviction of this recording
    assert (got.hits, got.totals["evictions"]) == (0, 0)
    assert got.totals["count"][Outcome.NotKept] == 1
    assert (got.totals["peak_cache"], got.totals["peak_reserved"]) == (0, 10 * MiB)


def test_memory_of_somebody_else_is_no_size_that_is_in_use() -> None:
    policy = MetalPolicy(512 * MiB, 1024 * MiB)
    steps = [Step("make", 16384), Step("make", 100), Step("alloc", 16384)]

    got = follow(Machine(policy).run(steps).trace())

    assert got.totals["count"][Outcome.Cold] == 1
    assert got.totals["system_allocations"] == 1
