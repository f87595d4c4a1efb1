"""The places where MLX's libraries for macOS make nodes, found in two ways.

mlxmem decodes the stubs; here they are known by the table of indirect symbols, and
functions by the table of their beginnings.
"""

from __future__ import annotations

import bisect
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from checks import needed
from host import CSRC, HERE, build
from macho_facts import library
from wheels import Wheel

SOURCES = ("node_sites.cpp", "macho_image.cpp", "image_macho.cpp", "image.cpp")
NEW = "__Znwm"
CONSTRUCTOR = "__ZN3mlx4core5array9ArrayDescC"
OF_NODES = "ENS4_10shared_ptrINS0_9PrimitiveEE"  # in the name: it takes a primitive
SIZE = 392  # of a node, 368, with its control block
LIBMLX = {"0.30.6": (37, 1), "0.31.2": (37, 1), "0.32.1": (38, 1), "0.32.4": (38, 1)}
CORE = {"0.30.6": (39, 0), "0.31.2": (39, 0), "0.32.1": (24, 0), "0.32.4": (26, 0)}


class Sites(NamedTuple):
    """By return address: whether it makes a leaf."""

    constructor_calls: int
    is_leaf: dict[int, bool]

    @property
    def leaves_and_nodes(self) -> tuple[int, int]:
        leaves = sum(self.is_leaf.values())
        return leaves, len(self.is_leaf) - leaves


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile what says which sites mlxmem finds."""
    needed("lief")
    sources = [HERE / "node_sites_of.cpp", HERE / "mapped_image.cpp"]
    sources += [CSRC / name for name in SOURCES]
    return build(tmp_path_factory.mktemp("sites") / "node_sites_of", sources)


def found_by_mlxmem(program: Path, wheel: Wheel) -> list[Sites]:
    done = subprocess.run(
        [program, wheel.libmlx, wheel.core],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    libraries: list[Sites] = []
    for line in done.stdout.splitlines():
        first, second = line.split()
        if first == "calls":
            libraries.append(Sites(int(second), {}))
        else:
            libraries[-1].is_leaf[int(first)] = second == "1"
    return libraries


class Code:
    """The instructions of a library, by addresses from its beginning."""

    def __init__(self, path: Path) -> None:
        self._library = library(path)
        image: Any = self._library.binary
        (text,) = self._library.code
        self._begin = text.start
        content = self._library.read(text.start, len(text))
        self._words = struct.unpack(f"<{len(content) // 4}I", content)
        self._functions = sorted(image.function_starts.functions)
        symbols = [s.name for s in image.dynamic_symbol_command.indirect_symbols]
        stubs = next(s for s in image.sections if s.name == "__stubs")
        first, size = stubs.reserved1, stubs.reserved2
        self.names = {
            stubs.virtual_address + i * size: symbols[first + i]
            for i in range(stubs.size // size)
        }
        for name, address in self._library.exports.items():
            if name.startswith(CONSTRUCTOR):
                self.names[address] = name
        self.branches = list(self._branches())

    def _branches(self) -> Iterator[tuple[int, bool, int]]:
        """Yield address, whether it is a call, and target of bl and b."""
        for i, word in enumerate(self._words):
            if word >> 26 in (0b100101, 0b000101):
                at = self._begin + 4 * i
                offset = (word & 0x3FFFFFF) - ((word & 0x2000000) << 1)
                yield at, word >> 31 == 1, at + 4 * offset

    def function_of(self, address: int) -> int:
        """Return where the function begins that an address lies in."""
        return self._functions[bisect.bisect(self._functions, address) - 1]

    def gets(self, call: int, size: int) -> bool:
        """Return whether w0 or x0 is set to `size` just before a call."""
        before = self._library.instruction(call - 4)
        return before & 0x7FFFFFFF == 0x52800000 | size << 5


def found_by_lief(path: Path) -> Sites:
    code = Code(path)
    # Constructors, and the functions around them that are called for a node.
    constructs = {
        address: OF_NODES not in name
        for address, name in code.names.items()
        if name.startswith(CONSTRUCTOR)
    }
    around = {
        code.function_of(at): constructs[target]
        for at, _, target in code.branches
        if target in constructs and code.function_of(at) not in constructs
    }
    calls = sorted(at for at, is_call, _ in code.branches if is_call)
    targets = {at: target for at, is_call, target in code.branches if is_call}
    sites = {}
    for at in calls:
        if code.names.get(targets[at]) == NEW and code.gets(at, SIZE):
            following = targets[calls[bisect.bisect(calls, at)]]
            sites[at + 4] = around[following]
    return Sites(sum(target in around for target in targets.values()), sites)


def test_the_sites_are_those_that_lief_shows(program: Path, wheel: Wheel) -> None:
    # GIVEN what an independent reader finds in both libraries
    expected = [found_by_lief(wheel.libmlx), found_by_lief(wheel.core)]

    # WHEN mlxmem looks for the places that make nodes
    found = found_by_mlxmem(program, wheel)

    # THEN they are the same, in number those of this version
    assert found == expected
    libmlx, core = found
    assert libmlx.leaves_and_nodes == LIBMLX[wheel.version]
    assert core.leaves_and_nodes == CORE[wheel.version]
    # THEN each node that is constructed is made at one of them
    assert libmlx.constructor_calls == len(libmlx.is_leaf)
    assert core.constructor_calls == len(core.is_leaf)
