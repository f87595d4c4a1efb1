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
    # GIVEN a process that records, with threads that evaluate or without

    # WHEN it forks, and each child begins a session of its own
    done = run("fork_child.py", mode)

    # THEN the children saw recording off and then their own events, and none hung
    clean(done)


def test_multiprocessing_with_fork() -> None:
    # GIVEN a process that records

    # WHEN a pool forks workers that record, too
    done = run("multiprocessing_fork.py")

    # THEN each worker has its own books, and the parent's session goes on
    clean(done)


@pytest.mark.parametrize("situation", [f.__name__ for f in SITUATIONS])
def test_the_interpreter_ends_cleanly_while_recording(situation: str) -> None:
    # GIVEN arrays in an awkward place, in a process that records

    # WHEN its interpreter ends
    done = run("exit_while_recording.py", situation)

    # THEN it does so without an error or a word
    clean(done)


def test_enable_and_disable_while_others_evaluate() -> None:
    # GIVEN threads that evaluate the same again and again

    # WHEN another one, and then several at once, turn recording on and off
    done = run("toggle_while_evaluating.py")

    # THEN no result changed, and a session begun afterwards balances
    clean(done)


def test_a_session_that_begins_under_load_balances() -> None:
    # GIVEN threads that allocate, free and evaluate without a pause

    # WHEN sessions begin in the midst of that
    done = run("enable_under_load.py")

    # THEN the books of each equal MLX's counters once the threads pause
    clean(done)


@pytest.mark.parametrize("situation", ["no_files", "loader_busy"])
def test_a_fork_in_an_awkward_moment(situation: str) -> None:
    # GIVEN a process that records and has no file descriptor left, or in which
    # another thread holds the loader's lock

    # WHEN it forks
    done = run("fork_awkward.py", situation)

    # THEN the child neither dies nor hangs, and MLX is restored in it
    clean(done)


def test_slots_that_are_resolved_lazily(tmp_path: Path) -> None:
    # GIVEN libraries loaded with RTLD_LAZY

    # WHEN a session records the first call through their slots
    done = run("lazy_binding.py", str(tmp_path / "w.safetensors"))

    # THEN no probe is overwritten, stacks are there, and disable() restores all
    clean(done)
