"""Source: ml-explore/mlx#3896 (get_peak_memory under-reports the footprint).
Diagnosis expected: report peak(active) and peak(active+cache) as two numbers,
with the time and live set of each.
"""

import mlx.core as mx
from _mem import MiB, metal_like_cache, rss, snap

metal_like_cache()
base, high = rss(), 0
for n in range(1, 33):
    y = mx.ones((n * 37, 4096)) + 1
    mx.eval(y)
    del y
    high = max(high, mx.get_active_memory() + mx.get_cache_memory())
snap("32 transient buffers")
print(f"peak reserved seen from outside: {high / MiB:.1f}M")
print(f"rss grew {(rss() - base) / MiB:.1f}M")
