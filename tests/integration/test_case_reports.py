"""Each case's diagnosis, as the report gives it that should: the command is named.

Every command is called as a user would, with `--json`, on the case's dump. Each
`snap()` of a case is a mark.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from books import HAS_CPU_CACHE
from case_run import CASES, CaseRun, recorded, run_case
from click.testing import CliRunner

from mlxmem.cli import main

KiB = 1 << 10
MiB = 1 << 20
Row = dict[str, Any]


def mlxmem(*arguments: str | Path) -> Row:
    """Call the command line with --json and return what it printed."""
    words = [str(word) for word in arguments]
    result = CliRunner().invoke(main, [*words, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    report: Row = json.loads(result.stdout)
    # The table for people is made of the same report, and must not fail on it.
    table = CliRunner().invoke(main, words, catch_exceptions=False)
    assert table.exit_code == 0, table.output
    return report


def at_line(rows: list[Row], run: CaseRun, text: str) -> Row:
    """Return the only row of the line with this text in the case's script."""
    line = run.line(text)
    found = [row for row in rows if row.get("file") == run.path and row["line"] == line]
    assert len(found) == 1, (text, rows)
    return found[0]


def step(report: Row, name: str) -> Row:
    """Return the timeline's step from the mark whose name begins so."""
    (found,) = [step for step in report["steps"] if step["name"].startswith(name)]
    return dict(found)


def bytes_at(run: CaseRun, entry: int, text: str) -> tuple[int, int]:
    """Return bytes and buffers of a line after so many events, from the events."""
    live = run.live(entry, text)
    return sum(alloc.size for alloc in live), len(live)


def case01() -> None:
    run = recorded("case01_loop_without_eval")

    report = mlxmem("leaks", run.dump)

    row = at_line(report["growing"], run, "ema = 0.99 * ema + 0.01 * target")
    assert (row["growth_buffers"], row["growth_bytes"]) == (4000, 16_000)
    assert row["until"] == "after 2000 lazy updates"
    assert (row["buffers_per_step"], row["bytes_per_step"]) == (1000, 4000)
    assert report["growing"] == [row]


def case02() -> None:
    run = recorded("case02_metric_outside_eval", "step 7")

    report = mlxmem("leaks", run.dump, "--marks", "step *")

    row = at_line(report["growing"], run, "out = batch @ w")
    assert (row["growth_buffers"], row["growth_bytes"]) == (7, 7 * MiB)
    assert (row["buffers_per_step"], row["bytes_per_step"]) == (1, MiB)
    # The holder is a chain that was never evaluated.
    holder = at_line(report["nodes"]["rows"], run, "running = running + mx.abs")
    assert holder["pending"] == 8 * 4  # abs, max and its squeeze, add


def case04() -> None:
    run = recorded("case04_cache_position_counter")

    report = mlxmem("leaks", run.dump)

    row = at_line(report["growing"], run, "self.left_padding = self.left_padding - n")
    assert (row["growth_buffers"], row["growth_bytes"]) == (32_000, 128_000)
    assert (row["until"], row["buffers_per_step"]) == ("4000 tokens, 8 layers", 8000)
    assert row["function"].endswith("advance")


def case07() -> None:
    run = recorded("case07_compiled_closure_pins_model")

    report = mlxmem("leaks", run.dump, "--by", "caller", "--marks", "load/unload *")

    row = at_line(report["growing"], run, "nn.Linear(512, 512)")
    assert row["bytes_per_step"] >= 4 * MiB
    assert row["growth_bytes"] // MiB == 12
    assert (row["until"], report["growing"][0]) == ("load/unload 3", row)


