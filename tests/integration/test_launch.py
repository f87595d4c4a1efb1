"""Ranks that MLX's own launcher starts: a file each, and one for all of them."""

from __future__ import annotations

import json
import os
import pickle
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import viewer
from click.testing import CliRunner

import mlxmem
from mlxmem.cli import main

Entry = dict[str, Any]
MEGABYTE = 1_000_000

# Each rank keeps a megabyte more than the one before; the ring runs on the CPU.
PROGRAM = f"""
import mlx.core as mx

mx.set_default_device(mx.cpu)
group = mx.distributed.init(strict=True, backend="ring")
kept = mx.zeros({MEGABYTE // 4} * (group.rank() + 1))
mx.eval(kept)
total = mx.distributed.all_sum(mx.full(1000, 1.0 + group.rank()))
mx.eval(total)
print("sum", total[0].item(), flush=True)
"""
SHARED = """
import mlx.core as mx
import mlxmem

mx.set_default_device(mx.cpu)
group = mx.distributed.init(strict=True, backend="ring")
mlxmem.enable()
mx.eval(mx.distributed.all_sum(mx.ones(1)))  # now all of them record
kept = mx.zeros(1000 * (group.rank() + 1))
mx.eval(kept)
mlxmem.dump(f"own.rank{group.rank()}.pickle")
for turn in range(group.size()):
    if turn == group.rank():
        mlxmem.dump("shared.pickle")
        mlxmem.dump("shared.pickle")  # its own file is nobody else's
    mx.eval(mx.distributed.all_sum(mx.ones(1)))
"""
FAILING = """
import time
import mlx.core as mx

mx.set_default_device(mx.cpu)
group = mx.distributed.init(strict=True, backend="ring")
kept = mx.zeros(1000 * (group.rank() + 1))
mx.eval(kept)
mx.eval(mx.distributed.all_sum(mx.ones(1)))
if group.rank() == 1:
    raise SystemExit(3)
time.sleep(60)
"""


class Launched(NamedTuple):
    """A folder in which two ranks ran, and what the launcher printed."""

    folder: Path
    out: str
    err: str

    def rank(self, number: int) -> Entry:
        path = self.folder / f"out.rank{number}.pickle"
        snapshot: Entry = viewer.check_pickle(path.read_bytes())
        return snapshot


def free_ports(count: int) -> int:
    """Return the first of so many free ports in a row."""
    for _ in range(100):
        with socket.socket() as first:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
        try:
            for other in range(port, port + count):
                with socket.socket() as one:
                    one.bind(("127.0.0.1", other))
        except (OSError, OverflowError):
            continue
        return port
    raise RuntimeError("no free ports")


def launch(folder: Path, *command: str, backend: str = "ring") -> Launched:
    """Run a python command as two ranks."""
    launcher = "from mlx._distributed_utils.launch import main; main()"
    # MLX before 0.32 puts a python of its own before a file, but not before a command.
    port = "--nccl-port" if backend == "nccl" else "--starting-port"
    options = ["--backend", backend, "-n", "2", port, str(free_ports(2)), "--", "env"]
    done = subprocess.run(
        [sys.executable, "-c", launcher, *options, sys.executable, *command],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        env={k: v for k, v in os.environ.items() if not k.startswith("OMPI_")},
    )
    assert done.returncode == 0, done.stderr
    return Launched(folder, done.stdout, done.stderr)


def line_of(text: str, source: str = PROGRAM) -> int:
    lines = source.splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def allocated(trace: list[Entry], line: int) -> list[int]:
    """Return the bytes of the allocations of at least 1 kB that a line made."""
    return [
        entry["size"]
        for entry in trace
        if entry["action"] == "alloc"
        and entry["size"] >= 1000
        and entry["frames"][0]["filename"].endswith(".py")
        and entry["frames"][0]["line"] == line
    ]


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    folder = tmp_path_factory.mktemp("launched")
    (folder / "program.py").write_text(PROGRAM)
    return launch(folder, "-m", "mlxmem", "run", "-o", "out.pickle", "program.py")


@pytest.fixture(scope="module")
def merged(launched: Launched) -> Path:
    paths = sorted(launched.folder.glob("out.rank*.pickle"), reverse=True)
    return mlxmem.merge(paths, launched.folder / "merged.pickle")


