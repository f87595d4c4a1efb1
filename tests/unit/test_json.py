"""The JSON of the reports has the keys and types that its page in the docs lists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from handmade import STACKS, THREAD
from test_cache_report import jumping_sizes, two_sizes
from test_reports import growing_heap, read, two_lines

from mlxmem.cache import CpuPolicy
from mlxmem.events import (
    RAW_NODE,
    RAW_NODE_SAMPLE,
    Action,
    Mark,
    Nodes,
    OutOfMemory,
    Range,
    SettingCall,
)
from mlxmem.reports.cache import cache
from mlxmem.reports.diff import diff
from mlxmem.reports.leaks import leaks
from mlxmem.reports.peak import peak
from mlxmem.reports.summary import summary
from mlxmem.reports.timeline import timeline
from mlxmem.reports.tree import tree

PAGE = Path(__file__).resolve().parents[2] / "docs" / "json.md"
SHARED = (
    "row",
    "moment",
    "frame",
    "nodes",
    "visible",
    "call",
    "crossing",
    "oom",
    "replay",
    "contents",
)
_LINE = re.compile(r"\| `([^`]+)` \| (\w+) \|")


def documented() -> dict[str, dict[str, str]]:
    """Return the keys and types of the page's tables, by report or shared part."""
    tables: dict[str, dict[str, str]] = {"every": {}, "summary rows": {}}
    current = ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            current = {"In every report": "every"}.get(line[3:], line[3:])
        elif line.startswith("The rows of `rows`"):
            current = "summary rows"
        else:
            for name in SHARED:
                if re.match(rf"((An?|The) )?\*\*{name}\*\*", line, re.IGNORECASE):
                    current = name
        found = _LINE.match(line)
        if found:
            tables.setdefault(current, {})[found[1]] = found[2]
    return tables


def expand(table: dict[str, str], tables: dict[str, Any]) -> dict[str, str]:
    """Replace keys whose type is a shared part by that part's keys."""
    keys: dict[str, str] = {}
    for key, kind in table.items():
        if kind in SHARED:
            for inner, inner_kind in expand(tables[kind], tables).items():
                keys[f"{key}.{inner}"] = inner_kind
        else:
            keys[key] = kind
    return keys


def keys_of(value: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """Return the path of every value that is no container, and the value."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from keys_of(item, f"{at}.{key}" if at else key)
    elif isinstance(value, list):
        for item in value:
            yield from keys_of(item, f"{at}[]")
    else:
        yield at, value


def samples() -> dict[str, list[dict[str, Any]]]:
    """Return reports that between them have every key."""
    heap, marks = growing_heap(20)
    small = next(a for a, buffer in heap.buffers.items() if buffer.size == 4)
    live = np.array([(4, small, 2, 0), (8, 0, 1, 1), (8, 0, 7, 1)], RAW_NODE)
    nodes = Nodes(live, np.array([(0, 1, 2, 1)], RAW_NODE_SAMPLE))
    stack = [("/app/main.py", "main", 3), ("/v/site-packages/mlx/nn.py", "call", 9)]

    def resolve(number: int) -> Any:
        return stack if number == 7 else STACKS[number - 1] if number else None

    heap.free(heap.new(9, stack=7), Action.FreeActiveToOS)
    heap.free(heap.new(9, stack=7), Action.FreeActiveToOS)
    marks.append(Mark(len(heap.rows), 10**6, THREAD, "idle"))
    other = THREAD + 1  # which frees
    history = read(
        heap,
        marks=marks,
        nodes=nodes,
        resolve=resolve,
        ooms=[OutOfMemory(Mark(2, 20, THREAD, "no"), 99, 5, 4, 3, traceback_id=1)],
        calls=[SettingCall(Mark(4, 41, THREAD, "clear_cache"), 0, 9, STACKS[1])],
        crossings=[Mark(1, 10, THREAD, "active above the memory limit, 9 B")],
        ranges=[Range(Mark(5, 50, other, "a"), Mark(9, 90, other, "a"), ("a",))],
    )
    small_one = read(two_lines(), marks=[Mark(1, 10, THREAD, "begin")])
    return {
        "summary": [summary(history, top=99)],
        "peak": [peak(history), peak(small_one)],
        "leaks": [leaks(history)],
        "tree": [tree(history), tree(history, threshold=0.5)],
        "timeline": [timeline(history), timeline(small_one)],
        "diff": [diff(history, small_one), diff(small_one, history)],
        "cache": [cache(jumping_sizes()), cache(two_sizes(), policy=CpuPolicy(0))],
    }


def fits(value: Any, kind: str) -> bool:
    if kind == "float":
        return type(value) in (float, int)
    return type(value).__name__ == kind


@pytest.mark.parametrize("name", sorted(samples()))
def test_page_lists_every_key_of(name: str) -> None:
    # GIVEN what the page says of a report
    tables = documented()
    listed = {**tables["every"], **expand(tables[name], tables)}
    if name == "summary":
        for key in ("rows.allocated", "rows.buffers", "rows.churn"):
            for inner, kind in tables["summary rows"].items():
                listed[f"{key}[].{inner}"] = kind
        for key in ("primitives", "threads", "streams"):
            for inner, kind in tables["summary rows"].items():
                listed[f"{key}[].{inner}"] = kind

    # WHEN the report is made
    found: dict[str, list[Any]] = {}
    for report in samples()[name]:
        for key, value in keys_of(report):
            # The tree's children are like its root, and ranges name keys.
            key = re.sub(r"root(\.children\[\])+", "root", key)
            key = re.sub(r"^settings\..*", "settings", key)
            key = re.sub(r"freed_during\..*", "freed_during", key)
            found.setdefault(key, []).append(value)

    # THEN every key is on the page, with its type
    for key, values in found.items():
        if any(k.startswith((f"{key}.", f"{key}[]")) for k in listed):
            assert set(values) == {None}, key  # a part that is not known
            continue
        assert key in listed, f"{key} is not in docs/json.md"
        kind = listed[key]
        if kind != "object":
            assert all(value is None or fits(value, kind) for value in values), key
    # AND every key of the page is there
    optional = ("file", "line", "function", "called_from")
    missing = {
        key
        for key in listed
        if key not in found
        and not key.endswith("children[]")
        and key.rpartition(".")[2] not in optional
    }
    assert missing == set()


def test_rows_name_the_line_and_its_caller() -> None:
    rows = samples()["summary"][0]["rows"]["allocated"]
    (row,) = [row for row in rows if row["label"].startswith("/v/")]

    assert (row["file"], row["line"], row["function"]) == (
        "/v/site-packages/mlx/nn.py",
        9,
        "call",
    )
    assert row["called_from"] == "/app/main.py:3 main"
