"""Exports: what each file says of a recording, to the byte."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable
from typing import Any

import exports
import numpy as np
import pytest
from exports import START_US, THREAD
from handmade import heaps, quick
from hypothesis import given

from mlxmem.export import FORMATS, Options, format_of
from mlxmem.export.weights import CHOICES, by_stack
from mlxmem.reports.history import History, from_snapshot
from mlxmem.snapshot import build

LAYER = "<module> (/app/train.py:40);Block.__call__ (/app/model.py:12)"
LOADER = "<module> (/app/train.py:41)"
BEFORE = "allocated before mlxmem.enable()"


@pytest.fixture
def history() -> History:
    return from_snapshot(exports.snapshot(), name="out.pickle")


def written(history: History, name: str, **options: Any) -> bytes:
    """Return the file of a format."""
    file = io.BytesIO()
    FORMATS[name].write(history, file, Options(**options))
    assert not file.closed
    return file.getvalue()


# Which blocks weigh.


@pytest.mark.parametrize(
    ("at", "total", "count"),
    [("peak", 1700, 3), ("end", 1200, 2), ("allocated", 2500, 3)],
)
def test_weights_add_up(history: History, at: str, total: int, count: int) -> None:
    weights = by_stack(history, at)

    assert sum(weight.size for weight in weights) == total
    assert sum(weight.count for weight in weights) == count


@quick
@given(heaps())
def test_weights_of_any_recording_add_up_to_its_totals(heap: Any) -> None:
    history = from_snapshot(build(heap.recording()))

    peak, end, _ = (sum(w.size for w in by_stack(history, at)) for at in CHOICES)

    assert peak == history.peak
    assert end == history.active_after(history.end)


def test_another_choice_is_refused(history: History) -> None:
    with pytest.raises(ValueError, match="at must be one of peak, end, allocated"):
        by_stack(history, "start")


# Collapsed stacks.


@pytest.mark.parametrize(
    ("at", "lines"),
    [
        ("peak", [f"{BEFORE} 200", f"{LAYER} 1000", f"{LOADER} 500"]),
        ("end", [f"{BEFORE} 200", f"{LAYER} 1000"]),
        ("allocated", [f"{LAYER} 2000", f"{LOADER} 500"]),
    ],
)
def test_collapsed_has_a_line_per_stack(
    history: History, at: str, lines: list[str]
) -> None:
    assert written(history, "collapsed", at=at).decode().splitlines() == lines


def test_collapsed_names_can_not_make_frames_or_lines() -> None:
    # GIVEN a function whose name has what separates frames and lines
    taken = exports.snapshot()
    exports_frame = {"filename": "/a;b.py", "line": 3, "name": "f;g\x0bh"}
    taken["device_traces"][0][3]["frames"] = [exports_frame]

    # WHEN
    text = written(from_snapshot(taken), "collapsed").decode()

    # THEN
    assert "f:g\\x0bh (/a:b.py:3) 1000\n" in text


# Speedscope.


def check_speedscope(document: dict[str, Any]) -> None:
    """Check what speedscope's file-format-spec.ts demands of sampled profiles."""
    assert document["$schema"].endswith("speedscope.app/file-format-schema.json")
    frames = document["shared"]["frames"]
    for frame in frames:
        assert isinstance(frame["name"], str)
        assert set(frame) <= {"name", "file", "line", "col"}
    assert 0 <= document["activeProfileIndex"] < len(document["profiles"])
    for profile in document["profiles"]:
        assert profile["type"] == "sampled"
        assert profile["unit"] == "bytes"
        assert isinstance(profile["name"], str)
        assert len(profile["samples"]) == len(profile["weights"])
        assert profile["startValue"] == 0
        assert profile["endValue"] == sum(profile["weights"])
        for sample in profile["samples"]:
            assert sample
            assert all(0 <= place < len(frames) for place in sample)


def test_speedscope_has_a_profile_for_each_moment(history: History) -> None:
    document = json.loads(written(history, "speedscope", at="end"))

    check_speedscope(document)
    assert document["name"] == "out.pickle"
    assert [p["name"] for p in document["profiles"]] == [
        "bytes live at the peak",
        "bytes live at the end",
        "bytes allocated during the recording",
    ]
    assert [p["endValue"] for p in document["profiles"]] == [1700, 1200, 2500]
    assert document["activeProfileIndex"] == 1


