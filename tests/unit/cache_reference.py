"""MLX's buffer cache and its three allocators once more, slowly: the model's opponent.

Written from MLX's sources and from what is known about its policies, apart from
`mlxmem.cache` on purpose: lists that are searched from one end to the other, so that
what it does can be seen at a glance. `Machine` runs a program on one of the
allocators and writes down what a recorder would have seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mlxmem.cache._replay import CACHED, ROW
from mlxmem.cache.outcomes import Outcome
from mlxmem.cache.policies import Policy
from mlxmem.cache.replay import Followed, Predicted
from mlxmem.cache.trace import Trace

ALLOC, FREE, MAKE, RELEASE, EVICT, BEGINS, ENDS = range(7)
CLEAR, CACHE_LIMIT, MEMORY_LIMIT = range(3)


class Step(NamedTuple):
    """One request of a program.

    `what` is "alloc" or "make" (`n` bytes), "free" (of what step `n` made, or of
    buffer -1 - n of those before the program), "clear", "cache limit" or
    "memory limit" (`n` bytes).
    """

    what: str
    n: int = 0


@dataclass(eq=False)
class Block:
    """A piece of memory."""

    size: int
    address: int
    from_slab: bool = False
    waste: int = 0


class Pool:
    """The cache: one list, the newest block last."""

    def __init__(self, page: int) -> None:
        self.page = page
        self.blocks: list[Block] = []

    @property
    def bytes(self) -> int:
        return sum(block.size for block in self.blocks)

    def take(self, size: int) -> Block | None:
        """The smallest that is large enough, the one that came first of equal ones."""
        best = None
        for block in self.blocks:
            if block.size >= size and (best is None or block.size < best.size):
                best = block
        if best is None or best.size >= 2 * size or best.size >= size + 2 * self.page:
            return None
        self.blocks.remove(best)
        return best

    def give_back(self, least: int) -> list[Block]:
        """From the oldest on until so many bytes are out, or all if it is most."""
        if float(least) >= 0.9 * float(self.bytes):
            return self.empty()
        gone: list[Block] = []
        while self.blocks and sum(block.size for block in gone) < least:
            gone.append(self.blocks.pop(0))
        return gone

    def empty(self) -> list[Block]:
        """All, the smallest first; of equal ones the oldest first."""
        gone = sorted(self.blocks, key=lambda block: block.size)
        self.blocks.clear()
        return gone


class Cpu:
    """The allocator of the backend no_gpu."""

    page = 4096

    def __init__(self, cache_limit: int, has_cache: bool = True) -> None:
        self.pool = Pool(self.page)
        self.cache_limit = cache_limit
        self.has_cache = has_cache
        self.active = 0
        self.evicted: list[Block] = []  # since somebody looked

    def round(self, n: int) -> int:
        return n

    def malloc(self, n: int) -> tuple[Block, bool]:
        found = self.pool.take(n) if self.has_cache else None
        block = found or Block(n, 0)
        self.active += block.size
        return block, found is not None

    def free(self, block: Block) -> bool:
        self.active -= block.size
        if self.has_cache and self.pool.bytes + block.size <= self.cache_limit:
            self.pool.blocks.append(block)
            return True
        return False

    def clear_cache(self) -> None:
        self.evicted += self.pool.empty()

    def set_cache_limit(self, n: int) -> None:
        self.cache_limit = n
        if self.pool.bytes > n:
            self.evicted += self.pool.give_back(self.pool.bytes - n)

    def set_memory_limit(self, n: int) -> None:
        pass


class Gpu:
    """What the allocators of the backends metal and cuda have in common."""

    page = 16384
    slab_size = 0  # largest block that comes out of the slab

    def __init__(self, cache_limit: int, memory_limit: int, slab_blocks: int) -> None:
        self.pool = Pool(self.page)
        self.cache_limit = cache_limit
        self.memory_limit = memory_limit
        self.slab_left = slab_blocks
        self.active = 0
        self.count = 0  # of blocks, active or cached
        self.evicted: list[Block] = []

    def round(self, n: int) -> int:
        raise NotImplementedError

    def make_room(self, size: int) -> None:
        raise NotImplementedError

    def drop(self, blocks: list[Block]) -> None:
        self.evicted += blocks
        for block in blocks:
            self.return_to_system(block)

    def return_to_system(self, block: Block) -> None:
        self.count -= 1
        self.slab_left += block.from_slab

    def malloc(self, n: int) -> tuple[Block, bool]:
        size = self.round(n)
        found = self.pool.take(size)
        if found is None:
            self.make_room(size)
            block = Block(size, 0, size <= self.slab_size and self.slab_left > 0)
            self.slab_left -= block.from_slab
            self.count += 1
        else:
            block = found
        self.active += block.size
        return block, found is not None

    def trim(self) -> None:
        """What malloc does last."""
        if self.pool.bytes > self.cache_limit:
            self.drop(self.pool.give_back(self.pool.bytes - self.cache_limit))

    def free(self, block: Block) -> bool:
        self.active -= block.size
        if self.pool.bytes < self.cache_limit:
            self.pool.blocks.append(block)
            return True
        self.return_to_system(block)
        return False

    def clear_cache(self) -> None:
        self.drop(self.pool.empty())

    def set_cache_limit(self, n: int) -> None:
        self.cache_limit = n

    def set_memory_limit(self, n: int) -> None:
        self.memory_limit = n


class Metal(Gpu):
    """Metal's, with room for as many resources as are asked for."""

    slab_size = 255

    def __init__(
        self,
        cache_limit: int,
        memory_limit: int,
        recommended_95: int,
        resources: int,
        slab_blocks: int,
    ) -> None:
        super().__init__(cache_limit, memory_limit, slab_blocks)
        self.recommended_95 = recommended_95
        self.resources = resources

    def round(self, n: int) -> int:
        if n <= self.page:
            return n
        while n % self.page:
            n += self.page - n % self.page
        return n

    def make_room(self, size: int) -> None:
        gc_limit = min(self.memory_limit, self.recommended_95)
        required = self.active + self.pool.bytes + size
        if required >= gc_limit or self.count >= self.resources:
            # The difference is unsigned in MLX.
            self.drop(self.pool.give_back((required - gc_limit) % 2**64))


