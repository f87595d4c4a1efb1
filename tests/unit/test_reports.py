"""Each report on events made by hand: exact bytes, counts and lines."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from handmade import STACKS, START_US, THREAD, Heap, busy_heap, heaps, quick
from hypothesis import given, strategies as st
from test_dump import many

from mlxmem.cli import main
from mlxmem.events import (
    RAW_NODE,
    RAW_NODE_SAMPLE,
    Action,
    Context,
    Mark as At,
    Nodes,
    OutOfMemory,
    Range as Span,
    SettingCall,
)
from mlxmem.reports.diff import diff
from mlxmem.reports.grouping import KEYS, caller_of, group, is_own, line_of
from mlxmem.reports.history import Frame, History, from_snapshot
from mlxmem.reports.leaks import leaks
from mlxmem.reports.peak import peak
from mlxmem.reports.summary import summary
from mlxmem.reports.timeline import timeline
from mlxmem.reports.tree import tree
from mlxmem.snapshot import build, dump

MODEL = "/app/model.py:12 Block.__call__"
TRAIN = "/app/train.py:41 <module>"
DATA = "/app/data.py:7 batches.<locals>.get"


def read(heap: Heap, **changes: Any) -> History:
    return from_snapshot(build(heap.recording(**changes)), name="out.pickle")


def brief(rows: list[dict[str, Any]], *keys: str) -> list[tuple[Any, ...]]:
    return [tuple(row[key] for key in ("label", *keys)) for row in rows]


def two_lines() -> Heap:
    """1,000 and 3,000 bytes at one line, 500 at another; 3,000 are freed last."""
    heap = Heap()
    heap.new(1000, stack=1, primitive=1, stream=0)
    heap.new(500, stack=2)
    large = heap.new(3000, stack=1, primitive=2, stream=1)
    heap.free(large)
    heap.reuse(large, requested=2000, stack=2, primitive=1, stream=0)
    heap.free(large)
    return heap


def test_peak_names_lines_and_buffers() -> None:
    report = peak(read(two_lines()))

    assert report["moment"]["active"] == 4500
    assert report["moment"]["reserved"] == 4500
    assert brief(report["rows"], "bytes", "buffers", "share") == [
        (MODEL, 4000, 2, 0.8889),
        (TRAIN, 500, 1, 0.1111),
    ]
    assert (report["rows"][0]["file"], report["rows"][0]["line"]) == (
        "/app/model.py",
        12,
    )
    assert report["rest"] == {"bytes": 0, "buffers": 0}
    largest = report["largest"][0]
    assert (largest["size"], largest["primitive"], largest["stream"]) == (
        3000,
        "Add",
        1,
    )
    assert [frame["line"] for frame in largest["frames"]] == [12, 40]
    assert report["largest"][1]["freed_at"] is None


def test_peak_sums_what_is_beyond_the_top() -> None:
    report = peak(read(two_lines()), top=1)

    assert brief(report["rows"], "bytes") == [(MODEL, 4000)]
    assert report["rest"] == {"bytes": 500, "buffers": 1}


def test_peak_of_another_moment_and_key() -> None:
    history = read(two_lines())

    report = peak(history, by="primitive", at=history.end)

    assert brief(report["rows"], "bytes", "buffers") == [
        ("Matmul", 1000, 1),
        ("leaf array", 500, 1),
    ]


def test_summary_counts() -> None:
    report = summary(read(two_lines()))

    assert report["totals"] == {
        "duration_us": 50,
        "allocations": 4,
        "reuses": 1,
        "frees": 2,
        "buffers": 2,
        "allocated_bytes": 7500,
    }
    assert report["peak"]["active"] == report["reserved_peak"]["active"] == 4500
    assert report["reserved_peak"]["cache"] == 0
    assert (report["end"]["active"], report["end"]["cache"]) == (1500, 3000)
    columns = ("bytes", "buffers", "freed_bytes", "live_bytes")
    assert brief(report["rows"]["allocated"], *columns) == [
        (MODEL, 4000, 2, 3000, 1000),
        (TRAIN, 3500, 2, 3000, 500),
    ]
    assert brief(report["rows"]["churn"], "freed_bytes") == [
        (MODEL, 3000),
        (TRAIN, 3000),
    ]
    assert brief(report["primitives"], "bytes") == [
        ("Matmul", 4000),
        ("Add", 3000),
        ("leaf array", 500),
    ]
    assert brief(report["streams"], "bytes") == [
        ("stream 0", 4000),
        ("stream 1", 3000),
        ("no stream", 500),
    ]
    assert brief(report["threads"], "bytes") == [(f"thread {THREAD}", 7500)]
    assert (report["nodes"], report["visible"]) == (None, None)


def test_summary_leaves_out_what_was_there_before() -> None:
    heap = Heap(active=700)
    heap.existing(900)
    heap.new(10, stack=1)

    report = summary(read(heap))

    assert report["totals"]["allocations"] == 1
    assert report["totals"]["allocated_bytes"] == 10
    assert report["peak"]["active"] == 1610
    assert brief(report["peak"]["rows"], "bytes")[0] == (
        "allocated before mlxmem.enable()",
        1600,
    )


def growing_heap(steps: int) -> tuple[Heap, list[At]]:
    """Two buffers of 4 bytes stay in each step, at one line; work comes and goes."""
    heap, marks = Heap(), []
    heap.new(64, stack=1)
    for step in range(steps):
        marks.append(At(len(heap.rows), 10 * len(heap.rows), THREAD, f"step {step}"))
        work = heap.new(1000, stack=1)
        heap.new(4, stack=2)
        heap.new(4, stack=2)
        heap.free(work, Action.FreeActiveToOS)
    marks.append(At(len(heap.rows), 10 * len(heap.rows), THREAD, "done"))
    return heap, marks


def test_leaks_find_what_grows() -> None:
    heap, marks = growing_heap(20)

    report = leaks(read(heap, marks=marks))

    (row,) = report["growing"]
    assert row["label"] == TRAIN
    assert (row["growth_buffers"], row["growth_bytes"]) == (40, 160)
    assert (row["buffers_per_step"], row["bytes_per_step"]) == (2, 8)
    assert (row["until"], row["steps"]) == ("done", 20)
    assert (row["bytes"], row["buffers"]) == (160, 40)
    assert brief(report["live"], "bytes", "buffers", "growing") == [
        (TRAIN, 160, 40, True),
        (MODEL, 64, 1, False),
    ]
    assert report["from_marks"] is True
    assert [step["active"] for step in report["steps"][:3]] == [64, 72, 80]


def test_leaks_that_end_late_are_found() -> None:
    heap, marks = growing_heap(20)
    small = [addr for addr, buffer in heap.buffers.items() if buffer.size == 4]
    for addr in small:
        heap.free(addr, Action.FreeActiveToOS)
    marks.append(At(len(heap.rows), 10**6, THREAD, "evaluated"))

    (row,) = leaks(read(heap, marks=marks))["growing"]

    assert (row["label"], row["growth_buffers"], row["until"]) == (TRAIN, 40, "done")
    assert (row["bytes"], row["buffers"]) == (0, 0)


def test_leaks_between_two_marks() -> None:
    heap, marks = growing_heap(20)
    history = read(heap, marks=marks)

    report = leaks(history, first="step 5", last="step 9")

    (row,) = report["growing"]
    assert (row["growth_buffers"], row["steps"]) == (8, 4)
    assert [step["name"] for step in report["steps"]] == [
        "step 5",
        "step 6",
        "step 7",
        "step 8",
        "step 9",
    ]
    assert len(leaks(history, marks="step 1*")["steps"]) == 11
    for options, says in (
        ({"first": "nowhere"}, "--from 'nowhere' is no mark of this recording"),
        ({"last": "step 99"}, "--to 'step 99' is no mark"),
        ({"marks": "done"}, "1 of 21 marks match, and growth needs two"),
    ):
        with pytest.raises(ValueError, match=says):
            leaks(history, **options)  # type: ignore[arg-type]


def test_steps_are_counted_where_marks_are_many() -> None:
    heap, marks = growing_heap(1000)

    report = leaks(read(heap, marks=marks))

    (row,) = report["growing"]
    assert (report["step_count"], row["steps"]) == (1000, 1000)
    assert (row["buffers_per_step"], row["bytes_per_step"]) == (2, 8)
    assert len(report["steps"]) <= 200


def test_growth_of_the_lazy_graph_is_a_leak(tmp_path: Any) -> None:
    # GIVEN a loop that makes 1,000 pending nodes in each step, and not one event
    heap = Heap()
    heap.new(100, stack=1)
    marks = [At(1, 100 * step, THREAD, f"step {step}") for step in range(1, 21)]
    samples = np.array(
        [(1, mark.timestamp_us, 1000 * n, 1000 * n) for n, mark in enumerate(marks)],
        RAW_NODE_SAMPLE,
    )
    live = np.array([(8, 0, 2, 1)] * 19_000, RAW_NODE)
    recording = heap.recording(marks=marks, nodes=Nodes(live, samples))

    pending = leaks(from_snapshot(build(recording)))["pending"]

    assert pending == {
        "growing": True,
        "growth": 19_000,
        "per_step": 1000,
        "until": "step 20",
    }
    path = str(dump(recording, tmp_path / "lazy.pickle"))
    result = CliRunner().invoke(main, ["leaks", path, "--fail"])
    assert result.exit_code == 3
    assert "Pending nodes grow by +19,000" in result.stdout


def test_leaks_without_marks_cut_the_recording() -> None:
    heap, _ = growing_heap(100)

    report = leaks(read(heap))

    assert report["from_marks"] is False
    assert [step["name"] for step in report["steps"]][::9] == ["10 %", "100 %"]
    assert brief(report["growing"]) == [(TRAIN,)]
    assert report["growing"][0]["growth_buffers"] == pytest.approx(180, abs=4)


def test_what_comes_and_goes_is_no_leak() -> None:
    heap = Heap()
    for _ in range(100):
        heap.free(heap.new(1000, stack=1), Action.FreeActiveToOS)

    report = leaks(read(heap))

    assert (report["growing"], report["live"]) == ([], [])


def test_leaks_that_grow_now_and_then_are_found() -> None:
    # GIVEN a line that keeps something in every tenth step, and one that has what it
    # needs after two
    heap, marks = Heap(), []
    for step in range(60):
        marks.append(At(len(heap.rows), 10 * len(heap.rows), THREAD, f"step {step}"))
        if step < 2:
            heap.new(500, stack=1)
        if step % 10 == 5:
            heap.new(700, stack=2)
        heap.free(heap.new(30, stack=4), Action.FreeActiveToOS)

    report = leaks(read(heap, marks=marks))

    (row,) = report["growing"]
    assert (row["label"], row["growth_buffers"], row["growth_bytes"]) == (
        TRAIN,
        6,
        4200,
    )


def test_the_caller_with_most_bytes_is_named() -> None:
    # GIVEN one library line that two lines of the program call
    library = ("/v/site-packages/mlx/nn.py", "call", 9)
    stacks = {
        1: [("/app/a.py", "often", 1), library],
        2: [("/app/b.py", "kept", 2), library],
    }
    heap = Heap()
    for _ in range(10):
        heap.free(heap.new(1000, stack=1), Action.FreeActiveToOS)
    heap.new(3000, stack=2)
    history = read(heap, resolve=stacks.get)

    # THEN what stayed comes from the one, most that was allocated from the other
    (live,) = leaks(history)["live"]
    assert live["called_from"] == "/app/b.py:2 kept"
    (row,) = summary(history)["rows"]["allocated"]
    assert row["called_from"] == "/app/a.py:1 often"


def test_leaks_show_what_is_hidden_and_pending() -> None:
    # GIVEN a buffer of 4,000 bytes of which an array shows 100, a whole one, and a
    # line with three pending nodes
    heap = Heap()
    large = heap.new(4096, requested=4000, stack=1)
    whole = heap.new(600, stack=2)
    live = np.array(
        [(100, large, 1, 0), (600, whole, 2, 0), *[(8, 0, 4, 1)] * 3, (8, 0, 0, 1)],
        RAW_NODE,
    )
    samples = np.array([(0, 1, 2, 1), (2, 9, 9, 7)], RAW_NODE_SAMPLE)

    report = leaks(read(heap, nodes=Nodes(live, samples)))

    assert brief(report["live"], "bytes", "visible_bytes") == [
        (MODEL, 4096, 100),
        (TRAIN, 600, 600),
    ]
    assert report["visible"] == {"live_bytes": 4600, "visible_bytes": 700}
    nodes = report["nodes"]
    assert (nodes["live"], nodes["pending"], nodes["evaluated"]) == (6, 4, 2)
    assert nodes["peak_pending"] == 7
    assert brief(nodes["rows"], "pending", "live") == [(DATA, 3, 3), ("no stack", 1, 1)]
    assert nodes["host_bytes"] == 4 * 485


def test_tree_adds_up() -> None:
    report = tree(read(two_lines()))

    root = report["root"]
    assert (root["bytes"], root["buffers"]) == (4500, 3)
    assert [(child["label"], child["bytes"]) for child in root["children"]] == [
        ("/app/train.py:40 <module>", 4000),
        (TRAIN, 500),
    ]
    (inner,) = root["children"][0]["children"]
    assert (inner["label"], inner["bytes"], inner["children"]) == (MODEL, 4000, [])
    few = tree(read(two_lines()), threshold=0.5)["root"]
    assert (len(few["children"]), few["hidden_bytes"]) == (1, 500)
    every = tree(read(two_lines()), allocated=True)
    assert (every["moment"], every["root"]["bytes"]) == (None, 7500)


def test_timeline_shows_steps_between_marks() -> None:
    # GIVEN a mark after the first and one after the fourth event, and a range "gc"
    # of another thread in which the last free happened
    marks = [At(1, 10, THREAD, "one"), At(4, 40, THREAD, "two")]
    other = THREAD + 1
    span = Span(At(5, 50, other, "gc"), At(6, 60, other, "gc"), ("gc",))
    calls = [SettingCall(At(4, 41, THREAD, "set_cache_limit"), 0, 99, STACKS[1], 3)]
    crossings = [At(2, 20, THREAD, "active above the memory limit, 1.0 KiB")]

    report = timeline(
        read(two_lines(), marks=marks, ranges=[span], calls=calls, crossings=crossings)
    )

    columns = ("name", "active", "cache", "peak", "allocated_bytes", "freed_bytes")
    assert [tuple(step[c] for c in columns) for step in report["steps"]] == [
        ("", 0, 0, 1000, 1000, 0),
        ("one", 1000, 0, 4500, 3500, 3000),
        ("two", 1500, 3000, 4500, 3000, 3000),
    ]
    assert report["steps"][1]["most_allocated"]["label"] == MODEL
    assert report["steps"][1]["most_allocated"]["bytes"] == 3000
    assert report["steps"][2]["freed_during"] == {"gc": 3000}
    assert report["steps"][2]["most_freed"]["label"] == TRAIN
    (call,) = report["calls"]
    assert (call["name"], call["value"], call["previous"]) == ("set_cache_limit", 0, 99)
    assert call["frames"][0]["line"] == 41
    assert call["from_at"] < call["at"]
    (crossing,) = report["crossings"]
    assert (crossing["name"], crossing["time_us"], crossing["thread"]) == (
        "active above the memory limit, 1.0 KiB",
        20,
        THREAD,
    )
    assert crossing["active"] > 1024
    assert report["ranges"][0]["duration_us"] == 10


@quick
@given(heaps(), st.lists(st.integers(0, 30), max_size=8).map(sorted))
def test_steps_add_up(heap: Heap, places: list[int]) -> None:
    marks = [At(at, 10 * at, THREAD, f"at {at}") for at in places]
    history = read(heap, marks=marks)

    report = timeline(history)

    steps = report["steps"]
    assert len(steps) == (len(marks) + 1 if marks else 0)
    for step, after in itertools.pairwise(steps):
        assert step["to_at"] == after["from_at"]
        change = step["allocated_bytes"] - step["freed_bytes"]
        assert step["active"] + change == after["active"]
    for step in steps:
        most = step["most_allocated"]
        assert (most is None) == (step["allocations"] == 0)
        if most:
            inside = history.blocks[
                (history.blocks["start"] >= step["from_at"])
                & (history.blocks["start"] < step["to_at"])
            ]
            sums: dict[str, int] = {}
            for block in inside:
                label = line_of(history.stacks[block["stack"]])
                sums[label] = sums.get(label, 0) + int(block["size"])
            assert most["bytes"] == max(sums.values()) == sums[most["label"]]


def test_timeline_slices_keep_every_spike() -> None:
    heap = Heap()
    for _ in range(500):
        heap.free(heap.new(10, stack=1))
    heap.free(heap.new(5000, stack=2), Action.FreeActiveToOS)
    for _ in range(500):
        heap.free(heap.new(10, stack=1))
    history = read(heap)

    for by_time in (False, True):
        slices = timeline(history, slices=7, time=by_time)["slices"]
        assert len(slices) == 7
        assert max(part["active"] for part in slices) == history.peak == 5000
        assert slices[0]["from_at"] == 0
        assert slices[-1]["to_at"] == len(history)
        pairs = itertools.pairwise(slices)
        assert all(a["to_at"] == b["from_at"] for a, b in pairs)


def test_diff_says_what_changed() -> None:
    old, new = Heap(), Heap()
    old.new(1000, stack=1)
    old.new(50, stack=2)
    new.new(1500, stack=1)
    new.new(1500, stack=1)
    new.new(70, stack=4)

    report = diff(read(old), read(new))

    assert brief(report["rows"], "change", "bytes", "buffers") == [
        (MODEL, "grew", 2000, 1),
        (DATA, "appeared", 70, 1),
        (TRAIN, "went", -50, -1),
    ]
    assert (report["old"]["bytes"], report["new"]["bytes"]) == (1050, 3070)
    assert diff(read(old), read(old))["rows"] == []
    assert diff(read(old), read(old))["same"] == 2
    assert len(diff(read(old), read(new), threshold=60)["rows"]) == 2
    with pytest.raises(ValueError, match="--at must be one of peak, end, allocated"):
        diff(read(old), read(new), at="noon")


def test_growth_beyond_the_top_counts(tmp_path: Any) -> None:
    old, new = Heap(), Heap()
    old.new(10_000_000, stack=1)
    old.new(100, stack=2)
    new.new(1000, stack=1)
    new.new(900_000, stack=2)
    files = [
        str(dump(heap.recording(), tmp_path / name))
        for heap, name in ((old, "old.pickle"), (new, "new.pickle"))
    ]

    result = CliRunner().invoke(main, ["diff", *files, "--top", "1", "--fail"])

    assert result.exit_code == 3
    assert "shrank" in result.stdout


def test_failed_allocations_are_told() -> None:
    oom = OutOfMemory(
        At(2, 20, THREAD, "no memory"), 1 << 34, 123, 1500, 0, traceback_id=1
    )
    built = build(two_lines().recording(ooms=[oom]))

    report = summary(from_snapshot(built))

    (row,) = report["ooms"]
    assert (row["size"], row["free"], row["active"]) == (1 << 34, 123, 1500)
    assert (row["message"], row["frames"][0]["line"]) == ("no memory", 12)
    (entry,) = [e for e in built["device_traces"][0] if e["action"] == "oom"]
    assert built["device_traces"][0].index(entry) == row["at"]
    assert (entry["size"], entry["device_free"]) == (1 << 34, 123)


def test_groups_follow_every_key() -> None:
    def context(traceback_id: int) -> Context:
        return Context(("fwd", "attn"), "layers.1") if traceback_id == 1 else Context()

    history = read(two_lines(), context=context)
    labels = {
        by: set(group(history, by).labels)
        for by in KEYS
        if by not in ("thread", "stream")
    }

    assert labels["line"] == {MODEL, TRAIN}
    assert labels["function"] == {
        "/app/model.py Block.__call__",
        "/app/train.py <module>",
    }
    assert labels["file"] == {"/app/model.py", "/app/train.py"}
    assert labels["stack"] == {f"{MODEL} <- /app/train.py:40 <module>", TRAIN}
    assert labels["range"] == {"fwd/attn", "no range"}
    assert labels["module"] == {"layers.1", "no module"}
    assert labels["primitive"] == {"Matmul", "Add", "leaf array"}
    assert labels["action"] == {"AllocNew", "AllocReuse"}
    for by in KEYS:
        groups = group(history, by)
        assert groups.total(history.blocks["size"]).sum() == 7500
        assert groups.count().sum() == 4
    with pytest.raises(ValueError, match="--by must be one of line, caller"):
        group(history, "colour")


def test_the_caller_is_the_programs_own_line() -> None:
    library = Frame("/venv/lib/python3.11/site-packages/mlx/nn/linear.py", 52, "init")
    standard = Frame("<frozen runpy>", 88, "run")
    own = Frame("/home/me/train.py", 3, "main")

    assert caller_of((library, standard, own)) == "/home/me/train.py:3 main"
    assert caller_of((library,)) == line_of((library,))
    assert not is_own(library.filename)
    assert is_own(own.filename)
    assert caller_of(()) == "no stack"


@quick
@given(heaps())
def test_reports_agree_with_the_allocator(heap: Heap) -> None:
    history = read(heap)

    found = peak(history, top=1000)
    assert found["moment"]["active"] == heap.peak
    assert sum(row["bytes"] for row in found["rows"]) == heap.peak
    assert tree(history, threshold=0)["root"]["bytes"] == heap.peak
    report = leaks(history, top=1000)
    live = sum(row["bytes"] for row in report["live"]) + report["before"]["bytes"]
    assert live == heap.totals()[0]
    for made in (summary(history), timeline(history), diff(history, history)):
        json.dumps(made, allow_nan=False)  # plain data, all of it


VERBS = ("summary", "peak", "leaks", "tree", "timeline")


def test_commands_print_tables_and_json(tmp_path: Any) -> None:
    heap, marks = growing_heap(5)
    path = str(dump(heap.recording(marks=marks), tmp_path / "out.pickle"))

    for verb in VERBS:
        text = CliRunner().invoke(main, [verb, path])
        plain = CliRunner().invoke(main, [verb, path, "--json"])
        assert (text.exit_code, plain.exit_code) == (0, 0), text.output
        assert path in text.stdout
        report = json.loads(plain.stdout)
        assert (report["report"], report["format"], report["file"]) == (verb, 1, path)
    both = CliRunner().invoke(main, ["diff", path, path])
    assert "Nothing changed." in both.stdout


def test_commands_tell_of_the_memory_limit_and_of_calls_that_nobody_saw(
    tmp_path: Any,
) -> None:
    # GIVEN two crossings in the file, of three, and a call without a stack
    name = "active above the memory limit, 1.0 KiB"
    crossings = [At(2, 20, THREAD, name), At(5, 50, THREAD, name)]
    calls = [SettingCall(At(4, 41, THREAD, "set_cache_limit"), 0, 99)]
    recording = two_lines().recording(
        crossings=crossings, calls=calls, settings={"limit_crossings": 3}
    )
    path = str(dump(recording, tmp_path / "out.pickle"))

    text = {
        verb: " ".join(CliRunner().invoke(main, [verb, path]).stdout.split())
        for verb in ("summary", "timeline")
    }

    assert (
        "Active above the memory limit, 1.0 KiB: 3 times, first after 20 us (entry 4) "
        "with 1.5 KiB at /app/train.py:41 <module>"
    ) in text["summary"]
    assert f"4 20 us 1.5 KiB {name} /app/train.py:41 <module>" in text["timeline"]
    assert f"9 50 us 4.4 KiB {name} /app/train.py:41 <module>" in text["timeline"]
    for found in text.values():
        assert "set_cache_limit by a call that was not seen: C++ code" in found


def test_exit_codes_are_for_scripts(tmp_path: Any) -> None:
    heap, marks = growing_heap(5)
    grows = str(dump(heap.recording(marks=marks), tmp_path / "grows.pickle"))
    calm = str(dump(two_lines().recording(), tmp_path / "calm.pickle"))

    def code(*arguments: str) -> int:
        return CliRunner().invoke(main, list(arguments)).exit_code

    assert code("leaks", grows, "--fail") == 3
    assert code("leaks", calm, "--fail", "--marks", "*") == 0
    assert code("diff", grows, calm, "--at", "end", "--fail") == 3
    assert code("diff", calm, calm, "--fail") == 0
    assert code("leaks", grows, "--from", "nowhere") == 2
    assert code("peak", grows, "--at", "99999") == 2
    assert code("tree", grows, "--at", "-2") == 2
    assert code("peak", grows, "--at", "-1") == 0
    assert code("peak", grows, "--by", "colour") == 2
    assert code("peak", str(tmp_path / "missing")) == 1
    assert code("peak") == 2


@pytest.mark.slow
def test_a_million_events_take_less_than_two_gigabytes(tmp_path: Any) -> None:
    # GIVEN a dump of a million events
    path = str(dump(many(1_000_000), tmp_path / "out.pickle"))

    # WHEN the reports that need most are made, each in a process of its own
    for verb in ("summary", "diff"):
        arguments = [verb, path] + [path] * (verb == "diff")
        code = f"""
