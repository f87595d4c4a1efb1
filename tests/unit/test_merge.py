"""Recordings of several ranks become one file, a device for each."""

from __future__ import annotations

import pathlib
import pickle
import sys
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner, Result
from handmade import START_US, Heap, busy_heap

import mlxmem
from mlxmem.cli import main
from mlxmem.events import Mark, Range
from mlxmem.reports import history
from mlxmem.reports.reading import SnapshotError
from mlxmem.snapshot import build, write

Entry = dict[str, Any]
MINUTE_US = 60_000_000


def heap_of(rank: int) -> Heap:
    """Return a heap whose totals depend on the rank."""
    heap = Heap()
    weights = heap.new(1000 * (rank + 1), stack=1, primitive=1, stream=0)
    heap.new(64, stack=2, primitive=2, stream=0)
    heap.free(weights)
    heap.new(300 + rank, stack=3 if rank else 2)
    return heap


def write_rank(
    folder: pathlib.Path,
    rank: int | None,
    world_size: int | None = None,
    *,
    name: str = "",
    heap: Heap | None = None,
    **changes: Any,
) -> pathlib.Path:
    """Write a recording as rank `rank` of `world_size` would."""
    settings = {"backend": "cpu", "mlx_version": "0.0", "cache_limit": 10 + (rank or 0)}
    if rank is not None:
        settings |= {"rank": rank, "world_size": world_size}
    recording = (heap or heap_of(rank or 0)).recording(settings=settings, **changes)
    return write(build(recording), folder / (name or f"out.rank{rank}.pickle"))


def load(path: pathlib.Path) -> Entry:
    snapshot: Entry = pickle.loads(path.read_bytes())
    return snapshot


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def change(path: pathlib.Path, edit: Callable[[Entry], object]) -> pathlib.Path:
    """Edit what is in a file."""
    snapshot = load(path)
    edit(snapshot)
    path.write_bytes(pickle.dumps(snapshot, 4))
    return path


def test_ranks_are_sorted_and_stay_as_they_were(tmp_path: pathlib.Path) -> None:
    # GIVEN three ranks, more than nine of them in the program's order of names
    paths = [write_rank(tmp_path, rank, 3) for rank in (2, 0, 1)]

    # WHEN
    out = mlxmem.merge(paths, tmp_path / "all.pickle")

    # THEN
    assert out == tmp_path / "all.pickle"
    merged = load(out)
    assert list(map(len, merged["device_traces"])) == [8, 8, 8]
    for rank, path in zip((2, 0, 1), paths, strict=True):
        alone = load(path)
        assert merged["device_traces"][rank] == alone["device_traces"][0]
        assert merged["mlxmem"]["devices"][rank] == alone["mlxmem"]
        segments = [s for s in merged["segments"] if s["device"] == rank]
        assert [s | {"device": 0} for s in segments] == alone["segments"]
        assert sum(s["total_size"] for s in segments) == 1364 + 1001 * rank
        read = history.read(out, rank)
        assert (read.device, read.devices, read.source) == (rank, 3, "mlxmem")
        assert read.peak == 1000 * (rank + 1) + 64
        assert read.settings == history.read(path).settings | {"file": path.name}


def test_settings_are_common_or_a_ranks_own(tmp_path: pathlib.Path) -> None:
    # GIVEN a rank that lost events and one that kept all
    paths = [
        write_rank(tmp_path, 0, 2, max_entries=3),
        write_rank(tmp_path, 1, 2),
    ]

    # WHEN
    settings = load(mlxmem.merge(paths, tmp_path / "all.pickle"))["allocator_settings"]

    # THEN
    assert settings == {
        "backend": "cpu",
        "mlx_version": "0.0",
        "world_size": 2,
        "zero_byte_allocs": 0,
        "inconsistent_events": 0,
        "trace_alloc_overflowed": True,
        "trace_alloc_max_entries": 0,
        "trace_alloc_dropped": 1,
        "ranks": [
            {
                "file": "out.rank0.pickle",
                "rank": 0,
                "cache_limit": 10,
                "trace_alloc_max_entries": 3,
            },
            {
                "file": "out.rank1.pickle",
                "rank": 1,
                "cache_limit": 11,
                "trace_alloc_overflowed": False,
                "trace_alloc_dropped": 0,
            },
        ],
    }
    assert history.read(tmp_path / "all.pickle", 0).dropped == 1
    assert history.read(tmp_path / "all.pickle", 1).dropped == 0


