"""The cache of this process: statistics and advice, and what a warm start changes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from books import HAS_CPU_CACHE, Books, settle

import mlxmem
from mlxmem import recorder
from mlxmem.cache.policies import CpuPolicy
from mlxmem.cache.replay import Followed, follow, predict
from mlxmem.cache.trace import of_recording

KiB, MiB = 1 << 10, 1 << 20
_zeros = np.zeros(8 * MiB, np.uint8)


def leaf(size: int) -> mx.array:
    return mx.array(_zeros[:size])


def in_turn(rounds: int = 500) -> None:
    """Two sizes, one after the other: all but the first two requests can hit."""
    for _ in range(rounds):
        leaf(20 * KiB)
        leaf(50 * KiB)


def fill(buffers: int, size: int) -> None:
    """Put so many buffers of one size into the cache."""
    keep = [leaf(size) for _ in range(buffers)]
    settle()
    keep.clear()
    settle()


def record(limit: int, max_entries: int = 0) -> Followed:
    """Record the program with a cache that was filled before."""
    mx.set_cache_limit(32 * MiB)
    mx.clear_cache()
    fill(4, 5 * MiB)
    with Books(max_entries) as books:
        mx.set_cache_limit(limit)
        in_turn()
        books.check()
        got = follow(of_recording(recorder.recording()))
    assert (got.totals["mismatches"], got.totals["unseen"]) == (0, 0)
    return got


def test_functions_agree_with_the_command(books: Books, tmp_path: Path) -> None:
    in_turn()
    books.check()

    stats = mlxmem.cache_stats(limits="64 KiB")
    best = mlxmem.recommend_cache_limit()

    path = mlxmem.dump(tmp_path / "out.pickle")
    command = [sys.executable, "-m", "mlxmem", "cache", str(path), "--json"]
    done = subprocess.run(
        [*command, "--limit", "64KiB", "--top", "20"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == stats | {"file": str(path)}
    assert stats["agreement"]["mismatches"] == 0
    assert stats["totals"]["allocations"] == 1000
    assert stats["totals"]["hits"] == (998 if HAS_CPU_CACHE else 0)
    found: dict[str, Any] = stats["what_if"]["recommendation"]
    assert found["cache_limit"] == best.limit == (MiB if HAS_CPU_CACHE else None)
    assert found["reason"] == best.reason
    if best.limit is not None:
        mx.set_cache_limit(best.limit)
        assert best.hit_rate == best.recorded_hit_rate == 0.998


def test_functions_tell_of_a_session_that_ended(books: Books) -> None:
    in_turn(10)
    mlxmem.disable()

    assert mlxmem.cache_stats()["totals"]["allocations"] == 20


@pytest.mark.usefixtures("cpu_cache")
@pytest.mark.parametrize("limit", [0, 100 * KiB, MiB, 16 * MiB, 64 * MiB])
def test_a_cache_that_was_full_before(limit: int) -> None:
    """Predicted from a recording without a change of the limit, and really set."""
    recorded = record(32 * MiB)
    trace = recorded.trace
    assert trace.is_exact
    assert trace.cached["size"].tolist() == [5 * MiB] * 4

    expected = predict(trace, CpuPolicy(limit))
    measured = record(limit)

    keys = ("system_allocations", "peak_active", "active", "cache")
    assert measured.hits == expected.hits
    assert [measured.totals[key] for key in keys] == [
        expected.totals[key] for key in keys
    ]
    assert measured.hits == (0 if limit == 0 else 998)


@pytest.mark.usefixtures("cpu_cache")
def test_a_ring_after_a_full_cache_knows_its_start() -> None:
    got = record(32 * MiB, max_entries=100)

    # Four from before that no event names, and the two sizes.
    assert got.trace.unknown == 0
    assert sorted(got.trace.cached["size"].tolist())[-4:] == [5 * MiB] * 4
    assert not got.trace.is_exact  # events were dropped


@pytest.mark.usefixtures("cpu_cache")
def test_limits_set_unseen_explain_what_goes(books: Books) -> None:
    mlxmem.disable()
    set_limit = mx.set_cache_limit  # as C++ code does, or an older reference
    with Books():
        for limit in (300 * KiB, 100 * KiB, 0):
            set_limit(32 * MiB)
            fill(4, 100 * KiB)
            set_limit(limit)
            leaf(10)
        settle()
        got = follow(of_recording(recorder.recording()))

    assert (got.totals["mismatches"], got.totals["unseen"]) == (0, 0)
    assert got.totals["evictions"] >= 8


def test_a_limit_is_remembered_beyond_ten_thousand_clears(books: Books) -> None:
    mx.set_cache_limit(MiB)
    for _ in range(10_050):
        mx.clear_cache()
    in_turn(10)

    calls = recorder.recording().calls

    assert [c.value for c in calls if c.mark.name == "set_cache_limit"] == [MiB]
    assert all(call.stack for call in calls)
    assert len(calls) == 10_001
    got = follow(of_recording(recorder.recording()))
    assert got.totals["mismatches"] == 0
