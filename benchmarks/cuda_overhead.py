"""Compare work on a GPU: not recorded, attached only, recorded.

Training steps of a transformer, the generation of tokens one by one, small evaluated
operations, and lazy nodes, each in four modes that take turns in random order:
``off``; ``attached``, with MLX patched but no session; ``no stacks``; ``on``. Printed
are the events of a step or token, the median time, and the ratio to ``off`` of the
same round, with quartiles. It runs on MLX's default device. Nothing is judged here.

``--large`` takes a decoder of about a billion parameters in bfloat16 for the first
two, and the modes ``off`` and ``on``; it needs 40 GB of the GPU.

    python benchmarks/cuda_overhead.py --rounds 20
    python benchmarks/cuda_overhead.py --large
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten
from step_overhead import quartiles

import mlxmem
from mlxmem import _hook

Work = Callable[[], None]
STEP = 256  # by which the caches of keys and values grow, tokens; as in mlx_lm
CACHE_CLEARED = 256  # mlx_lm empties MLX's cache after so many tokens


class Load(NamedTuple):
    """Something to time."""

    work: Work
    times: int  # it is called in one measurement
    units: int  # steps or tokens of one call
    unit: str


class Sizes(NamedTuple):
    """Sizes of a decoder."""

    layers: int
    width: int
    heads: int
    vocabulary: int

    @property
    def key_heads(self) -> int:
        """Heads of keys and values, each of which serves up to four others."""
        return max(self.heads // 4, 1)


class KeyValueCache:
    """Keys and values of one layer, which grow by `STEP` tokens."""

    def __init__(self) -> None:
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.offset = 0

    def update(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Add those of new tokens and return all, (1, heads, tokens, size)."""
        before = self.offset
        self.offset += keys.shape[2]
        self.keys = self._room(self.keys, keys, before)
        self.values = self._room(self.values, values, before)
        self.keys[..., before : self.offset, :] = keys
        self.values[..., before : self.offset, :] = values
        return self.keys[..., : self.offset, :], self.values[..., : self.offset, :]

    def _room(self, held: mx.array | None, new: mx.array, before: int) -> mx.array:
        if held is not None and self.offset <= held.shape[2]:
            return held
        steps = (STEP + new.shape[2] - 1) // STEP
        room = mx.zeros((*new.shape[:2], steps * STEP, new.shape[3]), new.dtype)
        if held is None:
            return room
        return mx.concatenate([held[..., :before, :], room], axis=2)


class DecoderLayer(nn.Module):
    """Attention with grouped keys and a gated network, as in Llama."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads, self.key_heads = sizes.heads, sizes.key_heads
        self.size = sizes.width // sizes.heads
        keys = self.key_heads * self.size
        self.query = nn.Linear(sizes.width, sizes.width, bias=False)
        self.key = nn.Linear(sizes.width, keys, bias=False)
        self.value = nn.Linear(sizes.width, keys, bias=False)
        self.out = nn.Linear(sizes.width, sizes.width, bias=False)
        self.gate = nn.Linear(sizes.width, 4 * sizes.width, bias=False)
        self.up = nn.Linear(sizes.width, 4 * sizes.width, bias=False)
        self.down = nn.Linear(4 * sizes.width, sizes.width, bias=False)
        self.attention_norm = nn.RMSNorm(sizes.width)
        self.norm = nn.RMSNorm(sizes.width)
        self.rope = nn.RoPE(self.size)

    def __call__(self, hidden: Any, cache: KeyValueCache | None) -> Any:
        """Map (batch, tokens, width) to the same."""
        batch, tokens, _ = hidden.shape
        normed = self.attention_norm(hidden)
        query, key, value = (
            project(normed).reshape(batch, tokens, heads, -1).transpose(0, 2, 1, 3)
            for project, heads in (
                (self.query, self.heads),
                (self.key, self.key_heads),
                (self.value, self.key_heads),
            )
        )
        offset = cache.offset if cache else 0
        query, key = self.rope(query, offset=offset), self.rope(key, offset=offset)
        if cache:
            key, value = cache.update(key, value)
        mixed = mx.fast.scaled_dot_product_attention(
            query,
            key,
            value,
            scale=self.size**-0.5,
            mask="causal" if tokens > 1 else None,
        )
        mixed = mixed.transpose(0, 2, 1, 3).reshape(batch, tokens, -1)
        hidden = hidden + self.out(mixed)
        normed = self.norm(hidden)
        return hidden + self.down(nn.silu(self.gate(normed)) * self.up(normed))


class Decoder(nn.Module):
    """A language model with the embedding as its last layer."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.layers = [DecoderLayer(sizes) for _ in range(sizes.layers)]
        self.norm = nn.RMSNorm(sizes.width)

    def __call__(self, tokens: mx.array, caches: list[KeyValueCache] | None) -> Any:
        """Map (batch, tokens) to logits, (batch, tokens, vocabulary)."""
        hidden = self.embedding(tokens)
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden, caches[number] if caches else None)
        return self.embedding.as_linear(self.norm(hidden))


