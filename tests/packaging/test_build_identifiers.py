"""cibuildwheel, by what pyproject.toml says, builds the wheels that are meant."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from checks import needed

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = ("cp310", "cp311", "cp312", "cp313")


def identifiers(*options: str) -> list[str]:
    """Return what would be built."""
    needed("cibuildwheel")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "cibuildwheel", "--print-build-identifiers"),
            *(*options, str(ROOT)),
        ],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return done.stdout.split()


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (("linux", "--archs", "x86_64"), "manylinux_x86_64"),
        (("linux", "--archs", "aarch64"), "manylinux_aarch64"),
        # By itself: on an Intel Mac, too, nothing is built for it.
        (("macos",), "macosx_arm64"),
    ],
    ids=["Linux x86-64", "Linux aarch64", "macOS"],
)
def test_each_python_has_a_wheel_where_mlx_has_one(
    options: tuple[str, ...], wanted: str
) -> None:
    # GIVEN a system

    # WHEN it is asked what is built there
    found = identifiers("--platform", *options)

    # THEN it is one wheel for each Python: no free-threaded one, none for musl
    assert found == [f"{python}-{wanted}" for python in PYTHONS]


def test_what_is_built_is_what_the_metadata_names() -> None:
    # GIVEN the Pythons that pyproject.toml's classifiers name
    text = (ROOT / "pyproject.toml").read_text()
    named = re.findall(r'"Programming Language :: Python :: (3)\.(\d+)"', text)

    # WHEN it is asked what is built for them

    # THEN each has a wheel, as the tests above say
    assert tuple(f"cp{major}{minor}" for major, minor in named) == PYTHONS
