"""Failed allocations: what is known of them, and the dump that is made at once.

MLX's CPU backend does not look at what its allocator returned, and crashes. So the
dump is written inside the call that failed, before it returns.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import os
from collections.abc import Callable

from mlxmem import _hook
from mlxmem.events import Mark, OutOfMemory
from mlxmem.units import format_bytes


def dump_on_failure(path: str, dump: Callable[[str], object]) -> None:
    """Dump to `path` whenever an allocation fails from now on; the last one stays.

    Parameters
    ----------
    path : str
    dump : callable
        Writes the recording to the path that it gets.
    """
    # A later change of the working directory must not move the file.
    target = os.path.abspath(path)

    def handle() -> None:
        failed = "MLX could not allocate memory"
        try:
            failed = f"MLX could not allocate {format_bytes(ooms()[-1].size)}"
            dump(target)
            _say(f"{failed}; what was recorded until then is in {path}")
        except KeyboardInterrupt:
            _thread.interrupt_main()  # MLX's allocator is no place for it
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}".rstrip(": ")
            _say(f"{failed}, and {path} could not be written ({reason})")

    _hook.set_failure_handler(handle)
    # The interpreter takes no new threads when it ends.
    atexit.unregister(ignore_failures)
    atexit.register(ignore_failures)


def ignore_failures() -> None:
    """Dump no more when an allocation fails; it is noted all the same."""
    _hook.set_failure_handler(None)


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
    # Not through sys.stderr, whose lock another thread may hold.
    with contextlib.suppress(OSError):
        os.write(2, f"mlxmem: {line}\n".encode(errors="backslashreplace"))
