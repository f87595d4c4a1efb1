"""Marks and ranges: where they lie, whose they are, and what they tag."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from books import Books

import mlxmem
from mlxmem import marks
from mlxmem._interner import resolve_context, set_context
from mlxmem.events import NO_CONTEXT, Action, Context, Range


@pytest.fixture(autouse=True)
def _no_context() -> Iterator[None]:
    yield
    assert set_context(0) == 0, "a range was left open"


def allocate(kib: int = 4) -> None:
    mx.eval(mx.ones((kib, 256)))


def contexts(books: Books) -> list[tuple[str, Context]]:
    """(operation, context) of each allocation, in order."""
    recording = books.check()
    return [
        (
            recording.primitives[row["primitive_id"]],
            resolve_context(row["traceback_id"]),
        )
        for row in recording.events
        if row["action"] <= Action.AllocMakeBuffer and row["primitive_id"]
    ]


def paths(ranges: tuple[Range, ...]) -> list[tuple[str, ...]]:
    return [each.path for each in ranges]


# --- where they lie ---------------------------------------------------------


def test_a_mark_lies_between_the_events_around_it() -> None:
    with Books() as books:
        # GIVEN events before and after
        allocate()
        before = mlxmem.stats()["events_recorded"]
        # WHEN the moment between is marked
        mlxmem.mark("between")
        allocate()
        # THEN the mark has its position, time and thread
        recording = books.check()
        [found], ranges = marks.collect()
        times = recording.events["timestamp_us"]
        assert (found.name, ranges) == ("between", ())
        assert found.at >= before > 0
        assert found.thread_id == threading.get_native_id()
        assert times[found.at - 1] <= found.timestamp_us <= times[found.at]
        names = [e["primitive_name"] for e in mlxmem.events()[found.at :]]
        assert names.count("Full") == 1


def test_positions_count_events_that_were_dropped() -> None:
    with Books(max_entries=5):
        # GIVEN a ring that has overflowed
        for _ in range(20):
            allocate()
        assert mlxmem.stats()["events_dropped"] > 0
        # WHEN a mark is set
        mlxmem.mark("late")
        # THEN it counts all events
        [found], _ = marks.collect()
        assert found.at > 5


def test_ranges_nest() -> None:
    with Books() as books:
        # GIVEN ranges in one another, one of them twice
        with mlxmem.annotate("step"):
            allocate()
            with mlxmem.annotate("forward"), mlxmem.annotate("attention"):
                allocate()
            with mlxmem.annotate("backward"):
                allocate()
        allocate()
        # WHEN they are read
        _, ranges = marks.collect()
        # THEN each has its path, and lies inside the one around it
        assert paths(ranges) == [
            ("step",),
            ("step", "forward"),
            ("step", "forward", "attention"),
            ("step", "backward"),
        ]
        step, forward, attention, backward = ranges
        assert step.start.at <= forward.start.at <= attention.start.at
        assert attention.start.at < attention.end.at <= forward.end.at
        assert forward.end.at <= backward.start.at < backward.end.at <= step.end.at
        assert not any(each.open for each in ranges)
        assert all(each.start.timestamp_us <= each.end.timestamp_us for each in ranges)
        # AND what was created in them carries their names
        assert [c for op, c in contexts(books) if op == "Full"] == [
            Context(("step",)),
            Context(("step", "forward", "attention")),
            Context(("step", "backward")),
            NO_CONTEXT,
        ]


def test_a_range_belongs_to_what_is_created_in_it() -> None:
    with Books() as books:
        # GIVEN a lazy array that a range creates
        with mlxmem.annotate("build"):
            array = mx.ones((64, 64))
        # WHEN it is evaluated in another
        with mlxmem.annotate("evaluate"):
            mx.eval(array)
        # THEN it carries the first one's name
        assert ("Full", Context(("build",))) in contexts(books)
        assert not any(c == Context(("evaluate",)) for _, c in contexts(books))


def test_an_object_can_be_entered_again_inside_itself() -> None:
    with Books():
        # GIVEN one object
        again = mlxmem.annotate("again")
        # WHEN it is entered three times, twice inside itself
        with again, again:
            pass
        with again:
            pass
        # THEN there are three ranges
        _, ranges = marks.collect()
        assert paths(ranges) == [("again",), ("again", "again"), ("again",)]


def test_an_exception_closes_its_ranges() -> None:
    with Books() as books:
        # GIVEN a body that raises, two ranges deep
        # WHEN the exception has left them
        with pytest.raises(ZeroDivisionError), mlxmem.annotate("a"):  # noqa: SIM117
            with mlxmem.annotate("b"):
                raise ZeroDivisionError
        allocate()
        # THEN both have ended
        _, ranges = marks.collect()
        assert [(each.path, each.open) for each in ranges] == [
            (("a",), False),
            (("a", "b"), False),
        ]
        assert {c for _, c in contexts(books)} == {NO_CONTEXT}


# --- decorators -------------------------------------------------------------


def test_a_decorated_function_is_a_range_at_each_call() -> None:
    @mlxmem.annotate("work")
    def work(depth: int) -> int:
        """Do it."""
        allocate()
        return work(depth - 1) + 1 if depth else 0

    with Books() as books:
        # GIVEN a decorated function that calls itself
        # WHEN it is called
        assert work(1) == 1
        # THEN there is a range for each call, and it looks as before
        assert paths(marks.collect()[1]) == [("work",), ("work", "work")]
        assert (work.__name__, work.__doc__) == ("work", "Do it.")
        assert [c for op, c in contexts(books) if op == "Full"] == [
            Context(("work",)),
            Context(("work", "work")),
        ]


def test_a_decorated_coroutine_is_a_range_until_it_is_done() -> None:
    @mlxmem.annotate("task")
    async def work() -> str:
        await asyncio.sleep(0)
        allocate()
        return "done"

    async def both() -> list[str]:
        return list(await asyncio.gather(work(), work()))

    with Books():
        # GIVEN two tasks that take turns, so that neither ends last first
        # WHEN they are done
        assert asyncio.run(both()) == ["done", "done"]
        # THEN both ranges have ended
        _, ranges = marks.collect()
        assert [each.path[-1] for each in ranges] == ["task", "task"]
        assert not any(each.open for each in ranges)


def test_a_generator_function_is_refused() -> None:
    def numbers() -> Iterator[int]:
        yield 1

    with pytest.raises(TypeError, match="can't decorate the generator"):
        mlxmem.annotate("numbers")(numbers)


# --- threads ----------------------------------------------------------------


def test_each_thread_has_its_own_ranges() -> None:
    with Books() as books:
        # GIVEN two threads that are in their ranges at the same time
        barrier = threading.Barrier(2, timeout=30)

        def work(name: str) -> int:
            with mlxmem.annotate(name):
                barrier.wait()
                mx.eval(mx.ones((16, 256), stream=mx.new_stream(mx.cpu)) + 1)
                barrier.wait()
            return threading.get_native_id()

        # WHEN both allocate
        with ThreadPoolExecutor(2) as pool:
            ids = dict(zip("ab", pool.map(work, "ab"), strict=True))
        # THEN neither is in the other's
        _, ranges = marks.collect()
        assert sorted(paths(ranges)) == [("a",), ("b",)]
        assert {each.path[0]: each.start.thread_id for each in ranges} == ids
        recording = books.check()
        tagged = {
            (resolve_context(row["traceback_id"]).ranges, int(row["thread_id"]))
            for row in recording.events
            if row["action"] <= Action.AllocMakeBuffer
        }
        assert tagged == {(("a",), ids["a"]), (("b",), ids["b"])}


def test_a_block_that_is_left_on_another_thread_ends() -> None:
    def numbers() -> Iterator[int]:
        with mlxmem.annotate("numbers"):
            yield 1

    with Books():
        # GIVEN a generator that has entered its block on this thread
        generator = numbers()
        assert next(generator) == 1
        # WHEN another thread exhausts it
        thread = threading.Thread(target=lambda: next(generator, None))
        thread.start()
        thread.join()
        # THEN the range has ended, and this thread's next is not inside it
        with mlxmem.annotate("next"):
            pass
        _, ranges = marks.collect()
        assert [(each.path, each.open) for each in ranges] == [
            (("numbers",), False),
            (("next",), False),
        ]


def test_many_threads_mark_while_somebody_reads() -> None:
    with Books():
        # GIVEN four threads, each with 500 marks in ranges of its own
        def work(number: int) -> None:
            for _ in range(500):
                with mlxmem.annotate(f"thread {number}"):
                    mlxmem.mark(f"mark {number}")

        # WHEN they run while the marks are read
        with ThreadPoolExecutor(4) as pool:
            running = [pool.submit(work, number) for number in range(4)]
            while not all(each.done() for each in running):
                marks.collect()
            for each in running:
                each.result()
        # THEN none is lost
        found, ranges = marks.collect()
        assert (len(found), len(ranges)) == (2000, 2000)
        assert {each.path for each in ranges} == {(f"thread {n}",) for n in range(4)}
        times = [each.timestamp_us for each in found]
        assert times == sorted(times)


def test_a_range_that_another_thread_closes_leaves_its_owner() -> None:
    def steps() -> Iterator[None]:
        with mlxmem.annotate("steps"):
            yield

    for call in (
        lambda: mlxmem.mark("next"),
        lambda: mlxmem.annotate("next").__enter__().__exit__(None, None, None),
        lambda: marks.enter_module(marks.enter_module("next")),
    ):
        with Books() as books:
            # GIVEN a generator that waits in a range
            waiting = steps()
            next(waiting)
            with ThreadPoolExecutor(1) as pool:
                # WHEN another thread closes it
                pool.submit(waiting.close).result()
            # THEN the first thread leaves the range at its next call
            call()
            allocate()
            assert [c for op, c in contexts(books) if op == "Full"] == [NO_CONTEXT]
            assert paths(marks.collect()[1])[0] == ("steps",)


# --- the recursion limit ----------------------------------------------------


@pytest.mark.parametrize("recording", [False, True])
def test_a_program_can_still_handle_its_recursion_errors(recording: bool) -> None:
    @mlxmem.annotate("recurse")
    def recurse() -> None:
        mlxmem.mark("deeper")
        recurse()

    def deeper(frames: int) -> None:
        if frames:
            deeper(frames - 1)
        else:
            recurse()

    if recording:
        mlxmem.enable()
    # GIVEN a function with a range that calls itself without end
    for frames in range(24):
        # WHEN the limit is met, each time at another place
        with pytest.raises(RecursionError):
            deeper(frames)
        # THEN it is the error that Python raises, and no range stays open
        assert not any(each.open for each in marks.collect()[1])
        assert marks._local.thread.path == ()
        mlxmem.mark("after")
        assert set_context(0) == 0


# --- sessions ---------------------------------------------------------------


def test_nothing_is_kept_without_a_session() -> None:
    # GIVEN no session
    mlxmem.enable()
    mlxmem.disable()
    # WHEN something is marked
    mlxmem.mark("before")
    with mlxmem.annotate("before"):
        pass
    # THEN nothing is there
    assert marks.collect() == ((), ())


def test_marks_stay_after_disable_and_go_with_the_next_session() -> None:
    # GIVEN a session with a mark and a range that ended
    mlxmem.enable()
    mlxmem.mark("first")
    with mlxmem.annotate("range"):
        allocate()
    mlxmem.disable()
    found, ranges = marks.collect()
    assert [each.name for each in found] == ["first"]
    assert [(each.path, each.open) for each in ranges] == [(("range",), False)]
    # WHEN the next one begins
    mlxmem.enable()
    # THEN they are gone
    assert marks.collect() == ((), ())


def test_a_session_that_begins_inside_a_range() -> None:
    # GIVEN two open ranges
    # WHEN a session begins inside of them
    outer, inner = mlxmem.annotate("outer"), mlxmem.annotate("inner")
    with outer, inner, Books() as books:
        allocate()
        _, ranges = marks.collect()
        # THEN they are part of it from its first moment
        assert [(each.path, each.open) for each in ranges] == [
            (("outer",), True),
            (("outer", "inner"), True),
        ]
        assert [(r.start.at, r.start.timestamp_us) for r in ranges] == [(0, 0)] * 2
        assert {c for _, c in contexts(books)} == {Context(("outer", "inner"))}


def test_a_session_that_ends_inside_a_range() -> None:
    # GIVEN an open range
    mlxmem.enable()
    with mlxmem.annotate("cut"):
        allocate()
        # WHEN its session ends
        mlxmem.disable()
        total = mlxmem.stats()["events_recorded"]
        during = marks.collect()[1]
    # THEN it ends with it, also after its block has
    after = marks.collect()[1]
    for [found] in (during, after):
        assert (found.path, found.open, found.end.at) == (("cut",), True, total)


def test_a_range_around_two_sessions_belongs_to_each() -> None:
    # GIVEN a session that ends inside a range
    with mlxmem.annotate("around"):
        mlxmem.enable()
        mlxmem.disable()
        # WHEN another begins, and the range ends inside that one
        mlxmem.enable()
    # THEN it is part of it from its beginning
    [found] = marks.collect()[1]
    assert (found.path, found.open, found.start.at) == (("around",), False, 0)


def test_a_forked_child_starts_empty() -> None:
    def child() -> bool:
        empty = marks.collect() == ((), ())
        mlxmem.mark("not recorded")
        mlxmem.enable()
        mlxmem.mark("mine")
        found, ranges = marks.collect()
        return (
            empty
            and [each.name for each in found] == ["mine"]
            and [(r.path, r.start.at, r.open) for r in ranges] == [(("a",), 0, True)]
            and ranges[0].start.thread_id == os.getpid()
        )

    # GIVEN marks, and a range that is open
    mlxmem.enable()
    mlxmem.mark("parent's")
    with mlxmem.annotate("over"):
        pass
    with mlxmem.annotate("a"):
        # WHEN the process forks in it
        pid = os.fork()
        if pid == 0:
            os._exit(0 if child() else 1)
        status = os.waitpid(pid, 0)[1]
    # THEN the child has the open range alone, and the parent all
    assert os.waitstatus_to_exitcode(status) == 0
    found, ranges = marks.collect()
    assert [each.name for each in found] == ["parent's"]
    assert paths(ranges) == [("over",), ("a",)]


def test_the_last_hundred_thousand_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN room for ten
    monkeypatch.setattr(marks, "MOST", 10)
    mlxmem.enable()
    # WHEN there are twelve of each
    for number in range(12):
        mlxmem.mark(str(number))
        with mlxmem.annotate(str(number)):
            pass
    # THEN the last ten are there
    found, ranges = marks.collect()
    expected = [str(number) for number in range(2, 12)]
    assert [each.name for each in found] == expected
    assert paths(ranges) == [(name,) for name in expected]


# --- names ------------------------------------------------------------------


@pytest.mark.parametrize("function", [mlxmem.mark, mlxmem.annotate])
@pytest.mark.parametrize("name", ["", "  ", "two\nlines", "\0", "\ud800"])
def test_what_is_no_name_is_refused(function: Callable[[str], Any], name: str) -> None:
    with pytest.raises(ValueError, match="one printable line"):
        function(name)


@pytest.mark.parametrize("function", [mlxmem.mark, mlxmem.annotate])
def test_a_name_has_an_end(function: Callable[[str], Any]) -> None:
    # GIVEN the longest name
    function("n" * 200)
    # WHEN one is longer
    # THEN it is refused, without being shown
    with pytest.raises(ValueError, match=r"at most 200 characters, not 1,000,000$"):
        function("n" * 1_000_000)


@pytest.mark.parametrize("function", [mlxmem.mark, mlxmem.annotate])
@pytest.mark.parametrize("name", [None, 3, b"step", len])
def test_another_type_is_refused(function: Callable[[Any], Any], name: Any) -> None:
    with pytest.raises(TypeError, match="takes a name"):
        function(name)


def test_names_of_a_subclass_become_plain_text() -> None:
    # GIVEN numpy's own kind of str
    mlxmem.enable()
    # WHEN it names something
    mlxmem.mark(np.str_("step"))
    with mlxmem.annotate(np.str_("range")):
        pass
    # THEN what is kept is a str
    [found], [ranges] = marks.collect()
    assert [type(found.name), type(ranges.path[0])] == [str, str]
