"""Train a small character-level transformer and record its memory.

The text is what every machine with Python has: the source of the standard library.
The model has about a million parameters, so a few dozen steps take about a
minute on a CPU.

    python examples/train_transformer.py --steps 36 --out out.pickle
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import sysconfig
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten

import mlxmem

TEXT_BYTES = 2_000_000


def read_text(limit: int = TEXT_BYTES) -> str:
    """Return the standard library's top-level modules as one text.

    Files are taken in the order of their names until ``limit`` characters are
    reached. What is not ASCII becomes "?", which keeps the alphabet small.
    """
    parts: list[str] = []
    length = 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_text(encoding="ascii", errors="replace")
        parts.append(text.replace("\ufffd", "?"))
        length += len(parts[-1])
        if length >= limit:
            break
    return "".join(parts)[:limit]


def encode(text: str) -> tuple[np.ndarray, int]:
    """Return the text as character numbers, shape (len(text),), and their count."""
    alphabet = sorted(set(text))
    number = {character: index for index, character in enumerate(alphabet)}
    return np.array([number[character] for character in text], np.int32), len(alphabet)


def batches(
    tokens: np.ndarray, batch: int, context: int, seed: int
) -> Iterator[tuple[mx.array, mx.array]]:
    """Yield (inputs, targets), int32 of shape (batch, context), without end."""
    random = np.random.default_rng(seed)
    while True:
        starts = random.integers(0, len(tokens) - context - 1, size=batch)
        rows = tokens[starts[:, None] + np.arange(context + 1)]
        yield mx.array(rows[:, :-1]), mx.array(rows[:, 1:])


class Transformer(nn.Module):
    """A decoder-only transformer: it guesses each next character."""

    def __init__(
        self, alphabet: int, context: int, dims: int, layers: int, heads: int
    ) -> None:
        super().__init__()
        self.character = nn.Embedding(alphabet, dims)
        self.position = nn.Embedding(context, dims)
        self.encoder = nn.TransformerEncoder(layers, dims, heads, norm_first=True)
        self.out = nn.Linear(dims, alphabet)

    def __call__(self, tokens: mx.array) -> mx.array:
        """Map (batch, context) tokens to (batch, context, alphabet) logits."""
        length = tokens.shape[1]
        mask = nn.MultiHeadAttention.create_additive_causal_mask(length)
        hidden = self.character(tokens) + self.position(mx.arange(length))
        return self.out(self.encoder(hidden, mask))


def loss_of(model: Transformer, inputs: mx.array, targets: mx.array) -> mx.array:
    """Return the mean cross entropy in nats per character, shape ()."""
    return nn.losses.cross_entropy(model(inputs), targets, reduction="mean")


class Trainer:
    """The model, its optimizer and its data; ``step`` is one training step."""

    def __init__(self, batch: int = 4, context: int = 64, seed: int = 0) -> None:
        mx.random.seed(seed)
        tokens, alphabet = encode(read_text())
        self.characters = len(tokens)
        self.data = batches(tokens, batch, context, seed)
        self.model = Transformer(alphabet, context, dims=128, layers=5, heads=4)
        self.optimizer = optim.AdamW(learning_rate=3e-4)
        self.loss_and_grad = nn.value_and_grad(self.model, loss_of)
        mx.eval(self.model.parameters())

    @property
    def parameters(self) -> int:
        """The number of weights."""
        leaves = cast(list[tuple[str, mx.array]], tree_flatten(self.model.parameters()))
        return sum(array.size for _, array in leaves)

    def step(self) -> float:
        """Train on one batch and return its loss."""
        inputs, targets = next(self.data)
        loss, gradients = self.loss_and_grad(self.model, inputs, targets)
        self.optimizer.update(self.model, gradients)
        mx.eval(loss, self.model.parameters(), self.optimizer.state)
        return float(loss.item())


def human(size: float) -> str:
    """Write a number of bytes for people: 1536 is "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def print_counters() -> None:
    """Print MLX's own counters beside those of the recorder."""
    stats: dict[str, Any] = dict(mlxmem.stats())
    counters = {
        "active": mx.get_active_memory(),
        "cache": mx.get_cache_memory(),
        "peak": mx.get_peak_memory(),
    }
    print(f"\n{'':10}{'MLX counts':>14}{'recorded':>14}")
    for name, count in counters.items():
        print(f"{name:10}{human(count):>14}{human(stats.pop(name)):>14}")
    print(f"{'reserved':10}{'':14}{human(stats.pop('reserved')):>14}")
    for name, value in stats.items():
        print(f"{name.replace('_', ' '):24}{value:>14,}")


def main() -> None:
    """Parse the arguments, train under recording and write the dump."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=36)
    parser.add_argument("--batch", type=int, default=4, help="texts per step")
    parser.add_argument("--context", type=int, default=64, help="characters per text")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out.pickle"))
    parser.add_argument("--no-record", action="store_true", help="only train")
    options = parser.parse_args()

    with contextlib.ExitStack() as stack:
        if not options.no_record:
            stack.enter_context(mlxmem.record(options.out, max_entries=0))
        trainer = Trainer(options.batch, options.context, options.seed)
        print(
            f"{trainer.parameters:,} parameters, {trainer.characters:,} characters, "
            f"MLX {version('mlx')}",
            flush=True,
        )
        losses: list[float] = []  # those since the last line
        started = time.perf_counter()
        for step in range(1, options.steps + 1):
            losses.append(trainer.step())
            if step == 1 or step % 6 == 0:
                mean = sum(losses) / len(losses)
                print(f"step {step:4}  loss {mean:.3f}", flush=True)
                losses.clear()
        seconds = time.perf_counter() - started
        print(f"{options.steps} steps in {seconds:.1f} s")
        if not options.no_record:
            print_counters()

    if not options.no_record:
        size = options.out.stat().st_size
        print(f"\nThe recording is in {options.out} ({human(size)}). To look at it:")
        mlxmem_command = Path(sys.executable).with_name("mlxmem")
        print(f"  {mlxmem_command} summary {options.out}")
        print(f"  {mlxmem_command} view {options.out}")
        print("or drop the file on https://docs.pytorch.org/memory_viz")


if __name__ == "__main__":
    main()
