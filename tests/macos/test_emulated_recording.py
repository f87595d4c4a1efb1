"""mlxmem's own library for macOS records MLX's, both in an emulator.

All that runs is the code that would run on a Mac, up to the system and the GPU.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import emulated_mlx as mlx
import pytest
from emulated_mlx import EmulatedMlx
from emulated_mlxmem import Action, EmulatedMlxmem
from emulator import PAGE, READ, WRITE
from emulator_images import Image
from emulator_system import THREAD
from macho_facts import library, patched_words

COPY = 0x10  # VM_PROT_COPY
VPTR = "the allocator's vtable pointer"
TRACEBACK = 364  # of an ArrayDesc, see csrc/node.h
PRIMITIVE = 200


@pytest.fixture(scope="module")
def mlxmem(emulated: EmulatedMlx, mlxmem_dylib: Path) -> EmulatedMlxmem:
    """Load core.so and mlxmem, as Python does."""
    emulated.load_core()
    return EmulatedMlxmem(emulated, mlxmem_dylib)


@pytest.fixture
def recording(mlxmem: EmulatedMlxmem) -> Iterator[EmulatedMlxmem]:
    """Attach, and begin a session."""
    mlxmem.attach()
    mlxmem.call("start_session", 0)
    yield mlxmem
    mlxmem.call("stop_session")
    mlxmem.detach()
    mlxmem.traceback = 0


def of_mlx(mlxmem: EmulatedMlxmem) -> list[Image]:
    """Return MLX's libraries."""
    wheel = mlxmem.mlx.wheel
    paths = (str(wheel.libmlx), str(wheel.core))
    return [image for image in mlxmem.mac.loader.images if image.path in paths]


def expected_words(mlxmem: EmulatedMlxmem) -> dict[int, tuple[str, str]]:
    """Return what each word of a library is that an attach edits, by lief."""
    found = {}
    for image in of_mlx(mlxmem):
        path = Path(image.path)
        is_core = path == mlxmem.mlx.wheel.core
        words = patched_words(library(path), has_gil=is_core)
        for what, offsets in words.items():
            found |= {image.base + at: (what, path.name) for at in offsets}
    return found


class World:
    """MLX's libraries and its allocator, at a time."""

    def __init__(self, mlxmem: EmulatedMlxmem) -> None:
        mac = mlxmem.mac
        self.allocator = mac.word(mlxmem.mlx.allocator())
        self.protections = mac.protections()
        self._bytes = {
            begin: mac.read(begin, size)
            for image in of_mlx(mlxmem)
            for _, begin, size, _ in image.segments
        }

    def changed_since(self, before: World) -> dict[int, tuple[int, int]]:
        """Return the words of the libraries that differ, as they were and are."""
        return {
            begin + page + 8 * i: (was, now)
            for begin, old in before._bytes.items()
            for page in range(0, len(old), PAGE)
            if (one := old[page : page + PAGE])
            != (other := self._bytes[begin][page : page + PAGE])
            for i, (was, now) in enumerate(zip(words(one), words(other), strict=True))
            if was != now
        }

    def assert_is(self, before: World) -> None:
        """Check that nothing has changed."""
        assert self.changed_since(before) == {}
        assert self.allocator == before.allocator
        assert self.protections == before.protections


def words(content: bytes) -> list[int]:
    """Return the words in memory."""
    return [word for (word,) in struct.iter_unpack("<Q", content)]


# ---- attach and detach -----------------------------------------------------------


def test_a_check_finds_every_fact_and_edits_nothing(mlxmem: EmulatedMlxmem) -> None:
    # GIVEN MLX, and its words by lief
    expected = list(expected_words(mlxmem).values())
    before = World(mlxmem)
    mlxmem.mac.protect_calls.clear()

    # WHEN it is asked what an attach would find
    check = mlxmem.check()

    # THEN every fact holds, and the words of both libraries are named
    assert check.refusal == ""
    assert [fact.otherwise for fact in check.facts if not fact.holds] == []
    texts = {fact.text: fact.found for fact in check.facts}
    assert texts["slot 5 of the vtable of Add returns its name"] == "Add"
    assert texts["ArrayDesc: the status is at offset 216"].endswith("0 of a node")
    assert check.patches == {
        (VPTR, ""): 1,
        **{place: expected.count(place) for place in expected},
    }

    # AND nothing is other than before
    World(mlxmem).assert_is(before)
    assert mlxmem.mac.protect_calls == []
    assert mlxmem.words() == []


