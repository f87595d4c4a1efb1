"""Unit tests of sizes in words."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from mlxmem.units import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (0, 0),
        (1024, 1024),
        ("1024", 1024),
        ("7 B", 7),
        ("64 MB", 64_000_000),
        ("64mb", 64_000_000),
        ("1.5GiB", 3 << 29),
        (" 512 kB ", 512_000),
        ("1 KiB", 1024),
        (".5 KiB", 512),
        ("2. KiB", 2048),
        ("0.3 B", 0),
        ("2 TiB", 2 << 40),
        ("8191.9999999999999999 PiB", 9223372036854775807),
    ],
)
def test_sizes_are_read(size: int | str, expected: int) -> None:
    assert parse_bytes(size) == expected


@pytest.mark.parametrize(
    "size", ["", "MB", "64 MX", "-1", "1e6", "1,5 GiB", "64 M B", "1.2.3", "٣ MB", "."]
)
def test_what_is_no_size_is_refused_with_the_valid_forms(size: str) -> None:
    with pytest.raises(ValueError, match=r'"64 MB", "1.5 GiB"') as error:
        parse_bytes(size)
    assert repr(size) in str(error.value)


def test_a_negative_number_is_refused() -> None:
    with pytest.raises(ValueError, match="can't be negative: -1"):
        parse_bytes(-1)


@pytest.mark.parametrize("size", [None, 1.5, True, b"64 MB"])
def test_another_type_is_refused(size: Any) -> None:
    with pytest.raises(TypeError, match="must be an int or a str"):
        parse_bytes(size)


@pytest.mark.parametrize(
    ("n", "expected"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (-1536, "-1.5 KiB"),
        (-5, "-5 B"),
        ((1 << 20) - 1, "1.0 MiB"),
        (64 << 20, "64.0 MiB"),
        (3 << 29, "1.5 GiB"),
        (1 << 60, "1.0 EiB"),
        (1 << 71, "2048.0 EiB"),
    ],
)
def test_bytes_are_written(n: int, expected: str) -> None:
    assert format_bytes(n) == expected


@given(st.integers(0, 2**60))
def test_what_is_written_reads_back_to_half_a_tenth(n: int) -> None:
    text = format_bytes(n)
    unit = parse_bytes("1 " + text.split()[1])
    assert abs(parse_bytes(text) - n) <= 0.051 * unit
