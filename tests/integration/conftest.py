"""Makes `books` and `viewer` importable, and leaves no recording on between tests."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# For books.py and viewer.py.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "contract"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import mlx.core as mx
from books import HAS_CPU_CACHE, Books

import mlxmem

# A shell that runs the tests in the background ignores Ctrl-C, and so would the
# programs that they start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _clean_slate() -> Iterator[None]:
    """Start and leave each test with recording off and MLX's limits as they were."""
    cache_limit = mx.set_cache_limit(32 << 20)
    mx.set_cache_limit(cache_limit)
    yield
    mlxmem.disable()
    mx.set_cache_limit(cache_limit)
    gc.collect()
    mx.clear_cache()


@pytest.fixture
def books() -> Iterator[Books]:
    """Record the test's body and check its books when it is over."""
    with Books() as session:
        yield session


@pytest.fixture
def cpu_cache() -> None:
    """Skip where MLX's CPU allocator has no cache."""
    if not HAS_CPU_CACHE:
        pytest.skip("before 0.32.0 MLX's CPU allocator caches nothing")
