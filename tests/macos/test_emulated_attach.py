"""An attach to macOS's MLX, on Linux: which words it edits, and that it undoes them.

csrc's own code for macOS, mapped libraries of the wheels; no function of MLX runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from checks import needed
from emulated import PAGE, Memory, Process, build_program, changed_words
from macho_facts import (
    CONTROL_BLOCK,
    WORD,
    Library,
    library,
    patched_words,
    primitive_vtables,
    primitive_vtables_by_symbol,
)
from wheels import Wheel

LIBMLX, CORE = 0, 1  # the order of the images
READ, WRITE = 1, 2
VPTR = "the allocator's vtable pointer"
N_PRIMITIVES = {"0.30.6": 130, "0.31.2": 130, "0.32.1": 132, "0.32.4": 137}
ALLOCATOR_SLOTS = 7
ALLOCATOR_VTABLE = "__ZTVN3mlx4core5metal14MetalAllocatorE"
UNARY = "N3mlx4core14UnaryPrimitiveE"
LEAF_CONSTRUCTOR = (
    "__ZN3mlx4core5array9ArrayDescC1E"
    "NS0_11SmallVectorIiLm10ENSt3__19allocatorIiEEEENS0_5DtypeE"
)
METAL_MALLOC = "__ZN3mlx4core5metal14MetalAllocator6mallocEm"
MOV_NODE_SIZE = 0x52803100  # mov w0, #0x188
CALL = 0b100101  # the first bits of bl
NO_SYMBOL = 0x40000000  # in the table of indirect symbols


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the process that MLX's libraries are mapped into."""
    needed("lief")  # before a minute of compiling
    return build_program(tmp_path_factory.mktemp("emulated"))


class Mlx:
    """A process with MLX in it, and what is expected of it."""

    def __init__(self, program: Path, wheel: Wheel) -> None:
        self.files = library(wheel.libmlx), library(wheel.core)
        self.process = Process(program, wheel.libmlx, wheel.core)

    def base(self, index: int) -> int:
        """Return where a library lies."""
        return self.process.base(index)

    def images(self) -> tuple[Memory, Memory]:
        """Return all bytes and all protections of both libraries."""
        libmlx, core = (
            self.process.image(i, file.size) for i, file in enumerate(self.files)
        )
        return libmlx, core

    def allocator_vptr(self) -> int:
        """Return the word that the allocator begins with."""
        return self.process.word(self.process.places["allocator"])

    def attach(self) -> None:
        """Attach."""
        assert self.process.ask("attach") == {"refusal": ""}

    def expected(self) -> dict[int, str]:
        """Return what each word is that an attach edits, by lief."""
        return {
            self.base(index) + word: what
            for index, file in enumerate(self.files)
            for what, words in patched_words(file, has_gil=index == CORE).items()
            for word in words
        }

    def segment_of(self, address: int) -> str:
        """Return the name of the segment that an address lies in."""
        index = LIBMLX
        if not 0 <= address - self.base(index) < self.files[index].size:
            index = CORE
        return self.files[index].segment_of(address - self.base(index))


@pytest.fixture
def mlx(program: Path, wheel: Wheel) -> Iterator[Mlx]:
    """Start a process with the libraries of a wheel."""
    started = Mlx(program, wheel)
    with started.process:
        yield started


def all_changed(
    before: tuple[Memory, Memory], after: tuple[Memory, Memory]
) -> dict[int, tuple[int, int]]:
    """Return the words of both libraries that differ, as they were and are."""
    (libmlx, new_libmlx), (core, new_core) = zip(before, after, strict=True)
    return {**changed_words(libmlx, new_libmlx), **changed_words(core, new_core)}


def words_by_address(process: Process) -> dict[int, dict[str, object]]:
    """Return what mlxmem says that it edited."""
    words = process.ask("words")["words"]
    found = {word["address"]: word for word in words}
    assert len(found) == len(words)
    return found