def decoder(sizes: Sizes) -> Any:
    """Return a decoder in bfloat16, and print how large it is."""
    mx.random.seed(0)
    model: Any = Decoder(sizes)
    model.set_dtype(mx.bfloat16)
    mx.eval(model.parameters())
    leaves: Any = tree_flatten(model.parameters())
    parameters = sum(array.size for _, array in leaves)
    print(f"decoder: {parameters:,} parameters, {sizes}")
    return model


def generation(model: Any, prompt: int, tokens: int) -> Work:
    """Return the generation of so many tokens, one ahead of the one that is read."""
    text = mx.arange(prompt)[None] % 100
    mx.eval(text)

    def generate() -> None:
        caches = [KeyValueCache() for _ in model.layers]

        def following(token: mx.array) -> mx.array:
            return mx.argmax(model(token, caches)[:, -1:, :], axis=-1)

        token = following(text)
        mx.async_eval(token)
        for number in range(1, tokens + 1):
            ahead = following(token)
            mx.async_eval(ahead)
            token.item()
            token = ahead
            if number % CACHE_CLEARED == 0:
                mx.clear_cache()
        mx.eval(token)

    return generate


def decoder_step(model: Any, vocabulary: int, batch: int, tokens: int) -> Work:
    """Return one step of AdamW on the decoder."""
    optimizer = optim.AdamW(1e-5)
    text = mx.random.randint(0, vocabulary, (batch, tokens + 1))
    mx.eval(text)

    def loss_of(model: Any, inputs: mx.array, targets: mx.array) -> mx.array:
        return nn.losses.cross_entropy(model(inputs, None), targets).mean()

    loss_and_grad = nn.value_and_grad(model, loss_of)

    def step() -> None:
        loss, grads = loss_and_grad(model, text[:, :-1], text[:, 1:])
        optimizer.update(model, grads)
        mx.eval(loss, model.parameters(), optimizer.state)

    return step


def training_step(layers: int, width: int, batch: int, tokens: int) -> Work:
    """Return one step of AdamW on an encoder, in float32."""
    # mlx.nn has no types.
    model: Any = nn.TransformerEncoder(layers, width, 8, 4 * width)
    mx.eval(model.parameters())
    optimizer = optim.AdamW(1e-3)
    rows = mx.random.normal((batch, tokens, width))
    mask = nn.MultiHeadAttention.create_additive_causal_mask(tokens)
    loss_and_grad = nn.value_and_grad(
        model, lambda model, rows: (model(rows, mask) ** 2).mean()
    )

    def step() -> None:
        loss, grads = loss_and_grad(model, rows)
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


def events_of(load: Load) -> float:
    """Return how many events a step or token has."""
    mlxmem.enable(stacks=False)
    try:
        load.work()
        mx.synchronize()
        return float(mlxmem.stats()["events_recorded"] / load.units)
    finally:
        mlxmem.disable()


