"""What of MLX's libraries is mapped into this process, byte by byte.

Independent of what mlxmem says that it changed.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx

PT_LOAD = 1


class Mapping(NamedTuple):
    """One mapping of a library, or the part of its last one that is zeros at first."""

    path: str
    begin: int
    rights: str
    content: bytes


def _end_in_memory(header: bytes, base: int) -> int:
    """Return where a library ends, from its program headers."""
    (table,) = struct.unpack_from("<Q", header, 32)
    size, count = struct.unpack_from("<HH", header, 54)
    end = base
    for i in range(count):
        kind, _, _, address, _, _, in_memory, _ = struct.unpack_from(
            "<IIQQQQQQ", header, table + i * size
        )
        if kind == PT_LOAD:
            end = max(end, base + address + in_memory)
    return end


def mlx_mappings() -> list[Mapping]:
    """Read all mappings of the libraries in MLX's package, in address order."""
    package = f"{Path(mx.__file__).parent}/"
    found = []
    path, end = "", 0
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
        for line in maps:
            span, rights, offset, _, _, *name = line.split(None, 5)
            first, last = (int(text, 16) for text in span.split("-"))
            if name and name[0].strip().startswith(package):
                path = name[0].strip()
                if int(offset, 16) == 0 and first >= end:
                    memory.seek(first)
                    end = _end_in_memory(memory.read(4096), first)
            elif name or first >= end:
                continue  # nameless memory within the library is its .bss
            last = min(last, end)
            if "r" in rights and last > first:
                memory.seek(first)
                content = memory.read(last - first)
                assert len(content) == last - first
                found.append(Mapping(path, first, rights, content))
    assert any(mapping.path.endswith("/libmlx.so") for mapping in found)
    return found


def differences(one: list[Mapping], other: list[Mapping]) -> dict[int, tuple[int, int]]:
    """Return the words that differ: their addresses, and what they are in each.

    Raises
    ------
    AssertionError
        The mappings are not the same ones.
    """
    assert [m[:2] for m in one] == [m[:2] for m in other]
    words = {}
    for a, b in zip(one, other, strict=True):
        assert len(a.content) == len(b.content)
        if a.content == b.content:
            continue
        for at in range(0, len(a.content), 8):
            if a.content[at : at + 8] != b.content[at : at + 8]:
                old, new = (m.content[at : at + 8] for m in (a, b))
                words[a.begin + at] = (
                    int.from_bytes(old, "little"),
                    int.from_bytes(new, "little"),
                )
    return words
