"""The chart alone, as a Plotly figure: for notebooks."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mlxmem.reports.grouping import group
from mlxmem.reports.history import History, Ints
from mlxmem.units import format_bytes

# The page's colours for areas, and the one for the rest; see view.css.
COLOURS = (
    "#4477aa",
    "#ee7733",
    "#228833",
    "#aa3377",
    "#ccbb44",
    "#66ccee",
    "#cc6677",
    "#44aa99",
    "#8877cc",
    "#997700",
    "#99ddaa",
    "#775544",
)
_REST = "#a3abb8"
_LONGEST = 60


def figure(
    history: History, by: str = "line", *, areas: int = 8, bins: int = 600
) -> Any:
    """Draw active memory as stacked areas.

    Parameters
    ----------
    history : History
    by : str
        One of `grouping.KEYS`.
    areas : int
        How many groups have an area of their own; the rest is summed.
    bins : int
        Stretches of the recording; each shows the moment where it was highest.

    Returns
    -------
    plotly.graph_objects.Figure
        Entries on the horizontal axis, bytes on the vertical one.

    Raises
    ------
    ValueError
        `by` is no key.
    """
    # Plotly takes half a second to load; who renders a page does not need this part.
    import plotly.graph_objects as go

    picked = _pick(history.active, bins)
    labels, values = _stacked(history, by, areas, picked)
    x = np.append(picked, len(history))
    chart = go.Figure()
    for place, (label, row) in enumerate(zip(labels, values, strict=True)):
        is_rest = place >= areas
        chart.add_scatter(
            x=x,
            y=np.append(row, row[-1]),
            name=_plain(_shorten(label)),
            stackgroup="active",
            line={"width": 0, "shape": "hv"},
            fillcolor=_REST if is_rest else COLOURS[place % len(COLOURS)],
            text=[
                f"{_plain(label)}<br>{format_bytes(int(b))}" for b in (*row, row[-1])
            ],
            hoverinfo="text",
        )
    highest = _pick(history.reserved, bins)
    reserved = [history.reserved_after(at) for at in highest.tolist()]
    chart.add_scatter(
        x=np.append(highest, len(history)),
        y=[*reserved, reserved[-1]],
        name="reserved",
        mode="lines",
        line={"width": 1.4, "shape": "hv", "color": "#808890"},
        text=[f"reserved {format_bytes(b)}" for b in (*reserved, reserved[-1])],
        hoverinfo="text",
    )
    for mark in history.marks[:40]:
        chart.add_vline(
            mark.at - 0.5,
            line={"width": 1, "dash": "dot"},
            annotation={"text": _plain(_shorten(mark.name)), "font": {"size": 10}},
        )
    lines = [(call.at, "dashdot") for call in history.calls[:40]]
    lines += [(mark.at, "longdash") for mark in history.crossings[:40]]
    for at, dash in lines:
        chart.add_vline(at - 0.5, line={"width": 1, "dash": dash})
    for oom in history.ooms:
        chart.add_vline(oom.at - 0.5, line={"width": 2, "color": "#d0021b"})
    ticks = _ticks(max(history.reserved_peak, history.peak, 1))
    chart.update_layout(
        title={
            "text": f"Peak {format_bytes(history.peak)}, "
            f"reserved peak {format_bytes(history.reserved_peak)}",
            "font": {"size": 15},
        },
        height=420,
        margin={"l": 80, "r": 20, "t": 50, "b": 40},
        xaxis={"title": "entry"},
        yaxis={
            "tickmode": "array",
            "tickvals": ticks,
            "ticktext": [format_bytes(tick) for tick in ticks],
        },
        legend={"orientation": "h", "y": -0.2},
        hovermode="closest",
    )
    return chart


def fragment(history: History, by: str = "line", *, areas: int = 8) -> str:
    """Return `figure` as HTML for a place in another page, with Plotly in it.

    Parameters
    ----------
    history : History
    by : str
        One of `grouping.KEYS`.
    areas : int
        How many groups have an area of their own.

    Returns
    -------
    str
        A `<div>` and its scripts; nothing is loaded from anywhere.

    Raises
    ------
    ValueError
        `by` is no key.
    """
    chart = figure(history, by, areas=areas)
    html: str = chart.to_html(full_html=False, include_plotlyjs=True)
    return html


def _pick(column: Ints, bins: int) -> Ints:
    """Return the beginning and, of each bin, the highest and the last entry."""
    count = len(column)
    edges = np.unique(np.linspace(0, count, min(bins, count) + 1).astype(np.int64))
    best = [
        start + int(column[start:stop].argmax())
        for start, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
    ]
    return np.unique(np.array([-1, *best, *(edges[1:] - 1).tolist()], np.int64))


def _stacked(
    history: History, by: str, areas: int, picked: Ints
) -> tuple[list[str], npt.NDArray[np.int64]]:
    """Return the areas' labels, largest at the peak first, and bytes at `picked`."""
    groups = group(history, by)
    blocks = history.blocks
    at_peak = groups.total(blocks["size"], history.live(history.peak_at))
    order = np.argsort(-at_peak, kind="stable")
    shown = order[: max(areas, 0)]
    shown = shown[at_peak[shown] > 0]
    area_of = np.full(len(groups) or 1, len(shown), np.int64)
    area_of[shown] = np.arange(len(shown))
    area = area_of[groups.index]
    # Blocks count from the first picked entry at or after their own.
    change = np.zeros((len(shown) + 1, len(picked) + 1), np.int64)
    starts = np.searchsorted(picked, blocks["start"])
    ends = np.searchsorted(picked, blocks["end"])
    np.add.at(change, (area, starts), blocks["size"])
    np.subtract.at(change, (area, ends), blocks["size"])
    values = np.cumsum(change, axis=1)[:, :-1]
    labels = [groups.labels[place] for place in shown.tolist()]
    if not values[-1].any():
        return labels, values[:-1]
    return [*labels, f"{len(groups) - len(shown):,} others"], values


def _ticks(highest: int, wanted: int = 6) -> list[int]:
    step = 1
    while highest / step > wanted:
        step *= 2
    return list(range(0, highest + 1, step))


def _shorten(label: str) -> str:
    return label if len(label) <= _LONGEST else f"…{label[1 - _LONGEST :]}"


def _plain(label: str) -> str:
    """Escape what Plotly would take for tags and entities."""
    return label.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
