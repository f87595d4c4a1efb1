"""Source: ml-explore/mlx#63, #3350; Blaizzy/mlx-vlm#1275 (OOM at allocation).
Diagnosis expected: dump must be written at the failing request, with the size,
stack and live set; the process may not survive (the CPU backend
does not check what malloc returned, so there it never does).
"""

import os
import resource
import subprocess
import sys

import mlx.core as mx
from _mem import snap

if len(sys.argv) > 1:
    resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
    keep = mx.ones((1024, 1024))
    mx.eval(keep)
    try:
        x = mx.zeros((1 << 20, 1 << 12))
        mx.eval(x)  # 16 GiB
        print("allocation succeeded?")
    except BaseException as e:
        print("raised", type(e).__name__, e)
    snap("child after failure")
    sys.exit(0)
r = subprocess.run(
    [sys.executable, __file__, "child"],
    capture_output=True,
    text=True,
    env={**os.environ, "MLXMEM_DUMP": ""},
)
print("child returncode", r.returncode)
print(r.stdout.strip() or "(no output)", r.stderr.strip()[-300:])
