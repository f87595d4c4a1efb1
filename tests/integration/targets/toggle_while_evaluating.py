"""One thread turns recording on and off while others evaluate.

No result may change, and a session that begins afterwards balances.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[2]))

import mlx.core as mx
import numpy as np
from books import Books, read_counters, settle
from os_threads import wait_until_gone

import mlxmem

ROUNDS = 150


def work(seed: int, stop: threading.Event, results: dict[int, list[bytes]]) -> None:
    """Evaluate the same things again and again, until told to stop."""
    with mx.stream(mx.new_stream(mx.cpu)):
        x = mx.array(np.random.default_rng(seed).normal(size=(40, 40)))
        while not stop.is_set():
            y = mx.tanh(x @ x.T) + mx.array([1.0, 2.0] * 20)
            values = mx.linalg.eigvalsh(y @ y.T, stream=mx.cpu)
            mx.eval(y, values)
            mx.async_eval(mx.exp(y))
            results[seed].append(np.array(values).tobytes())


def main() -> None:
    before = settle()
    stop = threading.Event()
    results: dict[int, list[bytes]] = {seed: [] for seed in range(3)}
    threads = [
        threading.Thread(target=work, args=(seed, stop, results)) for seed in results
    ]
    for thread in threads:
        thread.start()
    for round_ in range(ROUNDS):
        mlxmem.enable(max_entries=(0, 1, 500)[round_ % 3], stacks=round_ % 2 == 0)
        if round_ % 5 == 0:
            mlxmem.enable()
        mx.array([1.0] * round_)
        if round_ % 7 == 0:
            mlxmem.events()
            mlxmem.snapshot()
        if round_ % 3:
            mlxmem.disable()
    # While the workers go on, others toggle at the same time.
    togglers = [threading.Thread(target=toggle) for _ in range(3)]
    for thread in togglers:
        thread.start()
    for thread in togglers:
        thread.join()
    stop.set()
    for thread in threads:
        thread.join()
    for seen in results.values():
        assert len(set(seen)) == 1, "a result changed"
    assert sum(map(len, results.values())) > 3
    mlxmem.disable()
    results.clear()
    # What the workers began without waiting ends when their streams get a processor.
    until = time.monotonic() + 60
    while settle().active != before.active and time.monotonic() < until:
        time.sleep(0.1)
    assert settle().active == before.active, (before, read_counters())

    with Books() as books:
        last: dict[int, list[bytes]] = {9: []}
        stop.clear()
        thread = threading.Thread(target=work, args=(9, stop, last))
        thread.start()
        while len(last[9]) < 20:
            mx.eval(mx.exp(mx.array([1.0] * 100)))
        stop.set()
        wait_until_gone(thread)
        books.check()


def toggle() -> None:
    for _ in range(30):
        mlxmem.enable()
        mlxmem.stats()
        mlxmem.disable()


if __name__ == "__main__":
    main()
