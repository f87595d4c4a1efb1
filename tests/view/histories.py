"""Histories made by hand for the page's tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from mlxmem.reports.history import BLOCK, CacheStart, Call, Frame, History, Stack

MIB = 1 << 20
BEGIN_US = 1_750_000_000_000_000
STEP_US = 1_000  # between two entries
ADDRESS = 0x7F00_0000_0000

MODEL = (
    Frame("/app/model.py", 12, "Block.__call__"),
    Frame("/app/train.py", 40, "main"),
)
DATA = (Frame("/app/data.py", 7, "batches"), Frame("/app/train.py", 41, "main"))
SPIKE = (Frame("/app/spike.py", 99, "attend"), Frame("/app/train.py", 42, "main"))

_KIND = {"alloc": 0, "free_completed": 2, "segment_free": 4}


class Story:
    """A program that allocates and frees; one entry each."""

    def __init__(self) -> None:
        self.kinds: list[int] = []
        self.blocks: list[dict[str, Any]] = []
        self.entries: list[tuple[int, int, int]] = []  # address, size, action
        self.lists: dict[str, list[Any]] = {
            "stack": [()],
            "primitive": ["unknown"],
            "action": [""],
            "range": [""],
            "module": [""],
        }
        self.lists["freed_during"] = self.lists["range"]

    def __len__(self) -> int:
        return len(self.kinds)

    def before(self, size: int, stack: Stack = ()) -> int:
        """Add a block that is older than the trace."""
        return self._block(-1, size, stack=stack)

    def alloc(self, size: int, stack: Stack = MODEL, **fields: Any) -> int:
        """Allocate, and return the block's place."""
        block = self._block(len(self.kinds), size, stack=stack, **fields)
        self._entry("alloc", block, fields.get("action", ""))
        return block

    def free(self, block: int, during: str = "", action: str = "") -> None:
        """Free a block, in a range or in none."""
        ranges = self.lists["range"]
        if during not in ranges:
            ranges.append(during)
        self.blocks[block]["freed_during"] = ranges.index(during)
        self.blocks[block]["end"] = len(self.kinds)
        self._entry("free_completed", block, action)

    def close(self, block: int) -> None:
        """Give the memory of a block that is cached back to the system."""
        self._entry("segment_free", block, "FreeCacheToOS")

    def _entry(self, kind: str, block: int, action: str) -> None:
        self.kinds.append(_KIND[kind])
        actions = self.lists["action"]
        if action not in actions:
            actions.append(action)
        row = self.blocks[block]
        self.entries.append((row["addr"], row["size"], actions.index(action)))

    def _block(self, start: int, size: int, **fields: Any) -> int:
        row = {"start": start, "end": None, "size": size, "requested": size}
        row["addr"] = ADDRESS + len(self.blocks) * 16 * MIB
        for name, value in fields.items():
            known = self.lists.get(name)
            if known is None:
                row[name] = value
                continue
            if value not in known:
                known.append(value)
            row[name] = known.index(value)
        self.blocks.append(row)
        return len(self.blocks) - 1

    def history(self, reserved: int = 0, **changes: Any) -> History:
        """Return the history; `reserved` bytes from the beginning to the end."""
        count = len(self.kinds)
        blocks = np.zeros(len(self.blocks), BLOCK)
        for place, row in enumerate(self.blocks):
            for name, value in row.items():
                blocks[name][place] = count if value is None else value
        blocks = blocks[np.argsort(blocks["start"], kind="stable")]
        entries = np.array(self.entries, np.int64).reshape(count, 3)
        return of_blocks(
            blocks,
            count,
            addr=entries[:, 0].astype(np.uint64),
            size=entries[:, 1],
            action=entries[:, 2].astype(np.int32),
            kind=np.array(self.kinds, np.uint8),
            reserved=np.full(count, reserved, np.int64),
            start_reserved=reserved,
            stacks=self.lists["stack"],
            primitives=self.lists["primitive"],
            actions=self.lists["action"],
            ranges=self.lists["range"],
            modules=self.lists["module"],
            **changes,
        )