def test_equal_stacks_are_one_object(tmp_path: pathlib.Path) -> None:
    # GIVEN ranks that run the same lines
    heaps = [busy_heap(), busy_heap()]
    paths = [
        write_rank(tmp_path, rank, 2, heap=heap) for rank, heap in enumerate(heaps)
    ]

    # WHEN
    merged = load(mlxmem.merge(paths, tmp_path / "all.pickle"))

    # THEN the second one brings no new stack
    first, second = (
        {id(entry["frames"]) for entry in trace} for trace in merged["device_traces"]
    )
    assert first == second
    assert {id(s["frames"]) for s in merged["segments"]} <= first
    both = sum(path.stat().st_size for path in paths)
    assert (tmp_path / "all.pickle").stat().st_size < 0.8 * both


def test_marks_and_ranges_stay_with_their_rank(tmp_path: pathlib.Path) -> None:
    # GIVEN
    paths = []
    for rank in (0, 1):
        mark = Mark(1 + rank, 5, 77, f"step of {rank}")
        end = Mark(3, 25 - rank, 77, "")
        span = Range(mark, end, (f"range of {rank}",))
        paths.append(write_rank(tmp_path, rank, 2, marks=(mark,), ranges=(span,)))

    # WHEN
    out = mlxmem.merge(paths, tmp_path / "all.pickle")

    # THEN
    for rank, path in enumerate(paths):
        read, alone = history.read(out, rank), history.read(path)
        assert [mark.name for mark in read.marks] == [f"step of {rank}"]
        assert read.marks == alone.marks
        assert read.spans == alone.spans
    annotations = load(out)["external_annotations"]
    assert [(a["name"], a["stage"], a["device"]) for a in annotations] == [
        ("range of 0", "START", 0),
        ("range of 1", "START", 1),
        ("range of 1", "END", 1),
        ("range of 0", "END", 0),
    ]


def test_without_ranks_the_order_of_the_arguments_counts(
    tmp_path: pathlib.Path,
) -> None:
    # GIVEN
    heaps = [heap_of(4), heap_of(3)]
    paths = [
        write_rank(tmp_path, None, name=name, heap=heap)
        for name, heap in zip(("b.pickle", "a.pickle"), heaps, strict=True)
    ]

    # WHEN
    done = run("merge", *paths, "-o", tmp_path / "all.pickle")

    # THEN
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[:2] == [
        f"device 0: 8 entries of {paths[0]}",
        f"device 1: 8 entries of {paths[1]}",
    ]
    assert history.read(tmp_path / "all.pickle", 0).peak == 5064
    assert history.read(tmp_path / "all.pickle", 1).peak == 4064


def test_a_missing_rank_is_said_and_keeps_its_number(tmp_path: pathlib.Path) -> None:
    # GIVEN ranks 1 and 3 of 5
    paths = [write_rank(tmp_path, rank, 5) for rank in (1, 3)]
    out = tmp_path / "all.pickle"

    # WHEN
    done = run("merge", *paths, "-o", out)

    # THEN
    assert done.exit_code == 0, done.output
    assert done.stderr == "There are no files of ranks 0, 2 and 4.\n"
    assert list(map(len, load(out)["device_traces"])) == [0, 8, 0, 8, 0]
    assert history.read(out).device == 1
    assert history.read(out, 3).peak == 4064
    shown = run("summary", out, "--device", 2)
    assert shown.exit_code == 1
    assert shown.stderr == (
        f"Error: {out}: the file of rank 2 was not merged into it\n"
    )


