"""Source: Goekdeniz-Guelmez/mlx-lm-lora PR#47; same family:
ml-explore/mlx-examples#1262.
Diagnosis expected: per-step batches stay live because a running metric that
was left out of mx.eval still points at them; the growth is charged to the
batch-creation line, the *holder* is an unevaluated `Add` chain.
(What the metric points at is `out`: the product of each batch stays, on its line.)
"""

import mlx.core as mx
from _mem import snap

w = mx.random.normal((256, 256))
mx.eval(w)
running = mx.array(0.0)
for step in range(8):
    batch = mx.random.normal((1024, 256))
    mx.eval(batch)  # 1 MiB
    out = batch @ w
    loss = (out * out).mean()
    running = running + mx.abs(out).max()  # metric, never evaluated
    mx.eval(loss)
    snap(f"step {step}")
mx.eval(running)
del batch, out, loss
snap("after evaluating the metric")
