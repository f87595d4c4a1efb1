"""Source: ml-explore/mlx#1832, PR#1856 (function transforms in reference cycles).
Diagnosis expected: blocks survive `del` and vanish at gc.collect(); the free
events must be labelled as coming from the garbage collector if possible.
"""

import gc

import mlx.core as mx
import mlx.nn as nn
from _mem import snap

gc.disable()


class Trainer:
    def __init__(self):
        self.model = nn.Linear(1024, 1024)  # 4 MiB
        mx.eval(self.model.parameters())
        self.step = nn.value_and_grad(self.model, self.loss)  # bound method: cycle

    def loss(self, x):
        return self.model(x).sum()


for i in range(4):
    t = Trainer()
    del t
    snap(f"trainer {i} deleted")
gc.collect()
snap("after gc.collect()")
