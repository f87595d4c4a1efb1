"""Qualified names of code objects on Python 3.10, which has no ``co_qualname``."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from inspect import CO_NEWLOCALS, CO_OPTIMIZED
from types import CodeType, FunctionType


def find_names(wanted: Sequence[CodeType], names: dict[int, str]) -> None:
    """Find the qualified names of code objects, as 3.11's compiler makes them.

    Looked at, in this order; the first that knows a code object decides:

    1. module code is called ``<module>``;
    2. live functions that the garbage collector tracks and that are no closures,
       by their ``__qualname__``, unless its last part is not the code's own name
       (``functools.wraps`` copies the name of what it wraps);
    3. code objects nested in those found, by the compiler's rule: the parent's
       name, then ``.<locals>`` if the parent is a function, then its own name;
    4. the ``__qualname__`` of any other live function with that code;
    5. the bare ``co_name``: the function is gone or frozen (``gc.freeze``), and
       so is the code that it was defined in.

    Parameters
    ----------
    wanted : sequence of code
        Code objects to name.
    names : dict of int to str
        Names by ``id(code)``; every wanted one is there afterwards.
    """
    files = {code.co_filename for code in wanted}
    found: dict[int, tuple[CodeType, str]] = {}
    # Whether the name ends with the code's own, the code, the name.
    doubtful: list[tuple[bool, CodeType, str]] = []
    for code in wanted:
        if code.co_name == "<module>":
            found[id(code)] = (code, "<module>")
    for function in gc.get_objects():
        if type(function) is not FunctionType:
            continue
        code = function.__code__
        if code.co_filename not in files:
            continue
        name = function.__qualname__
        own = name.rpartition(".")[2] == code.co_name
        if own and "<locals>" not in name:
            found[id(code)] = (code, name)
        else:
            doubtful.append((own, code, name))
    # Taken from the end: those that at least carry the code's own name first.
    doubtful.sort(key=lambda entry: entry[0])
    to_visit = list(found.values())
    while to_visit or doubtful:
        if not to_visit:
            # No parent is known for these: their own word, and go down again.
            _, code, name = doubtful.pop()
            if id(code) in found:
                continue
            found[id(code)] = (code, name)
            to_visit.append((code, name))
        code, name = to_visit.pop()
        if code.co_name == "<module>":
            prefix = ""
        elif code.co_flags & CO_OPTIMIZED and code.co_flags & CO_NEWLOCALS:
            prefix = name + ".<locals>."
        else:
            prefix = name + "."
        for child in code.co_consts:
            if type(child) is CodeType and id(child) not in found:
                entry = (child, prefix + child.co_name)
                found[id(child)] = entry
                to_visit.append(entry)
    for code in wanted:
        names[id(code)] = found[id(code)][1] if id(code) in found else code.co_name
