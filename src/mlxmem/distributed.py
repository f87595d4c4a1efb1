"""Which rank of a distributed program this process is.

Read from the variables that `mlx.launch` and mpirun set, as MLX reads them:
`mx.distributed.init()` would know, too, but it connects the ranks.
"""

from __future__ import annotations

import json
import os
import stat
import warnings
from typing import NamedTuple

_HOSTS = ("MLX_HOSTFILE", "MLX_IBV_DEVICES")  # ring, jaccl: files with a list of ranks
MOST_RANKS = 1 << 16

_written: dict[str, int] = {}  # real path -> mtime (ns) after this process's last dump


class Rank(NamedTuple):
    """A rank, and how many there are, None where that is not known."""

    rank: int
    world_size: int | None

    def __str__(self) -> str:
        if self.world_size is None:
            return f"rank {self.rank}"
        return f"rank {self.rank} of {self.world_size}"


def current() -> Rank | None:
    """Return the rank of this process; None where it is not part of a group."""
    rank = _number(os.environ.get("MLX_RANK"))
    if rank is not None:
        size = _number(os.environ.get("MLX_WORLD_SIZE"))  # nccl
        if size is None:
            size = next(filter(None, map(_listed, _HOSTS)), None)
    else:
        rank = _number(os.environ.get("OMPI_COMM_WORLD_RANK"))
        size = _number(os.environ.get("OMPI_COMM_WORLD_SIZE"))
    if rank is None:
        return None
    return Rank(rank, size if size is not None and rank < size else None)


def with_rank(path: str, rank: Rank) -> str:
    """Put a rank before the suffix of a path: out.pickle -> out.rank0.pickle."""
    stem, suffix = os.path.splitext(path)
    return f"{stem}.rank{rank.rank}{suffix}"


def warn_if_shared(path: str | os.PathLike[str], since_us: int) -> None:
    """Warn if another process wrote a file that this rank is going to replace.

    Ranks run the same program, so that each dumps to the same path unless its rank
    is part of it. Two that write at the same moment are not noticed.

    Parameters
    ----------
    path : str or os.PathLike
    since_us : int
        When the recording began, microseconds since the Unix epoch; what is older
        is of another run.
    """
    rank = current()
    if rank is None or rank.world_size == 1:
        return
    modified = _modified(path)
    if modified is None or modified < since_us * 1000:
        return
    if _written.get(os.path.realpath(path)) == modified:
        return
    name = os.fspath(path)
    warnings.warn(
        f"{rank} replaces {name!r}, which another process wrote since the recording "
        f"began; put the rank in the name, such as {with_rank(name, rank)!r}",
        stacklevel=3,
    )


def note_written(path: str | os.PathLike[str]) -> None:
    """Remember that what is at a path now is this process's own."""
    modified = _modified(path)
    if modified is not None and current() is not None:
        _written[os.path.realpath(path)] = modified


def _modified(path: str | os.PathLike[str]) -> int | None:
    """Return when a plain file was modified, nanoseconds; None if there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns if stat.S_ISREG(status.st_mode) else None


def _number(value: str | None) -> int | None:
    # Digits alone: int() takes " 1", "+1" and "1_0", too.
    if value is None or not value.isascii() or not value.isdigit():
        return None
    number = int(value[:10])
    return number if number < MOST_RANKS else None


def _listed(variable: str) -> int | None:
    """Return how many ranks the file that a variable names lists."""
    name = os.environ.get(variable)
    if not name:
        return None
    try:
        with open(name, encoding="utf-8") as file:
            text = file.read().strip()
        hosts = json.loads(text) if text else [[]]  # mlx.launch -n 1 writes no list
    except (OSError, ValueError, RecursionError):
        return None
    return len(hosts) if isinstance(hosts, list) else None