def test_each_rank_writes_its_own_file(launched: Launched) -> None:
    # GIVEN two ranks under `mlxmem run -o out.pickle`
    assert launched.out.splitlines() == ["sum 3.0", "sum 3.0"]

    # THEN each has a file, and no other one is there
    names = sorted(path.name for path in launched.folder.glob("*.pickle"))
    assert [n for n in names if n != "merged.pickle"] == [
        "out.rank0.pickle",
        "out.rank1.pickle",
    ]
    # THEN it holds the bytes of its rank at their line, and says whose it is
    for rank in (0, 1):
        snapshot = launched.rank(rank)
        (trace,) = snapshot["device_traces"]
        assert allocated(trace, line_of("kept =")) == [MEGABYTE * (rank + 1)]
        settings = snapshot["allocator_settings"]
        assert (settings["rank"], settings["world_size"]) == (rank, 2)


def test_each_rank_says_which_it_is(launched: Launched) -> None:
    said = sorted(re.findall(r"^mlxmem: .*$", launched.err, re.MULTILINE))
    assert len(said) == 2
    peaks = (r"9\d\d\.\d KiB", r"1\.9 MiB")  # a megabyte, two, and some numbers
    for rank, line in enumerate(said):
        assert re.fullmatch(
            rf"mlxmem: rank {rank} of 2: \d+ events, peak {peaks[rank]}\. "
            rf"Next: mlxmem summary out\.rank{rank}\.pickle",
            line,
        ), line


def test_the_merged_file_has_a_device_for_each_rank(
    launched: Launched, merged: Path
) -> None:
    # WHEN the files were merged, named the wrong way round
    snapshot = viewer.check_pickle(merged.read_bytes(), devices=2)

    # THEN nothing of a rank is lost or changed but the device's number
    for rank in (0, 1):
        alone = launched.rank(rank)
        trace = snapshot["device_traces"][rank]
        assert trace == alone["device_traces"][0]
        assert allocated(trace, line_of("kept =")) == [MEGABYTE * (rank + 1)]
        segments = [s for s in snapshot["segments"] if s["device"] == rank]
        assert [s | {"device": 0} for s in segments] == alone["segments"]
        assert snapshot["mlxmem"]["devices"][rank] == alone["mlxmem"]
    settings = snapshot["allocator_settings"]
    assert settings["world_size"] == 2
    assert [rank["rank"] for rank in settings["ranks"]] == [0, 1]


@pytest.mark.parametrize(
    "verb", ["summary", "peak", "leaks", "tree", "timeline", "cache"]
)
@pytest.mark.parametrize("rank", [0, 1])
def test_each_report_is_that_of_the_ranks_own_file(
    launched: Launched, merged: Path, verb: str, rank: int
) -> None:
    # WHEN
    own = launched.folder / f"out.rank{rank}.pickle"
    of_rank, of_device = (
        CliRunner().invoke(main, [verb, str(path), "--json", *options])
        for path, options in ((own, []), (merged, ["--device", str(rank)]))
    )

    # THEN
    assert (of_rank.exit_code, of_device.exit_code) == (0, 0), of_device.output
    expected = json.loads(of_rank.stdout)
    expected |= {"file": str(merged), "device": rank, "devices": 2}
    if "settings" in expected:
        expected["settings"]["file"] = own.name
    assert json.loads(of_device.stdout) == expected


@pytest.mark.parametrize("rank", [0, 1])
def test_diff_view_and_export_take_a_device(
    launched: Launched, merged: Path, tmp_path: Path, rank: int
) -> None:
    own = str(launched.folder / f"out.rank{rank}.pickle")
    device = ["--device", str(rank)]

    def run(*command: str) -> str:
        done = CliRunner().invoke(main, list(command))
        assert done.exit_code == 0, done.output
        return done.stdout

    # WHEN, THEN
    allocations = ["export", "--format", "csv", "-o", "-"]
    assert run(*allocations, str(merged), *device) == run(*allocations, own)
    page = tmp_path / "page.html"
    run("view", str(merged), *device, "--no-open", "-o", str(page))
    assert page.stat().st_size > MEGABYTE
    shown = run("diff", str(merged), str(merged), *device, "--by", "line")
    assert "Nothing changed." in shown


