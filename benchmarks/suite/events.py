"""An event in the ring: what recording adds to a bare allocation and its free."""

from __future__ import annotations

import ctypes
import shlex
import statistics
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path

from .common import BENCHMARKS, scaled

THREADS = (1, 2, 4)
PAIRS = 20_000  # allocations with their frees, of each thread

Found = dict[int, dict[str, float]]


def build_loop(folder: Path) -> Callable[[int, int], float]:
    """Compile `allocator_loop.cpp` and return its timer of (pairs, threads)."""
    import mlx.core as mx

    library = folder / "allocator_loop.so"
    compiler = shlex.split(sysconfig.get_config_var("CXX") or "c++")
    command = [*compiler, "-O2", "-std=c++17", "-shared", "-fPIC", "-pthread"]
    source = BENCHMARKS / "allocator_loop.cpp"
    subprocess.run([*command, str(source), "-o", str(library)], check=True)
    (path,) = (Path(mx.__file__).parent / "lib").glob("libmlx.*")
    allocator = ctypes.CDLL(str(path))._ZN3mlx4core9allocator9allocatorEv
    allocator.restype = ctypes.c_void_p
    # CDLL releases the GIL: as in MLX, nothing of Python is held.
    function = ctypes.CDLL(str(library)).time_allocations
    function.argtypes = [ctypes.c_void_p, ctypes.c_long, ctypes.c_int]
    function.restype = ctypes.c_double
    pointer = allocator()
    return lambda pairs, threads: float(function(pointer, pairs, threads))


def measure() -> Found:
    """Time the loop with recording off and on, in turn."""
    import mlxmem

    found: Found = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            loop = build_loop(Path(folder))
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"the loop can't be built: {error}")
            return found
        pairs = scaled(PAIRS)
        for threads in THREADS:
            off, on = [], []
            for _ in range(scaled(41, 3)):
                off.append(loop(pairs, threads))
                mlxmem.enable(max_entries=1_000)
                on.append(loop(pairs, threads))
                mlxmem.disable()
                events = mlxmem.stats()["events_recorded"]
                if events != 2 * pairs * threads:
                    raise RuntimeError(f"{events} events of {pairs} x {threads} pairs")
            added = statistics.median(on) - statistics.median(off)
            found[threads] = {
                "event": added / events * 1e9,
                "seen": added / (2 * pairs) * 1e9,
                "ratio": statistics.median(
                    [b / a for a, b in zip(off, on, strict=True)]
                ),
            }
    return found


class Measured:
    """What both classes share: one measurement for all of their numbers."""

    params = (THREADS,)
    param_names = ("threads",)

    def setup_cache(self) -> Found:
        """Measure."""
        return measure()

    def setup(self, found: Found, threads: int) -> None:
        """Skip where there is no compiler."""
        if threads not in found:
            raise NotImplementedError("the loop can't be built")


class Nanoseconds(Measured):
    """What recording adds per event; the ring keeps 1,000."""

    unit = "ns"

    def track_event(self, found: Found, threads: int) -> float:
        """Return the time added, by the events of all threads."""
        return found[threads]["event"]

    def track_event_of_a_thread(self, found: Found, threads: int) -> float:
        """Return the time added, by the events of one thread: waiting included."""
        return found[threads]["seen"]


class Ratios(Measured):
    """Recorded against not recorded."""

    unit = "ratio"

    def track_on_to_off(self, found: Found, threads: int) -> float:
        """Return the median ratio for bare allocations with their frees."""
        return found[threads]["ratio"]
