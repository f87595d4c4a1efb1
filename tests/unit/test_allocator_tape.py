"""The tape of CUDA's allocator, driven by threads without MLX."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [
    Path(__file__).with_name("allocator_tape_stress.cpp"),
    *(ROOT / "csrc" / f"{name}.cpp" for name in ("allocator_tape", "clock", "threads")),
]


def test_the_tape_keeps_order_places_and_times(tmp_path: Path) -> None:
    # GIVEN a program with a mutex and words that stand for an allocator's
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    out = tmp_path / "stress"
    command = [compiler, "-std=c++17", "-O2", "-pthread", f"-I{ROOT / 'csrc'}"]
    subprocess.run([*command, "-o", str(out), *map(str, SOURCES)], check=True)

    # WHEN
    done = subprocess.run(
        [out], capture_output=True, text=True, timeout=240, check=False
    )

    # THEN
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")
