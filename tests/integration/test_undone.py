"""What disable() leaves behind: nothing. And recording changes no result."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from books import HAS_CPU_CACHE, Books, read_counters, settle

import mlxmem
from mlxmem import _hook, _setting_calls
from mlxmem._interner import interner_stats

TARGETS = Path(__file__).parent / "targets"


def test_every_patched_word_is_restored() -> None:
    # In a process of its own: other tests leave import slots that the loader fills
    # when they are first called through.
    done = subprocess.run(
        [sys.executable, str(TARGETS / "undone.py")],
        env={**os.environ, "LD_BIND_NOW": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")


def names() -> dict[str, Any]:
    """Every function of mlx.core and of its submodule for Metal, where there is one."""
    found = {f"mx.{name}": value for name, value in vars(mx).items()}
    metal = getattr(mx, "metal", None)
    if metal is not None:
        found |= {f"metal.{name}": value for name, value in vars(metal).items()}
    return {name: value for name, value in found.items() if callable(value)}


def replaced(before: dict[str, Any], now: dict[str, Any]) -> set[str]:
    assert set(before) == set(now)
    return {name for name in before if before[name] is not now[name]}


def wrapped_names() -> set[str]:
    """What enable() wraps in this MLX."""
    every = {f"{m}.{f}" for m in ("mx", "metal") for f in _setting_calls.NAMES}
    assert {"mx.clear_cache", "mx.set_cache_limit"} <= every
    return every & set(names())


def test_mlx_names_are_restored() -> None:
    # GIVEN MLX's own functions
    before = names()

    # WHEN a session runs, and another one is begun in it
    mlxmem.enable()
    during = names()
    mlxmem.enable()
    again = names()
    mlxmem.disable()

    # THEN these two, and their aliases, are wrapped once while it does
    assert replaced(before, during) == wrapped_names()
    assert replaced(during, again) == set()
    for name in wrapped_names():
        assert during[name].__wrapped__ is before[name]
        assert during[name].__name__ == before[name].__name__

    # AND are MLX's own objects again afterwards
    assert replaced(before, names()) == set()


def test_mlx_names_are_restored_when_enable_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # GIVEN a session that can't begin, at the last moment
    before = names()
    during: list[set[str]] = []

    def fail(max_entries: int) -> None:
        during.append(replaced(before, names()))
        raise MemoryError("no room for events")

    monkeypatch.setattr(_hook, "start_session", fail)

    # WHEN
    with pytest.raises(MemoryError, match="no room"):
        mlxmem.enable()

    # THEN
    assert during == [wrapped_names()]
    assert replaced(before, names()) == set()
    assert _hook.patched_words() == []
    assert not mlxmem.is_enabled()


def test_what_another_tool_replaced_meanwhile_is_left() -> None:
    # GIVEN another tool that replaces a function while it is wrapped
    before = names()
    mlxmem.enable()
    theirs = mx.clear_cache

    def other() -> None:
        theirs()

    mx.clear_cache = other
    try:
        # WHEN recording ends
        mlxmem.disable()

        # THEN that one stays and works, and all else is MLX's own
        assert mx.clear_cache is other
        assert replaced(before, names()) == {"mx.clear_cache"}
        mx.clear_cache()
    finally:
        mx.clear_cache = before["mx.clear_cache"]
    mx.eval(mx.exp(mx.ones((100,))))


def test_wrapped_functions_still_return_and_raise() -> None:
    # GIVEN what MLX's own functions return and raise
    def results() -> list[Any]:
        old = mx.set_cache_limit(10 << 20)
        found = [old, mx.set_cache_limit(limit=old), mx.clear_cache()]
        for call in (lambda: mx.set_cache_limit("much"), lambda: mx.clear_cache(1)):
            with pytest.raises(TypeError) as caught:
                call()
            found.append(str(caught.value))
        return found

    plain = results()
    assert plain[1] == (10 << 20 if HAS_CPU_CACHE else 0)

    # WHEN they are wrapped
    with Books():
        assert hasattr(mx.clear_cache, "__wrapped__")
        assert hasattr(mx.set_cache_limit, "__wrapped__")
        wrapped = results()

    # THEN they do the same
    assert wrapped == plain
    assert not hasattr(mx.clear_cache, "__wrapped__")


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
