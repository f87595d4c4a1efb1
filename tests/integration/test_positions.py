"""Positions in a session, at which marks and samples stand between the events."""

from __future__ import annotations

import threading
import time

import mlx.core as mx
from books import Books

import mlxmem
from mlxmem import _hook


def test_a_position_lies_between_the_events_around_it(books: Books) -> None:
    # GIVEN a session with some events
    mx.eval(mx.exp(mx.array([1.0] * 50)))
    books.check()
    before = mlxmem.events()

    # WHEN its position is asked for, and more is allocated
    at, us = _hook.position()
    keep = mx.array([2.0] * 60)

    # THEN it has counted exactly the events before it, and its time lies between
    events = mlxmem.events()
    assert at == len(before)
    assert len(events) == at + 1
    assert before[-1]["timestamp_us"] <= us <= events[at]["timestamp_us"]
    assert events[at]["thread_id"] == threading.get_native_id()
    del keep


def test_positions_count_dropped_events() -> None:
    # GIVEN a ring of ten events
    with Books(max_entries=10):
        # WHEN 25 allocations are made
        keep = [mx.array([1.0] * n) for n in range(1, 26)]

        # THEN all of them count
        assert _hook.position()[0] == 25
        assert len(mlxmem.events()) == 10
        del keep


def test_the_position_stands_still_after_the_session() -> None:
    # GIVEN a session that has ended
    with Books() as books:
        keep = [mx.array([1.0] * 10) for _ in range(3)]
        books.check()
        mlxmem.disable()
        end = _hook.position()

        # WHEN time goes by and unrecorded arrays are made
        time.sleep(0.01)
        keep.append(mx.array([2.0]))

        # THEN the position is that of its end, and a new session begins at zero
        assert _hook.position() == end
        assert end[0] == 3
        mlxmem.enable()
        at, us = _hook.position()
        assert at == 0
        assert 0 <= us < 10_000_000
        del keep
