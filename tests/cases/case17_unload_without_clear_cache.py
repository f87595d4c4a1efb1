"""Source: waybarrios/vllm-mlx#743 and #793; exo-explore/exo#1370; ml-explore/mlx#742,
#1023.
Diagnosis expected: weights leave "active" but stay "reserved" in the pool; the
tool must show active, cached and reserved as separate curves.
"""

import mlx.core as mx
import mlx.nn as nn
from _mem import metal_like_cache, settle, snap

metal_like_cache()
model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)])
mx.eval(model.parameters())
snap("model loaded")
del model
settle()
snap("model deleted")
mx.clear_cache()
snap("after clear_cache")
