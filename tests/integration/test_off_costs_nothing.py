"""Recording that is off costs no instruction."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import off_cost

# Operations that only build a graph: no thread is waited for.
GRAPH_ONLY = ("add", "full")

Counts = dict[tuple[str, str], off_cost.Count]


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Counts, Counts]:
    """Return the counts of a process without mlxmem, and of one that had it on."""
    if reason := off_cost.missing():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("callgrind")
    never = off_cost.count(off_cost.NEVER, off_cost.TIMES, folder)
    once = off_cost.count(off_cost.OFF, off_cost.TIMES, folder)
    return never, once


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_off_costs_no_instruction(counts: tuple[Counts, Counts]) -> None:
    # GIVEN two processes, equal but for the recording half-way in one of them
    never, once = counts
    assert once["between", ""].mlxmem > 0
    assert never["between", ""].mlxmem == 0

    # WHEN both go on with the same operations
    for name in off_cost.operations():
        before, off = (once[turn, name] for turn in off_cost.ROUNDS)
        without = [
            count.steady
            for count in (*(never[turn, name] for turn in off_cost.ROUNDS), before)
        ]

        # THEN none of mlxmem's code runs, and as much runs as without it
        assert off.mlxmem == 0
        assert min(without) > 1000
        far_below_one = 0.05 if name in GRAPH_ONLY else 0.5
        assert max(without) - min(without) < 0.5
        assert min(without) - far_below_one < off.steady < max(without) + far_below_one


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_building_a_graph_costs_the_same_libc_included(
    counts: tuple[Counts, Counts],
) -> None:
    never, once = counts
    for name in GRAPH_ONLY:
        # An array from a number allocates, so the heap's free lists show: below 1.
        assert once["after", name].total == pytest.approx(
            never["after", name].total, abs=1.0
        )
