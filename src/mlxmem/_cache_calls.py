"""Notice at once when a call empties or trims MLX's cache."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

# mlx.core copied their C++ addresses when it was imported, so they are replaced as
# attributes. What a reference taken earlier does is booked at the next event.
NAMES = ("clear_cache", "set_cache_limit")

_replaced: list[tuple[Any, str, Any, Any]] = []  # module, name, original, replacement


def watch(mx: Any, called: Callable[[], Any]) -> None:
    """Call `called` after each call of these functions, until unwatch().

    Parameters
    ----------
    mx : module
        mlx.core; its submodule `metal` has aliases in some versions.
    called : callable
    """
    if _replaced:
        return
    for module in (mx, getattr(mx, "metal", None)):
        for name in NAMES:
            original = getattr(module, name, None)
            if original is not None:
                replacement = _after(original, called)
                setattr(module, name, replacement)
                _replaced.append((module, name, original, replacement))


def unwatch() -> None:
    """Put MLX's own functions back, unless another tool replaced them again."""
    while _replaced:
        module, name, original, replacement = _replaced.pop()
        if getattr(module, name, None) is replacement:
            setattr(module, name, original)


def _after(original: Any, called: Callable[[], Any]) -> Any:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        finally:
            called()

    return call
