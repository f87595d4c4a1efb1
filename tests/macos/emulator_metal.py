"""The objects of Metal and Foundation that MLX's allocator asks for.

No work is done on any GPU: what MLX's own code gets are a device, its heap and its
buffers, and whatever else it is given is an object that does nothing.
"""

# ruff: noqa: N802 (methods have the names of their selectors)

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from emulator_system import Mac

MAX_BUFFER = 9 << 30
WORKING_SET = 12 << 30


@dataclass
class Object:
    kind: str
    values: dict[str, int] = field(default_factory=dict)
    released: bool = False


class Metal:
    """The Objective-C runtime of a process, and its objects by address."""

    def __init__(self, mac: Mac) -> None:
        self.mac = mac
        self.objects: dict[int, Object] = {}
        self.messages: list[str] = []
        self.fails = False  # whether new buffers are refused
        self._device = 0
        mac.replace("_objc_lookUpClass", self._class)
        mac.replace("_objc_getProtocol", self._class)
        mac.replace("_sel_registerName", lambda mac: mac.interned(mac.text(mac.x(0))))
        mac.replace("_objc_msgSend", self._send)
        mac.replace("_MTLCopyAllDevices", lambda mac: self.new("NSArray"))
        mac.replace("_MTLCreateSystemDefaultDevice", lambda mac: self.device())

    def new(self, kind: str, **values: int) -> int:
        address = self.mac.call(self.mac.of_libc("malloc"), 64)
        self.objects[address] = Object(kind, values)
        return address

    def device(self) -> int:
        if not self._device:
            self._device = self.new("MTLDevice")
        return self._device

    def buffers(self) -> dict[int, Object]:
        """Return those that exist."""
        return {
            address: found
            for address, found in self.objects.items()
            if found.kind == "MTLBuffer" and not found.released
        }

    def _class(self, mac: Mac) -> int:
        return self.new("class " + mac.text(mac.x(0)))

    def _send(self, mac: Mac) -> int:
        receiver, selector = mac.x(0), mac.text(mac.x(1))
        if receiver == 0:
            return 0
        found = self.objects[receiver]
        assert not found.released, f"{selector} of a {found.kind} that is gone"
        self.messages.append(f"{found.kind} {selector}")
        own = getattr(self, "_" + selector.replace(":", "_"), None)
        if own:
            answer: Callable[[Object, int, int, int], int] = own
            return answer(found, mac.x(2), mac.x(3), mac.x(4))
        return receiver

    def _release(self, found: Object, *_: int) -> int:
        if found.kind == "MTLBuffer":
            found.released = True
        return 0

    # ---- what is asked of a device and its heap --------------------------------

    def _objectAtIndex_(self, *_: object) -> int:
        return self.device()

    def _count(self, *_: object) -> int:
        return 0  # of the devices: MLX then takes the default one

    def _UTF8String(self, *_: object) -> int:
        return self.mac.interned("applegpu_g14s")

    def _supportsFamily_(self, *_: object) -> int:
        return 0  # of Metal 3, with which there are residency sets

    def _maxBufferLength(self, *_: object) -> int:
        return MAX_BUFFER

    def _recommendedMaxWorkingSetSize(self, *_: object) -> int:
        return WORKING_SET

    def _newHeapWithDescriptor_(self, *_: object) -> int:
        return self.new("MTLHeap")

    def _newBufferWithLength_options_(self, found: Object, size: int, *_: int) -> int:
        if self.fails:
            return 0
        return self.new("MTLBuffer", length=size, heap=int(found.kind == "MTLHeap"))

    def _newBufferWithBytesNoCopy_length_options_deallocator_(
        self, _found: Object, _pointer: int, size: int, *_: int
    ) -> int:
        return self.new("MTLBuffer", length=size, heap=0)

    # ---- and of a buffer ---------------------------------------------------------

    def _length(self, found: Object, *_: int) -> int:
        return found.values["length"]

    def _allocatedSize(self, found: Object, *_: int) -> int:
        return found.values.get("length", 1 << 20)

    def _heap(self, found: Object, *_: int) -> int:
        return found.values["heap"]
