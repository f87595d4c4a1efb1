"""Unit tests of the stack interner and of the capture function."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import gc
import random
import subprocess
import sys
import textwrap
import threading
import traceback
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from mlxmem import _interner
from mlxmem._interner import (
    MAX_FRAMES,
    begin_session,
    capture_func_address,
    capture_traceback,
    intern_context,
    interner_stats,
    resolve_context,
    resolve_traceback,
    set_context,
)
from mlxmem.events import NO_CONTEXT, Context

Frame = tuple[str, str, int]
HAS_QUALNAME = sys.version_info >= (3, 11)
THIS_FILE = __file__


@pytest.fixture(autouse=True)
def new_session() -> Iterator[None]:
    begin_session()
    yield
    _interner._weaken_hash(64)
    begin_session()


def stack_of(frame: FrameType | None) -> list[Frame]:
    """Innermost `MAX_FRAMES` frames as `sys._getframe` sees them, outermost first.

    Python 3.10 knows no qualified names: there the bare name stands for it.
    """
    frames: list[Frame] = []
    while frame is not None and len(frames) < MAX_FRAMES:
        code = frame.f_code
        name = getattr(code, "co_qualname", code.co_name)
        frames.append((code.co_filename, name, frame.f_lineno))
        frame = frame.f_back
    return frames[::-1]


def here() -> list[Frame]:
    return stack_of(sys._getframe(1))


def assert_equal(traceback_id: int, expected: list[Frame]) -> None:
    found = resolve_traceback(traceback_id)
    assert found is not None
    if not HAS_QUALNAME:
        found = [(file, name.rpartition(".")[2], line) for file, name, line in found]
    assert found == expected


def innermost(traceback_id: int) -> Frame:
    frames = resolve_traceback(traceback_id)
    assert frames is not None
    return frames[-1]


def names(traceback_id: int) -> list[str]:
    frames = resolve_traceback(traceback_id)
    assert frames is not None
    return [name for _, name, _ in frames]


def run(source: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *options, "-c", textwrap.dedent(source)],
        capture_output=True,
        text=True,
        timeout=120,
    )


# --- what is captured: (id, the same stack by value), on one line -----------

Pair = tuple[int, list[Frame]]


def from_function() -> Pair:
    return capture_traceback(), here()


def from_lambda() -> Pair:
    return (lambda: (capture_traceback(), here()))()


def from_generator() -> Pair:
    def generate() -> Iterator[Pair]:
        yield capture_traceback(), here()

    return next(generate())


def from_yield_from() -> Pair:
    def inner() -> Iterator[Pair]:
        yield 0, []
        yield capture_traceback(), here()

    def outer() -> Iterator[Pair]:
        yield from inner()

    return list(outer())[1]


def from_generator_expression() -> Pair:
    return next((capture_traceback(), here()) for _ in "x")


def from_comprehension() -> Pair:
    return [(capture_traceback(), here()) for _ in "x"].pop()


def from_dict_comprehension() -> Pair:
    return {key: (capture_traceback(), here()) for key in "x"}["x"]


def from_coroutine() -> Pair:
    async def inner() -> Pair:
        await asyncio.sleep(0)
        return capture_traceback(), here()

    async def outer() -> Pair:
        return await inner()

    return asyncio.run(outer())


def from_async_generator() -> Pair:
    async def generate() -> AsyncIterator[Pair]:
        await asyncio.sleep(0)
        yield capture_traceback(), here()

    async def main() -> Pair:
        return [pair async for pair in generate()].pop()

    return asyncio.run(main())


def from_class_body() -> Pair:
    class Body:
        pair = (capture_traceback(), here())

    return Body.pair


def from_callback_of_c() -> Pair:
    pairs: list[Pair] = []

    def key(_: int) -> int:
        pairs.append((capture_traceback(), here()))
        return 0

    sorted([1, 2], key=key)
    return pairs[0]


def from_nested_c_calls() -> Pair:
    def inner(_: int) -> Pair:
        return capture_traceback(), here()

    def outer(_: int) -> Pair:
        return list(map(inner, [0])).pop()

    return max(map(outer, [0]), key=lambda pair: pair[0])


def from_exec() -> Pair:
    scope: dict[str, Any] = {"capture_traceback": capture_traceback, "here": here}
    exec("\n\npair = capture_traceback(), here()", scope)
    pair: Pair = scope["pair"]
    return pair


def from_code_with_a_name_of_its_own() -> Pair:
    source = "def f():\n  return (\n    capture_traceback(), here())\npair = f()"
    scope: dict[str, Any] = {"capture_traceback": capture_traceback, "here": here}
    exec(compile(source, "/no/such/file.py", "exec"), scope)
    pair: Pair = scope["pair"]
    return pair


def from_eval() -> Pair:
    pair: Pair = eval("(capture_traceback(), here())")
    return pair


def from_handler() -> Pair:
    try:
        raise ValueError
    except ValueError:
        return capture_traceback(), here()
    finally:
        pass


def from_continued_lines() -> Pair:
    return (
        capture_traceback(),
        here(),
    )


def from_trace_function() -> Pair:
    pairs: list[Pair] = []

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        pairs.append((capture_traceback(), here()))
        return trace

    def traced() -> int:
        return 1 + 1

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        traced()
    finally:
        sys.settrace(before)
    return pairs[0]


def from_traced_code() -> Pair:
    def trace(frame: FrameType, event: str, arg: object) -> Any:
        frame.f_trace_opcodes = True
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return from_callback_of_c()
    finally:
        sys.settrace(before)


def from_profiled_code() -> Pair:
    pairs: list[Pair] = []

    def profile(frame: FrameType, event: str, arg: object) -> None:
        pairs.append((capture_traceback(), here()))

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        from_callback_of_c()
    finally:
        sys.setprofile(before)
    return pairs[0]


def from_finalizer() -> Pair:
    pairs: list[Pair] = []

    class Dying:
        def __del__(self) -> None:
            pairs.append((capture_traceback(), here()))

    def lose() -> None:
        dying = Dying()
        dying.self = dying  # type: ignore[attr-defined]

    lose()
    gc.collect()
    return pairs[0]


def from_thread() -> Pair:
    pairs: list[Pair] = []
    thread = threading.Thread(target=lambda: pairs.append(from_function()))
    thread.start()
    thread.join()
    return pairs[0]


SHAPES = [value for name, value in list(globals().items()) if name.startswith("from_")]


@pytest.mark.parametrize("shape", SHAPES)
def test_frames_equal_those_of_the_interpreter(shape: Callable[[], Pair]) -> None:
    # GIVEN a stack of some shape
    # WHEN it is captured and read later
    traceback_id, expected = shape()
    # THEN files, names and lines are the interpreter's own
    if shape is from_continued_lines:
        expected = [*expected[:-1], (*expected[-1][:2], expected[-1][2] - 1)]
    assert traceback_id > 0
    assert_equal(traceback_id, expected)


def test_lines_equal_those_of_extract_stack() -> None:
    # GIVEN a stack
    # WHEN it is captured beside traceback.extract_stack()
    traceback_id, summary = capture_traceback(), traceback.extract_stack()
    # THEN both show the same files, functions and lines
    found = resolve_traceback(traceback_id)
    assert found is not None
    expected = [(f.filename, f.name, f.lineno) for f in summary][-MAX_FRAMES:]
    assert [
        (file, name.rpartition(".")[2], line) for file, name, line in found
    ] == expected


def test_module_level_and_code_without_a_file() -> None:
    # GIVEN a script given as a string
    # WHEN its module level captures
    result = run(
        """
        from mlxmem._interner import *
        begin_session()
        print(resolve_traceback(capture_traceback()))
        """
    )
    # THEN the frame is the module's, in "<string>"
    assert result.stdout.strip() == "[('<string>', '<module>', 4)]", result.stderr


# --- names ------------------------------------------------------------------


def wrapped(function: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(function)
    def wrapper(*args: Any) -> int:
        return function(*args)

    return wrapper


class Model:
    class Inner:
        def method(self) -> int:
            return capture_traceback()

    def method(self) -> int:
        return capture_traceback()

    @wrapped
    def decorated(self) -> int:
        return capture_traceback()

    @staticmethod
    def static() -> int:
        return capture_traceback()

    @classmethod
    def of_class(cls) -> int:
        return capture_traceback()

    @property
    def value(self) -> int:
        return capture_traceback()

    def __call__(self) -> int:
        return (lambda: [capture_traceback() for _ in "x"])()[0]

    def closure(self) -> Callable[[], int]:
        def inner() -> int:
            return capture_traceback()

        return inner


class Derived(Model):
    pass


def local_class() -> int:
    class Local:
        def method(self) -> int:
            return capture_traceback()

    return Local().method()


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: Model().method(), "Model.method"),
        (lambda: Derived().method(), "Model.method"),
        (lambda: Model.Inner().method(), "Model.Inner.method"),
        (lambda: Model().decorated(), "Model.decorated"),
        (lambda: Model.static(), "Model.static"),
        (lambda: Model.of_class(), "Model.of_class"),
        (lambda: Model().value, "Model.value"),
        (lambda: Model().closure()(), "Model.closure.<locals>.inner"),
        (local_class, "local_class.<locals>.Local.method"),
    ],
)
def test_qualified_name_on_every_version(call: Callable[[], int], name: str) -> None:
    # GIVEN a function of some kind, which may be gone when the name is read
    # WHEN it captures
    traceback_id = call()
    # THEN the frame shows the name that the compiler gave it
    assert innermost(traceback_id)[1] == name


def test_wrapper_keeps_its_own_name() -> None:
    # GIVEN a wrapper that functools.wraps renamed
    # WHEN the function it wraps captures
    traceback_id = Model().decorated()
    # THEN the wrapper's frame does not carry the wrapped function's name
    assert names(traceback_id)[-2] == "wrapped.<locals>.wrapper"


def test_comprehension_in_a_lambda_in_a_method() -> None:
    # GIVEN code nested three deep
    # WHEN it captures
    found = [name for name in names(Model()()) if name.startswith("Model")]
    # THEN each level is named after its parent; 3.12 inlines comprehensions
    expected = [
        "Model.__call__",
        "Model.__call__.<locals>.<lambda>",
        "Model.__call__.<locals>.<lambda>.<locals>.<listcomp>",
    ]
    assert found == expected[: 2 if sys.version_info >= (3, 12) else 3]


def test_generator_that_is_gone() -> None:
    # GIVEN a generator whose function is gone when the stack is read
    traceback_id = from_generator()[0]
    gc.collect()
    # WHEN the stack is resolved
    # THEN its name is still found
    assert innermost(traceback_id)[1] == "from_generator.<locals>.generate"


# --- depth ------------------------------------------------------------------


def recurse(depth: int) -> Pair:
    if depth > 1:
        return recurse(depth - 1)
    return capture_traceback(), here()


def test_deep_recursion_keeps_the_innermost_frames() -> None:
    # GIVEN a recursion 64 deep
    # WHEN its innermost call captures
    traceback_id, expected = recurse(64)
    # THEN there are 32 frames, and the innermost is the last
    found = resolve_traceback(traceback_id)
    assert found is not None
    assert len(found) == MAX_FRAMES == 32
    assert_equal(traceback_id, expected)
    assert found[-1][2] == found[-2][2] + 1
    # AND what lies further out makes no difference
    assert recurse_once_more(64) == traceback_id


def recurse_once_more(depth: int) -> int:
    return recurse(depth)[0]


def test_shallow_stack_keeps_only_its_frames() -> None:
    # GIVEN a thread with a short stack
    ids: list[int] = []

    def target() -> None:
        ids.append(capture_traceback())

    # WHEN it captures
    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    # THEN the stack ends where the thread begins
    found = resolve_traceback(ids[0])
    assert found is not None
    assert len(found) < 8
    assert found[0][1].endswith("_bootstrap")


# --- the walk ---------------------------------------------------------------


def both_walks() -> tuple[list[CodeType], list[CodeType]]:
    quick, portable = _interner._walk(False), _interner._walk(True)
    # This function's own frame has moved on between the two calls.
    assert quick[1:] == portable[1:]
    return [f[0] for f in quick], [f[0] for f in portable]  # type: ignore[misc]


@pytest.mark.skipif(
    not (3, 10) <= sys.version_info < (3, 14), reason="no layout is known"
)
def test_fast_walk_is_in_use_and_right() -> None:
    # GIVEN a Python whose frame layout is known
    # WHEN both walks read the same stacks, generators and C calls among them
    assert _interner._walks_fast()
    stacks = [
        both_walks(),
        next(both_walks() for _ in "x"),
        [both_walks() for _ in "x"].pop(),
        max(map(lambda _: both_walks(), "x"), key=len),
    ]
    # THEN they see the same frames
    for quick, portable in stacks:
        assert quick == portable


def test_frames_that_have_not_begun_are_skipped() -> None:
    # GIVEN a collector that runs whenever it may, also in a function's prologue
    pairs: list[Pair] = []

    def callback(phase: str, info: object) -> None:
        if len(pairs) < 500:
            pairs.append((capture_traceback(), here()))

    def with_cells(a: int, b: int, c: int) -> list[Callable[[], int]]:
        return [lambda: a, lambda: b, lambda: c]

    def generate(a: int) -> Iterator[Callable[[], int]]:
        yield lambda: a

    threshold = gc.get_threshold()
    gc.callbacks.append(callback)
    gc.set_threshold(1)
    # WHEN functions with cells and generators begin
    try:
        for i in range(200):
            with_cells(i, i, i)
            list(generate(i))
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(callback)
    # THEN each stack is what the interpreter shows
    assert pairs
    for traceback_id, expected in pairs:
        assert_equal(traceback_id, expected)


# --- ids --------------------------------------------------------------------


def test_equal_stacks_have_equal_ids() -> None:
    # GIVEN one line that captures in a loop, and another one
    first = [capture_traceback() for _ in range(3)]
    second = [capture_traceback() for _ in range(3)]
    # THEN each line has one id
    assert len(set(first)) == len(set(second)) == 1
    assert first[0] != second[0]
    # AND two calls on one line have two: the instruction counts
    assert len({capture_traceback(), capture_traceback()}) == 2


# Each node of a random tree picks one of these calls.
def branch_a(path: list[int]) -> tuple[int, tuple[Any, ...]]:
    if len(path) % 2:
        return step(path)
    return step(path)


def branch_b(path: list[int]) -> tuple[int, tuple[Any, ...]]:
    return [step(path) for _ in "x"].pop()


def branch_c(path: list[int]) -> tuple[int, tuple[Any, ...]]:
    return max(map(step, [path]))


def branch_d(path: list[int]) -> tuple[int, tuple[Any, ...]]:
    return next(step(path) for _ in "x")


BRANCHES = [branch_a, branch_a, branch_b, branch_c, branch_d]


def step(path: list[int]) -> tuple[int, tuple[Any, ...]]:
    if len(path) > 1:
        return BRANCHES[path[1]](path[1:])
    traceback_id = capture_traceback()
    key: list[tuple[int, int]] = []
    frame: FrameType | None = sys._getframe()
    instruction = 0
    while frame is not None and len(key) < MAX_FRAMES:
        # The innermost frame has moved on since; its instruction is always one.
        key.append((id(frame.f_code), instruction and frame.f_lasti))
        frame = frame.f_back
        instruction = 1
    return traceback_id, tuple(key)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.integers(0, 4), max_size=20), min_size=2, max_size=40))
def test_ids_are_equal_exactly_when_the_stacks_are(paths: list[list[int]]) -> None:
    # GIVEN random call trees, some of them deeper than MAX_FRAMES
    # WHEN each leaf captures
    pairs = [step([0, *path]) for path in paths]
    # THEN ids and stacks are one to one
    assert len(set(pairs)) == len({i for i, _ in pairs}) == len({k for _, k in pairs})


def test_frames_are_compared_when_hashes_collide() -> None:
    # GIVEN a hash that gives all stacks one of two values
    _interner._weaken_hash(1)
    begin_session()
    # WHEN many stacks are captured, twice
    paths = [[0, *(1 + (i >> k & 1) for k in range(8))] for i in range(256)]
    first, again = [[step(path) for path in paths] for _ in range(2)]
    # THEN they are told apart all the same
    assert first == again
    assert interner_stats()["tracebacks"] == len({i for i, _ in first})
    assert len(set(first)) == len({key for _, key in first}) > 100


def climb(depth: int, ids: list[int]) -> None:
    if depth:
        climb(depth - 1, ids)
        climb(depth - 1, ids)
    else:
        ids.append(capture_traceback())


def test_a_million_stacks() -> None:
    # GIVEN a binary call tree with 2**20 leaves
    ids: list[int] = []
    again: list[int] = []
    # WHEN each leaf captures, twice
    for leaves in ids, again:
        climb(20, leaves)
    # THEN each has an id of its own, in order, and shows its own path
    assert len(set(ids)) == 1 << 20
    assert ids == list(range(ids[0], ids[0] + len(ids)))
    line = climb.__code__.co_firstlineno + 2
    for leaf in random.sample(range(1 << 20), 200):
        found = resolve_traceback(ids[leaf])
        assert found is not None
        lines = [number for _, name, number in found if name == "climb"]
        turns = [line + (leaf >> bit & 1) for bit in range(19, -1, -1)]
        assert lines == [*turns, line + 3]
    # AND is found again the second time, in little memory
    assert ids == again
    stats = interner_stats()
    assert stats["tracebacks"] == 1 << 20
    per_frame = 8 if HAS_QUALNAME else 16
    assert stats["bytes"] < stats["frames"] * per_frame * 1.5 + (1 << 20) * 64


# --- sessions ---------------------------------------------------------------


def test_nothing_is_captured_before_the_first_session() -> None:
    # GIVEN a process that has begun no session
    # WHEN it captures
    result = run(
        """
        import ctypes
        from mlxmem._interner import *
        print(capture_traceback())
        print(ctypes.PYFUNCTYPE(ctypes.c_uint32)(capture_func_address())())
        print(begin_session(), capture_traceback(), begin_session())
        """
    )
    # THEN there is no id until it has
    assert result.stdout.split() == ["0", "0", "1", "1", "2"], result.stderr


def test_ids_of_an_old_session_never_resolve() -> None:
    # GIVEN an id
    old = capture_traceback()
    assert resolve_traceback(old) is not None
    # WHEN another session begins, and captures
    before = begin_session()
    new = [capture_traceback(), from_function()[0], from_lambda()[0]]
    # THEN the old id means nothing, and no new one equals it
    assert resolve_traceback(old) is None
    assert min(new) > old
    assert begin_session() == before + 1
    assert [resolve_traceback(i) for i in new] == [None] * 3


@pytest.mark.parametrize("bad", [0, -1, 2**32 - 1, 2**32, 2**80, -(2**80)])
def test_unknown_ids_resolve_to_none(bad: int) -> None:
    # GIVEN a session with one stack
    known = capture_traceback()
    # WHEN an id is resolved that was never given out
    # THEN there is nothing
    assert resolve_traceback(bad) is None
    assert resolve_traceback(known + 1) is None
    assert resolve_traceback(known) is not None


def test_resolving_something_else_is_a_type_error() -> None:
    # GIVEN no integer
    # WHEN it is resolved
    # THEN the error names the argument and the value
    with pytest.raises(TypeError, match="id must be an integer, not 'seven'"):
        resolve_traceback("seven")  # type: ignore[arg-type]


def test_ids_run_out() -> None:
    # GIVEN a process that has given out almost all 32-bit ids
    result = run(
        """
        from mlxmem import _interner as i
        i.begin_session()
        i._skip_ids(2**32 - 2)
        ids = [i.capture_traceback(), i.capture_traceback(), i.capture_traceback()]
        print(ids)
        print([i.resolve_traceback(n) is not None for n in ids])
        i.begin_session()
        print(i.capture_traceback(), i.resolve_traceback(2**32 - 1))
        """
    )
    # WHEN it captures more
    # THEN there is "no traceback", never an id used before
    lines = result.stdout.splitlines()
    assert lines[0] == f"[{2**32 - 2}, {2**32 - 1}, 0]", result.stderr
    assert lines[1:] == ["[True, True, False]", "0 None"]


# --- lifetimes --------------------------------------------------------------


def fresh_function() -> Callable[[int], int]:
    source = "def f(n):\n  if n: return f(n - 1)\n  return capture()\n"
    scope: dict[str, Any] = {"capture": capture_traceback}
    exec(source, scope)
    function: Callable[[int], int] = scope["f"]
    return function


def test_one_reference_for_each_code_object() -> None:
    # GIVEN a function, and the references to its code
    function = fresh_function()
    code = function.__code__
    before = sys.getrefcount(code)
    # WHEN it is captured in many stacks, many times in each
    for _ in range(3):
        for depth in range(20):
            function(depth)
    stats = interner_stats()
    # THEN the table holds one reference, until the next session
    assert stats["tracebacks"] >= 20
    assert sys.getrefcount(code) == before + 1
    begin_session()
    assert sys.getrefcount(code) == before
    assert set(interner_stats().values()) == {0}


def test_a_function_that_is_gone_still_resolves() -> None:
    # GIVEN a captured function that is deleted, and code made in its place
    function = fresh_function()
    traceback_id = function(1)
    alive = weakref.ref(function.__code__)
    del function
    gc.collect()
    others = [fresh_function() for _ in range(100)]
    # WHEN the stack is resolved
    found = resolve_traceback(traceback_id)
    # THEN it shows the function, and the code goes with the session
    assert found is not None
    assert found[-2:] == [("<string>", "f", 2), ("<string>", "f", 3)]
    assert alive() is not None
    begin_session()
    assert alive() is None
    del others


def test_dropping_code_may_run_anything() -> None:
    # GIVEN code objects whose end begins a session and captures
    seen: list[int] = []

    def on_death(_: object) -> None:
        seen.append(begin_session())
        seen.append(capture_traceback())
        gc.collect(0)

    watchers = []
    for _ in range(50):
        function = fresh_function()
        function(3)
        watchers.append(weakref.ref(function.__code__, on_death))
        del function
    gc.collect()
    # WHEN a session begins
    begun = begin_session()
    # THEN all of them ran, each in the session after
    assert len(seen) == 100
    assert seen[::2] == list(range(begun + 1, begun + 51))
    assert all(seen[1::2])


def test_resolving_while_sessions_begin() -> None:
    # GIVEN a collector that begins a session whenever it runs
    def callback(phase: str, info: object) -> None:
        begin_session()

    ids = [fresh_function()(depth) for depth in range(40)]
    threshold = gc.get_threshold()
    gc.callbacks.append(callback)
    gc.set_threshold(1)
    # WHEN ids are resolved
    try:
        found = [resolve_traceback(i) for i in ids]
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(callback)
    # THEN each is whole or gone
    for frames in found:
        assert frames is None or frames[-1] == ("<string>", "f", 3)


# --- the C function ---------------------------------------------------------


def test_c_function_with_the_gil() -> None:
    # GIVEN the C function, called with the GIL held
    function = ctypes.PYFUNCTYPE(ctypes.c_uint32)(capture_func_address())
    # WHEN Python code calls it
    traceback_id, expected = function(), here()
    # THEN it returns the id of the calling stack
    assert_equal(traceback_id, expected)


def test_c_function_without_the_gil() -> None:
    # GIVEN the C function, called with the GIL released
    function = ctypes.CFUNCTYPE(ctypes.c_uint32)(capture_func_address())
    # WHEN Python code calls it
    # THEN there is no traceback
    assert [function() for _ in range(100)] == [0] * 100


def test_c_function_without_the_gil_while_another_thread_has_it() -> None:
    # GIVEN a thread that keeps the GIL busy
    function = ctypes.CFUNCTYPE(ctypes.c_uint32)(capture_func_address())
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            capture_traceback()

    thread = threading.Thread(target=spin)
    thread.start()
    # WHEN this one calls without it
    try:
        results = {function() for _ in range(2000)}
    finally:
        stop.set()
        thread.join()
    # THEN it never sees the other's stack
    assert results == {0}


@pytest.mark.skipif(sys.platform == "win32", reason="needs pthreads")
def test_c_function_on_a_thread_that_python_does_not_know() -> None:
    # GIVEN a thread made by C, which begins with the C function
    libc = ctypes.CDLL(None)
    libc.pthread_create.argtypes = [ctypes.c_void_p] * 4
    libc.pthread_join.argtypes = [ctypes.c_void_p] * 2
    with_gil = ctypes.PyDLL(None)
    with_gil.pthread_create.argtypes = [ctypes.c_void_p] * 4
    with_gil.pthread_join.argtypes = [ctypes.c_void_p] * 2
    for library in libc, with_gil:
        for _ in range(50):
            thread, result = ctypes.c_void_p(), ctypes.c_void_p(77)
            address = capture_func_address()
            # WHEN it runs, while this thread has the GIL and while it has not
            assert library.pthread_create(ctypes.byref(thread), None, address, 0) == 0
            assert library.pthread_join(thread, ctypes.byref(result)) == 0
            # THEN there is no traceback
            assert (result.value or 0) & 0xFFFFFFFF == 0


# --- threads, other interpreters, the end -----------------------------------


def test_threads_capture_while_sessions_begin() -> None:
    # GIVEN threads that capture and resolve, and one that collects
    stop = threading.Event()
    wrong: list[object] = []

    def work(function: Callable[[int], int]) -> None:
        depth = 0
        while not stop.is_set():
            depth = (depth + 1) % 40
            found = resolve_traceback(function(depth))
            # None: a session began between the two.
            if found is not None and found[-1] != ("<string>", "f", 3):
                wrong.append(found)

    def collect() -> None:
        while not stop.is_set():
            gc.collect(0)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    threads = [
        threading.Thread(target=work, args=(fresh_function(),)) for _ in range(4)
    ]
    threads.append(threading.Thread(target=collect))
    for thread in threads:
        thread.start()
    # WHEN sessions begin meanwhile
    try:
        for _ in range(300):
            begin_session()
            fresh_function()(3)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    # THEN no stack is ever another one's
    assert wrong == []


SUBINTERPRETER = """
    import ctypes
    from mlxmem import _interner as i
    i.begin_session()
    address = i.capture_func_address()
    script = f'''
    import ctypes
    function = ctypes.PYFUNCTYPE(ctypes.c_uint32)({address})
    print("inside", function(), function())
    '''.replace("    ", "")
    try:
        import _interpreters as s
        new = lambda: s.create(KIND)
        run = s.exec
    except ImportError:
        import _xxsubinterpreters as s
        import sys
        new = (lambda: s.create(isolated=False)) if sys.version_info < (3, 13) else None
        run = s.run_string
    interpreter = new()
    failed = run(interpreter, script)
    if failed:
        print(failed)
    print("outside", bool(i.capture_traceback()))
    print("released", ctypes.CFUNCTYPE(ctypes.c_uint32)(address)())
    s.destroy(interpreter)
    print("after", bool(i.capture_traceback()))
    print("released", ctypes.CFUNCTYPE(ctypes.c_uint32)(address)())
