"""Source: ml-explore/mlx-lm PR#986 and #828; ml-explore/mlx#3993; mlx-examples#738.
Diagnosis expected: peak stays flat, reserved grows: many distinct sizes, most
allocations miss the reuse window [size, min(2*size, size+2*page)).
"""

import random

import mlx.core as mx
from _mem import metal_like_cache, snap

metal_like_cache()
random.seed(0)
w = mx.random.normal((256, 256))
mx.eval(w)


def run(lengths, label):
    for n in lengths:
        h = mx.random.normal((n, 256)) @ w
        mx.eval((h * h).sum())
    snap(label)


run([1024] * 64, "64 batches of equal length")
mx.clear_cache()
run([random.randint(512, 2048) for _ in range(64)], "64 batches of random length")
mx.clear_cache()
snap("after clear_cache")