@pytest.mark.parametrize(
    ("world_size", "line"),
    [
        (2, "There is no file of rank 0."),
        (3, "There are no files of ranks 0 and 2."),
        (11, "There are no files of ranks 0, 2, 3, 4, 5, 6, 7, 8, 9 and 10."),
        (12, "There are no files of ranks 0, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 1 more."),
    ],
)
def test_missing_ranks_are_a_sentence(
    tmp_path: pathlib.Path, world_size: int, line: str
) -> None:
    path = write_rank(tmp_path, 1, world_size)
    done = run("merge", path, "-o", tmp_path / "all.pickle")
    assert done.exit_code == 0, done.output
    assert done.stderr == f"{line}\n"


def test_what_is_printed(tmp_path: pathlib.Path) -> None:
    paths = [write_rank(tmp_path, rank, 2) for rank in (0, 1)]
    out = tmp_path / "all.pickle"
    done = run("merge", *paths, "-o", out)
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert lines[:2] == [
        f"device 0 (rank 0): 8 entries of {paths[0]}",
        f"device 1 (rank 1): 8 entries of {paths[1]}",
    ]
    assert lines[2].startswith(f"{out}: ")
    assert done.stderr == ""


# --- what can't be merged ---------------------------------------------------


def _both_of_rank_1(folder: pathlib.Path) -> list[pathlib.Path]:
    return [
        write_rank(folder, 1, 2),
        write_rank(folder, 0, 2),
        write_rank(folder, 1, 2, name="b.pickle"),
    ]


def _of_other_sizes(folder: pathlib.Path) -> list[pathlib.Path]:
    return [write_rank(folder, 0, 2), write_rank(folder, 3, 4)]


def _one_without_a_rank(folder: pathlib.Path) -> list[pathlib.Path]:
    return [write_rank(folder, 1, 2), write_rank(folder, None, name="b.pickle")]


def _of_two_days(folder: pathlib.Path) -> list[pathlib.Path]:
    return [
        write_rank(folder, 0, 2, start_us=START_US + 86400 * 1_000_000),
        write_rank(folder, 1, 2),
    ]


def _of_pytorch(folder: pathlib.Path) -> list[pathlib.Path]:
    path = write_rank(folder, 1, 2)
    return [write_rank(folder, 0, 2), change(path, lambda s: s.pop("mlxmem"))]


def _merged_already(folder: pathlib.Path) -> list[pathlib.Path]:
    paths = [write_rank(folder, rank, 2) for rank in (0, 1)]
    return [*paths, mlxmem.merge(paths, folder / "out.pickle")]


def _twice(folder: pathlib.Path) -> list[pathlib.Path]:
    return [write_rank(folder, 0, 2)] * 2


def _not_there(folder: pathlib.Path) -> list[pathlib.Path]:
    return [write_rank(folder, 0, 2), folder / "out.rank1.pickle"]


def _text(folder: pathlib.Path) -> list[pathlib.Path]:
    path = folder / "out.rank0.pickle"
    path.write_text("hello")
    return [path]


def _rank_out_of_range(folder: pathlib.Path) -> list[pathlib.Path]:
    return [write_rank(folder, 2, 2)]


def _rank_of_text(folder: pathlib.Path) -> list[pathlib.Path]:
    path = write_rank(folder, 0, 2)
    return [change(path, lambda s: s["allocator_settings"].update(rank="0"))]


def _entry_without_frames(folder: pathlib.Path) -> list[pathlib.Path]:
    path = write_rank(folder, 0, 2)
    return [change(path, lambda s: s["segments"][0].pop("frames"))]


