"""Each allocation names the line that created its array, and its primitive."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from books import Books

HERE = __file__


def this_line() -> int:
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


def of_size(books: Books, size: int) -> dict[str, Any]:
    """Return the only allocation for which `size` bytes were requested."""
    (found,) = [e for e in books.allocs() if e["requested_size"] == size]
    return found


def innermost(event: dict[str, Any]) -> tuple[str, str, int]:
    frame: tuple[str, str, int] = event["traceback"][-1]
    return frame


def test_matmul_names_the_function_that_made_it(books: Books) -> None:
    # GIVEN a product built in a function
    a, b = mx.random.normal((311, 77)), mx.random.normal((77, 43))
    line = 0

    def product() -> mx.array:
        nonlocal line
        line = this_line() + 1
        return a @ b

    made = product()

    # WHEN it is evaluated elsewhere
    mx.eval(made)

    # THEN its 53,492 bytes are charged to that line
    event = of_size(books, 53_492)
    assert event["primitive_name"] == "Matmul"
    name = "test_matmul_names_the_function_that_made_it.<locals>.product"
    assert innermost(event) == (HERE, name, line)
    assert event["stream"] >= 0
    assert event["thread_id"] == threading.get_native_id()


def test_evaluated_on_another_thread(books: Books) -> None:
    line = this_line() + 1
    x = mx.exp(mx.ones((123, 5)))
    ids: list[int] = []
    refused: list[str] = []

    def evaluate() -> None:
        ids.append(threading.get_native_id())
        try:
            mx.eval(x)
        except RuntimeError as error:
            refused.append(str(error))

    thread = threading.Thread(target=evaluate)
    thread.start()
    thread.join()
    if refused:
        mx.eval(x)  # which stopped half-way
        pytest.skip(f"in this MLX a stream belongs to its thread: {refused[0]}")
    event = of_size(books, 123 * 5 * 4)
    assert innermost(event)[2] == line
    assert event["thread_id"] == ids[0]


def test_created_on_another_thread(books: Books) -> None:
    made: list[mx.array] = []

    def create() -> None:
        with mx.stream(mx.cpu):
            made.append(mx.array([1.5] * 321))

    thread = threading.Thread(target=create)
    thread.start()
    thread.join()
    event = of_size(books, 321 * 4)
    assert innermost(event)[1].endswith("create")
    assert event["traceback"][0][1].endswith("_bootstrap")


def test_leaves_name_their_line(books: Books) -> None:
    first = this_line()
    keep: list[Any] = []
    keep.append(mx.array(list(range(101))))
    keep.append(mx.array(np.ones((103, 2), np.float32)))
    keep.append(mx.array([[True] * 107]))
    keep.append(mx.array(3.25))
    for offset, size in ((2, 404), (3, 824), (4, 107), (5, 4)):
        event = of_size(books, size)
        assert innermost(event)[2] == first + offset
        assert (event["primitive_name"], event["stream"]) == ("", -1)


# Operations whose kernels allocate more than their result, on the thread that
# evaluates: the sizes in bytes, that of the result last. x is (37, 53), b (106, 7).
TEMPORARIES: dict[str, tuple[Callable[[mx.array, mx.array], mx.array], list[int]]] = {
    # a contiguous copy of the rows
    "LogSumExp": (lambda x, b: mx.logsumexp(x.T[::2], axis=-1), [27 * 37 * 4, 27 * 4]),
    # contiguous copies of both factors
    "Matmul": (
        lambda x, b: x[:, ::2][:, :20] @ b[::2][:20],
        [37 * 20 * 4, 20 * 7 * 4, 37 * 7 * 4],
    ),
    # a contiguous copy of the input
    "CumSum": (lambda x, b: mx.cumsum(x.T[::2], axis=0), [27 * 37 * 4, 27 * 37 * 4]),
}


@pytest.mark.parametrize("name", TEMPORARIES)
def test_temporaries_inside_an_op_name_the_op(books: Books, name: str) -> None:
    # GIVEN an operation on views that its kernel has to copy
    x, b = mx.random.normal((37, 53)), mx.random.normal((106, 7))
    mx.eval(x, b)
    before = len(books.events())
    make, sizes = TEMPORARIES[name]

    # WHEN only its result is asked for
    line = this_line() + 1
    y = make(x, b)
    mx.eval(y)

    # THEN there are scratch buffers, and each is the operation's and on its line
    made = [e for e in books.events()[before:] if e["action"].startswith("Alloc")]
    assert sorted(event["requested_size"] for event in made) == sorted(sizes)
    assert len(made) >= 2
    assert y.nbytes == sizes[-1]
    for event in made:
        assert event["primitive_name"] == name
        assert (event["traceback"][-2][0], event["traceback"][-2][2]) == (HERE, line)
        assert event["stream"] >= 0
        assert event["thread_id"] == threading.get_native_id()
    # The scratch goes, the result stays.
    events = books.events()[before:]
    freed = {e["addr"]: e["size"] for e in events if e["action"].startswith("Free")}
    kept = [event for event in made if event["addr"] not in freed]
    assert [event["requested_size"] for event in kept] == [y.nbytes]


def test_composed_ops_stay_on_their_line(books: Books) -> None:
    before = len(books.events())
    line = this_line() + 1
    x = mx.logsumexp(mx.var(mx.random.normal((59, 61)), axis=0), axis=0)
    mx.eval(x)
    made = [e for e in books.events()[before:] if e["action"].startswith("Alloc")]
    assert len(made) > 3
    assert {innermost(event)[2] for event in made} == {line}


def test_deep_recursion_gives_32_frames(books: Books) -> None:
    def dive(depth: int) -> mx.array:
        if depth:
            return dive(depth - 1)
        return mx.ones((67,)) * 2

    mx.eval(dive(64))
    event = of_size(books, 67 * 4)
    assert len(event["traceback"]) == 32
    names = [frame[1] for frame in event["traceback"]]
    assert all(name.endswith("dive") for name in names)
    lines = [frame[2] for frame in event["traceback"]]
    assert lines[:-1] == [lines[0]] * 31
    assert lines[-1] == lines[0] + 1  # the innermost frame is the last one


def test_outermost_frame_comes_first(books: Books) -> None:
    def inner() -> mx.array:
        return mx.array([0] * 71)

    def outer() -> mx.array:
        return inner()

    keep = outer()
    names = [frame[1] for frame in of_size(books, 71 * 4)["traceback"]]
    assert [name.split(".")[-1] for name in names[-3:]] == [
        "test_outermost_frame_comes_first",
        "outer",
        "inner",
    ]
    del keep


def test_frees_have_no_primitive_and_no_stack(books: Books) -> None:
    x = mx.exp(mx.ones((73, 11)))
    mx.eval(x)
    del x
    frees = [e for e in books.events() if e["action"].startswith("Free")]
    assert frees
    for event in frees:
        assert event["primitive_name"] == ""
        assert event["traceback"] is None
        assert event["stream"] == -1


class Maker:
    """Makes arrays in its methods."""

    def make(self) -> mx.array:
        return mx.full((79,), 2.0)

    @staticmethod
    def make_static() -> mx.array:
        return mx.full((83,), 2.0)

    @property
    def made(self) -> mx.array:
        return mx.full((89,), 2.0)


def test_methods_show_their_qualified_name(books: Books) -> None:
    maker = Maker()
    mx.eval(maker.make(), maker.make_static(), maker.made)
    for size, name in ((79, "make"), (83, "make_static"), (89, "made")):
        found = innermost(of_size(books, 4 * size))
        assert found[:2] == (HERE, f"Maker.{name}")


def test_comprehensions_generators_and_lambdas(books: Books) -> None:
    def generate() -> Any:
        yield mx.array([1] * 97)

    line = this_line() + 1
    arrays = [mx.array([1] * n) for n in (109,)]
    pairs = {n: mx.array([1] * n) for n in (113,)}
    function = lambda: mx.array([1] * 127)  # noqa: E731
    keep = [arrays, pairs, list(generate()), function()]
    assert innermost(of_size(books, 4 * 109))[2] == line
    assert innermost(of_size(books, 4 * 113))[2] == line + 1
    made_by = innermost(of_size(books, 4 * 127))
    assert (made_by[1].split(".")[-1], made_by[2]) == ("<lambda>", line + 2)
    generator = innermost(of_size(books, 4 * 97))
    assert (generator[1].split(".")[-1], generator[2]) == ("generate", line - 3)
    del keep


def test_the_line_of_a_call_over_several_lines(books: Books) -> None:
    line = this_line()
    keep = [
        mx.array([1] * 131),
        mx.array(
            [1] * 137,
        ),
    ]
    assert innermost(of_size(books, 4 * 131))[2] == line + 2
    assert innermost(of_size(books, 4 * 137))[2] == line + 3
    del keep


def test_exec_and_deleted_code(books: Books) -> None:
    # GIVEN code that is gone when its name is asked for
    space: dict[str, Any] = {"mx": mx}
    source = "def made_by_exec():\n    return mx.array([1] * 139)\n"
    exec(compile(source, "<made up>", "exec"), space)
    keep = space["made_by_exec"]()
    space.clear()
    found = innermost(of_size(books, 4 * 139))
    assert found == ("<made up>", "made_by_exec", 2)
    del keep


def test_compiled_function_names_its_call(books: Books) -> None:
    # A compiled call builds its nodes anew, from the trace and without the body.
    def body(x: mx.array) -> mx.array:
        return mx.exp(x) * mx.sin(x) + 1

    compiled = mx.compile(body)
    x = mx.random.normal((149,))
    mx.eval(x, compiled(x))
    before = len(books.events())
    line = this_line() + 1
    y = compiled(x)
    mx.eval(y)
    made = [e for e in books.events()[before:] if e["action"].startswith("Alloc")]
    assert {innermost(event)[2] for event in made} == {line}
    assert {event["primitive_name"] for event in made} != {""}


def test_gradients_name_the_call_or_the_forward_line(books: Books) -> None:
    def loss(w: mx.array) -> mx.array:
        return mx.tanh(w @ w.T).sum()

    forward = loss.__code__.co_firstlineno + 1
    w = mx.random.normal((151, 7))
    mx.eval(w)
    before = len(books.events())
    line = this_line() + 1
    gradient = mx.grad(loss)(w)
    mx.eval(gradient)
    made = [e for e in books.events()[before:] if e["action"].startswith("Alloc")]
    lines = {innermost(event)[2] for event in made}
    assert lines == {forward, line}
    sizes = {e["requested_size"] for e in made if innermost(e)[2] == line}
    assert 151 * 7 * 4 in sizes


def test_layers_show_the_users_line_further_out(books: Books) -> None:
    line = this_line() + 1
    layer = nn.Linear(157, 3, bias=False)
    mx.eval(layer.parameters())
    stacks = [e["traceback"] for e in books.allocs() if e["requested_size"] == 1884]
    assert stacks
    for stack in stacks:
        assert stack[-1][0].endswith("linear.py")
        assert [f[2] for f in stack if f[0] == HERE][-1] == line


def test_equal_stacks_are_one_object(books: Books) -> None:
    keep = [mx.array([0] * 163) for _ in range(5)]
    found = [e for e in books.allocs() if e["requested_size"] == 4 * 163]
    assert len(found) == 5
    assert len({id(event["traceback"]) for event in found}) == 1
    del keep


def test_streams_are_told_apart(books: Books) -> None:
    # MLX numbers its streams; a stream's repr ends with that number.
    streams = [mx.new_stream(mx.cpu) for _ in range(2)]
    numbers = []
    inputs = [mx.ones((n,)) for n in (167, 173)]
    mx.eval(inputs)
    books.restart()
    for x, stream in zip(inputs, streams, strict=True):
        mx.eval(mx.exp(x, stream=stream))
        numbers.append(int(str(stream).rstrip(")").split()[-1]))
    found = [of_size(books, 4 * n)["stream"] for n in (167, 173)]
    assert found == numbers
