"""The summary: totals, the peak, and the lines that matter in five orders."""

from __future__ import annotations

from mlxmem.reports.grouping import group
from mlxmem.reports.history import History, Ints, Mask
from mlxmem.reports.nodes import node_rows, node_totals
from mlxmem.reports.rows import (
    Row,
    call_rows,
    crossing_rows,
    heading,
    largest,
    live_rows,
    moment,
    oom_rows,
    row_of,
    visible_totals,
)


def summary(history: History, by: str = "line", top: int = 10) -> Row:
    """Summarize a history.

    Parameters
    ----------
    history : History
    by : str
        One of `grouping.KEYS`.
    top : int
        Rows in each list.

    Returns
    -------
    dict
        `totals`: `duration_us`, `allocations`, `reuses`, `frees`, `buffers` (live at
        the end), `allocated_bytes`. `start`, `end`, `peak`, `reserved_peak`: moments;
        `peak` has `rows`. `rows`: by `allocated`, `buffers` and `churn` (bytes that
        were freed again), each row with `bytes` allocated, `buffers`, `freed_bytes`,
        `live_bytes`. `primitives`, `threads`, `streams`: such rows, by allocated
        bytes. `nodes` (None where not counted) with `rows`. `visible`: live bytes,
        and what arrays show of them. `calls`, `crossings` (of the memory limit),
        `ooms`, `marks`, `settings`.
    """
    blocks = history.blocks
    made = ~history.older
    freed = made & (blocks["end"] < len(history))
    live = history.live(history.end)
    reused = made & (blocks["action"] == _action(history, "AllocReuse"))
    report = heading("summary", history)
    report |= {
        "by": by,
        "totals": {
            "duration_us": history.time_after(history.end),
            "allocations": int(made.sum()),
            "reuses": int(reused.sum()),
            "frees": int((blocks["end"] < len(history)).sum()),
            "buffers": int(live.sum()),
            "allocated_bytes": int(blocks["size"][made].sum()),
        },
        "start": moment(history, -1),
        "end": moment(history, history.end),
        "peak": moment(history, history.peak_at)
        | {"rows": live_rows(history, group(history, by), history.peak_at, top)},
        "reserved_peak": moment(history, _reserved_peak_at(history)),
        "rows": {
            order: _rows(history, by, top, made, freed, order)
            for order in ("allocated", "buffers", "churn")
        },
    }
    for name in ("primitive", "thread", "stream"):
        report[f"{name}s"] = _rows(history, name, top, made, freed, "allocated")
    totals = node_totals(history)
    report["nodes"] = totals and totals | {"rows": node_rows(history, top, by)}
    report["visible"] = visible_totals(history)
    report["calls"] = call_rows(history)
    report["crossings"] = crossing_rows(history)
    report["ooms"] = oom_rows(history)
    report["marks"] = len(history.marks)
    report["settings"] = dict(history.settings)
    return report


def _action(history: History, name: str) -> int:
    return history.actions.index(name) if name in history.actions else -1


def _reserved_peak_at(history: History) -> int:
    if not len(history) or history.start_reserved >= int(history.reserved.max()):
        return -1
    return int(history.reserved.argmax())


def _rows(
    history: History,
    by: str,
    top: int,
    made: Mask,
    freed: Mask,
    order: str,
) -> list[Row]:
    groups = group(history, by).weighed(made)
    size = history.blocks["size"]
    sums: dict[str, Ints] = {
        "bytes": groups.total(size, made),
        "buffers": groups.count(made),
        "freed_bytes": groups.total(size, freed),
        "live_bytes": groups.total(size, history.live(history.end)),
    }
    key = {"allocated": "bytes", "buffers": "buffers", "churn": "freed_bytes"}[order]
    return [
        row_of(groups, place) | {name: int(sums[name][place]) for name in sums}
        for place in largest(sums[key], top)
    ]
