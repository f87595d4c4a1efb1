"""Source: jundot/omlx PR#2052 (compiled callable closes over the model).
Diagnosis expected: after `del model` all weights are still live; creation stack
is the model constructor, so the tool must say "still alive at exit/after mark",
not "leaked by compile".
"""

import mlx.core as mx
import mlx.nn as nn
from _mem import settle, snap


class Engine:
    def __init__(self):
        self.model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)])  # ~4 MiB
        mx.eval(self.model.parameters())


callables = []
for i in range(4):
    e = Engine()
    callables.append(mx.compile(lambda x, m=e.model: m(x)))  # registry survives unload
    mx.eval(callables[-1](mx.zeros((1, 512))))
    del e
    settle()
    mx.clear_cache()
    snap(f"load/unload {i}")
callables.clear()
settle()
mx.clear_cache()
snap("after clearing the registry")
