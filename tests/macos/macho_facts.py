"""What lief says of MLX's libraries: where the words are that mlxmem patches.

Independent of csrc: from the fixups of the file where csrc reads what dyld made of
them, and by the symbols of vtables where csrc knows none of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from checks import needed

WORD = 8
TYPE_KINDS = (
    "__ZTVN10__cxxabiv117__class_type_infoE",
    "__ZTVN10__cxxabiv120__si_class_type_infoE",
)
NOT_UNIQUE = 1 << 63  # of the pointer to a type's name
PRIMITIVE = "N3mlx4core9PrimitiveE"
CONTROL_BLOCK = (
    "NSt3__120__shared_ptr_emplaceIN3mlx4core5array9ArrayDescENS_9allocatorIS4_EEEE"
)
ON_ZERO_SHARED = 2 * WORD


class Type(NamedTuple):
    """The type information of a class with one base or none."""

    name: str
    base: str | int | None  # in another library: its symbol


class Library:
    """A library as it is in its file, by addresses from its beginning."""

    def __init__(self, path: Path) -> None:
        binary: Any = needed("lief").MachO.parse(str(path)).at(0)
        assert binary.imagebase == 0
        self.binary = binary
        self._segments = [
            (s.name, s.virtual_address, s.virtual_size, bytes(s.content))
            for s in binary.segments
        ]
        self.size = max(begin + size for _, begin, size, _ in self._segments)
        self.code = [
            range(s.virtual_address, s.virtual_address + s.size)
            for s in binary.sections
            if s.segment_name == "__TEXT" and s.name == "__text"
        ]
        self.bound = {b.address: b.symbol.name for b in binary.bindings}
        self.pointers = {r.address: r.target for r in binary.relocations}
        self.symbols = {s.name: s.value for s in binary.symbols if s.value}
        self.exports = {
            s.name: s.export_info.address
            for s in binary.exported_symbols
            if s.has_export_info
        }
        self.types = dict(self._types())
        self._pointers_to: dict[int, list[int]] = {}
        for address, target in self.pointers.items():
            self._pointers_to.setdefault(target, []).append(address)

    def segment_of(self, address: int) -> str:
        """Return the name of the segment there."""
        return next(
            name
            for name, begin, size, _ in self._segments
            if begin <= address < begin + size
        )

    def read(self, address: int, size: int) -> bytes:
        """Return the bytes of the file."""
        for _, begin, _, content in self._segments:
            if begin <= address and address + size <= begin + len(content):
                return content[address - begin : address - begin + size]
        raise KeyError(address)

    def word(self, address: int) -> int:
        """Return the word in the file."""
        return int.from_bytes(self.read(address, WORD), "little")

    def text(self, address: int) -> str:
        """Return the string there."""
        for _, begin, _, content in self._segments:
            if begin <= address < begin + len(content):
                start = address - begin
                return content[start : content.index(0, start)].decode()
        raise KeyError(address)

    def type(self, name: str) -> int:
        """Return where the type information of a class lies."""
        (address,) = (at for at, found in self.types.items() if found.name == name)
        return address

    def type_name(self, name: str) -> int:
        """Return where that has its name."""
        return self.pointers[self.type(name) + WORD] & ~NOT_UNIQUE

    def indirect_symbol(self, slot: int) -> int:
        """Return where the file says of which symbol an import slot is."""
        binary = self.binary
        section = next(
            s
            for s in binary.sections
            if s.virtual_address <= slot < s.virtual_address + s.size
        )
        index = section.reserved1 + (slot - section.virtual_address) // WORD
        offset = binary.dynamic_symbol_command.indirect_symbol_offset + 4 * index
        return int(binary.offset_to_virtual_address(offset))

    def instruction(self, address: int) -> int:
        """Return the instruction there."""
        return int.from_bytes(self.read(address, 4), "little")

    def instructions(self, wanted: int) -> Iterator[int]:
        """Yield where an instruction is, in order."""
        content = wanted.to_bytes(4, "little")
        for code in self.code:
            found = self.read(code.start, len(code))
            at = found.find(content)
            while at >= 0:
                if at % 4 == 0:
                    yield code.start + at
                at = found.find(content, at + 1)

    def is_code(self, address: int | None) -> bool:
        """Whether a function lies there."""
        return address is not None and any(address in code for code in self.code)

    def slots(self, symbol: str) -> list[int]:
        """Return the words that a function of another library is called through."""
        return [address for address, name in self.bound.items() if name == symbol]

    def vtables(self, type_address: int) -> list[int]:
        """Return the first functions of a type's vtables."""
        return [
            address + WORD
            for address in self._pointers_to.get(type_address, ())
            if address - WORD not in self.bound
            and address - WORD not in self.pointers
            and self.word(address - WORD) == 0  # the offset to the top
        ]

    def is_primitive(self, type_address: int) -> bool:
        """Whether the class derives from Primitive."""
        at: str | int | None = type_address
        while isinstance(at, int) and at in self.types:
            if self.types[at].name == PRIMITIVE:
                return True
            at = self.types[at].base
        return at == f"__ZTI{PRIMITIVE}"

    def _types(self) -> list[tuple[int, Type]]:
        found = []
        for address, symbol in self.bound.items():
            if symbol in TYPE_KINDS:
                name = self.text(self.pointers[address + WORD] & ~NOT_UNIQUE)
                at = address + 2 * WORD
                base = self.pointers.get(at, self.bound.get(at))
                has_base = symbol == TYPE_KINDS[1]
                found.append((address, Type(name, base if has_base else None)))
        return found


@lru_cache(maxsize=2)
def library(path: Path) -> Library:
    """Return the library of a file."""
    return Library(path)


def primitive_vtables(of: Library) -> list[int]:
    """Return those of all classes of primitives that can have objects."""
    tables = [
        vtable
        for address in of.types
        if of.is_primitive(address)
        for vtable in of.vtables(address)
    ]
    return [
        vtable
        for vtable in tables
        if of.is_code(of.pointers.get(vtable))
        and of.is_code(of.pointers.get(vtable + WORD))
    ]


def primitive_vtables_by_symbol(of: Library) -> list[int]:
    """Return the same for a library that still has these symbols."""
    vtables = [
        address + 2 * WORD
        for name, address in of.symbols.items()
        if name.startswith("__ZTV") and of.pointers.get(address + WORD) in of.types
    ]
    return [
        vtable
        for vtable in vtables
        if of.is_primitive(of.pointers[vtable - WORD])
        and of.is_code(of.pointers.get(vtable))
    ]


@lru_cache(maxsize=4)
def patched_words(of: Library, *, has_gil: bool) -> dict[str, list[int]]:
    """Return the words that an attach edits, by what mlxmem calls them."""
    words = {
        "the import slot of operator new": of.slots("__Znwm"),
        "the control block's vtable of a node": [
            vtable + ON_ZERO_SHARED
            for address, one in of.types.items()
            if one.name == CONTROL_BLOCK
            for vtable in of.vtables(address)
        ],
        "a primitive's vtable": [
            word for vtable in primitive_vtables(of) for word in (vtable, vtable + WORD)
        ],
    }
    if has_gil:
        for name in ("PyEval_SaveThread", "PyEval_RestoreThread"):
            words[f"the import slot of {name}"] = of.slots(f"_{name}")
    return words
