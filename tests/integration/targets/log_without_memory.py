"""The memory for the log runs out while a session records; MLX must not notice."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[2]))

import mlx.core as mx
import numpy as np
from books import FREES, Books

import mlxmem
from mlxmem import recorder
from mlxmem.events import Action
from mlxmem.ledger import Ledger

CHUNK = 16_384  # events that the log makes room for at a time
AT_MOST = 40 * CHUNK


def limit_memory() -> tuple[int, int]:
    """Let the process grow by less than a chunk from now on; return the old limits."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(
        resource.RLIMIT_AS, (pages * resource.getpagesize() + (256 << 10), before[1])
    )
    return before


def fill_the_log() -> int:
    """Make and drop small arrays until the session ends; return how many."""
    for made in range(1, AT_MOST):
        mx.array(1.0)
        if made % 64 == 0 and not mlxmem.is_enabled():
            return made
    raise AssertionError("the log never ran out of memory")


def main() -> None:
    """Run out of memory, look at what is left, and record once more."""
    ones = mx.ones((1_000,))
    mx.eval(ones)
    mlxmem.enable(max_entries=0)
    keep = mx.ones((500,)) * 3
    mx.eval(keep)
    mlxmem.stats()  # whatever it imports is imported
    before = limit_memory()
    try:
        made = fill_the_log()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)

    # MLX goes on, and nothing is changed any more.
    assert mx.sum(ones).item() == 1_000
    # What was recorded until then adds up and can be read.
    recording = recorder.recording()
    assert 0 < len(recording.events) <= 2 * made + 10
    assert len(recording.events) % CHUNK == 0, len(recording.events)
    stats = mlxmem.stats()
    assert stats["events_recorded"] == len(recording.events)
    actions = recording.events["action"]
    allocs = int((actions <= Action.AllocMakeBuffer).sum())
    frees = int(np.isin(actions, FREES).sum())
    assert (stats["allocs"], stats["frees"]) == (allocs, frees)
    # Nothing from before enable() was freed.
    assert stats["live_buffers"] == allocs - frees
    ledger = Ledger(recording)
    at_the_end = (ledger.active[-1], ledger.cache[-1])
    assert at_the_end == (stats["active"], stats["cache"])
    snapshot = mlxmem.snapshot()
    assert snapshot["allocator_settings"]["ran_out_of_memory"] is True
    live = sum(segment["allocated_size"] for segment in snapshot["segments"])
    assert live == recording.active, (live, recording.active)
    # The next session starts afresh, and its books balance.
    mlxmem.disable()
    with Books() as books:
        more = [mx.array([float(n)]) for n in range(100)]
        assert len(books.allocs()) == 100
        del more
    assert mlxmem.snapshot()["allocator_settings"]["ran_out_of_memory"] is False


if __name__ == "__main__":
    main()
