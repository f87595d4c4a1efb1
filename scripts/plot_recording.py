"""Draw a recording: active memory by creating line, the cache and what is reserved.

    python scripts/plot_recording.py out.pickle picture.png

Reads the pickle alone, so it also shows what a reader of the format gets from it.
The x axis is time; a buffer counts with the bytes that were requested. It belongs to
the innermost frame, or with --own-lines to the innermost outside MLX's Python files.
"""

from __future__ import annotations

import argparse
import pickle
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

MIB = 2**20
NO_LINE = "no line"
OTHERS = "all other lines"


class Curves(NamedTuple):
    """What is drawn; all arrays have one value per point in time."""

    seconds: np.ndarray  # since the first entry
    lines: dict[str, np.ndarray]  # active bytes by creating line, the bottom first
    reserved: np.ndarray  # bytes


def line_of(frames: Sequence[Mapping[str, Any]], own_lines: bool) -> str:
    """Name the innermost frame, or that outside MLX, as "file:line function"."""
    for frame in frames:
        path = Path(frame["filename"])
        if not (own_lines and "mlx" in path.parts):
            where = f"{path.name}:{frame['line']}" if frame["line"] else path.name
            return f"{where} {frame['name']}".strip()
    return frames[0]["name"] if frames else NO_LINE


def steps(
    snapshot: Mapping[str, Any], own_lines: bool
) -> Iterator[tuple[int, str, int, int]]:
    """Yield (time in microseconds, line, change of active, change of reserved).

    What was there before the first entry comes first, with the time of that entry.
    """
    trace = snapshot["device_traces"][0]
    begin = trace[0]["time_us"]
    live: dict[int, str] = {}
    changes: list[tuple[int, str, int, int]] = []
    before: Counter[str] = Counter()
    reserved = 0
    for entry in trace:
        address, size, now = entry["addr"], entry["size"], entry["time_us"]
        match entry["action"]:
            case "alloc":
                live[address] = line_of(entry.get("frames", ()), own_lines)
                changes.append((now, live[address], size, 0))
            case "free_completed":
                line = live.pop(address, None)
                if line is None:
                    line = NO_LINE
                    before[line] += size
                changes.append((now, line, -size, 0))
            case "segment_alloc":
                reserved += size
                changes.append((now, NO_LINE, 0, size))
            case "segment_free":
                reserved -= size
                changes.append((now, NO_LINE, 0, -size))
    at_end = 0
    for segment in snapshot["segments"]:
        at_end += segment["total_size"]
        for block in segment["blocks"]:
            if block["state"] != "inactive" and block["address"] not in live:
                line = line_of(block.get("frames", ()), own_lines)
                before[line] += block["requested_size"]
    yield begin, NO_LINE, 0, at_end - reserved
    for line, size in before.items():
        yield begin, line, size, 0
    yield from changes


def curves(
    snapshot: Mapping[str, Any], own_lines: bool, largest: int, points: int
) -> Curves:
    """Replay the snapshot into curves of ``points`` values.

    The ``largest`` lines by their highest active bytes have a curve of their own.
    """
    rows = list(steps(snapshot, own_lines))
    time = np.array([row[0] for row in rows], float)
    seconds = (time - time[0]) / 1e6
    names = list(dict.fromkeys(row[1] for row in rows))
    owner = np.array([names.index(row[1]) for row in rows])
    active = np.array([row[2] for row in rows])
    # From each interval the moment with the most active bytes, so that no peak is lost
    # and all curves are of the same moment.
    total = np.cumsum(active)
    edges = np.searchsorted(seconds, np.linspace(0, seconds[-1], points + 1)[:-1])
    moments = [
        start + int(np.argmax(total[start:end]))
        for start, end in zip(edges, [*edges[1:], len(total)], strict=True)
        if end > start
    ]

    def sampled(changes: np.ndarray) -> np.ndarray:
        """Return the running sum of the changes at the chosen moments."""
        sums: np.ndarray = np.cumsum(changes)[moments]
        return sums

    by_line = {
        name: sampled(np.where(owner == index, active, 0))
        for index, name in enumerate(names)
    }
    order = sorted(by_line, key=lambda name: -int(by_line[name].max()))
    # What is there most of the time, such as weights, goes to the bottom.
    steady = sorted(order[:largest], key=lambda name: -np.median(by_line[name]))
    lines = {name: by_line[name] for name in steady}
    rest = [by_line[name] for name in order[largest:]]
    if rest:
        lines[OTHERS] = np.sum(rest, axis=0)
    reserved = sampled(np.array([row[3] for row in rows]))
    return Curves(seconds[moments], lines, reserved)


def draw(data: Curves, title: str) -> Figure:
    """Return the figure: stacked areas of active, and reserved above them."""
    figure = Figure(figsize=(11, 5.5), layout="constrained")
    axes = figure.subplots()
    stack = [values / MIB for values in data.lines.values()]
    axes.set_prop_cycle(color=colormaps["tab20"](range(20)))
    axes.stackplot(
        data.seconds, stack, labels=list(data.lines), step="post", linewidth=0
    )
    axes.fill_between(
        data.seconds,
        np.sum(stack, axis=0),
        data.reserved / MIB,
        step="post",
        color="#dddddd",
        label="cache",
    )
    axes.step(
        data.seconds, data.reserved / MIB, "k", where="post", lw=1, label="reserved"
    )
    axes.set(title=title, xlabel="seconds since the recording began")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} MiB"))
    axes.margins(x=0)
    axes.set_ylim(bottom=0)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1],
        labels[::-1],
        title="active, by creating line",
        loc="center left",
        bbox_to_anchor=(1, 0.5),
        fontsize="small",
        frameon=False,
    )
    return figure


def main() -> None:
    """Parse the arguments, read the dump and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dump", type=Path, help="what mlxmem.dump() wrote")
    parser.add_argument("picture", type=Path, help=".png, .svg or .pdf")
    parser.add_argument("--lines", type=int, default=9, help="lines with own colour")
    parser.add_argument("--points", type=int, default=1500, help="points in time")
    parser.add_argument("--title", default="", help="above the picture")
    parser.add_argument("--own-lines", action="store_true", help="outside MLX's files")
    options = parser.parse_args()

    with options.dump.open("rb") as file:
        snapshot = pickle.load(file)
    if not any(snapshot["device_traces"]):
        parser.error(f"{options.dump} has no events to draw")
    options.picture.parent.mkdir(parents=True, exist_ok=True)
    data = curves(snapshot, options.own_lines, options.lines, options.points)
    figure = draw(data, options.title)
    figure.savefig(options.picture, dpi=110)
    print(f"{options.picture}, from {options.dump}")


if __name__ == "__main__":
    main()
