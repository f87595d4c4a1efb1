"""Blocks by what they have in common: the line, the function, the operation, ..."""

from __future__ import annotations

import dataclasses
import functools
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlxmem.reports.history import History, Ints, Mask, Stack

NO_STACK = "no stack"

# What `--by` knows.
KEYS = (
    "line",
    "caller",
    "function",
    "file",
    "stack",
    "primitive",
    "range",
    "module",
    "thread",
    "stream",
    "action",
)


@dataclass(frozen=True)
class Groups:
    """A partition of a history's blocks.

    Attributes
    ----------
    by : str
        One of `KEYS`.
    labels : sequence of str
        One per group.
    stacks : sequence of Stack
        Of each group's stacks the one with most bytes, () where the key has none.
    index : ndarray of int64, shape (len(blocks),)
        The group of each block.
    history : History
        Whose blocks they are.
    """

    by: str
    labels: Sequence[str]
    stacks: Sequence[Stack]
    index: Ints
    history: History

    def __len__(self) -> int:
        """Return the number of groups."""
        return len(self.labels)

    def total(self, values: Ints, where: Mask | None = None) -> Ints:
        """Sum `values` of the blocks, or of those at `where`, per group."""
        index = self.index if where is None else self.index[where]
        values = values if where is None else values[where]
        sums = np.zeros(len(self), np.int64)
        np.add.at(sums, index, values)
        return sums

    def weighed(self, where: Mask) -> Groups:
        """Return the groups with the stacks that have most bytes at `where`."""
        if self.by not in OF_STACK:
            return self
        blocks = self.history.blocks
        sums = np.zeros(len(self.history.stacks), np.int64)
        np.add.at(sums, blocks["stack"][where], blocks["size"][where])
        group_of = np.zeros(len(sums), np.int64)
        group_of[blocks["stack"]] = self.index
        stacks = list(self.stacks)
        for place in np.argsort(sums, kind="stable").tolist():  # the largest last
            if sums[place]:
                stacks[group_of[place]] = self.history.stacks[place]
        return dataclasses.replace(self, stacks=stacks)

    def count(self, where: Mask | None = None) -> Ints:
        """Count the blocks, or those at `where`, per group."""
        index = self.index if where is None else self.index[where]
        return np.bincount(index, minlength=len(self)).astype(np.int64)


def group(history: History, by: str = "line") -> Groups:
    """Group the blocks of a history.

    Parameters
    ----------
    history : History
    by : str
        One of `KEYS`. "line" is the innermost frame, the line that created the array;
        "caller" the innermost one outside of installed packages.

    Returns
    -------
    Groups

    Raises
    ------
    ValueError
        `by` is no key.
    """
    if by not in KEYS:
        raise ValueError(f"--by must be one of {', '.join(KEYS)}, not {by!r}")
    blocks = history.blocks
    if by in OF_STACK:
        used, of_block = np.unique(blocks["stack"], return_inverse=True)
        places: dict[str, int] = {}
        stacks: list[Stack] = []
        of_stack = np.zeros(len(used), np.int64)
        for number, at in enumerate(used.tolist()):
            stack = history.stacks[at]
            place = places.setdefault(OF_STACK[by](stack), len(places))
            if place == len(stacks):
                stacks.append(stack)
            of_stack[number] = place
        groups = Groups(by, list(places), stacks, of_stack[of_block], history)
        return groups.weighed(np.ones(len(blocks), np.bool_))
    values, index = np.unique(blocks[by], return_inverse=True)
    labels = [_label(history, by, value) for value in values.tolist()]
    return Groups(by, labels, [()] * len(labels), index.astype(np.int64), history)


def _label(history: History, by: str, value: int) -> str:
    if by == "thread":
        return f"thread {value}" if value else "unknown thread"
    if by == "stream":
        return f"stream {value}" if value >= 0 else "no stream"
    names: Sequence[str] = {
        "primitive": history.primitives,
        "range": history.ranges,
        "module": history.modules,
        "action": history.actions,
    }[by]
    return names[value] or f"no {by}"


def line_of(stack: Stack) -> str:
    """Return "file:line function" of the innermost frame."""
    if not stack:
        return NO_STACK
    filename, line, function = stack[0]
    if not line:
        return function  # a label instead of a frame
    return f"{filename}:{line} {function}"


def caller_of(stack: Stack) -> str:
    """Return the innermost frame outside of installed packages, else the innermost."""
    for at, frame in enumerate(stack):
        if is_own(frame.filename):
            return line_of(stack[at:])
    return line_of(stack)


@functools.cache
def is_own(filename: str) -> bool:
    """Tell whether a file is the program's, not of a package or the library."""
    if not filename or filename.startswith("<frozen"):
        return False
    folders = ("/site-packages/", "/dist-packages/", f"/{_LIBRARY}/")
    return not any(folder in filename for folder in folders)


_LIBRARY = "/".join(sysconfig.get_paths()["stdlib"].split("/")[-2:])


def _function_of(stack: Stack) -> str:
    if not stack:
        return NO_STACK
    return (
        f"{stack[0].filename} {stack[0].function}" if stack[0].line else line_of(stack)
    )


def _file_of(stack: Stack) -> str:
    return (
        (stack[0].filename if stack[0].line else line_of(stack)) if stack else NO_STACK
    )


def _stack_of(stack: Stack) -> str:
    return " <- ".join(line_of(stack[at:]) for at in range(len(stack))) or NO_STACK


OF_STACK: dict[str, Callable[[Stack], Any]] = {
    "line": line_of,
    "caller": caller_of,
    "function": _function_of,
    "file": _file_of,
    "stack": _stack_of,
}
