"""What the sdist and the wheel hold, and that the one is enough for the other.

Which files are mlxmem's is what git says. The sdist is made of a copy in which there
lies also what a used clone has.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

import pytest
from checks import missing, needed

import mlxmem

ROOT = Path(__file__).resolve().parents[2]
NAME = f"mlxmem-{mlxmem.__version__}"
# Kept in the repository, of no use without it.
LEFT_OUT = (".ci/", ".github/", ".gitignore")
MADE_BY_SETUPTOOLS = {
    "PKG-INFO",
    "setup.cfg",
    "src/mlxmem.egg-info/PKG-INFO",
    "src/mlxmem.egg-info/SOURCES.txt",
    "src/mlxmem.egg-info/dependency_links.txt",
    "src/mlxmem.egg-info/entry_points.txt",
    "src/mlxmem.egg-info/not-zip-safe",
    "src/mlxmem.egg-info/requires.txt",
    "src/mlxmem.egg-info/top_level.txt",
}
# What tests, builds, editors and recordings leave behind.
LITTER = (
    "build/lib/mlxmem/events.py",
    "csrc/__pycache__/of.cpython-311.pyc",
    "dist/mlxmem-0.0.0.tar.gz",
    "examples/out.pickle",
    "out.pickle",
    "src/mlxmem/_interner.c",
    "src/mlxmem/_native.cpython-311-x86_64-linux-gnu.so",
    "src/mlxmem/_pickle_writer.c",
    "tests/__pycache__/books.cpython-311.pyc",
    ".venv/pyvenv.cfg",
    ".mypy_cache/CACHEDIR.TAG",
    ".ruff_cache/CACHEDIR.TAG",
)
MODULES = (
    "mlxmem/_columns",
    "mlxmem/_interner",
    "mlxmem/_module_calls",
    "mlxmem/_native",
    "mlxmem/_pickle_scan",
    "mlxmem/_pickle_writer",
    "mlxmem/cache/_replay",
)
# Sources of the compiled modules: nobody needs them once these are there.
COMPILED_FROM = (".h", ".pyx")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def run(command: list[str], cwd: Path, **variables: str) -> str:
    """Run it without what leads to this checkout and return what it printed."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        command,
        cwd=cwd,
        env=environment | variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    """Return the files of the repository."""
    try:
        return run(["git", "ls-files"], ROOT).splitlines()
    except (AssertionError, OSError):
        missing("this is no clone of mlxmem's repository, or there is no git")


@pytest.fixture(scope="module")
def sdist(tracked: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build it, of a clone in which somebody has worked."""
    needed("Cython")
    needed("setuptools")
    clone = tmp_path_factory.mktemp("clone")
    for name in tracked:
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, clone / name)
    for name in LITTER:
        assert name not in tracked
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).write_text("")
    out = tmp_path_factory.mktemp("sdist")
    build = f"from setuptools import build_meta; build_meta.build_sdist({str(out)!r})"
    run([sys.executable, "-c", build], clone)
    (made,) = out.iterdir()
    return made


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build it of the sdist alone."""
    out = tmp_path_factory.mktemp("wheel")
    options = ["--no-build-isolation", "--no-deps", "--no-index", "--quiet"]
    pip = [sys.executable, "-m", "pip", "wheel", *options]
    run([*pip, "-w", str(out), str(sdist)], out)
    (made,) = out.iterdir()
    return made


def test_the_sdist_has_the_files_of_the_repository(
    sdist: Path, tracked: list[str]
) -> None:
    # GIVEN the files of the repository, without what serves it alone
    wanted = {name for name in tracked if not name.startswith(LEFT_OUT)}
    assert {"LICENSE", "csrc/attach.cpp", "src/mlxmem/_interner.pyx"} <= wanted

    # WHEN the sdist is opened
    with tarfile.open(sdist) as archive:
        members = [m for m in archive.getmembers() if not m.isdir()]

    # THEN it has these and what setuptools adds, all in one folder, and no litter
    assert sdist.name == f"{NAME}.tar.gz"
    assert {member.isfile() for member in members} == {True}
    assert {PurePosixPath(member.name).parts[0] for member in members} == {NAME}
    found = {member.name.partition("/")[2] for member in members}
    assert found - wanted == MADE_BY_SETUPTOOLS
    assert wanted - found == set()


def test_the_wheel_has_what_runs(wheel: Path, tracked: list[str]) -> None:
    # GIVEN the files under src that nothing is compiled from, and the modules
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    wanted = {
        name.removeprefix("src/")
        for name in tracked
        if name.startswith("src/") and not name.endswith(COMPILED_FROM)
    }
    wanted |= {module + suffix for module in MODULES}
    wanted |= {
        f"{NAME}.dist-info/{name}"
        for name in (
            "METADATA",
            "RECORD",
            "WHEEL",
            "entry_points.txt",
            "licenses/LICENSE",
            "top_level.txt",
        )
    }

    # WHEN the wheel is opened
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if not name.endswith("/")}

    # THEN it has these
    assert found == wanted


def test_the_wheel_of_the_sdist_records(wheel: Path, tmp_path: Path) -> None:
    # GIVEN the wheel, in a folder of its own
    pip = [sys.executable, "-m", "pip", "install", "--quiet"]
    place = tmp_path / "installed"
    options = ["--no-deps", "--no-index", "--target", str(place)]
    run([*pip, *options, str(wheel)], tmp_path)
    command = [sys.executable, str(place / "bin" / "mlxmem")]

    # WHEN its command runs
    version = run([*command, "--version"], tmp_path, PYTHONPATH=str(place))
    text = run([*command, "doctor", "--json"], tmp_path, PYTHONPATH=str(place))
    where = "import mlxmem, mlxmem_command as c; print(mlxmem.__file__, c.__file__)"
    files = run([sys.executable, "-c", where], tmp_path, PYTHONPATH=str(place))

    # THEN it is that wheel which runs, and records
    assert files.split() == [
        str(place / "mlxmem" / "__init__.py"),
        str(place / "mlxmem_command.py"),
    ]
    assert version == f"mlxmem, version {mlxmem.__version__}\n"
    report = json.loads(text)
    assert (report["works"], report["problem"]) == (True, None)
