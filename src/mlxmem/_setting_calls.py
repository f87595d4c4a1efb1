"""Notice calls that change what MLX's allocator keeps.

A call that empties or trims the cache is booked at once, and every call is kept with
its line, for the reports.
"""

from __future__ import annotations

import functools
import itertools
import operator
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from mlxmem import _interner
from mlxmem.events import Mark, SettingCall

# mlx.core copied their C++ addresses when it was imported, so they are replaced as
# attributes. What a reference taken earlier does is booked at the next event.
NAMES = (
    "clear_cache",
    "set_cache_limit",
    "set_memory_limit",
    "set_wired_limit",
    "reset_peak_memory",
)
# What these give back is the counter that they clear; MLX returns nothing.
_CLEARED = {"clear_cache": "get_cache_memory", "reset_peak_memory": "get_peak_memory"}
MOST = 10_000  # calls that are kept, the last ones: limits, and apart from them others

_replaced: list[tuple[Any, str, Any, Any]] = []  # module, name, original, replacement
_limits: deque[tuple[int, SettingCall]] = deque(maxlen=MOST)
_others: deque[tuple[int, SettingCall]] = deque(maxlen=MOST)
_numbers = itertools.count()
_inside = threading.local()  # names of the functions that this thread is in


def watch(mx: Any, position: Callable[[], tuple[int, int]]) -> None:
    """Note each call of these functions from now on, until unwatch().

    Parameters
    ----------
    mx : module
        mlx.core; its submodule `metal` has aliases in some versions.
    position : callable
        Books what happened, and returns how many events there are and the
        microseconds since the session began. Asked before and after each call.
    """
    _limits.clear()
    _others.clear()
    if _replaced:
        return
    for module in (mx, getattr(mx, "metal", None)):
        for name in NAMES:
            original = getattr(module, name, None)
            if original is not None:
                counter = getattr(mx, _CLEARED.get(name, ""), None)
                replacement = _noted(original, name, counter, position)
                setattr(module, name, replacement)
                _replaced.append((module, name, original, replacement))


def unwatch() -> None:
    """Put MLX's own functions back, unless another tool replaced them again."""
    while _replaced:
        module, name, original, replacement = _replaced.pop()
        if getattr(module, name, None) is replacement:
            setattr(module, name, original)


def collect() -> tuple[SettingCall, ...]:
    """Return the calls of the running or last session."""
    numbered = sorted((*_limits, *_others), key=operator.itemgetter(0))
    return tuple(call for _, call in numbered)


def _noted(
    original: Any,
    name: str,
    counter: Callable[[], int] | None,
    position: Callable[[], tuple[int, int]],
) -> Any:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        names = _inside.__dict__.setdefault("names", set())
        # An alias that calls the other function is one call; and somebody may have
        # kept this function for longer than the session.
        if name in names or not _replaced:
            return original(*args, **kwargs)
        began, _ = position()
        before = counter() if counter else None
        names.add(name)  # no longer than that: a signal handler may call it, too
        try:
            returned = original(*args, **kwargs)
        finally:
            names.discard(name)
        # A call that raised changed nothing, and is not here.
        at, time_us = position()
        # The innermost frame is this one.
        stack = _interner.resolve_traceback(_interner.capture_traceback()) or []
        value = 0 if name in _CLEARED else _number(next(_values(args, kwargs), None))
        calls = _others if name in _CLEARED else _limits
        made = SettingCall(
            Mark(at, time_us, threading.get_native_id(), name),
            value,
            _number(before if name in _CLEARED else returned),
            tuple(stack[:-1]),
            began,
        )
        calls.append((next(_numbers), made))
        return returned

    return call


def _values(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    yield from args
    yield from kwargs.values()


def _number(value: Any) -> int | None:
    try:
        return operator.index(value)
    except TypeError:
        return None
