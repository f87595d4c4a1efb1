"""Array nodes: how many live, whose they are, and which wait to be evaluated."""

from __future__ import annotations

import gc
import itertools
import threading
from collections import Counter
from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest
from books import Books, check_nodes, settle

import mlxmem
from mlxmem import _hook
from mlxmem._interner import resolve_traceback
from mlxmem.events import Nodes


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    """Keep a garbage collection from taking nodes between two counts."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def count() -> tuple[int, int]:
    """Return how many nodes live and how many of these are pending."""
    settle()
    nodes = check_nodes()
    return len(nodes.live), int(nodes.live["pending"].sum())


def by_function(nodes: Nodes) -> Counter[tuple[str, int]]:
    """Count nodes by (function that created them, pending)."""
    lines: Counter[tuple[str, int]] = Counter()
    for traceback_id, pending in nodes.live[["traceback_id", "pending"]].tolist():
        stack = resolve_traceback(traceback_id)
        lines[stack[-1][1] if stack else "", pending] += 1
    return lines


def test_a_deep_lazy_graph_is_counted_at_its_line(books: Books) -> None:
    # GIVEN an array that is evaluated
    x = mx.ones((2,))
    mx.eval(x)
    assert count() == (1, 0)

    def deepen(x: mx.array) -> mx.array:
        for _ in range(200_000):
            x = mx.sin(x)
        return x

    # WHEN 200,000 operations on it are left unevaluated
    x = deepen(x)

    # THEN all of them are pending, at the line that made them
    nodes = check_nodes()
    assert by_function(nodes)[f"{__name__}.deepen", 1] == 0
    pending = nodes.live[nodes.live["pending"] == 1]
    assert len(pending) == 200_000
    (traceback_id,) = set(pending["traceback_id"].tolist())
    stack = resolve_traceback(traceback_id)
    assert stack is not None
    filename, function, line = stack[-1]
    assert filename == __file__
    assert function.endswith("deepen")
    assert line == deepen.__code__.co_firstlineno + 2
    assert set(pending["buffer"].tolist()) == {0}
    assert set(pending["nbytes"].tolist()) == {8}

    # WHEN they go
    del x

    # THEN none is left
    assert count() == (0, 0)


def test_a_loop_without_eval_grows_by_its_nodes(books: Books) -> None:
    # GIVEN an average that is never evaluated
    ema, target = mx.zeros((64, 64)), mx.ones((64, 64))
    counts = [count()]

    # WHEN it is updated: two scalars and their broadcasts, two products and a sum
    for _ in range(3):
        for _ in range(50):
            ema = 0.99 * ema + 0.01 * target
        counts.append(count())

    # THEN each update leaves seven nodes, all but the scalars pending
    steps = [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(counts)]
    assert steps == [(350, 250)] * 3

    # WHEN it is evaluated
    mx.eval(ema)

    # THEN only the two arrays that Python holds are left
    assert count() == (2, 0)


def test_eval_makes_pending_nodes_evaluated(books: Books) -> None:
    # GIVEN two pending nodes, one the other's input
    a = mx.array([1.0, 2.0])
    b = mx.exp(a)
    c = mx.sin(b)
    assert count() == (3, 2)

    # WHEN the input is evaluated, and then the other
    mx.eval(b)
    after_b = count()
    mx.eval(c)

    # THEN they are pending no more, one after the other
    assert after_b == (3, 1)
    assert count() == (3, 0)
    nodes = check_nodes()
    assert set(nodes.live["buffer"].tolist()) == {
        event["addr"] for event in books.allocs()
    }


def test_outputs_of_one_operation_are_evaluated_together(books: Books) -> None:
    # GIVEN an operation with three outputs
    x = mx.arange(12)
    mx.eval(x)
    a, b, c = mx.split(x, 3)
    before = count()

    # WHEN one of them is evaluated
    mx.eval(b)

    # THEN none is pending
    assert before[1] - count()[1] == 3
    assert count()[1] == 0
    del a, b, c


def test_views_show_fewer_bytes_than_their_buffers(books: Books) -> None:
    # GIVEN six big arrays of which only a view of two rows is kept
    views = []
    for _ in range(6):
        big = mx.random.normal((1024, 1024))
        mx.eval(big)
        tail = big[-2:]
        mx.eval(tail)
        views.append(tail)
        del big, tail
    settle()

    # WHEN the nodes are read
    nodes = check_nodes()

    # THEN each view is visible with its 8,192 bytes, of a buffer of 4 MiB
    mine = nodes.live[nodes.live["nbytes"] == 8192]
    assert len(mine) == 6
    sizes = {e["addr"]: e["size"] for e in books.allocs()}
    assert [sizes[a] for a in mine["buffer"].tolist()] == [4 << 20] * 6
    del views


def test_nodes_from_before_enable_are_not_counted() -> None:
    # GIVEN pending and evaluated nodes from before
    old = mx.ones((3,))
    mx.eval(old)
    waiting = mx.exp(old)

    with Books():
        # WHEN a session makes one more on top of them
        new = mx.sin(waiting)

        # THEN it is the only one, also when the others are evaluated and go
        assert count() == (1, 1)
        mx.eval(new)
        assert count() == (1, 0)
        del old, waiting
        assert count() == (1, 0)
        del new
        assert count() == (0, 0)


def test_each_session_counts_its_own_nodes() -> None:
    for n in (5, 1, 9):
        # GIVEN a session, with nodes of the last one that live and ones that go
        with Books() as books:
            first = [mx.exp(mx.array([1.0])) for _ in range(n)]
            assert count() == (2 * n, n)

            # WHEN another begins without a pause
            books.restart()
            second = [mx.sin(mx.array([1.0])) for _ in range(n + 1)]

            # THEN the nodes of the first are no longer there
            assert count() == (2 * n + 2, n + 1)
            del first
            assert count() == (2 * n + 2, n + 1)
            mx.eval(second)
            assert count() == (n + 1, 0)
        del second


def test_nodes_stay_known_after_the_session() -> None:
    # GIVEN a session that ends with two nodes
    with Books():
        keep = [mx.exp(mx.array([1.0]))]
        settle()
        mlxmem.disable()

        # WHEN they go, unseen
        keep.clear()

        # THEN those of its end are reported, to everybody who asks
        for _ in range(2):
            nodes = _hook.copy_nodes()
            assert nodes is not None
            assert sorted(nodes.live["pending"].tolist()) == [0, 1]
            assert nodes.samples[-1].tolist()[2:] == (2, 1)


def test_without_stacks_nodes_are_counted_all_the_same() -> None:
    with Books(stacks=False):
        # GIVEN a session without stacks
        keep = [mx.exp(mx.array([1.0])) for _ in range(7)]

        # WHEN its nodes are read
        nodes = check_nodes()

        # THEN they are all there, without a stack
        assert len(nodes.live) == 14
        assert set(nodes.live["traceback_id"].tolist()) == {0}
        del keep


def test_compiled_functions_and_gradients_leave_no_nodes(books: Books) -> None:
    # GIVEN a compiled function and a gradient, both used once: what compile() keeps
    def loss(w: mx.array, x: mx.array) -> mx.array:
        return mx.mean(mx.tanh(x @ w) ** 2)

    w, x = mx.random.normal((8, 8)), mx.random.normal((4, 8))
    step = mx.compile(mx.value_and_grad(loss))
    plain = mx.grad(loss)
    mx.eval(w, x, step(w, x), plain(w, x))
    first = count()

    # WHEN they run again
    for _ in range(20):
        value, gradient = step(w, x)
        mx.eval(value, gradient, plain(w, x))
        del value, gradient

    # THEN nothing is added
    assert count() == first


def test_async_eval_and_streams(books: Books) -> None:
    # GIVEN work on two streams
    streams = [mx.new_stream(mx.cpu) for _ in range(2)]
    x = mx.ones((50, 50))
    mx.eval(x)
    kept = []

    # WHEN much is evaluated asynchronously
    for i in range(200):
        with mx.stream(streams[i % 2]):
            y = mx.exp(x @ x) + 1
            mx.async_eval(y)
            kept = [*kept[-3:], y]
    mx.eval(kept)

    # THEN the arrays that Python holds are left
    del y
    assert count() == (5, 0)


def test_threads_that_make_and_drop_nodes_at_once(books: Books) -> None:
    # GIVEN threads that hand nodes to each other
    stop = threading.Event()
    box: list[mx.array] = []

    def work(seed: int) -> None:
        with mx.stream(mx.new_stream(mx.cpu)):
            for i in range(600):
                made = [mx.exp(mx.array([float(seed + i)])) for _ in range(5)]
                box.append(made[0])
                if i % 3 == 0:
                    mx.eval(made[1:3])
                if len(box) > 8:
                    box.pop(0)
                if stop.is_set():
                    break

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()

    # WHEN the nodes are read meanwhile
    while any(thread.is_alive() for thread in threads):
        nodes = _hook.copy_nodes()
        assert nodes is not None
        assert set(nodes.live["pending"].tolist()) <= {0, 1}
        # A node with its input, and those that five lines hold for the moment.
        assert len(nodes.live) < 1000
    for thread in threads:
        thread.join()

    # THEN every one that is not held has gone
    assert count() == (2 * len(box), len(box))
    box.clear()
    assert count() == (0, 0)


def test_samples_follow_the_totals(books: Books) -> None:
    # GIVEN a session in which 100 nodes come and half of them go
    keep = [mx.array([1.0]) for _ in range(100)]
    _hook.position()
    del keep[50:]
    settle()

    # WHEN the samples are read
    samples = check_nodes().samples

    # THEN they rise to 100 at the 100th event, and fall to 50 at the 150th
    assert samples[0].tolist()[2:] == (0, 0)
    assert int(samples["live"].max()) == 100
    at = {int(s["live"]): int(s["at"]) for s in samples}
    assert at[100] == 100
    assert samples[-1]["live"] == 50
    assert samples[-1]["at"] == 150


def test_samples_are_thinned_out() -> None:
    with Books() as books:
        # GIVEN many more changes than samples are kept
        x = mx.array([0.5])
        for _ in range(300_000):
            x = mx.sin(x)

        # WHEN they are read
        samples = check_nodes().samples

        # THEN some thousands stand for all, evenly
        assert 2048 <= len(samples) <= 4097
        live = samples["live"].astype(np.int64)
        assert np.all(np.diff(live) >= 0)
        assert int(np.diff(live).max()) <= 128
        assert live[-1] == 300_001
        del x
        books.check()
