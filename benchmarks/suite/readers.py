"""events(), snapshot(), dump() and reports of real recordings.

A recording is made by small arrays that are made and dropped in a fast loop, from 1,000
places 32 frames deep, with max_entries=0: an allocation and a free for each.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .common import skip_in_quick_run
from .interner import CALLS, FRAMES, caller

EVENTS = (10_000, 100_000, 1_000_000)
READERS = ("events", "snapshot", "dump", "summary")


def record(events: int) -> None:
    """Record so many events, and stop."""
    import mlx.core as mx
    from step_overhead import deep

    import mlxmem

    make = caller("make", CALLS, lambda: mx.array(1.0))
    mlxmem.enable(max_entries=0)
    while mlxmem.stats()["events_recorded"] < events:
        deep(FRAMES, make)
    mlxmem.disable()
    recorded = mlxmem.stats()["events_recorded"]
    if recorded != events:
        raise RuntimeError(f"{recorded} events, not {events}")


class Reader:
    """Records in `setup`."""

    params = (READERS, EVENTS)
    param_names = ("reader", "events")
    timeout = 900

    def setup(self, reader: str, events: int) -> None:
        """Make the recording, and the call to measure."""
        skip_in_quick_run(events > 10_000)
        import mlxmem
        from mlxmem.reports.history import read
        from mlxmem.reports.summary import summary

        record(events)
        self.folder = tempfile.TemporaryDirectory()
        path = Path(self.folder.name) / "out.pickle"
        reads: dict[str, Callable[[], Any]] = {
            "events": mlxmem.events,
            "snapshot": mlxmem.snapshot,
            "dump": lambda: mlxmem.dump(path),
            "summary": lambda: summary(read(path)),
        }
        if reader == "summary":
            mlxmem.dump(path)
        self.read = reads[reader]

    def teardown(self, reader: str, events: int) -> None:
        """Remove the file."""
        if hasattr(self, "folder"):
            self.folder.cleanup()


class Time(Reader):
    """Seconds, what is returned and its release included."""

    number = 1
    repeat = (1, 3, 30.0)
    rounds = 1
    warmup_time = 0.0

    def time_reader(self, reader: str, events: int) -> None:
        """One call."""
        self.read()


class Memory(Reader):
    """Peak memory above that of the recording."""

    unit = "bytes"

    def track_peak(self, reader: str, events: int) -> int:
        """Return by how much the resident memory rises during one call."""
        status, clear = Path("/proc/self/status"), Path("/proc/self/clear_refs")
        clear.write_text("5")  # the peak begins again
        before = resident(status, "VmRSS")
        self.read()
        return resident(status, "VmHWM") - before


def resident(status: Path, field: str) -> int:
    """Return a field of Linux's /proc/self/status in bytes."""
    found = re.search(rf"{field}:\s+(\d+) kB", status.read_text())
    if found is None:
        raise RuntimeError(f"{status} has no {field}")
    return int(found[1]) * 1024


class Disk:
    """The file that dump() writes, in bytes."""

    params = (EVENTS,)
    param_names = ("events",)
    unit = "bytes"
    timeout = 900

    def setup(self, events: int) -> None:
        """Make the recording."""
        skip_in_quick_run(events > 10_000)
        record(events)

    def track_bytes(self, events: int) -> int:
        """Return the file's size."""
        import mlxmem

        with tempfile.TemporaryDirectory() as folder:
            return mlxmem.dump(Path(folder) / "out.pickle").stat().st_size

    def track_bytes_per_entry(self, events: int) -> float:
        """Return the file's size by the number of its trace entries."""
        import mlxmem

        (trace,) = mlxmem.snapshot()["device_traces"]
        return self.track_bytes(events) / len(trace)
