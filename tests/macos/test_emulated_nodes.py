"""The code of MLX's own libraries for macOS runs in an emulator and makes nodes.

What mlx_abi.h says of a node, of how one is made and of how it goes is seen by value.
"""

from __future__ import annotations

import struct

import emulated_mlx as mlx
import pytest
from emulated_mlx import Array, EmulatedMlx
from emulator import Process

PATTERN = 0xA5
STATUS_PADDING, TRACER_PADDING, TAIL_PADDING = 220, 268, 364
MOV_W0_392 = bytes.fromhex("00318052")


def numbers(process: Process, vector: int, letter: str) -> list[int]:
    """Read a SmallVector."""
    begin, end = struct.unpack("<2Q", process.read(vector + 8, 16))
    return [
        n for (n,) in struct.iter_unpack(f"<{letter}", process.read(begin, end - begin))
    ]


def paddings(process: Process, desc: int) -> list[bytes]:
    """Read the three words that no constructor writes."""
    places = (STATUS_PADDING, TRACER_PADDING, TAIL_PADDING)
    return [process.read(desc + place, 4) for place in places]


@pytest.mark.parametrize(
    "constructor",
    [mlx.LEAF_COMPLETE, mlx.LEAF_BASE, mlx.NODE_COMPLETE, mlx.NODE_BASE],
    ids=["leaf C1", "leaf C2", "node C1", "node C2"],
)
def test_a_constructor_writes_where_mlx_abi_says(
    emulated: EmulatedMlx, constructor: str
) -> None:
    # GIVEN memory full of a pattern, a shape, a dtype and a primitive
    mac = emulated.mac
    memory = mac.put(bytes([PATTERN]) * (mlx.DESC + 64))
    primitive = mac.put(bytes(64))
    shared = mac.put(struct.pack("<2Q", primitive, 0))
    no_inputs = mac.put(bytes(24))
    is_node = constructor in (mlx.NODE_COMPLETE, mlx.NODE_BASE)

    # WHEN MLX's constructor runs
    more = (shared, no_inputs) if is_node else ()
    emulated.call(constructor, memory, emulated.shape(3, 5, 7), mlx.FLOAT32, *more)

    # THEN each member is at its place, and the paddings are as before
    assert numbers(mac, memory, "i") == [3, 5, 7]
    assert numbers(mac, memory + 72, "q") == [35, 7, 1]
    assert mac.word(memory + 184) == 105
    assert mac.read(memory + 192, 5) == struct.pack("<iB", 11, 4)
    assert mac.word(memory + 200) == (primitive if is_node else 0)
    status = struct.unpack("<I", mac.read(memory + 216, 4))[0]
    assert status == 0 if is_node else 0 < status < 8
    assert mac.word(memory + 272) == 0
    assert paddings(mac, memory) == [bytes([PATTERN]) * 4] * 3
    assert mac.read(memory + mlx.DESC, 64) == bytes([PATTERN]) * 64


def seen_requests(emulated: EmulatedMlx, seen: list[tuple[int, int, int]]) -> int:
    """Return an operator new that notes size, return address and block."""
    original = emulated.mac.loader.find(mlx.OPERATOR_NEW)
    assert original

    def operator_new(process: Process) -> int:
        size, called_from = process.x(0), process.return_address()
        block = process.call(original, size)
        process.write(block, bytes([PATTERN]) * size)
        seen.append((size, called_from, block))
        return block

    return emulated.mac.stub("operator new", operator_new)


def make_seen(emulated: EmulatedMlx) -> tuple[Array, list[tuple[int, int, int]]]:
    """Make an array with the slot of operator new replaced."""
    seen: list[tuple[int, int, int]] = []
    mac = emulated.mac
    (slot,) = emulated.libmlx.slots(mlx.OPERATOR_NEW)
    before = mac.word(slot)
    mac.set_word(slot, seen_requests(emulated, seen))
    array = emulated.make_array(3, 5, 7, primitive=mac.put(bytes(64)))
    mac.set_word(slot, before)
    return array, seen


def test_an_array_is_one_block_that_the_slot_of_operator_new_gives(
    emulated: EmulatedMlx,
) -> None:
    # GIVEN the slot, with a function that notes who asks
    mac = emulated.mac

    # WHEN array's constructor makes a node
    array, seen = make_seen(emulated)

    # THEN it asked for one of 392 bytes, after `mov w0, #392`, and the node is in it
    nodes = [found for found in seen if found[0] == mlx.HEAD + mlx.DESC]
    assert len(nodes) == 1
    (_, called_from, block) = nodes[0]
    assert MOV_W0_392 in mac.read(called_from - 16, 12)
    assert (array.block, array.desc) == (block, block + mlx.HEAD)
    assert numbers(mac, array.desc, "i") == [3, 5, 7]
    assert mac.word(array.desc + 184) == 105
    vtable = mac.word(array.block)
    assert vtable == emulated.libmlx.symbols[mlx.CONTROL_BLOCK] + 16

    # THEN what a probe wrote before the constructor would still be there
    assert paddings(mac, array.desc) == [bytes([PATTERN]) * 4] * 3
    mac.set_word(array.desc + 200, 0)
    emulated.drop(array)


def test_a_node_goes_through_the_control_blocks_third_slot(
    emulated: EmulatedMlx,
) -> None:
    # GIVEN an array, and ids in its paddings
    mac = emulated.mac
    array, _ = make_seen(emulated)
    mac.set_word(array.desc + 200, 0)
    for place in (STATUS_PADDING, TRACER_PADDING, TAIL_PADDING):
        mac.write(array.desc + place, struct.pack("<I", place))
    written: list[int] = []
    hook = mac.on_write(lambda address, size, value: written.append(address))

    # WHEN the last reference goes
    emulated.drop(array)
    mac.unhook(hook)

    # THEN MLX's code destroyed the node, and wrote no padding
    assert written
    kept = [
        struct.pack("<I", p) for p in (STATUS_PADDING, TRACER_PADDING, TAIL_PADDING)
    ]
    assert paddings(mac, array.desc) == kept
