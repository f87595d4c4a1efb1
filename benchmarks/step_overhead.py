"""Compare recorded and unrecorded work, side by side in one process.

Two modes. ``step`` times training steps of ``examples/train_transformer.py``;
``tiny`` times a loop of small operations, 10x10 adds with an eval each, called 32
frames deep. Recording is switched on and off between blocks of work, in the order
ABBA with a random first letter, so that drift of the machine hits both alike. What is
printed is the median, the quartiles, and the ratio of neighbours, by the clock and by
the processor time of all threads; on a busy machine only the latter means much.
Nothing is judged here.

    python benchmarks/step_overhead.py --mode step --pairs 20
"""

from __future__ import annotations

import argparse
import random
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx

import mlxmem

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

DEPTH = 32


def deep(depth: int, work: Callable[[], None]) -> None:
    """Call ``work`` with at least ``depth`` Python frames below it."""
    if depth > 0:
        deep(depth - 1, work)
    else:
        work()


def step_block(steps: int) -> Callable[[], None]:
    """Return a block of ``steps`` training steps of the example."""
    from train_transformer import Trainer

    trainer = Trainer()

    def block() -> None:
        for _ in range(steps):
            trainer.step()

    return block


def tiny_block(operations: int) -> Callable[[], None]:
    """Return a block of ``operations`` adds of 10x10, each evaluated at once."""
    left, right = mx.ones((10, 10)), mx.ones((10, 10))
    mx.eval(left, right)

    def work() -> None:
        for _ in range(operations):
            mx.eval(left + right)

    return lambda: deep(DEPTH, work)


class Seconds(NamedTuple):
    """What one block took."""

    wall: float  # by the clock
    cpu: float  # of all threads of the process


def timed(block: Callable[[], None], recorded: bool, stacks: bool) -> Seconds:
    """Run one block, recorded or not, and return its seconds.

    Switching on and off is not part of the time.
    """
    if recorded:
        mlxmem.enable(stacks=stacks)
    try:
        wall, cpu = time.perf_counter(), time.process_time()
        block()
        return Seconds(time.perf_counter() - wall, time.process_time() - cpu)
    finally:
        if recorded:
            mlxmem.disable()


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the first quartile, the median and the third quartile."""
    first, median, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, median, third


def measure(
    block: Callable[[], None], pairs: int, warm_up: int, stacks: bool, seed: int
) -> tuple[list[Seconds], list[Seconds]]:
    """Return the seconds of the unrecorded and of the recorded blocks, in pairs."""
    for _ in range(warm_up):
        timed(block, False, stacks)
        timed(block, True, stacks)
    order = random.Random(seed)
    times: dict[bool, list[Seconds]] = {False: [], True: []}
    first = order.random() < 0.5
    for pair in range(pairs):
        if pair % 2 == 0:
            first = order.random() < 0.5
        # The second pair of two runs in the opposite order of the first.
        now = first if pair % 2 == 0 else not first
        for recorded in (now, not now):
            times[recorded].append(timed(block, recorded, stacks))
    return times[False], times[True]


def report(plain: list[Seconds], recorded: list[Seconds], units: int) -> None:
    """Print both times per unit of work, and the ratio of the pairs."""
    for clock in Seconds._fields:
        off = [getattr(seconds, clock) for seconds in plain]
        on = [getattr(seconds, clock) for seconds in recorded]
        print(f"  {clock} time")
        for label, values in (("not recorded", off), ("recorded", on)):
            low, median, high = (1e3 * value / units for value in quartiles(values))
            print(f"    {label:18}{median:10.4f} ms  ({low:.4f} to {high:.4f})")
        low, median, high = quartiles([b / a for a, b in zip(off, on, strict=True)])
        of_medians = statistics.median(on) / statistics.median(off)
        print(f"    ratio of medians  {of_medians:10.4f}")
        print(f"    median of ratios  {median:10.4f}     ({low:.4f} to {high:.4f})")


def main() -> None:
    """Parse the arguments, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=("step", "tiny", "both"), default="both")
    parser.add_argument("--pairs", type=int, default=24, help="pairs of blocks")
    parser.add_argument("--steps", type=int, default=1, help="training steps a block")
    parser.add_argument("--operations", type=int, default=2000, help="adds a block")
    parser.add_argument("--warm-up", type=int, default=3, help="pairs not counted")
    parser.add_argument("--no-stacks", action="store_true", help="record no stacks")
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    options = parser.parse_args()
    if options.pairs < 2:
        parser.error("--pairs must be at least 2, for the quartiles")

    python = "{}.{}.{}".format(*sys.version_info[:3])
    print(f"{shlex.join(['python', *sys.argv])}\nPython {python}, MLX {version('mlx')}")
    modes = {
        "step": (step_block, options.steps, "training step"),
        "tiny": (tiny_block, options.operations, f"10x10 add, {DEPTH} frames deep"),
    }
    for mode, (make, units, name) in modes.items():
        if options.mode not in (mode, "both"):
            continue
        plain, recorded = measure(
            make(units),
            options.pairs,
            options.warm_up,
            not options.no_stacks,
            options.seed,
        )
        print(f"\n{mode}: a {name}; {options.pairs} pairs of {units}, quartiles in ()")
        report(plain, recorded, units)


if __name__ == "__main__":
    main()
