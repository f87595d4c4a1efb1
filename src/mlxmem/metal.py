"""What a recording on Metal says of the machine and of MLX's allocator there."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from mlxmem.events import Setting

# Of MLX's sources: buffers below this size come from one heap, and a page is what
# larger ones are rounded up to. Bytes.
_ALLOCATOR = {
    "page_size": 16_384,
    "small_buffers_below": 256,
    "small_buffers_heap": 1 << 20,
}
_DEVICE = (
    "memory_size",
    "max_recommended_working_set_size",
    "max_buffer_length",
    "resource_limit",
)
NEAR_LIMIT = 0.9  # of the buffers that Metal allows


def settings(mx: Any, resources: Mapping[str, int] | None) -> dict[str, Setting]:
    """Return the part of the settings that only Metal has.

    Parameters
    ----------
    mx : module
        mlx.core.
    resources : mapping or None
        What `_hook.metal_resources()` returned.
    """
    info = _device_info(mx)
    found: dict[str, Setting] = {name: info[name] for name in _DEVICE if name in info}
    found |= _ALLOCATOR
    if resources is not None:
        names = {"wired_limit": "wired_limit_now"}  # the other is what calls have set
        found |= {names.get(name, name): value for name, value in resources.items()}
    return found


def _device_info(mx: Any) -> Mapping[str, Setting]:
    ask = getattr(mx, "device_info", None)
    # A recording must not fail for what it only shows.
    with contextlib.suppress(Exception):
        if ask is None:  # older versions
            info: Mapping[str, Setting] = mx.metal.device_info()
            return info
        try:
            info = ask(mx.gpu)  # the default device may be the CPU
        except TypeError:
            info = ask()
        return info
    return {}


def near_resource_limit(settings: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return how many buffers there are and may be; None unless that is close."""
    now, limit = settings.get("resources"), settings.get("resource_limit")
    if type(now) is not int or type(limit) is not int or limit <= 0:
        return None
    return (now, limit) if now >= NEAR_LIMIT * limit else None
