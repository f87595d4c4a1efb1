"""Collapsed stacks: a line per stack, frames from the outermost, then the bytes."""

from __future__ import annotations

from typing import BinaryIO

from mlxmem.export.weights import by_stack
from mlxmem.reports.history import Frame, History


def write(history: History, file: BinaryIO, *, at: str = "peak") -> None:
    """Write the bytes of each stack.

    Parameters
    ----------
    history : History
    file : binary file
    at : str
        As for `weights.chosen`.
    """
    for weight in by_stack(history, at):
        if weight.size:
            names = ";".join(map(_name, weight.stack))
            file.write(f"{names} {weight.size}\n".encode())


def _name(frame: Frame) -> str:
    name = f"{frame.function} ({frame.filename}:{frame.line})"
    # Semicolons separate frames, and a line is a stack.
    plain = (name if frame.line else frame.function).replace(";", ":")
    return "".join(c if c.isprintable() else " " for c in plain)
