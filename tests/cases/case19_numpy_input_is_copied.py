"""Source: ml-explore/mlx PR#3872 (mx.array(host_buffer) always copies),
nanobind PR#1386.
Diagnosis expected: a leaf allocation with primitive "none/leaf" and the stack of
the mx.array(...) call, eager, on the Python thread.  The NumPy half is outside
MLX: show RSS next to it.
"""

import mlx.core as mx
import numpy as np
from _mem import snap

snap("start")
host = np.ones((2048, 2048), np.float32)  # 16 MiB owned by NumPy
snap("numpy only")
dev = mx.array(host)
snap("mx.array(host)")
dev64 = mx.array(np.ones((512, 512), np.float64))  # 2 MiB host -> float32 1 MiB
snap("float64 input is narrowed")
alias = mx.asarray(host)
snap("mx.asarray(host)")
del host
snap("host array dropped")
