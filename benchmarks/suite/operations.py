"""Small operations: what a node and an event cost, with recording off and on."""

from __future__ import annotations

import subprocess
import sys
from itertools import product

from .common import BENCHMARKS, Block, OffAndOn, off_and_on, scaled, skip_in_quick_run

import time_operations as timing  # isort: skip

COUNTS = (10, 20, 30)
EVALUATE = ("graph only", "eval")


def at_once(name: str, operations: int) -> Block:
    """Return a block that evaluates each operation at once."""
    work = timing.build(name, 1, True)
    return lambda: run_often(work, scaled(operations))


def in_batches(name: str, operations: int) -> Block:
    """Return a block that evaluates 30 operations together."""
    work = timing.build(name, 30, True)
    return lambda: run_often(work, scaled(operations // 30))


def never(name: str, operations: int) -> Block:
    """Return a block that only builds graphs, of 30 nodes."""
    work = timing.build(name, 30, False)
    return lambda: run_often(work, scaled(operations // 30))


EVALUATIONS = {"graph only": never, "eval of 30": in_batches, "eval of each": at_once}


class Operations:
    """`full` and `add` on 10x10 arrays, 31 frames deep, in each of the modes."""

    params = (COUNTS, EVALUATE, timing.MODES)
    param_names = ("operations", "work", "mlxmem")
    warmup_time = 0.05

    def setup(self, count: int, evaluate: str, mode: str) -> None:
        """Bring this process into the mode."""
        skip_in_quick_run(count < max(COUNTS))
        timing.enter(mode)
        self.full = timing.build("full", count, evaluate == "eval")
        self.add = timing.build("add", count, evaluate == "eval")

    def time_full(self, count: int, evaluate: str, mode: str) -> None:
        """`mx.full`, so many times."""
        self.full()

    def time_add(self, count: int, evaluate: str, mode: str) -> None:
        """Additions, so many."""
        self.add()


class Costs:
    """Nanoseconds that mlxmem adds, for each operation.

    Of all turns the fastest counts: what other programs do only makes them slower.
    """

    params = (timing.OPERATIONS,)
    param_names = ("operation",)
    unit = "ns"
    timeout = 900

    def setup_cache(self) -> dict[str, dict[str, float]]:
        """Measure all in one go: on against off in turn, off against never in turn."""
        return {name: measure(name) for name in timing.OPERATIONS}

    def track_node_off(self, costs: dict[str, dict[str, float]], name: str) -> float:
        """Return what a node costs more in a process where mlxmem was on and is off.

        Noise around 0; `off_cost.py` counts instructions.
        """
        return costs[name]["node off"]

    def track_node_on(self, costs: dict[str, dict[str, float]], name: str) -> float:
        """Return what recording adds to an operation that is not evaluated."""
        return costs[name]["node on"]

    def track_event_on(self, costs: dict[str, dict[str, float]], name: str) -> float:
        """Return what recording adds to an evaluated operation, per event.

        The node's cost is taken off before.
        """
        return costs[name]["event on"]


class Ratios:
    """Recorded against unrecorded, in turn in one process."""

    params = (timing.OPERATIONS, tuple(EVALUATIONS))
    param_names = ("operation", "work")
    unit = "ratio"
    timeout = 900

    def setup_cache(self) -> dict[tuple[str, str], OffAndOn]:
        """Measure all."""
        return {
            (name, evaluate): off_and_on(
                EVALUATIONS[evaluate](name, 3_000), scaled(41, 3)
            )
            for name, evaluate in product(*self.params)
        }

    def track_on_to_off(
        self, found: dict[tuple[str, str], OffAndOn], name: str, evaluate: str
    ) -> float:
        """Return the median of the ratios of neighbours."""
        return found[name, evaluate].ratio

    def track_cpu_on_to_off(
        self, found: dict[tuple[str, str], OffAndOn], name: str, evaluate: str
    ) -> float:
        """Return the same by processor time, which other programs disturb less."""
        return found[name, evaluate].cpu_ratio


def run_often(work: Block, times: int) -> None:
    """Call ``work`` so many times."""
    for _ in range(times):
        work()


def measure(name: str) -> dict[str, float]:
    """Return the nanoseconds that mlxmem adds to one operation, by part."""
    import mlxmem

    count, runs, pairs = 30, scaled(20), scaled(201, 3)
    operations = count * runs

    def added(evaluate: bool) -> float:
        work = timing.build(name, count, evaluate)
        times = off_and_on(lambda: run_often(work, runs), pairs)
        return (times.least_on - times.least_off) / operations * 1e9

    def events(evaluate: bool) -> float:
        work = timing.build(name, count, evaluate)
        mlxmem.enable()
        work()
        mlxmem.disable()
        return mlxmem.stats()["events_recorded"] / count

    # `full` makes its leaf at once: those events belong to the node.
    node, evaluated = added(False), added(True)
    more_events = events(True) - events(False)
    children: dict[str, list[float]] = {"never": [], "disabled": []}
    for _, mode in product(range(scaled(7, 1)), children):
        children[mode].append(in_a_child(name, mode))
    return {
        "node on": node,
        "event on": (evaluated - node) / more_events,
        "node off": min(children["disabled"]) - min(children["never"]),
    }


def in_a_child(name: str, mode: str) -> float:
    """Return the nanoseconds of one operation in a process of its own."""
    script = BENCHMARKS / "time_operations.py"
    command = [sys.executable, str(script), "--operation", name, "--mode", mode]
    command += ["--turns", str(scaled(501, 3))]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout)
