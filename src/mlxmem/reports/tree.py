"""The call tree of what lives at a moment, from the outermost frame inwards."""

from __future__ import annotations

from typing import Any

from mlxmem.reports.grouping import group, line_of
from mlxmem.reports.history import History
from mlxmem.reports.rows import Row, check_at, heading, moment, share


def tree(
    history: History,
    at: int | None = None,
    threshold: float = 0.01,
    allocated: bool = False,
) -> Row:
    """Report the call tree at the peak, at another moment, or of all allocations.

    Parameters
    ----------
    history : History
    at : int, optional
        After this entry of the trace instead of the peak.
    threshold : float
        Leave out subtrees with less than this share of all bytes (0 to 1).
    allocated : bool
        Count every allocation of the recording instead of what lives.

    Returns
    -------
    dict
        `moment` (None with `allocated`), and `root`: `label`, `bytes`, `buffers`,
        `share` (of the root, 0 to 1) and `children`, largest first. `hidden_bytes`
        of a node were left out below it.
    """
    at = check_at(history, at)
    mask = history.blocks["start"] >= 0 if allocated else history.live(at)
    groups = group(history, "stack")
    sizes = groups.total(history.blocks["size"], mask)
    counts = groups.count(mask)
    root = _Node("all")
    for place in sizes.nonzero()[0].tolist():
        stack = groups.stacks[place]
        # Outermost first; no stack is a branch of its own.
        path = [line_of(stack[i:]) for i in range(len(stack))][::-1] or [line_of(())]
        root.add(path, int(sizes[place]), int(counts[place]))
    report = heading("tree", history)
    report |= {
        "moment": None if allocated else moment(history, at),
        "threshold": threshold,
        "root": root.plain(root.bytes, threshold),
    }
    return report


class _Node:
    def __init__(self, label: str) -> None:
        self.label = label
        self.bytes = self.buffers = 0
        self.children: dict[str, _Node] = {}

    def add(self, path: list[str], size: int, count: int) -> None:
        node = self
        node.bytes += size
        node.buffers += count
        for label in path:
            node = node.children.setdefault(label, _Node(label))
            node.bytes += size
            node.buffers += count

    def plain(self, whole: int, threshold: float) -> dict[str, Any]:
        # At most 33 deep: a recorded stack has 32 frames, and torch's some more.
        ordered = sorted(self.children.values(), key=lambda n: (-n.bytes, n.label))
        shown = [n for n in ordered if n.bytes >= threshold * whole]
        return {
            "label": self.label,
            "bytes": self.bytes,
            "buffers": self.buffers,
            "share": share(self.bytes, whole),
            "hidden_bytes": sum(n.bytes for n in ordered if n not in shown),
            "children": [node.plain(whole, threshold) for node in shown],
        }
