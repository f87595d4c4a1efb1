"""SIGTERM and SIGHUP as a call that returns; see csrc/termination.h."""

from __future__ import annotations

import ctypes

from mlxmem._hook import _native

_native.mlxmem_catch_termination.restype = ctypes.c_int
_native.mlxmem_wait_for_termination.restype = ctypes.c_int
_native.mlxmem_release_termination.restype = None


def catch() -> bool:
    """Let SIGTERM and SIGHUP end `wait` instead of the process.

    The first of them does, and a second SIGTERM; a third one ends the process.

    Returns
    -------
    bool
        False where both are ignored or the program handles them.
    """
    return bool(_native.mlxmem_catch_termination())


def wait() -> int:
    """Wait for one of them, without the GIL.

    Returns
    -------
    int
        The number of the signal that came first.
    """
    return int(_native.mlxmem_wait_for_termination())


def release() -> None:
    """Let them kill again, unless the program handles them by now."""
    _native.mlxmem_release_termination()
