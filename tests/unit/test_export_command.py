"""`mlxmem export`: where files go, and what is said when something is wrong."""

from __future__ import annotations

import gzip
import json
import pathlib
import pickle
import sys
from typing import Any

import exports
import pytest
from click.testing import CliRunner, Result

from mlxmem.commands.export import command
from mlxmem.export import FORMATS


@pytest.fixture
def recording(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "out.pickle"
    path.write_bytes(pickle.dumps(exports.snapshot(), protocol=4))
    return path


def export(*arguments: Any) -> Result:
    """Run the command."""
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


@pytest.mark.parametrize("name", list(FORMATS))
def test_a_file_is_written_beside_the_recording(
    recording: pathlib.Path, name: str
) -> None:
    if name == "parquet":
        pytest.importorskip("pyarrow")

    result = export(recording, "--format", name)

    assert result.exit_code == 0, result.output
    target = recording.with_name("out" + FORMATS[name].suffixes[0])
    assert target.stat().st_size > 0
    assert result.stdout.startswith(f"{name} -> {target} (")
    assert sorted(recording.parent.iterdir()) == sorted([recording, target])


def test_the_target_says_the_format(recording: pathlib.Path) -> None:
    target = recording.with_name("heap.trace.json.gz")

    result = export(recording, "-o", target)

    assert result.exit_code == 0, result.output
    document = json.loads(gzip.decompress(target.read_bytes()))
    assert document["otherData"]["name"] == str(recording)


def test_a_trace_without_gz_in_its_name_is_plain(recording: pathlib.Path) -> None:
    target = recording.with_name("heap.trace.json")

    assert export(recording, "-o", target).exit_code == 0

    assert json.loads(target.read_bytes())["traceEvents"]


def test_standard_output_gets_the_file_and_nothing_else(
    recording: pathlib.Path,
) -> None:
    result = export(recording, "--format", "collapsed", "--at", "end", "-o", "-")

    assert result.exit_code == 0
    assert result.stdout == (
        "allocated before mlxmem.enable() 200\n"
        "<module> (/app/train.py:40);Block.__call__ (/app/model.py:12) 1000\n"
    )


def test_options_reach_the_format(recording: pathlib.Path) -> None:
    timeline = export(recording, "-f", "csv", "--rows", "timeline", "-o", "-").stdout
    stacks = export(recording, "-f", "csv", "--full-stacks", "-o", "-").stdout
    trace = export(recording, "-f", "trace", "--largest", 1, "-o", "-").stdout

    assert timeline.startswith("entry,time_us,action,active,cache,reserved\n")
    assert stacks.splitlines()[0].endswith(",live_at_end,stack")
    assert trace.count('"cat":"block"') == 1


def test_an_unknown_format_names_the_valid_ones(recording: pathlib.Path) -> None:
    result = export(recording, "--format", "svg")

    assert result.exit_code == 2
    for name in FORMATS:
        assert name in result.stderr


def test_a_missing_format_names_the_valid_ones(recording: pathlib.Path) -> None:
    result = export(recording, "-o", recording.with_name("out.bin"))

    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == (
        "Error: which format? Say --format with one of speedscope, collapsed, pprof, "
        "trace, csv, parquet."
    )


def test_parquet_without_pyarrow_says_what_to_install(
    recording: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)

    result = export(recording, "--format", "parquet")

    assert result.exit_code == 1
    assert result.stderr == (
        "Error: parquet needs pyarrow, which is not installed: pip install pyarrow\n"
    )
    assert list(recording.parent.iterdir()) == [recording]


def test_a_file_that_is_no_snapshot_is_one_line(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("dear diary")

    result = export(path, "--format", "csv")

    assert result.exit_code == 1
    assert result.stderr.startswith(f"Error: {path}: not a memory snapshot")
    assert result.stderr.count("\n") == 1
    assert not path.with_suffix(".csv").exists()


def test_a_device_that_is_not_there_is_one_line(recording: pathlib.Path) -> None:
    result = export(recording, "--format", "csv", "--device", 3)

    assert result.exit_code == 1
    assert result.stderr == f"Error: {recording}: it has no device 3, only 0 to 0\n"


def test_a_target_that_can_not_be_written_is_one_line(
    recording: pathlib.Path,
) -> None:
    folder = recording.with_name("missing")

    result = export(recording, "--format", "csv", "-o", folder / "out.csv")

    assert result.exit_code == 1
    assert result.stderr == f"Error: {folder}/out.csv: No such file or directory\n"


def test_the_recording_itself_is_never_overwritten(recording: pathlib.Path) -> None:
    before = recording.read_bytes()

    result = export(recording, "--format", "csv", "-o", recording)

    assert result.exit_code == 2
    assert result.stderr.endswith("is the recording itself; name another file.\n")
    assert recording.read_bytes() == before


def test_the_help_shows_formats_and_examples() -> None:
    result = export("--help")

    assert result.exit_code == 0
    assert "mlxmem export out.pickle --format speedscope" in result.stdout
    for name, kind in FORMATS.items():
        assert f"{name:<12} {kind.about}" in result.stdout
