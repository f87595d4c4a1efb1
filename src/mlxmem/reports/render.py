"""Reports for people: tables with human units."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from rich.console import (
    Console,
    ConsoleOptions,
    Group,
    RenderableType,
    RenderResult,
)
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from mlxmem.limits import UNSEEN
from mlxmem.metal import near_resource_limit
from mlxmem.reports.rows import Row
from mlxmem.units import format_bytes

_TEXT_WIDTH = 40  # columns that a table's text needs beside its numbers
_CROSSINGS = 20  # rows of the table
_BARS = " ▁▂▃▄▅▆▇█"


def size(value: int | float | None) -> str:
    """Return bytes in human units, "" for None."""
    return "" if value is None else format_bytes(int(value))


def signed(value: int | float) -> str:
    """Return bytes in human units with their sign."""
    return f"{'-' if value < 0 else '+'}{format_bytes(abs(int(value)))}"


def count(value: int | float | None) -> str:
    """Return a number with thousands separated, "" for None."""
    return "" if value is None else f"{value:,}"


def duration(us: int) -> str:
    """Return microseconds in human units."""
    if abs(us) < 1_000:
        return f"{us} us"
    if abs(us) < 1_000_000:
        return f"{us / 1e3:.1f} ms"
    return f"{us / 1e6:.2f} s"


def name(row: Row) -> Text:
    """Return what a row is about: its line, short, and who called it."""
    label = short(row["label"])
    if "file" in row:
        label = f"{short(row['file'])}:{row['line']} {row['function']}"
    text = Text(label, overflow="fold")
    if row.get("called_from"):
        text.append(f"\n  from {short(row['called_from'])}", style="dim")
    return text


def short(path: str) -> str:
    """Shorten a path: relative to the working directory, or after site-packages."""
    for folder in ("/site-packages/", "/dist-packages/"):
        if folder in path:
            return path.rpartition(folder)[2]
    here = os.getcwd().rstrip("/") + "/"
    return path[len(here) :] if path.startswith(here) else path


class _Table:
    """A table whose last column is text and whose others are numbers.

    Where it is too narrow for both, the text stands below its numbers.
    """

    def __init__(
        self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]
    ) -> None:
        self._title = title
        self._columns = columns
        # Names come from the recorded program: nothing in them is markup.
        self._rows = [
            [cell if isinstance(cell, Text) else Text(cell) for cell in row]
            for row in rows
        ]

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> RenderResult:
        numbers = range(len(self._columns) - 1)
        widths = [
            max([len(self._columns[i]), *(row[i].cell_len for row in self._rows)])
            for i in numbers
        ]
        used = sum(width + 2 for width in widths)
        if options.max_width - used >= min(_TEXT_WIDTH, self._longest()):
            yield self._side_by_side()
            return
        if self._title:
            yield Text(self._title, style="bold")
        yield Text(
            "  ".join(self._columns[i].rjust(widths[i]) for i in numbers)
            + f"  {self._columns[-1]} below",
            style="bold",
        )
        for row in self._rows:
            yield Text("  ".join(row[i].plain.rjust(widths[i]) for i in numbers))
            for line in row[-1].split():
                yield Text("    ").append_text(line)

    def _longest(self) -> int:
        lines = [line for row in self._rows for line in row[-1].split()]
        return max([line.cell_len for line in lines], default=0)

    def _side_by_side(self) -> Table:
        made = Table(
            title=self._title, title_justify="left", title_style="bold", box=None
        )
        for column in self._columns[:-1]:
            made.add_column(column, justify="right", no_wrap=True)
        made.add_column(self._columns[-1], overflow="fold")
        for row in self._rows:
            made.add_row(*row)
        return made


def table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]
) -> RenderableType:
    """Return a table whose last column is text and whose others are numbers."""
    return _Table(title, columns, rows)


def title(report: Row) -> RenderableType:
    """Return the first lines of a report: its file, and what to know of it."""
    device = f", device {report['device']}" if report["devices"] > 1 else ""
    lines = [Text(f"{report['file']}{device}", style="bold")]
    dropped = report["dropped"]
    if dropped:
        some = f"{dropped:,}" if dropped > 0 else "some"
        lines.append(
            Text(
                f"{some} older events were dropped: record with --max-entries or "
                "--unlimited to keep them. Totals are right, rows are not complete.",
                style="yellow",
            )
        )
    return Group(*lines)


def moment(label: str, found: Row) -> Text:
    """Return one line about a moment."""
    text = Text(f"{label}: ", style="bold")
    text.append(
        f"{size(found['active'])} active, {size(found['reserved'])} reserved "
        f"({size(found['cache'])} in the cache), "
        + (
            f"after {duration(found['time_us'])} (entry {count(found['at'])})"
            if found["at"] >= 0
            else "before the first entry"
        )
        + (f", after mark {found['after_mark']!r}" if found["after_mark"] else ""),
        style="not bold",
    )
    return text


def live_table(
    heading: str, rows: Sequence[Row], by: str, rest: Row | None
) -> RenderableType:
    """Return the table of rows with bytes, buffers and share."""
    cells: list[Sequence[Any]] = [
        (size(r["bytes"]), f"{r['share']:.1%}", count(r["buffers"]), name(r))
        for r in rows
    ]
    if rest and rest["buffers"]:
        cells.append((size(rest["bytes"]), "", count(rest["buffers"]), "the rest"))
    return table(heading, ("bytes", "share", "buffers", by), cells)


def nodes(found: Row | None) -> list[RenderableType]:
    """Return the lazy graph: totals, and the lines with pending nodes."""
    if found is None:
        return []
    line = Text("Array nodes at the end: ", style="bold")
    line.append(
        f"{count(found['live'])} live, {count(found['pending'])} pending (not "
        f"evaluated), about {size(found['host_bytes'])} of host memory; "
        f"at most {count(found['peak_pending'])} pending",
        style="not bold",
    )
    if not found["rows"]:
        return [line]
    cells = [
        (count(r["pending"]), size(r["host_bytes"]), count(r["live"]), name(r))
        for r in found["rows"]
    ]
    columns = ("pending nodes", "host bytes", "live nodes", "line")
    return [line, table("Pending nodes by line", columns, cells)]


def visible(found: Row | None) -> list[RenderableType]:
    """Return how much of live memory no array shows."""
    if found is None:
        return []
    hidden = found["live_bytes"] - found["visible_bytes"]
    line = Text("Live against visible: ", style="bold")
    line.append(
        f"{size(found['live_bytes'])} live, {size(found['visible_bytes'])} visible "
        f"through arrays, {size(hidden)} only kept alive (slices of larger arrays, "
        "the graph)",
        style="not bold",
    )
    return [line]


def calls(rows: Sequence[Row]) -> list[RenderableType]:
    """Return the table of calls that changed the allocator's settings."""
    if not rows:
        return []
    cells = [
        (
            count(r["at"]),
            duration(r["time_us"]),
            size(r["value"]),
            size(r["previous"]),
            Text(f"{r['name']}  {where(r['frames']) or UNSEEN}"),
        )
        for r in rows
    ]
    columns = ("entry", "time", "value", "before", "call")
    return [table("Settings", columns, cells)]


