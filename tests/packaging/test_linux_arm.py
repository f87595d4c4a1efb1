"""mlxmem compiles and links for Linux on arm64; nobody has run it there.

zig has glibc's headers and the names that each version of it exports.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import cross
import pytest
from checks import HINT, missing, needed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Build the native library, without a warning, and read it."""
    needed("setuptools")
    lief = needed("lief")
    out = tmp_path_factory.mktemp("linux") / "native.so"
    try:
        cross.build_native_library(out, cross.LINUX_ARM)
    except cross.ToolMissingError as error:
        missing(f"{error}: {HINT}")
    except subprocess.CalledProcessError as error:
        pytest.fail(error.stdout or str(error), pytrace=False)
    return lief.ELF.parse(str(out))


def glibc_versions(library: Any) -> set[tuple[int, ...]]:
    return {
        tuple(map(int, version.name.removeprefix("GLIBC_").split(".")))
        for needed_of in library.symbols_version_requirement
        for version in needed_of.get_auxiliary_symbols()
        if version.name.startswith("GLIBC_")
    }


def test_it_exports_the_functions_of_the_headers(library: Any) -> None:
    # GIVEN what the headers declare for Python
    declared = cross.declared_functions()
    assert {"mlxmem_attach", "mlxmem_catch_termination"} <= declared

    # WHEN the library is linked for Linux on arm64
    assert library.header.machine_type.name == "AARCH64"
    exported = {symbol.name for symbol in library.exported_symbols}

    # THEN these are mlxmem's functions in it
    assert {name for name in exported if name.startswith("mlxmem_")} == declared


def test_it_asks_nothing_of_a_newer_glibc_than_mlx(library: Any) -> None:
    # GIVEN the library

    # WHEN it is read what it loads, and which versions of glibc it names
    loaded = {Path(name).name for name in library.libraries}
    versions = glibc_versions(library)

    # THEN it is glibc alone, of no newer version than that of MLX's wheels
    assert loaded <= {"libc.so.6", "libm.so.6", "ld-linux-aarch64.so.1"}
    assert (2, 17) in versions  # arm64's first
    assert max(versions) <= (2, 35)
