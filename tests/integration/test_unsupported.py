"""An MLX that fails a check is refused, says which, and is left as it was.

Each test runs on a copy of the installed MLX in which one fact was made untrue, so
that the copy itself still works.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import pytest

import mlxmem

TARGET = Path(__file__).parent / "targets" / "refused.py"
VERSIONS = ("0.30.6", "0.31.2", "0.32.1", "0.32.4")
ADD_VTABLE = "_ZTVN3mlx4core3AddE"
EXP_VTABLE = "_ZTVN3mlx4core3ExpE"
ALLOCATOR_TYPE = "_ZTIN3mlx4core9allocator9AllocatorE"
LEAF = "_ZN3mlx4core5array9ArrayDescC{}ENS0_11SmallVectorIiLm10ESaIiEEENS0_5DtypeE"
NAME_SLOT = 5  # of a primitive's vtable, which begins two words behind its symbol


class Section(NamedTuple):
    """Where a section lies in the file and in memory, bytes."""

    address: int
    offset: int
    size: int


class Elf:
    """A 64-bit ELF library, to be changed in place."""

    SYMBOL = struct.Struct("<IBBHQQ")  # name, info, other, section, value, size
    RELOCATION = struct.Struct("<QQq")  # offset, type and symbol, addend

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data = bytearray(path.read_bytes())
        assert self.data[:6] == b"\x7fELF\x02\x01"
        (table,) = struct.unpack_from("<Q", self.data, 40)
        size, count, names = struct.unpack_from("<HHH", self.data, 58)
        headers = [
            struct.unpack_from("<IIQQQQIIQQ", self.data, table + i * size)
            for i in range(count)
        ]
        self.sections = {
            self._text(headers[names][4] + header[0]): Section(*header[3:6])
            for header in headers
        }
        self.names = self.sections[".dynstr"]

    def _text(self, offset: int) -> str:
        return self.data[offset : self.data.index(b"\0", offset)].decode()

    def symbol(self, name: str) -> int:
        """Number of the dynamic symbol with this name."""
        table = self.sections[".dynsym"]
        for number in range(table.size // self.SYMBOL.size):
            name_at = self.read_symbol(number)[0]
            if self._text(self.names.offset + name_at) == name:
                return number
        raise AssertionError(f"{self.path} has no symbol {name}")

    def read_symbol(self, number: int) -> tuple[int, ...]:
        at = self.sections[".dynsym"].offset + number * self.SYMBOL.size
        return self.SYMBOL.unpack_from(self.data, at)

    def write_symbol(self, number: int, fields: tuple[int, ...]) -> None:
        at = self.sections[".dynsym"].offset + number * self.SYMBOL.size
        self.SYMBOL.pack_into(self.data, at, *fields)

    def rename(self, old: str, new: str) -> None:
        """Change a symbol's name; both are equally long."""
        assert len(old) == len(new)
        at = self.names.offset + self.read_symbol(self.symbol(old))[0]
        self.data[at : at + len(old)] = new.encode()

    def hide(self, name: str) -> None:
        """Export a symbol no longer; the library's own uses of it stay bound."""
        number = self.symbol(name)
        at, info, _, *rest = self.read_symbol(number)
        self.write_symbol(number, (at, info, 2, *rest))  # 2 = STV_HIDDEN
        self.rename(name, name[:-2] + "_E")

    def move_uses(self, old: int, new: int) -> None:
        """Let what is bound to one symbol be bound to another."""
        for name in (".rela.plt", ".rela.dyn"):
            section = self.sections[name]
            for i in range(section.size // self.RELOCATION.size):
                at = section.offset + i * self.RELOCATION.size
                slot, info, addend = self.RELOCATION.unpack_from(self.data, at)
                if info >> 32 == old:
                    info = new << 32 | info & 0xFFFFFFFF
                    self.RELOCATION.pack_into(self.data, at, slot, info, addend)

    def file_offset(self, address: int) -> int:
        """Where in the file the byte lies that is mapped there."""
        for section in self.sections.values():
            if 0 < section.address <= address < section.address + section.size:
                return address - section.address + section.offset
        raise AssertionError(f"{address:#x} is in no section")

    def save(self) -> None:
        # Written anew: the file may be a link to the installed one.
        self.path.unlink()
        self.path.write_bytes(self.data)


class Pristine:
    """What the unspoiled libmlx of this process tells about itself."""

    def __init__(self) -> None:
        path = Path(mx.__file__).parent / "lib" / "libmlx.so"
        self.library = ctypes.CDLL(str(path))
        vtable = self.address(EXP_VTABLE)
        slot = vtable + (2 + NAME_SLOT) * ctypes.sizeof(ctypes.c_void_p)
        name = ctypes.c_void_p.from_address(slot).value
        assert name is not None
        literal = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(name)(0)
        assert ctypes.string_at(literal) == b"Exp"
        elf = Elf(path)
        base = vtable - elf.read_symbol(elf.symbol(EXP_VTABLE))[4]
        self.exp_literal: int = literal - base
        self.exp_name: int = name - base

    def address(self, symbol: str) -> int:
        return ctypes.addressof(ctypes.c_char.in_dll(self.library, symbol))


def link(source: str, target: str) -> None:
    """Link a file, or copy it where that is not possible."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


@dataclass
class Copy:
    """A copy of MLX that a subprocess imports instead of the installed one."""

    root: Path

    @property
    def libmlx(self) -> Path:
        return self.root / "mlx" / "lib" / "libmlx.so"

    @property
    def core(self) -> Path:
        (found,) = self.root.glob("mlx/core.*.so")
        return found

    def enable(self, *options: str) -> dict[str, Any]:
        """Call enable() in a subprocess and return what came of it."""
        path = os.pathsep.join([str(self.root), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [sys.executable, str(TARGET), *options],
            env={
                **os.environ,
                "PYTHONPATH": path.rstrip(os.pathsep),
                "LD_BIND_NOW": "1",  # the loader itself writes no word later on
            },
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert (done.returncode, done.stderr) == (0, "")
        result: dict[str, Any] = json.loads(done.stdout)
        assert result["libraries"] == sorted(
            [*map(str, (self.core, self.libmlx)), *options]
        )
        assert result["evaluated"] == [6.0, 2.0]
        return result

    def doctor(self) -> tuple[int, dict[str, Any]]:
        """Return the exit code of `mlxmem doctor --json` and what it printed."""
        path = os.pathsep.join([str(self.root), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [sys.executable, "-m", "mlxmem", "doctor", "--json"],
            env={**os.environ, "PYTHONPATH": path.rstrip(os.pathsep)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.stderr == ""
        return done.returncode, json.loads(done.stdout)


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    """MLX and the libraries beside it, linked into a folder of their own."""
    package = Path(mx.__file__).parent
    if not (package / "lib" / "libmlx.so").exists():
        pytest.skip("needs MLX as the wheels for Linux have it")
    shutil.copytree(package, tmp_path / "mlx", copy_function=link)
    for libraries in package.parent.glob("mlx*.libs"):
        (tmp_path / libraries.name).symlink_to(libraries)
    return Copy(tmp_path)


def refused(result: dict[str, Any], fact: str) -> None:
    """Assert that enable() failed for this reason and changed nothing."""
    assert result["error"] == mlxmem.UnsupportedMLXError.__name__
    message = result["message"]
    assert fact in message
    assert f"({mx.__version__})" in message
    assert [version for version in VERSIONS if version not in message] == []
    assert message.endswith("Please report this with the output of `mlxmem doctor`.")
    assert result["enabled"] is False
    assert result["patched_words"] == 0
    assert result["bytes"] > 10 << 20
    assert result["changed"] == 0
    assert result["same_rights"] is True


def test_a_sound_copy_is_recorded(copy: Copy) -> None:
    # The control: what the other tests find is not the copying's fault, and the
    # comparison of the mapped bytes sees what enable() changes.
    result = copy.enable()
    assert result["error"] is None
    assert result["enabled"] is True
    assert result["patched_words"] > 100
    assert result["changed"] > 100


@pytest.mark.parametrize("symbol", [ADD_VTABLE, ALLOCATOR_TYPE])
def test_a_symbol_that_is_not_exported(copy: Copy, symbol: str) -> None:
    elf = Elf(copy.libmlx)
    elf.hide(symbol)
    elf.save()
    refused(copy.enable(), f"libmlx does not export {symbol}")


def test_a_primitive_with_another_name(copy: Copy) -> None:
    elf = Elf(copy.libmlx)
    at = elf.file_offset(Pristine().exp_literal)
    assert elf.data[at : at + 4] == b"Exp\0"
    elf.data[at : at + 4] = b"Exq\0"
    elf.save()
    refused(copy.enable(), "slot 5 of the vtable of Exp does not return its name")

    # WHEN the user asks the doctor
    code, report = copy.doctor()
    # THEN it looked at this copy, and the facts end with the one that does not hold
    assert (code, report["works"]) == (1, False)
    assert Path(report["mlx"]["file"]) == copy.core
    *sound, spoiled = report["facts"]
    assert len(sound) > 20
    assert [fact for fact in sound if not fact["holds"]] == []
    assert spoiled == {
        "group": "operations",
        "text": "slot 5 of the vtable of Exp returns its name",
        "found": "Exq",
        "otherwise": "slot 5 of the vtable of Exp does not return its name",
        "holds": False,
    }
    assert report["patches"] == []
    problem = report["problem"]
    assert problem["step"] == "checking MLX"
    assert problem["text"].endswith(f": {spoiled['otherwise']}")
    assert problem["advice"].endswith("Please report it with this output.")


def test_another_layout_of_arrays(copy: Copy) -> None:
    # GIVEN a constructor of array nodes that writes nothing where the shape belongs.
    # A constructor has two equal names: MLX's own calls go to the second one here.
    first, second = LEAF.format(1), LEAF.format(2)
    elf = Elf(copy.libmlx)
    number = elf.symbol(first)
    elf.move_uses(number, elf.symbol(second))
    name_at, info, other, section, _, size = elf.read_symbol(number)
    elf.write_symbol(number, (name_at, info, other, section, Pristine().exp_name, size))
    elf.save()
    core = Elf(copy.core)
    core.rename(first, second)
    core.save()

    # WHEN / THEN
    refused(copy.enable(), "ArrayDesc: the shape of a leaf is not at offset 0")


def test_a_second_mlx_core(copy: Copy) -> None:
    # Another file: the loader would know a link for the library that is there.
    another = copy.libmlx.with_name("libmlx_again.so")
    shutil.copy(copy.libmlx, another)
    refused(copy.enable(str(another)), "two MLX cores are loaded in this process")
