"""What emulated code calls of macOS: dyld, the kernel and the rest of libSystem."""

from __future__ import annotations

import re
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cross
from emulator import PAGE, READ, WRITE, Process
from emulator_images import Loader

HERE = Path(__file__).parent
SUCCESS, BAD_ADDRESS, DENIED = 0, 1, 2  # KERN_SUCCESS and two refusals
_COPY = 0x10  # VM_PROT_COPY
_TASK = 0x103
_HEAP = 0x1000_0000
_FIXED = 0x10  # MAP_FIXED
_FORMAT = re.compile(r"%([-0 +#]*)(\d+|\*)?(?:\.(\d+))?(hh|h|ll|l|z|j|t)?([a-zA-Z%])")
_WIDTHS = {"hh": 8, "h": 16, None: 32}


@dataclass(frozen=True)
class Libraries:
    """Stand-ins of the system's own libraries, compiled for macOS."""

    libc: Path
    cxx: Path
    unwind: Path


def build_libraries(out: Path, symbols_of_cxx: set[str]) -> Libraries:
    """Build them: zig's own libc++ and unwinder, and memory and text functions.

    symbols_of_cxx: what is to be in libc++ of all that it has.
    """
    made = Libraries(out / "libc.dylib", out / "libc++.1.dylib", out / "unwind.dylib")
    _build_libc(made.libc)
    _build_cxx(made.cxx, symbols_of_cxx)
    _build_unwind(made.unwind)
    return made


def _build_libc(out: Path) -> None:
    source = HERE / "emulated_libc.c"
    made = out.with_suffix(".o")
    cross.compile_object(source, made, "-O2", "-fno-builtin")
    cross.link(out, made)


def _build_cxx(out: Path, symbols: set[str]) -> None:
    # A word for each, so that the linker takes it from zig's archive.
    source = out.with_suffix(".s")
    words = "".join(f".quad {name}\n" for name in sorted(symbols))
    source.write_text(f".data\n.p2align 3\n.globl _all\n_all:\n{words}")
    made = out.with_suffix(".o")
    cross.compile_object(source, made)
    cross.link(out, made, compiler="c++")


def _build_unwind(out: Path) -> None:
    folder = cross.zig_library() / "libunwind"
    names = (
        "libunwind.cpp",
        "UnwindLevel1.c",
        "UnwindLevel1-gcc-ext.c",
        "UnwindRegistersRestore.S",
        "UnwindRegistersSave.S",
    )
    flags = (
        "-w",
        "-O2",
        "-DNDEBUG",
        "-fno-exceptions",
        "-fno-rtti",
        f"-I{folder / 'include'}",
    )
    made = []
    for name in names:
        made.append(out.with_name(name + ".o"))
        cross.compile_object(folder / "src" / name, made[-1], *flags)
    cross.link(out, *made)


@dataclass(frozen=True)
class ProtectCall:
    """A call of vm_protect that was granted."""

    address: int
    size: int
    protection: int
    segment: str  # "" outside of images


class Mac(Process):
    """A process with the system's functions, and none of MLX's libraries yet."""

    def __init__(self, libraries: Libraries) -> None:
        super().__init__()
        self.loader = Loader(self, self._missing)
        self.handles: dict[int, int] = {}  # of dlopen, how often each is open
        self.protect_calls: list[ProtectCall] = []
        self.environment: dict[str, str] = {}
        self.hidden_symbols: set[str] = set()
        self.said = ""  # to stderr
        self._texts: dict[str, int] = {}
        self._data: dict[str, int] = {}
        self._system = _functions()
        self.map(_HEAP, 0x4000_0000, READ | WRITE)
        # The program itself, of which nothing can be read: dyld's first image.
        self._program = self.allocate(PAGE)
        libc = self.loader.load(libraries.libc, in_shared_cache=True)
        self._libc = libc
        self.set_word(libc.symbols["_emulated_heap"], _HEAP)
        self.set_word(libc.symbols["_emulated_heap_end"], _HEAP + 0x4000_0000)
        for path in (libraries.unwind, libraries.cxx):
            image = self.loader.load(path, in_shared_cache=True)
            self.loader.run_initializers(image)

    def of_libc(self, name: str) -> int:
        return self._libc.exports[f"_{name}"]

    def unknown(self, name: str) -> int:
        """Return the address of a function that fails when it is called."""

        def fail(process: Process) -> int:
            raise NotImplementedError(
                f"{name} was called from {process.return_address():#x}"
            )

        return self.stub(name, fail)

    def interned(self, text: str) -> int:
        """Return the one address of a text."""
        if text not in self._texts:
            self._texts[text] = self.put(text)
        return self._texts[text]

    def replace(self, name: str, function: Callable[[Mac], int | None]) -> None:
        """Define a function of the system, before it is bound."""
        self._system[name] = function

    def _missing(self, name: str) -> int:
        if name in _DATA:
            if name not in self._data:
                self._data[name] = self.allocate(PAGE)
                self.set_word(self._data[name], _DATA[name])
            return self._data[name]
        function = self._system.get(name)
        return self.stub(name, function) if function else self.unknown(name)

    def find_symbol(self, name: str) -> int:
        """Return what dlsym gives for a C name, 0 for none."""
        found = self.loader.find(f"_{name}")
        if found is None and f"_{name}" in self._system:
            found = self._missing(f"_{name}")
        return found or 0


