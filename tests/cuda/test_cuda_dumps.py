"""Dumps of work on the GPU keep every rule of their readers."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import test_memory_viz
import viewer
import workloads
from books import ALLOCS, Books

import mlxmem
from mlxmem.events import Action
from mlxmem.reports import history
from mlxmem.snapshot import BEFORE_ENABLE

pytestmark = pytest.mark.cuda

Entry = dict[str, Any]


def no_overlap(snapshot: Entry) -> None:
    """Assert that no two segments, and no two blocks, share an address."""
    for owners in (
        snapshot["segments"],
        [block for segment in snapshot["segments"] for block in segment["blocks"]],
    ):
        ranges = sorted(
            (owner["address"], owner.get("total_size", owner.get("size")))
            for owner in owners
        )
        for (one, size), (other, _) in itertools.pairwise(ranges):
            assert one + size <= other, f"{size} bytes at {one:#x} and at {other:#x}"


def work() -> list[Any]:
    """Allocate, free, reuse and empty the cache; return what shall stay alive."""
    step = workloads.training(layers=1, context=16)
    keep: list[Any] = [step]
    for n in range(6):
        step()
        keep.append(mx.array(np.ones((n + 1, 5), np.float32)))
        keep.append(mx.exp(mx.ones((100 * n + 1, 50))))
        mx.eval(keep[-1])
        if n == 3:
            keep[3:6] = []
            mx.clear_cache()
    keep.extend(mx.array(n) for n in range(50))
    keep.append(mx.zeros((0, 3)) + 1)
    mx.eval(keep[-1])
    return keep


@pytest.mark.parametrize("max_entries", [0, 7, 101])
def test_a_dump_keeps_every_rule(tmp_path: Path, max_entries: int) -> None:
    # GIVEN arrays from before, some of which go
    old = [mx.random.normal((60 + n, 50)) for n in range(8)]
    mx.eval(old)
    with Books(max_entries) as books:
        del old[1:4]
        keep = work()

        # WHEN it is dumped
        recording = books.check()
        path = tmp_path / "out.pickle"
        mlxmem.dump(path)

        # THEN the readers' rules hold, ranges are apart, and totals are MLX's
        snapshot = viewer.check_pickle(path.read_bytes())
        no_overlap(snapshot)
        settings, segments = snapshot["allocator_settings"], snapshot["segments"]
        assert settings["inconsistent_events"] == 0
        assert settings["backend"] == "cuda"
        assert settings["mlx_version"] == mx.__version__
        assert settings["trace_alloc_dropped"] == recording.dropped
        assert (recording.dropped > 0) is (max_entries > 0)
        assert sum(s["active_size"] for s in segments) == mx.get_active_memory()
        reserved = mx.get_active_memory() + mx.get_cache_memory()
        assert sum(s["total_size"] for s in segments) == reserved
        if not max_entries:
            entries = [
                e for e in snapshot["device_traces"][0] if e["action"] == "alloc"
            ]
            names = {entry["category"] for entry in entries}
            assert {"Matmul", "leaf array"} <= names, names
            here = {f["filename"] for e in entries for f in e["frames"]}
            assert {__file__, workloads.__file__} <= here
            blocks = [block for s in segments for block in s["blocks"]]
            labels = [block["frames"][0]["name"] for block in blocks]
            assert BEFORE_ENABLE in labels
        del keep


@pytest.mark.skipif(
    test_memory_viz.SCRIPT is None, reason="needs torch's _memory_viz.py"
)
def test_torchs_script_reads_it(tmp_path: Path) -> None:
    with Books() as books:
        # Few events: some of the script's commands take long for thousands.
        keep = [mx.array(np.ones((n + 1, 5), np.float32)) for n in range(5)]
        for n in range(10):
            keep.append(mx.exp(mx.ones((300 * n + 1, 50))) @ mx.ones((50, 3)))
            mx.eval(keep[-1])
        keep[2:4] = []
        books.check(readers=False)
        path = mlxmem.dump(tmp_path / "out.pickle")
        del keep

    commands = "stats", "trace", "segments", "memory", "trace_plot", "segment_plot"
    shown = {command: test_memory_viz.read(command, path) for command in commands}

    assert "total_reserved" in shown["stats"]
    assert "MEM[" not in shown["trace"]
    assert "test_cuda_dumps.py" in shown["memory"]
    assert "add_local_files" in shown["trace_plot"]


def test_a_million_events(tmp_path: Path) -> None:
    begin = time.perf_counter()

    def said(what: str) -> None:
        print(f"{time.perf_counter() - begin:6.1f} s: {what}")

    with Books(0) as books:
        # GIVEN half a million arrays: leaves of many sizes, and what kernels make
        sizes = [np.ones(n, np.uint8) for n in (1, 8, 9, 1000, 5000, 16_384, 20_000)]
        a = mx.random.normal((64, 64))
        mx.eval(a)
        made = 0
        while mlxmem.stats()["events_recorded"] < 1_000_000:
            for _ in range(2_000):
                mx.array(sizes[made % len(sizes)])
                made += 1
            for _ in range(20):
                mx.eval(mx.tanh(a @ a))
        said("recorded")

        # THEN the books balance over all of them
        recording = books.check(readers=False)
        said("books checked")
        events = recording.events
        assert (recording.dropped, len(events)) == (
            0,
            mlxmem.stats()["events_recorded"],
        )
        assert len(events) >= 1_000_000
        allocs = int(np.isin(events["action"], ALLOCS).sum())
        assert allocs >= made

        # AND they are in the file, when it is read back
        path = tmp_path / "out.pickle"
        mlxmem.dump(path)
        said(f"dumped {path.stat().st_size:,} bytes")
        assert path.stat().st_size < 100 * 2 * len(events)
        found = history.read(path)
        said("read")
        reused = int((events["action"] == Action.AllocReuse).sum())
        assert reused > 0.9 * allocs
        assert found.dropped == 0
        assert found.active_after(found.end) == recording.active
        assert found.peak == recording.peak
        assert len(found) >= len(events)
