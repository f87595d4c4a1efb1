"""Source: ml-explore/mlx#2676 (allocations grow when an array is rebound in a loop).
Diagnosis expected: live-buffer COUNT grows by 2 per iteration, all 4-byte
scalar leaves, all created on the one update line; no `eval` ever frees them.
Bytes look harmless; on Metal the run ends in "Resource limit (499000) exceeded".
"""

import mlx.core as mx
from _mem import snap

ema, target = mx.zeros((64, 64)), mx.ones((64, 64))
snap("start")
for epoch in range(4):
    for _ in range(500):
        ema = 0.99 * ema + 0.01 * target  # two scalar leaves + three lazy nodes
    snap(f"after {500 * (epoch + 1)} lazy updates")
mx.eval(ema)
snap("after mx.eval")
