"""Source: ml-explore/mlx-lm#1641, #1845, #1332 (ArraysCache.advance), PR#1632.
Diagnosis expected: one 4-byte leaf per layer per token stays live; bytes stay
tiny while buffer count and host RSS climb; stack points at advance().
"""

import mlx.core as mx
from _mem import snap

LAYERS = 8


class Slot:
    def __init__(self):
        self.left_padding = mx.array([0])
        self.state = mx.zeros((1, 64))

    def advance(self, n):
        self.left_padding = self.left_padding - n  # nothing ever reads it

    def step(self):
        self.state = self.state * 0.5


slots = [Slot() for _ in range(LAYERS)]
mx.eval([s.state for s in slots], [s.left_padding for s in slots])
snap("start")
for block in range(4):
    for _ in range(1000):
        for s in slots:
            s.step()
            s.advance(1)
        mx.eval([s.state for s in slots])
    snap(f"{1000 * (block + 1)} tokens, {LAYERS} layers")
mx.eval([s.left_padding for s in slots])
snap("after evaluating the counters")
