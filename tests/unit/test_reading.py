"""Files that are no snapshots, or want to do harm: one clear line, nothing executed."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from handmade import busy_heap
from hypothesis import given, settings, strategies as st

from mlxmem._pickle_scan import scan
from mlxmem.cli import main
from mlxmem.reports import history
from mlxmem.reports.reading import SnapshotError, load
from mlxmem.snapshot import build

GOOD = build(busy_heap().recording())


class Harm:
    """Calls a function when it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def hostile(canary: Path) -> dict[str, bytes]:
    """Return pickles that make the canary file when a plain unpickler reads them."""
    touch = f"touch {canary}".encode()
    name = b"\x8c\x05posix\x8c\x06system\x93"
    text = b"\x8c" + bytes([len(touch)]) + touch
    inside = {**GOOD, "device_traces": [[{"action": Harm(os.system, touch.decode())}]]}
    return {
        "reduce": pickle.dumps(Harm(os.system, touch.decode()), 4),
        "deep inside a snapshot": pickle.dumps(inside, 4),
        "protocol 0": b"cposix\nsystem\n(S'" + touch + b"'\ntR.",
        "inst": b"\x80\x02(S'" + touch + b"'\niposix\nsystem\n.",
        "obj": b"\x80\x02(cposix\nsystem\nS'" + touch + b"'\no.",
        "stack global": b"\x80\x04" + name + text + b"\x85R.",
        "newobj": b"\x80\x04" + name + text + b"\x85\x81.",
        "build": b"\x80\x04}" + name + b"b.",
        "in a frame": b"\x80\x04\x95" + struct.pack("<Q", 40) + name + text + b"\x85R.",
        "eval": pickle.dumps(Harm(eval, f"open({str(canary)!r}, 'w')"), 5),
        "persistent id": b"\x80\x04" + text + b"Q.",
        "extension": b"\x80\x04\x82\x01.",
    }


@pytest.mark.parametrize("kind", sorted(hostile(Path("canary"))))
def test_nothing_in_a_file_is_executed(kind: str, tmp_path: Path) -> None:
    # GIVEN a file that runs a command when it is unpickled
    canary = tmp_path / "canary"
    file = tmp_path / "evil.pickle"
    file.write_bytes(hostile(canary)[kind])

    # WHEN it is read
    with pytest.raises(SnapshotError) as caught:
        load(file)

    # THEN nothing ran, and one line says that it is no snapshot
    assert not canary.exists()
    assert str(caught.value).startswith(f"{file}: not a memory snapshot, ")
    assert "\n" not in str(caught.value)


def test_the_hostile_files_would_do_harm(tmp_path: Path) -> None:
    # The test above can fail only if a plain unpickler does run them.
    for kind in ("reduce", "protocol 0", "stack global", "inst", "obj"):
        canary = tmp_path / "canary"
        code = "import pickle, sys; pickle.load(open(sys.argv[1], 'rb'))"
        file = tmp_path / "evil.pickle"
        file.write_bytes(hostile(canary)[kind])
        subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True)
        assert canary.exists(), kind
        canary.unlink()


VERBS = ("summary", "peak", "leaks", "tree", "timeline", "export", "view")


@pytest.mark.parametrize("verb", [*VERBS, "diff"])
def test_commands_refuse_in_one_line(verb: str, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    file = tmp_path / "evil.pickle"
    file.write_bytes(hostile(canary)["reduce"])
    arguments = [verb, str(file)]
    if verb == "diff":
        arguments.append(str(file))
    if verb == "export":
        arguments += ["--format", "speedscope", "-o", str(tmp_path / "out")]

    done = subprocess.run(
        [sys.executable, "-m", "mlxmem", *arguments], capture_output=True, text=True
    )

    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        f"Error: {file}: not a memory snapshot, it wants to run code"
    )
    assert not canary.exists()


def test_truncated_files_are_refused(tmp_path: Path) -> None:
    data = pickle.dumps(GOOD, 4)
    file = tmp_path / "cut.pickle"
    for size in [*range(0, len(data) - 1, 97), len(data) - 1]:
        file.write_bytes(data[:size])
        with pytest.raises(SnapshotError, match=r"cut\.pickle: ") as caught:
            load(file)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "the file is empty"),
        (b"{}", "it is no pickle of protocol 2 to 5"),
        (json.dumps({"segments": []}).encode(), "it is no pickle"),
        (b"\x89PNG\r\n\x1a\n" + bytes(100), "it is no pickle"),
        (pickle.dumps([1, 2], 4), "but a list"),
        (pickle.dumps({"segments": []}, 4), "no list 'device_traces'"),
        (pickle.dumps({"segments": {}, "device_traces": []}, 4), "no list 'segments'"),
        (pickle.dumps({1, 2}, 4), "something else than plain data"),
        (pickle.dumps(b"x" * 300, 4), "something else than plain data"),
        # A memo number of 4 billion is a table of 64 GiB for the unpickler.
        (b"\x80\x02}r\xff\xff\xff\xff.", "more memory than its size allows"),
        (b"\x80\x04\x8d" + b"\xff" * 8 + b".", "it ends in the middle"),
        (b"\x80\x04X" + b"\xff" * 4 + b".", "it ends in the middle"),
        (b"\x80\x04h\x07.", "not a memory snapshot"),
        (b"\x80\x04u.", "not a memory snapshot"),
        (b"\x80\x04.", "not a memory snapshot"),
    ],
)
def test_foreign_files_are_refused(data: bytes, says: str, tmp_path: Path) -> None:
    file = tmp_path / "foreign.pickle"
    file.write_bytes(data)

    with pytest.raises(SnapshotError) as caught:
        load(file)

    assert says in str(caught.value)
    assert str(caught.value).startswith(str(file))
    assert "\n" not in str(caught.value)


