"""Source: ml-explore/mlx#999 (only the loss is evaluated, second step explodes), #1432.
Diagnosis expected: step 1 looks cheap because only the forward ran; optimiser
state and backward appear at step 2 (or at mx.eval(state)), 2x params for Adam.
"""

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from _mem import snap

model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
mx.eval(model.parameters())
opt = optim.Adam(1e-3)
lg = nn.value_and_grad(model, lambda m, x: (m(x) ** 2).mean())
x = mx.random.normal((64, 512))
mx.eval(x)
snap("parameters only")
for i in range(3):
    loss, grads = lg(model, x)
    opt.update(model, grads)
    mx.eval(loss)
    snap(f"step {i}, only loss evaluated")
mx.eval(model.parameters(), opt.state)
del grads
snap("state evaluated")
