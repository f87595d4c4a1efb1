"""Errors that are mlxmem's own; bad arguments raise ValueError or TypeError."""

from __future__ import annotations


class UnsupportedMLXError(RuntimeError):
    """The MLX of this process failed a check, and nothing was changed.

    The message names the failed check, the MLX version and the versions known to
    work.
    """
