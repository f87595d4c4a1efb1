"""An exception thrown inside the allocator's malloc reaches Python unchanged."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

sys.path[1:1] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

import mlx.core as mx  # noqa: E402
from books import Books  # noqa: E402
from test_extension import Extension  # noqa: E402

extension = Extension(Path(sys.argv[1]))
extension.note_malloc()
if not extension.prepare_failures():
    print("MLX's malloc takes no lock through an import slot")
    sys.exit(77)


def leaf() -> None:
    mx.array([1.0] * 1000)


def inside_an_op() -> None:
    mx.eval(x @ x)


def failure(work: Callable[[], None]) -> tuple[type[BaseException], str] | None:
    """Return what `work` raises when its first malloc fails."""
    extension.fail_malloc()
    try:
        work()
    except BaseException as error:
        return type(error), str(error)
    return None


x = mx.random.normal((50, 50))
mx.eval(x)
expected = [failure(leaf), failure(inside_an_op)]
if None in expected:
    print(f"MLX's malloc did not fail: {expected}")
    sys.exit(77)
with Books() as books:
    for _ in range(3):
        assert [failure(leaf), failure(inside_an_op)] == expected
        books.check()
    # The operation that failed is over: what follows is not charged to it.
    before = len(books.events())
    after = mx.array([1, 2, 3, 4, 5])
    event = books.events()[before]
    assert (event["requested_size"], event["primitive_name"]) == (20, "")
    assert event["traceback"][-1][1] == "<module>"
    leaf()
    inside_an_op()
