"""Calls that change what MLX's allocator keeps: each with its values and its line."""

from __future__ import annotations

import itertools
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from books import HAS_CPU_CACHE
from click.testing import CliRunner

import mlxmem
from mlxmem import _setting_calls, recorder
from mlxmem.cli import main
from mlxmem.events import SettingCall
from mlxmem.units import format_bytes

KiB, MiB = 1 << 10, 1 << 20
METAL = getattr(mx, "metal", None)


@pytest.fixture(autouse=True)
def memory_limit() -> Iterator[int]:
    limit = mx.set_memory_limit(1 << 40)
    mx.set_memory_limit(limit)
    yield limit
    mx.set_memory_limit(limit)


def calls() -> list[SettingCall]:
    return list(recorder.recording().calls)


def values() -> list[tuple[str, int | None, int | None]]:
    return [(call.mark.name, call.previous, call.value) for call in calls()]


def line_of(call: SettingCall) -> tuple[str, str]:
    file, function, _ = call.stack[-1]
    return file, function


def modules() -> list[Any]:
    return [module for module in (mx, METAL) if module is not None]


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.__name__)
def test_limits_have_their_old_and_new_value(module: Any, memory_limit: int) -> None:
    # GIVEN functions of MLX, or their aliases
    mlxmem.enable()
    first = mx.set_cache_limit(5 * MiB)

    returned = [
        module.set_cache_limit(7 * MiB),
        module.set_memory_limit(limit=1 << 39),
        module.set_memory_limit(1 << 38),
        module.set_wired_limit(0),
    ]
    mlxmem.disable()

    # THEN each is there once, with what MLX returned
    assert values() == [
        ("set_cache_limit", first, 5 * MiB),
        ("set_cache_limit", returned[0], 7 * MiB),
        ("set_memory_limit", memory_limit, 1 << 39),
        ("set_memory_limit", 1 << 39, 1 << 38),
        ("set_wired_limit", returned[3], 0),
    ]
    assert returned[0] == (5 * MiB if HAS_CPU_CACHE else 0)
    here = (__file__, "test_limits_have_their_old_and_new_value")
    assert [line_of(call) for call in calls()] == [here] * 5
    assert {call.mark.thread_id for call in calls()} == {threading.get_native_id()}


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.__name__)
def test_what_is_cleared_has_the_counter_as_its_old_value(module: Any) -> None:
    mx.clear_cache()
    mlxmem.enable()
    x = mx.zeros((MiB,), mx.uint8)
    mx.eval(x)
    peak = mx.get_peak_memory()
    del x
    cached = mx.get_cache_memory()

    assert module.clear_cache() is None
    assert module.reset_peak_memory() is None
    assert mx.get_peak_memory() == 0
    mlxmem.disable()

    assert cached >= (MiB if HAS_CPU_CACHE else 0)
    assert values() == [
        ("clear_cache", cached, 0),
        ("reset_peak_memory", peak, 0),
    ]
    # AND what the call freed lies between its beginning and its end
    clear, reset = calls()
    recording = recorder.recording()
    freed = recording.events["size"][clear.began : clear.mark.at]
    assert freed.sum() == cached
    assert reset.began == reset.mark.at == clear.mark.at


def test_a_call_that_raises_changes_nothing_and_is_not_there() -> None:
    core: Any = mx
    mlxmem.enable()

    with pytest.raises(TypeError) as wrong:
        core.set_cache_limit("many")
    with pytest.raises(TypeError):
        core.clear_cache(1)
    mx.set_wired_limit(0)
    mlxmem.disable()

    assert [name for name, _, _ in values()] == ["set_wired_limit"]
    # AND the exception is MLX's own
    with pytest.raises(TypeError) as own:
        core.set_cache_limit("many")
    assert str(wrong.value) == str(own.value)


def test_a_call_between_events_of_another_thread_has_both_places() -> None:
    # GIVEN a function during which another thread allocates two events
    module = types.SimpleNamespace(get_cache_memory=lambda: 40)
    positions = itertools.chain([(3, 30), (5, 50)])
    module.clear_cache = lambda: None
    try:
        _setting_calls.watch(module, lambda: next(positions))
        module.clear_cache()
        (call,) = _setting_calls.collect()
    finally:
        _setting_calls.unwatch()

    assert (call.began, call.mark.at, call.mark.timestamp_us) == (3, 5, 50)
    assert (call.previous, call.value) == (40, 0)


