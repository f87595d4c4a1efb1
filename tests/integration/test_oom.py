"""Allocations that fail: the dump is there before MLX crashes of it."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import mlxmem

TARGETS = Path(__file__).parent / "targets"
GIB = 1 << 30


def crash(folder: Path, mode: str) -> tuple[dict[str, Any], str]:
    """Run a program that fails to allocate; return its dump and its stderr."""
    done = subprocess.run(
        [sys.executable, TARGETS / "out_of_memory.py", "out.pickle", mode],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=200,
    )
    assert done.returncode == -signal.SIGSEGV, done.stderr
    out = folder / "out.pickle"
    return pickle.loads(out.read_bytes()) if out.exists() else {}, done.stderr


def ooms(snapshot: dict[str, Any]) -> list[dict[str, Any]]:
    return [e for e in snapshot["device_traces"][0] if e["action"] == "oom"]


@pytest.mark.parametrize(
    ("mode", "function", "size", "primitive"),
    [
        ("eval", "too_large", 16 * GIB, "Full"),
        ("leaf", "main", GIB // 4, ""),
        ("thread", "too_large", 16 * GIB, "Full"),
    ],
)
def test_a_crash_leaves_a_dump(
    tmp_path: Path, mode: str, function: str, size: int, primitive: str
) -> None:
    # GIVEN a program whose address space is limited, with one array of 4 MiB
    # WHEN it asks for more than there is, and crashes as it does unrecorded
    snapshot, stderr = crash(tmp_path, mode)

    # THEN the file holds the failure with its size and its line
    (oom,) = ooms(snapshot)
    assert oom["size"] == size
    assert oom["frames"][0]["name"] == function
    (extra,) = snapshot["mlxmem"]["ooms"]
    assert (extra["primitive"], extra["size"]) == (primitive, size)

    # THEN what was left is less than that, and what is live is what the program holds
    assert 0 <= oom["device_free"] <= 128 << 20
    held = 4 << 20
    assert held <= extra["active"] < held + 100
    live = [
        block["size"]
        for segment in snapshot["segments"]
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    ]
    assert sum(live) == extra["active"]
    assert max(live) == held

    # THEN one line tells of it
    (line,) = stderr.splitlines()
    assert line.startswith("mlxmem: MLX could not allocate ")
    assert line.endswith("what was recorded until then is in out.pickle")
    assert sorted(os.listdir(tmp_path)) == ["out.pickle"]


def test_without_the_option_nothing_is_written(tmp_path: Path) -> None:
    # GIVEN a session without dump_on_oom
    # WHEN an allocation fails
    snapshot, stderr = crash(tmp_path, "no-dump")

    # THEN the program dies as always
    assert (snapshot, stderr) == ({}, "")


def test_a_dump_that_fails_says_so(tmp_path: Path) -> None:
    # GIVEN a folder that goes away after enable()
    # WHEN an allocation fails
    snapshot, stderr = crash(tmp_path, "folder-gone")

    # THEN the program dies as always, and one line says that nothing was written
    assert snapshot == {}
    (line,) = stderr.splitlines()
    assert "MLX could not allocate 16.0 GiB, and " in line
    assert "could not be written (FileNotFoundError" in line


@pytest.mark.slow
def test_somebody_who_holds_the_gil_delays_but_never_deadlocks(tmp_path: Path) -> None:
    # GIVEN a thread that holds the GIL for 45 seconds
    begin = time.monotonic()

    # WHEN an allocation fails on another one, which has not got it
    snapshot, stderr = crash(tmp_path, "busy")

    # THEN it waits for half a minute, no longer
    assert (snapshot, stderr) == ({}, "")
    assert 29 < time.monotonic() - begin < 44


def test_bad_options_are_refused_at_once(tmp_path: Path) -> None:
    # GIVEN no session
    # WHEN a path is none, or can't be one
    # THEN the error says which argument it is, and nothing records
    with pytest.raises(TypeError, match="dump_on_oom must be a str or path-like"):
        mlxmem.enable(dump_on_oom=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dump_on_oom must name a file"):
        mlxmem.enable(dump_on_oom="")
    with pytest.raises(IsADirectoryError):
        mlxmem.enable(dump_on_oom=tmp_path)
    with pytest.raises(FileNotFoundError):
        mlxmem.enable(dump_on_oom=tmp_path / "missing" / "out.pickle")
    with pytest.raises(TypeError, match="dump_on_oom must be a str or path-like"):
        mlxmem.record(dump_on_oom=3)
    assert not mlxmem.is_enabled()


def test_record_takes_the_option(tmp_path: Path) -> None:
    # GIVEN a block with the option
    # WHEN nothing fails in it
    with mlxmem.record(dump_on_oom=tmp_path / "oom.pickle"):
        assert mlxmem.is_enabled()

    # THEN nothing is written
    assert os.listdir(tmp_path) == []
