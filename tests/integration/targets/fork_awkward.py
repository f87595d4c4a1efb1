"""Fork a recording process where little works: `no_files` or `loader_busy`."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
import threading

import mlx.core as mx

import mlxmem
from mlxmem import _hook


def fork() -> None:
    """Fork once; the child finds recording off and every word restored."""
    child = os.fork()
    if child == 0:
        good = not mlxmem.is_enabled() and _hook.patched_words() == []
        os._exit(0 if good else 1)
    status = os.waitpid(child, 0)[1]
    assert status == 0, status


def no_files() -> None:
    """Fork when no file descriptor is left: undoing must open none."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    taken = []
    try:
        while True:
            taken.append(os.dup(0))
    except OSError:
        pass
    fork()
    mlxmem.disable()
    assert _hook.patched_words() == []
    for descriptor in taken:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def loader_busy() -> None:
    """Fork while another thread walks the loader's list, holding its lock."""
    process = ctypes.CDLL(None)
    # Called for every library with the lock held: gives the processor away, returns 0.
    visit = ctypes.cast(process.sched_yield, ctypes.c_void_p)
    stop = threading.Event()

    def walk() -> None:
        while not stop.is_set():
            for _ in range(100):
                process.dl_iterate_phdr(visit, None)

    walkers = [threading.Thread(target=walk) for _ in range(2)]
    for walker in walkers:
        walker.start()
    for _ in range(40):
        fork()
    stop.set()
    for walker in walkers:
        walker.join()


if __name__ == "__main__":
    keep = mx.ones((10,)) * 2
    mx.eval(keep)
    mlxmem.enable()
    globals()[sys.argv[1]]()
