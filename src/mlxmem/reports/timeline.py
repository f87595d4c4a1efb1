"""The timeline: memory in equal slices, and what happened between marks."""

from __future__ import annotations

import numpy as np

from mlxmem.reports.grouping import group
from mlxmem.reports.history import History, Ints
from mlxmem.reports.rows import (
    Row,
    call_rows,
    crossing_rows,
    heading,
    oom_rows,
    row_of,
)


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
        `time_us` of its end, and of `active`, `reserved`, `cache` (bytes) and `pending`
        nodes (None where not counted) the highest value in it. `steps`: from
        one mark to the next, the first one from the beginning: `name` of the mark, ""
        for the first, `from_at`, `to_at`, `time_us`, `active` and `cache` (at the
        mark, bytes), and up to the next mark `peak` of active, `allocations`,
        `allocated_bytes`, `frees`, `freed_bytes`, `freed_during` (bytes
        by the range in which they were freed), `most_freed` and `most_allocated`:
        the row of the group with most bytes, or None. `ranges`: with `path`, `at`,
        `end_at`, `time_us`, `duration_us`, `thread`, `allocated_bytes`, `peak`.
        `calls`, `crossings`, `ooms`: as in the summary.
    """
    report = heading("timeline", history)
    report |= {
        "by": by,
        "axis": "time" if time else "entries",
        "slices": _slices(history, slices, time),
        "steps": _steps(history, by),
        "ranges": _ranges(history),
        "calls": call_rows(history),
        "crossings": crossing_rows(history),
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
    first_seen = 0
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
        inside = [sample.pending for sample in samples[first_seen:seen]]
        if seen:
            inside.append(samples[max(first_seen - 1, 0)].pending)
        first_seen = seen
        found.append(
            {
                "from_at": begin,
                "to_at": stop,
                "time_us": history.time_after(stop - 1),
                **highest,
                "cache": cache,
                "pending": max(inside) if inside else None,
            }
        )
    return found


def _steps(history: History, by: str) -> list[Row]:
    if not history.marks:
        return []
    first = history.start_us
    named = [("", 0, 0)]
    named += [(mark.name, mark.at, mark.time_us - first) for mark in history.marks]
    edges = np.array([at for _, at, _ in named] + [len(history)], np.int64)
    blocks = history.blocks
    made = _Sums(history, by, edges, blocks["start"])
    gone = _Sums(history, by, edges, blocks["end"])
    during = _freed_during(history, edges)
    found = []
    for number, (name, begin, time_us) in enumerate(named):
        stop = int(edges[number + 1])
        inside = history.active[begin:stop]
        found.append(
            {
                "name": name,
                "from_at": begin,
                "to_at": stop,
                "time_us": time_us,
                "active": history.active_after(begin - 1),
                "cache": history.cache_after(begin - 1),
                "peak": int(inside.max()) if stop > begin else None,
                "allocations": int(made.counts[number]),
                "allocated_bytes": int(made.sizes[number]),
                "frees": int(gone.counts[number]),
                "freed_bytes": int(gone.sizes[number]),
                "freed_during": during.get(number, {}),
                "most_allocated": made.most.get(number),
                "most_freed": gone.most.get(number),
            }
        )
    return found


class _Sums:
    """What was made, or freed, in each step; there may be as many steps as blocks.

    Attributes
    ----------
    sizes, counts : ndarray of int64, shape (steps,)
    most : dict
        Step -> row of the group with most bytes in it.
    """

    def __init__(self, history: History, by: str, edges: Ints, at: Ints) -> None:
        steps = len(edges) - 1
        groups = group(history, by)
        chosen = np.flatnonzero((at >= 0) & (at < edges[-1]))
        step = np.searchsorted(edges[1:], at[chosen], side="right")
        size = history.blocks["size"][chosen]
        self.counts = np.bincount(step, minlength=steps)
        self.sizes = np.zeros(steps, np.int64)
        np.add.at(self.sizes, step, size)

        # By step and group, the largest block of each last.
        key = step * max(len(groups), 1) + groups.index[chosen]
        order = np.lexsort((size, key))
        last = np.flatnonzero(np.diff(key[order], append=-1))
        total = np.diff(np.cumsum(size[order])[last], prepend=0)
        count = np.diff(last, prepend=-1)
        of_step = step[order][last]
        # Of each step the largest group, which comes last.
        ranked = np.lexsort((total, of_step))
        top = ranked[np.flatnonzero(np.diff(of_step[ranked], append=-1))]
        self.most: dict[int, Row] = {}
        for place in top.tolist():
            block = int(chosen[order[last[place]]])
            stack = history.stacks[history.blocks["stack"][block]]
            row = row_of(groups, int(groups.index[block]), stack)
            row |= {"bytes": int(total[place]), "buffers": int(count[place])}
            self.most[int(of_step[place])] = row


def _freed_during(history: History, edges: Ints) -> dict[int, dict[str, int]]:
    """Sum what was freed by step and by the range of the thread that freed it."""
    sums: dict[int, dict[str, int]] = {}
    blocks = history.blocks
    gone = blocks[(blocks["end"] < edges[-1]) & (blocks["freed_during"] > 0)]
    step = np.searchsorted(edges[1:], gone["end"], side="right")
    columns = zip(
        step.tolist(), gone["freed_during"].tolist(), gone["size"].tolist(), strict=True
    )
    for number, place, size in columns:
        of_step = sums.setdefault(number, {})
        name = history.ranges[place]
        of_step[name] = of_step.get(name, 0) + size
    return sums


def _ranges(history: History) -> list[Row]:
    made = history.blocks[history.blocks["start"] >= 0]
    by_thread: dict[int, tuple[Ints, Ints]] = {}
    for thread in {span.thread for span in history.spans}:
        own = made[made["thread"] == thread]
        totals = np.concatenate([np.zeros(1, np.int64), np.cumsum(own["size"])])
        by_thread[thread] = own["start"], totals
    highest = _Highest(history.active)
    found = []
    for span in history.spans:
        starts, totals = by_thread[span.thread]
        first, last = np.searchsorted(starts, (span.at, span.end_at)).tolist()
        found.append(
            {
                "path": "/".join(span.path),
                "at": span.at,
                "end_at": span.end_at,
                "time_us": span.time_us - history.start_us,
                "duration_us": span.end_time_us - span.time_us,
                "thread": span.thread,
                "open": span.open,
                "allocated_bytes": int(totals[last] - totals[first]),
                "peak": highest.between(span.at, span.end_at),
            }
        )
    return found


class _Highest:
    """The highest value of any stretch; ranges nest, and may be many and long."""

    _PART = 1024

    def __init__(self, values: Ints) -> None:
        self._values = values
        starts = np.arange(0, len(values), self._PART)
        self._parts: Ints = (
            np.maximum.reduceat(values, starts) if len(values) else values
        )

    def between(self, begin: int, stop: int) -> int | None:
        """Return the highest of values[begin:stop], None if that is empty."""
        if begin >= stop:
            return None
        first, last = -(-begin // self._PART), stop // self._PART
        if first >= last:
            return int(self._values[begin:stop].max())
        pieces = (
            self._values[begin : first * self._PART],
            self._parts[first:last],
            self._values[last * self._PART : stop],
        )
        return max(int(piece.max()) for piece in pieces if len(piece))
