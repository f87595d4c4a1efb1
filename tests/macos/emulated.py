"""A process on Linux that mlxmem's own code for macOS attaches to macOS's MLX in.

emulated_attach.cpp is that process; its memory is read from outside.
"""

from __future__ import annotations

import json
import struct
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

from host import CSRC, HERE, build

PAGE = 0x4000  # of a Mac
WORD = 8
# Of csrc, what the program has its own of.
REPLACED = {"mlx_checks.cpp", "page_protection_linux.cpp"}
OWN = ("emulated_attach.cpp", "mapped_image.cpp")


def build_program(folder: Path) -> Path:
    """Compile emulated_attach.cpp with csrc."""
    sources = [path for path in CSRC.glob("*.cpp") if path.name not in REPLACED]
    return build(folder / "emulated_attach", sources + [HERE / name for name in OWN])


class Mapping(NamedTuple):
    """Neighbouring pages of an image with the same protection."""

    begin: int
    end: int
    rights: str  # "r--"
    content: bytes

    @property
    def kind(self) -> tuple[int, int, str]:
        """All but the content."""
        return self[:3]


class Memory(NamedTuple):
    """An image as it is in the process."""

    mappings: tuple[Mapping, ...]

    @property
    def protections(self) -> list[tuple[int, int, str]]:
        """Return where each protection begins and ends."""
        return [mapping.kind for mapping in self.mappings]

    def word(self, address: int) -> int:
        """Return the word there."""
        for begin, end, _, content in self.mappings:
            if begin <= address < end:
                (word,) = struct.unpack_from("<Q", content, address - begin)
                return int(word)
        raise KeyError(address)


def changed_words(before: Memory, after: Memory) -> dict[int, tuple[int, int]]:
    """Return the words that differ by their addresses, as they were and are.

    Raises
    ------
    AssertionError
        The protections differ.
    """
    assert before.protections == after.protections
    changed = {}
    for old, new in zip(before.mappings, after.mappings, strict=True):
        for page in range(0, len(old.content), PAGE):
            one, other = (m.content[page : page + PAGE] for m in (old, new))
            if one == other:
                continue
            words = zip(
                struct.iter_unpack("<Q", one),
                struct.iter_unpack("<Q", other),
                strict=True,
            )
            for i, ((was,), (now,)) in enumerate(words):
                if was != now:
                    changed[old.begin + page + WORD * i] = was, now
    return changed


class Process:
    """The program with MLX's images mapped into it."""

    def __init__(self, program: Path, *libraries: Path) -> None:
        self._process = subprocess.Popen(
            [program, *libraries],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.libraries = libraries
        self.places = self.ask("places")

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=60)

    def ask(self, command: str, *arguments: object) -> dict[str, Any]:
        """Return the answer to a command."""
        process = self._process
        assert process.stdin
        assert process.stdout
        assert process.stderr
        process.stdin.write(" ".join(map(str, (command, *arguments))) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        assert line, process.stderr.read()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def base(self, index: int) -> int:
        """Return where the image of a library lies, by its place in the arguments."""
        return int(self.places["images"][index])

    def read(self, begin: int, end: int) -> bytes:
        """Return the bytes of its memory."""
        with open(f"/proc/{self._process.pid}/mem", "rb", 0) as memory:
            memory.seek(begin)
            content = memory.read(end - begin)
        assert len(content) == end - begin
        return content

    def word(self, address: int) -> int:
        """Return a word of its memory."""
        return int.from_bytes(self.read(address, address + WORD), "little")

    def image(self, index: int, size: int) -> Memory:
        """Return the image of a library that spans so many bytes."""
        begin = self.base(index)
        found: list[tuple[int, int, str]] = []
        for first, last, rights in self.mappings():
            first, last = max(first, begin), min(last, begin + size)
            if first >= last:
                continue
            if found and found[-1][1:] == (first, rights):
                first = found.pop()[0]
            found.append((first, last, rights))
        assert found[0][0] == begin
        assert found[-1][1] == begin + size
        return Memory(tuple(Mapping(*kind, self.read(*kind[:2])) for kind in found))

    def mappings(self) -> list[tuple[int, int, str]]:
        """Return all of its memory: from, to, rights."""
        found = []
        with open(f"/proc/{self._process.pid}/maps") as maps:
            for line in maps:
                span, rights, *_ = line.split()
                first, last = (int(text, 16) for text in span.split("-"))
                found.append((first, last, rights[:3]))
        return found

    def is_code(self, address: int) -> bool:
        """Whether its own code lies there."""
        return any(
            begin <= address < end and "x" in rights
            for begin, end, rights in self.mappings()
        )
