"""Attach to extension modules that are imported while a session records."""

from __future__ import annotations

import importlib.machinery
from collections.abc import Callable
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from types import ModuleType
from typing import Any

_original: Callable[..., ModuleType] | None = None
_replacement: Callable[..., ModuleType] | None = None


def watch(loaded: Callable[[], Any]) -> None:
    """Call `loaded` after each load of an extension module, until unwatch().

    `create_module` is where importlib loads the shared library, before any of the
    module's functions can run.
    """
    global _original, _replacement
    if _original is not None:
        return
    original = ExtensionFileLoader.create_module

    def create_module(self: ExtensionFileLoader, spec: ModuleSpec) -> ModuleType:
        module: ModuleType = original(self, spec)
        loaded()
        return module

    _original, _replacement = original, create_module
    importlib.machinery.ExtensionFileLoader.create_module = (  # type: ignore[method-assign]
        create_module
    )


def unwatch() -> None:
    """Put importlib's own function back, unless another tool replaced it again."""
    global _original, _replacement
    if _original is None:
        return
    if ExtensionFileLoader.create_module is _replacement:
        ExtensionFileLoader.create_module = _original  # type: ignore[method-assign]
    _original = _replacement = None
