"""Hand-made recordings for the tests of the exports."""

from __future__ import annotations

from typing import Any

import numpy as np

from mlxmem.reports.history import BLOCK, Frame, History

START_US = 1_750_000_000_000_000
A, B, OLD = 0x1000, 0x2000, 0x9000
THREAD = 7

INNER = {"filename": "/app/model.py", "line": 12, "name": "Block.__call__"}
OUTER = {"filename": "/app/train.py", "line": 40, "name": "<module>"}
LAYER = [INNER, OUTER]
LOADER = [{"filename": "/app/train.py", "line": 41, "name": "<module>"}]
BEFORE = [{"filename": "", "line": 0, "name": "allocated before mlxmem.enable()"}]


def entry(
    kind: str,
    addr: int,
    size: int,
    time: int,
    frames: list[dict[str, Any]],
    category: str = "unknown",
    **meta: Any,
) -> dict[str, Any]:
    """Return a trace entry, `time` microseconds after the start."""
    return {
        "action": kind,
        "addr": addr,
        "size": size,
        "stream": 0,
        "time_us": START_US + time,
        "frames": frames,
        "user_metadata": {"thread": THREAD, **meta},
        "category": category,
        "pool_id": (0, 0),
    }


def snapshot() -> dict[str, Any]:
    """Return 200 bytes from before and three allocations, two of them at the peak.

    At the peak, entry 5, live 200 + 1000 + 500 = 1,700 bytes, at the end 1,200;
    2,500 bytes were allocated.
    """
    first = {"range": "epoch/forward", "module": "layers.0", "action": "AllocNew"}
    second = {"buffer_size": 500, "action": "AllocNew"}
    again = {"action": "AllocReuse"}
    trace = [
        entry("segment_alloc", OLD, 200, 0, BEFORE, action="Before"),
        entry("alloc", OLD, 200, 0, BEFORE, action="Before"),
        entry("segment_alloc", A, 1000, 5, LAYER, "Matmul", **first),
        entry("alloc", A, 1000, 5, LAYER, "Matmul", **first),
        entry("segment_alloc", B, 500, 10, LOADER, "Add", **second),
        entry("alloc", B, 400, 10, LOADER, "Add", **second),
        entry("free_requested", A, 1000, 20, LAYER, "Matmul"),
        entry("free_completed", A, 1000, 20, LAYER, "Matmul"),
        entry("alloc", A, 1000, 30, LAYER, "Matmul", **again),
        entry("free_requested", B, 400, 40, LOADER, "Add", buffer_size=500),
        entry("free_completed", B, 400, 40, LOADER, "Add", buffer_size=500),
        entry("segment_free", B, 500, 40, LOADER, "Add", buffer_size=500),
    ]

    def segment(addr: int, size: int, frames: list[dict[str, Any]]) -> dict[str, Any]:
        block = {
            "address": addr,
            "size": size,
            "requested_size": size,
            "state": "active_allocated",
            "frames": frames,
        }
        return {
            "device": 0,
            "address": addr,
            "total_size": size,
            "stream": 0,
            "frames": frames,
            "blocks": [block],
        }

    mark = {"name": "step 1", "at": 6, "time_us": START_US + 15, "thread": THREAD}
    span = {
        "name": "forward",
        "path": ["epoch", "forward"],
        "at": 2,
        "end_at": 6,
        "time_us": START_US + 4,
        "end_time_us": START_US + 14,
        "thread": THREAD,
        "open": False,
    }
    oom = {
        "name": "no memory",
        "message": "no memory",
        "at": 12,
        "time_us": START_US + 45,
        "thread": THREAD,
        "size": 10**12,
        "free": 10**9,
        "active": 1200,
        "cache": 0,
        "frames": LOADER,
        "primitive": "Add",
        "stream": 0,
    }
    call = {
        "name": "set_cache_limit",
        "at": 6,
        "time_us": START_US + 16,
        "thread": THREAD,
        "value": 0,
        "previous": 1 << 25,
        "frames": LOADER,
    }
    crossing = {
        "name": "active above the memory limit, 1.0 KiB",
        "at": 4,
        "time_us": START_US + 5,
        "thread": THREAD,
    }
    return {
        "segments": [segment(A, 1000, LAYER), segment(OLD, 200, BEFORE)],
        "device_traces": [trace],
        "allocator_settings": {"mlx_version": "0.32.4", "backend": "cpu"},
        "external_annotations": [],
        "mlxmem": {
            "format": 1,
            "start_us": START_US,
            "marks": [mark],
            "ranges": [span],
            "ooms": [oom],
            "calls": [call],
            "crossings": [crossing],
            "nodes": {
                "live": 3,
                "pending": 2,
                "lines": [],
                "samples": [[4, START_US + 8, 5, 4]],
            },
        },
    }


def large(blocks: int, stacks: int = 1000, depth: int = 32) -> History:
    """Return a history of `blocks` allocations, each of which has four entries.

    Half of the blocks live at the end. Sizes are 1 to 1,000 bytes.
    """
    place = np.arange(blocks)
    half = blocks // 2
    kind = np.tile(np.array([3, 0, 1, 2], np.uint8), blocks)
    start, end = 4 * place + 1, 4 * place + 4 * half
    count = len(kind)
    rows = np.zeros(blocks, BLOCK)
    rows["start"], rows["end"] = start, np.minimum(end, count)
    rows["addr"] = 4096 * place
    rows["size"] = rows["requested"] = place % 1000 + 1
    rows["stack"] = place % stacks
    rows["primitive"] = 1 + place % 2
    rows["thread"] = THREAD
    change = np.zeros(count, np.int64)
    change[start] = rows["size"]
    over = rows["end"] < count
    change[rows["end"][over]] -= rows["size"][over]
    active = np.cumsum(change)
    return History(
        name="large.pickle",
        source="mlxmem",
        device=0,
        devices=1,
        start_us=START_US,
        time_us=START_US + np.arange(count) // 4,
        kind=kind,
        addr=np.repeat(4096 * place, 4).astype(np.uint64),
        size=np.repeat(rows["size"], 4),
        action=np.zeros(count, np.int32),
        active=active,
        reserved=np.maximum.accumulate(active),
        start_active=0,
        start_reserved=0,
        blocks=rows,
        stacks=[
            tuple(
                Frame(f"/app/module{level}.py", 1 + (level == 0) * stack, f"f{level}")
                for level in range(depth)
            )
            for stack in range(stacks)
        ],
        primitives=["unknown", "Matmul", "Add"],
        actions=[""],
        ranges=[""],
        modules=[""],
    )
