"""MLX's wheels for macOS, for all checks that read them."""

from __future__ import annotations

import pytest
from checks import missing, needed
from wheels import Wheel, WheelsMissingError, all_wheels, fetch


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