def case08() -> None:
    run = recorded("case08_compile_cache_per_thread")
    timeline = mlxmem("timeline", run.dump)
    workers = step(timeline, "4 live worker")

    report = mlxmem(
        "peak", run.dump, "--at", str(workers["from_at"] - 1), "--by", "thread"
    )

    held = [row for row in report["rows"] if row["bytes"] >= MiB]
    assert len({row["label"] for row in held}) == 4
    assert [row["bytes"] // MiB for row in held] == [1] * 4


def case10() -> None:
    run = recorded("case10_monotonic_sizes")

    report = mlxmem("timeline", run.dump)

    for number in range(1, 9):
        found = step(report, f"request {number}")
        assert found["active"] // MiB == 2 * number
        if HAS_CPU_CACHE:  # what the earlier ones left, and nobody takes
            assert found["cache"] // MiB == number * (number - 1)
    row = at_line(
        mlxmem("summary", run.dump)["rows"]["allocated"], run, "kv = mx.zeros"
    )
    assert row["bytes"] // MiB == 2 * sum(range(1, 9))


def case11() -> None:
    run = recorded("case11_variable_length_batches")

    report = mlxmem("summary", run.dump)

    assert report["peak"]["active"] == int(run.active.max())
    if HAS_CPU_CACHE:
        # The footprint is the cache: the reserved peak is far above the active one.
        reserved = report["reserved_peak"]
        assert reserved["reserved"] == int((run.active + run.cache).max())
        assert reserved["cache"] > 0.9 * reserved["reserved"]
        assert reserved["after_mark"].startswith("64 batches of equal")


def case13() -> None:
    run = recorded("case13_kv_stepped_growth")

    report = mlxmem("peak", run.dump)

    row = at_line(report["rows"], run, "k = mx.concatenate")
    expected = bytes_at(run, int(np.argmax(run.active)) + 1, "k = mx.concatenate")
    assert (row["bytes"], row["buffers"]) == expected
    # Old and new, and the zeros between them.
    assert [block["requested"] for block in report["largest"][:3]] == [
        4 * MiB,
        3 * MiB,
        MiB,
    ]


def case14() -> None:
    run = recorded("case14_attention_scores_quadratic")

    report = mlxmem("peak", run.dump)

    top = report["largest"][0]
    assert (top["requested"], top["primitive"]) == (16 * MiB, "Matmul")
    assert top["frames"][0]["line"] == run.line("s = mx.matmul(")
    row = at_line(report["rows"], run, "s = mx.matmul(")
    assert row["bytes"] == 16 * MiB
    assert report["rows"][0] == row


def case16() -> None:
    run = recorded("case16_cache_limit_clobbered")

    report = mlxmem("timeline", run.dump)

    calls = [call for call in report["calls"] if call["name"] == "set_cache_limit"]
    assert [call["value"] for call in calls] == [0, 4 << 30]
    assert calls[1]["previous"] == 0
    settings = mlxmem("summary", run.dump)["settings"]
    lines = [text for key, text in settings.items() if key.startswith("call ")]
    line = run.line("mx.set_cache_limit(4 << 30)")
    change = f"set_cache_limit: 0 B -> 4.0 GiB at {Path(run.path).name}:{line}, "
    assert sum(text.startswith(change) for text in lines) == 1
    where = [
        (call["frames"][0]["line"], call["frames"][0]["function"]) for call in calls
    ]
    assert where == [
        (run.line("mx.set_cache_limit(0)"), "pipeline_init"),
        (run.line("mx.set_cache_limit(4 << 30)"), "third_party_encoder"),
    ]
    if HAS_CPU_CACHE:
        assert settings["cache_limit_at_start"] == calls[0]["previous"] > 0
        assert settings["cache_limit"] == 4 << 30
        assert step(report, "limit 0")["cache"] == 0
        assert step(report, "after the encoder")["cache"] > 16 * MiB


def case17() -> None:
    run = recorded("case17_unload_without_clear_cache")

    report = mlxmem("timeline", run.dump)

    loaded, deleted = (step(report, f"model {word}") for word in ("loaded", "deleted"))
    assert loaded["active"] // MiB == 32
    assert deleted["active"] <= 16
    if HAS_CPU_CACHE:
        assert deleted["cache"] // MiB == 32
        assert step(report, "after clear_cache")["cache"] == 0
        assert "clear_cache" in [call["name"] for call in report["calls"]]


def case18() -> None:
    run = recorded("case18_peak_ignores_cache")

    report = mlxmem("summary", run.dump)

    row = 37 * 4096 * 4
    assert report["peak"]["active"] // row == 32
    expected = sum(range(1, 33)) if HAS_CPU_CACHE else 32
    assert report["reserved_peak"]["reserved"] // row == expected


def case19() -> None:
    run = recorded("case19_numpy_input_is_copied")

    report = mlxmem("leaks", run.dump)

    for text, size in (
        ("dev = mx.array(host)", 16 * MiB),
        ("dev64 = mx.array", MiB),
        ("alias = mx.asarray(host)", 16 * MiB),
    ):
        row = at_line(report["live"], run, text)
        assert (row["bytes"], row["buffers"]) == (size, 1)


def case21() -> None:
    views = recorded("case21_slice_pins_parent", "views")
    copies = recorded("case21_slice_pins_parent", "mx.contiguous")

    held, free = (mlxmem("leaks", run.dump) for run in (views, copies))

    # Six views of 8 KiB each keep six buffers of 4 MiB; the random state is small.
    row = at_line(held["live"], views, "big = mx.random.normal")
    assert row["buffers"] >= 6
    assert 0 <= row["bytes"] - 24 * MiB < 64
    assert 0 <= row["visible_bytes"] - 6 * 8 * KiB < 64
    for report, hidden in ((held, 24 * MiB - 6 * 8 * KiB), (free, 0)):
        visible = report["visible"]
        assert 0 <= visible["live_bytes"] - visible["visible_bytes"] - hidden < 64
    copied = at_line(free["live"], copies, "mx.contiguous(a[-2:])")
    assert copied["bytes"] == copied["visible_bytes"] == 6 * 8 * KiB


def case22() -> None:
    run = recorded("case22_grad_accumulation_lazy")

    report = mlxmem("peak", run.dump)

    text = "h = mx.tanh(h @ w)"
    row = at_line(report["rows"], run, text)
    expected = bytes_at(run, int(np.argmax(run.active)) + 1, text)
    assert (row["bytes"], row["buffers"]) == expected
    # One micro-batch has eight activations of half a MiB at this line.
    assert row["bytes"] > 5 * 4 * (2048 * 64 * 4)
    assert report["moment"]["active"] == int(run.active.max())


def case24() -> None:
    run = recorded("case24_quantize_all_at_once")

    report = mlxmem("peak", run.dump)

    # Full precision and quantized weights of all layers live side by side.
    full = at_line(report["rows"], run, "w = mx.load(")
    packed = at_line(report["rows"], run, "mx.quantize(w.pop(k))")
    at = int(np.argmax(run.active)) + 1
    for row, text in ((full, "w = mx.load("), (packed, "mx.quantize(w.pop(k))")):
        assert (row["bytes"], row["buffers"]) == bytes_at(run, at, text)
    assert full["bytes"] // MiB >= 16
    assert packed["bytes"] >= 4 * 512 * KiB
    by_primitive = mlxmem("peak", run.dump, "--by", "primitive")
    assert {"Load", "Quantize"} <= {row["label"] for row in by_primitive["rows"]} or {
        "Load",
        "AffineQuantize",
    } <= {row["label"] for row in by_primitive["rows"]}


def case26() -> None:
    run = recorded("case26_save_needs_copies")

    report = mlxmem("timeline", run.dump)

    found = step(report, "save row contiguous")
    assert at_line([found["most_allocated"]], run, "mx.save_safetensors(")
    assert (found["most_allocated"]["bytes"], found["most_allocated"]["buffers"]) == (
        32 * MiB,
        8,
    )


def case27() -> None:
    run = recorded("case27_deep_lazy_graph", "200k pending")
    after = recorded("case27_deep_lazy_graph")

    report = mlxmem("leaks", run.dump)

    row = at_line(report["nodes"]["rows"], run, "x = mx.sin(x)")
    assert row["pending"] == 200_000
    assert report["nodes"]["pending"] == 200_000
    assert 80 * MiB < row["host_bytes"] < 120 * MiB
    # Once dropped, the samples still show how many there were.
    nodes = mlxmem("summary", after.dump)["nodes"]
    assert nodes["pending"] == 0
    assert 190_000 < nodes["peak_pending"] <= 200_000


def case28() -> None:
    run = recorded("case28_streams_and_threads")

    report = mlxmem("summary", run.dump)

    products = [alloc for alloc in run.allocs if alloc.primitive == "Matmul"]
    for name, key in (("threads", "thread_id"), ("streams", "stream")):
        for value in {alloc.event[key] for alloc in products}:
            label = f"{name[:-1]} {value}"
            (row,) = [row for row in report[name] if row["label"] == label]
            mine = [a for a in run.allocs if a.event[key] == value]
            assert row["bytes"] == sum(alloc.size for alloc in mine)
            assert row["buffers"] == len([a for a in mine if a.size])


def case30() -> None:
    run = recorded("case30_reference_cycle")

    report = mlxmem("timeline", run.dump)

    found = step(report, "trainer 3 deleted")
    assert found["freed_during"]["gc"] // MiB == 16
    assert found["freed_during"]["gc"] == found["freed_bytes"]
    leaks = mlxmem("leaks", run.dump, "--by", "caller", "--to", "trainer 3*")
    row = at_line(leaks["growing"], run, "self.model = nn.Linear(1024, 1024)")
    assert row["growth_bytes"] // MiB == 12


def case33() -> None:
    run = recorded("case33_memory_limit_is_soft")

    report = mlxmem("summary", run.dump)

    calls = {call["name"]: call for call in report["calls"]}
    assert calls["set_memory_limit"]["value"] == 8 * MiB
    frame, *_ = calls["set_memory_limit"]["frames"]
    assert frame["line"] == run.line("mx.set_memory_limit(8 << 20)")
    assert calls["set_wired_limit"]["value"] == 1 << 30
    assert report["peak"]["active"] // MiB == 24
    settings = report["settings"]
    assert settings["memory_limit"] == 8 * MiB
    assert settings["memory_limit_at_start"] == calls["set_memory_limit"]["previous"]
    assert settings["wired_limit"] == 1 << 30
    # The second array crosses the limit, since a few bytes are there, too.
    (crossing,) = report["crossings"]
    assert crossing["name"] == "active above the memory limit, 8.0 MiB"
    assert 8 * MiB < crossing["active"] <= 8 * MiB + KiB
    frame, *_ = crossing["frames"]
    assert (frame["file"], frame["line"]) == (
        run.path,
        run.line("x = [mx.ones((1024, 1024)) for _ in range(6)]"),
    )
    assert calls["set_memory_limit"]["at"] <= crossing["at"]
    assert settings["limit_crossings"] == 1
    assert mlxmem("timeline", run.dump)["crossings"] == [crossing]


def case34() -> None:
    run = recorded("case34_pairwise_broadcast")

    report = mlxmem("peak", run.dump)

    row = at_line(report["rows"], run, "d = ((a[:, None, :] - b[None, :, :]) ** 2)")
    assert report["rows"][0] == row
    assert row["bytes"] >= 512 * 512 * 64 * 4
    assert report["largest"][0]["requested"] == 512 * 512 * 64 * 4
    assert report["largest"][0]["primitive"] == "Subtract"


def case36() -> None:
    run = recorded("case36_second_reference_stops_donation")

    report = mlxmem("timeline", run.dump)

    found = step(report, "single handle")
    row = at_line([found["most_allocated"]], run, "x = mx.abs(x)")
    assert (row["bytes"], row["buffers"]) == (4 * 8 * MiB, 4)
    assert found["peak"] // MiB == 16


def case38() -> None:
    run = recorded("case38_optimizer_state_first_step")

    report = mlxmem("leaks", run.dump, "--by", "caller", "--top", "50")

    row = at_line(report["live"], run, "opt.update(model, grads)")
    assert row["bytes"] >= 2 * 2 * (512 * 512 + 512) * 4
    steps = {found["name"][:6]: found for found in report["steps"]}
    assert steps["step 0"]["active"] < 3 * MiB < 6 * MiB < steps["step 1"]["active"]


REPORTS: dict[str, Callable[[], None]] = {
    name: found for name, found in globals().items() if name.startswith("case")
}
OTHERS = {"case32", "case42"}  # below: one dies, one overflows


def test_every_case_has_its_report() -> None:
    assert {path.name[:6] for path in CASES.glob("case*.py")} == OTHERS | set(REPORTS)


@pytest.mark.parametrize("name", sorted(REPORTS))
def test_report_gives_the_diagnosis(name: str) -> None:
    REPORTS[name]()


def test_failed_allocation_leaves_its_dump(tmp_path: Path) -> None:
    # GIVEN a case that dies of a failed allocation
    script = CASES / "case32_allocation_failure.py"
    dump = tmp_path / "oom.pickle"

    # WHEN `mlxmem run` records it
    done = subprocess.run(
        [sys.executable, "-m", "mlxmem", "run", "-o", str(dump), str(script), "child"],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "MLXMEM_DUMP": ""},
    )

    # THEN it dies as without mlxmem, and the dump says of what
    assert done.returncode == -signal.SIGSEGV, done.stderr
    report = mlxmem("summary", dump)
    (oom,) = report["ooms"]
    text = "x = mx.zeros((1 << 20, 1 << 12))"
    (line,) = [
        number
        for number, words in enumerate(script.read_text().splitlines(), 1)
        if text in words
    ]
    assert oom["size"] == 16 << 30
    assert (oom["frames"][0]["file"], oom["frames"][0]["line"]) == (str(script), line)
    assert 0 <= oom["free"] < 16 << 30
    assert oom["active"] == report["end"]["active"] >= 4 * MiB


def test_overflow_is_reported(tmp_path: Path) -> None:
    dump = tmp_path / "dump.pickle"
    run = run_case("case42_event_flood", tmp_path, max_entries=10_000, dump=dump)

    report = mlxmem("summary", dump)

    assert report["dropped"] == run.recording.dropped > 30_000
    assert report["end"]["active"] == run.recording.active
    assert report["settings"]["trace_alloc_overflowed"] is True
