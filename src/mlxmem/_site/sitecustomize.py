"""What a Python that `mlxmem run` starts runs first.

The folder of this file is on PYTHONPATH. It leaves sys.path again and hands over to
the environment's own sitecustomize, if there is one.
"""

import os
import sys

import _mlxmem_program  # type: ignore[import-not-found]  # beside this file

_folder = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [path for path in sys.path if os.path.abspath(path) != _folder]
sys.path_importer_cache.pop(_folder, None)
_mlxmem_program.begin()

# Without one this raises the ImportError that site expects then.
sys.modules.pop("sitecustomize", None)
import sitecustomize  # type: ignore[import-not-found]  # noqa: E402,F401
