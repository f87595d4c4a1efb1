"""The two workloads of the GPU tests: a training step, and generation by token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim

WIDTH, HEADS, VOCABULARY = 128, 4, 500


def training(layers: int = 2, context: int = 64) -> Callable[[], float]:
    """Return a step of AdamW on a small transformer; it returns the loss."""
    mx.random.seed(0)
    model: Any = nn.TransformerEncoder(layers, WIDTH, HEADS)
    head = nn.Linear(WIDTH, VOCABULARY)
    both = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), head)
    both.encoder = model
    optimizer = optim.AdamW(1e-3)
    tokens = mx.random.randint(0, VOCABULARY, (4, context + 1))
    mask = nn.MultiHeadAttention.create_additive_causal_mask(context)
    mx.eval(both.parameters(), tokens, mask)

    def loss_of(both: Any, inputs: mx.array, targets: mx.array) -> mx.array:
        hidden = both.encoder(both.layers[0](inputs), mask)
        return nn.losses.cross_entropy(both.layers[1](hidden), targets).mean()

    loss_and_grad = nn.value_and_grad(both, loss_of)

    def step() -> float:
        loss, gradients = loss_and_grad(both, tokens[:, :-1], tokens[:, 1:])
        optimizer.update(both, gradients)
        mx.eval(loss, both.parameters(), optimizer.state)
        return float(loss.item())

    return step


def generate(tokens: int, step: int = 32) -> list[int]:
    """Generate token by token: keys and values grow by `step`, one token ahead."""
    mx.random.seed(0)
    embedding = nn.Embedding(VOCABULARY, WIDTH)
    query, key, value, out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
    mx.eval([layer.parameters() for layer in (embedding, query, key, value, out)])
    size = WIDTH // HEADS
    keys = mx.zeros((1, HEADS, 0, size))
    values = mx.zeros((1, HEADS, 0, size))
    used = 0

    def heads(x: mx.array) -> mx.array:
        return x.reshape(1, 1, HEADS, size).transpose(0, 2, 1, 3)

    def next_token(token: mx.array) -> mx.array:
        nonlocal keys, values, used
        hidden = embedding(token)[None]
        if used == keys.shape[2]:
            more = mx.zeros((1, HEADS, step, size))
            keys = mx.concatenate([keys, more], axis=2)
            values = mx.concatenate([values, more], axis=2)
        keys[..., used : used + 1, :] = heads(key(hidden))
        values[..., used : used + 1, :] = heads(value(hidden))
        used += 1
        mixed = mx.fast.scaled_dot_product_attention(
            heads(query(hidden)),
            keys[..., :used, :],
            values[..., :used, :],
            scale=size**-0.5,
        )
        mixed = out(mixed.transpose(0, 2, 1, 3).reshape(1, WIDTH)) + hidden[0]
        return mx.argmax(mixed @ embedding.weight.T, axis=-1)

    found = []
    token = next_token(mx.array([1]))
    mx.async_eval(token)
    for _ in range(tokens):
        ahead = next_token(token)
        mx.async_eval(ahead)
        found.append(int(token.item()))
        token = ahead
    return found