def test_an_attach_edits_the_words_that_lief_finds_and_a_detach_puts_them_back(
    mlxmem: EmulatedMlxmem,
) -> None:
    # GIVEN MLX
    mac = mlxmem.mac
    expected = expected_words(mlxmem)
    before = World(mlxmem)
    allocator = mlxmem.mlx.allocator()
    mac.protect_calls.clear()

    # WHEN mlxmem attaches
    mlxmem.attach()

    # THEN those words are edited, and that of the allocator, and mlxmem says so
    attached = World(mlxmem)
    edited = {word.address: word[1:] for word in mlxmem.words()}
    assert edited.pop(allocator) == (before.allocator, attached.allocator)
    assert edited.keys() == expected.keys()
    assert attached.changed_since(before) == edited

    # AND their pages were made writable as copies of their own, and closed again
    opened = [call for call in mac.protect_calls if call.protection & WRITE]
    closed = mac.protect_calls[len(opened) :]
    assert {call.protection for call in opened} == {READ | WRITE | COPY}
    assert {call.protection for call in closed} == {READ}
    assert {call.segment for call in mac.protect_calls} == {"__DATA_CONST"}
    pages, closed_pages = (
        [
            page
            for call in calls
            for page in range(call.address, call.address + call.size, PAGE)
        ]
        for calls in (opened, closed)
    )
    assert pages == closed_pages
    assert pages == sorted({address // PAGE * PAGE for address in expected})
    assert attached.protections == before.protections

    # WHEN it detaches
    mlxmem.detach()

    # THEN every byte and every protection is as it was
    World(mlxmem).assert_is(before)
    assert mlxmem.words() == []


# ---- nodes -----------------------------------------------------------------------


def test_a_node_lives_from_its_constructor_to_its_last_reference(
    recording: EmulatedMlxmem,
) -> None:
    # GIVEN a session, and a primitive
    emulated, mac = recording.mlx, recording.mac
    primitive = mac.put(bytes(64))
    assert recording.nodes() == []

    # WHEN MLX makes two nodes, at two lines of a program
    recording.traceback = 7
    first = emulated.make_array(3, 5, 7, primitive=primitive)
    recording.traceback = 8
    second = emulated.make_array(2, 2, primitive=primitive)

    # THEN mlxmem knows both, each with its line
    seen = sorted((n.traceback, n.nbytes, n.pending) for n in recording.nodes())
    assert seen == [(7, 4 * 3 * 5 * 7, 1), (8, 4 * 2 * 2, 1)]
    # AND has it in the very node that MLX made
    tracebacks = [mac.read(n.desc + TRACEBACK, 4) for n in (first, second)]
    assert tracebacks == [struct.pack("<I", n) for n in (7, 8)]

    # WHEN the last reference of the first one goes, and then of the second
    for node, left in ((first, [8]), (second, [])):
        mac.set_word(node.desc + PRIMITIVE, 0)  # which no shared_ptr owns
        emulated.drop(node)

        # THEN mlxmem knows the other one only
        assert [n.traceback for n in recording.nodes()] == left


# ---- buffers ---------------------------------------------------------------------


def test_the_books_are_mlxs_counters_at_every_step(recording: EmulatedMlxmem) -> None:
    # GIVEN a session, and buffers of two sizes
    emulated = recording.mlx
    emulated.call(mlx.CLEAR_CACHE)
    start = len(recording.session().events)
    small, large = 100, 7 * PAGE
    expected: list[tuple[Action, int, int, int, int]] = []

    def ask(what: Action, buffer: int, size: int, asked: int, line: int) -> None:
        # THEN the event is that, and the books are what MLX counts
        expected.append((what, buffer, size, asked, line))
        session = recording.session()
        assert [
            (Action(e.kind), e.address, e.size, e.requested_size, e.traceback)
            for e in session.events[start:]
        ] == expected
        assert session.now == emulated.counters()
        assert session.unexplained == 0

    # WHEN MLX's allocator gives two buffers, at two lines
    recording.traceback = 3
    one = emulated.call_allocator(mlx.MALLOC, small)
    ask(Action.ALLOC_NEW, one, small, small, 3)
    recording.traceback = 4
    two = emulated.call_allocator(mlx.MALLOC, 100_000)
    ask(Action.ALLOC_NEW, two, large, 100_000, 4)

    # WHEN the large one is freed, and MLX uses it again
    emulated.call_allocator(mlx.FREE, two)
    ask(Action.FREE_ACTIVE_TO_CACHE, two, large, 100_000, 4)
    recording.traceback = 5
    assert emulated.call_allocator(mlx.MALLOC, 110_000) == two
    ask(Action.ALLOC_REUSE, two, large, 110_000, 5)
    assert recording.session().live_buffers == 2

    # WHEN it is freed, and the cache is cleared
    emulated.call_allocator(mlx.FREE, two)
    ask(Action.FREE_ACTIVE_TO_CACHE, two, large, 110_000, 5)
    emulated.call(mlx.CLEAR_CACHE)
    ask(Action.FREE_CACHE_TO_OS, two, large, 110_000, 5)

    # WHEN the other one is freed where no cache is kept
    kept = emulated.call(mlx.SET_CACHE_LIMIT, 0)
    emulated.call_allocator(mlx.FREE, one)
    ask(Action.FREE_ACTIVE_TO_OS, one, small, small, 3)
    emulated.call(mlx.SET_CACHE_LIMIT, kept)

    # THEN no buffer of Metal's is left, and each event says which thread it was
    session = recording.session()
    assert session.now | {"peak": 0} == {"active": 0, "cache": 0, "peak": 0}
    assert session.live_buffers == 0
    assert {event.thread_id for event in session.events[start:]} == {THREAD}
