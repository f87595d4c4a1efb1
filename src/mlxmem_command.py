"""The command `mlxmem`; says what is wrong where mlxmem itself can't be imported.

Apart from the package, whose import is what fails then.
"""

from __future__ import annotations

import os
import platform
import sys
from importlib.util import find_spec


def main() -> None:
    """Run the command."""
    try:
        from mlxmem.cli import main as command
    except (ImportError, OSError) as error:  # OSError: ctypes, of the native library
        sys.exit(_explain(error))
    command(prog_name="mlxmem")


def _explain(error: Exception) -> str:
    spec = find_spec("mlxmem")
    places = spec.submodule_search_locations if spec else None
    folder = next(iter(places or ()), "")
    compiled = [
        name
        for name in (sorted(os.listdir(folder)) if folder else ())
        if name.endswith((".so", ".dylib", ".pyd"))
    ]
    return "\n".join(
        [
            f"mlxmem can't be imported: {type(error).__name__}: {error}",
            f"  system    {platform.platform()}, {platform.machine()}",
            f"  Python    {platform.python_version()}, {sys.executable}",
            f"  mlxmem    {folder or 'not found'}",
            f"  compiled  {', '.join(compiled) or 'nothing'}",
            "Compiled modules must be for this Python and this system: install mlxmem "
            "again with",
            f"  {sys.executable} -m pip install --force-reinstall --no-deps mlxmem",
            "or, from a clone, with a dot for its last word. If that does not help, "
            "please report it with this output.",
        ]
    )


if __name__ == "__main__":
    main()
