"""Compare MLX's libraries in memory before, during and after recording.

Run it with LD_BIND_NOW=1: else the loader itself writes import slots when they are
first called through.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(1, str(Path(__file__).parents[2]))

import mlx.core as mx
from books import settle
from mapped import Mapping, differences, mlx_mappings

import mlxmem
from mlxmem import _hook, _setting_calls

OBJECT = 256  # bytes of the allocator to look at, all that CommonAllocator has


class Seen(NamedTuple):
    """What the memory is like at one moment."""

    mappings: list[Mapping]
    allocator: bytes

    @property
    def rights(self) -> list[tuple[int, str]]:
        return [(mapping.begin, mapping.rights) for mapping in self.mappings]


def allocator() -> int:
    """Address of MLX's allocator, as MLX tells it."""
    library = ctypes.CDLL(str(Path(mx.__file__).parent / "lib" / "libmlx.so"))
    getter = library._ZN3mlx4core9allocator9allocatorEv
    getter.restype = ctypes.c_void_p
    address: int = getter()
    return address


def look() -> Seen:
    return Seen(mlx_mappings(), ctypes.string_at(allocator(), OBJECT))


def own_memory() -> list[range]:
    """Where mlxmem's native library is mapped."""
    found = []
    with open("/proc/self/maps") as maps:
        for line in maps:
            if "/mlxmem/_native" in line:
                first, last = line.split(None, 1)[0].split("-")
                found.append(range(int(first, 16), int(last, 16)))
    assert found
    return found


def points_to_us(content: bytes) -> list[int]:
    """Words that are addresses within mlxmem's native library."""
    words = memoryview(content[: len(content) // 8 * 8]).cast("Q")
    low, high = own_memory()[0].start, own_memory()[-1].stop
    near = [word for word in words if low <= word < high]
    return [word for word in near if any(word in part for part in own_memory())]


def changed_words(one: Seen, other: Seen) -> dict[int, tuple[int, int]]:
    """Words that differ in MLX's libraries or in the allocator."""
    changed = differences(one.mappings, other.mappings)
    address = allocator()
    for at in range(0, OBJECT, 8):
        pair = one.allocator[at : at + 8], other.allocator[at : at + 8]
        if pair[0] != pair[1]:
            old, new = (int.from_bytes(value, "little") for value in pair)
            changed[address + at] = (old, new)
    return changed


def check_undone(before: Seen) -> None:
    """Nothing of ours is left in MLX, and no page has other rights."""
    after = look()
    assert after.rights == before.rights
    for mapping in after.mappings:
        assert points_to_us(mapping.content) == [], mapping[:3]
    assert points_to_us(after.allocator) == []
    # What only the loader ever wrote is the same byte for byte, whatever MLX did.
    for old, new in zip(before.mappings, after.mappings, strict=True):
        assert "w" in old.rights or old.content == new.content, old[:3]


def main() -> None:
    # GIVEN an MLX that has worked a little, and is quiet. (Its binding writes a
    # function's text into memory of its own when it is read, as enable() does.)
    for module in (mx, getattr(mx, "metal", None)):
        for name in _setting_calls.NAMES:
            if hasattr(module, name):
                functools.wraps(getattr(module, name))(lambda: None)
    mx.eval(mx.random.normal((100, 100)) @ mx.ones((100, 3)))
    settle()
    before = look()

    # WHEN a session begins
    mlxmem.enable()
    during = look()
    listed = {
        address: (original, replacement)
        for address, original, replacement in _hook.patched_words()
    }

    # THEN exactly the listed words differ, and nothing but these
    assert len(listed) > 100
    assert changed_words(before, during) == listed
    assert during.rights == before.rights

    # WHEN it ends
    mlxmem.disable()

    # THEN nothing does
    assert changed_words(before, look()) == {}
    check_undone(before)

    # AND the same after sessions with work in them, one begun within another
    for _ in range(2):
        mlxmem.enable()
        mx.eval(mx.random.normal((50, 50)) @ mx.ones((50, 3)))
        mlxmem.enable()
        mx.clear_cache()
        again = {a: (o, r) for a, o, r in _hook.patched_words()}
        assert again == listed  # no word is patched twice
        mx.eval(mx.exp(mx.ones((10,))))
        mlxmem.disable()
        settle()
        check_undone(before)


if __name__ == "__main__":
    main()