def test_what_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    for path, says in (
        (tmp_path / "missing.pickle", "No such file or directory"),
        (tmp_path, "Is a directory"),
    ):
        with pytest.raises(SnapshotError, match=says):
            load(path)
    result = CliRunner().invoke(main, ["summary", str(tmp_path / "missing.pickle")])
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: ")
    assert "Traceback" not in result.output


def _entry(**changes: Any) -> dict[str, Any]:
    return {
        "action": "alloc",
        "addr": 1,
        "size": 2,
        "stream": 0,
        "frames": [],
    } | changes


@pytest.mark.parametrize(
    "change",
    [
        {"device_traces": [[{}]]},
        {"device_traces": [[1]]},
        {"device_traces": [1]},
        {"device_traces": [[_entry(addr="x")]]},
        {"device_traces": [[_entry(addr=-1)]]},
        {"device_traces": [[_entry(addr=2**70)]]},
        {"device_traces": [[_entry(size=2**70)]]},
        {"device_traces": [[_entry(size=None)]]},
        {"device_traces": [[_entry(frames=[1])]]},
        {"device_traces": [[_entry(frames=[{"filename": "a", "line": "x"}])]]},
        {"segments": [1]},
        {"segments": [{}]},
        {"segments": [{"device": 0, "total_size": "x", "blocks": []}]},
        {"segments": [{"device": -1, "total_size": 1, "blocks": []}]},
        {"device_traces": [[_entry(size=-5)]]},
        {"device_traces": [[_entry(size=2**62)] * 3]},
        {"allocator_settings": {"trace_alloc_dropped": "many"}},
        {"allocator_settings": {(1, 2): 3}},
        {"mlxmem": {"format": 1, "marks": [{}]}},
        {"mlxmem": {"format": 1, "nodes": {"live": 1}}},
        {"mlxmem": {"format": 1, "hidden": {"addresses": [1], "visible": []}}},
    ],
)
def test_dicts_with_nonsense_inside_are_refused(change: dict[str, Any]) -> None:
    snapshot_of_little = {"segments": [], "device_traces": [], **change}

    with pytest.raises(SnapshotError) as caught:
        history.from_snapshot(snapshot_of_little, name="x")

    assert "\n" not in str(caught.value)


def test_odd_but_plain_files_are_read_by_every_command(tmp_path: Path) -> None:
    # GIVEN settings that are no JSON, and a stack deeper than Python's own limit
    settings: dict[str, Any] = {"nan": float("nan"), "text": "\x1b[31m", "list": []}
    settings["list"].append(settings)
    frame = {"filename": "/a.py", "name": "f", "line": 1}
    entries = [_entry(frames=[{**frame, "line": n} for n in range(5000)])]
    odd = {"segments": [], "device_traces": [entries], "allocator_settings": settings}
    file = tmp_path / "odd.pickle"
    file.write_bytes(pickle.dumps(odd, 4))

    for verb in (*VERBS, "diff"):
        arguments = [verb, str(file)] + [str(file)] * (verb == "diff")
        if verb == "view":
            arguments += ["--no-open", "-o", str(tmp_path / "page.html")]
        if verb == "export":
            arguments += ["--format", "pprof", "-o", str(tmp_path / "out.pb.gz")]
        json_too = [[]] if verb in ("view", "export") else [[], ["--json"]]
        for more in json_too:
            result = CliRunner().invoke(main, [*arguments, *more])
            assert result.exit_code == 0, (verb, result.output, result.exception)


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_damaged_files_end_in_an_error_or_a_snapshot(data: st.DataObject) -> None:
    # GIVEN a good file in which some bytes are others
    content = bytearray(pickle.dumps(GOOD, 4))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] = data.draw(st.integers(0, 255))
    file = Path("damaged.pickle")

    # WHEN it is read, THEN nothing but SnapshotError comes of it
    path = Path(os.environ["PYTEST_DAMAGED"]) / file
    path.write_bytes(content)
    with contextlib.suppress(SnapshotError):
        history.read(path)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DAMAGED", str(tmp_path))


def test_scan_lets_every_pickler_through() -> None:
    for protocol in (2, 3, 4, 5):
        assert scan(pickle.dumps(GOOD, protocol)) is None
