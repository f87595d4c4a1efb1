"""Failed allocations: what is known of them, and the dump that is made at once.

MLX's CPU backend does not look at what its allocator returned, and crashes. So the
dump is written inside the call that failed, before it returns.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import os
import sys
from collections.abc import Callable
from typing import NamedTuple

from mlxmem import _hook
from mlxmem.events import Mark, OutOfMemory
from mlxmem.units import format_bytes


class _Target(NamedTuple):
    """A file that is written when an allocation fails."""

    shown: str  # as the user has given it
    path: str
    dump: Callable[[str], object]
    pid: int


_of_session: _Target | None = None
_always: _Target | None = None


def dump_on_failure(path: str, dump: Callable[[str], object]) -> None:
    """Dump to `path` when an allocation of this session fails; the last one stays.

    Parameters
    ----------
    path : str
    dump : callable
        Writes the recording to the path that it gets.
    """
    global _of_session
    _of_session = _target(path, dump)
    _handle_failures()


def always_dump_on_failure(path: str, dump: Callable[[str], object]) -> None:
    """Dump to `path`, too, in this and every later session of this process.

    Parameters
    ----------
    path : str
    dump : callable
        Writes the recording to the path that it gets.
    """
    global _always
    _always = _target(path, dump)
    _handle_failures()


def ignore_failures() -> None:
    """Dump no more where `dump_on_failure` said so; failures are noted all the same."""
    global _of_session
    _of_session = None
    if _always is None or _always.pid != os.getpid():
        _hook.set_failure_handler(None)


def _target(path: str, dump: Callable[[str], object]) -> _Target:
    # A later change of the working directory must not move the file.
    return _Target(path, os.path.abspath(path), dump, os.getpid())


def _handle_failures() -> None:
    _hook.set_failure_handler(_dump_all)
    # The interpreter takes no new threads when it ends.
    atexit.unregister(_ignore_all)
    atexit.register(_ignore_all)


def _ignore_all() -> None:
    global _always
    _always = None
    ignore_failures()


def _dump_all() -> None:
    targets = {
        target.path: target
        for target in (_always, _of_session)
        # A forked child must not replace its parent's file.
        if target is not None and target.pid == os.getpid()
    }
    for target in targets.values():
        _dump(target)


def _dump(target: _Target) -> None:
    failed = "MLX could not allocate memory"
    try:
        failed = f"MLX could not allocate {format_bytes(ooms()[-1].size)}"
        target.dump(target.path)
        _say(f"{failed}; what was recorded until then is in {target.shown}")
    except KeyboardInterrupt:
        _thread.interrupt_main()  # MLX's allocator is no place for it
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}".rstrip(": ")
        _say(f"{failed}, and {target.shown} could not be written ({reason})")


def ooms() -> list[OutOfMemory]:
    """Return the last failed allocations of the running or last session.

    Returns
    -------
    list of OutOfMemory
        The oldest first, 64 at most.
    """
    return [
        OutOfMemory(
            mark=Mark(at, time_us, thread, message.decode(errors="replace")),
            size=size,
            free=free,
            active=active,
            cache=cache,
            traceback_id=traceback_id,
            primitive_id=primitive_id,
            stream=stream,
        )
        for (
            at,
            time_us,
            size,
            free,
            active,
            cache,
            traceback_id,
            stream,
            thread,
            primitive_id,
            _,
            message,
        ) in _hook.copy_failures().tolist()
    ]


def _say(line: str) -> None:
    if sys.__stderr__ is None:
        return  # closed at the start: the number may be another file's by now
    # Not through sys.stderr, whose lock another thread may hold.
    with contextlib.suppress(OSError):
        os.write(2, f"mlxmem: {line}\n".encode(errors="backslashreplace"))
