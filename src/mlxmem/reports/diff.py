"""The difference of two recordings: what appeared, went, grew and shrank."""

from __future__ import annotations

from mlxmem.reports.grouping import group
from mlxmem.reports.history import History
from mlxmem.reports.rows import Row, heading, moment, row_of

MOMENTS = ("peak", "end", "allocated")


def diff(
    old: History,
    new: History,
    by: str = "line",
    top: int = 20,
    at: str = "peak",
    threshold: int = 1,
) -> Row:
    """Compare two histories group by group.

    Parameters
    ----------
    old, new : History
    by : str
        One of `grouping.KEYS`. Lines move when a file is edited; "function" does not.
    top : int
        Rows at most.
    at : str
        "peak", "end", or "allocated": what is compared.
    threshold : int
        Leave out changes of fewer bytes than this.

    Returns
    -------
    dict
        `old` and `new`: `file`, `bytes`, `buffers`, and a `moment` (None with
        "allocated"). `rows`, largest change first: `change` ("appeared", "went",
        "grew", "shrank"), `old_bytes`, `new_bytes`, `bytes` (their difference),
        `old_buffers`, `new_buffers`, `buffers`. `same`: how many groups did not
        change by `threshold` or more; `changed`, `grown`: how many did, and grew.

    Raises
    ------
    ValueError
        `at` is none of the three.
    """
    if at not in MOMENTS:
        raise ValueError(f"--at must be one of {', '.join(MOMENTS)}, not {at!r}")
    sides = [_Side(history, by, at) for history in (old, new)]
    rows = []
    labels = dict.fromkeys([*sides[0].rows, *sides[1].rows])
    for label in labels:
        (name, before, count_before), (newer, after, count_after) = (
            side.rows.get(label, ({}, 0, 0)) for side in sides
        )
        if before == after and count_before == count_after:
            continue
        if max(abs(after - before), 1) < threshold:
            continue
        if not count_before:
            change = "appeared"
        elif not count_after:
            change = "went"
        else:
            growth = (after - before) or (count_after - count_before)
            change = "grew" if growth > 0 else "shrank"
        rows.append(
            (newer or name)
            | {
                "change": change,
                "old_bytes": before,
                "new_bytes": after,
                "bytes": after - before,
                "old_buffers": count_before,
                "new_buffers": count_after,
                "buffers": count_after - count_before,
            }
        )
    rows.sort(key=lambda row: (-abs(row["bytes"]), -abs(row["buffers"])))
    report = heading("diff", new)
    report |= {
        "by": by,
        "compared": at,
        "old": sides[0].plain,
        "new": sides[1].plain,
        "rows": rows[:top],
        "changed": len(rows),
        "grown": sum(row["change"] in ("appeared", "grew") for row in rows),
        "same": len(labels) - len(rows),
    }
    return report


class _Side:
    def __init__(self, history: History, by: str, at: str) -> None:
        groups = group(history, by)
        entry = history.peak_at if at == "peak" else history.end
        mask = history.live(entry)
        if at == "allocated":
            mask = history.blocks["start"] >= 0
        sizes = groups.total(history.blocks["size"], mask)
        counts = groups.count(mask)
        self.rows: dict[str, tuple[Row, int, int]] = {
            groups.labels[place]: (
                row_of(groups, place),
                int(sizes[place]),
                int(counts[place]),
            )
            for place in counts.nonzero()[0].tolist()
        }
        self.plain: Row = {
            "file": history.name,
            "bytes": int(sizes.sum()),
            "buffers": int(counts.sum()),
            "moment": None if at == "allocated" else moment(history, entry),
        }