def cached(line: Stack = DATA, **changes: Any) -> History:
    """Return a program on MLX's CPU backend whose cache has hits, misses and a clear.

    A line asks for twelve sizes, another one five times for the first of them, and
    once more after a clear.
    """
    story, kept = Story(), "FreeActiveToCache"
    sizes = [MIB + place * MIB // 16 for place in range(12)]
    made = []
    for size in sizes:
        made.append(story.alloc(size, line, action="AllocNew"))
        story.free(made[-1], action=kept)
    first = made[0]
    for _ in range(5):
        address = story.blocks[first]["addr"]
        again = story.alloc(MIB, MODEL, action="AllocReuse", addr=address)
        story.free(again, action=kept)
    small = story.alloc(512, (), action="AllocNew")
    clear_from = len(story)
    for block in made:  # by size, as clear_cache() does
        story.close(block)
    clear_at = len(story)
    story.free(story.alloc(MIB, MODEL, action="AllocNew"), action=kept)
    story.free(small, action=kept)
    end, us = len(story), BEGIN_US + STEP_US * clear_at
    calls = [
        Call("clear_cache", clear_at, us, 4711, 0, 0, SPIKE, clear_from),
        Call("set_cache_limit", end, us + 9, 4711, 8 * MIB, 32 * MIB, SPIKE, end),
    ]
    settings = {
        "backend": "cpu",
        "mlx_version": "0.32.4",
        "cache_limit_at_start": 32 * MIB,
    }
    nothing = np.zeros(0, np.int64)
    known = {
        "calls": calls,
        "settings": settings,
        "cache_at_start": CacheStart(nothing, nothing, 0),
    }
    return story.history(**{**known, **changes})


def of_blocks(blocks: Any, count: int, **fields: Any) -> History:
    """Return the history of some blocks over `count` entries."""
    change = np.zeros(count, np.int64)
    begun = blocks["start"] >= 0
    np.add.at(change, blocks["start"][begun], blocks["size"][begun])
    over = blocks["end"] < count
    np.subtract.at(change, blocks["end"][over], blocks["size"][over])
    start_active = int(blocks["size"][~begun].sum())
    active = start_active + np.cumsum(change)
    known: dict[str, Any] = {
        "name": "out.pickle",
        "source": "mlxmem",
        "device": 0,
        "devices": 1,
        "start_us": BEGIN_US,
        "time_us": BEGIN_US + STEP_US * np.arange(count, dtype=np.int64),
        "kind": np.zeros(count, np.uint8),
        "addr": np.zeros(count, np.uint64),
        "size": np.zeros(count, np.int64),
        "action": np.zeros(count, np.int32),
        "active": active,
        "reserved": active,
        "start_active": start_active,
        "start_reserved": start_active,
        "blocks": blocks,
        "stacks": [()],
        "primitives": ["unknown"],
        "actions": [""],
        "ranges": [""],
        "modules": [""],
    }
    return History(**{**known, **fields})


def busy(events: int, seed: int = 1) -> History:
    """Return random blocks of random lives, an allocation and a free in turn.

    Sizes, addresses and lives have no pattern that would compress well.
    """
    random = np.random.default_rng(seed)
    count = events // 2
    blocks = np.zeros(count, BLOCK)
    blocks["start"] = np.arange(0, 2 * count, 2)
    order = np.argsort(np.arange(count) + random.exponential(50, count))
    blocks["end"][order] = np.arange(1, 2 * count, 2)
    # A block that would be freed before it is made lives on.
    early = blocks["end"] <= blocks["start"]
    blocks["end"][early] = 2 * count
    blocks["size"] = random.integers(1, 1 << 22, count)
    blocks["requested"] = blocks["size"] - random.integers(0, 2, count)
    blocks["addr"] = ADDRESS + random.integers(0, 1 << 34, count) * 16
    blocks["stack"] = random.integers(0, 300, count)
    blocks["primitive"] = random.integers(0, 20, count)
    blocks["thread"] = random.choice([4711, 4712], count)
    stacks = [
        tuple(
            Frame(f"/app/file{depth}.py", 10 + number + depth, f"function_{depth}")
            for depth in range(20)
        )
        for number in range(300)
    ]
    steps = random.integers(0, 400, 2 * count)
    return of_blocks(
        blocks,
        2 * count,
        time_us=BEGIN_US + np.cumsum(steps),
        stacks=stacks,
        primitives=[f"Primitive{number}" for number in range(20)],
    )
