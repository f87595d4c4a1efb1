"""Compiles mlxmem for another system on any machine, with zig's compiler.

What is compiled and with which flags is what setup.py says on that system.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WARNINGS = ("-Wall", "-Wextra", "-Wunguarded-availability", "-Werror")


@dataclass(frozen=True)
class Target:
    """A system to compile for, the oldest one."""

    zig: str  # how zig calls it
    platform: str  # what sys.platform is there
    complete: tuple[str, ...] = ()  # refuses to link a library that lacks a symbol


MACOS = Target("aarch64-macos.14.0", "darwin")
# MLX's wheels are manylinux_2_35.
LINUX_ARM = Target("aarch64-linux-gnu.2.35", "linux", ("-Wl,-z,defs",))

# setup() keeps what it was given; Cython is not called, and need not be there.
_READ_SETUP = """
import json, runpy, sys, types
import setuptools
build = types.ModuleType("Cython.Build")
build.cythonize = lambda extensions, **_: extensions
sys.modules["Cython"] = types.ModuleType("Cython")
sys.modules["Cython.Build"] = build
given = {}
setuptools.setup = given.update
sys.platform = sys.argv[1]
runpy.run_path("setup.py")
fields = (
    "name", "language", "sources", "include_dirs",
    "extra_compile_args", "extra_link_args",
)
print(json.dumps([
    {name: getattr(extension, name) for name in fields}
    for extension in given["ext_modules"]
]))
"""


class ToolMissingError(Exception):
    """There is nothing to compile with."""


def zig() -> list[str]:
    """Return the command that runs zig.

    Raises
    ------
    ToolMissingError
        Neither the package ziglang nor a program zig is there.
    """
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang"]
    program = shutil.which("zig")
    if program is None:
        raise ToolMissingError("neither the package ziglang nor zig is installed")
    return [program]


def extensions_on(target: Target) -> dict[str, dict[str, Any]]:
    """Return the extensions that setup.py builds there, by name."""
    done = subprocess.run(
        [sys.executable, "-c", _READ_SETUP, target.platform],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return {found["name"]: found for found in json.loads(done.stdout)}


def compile_object(
    source: Path, out: Path, *flags: str, target: Target = MACOS
) -> Path:
    """Compile a C or C++ file and return `out`; a warning is an error.

    Raises
    ------
    subprocess.CalledProcessError
        It does not compile; the compiler's output is in `stdout`.
    """
    compiler = "cc" if source.suffix == ".c" else "c++"
    _call(compiler, target, *WARNINGS, *flags, "-c", str(source), "-o", str(out))
    return out


def link(out: Path, *objects: Path, compiler: str = "cc") -> Path:
    """Link objects to a dylib and return `out`; what they lack is left to dyld.

    compiler: "c++" puts zig's libc++ in.
    """
    _call(
        compiler,
        MACOS,
        "-shared",
        "-Wl,-undefined,dynamic_lookup",
        "-o",
        str(out),
        *map(str, objects),
    )
    return out


def zig_library() -> Path:
    """Return the folder of zig's own sources."""
    done = subprocess.run(
        [*zig(), "env"], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    )
    found = re.search(r'\.lib_dir = "([^"]+)"', done.stdout)
    assert found
    return ROOT / found[1]


def _call(compiler: str, target: Target, *arguments: str) -> None:
    subprocess.run(
        [*zig(), compiler, "-target", target.zig, *arguments],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def flags_of(extension: dict[str, Any]) -> list[str]:
    """Return what setup.py has an extension's files compiled with."""
    includes = [f"-I{folder}" for folder in extension["include_dirs"]]
    return [*extension["extra_compile_args"], *includes]


def build_native_library(out: Path, target: Target = MACOS) -> Path:
    """Build the whole native library and return `out`.

    zig links its own libc++ into it, where the system has one; and it makes a dylib,
    where Python's own flags on a Mac make a bundle of the same objects.

    Raises
    ------
    ToolMissingError
        There is no zig.
    subprocess.CalledProcessError
        A file does not compile or a symbol is missing; see its `stdout`.
    """
    native = extensions_on(target)["mlxmem._native"]
    flags = flags_of(native)
    objects = out.with_suffix(".objects")
    objects.mkdir(parents=True, exist_ok=True)

    def compiled(source: str) -> str:
        made = objects / Path(source).with_suffix(".o").name
        return str(compile_object(Path(source), made, *flags, target=target))

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        made = list(pool.map(compiled, native["sources"]))
    flags = [*native["extra_link_args"], *target.complete]
    _call("c++", target, "-shared", *flags, "-o", str(out), *made)
    return out


def declared_functions() -> set[str]:
    """Return the names that csrc's headers say are exported."""
    text = "".join(path.read_text() for path in (ROOT / "csrc").glob("*.h"))
    return set(re.findall(r"^MLXMEM_API\b[^;(]*?\b(mlxmem_\w+)\(", text, re.MULTILINE))
