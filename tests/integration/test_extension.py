"""An extension module with a primitive of its own, loaded before or after enable().

It also binds buffers that the allocator's vtable never handed out, as MLX's CUDA
backend does for the outputs of its kernels.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from books import FOLLOWS_MUTEX, HAS_CPU_CACHE, Books

import mlxmem
from mlxmem._interner import resolve_traceback

SOURCE = Path(__file__).parent / "targets" / "extension.cpp"


around_the_vtable = pytest.mark.skipif(
    not FOLLOWS_MUTEX,
    reason="only CUDA's kernels do that: test_followed_mutex.py runs this in their way",
)


class Extension:
    """The functions of `extension.cpp`."""

    def __init__(self, path: Path) -> None:
        name = "probe_extension"
        loader = importlib.machinery.ExtensionFileLoader(name, str(path))
        spec = importlib.util.spec_from_file_location(name, path, loader=loader)
        assert spec is not None
        self.module = importlib.util.module_from_spec(spec)
        # What makes arrays is called with the GIL held, what evaluates without.
        with_gil, without = ctypes.PyDLL(str(path)), ctypes.CDLL(str(path))
        self.make = with_gil.probe_make
        self.bypass = with_gil.probe_bypass
        self.weak_copy = with_gil.probe_weak_copy
        self.drop = without.probe_drop
        self.eval = without.probe_eval
        self.error = without.probe_error
        self.buffer = without.probe_buffer
        self.node = without.probe_node
        self.note_malloc = without.probe_note_malloc
        self.prepare_failures = without.probe_prepare_failures
        self.fail_malloc = without.probe_fail_malloc
        pointers = (self.weak_copy, self.buffer, self.node)  # of an array
        for function in (self.make, self.bypass, *pointers):
            function.restype = ctypes.c_void_p
        for function in (self.drop, self.eval, *pointers):
            function.argtypes = [ctypes.c_void_p]
        self.eval.restype = ctypes.c_float
        self.error.restype = ctypes.c_char_p


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled extension."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    package = Path(mx.__file__).parent
    if not (package / "include" / "mlx" / "array.h").exists():
        pytest.skip("this MLX comes without its headers")
    python = sysconfig.get_paths()["include"]
    if not (Path(python) / "Python.h").exists():
        pytest.skip("this Python comes without its headers")
    out = tmp_path_factory.mktemp("extension") / "probe_extension.so"
    command = [compiler, "-std=c++20", "-O1", "-fPIC", "-shared", "-o", str(out)]
    command += [f"-I{package / 'include'}", f"-I{python}", str(SOURCE)]
    command += [f"-L{package / 'lib'}", "-lmlx", f"-Wl,-rpath,{package / 'lib'}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if "std=c++20" in done.stderr and done.returncode:
        pytest.skip(f"the compiler knows no C++20: {done.stderr[-200:]}")
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture
def extension(built: Path, tmp_path: Path) -> Extension:
    """A copy of the extension that this process has not loaded yet."""
    copy = tmp_path / built.name
    shutil.copy(built, copy)
    return Extension(copy)


@pytest.fixture
def late(built: Path, tmp_path: Path) -> Iterator[tuple[Books, Extension]]:
    """The same, loaded while a session records."""
    copy = tmp_path / built.name
    shutil.copy(built, copy)
    with Books() as books:
        yield books, Extension(copy)


def probe_allocs(books: Books) -> list[dict[str, Any]]:
    return [e for e in books.allocs() if e["primitive_name"] == "ProbeFill"]


def fill(books: Books, extension: Extension) -> None:
    """Evaluate the extension's primitive and check what was recorded of it."""
    handle = extension.make(331, 0)
    assert extension.eval(handle) == 7 * 331
    scratch, output = probe_allocs(books)
    assert (scratch["requested_size"], output["requested_size"]) == (640, 1324)
    for event in (scratch, output):
        assert event["traceback"][-1][:2] == (__file__, "fill")
        assert event["stream"] >= 0
    extension.drop(handle)
    books.check()


def test_own_primitive_of_a_module_loaded_before(extension: Extension) -> None:
    with Books() as books:
        fill(books, extension)
    with Books() as books:
        fill(books, extension)


def test_own_primitive_of_a_module_loaded_while_recording(
    late: tuple[Books, Extension],
) -> None:
    fill(*late)


def test_it_still_works_after_disable(late: tuple[Books, Extension]) -> None:
    books, extension = late
    fill(books, extension)
    lazy = extension.make(10, 0)
    mlxmem.disable()
    assert extension.eval(lazy) == 70
    extension.drop(lazy)
    handle = extension.make(20, 0)
    assert extension.eval(handle) == 140
    extension.drop(handle)


def test_its_exception_passes_and_leaves_nothing_behind(
    late: tuple[Books, Extension],
) -> None:
    books, extension = late
    handle = extension.make(337, 1)
    assert extension.eval(handle) == -1
    assert extension.error() == b"[ProbeFill] was told to fail"
    extension.drop(handle)
    before = len(books.allocs())
    keep = [mx.array([1, 2]), mx.array([3, 4]) + 1]
    mx.eval(keep)
    names = [event["primitive_name"] for event in books.allocs()[before:]]
    assert names[0] == ""
    assert "ProbeFill" not in names


# Two words of an array's node that MLX never writes: the id of the stack, and a tag.
STACK_ID, TAG = 364, 220


def word(node: int, offset: int) -> ctypes.c_uint32:
    return ctypes.c_uint32.from_address(node + offset)


