"""MLX's wheels for macOS, for all checks that read them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from checks import missing, needed
from wheels import VERSIONS, Wheel, WheelsMissingError, all_wheels, fetch

if TYPE_CHECKING:
    from pathlib import Path

    from emulated_mlx import EmulatedMlx
    from emulator_system import Libraries


@pytest.fixture(scope="session")
def wheels() -> list[Wheel]:
    """Return all of them, downloaded."""
    needed("lief")  # without which nobody reads them
    try:
        fetch(all_wheels())
    except WheelsMissingError as error:
        missing(str(error))
    return all_wheels()


@pytest.fixture(scope="session", params=all_wheels(), ids=str)
def wheel(request: pytest.FixtureRequest) -> Wheel:
    """Return each of them, downloaded when it is its turn."""
    needed("lief")
    one: Wheel = request.param
    try:
        fetch([one])
    except WheelsMissingError as error:
        missing(str(error))
    return one


@pytest.fixture(scope="session")
def mlxmem_dylib(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build mlxmem's own library for macOS."""
    from emulated_mlxmem import build_dylib  # needs an emulator

    return build_dylib(tmp_path_factory.mktemp("mlxmem") / "_native.dylib")


@pytest.fixture(scope="session")
def system(
    tmp_path_factory: pytest.TempPathFactory, wheels: list[Wheel], mlxmem_dylib: Path
) -> Libraries:
    """Build what stands for the system's libraries."""
    from emulated_mlx import build_system  # needs an emulator
    from emulated_mlxmem import symbols_of_cxx

    folder = tmp_path_factory.mktemp("system")
    return build_system(folder, wheels, symbols_of_cxx(mlxmem_dylib))


@pytest.fixture(scope="module", params=VERSIONS)
def emulated(
    request: pytest.FixtureRequest, system: Libraries, wheels: list[Wheel]
) -> EmulatedMlx:
    """Load one wheel of each version."""
    from emulated_mlx import EmulatedMlx

    wheel = next(wheel for wheel in wheels if wheel.version == request.param)
    return EmulatedMlx(system, wheel)