class Cuda(Gpu):
    """CUDA's, without memory pools."""

    slab_size = 8

    def round(self, n: int) -> int:
        if n >= self.page:
            return self.page * sum(1 for _ in range(0, n, self.page))
        size = 8
        while size < n:
            size += size
        return size

    def make_room(self, size: int) -> None:
        too_much = self.active + self.pool.bytes + size - self.memory_limit
        if too_much > 0:
            self.drop(self.pool.give_back(too_much))


def allocator(policy: Policy) -> Cpu | Gpu:
    """The allocator that has a policy's numbers."""
    if policy.name == "cpu":
        return Cpu(policy.cache_limit, policy.has_cache)
    limits = policy.cache_limit, policy.memory_limit
    if policy.name == "metal":
        return Metal(
            *limits,
            policy.collection_base,
            policy.resource_limit,
            policy.slab_blocks,
        )
    return Cuda(*limits, policy.slab_blocks)


@dataclass
class Sums:
    """What a run adds up to, with the names of `mlxmem.cache.outcomes.Totals`."""

    hits: int = 0
    allocations: int = 0
    requested: int = 0
    hit_bytes: int = 0
    system_allocations: int = 0
    system_bytes: int = 0
    evictions: int = 0
    evicted_bytes: int = 0
    peak_active: int = 0
    peak_cache: int = 0
    peak_reserved: int = 0
    peak_waste: int = 0
    waste: int = 0
    active: int = 0
    cache: int = 0


