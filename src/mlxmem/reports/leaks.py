"""Leaks: what lives at the end, and what grows from step to step."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mlxmem.reports.grouping import Groups, group
from mlxmem.reports.history import History, Ints, Mask
from mlxmem.reports.nodes import node_rows, node_totals
from mlxmem.reports.rows import Row, heading, moment, row_of, visible_totals

PARTS = 10  # steps of a recording without marks
MOST_STEPS = 200


def leaks(
    history: History,
    by: str = "line",
    top: int = 20,
    marks: str = "*",
    first: str | None = None,
    last: str | None = None,
) -> Row:
    """Report what was never freed, and what grows.

    A step goes from one mark to the next. Without marks the recording is cut into ten
    equal parts. A group grows if its highest point lies in the second half, and up to
    there it rises in two thirds of the steps, or three times and still in the second
    half, and falls hardly ever: once for ten rises.

    Parameters
    ----------
    history : History
    by : str
        One of `grouping.KEYS`.
    top : int
        Rows in each list.
    marks : str
        Only marks whose names match this pattern (`*`, `?`, `[...]`) count.
    first, last : str, optional
        Patterns of the marks where the first step begins and the last one ends.

    Returns
    -------
    dict
        `steps`: names and moments between which growth is counted, 200 at most;
        `step_count`: how many steps there really are; `from_marks`.
        `growing`: rows with `growth_bytes`, `growth_buffers` (from the first point to
        the highest), `until` (its name), `steps` up to there, `bytes_per_step`,
        `buffers_per_step` (means), `bytes`, `buffers` (at the last point). `live`:
        rows of what lives at the end, allocated in the recording, with `bytes`,
        `buffers`, `visible_bytes` (what arrays show of these; None if not known),
        `growing`. `before`: bytes and buffers that live and are older than the
        recording. `pending`: whether pending nodes grow, None if not counted:
        `growing`, `growth`, `per_step`, `until`. `nodes`, `visible`: as in the
        summary.

    Raises
    ------
    ValueError
        No mark matches `first` or `last`, or fewer than two points are left.
    """
    points = _points(history, marks, first, last)
    groups = group(history, by)
    sizes, counts = _at_points(history, groups, points.at)
    grows, until = _growth(sizes, counts)
    every = np.arange(len(groups))
    named = groups.weighed(history.live(points.at[-1]))
    passed = points.numbers - points.numbers[0]
    grown = sizes[every, until] - sizes[:, 0]
    more = counts[every, until] - counts[:, 0]
    growing = [
        row_of(named, place)
        | {
            "growth_bytes": int(grown[place]),
            "growth_buffers": int(more[place]),
            "steps": int(passed[until[place]]),
            "until": points.names[until[place]],
            "bytes_per_step": _per(int(grown[place]), int(passed[until[place]])),
            "buffers_per_step": _per(int(more[place]), int(passed[until[place]])),
            "bytes": int(sizes[place, -1]),
            "buffers": int(counts[place, -1]),
        }
        for place in np.lexsort((-more, -grown)).tolist()
        if grows[place]
    ][:top]
    report = heading("leaks", history)
    report |= {
        "by": by,
        "from_marks": points.from_marks,
        "step_count": int(passed[-1]),
        "steps": [
            {"name": name} | moment(history, at)
            for name, at in zip(points.names, points.at.tolist(), strict=True)
        ],
        "growing": growing,
        "pending": _pending(history, points),
        "live": _live(history, groups, grows, top),
        "before": _before(history),
        "visible": visible_totals(history),
    }
    totals = node_totals(history)
    report["nodes"] = totals and totals | {"rows": node_rows(history, top, by)}
    return report


class _Points(NamedTuple):
    """The moments to compare.

    Of many marks some are left out: `numbers` are their places among all of them.
    """

    names: list[str]
    at: Ints  # entries after which to look
    time_us: Ints  # Unix epoch
    numbers: Ints
    from_marks: bool


def _points(
    history: History, pattern: str, first: str | None, last: str | None
) -> _Points:
    """Choose the moments to compare."""
    marks = history.marks
    names = [mark.name for mark in marks]
    begin = _find(names, first, "--from") if first else 0
    stop = _find(names, last, "--to", from_end=True) if last else len(names) - 1
    chosen = [
        mark
        for mark in marks[begin : stop + 1]
        if fnmatch.fnmatchcase(mark.name, pattern)
    ]
    if len(chosen) < 2 and (pattern != "*" or first or last):
        raise ValueError(
            f"{len(chosen)} of {len(marks)} marks match, and growth needs two; "
            "mlxmem.mark(name) sets some, `mlxmem timeline` lists them"
        )
    if len(chosen) >= 2:
        most = min(len(chosen), MOST_STEPS)
        numbers = np.unique(np.linspace(0, len(chosen) - 1, most).astype(np.int64))
        chosen = [chosen[number] for number in numbers.tolist()]
        at = np.array([mark.at - 1 for mark in chosen], np.int64)
        time_us = np.array([mark.time_us for mark in chosen], np.int64)
        return _Points([mark.name for mark in chosen], at, time_us, numbers, True)
    at = np.linspace(-1, history.end, PARTS + 1)[1:].astype(np.int64)
    parts = [f"{100 * (n + 1) // PARTS} %" for n in range(PARTS)]
    times = [history.start_us + history.time_after(entry) for entry in at.tolist()]
    return _Points(parts, at, np.array(times, np.int64), np.arange(PARTS), False)


def _pending(history: History, points: _Points) -> Row | None:
    """Tell whether the number of pending nodes grows, from its samples.

    A loop that never evaluates makes no events, so it is time that orders them.
    """
    if history.nodes is None:
        return None
    samples = history.nodes.samples
    times = np.array([sample.time_us for sample in samples], np.int64)
    pending = np.array([0] + [sample.pending for sample in samples], np.int64)
    values = pending[np.searchsorted(times, points.time_us, side="right")]
    grows, highest = _rise(values[None, :])
    until = int(highest[0])
    growth = int(values[until] - values[0])
    return {
        "growing": bool(grows[0]),
        "growth": growth,
        "per_step": _per(growth, int(points.numbers[until] - points.numbers[0])),
        "until": points.names[until],
    }


def _find(
    names: Sequence[str], pattern: str, option: str, from_end: bool = False
) -> int:
    found = [n for n, name in enumerate(names) if fnmatch.fnmatchcase(name, pattern)]
    if not found:
        raise ValueError(
            f"{option} {pattern!r} is no mark of this recording; it has "
            + (", ".join(map(repr, names[:10])) or "none")
        )
    return found[-1 if from_end else 0]


def _at_points(history: History, groups: Groups, points: Ints) -> tuple[Ints, Ints]:
    """Count what lives of each group after each point, shape (groups, points)."""
    blocks = history.blocks
    shape = (len(groups), len(points) + 1)
    sizes, counts = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    born = np.searchsorted(points, blocks["start"])
    gone = np.searchsorted(points, blocks["end"])
    for at, sign in ((born, 1), (gone, -1)):
        np.add.at(sizes, (groups.index, at), sign * blocks["size"])
        np.add.at(counts, (groups.index, at), sign)
    return sizes.cumsum(axis=1)[:, :-1], counts.cumsum(axis=1)[:, :-1]


def _growth(sizes: Ints, counts: Ints) -> tuple[Mask, Ints]:
    """Tell which groups grow, and until which point they do.

    A leak that something ends late, such as one `eval` after the loop, is one.
    """
    of_sizes, of_counts = _rise(sizes), _rise(counts)
    grows = of_sizes[0] | of_counts[0]
    until = np.where(of_sizes[0], of_sizes[1], of_counts[1])
    return grows, until


def _rise(values: Ints) -> tuple[Mask, Ints]:
    steps = values.shape[1] - 1
    highest: Ints = steps - np.argmax(values[:, ::-1], axis=1)
    change = np.diff(values, axis=1)
    before = np.arange(steps) < highest[:, None]
    up, down = (change > 0) & before, (change < 0) & before
    rises, falls = up.sum(axis=1), down.sum(axis=1)
    # Most steps, or now and then to the end: a list may grow every tenth step.
    last_rise = np.where(up, np.arange(1, steps + 1), 0).max(axis=1, initial=0)
    steady = 3 * rises >= 2 * highest
    steady |= (rises >= 3) & (2 * last_rise >= steps)
    enough = steady & (10 * falls <= rises) & (rises > 0)
    return enough & (2 * highest >= max(steps, 1)), highest


def _per(total: int, steps: int) -> float:
    return round(total / max(steps, 1), 2)


def _live(
    history: History,
    groups: Groups,
    grows: Mask,
    top: int,
) -> list[Row]:
    live = history.live(history.end) & ~history.older
    blocks = history.blocks
    sizes, counts = groups.total(blocks["size"], live), groups.count(live)
    visible = groups.total(blocks["visible"], live)
    known = history.nodes is not None
    order = np.lexsort((-counts, -sizes))[:top]
    groups = groups.weighed(live)
    return [
        row_of(groups, place)
        | {
            "bytes": int(sizes[place]),
            "buffers": int(counts[place]),
            "visible_bytes": int(visible[place]) if known else None,
            "growing": bool(grows[place]),
        }
        for place in order.tolist()
        if counts[place]
    ]


def _before(history: History) -> Row:
    mask = history.live(history.end) & history.older
    return {
        "bytes": int(history.blocks["size"][mask].sum()),
        "buffers": int(mask.sum()),
    }
