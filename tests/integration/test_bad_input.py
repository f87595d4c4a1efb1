"""Wrong arguments and places that can't be written: named, and nothing is lost."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
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


def dump_fails(books: Books, path: Path, *errors: type[OSError]) -> None:
    """Assert that dumping there raises, loses nothing and leaves nothing."""
    keep = mx.exp(mx.ones((100,)))
    mx.eval(keep)
    events = books.events()
    folder = path.parent
    files = set(os.listdir(folder)) if folder.is_dir() else None
    with pytest.raises(errors):
        mlxmem.dump(path)
    assert mlxmem.events() == events
    if files is not None:
        assert set(os.listdir(folder)) == files
    del keep


def test_dump_to_a_directory_that_does_not_exist(books: Books, tmp_path: Path) -> None:
    dump_fails(books, tmp_path / "no" / "out.pickle", FileNotFoundError)


def test_dump_onto_a_directory(books: Books, tmp_path: Path) -> None:
    (tmp_path / "out.pickle").mkdir()
    dump_fails(books, tmp_path / "out.pickle", IsADirectoryError, PermissionError)
    assert (tmp_path / "out.pickle").is_dir()


def test_dump_below_a_file(books: Books, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    dump_fails(books, tmp_path / "file" / "out.pickle", NotADirectoryError)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_dump_to_a_read_only_directory(books: Books, tmp_path: Path) -> None:
    (tmp_path / "fixed").mkdir()
    (tmp_path / "fixed").chmod(0o500)
    dump_fails(books, tmp_path / "fixed" / "out.pickle", PermissionError)


def test_dump_to_a_read_only_file_system(books: Books) -> None:
    if os.access("/proc/self", os.W_OK) and os.geteuid() != 0:
        pytest.skip("no read-only place here")
    events = books.events()
    with pytest.raises(OSError, match=r"."):
        mlxmem.dump("/proc/self/out.pickle")
    assert mlxmem.events() == events


def test_dump_to_a_full_device(books: Books, tmp_path: Path) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    # GIVEN enough events that the file is larger than any buffer before it
    for n in range(2000):
        mx.array([n])
    events = books.events()
    before = set(os.listdir("/dev"))
    with pytest.raises(OSError, match=r"."):
        mlxmem.dump("/dev/full")
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
    assert done.stdout.startswith("OSError 27")


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
