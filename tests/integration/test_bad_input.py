"""Wrong arguments and places that can't be written: named, and nothing is lost."""

from __future__ import annotations

import errno
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from books import Books

import mlxmem


@pytest.mark.parametrize("value", ["x", True, 1.5, None, [3], b"1"])
def test_max_entries_of_the_wrong_type(value: Any) -> None:
    with pytest.raises(TypeError) as caught:
        mlxmem.enable(max_entries=value)
    assert "max_entries" in str(caught.value)
    assert repr(value) in str(caught.value)
    assert not mlxmem.is_enabled()


@pytest.mark.parametrize("value", [-1, -(10**30), 2**70])
def test_max_entries_out_of_range(value: int) -> None:
    with pytest.raises(ValueError, match="max_entries") as caught:
        mlxmem.enable(max_entries=value)
    assert str(value) in str(caught.value)
    assert not mlxmem.is_enabled()


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_stacks_of_the_wrong_type(value: Any) -> None:
    with pytest.raises(TypeError) as caught:
        mlxmem.enable(stacks=value)
    assert "stacks" in str(caught.value)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "name", "value"),
    [
        ((3,), {}, TypeError, "path", "3"),
        ((b"x",), {}, TypeError, "path", "b'x'"),
        ((1.5,), {}, TypeError, "path", "1.5"),
        ((), {"max_entries": -1}, ValueError, "max_entries", "-1"),
        ((), {"max_entries": 2**70}, ValueError, "max_entries", str(2**70)),
        ((), {"max_entries": "x"}, TypeError, "max_entries", "'x'"),
        ((), {"max_entries": True}, TypeError, "max_entries", "True"),
        ((), {"max_entries": None}, TypeError, "max_entries", "None"),
        ((), {"stacks": "yes"}, TypeError, "stacks", "'yes'"),
        ((), {"stacks": 1}, TypeError, "stacks", "1"),
        ((), {"max_entry": 5}, TypeError, "max_entry", ""),
    ],
)
def test_record_checks_its_arguments_when_it_is_made(
    arguments: tuple[Any, ...],
    options: dict[str, Any],
    error: type[Exception],
    name: str,
    value: str,
) -> None:
    with pytest.raises(error) as caught:
        mlxmem.record(*arguments, **options)
    assert type(caught.value) is error
    assert name in str(caught.value)
    assert value in str(caught.value)
    assert not mlxmem.is_enabled()


@pytest.mark.parametrize("value", [None, 3, 1.5])
@pytest.mark.parametrize("function", ["to_snapshot", "dump_snapshot"])
def test_events_that_are_none(tmp_path: Path, function: str, value: Any) -> None:
    arguments = [value, tmp_path / "out.pickle"][: 1 + function.startswith("dump")]
    with pytest.raises(TypeError) as caught:
        getattr(mlxmem, function)(*arguments)
    assert "events" in str(caught.value)
    assert repr(value) in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_bad_argument_leaves_the_session_as_it_was(books: Books) -> None:
    mx.eval(mx.array([1, 2]) + 1)
    events = books.events()
    with pytest.raises(ValueError, match="max_entries"):
        mlxmem.enable(max_entries=-5)
    assert mlxmem.is_enabled()
    assert mlxmem.events() == events


@pytest.mark.parametrize(
    "call", ["dump('x.pickle')", "snapshot()"], ids=["dump", "snapshot"]
)
def test_before_any_enable(tmp_path: Path, call: str) -> None:
    # GIVEN a process that never recorded
    code = f"""
import mlxmem
try:
    mlxmem.{call}
except RuntimeError as error:
    print(error)
assert not mlxmem.is_enabled()
mlxmem.disable()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stderr == ""
    assert "mlxmem.enable()" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [3, None, 1.5, object])
def test_a_path_of_the_wrong_type(books: Books, value: Any) -> None:
    with pytest.raises(TypeError) as caught:
        mlxmem.dump(value)
    assert "path" in str(caught.value)
    assert repr(value) in str(caught.value)


def dump_fails(books: Books, path: Path, error: type[OSError]) -> None:
    """Assert that dumping there fails for this reason and loses and leaves nothing."""
    keep = mx.exp(mx.ones((100,)))
    mx.eval(keep)
    events = books.events()
    folder = path.parent
    files = set(os.listdir(folder)) if folder.is_dir() else None
    with pytest.raises(OSError, match=path.name) as caught:
        mlxmem.dump(path)
    assert type(caught.value) is error
    assert mlxmem.events() == events
    if files is not None:
        assert set(os.listdir(folder)) == files
    del keep


def test_dump_to_a_directory_that_does_not_exist(books: Books, tmp_path: Path) -> None:
    dump_fails(books, tmp_path / "no" / "out.pickle", FileNotFoundError)


def test_dump_onto_a_directory(books: Books, tmp_path: Path) -> None:
    (tmp_path / "out.pickle").mkdir()
    dump_fails(books, tmp_path / "out.pickle", IsADirectoryError)
    assert (tmp_path / "out.pickle").is_dir()


def test_dump_below_a_file(books: Books, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    dump_fails(books, tmp_path / "file" / "out.pickle", NotADirectoryError)


def test_dump_to_a_read_only_directory(tmp_path: Path) -> None:
    # GIVEN a folder that may not be written, and a process that is not root
    code = """
