"""SIGTERM as a call that returns; see csrc/termination.h."""

from __future__ import annotations

import ctypes

from mlxmem._hook import _native

_native.mlxmem_catch_termination.restype = ctypes.c_int
_native.mlxmem_wait_for_termination.restype = None
_native.mlxmem_release_termination.restype = None


def catch() -> bool:
    """Let SIGTERM end `wait` instead of the process; a second one ends that.

    Returns
    -------
    bool
        False where SIGTERM is ignored or the program handles it.
    """
    return bool(_native.mlxmem_catch_termination())


def wait() -> None:
    """Wait for a SIGTERM, without the GIL."""
    _native.mlxmem_wait_for_termination()


def release() -> None:
    """Let SIGTERM kill again, unless the program handles it by now."""
    _native.mlxmem_release_termination()
