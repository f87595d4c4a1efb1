"""Workers of multiprocessing's fork method: recording is off, and can be turned on."""

from __future__ import annotations

import multiprocessing
import os
import threading

import mlx.core as mx

import mlxmem


def work(n: int) -> tuple[int, bool, int, bool]:
    was_on = mlxmem.is_enabled()
    mlxmem.enable()
    keep = mx.array([0.0] * n)
    with mx.stream(mx.new_stream(mx.cpu)):
        mx.eval(keep + 1)
    sizes = [event["requested_size"] for event in mlxmem.events()]
    balanced = mlxmem.stats()["active"] == mx.get_active_memory()
    mlxmem.disable()
    return os.getpid(), was_on, sizes.count(4 * n), balanced


def main() -> None:
    mlxmem.enable()
    keep = mx.random.normal((64, 64))
    mx.eval(keep)
    before = len(mlxmem.events())
    with multiprocessing.get_context("fork").Pool(2) as pool:
        results = pool.map(work, [301, 307, 311, 313], chunksize=1)
    for pid, was_on, count, balanced in results:
        assert pid != os.getpid()
        assert not was_on
        assert count >= 2
        assert balanced
    assert mlxmem.is_enabled()
    assert len(mlxmem.events()) == before
    with mlxmem.record():  # inside a running session: it goes on
        pass
    process = multiprocessing.get_context("fork").Process(target=check_off)
    process.start()
    process.join()
    assert process.exitcode == 0
    assert threading.active_count() < 10


def check_off() -> None:
    assert not mlxmem.is_enabled()


if __name__ == "__main__":
    main()
