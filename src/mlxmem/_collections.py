"""Notice the garbage collections that freed memory of MLX.

Arrays in reference cycles live until Python's collector finds them. What it frees then
carries the range "gc". Collections of the youngest generation alone are not watched:
they come too often, and cost would show.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from mlxmem.events import Mark, Range

NAME = "gc"
MOST = 10_000  # that are kept, the last ones

_ranges: deque[Range] = deque(maxlen=MOST)
_callback: Callable[[str, dict[str, Any]], None] | None = None


def watch(position: Callable[[], tuple[int, int]]) -> None:
    """Note collections from now on, until unwatch(); forget earlier ones.

    Parameters
    ----------
    position : callable
        Returns how many events there are and the microseconds since the session began.
    """
    global _callback
    unwatch()
    _ranges.clear()
    began: list[Mark] = []

    def callback(phase: str, info: dict[str, Any]) -> None:
        if info["generation"] == 0:
            return
        mark = Mark(*position(), threading.get_native_id(), NAME)
        if phase == "start":
            began[:] = [mark]
        # A collection that freed nothing of MLX is no news.
        elif began and mark.at > began[0].at:
            _ranges.append(Range(began.pop(), mark, (NAME,)))

    _callback = callback
    gc.callbacks.append(callback)


def unwatch() -> None:
    """Stop noting collections."""
    global _callback
    if _callback is not None:
        with contextlib.suppress(ValueError):
            gc.callbacks.remove(_callback)
        _callback = None


def collect() -> tuple[Range, ...]:
    """Return the collections of the running or last session that freed something."""
    return tuple(_ranges)