# ---- the words ---------------------------------------------------------------


def test_the_primitives_of_libmlx_are_those_that_its_symbols_name(wheel: Wheel) -> None:
    # GIVEN libmlx, which still has the symbols of its vtables
    libmlx = library(wheel.libmlx)

    # WHEN they are looked for by type information
    vtables = primitive_vtables(libmlx)

    # THEN they are the same ones
    assert sorted(vtables) == sorted(primitive_vtables_by_symbol(libmlx))
    assert len(vtables) == N_PRIMITIVES[wheel.version]


def test_an_attach_edits_the_words_that_lief_finds_and_no_other(
    mlx: Mlx, wheel: Wheel
) -> None:
    # GIVEN both libraries before an attach, and its words by lief
    before = mlx.images()
    expected = mlx.expected()

    # WHEN mlxmem attaches
    mlx.attach()

    # THEN these words are changed, all of them in pages that never hold code
    changed = all_changed(before, mlx.images())
    assert changed.keys() == expected.keys()
    assert {mlx.segment_of(address) for address in changed} == {"__DATA_CONST"}

    # AND mlxmem says so, word by word
    said = words_by_address(mlx.process)
    vptr = said.pop(mlx.process.places["allocator"])
    assert {address: word["what"] for address, word in said.items()} == expected
    assert changed == {
        address: (word["original"], word["replacement"])
        for address, word in said.items()
    }
    assert vptr["what"] == VPTR

    # AND there are so many of each kind
    kinds = list(expected.values())
    assert {kind: kinds.count(kind) for kind in kinds} == {
        "the import slot of operator new": 2,
        "the import slot of PyEval_SaveThread": 1,
        "the import slot of PyEval_RestoreThread": 1,
        "the control block's vtable of a node": 2,
        "a primitive's vtable": 2 * N_PRIMITIVES[wheel.version],
    }


def test_the_words_lead_to_the_probes(mlx: Mlx) -> None:
    # GIVEN the probes of the process, and MLX's own vtable of its allocator
    probes = mlx.process.places["probes"]
    expected = mlx.expected()
    own = mlx.base(LIBMLX) + mlx.files[LIBMLX].symbols[ALLOCATOR_VTABLE] + 2 * WORD
    assert mlx.allocator_vptr() == own

    # WHEN mlxmem attaches
    mlx.attach()

    # THEN the import slots hold the probe of their function
    held = {address: mlx.process.word(address) for address in expected}
    by_kind: dict[str, list[int]] = {}
    for address, what in expected.items():
        by_kind.setdefault(what, []).append(held[address])
    assert set(by_kind["the import slot of operator new"]) == {probes["operator_new"]}
    assert by_kind["the import slot of PyEval_SaveThread"] == [probes["release_gil"]]
    assert by_kind["the import slot of PyEval_RestoreThread"] == [probes["acquire_gil"]]

    # AND each word of a vtable a function of mlxmem's that no other word holds
    of_vtables = [
        *by_kind["the control block's vtable of a node"],
        *by_kind["a primitive's vtable"],
    ]
    assert len(set(of_vtables)) == len(of_vtables)
    assert all(mlx.process.is_code(function) for function in of_vtables)

    # AND the allocator a vtable of its own, which differs in what is noted
    vptr = mlx.allocator_vptr()
    originals, copy = (
        [mlx.process.word(table + WORD * i) for i in range(-2, ALLOCATOR_SLOTS)]
        for table in (own, vptr)
    )
    malloc, free, _, make_buffer, release = range(2, 7)
    for slot, name in (
        (malloc, "malloc"),
        (free, "free"),
        (make_buffer, "make_buffer"),
        (release, "release"),
    ):
        assert copy[slot] == probes[name]
        originals[slot] = copy[slot]
    assert copy == originals
    assert mlx.process.ask("words")["backend"] == "metal"


