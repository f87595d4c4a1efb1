"""Each allocation on the GPU: so many bytes, at this line, for this operation."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from books import Books, rounded

pytestmark = pytest.mark.cuda

HERE = __file__
PAGE = 16_384


def this_line() -> int:
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


def of_size(books: Books, size: int) -> dict[str, Any]:
    """Return the only allocation for which `size` bytes were requested."""
    allocs = books.allocs()
    found = [e for e in allocs if e["requested_size"] == size]
    sizes = sorted({(e["requested_size"], e["primitive_name"]) for e in allocs})
    assert len(found) == 1, (size, sizes)
    return found[0]


def innermost(event: dict[str, Any]) -> tuple[str, str, int]:
    frame: tuple[str, str, int] = event["traceback"][-1]
    return frame


@pytest.mark.parametrize(
    ("asked", "size"),
    [
        (2, 8),
        (8, 8),
        (9, 16),
        (16, 16),
        (17, 32),
        (1000, 1024),
        (1025, 2048),
        (PAGE // 2 + 1, PAGE),
        (PAGE - 1, PAGE),
        (PAGE, PAGE),
        (PAGE + 1, 2 * PAGE),
        (3 * PAGE, 3 * PAGE),
        (1_000_001, 62 * PAGE),
    ],
)
def test_sizes_are_rounded(asked: int, size: int) -> None:
    assert rounded(asked) == size
    mx.clear_cache()
    with Books() as books:
        # GIVEN a leaf and the output of a kernel, of so many bytes
        first = this_line() + 1
        leaf = mx.array(np.ones(asked, np.uint8))
        kernel = mx.full((asked,), 7, mx.uint8)
        mx.eval(kernel)

        # THEN both show what was asked for, and what they got
        events = [e for e in books.allocs() if e["requested_size"] == asked]
        one = [e for e in events if innermost(e)[2] == first]
        assert [(e["size"], e["primitive_name"]) for e in one] == [(size, "")]
        (other,) = [e for e in events if e["primitive_name"]]
        assert other["size"] == size
        assert [f[2] for f in other["traceback"] if f[0] == HERE][-1] == first + 1
        assert (leaf.nbytes, kernel.nbytes) == (asked, asked)


def test_a_larger_buffer_may_be_used_again(books: Books) -> None:
    # GIVEN 20 pages in the cache and nothing else
    mx.clear_cache()
    x = mx.array(np.ones(20 * PAGE, np.uint8))
    del x

    # WHEN 19 pages and a byte less are asked for
    y = mx.array(np.ones(19 * PAGE - 1, np.uint8))

    # THEN it is the larger one, of which so much was asked
    event = of_size(books, 19 * PAGE - 1)
    assert (event["action"], event["size"]) == ("AllocReuse", 20 * PAGE)
    assert y.nbytes == 19 * PAGE - 1


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

    # THEN its 53,492 bytes, in four pages, are charged to that line
    event = of_size(books, 53_492)
    assert event["primitive_name"] == "Matmul"
    assert event["size"] in (4 * PAGE, 5 * PAGE)  # it may have been in the cache
    name = "test_matmul_names_the_function_that_made_it.<locals>.product"
    assert innermost(event) == (HERE, name, line)
    assert event["stream"] >= 0
    assert event["thread_id"] == threading.get_native_id()


def test_leaves_name_their_line(books: Books) -> None:
    first = this_line()
    keep: list[Any] = []
    keep.append(mx.array(list(range(101))))
    keep.append(mx.array(np.ones((103, 2), np.float32)))
    keep.append(mx.array([[True] * 107]))
    keep.append(mx.array(3.25))
    for offset, size, buffer in (
        (2, 404, 512),
        (3, 824, 1024),
        (4, 107, 128),
        (5, 4, 8),
    ):
        event = of_size(books, size)
        assert innermost(event)[2] == first + offset
        assert (event["primitive_name"], event["stream"]) == ("", -1)
        assert event["size"] == buffer


# An operation on new arrays, whose result nothing else in it equals in size.
KERNELS: dict[str, tuple[Callable[[mx.array], mx.array], int]] = {
    # x is (37, 53) of float32.
    "Matmul": (lambda x: x @ x.T, 37 * 37 * 4),
    "Concatenate": (lambda x: mx.concatenate([x, x, x]), 3 * 37 * 53 * 4),
    "Subtract": (lambda x: x[:, None, :] - x[None, :, :], 37 * 37 * 53 * 4),
    "Sum": (lambda x: x.sum(axis=1), 37 * 4),
    "Gather": (lambda x: x[mx.array([1, 2, 3, 4, 5, 6, 7])], 7 * 53 * 4),
    "ArgReduce": (lambda x: mx.argmax(x, axis=0), 53 * 4),
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernels_result_is_its_operations(books: Books, name: str) -> None:
    make, size = KERNELS[name]
    x = mx.array(np.arange(37 * 53, dtype=np.float32).reshape(37, 53))
    at = len(books.events())
    line = this_line() + 1
    y = make(x)
    mx.eval(y)

    made = [e for e in books.events()[at:] if e["action"].startswith("Alloc")]
    shown = [(e["requested_size"], e["size"], e["primitive_name"]) for e in made]
    result = [e for e in made if e["requested_size"] == size and e["primitive_name"]]
    assert len(result) == 1, shown
    assert result[0]["primitive_name"].startswith(name), shown
    assert rounded(size) <= result[0]["size"] < rounded(size) + 2 * PAGE, shown
    assert (result[0]["traceback"][-2][0], result[0]["traceback"][-2][2]) == (
        HERE,
        line,
    )
    assert result[0]["thread_id"] == threading.get_native_id()
    # Scratch of the kernel, if any, is the operation's, too, and does not stay.
    others = [e for e in made if e["stream"] >= 0 and e is not result[0]]
    freed = {e["addr"] for e in books.events()[at:] if e["action"].startswith("Free")}
    assert all(event["addr"] in freed for event in others), shown
    assert y.nbytes == size


def test_created_on_another_thread(books: Books) -> None:
    made: list[mx.array] = []

    def create() -> None:
        made.append(mx.array([1.5] * 321))

    thread = threading.Thread(target=create)
    thread.start()
    thread.join()
    event = of_size(books, 321 * 4)
    assert innermost(event)[1].endswith("create")
    assert event["traceback"][0][1].endswith("_bootstrap")
    assert event["thread_id"] != threading.get_native_id()


def test_compiled_function_names_its_call(books: Books) -> None:
    compiled = mx.compile(lambda x: mx.exp(x) * mx.sin(x) + 1)
    x = mx.random.normal((149,))
    mx.eval(x, compiled(x))
    at = len(books.events())
    line = this_line() + 1
    y = compiled(x)
    mx.eval(y)

    made = [e for e in books.events()[at:] if e["action"].startswith("Alloc")]
    assert {innermost(event)[2] for event in made} == {line}
    assert {event["primitive_name"] for event in made} != {""}


def test_gradients_name_the_call_or_the_forward_line(books: Books) -> None:
    def loss(w: mx.array) -> mx.array:
        return mx.tanh(w @ w.T).sum()

    forward = loss.__code__.co_firstlineno + 1
    w = mx.random.normal((151, 7))
    mx.eval(w)
    at = len(books.events())
    line = this_line() + 1
    gradient = mx.grad(loss)(w)
    mx.eval(gradient)

    made = [e for e in books.events()[at:] if e["action"].startswith("Alloc")]
    assert {innermost(event)[2] for event in made} == {forward, line}
    sizes = {e["requested_size"] for e in made if innermost(e)[2] == line}
    assert 151 * 7 * 4 in sizes, sizes


def test_layers_show_the_users_line_further_out(books: Books) -> None:
    line = this_line() + 1
    layer = nn.Linear(157, 3, bias=False)
    mx.eval(layer.parameters())

    stacks = [e["traceback"] for e in books.allocs() if e["requested_size"] == 1884]
    assert stacks
    for stack in stacks:
        assert stack[-1][0].endswith("linear.py")
        assert [f[2] for f in stack if f[0] == HERE][-1] == line


def test_frees_have_no_operation_and_no_stack(books: Books) -> None:
    x = mx.exp(mx.ones((73, 11)))
    mx.eval(x)
    del x
    frees = [e for e in books.events() if e["action"].startswith("Free")]
    assert frees
    for event in frees:
        assert event["primitive_name"] == ""
        assert event["traceback"] is None
        assert event["stream"] == -1


def test_streams_are_told_apart(books: Books) -> None:
    # MLX numbers its streams; a stream's repr ends with that number.
    streams = [mx.new_stream(mx.default_device()) for _ in range(2)]
    inputs = [mx.ones((n,)) for n in (167, 173)]
    mx.eval(inputs)
    books.restart()
    for x, stream in zip(inputs, streams, strict=True):
        mx.eval(mx.exp(x, stream=stream))
    numbers = [int(str(stream).rstrip(")").split()[-1]) for stream in streams]
    assert [of_size(books, 4 * n)["stream"] for n in (167, 173)] == numbers
