"""Source: exo-explore/exo#1048; Blaizzy/mlx-vlm#1275; jjang-ai/vmlx#50;
mlx-examples PR#931.
Diagnosis expected: the single largest block is the L*L score matrix; show
"largest allocation" with stack so it can be compared with the per-buffer limit
("[metal::malloc] ... greater than the maximum allowed buffer size").
"""

import mlx.core as mx
from _mem import snap


def attend(q, k):
    s = mx.matmul(q, mx.swapaxes(k, -1, -2))  # H*L*L
    return mx.softmax(s, axis=-1).sum()


H, D, L = 4, 32, 1024
q, k = mx.random.normal((H, L, D)), mx.random.normal((H, L, D))
mx.eval(q, k)
mx.reset_peak_memory()
mx.eval(attend(q, k))
snap("one shot, L=1024")
mx.clear_cache()
mx.reset_peak_memory()
for i in range(0, L, 128):
    mx.eval(attend(q[:, i : i + 128], k))
snap("chunks of 128")
