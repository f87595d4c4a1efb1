"""What off_cost.py runs under callgrind: the same operations, before and after.

Each operation runs in blocks. Between two blocks `os.getppid` is called, a libc
function that nothing else here calls; callgrind is told to write out its counts there
and to begin again (``--dump-before=getppid``), so each block has counts of its own,
with start-up and everything else in other ones.

    off_cost_driver.py 0 256     # mlxmem is never imported
    off_cost_driver.py 1 256     # it is imported, enabled and disabled half-way
    off_cost_driver.py 2 256     # it is imported and enabled half-way, and stays on
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable

import mlx.core as mx

Block = Callable[[int], None]

NEVER, OFF, ON = range(3)  # one digit: all modes start with equal memory
BLOCKS = 8  # of each operation, before and after
WARM_UP = 256  # runs of an operation before its blocks


def operations() -> dict[str, Block]:
    """Return the operations by name; each takes how often it is to run."""
    # Locals only: a module's dict changes with each import, and what the
    # interpreter's caches then do would be counted.
    left, right = mx.ones((10, 10)), mx.ones((10, 10))
    mx.eval(left, right)
    full, evaluate = mx.full, mx.eval
    shape = (10, 10)

    def add(times: int) -> None:
        for _ in range(times):
            left + right

    def full_only(times: int) -> None:
        for _ in range(times):
            full(shape, 1.0)

    def add_and_eval(times: int) -> None:
        for _ in range(times):
            evaluate(left + right)

    return {"add": add, "full": full_only, "add, eval": add_and_eval}


def run_blocks(blocks: dict[str, Block], times: int) -> None:
    """Run the blocks of each operation, with a mark before and after each."""
    mark = os.getppid
    held = []
    for block in blocks.values():
        block(WARM_UP)
        for _ in range(BLOCKS):
            # One block less in each of the heap's free lists: other addresses.
            held.append([bytearray(size) for size in range(8, 1032, 16)])
            # MLX looks its cached buffers up in a tree; let it be equally small.
            mx.clear_cache()
            block(16)
            mark()
            block(times)
            mark()


def main(mode: int, times: int) -> None:
    """Run all blocks twice; in between, do what the mode says."""
    # Never collect, and never come to the point where a collection is considered.
    gc.disable()
    gc.set_threshold(1 << 30)
    blocks = operations()
    run_blocks(blocks, times)
    if mode != NEVER:
        import mlxmem

        mlxmem.enable(max_entries=1_000)
        for block in blocks.values():
            block(WARM_UP)
        if mode == OFF:
            mlxmem.disable()
    run_blocks(blocks, times)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