def _entry_that_is_a_list(folder: pathlib.Path) -> list[pathlib.Path]:
    path = write_rank(folder, 0, 2)
    return [change(path, lambda s: s["device_traces"][0].append(["alloc"]))]


def _float_among_the_sizes(folder: pathlib.Path) -> list[pathlib.Path]:
    path = write_rank(folder, 0, 2)
    return [change(path, lambda s: s["device_traces"][0][3].update(size=1.5))]


def _stacks_that_hold_themselves(folder: pathlib.Path) -> list[pathlib.Path]:
    def edit(snapshot: Entry) -> None:
        frames: list[Any] = []
        frames.append(frames)
        snapshot["device_traces"][0][0]["frames"] = frames

    return [change(write_rank(folder, 0, 2), edit)]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (_both_of_rank_1, "{}/out.rank1.pickle and {}/b.pickle are both of rank 1; "),
        (
            _of_other_sizes,
            "{}/out.rank3.pickle is of a program of 4 ranks, and {}/out.rank0.pickle "
            "of one of 2: of different runs",
        ),
        (_one_without_a_rank, "{}/b.pickle: has no rank, but {}/out.rank1.pickle is "),
        (
            _of_two_days,
            "{}/out.rank0.pickle begins 86,399 s after {}/out.rank1.pickle ends: of "
            "different runs",
        ),
        (_of_pytorch, "{}/out.rank1.pickle: not written by mlxmem; only its own "),
        (_merged_already, "{}/out.pickle: is merged already; name the files that "),
        (_twice, "{}/out.rank0.pickle is named twice"),
        (_not_there, "{}/out.rank1.pickle: No such file or directory"),
        (_text, "{}/out.rank0.pickle: not a memory snapshot, "),
        (_rank_out_of_range, "{}/out.rank2.pickle: not a memory snapshot, "),
        (_rank_of_text, "{}/out.rank0.pickle: not a memory snapshot, "),
        (_entry_without_frames, "{}/out.rank0.pickle: not a memory snapshot, "),
        (_entry_that_is_a_list, "{}/out.rank0.pickle: not a memory snapshot, "),
        (_float_among_the_sizes, "{}/out.rank0.pickle: not a memory snapshot, "),
        (_stacks_that_hold_themselves, "{}/out.rank0.pickle: not a memory snapshot, "),
    ],
)
def test_what_does_not_go_together_is_one_line(
    tmp_path: pathlib.Path,
    files: Callable[[pathlib.Path], list[pathlib.Path]],
    message: str,
) -> None:
    # GIVEN
    paths = files(tmp_path)
    out = tmp_path / "all.pickle"

    # WHEN
    done = run("merge", *paths, "-o", out)

    # THEN
    assert done.exit_code in (1, 2), done.output
    error = done.stderr.splitlines()[-1]
    assert error.startswith("Error: " + message.replace("{}", str(tmp_path)))
    assert not out.exists()
    with pytest.raises(ValueError, match=r"."):
        mlxmem.merge(paths, out)


def _setting(key: str, value: object) -> Callable[[Entry], object]:
    return lambda snapshot: snapshot["allocator_settings"].update({key: value})


def _annotations(value: object) -> Callable[[Entry], object]:
    return lambda snapshot: snapshot.update(external_annotations=value)