def sums_of(replay: Predicted | Followed) -> Sums:
    """The same of a replay."""
    totals: Any = replay.totals
    counted = totals["requested"][Outcome.Hit]
    return Sums(
        replay.hits,
        replay.allocations,
        replay.requested,
        counted,
        **{item.name: totals[item.name] for item in fields(Sums)[4:]},
    )


@dataclass
class Machine:
    """An allocator, and a recorder that watches it.

    Parameters
    ----------
    policy : Policy
        Whose numbers the allocator has.
    cached : sequence of int
        Sizes in the cache at the start, the oldest first, bytes.
    live : sequence of int
        Sizes in use at the start, bytes; none of a slab.
    fixed_limit : bool
        Whether the program's cache limits count for nothing.
    """

    policy: Policy
    cached: Sequence[int] = ()
    live: Sequence[int] = ()
    fixed_limit: bool = False
    sums: Sums = field(default_factory=Sums)
    rows: list[tuple[Any, ...]] = field(default_factory=list)
    decisive: int = -1  # row of the last step's decision
    row_of_step: list[int] = field(default_factory=list)  # that of each step
    hit: list[bool | None] = field(default_factory=list)  # of each step
    size: list[int] = field(default_factory=list)
    reserved: list[int] = field(default_factory=list)
    free_addresses: list[int] = field(default_factory=list)
    high: int = 0x1000
    waste: int = 0

    def __post_init__(self) -> None:
        self.allocator = allocator(self.policy)
        size_of = self.allocator.round
        self.start_cache = [Block(size_of(n), self.address()) for n in self.cached]
        self.start_live = [Block(size_of(n), self.address()) for n in self.live]
        self.allocator.pool.blocks += self.start_cache
        self.allocator.active = sum(block.size for block in self.start_live)
        if isinstance(self.allocator, Gpu):
            for block in self.start_cache:
                small = block.size <= self.allocator.slab_size
                block.from_slab = small and self.allocator.slab_left > 0
                self.allocator.slab_left -= block.from_slab
            self.allocator.count = len(self.cached)
        pool, limit = self.allocator.pool, self.policy.cache_limit
        if self.fixed_limit and pool.bytes > limit:
            # Under a limit that held all along they would not have been kept.
            self.free_addresses += [
                block.address for block in pool.give_back(pool.bytes - limit)
            ]
            if isinstance(self.allocator, Gpu):
                gone = [b for b in self.start_cache if b not in pool.blocks]
                for block in gone:
                    self.allocator.return_to_system(block)
        self.made: dict[int, tuple[Block, int, bool]] = {}
        self.note_peaks()

    def address(self) -> int:
        """As malloc does, the last one returned is handed out again."""
        if self.free_addresses and len(self.free_addresses) % 3:
            return self.free_addresses.pop()
        self.high += 0x100
        return self.high

    def note_peaks(self) -> None:
        active, cache = self.allocator.active, self.allocator.pool.bytes
        sums = self.sums
        sums.peak_active = max(sums.peak_active, active)
        sums.peak_cache = max(sums.peak_cache, cache)
        sums.peak_reserved = max(sums.peak_reserved, active + cache)
        sums.peak_waste = max(sums.peak_waste, self.waste)
        sums.active, sums.cache = active, cache

    def row(self, op: int, address: int, size: int, **more: int) -> int:
        order = ("requested", "owner", "recorded", "call")
        values = {"requested": 0, "owner": -1, "recorded": 0, "call": 0, **more}
        requested, owner, recorded, call = (values[name] for name in order)
        self.rows.append(
            (address, size, requested, owner, op, recorded, call, 0, [0] * 4)
        )
        if op != EVICT:
            self.decisive = len(self.rows) - 1
        return len(self.rows) - 1

    def write_evictions(self) -> None:
        """Write rows of what the cache gave back since the last time."""
        for block in self.allocator.evicted:
            self.row(EVICT, block.address, block.size)
            self.free_addresses.append(block.address)
            self.sums.evictions += 1
            self.sums.evicted_bytes += block.size
        self.allocator.evicted.clear()

    def run(self, steps: Sequence[Step]) -> Machine:
        """Run a program to its end."""
        for number, step in enumerate(steps):
            self.hit.append(None)
            self.size.append(0)
            getattr(self, step.what.replace(" ", "_"))(number, step.n)
            self.note_peaks()
            self.row_of_step.append(self.decisive)
            self.reserved.append(self.allocator.active + self.allocator.pool.bytes)
        return self

    def alloc(self, number: int, n: int) -> None:
        block, hit = self.allocator.malloc(n)
        sums = self.sums
        sums.allocations += 1
        sums.requested += n
        if hit:
            sums.hits += 1
            sums.hit_bytes += n
            block.waste = block.size - n
            sums.waste += block.waste
            self.waste += block.waste
        else:
            block.waste = 0
            sums.system_allocations += not block.from_slab
            sums.system_bytes += 0 if block.from_slab else block.size
        self.note_peaks()
        # Metal's recorder hears of all of them before malloc returns, CUDA's of each
        # where it happens.
        if isinstance(self.allocator, Metal):
            self.allocator.trim()
        self.write_evictions()
        if not hit:
            block.address = self.address()
        row = self.row(ALLOC, block.address, block.size, requested=n, recorded=hit)
        self.made[number] = block, row, False
        if isinstance(self.allocator, Cuda):
            self.allocator.trim()
            self.write_evictions()
        self.hit[-1], self.size[-1] = hit, block.size

    def make(self, number: int, n: int) -> None:
        block = Block(n, self.address())
        self.allocator.active += n
        if isinstance(self.allocator, Gpu):
            self.allocator.count += 1
        row = self.row(MAKE, block.address, n, requested=n)
        self.made[number] = block, row, True

    def free(self, _: int, which: int) -> None:
        if which < 0:
            block, row, foreign = self.start_live[-1 - which], -1, False
            if isinstance(self.allocator, Gpu):
                self.allocator.count += 1  # nobody counted it before
        else:
            block, row, foreign = self.made.pop(which)
        self.waste -= block.waste
        address, size = block.address, block.size
        if foreign:
            self.allocator.active -= size
            if isinstance(self.allocator, Gpu):
                self.allocator.count -= 1
            kept = False
        else:
            kept = self.allocator.free(block)
        block.waste = 0
        if not kept:
            self.free_addresses.append(address)
        op = RELEASE if foreign else FREE
        self.row(op, address, size, owner=row, recorded=kept)

    def call(self, call: int, n: int, does: Any) -> None:
        row = self.row(BEGINS, 0, n, call=call)
        does()
        self.write_evictions()
        self.row(ENDS, 0, n, owner=row, call=call)

    def clear(self, _: int, n: int) -> None:
        self.call(CLEAR, n, self.allocator.clear_cache)

    def cache_limit(self, _: int, n: int) -> None:
        does = self.allocator.set_cache_limit
        ignored = self.fixed_limit
        self.call(CACHE_LIMIT, n, lambda: None if ignored else does(n))

    def memory_limit(self, _: int, n: int) -> None:
        does = self.allocator.set_memory_limit
        self.call(MEMORY_LIMIT, n, lambda: does(n))

    def trace(self) -> Trace:
        """The recording."""
        return make_trace(
            np.array(self.rows, ROW),
            [(block.address, block.size) for block in self.start_cache],
            sum(block.size for block in self.start_live),
            self.policy,
        )


def make_trace(
    rows: npt.NDArray[np.void],
    cached: Sequence[tuple[int, int]],
    active: int,
    policy: Policy,
) -> Trace:
    """A trace of these rows, one event each."""
    count = np.arange(len(rows), dtype=np.int64)
    return Trace(
        rows=rows,
        event=count,
        time_us=count,
        number=np.full(len(rows), -1, np.int64),
        cached=np.array(list(cached), CACHED),
        unknown=0,
        active=active,
        policy=policy,
        dropped=0,
    )