def compare(name: str, load: Load, rounds: int, modes: Sequence[str]) -> None:
    """Time one load in every mode and print what came out."""
    for _ in range(2):
        load.work()
    print(f"{name}: {events_of(load):,.1f} events a {load.unit}")
    order = list(modes)
    found: dict[str, list[float]] = {mode: [] for mode in modes}
    for _ in range(rounds):
        random.shuffle(order)
        for mode in order:
            before, after = MODES[mode]
            before()
            try:
                found[mode].append(milliseconds(load.work, load.times) / load.units)
            finally:
                after()
    for mode, values in found.items():
        ratios = [b / a for a, b in zip(found["off"], values, strict=True)]
        low, median, high = quartiles(ratios)
        print(
            f"{name}, {mode}: {statistics.median(values):.3f} ms a {load.unit}, "
            f"{median:.4f} ({low:.4f} to {high:.4f})",
            flush=True,
        )


LOADS = ("training", "generation", "operations", "nodes")


def make(name: str, options: argparse.Namespace) -> tuple[str, Load]:
    """Return one of `LOADS` with its title."""
    sizes = Sizes(
        options.decoder_layers,
        options.decoder_width,
        options.decoder_heads,
        options.vocabulary,
    )
    if name == "operations":
        return "300 small operations", Load(small_operations(300), 1, 1, "block")
    if name == "nodes":
        return "2,000 lazy nodes", Load(lazy_nodes(2_000), 3, 1, "block")
    if name == "generation":
        work = generation(decoder(sizes), options.prompt, options.new_tokens)
        title = f"generation of {options.new_tokens} tokens"
        return title, Load(work, 1, options.new_tokens, "token")
    batch, tokens = options.batch, options.tokens
    if options.large:
        work = decoder_step(decoder(sizes), sizes.vocabulary, batch, tokens)
        return "training step", Load(work, 2, 1, "step")
    work = training_step(options.layers, options.width, batch, tokens)
    return "training step", Load(work, 4, 1, "step")


# What --large changes, where an option does not say otherwise.
DEFAULTS = {
    "rounds": (20, 8),
    "batch": (8, 4),
    "tokens": (256, 1024),
    "decoder_layers": (12, 16),
    "decoder_width": (768, 2048),
    "decoder_heads": (12, 32),
    "vocabulary": (32_000, 32_000),
    "new_tokens": (128, 128),
    "modes": (list(MODES), ["off", "on"]),
    "loads": (list(LOADS), ["training", "generation"]),
}


def main() -> None:
    """Parse the arguments, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--large", action="store_true", help="a billion parameters")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--loads", nargs="+", choices=LOADS, help="what to time")
    parser.add_argument("--modes", nargs="+", choices=tuple(MODES), help="with off")
    parser.add_argument("--layers", type=int, default=6, help="of the encoder")
    parser.add_argument("--width", type=int, default=512, help="of the encoder")
    parser.add_argument("--batch", type=int, help="sequences of a training step")
    parser.add_argument("--tokens", type=int, help="of a sequence")
    parser.add_argument("--decoder-layers", type=int)
    parser.add_argument("--decoder-width", type=int)
    parser.add_argument("--decoder-heads", type=int)
    parser.add_argument("--vocabulary", type=int)
    parser.add_argument("--prompt", type=int, default=32, help="tokens before")
    parser.add_argument("--new-tokens", type=int, help="tokens to generate")
    options = parser.parse_args()
    for name, values in DEFAULTS.items():
        if getattr(options, name) is None:
            setattr(options, name, values[options.large])
    if options.rounds < 2:
        parser.error("--rounds must be at least 2, for the quartiles")
    if "off" not in options.modes:
        parser.error("--modes needs off, which the others are compared with")
    if options.decoder_width % options.decoder_heads:
        parser.error("--decoder-width must be a multiple of --decoder-heads")
    print(f"MLX {version('mlx')}, {mx.default_device()}")
    for name in options.loads:
        compare(*make(name, options), options.rounds, options.modes)
        mx.clear_cache()


if __name__ == "__main__":
    main()
