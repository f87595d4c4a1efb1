"""Snapshot files, read without trusting them.

A pickle can name any function and have it called while it is read. Here a scan lets
only plain data through, and the unpickler that reads it then refuses to look up any
name: nothing in a file is ever executed.
"""

from __future__ import annotations

import mmap
import os
import pickle
from typing import Any, BinaryIO, NoReturn

from mlxmem import _pickle_scan
from mlxmem._version import __version__
from mlxmem.dump_file import check_path
from mlxmem.events import no_collector
from mlxmem.extras import FORMAT
from mlxmem.frames import text


class SnapshotError(ValueError):
    """A file that can't be read as a memory snapshot; the message is one line."""


# What reading a dict from anywhere, which can hold anything anywhere, can raise.
DAMAGE = (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError)


def damaged(name: str, error: Exception) -> SnapshotError:
    """Return the error that says of a file what was found wrong inside it."""
    what = " ".join(text(str(error)).split())
    return SnapshotError(
        f"{name}: not a memory snapshot, {type(error).__name__}: {what}"
    )


class _PlainData(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a memory snapshot that mlxmem or PyTorch wrote.

    Parameters
    ----------
    path : str or path-like
        A pickle of `mlxmem.dump` or of `torch.cuda.memory._dump_snapshot`.

    Returns
    -------
    dict
        With lists `segments` and `device_traces`; what is in them is not checked yet.

    Raises
    ------
    SnapshotError
        The file is unreadable, truncated, of another kind, of a later mlxmem's format,
        or wants to run code. The message names the file and says which.
    """
    name = text(check_path(path))
    try:
        with open(path, "rb") as file:
            return _check(_load(file, name), name)
    except OSError as error:
        raise SnapshotError(f"{name}: {error.strerror or error}") from error


def _load(file: BinaryIO, name: str) -> Any:
    if os.fstat(file.fileno()).st_size == 0:
        raise SnapshotError(f"{name}: the file is empty")
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        wrong = _pickle_scan.scan(data)
    if wrong:
        reason, offset = wrong
        raise SnapshotError(f"{name}: not a memory snapshot, {reason} (byte {offset})")
    try:
        with no_collector():
            return _PlainData(file).load()
    # What a damaged pickle raises depends on where it is damaged.
    except Exception as error:
        what = " ".join(text(str(error)).split()) or type(error).__name__
        raise SnapshotError(f"{name}: not a memory snapshot, {what}") from error


def _check(snapshot: Any, name: str) -> dict[str, Any]:
    if not isinstance(snapshot, dict):
        kind = type(snapshot).__name__
        raise SnapshotError(f"{name}: not a memory snapshot, but a {kind}")
    for key in ("segments", "device_traces"):
        if not isinstance(snapshot.get(key), list):
            raise SnapshotError(
                f"{name}: not a memory snapshot, it has no list {key!r}; "
                "mlxmem.dump() and torch.cuda.memory._dump_snapshot() write some"
            )
    extra = snapshot.get("mlxmem")
    _check_format(extra, name)
    devices = extra.get("devices") if isinstance(extra, dict) else None
    for part in devices if isinstance(devices, list) else ():
        _check_format(part, name)
    return snapshot


def _check_format(extra: Any, name: str) -> None:
    """Raise SnapshotError if what mlxmem added is of a format not known here."""
    if not isinstance(extra, dict) or "format" not in extra:
        return  # PyTorch's
    found = extra["format"]
    if type(found) is int and found == FORMAT:
        return
    # Anything else would have to be made fit for one line first.
    known = type(found) is int and 0 <= found < 1_000_000
    raise SnapshotError(
        f"{name}: is of {f'format {found}' if known else 'a format'} that mlxmem "
        f"{__version__} does not know; update mlxmem"
    )
