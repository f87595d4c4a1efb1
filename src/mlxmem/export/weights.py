"""Which blocks weigh in a flame graph, and how much each stack has of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mlxmem.reports.grouping import NO_STACK
from mlxmem.reports.history import Frame, History, Stack

# What `--at` knows.
CHOICES = ("peak", "end", "allocated")
TITLES = {
    "peak": "live at the peak",
    "end": "live at the end",
    "allocated": "allocated during the recording",
}

_NO_STACK = (Frame("", 0, NO_STACK),)


@dataclass(frozen=True)
class Weight:
    """What one stack has of the chosen blocks.

    Attributes
    ----------
    stack : Stack
        Outermost frame first; never empty.
    size : int
        Bytes of the buffers.
    count : int
        Buffers.
    """

    stack: Stack
    size: int
    count: int


def chosen(history: History, at: str) -> npt.NDArray[np.bool_]:
    """Tell which blocks weigh.

    Parameters
    ----------
    history : History
    at : str
        "peak" for the blocks that live when active is highest, "end" for those that
        live at the end, "allocated" for all that were allocated during the recording;
        one that was freed and handed out again counts each time.

    Returns
    -------
    ndarray of bool, shape (len(history.blocks),)

    Raises
    ------
    ValueError
        `at` is none of `CHOICES`.
    """
    if at == "peak":
        return history.live(history.peak_at)
    if at == "end":
        return history.live(history.end)
    if at != "allocated":
        raise ValueError(f"at must be one of {', '.join(CHOICES)}, not {at!r}")
    before = [name == "Before" for name in history.actions] or [False]
    older = np.array(before)[history.blocks["action"]]
    mask: npt.NDArray[np.bool_] = (history.blocks["start"] >= 0) & ~older
    return mask


def outermost_first(stack: Stack) -> Stack:
    """Turn a history's stack round; one without frames gets a frame that says so."""
    return stack[::-1] or _NO_STACK


def by_stack(history: History, at: str) -> list[Weight]:
    """Sum the chosen blocks of each stack.

    Parameters
    ----------
    history : History
    at : str
        As for `chosen`.

    Returns
    -------
    list of Weight
        Ordered by stack, so that neighbours share their outer frames.
    """
    where = chosen(history, at)
    places = history.blocks["stack"][where]
    sizes = np.zeros(max(len(history.stacks), 1), np.int64)
    np.add.at(sizes, places, history.blocks["size"][where])
    counts = np.bincount(places, minlength=len(sizes))
    weights = [
        Weight(outermost_first(history.stacks[place]), size, count)
        for place, (size, count) in enumerate(
            zip(sizes.tolist(), counts.tolist(), strict=True)
        )
        if count
    ]
    return sorted(weights, key=lambda weight: weight.stack)
