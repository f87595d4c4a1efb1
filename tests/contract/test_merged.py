"""The readers take a merged recording of several ranks."""

from __future__ import annotations

import pathlib

import pytest
import viewer
from handmade import Heap, busy_heap, heaps, quick
from hypothesis import given, strategies as st
from test_memory_viz import SCRIPT, read

import mlxmem
from mlxmem.snapshot import build, write

COMMANDS = ("stats", "trace", "segments", "memory", "trace_plot", "segment_plot")


def merged(folder: pathlib.Path, *heaps: Heap, max_entries: int = 0) -> pathlib.Path:
    """Merge recordings of heaps, a rank each."""
    paths = [
        write(
            build(heap.recording(max_entries, settings={"rank": rank})),
            folder / f"out.rank{rank}.pickle",
        )
        for rank, heap in enumerate(heaps)
    ]
    return mlxmem.merge(paths, folder / "out.pickle")


@pytest.mark.parametrize("max_entries", [0, 1, 7, 15])
def test_every_rule_holds_on_each_device(
    tmp_path: pathlib.Path, max_entries: int
) -> None:
    # GIVEN ranks with the same addresses, and one with nothing
    heaps = busy_heap(), Heap(), busy_heap()

    # WHEN
    path = merged(tmp_path, *heaps, max_entries=max_entries)

    # THEN
    snapshot = viewer.check_pickle(path.read_bytes(), devices=3)
    first, nothing, last = snapshot["device_traces"]
    assert first == last
    assert not nothing


@quick
@given(st.lists(heaps(), min_size=1, max_size=4), st.integers(0, 12))
def test_random_ranks_keep_every_rule(
    tmp_path_factory: pytest.TempPathFactory, ranks: list[Heap], max_entries: int
) -> None:
    # WHEN
    folder = tmp_path_factory.mktemp("ranks")
    path = merged(folder, *ranks, max_entries=max_entries)

    # THEN
    snapshot = viewer.check_pickle(path.read_bytes(), devices=len(ranks))
    for device, heap in enumerate(ranks):
        active, cache = heap.totals()
        segments = [s for s in snapshot["segments"] if s["device"] == device]
        assert sum(s["active_size"] for s in segments) == active
        assert sum(s["total_size"] for s in segments) == active + cache


@pytest.mark.skipif(
    SCRIPT is None,
    reason="needs `pip install torch==2.13.0`, or MLXMEM_TORCH_VIZ=<_memory_viz.py>",
)
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_torchs_script_reads_it(
    tmp_path: pathlib.Path, command: str
) -> None:
    # GIVEN
    small, large = Heap(active=1 << 20), Heap(active=8 << 20)
    small.new(1 << 20, stack=1)
    large.new(3 << 20, stack=2)
    path = merged(tmp_path, small, large)

    # WHEN, THEN
    shown = read(command, path)
    if command == "stats":
        assert "total_reserved: 13.0MiB" in shown
    options = ("--device", "1") if command == "trace_plot" else ()
    assert read(command, path, *options)
