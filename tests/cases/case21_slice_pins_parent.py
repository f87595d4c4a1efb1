"""Source: ml-explore/mlx-lm PR#1077; jundot/omlx PR#2500; jjang-ai/vmlx#176.
Diagnosis expected: a big block is live although only an array whose nbytes is
tiny references it; needs "bytes live" vs "bytes visible through live arrays".
"""

import mlx.core as mx
from _mem import settle, snap


def run(keep, label):
    kept = []
    for _ in range(6):
        big = mx.random.normal((1024, 1024))
        mx.eval(big)  # 4 MiB
        tail = keep(big)
        mx.eval(tail)
        kept.append(tail)
        del big, tail
    settle()
    snap(f"{label}: nbytes={sum(t.nbytes for t in kept)}")


run(lambda a: a[-2:], "views")
mx.clear_cache()
run(lambda a: mx.contiguous(a[-2:]), "mx.contiguous of view")
mx.clear_cache()
run(lambda a: a[-2:] + 0, "copied by arithmetic")
