"""The table of stacks, from ten to a million of them, 32 frames each."""

from __future__ import annotations

import time
from collections.abc import Callable

from .common import skip_in_quick_run

STACKS = (10, 100, 1_000, 10_000, 100_000, 1_000_000)
CALLS = 1_000  # call sites in a function
FRAMES = 32

Found = dict[str, float]


def caller(name: str, calls: int, callee: Callable[[], object]) -> Callable[[], None]:
    """Return a function with so many calls of another one, each at its own place."""
    scope: dict[str, Callable[[], None]] = {"callee": callee}  # type: ignore[dict-item]
    exec(f"def {name}():\n" + "    callee()\n" * calls, scope)
    return scope[name]


def measure(stacks: int) -> Found:
    """Capture each of so many distinct stacks once, then once more.

    The same calls before the first session, when nothing is captured, are taken off.
    What stays has the int in it that each call returns.
    """
    from step_overhead import deep

    from mlxmem import _interner

    inner = caller("inner", min(stacks, CALLS), _interner.capture_traceback)
    outer = caller("outer", stacks // min(stacks, CALLS), inner)
    seconds: list[float] = []

    def timed() -> None:
        begin = time.perf_counter()
        outer()
        seconds.append(time.perf_counter() - begin)

    # The last 32 frames: inner, outer, timed and those of `deep`.
    repeats = max(3, 3_000 // stacks)
    for _ in range(repeats):
        deep(FRAMES, timed)
    calls = min(seconds)
    first, again = [], []
    for _ in range(max(1, 1_000 // stacks)):
        _interner.begin_session()
        seconds.clear()
        for _ in range(repeats):
            deep(FRAMES, timed)
        first.append(seconds[0] - calls)
        again.append(min(seconds[1:]) - calls)
        found = _interner.interner_stats()
        if found["tracebacks"] != stacks:
            raise RuntimeError(f"{found['tracebacks']} stacks, not {stacks}")
    return {
        "first": min(first) / stacks * 1e9,
        "again": min(again) / stacks * 1e9,
        "bytes": found["bytes"] / stacks,
    }


class Captures:
    """Nanoseconds of one capture."""

    params = (STACKS,)
    param_names = ("stacks",)
    unit = "ns"
    timeout = 900

    def setup(self, stacks: int) -> None:
        """Leave the large tables out of a quick run."""
        skip_in_quick_run(stacks > 10_000)

    def track_new(self, stacks: int) -> float:
        """Return what a stack costs that is not in the table."""
        return measure(stacks)["first"]

    def track_known(self, stacks: int) -> float:
        """Return what a stack costs that is in the table; all take their turn."""
        return measure(stacks)["again"]


class Memory:
    """Bytes of the table."""

    params = (STACKS,)
    param_names = ("stacks",)
    unit = "bytes"

    def setup(self, stacks: int) -> None:
        """Leave the large tables out of a quick run."""
        skip_in_quick_run(stacks > 10_000)

    def track_bytes_per_stack(self, stacks: int) -> float:
        """Return what the table has reserved, by the number of stacks in it."""
        return measure(stacks)["bytes"]
