"""Python stacks as the readers of snapshots want them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from mlxmem.events import Frame

Entry = dict[str, Any]

# Both readers hide frames whose name or file name contains one of these.
_HIDDEN_NAMES = re.compile(
    "unwind::unwind|CapturedTraceback::gather|gather_with_cpp|_start|"
    "PyEval_|PyObject_|PyFunction_"
)
_HIDDEN_FILES = re.compile(
    r"core/boxing|/Register|/Redispatch|pythonrun\.c|Modules/main\.c|Objects/call\.c|"
    r"Objects/methodobject\.c|pycore_ceval\.h|ceval\.c|cpython/abstract\.h"
)
_ZERO_WIDTH_SPACE = "\u200b"


class Frames:
    """Stacks as the readers want them, one object per distinct stack."""

    def __init__(self, resolve: Callable[[int], list[Frame] | None]) -> None:
        self._resolve = resolve
        self._frames: dict[Frame, Entry] = {}
        self._stacks: dict[tuple[Frame, ...], list[Entry]] = {}

    def stack(self, traceback_id: int) -> list[Entry] | None:
        """Return the frames of an id, innermost first, or None."""
        frames = self._resolve(traceback_id) if traceback_id else None
        return self.of(frames) if frames else None

    def of(self, frames: Sequence[Frame]) -> list[Entry]:
        """Return frames that are given outermost first, innermost first."""
        key = tuple(frames)
        known = self._stacks.get(key)
        if known is None:
            known = [self._frame(frame) for frame in reversed(key)]
            self._stacks[key] = known
        return known

    def label(self, text: str) -> list[Entry]:
        """Return a stack of one frame that says why there is no real one."""
        frame = ("mlxmem", text, 0)
        return self._stacks.setdefault((frame,), [self._frame(frame)])

    def _frame(self, frame: Frame) -> Entry:
        known = self._frames.get(frame)
        if known is None:
            filename, name, line = frame
            known = self._frames[frame] = {
                "name": _HIDDEN_NAMES.sub(_unhide, text(name)),
                "filename": _HIDDEN_FILES.sub(_unhide, text(filename)),
                "line": int(line),
            }
        return known


def _unhide(match: re.Match[str]) -> str:
    # Looks the same in the viewer, but its filter does not find it any more.
    return match[0][0] + _ZERO_WIDTH_SPACE + match[0][1:]


def text(raw: str) -> str:
    """Make a string of printable characters alone; others are escaped.

    Names come from the recorded program, or from a stranger's file: they must stay on
    their line, send no commands to a terminal, and be fit for UTF-8.
    """
    if raw.isprintable():
        return raw
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in raw
    )


def shown(raw: str) -> str:
    """Undo what a snapshot does to names for the viewer, and make them printable."""
    return text(raw.replace(_ZERO_WIDTH_SPACE, ""))
