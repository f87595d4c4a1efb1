"""mlxmem compiles and links for macOS, and the library is what dyld expects there.

zig has a macOS SDK's headers and its list of what libSystem exports. Its own libc++ is
linked in, where on a Mac that of the system is loaded.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import cross
import pytest
from checks import HINT, missing, needed

LIBSYSTEM = "/usr/lib/libSystem.B.dylib"
PAGE = 0x4000
WRITE, EXECUTE = 2, 4  # VM_PROT_WRITE, VM_PROT_EXECUTE
# operator new and delete, and what names the image's beginning.
OF_ZIG = ("__Zn", "__Zd", "___dso_handle", "__mh_dylib_header")
# Asked from macOS by a name of its own, and what Linux has for it.
OF_MACOS = {
    "_clock_gettime_nsec_np",
    "_host_statistics64",
    "_pipe",
    "_pthread_threadid_np",
    "_vm_protect",
    "_vm_read_overwrite",
    "_vm_region_64",
}
OF_LINUX = {"_madvise", "_mprotect", "_pread", "_sem_init", "_syscall"}


def compile_for_macos(source: Path, out: Path, *flags: str) -> str:
    """Return what the compiler says, "" when all is well."""
    try:
        cross.compile_object(source, out, *flags)
    except cross.ToolMissingError as error:
        missing(f"{error}: {HINT}")
    except subprocess.CalledProcessError as error:
        return str(error.stdout)
    return ""


@pytest.fixture(scope="module")
def dylib(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the native library, without a warning."""
    needed("setuptools")
    try:
        return cross.build_native_library(tmp_path_factory.mktemp("macos") / "n.dylib")
    except cross.ToolMissingError as error:
        missing(f"{error}: {HINT}")
    except subprocess.CalledProcessError as error:
        pytest.fail(error.stdout or str(error), pytrace=False)


@pytest.fixture(scope="module")
def image(dylib: Path) -> Any:
    """Read it."""
    fat = needed("lief").MachO.parse(str(dylib))
    assert len(fat) == 1
    return fat.at(0)


def test_it_exports_the_functions_of_the_headers_and_nothing_else(image: Any) -> None:
    # GIVEN what the headers declare for Python
    declared = cross.declared_functions()
    assert {"mlxmem_attach", "mlxmem_catch_termination"} <= declared

    # WHEN the library is linked for macOS
    exported = {symbol.name for symbol in image.exported_symbols}

    # THEN these are its exports, but for those of zig's libc++ and linker
    own = {name for name in exported if not name.startswith(OF_ZIG)}
    assert own == {f"_{name}" for name in declared}


def test_it_is_for_arm64_from_macos_14_on(image: Any) -> None:
    # GIVEN the library

    # WHEN its header is read
    version = image.build_version

    # THEN it is a library for the processor and the oldest system that MLX supports
    assert image.header.cpu_type == image.header.CPU_TYPE.ARM64
    assert image.header.file_type == image.header.FILE_TYPE.DYLIB
    assert version.platform == version.PLATFORMS.MACOS
    assert version.minos == [14, 0, 0]


def test_it_asks_macos_and_only_libsystem(image: Any) -> None:
    # GIVEN the library

    # WHEN it is read what it loads and imports
    loaded = {
        command.name
        for command in image.libraries
        if command.command != command.TYPE.ID_DYLIB
    }
    imported = {symbol.name for symbol in image.imported_symbols}

    # THEN all is libSystem's, and macOS's own where Linux has another function
    assert loaded == {LIBSYSTEM}
    assert imported >= OF_MACOS
    assert not imported & OF_LINUX


def test_no_page_of_it_is_code_and_writable(image: Any) -> None:
    # GIVEN the library's segments, in pages of a Mac
    segments = list(image.segments)
    assert all(segment.virtual_address % PAGE == 0 for segment in segments)

    # WHEN those with code are looked at
    code = [s for s in segments if s.init_protection & EXECUTE]

    # THEN there is one, and it can't become writable
    assert [segment.name for segment in code] == ["__TEXT"]
    assert not any((s.init_protection | s.max_protection) & WRITE for s in code)
    assert not any(
        s.max_protection & EXECUTE and s.max_protection & WRITE for s in segments
    )


def test_a_function_that_macos_14_lacks_is_refused(tmp_path: Path) -> None:
    # GIVEN a call that came later
    source = tmp_path / "newer.cpp"
    source.write_text(
        "#include <string.h>\n"
        "char* newer(const char* text) { return strchrnul(text, 32); }\n"
    )

    # WHEN it is compiled as the library is
    said = compile_for_macos(source, tmp_path / "newer.o", "-std=c++17")

    # THEN the compiler says so
    assert "'strchrnul' is only available on macOS 15.4" in said


def test_the_cython_modules_compile(tmp_path: Path) -> None:
    """With this machine's Python, whose pyconfig.h is its own system's."""
    # GIVEN the C and C++ that Cython makes
    needed("Cython")
    extensions = cross.extensions_on(cross.MACOS)
    del extensions["mlxmem._native"]
    includes = sysconfig.get_paths()["include"]
    if not Path(includes, "Python.h").exists():
        missing(f"{sys.executable} has no headers")
    said = {}
    for name, extension in extensions.items():
        (source,) = extension["sources"]
        suffix = ".cpp" if extension["language"] == "c++" else ".c"
        made = tmp_path / Path(source).with_suffix(suffix).name
        cython = [sys.executable, "-m", "cython", "-3", "-o", str(made), source]
        subprocess.run(
            [*cython, *(["--cplus"] if suffix == ".cpp" else [])],
            cwd=cross.ROOT,
            check=True,
        )

        # WHEN it is compiled for macOS
        flags = [*cross.flags_of(extension), f"-I{includes}"]
        said[name] = compile_for_macos(made, tmp_path / "module.o", *flags)

    # THEN nothing is amiss
    assert said == dict.fromkeys(extensions, "")