def test_an_alias_that_calls_the_other_function_is_one_call() -> None:
    # GIVEN an alias in Python, as an MLX might have it
    module = types.SimpleNamespace(set_cache_limit=lambda limit: 7, clear_cache=list)
    module.get_cache_memory = lambda: 9

    def set_cache_limit(limit: int) -> int:
        module.clear_cache()
        return int(module.set_cache_limit(limit))

    module.metal = types.SimpleNamespace(set_cache_limit=set_cache_limit)
    try:
        _setting_calls.watch(module, lambda: (1, 10))
        assert module.metal.set_cache_limit(3) == 7
        assert module.set_cache_limit(4) == 7
        found = _setting_calls.collect()
    finally:
        _setting_calls.unwatch()

    # THEN it is there once, as what the program called; the other function, too
    assert [(call.mark.name, call.previous, call.value) for call in found] == [
        ("clear_cache", 9, 0),
        ("set_cache_limit", 7, 3),
        ("set_cache_limit", 7, 4),
    ]
    assert found[0].stack[-1][1].endswith("set_cache_limit")
    assert found[1].stack[-1][1] == (
        "test_an_alias_that_calls_the_other_function_is_one_call"
    )


def test_a_reference_that_outlives_the_session_notes_nothing() -> None:
    mlxmem.enable()
    kept = mx.clear_cache
    mlxmem.disable()

    kept()

    assert values() == []


def test_settings_tell_what_the_limits_were_and_who_changed_them(
    memory_limit: int,
) -> None:
    cache_limit = mx.set_cache_limit(5 * MiB)
    mx.set_cache_limit(cache_limit)
    mlxmem.enable()
    mx.set_memory_limit(1 << 39)
    mx.set_cache_limit(6 * MiB)
    mx.set_wired_limit(0)
    mlxmem.disable()

    settings = mlxmem.snapshot()["allocator_settings"]

    assert settings["memory_limit"] == 1 << 39
    assert settings["memory_limit_at_start"] == memory_limit
    assert settings["cache_limit_at_start"] == cache_limit
    assert settings["cache_limit"] == (6 * MiB if HAS_CPU_CACHE else None)
    assert (settings["wired_limit"], settings["settings_calls"]) == (0, 3)
    assert settings["limit_crossings"] == 0
    assert settings["call 1"].startswith("set_memory_limit: ")
    assert " -> 512.0 GiB at test_setting_calls.py:" in settings["call 1"]
    assert settings["call 3"].startswith("set_wired_limit: 0 B -> 0 B at ")


@pytest.mark.usefixtures("cpu_cache")
def test_a_limit_that_is_set_past_mlxmem_is_a_call_without_a_line(
    memory_limit: int, tmp_path: Path
) -> None:
    # GIVEN a reference from before enable(), and a call that is noted
    set_memory_limit = mx.set_memory_limit
    mlxmem.enable()
    active = mx.get_active_memory()
    mx.set_memory_limit(1 << 39)
    set_memory_limit(active + MiB)
    kept = mx.zeros((2 * MiB,), mx.uint8)
    mx.eval(kept)
    mlxmem.disable()

    # THEN both are there, and only the noted one has a stack
    assert values() == [
        ("set_memory_limit", memory_limit, 1 << 39),
        ("set_memory_limit", 1 << 39, active + MiB),
    ]
    assert [bool(call.stack) for call in calls()] == [True, False]
    # AND the limit counts
    recording = recorder.recording()
    (crossing,) = recording.crossings
    assert recording.events["size"][crossing.at - 1] >= 2 * MiB
    assert recording.settings["memory_limit_at_start"] == memory_limit
    # AND reports say that nobody saw the call
    words = "by a call that was not seen: C++ code, or a reference from before enable()"
    assert f" {words}, " in str(recording.settings["call 2"])
    path = mlxmem.dump(tmp_path / "out.pickle")
    for command in ("summary", "timeline"):
        printed = CliRunner().invoke(main, [command, str(path)], catch_exceptions=False)
        assert words in " ".join(printed.output.split())


def test_limits_at_the_start_are_those_of_the_oldest_kept_event() -> None:
    # GIVEN a ring that loses the events before the second call
    mlxmem.enable(max_entries=12)
    mx.set_memory_limit(1 << 39)
    for _ in range(10):
        mx.eval(mx.zeros((100,)))
    mx.set_memory_limit(1 << 38)
    mx.eval(mx.zeros((100,)))
    mlxmem.disable()

    settings = mlxmem.snapshot()["allocator_settings"]

    assert settings["trace_alloc_dropped"] > 0
    assert settings["memory_limit_at_start"] == 1 << 39


def test_active_above_the_memory_limit_is_a_crossing() -> None:
    mlxmem.enable()
    limit = mx.get_active_memory() + 3 * MiB + 64 * KiB
    mx.set_memory_limit(limit)
    kept: list[mx.array] = []
    for _ in range(2):
        kept.clear()
        for _ in range(4):
            kept.append(mx.zeros((MiB,), mx.uint8))
            mx.eval(kept)
    mlxmem.disable()

    recording = recorder.recording()

    assert len(recording.crossings) == 2
    assert recording.settings["limit_crossings"] == 2
    assert recording.marks == ()
    for mark in recording.crossings:
        event = recording.events[mark.at - 1]
        assert event["size"] >= MiB
        assert event["timestamp_us"] == mark.timestamp_us
        assert event["thread_id"] == mark.thread_id
        assert mark.name == f"active above the memory limit, {format_bytes(limit)}"
