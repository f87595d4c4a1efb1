"""The compiled modules; everything else is in pyproject.toml."""

import os
import sys
from glob import glob

from Cython.Build import cythonize
from setuptools import Extension, setup

# As MLX's own wheels: a Python that is made for older systems and for two processors
# would build for those, too, where there is no MLX.
if sys.platform == "darwin":
    target = os.environ.setdefault("MACOSX_DEPLOYMENT_TARGET", "14.0")
    os.environ.setdefault("ARCHFLAGS", "-arch arm64")
    os.environ.setdefault("_PYTHON_HOST_PLATFORM", f"macosx-{target}-arm64")

# What runs at every node calls other libraries without a stub in between.
direct_calls = ["-fno-plt"] if sys.platform == "linux" else []

# Loaded with ctypes, never imported, so it has no PyInit. It includes neither MLX
# nor Python headers: one build serves every supported MLX.
native = Extension(
    "mlxmem._native",
    sources=sorted(glob("csrc/*.cpp")),
    depends=sorted(glob("csrc/*.h")),
    include_dirs=["csrc"],
    language="c++",
    # initial-exec: the thread-local state is read on every allocation.
    extra_compile_args=[
        "-std=c++17",
        "-O2",
        "-fvisibility=hidden",
        "-ftls-model=initial-exec",
        *direct_calls,
    ],
)

interner = Extension(
    "mlxmem._interner",
    sources=["src/mlxmem/_interner.pyx"],
    depends=sorted(glob("src/mlxmem/*.h")),
    include_dirs=["src/mlxmem"],
    extra_compile_args=["-O3", *direct_calls],
)

pickle_writer = Extension(
    "mlxmem._pickle_writer",
    sources=["src/mlxmem/_pickle_writer.pyx"],
    extra_compile_args=["-O3"],
)

pickle_scan = Extension(
    "mlxmem._pickle_scan",
    sources=["src/mlxmem/_pickle_scan.pyx"],
    extra_compile_args=["-O3"],
)

module_calls = Extension(
    "mlxmem._module_calls", sources=["src/mlxmem/_module_calls.pyx"]
)

columns = Extension(
    "mlxmem._columns",
    sources=["src/mlxmem/_columns.pyx"],
    extra_compile_args=["-O3"],
)

cache_replay = Extension(
    "mlxmem.cache._replay",
    sources=["src/mlxmem/cache/_replay.pyx"],
    depends=sorted(glob("src/mlxmem/cache/*.h")),
    include_dirs=["src/mlxmem/cache"],
    language="c++",
    extra_compile_args=["-std=c++17", "-O2"],
)

setup(
    ext_modules=[
        native,
        *cythonize(
            [
                cache_replay,
                columns,
                interner,
                module_calls,
                pickle_scan,
                pickle_writer,
            ],
            build_dir="build/cython",
            compiler_directives={"language_level": "3"},
        ),
    ]
)
