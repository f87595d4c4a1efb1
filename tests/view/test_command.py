"""`mlxmem view`: where the page goes and what it says."""

from __future__ import annotations

import pathlib
import webbrowser
from typing import Any

import pytest
from click.testing import CliRunner, Result

from mlxmem.cli import main
from mlxmem.events import FIELDS, from_dicts
from mlxmem.snapshot import dump


@pytest.fixture
def recording(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "out.pickle"
    event = dict.fromkeys(FIELDS, 0) | {
        "addr": 4096,
        "size": 1024,
        "requested_size": 1000,
        "action": "AllocNew",
        "primitive_name": "Matmul",
        "traceback": [("/app/train.py", "main", 7)],
    }
    dump(from_dicts([event]), path)
    return path


@pytest.fixture
def visited(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    addresses: list[str] = []

    def visit(address: str, *_: Any) -> bool:
        addresses.append(address)
        return True

    monkeypatch.setattr(webbrowser, "open", visit)
    return addresses


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["view", *map(str, arguments)])


def test_the_page_lies_beside_the_recording_and_is_opened(
    recording: pathlib.Path, visited: list[str]
) -> None:
    result = run(recording)

    page = recording.with_suffix(".html")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"{page}: ")
    assert "/app/train.py" in page.read_text("utf-8")
    assert visited == [page.as_uri()]


def test_no_open_only_writes(recording: pathlib.Path, visited: list[str]) -> None:
    target = recording.with_name("elsewhere.html")

    result = run(recording, "-o", target, "--no-open", "--by", "primitive")

    assert result.exit_code == 0, result.output
    assert '"by":"primitive"' in target.read_text("utf-8")
    assert visited == []


def test_without_a_browser_it_says_where_the_page_is(
    recording: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webbrowser, "open", lambda *_: False)

    result = run(recording)

    assert result.exit_code == 0
    assert recording.with_suffix(".html").as_uri() in result.stderr


def test_a_file_that_is_no_snapshot_is_one_line(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "bad.pickle"
    path.write_bytes(b"nonsense")

    result = run(path, "--no-open")

    assert result.exit_code == 1
    assert result.stderr.startswith(f"Error: {path}: not a memory snapshot")
    assert result.stderr.count("\n") == 1
    assert not path.with_suffix(".html").exists()


def test_a_missing_file_is_one_line(tmp_path: pathlib.Path) -> None:
    result = run(tmp_path / "none.pickle", "--no-open")

    assert result.exit_code == 1
    assert "No such file or directory" in result.stderr


def test_a_folder_that_is_missing_is_named(recording: pathlib.Path) -> None:
    target = recording.parent / "nowhere" / "a.html"

    result = run(recording, "-o", target, "--no-open")

    assert result.exit_code == 1
    assert result.stderr == f"Error: {target}: No such file or directory\n"


def test_a_device_that_is_not_there_is_named(recording: pathlib.Path) -> None:
    result = run(recording, "--device", "3", "--no-open")

    assert result.exit_code == 1
    assert "it has no device 3" in result.stderr


def test_a_recording_that_ends_in_html_is_not_overwritten(
    recording: pathlib.Path,
) -> None:
    file = recording.rename(recording.with_suffix(".html"))
    before = file.read_bytes()

    result = run(file, "--no-open")

    assert result.exit_code == 2
    assert file.read_bytes() == before


def test_an_unknown_key_is_bad_usage(recording: pathlib.Path) -> None:
    result = run(recording, "--by", "colour")

    assert result.exit_code == 2
    assert "'colour' is not one of" in result.stderr
