"""The timeline: memory in equal slices, and what happened between marks."""

from __future__ import annotations

import numpy as np

from mlxmem.reports.grouping import Groups, group
from mlxmem.reports.history import History, Ints, Mask
from mlxmem.reports.rows import Row, heading, largest, moment, row_of
from mlxmem.reports.summary import call_rows, oom_rows


def timeline(
    history: History, by: str = "line", slices: int = 60, time: bool = False
) -> Row:
    """Report how memory went.

    Parameters
    ----------
    history : History
    by : str
        One of `grouping.KEYS`: what a step's largest group is.
    slices : int
        Into how many parts the recording is cut.
    time : bool
        Parts of equal time instead of equally many entries.

    Returns
    -------
    dict
        `slices`: for each, `from_at`, `to_at` (entries, the last one excluded),
        `time_us` of its end, and of active, reserved and cache the highest value in
        it, bytes; `pending` nodes at its end (None where not counted). `steps`: from
        one mark to the next, the first one from the beginning: `name` of the mark, ""
        for the first, `from_at`, `to_at`, `time_us`, `active` and `cache` (at the
        mark, bytes), and up to the next mark `peak` of active, `allocations`,
        `allocated_bytes`, `frees`, `freed_bytes`, `freed_during` (bytes
        by the range in which they were freed), `most_freed` and `most_allocated`:
        the row of the group with most bytes, or None. `ranges`: with `path`, `at`,
        `end_at`, `time_us`, `duration_us`, `thread`, `allocated_bytes`, `peak`.
        `calls`, `ooms`: as in the summary.
    """
    report = heading("timeline", history)
    report |= {
        "by": by,
        "axis": "time" if time else "entries",
        "slices": _slices(history, slices, time),
        "steps": _steps(history, by),
        "ranges": _ranges(history),
        "calls": call_rows(history),
        "ooms": oom_rows(history),
    }
    return report


def _slices(history: History, count: int, by_time: bool) -> list[Row]:
    entries = len(history)
    if not entries:
        return []
    if by_time:
        times = history.time_us
        cuts = np.linspace(times[0], times[-1], count + 1)
        edges = np.searchsorted(times, cuts, side="right")
        edges[0] = 0
    else:
        edges = np.linspace(0, entries, min(count, entries) + 1).astype(np.int64)
    samples = history.nodes.samples if history.nodes else ()
    sample_at = np.array([sample.at for sample in samples], np.int64)
    found = []
    active, reserved = history.start_active, history.start_reserved
    for begin, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        highest = {"active": active, "reserved": reserved}
        cache = max(reserved - active, 0)
        if stop > begin:
            part = slice(begin, stop)
            highest["active"] = int(history.active[part].max())
            highest["reserved"] = int(history.reserved[part].max())
            kept = history.reserved[part] - history.active[part]
            cache = max(int(kept.max()), 0)
            active, reserved = (
                int(history.active[stop - 1]),
                int(history.reserved[stop - 1]),
            )
        seen = int(np.searchsorted(sample_at, stop, side="right"))
        found.append(
            {
                "from_at": begin,
                "to_at": stop,
                "time_us": history.time_after(stop - 1) - history.time_after(0),
                **highest,
                "cache": cache,
                "pending": samples[seen - 1].pending if seen else None,
            }
        )
    return found


def _steps(history: History, by: str) -> list[Row]:
    if not history.marks:
        return []
    groups = group(history, by)
    blocks = history.blocks
    first = history.time_after(0)
    named = [("", 0, 0)]
    named += [(mark.name, mark.at, mark.time_us - first) for mark in history.marks]
    edges = [at for _, at, _ in named] + [len(history)]
    found = []
    for number, (name, begin, time_us) in enumerate(named):
        stop = edges[number + 1]
        made = (blocks["start"] >= begin) & (blocks["start"] < stop)
        gone = (blocks["end"] >= begin) & (blocks["end"] < stop)
        inside = history.active[begin:stop]
        found.append(
            {
                "name": name,
                "from_at": begin,
                "to_at": stop,
                "time_us": time_us,
                "active": history.active_after(begin - 1),
                "cache": moment(history, begin - 1)["cache"],
                "peak": int(inside.max()) if stop > begin else None,
                "allocations": int(made.sum()),
                "allocated_bytes": int(blocks["size"][made].sum()),
                "frees": int(gone.sum()),
                "freed_bytes": int(blocks["size"][gone].sum()),
                "freed_during": _freed_during(history, begin, stop),
                "most_allocated": _most(groups, blocks["size"], made),
                "most_freed": _most(groups, blocks["size"], gone),
            }
        )
    return found


def _freed_during(history: History, begin: int, stop: int) -> dict[str, int]:
    """Sum what was freed by the innermost range of the thread that freed it."""
    sums: dict[str, int] = {}
    blocks = history.blocks
    gone = blocks[(blocks["end"] >= begin) & (blocks["end"] < stop)]
    names, index = np.unique(gone["freed_during"], return_inverse=True)
    for place, name in enumerate(names.tolist()):
        if history.ranges[name]:
            size = int(gone["size"][index == place].sum())
            sums[history.ranges[name]] = size
    return sums


def _most(groups: Groups, sizes: Ints, mask: Mask) -> Row | None:
    totals = groups.total(sizes, mask)
    for place in largest(totals, 1):
        count = int(groups.count(mask)[place])
        return row_of(groups, place) | {"bytes": int(totals[place]), "buffers": count}
    return None


def _ranges(history: History) -> list[Row]:
    blocks = history.blocks
    found = []
    for span in history.spans:
        made = (blocks["start"] >= span.at) & (blocks["start"] < span.end_at)
        made &= blocks["thread"] == span.thread
        inside = history.active[span.at : span.end_at]
        found.append(
            {
                "path": "/".join(span.path),
                "at": span.at,
                "end_at": span.end_at,
                "time_us": span.time_us - history.time_after(0),
                "duration_us": span.end_time_us - span.time_us,
                "thread": span.thread,
                "open": span.open,
                "allocated_bytes": int(blocks["size"][made].sum()),
                "peak": int(inside.max()) if len(inside) else None,
            }
        )
    return found