def _settings_that_hold_themselves(snapshot: Entry) -> None:
    settings = snapshot["allocator_settings"]
    settings["self"] = settings


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (_annotations(None), "TypeError: 'external_annotations' is no list"),
        (_annotations([1]), "TypeError: an annotation is no dict"),
        (_annotations([{}]), "KeyError: 'time_us'"),
        (
            _annotations([{"time_us": "x"}]),
            "TypeError: 'time_us' is no int",
        ),
        (
            _setting("trace_alloc_dropped", "abc"),
            "TypeError: 'trace_alloc_dropped' is no int",
        ),
        (
            _setting("trace_alloc_dropped", -1),
            "ValueError: 'trace_alloc_dropped' is negative",
        ),
        (
            _setting("trace_alloc_max_entries", "abc"),
            "TypeError: 'trace_alloc_max_entries' is no int",
        ),
        (
            _setting("trace_alloc_max_entries", 2**63),
            "OverflowError: 'trace_alloc_max_entries' is out of range",
        ),
        (
            _setting("trace_alloc_overflowed", "abc"),
            "TypeError: 'trace_alloc_overflowed' is no bool",
        ),
        (
            lambda s: s["allocator_settings"].pop("trace_alloc_dropped"),
            "KeyError: 'trace_alloc_dropped'",
        ),
        (
            lambda s: s["mlxmem"].update(start_us=10**70),
            "OverflowError: 'start_us' is out of range",
        ),
        (_settings_that_hold_themselves, "RecursionError: "),
    ],
)
@pytest.mark.parametrize("damaged", [0, 1])
def test_a_wrong_key_is_one_line(
    tmp_path: pathlib.Path,
    edit: Callable[[Entry], object],
    reason: str,
    damaged: int,
) -> None:
    # GIVEN a damaged file and one with an annotation, to replace an older one
    paths = [write_rank(tmp_path, rank, 2) for rank in (0, 1)]
    change(paths[1 - damaged], _annotations([{"time_us": 1}]))
    change(paths[damaged], edit)
    out = tmp_path / "all.pickle"
    out.write_bytes(b"older")
    before = sorted(tmp_path.iterdir())

    # WHEN
    done = run("merge", *paths, "-o", out)
    with pytest.raises(SnapshotError) as caught:
        mlxmem.merge(paths, out)

    # THEN
    message = f"{paths[damaged]}: not a memory snapshot, {reason}"
    assert str(caught.value).startswith(message)
    assert done.exit_code == 1
    assert done.stderr.startswith(f"Error: {message}")
    assert done.stderr.count("\n") == 1
    assert "\n" not in str(caught.value)
    assert sorted(tmp_path.iterdir()) == before
    assert out.read_bytes() == b"older"


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (99, "format 99"),
        (0, "format 0"),
        ("x", "a format"),
        (True, "a format"),
        pytest.param(10**70, "a format", id="huge"),
    ],
)
def test_a_format_of_a_later_version_is_refused(
    tmp_path: pathlib.Path, value: object, what: str
) -> None:
    # GIVEN
    paths = [write_rank(tmp_path, rank, 2) for rank in (0, 1)]
    change(paths[1], lambda s: s["mlxmem"].update(format=value))
    out = tmp_path / "all.pickle"

    # WHEN
    done = run("merge", *paths, "-o", out)
    with pytest.raises(SnapshotError) as caught:
        mlxmem.merge(paths, out)
    shown = run("summary", paths[1])

    # THEN the readers say the same
    message = (
        f"{paths[1]}: is of {what} that mlxmem {mlxmem.__version__} does not know; "
        "update mlxmem"
    )
    assert str(caught.value) == message
    assert done.exit_code == shown.exit_code == 1
    assert done.stderr == shown.stderr == f"Error: {message}\n"
    assert not out.exists()


@pytest.mark.parametrize("place", ["file", "rank"])
def test_a_merged_file_of_a_later_version_is_refused(
    tmp_path: pathlib.Path, place: str
) -> None:
    # GIVEN
    paths = [write_rank(tmp_path, rank, 2) for rank in (0, 1)]
    out = mlxmem.merge(paths, tmp_path / "all.pickle")

    # WHEN
    def edit(snapshot: Entry) -> None:
        extra = snapshot["mlxmem"]
        (extra if place == "file" else extra["devices"][1])["format"] = 2

    change(out, edit)

    # THEN
    with pytest.raises(SnapshotError, match=r"is of format 2 that .*; update mlxmem$"):
        history.read(out)