"""


@pytest.mark.parametrize("kind", ["legacy", "isolated"])
def test_only_the_importing_interpreter_captures(kind: str) -> None:
    # GIVEN a subinterpreter that knows the C function's address
    # WHEN it calls, and when the main interpreter calls again
    if kind == "isolated" and sys.version_info < (3, 13):
        pytest.skip("ctypes cannot be imported there")
    result = run(SUBINTERPRETER.replace("KIND", repr(kind)))
    # THEN only the main interpreter captures, and only with the GIL
    assert result.stdout.splitlines() == [
        "inside 0 0",
        "outside True",
        "released 0",
        "after True",
        "released 0",
    ], result.stderr


def test_interpreter_exit() -> None:
    # GIVEN captures from exit handlers, from finalizers of module globals, from a
    # daemon thread, and from the C library's own exit, after Python is gone
    result = run(
        """
        import atexit, ctypes, os, sys, threading, time
        from mlxmem import _interner as i
        i.begin_session()
        libc = ctypes.CDLL(None)
        getattr(libc, "__cxa_atexit").argtypes = [ctypes.c_void_p] * 3
        getattr(libc, "__cxa_atexit")(i.capture_func_address(), None, None)
        function = ctypes.PYFUNCTYPE(ctypes.c_uint32)(i.capture_func_address())
        atexit.register(lambda: print("exit", bool(i.capture_traceback()), flush=True))

        def spin(capture=i.capture_traceback):
            while True:
                capture()

        threading.Thread(target=spin, daemon=True).start()

        class Last:
            def __init__(self):
                self.capture = function
                self.write = os.write
            def __del__(self):
                self.write(1, b"end %d\\n" % self.capture())

        last = Last()
        last.cycle = last
        sys.kept = threading.kept = Last()
        time.sleep(0.05)
        print("id", bool(i.capture_traceback()), flush=True)
        """,
        "-X",
        "dev",
    )
    # WHEN the interpreter ends
    # THEN it ends well, and there is no traceback once it has begun to
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[:2] == ["id True", "exit True"]
    assert set(lines[2:]) == {"end 0"}


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_forked_child_keeps_its_own_table() -> None:
    # GIVEN a process with a session, and a child of it
    result = run(
        """
        import os
        from mlxmem._interner import *
        begin_session()
        old = capture_traceback()
        child = os.fork()
        if child == 0:
            ok = resolve_traceback(old) and begin_session() and capture_traceback()
            os._exit(0 if ok and resolve_traceback(old) is None else 1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(status, resolve_traceback(old))
        """
    )
    # WHEN the child begins another session
    # THEN both go on, each with its own
    assert result.stdout.strip() == "0 [('<string>', '<module>', 5)]", result.stderr


# --- contexts ---------------------------------------------------------------


@pytest.fixture
def _no_context() -> Iterator[None]:
    yield
    set_context(0)


FORWARD = Context(("forward",))
LAYER = Context(("forward", "attention"), "layers.3")


def capture_in(*wanted: Context) -> list[int]:
    """Capture one stack in several contexts."""
    ids = [intern_context(context) for context in wanted]
    found = []
    for context in ids:
        set_context(context)
        found.append(capture_traceback())
    return found


@pytest.mark.usefixtures("_no_context")
def test_a_stack_has_an_id_for_each_context() -> None:
    # GIVEN two contexts and none
    wanted = [FORWARD, LAYER, NO_CONTEXT, FORWARD, NO_CONTEXT, LAYER]
    # WHEN one stack is captured in them, in turn
    ids = capture_in(*wanted)
    # THEN ids differ exactly where contexts do, and the frames are the same
    assert [resolve_context(i) for i in ids] == wanted
    assert ids[:3] == [ids[3], ids[5], ids[4]]
    assert len(set(ids)) == 3
    frames = [resolve_traceback(i) for i in ids]
    assert frames == [frames[0]] * 6
    assert innermost(ids[0])[1] == "capture_in"
    stats = interner_stats()
    assert (stats["tracebacks"], stats["pairs"]) == (1, 2)
    assert stats["frames"] == len(frames[0] or [])


def test_contexts_are_told_apart_by_value() -> None:
    # GIVEN no context, and equal ones that are not the same object
    again = Context(("".join(["for", "ward"]),))
    # WHEN they are interned
    # THEN equal ones have one id, and none has 0
    assert intern_context(NO_CONTEXT) == intern_context(Context()) == 0
    assert intern_context(FORWARD) == intern_context(again) > 0
    assert intern_context(LAYER) != intern_context(FORWARD)


@pytest.mark.usefixtures("_no_context")
def test_a_context_belongs_to_its_thread() -> None:
    # GIVEN a thread that sets a context
    old = set_context(intern_context(FORWARD))
    found: list[int] = []
    # WHEN another one captures
    thread = threading.Thread(target=lambda: found.extend(capture_in(LAYER)))
    thread.start()
    thread.join()
    # THEN each has its own, and set_context returns the one before
    assert old == 0
    assert resolve_context(found[0]) == LAYER
    assert resolve_context(capture_traceback()) == FORWARD
    assert set_context(0) == intern_context(FORWARD)


@pytest.mark.usefixtures("_no_context")
def test_contexts_of_old_sessions_never_resolve() -> None:
    # GIVEN an id of a session that ended inside a context
    [old] = capture_in(FORWARD)
    # WHEN the next one begins
    begin_session()
    # THEN the old id means nothing, and the thread is still in the context
    assert resolve_context(old) == NO_CONTEXT
    new = capture_traceback()
    assert (new != old, resolve_context(new)) == (True, FORWARD)


@pytest.mark.parametrize("bad", [0, -1, 2**32, 2**40, 2**31])
def test_unknown_ids_have_no_context(bad: int) -> None:
    assert resolve_context(bad) == NO_CONTEXT


@pytest.mark.usefixtures("_no_context")
def test_contexts_are_compared_when_hashes_collide() -> None:
    # GIVEN a session whose hashes have two bits
    _interner._weaken_hash(2)
    begin_session()
    wanted = [Context((str(i),)) for i in range(200)]
    # WHEN one stack is captured in 200 contexts, among other stacks
    first = [capture_in(context)[0] for context in wanted]
    stacks = [recurse(depth)[0] for depth in range(1, 21)]
    again = [capture_in(context)[0] for context in wanted]
    # THEN each has its own
    assert [resolve_context(i) for i in first] == wanted
    assert [resolve_context(i) for i in again] == wanted
    assert len({*first, *stacks}) == 220


def test_names_with_numbers_in_them_end_some_time() -> None:
    # GIVEN a process that has used up its contexts
    result = run(
        """
        from mlxmem import _interner as i
        from mlxmem.events import Context
        i.begin_session()
        ids = [i.intern_context(Context((str(n),))) for n in range(70_000)]
        print(len(set(ids)), ids[65_535] > 0, ids[65_536:] == [0] * 4464)
        i.set_context(ids[7])
        print(i.resolve_context(i.capture_traceback()).ranges)
        # WHEN the next session begins
        i.begin_session()
        print(i.resolve_context(i.capture_traceback()).ranges)
        new = i.intern_context(Context(("new",)))
        i.set_context(new)
        print(new > max(ids), i.resolve_context(i.capture_traceback()).ranges)
        """
    )
    # THEN it has room again, and an old context is no new one
    assert result.stdout.splitlines() == [
        "65537 True True",
        "('7',)",
        "()",
        "True ('new',)",
    ], result.stderr


def test_a_stack_keeps_its_id_where_ids_run_out() -> None:
    # GIVEN a process with one id left
    # WHEN it captures one stack in two contexts
    result = run(
        """
        from mlxmem import _interner as i
        from mlxmem.events import Context
        i.begin_session()
        i._skip_ids(2**32 - 1)
        ids = []
        for name in ("a", "b"):
            i.set_context(i.intern_context(Context((name,))))
            ids.append(i.capture_traceback())
        print([n - 2**32 for n in ids], i.resolve_traceback(ids[0]) is not None)
        """
    )
    # THEN the stack is there, without its context
    assert result.stdout.splitlines() == ["[-1, -1] True"], result.stderr


# --- size -------------------------------------------------------------------


def test_stats_count_what_is_stored() -> None:
    # GIVEN an empty table
    assert interner_stats()["tracebacks"] == 0
    # WHEN two stacks are captured, one of them twice
    ids = [capture_traceback() for _ in range(2)] + [recurse(64)[0]]
    # THEN two are stored, with their frames
    stats = interner_stats()
    lengths = [len(resolve_traceback(i) or []) for i in set(ids)]
    assert stats["tracebacks"] == 2
    assert stats["frames"] == sum(lengths)
    assert 1 <= stats["codes"] <= stats["frames"]
    assert stats["bytes"] > 0
