"""More memory than the GPU has: a dump is left, and the program goes on."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import viewer

pytestmark = pytest.mark.cuda

TARGET = Path(__file__).parent / "targets" / "out_of_gpu_memory.py"


def run(folder: Path, mode: str) -> tuple[dict[str, Any], str, str]:
    """Run the program that fails to allocate; return its dump, stdout and stderr."""
    done = subprocess.run(
        [sys.executable, str(TARGET), "out.pickle", mode],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=200,
    )
    said = f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    print(said)
    if mode == "leaf" and "huge_source" in done.stderr:
        pytest.skip("this system gives out no 80 TiB of addresses")
    assert done.returncode == 0, said
    out = folder / "out.pickle"
    if not out.exists():
        return {}, done.stdout, done.stderr
    return pickle.loads(out.read_bytes()), done.stdout, done.stderr


@pytest.mark.parametrize(
    ("mode", "function", "size", "primitives"),
    [
        ("array", "whole_array", 4 << 40, {"Full", "Broadcast"}),
        ("kernel", "kernel_output", 1 << 40, {"Add"}),
        ("leaf", "leaf", 80 << 40, {""}),
    ],
)
def test_a_failure_leaves_a_dump_and_the_program_goes_on(
    tmp_path: Path, mode: str, function: str, size: int, primitives: set[str]
) -> None:
    # WHEN a program asks for more than there is
    snapshot, stdout, stderr = run(tmp_path, mode)

    # THEN MLX's error passes, and the rest of the program is right
    assert "raised " in stdout
    held = re.search(r"held (\d+), now (\d+)", stdout)
    assert held is not None
    assert held[1] == held[2]
    assert "sum 2097152" in stdout

    # AND the file holds the failure with its size, its operation and its line
    assert sorted(os.listdir(tmp_path)) == ["out.pickle"], stderr
    viewer.check_pickle((tmp_path / "out.pickle").read_bytes())
    ooms = [e for e in snapshot["device_traces"][0] if e["action"] == "oom"]
    assert [oom["size"] for oom in ooms] == [size]
    (extra,) = snapshot["mlxmem"]["ooms"]
    assert extra["size"] == size
    assert extra["primitive"] in primitives
    frames = [(f["filename"], f["name"]) for f in ooms[0]["frames"]]
    assert frames[0] == (str(TARGET), function), frames
    line = TARGET.read_text().splitlines()[ooms[0]["frames"][0]["line"] - 1]
    assert line.startswith("    return "), line
    assert ooms[0]["device_free"] >= 0

    # AND what is live in it is what the program held, with a constant or two
    assert int(held[1]) <= extra["active"] < int(held[1]) + 100
    live = [
        block["size"]
        for segment in snapshot["segments"]
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    ]
    assert sum(live) == extra["active"]
    assert sorted(live)[-2:] == [2 << 20, 4 << 20]

    # AND one line tells of it
    (told,) = [line for line in stderr.splitlines() if line.startswith("mlxmem: ")]
    assert told.startswith("mlxmem: MLX could not allocate ")
    assert told.endswith("what was recorded until then is in out.pickle")


def test_without_the_option_nothing_is_written(tmp_path: Path) -> None:
    snapshot, stdout, stderr = run(tmp_path, "no-dump")

    assert snapshot == {}
    assert "raised " in stdout
    assert "sum 2097152" in stdout
    assert "mlxmem: " not in stderr
    assert os.listdir(tmp_path) == []
