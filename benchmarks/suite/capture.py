"""One capture of a Python stack, against other ways to know it; see capture_cost.py."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import CodeType, FrameType

from .common import scaled

DEPTHS = (1, 8, 32, 64)
OURS = "mlxmem"
OTHERS = (
    "pointer chase",
    "frame objects",
    "sys._getframe",
    "torch gather_traceback",
    "extract_stack",
)

# Depth -> way -> nanoseconds; a way that can't be had here is not in it.
Found = dict[int, dict[str, float]]


def walk_frames(times: int) -> float:
    """Return the seconds that walks from `sys._getframe` take, lines included."""
    begin = time.perf_counter()
    for _ in range(times):
        stack: list[tuple[CodeType, int]] = []
        frame: FrameType | None = sys._getframe()
        while frame is not None and len(stack) < 32:
            stack.append((frame.f_code, frame.f_lineno))
            frame = frame.f_back
    return time.perf_counter() - begin


def measure() -> Found:
    """Time all ways in turn, at each depth."""
    import capture_cost

    from mlxmem import _interner

    # Short turns, as in capture_cost.py.
    ways: list[tuple[str, capture_cost.Timer, int]] = [
        (OURS, _interner._time_captures, 10_000),
        ("pointer chase", _interner._time_pointer_chase, 10_000),
        ("sys._getframe", walk_frames, 50),
        ("extract_stack", capture_cost.time_extract_stack, 5),
    ]
    _interner.begin_session()
    with tempfile.TemporaryDirectory() as folder:
        try:
            reference = capture_cost.build_reference(Path(folder))
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"no reference: {error}", file=sys.stderr)
        else:
            ways.append(("frame objects", reference, 100))
        try:
            from torch._C._profiler import gather_traceback
        except ImportError as error:
            print(f"no torch: {error}", file=sys.stderr)
        else:

            def gather(times: int) -> float:
                begin = time.perf_counter()
                for _ in range(times):
                    gather_traceback(True, False, False)
                return time.perf_counter() - begin

            ways.append(("torch gather_traceback", gather, 500))
        turns = scaled(101, 3)
        return {depth: capture_cost.medians(depth, ways, turns) for depth in DEPTHS}


class Measured:
    """What both classes share: one measurement for all of their numbers."""

    def setup_cache(self) -> Found:
        """Measure."""
        return measure()

    def setup(self, found: Found, depth: int, way: str) -> None:
        """Skip what can't be had here: torch, a compiler."""
        if way not in found[depth]:
            raise NotImplementedError(f"{way} is not available")


class Nanoseconds(Measured):
    """One capture; the ways took turns in one process."""

    params = (DEPTHS, (OURS, *OTHERS))
    param_names = ("frames", "way")
    unit = "ns"

    def track_capture(self, found: Found, depth: int, way: str) -> float:
        """Return the median nanoseconds."""
        return found[depth][way]


class Ratios(Measured):
    """How many times mlxmem's capture another way takes."""

    params = (DEPTHS, OTHERS)
    param_names = ("frames", "way")
    unit = "ratio"

    def track_to_mlxmem(self, found: Found, depth: int, way: str) -> float:
        """Return the ratio of the medians."""
        return found[depth][way] / found[depth][OURS]