import errno, os, sys
import mlx.core as mx
import mlxmem
fixed, free = sys.argv[1:]
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
mlxmem.enable()
keep = mx.exp(mx.ones((100,)))
mx.eval(keep)
mx.synchronize()
events = mlxmem.events()

# WHEN the snapshot is dumped there
try:
    mlxmem.dump(fixed + "/out.pickle")
except PermissionError as error:
    print(errno.errorcode[error.errno])

# THEN nothing is written, nothing lost, and it can be dumped elsewhere
assert os.listdir(fixed) == []
assert len(events) > 1 and mlxmem.events() == events
assert str(mlxmem.dump(free + "/out.pickle")) == free + "/out.pickle"
assert os.listdir(free) == ["out.pickle"]
"""
    # Not in tmp_path, which nobody but its owner may enter.
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        fixed, free = os.path.join(folder, "fixed"), os.path.join(folder, "free")
        os.mkdir(fixed)
        os.mkdir(free)
        os.chmod(fixed, 0o555)
        os.chmod(free, 0o777)
        done = subprocess.run(
            [sys.executable, "-c", code, fixed, free],
            cwd=folder,
            capture_output=True,
            text=True,
        )
    assert (done.stderr, done.stdout) == ("", "EACCES\n")


def test_dump_where_no_file_can_be_made(books: Books) -> None:
    # GIVEN a folder of the kernel's, in which nobody can make a file, root neither
    keep = mx.exp(mx.ones((100,)))
    mx.eval(keep)
    events = books.events()
    before = set(os.listdir("/proc/self"))
    with pytest.raises(OSError, match=r"out\.pickle") as caught:
        mlxmem.dump("/proc/self/out.pickle")
    root = os.geteuid() == 0
    assert caught.value.errno == (errno.ENOENT if root else errno.EACCES)
    assert mlxmem.events() == events
    assert set(os.listdir("/proc/self")) == before


def test_dump_to_a_full_device(books: Books) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    # GIVEN enough events that the file is larger than any buffer before it
    for n in range(2000):
        mx.array([n])
    events = books.events()
    before = set(os.listdir("/dev"))
    with pytest.raises(OSError, match="No space left") as caught:
        mlxmem.dump("/dev/full")
    assert caught.value.errno == errno.ENOSPC
    assert mlxmem.events() == events
    assert set(os.listdir("/dev")) == before
    assert not os.path.isfile("/dev/full")


def test_dump_where_files_may_not_grow(tmp_path: Path) -> None:
    # GIVEN an old dump, and a process that may write no more than 64 KiB
    target = tmp_path / "out.pickle"
    code = """
import os, resource, signal, sys
import mlx.core as mx
import mlxmem
path = sys.argv[1]
mlxmem.enable()
for n in range(20):
    mx.array([n])
mlxmem.dump(path)
old = open(path, "rb").read()
for n in range(5000):
    mx.array([n])
events = mlxmem.events()
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))

# WHEN a larger dump is to replace it
try:
    mlxmem.dump(path)
except OSError as error:
    print(type(error).__name__, error.errno)

# THEN the old one is whole, nothing lies beside it and the events are there
assert open(path, "rb").read() == old
assert os.listdir(os.path.dirname(path)) == ["out.pickle"], os.listdir(".")
assert mlxmem.events() == events
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(target)], capture_output=True, text=True
    )
    assert done.stderr == ""
    assert done.stdout == f"OSError {errno.EFBIG}\n"


def test_dump_replaces_and_returns_the_path(books: Books, tmp_path: Path) -> None:
    keep = mx.array([1.0] * 10)
    for path in (tmp_path / "out.pickle", str(tmp_path / "out.pickle")):
        written = mlxmem.dump(path)
        assert written == tmp_path / "out.pickle"
        assert isinstance(written, Path)
    with open(tmp_path / "out.pickle", "rb") as file:
        assert len(pickle.load(file)["device_traces"][0]) >= 2
    assert os.listdir(tmp_path) == ["out.pickle"]
    del keep
