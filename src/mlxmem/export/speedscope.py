"""Flame graphs for speedscope: sampled profiles whose weights are bytes.

The format: https://github.com/jlfwong/speedscope, src/lib/file-format-spec.ts.
"""

from __future__ import annotations

import json
from typing import Any, BinaryIO

from mlxmem._version import __version__
from mlxmem.export.weights import CHOICES, TITLES, by_stack
from mlxmem.reports.history import Frame, History

_SCHEMA = "https://www.speedscope.app/file-format-schema.json"


def write(history: History, file: BinaryIO, *, at: str = "peak") -> None:
    """Write a profile for each of `weights.CHOICES`; `at` is shown first.

    Parameters
    ----------
    history : History
    file : binary file
    at : str
        As for `weights.chosen`.
    """
    frames: dict[Frame, int] = {}
    profiles: list[dict[str, Any]] = []
    shown = 0
    for choice in CHOICES:
        samples, weights = [], []
        for weight in by_stack(history, choice):
            places = [frames.setdefault(f, len(frames)) for f in weight.stack]
            samples.append(places)
            weights.append(weight.size)
        if choice == at:
            shown = len(profiles)
        elif not samples:
            continue
        profiles.append(
            {
                "type": "sampled",
                "name": f"bytes {TITLES[choice]}",
                "unit": "bytes",
                "startValue": 0,
                "endValue": sum(weights),
                "samples": samples,
                "weights": weights,
            }
        )
    document = {
        "$schema": _SCHEMA,
        "exporter": f"mlxmem@{__version__}",
        "name": history.name,
        "activeProfileIndex": shown,
        "shared": {"frames": [_frame(frame) for frame in frames]},
        "profiles": profiles,
    }
    file.write(json.dumps(document, separators=(",", ":")).encode())


def _frame(frame: Frame) -> dict[str, Any]:
    if not frame.line:
        return {"name": frame.function}  # a label instead of a frame
    return {"name": frame.function, "file": frame.filename, "line": frame.line}
