"""What the page's tab "Cache" shows: the report of `mlxmem cache`."""

from __future__ import annotations

from mlxmem.reports.cache import MISS_REASONS, TAKERS, WHEN_TAKEN, cache
from mlxmem.reports.history import History
from mlxmem.reports.reading import SnapshotError
from mlxmem.reports.rows import Row

_ROWS = 20  # in each table


def describe(history: History, by: str = "line") -> Row | None:
    """Report on the cache, as `mlxmem cache --json` does.

    Parameters
    ----------
    history : History
    by : str
        One of `grouping.KEYS`.

    Returns
    -------
    dict or None
        The report without `what_if.rows`, which the curve shows, and with `words` for
        kinds of misses; None where there is nothing to say: PyTorch wrote the file, it
        does not tell what was cached, or nothing was allocated.
    """
    # Half of a report's time are replays; without a request there is no need of any.
    if not (history.blocks["start"] >= 0).any():
        return None
    try:
        report = cache(history, by, _ROWS, limits=[0])
    except SnapshotError:
        return None
    if not report["totals"]["allocations"]:
        return None
    del report["what_if"]["rows"]
    words = {"reasons": MISS_REASONS, "takers": TAKERS, "when": WHEN_TAKEN}
    return report | {"words": words}
