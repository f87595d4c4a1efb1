"""The API's types, as `mypy --strict` sees them from outside."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

GOOD = """
from pathlib import Path
from typing import Any

import mlxmem

mlxmem.enable()
mlxmem.enable(0, stacks=False)
mlxmem.enable(max_entries=10)
on: bool = mlxmem.is_enabled()
events: list[dict[str, Any]] = mlxmem.events()
fields = mlxmem.events_array().dtype.names
first: int = mlxmem.stats()["peak"]
snapshot: dict[str, Any] = mlxmem.snapshot()
path: Path = mlxmem.dump("out.pickle")
path = mlxmem.dump(path)
number: int = mlxmem.Action.AllocNew
limit: int | None = mlxmem.recommend_cache_limit("metal", ram="16 GB").limit
report: dict[str, Any] = mlxmem.cache_stats(limits=["1 MB", 0])
stack: list[tuple[str, str, int]] | None
stack = mlxmem.resolve_traceback(mlxmem.capture_traceback())


@mlxmem.record("out.pickle", max_entries=0)
def train(steps: int) -> float:
    return steps * 0.5


loss: float = train(3)
with mlxmem.record():
    pass
mlxmem.record_memory_events(enabled=True, max_entries=0)
shown: dict[str, Any] = mlxmem.to_snapshot(mlxmem.get_memory_events())
mlxmem.dump_snapshot(mlxmem.get_memory_events(), "out.pickle")
mlxmem.disable()
"""

# Each line is one mistake that the types must show.
BAD = """
import mlxmem

mlxmem.enable("x")
mlxmem.enable(5, False)
mlxmem.dump(3)
mlxmem.stats()["pek"]
x: str = mlxmem.events()
"""


def test_the_api_is_typed(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "good.py").write_text(GOOD)
    (tmp_path / "bad.py").write_text(BAD)
    command = [sys.executable, "-m", "mypy", "--strict", "good.py", "bad.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    found = re.findall(r"^(\w+)\.py:(\d+): error", done.stdout, re.MULTILINE)
    assert {(name, int(line)) for name, line in found} == {
        ("bad", line) for line in (4, 5, 6, 7, 8)
    }, done.stdout + done.stderr
