"""A forked child starts with recording off and can have a session of its own.

python fork_child.py quiet|evaluating
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[2]))

import mlx.core as mx
from books import Books
from os_threads import wait_until_gone

import mlxmem


def child(evaluates: bool) -> int:
    assert not mlxmem.is_enabled()
    assert mlxmem.events() == []
    assert mlxmem.stats()["allocs"] == 0
    unrecorded = mx.array([1.0] * 100)
    assert mlxmem.events() == []
    mlxmem.disable()
    mlxmem.enable()
    mine = mx.array([2.0] * 211)
    last = mlxmem.events()[-1]
    assert last["requested_size"] == 844
    assert last["traceback"][-1][1] == "child"
    assert last["thread_id"] == os.getpid()
    if evaluates:
        # The workers of old streams stayed in the parent, so: a new one.
        with mx.stream(mx.new_stream(mx.cpu)):
            product = mx.exp(mine) @ mx.exp(unrecorded[:1] + mx.zeros((211,)))
            mx.eval(product)
        assert {e["primitive_name"] for e in mlxmem.events()} >= {"Exp", "Matmul"}
    assert mlxmem.stats()["active"] == mx.get_active_memory()
    mlxmem.disable()
    assert not mlxmem.is_enabled()
    mx.array([3.0] * 10)
    return 0


def fork_once(evaluates: bool) -> None:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            signal.alarm(30)  # a deadlock ends the child
            status = child(evaluates)
        finally:
            # A normal exit would wait for MLX's workers, which the child lacks.
            sys.stderr.flush()
            os._exit(status)
    assert os.waitpid(pid, 0) == (pid, 0)


def main(mode: str) -> None:
    with Books() as books:
        keep = mx.random.normal((100, 100))
        mx.eval(keep)
        if mode == "quiet":
            for _ in range(5):
                fork_once(evaluates=True)
        else:
            stop = threading.Event()

            def work() -> None:
                with mx.stream(mx.new_stream(mx.cpu)):
                    while not stop.is_set():
                        mx.eval(mx.tanh(mx.array([0.5] * 3000)) * 2)

            threads = [threading.Thread(target=work) for _ in range(2)]
            for thread in threads:
                thread.start()
            for _ in range(25):
                fork_once(evaluates=False)
            stop.set()
            for thread in threads:
                wait_until_gone(thread)
        assert mlxmem.is_enabled()
        books.check()


if __name__ == "__main__":
    main(sys.argv[1])