# Words that are imported, and what they hold.
_DATA = {
    "_vm_page_size": PAGE,
    "___stack_chk_guard": 0x5A5A_5A5A_5A5A_5A00,
    "___stderrp": 0,
    "___stdinp": 0,
    "___stdoutp": 0,
    "_mach_task_self_": _TASK,
    "__DefaultRuneLocale": 0,
    "__NSConcreteStackBlock": 0,
}


def formatted(process: Process, text: str, place: int) -> str:
    """Format as printf does; arguments lie in words from `place` on."""

    def one(match: re.Match[str]) -> str:
        nonlocal place
        flags, width, precision, length, kind = match.groups()
        if kind == "%":
            return "%"
        value = process.word(place)
        place += 8
        how = f"%{flags}{width or ''}" + (f".{precision}" if precision else "")
        if kind == "s":
            return (how + "s") % process.text(value)
        bits = _WIDTHS.get(length, 64)
        value &= (1 << bits) - 1
        if kind in "di" and value >> bits - 1:
            value -= 1 << bits
        return (how + ("d" if kind in "diu" else kind)) % value

    return _FORMAT.sub(one, text)


# ---- dyld -------------------------------------------------------------------


def _headers(mac: Mac) -> list[int]:
    return [mac._program, *(image.base for image in mac.loader.images)]


def _image_count(mac: Mac) -> int:
    return len(_headers(mac))


def _image_header(mac: Mac) -> int:
    headers = _headers(mac)
    return headers[mac.x(0)] if mac.x(0) < len(headers) else 0


def _image_name(mac: Mac) -> int:
    i = mac.x(0)
    if i > len(mac.loader.images):
        return 0
    return mac.interned(mac.loader.images[i - 1].path if i else "/usr/bin/python3")


def _dlopen(mac: Mac) -> int:
    path = mac.text(mac.x(0))
    for image in mac.loader.images:
        if image.path == path:
            mac.handles[image.base] = mac.handles.get(image.base, 0) + 1
            return image.base
    return 0


def _dlclose(mac: Mac) -> int:
    mac.handles[mac.x(0)] -= 1
    return 0


def _dlsym(mac: Mac) -> int:
    return mac.find_symbol(mac.text(mac.x(1)))


def _dladdr(mac: Mac) -> int:
    image = mac.loader.image_at(mac.x(0))
    if not image:
        return 0
    words = (mac.interned(image.path), image.base, 0, 0)
    mac.write(mac.x(1), struct.pack("<4Q", *words))
    return 1


def _find_unwind_sections(mac: Mac) -> int:
    image = mac.loader.image_at(mac.x(0))
    if not image:
        return 0
    words = [image.base]
    for name in ("__eh_frame", "__unwind_info"):
        found = image.section(name)
        words += [found.begin, found.size] if found else [0, 0]
    mac.write(mac.x(1), struct.pack("<5Q", *words))
    return 1


# ---- the kernel ---------------------------------------------------------------


def _vm_region(mac: Mac) -> int:
    address_at, size_at, info = mac.x(1), mac.x(2), mac.x(4)
    found = mac.region(mac.word(address_at))
    if not found:
        return BAD_ADDRESS
    begin, end, protection = found
    mac.set_word(address_at, begin)
    mac.set_word(size_at, end - begin)
    mac.write(info, struct.pack("<2i", protection, protection))
    return SUCCESS


def _vm_protect(mac: Mac) -> int:
    address, size, wanted = mac.x(1), mac.x(2), mac.x(4)
    name, most = "", READ | WRITE
    if image := mac.loader.image_at(address):
        for segment, begin, length, allowed in image.segments:
            if begin <= address < begin + length:
                name, most = segment, allowed
    if wanted & ~_COPY & ~most:
        return DENIED
    mac.protect_calls.append(ProtectCall(address, size, wanted, name))
    mac.protect(address, size, wanted & ~_COPY)
    return SUCCESS


