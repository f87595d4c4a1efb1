"""The case scripts on the GPU: books, diagnosis by value, and the cache's model."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import test_cache_replay
import test_cases
import viewer
from case_run import CaseRun, recorded, run_case

from mlxmem.cache.trace import of_recording
from mlxmem.events import Action

pytestmark = pytest.mark.cuda

# 32 limits the address space, in which no GPU can be used; test_cuda_oom.py has that.
# 42 has a test of its own.
NAMES = [n for n in test_cases.names() if n[:6] not in ("case32", "case42")]


def story(run: CaseRun) -> str:
    """What is needed to understand a failure: the output and the largest buffers."""
    largest = sorted(run.allocs, key=lambda alloc: alloc.size, reverse=True)[:20]
    rows = [
        f"{a.index}: {a.asked} in {a.size} bytes, {a.action.name}, {a.primitive!r}, "
        f"line {a.line}, freed {a.freed} by {a.freed_by}"
        for a in largest
    ]
    return "\n".join([run.output, *rows])


@pytest.mark.parametrize("name", NAMES)
def test_case_balances_and_shows_its_diagnosis(name: str) -> None:
    # GIVEN a case in a process of its own, whose books were checked there and here
    run = recorded(name)
    print(story(run))  # shown when the test fails
    assert run.recording.settings["backend"] == "cuda"
    assert run.recording.dropped == 0

    # THEN the diagnosis is there, by value, where events show one
    if name[:6] in test_cases.DIAGNOSES:
        test_cases.DIAGNOSES[name[:6]](run)


@pytest.mark.parametrize("name", NAMES)
def test_the_model_decides_as_mlx_did(name: str) -> None:
    run = recorded(name)
    policy = of_recording(run.recording).policy
    assert (policy.name, policy.page) == ("cuda", 16 << 10)

    got = test_cache_replay.followed(run.recording)

    # Threads may have raced, and then what one got depends on who was first.
    if got.totals["raced"] == 0:
        test_cache_replay.replayed(run.recording)


@pytest.mark.parametrize("name", NAMES)
def test_the_dump_keeps_every_rule(name: str) -> None:
    run = recorded(name)

    snapshot = viewer.check_pickle(run.dump.read_bytes())

    settings, segments = snapshot["allocator_settings"], snapshot["segments"]
    assert settings["inconsistent_events"] == 0
    assert settings["backend"] == "cuda"
    assert sum(s["active_size"] for s in segments) == run.recording.active
    reserved = run.recording.active + run.recording.cache
    assert sum(s["total_size"] for s in segments) == reserved
    ranges = sorted((s["address"], s["total_size"]) for s in segments)
    for (one, size), (other, _) in itertools.pairwise(ranges):
        assert one + size <= other, f"{size} bytes at {one:#x} reach over {other:#x}"


def test_event_flood_says_what_it_dropped(tmp_path: Path) -> None:
    run = run_case("case42_event_flood", tmp_path, max_entries=10_000)

    assert len(run.recording.events) == run.recording.max_entries == 10_000
    assert run.recording.dropped > 30_000
    # The process checked its books at the end; here is what MLX said at the last snap.
    assert run.recording.active == run.marks[-1]["active"]
    kinds = {Action(a) for a in run.recording.events["action"].tolist()}
    assert kinds <= {Action.AllocNew, Action.AllocReuse, Action.FreeActiveToCache}
