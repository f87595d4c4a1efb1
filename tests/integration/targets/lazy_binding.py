"""Record an MLX whose import slots are resolved when they are first called."""

from __future__ import annotations

import os
import sys

sys.setdlopenflags(os.RTLD_LAZY | os.RTLD_LOCAL)

import mlx.core as mx  # noqa: E402

import mlxmem  # noqa: E402
from mlxmem import _hook  # noqa: E402

mlxmem.enable()
words = _hook.patched_words()
mx.eval(mx.ones((10,)) + 1)
mx.save_safetensors(sys.argv[1], {"w": mx.ones((8, 4)).T})
assert _hook.patched_words() == words
stacks = [e["traceback"] for e in mlxmem.events() if e["action"].startswith("Alloc")]
assert stacks
assert None not in stacks
mlxmem.disable()  # raises if a word could not be restored
assert _hook.patched_words() == []
