"""Histories made by hand for the page's tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from mlxmem.reports.history import BLOCK, Frame, History, Stack

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

_KIND = {"alloc": 0, "free_completed": 2}


class Story:
    """A program that allocates and frees; one entry each."""

    def __init__(self) -> None:
        self.kinds: list[int] = []
        self.blocks: list[dict[str, Any]] = []
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
        self.kinds.append(_KIND["alloc"])
        return self._block(len(self.kinds) - 1, size, stack=stack, **fields)

    def free(self, block: int, during: str = "") -> None:
        """Free a block, in a range or in none."""
        ranges = self.lists["range"]
        if during not in ranges:
            ranges.append(during)
        self.blocks[block]["freed_during"] = ranges.index(during)
        self.blocks[block]["end"] = len(self.kinds)
        self.kinds.append(_KIND["free_completed"])

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
        return of_blocks(
            blocks,
            count,
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
