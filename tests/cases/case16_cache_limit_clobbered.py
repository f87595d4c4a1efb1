"""Source: dgrauet/ltx-2-mlx#79 (set_cache_limit(0) overwritten by a library call).
Diagnosis expected: a settings event "cache_limit 0 -> N" with the Python stack
of the caller, next to the moment the cache starts to grow.
"""

import contextlib

import mlx.core as mx
from _mem import snap


def pipeline_init():
    mx.set_cache_limit(0)


def third_party_encoder():
    with contextlib.suppress(Exception):
        mx.set_cache_limit(4 << 30)  # "headroom", never restored


def work(label):
    for n in range(4):
        y = mx.ones((1024 + 64 * n, 1024)) * 2
        mx.eval(y)
        del y
    snap(label)


pipeline_init()
work("limit 0")
third_party_encoder()
work("after the encoder ran")