def crossings(rows: Sequence[Row]) -> list[RenderableType]:
    """Return the table of moments at which active rose above the memory limit."""
    if not rows:
        return []
    cells: list[Sequence[Any]] = [
        (
            count(r["at"]),
            duration(r["time_us"]),
            size(r["active"]),
            Text(f"{r['name']}  {where(r['frames'])}"),
        )
        for r in rows[:_CROSSINGS]
    ]
    if len(rows) > _CROSSINGS:
        note = f"... {len(rows) - _CROSSINGS:,} more, which --json has"
        cells.append(("", "", "", Text(note, style="dim")))
    columns = ("entry", "time", "active", "crossing")
    return [table("Above the memory limit", columns, cells)]


def crossing_line(report: Row) -> list[RenderableType]:
    """Return how often active rose above the memory limit, and where first."""
    rows = report["crossings"]
    if not rows:
        return []
    first = rows[0]
    # The file has no more than the first ones.
    found = report["settings"].get("limit_crossings")
    if type(found) is not int:
        found = len(rows)
    times = "once," if found == 1 else f"{count(found)} times, first"
    what = f"{first['name'][:1].upper()}{first['name'][1:]}"
    line = Text(f"{what}: ", style="bold yellow")
    line.append(
        f"{times} after {duration(first['time_us'])} (entry {count(first['at'])}) "
        f"with {size(first['active'])} at {where(first['frames']) or 'no stack'}",
        style="not bold",
    )
    return [line]


def resource_line(report: Row) -> list[RenderableType]:
    """Say that there are nearly as many buffers as Metal allows."""
    close = near_resource_limit(report["settings"])
    if close is None:
        return []
    now, limit = close
    text = (
        f"Metal allows {count(limit)} buffers, cached ones included, and there were "
        f"{count(now)} at the end: MLX empties its cache at the limit, and fails when "
        "that does not help. Fewer and larger arrays take fewer buffers."
    )
    return [Text(text, style="yellow")]


def ooms(rows: Sequence[Row]) -> list[RenderableType]:
    """Return what is to know of allocations that failed."""
    found: list[RenderableType] = []
    for row in rows:
        line = Text("Out of memory: ", style="bold red")
        free = f", {size(row['free'])} free" if row["free"] >= 0 else ""
        active = f", {size(row['active'])} active" if row["active"] >= 0 else ""
        line.append(
            f"{size(row['size'])} asked for{active}{free}, {row['primitive']}, at "
            + (where(row["frames"]) or "no stack"),
            style="not bold",
        )
        found.append(line)
    return found


def where(frames: Sequence[Row]) -> str:
    """Return the innermost frame as file:line function."""
    if not frames:
        return ""
    frame = frames[0]
    if not frame["line"]:
        return str(frame["function"])  # a label that says why there is no stack
    return f"{short(frame['file'])}:{frame['line']} {frame['function']}"


def bars(values: Sequence[int], highest: int) -> str:
    """Return one character per value, as high as its share of the highest."""
    top = len(_BARS) - 1
    return "".join(
        _BARS[-(-value * top // highest) if highest else 0] for value in values
    )


def call_tree(node: Row) -> Tree:
    """Return a call tree."""
    made = Tree(_branch(node), guide_style="dim")
    _grow(made, node)
    return made


def _grow(made: Tree, node: Row) -> None:
    for child in node["children"]:
        # A chain of frames with one way to go takes one branch each, but no indent.
        _grow(made.add(_branch(child)), child)
    if node["hidden_bytes"]:
        made.add(Text(f"{size(node['hidden_bytes'])} in smaller ones", style="dim"))


def _branch(node: Row) -> Text:
    text = Text(f"{size(node['bytes'])} ", style="bold")
    text.append(
        f"{node['share']:.1%} {count(node['buffers'])} buffers ", "not bold dim"
    )
    text.append(short(node["label"]), style="not bold")
    return text
