"""Begin to record as soon as the program has imported mlx.core.

Runs in every Python that `mlxmem run` starts, most of which never import MLX: it
imports nothing that Python itself has not imported by then.
"""

from __future__ import annotations

import atexit
import os
import sys
from types import ModuleType
from typing import Any

# Set by `mlxmem run`, described in mlxmem.commands.run.
PREFIX = "MLXMEM_RUN_"

_startup_pid = os.getpid()
_startup_path = list(sys.path)
_options: dict[str, str] = {}
_session: Any = None  # the mlxmem.run_session.RunSession, once mlx.core is there


class _Finder:
    """Notices that mlx.core was imported; finds nothing by itself."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return what the other finders find, and be told when it is loaded."""
        if name != "mlx.core":
            return None
        for finder in sys.meta_path:
            find_spec = getattr(finder, "find_spec", None)
            if finder is self or find_spec is None:
                continue
            spec = find_spec(name, path, target)
            if spec is not None:
                self._watch(spec.loader)
                return spec
        return None

    def _watch(self, loader: Any) -> None:
        original = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            original(module)
            del loader.exec_module
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                _mlx_is_there(module)

        loader.exec_module = exec_module


def begin() -> None:
    """Take over what `mlxmem run` has left in the environment."""
    for name, value in os.environ.items():
        if name.startswith(PREFIX):
            _options[name[len(PREFIX) :].lower()] = value
    if "out" not in _options:
        return
    if "follow" not in _options:
        for name in _options:
            del os.environ[PREFIX + name.upper()]
        # The program sees the environment that it would have without us.
        if "pythonpath" in _options:
            os.environ["PYTHONPATH"] = _options["pythonpath"]
        else:
            os.environ.pop("PYTHONPATH", None)
    sys.meta_path.insert(0, _Finder())
    # Registered first, so it runs after whatever the program registers.
    atexit.register(_finish)


def _mlx_is_there(module: ModuleType) -> None:
    global _session
    if os.getpid() != int(_options["pid"]) and "follow" not in _options:
        return
    # The import system does this when the import is done.
    sys.modules["mlx"].core = module  # type: ignore[attr-defined]
    try:
        _session = _import_session().begin(_options, _startup_pid)
    except Exception as error:
        _say(f"not recording: {type(error).__name__}: {error}")
        _options["quiet"] = "1"


def _import_session() -> Any:
    """Import mlxmem.run_session, from where this file is."""
    import importlib.util

    # The program's folder may hold modules of the same name as one that we need.
    now = list(sys.path)
    sys.path[:] = _startup_path
    try:
        if "mlxmem" not in sys.modules:
            folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
            spec = importlib.util.spec_from_file_location(
                "mlxmem",
                os.path.join(folder, "__init__.py"),
                submodule_search_locations=[folder],
            )
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules["mlxmem"] = module
            try:
                spec.loader.exec_module(module)
            except BaseException:
                del sys.modules["mlxmem"]
                raise
        return importlib.import_module("mlxmem.run_session")
    finally:
        sys.path[:] = now


def _finish() -> None:
    if _session is not None:
        _session.finish()
    elif os.getpid() == int(_options["pid"]):
        _say("nothing was recorded, since the program did not import mlx.core")


def _say(text: str) -> None:
    if "quiet" in _options:
        return
    if "rank" in _options:
        text = f"{_options['rank']}: {text}"
    try:
        sys.__stderr__.write(f"mlxmem: {text}\n")  # type: ignore[union-attr]
        sys.__stderr__.flush()  # type: ignore[union-attr]
    except (AttributeError, OSError, ValueError):
        pass
