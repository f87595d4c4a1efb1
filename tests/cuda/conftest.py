"""Tests on a GPU: skipped as a whole where MLX has no CUDA GPU."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# For books.py and case_run.py, viewer.py, and the checks of the CPU's tests.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "contract"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "integration"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import mlx.core as mx
from books import ON_CUDA, Books, settle

import mlxmem

REASON = (
    f"MLX {mx.__version__} has no CUDA GPU here: these need an NVIDIA GPU and "
    "`pip install '.[cuda13]'` or '.[cuda12]'"
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `cuda`."""
    if ON_CUDA:
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason=REASON))


@pytest.fixture(autouse=True)
def _on_the_gpu() -> Iterator[None]:
    """Run on the GPU; leave no recording, and device and limits as they were."""
    device = mx.default_device()
    if ON_CUDA:
        mx.set_default_device(mx.Device(mx.gpu, 0))
    memory_limit = mx.set_memory_limit(1 << 40)
    mx.set_memory_limit(memory_limit)
    cache_limit = mx.set_cache_limit(1 << 40)
    mx.set_cache_limit(cache_limit)
    yield
    mlxmem.disable()
    mx.set_cache_limit(cache_limit)
    mx.set_memory_limit(memory_limit)
    mx.set_default_device(device)
    gc.collect()
    settle()
    mx.clear_cache()


@pytest.fixture
def books() -> Iterator[Books]:
    """Record the test's body and check its books when it is over."""
    with Books() as session:
        yield session
