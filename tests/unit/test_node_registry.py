"""The registry of array nodes, driven by threads without MLX."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (
    Path(__file__).with_name("node_registry_stress.cpp"),
    ROOT / "csrc" / "node_registry.cpp",
    ROOT / "csrc" / "node_threads.cpp",
)


def build(out: Path, *sources: Path) -> Path:
    """Compile a program of the sources."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    command = [compiler, "-std=c++17", "-O2", "-pthread", f"-I{ROOT / 'csrc'}"]
    subprocess.run([*command, "-o", str(out), *map(str, sources)], check=True)
    return out


@pytest.fixture(scope="module")
def stress(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the program that drives it."""
    return build(tmp_path_factory.mktemp("node_registry") / "stress", *SOURCES)


@pytest.mark.parametrize(
    "what",
    [
        pytest.param("one-way", id="one thread makes 10 million, another drops them"),
        pytest.param("all-ways", id="threads drop each other's"),
        pytest.param("short-threads", id="threads come and go"),
        pytest.param("late-threads", id="sessions begin under threads at work"),
        pytest.param("forks", id="forks in the middle of anything"),
    ],
)
def test_nodes_are_counted_exactly_and_slots_are_used_again(
    stress: Path, what: str
) -> None:
    # GIVEN a program that counts its own nodes

    # WHEN its threads make and drop them so
    done = subprocess.run(
        [stress, what], capture_output=True, text=True, timeout=240, check=False
    )

    # THEN the registry's totals and lists are the same
    assert (done.returncode, done.stderr) == (0, "")


def test_samples_never_run_backwards(tmp_path: Path) -> None:
    # GIVEN three samples, the second one from a rough position a little earlier
    program = build(
        tmp_path / "samples", Path(__file__).with_name("node_samples_order.cpp")
    )

    # WHEN they are taken
    done = subprocess.run([program], capture_output=True, text=True, check=True)

    # THEN the second keeps its count and lies where the first does
    samples = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert samples == [(5, 100, 1), (5, 100, 2), (6, 101, 3)]
