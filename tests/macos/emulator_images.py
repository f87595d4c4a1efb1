"""Loads Mach-O files into an emulated process, as dyld does."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checks import needed
from emulator import EXECUTE, PAGE, READ, WRITE, Process

lief = needed("lief")
lief.logging.disable()

_FLAGS_OFFSET = 24  # of mach_header_64
_IN_SHARED_CACHE = 0x8000_0000
_READ_ONLY_SEGMENT = 0x10  # SG_READ_ONLY: not writable once its pointers are set
# ldr x0, [x0, #16]; ret: there is one thread, so a descriptor has the address itself.
_THREAD_LOCAL = bytes.fromhex("000840f9c0035fd6")


@dataclass
class Section:
    begin: int
    size: int


@dataclass
class Image:
    """A file that is loaded, by its addresses in the process."""

    path: str
    base: int
    end: int
    parsed: Any
    in_shared_cache: bool
    exports: dict[str, int] = field(default_factory=dict)
    symbols: dict[str, int] = field(default_factory=dict)
    # All of its bytes that can be patched, as they were when it had been loaded.
    segments: list[tuple[str, int, int, int]] = field(default_factory=list)

    def section(self, name: str) -> Section | None:
        for found in self.parsed.sections:
            if found.name == name:
                return Section(self.base + found.virtual_address, found.size)
        return None

    def slots(self, symbol: str) -> list[int]:
        """Return the words through which it imports a symbol."""
        return [
            self.base + binding.address
            for binding in self.parsed.bindings
            if binding.has_symbol and binding.symbol.name == symbol
        ]


class Loader:
    """The images of a process, in load order.

    missing: what a symbol that no image exports is bound to.
    """

    def __init__(self, process: Process, missing: Callable[[str], int]) -> None:
        self.process = process
        self.images: list[Image] = []
        self._missing = missing
        self._thread_local = process.reserve(PAGE)
        process.map(self._thread_local, PAGE, READ | EXECUTE)
        process.write(self._thread_local, _THREAD_LOCAL)

    def load(self, path: Path, *, in_shared_cache: bool = False) -> Image:
        """Map a file and set its pointers; none of its code runs."""
        raw = path.read_bytes()
        parsed = lief.MachO.parse(raw).at(0)
        segments = [s for s in parsed.segments if s.virtual_size]
        size = max(s.virtual_address + s.virtual_size for s in segments)
        base = self.process.reserve(size)
        image = Image(str(path), base, base + size, parsed, in_shared_cache)
        for s in segments:
            begin, end = s.file_offset, s.file_offset + s.file_size
            self.process.map(
                base + s.virtual_address, s.virtual_size, int(s.init_protection)
            )
            self.process.write(base + s.virtual_address, raw[begin:end])
        self._name(image)
        self.images.append(image)
        self._set_pointers(image)
        self._set_thread_locals(image)
        for s in segments:
            protection = int(s.init_protection)
            if s.flags & _READ_ONLY_SEGMENT:
                protection &= ~WRITE
            begin = base + s.virtual_address
            self.process.protect(
                begin, (s.virtual_size + PAGE - 1) // PAGE * PAGE, protection
            )
            image.segments.append(
                (s.name, begin, s.virtual_size, int(s.max_protection))
            )
        if in_shared_cache:
            flags = struct.unpack("<I", self.process.read(base + _FLAGS_OFFSET, 4))[0]
            changed = struct.pack("<I", flags | _IN_SHARED_CACHE)
            self.process.write(base + _FLAGS_OFFSET, changed)
        return image

    def run_initializers(self, image: Image) -> None:
        """Call the functions that construct its static objects."""
        if found := image.section("__mod_init_func"):
            for at in range(found.begin, found.begin + found.size, 8):
                self.process.call(self.process.word(at))
        if found := image.section("__init_offsets"):
            raw = self.process.read(found.begin, found.size)
            for (offset,) in struct.iter_unpack("<I", raw):
                self.process.call(image.base + offset)

    def find(self, symbol: str) -> int | None:
        """Return what the first image exports by this name, or None."""
        return next(
            (i.exports[symbol] for i in self.images if symbol in i.exports), None
        )

    def image_at(self, address: int) -> Image | None:
        return next((i for i in self.images if i.base <= address < i.end), None)

    def _name(self, image: Image) -> None:
        # zig gives some of what is imported the address of the code that jumps there.
        imported = {b.symbol.name for b in image.parsed.bindings if b.has_symbol}
        for symbol in image.parsed.symbols:
            if symbol.value and symbol.name not in imported:
                image.symbols.setdefault(symbol.name, image.base + symbol.value)
        if image.in_shared_cache:
            image.exports.update(image.symbols)  # zig's libc++ hides its own
        for symbol in image.parsed.exported_symbols:
            image.exports[symbol.name] = image.base + symbol.export_info.address

    def _set_pointers(self, image: Image) -> None:
        for relocation in image.parsed.relocations:
            at = image.base + relocation.address
            target = getattr(relocation, "target", None)
            if target is None:
                target = self.process.word(at)
            self.process.set_word(at, image.base + target)
        for binding in image.parsed.bindings:
            name = binding.symbol.name
            found = self.find(name)
            target = self._missing(name) if found is None else found
            self.process.set_word(image.base + binding.address, target + binding.addend)

    def _set_thread_locals(self, image: Image) -> None:
        found = image.section("__thread_vars")
        if not found:
            return
        parts = [image.section(name) for name in ("__thread_data", "__thread_bss")]
        there = [part for part in parts if part]
        begin = min(part.begin for part in there)
        size = max(part.begin + part.size for part in there) - begin
        block = self.process.allocate(size)
        if data := parts[0]:
            at = block + data.begin - begin
            self.process.write(at, self.process.read(data.begin, data.size))
        for at in range(found.begin, found.begin + found.size, 24):
            self.process.set_word(at, self._thread_local)
            self.process.set_word(at + 16, block + self.process.word(at + 16))
