"""Source: pytorch/pytorch PR#179276, PR#176290, pytorch/torchtitan PR#3628 (ring
overflow, GB-sized snapshots, slow dumps).
Diagnosis expected: bounded recording with an explicit "N events dropped" flag, a
dump that stays loadable, and a small overhead (compare the wall time with and without).
"""

import time

import mlx.core as mx
from _mem import snap

x = mx.ones((16, 16))
mx.eval(x)
t0 = time.perf_counter()
for _ in range(20_000):
    y = mx.tanh(x @ x) + 1.0
    mx.eval(y)
dt = time.perf_counter() - t0
snap("20k evals done")
print(f"wall {dt:.2f}s = {dt / 20_000 * 1e6:.0f} us per eval")
