# cython: language_level=3
"""What stands in for a module's `__call__`: compiled, so that it is in no stack."""


def in_module(original, paths, enter):
    """A function that calls `original`, a `__call__` of some class.

    Parameters
    ----------
    original : object
        What the class had.
    paths : dict of int to str
        Path by id() of the module.
    enter : callable
        Takes the path of the module that runs from now on and returns the last one.
    """
    binds = hasattr(type(original), "__get__")

    def __call__(self, *args, **kwargs):
        call = original.__get__(self, type(self)) if binds else original
        path = paths.get(id(self))
        if path is None:
            return call(*args, **kwargs)
        before = enter(path)
        try:
            return call(*args, **kwargs)
        finally:
            enter(before)

    return __call__
