"""Dumps of real work keep every rule of their readers; needs MLX alone, no torch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import viewer
from books import ALLOCS, HAS_CPU_CACHE, ON_CUDA, VERSION, Books

import mlxmem
from mlxmem.events import Recording
from mlxmem.snapshot import BEFORE_ENABLE, NO_STACKS

Entry = dict[str, Any]


def dumped(books: Books, path: Path) -> tuple[Entry, Recording]:
    """Dump what is recorded, check the file and compare its totals with MLX's."""
    recording = books.check()
    mlxmem.dump(path)
    snapshot = viewer.check_pickle(path.read_bytes())
    settings, segments = snapshot["allocator_settings"], snapshot["segments"]
    assert settings["inconsistent_events"] == 0
    assert settings["mlx_version"] == mx.__version__
    assert settings["backend"] == ("cuda" if ON_CUDA else "cpu")
    assert settings["trace_alloc_max_entries"] == books.max_entries
    assert settings["trace_alloc_overflowed"] == (recording.dropped > 0)
    assert settings["trace_alloc_dropped"] == recording.dropped
    assert sum(s["active_size"] for s in segments) == mx.get_active_memory()
    reserved = mx.get_active_memory() + mx.get_cache_memory()
    assert sum(s["total_size"] for s in segments) == reserved
    return snapshot, recording


def work() -> list[Any]:
    """Allocate, free, reuse and empty the cache; return what shall stay alive."""
    model = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 20))
    step = mx.compile(nn.value_and_grad(model, lambda x: model(x).sum()))
    keep: list[Any] = [model]
    for n in range(12):
        x = mx.random.normal((10 + n, 40))
        mx.eval(step(x))
        keep.append(mx.array(np.ones((n + 1, 5), np.float32)))
        if n == 5:
            keep[3:6] = []
            mx.clear_cache()
    mx.async_eval(x @ x.T)
    return keep


def allocs(snapshot: Entry) -> list[Entry]:
    """Entries of recorded allocations, not those that open what was there before."""
    entries = [e for e in snapshot["device_traces"][0] if e["action"] == "alloc"]
    return [e for e in entries if e["user_metadata"]["action"].startswith("Alloc")]


def labels(owner: Entry) -> list[str]:
    return [frame["name"] for frame in owner["frames"]]


def test_unlimited(tmp_path: Path) -> None:
    # GIVEN a session that keeps every event
    with Books() as books:
        keep = work()

        # WHEN it is dumped
        snapshot, recording = dumped(books, tmp_path / "out.pickle")

        # THEN each allocation is in it, with its operation and its stack
        made = int(np.isin(recording.events["action"], ALLOCS).sum())
        assert len(allocs(snapshot)) == made > 200
        here = {f["filename"] for e in allocs(snapshot) for f in e["frames"]}
        assert __file__ in here
        assert {"Matmul", "RandomBits"} <= {e["category"] for e in allocs(snapshot)}
        del keep


@pytest.mark.parametrize("max_entries", [1, 2, 7, 40, 101])
def test_a_small_ring(tmp_path: Path, max_entries: int) -> None:
    # GIVEN a ring that overflows
    with Books(max_entries) as books:
        keep = work()

        # WHEN it is dumped
        _, recording = dumped(books, tmp_path / "out.pickle")

        # THEN the totals are right all the same
        assert recording.dropped > 100
        assert len(recording.events) == max_entries
        del keep


def test_without_stacks(tmp_path: Path) -> None:
    # GIVEN a session that captures no stacks
    with Books(stacks=False) as books:
        keep = work()

        # WHEN it is dumped
        snapshot, _ = dumped(books, tmp_path / "out.pickle")

        # THEN each entry says so
        assert len(allocs(snapshot)) > 50
        assert {tuple(labels(e)) for e in allocs(snapshot)} == {(NO_STACKS,)}
        del keep


@pytest.mark.parametrize("max_entries", [0, 30])
def test_arrays_and_a_cache_from_before(tmp_path: Path, max_entries: int) -> None:
    # GIVEN arrays, lazy arrays and a filled cache from before enable()
    old = [mx.random.normal((60 + n, 50)) for n in range(8)]
    mx.eval(old)
    lazy = mx.exp(old[0]) @ old[0].T
    del old[1:4]
    active, cache = mx.get_active_memory(), mx.get_cache_memory()
    assert (cache > 3 * 60 * 50 * 4) == HAS_CPU_CACHE
    with Books(max_entries) as books:
        # WHEN some of them go, some are used again and others are made
        mx.eval(lazy)
        old.pop()
        keep = work()
        snapshot, recording = dumped(books, tmp_path / "out.pickle")

        # THEN what is left of the old ones is one block with its label
        assert recording.active_at_enable <= active
        blocks = [b for s in snapshot["segments"] for b in s["blocks"]]
        active_blocks = [b for b in blocks if b["state"] == "active_allocated"]
        before = [b for b in active_blocks if labels(b) == [BEFORE_ENABLE]]
        if max_entries == 0:
            assert len(before) == 1
            assert before[0]["size"] >= sum(array.nbytes for array in old)
        del keep


def test_arrays_of_no_size(tmp_path: Path) -> None:
    # GIVEN buffers of 0 bytes, which all may have one address
    with Books() as books:
        empty = [mx.zeros((0, 3)) + 1 for _ in range(5)]
        empty += [mx.array([]), mx.array(np.ones((0,), np.float32))]
        mx.eval(empty)
        keep = work()

        # WHEN they are dumped
        snapshot, recording = dumped(books, tmp_path / "out.pickle")

        # THEN they are counted, and no entry or block of 0 bytes is there
        made = recording.events[np.isin(recording.events["action"], ALLOCS)]
        none = int((made["size"] == 0).sum())
        assert none >= len(empty)
        assert snapshot["allocator_settings"]["zero_byte_allocs"] == none
        assert len(allocs(snapshot)) == len(made) - none
        del keep


def test_scratch_of_linear_algebra(tmp_path: Path) -> None:
    # GIVEN kernels that allocate on a stream's worker thread
    functions: list[Callable[..., Any]] = [
        mx.linalg.svd,
        mx.linalg.qr,
        mx.linalg.inv,
        mx.linalg.eigh,
    ]
    with Books() as books:
        x = mx.random.normal((33, 33))
        mx.eval(x)
        keep = [function(x @ x.T, stream=mx.cpu) for function in functions]
        mx.eval(keep)

        # WHEN they are dumped
        snapshot, _ = dumped(books, tmp_path / "out.pickle")

        # THEN their scratch is there with the operation and the thread
        threads: dict[str, set[int]] = {}
        for entry in allocs(snapshot):
            meta = entry["user_metadata"]
            threads.setdefault(meta.get("primitive", ""), set()).add(meta["thread"])
        me = threading.get_native_id()
        names = ["SVD", "QRF", "Inverse", "Eigh"]
        if VERSION < (0, 31, 2):  # the way to a worker has no name there yet
            names = [""]
        for name in names:
            assert threads[name] - {me}, name


def test_a_session_that_recorded_nothing(tmp_path: Path) -> None:
    keep = mx.random.normal((50, 50))
    mx.eval(keep)
    with Books() as books:
        snapshot, recording = dumped(books, tmp_path / "out.pickle")
        assert len(recording.events) == 0
        assert len(snapshot["segments"]) >= 1
