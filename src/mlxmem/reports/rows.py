"""Rows of a report: groups of blocks with their sums, as plain data."""

from __future__ import annotations

import bisect
from typing import Any

import numpy as np

from mlxmem.reports.grouping import OF_STACK, Groups, is_own, line_of
from mlxmem.reports.history import History, Ints, Stack

Row = dict[str, Any]


def row_of(groups: Groups, at: int, stack: Stack | None = None) -> Row:
    """Return what names a group: its label, and its line where it has a stack.

    Parameters
    ----------
    groups : Groups
    at : int
        Which group.
    stack : Stack, optional
        One of the group's, instead of the one with most bytes.

    Returns
    -------
    dict
        `label`; with a stack also `file`, `line`, `function` of the innermost frame,
        and `called_from`, the innermost line of the program itself, where that is
        another one.
    """
    stack = groups.stacks[at] if stack is None else stack
    return _named(groups.labels[at], stack, groups.by)


def stack_label(stack: Stack, by: str) -> Row:
    """Return what names a stack, by a key of stacks; by line for any other key."""
    by = by if by in OF_STACK else "line"
    return _named(OF_STACK[by](stack), stack, by)


def _named(label: str, stack: Stack, by: str) -> Row:
    row: Row = {"label": label}
    if by in ("line", "caller", "stack") and stack and stack[0].line:
        frame = stack[0]
        if by == "caller":
            frame = next((f for f in stack if is_own(f.filename)), frame)
        row |= {"file": frame.filename, "line": frame.line, "function": frame.function}
        caller = called_from(stack)
        if by != "caller" and caller:
            row["called_from"] = caller
    return row


def called_from(stack: Stack) -> str:
    """Return the innermost line of the program itself, "" if it is the first one."""
    for at, frame in enumerate(stack):
        if is_own(frame.filename):
            return line_of(stack[at:]) if at else ""
    return ""


def largest(values: Ints, top: int) -> list[int]:
    """Return the places of the largest values above 0, largest first."""
    order = np.argsort(-values, kind="stable")[:top]
    return [place for place in order.tolist() if values[place] > 0]


def share(part: int, whole: int) -> float:
    """Return part / whole, rounded to 4 digits; 0 of nothing."""
    return round(part / whole, 4) if whole else 0.0


def live_rows(history: History, groups: Groups, at: int, top: int) -> list[Row]:
    """Return the groups with most bytes after entry `at`, largest first.

    Returns
    -------
    list of dict
        What `row_of` gives, `bytes`, `buffers`, and `share` of active (0 to 1).
    """
    live = history.live(at)
    sizes = groups.total(history.blocks["size"], live)
    counts = groups.count(live)
    active = history.active_after(at)
    heaviest = groups.weighed(live)
    return [
        row_of(heaviest, place)
        | {
            "bytes": int(sizes[place]),
            "buffers": int(counts[place]),
            "share": share(int(sizes[place]), active),
        }
        for place in largest(sizes, top)
    ]


def moment(history: History, at: int) -> Row:
    """Return what a moment is: entry, time and totals.

    Returns
    -------
    dict
        `at` (entry, -1 before the first one), `time_us` (since the start),
        `active`, `reserved`, `cache` (bytes) and `after_mark` (the last mark before
        it, or None).
    """
    return {
        "at": at,
        "time_us": history.time_after(at),
        "active": history.active_after(at),
        "reserved": history.reserved_after(at),
        "cache": history.cache_after(at),
        "after_mark": mark_before(history, at),
    }


def check_at(history: History, at: int | None) -> int:
    """Return the entry that `--at` asks for, that of the peak if it is left out.

    Raises
    ------
    ValueError
        There is no such entry.
    """
    if at is None:
        return history.peak_at
    if not -1 <= at <= history.end:
        raise ValueError(
            f"--at must be an entry from 0 to {history.end}, or -1 for what was there "
            f"before the first, not {at}"
        )
    return at


def mark_before(history: History, at: int) -> str | None:
    """Return the name of the last mark before entry `at` was made."""
    place = bisect.bisect_right(history.marks, at, key=lambda mark: mark.at)
    return history.marks[place - 1].name if place else None


def frames_of(stack: Stack) -> list[Row]:
    """Return a stack as plain data, innermost first."""
    return [{"file": f.filename, "line": f.line, "function": f.function} for f in stack]


def heading(report: str, history: History) -> Row:
    """Return what every report begins with.

    Returns
    -------
    dict
        `report`, `format` (of the JSON, 1), `file`, `source`, `device`, `devices`,
        `dropped` (events that fell out of the ring, -1 = some).
    """
    return {
        "report": report,
        "format": 1,
        "file": history.name,
        "source": history.source,
        "device": history.device,
        "devices": history.devices,
        "dropped": history.dropped,
    }


def visible_totals(history: History) -> Row | None:
    """Return live bytes at the end and what arrays show of them, None if not known."""
    blocks = history.blocks[history.live(history.end)]
    known = blocks[blocks["visible"] >= 0]
    if history.nodes is None:
        return None
    return {
        "live_bytes": int(known["requested"].sum()),
        "visible_bytes": int(known["visible"].sum()),
    }


def call_rows(history: History) -> list[Row]:
    """Return the calls that changed the allocator's settings, in their order."""
    first = history.start_us
    return [
        {
            "name": call.name,
            "value": call.value,
            "previous": call.previous,
            "from_at": call.from_at,
            "at": call.at,
            "time_us": call.time_us - first,
            "thread": call.thread,
            "frames": frames_of(call.stack),
        }
        for call in history.calls
    ]


def crossing_rows(history: History) -> list[Row]:
    """Return where active rose above the memory limit, in their order."""
    first = history.start_us
    return [
        {
            "name": mark.name,
            "at": mark.at,
            "time_us": mark.time_us - first,
            "thread": mark.thread,
            "active": history.active_after(mark.at - 1),
            "frames": frames_of(history.made_by(mark.at - 1)),
        }
        for mark in history.crossings
    ]


def oom_rows(history: History) -> list[Row]:
    """Return the allocations that failed, in their order."""
    first = history.start_us
    return [
        {
            "size": oom.size,
            "free": oom.free,
            "active": oom.active,
            "cache": oom.cache,
            "at": oom.at,
            "time_us": oom.time_us - first,
            "thread": oom.thread,
            "primitive": oom.primitive,
            "message": oom.message,
            "frames": frames_of(oom.stack),
        }
        for oom in history.ooms
    ]
