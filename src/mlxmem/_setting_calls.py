"""Notice calls that change what MLX's allocator keeps.

A call that empties or trims the cache is booked at once, and every call is kept with
its line, for the reports.
"""

from __future__ import annotations

import functools
import operator
import threading
from collections import deque
from collections.abc import Callable
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
MOST = 10_000  # calls that are kept, the last ones

_replaced: list[tuple[Any, str, Any, Any]] = []  # module, name, original, replacement
_calls: deque[SettingCall] = deque(maxlen=MOST)


def watch(mx: Any, position: Callable[[], tuple[int, int]]) -> None:
    """Note each call of these functions from now on, until unwatch().

    Parameters
    ----------
    mx : module
        mlx.core; its submodule `metal` has aliases in some versions.
    position : callable
        Books what the call did, and returns how many events there are and the
        microseconds since the session began.
    """
    _calls.clear()
    if _replaced:
        return
    for module in (mx, getattr(mx, "metal", None)):
        for name in NAMES:
            original = getattr(module, name, None)
            if original is not None:
                replacement = _noted(original, name, position)
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
    return tuple(_calls)


def _noted(original: Any, name: str, position: Callable[[], tuple[int, int]]) -> Any:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        previous = None
        try:
            previous = original(*args, **kwargs)
            return previous
        finally:
            at, time_us = position()
            mark = Mark(at, time_us, threading.get_native_id(), name)
            value = next(iter((*args, *kwargs.values())), None)
            # The innermost frame is this one.
            stack = _interner.resolve_traceback(_interner.capture_traceback()) or []
            _calls.append(
                SettingCall(mark, _number(value), _number(previous), tuple(stack[:-1]))
            )

    return call


def _number(value: Any) -> int | None:
    try:
        return operator.index(value)
    except TypeError:
        return None
