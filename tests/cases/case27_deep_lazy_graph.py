"""Source: ml-explore/mlx PR#982, PR#1462, PR#797 (deep graphs overflow the stack).
Diagnosis expected: no buffers at all, only host memory for graph nodes; profiler
must survive 200k nested destructions and should count pending (unevaluated) arrays.
"""

import mlx.core as mx
from _mem import settle, snap

snap("start")
x = mx.ones((2,))
mx.eval(x)
for _ in range(200_000):
    x = mx.sin(x)
snap("200k pending nodes")
del x
settle()
snap("dropped without eval")
