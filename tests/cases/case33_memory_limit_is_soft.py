"""Source: ml-explore/mlx#2490, ml-explore/mlx-lm#828 (set_memory_limit not strict).
Diagnosis expected: settings event plus a marker each time active crosses the
limit; on the CPU backend nothing is enforced.
"""

import mlx.core as mx
from _mem import snap

mx.set_memory_limit(8 << 20)
x = [mx.ones((1024, 1024)) for _ in range(6)]
mx.eval(x)  # 24 MiB
snap("limit 8 MiB, asked 24 MiB")
if hasattr(mx, "get_memory_limit"):  # not yet in 0.30.6
    print("get_memory_limit:", mx.get_memory_limit())
print(
    "set_wired_limit(1 GiB) returned:", mx.set_wired_limit(1 << 30)
)  # mlx-lm#883, PR#1252
