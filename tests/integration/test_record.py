"""`record()`: a context manager and a decorator that dumps on the way out."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import mlxmem


def sizes(path: Path) -> list[int]:
    """Sizes of the allocations in a dump, bytes."""
    with open(path, "rb") as file:
        trace = pickle.load(file)["device_traces"][0]
    return [entry["size"] for entry in trace if entry["action"] == "alloc"]


def test_context_manager_dumps(tmp_path: Path) -> None:
    # GIVEN
    path = tmp_path / "out.pickle"

    # WHEN
    with mlxmem.record(path):
        assert mlxmem.is_enabled()
        keep = mx.array([1] * 101)

    # THEN
    assert not mlxmem.is_enabled()
    assert 404 in sizes(path)
    del keep


def test_without_a_path_it_only_collects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN
    monkeypatch.chdir(tmp_path)

    # WHEN
    with mlxmem.record():
        keep = mx.array([1] * 103)

    # THEN
    assert list(tmp_path.iterdir()) == []
    assert 412 in [event["requested_size"] for event in mlxmem.events()]
    del keep


def test_dumps_also_when_the_body_raised(tmp_path: Path) -> None:
    # GIVEN
    path = tmp_path / "out.pickle"

    def body() -> None:
        keep = mx.array([1] * 107)
        raise KeyError(keep.size)

    # WHEN
    with pytest.raises(KeyError) as caught, mlxmem.record(path):
        body()

    # THEN
    assert caught.value.args == (107,)
    assert 428 in sizes(path)
    assert not mlxmem.is_enabled()


def test_a_failing_dump_does_not_hide_the_bodys_error(tmp_path: Path) -> None:
    # GIVEN a body that raises, and a folder that goes away meanwhile
    path = tmp_path / "no" / "out.pickle"
    path.parent.mkdir()

    def body() -> None:
        with mlxmem.record(path):
            path.parent.rmdir()
            keep = mx.array([1] * 109)
            raise KeyError(keep.size)

    # WHEN
    with (
        pytest.warns(RuntimeWarning, match=r"out\.pickle.*No such file") as warned,
        pytest.raises(KeyError) as caught,
    ):
        body()

    # THEN the body's error comes through, the other is told and the events are there
    assert caught.value.args == (109,)
    assert warned[0].filename == __file__
    assert not mlxmem.is_enabled()
    assert 436 in [event["requested_size"] for event in mlxmem.events()]
    assert list(tmp_path.iterdir()) == []


def test_a_failing_dump_is_an_error(tmp_path: Path) -> None:
    # GIVEN a place that can't be written

    # WHEN
    with pytest.raises(FileNotFoundError), mlxmem.record(tmp_path / "no" / "out"):
        mx.array([1])

    # THEN
    assert not mlxmem.is_enabled()
    assert mlxmem.events()


def test_decorator(tmp_path: Path) -> None:
    # GIVEN
    path = tmp_path / "out.pickle"

    @mlxmem.record(path, max_entries=0)
    def build(n: int, *, twice: bool = False) -> mx.array:
        """Builds."""
        made = mx.array([1] * n)
        return mx.array([1] * (2 * n)) if twice else made

    assert (build.__name__, build.__doc__) == ("build", "Builds.")
    assert not mlxmem.is_enabled()

    # WHEN
    assert build(109).size == 109

    # THEN
    assert 436 in sizes(path)

    # WHEN it is called again
    assert build(113, twice=True).size == 226

    # THEN that call alone is dumped
    assert {452, 904} <= set(sizes(path))
    assert 436 not in sizes(path)


def test_decorator_dumps_also_when_the_function_raised(tmp_path: Path) -> None:
    # GIVEN
    path = tmp_path / "out.pickle"

    @mlxmem.record(path)
    def broken() -> None:
        mx.array([1] * 127)
        raise ValueError("broken")

    # WHEN
    with pytest.raises(ValueError, match="broken"):
        broken()

    # THEN
    assert 508 in sizes(path)


def test_options_reach_enable() -> None:
    # WHEN
    with mlxmem.record(max_entries=5, stacks=False):
        keep = [mx.array([n]) for n in range(20)]

        # THEN
        assert len(mlxmem.events()) == 5
        assert {event["traceback"] for event in mlxmem.events()} == {None}
    del keep


def test_a_generator_cannot_be_decorated() -> None:
    # GIVEN a function whose body runs after its call
    def generate() -> Any:
        yield mx.array([1])

    # WHEN / THEN
    with pytest.raises(TypeError, match="generate"):
        mlxmem.record()(generate)


def test_inside_a_running_session_it_only_dumps(tmp_path: Path) -> None:
    # GIVEN a session that has collected something
    outer, inner = tmp_path / "outer.pickle", tmp_path / "inner.pickle"
    with mlxmem.record(outer):
        first = mx.array([1] * 131)

        # WHEN a record() begins and ends inside it
        with mlxmem.record(inner, max_entries=1):
            second = mx.array([1] * 137)

        # THEN that went on: nothing was thrown away, and what follows is recorded
        assert mlxmem.is_enabled()
        third = mx.array([1] * 139)
    assert not mlxmem.is_enabled()
    assert {524, 548} <= set(sizes(inner))
    assert {524, 548, 556} <= set(sizes(outer))
    del first, second, third


def test_inside_enable_it_stops_nothing(tmp_path: Path) -> None:
    # GIVEN
    mlxmem.enable()
    first = mx.array([1] * 149)

    # WHEN
    with mlxmem.record(tmp_path / "out.pickle"):
        pass

    # THEN
    assert mlxmem.is_enabled()
    assert 596 in sizes(tmp_path / "out.pickle")
    del first


def test_overlapping_blocks_share_a_session(tmp_path: Path) -> None:
    # GIVEN a block inside which another one began
    first, second = tmp_path / "first.pickle", tmp_path / "second.pickle"
    one, two = mlxmem.record(first), mlxmem.record(second)
    one.__enter__()
    two.__enter__()

    # WHEN the first one ends while the second goes on
    one.__exit__(None, None, None)

    # THEN recording goes on, and ends with the last one, which has all events
    assert mlxmem.is_enabled()
    keep = mx.array([1.0] * 1111)
    two.__exit__(None, None, None)
    assert not mlxmem.is_enabled()
    sizes = [e["size"] for e in pickle.loads(second.read_bytes())["device_traces"][0]]
    assert 4444 in sizes
    del keep


def test_one_object_entered_twice(tmp_path: Path) -> None:
    # GIVEN one record object
    block = mlxmem.record(tmp_path / "out.pickle")

    # WHEN it is entered twice
    with block, block:
        assert mlxmem.is_enabled()

    # THEN recording is off again
    assert not mlxmem.is_enabled()


def test_a_session_that_was_replaced_is_not_dumped(tmp_path: Path) -> None:
    # GIVEN a block whose body starts a session of its own
    path = tmp_path / "out.pickle"

    # WHEN it ends
    with (
        pytest.warns(RuntimeWarning, match="another mlxmem.enable"),
        mlxmem.record(path),
    ):
        mlxmem.enable()

    # THEN the other session's events are not written under its name
    assert not path.exists()
    assert mlxmem.is_enabled()


def test_generator_functions_are_refused() -> None:
    # GIVEN a function whose body runs after the call
    def batches() -> Iterator[int]:
        yield 1

    # WHEN it is decorated
    # THEN the error says what to use instead
    with pytest.raises(TypeError, match=r"generator.*with mlxmem.record"):
        mlxmem.record()(batches)


def test_a_change_in_the_middle_of_another_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # GIVEN a handler that calls disable() while enable() is under way
    from mlxmem import _hook

    start = _hook.start_session

    def interrupted(max_entries: int) -> None:
        mlxmem.disable()
        start(max_entries)

    monkeypatch.setattr(_hook, "start_session", interrupted)

    # WHEN enable() is called
    # THEN it says so, and leaves nothing half done
    with pytest.raises(RuntimeError, match="in the middle"):
        mlxmem.enable()
    assert not mlxmem.is_enabled()
    assert _hook.patched_words() == []


@pytest.mark.parametrize("path", ["no/out.pickle", "."])
def test_a_place_without_room_is_refused_before_the_body(
    tmp_path: Path, path: str
) -> None:
    # GIVEN a folder that does not exist, and a folder as target
    block = mlxmem.record(tmp_path / path)

    # WHEN the block is entered
    # THEN it fails at once, and nothing records
    with pytest.raises(OSError, match=r"No such file|Is a directory") as caught:
        block.__enter__()
    assert caught.value.filename == str(tmp_path / path)
    assert not mlxmem.is_enabled()


def test_the_decorator_wants_parentheses() -> None:
    # GIVEN a function

    # WHEN it is decorated without them
    # THEN the error shows them
    with pytest.raises(TypeError, match=r"@mlxmem\.record\(\)"):
        mlxmem.record(len)  # type: ignore[arg-type]


def test_an_option_that_does_not_exist() -> None:
    # GIVEN no option of that name

    # WHEN it is given
    # THEN the error names it and those that exist
    with pytest.raises(TypeError, match=r"record.*depth.*stacks and dump_on_oom"):
        mlxmem.record(depth=3)
