"""What counting array nodes costs: 200,000 pending nodes are made and dropped.

Recording off, on without stacks and on, in turns in one process: what "on without
stacks" takes more than "off" is the counting, what "on" takes more than that is the
capture of stacks. Reading the list of nodes is timed apart.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time

import mlx.core as mx

import mlxmem
from mlxmem import _hook

MODES = ("off", "on without stacks", "on")


def enter(mode: str) -> None:
    """Begin a session, or none."""
    if mode != "off":
        mlxmem.enable(stacks=mode == "on")


def make_and_drop(nodes: int) -> tuple[float, float]:
    """Return the seconds that making the nodes and dropping them takes."""
    x = mx.ones((2,))
    mx.eval(x)
    mx.synchronize()
    sin = mx.sin
    begin = time.thread_time()
    for _ in range(nodes):
        x = sin(x)
    made = time.thread_time()
    del x
    return made - begin, time.thread_time() - made


def time_reading(nodes: int) -> float:
    """Return the seconds that reading so many live nodes takes."""
    x = mx.ones((2,))
    mlxmem.enable()
    for _ in range(nodes):
        x = mx.sin(x)
    begin = time.perf_counter()
    found = _hook.copy_nodes()
    seconds = time.perf_counter() - begin
    assert found is not None
    assert int(found.live["pending"].sum()) == nodes
    mlxmem.disable()
    return seconds


def main() -> None:
    """Print medians over the rounds, in ns per node and as ratios to "off"."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    gc.disable()
    make_and_drop(options.nodes)
    taken: dict[str, list[tuple[float, float]]] = {mode: [] for mode in MODES}
    for round_ in range(options.rounds):
        turn = round_ % len(MODES)
        for mode in (*MODES[turn:], *MODES[:turn]):
            enter(mode)
            taken[mode].append(make_and_drop(options.nodes))
            mlxmem.disable()
    for mode in MODES:
        made = statistics.median(m for m, _ in taken[mode]) / options.nodes * 1e9
        dropped = statistics.median(d for _, d in taken[mode]) / options.nodes * 1e9
        ratios = sorted(
            sum(on) / sum(off)
            for on, off in zip(taken[mode], taken["off"], strict=True)
        )
        quartiles = statistics.quantiles(ratios, n=4)
        print(
            f"{mode:<18} made in {made:6.1f} ns, dropped in {dropped:6.1f} ns a node; "
            f"{statistics.median(ratios):.3f} of off "
            f"({quartiles[0]:.3f} to {quartiles[2]:.3f})"
        )
    seconds = time_reading(options.nodes)
    print(f"read: {seconds:.3f} s, {seconds / options.nodes * 1e9:.0f} ns a node")


if __name__ == "__main__":
    main()
