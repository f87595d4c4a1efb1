"""The peak: what lived when active memory was highest, or at another moment."""

from __future__ import annotations

from mlxmem.reports.grouping import group
from mlxmem.reports.history import History
from mlxmem.reports.rows import Row, check_at, frames_of, heading, live_rows, moment


def peak(
    history: History, by: str = "line", top: int = 20, at: int | None = None
) -> Row:
    """Report what lived at the peak.

    Parameters
    ----------
    history : History
    by : str
        One of `grouping.KEYS`.
    top : int
        Rows and buffers at most.
    at : int, optional
        Another moment: after this entry of the trace.

    Returns
    -------
    dict
        `moment`, `rows` (by `bytes`, with `buffers` and `share`), `rest` (bytes and
        buffers of the groups beyond `top`), `largest`: the largest buffers, with
        `size`, `requested`, `primitive`, `action`, `thread`, `stream`, `range`,
        `module`, `made_at`, `freed_at` (None = never) and `frames`.
    """
    at = check_at(history, at)
    rows = live_rows(history, group(history, by), at, top)
    live = history.live(at)
    blocks = history.blocks[live]
    order = (-blocks["size"]).argsort(kind="stable")[:top]
    report = heading("peak", history)
    report |= {
        "by": by,
        "moment": moment(history, at),
        "rows": rows,
        "rest": {
            "bytes": int(blocks["size"].sum()) - sum(row["bytes"] for row in rows),
            "buffers": len(blocks) - sum(row["buffers"] for row in rows),
        },
        "largest": [
            {
                "size": int(block["size"]),
                "requested": int(block["requested"]),
                "primitive": history.primitives[block["primitive"]],
                "action": history.actions[block["action"]],
                "thread": int(block["thread"]),
                "stream": int(block["stream"]),
                "range": history.ranges[block["range"]],
                "module": history.modules[block["module"]],
                "made_at": int(block["start"]),
                "freed_at": int(block["end"]) if block["end"] < len(history) else None,
                "frames": frames_of(history.stacks[block["stack"]]),
            }
            for block in blocks[order]
        ],
    }
    return report
