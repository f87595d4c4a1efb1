"""A history as what the page reads: a description in JSON, and columns of numbers.

Every event and block goes into the page, so that a zoom shows what was recorded and
not a picture of it. The columns are typed arrays, one behind the other, compressed
as one zlib stream, which the browser inflates itself.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from mlxmem.reports.grouping import KEYS, group
from mlxmem.reports.history import Frame, History, Stack
from mlxmem.view import cache

Json = dict[str, Any]

# What the browser's typed arrays hold, smallest first.
_TYPES = tuple(np.dtype(name) for name in ("u1", "u2", "u4", "i1", "i2", "i4"))
_NAMES = {"u1": "u8", "u2": "u16", "u4": "u32", "i1": "i8", "i2": "i16", "i4": "i32"}
_LEVEL = 6


def describe(history: History, by: str = "line") -> tuple[Json, bytes]:
    """Describe a history for the page.

    Parameters
    ----------
    history : History
    by : str
        One of `grouping.KEYS`: what the page groups by when it opens.

    Returns
    -------
    description : dict
        Plain JSON. Sizes in bytes, times in microseconds since the first entry.
        `columns` says how to read the numbers.
    columns : bytes
        A zlib stream.

    Raises
    ------
    ValueError
        `by` is no key.
    """
    if by not in KEYS:
        raise ValueError(f"--by must be one of {', '.join(KEYS)}, not {by!r}")
    names = _Frames()
    columns = _Columns()
    begin = int(history.time_us[0]) if len(history) else 0
    blocks = history.blocks
    # A clock may step back; the axis must not.
    columns.add("time", np.maximum.accumulate(history.time_us - begin), delta=True)
    columns.add("reserved", history.reserved - history.start_reserved, delta=True)
    columns.add("start", blocks["start"], delta=True)
    columns.add("life", blocks["end"] - blocks["start"])
    columns.add("size", blocks["size"])
    columns.add("slack", blocks["size"] - blocks["requested"])
    columns.add("stack", blocks["stack"])
    addresses, which = np.unique(blocks["addr"], return_inverse=True)
    columns.add("addresses", addresses.astype(np.int64), delta=True)
    columns.add("address", which)
    columns.add("freed during", blocks["freed_during"])
    keys = {}
    for key in KEYS:
        groups = group(history, key)
        if key == "stack":
            labels = [_short(stack, place) for place, stack in enumerate(groups.stacks)]
        else:
            labels = list(groups.labels)
        keys[key] = {"labels": labels}
        if any(groups.stacks) or key in ("line", "caller", "function", "file", "stack"):
            of_stack = np.zeros(max(len(history.stacks), 1), np.int64)
            of_stack[blocks["stack"]] = groups.index
            keys[key]["ofStack"] = of_stack.tolist()
        else:
            columns.add(f"by {key}", groups.index)
    description = {
        "name": history.name,
        "source": history.source,
        "device": history.device,
        "devices": history.devices,
        "by": by,
        "entries": len(history),
        "blocks": len(blocks),
        "beginUs": begin,
        "hasTime": bool(len(history)) and int(history.time_us.max()) > begin,
        "startReserved": history.start_reserved,
        "peak": history.peak,
        "peakAt": history.peak_at,
        "reservedPeak": history.reserved_peak,
        "dropped": history.dropped,
        "keys": keys,
        "stacks": [names.places(stack) for stack in history.stacks],
        "marks": [
            {"name": m.name, "at": m.at, "us": m.time_us - begin, "thread": m.thread}
            for m in history.marks
        ],
        "ranges": [
            {
                "name": r.name,
                "path": list(r.path),
                "at": r.at,
                "endAt": r.end_at,
                "us": r.time_us - begin,
                "endUs": r.end_time_us - begin,
                "thread": r.thread,
                "open": r.open,
            }
            for r in history.spans
        ],
        "ooms": [
            {
                "at": o.at,
                "us": o.time_us - begin,
                "thread": o.thread,
                "size": o.size,
                "free": o.free,
                "active": o.active,
                "cache": o.cache,
                "stack": names.places(o.stack),
                "primitive": o.primitive,
                "message": o.message,
            }
            for o in history.ooms
        ],
        "calls": [
            {
                "name": c.name,
                "at": c.at,
                "us": c.time_us - begin,
                "thread": c.thread,
                "value": c.value,
                "previous": c.previous,
                "stack": names.places(c.stack),
            }
            for c in history.calls
        ],
        "crossings": [
            {
                "name": m.name,
                "at": m.at,
                "us": m.time_us - begin,
                "thread": m.thread,
                "stack": names.places(history.made_by(m.at - 1)),
            }
            for m in history.crossings
        ],
        "rangeNames": list(history.ranges),
        "nodes": _nodes(history, names, begin),
        "settings": _settings(history.settings),
        "cacheReport": cache.describe(history, by),
        "frames": names.frames,
        "columns": columns.layout,
    }
    return description, columns.pack()


class _Frames:
    """Distinct frames, and stacks as places in them."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self._places: dict[Frame, int] = {}

    def places(self, stack: Stack) -> list[int]:
        places = []
        for frame in stack:
            place = self._places.setdefault(frame, len(self.frames))
            if place == len(self.frames):
                self.frames.append(frame)
            places.append(place)
        return places


class _Columns:
    """Integer columns, each in the smallest type that holds it."""

    def __init__(self) -> None:
        self.layout: list[Json] = []
        self._parts: list[bytes] = []

    def add(self, name: str, values: npt.NDArray[Any], delta: bool = False) -> None:
        """Append a column; with `delta` the differences, the first one from 0."""
        values = values.astype(np.int64)
        if delta:
            values = np.diff(values, prepend=np.int64(0))
        low = int(values.min()) if len(values) else 0
        high = int(values.max()) if len(values) else 0
        kind = "f64"
        data = values.astype("<f8")  # exact up to 2**53, as all numbers there
        for dtype in _TYPES:
            limits = np.iinfo(dtype)
            if limits.min <= low and high <= limits.max:
                kind = _NAMES[dtype.str[1:]]
                data = values.astype(dtype.newbyteorder("<"))
                break
        self.layout.append(
            {"name": name, "type": kind, "count": len(values), "delta": delta}
        )
        self._parts.append(data.tobytes())

    def pack(self) -> bytes:
        packer = zlib.compressobj(_LEVEL)
        return b"".join([*map(packer.compress, self._parts), packer.flush()])


def _short(stack: Stack, place: int) -> str:
    """Name a stack by its innermost line; whole, it would be there twice."""
    if not stack:
        return "no stack"
    frame = stack[0]
    where = f"{frame.filename}:{frame.line} " if frame.line else ""
    return f"{where}{frame.function} (stack {place + 1})"


def _nodes(history: History, names: _Frames, begin: int) -> Json | None:
    nodes = history.nodes
    if nodes is None:
        return None
    return {
        "live": nodes.live,
        "pending": nodes.pending,
        "lines": [
            {
                "stack": names.places(line.stack),
                "range": line.range,
                "module": line.module,
                "live": line.live,
                "pending": line.pending,
            }
            for line in nodes.lines
        ],
        "samples": [
            [s.at, s.time_us - begin, s.live, s.pending] for s in nodes.samples
        ],
    }


def _settings(settings: Mapping[str, Any]) -> list[Json]:
    """List the settings; as text too, since a big number is not exact over there."""
    rows = []
    for name, value in settings.items():
        number = type(value) is int and abs(value) < 2**53
        rows.append(
            {"name": str(name), "text": str(value), "value": value if number else None}
        )
    return rows
