"""Time operations on 10x10 arrays, reached through 31 recursive frames.

The mode says where mlxmem stands: ``never`` (it is not imported), ``disabled``
(imported, enabled and disabled again) or ``enabled``. Printed are the nanoseconds that
one operation takes in the fastest turn: other programs only make a turn slower.

    python benchmarks/time_operations.py --operation add --mode enabled --eval
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import mlx.core as mx

FRAMES = 31
SHAPE = (10, 10)
OPERATIONS = ("full", "add")
MODES = ("never", "disabled", "enabled")


def reach(frames: int, work: Callable[[], None]) -> None:
    """Call ``work`` through ``frames`` recursive frames."""
    if frames > 1:
        reach(frames - 1, work)
    else:
        work()


def build(operation: str, count: int, evaluate: bool) -> Callable[[], None]:
    """Return the work: ``count`` operations, then one `mx.eval` of all, or none."""
    left = mx.ones(SHAPE)
    mx.eval(left)

    def add() -> None:
        arrays = [left + left for _ in range(count)]
        if evaluate:
            mx.eval(arrays)

    def full() -> None:
        arrays = [mx.full(SHAPE, 1.0) for _ in range(count)]
        if evaluate:
            mx.eval(arrays)

    work = {"add": add, "full": full}[operation]
    return lambda: reach(FRAMES, work)


def enter(mode: str) -> None:
    """Bring the process into a mode; from ``never`` on it can go to any other."""
    if mode == "never":
        if "mlxmem" in sys.modules:
            raise RuntimeError("mlxmem was imported already")
        return
    import mlxmem

    mlxmem.enable()
    if mode == "disabled":
        mlxmem.disable()


def nanoseconds(work: Callable[[], None], count: int, runs: int, turns: int) -> float:
    """Return the nanoseconds of one operation in the fastest turn."""
    times = []
    for _ in range(turns):
        begin = time.perf_counter()
        for _ in range(runs):
            work()
        times.append((time.perf_counter() - begin) / (runs * count) * 1e9)
    return min(times)


def main() -> None:
    """Measure in one mode and print the nanoseconds alone."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mode", choices=MODES, default="never")
    parser.add_argument("--operation", choices=OPERATIONS, default="add")
    parser.add_argument("--count", type=int, default=30, help="operations a run")
    parser.add_argument("--eval", action="store_true", help="evaluate them, too")
    parser.add_argument("--runs", type=int, default=5, help="runs a turn")
    parser.add_argument("--turns", type=int, default=501)
    options = parser.parse_args()
    enter(options.mode)
    work = build(options.operation, options.count, options.eval)
    work()
    print(nanoseconds(work, options.count, options.runs, options.turns))


if __name__ == "__main__":
    main()
