"""Source: ml-explore/mlx#239 (memory jumps when saving),
ml-explore/mlx-examples PR#462.
Diagnosis expected: allocations made by the save call itself: contiguous copies of
transposed weights, charged to mx.save_safetensors, live until the call returns.
"""

import mlx.core as mx
from _mem import scratch, settle, snap

params = {f"w{i}": mx.random.normal((1024, 1024)) for i in range(8)}
mx.eval(params)
for label, tree in (
    ("row contiguous", params),
    ("transposed views", {k: v.T for k, v in params.items()}),
):
    settle()
    mx.clear_cache()
    mx.reset_peak_memory()
    mx.save_safetensors(scratch("_s.safetensors"), tree)
    snap(f"save {label}")
