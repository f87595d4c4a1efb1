"""Ask for more memory than the GPU has, and go on.

python out_of_gpu_memory.py out.pickle array|kernel|leaf|no-dump

Prints the error, then what was computed after it. A leaf is made in managed memory,
which can be larger than the GPU; so it asks for more addresses than are left.
"""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[2]))

import mlx.core as mx
import numpy as np
from books import Books, settle

import mlxmem

MIB = 1 << 20
LEAF = 80 << 40  # of 128 TiB of addresses, for the source and the leaf


def whole_array() -> mx.array:
    return mx.zeros((1 << 20, 1 << 20))  # 4 TiB


def kernel_output(row: mx.array) -> mx.array:
    return row[:, None] + row[None, :]  # 1 TiB


def leaf(source: object) -> mx.array:
    return mx.array(source)


def huge_source() -> object:
    """Return LEAF bytes of which no page is ever touched."""
    flags = (
        mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    )
    return np.frombuffer(mmap.mmap(-1, LEAF, flags=flags), np.uint8).reshape(
        -1, 1 << 24
    )


def main(out: str, mode: str) -> None:
    mx.set_default_device(mx.Device(mx.gpu, 0))
    source = huge_source() if mode == "leaf" else None
    with Books():
        mlxmem.enable(0, dump_on_oom=None if mode == "no-dump" else out)
        keep = mx.ones((1024, 1024))
        row = mx.ones((1 << 19,))
        mx.eval(keep, row)
        held = settle().active
        try:
            if mode == "leaf":
                leaf(source)
            elif mode == "kernel":
                mx.eval(kernel_output(row))
            else:
                mx.eval(whole_array())
            print("nothing failed")
        except (RuntimeError, MemoryError, ValueError) as error:
            print(f"raised {type(error).__name__}: {' '.join(str(error).split())}")
        print(f"held {held}, now {settle().active}")
        # The program goes on, and Books() checks its books when it is left.
        print("sum", int((keep + mx.ones((1024, 1024))).sum().item()))


if __name__ == "__main__":
    main(*sys.argv[1:])
