"""Names for moments and stretches of a program: `mark` and `annotate`."""

from __future__ import annotations

import functools
import inspect
import operator
import os
import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar, cast

from mlxmem import _hook, _interner
from mlxmem._decorating import refuse_generator
from mlxmem.events import Mark, Range

_Function = TypeVar("_Function", bound=Callable[..., Any])

# As many as events by default: a training loop that runs for weeks marks its steps.
MOST = 100_000

_LONGEST = 200  # characters of a name, which stands in tables and charts


class _Open:
    """A range that has not ended."""

    __slots__ = ("name", "owner", "path", "session", "start", "thread")

    def __init__(self, name: str, owner: annotate, thread: _Thread) -> None:
        self.name = name
        self.owner = owner
        self.thread = thread
        self.path = (*thread.path, name)
        self.session, self.start = _now(name, thread)


class _Thread:
    """Where a thread is."""

    def __init__(self) -> None:
        self.id = threading.get_native_id()
        self.ranges: list[_Open] = []
        self.path: tuple[str, ...] = ()
        self.module = ""
        self.dirty = False  # another thread has closed one of its ranges

    def apply(self) -> None:
        """Tag what the calling thread creates from now on."""
        self.dirty = False
        ranges = self.path
        while True:
            id = _interner.intern_context((ranges, self.module))
            # No room for one more name: what is around it is better than nothing.
            if id or not ranges:
                _interner.set_context(id)
                return
            ranges = ranges[:-1]


class _Local(threading.local):
    def __init__(self) -> None:
        self.thread = _Thread()


class _Book:
    """Marks and ended ranges of one session, the last `MOST` of each."""

    def __init__(self) -> None:
        self.marks: deque[Mark] = deque(maxlen=MOST)
        self.ranges: deque[Range] = deque(maxlen=MOST)


# No locks: a signal handler may mark, too. Each step is one operation of a dict or
# deque, which the GIL makes atomic.
_local = _Local()
_books: dict[int, _Book] = {}  # by session; only the newest one stays
_open: dict[int, _Open] = {}  # by id()


def mark(name: str) -> None:
    """Name this moment of the recording, such as the beginning of a step.

    No effect while nothing is recording. The last 100,000 marks are kept.

    Parameters
    ----------
    name : str
        One line of text, of 200 characters at most.

    Raises
    ------
    TypeError, ValueError
        `name` is no name.

    Examples
    --------
    >>> for step in range(100):
    ...     mlxmem.mark(f"step {step}")
    ...     train_step()
    """
    name = _check_name(name, "mark")
    thread = _local.thread
    if thread.dirty:
        thread.apply()
    session, moment = _now(name, thread)
    if moment is not None:
        _book(session).marks.append(moment)


class annotate:  # noqa: N801 - used like a function
    """Name what happens in a `with` block, or in each call of a function.

    What is allocated inside carries the name, also when it is evaluated later: a
    range belongs to the arrays that its thread creates in it. Ranges nest; each
    thread has its own. The last 100,000 ranges are kept, and 65,536 different
    nestings of names: for numbers, `mark` is better.

    It costs next to nothing while nothing is recording. A range that is open when a
    recording begins is part of it from its first moment on; one that is open when it
    ends goes on to its end.

    Parameters
    ----------
    name : str
        One line of text, of 200 characters at most.

    Raises
    ------
    TypeError, ValueError
        `name` is no name.

    Notes
    -----
    A decorated coroutine function is in its range from its first step to its end. While
    it waits, so is whatever else runs on its thread: there is one nesting for each
    thread, not for each task. The same holds for a `with` block around an `await` or a
    `yield`. When another thread closes a generator that waits in such a block, the
    range ends there and then, but the first thread's allocations carry it until that
    thread calls `mark`, `annotate` or a tracked module again.

    Examples
    --------
    >>> with mlxmem.annotate("forward"):
    ...     logits = model(tokens)
    >>> @mlxmem.annotate("optimizer")
    ... def update(): ...
    """

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        if callable(name):
            raise TypeError('annotate() takes a name: write @mlxmem.annotate("name")')
        self.name = _check_name(name, "annotate")

    def __enter__(self) -> annotate:
        thread = _local.thread
        before = thread.path
        opened = _Open(self.name, self, thread)
        key = id(opened)
        try:
            _open[key] = opened
            thread.ranges.append(opened)
            thread.path = opened.path
            thread.apply()
        except BaseException:
            # Near the recursion limit. Nothing is called here: that may fail as well.
            if key in _open:
                del _open[key]  # noqa: RUF051
            if thread.ranges and thread.ranges[-1] is opened:
                del thread.ranges[-1]
            thread.path = before
            thread.dirty = True
            raise
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        thread = _local.thread
        opened = _last(thread.ranges, self)
        if opened is None:
            # A generator can leave its block on another thread.
            opened = _last(list(_open.values()), self)
            if opened is None:
                return
        _open.pop(id(opened), None)
        owner = opened.thread
        # Not always the last one: tasks leave theirs in any order.
        if opened in owner.ranges:
            owner.ranges.remove(opened)
            owner.path = tuple(each.name for each in owner.ranges)
        if owner is thread:
            thread.apply()
        else:
            # Only a thread itself can change what its allocations carry.
            owner.dirty = True
        session = _interner.session_number()
        ended = _ended(opened, session)
        if ended is not None:
            _book(session).ranges.append(ended)

    def __call__(self, func: _Function) -> _Function:
        """Decorate a function or a coroutine function.

        Raises
        ------
        TypeError
            `func` is a generator function: its body runs after the call has returned.
        """
        refuse_generator(func, "annotate()", "mlxmem.annotate(...)")
        if inspect.iscoroutinefunction(func):

            @functools.wraps(func)
            async def annotated_coroutine(*args: Any, **kwargs: Any) -> Any:
                with annotate(self.name):
                    return await func(*args, **kwargs)

            return cast(_Function, annotated_coroutine)

        @functools.wraps(func)
        def annotated(*args: Any, **kwargs: Any) -> Any:
            with annotate(self.name):
                return func(*args, **kwargs)

        return cast(_Function, annotated)