import resource, sys
from mlxmem.cli import main
main({arguments!r}, standalone_mode=False)
kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(kilobytes, file=sys.stderr)
"""
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=280
        )

        # THEN its memory stays in bounds
        assert done.returncode == 0, done.stderr
        assert int(done.stderr) < 2_000_000, verb


def test_names_send_nothing_to_the_terminal(tmp_path: Any) -> None:
    heap = Heap()
    heap.new(100, stack=1)
    names = [("/x/\x1b]0;pwned\x07.py", "\x9b31mred\u202e\r\n\udc80", 1)]
    marks = [At(0, 0, THREAD, "a"), At(1, 1, THREAD, "b")]
    recording = heap.recording(resolve=lambda traceback_id: names, marks=marks)
    path = str(dump(recording, tmp_path / "out.pickle"))

    for verb in VERBS:
        result = CliRunner().invoke(main, [verb, path], catch_exceptions=False)
        lines = result.stdout.split("\n")
        assert all(line.isprintable() for line in lines), (verb, lines)


def test_names_from_a_recording_are_no_markup(tmp_path: Any) -> None:
    heap = Heap()
    heap.new(100, stack=1)
    names = [("/app/[bold]x.py", "[red]f[/red] [/]", 1)]
    recording = heap.recording(resolve=lambda traceback_id: names)
    path = str(dump(recording, tmp_path / "out.pickle"))

    for verb in VERBS:
        result = CliRunner().invoke(main, [verb, path], catch_exceptions=False)
        assert result.exit_code == 0
        assert verb == "timeline" or "[red]f[/red]" in result.stdout


def test_times_count_from_the_first_entry() -> None:
    history = read(busy_heap())

    assert history.time_us[0] == START_US
    assert summary(history)["start"]["time_us"] == 0
    assert summary(history)["end"]["time_us"] == 10 * (len(busy_heap().rows) - 1)


def test_summary_points_to_the_cache_where_it_holds_more_than_arrays(
    tmp_path: Path,
) -> None:
    heap = Heap()
    for _ in range(3):
        heap.free(heap.new(1000))
    kept = Heap()
    kept.new(1000)

    def printed(heap: Heap) -> str:
        dump(heap.recording(), tmp_path / "out.pickle")
        return (
            CliRunner().invoke(main, ["summary", str(tmp_path / "out.pickle")]).output
        )

    assert "`mlxmem cache`" in printed(heap)
    assert "`mlxmem cache`" not in printed(kept)
