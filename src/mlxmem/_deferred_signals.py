"""Python's signal handlers, held back while the recording is written."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


@contextlib.contextmanager
def deferred(on_first_interrupt: Callable[[], object]) -> Iterator[None]:
    """Call no signal handler of the program in the block, but after it.

    The first Ctrl-C calls `on_first_interrupt`, the next one raises
    KeyboardInterrupt in the block. Handlers run in the main thread alone, so that
    nothing is to be done in another one.

    Parameters
    ----------
    on_first_interrupt : callable
    """
    handlers: dict[int, Any] = {}
    arrived: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        again = number in arrived
        if not again:
            arrived.append(number)
        if number == signal.SIGINT:
            if again:
                raise KeyboardInterrupt
            on_first_interrupt()

    with contextlib.suppress(ValueError):  # not the main thread
        for number in signal.valid_signals():
            handler: Any = signal.getsignal(number)
            if callable(handler):
                signal.signal(number, note)
                handlers[number] = handler
    try:
        yield
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)
        for each in arrived:
            # The program is at its end: to end it is no news any more.
            with contextlib.suppress(KeyboardInterrupt, SystemExit):
                signal.raise_signal(each)
