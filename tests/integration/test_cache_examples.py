"""The programs of the page on the cache: what is predicted is what is measured.

Each knob that the page turns, and each limit that its tables answer for, is really
turned, and the program recorded again.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mlxmem.cache.advice import recommend
from mlxmem.cache.outcomes import Outcome
from mlxmem.cache.policies import NO_LIMIT
from mlxmem.cache.replay import Followed, Predicted, follow, predict
from mlxmem.reports.cache import cache
from mlxmem.reports.cache_trace import of_history
from mlxmem.reports.history import History, read

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tune-the-cache.md"
MiB = 1 << 20
_STEP = re.compile(r"^<!-- (file|edit): (\S+) -->\n```\w*\n(.*?)^```$", re.M | re.S)

pytestmark = pytest.mark.usefixtures("cpu_cache")


def versions(name: str) -> list[str]:
    """Return a program of the page as it is first, and after each edit."""
    found: list[str] = []
    for what, file, body in _STEP.findall(PAGE.read_text()):
        if file != name:
            continue
        if what == "file":
            found.append(body)
            continue
        lines = body.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] in " -")
        new = "".join(line[1:] for line in lines if line[0] in " +")
        assert found[-1].count(old) == 1
        found.append(found[-1].replace(old, new))
    assert found
    return found


def run(program: str, folder: Path, limit: int | None = None) -> History:
    """Record a program; with a limit, under that one whatever it sets itself."""
    if limit is not None:
        program = (
            "import mlx.core as _mx\n"
            f"_mx.set_cache_limit({limit})\n"
            "_mx.set_cache_limit = lambda limit: 0\n" + program
        )
    (folder / "program.py").write_text(program)
    command = [sys.executable, "-m", "mlxmem", "run", "-q", "-o", "out.pickle"]
    done = subprocess.run(
        [*command, "--unlimited", "program.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return read(folder / "out.pickle")


def recorded(history: History) -> Followed:
    """Return what was recorded, all of which the model decides alike."""
    found = follow(of_history(history))
    assert found.totals["checked"] >= 32
    assert (found.totals["mismatches"], found.totals["unseen"]) == (0, 0)
    return found


def numbers(replay: Followed | Predicted) -> dict[str, Any]:
    """Return all that is predicted of a run."""
    totals = replay.totals
    keys = ("system_allocations", "system_bytes", "waste", "active", "cache")
    peaks = ("peak_active", "peak_cache", "peak_reserved", "peak_waste")
    return {
        "hits": replay.hits,
        "hit_rate": replay.hit_rate,
        "hit_rate_bytes": replay.hit_rate_bytes,
        "allocations": replay.allocations,
        **{key: totals[key] for key in (*keys, *peaks)},  # type: ignore[literal-required]
    }


NAMES = ("batches.py", "generate.py", "generate_in_steps.py", "serve.py", "encode.py")


@pytest.mark.parametrize("name", NAMES)
def test_each_limit_of_the_table_really_set(name: str, tmp_path: Path) -> None:
    """0, the recommended limit and none: what the page's tables answer for."""
    history = run(versions(name)[0], tmp_path)
    trace = recorded(history).trace
    best = recommend(trace)
    rows = cache(history)["what_if"]["rows"]
    assert [row["label"] for row in rows] == ["no cache", "recommended", "no limit"]
    assert rows[1]["cache_limit"] == best.limit
    for row, limit in zip(rows, (0, best.limit, NO_LIMIT), strict=True):
        expected = predict(trace, trace.policy.with_limits(cache_limit=limit))
        assert row["hits"] == expected.hits
        assert row["peak_reserved"] == expected.totals["peak_reserved"]
        measured = recorded(run(versions(name)[0], tmp_path, limit))
        assert numbers(measured) == numbers(expected)


def test_batches(tmp_path: Path) -> None:
    as_it_was, limited, _, padded = versions("batches.py")
    history = run(as_it_was, tmp_path)
    trace = recorded(history).trace
    report = cache(history, by="caller")

    window = next(row for row in report["misses"] if row["kind"] == "window")
    assert window["bytes"] > 0.5 * report["totals"]["requested_bytes"]
    first = as_it_was.splitlines().index("    batch = mx.array(data[:length])")
    jumping = {row["line"] for row in report["lines"] if row["jumps"]}
    assert jumping == {first + 1, first + 2, first + 3}

    expected = predict(trace, trace.policy.with_limits(cache_limit=16 * MiB))
    assert numbers(recorded(run(limited, tmp_path))) == numbers(expected)
    steps = report["what_if"]["rounding"]["steps"]
    four = next(row for row in steps if row["steps_per_doubling"] == 4)
    measured = recorded(run(padded, tmp_path))
    assert measured.hits == four["hits"]
    assert measured.totals["system_allocations"] == four["system_allocations"]
    assert measured.totals["peak_reserved"] == four["peak_reserved"]
    assert measured.hit_rate > 0.9


def test_generate(tmp_path: Path) -> None:
    as_it_was, limited = versions("generate.py")
    history = run(as_it_was, tmp_path)
    trace = recorded(history).trace
    line = cache(history)["lines"][0]
    assert (
        line["line"]
        == as_it_was.splitlines().index(
            "    keys = now(mx.concatenate([keys, token], axis=1))"
        )
        + 1
    )
    assert (line["allocations"], line["misses"]["cold"]) == (500, 500)
    expected = predict(trace, trace.policy.with_limits(cache_limit=MiB))
    assert numbers(recorded(run(limited, tmp_path))) == numbers(expected)
    assert expected.hits == recorded(history).hits  # the limit costs nothing


def test_serve(tmp_path: Path) -> None:
    as_it_was, cleared = versions("serve.py")
    before = recorded(run(as_it_was, tmp_path))
    history = run(cleared, tmp_path)
    after = recorded(history)
    assert after.totals["peak_reserved"] < before.totals["peak_reserved"] / 2
    taken = cache(history)["evicted_by"]
    assert {row["call"] for row in taken} == {"clear_cache"}
    at = cleared.splitlines().index("    mx.clear_cache()") + 1
    assert {row["frames"][0]["line"] for row in taken} == {at}
    assert sum(row["misses"] for row in taken) == after.totals["count"][Outcome.Cleared]


def test_encode(tmp_path: Path) -> None:
    as_it_was, restored = versions("encode.py")
    history = run(as_it_was, tmp_path)
    trace = recorded(history).trace
    lines = as_it_was.splitlines()
    shown = [(c.name, c.previous, c.value, c.stack[0].line) for c in history.calls]
    assert shown == [
        ("set_cache_limit", 32 * MiB, 0, lines.index("    mx.set_cache_limit(0)") + 1),
        (
            "set_cache_limit",
            0,
            4 << 30,
            lines.index("    mx.set_cache_limit(4 << 30)") + 1,
        ),
    ]
    assert int(history.reserved.max()) == history.reserved_peak
    after_second = int(history.calls[1].at)
    cached = history.reserved - history.active
    assert int(cached[:after_second].max()) == 0
    assert int(cached[after_second:].max()) > 17 * MiB
    expected = predict(trace, trace.policy.with_limits(cache_limit=0))
    assert numbers(recorded(run(restored, tmp_path))) == numbers(expected)
