"""Allocations that fail for want of address space; the process does not survive.

python out_of_memory.py out.pickle eval|leaf|thread|busy|again|no-dump|folder-gone
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys
import threading
import time
from pathlib import Path

import mlx.core as mx
import numpy as np

import mlxmem

MIB = 1 << 20


def leave_only(mib: int) -> None:
    """Limit the address space to what is used now and a little more."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + mib * MIB
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def too_large() -> mx.array:
    return mx.zeros((1 << 20, 1 << 12))  # 16 GiB


def evaluate_there() -> None:
    with mx.stream(mx.new_stream(mx.cpu)):
        mx.eval(too_large())


def main(out: str, mode: str) -> None:
    weights = np.zeros((256, MIB // 4), np.float32)  # 256 MiB
    mx.eval(mx.exp(mx.ones((10,))))  # every thread is there
    path = Path("gone", "out.pickle").resolve() if mode == "folder-gone" else out
    if mode == "folder-gone":
        Path(path).parent.mkdir()
    mlxmem.enable(dump_on_oom=None if mode == "no-dump" else path)
    keep = mx.ones((1024, 1024))
    mx.eval(keep)
    os.chdir("/")  # a relative path was meant for the old folder
    leave_only(128)
    if mode == "leaf":
        mx.array(weights)
    if mode == "folder-gone":
        Path(path).parent.rmdir()
    if mode in ("thread", "busy"):
        thread = threading.Thread(target=evaluate_there)
        thread.start()
        if mode == "busy":
            # Longer than the allocation waits; the GIL is held all the time.
            ctypes.PyDLL(None).sleep(45)
        thread.join()
    mx.eval(too_large())
    time.sleep(60)  # never reached


if __name__ == "__main__":
    main(*sys.argv[1:])
