"""Replays through the model of MLX's buffer cache.

The requests are made up: sizes from 400 to 4 million bytes, a few hundred buffers in
use at a time, freed in any order; the model itself says what comes of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from .common import skip_in_quick_run

EVENTS = (10_000, 100_000, 1_000_000)
LIVE = 300


def requests(events: int) -> npt.NDArray[np.void]:
    """Return rows of so many allocations and frees, as mlxmem.cache.trace has them."""
    from mlxmem.cache._replay import ROW
    from mlxmem.cache.trace import ALLOC, FREE

    random = np.random.default_rng(0)
    rows = np.zeros(events, ROW)
    sizes = random.choice(np.exp(random.uniform(6, 15, 2000)).astype(np.int64), events)
    picks = random.integers(0, LIVE, events)
    live: list[int] = []
    for i in range(events):
        if len(live) < LIVE:
            rows[i]["op"], rows[i]["requested"] = ALLOC, sizes[i]
            rows[i]["size"], rows[i]["address"] = sizes[i], 4096 + 8 * i
            live.append(i)
        else:
            place = picks[i] % len(live)
            made = live[place]
            live[place] = live[-1]
            live.pop()
            rows[i] = rows[made]
            rows[i]["op"], rows[i]["requested"], rows[i]["owner"] = FREE, 0, made
    rows["owner"][rows["op"] == ALLOC] = -1
    return rows


class Time:
    """Seconds of one replay, and of the whole curve with its recommendation."""

    params = (("follow", "predict", "curve"), EVENTS)
    param_names = ("replay", "events")
    number = 1
    repeat = (1, 5, 30.0)
    rounds = 1
    warmup_time = 0.0
    timeout = 900

    def setup(self, replay: str, events: int) -> None:
        """Make the requests, and choose what to measure."""
        skip_in_quick_run(events > 10_000)
        from mlxmem.cache import advice
        from mlxmem.cache._replay import CACHED
        from mlxmem.cache.policies import CpuPolicy
        from mlxmem.cache.replay import follow, predict
        from mlxmem.cache.trace import Trace

        rows = requests(events)
        nothing = np.full(events, -1, np.int64)
        trace = Trace(
            rows=rows,
            event=np.arange(events),
            time_us=np.arange(events),
            number=nothing,
            cached=np.zeros(0, CACHED),
            unknown=0,
            active=0,
            policy=CpuPolicy(),
            dropped=0,
        )
        calls: dict[str, Callable[[], Any]] = {
            "follow": lambda: follow(trace),
            "predict": lambda: predict(trace),
            "curve": lambda: advice.recommend(trace),
        }
        self.call = calls[replay]

    def time_replay(self, replay: str, events: int) -> None:
        """Measure one call."""
        self.call()
