"""Source: ml-explore/mlx#2305 (sudden memory use by mx.eval after accumulation).
Diagnosis expected: flat until eval, then K forward/backward graphs at once; the
peak's live set lists activations of K micro-batches, all from the same line.
The width of 64 instead of 256 saves time; each activation is a quarter of the
reported one.
"""

import mlx.core as mx
from _mem import snap

w = mx.random.normal((64, 64))
mx.eval(w)


def loss(w, x):
    h = x
    for _ in range(4):
        h = mx.tanh(h @ w)
    return (h * h).mean()


g = mx.grad(loss)
batches = [mx.random.normal((2048, 64)) for _ in range(8)]
mx.eval(batches)
for eager in (False, True):
    mx.clear_cache()
    mx.reset_peak_memory()
    acc = mx.zeros_like(w)
    for x in batches:
        acc = acc + g(w, x)
        if eager:
            mx.eval(acc)
    before = mx.get_active_memory()
    mx.eval(acc)
    snap(f"8 micro-batches, eval {'each' if eager else 'at the end'}")
