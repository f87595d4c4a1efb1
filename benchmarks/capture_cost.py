"""Compare what one capture of a Python stack costs, side by side in one process.

Four ways, at several depths, each called in a loop from one place:

- ``mlxmem``: the interner's C function, called from C, on a stack that it knows;
- ``pointer chase``: following the frame chain and reading nothing else, the least
  that any capture can cost;
- ``frame objects``: PyEval_GetFrame, PyFrame_GetBack and PyFrame_GetLineNumber, then
  a vector looked up in an unordered_map (``frame_object_walk.cpp``, compiled here).
  The frame objects are made once, in the first turn of the loop: it is flattered;
- ``extract_stack``: ``traceback.extract_stack(limit=32)``.

The ways take turns. What is printed is the median of all turns, and its ratio to
mlxmem's. Nothing is judged here.

    python benchmarks/capture_cost.py
"""

from __future__ import annotations

import _thread
import argparse
import ctypes
import shlex
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from mlxmem import _interner

SOURCE = Path(__file__).with_name("frame_object_walk.cpp")
OURS = "mlxmem"

# Seconds that so many captures take.
Timer = Callable[[int], float]


def build_reference(folder: Path) -> Timer:
    """Compile the walk over frame objects and return its timer."""
    library = folder / "frame_object_walk.so"
    compiler = shlex.split(sysconfig.get_config_var("CXX") or "c++")
    undefined = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
    include = sysconfig.get_path("include")
    subprocess.run(
        [
            *compiler,
            "-O3",
            "-std=c++17",
            "-shared",
            "-fPIC",
            *undefined,
            f"-I{include}",
            str(SOURCE),
            "-o",
            str(library),
        ],
        check=True,
    )
    # PyDLL keeps the GIL held during the call.
    function = ctypes.PyDLL(str(library)).time_frame_object_walks
    function.argtypes = [ctypes.c_long]
    function.restype = ctypes.c_double
    timer: Timer = function
    return timer


def time_extract_stack(n: int) -> float:
    """Return the seconds that ``n`` calls of traceback.extract_stack take."""
    begin = time.perf_counter()
    for _ in range(n):
        traceback.extract_stack(limit=_interner.MAX_FRAMES)
    return time.perf_counter() - begin


def measure(
    frames: int,
    ways: Sequence[tuple[str, Timer, int]],
    turns: int,
    results: dict[str, list[float]],
    done: _thread.LockType,
) -> None:
    """Time each way in turn at the end of a stack of ``frames`` frames."""
    if frames > 1:
        measure(frames - 1, ways, turns, results, done)
        return
    try:
        for _ in range(turns):
            for name, timer, n in ways:
                results[name].append(timer(n) / n * 1e9)
    finally:
        done.release()


def medians(
    frames: int, ways: Sequence[tuple[str, Timer, int]], turns: int
) -> dict[str, float]:
    """Return the median nanoseconds of one capture for each way."""
    results: dict[str, list[float]] = {name: [] for name, _, _ in ways}
    done = _thread.allocate_lock()
    done.acquire()
    # A bare thread: its stack begins with `measure`, so the depth is exact.
    _thread.start_new_thread(measure, (frames, ways, turns, results, done))
    done.acquire()
    if not all(len(values) == turns for values in results.values()):
        raise RuntimeError("a measurement failed; its error is printed above")
    return {name: statistics.median(values) for name, values in results.items()}


def whole_number(least: int, text: str) -> int:
    """Return ``text`` as an integer of at least ``least``, for argparse."""
    value = int(text)
    if value < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}, not {value}")
    return value


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    positive = partial(whole_number, 1)
    parser.add_argument("--turns", type=positive, default=101)
    parser.add_argument("--depths", type=positive, nargs="+", default=[1, 8, 32, 64])
    arguments = parser.parse_args()

    _interner.begin_session()
    with tempfile.TemporaryDirectory() as folder:
        frame_objects = build_reference(Path(folder))
        # Turns that are short beside a time slice: on a busy machine a long one is
        # interrupted almost always, a short one seldom.
        ways = [
            (OURS, _interner._time_captures, 10_000),
            ("pointer chase", _interner._time_pointer_chase, 10_000),
            ("frame objects", frame_objects, 100),
            ("extract_stack", time_extract_stack, 5),
        ]
        walk = "frame chain" if _interner._walks_fast() else "portable walk"
        print(f"Python {sys.version.split()[0]}, {walk}, {arguments.turns} turns")
        print(f"{'frames':>6}  " + "  ".join(f"{name:>22}" for name, _, _ in ways))
        for depth in arguments.depths:
            found = medians(depth, ways, arguments.turns)
            cells = [
                f"{value:>10,.1f} ns {value / found[OURS]:>7.2f}x"
                for value in found.values()
            ]
            print(f"{depth:>6}  " + "  ".join(f"{cell:>22}" for cell in cells))


if __name__ == "__main__":
    main()
