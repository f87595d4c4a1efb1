"""What the benchmarks share."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

BENCHMARKS = Path(__file__).resolve().parent.parent
# The scripts beside the suite and the example are used, not copied.
for folder in (BENCHMARKS, BENCHMARKS.parent / "examples"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

# `make bench` and CI: a short run that shows that all works; the numbers mean little.
QUICK = os.environ.get("MLXMEM_BENCH_QUICK") == "1"

Block = Callable[[], None]


def scaled(count: int, least: int = 1) -> int:
    """Return ``count``, or a twentieth of it in a quick run."""
    return max(least, count // 20) if QUICK else count


def skip_in_quick_run(wanted: bool = True) -> None:
    """Leave a benchmark out of a quick run; asv shows it as n/a."""
    if QUICK and wanted:
        raise NotImplementedError("left out of a quick run")


class OffAndOn(NamedTuple):
    """Medians of blocks that took turns in one process."""

    off: float  # seconds of a block, not recorded
    on: float  # seconds of a block, recorded
    ratio: float  # median of the ratios of neighbours
    low: float  # first quartile of these ratios
    high: float  # third quartile
    least_off: float  # seconds of the fastest block, not recorded
    least_on: float  # recorded
    cpu_ratio: float  # as `ratio`, by the processor time of all threads


def off_and_on(block: Block, pairs: int) -> OffAndOn:
    """Time a block with recording off and on, in turn."""
    from step_overhead import measure, quartiles

    plain, recorded = measure(block, max(2, pairs), warm_up=1, stacks=True, seed=0)
    off = [seconds.wall for seconds in plain]
    on = [seconds.wall for seconds in recorded]
    low, ratio, high = quartiles([b / a for a, b in zip(off, on, strict=True)])
    return OffAndOn(
        statistics.median(off),
        statistics.median(on),
        ratio,
        low,
        high,
        min(off),
        min(on),
        statistics.median(
            [b.cpu / a.cpu for a, b in zip(plain, recorded, strict=True)]
        ),
    )
