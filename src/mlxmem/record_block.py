"""Record a block or a function: `mlxmem.record`."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import threading
import warnings
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, NamedTuple, TypeVar, cast

from mlxmem._decorating import refuse_generator
from mlxmem.dump_file import check_path, check_target
from mlxmem.recorder import (
    check_options,
    disable,
    dump,
    enable,
    is_enabled,
    session_number,
)

_Function = TypeVar("_Function", bound=Callable[..., Any])

_lock = threading.RLock()
_shared = 0  # number of the session that record() began
_open = 0  # blocks inside it


class _Entered(NamedTuple):
    pid: int
    session: int


def _enter(options: Mapping[str, Any]) -> _Entered:
    global _shared, _open
    with _lock:
        if not is_enabled():
            enable(**options)
            _shared, _open = session_number(), 0
        if session_number() == _shared:
            _open += 1
        return _Entered(os.getpid(), session_number())


def _leave(entered: _Entered) -> bool:
    """Leave a block; False when its session is gone."""
    global _open
    with _lock:
        if session_number() != entered.session:
            return False
        if entered.session == _shared:
            _open -= 1
            if _open == 0:
                disable()
        return True


# A forked child finds the lock free.
os.register_at_fork(
    before=_lock.acquire,
    after_in_parent=_lock.release,
    after_in_child=_lock.release,
)


class record(contextlib.ContextDecorator):  # noqa: N801 - used like a function
    """Record the body of a `with` block, or each call of a function.

    On the way out, also when the body raised, recording stops and the snapshot is
    dumped; a dump that fails then is a warning, and the body's exception goes on.
    Inside a running session it starts none of its own and dumps that one at its end.
    Blocks that overlap share one session, which ends with the last of them; one that
    `enable` began goes on.

    Parameters
    ----------
    path : str or os.PathLike, optional
        Where to dump; without it the events stay for `events()` and `snapshot()`.
    **options
        Those of `enable`; inside a running session they have no effect.

    Raises
    ------
    TypeError, ValueError
        An argument is bad; the message names it. Nothing was started.

    Examples
    --------
    >>> with mlxmem.record("out.pickle"):
    ...     train()
    """

    def __init__(
        self, path: str | os.PathLike[str] | None = None, **options: Any
    ) -> None:
        if callable(path):
            raise TypeError(
                "record() takes a path: write @mlxmem.record() with parentheses"
            )
        if path is not None:
            check_path(path)
        unknown = sorted(options.keys() - {"max_entries", "stacks", "dump_on_oom"})
        if unknown:
            raise TypeError(
                f"record() has no option {unknown[0]!r}, only max_entries, stacks and "
                "dump_on_oom"
            )
        check_options(**options)
        self.path = path
        self.options = options
        self._entered: list[_Entered] = []  # one object may be entered twice

    def __enter__(self) -> record:
        # Better now than after hours of training.
        if self.path is not None:
            check_target(self.path)
        self._entered.append(_enter(self.options))
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        entered = self._entered.pop()
        if os.getpid() != entered.pid:
            return  # a forked child has no session to dump
        if not _leave(entered):
            warnings.warn(
                "another mlxmem.enable() ended the session of this record(), whose "
                "events are gone; nothing was dumped",
                RuntimeWarning,
                stacklevel=2,
            )
            return
        if self.path is None:
            return
        try:
            dump(self.path)
        except OSError as error:
            if exc is None:
                raise
            # What the body raised matters more; the events are still there.
            warnings.warn(
                f"mlxmem could not write {os.fspath(self.path)!r}: {error}",
                RuntimeWarning,
                stacklevel=2,
            )

    def _recreate_cm(self) -> record:
        return type(self)(self.path, **self.options)

    def __call__(self, func: _Function) -> _Function:
        """Decorate a function or a coroutine function.

        Raises
        ------
        TypeError
            `func` is a generator function: its body runs after the call has returned.
        """
        refuse_generator(func, "record()", "mlxmem.record()")
        if inspect.iscoroutinefunction(func):

            @functools.wraps(func)
            async def recorded(*args: Any, **kwargs: Any) -> Any:
                with self._recreate_cm():
                    return await func(*args, **kwargs)

            return cast(_Function, recorded)
        return super().__call__(func)
