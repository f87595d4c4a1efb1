"""The interpreter ends while a session records, with arrays in awkward places.

python exit_while_recording.py SITUATION
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from os_threads import wait_until_gone

import mlxmem

KEEP: list[Any] = []


class Cycle:
    def __init__(self) -> None:
        self.me = self
        self.array = mx.random.normal((64, 64))
        self.lazy = mx.exp(self.array)
        mx.eval(self.array)

    def __del__(self) -> None:
        # Runs late, with the interpreter half gone.
        self.other = self.array + 1


def wait_at_exit(thread: threading.Thread) -> None:
    """Let a thread outlive the main program, but not the interpreter."""
    atexit.register(wait_until_gone, thread)  # after Python has joined its threads


def in_globals() -> None:
    for n in range(1, 50):
        KEEP.append(mx.random.normal((n, 10)))
    mx.eval(KEEP[::2])


def in_cycles() -> None:
    gc.disable()
    for _ in range(20):
        Cycle()


def on_a_worker_thread() -> None:
    started = threading.Event()

    def work() -> None:
        local = [mx.array([float(n)] * 100) for n in range(20)]
        with mx.stream(mx.new_stream(mx.cpu)):
            for _ in range(200):
                local.append(mx.sin(local[-1]))
                mx.eval(local[-1])
                started.set()
        KEEP.append(local)

    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    wait_at_exit(thread)


def on_a_sleeping_daemon_thread() -> None:
    started = threading.Event()

    def work() -> None:
        local = [mx.array([float(n)] * 100) for n in range(20)]
        with mx.stream(mx.new_stream(mx.cpu)):
            mx.eval([mx.sin(array) for array in local])
        started.set()
        threading.Event().wait()

    threading.Thread(target=work, daemon=True).start()
    started.wait()


def in_a_thread_local() -> None:
    local = threading.local()
    KEEP.append(local)
    done = threading.Event()

    def work() -> None:
        local.array = mx.array([1.0] * 1000)
        done.wait()

    local.array = mx.array([1.0] * 1000)
    thread = threading.Thread(target=work)
    thread.start()
    done.set()
    wait_at_exit(thread)


def still_running() -> None:
    x = mx.random.normal((300, 300))
    for _ in range(30):
        x = mx.sigmoid(x @ x)
    mx.async_eval(x)
    KEEP.append(x)


def never_evaluated() -> None:
    x = mx.ones((3,))
    for _ in range(20_000):
        x = x + 1
    KEEP.append(x)


def compiled() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    step = mx.compile(nn.value_and_grad(model, lambda x: model(x).sum()))
    mx.eval(step(mx.ones((2, 8))))
    KEEP.append((model, step))


def dumped_at_exit() -> None:
    in_globals()
    atexit.register(mlxmem.dump, os.devnull)


def freed_in_atexit() -> None:
    in_globals()
    atexit.register(KEEP.clear)


def disabled_in_atexit() -> None:
    in_globals()
    atexit.register(mlxmem.disable)


def mlx_modules_dropped() -> None:
    in_globals()
    for name in list(sys.modules):
        if name.startswith(("mlx.", "mlxmem")) or name == "mlx":
            del sys.modules[name]


SITUATIONS = [
    in_globals,
    in_cycles,
    on_a_worker_thread,
    on_a_sleeping_daemon_thread,
    in_a_thread_local,
    still_running,
    never_evaluated,
    compiled,
    dumped_at_exit,
    freed_in_atexit,
    disabled_in_atexit,
    mlx_modules_dropped,
]

if __name__ == "__main__":
    mlxmem.enable()
    {function.__name__: function for function in SITUATIONS}[sys.argv[1]]()
    assert mlxmem.is_enabled()
