"""Processes that fork, end, or toggle recording: each target runs as a script."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TARGETS = Path(__file__).parent / "targets"
sys.path.insert(0, str(TARGETS))

from exit_while_recording import SITUATIONS  # noqa: E402


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a target and wait for it; a hang fails the test."""
    # Python 3.12 warns of a fork with threads, and MLX always has some.
    options = ["-X", "faulthandler", "-W", "ignore::DeprecationWarning"]
    return subprocess.run(
        [sys.executable, *options, str(TARGETS / name), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
    )


def clean(done: subprocess.CompletedProcess[str]) -> None:
    """Assert that a target ended without an error or a word of complaint."""
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("mode", ["quiet", "evaluating"])
def test_a_forked_child_starts_with_recording_off(mode: str) -> None:
    clean(run("fork_child.py", mode))


def test_multiprocessing_with_fork() -> None:
    clean(run("multiprocessing_fork.py"))


@pytest.mark.parametrize("situation", [f.__name__ for f in SITUATIONS])
def test_the_interpreter_ends_cleanly_while_recording(situation: str) -> None:
    clean(run("exit_while_recording.py", situation))


def test_enable_and_disable_while_others_evaluate() -> None:
    clean(run("toggle_while_evaluating.py"))
