"""MLX's library of a wheel for macOS in an emulated process, and calls of it."""

from __future__ import annotations

import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

import cross
from checks import HINT, missing, needed
from emulator_images import Image
from emulator_metal import Metal
from emulator_system import Libraries, Mac, build_libraries
from wheels import Wheel

_SHAPE = "NS0_11SmallVectorIiLm10ENSt3__19allocatorIiEEEENS0_5DtypeE"
_PRIMITIVE = "10shared_ptrINS0_9PrimitiveEEENS{}_6vectorIS1_NS{}_IS1_EEEE"
LEAF_COMPLETE = f"__ZN3mlx4core5array9ArrayDescC1E{_SHAPE}"
LEAF_BASE = f"__ZN3mlx4core5array9ArrayDescC2E{_SHAPE}"
NODE_COMPLETE = f"__ZN3mlx4core5array9ArrayDescC1E{_SHAPE}NS4_{_PRIMITIVE.format(4, 5)}"
NODE_BASE = NODE_COMPLETE.replace("DescC1E", "DescC2E")
DESTROY = "__ZN3mlx4core5array9ArrayDescD1Ev"
ARRAY = f"__ZN3mlx4core5arrayC1E{_SHAPE}NS3_{_PRIMITIVE.format(3, 4)}"
_DESC_TYPE = "N3mlx4core5array9ArrayDescE"
CONTROL_BLOCK = f"__ZTVNSt3__120__shared_ptr_emplaceI{_DESC_TYPE}NS_9allocatorIS4_EEEE"
ALLOCATOR = "__ZN3mlx4core9allocator9allocatorEv"
COUNTERS = {
    "active": "__ZN3mlx4core17get_active_memoryEv",
    "cache": "__ZN3mlx4core16get_cache_memoryEv",
    "peak": "__ZN3mlx4core15get_peak_memoryEv",
}
CLEAR_CACHE = "__ZN3mlx4core11clear_cacheEv"
SET_CACHE_LIMIT = "__ZN3mlx4core15set_cache_limitEm"
OPERATOR_NEW = "__Znwm"

FLOAT32 = 11 | 4 << 32
ON_ZERO_SHARED = 2  # of a control block's vtable
MALLOC, FREE, SIZE = range(3)  # of an allocator's
DESC = 368
HEAD = 24  # of the control block, before the ArrayDesc


def build_system(out: Path, wheels: list[Wheel], of_cxx: set[str]) -> Libraries:
    """Build the system's libraries, or skip where there is no zig.

    of_cxx: what is to be in libc++ besides what MLX needs.
    """
    lief = needed("lief")
    symbols = set(of_cxx)
    for wheel in wheels:
        for path in (wheel.libmlx, wheel.core):
            symbols |= {
                binding.symbol.name
                for binding in lief.MachO.parse(str(path)).at(0).bindings
                if binding.has_library and "libc++" in binding.library.name
            }
    try:
        return build_libraries(out, symbols)
    except cross.ToolMissingError as error:
        missing(f"{error}: {HINT}")
    except subprocess.CalledProcessError as error:
        raise AssertionError(error.stdout) from error


@dataclass
class Array:
    """An mlx::core::array: a shared_ptr."""

    address: int
    desc: int
    block: int


class EmulatedMlx:
    """A process that has imported MLX, as far as its own code goes."""

    def __init__(self, system: Libraries, wheel: Wheel) -> None:
        self.version = wheel.version
        self.wheel = wheel
        self.mac = Mac(system)
        self.metal = Metal(self.mac)
        self.libmlx: Image = self.mac.loader.load(wheel.libmlx)
        self.mac.loader.run_initializers(self.libmlx)

    def load_core(self) -> Image:
        """Map core.so, too, which runs in a Python of which two functions are here."""
        for name in ("_PyEval_SaveThread", "_PyEval_RestoreThread"):
            self.mac.replace(name, lambda _: 0)
        return self.mac.loader.load(self.wheel.core)

    def call(self, symbol: str, *arguments: int) -> int:
        return self.mac.call(self.libmlx.exports[symbol], *arguments)

    def counters(self) -> dict[str, int]:
        """Return what MLX's own functions say, in bytes."""
        return {name: self.call(symbol) for name, symbol in COUNTERS.items()}

    # ---- nodes ------------------------------------------------------------------

    def shape(self, *sizes: int) -> int:
        """Place a Shape, which a constructor takes what it needs from."""
        place = self.mac.put(bytes(72))
        first = place + 32
        words = (0, first, first + 4 * len(sizes), first + 40)
        self.mac.write(place, struct.pack("<4Q", *words))
        self.mac.write(first, struct.pack(f"<{len(sizes)}i", *sizes))
        return place

    def make_array(self, *sizes: int, primitive: int = 0) -> Array:
        """Call array's constructor; the primitive has no control block."""
        place = self.mac.put(bytes(16))
        shared = self.mac.put(struct.pack("<2Q", primitive, 0))
        no_inputs = self.mac.put(bytes(24))
        self.call(ARRAY, place, self.shape(*sizes), FLOAT32, shared, no_inputs)
        return Array(place, self.mac.word(place), self.mac.word(place + 8))

    def drop(self, array: Array) -> None:
        """Do what the last shared_ptr does when it goes."""
        vtable = self.mac.word(array.block)
        self.mac.call(self.mac.word(vtable + 8 * ON_ZERO_SHARED), array.block)

    # ---- the allocator ------------------------------------------------------------

    def allocator(self) -> int:
        """Return the object, which is a MetalAllocator."""
        return self.call(ALLOCATOR)

    def call_allocator(self, slot: int, *arguments: int) -> int:
        """Call a virtual function of it, as MLX does."""
        allocator = self.allocator()
        function = self.mac.word(self.mac.word(allocator) + 8 * slot)
        return self.mac.call(function, allocator, *arguments)