@pytest.mark.parametrize("files", [_of_other_sizes, _of_two_days])
def test_different_runs_can_be_asked_for(
    tmp_path: pathlib.Path, files: Callable[[pathlib.Path], list[pathlib.Path]]
) -> None:
    # WHEN
    out = tmp_path / "all.pickle"
    done = run("merge", *files(tmp_path), "-o", out, "--different-runs")

    # THEN
    assert done.exit_code == 0, done.output
    assert history.read(out, 0).peak == 1064


def test_ranks_may_begin_a_minute_apart(tmp_path: pathlib.Path) -> None:
    for more, error in ((0, False), (1_000, True)):
        late = START_US + 30 + MINUTE_US + more
        paths = [write_rank(tmp_path, 0, 2), write_rank(tmp_path, 1, 2, start_us=late)]
        done = run("merge", *paths, "-o", tmp_path / "all.pickle")
        assert bool(done.exit_code) == error, done.output


def test_a_merged_file_takes_no_place_of_its_parts(tmp_path: pathlib.Path) -> None:
    # GIVEN
    paths = [write_rank(tmp_path, rank, 2) for rank in (0, 1)]
    before = paths[0].read_bytes()

    # WHEN
    done = run("merge", *paths, "-o", paths[0])

    # THEN
    assert done.exit_code == 2
    assert f"{paths[0]} would be overwritten; name another output" in done.stderr
    assert paths[0].read_bytes() == before
    done = run("merge", *paths, "-o", tmp_path / "no" / "all.pickle")
    assert done.exit_code == 1
    assert done.stderr == (
        f"Error: {tmp_path / 'no' / 'all.pickle'}: No such file or directory\n"
    )


def test_arguments_of_the_function(tmp_path: pathlib.Path) -> None:
    out = tmp_path / "all.pickle"
    with pytest.raises(TypeError, match="paths must be several paths, not the one"):
        mlxmem.merge("out.rank0.pickle", out)
    with pytest.raises(ValueError, match="there is nothing to merge"):
        mlxmem.merge([], out)
    with pytest.raises(TypeError, match="out must be a str or path-like"):
        mlxmem.merge([write_rank(tmp_path, 0, 2)], 7)  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["rank", "devices"])
def test_a_damaged_merged_file_is_one_line(tmp_path: pathlib.Path, key: str) -> None:
    # GIVEN
    paths = [write_rank(tmp_path, rank, 2) for rank in (0, 1)]
    out = mlxmem.merge(paths, tmp_path / "all.pickle")

    # WHEN
    if key == "rank":
        change(out, lambda s: s["allocator_settings"].pop("ranks"))
    else:
        change(out, lambda s: s["mlxmem"].update(devices=[]))

    # THEN
    with pytest.raises(SnapshotError, match="not a memory snapshot"):
        history.read(out)


def test_an_oom_stays_what_it_is(tmp_path: pathlib.Path) -> None:
    # GIVEN entries with other keys among the rest
    def edit(snapshot: Entry) -> None:
        trace = snapshot["device_traces"][0]
        failed = {**trace[2], "action": "oom", "device_free": 5}
        del failed["addr"]
        trace.insert(3, failed)

    path = change(write_rank(tmp_path, 0, 1), edit)

    # WHEN
    merged = load(mlxmem.merge([path], tmp_path / "all.pickle"))

    # THEN
    assert merged["device_traces"] == load(path)["device_traces"]
    assert "device_free" in merged["device_traces"][0][3]


def test_a_million_numbers_are_not_made_of_one(tmp_path: pathlib.Path) -> None:
    # GIVEN a file that says it is of a huge program
    path = write_rank(tmp_path, 0, 2)
    change(path, lambda s: s["allocator_settings"].update(world_size=sys.maxsize >> 11))

    # WHEN, THEN
    merged = load(mlxmem.merge([path], tmp_path / "all.pickle"))
    assert len(merged["device_traces"]) == 1
