"""A process of macOS on arm64 in an emulator: memory, code, calls.

What the code calls of the system are functions in Python, each at an address of its own
in memory that can't be executed: the emulator stops there, and the function is called.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from checks import needed

unicorn = needed("unicorn")
_ARM = needed("unicorn.arm64_const")

READ, WRITE, EXECUTE = 1, 2, 4  # VM_PROT_READ and the others
PAGE = 0x4000

_STUBS = 0x10_0000
_STUBS_END = 0x20_0000
_STACK = 0x7000_0000
_STACK_SIZE = 0x100_0000
_MOST_SECONDS = 5  # without a call of the system
_RED_ZONE = 0x200  # below the stack pointer; 128 bytes there are still used
_RETURNED = _STUBS  # where a call from outside returns to
_X = [_ARM.UC_ARM64_REG_X0 + i for i in range(9)]

# A function of the system: takes the process, and its arguments from there.
Function = Callable[["Process"], "int | None"]


class EmulatedCrashError(Exception):
    """The emulated code did what a processor or the system refuses."""


def pages(size: int) -> int:
    """Round up to whole pages."""
    return (size + PAGE - 1) // PAGE * PAGE


class Process:
    """Memory, a processor, and functions of the system."""

    def __init__(self) -> None:
        self._uc = unicorn.Uc(unicorn.UC_ARCH_ARM64, unicorn.UC_MODE_ARM)
        self._uc.ctl_set_cpu_model(_ARM.UC_CPU_ARM64_MAX)
        # Code uses vector registers.
        access = self._uc.reg_read(_ARM.UC_ARM64_REG_CPACR_EL1)
        self._uc.reg_write(_ARM.UC_ARM64_REG_CPACR_EL1, access | 3 << 20)
        self._next = 0x1_0000_0000
        self._regions: list[tuple[int, int, int]] = []
        self._functions: dict[int, tuple[str, Function]] = {}
        self._stubs: dict[str, int] = {}
        self.called: dict[str, int] = {}
        self.map(_STUBS, _STUBS_END - _STUBS, READ)
        self.map(_STACK, _STACK_SIZE, READ | WRITE)
        self._uc.reg_write(_ARM.UC_ARM64_REG_SP, _STACK + _STACK_SIZE - PAGE)

    # ---- memory --------------------------------------------------------------

    def map(self, address: int, size: int, protection: int) -> None:
        self._uc.mem_map(address, pages(size), protection)
        self._regions.append((address, address + pages(size), protection))
        self._regions.sort()

    def reserve(self, size: int) -> int:
        """Return a place for so many bytes, and leave a gap after it."""
        place = self._next
        self._next += pages(size) + PAGE
        return place

    def allocate(self, size: int) -> int:
        """Map memory full of zeros, and return its address."""
        place = self.reserve(size)
        self.map(place, size, READ | WRITE)
        return place

    def protect(self, address: int, size: int, protection: int) -> None:
        """Change pages that are mapped, as vm_protect does."""
        self._uc.mem_protect(address, size, protection)
        end = address + size
        kept = []
        for begin, stop, old in self._regions:
            kept += [
                piece
                for piece in (
                    (begin, min(stop, address), old),
                    (max(begin, address), min(stop, end), protection),
                    (max(begin, end), stop, old),
                )
                if piece[0] < piece[1]
            ]
        self._regions = sorted(kept)

    def region(self, address: int) -> tuple[int, int, int] | None:
        """Return begin, end and protection of what is mapped there or after it."""
        return next((r for r in self._regions if r[1] > address), None)

    def protections(self) -> list[tuple[int, int, int]]:
        """Return begin, end and protection of all that is mapped, as few as can be."""
        found: list[tuple[int, int, int]] = []
        for begin, end, protection in self._regions:
            if found and found[-1][1:] == (begin, protection):
                begin = found.pop()[0]
            found.append((begin, end, protection))
        return found

    def read(self, address: int, size: int) -> bytes:
        return bytes(self._uc.mem_read(address, size))

    def write(self, address: int, data: bytes) -> None:
        """Write, whatever the page's protection is."""
        self._uc.mem_write(address, data)

    def word(self, address: int) -> int:
        return int(struct.unpack("<Q", self.read(address, 8))[0])

    def set_word(self, address: int, value: int) -> None:
        self.write(address, struct.pack("<Q", value & (1 << 64) - 1))

    def text(self, address: int) -> str:
        found = b""
        while b"\0" not in found:
            found += self.read(address + len(found), 64 - (address + len(found)) % 64)
        return found.split(b"\0")[0].decode()

    def put(self, data: bytes | str) -> int:
        """Place bytes, or text with its zero, in memory of their own."""
        raw = data.encode() + b"\0" if isinstance(data, str) else data
        address = self.call(self.of_libc("malloc"), max(len(raw), 1))
        self.write(address, raw)
        return address

    def of_libc(self, name: str) -> int:
        """Return a function's address; the system sets where to look."""
        raise NotImplementedError(name)

    # ---- calls ---------------------------------------------------------------

    def stub(self, name: str, function: Function) -> int:
        """Return the address at which code calls a function in Python."""
        address = self._stubs.get(name)
        if address is None:
            address = _RETURNED + 16 * (len(self._stubs) + 1)
            self._stubs[name] = address
        self._functions[address] = (name, function)
        return address

    def x(self, i: int) -> int:
        """Return a register, which has the argument of this number."""
        return int(self._uc.reg_read(_X[i]))

    def set_x(self, i: int, value: int) -> None:
        self._uc.reg_write(_X[i], value & (1 << 64) - 1)

    def stack(self) -> int:
        """Return the stack pointer, where the arguments after an ellipsis are."""
        return int(self._uc.reg_read(_ARM.UC_ARM64_REG_SP))

    def return_address(self) -> int:
        return int(self._uc.reg_read(_ARM.UC_ARM64_REG_LR))

    def on_write(self, seen: Callable[[int, int, int], None]) -> Any:
        """Call seen(address, size, value) at each write; see unhook()."""
        return self._uc.hook_add(
            unicorn.UC_HOOK_MEM_WRITE,
            lambda _uc, _kind, address, size, value, _data: seen(address, size, value),
        )

    def unhook(self, hook: Any) -> None:
        self._uc.hook_del(hook)

    def call(self, address: int, *arguments: int, result_at: int = 0) -> int:
        """Call a function and return what it has in x0.

        Arguments are words in registers; a result in memory goes to `result_at`.
        """
        saved = self._uc.context_save()
        self._uc.reg_write(_ARM.UC_ARM64_REG_SP, (self.stack() - _RED_ZONE) & ~15)
        for i, argument in enumerate(arguments):
            self.set_x(i, argument)
        self.set_x(8, result_at)
        self._uc.reg_write(_ARM.UC_ARM64_REG_LR, _RETURNED)
        self._run(address)
        result = self.x(0)
        self._uc.context_restore(saved)
        return result

    def _run(self, address: int) -> None:
        while True:
            try:
                self._uc.emu_start(address, _RETURNED, timeout=_MOST_SECONDS * 10**6)
                at = int(self._uc.reg_read(_ARM.UC_ARM64_REG_PC))
                if at == _RETURNED:
                    return
                raise EmulatedCrashError(f"no end at {at:#x}, in {_MOST_SECONDS} s")
            except unicorn.UcError as error:
                at = int(self._uc.reg_read(_ARM.UC_ARM64_REG_PC))
                if at not in self._functions:
                    raise EmulatedCrashError(
                        f"{error} at {at:#x}, called from {self.return_address():#x}"
                    ) from None
            name, function = self._functions[at]
            self.called[name] = self.called.get(name, 0) + 1
            back = self.return_address()
            result = function(self)
            if result is not None:
                self.set_x(0, result)
            self._uc.reg_write(_ARM.UC_ARM64_REG_LR, back)
            address = back
            if address == _RETURNED:
                return
