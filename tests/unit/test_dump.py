"""Dumps without dicts: the same content, small, and safe to interrupt."""

from __future__ import annotations

import dataclasses
import errno
import io
import os
import pathlib
import pickle
import pickletools
import signal
import sys
import threading
from typing import Any

import numpy as np
import pytest
from handmade import Heap, PointerHeap, busy_heap, heaps, quick, resolve
from hypothesis import given, strategies as st

from mlxmem import _pickle_writer, dump_file
from mlxmem.events import RAW_EVENT, Action, Recording, decode, from_dicts
from mlxmem.snapshot import _Builder, build, dump
from mlxmem.tables import Rows, Shared, Table, keys_of, to_objects


def many(count: int, *, sizes: int = 1_000) -> Recording:
    """Return `count` events: every buffer is allocated, cached and given back."""
    rng = np.random.default_rng(1)
    events = np.zeros(count, RAW_EVENT)
    buffer = np.arange(count) // 3
    events["action"] = np.resize([0, 3, 6], count)
    events["addr"] = 0x7F00_0000_0000 + buffer * 4_096
    events["size"] = rng.integers(1, sizes, count // 3 + 1)[buffer] * 4
    events["requested_size"] = events["size"]
    events["traceback_id"] = rng.integers(1, 7, count // 3 + 1)[buffer]
    events["primitive_id"] = rng.integers(1, 4, count // 3 + 1)[buffer]
    events["timestamp_us"] = np.arange(count)
    events["thread_id"] = 4711
    events["stream"] = np.resize([0, -1, -1], count)
    left = events[3 * (count // 3) :]
    return Recording(
        events=events,
        primitives=("", "Matmul", "Add", "Reshape"),
        active=int(left["size"].sum()) if len(left) == 1 else 0,
        cache=int(left["size"][0]) if len(left) == 2 else 0,
        start_us=1_750_000_000_000_000,
        resolve=resolve,
    )


def load(path: pathlib.Path) -> Any:
    with open(path, "rb") as file:
        return pickle.load(file)


@pytest.mark.parametrize("max_entries", range(23))
def test_the_file_holds_what_the_snapshot_holds(
    tmp_path: pathlib.Path, max_entries: int
) -> None:
    # GIVEN rings that lose nothing, something and all but one event
    recording = busy_heap().recording(max_entries)

    # WHEN
    path = dump(recording, tmp_path / "out.pickle")

    # THEN values, their types and the order of keys are the same
    assert repr(load(path)) == repr(build(recording))


@quick
@given(heaps() | heaps(PointerHeap), st.integers(0, 12), st.data())
def test_random_recordings_dump_what_they_build(
    tmp_path_factory: pytest.TempPathFactory,
    heap: Heap,
    max_entries: int,
    data: st.DataObject,
) -> None:
    # GIVEN a sound recording, and events of which some were taken out
    events = decode(heap.recording())
    lost = data.draw(st.sets(st.integers(0, max(len(events) - 1, 0))))
    events = [e for i, e in enumerate(events) if i not in lost]
    broken = from_dicts(events, settings=heap.recording().settings)
    target = tmp_path_factory.mktemp("dump") / "out.pickle"
    for recording in (heap.recording(max_entries), broken):
        # WHEN
        dump(recording, target)

        # THEN
        assert repr(load(target)) == repr(build(recording))


def test_all_numbers_of_an_event_arrive() -> None:
    # GIVEN what no allocator says but a file of events may
    heap = Heap()
    heap.new(10, stack=1)
    (event,) = decode(heap.recording())
    for addr in (1, 2**31 - 1, 2**31, 2**47, 2**63 - 1, 2**63, 2**64 - 20):
        for time in (-(2**40), -1, 0, 255, 256, 65_535, 65_536, 2**31, 2**52):
            changes = {"addr": addr, "timestamp_us": time, "size": 2**45}
            recording = from_dicts([event | changes])

            # WHEN
            file = io.BytesIO()
            _dump(recording, file)

            # THEN
            assert pickle.loads(file.getvalue()) == build(recording)


def _dump(recording: Recording, file: io.BytesIO) -> None:
    """Dump as a device is written to: without a temporary file."""
    builder = _Builder(recording)
    _pickle_writer.dump(builder.build(), file.write, first=builder.common())


def test_pieces_follow_each_other_without_a_seam(tmp_path: pathlib.Path) -> None:
    # GIVEN events of more than two pieces, with a hole on a seam and cached bytes
    # from before that go in several parts
    recording = many(3 * 45_000)
    events = np.delete(recording.events, [65_536, 65_537, 90_001])
    for index in (10, 65_535, 65_536, 131_071, 131_072):
        part = np.zeros(1, RAW_EVENT)
        part["action"], part["size"] = Action.FreeCacheToOS, 100
        part["timestamp_us"] = events["timestamp_us"][index]
        events = np.insert(events, index, part)
    recording = dataclasses.replace(recording, events=events)

    # WHEN
    path = dump(recording, tmp_path / "out.pickle")

    # THEN
    loaded = load(path)
    assert loaded == build(recording)
    assert loaded["allocator_settings"]["inconsistent_events"] > 0
    times = [entry["time_us"] for entry in loaded["device_traces"][0]]
    assert times == sorted(times)


def test_equal_stacks_stay_one_object(tmp_path: pathlib.Path) -> None:
    # GIVEN ids 4 and 5, which read the same
    heap = Heap()
    heap.new(10, stack=4)
    heap.new(10, stack=5)

    # WHEN
    loaded = load(dump(heap.recording(), tmp_path / "out.pickle"))

    # THEN
    trace = loaded["device_traces"][0]
    owners = [
        *trace,
        *loaded["segments"],
        *(s["blocks"][0] for s in loaded["segments"]),
    ]
    assert len({id(owner["frames"]) for owner in owners}) == 1


def test_an_entry_takes_less_than_70_bytes(tmp_path: pathlib.Path) -> None:
    recording = many(30_000)
    path = dump(recording, tmp_path / "out.pickle")
    entries = len(load(path)["device_traces"][0])
    assert entries == 50_000
    assert path.stat().st_size / entries < 70


def test_live_blocks_take_less_than_180_bytes(tmp_path: pathlib.Path) -> None:
    # GIVEN buffers of which none is freed: a segment and two entries each
    recording = many(30_000)
    events = recording.events
    events["addr"] += np.arange(len(events), dtype=np.uint64) * np.uint64(1 << 13)
    events["action"] = Action.AllocNew
    active = int(events["size"].sum())
    recording = dataclasses.replace(recording, active=active, cache=0)

    # WHEN
    path = dump(recording, tmp_path / "out.pickle")

    # THEN
    assert len(load(path)["segments"]) == 30_000
    assert path.stat().st_size / 30_000 < 180 + 2 * 70


def test_rows_know_their_number() -> None:
    # GIVEN a recording with all kinds of extra entries
    events = decode(busy_heap().recording())
    del events[3], events[7], events[9]
    for recording in (busy_heap().recording(9), from_dicts(events)):
        # WHEN
        snapshot = _Builder(recording).build()

        # THEN what the progress counts to is what comes
        for rows in (snapshot["segments"], *snapshot["device_traces"]):
            assert rows.count == len(to_objects(rows))


# When it goes wrong.


def test_a_full_disk_leaves_what_was_there(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN a disk that takes one piece
    target = tmp_path / "out.pickle"
    target.write_text("old")
    real = _pickle_writer.dump
    pieces = []

    def full(value: Any, write: Any, **options: Any) -> None:
        def limited(piece: memoryview) -> None:
            pieces.append(len(piece))
            if len(pieces) > 1:
                raise OSError(errno.ENOSPC, "No space left on device")
            write(piece)

        real(value, limited, **options)

    monkeypatch.setattr(_pickle_writer, "dump", full)

    # WHEN
    with pytest.raises(OSError, match="No space left"):
        dump(many(60_000), target)

    # THEN pieces are about 1 MiB
    assert len(pieces) == 2
    assert 0.9 * 2**20 < pieces[0] <= 2**20
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["out.pickle"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full (Linux)")
def test_a_full_device_is_an_error() -> None:
    with pytest.raises(OSError, match="No space left"):
        dump(busy_heap().recording(), "/dev/full")
    dump(busy_heap().recording(), "/dev/null")
    assert not pathlib.Path("/dev/null").is_file()


def test_ctrl_c_ends_a_dump_and_leaves_what_was_there(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN Ctrl-C while the first piece is written
    assert threading.current_thread() is threading.main_thread()
    # A shell starts what it puts in the background with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    target = tmp_path / "out.pickle"
    target.write_text("old")
    real = _pickle_writer.dump
    pieces = []

    def interrupted(value: Any, write: Any, **options: Any) -> None:
        def wrapped(piece: memoryview) -> None:
            pieces.append(write(piece))
            signal.raise_signal(signal.SIGINT)

        real(value, wrapped, **options)

    monkeypatch.setattr(_pickle_writer, "dump", interrupted)

    # WHEN
    try:
        with pytest.raises(KeyboardInterrupt):
            dump(many(60_000), target)
    finally:
        signal.signal(signal.SIGINT, before)

    # THEN
    assert len(pieces) == 1
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["out.pickle"]


@pytest.mark.parametrize("path", [None, 3, b"out.pickle"])
def test_dump_wants_a_path(path: Any) -> None:
    with pytest.raises(TypeError, match="path must be a str or path-like, not"):
        dump(Heap().recording(), path)


# The sign of life.


class Terminal(io.StringIO):
    """A stderr that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def open_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Put one in the place of stderr; no fixture, since pytest sets stderr later."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    return stream


def test_a_long_dump_says_how_far_it_is_and_erases_it(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN any time is long
    terminal = open_terminal(monkeypatch)
    monkeypatch.setattr(dump_file, "_QUIET_S", 0)
    monkeypatch.setattr(dump_file, "_EVERY_S", 0)

    # WHEN
    dump(many(3 * 65_536), tmp_path / "out.pickle")

    # THEN every line starts where the last one did, and the last one is empty
    lines = terminal.getvalue().split("\r\x1b[K")
    assert lines[0] == lines[-1] == ""
    assert lines[1:-1] == [
        f"mlxmem: writing out.pickle {percent} %" for percent in (33, 66, 100)
    ]


def test_a_failed_dump_erases_its_line(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN a stack that can't be read, after the first piece
    terminal = open_terminal(monkeypatch)
    monkeypatch.setattr(dump_file, "_QUIET_S", 0)
    monkeypatch.setattr(dump_file, "_EVERY_S", 0)
    recording = many(3 * 65_536)
    recording.events["traceback_id"][-3:] = 99

    # WHEN
    with pytest.raises(IndexError):
        dump(recording, tmp_path / "a\x1b[2J\nb")

    # THEN the name sent no commands to the terminal
    lines = terminal.getvalue().split("\r\x1b[K")
    assert lines == ["", *(f"mlxmem: writing a?[2J?b {n} %" for n in (33, 66)), ""]
    assert os.listdir(tmp_path) == []


def test_a_short_dump_says_nothing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = open_terminal(monkeypatch)
    dump(busy_heap().recording(), tmp_path / "out.pickle")
    assert terminal.getvalue() == ""


def test_nothing_is_said_where_nobody_reads_it(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN no stderr, a closed one, a file, and a terminal that can't erase
    terminal = open_terminal(monkeypatch)
    monkeypatch.setattr(dump_file, "_QUIET_S", 0)
    closed, file = Terminal(), io.StringIO()
    closed.close()
    for stream in (None, closed, file):
        monkeypatch.setattr(sys, "stderr", stream)
        dump(busy_heap().recording(), tmp_path / "out.pickle")
    assert file.getvalue() == ""
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "dumb")
    dump(busy_heap().recording(), tmp_path / "out.pickle")
    assert terminal.getvalue() == ""


# The writer alone.


def pickled(value: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    _pickle_writer.dump({"value": value}, file.write, **options)
    return file.getvalue()


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**200), 2**200)
    | st.floats(allow_nan=False)
    | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(st.text(), inner)
    ),
    max_leaves=30,
)


@quick
@given(plain)
def test_plain_objects_come_back(value: Any) -> None:
    loaded = pickle.loads(pickled(value, first=("value", (0, 0), "x")))
    assert repr(loaded) == repr({"value": value})


@pytest.mark.parametrize("count", [0, 1, 999, 1_000, 1_001, 2_500])
def test_a_list_is_appended_a_thousand_items_at_a_time(count: int) -> None:
    # GIVEN a list of each kind
    table: Table = {"n": np.arange(count)}
    rows = Rows(count, lambda: iter([table]))
    for value in (list(range(count)), rows):
        # WHEN
        data = pickled(value)

        # THEN
        assert pickle.loads(data) == {"value": to_objects(value)}
        names = [opcode.name for opcode, _, _ in pickletools.genops(data)]
        assert names.count("APPENDS") == -(-count // 1_000)


@pytest.mark.parametrize("dtype", ["u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8"])
def test_columns_may_hold_any_integers(dtype: str) -> None:
    # GIVEN every other item, so that the memory has gaps
    info = np.iinfo(dtype)
    edges = [2**n + d for n in range(65) for d in (-1, 0, 1)]
    inside = [e * s for e in edges for s in (1, -1) if info.min <= e * s <= info.max]
    column = np.repeat(np.array([*inside, info.min, info.max], dtype), 2)[::2]

    # WHEN
    loaded = pickle.loads(pickled(Rows(0, lambda: iter([{"n": column}]))))

    # THEN
    assert loaded["value"] == [{"n": n} for n in column.tolist()]


def test_rows_of_every_kind_of_column() -> None:
    # GIVEN two tables with more shared objects in the second
    words: list[Any] = ["a", ["b"]]

    def tables() -> Any:
        for index in ([0, 1, 1], [2, 0, 2]):
            shared = Shared(words, np.array(index, np.int32))
            inner = {"word": shared, "n": np.array([1, 2, 3])}
            yield {"x": 7, "pair": (0, 0), "none": None, "word": shared, "in": inner}
            words.append({"c": 3 * "long" * 1_000})

    rows = Rows(6, tables)

    # WHEN
    loaded = pickle.loads(pickled(rows, first=["x", (0, 0)]))

    # THEN
    del words[2:]
    assert loaded == {"value": to_objects(rows)}
    first, second, third = loaded["value"][:3]
    assert second["word"] is third["word"] is second["in"][0]["word"]
    assert first["in"] == [{"word": "a", "n": 1}]
    (table, *_) = tables()
    assert keys_of(table) == ["x", "pair", "none", "word", "in", "word", "n"]


def test_what_no_reader_knows_is_refused() -> None:
    for value in (b"x", {1}, Action.AllocNew, np.int64(1), object()):
        with pytest.raises(TypeError, match="can't hold"):
            pickled([value])
    with pytest.raises(OverflowError):
        pickled(2**3_000)


@pytest.mark.parametrize(
    ("table", "error"),
    [
        ({"x": 1}, ValueError),
        ({"x": np.zeros(2, int), "y": np.zeros(3, int)}, ValueError),
        ({f"x{i}": np.zeros(2, int) for i in range(99)}, ValueError),
        ({"x": np.zeros(2)}, TypeError),
        ({"x": np.zeros(2, int), "y": {1, 2}}, TypeError),
        ({"x": Shared(["a"], np.array([1], np.int32))}, IndexError),
        ({"x": Shared(["a"], np.array([-1], np.int32))}, IndexError),
        ({"x": Shared([1], np.array([0], np.int32))}, TypeError),
    ],
)
def test_a_malformed_table_is_refused(table: Table, error: type[Exception]) -> None:
    with pytest.raises(error):
        pickled(Rows(0, lambda: iter([table])))


def test_a_pipe_behind_a_link(tmp_path: pathlib.Path) -> None:
    # GIVEN a pipe's end, whose name in /proc is a link to nothing
    out, into = os.pipe()

    # WHEN a file is written there
    dump_file.replace(f"/proc/self/fd/{into}", lambda file: file.write(b"all"))
    os.close(into)

    # THEN the pipe got it
    assert os.read(out, 10) == b"all"
    os.close(out)


def test_the_longest_name_and_the_old_mode(tmp_path: pathlib.Path) -> None:
    # GIVEN a private file with as long a name as there can be
    path = tmp_path / ("n" * 255)
    path.write_bytes(b"old")
    path.chmod(0o600)

    # WHEN it is replaced
    dump_file.replace(path, lambda file: file.write(b"new"))

    # THEN it is still private
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o600