def tag_for(node: int, other: int) -> int:
    """The tag that a node has in the session in which another one was made.

    A tag is the session's number, scattered, with the node's address mixed in.
    """
    return word(other, TAG).value ^ (other >> 4 & 0xFFFFFFFF) ^ (node >> 4 & 0xFFFFFFFF)


@pytest.mark.parametrize("tag", ["this session's", "an old session's", "a copy", "0"])
def test_a_valid_id_in_a_nodes_memory_is_no_stack(
    extension: Extension, tag: str
) -> None:
    # GIVEN a node of an old session, and one made while nothing was recorded
    with Books():
        old = extension.make(10, 0)
        assert word(extension.node(old), STACK_ID).value > 0
    lazy = extension.make(331, 0)
    with Books() as books:
        # GIVEN memory of the latter that by chance holds an id which is valid now
        new = extension.make(10, 0)
        node, recorded = extension.node(lazy), extension.node(new)
        stack_id = word(recorded, STACK_ID).value
        assert resolve_traceback(stack_id) is not None
        word(node, STACK_ID).value = stack_id
        word(node, TAG).value = {
            "this session's": tag_for(node, recorded),
            "an old session's": tag_for(node, extension.node(old)),
            "a copy": word(recorded, TAG).value,
            "0": 0,
        }[tag]

        # WHEN it is evaluated
        assert extension.eval(lazy) == 7 * 331

        # THEN its allocations have no stack. (The first case is the control: with
        # the right tag, which chance would have to hit, they have that one.)
        stacks = [event["traceback"] for event in probe_allocs(books)]
        if tag == "this session's":
            assert stacks == [resolve_traceback(stack_id)] * 2
        else:
            assert stacks == [None, None]
        for handle in (old, lazy, new):
            extension.drop(handle)


@around_the_vtable
@pytest.mark.parametrize("when", ["before", "while recording"])
def test_a_buffer_that_goes_around_the_vtable_is_seen_when_bound(
    built: Path, tmp_path: Path, when: str
) -> None:
    # GIVEN the allocator's malloc as it is without mlxmem
    extension = Extension(Path(shutil.copy(built, tmp_path / "first.so")))
    extension.note_malloc()
    mx.clear_cache()
    if when == "while recording":
        with Books():
            pass
    with Books() as books:
        # WHEN a buffer comes from there and is bound to an array
        handle = extension.bypass(347)

        # THEN that is one new allocation, at this line, of no primitive
        (event,) = books.allocs()
        assert event["action"] == "AllocNew"
        assert event["size"] == event["requested_size"] == 4 * 347
        assert event["addr"] == extension.buffer(handle)
        assert event["traceback"][-1][0] == __file__
        assert event["primitive_name"] == ""

        # AND binding it once more is none
        copy = extension.weak_copy(handle)
        assert len(books.allocs()) == 1
        extension.drop(copy)
        assert len(books.events()) == 1
        extension.drop(handle)
        assert books.events()[-1]["action"].startswith("FreeActive")
        assert len(books.events()) == 2


@around_the_vtable
@pytest.mark.usefixtures("cpu_cache")
def test_a_cached_buffer_that_goes_around_the_vtable_is_a_reuse(
    extension: Extension,
) -> None:
    extension.note_malloc()
    mx.clear_cache()
    with Books() as books:
        extension.drop(extension.bypass(3_000))
        handle = extension.bypass(2_990)
        actions = [event["action"] for event in books.events()]
        assert actions == ["AllocNew", "FreeActiveToCache", "AllocReuse"]
        last = books.events()[-1]
        assert last["size"] == 12_000
        extension.drop(handle)


def test_weak_copies_of_older_arrays_are_no_allocations(extension: Extension) -> None:
    extension.note_malloc()
    handle = extension.bypass(353)
    with Books() as books:
        copies = [extension.weak_copy(handle) for _ in range(3)]
        assert books.events() == []
        for copy in copies:
            extension.drop(copy)
        assert books.events() == []
        extension.drop(handle)
        (event,) = books.events()
        assert (event["size"], event["traceback"]) == (4 * 353, None)


@around_the_vtable
def test_freed_buffers_come_back_under_the_same_address(extension: Extension) -> None:
    extension.note_malloc()
    with Books() as books:
        for n in range(200):
            handle = extension.bypass(100 + n % 3)
            if n % 5 == 0:
                mx.clear_cache()
            extension.drop(handle)
            mx.eval(mx.exp(mx.ones((100,))))
        allocs = [e for e in books.allocs() if e["primitive_name"] == ""]
        assert len(allocs) >= 200
        reused = any(event["action"] == "AllocReuse" for event in allocs)
        assert reused == HAS_CPU_CACHE


def test_an_exception_of_the_allocator_passes_through(built: Path) -> None:
    # In a process of its own: the extension replaces a lock of MLX.
    target = Path(__file__).parent / "targets" / "allocator_throws.py"
    done = subprocess.run(
        [sys.executable, str(target), str(built)], capture_output=True, text=True
    )
    if done.returncode == 77:
        pytest.skip(done.stdout)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_program_survives_failed_allocations(built: Path, tmp_path: Path) -> None:
    # In a process of its own: the extension replaces a lock of MLX.
    done = subprocess.run(
        [
            sys.executable,
            Path(__file__).parent / "targets" / "failures_survived.py",
            built,
            tmp_path / "out.pickle",
        ],
        capture_output=True,
        text=True,
    )
    if done.returncode == 77:
        pytest.skip(done.stdout)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 107
    assert sum("could not be written (IsADirectoryError" in line for line in lines) == 1
