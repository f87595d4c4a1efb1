"""What the checks for macOS need, and what happens where it is missing.

They skip, and say how to get it. With MLXMEM_MACOS_CHECKS=required, as in CI, they
fail instead.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from typing import NoReturn

import pytest

REQUIRED = os.environ.get("MLXMEM_MACOS_CHECKS") == "required"
HINT = "`make test-macos` installs it, or pip install '.[macos-checks]'"


def missing(what: str) -> NoReturn:
    """Skip or fail, with a text such as "the package lief is not installed"."""
    if REQUIRED:
        pytest.fail(what)
    pytest.skip(what, allow_module_level=True)


def needed(module: str) -> ModuleType:
    """Import a module of the extra `macos-checks`."""
    try:
        return importlib.import_module(module)
    except ImportError:
        missing(f"the package {module} is not installed: {HINT}")
