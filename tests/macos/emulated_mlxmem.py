"""mlxmem's own library for macOS beside MLX's, in an emulated process.

Its C functions are called as Python calls them through ctypes, see csrc/hook_api.h.
"""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple, TypeVar

import cross
from checks import HINT, missing, needed
from emulated_mlx import EmulatedMlx
from emulator import Process
from emulator_images import Image

UNSUPPORTED = 1  # of mlxmem_status
_FLAT = -2  # BIND_SPECIAL_DYLIB_FLAT_LOOKUP
_MESSAGE = 1000
_TOTALS_AND_EVENTS = struct.Struct("<6Qq8Q5Q")  # mlxmem_copy
_NODES = struct.Struct("<5Q")  # mlxmem_nodes
_EVENT = struct.Struct("<3QqIHBBiI")
_NODE = struct.Struct("<2Q2I")
_WORD = struct.Struct("<3Q")
_T = TypeVar("_T")


class Action(IntEnum):
    """As in csrc/event.h."""

    ALLOC_NEW = 0
    ALLOC_REUSE = 1
    ALLOC_MAKE_BUFFER = 2
    FREE_ACTIVE_TO_CACHE = 3
    FREE_ACTIVE_TO_OS = 4
    RELEASE = 5
    FREE_CACHE_TO_OS = 6


class Event(NamedTuple):
    """A record of csrc/event.h."""

    address: int
    size: int
    requested_size: int
    timestamp_us: int
    traceback: int
    primitive: int
    kind: int
    after_look: int
    stream: int
    thread_id: int


class LiveNode(NamedTuple):
    """A record of csrc/live_nodes.h."""

    nbytes: int
    buffer: int
    traceback: int
    pending: int


class Word(NamedTuple):
    """A word that an attach changed."""

    address: int
    original: int
    replacement: int


class Fact(NamedTuple):
    """A fact that an attach relies on."""

    group: str
    text: str
    found: str
    otherwise: str
    holds: bool


class Check(NamedTuple):
    """What mlxmem_check says."""

    refusal: str
    facts: list[Fact]
    # By what they are and the name of their library's file.
    patches: dict[tuple[str, str], int]


class Session(NamedTuple):
    """What mlxmem_copy_session copies."""

    now: dict[str, int]  # as EmulatedMlx.counters()
    at_start: dict[str, int]
    live_buffers: int
    unexplained: int
    events: list[Event]


class RefusedError(Exception):
    """mlxmem did not attach; the text is its own."""


def build_dylib(out: Path) -> Path:
    """Build mlxmem's library, or skip where there is no zig.

    It finds the system's libc++ in the process, as on a Mac.
    """
    needed("lief")
    needed("setuptools")
    try:
        cross.build_native_library(out)
        return cross.link(out, *sorted(out.with_suffix(".objects").glob("*.o")))
    except cross.ToolMissingError as error:
        missing(f"{error}: {HINT}")
    except subprocess.CalledProcessError as error:
        raise AssertionError(error.stdout) from error


def symbols_of_cxx(dylib: Path) -> set[str]:
    """Return what it needs of libc++."""
    parsed = needed("lief").MachO.parse(str(dylib)).at(0)
    return {b.symbol.name for b in parsed.bindings if b.library_ordinal == _FLAT}


class EmulatedMlxmem:
    """mlxmem in a process that has imported MLX."""

    def __init__(self, mlx: EmulatedMlx, dylib: Path) -> None:
        self.mlx = mlx
        self.mac = mlx.mac
        self.image: Image = self.mac.loader.load(dylib)
        self.mac.loader.run_initializers(self.image)
        self.traceback = 0  # what the capture function gives
        self._message = self.mac.put(bytes(_MESSAGE))
        self._out = self.mac.put(bytes(_TOTALS_AND_EVENTS.size))
        capture = self.mac.stub("capture", lambda _: self.traceback)
        self.call("set_traceback_capture_func", capture)

    def call(self, name: str, *arguments: int) -> int:
        return self.mac.call(self.image.exports[f"_mlxmem_{name}"], *arguments)

    # ---- attach and detach ------------------------------------------------------

    def check(self) -> Check:
        facts: list[Fact] = []
        patches: dict[tuple[str, str], int] = {}

        def fact(mac: Process) -> None:
            texts = [mac.text(mac.x(i)) for i in range(4)]
            facts.append(Fact(*texts, holds=mac.x(4) & 0xFFFFFFFF == 1))

        def patch(mac: Process) -> None:
            what, image = (mac.text(mac.x(i)) for i in range(2))
            patches[what, Path(image).name] = mac.x(2)

        visitors = self.mac.stub("fact", fact), self.mac.stub("patch", patch)
        status = self.call("check", *visitors, self._message, _MESSAGE)
        refusal = self.mac.text(self._message)
        assert status == (UNSUPPORTED if refusal else 0)
        return Check(refusal, facts, patches)

    def attach(self) -> None:
        if status := self.call("attach", self._message, _MESSAGE):
            assert status == UNSUPPORTED
            raise RefusedError(self.mac.text(self._message))

    def detach(self) -> None:
        status = self.call("detach", self._message, _MESSAGE)
        assert (status, self.mac.text(self._message)) == (0, "")

    def words(self) -> list[Word]:
        """Return the words that are changed."""
        count = self.call("patched_words", 0, 0)
        place = self.mac.put(bytes(_WORD.size * count))
        self.call("patched_words", place, count)
        return self._records(place, count, _WORD, Word)

    # ---- a session ----------------------------------------------------------------

    def session(self) -> Session:
        """Copy the session as it is now."""
        assert self.call("copy_session", 1, self._out) == 0
        raw = self.mac.read(self._out, _TOTALS_AND_EVENTS.size)
        found = _TOTALS_AND_EVENTS.unpack(raw)
        names = ("active", "cache", "peak")
        copy = Session(
            now=dict(zip(names, found[:3], strict=True)),
            at_start=dict(zip(names, found[3:6], strict=True)),
            live_buffers=found[10],
            unexplained=found[14],
            events=self._records(found[16], found[15], _EVENT, Event),
        )
        self.call("free_copy", self._out)
        return copy

    def nodes(self) -> list[LiveNode]:
        """Return the session's nodes that live."""
        assert self.call("copy_nodes", self._out) == 0
        count, place, *_ = _NODES.unpack(self.mac.read(self._out, _NODES.size))
        nodes = self._records(place, count, _NODE, LiveNode)
        self.call("free_nodes", self._out)
        return nodes

    def primitive_name(self, number: int) -> str:
        return self.mac.text(self.call("primitive_name", number))

    def _records(
        self, place: int, count: int, record: struct.Struct, kind: Callable[..., _T]
    ) -> list[_T]:
        raw = self.mac.read(place, count * record.size) if count else b""
        return [kind(*found) for found in record.iter_unpack(raw)]
