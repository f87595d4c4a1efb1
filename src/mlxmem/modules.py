"""Tag allocations with the module of a model that ran."""

from __future__ import annotations

import functools
import inspect
import os
import threading
import warnings
import weakref
from types import TracebackType
from typing import TYPE_CHECKING, Any

from mlxmem import marks
from mlxmem._module_calls import in_module

if TYPE_CHECKING:
    import mlx.nn as nn

# By id(), since a module is an unhashable dict.
_paths: dict[int, str] = {}  # what the replaced calls look up
_tracked: dict[int, _Tracked] = {}
# Held while handles come and go. Reentrant, since a finalizer may remove one.
_lock = threading.RLock()


class _Tracked:
    """A module that lives, and its paths in the models of handles, newest last."""

    def __init__(self, module: Any) -> None:
        self.key = id(module)
        self.by_handle: dict[object, str] = {}
        self.reference = weakref.ref(module, self._forget)

    def _forget(self, _: object) -> None:
        # Without the lock, since it can come at any time, and in any thread. Its id
        # may belong to another module by now.
        if _tracked.get(self.key) is self:
            _tracked.pop(self.key, None)
            _paths.pop(self.key, None)

    def apply(self) -> object:
        """Let the newest path be the module's; return the module to keep it alive."""
        module = self.reference()
        if module is not None:
            if self.by_handle:
                _tracked[self.key] = self
                _paths[self.key] = next(reversed(self.by_handle.values()))
            else:
                _tracked.pop(self.key, None)
                _paths.pop(self.key, None)
        return module


class _Patched:
    """A class whose `__call__` is replaced, for as long as a handle needs it."""

    def __init__(self, cls: type) -> None:
        self.cls = cls
        self.users = 0
        self.original = cls.__dict__["__call__"]
        self.replacement = functools.wraps(self.original)(
            in_module(self.original, _paths, marks.enter_module)
        )
        cls.__call__ = self.replacement  # type: ignore[method-assign]

    def restore(self) -> None:
        if self.cls.__dict__.get("__call__") is self.replacement:
            self.cls.__call__ = self.original  # type: ignore[method-assign]


_patched: dict[type, _Patched] = {}


class TrackedModules:
    """The handle of `track_modules`."""

    def __init__(self) -> None:
        self._modules: list[_Tracked] = []
        self._classes: list[_Patched] = []

    def __enter__(self) -> TrackedModules:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.remove()

    def remove(self) -> None:
        """Put everything back as it was; no effect when that is done already."""
        alive = []  # until the lock is free: what dies may call anything
        errors = []
        with _lock:
            modules, self._modules = self._modules, []
            classes, self._classes = self._classes, []
            for module in modules:
                module.by_handle.pop(self, None)
                alive.append(module.apply())
            for patched in classes:
                patched.users -= 1
                if patched.users == 0:
                    del _patched[patched.cls]
                    try:
                        patched.restore()
                    except Exception as error:
                        errors.append(error)
        if errors:
            raise errors[0]

    def _add(self, modules: list[tuple[str, Any]]) -> None:
        with _lock:
            for path, module in modules:
                # A __call__ can hand over to the one of its base class.
                for cls in type(module).__mro__:
                    self._patch(cls)
                tracked = _tracked.get(id(module)) or _Tracked(module)
                if self not in tracked.by_handle:
                    tracked.by_handle[self] = path or type(module).__name__
                    self._modules.append(tracked)
                    tracked.apply()

    def _patch(self, cls: type) -> None:
        if not _is_patchable(cls) or any(cls is each.cls for each in self._classes):
            return
        patched = _patched.get(cls)
        if patched is None:
            try:
                patched = _Patched(cls)
            except Exception as error:
                raise TypeError(
                    f"track_modules() can't replace the __call__ of {cls!r}, which "
                    f"refuses it ({error}); nothing was changed. Track the modules "
                    "that are of other classes one by one"
                ) from error
            _patched[cls] = patched
        patched.users += 1
        self._classes.append(patched)


def track_modules(model: nn.Module) -> TrackedModules:
    """Tag what a model's modules create with their paths, like "layers.3.attention".

    Arrays that are created while a module runs carry its path, those of the model
    itself its class name, such as "Transformer". What `mlx.nn.value_and_grad` makes on
    the way back, outside any module, has none.

    Parameters
    ----------
    model : mlx.nn.Module
        Modules that it gets later are not tracked. One that it holds in two places
        has the path with fewer dots, one that is part of several tracked models the
        path in the one that was tracked last.

    Returns
    -------
    TrackedModules
        A context manager whose `remove()` puts everything back. Without it the model
        stays tracked for as long as it lives.

    Raises
    ------
    TypeError
        `model` is no module, or a class in it refuses a new `__call__`. Nothing was
        changed.

    Warns
    -----
    UserWarning
        A `__call__` is a coroutine or generator function: its body runs when the call
        has returned. It is left alone, and what it creates carries no path of it.

    Notes
    -----
    The `__call__` of each class is replaced, and looks up which instance it has: an
    instance can have none of its own, and another class would show in type() and in
    pickles. Nothing of the instances changes. The replacement is compiled code, so
    it stands in no recorded stack.

    Examples
    --------
    >>> with mlxmem.track_modules(model):
    ...     train(model)
    """
    import mlx.nn as nn

    if not isinstance(model, nn.Module):
        raise TypeError(f"track_modules() takes an mlx.nn.Module, not {model!r}")
    untyped: Any = model  # MLX's named_modules() has no type hints
    found = sorted(
        untyped.named_modules(), key=lambda each: (each[0].count("."), each[0])
    )
    later = {cls for _, module in found for cls in type(module).__mro__ if _later(cls)}
    for name in sorted(f"{cls.__module__}.{cls.__qualname__}" for cls in later):
        warnings.warn(
            f"track_modules() can't tag what {name} creates: its __call__ is a "
            "coroutine or generator function, which runs after the call has returned. "
            "Use `with mlxmem.annotate(...):` inside it",
            stacklevel=2,
        )
    handle = TrackedModules()
    try:
        handle._add(found)
    except BaseException:
        handle.remove()
        raise
    return handle


def _is_patchable(cls: type) -> bool:
    return "__call__" in cls.__dict__ and cls not in (dict, object) and not _later(cls)


def _later(cls: type) -> bool:
    """Tell whether the body of a class's `__call__` runs after the call."""
    call = cls.__dict__.get("__call__")
    return (
        inspect.iscoroutinefunction(call)
        or inspect.isgeneratorfunction(call)
        or inspect.isasyncgenfunction(call)
    )


def _forget_parent() -> None:
    # Another thread of the parent may have held it.
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_forget_parent)