def test_without_a_device_reports_show_rank_0(merged: Path) -> None:
    done = CliRunner().invoke(main, ["peak", str(merged)])
    assert done.stdout.splitlines()[0].endswith("merged.pickle, device 0")
    done = CliRunner().invoke(main, ["peak", str(merged), "--device", "2"])
    assert done.exit_code == 1
    assert "it has no device 2, only 0 to 1" in done.stderr


def as_rank_1(folder: Path, *command: str) -> tuple[list[str], list[str]]:
    """Run `mlxmem run` as rank 1 of 2; return what it says, and the new files."""
    done = subprocess.run(
        [sys.executable, "-m", "mlxmem", "run", *command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**os.environ, "MLX_RANK": "1", "MLX_WORLD_SIZE": "2"},
    )
    files = sorted(path.name for path in folder.iterdir())
    return done.stderr.splitlines(), files


def test_a_rank_that_records_nothing_says_which_it_is(tmp_path: Path) -> None:
    said, files = as_rank_1(tmp_path, "-o", "out.pickle", "-c", "pass")
    assert said == [
        "mlxmem: rank 1 of 2: nothing was recorded, since the program did not import "
        "mlx.core"
    ]
    assert files == []


def test_names_with_a_rank(tmp_path: Path) -> None:
    # GIVEN programs that say their process, and start a child
    code = "import mlx.core, os; print(os.getpid())"
    start = f"subprocess.run([sys.executable, '-c', {code!r}])"
    parent = f"import mlx.core, subprocess, sys; {start}"

    # WHEN, THEN a device is no file that a rank could have of its own
    said, files = as_rank_1(tmp_path, "-o", "/dev/null", "-c", code)
    assert said[0].endswith("Next: mlxmem summary /dev/null")
    assert files == []
    # THEN a name that mlxmem chose has both, and that of a child its process first
    _, files = as_rank_1(tmp_path, "-c", code)
    assert [re.sub(r"\d+", "N", name) for name in files] == [
        "mlxmem-code.N.rankN.pickle"
    ]
    (tmp_path / files[0]).unlink()
    _, files = as_rank_1(
        tmp_path, "--follow-children", "-o", "out.pickle", "-c", parent
    )
    assert len(files) == 2
    assert re.fullmatch(r"out\.\d+\.rank1\.pickle", files[0])
    assert files[1] == "out.rank1.pickle"


def test_ranks_that_are_stopped_leave_their_files(tmp_path: Path) -> None:
    # GIVEN a rank that fails, for which the launcher terminates the other one
    (tmp_path / "program.py").write_text(FAILING)

    # WHEN
    launch(tmp_path, "-m", "mlxmem", "run", "-o", "out.pickle", "program.py")

    # THEN
    for rank in (0, 1):
        snapshot = pickle.loads((tmp_path / f"out.rank{rank}.pickle").read_bytes())
        trace = snapshot["device_traces"][0]
        assert allocated(trace, line_of("kept =", FAILING)) == [4000 * (rank + 1)]


def test_a_dump_that_replaces_another_ranks_is_no_secret(tmp_path: Path) -> None:
    # GIVEN ranks that call dump() themselves, in turn to the same path
    (tmp_path / "program.py").write_text(SHARED)

    # WHEN
    ended = launch(tmp_path, "program.py")

    # THEN the second one is warned, and only once
    warned = re.findall(r"UserWarning: (.*)", ended.err)
    assert warned == [
        "rank 1 of 2 replaces 'shared.pickle', which another process wrote since the "
        "recording began; put the rank in the name, such as 'shared.rank1.pickle'"
    ]
    # THEN the path is what the program named
    for name, rank in (
        ("own.rank0.pickle", 0),
        ("own.rank1.pickle", 1),
        ("shared.pickle", 1),
    ):
        snapshot = pickle.loads((tmp_path / name).read_bytes())
        assert snapshot["allocator_settings"]["rank"] == rank
        line = line_of("kept =", SHARED)
        trace = snapshot["device_traces"][0]
        assert allocated(trace, line) == [4000 * (rank + 1)]
