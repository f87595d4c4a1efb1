"""Source: ml-explore/mlx-lm PR#1038 (stepped KV growth spikes), ml-explore/mlx-lm#883.
Diagnosis expected: every `step` tokens one resize event where old and new cache
are both live; peak = old + new, attributable to the concatenate line.
"""

import mlx.core as mx
from _mem import snap

STEP, cap, used = 256, 256, 0
k = mx.zeros((1, 8, cap, 128))
mx.eval(k)  # 1 MiB per 256 tokens
for _ in range(1024):
    if used == cap:
        mx.reset_peak_memory()
        k = mx.concatenate([k, mx.zeros((1, 8, STEP, 128))], axis=2)
        mx.eval(k)
        cap += STEP
        snap(f"resize to {cap}")
    k[..., used : used + 1, :] = mx.ones((1, 8, 1, 128))
    mx.eval(k)
    used += 1  # noqa: SIM113
snap("end")