def test_only_pages_with_edited_words_are_made_writable(mlx: Mlx) -> None:
    # GIVEN both libraries, in whose pages no code can be written
    before = [image.protections for image in mlx.images()]
    begins = {mlx.base(i) % PAGE for i in (LIBMLX, CORE)}
    assert begins == {0}
    expected = mlx.expected()
    wanted = {address // PAGE * PAGE for address in expected}

    for command in ("attach", "detach"):
        # WHEN mlxmem attaches, or detaches
        mlx.process.ask(command)
        requests = mlx.process.ask("requests")["requests"]

        # THEN it asks once for each page with such a word to be written, and once
        # for what it was before; never for a page that can be executed
        opened, closed = (
            [
                page
                for begin, end, protection in requests
                if protection == wanted_protection
                for page in range(begin, end, PAGE)
            ]
            for wanted_protection in (READ | WRITE, READ)
        )
        assert {protection for _, _, protection in requests} == {READ, READ | WRITE}
        assert sorted(opened) == sorted(closed) == sorted(wanted)
        order = [protection for _, _, protection in requests]
        assert order == sorted(order, reverse=True)  # writable first

        # AND all pages are as they were
        assert [image.protections for image in mlx.images()] == before


def test_a_detach_puts_every_byte_back(mlx: Mlx) -> None:
    # GIVEN both libraries and the allocator before an attach
    before = mlx.images()
    vptr = mlx.allocator_vptr()
    edits = None

    for _ in range(3):
        # WHEN mlxmem attaches
        mlx.attach()
        edited = words_by_address(mlx.process)

        # THEN it edits the same words as the last time
        assert edits in (None, edited)
        edits = edited
        assert mlx.images() != before
        assert mlx.allocator_vptr() != vptr

        # WHEN it detaches
        left = mlx.process.ask("detach")["left"]

        # THEN every byte is as it was before, and so is every protection
        assert left == ""
        assert mlx.images() == before
        assert mlx.allocator_vptr() == vptr
        assert words_by_address(mlx.process) == {}


def test_a_check_edits_nothing_and_names_all_that_an_attach_would(mlx: Mlx) -> None:
    # GIVEN both libraries
    before = mlx.images()

    # WHEN it is asked what an attach would find
    check = mlx.process.ask("check")

    # THEN every fact holds, and no page was touched
    assert check["refusal"] == ""
    assert not check["is_attached"]
    assert all(fact["holds"] for fact in check["facts"])
    texts = [fact["text"] for fact in check["facts"]]
    assert "the type information of Add names UnaryPrimitive as its base" in texts
    assert "the process defines PyEval_SaveThread" in texts
    for name in ("libmlx.dylib", "core.cpython-311-darwin.so"):
        assert f"{name} makes as many nodes as it constructs" in texts
        assert f"{name} has a vtable for the control block of a node" in texts
    assert mlx.images() == before
    assert mlx.process.ask("requests")["requests"] == []

    # AND an attach finds the same, and edits the words that were named
    mlx.attach()
    attached = mlx.process.ask("check")
    assert attached["facts"] == check["facts"]
    assert attached["words"] == check["words"]
    assert attached["is_attached"]


def test_a_library_that_is_loaded_later_is_patched_then(
    program: Path, wheel: Wheel
) -> None:
    # GIVEN an attach to a process that has libmlx only
    files = library(wheel.libmlx), library(wheel.core)
    with Process(program, wheel.libmlx) as process:
        assert process.ask("attach") == {"refusal": ""}
        first = words_by_address(process)

        # WHEN core.so is loaded and libraries are looked for again
        process.places["images"] = process.ask("load", wheel.core)["images"]
        before = process.image(CORE, files[CORE].size)
        changed = process.ask("attach-new")["changed"]

        # THEN the words of core.so are edited in addition
        after = process.image(CORE, files[CORE].size)
        wanted = patched_words(files[CORE], has_gil=True)
        expected = {
            process.base(CORE) + word for words in wanted.values() for word in words
        }
        assert changed_words(before, after).keys() == expected
        assert changed == len(expected)
        assert words_by_address(process).keys() == first.keys() | expected

        # AND put back with the others
        assert process.ask("detach") == {"left": ""}
        assert process.image(CORE, files[CORE].size) == before


@pytest.mark.parametrize(
    "again",
    [
        pytest.param(False, id="for good"),
        pytest.param(True, id="and loaded again"),
    ],
)
def test_a_library_that_is_gone_is_not_written_to(mlx: Mlx, again: bool) -> None:
    # GIVEN an attach, and core.so unloaded since
    libmlx, core = (file.size for file in mlx.files)
    before = [mlx.process.image(LIBMLX, libmlx)]
    mlx.attach()
    mlx.process.ask("unload")
    if again:
        path = mlx.process.libraries[CORE]
        mlx.process.places["images"] = mlx.process.ask("load", path)["images"]
        before.append(mlx.process.image(CORE, core))

    # WHEN libraries are looked for
    changed = mlx.process.ask("attach-new")["changed"]

    # THEN the words of the one that is loaded now are edited
    expected = patched_words(mlx.files[CORE], has_gil=True).values()
    assert changed == (sum(map(len, expected)) if again else 0)

    # WHEN mlxmem detaches
    left = mlx.process.ask("detach")["left"]

    # THEN every byte is as before in what is there
    assert left == ""
    sizes = [libmlx, core][: len(before)]
    assert [mlx.process.image(i, size) for i, size in enumerate(sizes)] == before


# ---- refusals ----------------------------------------------------------------


class Edit(NamedTuple):
    """A word that is not as it should be, by its address from the beginning."""

    image: int
    address: int
    content: bytes  # of any size up to a word


def other_size(index: int, of: Library) -> Edit:
    """Make a node with a block of memory of another size."""
    at = next(
        at
        for at in of.instructions(MOV_NODE_SIZE)
        if of.instruction(at + 4) >> 26 == CALL
    )
    return Edit(index, at, (MOV_NODE_SIZE | 1 << 5).to_bytes(4, "little"))


def one_more_node(of: Library) -> Edit:
    """Construct one more node, in memory that is got in no known way."""
    at = of.code[0].start
    distance = (of.exports[LEAF_CONSTRUCTOR] - at) // 4
    return Edit(LIBMLX, at, (CALL << 26 | distance & 0x3FFFFFF).to_bytes(4, "little"))


def direct_call(of: Library) -> Edit:
    """Call the allocator's malloc by its address."""
    at = of.code[0].start
    distance = (of.symbols[METAL_MALLOC] - at) // 4
    return Edit(LIBMLX, at, (CALL << 26 | distance & 0x3FFFFFF).to_bytes(4, "little"))


def another_name(name: str, index: int, of: Library) -> Edit:
    """Rename a type."""
    return Edit(index, of.type_name(name), name[:7].lower().encode())


def no_import(symbol: str, index: int, of: Library) -> Edit:
    """Leave the name of an import out."""
    (slot,) = of.slots(symbol)
    return Edit(index, of.indirect_symbol(slot), NO_SYMBOL.to_bytes(4, "little"))


CHANGES = {
    "a block of another size": lambda libmlx, _: (
        other_size(LIBMLX, libmlx),
        r"libmlx.dylib makes nodes at (\d+) places and constructs them at (\d+)",
    ),
    "a block of another size in core.so": lambda _, core: (
        other_size(CORE, core),
        r"core.\S+ makes nodes at (\d+) places and constructs them at (\d+)",
    ),
    "one more node": lambda libmlx, _: (
        one_more_node(libmlx),
        r"libmlx.dylib makes nodes at (\d+) places and constructs them at (\d+)",
    ),
    "a control block without its name": lambda libmlx, _: (
        another_name(CONTROL_BLOCK, LIBMLX, libmlx),
        "libmlx.dylib makes nodes whose control block is not found",
    ),
    "a control block of core.so without its name": lambda _, core: (
        another_name(CONTROL_BLOCK, CORE, core),
        r"core.\S+ makes nodes whose control block is not found",
    ),
    "another base of UnaryPrimitive": lambda libmlx, _: (
        Edit(LIBMLX, libmlx.type(UNARY) + 2 * WORD, bytes(WORD)),
        "UnaryPrimitive's type information does not name Primitive as its base",
    ),
    "another base of Add": lambda libmlx, _: (
        Edit(LIBMLX, libmlx.type("N3mlx4core3AddE") + 2 * WORD, bytes(WORD)),
        "the type information of Add does not name UnaryPrimitive as its base",
    ),
    "an allocator of another class": lambda libmlx, _: (
        another_name("N3mlx4core9allocator9AllocatorE", LIBMLX, libmlx),
        "the allocator's class does not derive from .* alone",
    ),
    "an allocator's function elsewhere": lambda libmlx, _: (
        Edit(LIBMLX, libmlx.symbols[ALLOCATOR_VTABLE] + 5 * WORD, bytes(WORD)),
        "slot 3 of the allocator's vtable is not a function of libmlx",
    ),
    "a call past the allocator's vtable": lambda libmlx, _: (
        direct_call(libmlx),
        r"libmlx calls the allocator past its vtable at 1 places",
    ),
    "no slot of operator new": lambda libmlx, _: (
        no_import("__Znwm", LIBMLX, libmlx),
        "libmlx.dylib does not call operator new through a slot",
    ),
    "no slot of operator new in core.so": lambda _, core: (
        no_import("__Znwm", CORE, core),
        r"core.\S+ does not call operator new through a slot",
    ),
    "another operator new in core.so": lambda _, core: (
        Edit(CORE, core.slots("__Znwm")[0], b"\x01"),
        r"core.\S+ has another operator new",
    ),
    "another PyEval_SaveThread": lambda _, core: (
        Edit(CORE, core.slots("_PyEval_SaveThread")[0], b"\x01"),
        "the import slot of PyEval_SaveThread in .* does not point to the function",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_fact_that_does_not_hold_is_a_refusal(mlx: Mlx, change: str) -> None:
    # GIVEN a library in which one word is another
    edit, text = CHANGES[change](*mlx.files)
    address = mlx.base(edit.image) + edit.address
    word = mlx.process.word(address)
    content = edit.content + word.to_bytes(WORD, "little")[len(edit.content) :]
    mlx.process.ask("write", address, int.from_bytes(content, "little"))
    assert mlx.process.word(address) != word
    before = mlx.images()
    vptr = mlx.allocator_vptr()

    # WHEN mlxmem would attach
    refusal = mlx.process.ask("attach")["refusal"]

    # THEN it says what is amiss, and has touched nothing
    assert_matches(text, refusal)
    assert mlx.images() == before
    assert mlx.allocator_vptr() == vptr
    assert mlx.process.ask("requests")["requests"] == []
    assert words_by_address(mlx.process) == {}

    # AND attaches as soon as the word is right
    mlx.process.ask("write", address, word)
    mlx.attach()
    edited = words_by_address(mlx.process).keys() - {mlx.process.places["allocator"]}
    assert edited == mlx.expected().keys()


def assert_matches(text: str, refusal: str) -> None:
    """Check a refusal; numbers in it differ."""
    found = re.fullmatch(text + r"( \(.*\))?", refusal)
    assert found, refusal
    numbers = found.groups()[:-1]
    assert len(set(numbers)) == len(numbers)


def test_an_allocator_that_another_tool_patched_is_a_refusal(mlx: Mlx) -> None:
    # GIVEN an allocator with a vtable that lies elsewhere
    before = mlx.images()
    own = mlx.allocator_vptr()
    mlx.process.ask("write", mlx.process.places["allocator"], own + (1 << 40))

    # WHEN mlxmem would attach
    refusal = mlx.process.ask("attach")["refusal"]

    # THEN it says so, and has touched nothing
    assert refusal.startswith("the allocator's vtable does not lie in libmlx (has ")
    assert mlx.images() == before
    assert mlx.allocator_vptr() == own + (1 << 40)


def test_two_cores_or_none_are_a_refusal(program: Path, wheel: Wheel) -> None:
    # GIVEN a process with libmlx twice, and one with core.so only
    for libraries, text in (
        ((wheel.libmlx, wheel.libmlx), "two MLX cores are loaded in this process"),
        ((wheel.core,), "no loaded library defines _ZN3mlx4core9allocator9allocator"),
    ):
        with Process(program, *libraries) as process:
            # WHEN mlxmem would attach
            refusal = process.ask("attach")["refusal"]

            # THEN it says so
            assert refusal.startswith(text)
            assert process.ask("requests")["requests"] == []


def test_pages_that_the_system_keeps_are_a_refusal(mlx: Mlx) -> None:
    # GIVEN how often an attach asks for pages to be writable
    before = mlx.images()
    vptr = mlx.allocator_vptr()
    mlx.attach()
    mlx.process.ask("detach")
    requests = mlx.process.ask("requests")["requests"]
    n = len(requests) // 4  # opened and closed, twice
    opened = [begin for begin, _, _ in requests[:n]]
    assert n > 2

    for nth in (1, 2, n):
        # WHEN the system refuses one of them
        mlx.process.ask("refuse", nth)
        refusal = mlx.process.ask("attach")["refusal"]

        # THEN it is named
        assert refusal == (
            f"the page at {opened[nth - 1]:#x} cannot be made writable: "
            "Permission denied"
        )

        # AND those before it are closed again, and nothing else was asked
        requests = mlx.process.ask("requests")["requests"]
        assert [protection for _, _, protection in requests] == [
            *[READ | WRITE] * nth,
            *[READ] * (nth - 1),
        ]
        assert mlx.images() == before
        assert mlx.allocator_vptr() == vptr
        assert words_by_address(mlx.process) == {}

    # AND an attach to which it gives all of them works
    mlx.attach()


def test_a_word_that_changes_meanwhile_is_a_refusal(mlx: Mlx) -> None:
    # GIVEN a word among those that an attach edits, and what others put there
    before = mlx.images()
    vptr = mlx.allocator_vptr()
    slot = mlx.base(CORE) + mlx.files[CORE].slots("_PyEval_SaveThread")[0]
    was, now = mlx.process.word(slot), vptr
    mlx.process.ask("interfere", slot, now)

    # WHEN mlxmem would attach while they do
    refusal = mlx.process.ask("attach")["refusal"]

    # THEN it names the word, and has taken back what it had edited till then
    assert refusal == (
        "the import slot of PyEval_SaveThread changed while it was being patched"
    )
    assert all_changed(before, mlx.images()) == {slot: (was, now)}
    assert mlx.allocator_vptr() == vptr
    assert words_by_address(mlx.process) == {}


def test_a_word_that_others_changed_later_is_left_alone(mlx: Mlx) -> None:
    # GIVEN an attach, and somebody else's function in a word of it
    before = mlx.images()
    slot = mlx.base(LIBMLX) + mlx.files[LIBMLX].slots("__Znwm")[0]
    was, now = mlx.process.word(slot), mlx.allocator_vptr()
    mlx.attach()
    mlx.process.ask("write", slot, now)

    # WHEN mlxmem detaches
    left = mlx.process.ask("detach")["left"]

    # THEN it says which word it left, and every other byte is as it was before
    assert left == "the import slot of operator new"
    assert all_changed(before, mlx.images()) == {slot: (was, now)}
