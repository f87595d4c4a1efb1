"""What mlxmem reads in MLX's libraries for macOS is what lief reads there, all of it.

lief reads the file, the table of fixups included; mlxmem has the memory, in which the
table of indirect symbols names the imports.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from checks import needed
from host import CSRC, HERE, build
from macho_facts import WORD, Library, library
from wheels import Wheel

SOURCES = ("macho_image.cpp", "image_macho.cpp", "image.cpp")
READABLE, EXECUTABLE = 1, 4

Rows = set[tuple[str | int, ...]]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile what says what mlxmem reads."""
    needed("lief")
    sources = [HERE / "macho_reader_of.cpp", HERE / "mapped_image.cpp"]
    sources += [CSRC / name for name in SOURCES]
    return build(tmp_path_factory.mktemp("reader") / "macho_reader_of", sources)


def read_by_mlxmem(program: Path, path: Path, names: Iterable[str]) -> dict[str, Rows]:
    """Return rows by their kind, numbers as such. None comes twice."""
    done = subprocess.run(
        [program, path],
        input="".join(f"{name}\n" for name in names),
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    rows: dict[str, Rows] = {}
    for line in done.stdout.splitlines():
        kind, *words = line.split("\t")
        row = tuple(int(word) if word.isdecimal() else word for word in words)
        assert row not in rows.setdefault(kind, set())
        rows[kind].add(row)
    return rows


def can_be_named(symbol: str) -> bool:
    """Whether it has the underscore that mlxmem puts before each name."""
    return symbol.startswith("_")


def exports(of: Library) -> dict[str, int]:
    """Return what lies in the image itself and has one fixed address."""
    found = {}
    for symbol in of.binary.exported_symbols:
        export = symbol.export_info
        kinds, flags = type(export).KIND, type(export).FLAGS
        elsewhere = (flags.REEXPORT, flags.STUB_AND_RESOLVER)
        if export.kind == kinds.REGULAR and not any(map(export.has, elsewhere)):
            found[symbol.name] = export.address
    return found


def names_to_look_for(of: Library) -> set[str]:
    """Return each name that any table of the file has, and some that none has."""
    symbols = {symbol.name for symbol in of.binary.symbols} | set(exports(of))
    named = {name[1:] for name in symbols if can_be_named(name)}
    return named | {name[:-1] for name in named} | {f"{name}x" for name in named}


def segments(of: Library) -> list[Any]:
    """Return those that can be read and are not empty."""
    return [
        segment
        for segment in of.binary.segments
        if segment.init_protection & READABLE and segment.virtual_size
    ]


def sections(of: Library) -> list[Any]:
    return [section for segment in segments(of) for section in segment.sections]


def is_code(section: Any) -> bool:
    flags = type(section).FLAGS
    instructions = (flags.PURE_INSTRUCTIONS, flags.SOME_INSTRUCTIONS)
    executable = section.segment.init_protection & EXECUTABLE
    return bool(executable) and any(map(section.has, instructions))


def has_pointers(section: Any) -> bool:
    types = type(section).TYPE
    kinds = (types.NON_LAZY_SYMBOL_POINTERS, types.LAZY_SYMBOL_POINTERS)
    return section.type in kinds


def slots(of: Library) -> set[int]:
    """Return all words of the sections of pointers."""
    return {
        section.virtual_address + i * WORD
        for section in sections(of)
        if has_pointers(section)
        for i in range(section.size // WORD)
    }


def place(section: Any) -> tuple[int, int]:
    return section.virtual_address, section.size


def read_by_lief(of: Library) -> dict[str, Rows]:
    return {
        "segment": {
            (s.name, s.virtual_address, s.virtual_size, s.file_offset, s.file_size)
            for s in segments(of)
        },
        "section": {
            (s.segment_name, s.name, *place(s), s.type.value, is_code(s), s.reserved1)
            for s in sections(of)
        },
        # A slot that dyld binds to nothing holds an address in the image.
        "import": {
            (of.bound[slot][1:], slot)
            for slot in slots(of)
            if slot in of.bound and can_be_named(of.bound[slot])
        },
        "export": {
            (name[1:], address)
            for name, address in exports(of).items()
            if can_be_named(name)
        },
        "code": {place(s) for s in sections(of) if is_code(s)},
        "constant": {
            place(s)
            for s in sections(of)
            if s.name == "__const" and s.segment_name in ("__DATA", "__DATA_CONST")
        },
        "span": {(0, of.size)},
    }


@pytest.mark.parametrize("which", ["libmlx", "core"])
def test_all_that_is_read_is_what_lief_reads(
    program: Path, wheel: Wheel, which: str
) -> None:
    # GIVEN what an independent reader finds in a library
    path: Path = getattr(wheel, which)
    of = library(path)
    expected = read_by_lief(of)

    # WHEN mlxmem reads it, and looks for all names
    found = read_by_mlxmem(program, path, names_to_look_for(of))

    # THEN each kind of rows is the same
    assert found.keys() == expected.keys()
    for kind, rows in expected.items():
        assert found[kind] - rows == set(), f"lief has no such {kind}"
        assert rows - found[kind] == set(), f"mlxmem has no such {kind}"
    # THEN nothing was left out but what no wheel has, and pointers to the inside
    assert len(segments(of)) == len(of.binary.segments)
    assert len(expected["export"]) == len(of.binary.dyld_exports_trie.exports)
    assert slots(of) == {row[1] for row in found["import"]} | {
        slot for slot in slots(of) if slot in of.pointers
    }
    # THEN what is well known is there
    imported = {name for name, _ in found["import"]}
    exported = {name for name, _ in found["export"]}
    assert "_Znwm" in imported
    assert (which == "core") == ("PyEval_SaveThread" in imported)
    assert (which == "core") == ("PyInit_core" in exported)
    assert len(exported) > 2500 if which == "libmlx" else len(exported) < 20
