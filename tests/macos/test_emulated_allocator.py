"""MLX's own allocator for Metal runs in an emulator.

Its counters and the words that mlx_abi.h says it keeps them in are seen by value.
"""

from __future__ import annotations

import emulated_mlx as mlx
from emulated_mlx import EmulatedMlx

PAGE = 0x4000
SMALL, LARGE = 100, 100_000
ROUNDED = 7 * PAGE  # LARGE, in whole pages
# Of mlx_abi.h's layouts: the memory limit, which seven more words follow, and the
# cached bytes.
LAYOUTS = {"0.30.6": (200, 64)}
FROM_0_31_2 = (152, 72)
ACTIVE, PEAK, RESOURCES, RESOURCE_LIMIT = 2, 3, 6, 7


def test_the_counters_are_those_of_its_words(emulated: EmulatedMlx) -> None:
    # GIVEN the allocator, of which nothing was asked yet
    allocator = emulated.allocator()
    first, cached = LAYOUTS.get(emulated.version, FROM_0_31_2)
    assert emulated.counters() == {"active": 0, "cache": 0, "peak": 0}

    def word(which: int) -> int:
        return emulated.mac.word(allocator + first + 8 * which)

    # WHEN a small and a large buffer are made, and the large one is freed
    small = emulated.call_allocator(mlx.MALLOC, SMALL)
    large = emulated.call_allocator(mlx.MALLOC, LARGE)
    sizes = [emulated.call_allocator(mlx.SIZE, buffer) for buffer in (small, large)]
    emulated.call_allocator(mlx.FREE, large)

    # THEN the large one was made of whole pages, and lies in the cache
    assert sizes == [SMALL, ROUNDED]
    assert emulated.counters() == {
        "active": SMALL,
        "cache": ROUNDED,
        "peak": SMALL + ROUNDED,
    }
    # THEN the words say the same
    assert word(ACTIVE) == SMALL
    assert word(PEAK) == SMALL + ROUNDED
    assert emulated.mac.word(allocator + cached) == ROUNDED
    assert word(RESOURCES) <= 2
    assert word(RESOURCE_LIMIT) > 0
