"""The libraries that are checked are those of the wheels that are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import wheels as module
from checks import needed
from wheels import Wheel, WheelsMissingError


def parse(path: Path) -> Any:
    fat = needed("lief").MachO.parse(str(path))
    assert len(fat) == 1
    return fat.at(0)


def test_a_wheel_is_for_its_version_of_macos(wheel: Wheel) -> None:
    # GIVEN the two libraries of a wheel

    # WHEN they are read
    libmlx, core = parse(wheel.libmlx), parse(wheel.core)

    # THEN they are for that macOS
    for image in (libmlx, core):
        assert image.header.cpu_type == image.header.CPU_TYPE.ARM64
        assert image.build_version.minos[0] == wheel.macos
    # THEN the one loads the other
    assert "@rpath/libmlx.dylib" in {library.name for library in core.libraries}


def test_there_are_twelve_and_nothing_else_is_kept(wheels: list[Wheel]) -> None:
    # GIVEN all wheels
    assert len({str(wheel) for wheel in wheels}) == 12

    # WHEN it is looked what lies in their folders
    kept = {path for wheel in wheels for path in wheel.libmlx.parent.rglob("*")}

    # THEN these are the libraries
    assert kept == {path for wheel in wheels for path in (wheel.libmlx, wheel.core)}


def test_a_version_that_pip_has_not_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # GIVEN a version that was never published
    monkeypatch.setattr(module, "KEPT_IN", tmp_path)
    folder = tmp_path / "0.0.0-14"
    absent = Wheel("0.0.0", 14, folder / module.LIBMLX, folder / module.CORE)

    # WHEN it is fetched
    with pytest.raises(WheelsMissingError) as error:
        module.fetch([absent])

    # THEN it is said, and nothing stays
    assert str(error.value).startswith("pip can't get MLX 0.0.0-14: ")
    assert list(tmp_path.iterdir()) == []
