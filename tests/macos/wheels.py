"""MLX's two libraries for macOS, from the wheels that pip finds.

They are kept in build/macos-wheels, one folder for each wheel. A folder appears there
when it is complete, so that several test processes can make it at the same time.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KEPT_IN = ROOT / "build" / "macos-wheels"
VERSIONS = ("0.30.6", "0.31.2", "0.32.1", "0.32.4")
SYSTEMS = (14, 15, 26)
CORE = "core.cpython-311-darwin.so"
LIBMLX = "libmlx.dylib"
# By the project of the wheel.
_WANTED = {"mlx": f"mlx/{CORE}", "mlx_metal": f"mlx/lib/{LIBMLX}"}


class WheelsMissingError(Exception):
    """Pip can't get them; the text says what it said."""


@dataclass(frozen=True)
class Wheel:
    """The libraries of one version of MLX, as built for one version of macOS."""

    version: str
    macos: int
    libmlx: Path
    core: Path

    def __str__(self) -> str:
        return f"{self.version}-{self.macos}"


def all_wheels() -> list[Wheel]:
    """Return those that mlxmem is checked with, there or not."""
    return [
        Wheel(version, macos, folder / LIBMLX, folder / CORE)
        for version in VERSIONS
        for macos in SYSTEMS
        for folder in [KEPT_IN / f"{version}-{macos}"]
    ]


def fetch(wheels: Iterable[Wheel]) -> None:
    """Make sure that the files of these wheels are there.

    Raises
    ------
    WheelsMissingError
        At least one can't be had.
    """
    absent = [wheel for wheel in wheels if not wheel.libmlx.parent.exists()]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(_fetch, absent))


def _fetch(wheel: Wheel) -> None:
    KEPT_IN.mkdir(parents=True, exist_ok=True)
    # What is left over of the wheels is 80 MB each.
    with tempfile.TemporaryDirectory(dir=KEPT_IN, prefix=".unfinished-") as made:
        downloads, folder = Path(made, "downloads"), Path(made, "libraries")
        _download(wheel, downloads)
        folder.mkdir()
        for project, member in _WANTED.items():
            name = f"{project}-{wheel.version}-*-macosx_{wheel.macos}_0_arm64.whl"
            found = list(downloads.glob(name))
            if len(found) != 1:
                raise WheelsMissingError(f"pip has no {name}")
            with zipfile.ZipFile(found[0]) as archive:
                data = archive.read(member)
            (folder / Path(member).name).write_bytes(data)
        try:
            folder.rename(wheel.libmlx.parent)
        except OSError:
            if not wheel.libmlx.parent.exists():  # nobody else was faster
                raise


def _download(wheel: Wheel, folder: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
            *("--only-binary=:all:", "--python-version", "3.11"),
            *("--platform", f"macosx_{wheel.macos}_0_arm64", "-d", str(folder)),
            *(f"mlx=={wheel.version}", f"mlx-metal=={wheel.version}"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != 0:
        said = done.stdout.strip().splitlines() or ["nothing"]
        raise WheelsMissingError(f"pip can't get MLX {wheel}: {said[-1]}")
