"""Files that are either there as a whole or not at all, and a sign of life."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import secrets
import shutil
import stat
import sys
import time
from collections.abc import Callable
from typing import BinaryIO

_QUIET_S = 1.0  # a dump that is done by then says nothing
_EVERY_S = 0.1


def check_path(path: str | os.PathLike[str], name: str = "path") -> str:
    """Return a path as text; errors call it `name`.

    Raises
    ------
    TypeError
        `path` is no path, or one of bytes.
    ValueError
        `path` is empty or has a NUL in it.
    """
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(text, str):
        raise TypeError(f"{name} must be a str or path-like, not {path!r}")
    if not text or "\0" in text:
        raise ValueError(f"{name} must name a file, not {path!r}")
    return text


def check_target(path: str | os.PathLike[str]) -> None:
    """Check, without touching it, that a file can be at a path.

    Raises
    ------
    OSError
        The path is a directory, or its folder is missing or not writable.
    """
    if os.path.isdir(path):
        raise _os_error(errno.EISDIR, path)
    if not os.path.exists(path):
        folder = os.path.dirname(os.path.realpath(path))
        if not os.path.isdir(folder):
            raise _os_error(errno.ENOENT, path)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise _os_error(errno.EACCES, path)


def is_plain(path: str | os.PathLike[str]) -> bool:
    """Tell whether `replace` makes a plain file at a path, not writes to a device."""
    return not os.path.exists(path) or os.path.isfile(path)


def _os_error(number: int, path: str | os.PathLike[str]) -> OSError:
    return OSError(number, os.strerror(number), os.fspath(path))


def replace(
    path: str | os.PathLike[str], fill: Callable[[BinaryIO], object]
) -> pathlib.Path:
    """Write a file so that no half-written one is ever at `path`.

    Parameters
    ----------
    path : str or path-like
        The target; it is replaced if it exists. A device or pipe is written to.
    fill : callable
        Writes the content to the open binary file that it gets.

    Returns
    -------
    pathlib.Path
        `path`.

    Raises
    ------
    TypeError
        `path` is no path.
    OSError
        The file can't be written. Then, and when `fill` raises, whatever was at
        `path` is untouched.
    """
    check_path(path)
    target = pathlib.Path(path)
    mode = None
    with contextlib.suppress(FileNotFoundError):
        mode = target.stat().st_mode
        if stat.S_ISDIR(mode):
            raise _os_error(errno.EISDIR, target)
        if not stat.S_ISREG(mode):
            # A rename would put a plain file in the place of /dev/null.
            with open(target, "wb") as file:
                fill(file)
            return target
    real = pathlib.Path(os.path.realpath(target))  # a link keeps pointing there
    # A short name: the target's may be as long as the file system allows.
    temporary = real.with_name(_temporary_prefix() + secrets.token_hex(4))
    try:
        with open(temporary, "xb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), stat.S_IMODE(mode))
            fill(file)
        os.replace(temporary, real)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and error.filename == str(temporary):
            error.filename = str(target)  # the one that the caller knows
        raise
    return target


def check_folder(path: str | os.PathLike[str]) -> None:
    """Check, by making a file for a moment, that `replace` can write to a path.

    Raises
    ------
    OSError
        There can be no new file in its folder; permissions alone don't tell.
    """
    if not is_plain(path):
        return  # `replace` makes no file then
    folder = os.path.dirname(os.path.realpath(path))
    trial = os.path.join(folder, _temporary_prefix() + secrets.token_hex(4))
    with open(trial, "xb"):
        os.unlink(trial)


def remove_partial(path: str | os.PathLike[str]) -> None:
    """Remove what this process has half written for a path, if it can be done.

    Parameters
    ----------
    path : str or path-like
        What `replace` was called with.
    """
    folder = os.path.dirname(os.path.realpath(path))
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if name.startswith(_temporary_prefix()):
                os.unlink(os.path.join(folder, name))


def _temporary_prefix() -> str:
    return f".mlxmem-{os.getpid()}-"


class Progress:
    """One line on the terminal that goes away again.

    Only where stderr is a terminal, and only after a second. It never raises.

    Parameters
    ----------
    path : str or os.PathLike
        What is being written.

    Attributes
    ----------
    total : int
        Number of steps; 0 = not known yet.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        name = os.path.basename(os.fspath(path))
        # A name must not send commands to the terminal.
        self._name = "".join(c if c.isprintable() else "?" for c in name)
        self.total = 0
        self._done = 0
        self._shown = False
        self._next = time.monotonic() + _QUIET_S
        stream = sys.stderr
        self._stream = stream
        self._wanted = os.environ.get("TERM") != "dumb"
        try:
            self._wanted = self._wanted and stream is not None and stream.isatty()
        except (AttributeError, OSError, ValueError):
            self._wanted = False

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._shown:
            self._put("")

    def add(self, steps: int) -> None:
        """Count steps, and now and then say how far it is."""
        self._done += steps
        if self._wanted and time.monotonic() >= self._next:
            self._next = time.monotonic() + _EVERY_S
            self._shown = True
            share = 100 * self._done // self.total if self.total else 0
            self._put(f"mlxmem: writing {self._name} {share} %")

    def _put(self, line: str) -> None:
        width = shutil.get_terminal_size().columns
        try:
            # Return to the start of the line and clear it.
            self._stream.write(f"\r\x1b[K{line[: width - 1]}")
            self._stream.flush()
        except (AttributeError, OSError, ValueError):
            self._wanted = self._shown = False
