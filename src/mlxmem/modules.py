"""Tag allocations with the module of a model that ran."""

from __future__ import annotations

import functools
import weakref
from types import TracebackType
from typing import TYPE_CHECKING, Any

from mlxmem import marks
from mlxmem._module_calls import in_module

if TYPE_CHECKING:
    import mlx.nn as nn

# By id(), since a module is an unhashable dict. The weak references remove both.
_paths: dict[int, str] = {}
_references: dict[int, weakref.ref[Any]] = {}


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

    def __init__(self, ids: list[int], classes: list[type]) -> None:
        self._ids = ids
        self._classes = classes

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
        ids, self._ids = self._ids, []
        classes, self._classes = self._classes, []
        for key in ids:
            _forget(key)
        for cls in classes:
            patched = _patched[cls]
            patched.users -= 1
            if patched.users == 0:
                del _patched[cls]
                patched.restore()


def track_modules(model: nn.Module) -> TrackedModules:
    """Tag what a model's modules create with their paths, like "layers.3.attention".

    Arrays that are created while a module runs carry its path, those of the model
    itself its class name, such as "Transformer". What `mlx.nn.value_and_grad` makes on
    the way back, outside any module, has none.

    Parameters
    ----------
    model : mlx.nn.Module
        Modules that it gets later are not tracked. One that it holds in two places
        has the path with fewer dots.

    Returns
    -------
    TrackedModules
        A context manager whose `remove()` puts everything back. Without it the model
        stays tracked for as long as it lives.

    Raises
    ------
    TypeError
        `model` is no module.

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
    ids: list[int] = []
    classes: dict[type, None] = {}
    for path, module in found:
        key = id(module)
        if key not in _references:
            _references[key] = weakref.ref(module, functools.partial(_forget, key))
            _paths[key] = path or type(module).__name__
            ids.append(key)
        # A __call__ can hand over to the one of its base class.
        for cls in type(module).__mro__:
            if "__call__" in cls.__dict__ and cls not in (dict, object):
                classes[cls] = None
    for cls in classes:
        if cls not in _patched:
            _patched[cls] = _Patched(cls)
        _patched[cls].users += 1
    return TrackedModules(ids, list(classes))


def _forget(key: int, reference: object = None) -> None:
    # Only the one that died: its id may belong to another module by now.
    if reference is None or _references.get(key) is reference:
        _references.pop(key, None)
        _paths.pop(key, None)
