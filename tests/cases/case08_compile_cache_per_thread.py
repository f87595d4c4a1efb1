"""Source: ml-explore/mlx PR#3280, #4377, #2086 (thread-local compile cache).
Diagnosis expected: one copy of the captured constants per worker thread, each
event tagged with its thread id; memory returns only when the thread ends.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
from _mem import settle, snap

barrier = threading.Barrier(4)


def make():
    def body(x):
        k = mx.ones((256, 1024))
        mx.eval(k)  # 1 MiB constant per trace
        return (k * x).sum()

    return mx.compile(body)


shared = make()


def job(_):
    with mx.stream(mx.new_stream(mx.default_device())):
        y = shared(mx.array(2.0))
        mx.eval(y)
    barrier.wait()


snap("start")
pool = ThreadPoolExecutor(4)
list(pool.map(job, range(4)))
settle()
mx.clear_cache()
snap("4 live worker threads")
pool.shutdown()
settle()
mx.clear_cache()
snap("threads ended")
