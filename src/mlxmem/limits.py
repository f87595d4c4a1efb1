"""Limits of MLX's allocator over a recording: what they were, and who passed them.

Functions of what was recorded; nothing here asks MLX.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mlxmem.events import Action, Mark, Records, Setting, SettingCall, is_alloc
from mlxmem.units import format_bytes

MOST_CROSSINGS = 1000  # marks, the first ones
SHOWN_CALLS = 20  # lines in the settings, the last ones
UNSEEN = "by a call that was not seen: C++ code, or a reference from before enable()"
FUNCTIONS = ("set_cache_limit", "set_memory_limit")  # by `which` of a change
_NEAR = 64  # events after a call in which its change may be noticed

Ints = npt.NDArray[np.int64]
_NO_LIMIT = 2**63 - 1


def limit_at_start(
    calls: Iterable[SettingCall],
    name: str,
    *,
    dropped: int,
    begin: int | None,
    end: int | None,
) -> int | None:
    """Return what a limit was at the first retained event.

    Parameters
    ----------
    calls : iterable of SettingCall
        In the order in which they were over.
    name : str
        Of the function that sets it.
    dropped : int
        Events before the retained ones. Without any it is the limit with which the
        session began.
    begin, end : int or None
        What it was when the session began, and is at its end, bytes; None where MLX
        does not tell.

    Returns
    -------
    int or None
        Bytes; None where that is not known.
    """
    if not dropped and begin is not None:
        return begin
    before = begin
    for call in calls:
        if call.mark.name != name:
            continue
        if (call.mark.at > dropped or not dropped) and call.previous is not None:
            return call.previous
        if call.value is not None:
            before = call.value
    return end if before is None else before


def last_set(calls: Iterable[SettingCall], name: str) -> int | None:
    """Return what the last call of a function set, None without one."""
    values = [call.value for call in calls if call.mark.name == name]
    return values[-1] if values else None


def crossings(
    events: Records,
    calls: Sequence[SettingCall],
    *,
    active: int,
    peak: int,
    limit: int | None,
    dropped: int = 0,
) -> tuple[tuple[Mark, ...], int]:
    """Find the events with which active rose above the memory limit.

    Parameters
    ----------
    events : ndarray of RAW_EVENT, shape (n,)
        The retained ones.
    calls : sequence of SettingCall
        Those of set_memory_limit change the limit for the events after them; others
        are ignored.
    active : int
        Bytes after the last event.
    peak : int
        The highest active of the session, bytes.
    limit : int or None
        The limit before the first of these events, bytes.
    dropped : int
        Events of the session before these.

    Returns
    -------
    marks : tuple of Mark
        The first `MOST_CROSSINGS`; each comes right after its event, and has its time
        and thread.
    count : int
        How many there are.
    """
    changes = [
        call
        for call in calls
        if call.mark.name == "set_memory_limit" and call.value is not None
    ]
    values = [_NO_LIMIT if limit is None else limit]
    values += [call.value for call in changes if call.value is not None]
    if not len(events) or peak <= min(values):
        return (), 0
    limits = np.array([min(max(value, 0), _NO_LIMIT) for value in values], np.int64)
    starts = np.array([call.mark.at - dropped for call in changes], np.int64)
    # Calls on several threads can be noted in another order than they ended in.
    order = np.argsort(starts, kind="stable")
    starts, limits[1:] = starts[order], limits[1:][order]
    in_force = limits[np.searchsorted(starts, np.arange(len(events)), side="right")]
    change = _changes(events)
    after = np.cumsum(change)
    after += active - int(after[-1])
    found = np.flatnonzero((after > in_force) & (after - change <= in_force))
    marks = tuple(
        Mark(
            at=dropped + place + 1,
            timestamp_us=int(events["timestamp_us"][place]),
            thread_id=int(events["thread_id"][place]),
            name="active above the memory limit, " + format_bytes(int(in_force[place])),
        )
        for place in found[:MOST_CROSSINGS].tolist()
    )
    return marks, len(found)


def _changes(events: Records) -> Ints:
    """Return the bytes by which each event changes active, shape (n,) -> (n,)."""
    action = events["action"]
    size = events["size"].astype(np.int64)
    frees = ~is_alloc(action) & (action <= Action.Release)
    return np.where(is_alloc(action), size, np.where(frees, -size, 0))


def with_unseen(
    calls: Sequence[SettingCall], changes: npt.NDArray[Any]
) -> tuple[SettingCall, ...]:
    """Add the changes of a limit that no noted call explains.

    Parameters
    ----------
    calls : sequence of SettingCall
    changes : ndarray, shape (n,)
        With `at`, `timestamp_us`, `thread_id`, `which` (place in `FUNCTIONS`),
        `previous` and `value` (bytes): each change that was noticed, in their order.

    Returns
    -------
    tuple of SettingCall
        In the order in which they were over; the added ones have no stack.
    """
    # By function and value; the ones that changed nothing explain nothing.
    unused: dict[tuple[str, int | None], deque[SettingCall]] = {}
    for call in sorted(calls, key=lambda call: call.began):
        if call.value != call.previous:
            unused.setdefault((call.mark.name, call.value), deque()).append(call)
    found = list(calls)
    fields = ("at", "timestamp_us", "thread_id", "which", "previous", "value")
    for row in changes[list(fields)].tolist():
        at, time, thread, which, previous, value = row
        name = FUNCTIONS[which]
        if not _explain(at, unused.get((name, value), deque())):
            mark = Mark(at, time, thread, name)
            found.append(SettingCall(mark, value, previous, (), at))
    return tuple(sorted(found, key=lambda call: (call.mark.at, call.mark.timestamp_us)))


def _explain(at: int, calls: deque[SettingCall]) -> bool:
    """Take the call that a change belongs to out of those that set its value."""
    while calls and calls[0].mark.at + _NEAR < at:
        calls.popleft()
    for place, call in enumerate(calls):
        if call.began > at:
            return False
        if at <= call.mark.at + _NEAR:
            del calls[place]
            return True
    return False


def settings(
    calls: Sequence[SettingCall],
    *,
    at_start: tuple[int | None, int | None],
    at_end: tuple[int | None, int | None],
    crossing_count: int,
) -> dict[str, Setting]:
    """Return what the snapshot's settings say of limits.

    Parameters
    ----------
    calls : sequence of SettingCall
        In the order in which they were over.
    at_start, at_end : tuple of int or None
        Cache limit and memory limit, bytes.
    crossing_count : int

    Returns
    -------
    dict
        Plain values: the viewer shows nothing else.
    """
    found: dict[str, Setting] = {
        "memory_limit": at_end[1],
        "cache_limit": at_end[0],
        "memory_limit_at_start": at_start[1],
        "cache_limit_at_start": at_start[0],
        "wired_limit": last_set(calls, "set_wired_limit"),
        "limit_crossings": crossing_count,
        "settings_calls": len(calls),
    }
    first = max(len(calls) - SHOWN_CALLS, 0)
    for number, call in enumerate(calls[first:], first + 1):
        found[f"call {number}"] = describe(call)
    return found


def describe(call: SettingCall) -> str:
    """Return a call as one line: what it changed, where and when."""
    previous, value = (
        "unknown" if size is None else format_bytes(size)
        for size in (call.previous, call.value)
    )
    where = UNSEEN
    if call.stack:
        file, _, line = call.stack[-1]
        where = f"at {os.path.basename(file)}:{line}"
    seconds = call.mark.timestamp_us / 1e6
    return (
        f"{call.mark.name}: {previous} -> {value} {where}, {seconds:.3f} s, "
        f"thread {call.mark.thread_id}"
    )
