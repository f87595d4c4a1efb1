"""Source: ml-explore/mlx PR#3566, #1979, ml-explore/mlx-lm#1666 (several streams).
Diagnosis expected: alloc/free events come from stream worker threads without
the GIL; each must carry the stream index and the creation stack of the array.
"""

import threading

import mlx.core as mx
from _mem import snap

streams = [mx.new_stream(mx.default_device()) for _ in range(3)]
w = mx.random.normal((512, 512))
mx.eval(w)


def worker(i):
    with mx.stream(mx.new_stream(mx.default_device())):
        for _ in range(20):
            mx.eval(mx.ones((512, 512)) @ w)


snap("start")
outs = []
for s in streams:
    with mx.stream(s):
        outs.append(mx.tanh(w @ w))
mx.eval(outs)
snap("3 streams, 1 MiB each")
ts = [threading.Thread(target=worker, args=(i,)) for i in range(3)]
[t.start() for t in ts]
[t.join() for t in ts]
snap("after 3 Python threads")
