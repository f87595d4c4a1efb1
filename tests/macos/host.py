"""Compiles csrc as for macOS, with this machine's compiler, to run it here."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from checks import missing

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"


def build(out: Path, sources: Iterable[Path]) -> Path:
    """Compile and link a program, beside its object files, and return `out`."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        missing("there is no C++ compiler")
    flags = ("-std=c++17", "-O1", "-pthread", "-DMLXMEM_MACOS=1")
    includes = (f"-I{CSRC}", f"-I{HERE}")

    def compiled(source: Path) -> Path:
        made = out.with_name(f"{source.stem}.o")
        command = [compiler, *flags, *includes, "-c", source, "-o", made]
        subprocess.run(command, check=True)
        return made

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, sources))
    # attach() looks Python's functions up in the process.
    link = [compiler, "-rdynamic", "-pthread", "-o", out]
    subprocess.run([*link, *objects, "-ldl"], check=True)
    return out
