"""Source: ml-explore/mlx#1499, #2668 (memory explosion in pairwise/broadcast code).
Diagnosis expected: the top line at peak is the broadcast subtract, N*M*D bytes,
far above inputs and output.
"""

import mlx.core as mx
from _mem import snap

a, b = mx.random.normal((512, 64)), mx.random.normal((512, 64))
mx.eval(a, b)
mx.reset_peak_memory()
d = ((a[:, None, :] - b[None, :, :]) ** 2).sum(-1)
mx.eval(d)
snap("broadcast difference")
del d
mx.clear_cache()
mx.reset_peak_memory()
d = (a * a).sum(-1)[:, None] + (b * b).sum(-1)[None] - 2 * a @ b.T
mx.eval(d)
snap("expanded form")
