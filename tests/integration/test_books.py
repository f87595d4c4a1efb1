"""The helper of all these tests can fail: a tampered recording does not balance."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest
from books import Books, Counters, check

from mlxmem.events import Action, Recording, Records


@pytest.fixture(scope="module")
def sound() -> tuple[Recording, Counters]:
    """A recording that balances, with what MLX counted."""
    with Books() as books:
        keep = [mx.random.normal((30 + n, 40)) for n in range(5)]
        mx.eval(keep)
        for n in range(20):
            mx.eval(mx.exp(mx.random.normal((100 + n, 30))))
        keep.pop()
        mx.clear_cache()
        books.check()
        return books.read()


def changed(recording: Recording, events: Records) -> Recording:
    return dataclasses.replace(recording, events=events)


def pick(recording: Recording, action: Action) -> int:
    """Index of an event of this kind that is not the first and has a size."""
    events = recording.events
    found = np.flatnonzero((events["action"] == action) & (events["size"] > 8))
    return int(found[len(found) // 2])


def test_an_honest_recording_balances(sound: tuple[Recording, Counters]) -> None:
    check(*sound)


@pytest.mark.parametrize("position", [0, 1, 0.5, -1])
def test_a_dropped_event_is_found(
    sound: tuple[Recording, Counters], position: float
) -> None:
    # GIVEN
    recording, counters = sound

    # WHEN one event is taken out
    count = len(recording.events)
    index = int(position * count) if 0 < position < 1 else int(position)
    tampered = changed(recording, np.delete(recording.events, index))

    # THEN
    with pytest.raises(AssertionError):
        check(tampered, counters)


def test_an_event_twice_is_found(sound: tuple[Recording, Counters]) -> None:
    # GIVEN
    recording, counters = sound

    # WHEN one event is put in twice
    index = pick(recording, Action.AllocNew)
    event = recording.events[index]
    tampered = changed(recording, np.insert(recording.events, index, event))

    # THEN
    with pytest.raises(AssertionError):
        check(tampered, counters)


def edit_size(events: Records, i: int) -> None:
    events["size"][i] += 1


def edit_requested(events: Records, i: int) -> None:
    events["requested_size"][i] -= 1


def edit_address(events: Records, i: int) -> None:
    events["addr"][i] += 16


def edit_action(events: Records, i: int) -> None:
    swapped = {0: 1, 1: 0, 3: 4, 4: 3}
    events["action"][i] = swapped[int(events["action"][i])]


def edit_time(events: Records, i: int) -> None:
    events["timestamp_us"][i] -= 10_000_000


def edit_stream(events: Records, i: int) -> None:
    events["stream"][i] = -1 if events["stream"][i] >= 0 else 0


@pytest.mark.parametrize(
    "edit",
    [edit_size, edit_requested, edit_address, edit_action, edit_time, edit_stream],
)
@pytest.mark.parametrize("kind", ["alloc", "free"])
def test_a_changed_event_is_found(
    sound: tuple[Recording, Counters], edit: Callable[[Records, int], None], kind: str
) -> None:
    # GIVEN an allocation, or a free as this MLX does it
    recording, counters = sound
    seen = set(recording.events["action"].tolist())
    freed = Action.FreeActiveToCache
    if freed not in seen:
        freed = Action.FreeActiveToOS
    events = recording.events.copy()

    # WHEN one of its fields is another
    edit(events, pick(recording, Action.AllocNew if kind == "alloc" else freed))

    # THEN
    with pytest.raises(AssertionError):
        check(changed(recording, events), counters)


def test_a_free_that_names_another_owner_is_found(
    sound: tuple[Recording, Counters],
) -> None:
    # GIVEN
    recording, counters = sound
    for name in ("traceback_id", "primitive_id"):
        # WHEN a free names another stack or operation than its allocation
        events = recording.events.copy()
        frees = np.flatnonzero(np.isin(events["action"], (3, 4)))
        events[name][frees[len(frees) // 2]] += 1

        # THEN
        with pytest.raises(AssertionError):
            check(changed(recording, events), counters)


@pytest.mark.parametrize("name", ["active", "cache", "peak"])
def test_a_counter_that_is_off_by_a_byte_is_found(
    sound: tuple[Recording, Counters], name: str
) -> None:
    # GIVEN
    recording, counters = sound

    # WHEN MLX's counter, or the recording's, is one more
    wrong = counters._replace(**{name: getattr(counters, name) + 1})
    total = getattr(recording, name) + 1
    tampered = dataclasses.replace(recording, **{name: total})

    # THEN
    with pytest.raises(AssertionError):
        check(recording, wrong)
    with pytest.raises(AssertionError):
        check(tampered, counters)


def test_a_reset_that_was_not_noted_is_found() -> None:
    with Books() as books:
        # GIVEN a large array, a reset, and a small one
        mx.eval(mx.random.normal((500, 500)))
        mx.reset_peak_memory()
        mx.eval(mx.random.normal((5, 5)))
        recording, counters = books.read()
        assert len(books.resets) == 1

        # WHEN / THEN the peak is right with the reset, and wrong without it
        check(recording, counters, books.resets)
        with pytest.raises(AssertionError):
            check(recording, counters)
