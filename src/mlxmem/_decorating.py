"""What the decorators of this package refuse."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def refuse_generator(func: Callable[..., Any], name: str, block: str) -> None:
    """Raise a TypeError for a generator function: its body runs after the call.

    Parameters
    ----------
    func : callable
        What is to be decorated.
    name, block : str
        The decorator as its user calls it, and the `with` block to write instead.
    """
    if inspect.isgeneratorfunction(func) or inspect.isasyncgenfunction(func):
        raise TypeError(
            f"{name} can't decorate the generator {func.__qualname__!r}; use "
            f"`with {block}:` around the loop that consumes it"
        )
