"""What becomes of a request, and what a replay adds up to."""

from __future__ import annotations

import enum
from typing import TypedDict


class Outcome(enum.IntEnum):
    """What became of a request; all but the first two are misses.

    A buffer that left the cache explains one miss of its size at most, and before any
    other reason.
    """

    NotAsked = 0
    Hit = 1
    Cold = 2  # no buffer of a size that serves was there before
    InUse = 3  # those there are, are in use; nothing larger is cached
    Window = 4  # a larger one was cached, beyond the window of reuse
    Cleared = 5  # one was cached, and clear_cache() gave it back
    Trimmed = 6  # ..., and went for the cache limit
    Reclaimed = 7  # ..., and went for the memory limit
    NotKept = 8  # one was freed, and did not fit under the cache limit


MISSES = tuple(outcome for outcome in Outcome if outcome > Outcome.Hit)


class Totals(TypedDict):
    """What a replay adds up to, with the names of replay.h; sizes in bytes.

    `count` and `requested` (bytes asked for) are indexed by `Outcome`. What comes of
    the system is `system_allocations`, `system_bytes`; what the cache gave back
    `evictions`, `evicted_bytes`. `waste` is by how much reused buffers exceed what was
    asked for, over all reuses; `peak_waste` is the most in use at a time. `active` and
    `cache` are those at the end. `checked` decisions of a recording were compared with
    the model's, `mismatches` differ; `raced` runs of evictions fit in another order
    of two threads, and `unseen` ones were caused by no call that was recorded.
    """

    count: list[int]
    requested: list[int]
    system_allocations: int
    system_bytes: int
    evictions: int
    evicted_bytes: int
    peak_active: int
    peak_cache: int
    peak_reserved: int
    peak_waste: int
    waste: int
    active: int
    cache: int
    checked: int
    mismatches: int
    raced: int
    unseen: int
