"""Source: ml-explore/mlx PR#850 review, PR#1858/PR#1863 (buffer donation).
Diagnosis expected: with one handle the update reuses its input buffer (no alloc
event); with a second handle every step allocates: peak doubles.
"""

import mlx.core as mx
from _mem import snap

for shared in (False, True):
    mx.clear_cache()
    mx.reset_peak_memory()
    x = mx.ones((2048, 1024))
    mx.eval(x)  # 8 MiB
    for _ in range(4):
        keep = x if shared else None
        x = mx.abs(x)
        mx.eval(x)
    snap("second handle kept" if shared else "single handle")
    del x, keep
