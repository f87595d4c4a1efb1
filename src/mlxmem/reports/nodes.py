"""The lazy graph: live array nodes by the line that made them."""

from __future__ import annotations

from mlxmem.reports.history import History
from mlxmem.reports.rows import Row, stack_label

# Host memory of one pending node: its ArrayDesc with the shared pointer's block, its
# primitive, and its list of inputs, as malloc rounds them. Measured as growth of the
# resident set over 200,000 pending `mx.sin` nodes (MLX 0.32.4, glibc, x86-64).
BYTES_PER_NODE = 485


def node_totals(history: History) -> Row | None:
    """Return the totals of live nodes at the end, None where nobody counted.

    Returns
    -------
    dict or None
        `live`, `pending` (not evaluated), `evaluated`, `host_bytes` (an estimate for
        the pending ones), `peak_pending` (the highest sample).
    """
    nodes = history.nodes
    if nodes is None:
        return None
    highest = max((sample.pending for sample in nodes.samples), default=0)
    return {
        "live": nodes.live,
        "pending": nodes.pending,
        "evaluated": nodes.live - nodes.pending,
        "host_bytes": nodes.pending * BYTES_PER_NODE,
        "peak_pending": max(highest, nodes.pending),
    }


def node_rows(history: History, top: int, by: str = "line") -> list[Row]:
    """Return the lines with most pending nodes at the end, most first.

    `by` counts if it is a key of stacks, such as "caller"; else it is by line.

    Returns
    -------
    list of dict
        `label`, `file`, `line`, `function`, `pending`, `live`, `host_bytes`.
    """
    if history.nodes is None:
        return []
    sums: dict[str, Row] = {}
    for line in history.nodes.lines:
        named = stack_label(line.stack, by)
        row = sums.setdefault(named["label"], named | {"pending": 0, "live": 0})
        row["pending"] += line.pending
        row["live"] += line.live
    rows = sorted(sums.values(), key=lambda row: -int(row["pending"]))
    rows = [row for row in rows if row["pending"]][:top]
    return [row | {"host_bytes": row["pending"] * BYTES_PER_NODE} for row in rows]
