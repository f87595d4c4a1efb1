"""Sizes as people write and read them."""

from __future__ import annotations

import re

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_FACTORS = {unit.lower(): 1024**power for power, unit in enumerate(_UNITS)} | {
    f"{prefix}b": 1000**power for power, prefix in enumerate("kmgtpe", 1)
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-z]*)\s*", re.IGNORECASE)
_FORMS = 'write a number of bytes or a size like "64 MB", "1.5 GiB" or "512 kB"'


def parse_bytes(size: int | str) -> int:
    """Return a size in bytes.

    Parameters
    ----------
    size : int or str
        Bytes, or a number and a unit: B; kB, MB, GB, TB, PB, EB (powers of 1000);
        KiB, MiB, GiB, TiB, PiB, EiB (powers of 1024). Case and spaces don't matter;
        without a unit it is bytes.

    Returns
    -------
    int
        Rounded down to whole bytes.

    Raises
    ------
    TypeError
        `size` is neither an int nor a str.
    ValueError
        It is negative, or no size; the message shows what is.

    Examples
    --------
    >>> parse_bytes("64 MB"), parse_bytes("1.5GiB"), parse_bytes(1024)
    (64000000, 1610612736, 1024)
    """
    if isinstance(size, int) and not isinstance(size, bool):
        if size < 0:
            raise ValueError(f"a size can't be negative: {size}; {_FORMS}")
        return size
    if not isinstance(size, str):
        raise TypeError(f"a size must be an int or a str, not {size!r}; {_FORMS}")
    match = _SIZE.fullmatch(size)
    factor = _FACTORS.get((match[2] or "B").lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f"{size!r} is no size; {_FORMS}")
    # In integers, since a float has no more than 53 bits.
    whole, _, fraction = match[1].partition(".")
    digits = int((whole + fraction) or "0")
    return int(digits * factor // 10 ** len(fraction))


def format_bytes(n: int) -> str:
    """Return bytes as people read them, in powers of 1024.

    Parameters
    ----------
    n : int
        Bytes; may be negative.

    Examples
    --------
    >>> format_bytes(512), format_bytes(64 << 20), format_bytes(-1536)
    ('512 B', '64.0 MiB', '-1.5 KiB')
    """
    sign = "-" if n < 0 else ""
    value: float = abs(n)
    if value < 1024:
        return f"{n} B"
    for unit in _UNITS[1:]:
        value /= 1024
        # What would round to "1024.0" belongs to the next unit.
        if value < 1023.95 or unit == _UNITS[-1]:
            break
    return f"{sign}{value:.1f} {unit}"
