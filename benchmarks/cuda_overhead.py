"""Compare training steps on a GPU: not recorded, attached only, recorded.

Training steps of a transformer encoder, small evaluated operations, and lazy nodes,
each in four modes that take turns in random order: ``off``; ``attached``, with MLX
patched but no session; ``no stacks``; ``on``. Printed are the median and the ratio to
``off`` of the same round, with quartiles. It runs on MLX's default device. Nothing is
judged here.

    python benchmarks/cuda_overhead.py --rounds 20
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from step_overhead import quartiles

import mlxmem
from mlxmem import _hook

Work = Callable[[], None]


def training_step(layers: int, width: int, tokens: int) -> Work:
    """Return one step of AdamW on a batch of 8 sequences."""
    # mlx.nn has no types.
    model: Any = nn.TransformerEncoder(layers, width, 8, 4 * width)
    mx.eval(model.parameters())
    optimizer = optim.AdamW(1e-3)
    batch = mx.random.normal((8, tokens, width))
    mask = nn.MultiHeadAttention.create_additive_causal_mask(tokens)
    loss_and_grad = nn.value_and_grad(
        model, lambda model, batch: (model(batch, mask) ** 2).mean()
    )

    def step() -> None:
        loss, grads = loss_and_grad(model, batch)
        optimizer.update(model, grads)
        mx.eval(loss, model.parameters(), optimizer.state)

    return step


def small_operations(count: int) -> Work:
    """Return so many evaluated products and sums of 64x64."""
    square = mx.random.normal((64, 64))
    mx.eval(square)

    def work() -> None:
        for _ in range(count):
            mx.eval(square @ square + square)

    return work


def lazy_nodes(count: int) -> Work:
    """Return a chain of so many nodes that are never evaluated."""
    square = mx.random.normal((64, 64))
    mx.eval(square)

    def work() -> None:
        chain = square
        for _ in range(count):
            chain = chain + square

    return work


def milliseconds(work: Work, times: int) -> float:
    """Return what one call takes, the GPU's work included, after one not counted."""
    work()
    mx.synchronize()
    begin = time.perf_counter()
    for _ in range(times):
        work()
    mx.synchronize()
    return (time.perf_counter() - begin) / times * 1e3


# What each mode does before and after its turn.
MODES: dict[str, tuple[Work, Work]] = {
    "off": (lambda: None, lambda: None),
    "attached": (lambda: _hook.attach(version("mlx")), _hook.detach),
    "no stacks": (lambda: mlxmem.enable(stacks=False), mlxmem.disable),
    "on": (mlxmem.enable, mlxmem.disable),
}


def main() -> None:
    """Parse the arguments, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=256, help="of a sequence")
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error("--rounds must be at least 2, for the quartiles")
    works = {
        "training step": (
            training_step(options.layers, options.width, options.tokens),
            4,
        ),
        "300 small operations": (small_operations(300), 1),
        "2,000 lazy nodes": (lazy_nodes(2_000), 3),
    }
    print(f"MLX {version('mlx')}, {mx.default_device()}")
    order = list(MODES)
    for name, (work, times) in works.items():
        for _ in range(3):
            work()
        found: dict[str, list[float]] = {mode: [] for mode in MODES}
        for _ in range(options.rounds):
            random.shuffle(order)
            for mode in order:
                before, after = MODES[mode]
                before()
                try:
                    found[mode].append(milliseconds(work, times))
                finally:
                    after()
        for mode, values in found.items():
            ratios = [b / a for a, b in zip(found["off"], values, strict=True)]
            low, median, high = quartiles(ratios)
            print(
                f"{name}, {mode}: {statistics.median(values):.3f} ms, "
                f"{median:.4f} ({low:.4f} to {high:.4f})"
            )


if __name__ == "__main__":
    main()