def test_speedscope_puts_the_outermost_frame_first(history: History) -> None:
    document = json.loads(written(history, "speedscope"))

    frames = document["shared"]["frames"]
    peak = document["profiles"][0]
    by_name = {
        tuple(frames[place]["name"] for place in sample): weight
        for sample, weight in zip(peak["samples"], peak["weights"], strict=True)
    }
    assert by_name == {
        (BEFORE,): 200,
        ("<module>", "Block.__call__"): 1000,
        ("<module>",): 500,
    }
    assert {"name": "<module>", "file": "/app/train.py", "line": 40} in frames
    assert {"name": BEFORE} in frames


@quick
@given(heaps())
def test_speedscope_of_any_recording_follows_the_rules(heap: Any) -> None:
    history = from_snapshot(build(heap.recording()))

    document = json.loads(written(history, "speedscope"))

    check_speedscope(document)


# pprof.


def profile_class() -> Any:
    """Return the message Profile, made of the numbers in pprof's profile.proto."""
    pytest.importorskip("google.protobuf", reason="protobuf decodes pprof's files")
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    messages = {
        "ValueType": "int64 type=1, int64 unit=2",
        "Label": "int64 key=1, int64 str=2, int64 num=3, int64 num_unit=4",
        "Sample": "uint64* location_id=1, int64* value=2, Label* label=3",
        "Mapping": "uint64 id=1, uint64 memory_start=2, uint64 memory_limit=3, "
        "uint64 file_offset=4, int64 filename=5, int64 build_id=6, "
        "bool has_functions=7, bool has_filenames=8, bool has_line_numbers=9, "
        "bool has_inline_frames=10",
        "Line": "uint64 function_id=1, int64 line=2",
        "Location": "uint64 id=1, uint64 mapping_id=2, uint64 address=3, "
        "Line* line=4, bool is_folded=5",
        "Function": "uint64 id=1, int64 name=2, int64 system_name=3, "
        "int64 filename=4, int64 start_line=5",
        "Profile": "ValueType* sample_type=1, Sample* sample=2, Mapping* mapping=3, "
        "Location* location=4, Function* function=5, string* string_table=6, "
        "int64 drop_frames=7, int64 keep_frames=8, int64 time_nanos=9, "
        "int64 duration_nanos=10, ValueType period_type=11, int64 period=12, "
        "int64* comment=13, int64 default_sample_type=14",
    }
    kind = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="profile.proto", package="pprof", syntax="proto3"
    )
    for name, fields in messages.items():
        message = file.message_type.add(name=name)
        for field in fields.split(", "):
            word, rest = field.split()
            key, number = rest.split("=")
            made = message.field.add(name=key, number=int(number))
            repeated = word.endswith("*")
            made.label = kind.LABEL_REPEATED if repeated else kind.LABEL_OPTIONAL
            word = word.rstrip("*")
            if word in messages:
                made.type, made.type_name = kind.TYPE_MESSAGE, f".pprof.{word}"
            else:
                made.type = getattr(kind, f"TYPE_{word.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("pprof.Profile"))


def decoded(data: bytes) -> tuple[Any, dict[tuple[Any, ...], list[int]]]:
    """Return a profile, and its samples by names, innermost frame first, and labels."""
    profile = profile_class().FromString(gzip.decompress(data))
    words = profile.string_table
    assert words[0] == ""
    functions = {f.id: (words[f.name], words[f.filename]) for f in profile.function}
    locations = {}
    for place in profile.location:
        (line,) = place.line
        assert place.mapping_id == 1
        locations[place.id] = (*functions[line.function_id], line.line)
    assert 0 not in functions
    assert 0 not in locations
    samples: dict[tuple[Any, ...], list[int]] = {}
    for sample in profile.sample:
        stack = tuple(locations[place] for place in sample.location_id)
        labels = tuple((words[lb.key], words[lb.str]) for lb in sample.label)
        assert (stack, labels) not in samples
        samples[stack, labels] = list(sample.value)
    return profile, samples


def test_pprof_has_what_was_allocated_and_what_lives(history: History) -> None:
    profile, samples = decoded(written(history, "pprof"))

    words = profile.string_table
    assert [(words[t.type], words[t.unit]) for t in profile.sample_type] == [
        ("alloc_objects", "count"),
        ("alloc_space", "bytes"),
        ("inuse_objects", "count"),
        ("inuse_space", "bytes"),
    ]
    layer = (
        ("Block.__call__", "/app/model.py", 12),
        ("<module>", "/app/train.py", 40),
    )
    matmul = ("primitive", "Matmul")
    inside = (matmul, ("range", "epoch/forward"), ("module", "layers.0"))
    loader = (("<module>", "/app/train.py", 41),)
    assert samples == {
        (((BEFORE, "", 0),), ()): [0, 0, 1, 200],
        (layer, inside): [1, 1000, 1, 1000],
        (layer, (matmul,)): [1, 1000, 0, 0],
        (loader, (("primitive", "Add"),)): [1, 500, 1, 500],
    }
    assert words[profile.default_sample_type] == "inuse_space"
    assert profile.time_nanos == START_US * 1000
    assert profile.duration_nanos == 40_000
    assert [words[m.filename] for m in profile.mapping] == ["out.pickle"]
    assert "mlx_version: 0.32.4" in [words[c] for c in profile.comment]


@pytest.mark.parametrize(
    ("at", "inuse", "shown"),
    [
        ("peak", 1700, "inuse_space"),
        ("end", 1200, "inuse_space"),
        ("allocated", 1200, "alloc_space"),
    ],
)
def test_pprof_says_in_use_of_the_chosen_moment(
    history: History, at: str, inuse: int, shown: str
) -> None:
    profile, samples = decoded(written(history, "pprof", at=at))

    assert sum(values[3] for values in samples.values()) == inuse
    assert sum(values[1] for values in samples.values()) == 2500
    assert profile.string_table[profile.default_sample_type] == shown


def test_pprof_files_of_one_recording_are_equal(history: History) -> None:
    assert written(history, "pprof") == written(history, "pprof")


@quick
@given(heaps())
def test_pprof_of_any_recording_adds_up(heap: Any) -> None:
    history = from_snapshot(build(heap.recording()))

    _, samples = decoded(written(history, "pprof"))

    assert sum(values[3] for values in samples.values()) == history.peak


# Traces.


def events_of(history: History, **options: Any) -> list[dict[str, Any]]:
    """Return the events of a trace."""
    document = json.loads(written(history, "trace", **options))
    events: list[dict[str, Any]] = document["traceEvents"]
    for event in events:
        assert event["ph"] in "MCXi"
        assert event["pid"] in (1, 2)
        assert "ts" in event or event["ph"] == "M"
    return events


def test_trace_counts_active_and_cache(history: History) -> None:
    events = events_of(history)

    memory = [
        (e["ts"], e["args"]["active"], e["args"]["cache"])
        for e in events
        if e["name"] == "bytes"
    ]
    # A segment and its only block are one step: between them nothing is cache.
    assert memory == [
        (0, 0, 0),
        (0, 200, 0),
        (5, 1200, 0),
        (10, 1700, 0),
        (20, 700, 1000),
        (30, 1700, 0),
        (40, 1200, 0),
    ]
    reserved = [
        (e["ts"], e["args"]["reserved"])
        for e in events
        if e["name"] == "reserved bytes"
    ]
    assert reserved == [(0, 0), (0, 200), (5, 1200), (10, 1700), (40, 1200)]


def test_trace_has_marks_ranges_failures_and_nodes(history: History) -> None:
    events = events_of(history)

    by_category = {
        e["cat"]: e for e in events if e.get("cat") != "block" and "cat" in e
    }
    mark, span, oom = (by_category[key] for key in ("mark", "range", "oom"))
    assert (mark["ph"], mark["name"], mark["ts"], mark["tid"]) == (
        "i",
        "step 1",
        15,
        THREAD,
    )
    assert (span["ph"], span["name"], span["ts"], span["dur"]) == (
        "X",
        "forward",
        4,
        10,
    )
    assert span["args"] == {"path": "epoch/forward", "open": False}
    assert (oom["name"], oom["ts"]) == ("out of memory", 45)
    assert oom["args"]["size"] == 10**12
    assert oom["args"]["message"] == "no memory"
    setting = by_category["setting"]
    assert (setting["name"], setting["ts"]) == ("set_cache_limit", 16)
    assert setting["args"] == {
        "value": 0,
        "previous": 1 << 25,
        "stack": "/app/train.py:41 <module>",
    }
    limit = by_category["limit"]
    assert (limit["ph"], limit["name"], limit["ts"], limit["tid"]) == (
        "i",
        "active above the memory limit, 1.0 KiB",
        5,
        THREAD,
    )
    assert limit["args"] == {
        "active": 1200,
        "stack": "/app/model.py:12 Block.__call__\n/app/train.py:40 <module>",
    }
    (nodes,) = (e for e in events if e["name"] == "array nodes")
    assert (nodes["ts"], nodes["args"]) == (8, {"pending": 4, "evaluated": 1})
    names = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert f"thread {THREAD}" in names


def test_trace_has_the_largest_blocks_as_slices(history: History) -> None:
    events = events_of(history, largest=2)

    slices = [e for e in events if e.get("cat") == "block"]
    assert [(e["name"], e["ts"], e["dur"], e["args"]["size"]) for e in slices] == [
        ("/app/model.py:12 Block.__call__", 5, 15, 1000),
        ("/app/model.py:12 Block.__call__", 30, 10, 1000),
    ]
    assert slices[0]["args"]["range"] == "epoch/forward"
    assert slices[0]["args"]["stack"] == (
        "/app/model.py:12 Block.__call__\n/app/train.py:40 <module>"
    )
    assert slices[0]["tid"] == slices[1]["tid"], "one follows the other in its lane"


@quick
@given(heaps())
def test_trace_slices_of_a_lane_never_overlap(heap: Any) -> None:
    history = from_snapshot(build(heap.recording()))

    slices = [e for e in events_of(history) if e.get("cat") == "block"]

    assert len(slices) == len(history.blocks)
    ends: dict[int, int] = {}
    for event in slices:
        assert ends.get(event["tid"], 0) <= event["ts"]
        ends[event["tid"]] = event["ts"] + event["dur"]


def test_trace_without_times_counts_entries() -> None:
    # GIVEN a snapshot of a torch that wrote no times
    taken = exports.snapshot()
    del taken["mlxmem"]
    for item in taken["device_traces"][0]:
        del item["time_us"]

    # WHEN
    document = json.loads(written(from_snapshot(taken), "trace"))

    # THEN
    assert document["otherData"]["time"] == "entries, for want of times"
    times = [e["ts"] for e in document["traceEvents"] if e["name"] == "bytes"]
    assert times == [0, 1, 3, 5, 7, 8, 10]


def test_trace_is_compressed_if_wanted(history: History) -> None:
    packed = written(history, "trace", compress=True)

    assert gzip.decompress(packed) == written(history, "trace")


# Tables.


def test_csv_has_a_row_per_block(history: History) -> None:
    rows = list(csv.DictReader(io.StringIO(written(history, "csv").decode())))

    assert list(rows[0]) == [
        "start", "end", "start_us", "end_us", "address", "size", "requested",
        "visible", "action", "primitive", "stream", "thread", "range", "module",
        "freed_during", "line", "stack_id", "live_at_peak", "live_at_end",
    ]  # fmt: skip
    before, first, second, again = rows
    assert first == {
        "start": "3",
        "end": "7",
        "start_us": str(START_US + 5),
        "end_us": str(START_US + 20),
        "address": str(exports.A),
        "size": "1000",
        "requested": "1000",
        "visible": "",
        "action": "AllocNew",
        "primitive": "Matmul",
        "stream": "0",
        "thread": "7",
        "range": "epoch/forward",
        "module": "layers.0",
        "freed_during": "",
        "line": "/app/model.py:12 Block.__call__",
        "stack_id": first["stack_id"],
        "live_at_peak": "1",
        "live_at_end": "0",
    }
    assert (second["size"], second["requested"]) == ("500", "400")
    assert (again["end"], again["end_us"], again["range"]) == ("", "", "")
    assert again["stack_id"] == first["stack_id"] != second["stack_id"]
    assert (before["line"], before["action"]) == (BEFORE, "Before")


def test_csv_has_whole_stacks_if_wanted(history: History) -> None:
    text = written(history, "csv", full_stacks=True).decode()

    rows = list(csv.DictReader(io.StringIO(text)))
    assert rows[1]["stack"] == (
        "/app/train.py:40 <module>;/app/model.py:12 Block.__call__"
    )


def test_csv_has_a_row_per_entry_if_wanted(history: History) -> None:
    text = written(history, "csv", rows="timeline").decode()

    assert text.splitlines()[:4] == [
        "entry,time_us,action,active,cache,reserved",
        f"0,{START_US},segment_alloc,0,0,0",
        f"1,{START_US},alloc,200,0,200",
        f"2,{START_US + 5},segment_alloc,200,0,200",
    ]
    assert len(text.splitlines()) == 1 + len(history)


def parquet_rows(data: bytes) -> list[dict[str, Any]]:
    parquet = pytest.importorskip("pyarrow.parquet")
    rows: list[dict[str, Any]] = parquet.read_table(io.BytesIO(data)).to_pylist()
    return rows


def test_parquet_has_the_same_rows_with_types(history: History) -> None:
    rows = parquet_rows(written(history, "parquet"))

    texts = csv.DictReader(
        io.StringIO(written(history, "csv", full_stacks=True).decode())
    )
    for row, text in zip(rows, texts, strict=True):
        plain = {
            key: "" if value is None else str(int(value) if value in (True, False)
                                              else value)
            for key, value in row.items()
        }  # fmt: skip
        assert plain == text
    assert rows[3]["end"] is None
    assert rows[1]["live_at_peak"] is True
    timeline = parquet_rows(written(history, "parquet", rows="timeline"))
    assert [row["active"] for row in timeline] == history.active.tolist()


@quick
@given(heaps())
def test_tables_of_any_recording_add_up(heap: Any) -> None:
    history = from_snapshot(build(heap.recording()))

    rows = parquet_rows(written(history, "parquet"))

    assert sum(r["size"] for r in rows if r["live_at_peak"]) == history.peak
    end = history.active_after(history.end)
    assert sum(r["size"] for r in rows if r["live_at_end"]) == end
    texts = csv.DictReader(io.StringIO(written(history, "csv").decode()))
    assert sum(int(row["size"]) for row in texts) == sum(r["size"] for r in rows)


# All formats.


def test_an_empty_recording_can_be_exported() -> None:
    empty = {"segments": [], "device_traces": [[]]}

    for name in FORMATS:
        if name == "parquet":
            pytest.importorskip("pyarrow")
        for rows in ("blocks", "timeline"):
            written(from_snapshot(empty), name, rows=rows)


def test_the_name_of_a_file_says_its_format() -> None:
    for name, kind in FORMATS.items():
        for suffix in kind.suffixes:
            assert format_of(f"/tmp/out{suffix}") == name
    assert format_of("out.pickle") is None


def sums(name: str) -> Callable[[bytes], int]:
    """Return what reads the bytes live at the peak out of a format's file."""

    def of_csv(data: bytes) -> int:
        rows = csv.DictReader(io.StringIO(data.decode()))
        return sum(int(row["size"]) for row in rows if row["live_at_peak"] == "1")

    def of_trace(data: bytes) -> int:
        events = json.loads(data)["traceEvents"]
        return max(e["args"]["active"] for e in events if e["name"] == "bytes")

    def of_parquet(data: bytes) -> int:
        import pyarrow.parquet

        table = pyarrow.parquet.read_table(io.BytesIO(data))
        sizes = table["size"].to_numpy()
        return int(sizes[table["live_at_peak"].to_numpy()].sum())

    return {
        "speedscope": lambda data: json.loads(data)["profiles"][0]["endValue"],
        "collapsed": lambda data: sum(
            int(line.rpartition(b" ")[2]) for line in data.splitlines()
        ),
        "pprof": lambda data: sum(v[3] for v in decoded(data)[1].values()),
        "trace": of_trace,
        "csv": of_csv,
        "parquet": of_parquet,
    }[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", list(FORMATS))
def test_a_million_allocations_and_frees_are_written(name: str) -> None:
    # GIVEN half a million blocks, made and freed, at a thousand places 32 deep
    if name == "parquet":
        pytest.importorskip("pyarrow")
    history = exports.large(500_000)
    assert np.count_nonzero(history.blocks["end"] < len(history)) == 250_000

    # WHEN
    data = written(history, name)

    # THEN nothing is missing
    assert sums(name)(data) == history.peak
