"""CUDA's way of recording, on the CPU: the allocator is followed by its own mutex.

There the events come from a tape that MLX's threads write while they hold the
allocator's mutex. The CPU's allocator has the same cache and the same kind of mutex, so
tests that record on the CPU are run again with it, in a process of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from books import HAS_CPU_CACHE

HERE = Path(__file__).parent
# What depends on the order of events, on threads, and on what a session begins with.
AGAIN = {
    "test_books.py": None,
    "test_sessions.py": None,
    "test_lifetimes.py": None,
    "test_attribution.py": None,
    "test_extension.py": None,
    "test_oom.py": None,
    "test_nodes.py": None,
    "test_positions.py": None,
    "test_setting_calls.py": None,
    "test_cache_at_enable.py": None,
    "test_undone.py": None,
    "test_cache_replay.py": "threads or million or before",
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not HAS_CPU_CACHE, reason="this MLX has no CPU cache to follow")
@pytest.mark.parametrize("name", AGAIN)
def test_again(name: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", str(HERE / name)]
    if AGAIN[name]:
        command += ["-k", str(AGAIN[name])]
    ended = subprocess.run(
        command,
        env={**os.environ, "MLXMEM_FOLLOW_MUTEX": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=550,
    )
    assert ended.returncode == 0, ended.stdout[-6000:]
    assert " passed" in ended.stdout
