"""Call enable() and report, as JSON, what it said and which bytes of MLX it changed.

python refused.py [LIBRARY]

LIBRARY is loaded after MLX and before enable().
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[2]))

import mlx.core as mx
from mapped import differences, mlx_mappings

import mlxmem
from mlxmem import _hook


def evaluate() -> list[float]:
    x = mx.array([1.0, 2.0, 3.0])
    sums = (x * 1).sum(), mx.exp(mx.zeros((2,))).sum()
    mx.eval(sums)
    return [float(value.item()) for value in sums]


evaluate()
mx.synchronize()
keep = [ctypes.CDLL(library) for library in sys.argv[1:]]
before = mlx_mappings()
error = None
try:
    mlxmem.enable()
except Exception as caught:
    error = caught
after = mlx_mappings()
enabled, words = mlxmem.is_enabled(), len(_hook.patched_words())
print(
    json.dumps(
        {
            "libraries": sorted({mapping.path for mapping in before}),
            "error": type(error).__name__ if error else None,
            "message": str(error),
            "enabled": enabled,
            "patched_words": words,
            "bytes": sum(len(mapping.content) for mapping in before),
            "changed": len(differences(before, after)),
            "same_rights": [m.rights for m in before] == [m.rights for m in after],
            "evaluated": evaluate(),
        }
    )
)
