"""Source: ml-explore/mlx-lm#1121, PR#1098, PR#1102; sgl-project/sglang#25541.
Diagnosis expected: peak holds full-precision weights of all layers next to the
quantised ones; per-layer eval bounds it to one layer.
"""

import mlx.core as mx
from _mem import scratch, settle, snap

mx.save_safetensors(
    scratch("_w.safetensors"),
    {f"l{i}": mx.random.normal((1024, 1024)) for i in range(8)},
)
settle()
mx.clear_cache()
for mode in ("eager load", "lazy, eval per layer", "lazy, eval all"):
    mx.clear_cache()
    mx.reset_peak_memory()
    w = mx.load(scratch("_w.safetensors"))
    if mode == "eager load":
        mx.eval(w)
    q = {}
    for k in list(w):
        q[k] = mx.quantize(w.pop(k))
        if mode == "lazy, eval per layer":
            mx.eval(q[k])
    mx.eval(q)
    snap(mode)
    del w, q
    settle()
