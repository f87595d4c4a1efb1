"""The page: template, style, scripts and a history's numbers in one HTML file."""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import json
import re
from importlib import resources

import plotly.offline

from mlxmem.reports.history import History
from mlxmem.view.payload import describe

# In this order they make one script.
_SCRIPTS = (
    "format.js",
    "model.js",
    "areas.js",
    "chart.js",
    "tree.js",
    "tables.js",
    "cache.js",
    "panel.js",
    "page.js",
)


def render(history: History, by: str = "line") -> str:
    """Make the page of a history.

    Parameters
    ----------
    history : History
    by : str
        One of `grouping.KEYS`: what the areas are when the page opens.

    Returns
    -------
    str
        An HTML document that needs nothing else: no file, no network. What comes from
        the recording is in it as data only, never as markup or code.

    Raises
    ------
    ValueError
        `by` is no key.
    """
    description, columns = describe(history, by)
    library = plotly.offline.get_plotlyjs()
    script = "\n".join(_file(name) for name in _SCRIPTS)
    parts = {
        "title": html.escape(history.name),
        "policy": _policy(library, script),
        "style": _file("view.css"),
        "description": _as_data(json.dumps(description, separators=(",", ":"))),
        "columns": base64.b64encode(columns).decode("ascii"),
        "library": library,
        "script": script,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda hole: parts[hole[1]], _file("view.html"))


@functools.cache
def _file(name: str) -> str:
    return (resources.files(__package__) / name).read_text("utf-8")


def _as_data(text: str) -> str:
    """Escape JSON so that no tag can begin or end in it."""
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _policy(*scripts: str) -> str:
    """Allow these scripts alone, and no connection to anywhere.

    The page escapes what it shows; should a name get through, it does not run.
    """
    hashes = " ".join(
        "'sha256-"
        + base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()
        + "'"
        for s in scripts
    )
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
