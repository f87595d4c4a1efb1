"""Source: ml-explore/mlx#3350 (pool keeps buffers that can never be reused).
Diagnosis expected: each request is a fresh segment, the previous one goes to the
cache and never comes back; reuse rate 0 %, "reserved" climbs while "active" is flat.
"""

import mlx.core as mx
from _mem import metal_like_cache, snap

metal_like_cache()
for i in range(1, 9):
    kv = mx.zeros((i * 512, 1024))
    mx.eval(kv)  # 2, 4, 6 ... MiB
    snap(f"request {i}")
    del kv
snap("idle")
mx.clear_cache()
snap("after clear_cache")
