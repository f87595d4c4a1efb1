"""What disable() leaves behind: nothing. And recording changes no result."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from books import Books, read_counters, settle

import mlxmem
from mlxmem import _hook
from mlxmem._interner import interner_stats


def word(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value


def test_every_patched_word_is_restored() -> None:
    # GIVEN the words that a session patches
    mlxmem.enable()
    patched = list(_hook.patched_words())
    during = [word(address) for address, _, _ in patched]
    mlxmem.disable()
    before = [word(address) for address, _, _ in patched]

    # THEN they hold the replacement while it records and the original else
    assert len(patched) > 100
    assert len({address for address, _, _ in patched}) == len(patched)
    assert during == [replacement for _, _, replacement in patched]
    assert before == [original for _, original, _ in patched]
    assert all(a != b for a, b in zip(before, during, strict=True))

    # AND the same in a second session, with work in it
    mlxmem.enable()
    mx.eval(mx.random.normal((100, 100)) @ mx.ones((100, 3)))
    again = {address: original for address, original, _ in _hook.patched_words()}
    mlxmem.enable()  # a new session patches no word twice
    assert {a: o for a, o, _ in _hook.patched_words()} == again
    mlxmem.disable()
    for address, original in again.items():
        assert word(address) == original
    for address, original, _ in patched:
        assert word(address) == original


def test_mlx_names_are_restored() -> None:
    def functions() -> dict[str, Any]:
        names = {f"mx.{name}": value for name, value in vars(mx).items()}
        metal = getattr(mx, "metal", None)
        names |= {f"metal.{name}": value for name, value in vars(metal).items()}
        return {name: value for name, value in names.items() if callable(value)}

    before = functions()
    mlxmem.enable()
    during = functions()
    mlxmem.enable()
    mlxmem.disable()
    after = functions()
    assert set(before) == set(during) == set(after)
    assert [name for name in before if before[name] is not after[name]] == []
    for name, value in during.items():  # a wrapper passes for what it wraps
        assert value.__name__ == before[name].__name__


def test_wrapped_functions_still_return_and_raise(books: Books) -> None:
    def results() -> list[Any]:
        old = mx.set_cache_limit(10 << 20)
        limit = mx.set_memory_limit(1 << 30)
        found = [old, mx.set_cache_limit(old), limit, mx.set_memory_limit(limit)]
        return [*found, mx.clear_cache(), mx.reset_peak_memory(), mx.set_wired_limit(0)]

    during = results()
    mlxmem.disable()
    assert during == results()
    books.restart()
    with pytest.raises(TypeError):
        mx.set_cache_limit("much")
    with pytest.raises(TypeError):
        mx.clear_cache(1)


def train() -> list[np.ndarray[Any, Any]]:
    mx.random.seed(7)
    model = nn.Sequential(
        nn.Linear(20, 40), nn.GELU(), nn.Dropout(0.2), nn.Linear(40, 5)
    )
    optimizer = optim.Adam(1e-2)
    mx.eval(model.parameters())
    x, y = mx.random.normal((64, 20)), mx.random.randint(0, 5, (64,))

    def loss(model: Any, x: mx.array, y: mx.array) -> mx.array:
        return nn.losses.cross_entropy(model(x), y).mean()

    step = nn.value_and_grad(model, loss)
    losses = []
    for _ in range(15):
        value, grads = step(model, x, y)
        optimizer.update(model, grads)
        mx.eval(model.parameters(), optimizer.state, value)
        losses.append(value)
    tree = [value for _, value in nn.utils.tree_flatten(model.parameters())]
    tree += [mx.random.normal((100,)), mx.random.permutation(50), mx.stack(losses)]
    svd = mx.linalg.svd(mx.random.normal((12, 12)), stream=mx.cpu)
    return [np.array(value) for value in [*tree, *svd]]


def test_results_are_equal_to_the_bit() -> None:
    plain = train()
    with Books():
        recorded = train()
    after = train()
    for one, two, three in zip(plain, recorded, after, strict=True):
        assert one.tobytes() == two.tobytes() == three.tobytes()


def mappings() -> int:
    with open("/proc/self/maps") as file:
        return len(file.readlines())


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_thousand_cycles_leak_nothing() -> None:
    def cycle() -> None:
        space: dict[str, Any] = {"mx": mx}
        code = compile("made = mx.exp(mx.ones((50,)))", "<cycle>", "exec")
        mlxmem.enable(max_entries=1000)
        exec(code, space)
        mx.eval(space["made"])
        mlxmem.stats()
        mlxmem.disable()

    # GIVEN a process that has done it often enough to have grown
    for _ in range(100):
        cycle()
    gc.collect()
    active = settle().active
    objects, memory = len(gc.get_objects()), resident()
    maps = mappings()

    # WHEN it is done a thousand times more
    for _ in range(1000):
        cycle()

    # THEN nothing has piled up
    gc.collect()
    assert settle().active == active
    assert len(gc.get_objects()) <= objects + 100
    assert mappings() <= maps + 20
    assert resident() - memory < 8 << 20
    assert interner_stats()["tracebacks"] < 100


def test_code_objects_go_with_their_session() -> None:
    # GIVEN a code object that only a recorded stack holds
    def make() -> Any:
        source = "def f(mx):\n    return mx.array([1, 2, 3])\n"
        space: dict[str, Any] = {}
        exec(compile(source, "<canary>", "exec"), space)
        return space["f"]

    function = make()
    code = function.__code__
    plain = sys.getrefcount(code)
    mlxmem.enable()
    keep = function(mx)
    held = sys.getrefcount(code)
    assert held == plain + 1  # one reference, however many stacks
    keep = function(mx)
    assert sys.getrefcount(code) == held

    # WHEN the next session begins
    mlxmem.enable()
    mlxmem.disable()

    # THEN it is let go
    assert sys.getrefcount(code) == plain
    del keep


def test_counters_are_left_alone() -> None:
    keep = mx.random.normal((64, 64))
    mx.eval(keep)
    before = settle()
    mlxmem.enable()
    during = read_counters()
    mlxmem.disable()
    assert before == during == read_counters()