def collect() -> tuple[tuple[Mark, ...], tuple[Range, ...]]:
    """Return the marks and ranges of the running or last session.

    Returns
    -------
    marks : tuple of Mark
    ranges : tuple of Range
        In the order of their beginning, outer ones first. What is open ends where the
        recording stands now.
    """
    session = _interner.session_number()
    book = _books.get(session) or _Book()
    ranges = list(book.ranges)
    for opened in list(_open.values()):
        still = _ended(opened, session, open=True)
        if still is not None:
            ranges.append(still)
    ranges.sort(key=_outer_first)
    marks = sorted(book.marks, key=operator.attrgetter("timestamp_us", "at"))
    return tuple(marks), tuple(ranges)


def enter_module(path: str) -> str:
    """Let the calling thread be in a module; return the one where it was."""
    thread = _local.thread
    before, thread.module = thread.module, path
    try:
        thread.apply()
    except BaseException:  # near the recursion limit
        thread.module = before
        thread.dirty = True
        raise
    return before


def _outer_first(each: Range) -> tuple[int, int, int]:
    # Those that were open when the session began all start at 0.
    return each.start.timestamp_us, each.start.at, len(each.path)


def _now(name: str, thread: _Thread) -> tuple[int, Mark | None]:
    """Session and moment; no moment while nothing is recording."""
    session = _interner.session_number()
    if not session or not _hook.is_enabled():
        return session, None
    at, us = _hook.position()
    return session, Mark(at, us, thread.id, name)


def _ended(opened: _Open, session: int, open: bool = False) -> Range | None:
    """Let a range end where `session` is now; None if it has no part in it."""
    start = opened.start
    if opened.session != session:
        start = Mark(0, 0, opened.thread.id, opened.name)
    if start is None:
        return None
    at, us = _hook.position()
    end = Mark(at, us, start.thread_id, opened.name)
    return Range(start, end, opened.path, open or not _hook.is_enabled())


def _book(session: int) -> _Book:
    book = _books.get(session)
    if book is None:
        book = _books.setdefault(session, _Book())
        for old in list(_books):
            if old < session:
                _books.pop(old, None)
    return book


def _last(ranges: list[_Open], owner: annotate) -> _Open | None:
    return next((each for each in reversed(ranges) if each.owner is owner), None)


def _check_name(name: str, who: str) -> str:
    if not isinstance(name, str):
        raise TypeError(f"{who}() takes a name, a str, not {name!r}")
    if len(name) > _LONGEST:
        raise ValueError(
            f"{who}() takes a name of at most {_LONGEST} characters, not {len(name):,}"
        )
    if not name.strip() or not name.isprintable():
        raise ValueError(f"{who}() takes a name of one printable line, not {name!r}")
    return str.__str__(name)  # of a subclass, the plain text


def _forget_parent() -> None:
    # What is open here goes on in the child, in the sessions that it begins.
    _books.clear()
    _open.clear()
    _local.thread.id = threading.get_native_id()
    for opened in _local.thread.ranges:
        opened.session, opened.start = _interner.session_number(), None
        _open[id(opened)] = opened


os.register_at_fork(after_in_child=_forget_parent)