def _vm_read_overwrite(mac: Mac) -> int:
    address, size, to, copied = (mac.x(i) for i in range(1, 5))
    found = mac.region(address)
    if not found or not found[0] <= address or address + size > found[1]:
        return BAD_ADDRESS
    mac.write(to, mac.read(address, size))
    mac.set_word(copied, size)
    return SUCCESS


def _mmap(mac: Mac) -> int:
    place, size, flags = mac.x(0), mac.x(1), mac.x(3)
    if flags & _FIXED:
        mac.write(place, bytes(size))
        return place
    return mac.allocate(size)


def _sysconf(mac: Mac) -> int:
    return PAGE if mac.x(0) == 29 else -1  # _SC_PAGESIZE


def _sysctlbyname(mac: Mac) -> int:
    known = {"hw.memsize": 16 << 30, "iogpu.rsrc_limit": 499_000}
    value = known.get(mac.text(mac.x(0)))
    if value is None:
        return -1
    mac.set_word(mac.x(1), value)
    return 0


# ---- the rest -----------------------------------------------------------------


def _snprintf(mac: Mac) -> int:
    out, size = mac.x(0), mac.x(1)
    raw = formatted(mac, mac.text(mac.x(2)), mac.stack()).encode()
    if size:
        mac.write(out, raw[: size - 1] + b"\0")
    return len(raw)


def _fwrite(mac: Mac) -> int:
    size, count = mac.x(1), mac.x(2)
    mac.said += mac.read(mac.x(0), size * count).decode()
    return count


def _vfprintf(mac: Mac) -> int:
    text = formatted(mac, mac.text(mac.x(1)), mac.x(2))
    mac.said += text
    return len(text)


def _fputc(mac: Mac) -> int:
    mac.said += chr(mac.x(0))
    return mac.x(0)


def _nanoseconds(_mac: Mac) -> int:
    return time.monotonic_ns()


def _clock_gettime(mac: Mac) -> int:
    now = time.time_ns() if mac.x(0) == 0 else time.monotonic_ns()
    mac.write(mac.x(1), struct.pack("<2q", *divmod(now, 10**9)))
    return 0


def _thread_id(mac: Mac) -> int:
    mac.set_word(mac.x(1), THREAD)
    return 0


THREAD = 4321  # as pthread_threadid_np tells it


def _getenv(mac: Mac) -> int:
    value = mac.environment.get(mac.text(mac.x(0)))
    return 0 if value is None else mac.interned(value)


def _dispatch_once(mac: Mac) -> None:
    predicate, context, function = (mac.x(i) for i in range(3))
    if mac.word(predicate) == 0:
        mac.set_word(predicate, (1 << 64) - 1)
        mac.call(function, context)


def _abort(mac: Mac) -> int:
    raise AssertionError(f"abort(), from {mac.return_address():#x}: {mac.said}")


def _number(value: int) -> Callable[[Any], int]:
    return lambda _mac: value


def _functions() -> dict[str, Callable[[Any], int | None]]:
    return {
        "__dyld_image_count": _image_count,
        "__dyld_get_image_header": _image_header,
        "__dyld_get_image_name": _image_name,
        "__dyld_find_unwind_sections": _find_unwind_sections,
        "__dyld_register_func_for_remove_image": _number(0),
        "__availability_version_check": _number(0),
        "_dlopen": _dlopen,
        "_dlclose": _dlclose,
        "_dlsym": _dlsym,
        "_dladdr": _dladdr,
        "_vm_region_64": _vm_region,
        "_vm_protect": _vm_protect,
        "_vm_read_overwrite": _vm_read_overwrite,
        "_mmap": _mmap,
        "_munmap": _number(0),
        "_sysconf": _sysconf,
        "_sysctlbyname": _sysctlbyname,
        "_snprintf": _snprintf,
        "_fwrite": _fwrite,
        "_vfprintf": _vfprintf,
        "_fputc": _fputc,
        "_clock_gettime_nsec_np": _nanoseconds,
        "_clock_gettime": _clock_gettime,
        "_nanosleep": _number(0),
        "_getpid": _number(77),
        "_pthread_threadid_np": _thread_id,
        "_getenv": _getenv,
        "_dispatch_once_f": _dispatch_once,
        "_abort": _abort,
    }
