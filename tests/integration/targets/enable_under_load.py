"""Sessions begin while other threads evaluate; the books must be right at once.

python enable_under_load.py [ROUNDS]

A thread may be inside MLX's allocator at the moment at which a session begins, so a
single round shows little: of sessions that miss such a call a few in a hundred fail.
"""

from __future__ import annotations

import random
import sys
import threading
import time
import traceback
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[2]))

import mlx.core as mx
from books import Books
from os_threads import wait_until_gone

import mlxmem

THREADS = 4


class Load:
    """Threads that evaluate, and can be told to pause."""

    def __init__(self) -> None:
        self.stopped = threading.Event()
        self.running = threading.Event()
        self.pausing = threading.Barrier(THREADS + 1)
        self.starting = threading.Lock()
        self.threads = [
            threading.Thread(target=self.work, daemon=True) for _ in range(THREADS)
        ]
        for thread in self.threads:
            thread.start()

    def work(self) -> None:
        # One after the other: before 0.31 streams made or first used at the same
        # time can crash MLX, without mlxmem, too.
        with self.starting:
            stream = mx.new_stream(mx.cpu)
            with mx.stream(stream):
                x = mx.random.normal((40, 40))
                mx.eval(mx.tanh(x @ x.T) + 1)
        with mx.stream(stream):
            while not self.stopped.is_set():
                if not self.running.is_set():
                    self.pausing.wait()  # until all others pause, too
                    self.running.wait()
                y = mx.tanh(x @ x.T) + mx.array([1.0, 2.0] * 20)
                mx.eval(y)
                mx.async_eval(mx.exp(y))
                del y

    def pause(self) -> None:
        self.running.clear()
        self.pausing.wait(timeout=60)

    def stop(self) -> None:
        """End the threads, which pause now."""
        self.stopped.set()
        self.running.set()
        for thread in self.threads:
            wait_until_gone(thread)


class BooksUnderLoad(Books):
    """Books of a session that begins while others evaluate, so without a reset."""

    def __enter__(self) -> BooksUnderLoad:
        mlxmem.enable(self.max_entries, stacks=self.stacks)
        return self


def main(rounds: int) -> None:
    load = Load()
    load.pause()
    chance = random.Random(1)
    wrong = []
    for round_ in range(rounds):
        # GIVEN threads at work
        load.running.set()
        time.sleep(chance.uniform(0.005, 0.02))

        # WHEN a session begins, sometimes within another one
        books = BooksUnderLoad(max_entries=(0, 500)[round_ % 2])
        if round_ % 3 == 0:
            mlxmem.enable()
        books.__enter__()
        time.sleep(chance.uniform(0.001, 0.02))
        load.pause()

        # THEN its totals are MLX's to the byte, and so is the sum of its events
        try:
            books.check()
        except AssertionError as error:
            line = traceback.extract_tb(error.__traceback__)[-1].line
            wrong.append(f"round {round_}: {line} {error}")
        mlxmem.disable()
    load.stop()
    assert not wrong, f"{len(wrong)} of {rounds} rounds: {wrong[:3]}"


if __name__ == "__main__":
    main(*map(int, sys.argv[1:] or ["60"]))
