"""A heap profile for pprof: gzip'd protocol buffer.

The format: https://github.com/google/pprof, proto/profile.proto. Numbers of fields
are its own. The four values are those of Go's heap profiles, which pprof knows.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable
from typing import BinaryIO

import numpy as np

from mlxmem._version import __version__
from mlxmem.export.weights import TITLES, chosen, outermost_first
from mlxmem.frames import text
from mlxmem.reports.history import UNKNOWN, Frame, History, Stack

_VARINT, _BYTES = 0, 2  # wire types
_VALUES = (
    ("alloc_objects", "count"),
    ("alloc_space", "bytes"),
    ("inuse_objects", "count"),
    ("inuse_space", "bytes"),
)
_LABELS = ("primitive", "range", "module")  # fields of a block


def write(history: History, file: BinaryIO, *, at: str = "peak") -> None:
    """Write a sample per stack, primitive, range and module.

    Parameters
    ----------
    history : History
    file : binary file
    at : str
        As for `weights.chosen`: what "inuse" means, the blocks at the peak or at the
        end. With "allocated" it is the end, and pprof shows the allocated bytes first.
    """
    profile = _Profile()
    inuse = "end" if at == "allocated" else at
    for kind, unit in _VALUES:
        profile.add(1, _pair(profile.string(kind), profile.string(unit)))
    profile.samples(history, inuse)
    profile.add(3, profile.mapping(history.name))
    profile.functions_and_locations()
    times = history.time_us[history.time_us > 0]
    if len(times):
        start, end = int(times.min()), int(times.max())
        profile.number(9, start * 1000)
        profile.number(10, (end - start) * 1000)
    for comment in _comments(history, inuse):
        profile.number(13, profile.string(comment))
    first = "alloc_space" if at == "allocated" else "inuse_space"
    profile.number(14, profile.string(first))
    profile.add_strings()
    # Without a time in the header equal recordings give equal files.
    with gzip.GzipFile("", "wb", 6, file, mtime=0) as packed:
        packed.write(b"".join(profile.parts))


def _comments(history: History, inuse: str) -> Iterable[str]:
    yield f"mlxmem {__version__}: inuse is what is {TITLES[inuse]}"
    for key in ("mlx_version", "backend"):
        if key in history.settings:
            yield text(f"{key}: {history.settings[key]}")


class _Profile:
    """A message Profile in the making."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self._strings = {"": 0}
        self._functions: dict[tuple[str, str], int] = {}
        self._locations: dict[Frame, int] = {}

    def string(self, string: str) -> int:
        return self._strings.setdefault(string, len(self._strings))

    def add(self, field: int, message: bytes) -> None:
        self.parts.append(_field(field, message))

    def number(self, field: int, value: int) -> None:
        self.parts.append(_number(field, value))

    def samples(self, history: History, inuse: str) -> None:
        blocks = history.blocks
        keys, index = np.unique(blocks[["stack", *_LABELS]], return_inverse=True)
        allocated, live = chosen(history, "allocated"), chosen(history, inuse)
        columns = []
        for where in (allocated, live):
            size = np.zeros(len(keys), np.int64)
            np.add.at(size, index[where], blocks["size"][where])
            columns += [np.bincount(index[where], minlength=len(keys)), size]
        names = (history.primitives, history.ranges, history.modules)
        stacks: dict[int, bytes] = {}
        rows = np.stack(columns, axis=1).tolist()
        for (place, *labels), values in zip(keys.tolist(), rows, strict=True):
            if not any(values):
                continue
            if place not in stacks:
                stacks[place] = self._stack(history.stacks[place])
            message = stacks[place] + _packed(2, values)
            for key, words, label in zip(_LABELS, names, labels, strict=True):
                if words[label] not in ("", UNKNOWN):
                    pair = _pair(self.string(key), self.string(words[label]))
                    message += _field(3, pair)
            self.add(2, message)

    def _stack(self, stack: Stack) -> bytes:
        """Return the field `location_id` of a stack, the innermost frame first."""
        places = [
            self._locations.setdefault(frame, len(self._locations) + 1)
            for frame in outermost_first(stack)[::-1]
        ]
        return _packed(1, places)

    def mapping(self, name: str) -> bytes:
        # pprof wants a main binary; 7 to 9 say that nothing is left to be resolved.
        done = b"".join(_number(field, 1) for field in (7, 8, 9))
        return _number(1, 1) + _number(5, self.string(name)) + done

    def functions_and_locations(self) -> None:
        for frame, place in self._locations.items():
            key = (frame.function, frame.filename)
            function = self._functions.setdefault(key, len(self._functions) + 1)
            line = _number(1, function) + _number(2, frame.line)
            self.add(4, _number(1, place) + _number(2, 1) + _field(4, line))
        # Without a system name: pprof takes one that is equal to the name for mangled
        # C++, and "<module>" for a template's arguments.
        for (name, filename), function in self._functions.items():
            message = _number(1, function) + _number(2, self.string(name))
            self.add(5, message + _number(4, self.string(filename)))

    def add_strings(self) -> None:
        for string in self._strings:
            self.add(6, string.encode())


def _varint(value: int) -> bytes:
    """Encode a number that is not negative, seven bits a byte, the lowest first."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3 | _VARINT) + _varint(value)


def _field(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | _BYTES) + _varint(len(content)) + content


def _packed(field: int, values: Iterable[int]) -> bytes:
    return _field(field, b"".join(map(_varint, values)))


def _pair(first: int, second: int) -> bytes:
    return _number(1, first) + _number(2, second)
