# cython: language_level=3
# cython: boundscheck=False, wraparound=False, initializedcheck=False
# cython: cdivision=True, annotation_typing=False, embedsignature=True
"""Pickle of nested plain objects in which long lists of dicts are tables.

Python's pickler wants every dict of a list as an object and remembers each of them:
for a trace of millions of entries that is most of the time and memory of a dump.
Here a table's keys become fixed bytes, between which each row puts its numbers.

Protocol 4, and only opcodes that the web viewer knows. It keeps a whole batch of a
list on its stack, so batches are of 1,000 items, as Python's own are. There are no
frames (PEP 3154 makes them optional): readers buffer by themselves.
"""

from cpython.buffer cimport PyBUF_READ
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cpython.exc cimport PyErr_CheckSignals
from cpython.memoryview cimport PyMemoryView_FromMemory
from libc.stdint cimport INT32_MAX, INT32_MIN, int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

import struct
from collections.abc import Mapping

import numpy as np

from mlxmem.tables import Rows, Shared, row_count

cdef extern from "Python.h":
    long long PyLong_AsLongLongAndOverflow(object, int*) except? -1

cdef enum:
    BUFFER = 1 << 20        # bytes that are written at once
    MARGIN = 1 << 12        # room for one row: MAX_STEPS * (9 + 2), and its keys
    BATCH = 1000            # items of a list between two marks
    MAX_STEPS = 64
    MAX_KEYS = 2048         # bytes of one row that are the same in all

cdef uint32_t UNWRITTEN = 0xFFFFFFFF

# What a row does after some fixed bytes.
cdef enum:
    SIGNED
    UNSIGNED
    SHARED
    NOTHING

cdef struct Step:
    const char* fixed
    Py_ssize_t n_fixed
    int kind
    const int64_t* numbers
    const int32_t* index
    uint32_t* memo          # by index: number in the memo, or UNWRITTEN
    Py_ssize_t n_objects


cdef class _Writer:
    cdef object _write
    cdef object _on_rows
    cdef char* _buffer
    cdef Py_ssize_t _used
    cdef dict _memo         # a str, or the id of another object -> its number
    cdef dict _numbers      # id of a Shared's objects -> numbers, as uint32 array
    cdef list _keep         # ids in the dicts above must not be reused

    def __cinit__(self, write, on_rows):
        self._buffer = <char*>malloc(BUFFER)
        if self._buffer == NULL:
            raise MemoryError
        self._write = write
        self._on_rows = on_rows
        self._used = 0
        self._memo = {}
        self._numbers = {}
        self._keep = []

    def __dealloc__(self):
        free(self._buffer)

    # Bytes.

    cdef int flush(self) except -1:
        if self._used:
            self._write(PyMemoryView_FromMemory(self._buffer, self._used, PyBUF_READ))
            self._used = 0
        return PyErr_CheckSignals()

    cdef inline int reserve(self, Py_ssize_t count) except -1:
        if self._used + count > BUFFER:
            self.flush()
        return 0

    cdef inline int put_byte(self, unsigned char byte) except -1:
        self.reserve(1)
        self._buffer[self._used] = <char>byte
        self._used += 1
        return 0

    cdef int put_bytes(self, bytes data) except -1:
        cdef Py_ssize_t count = PyBytes_GET_SIZE(data)
        if count > MARGIN:
            self.flush()
            self._write(memoryview(data))
            return 0
        self.reserve(count)
        memcpy(self._buffer + self._used, PyBytes_AS_STRING(data), count)
        self._used += count
        return 0

    # The next three need room for 11 bytes.

    cdef inline void put_int(self, int64_t value) noexcept:
        cdef char* to = self._buffer + self._used
        cdef uint64_t bits = <uint64_t>value
        cdef int count, i
        if 0 <= value <= 0xFF:
            to[0], to[1] = b"K", <char>bits
            self._used += 2
        elif 0 <= value <= 0xFFFF:
            to[0], to[1], to[2] = b"M", <char>bits, <char>(bits >> 8)
            self._used += 3
        elif INT32_MIN <= value <= INT32_MAX:
            to[0] = b"J"
            for i in range(4):
                to[1 + i] = <char>(bits >> (8 * i))
            self._used += 5
        else:
            # Two's complement, low byte first, as short as its sign allows.
            count = 5
            while count < 8 and (value >> (8 * count - 1)) not in (0, -1):
                count += 1
            to[0], to[1] = <char>0x8A, <char>count
            for i in range(count):
                to[2 + i] = <char>(bits >> (8 * i))
            self._used += 2 + count

    cdef inline void put_uint(self, uint64_t value) noexcept:
        cdef char* to = self._buffer + self._used
        cdef int i
        if value >> 63 == 0:
            self.put_int(<int64_t>value)
            return
        to[0], to[1] = <char>0x8A, 9
        for i in range(8):
            to[2 + i] = <char>(value >> (8 * i))
        to[10] = 0
        self._used += 11

    cdef inline void put_get(self, uint32_t number) noexcept:
        cdef char* to = self._buffer + self._used
        cdef int i
        if number <= 0xFF:
            to[0], to[1] = b"h", <char>number
            self._used += 2
        else:
            to[0] = b"j"
            for i in range(4):
                to[1 + i] = <char>(number >> (8 * i))
            self._used += 5

    # Objects.

    cdef int put(self, value) except -1:
        """Put any plain object; equal strings and the same containers only once."""
        kind = type(value)
        cdef int overflow = 0
        cdef int64_t number
        self.reserve(11)
        if value is None:
            self.put_byte(b"N")
        elif kind is bool:
            self.put_byte(0x88 if value else 0x89)
        elif kind is int:
            number = PyLong_AsLongLongAndOverflow(value, &overflow)
            if overflow:
                self.put_bytes(_int(value))
            else:
                self.put_int(number)
        elif kind is float:
            self.put_bytes(b"G" + struct.pack(">d", value))
        elif kind is Rows:
            self.put_rows(value)
        else:
            key = value if kind is str else id(value)
            known = self._memo.get(key)
            if known is not None:
                self.put_get(known)
            elif kind is str:
                self.put_bytes(_str(value))
                self.remember(value, key)
            elif kind is list:
                self.put_byte(b"]")
                self.remember(value, key)
                self.put_items(value)
            elif kind is dict:
                self.put_byte(b"}")
                self.remember(value, key)
                self.put_pairs(value.items())
            elif kind is tuple and not value:
                self.put_byte(b")")
            elif kind is tuple:
                # No tuple of a snapshot holds itself, so its memo can come last.
                short = len(value) <= 3
                if not short:
                    self.put_byte(b"(")
                for item in value:
                    self.put(item)
                self.put_bytes((b"\x85", b"\x86", b"\x87")[len(value) - 1]
                               if short else b"t")
                self.remember(value, key)
            else:
                raise TypeError(f"a snapshot can't hold {kind.__name__}: {value!r}")
        return 0

    cdef int remember(self, value, key) except -1:
        self.put_byte(0x94)
        self._memo[key] = len(self._memo)
        self._keep.append(value)
        return 0

    cdef int put_items(self, list items) except -1:
        for start in range(0, len(items), BATCH):
            self.put_byte(b"(")
            for item in items[start:start + BATCH]:
                self.put(item)
            self.put_byte(b"e")
        return 0

    cdef int put_pairs(self, pairs) except -1:
        self.put_byte(b"(")
        for key, item in pairs:
            self.put(key)
            self.put(item)
        self.put_byte(b"u")
        return 0

    cdef bytes known(self, value):
        """Return the bytes of a key or of a value that all rows share."""
        kind = type(value)
        if kind in (str, tuple):
            number = self._memo.get(value if kind is str else id(value))
            if number is not None:
                return _get(number)
        if value is None:
            return b"N"
        if kind is bool:
            return b"\x88" if value else b"\x89"
        if kind is int:
            return _int(value)
        if kind is str:
            return _str(value)
        if kind is tuple and len(value) == 2:
            return self.known(value[0]) + self.known(value[1]) + b"\x86"
        raise TypeError(f"no value for all rows: {value!r}")

    # Tables.

    cdef int put_rows(self, rows) except -1:
        self.put_byte(b"]")
        # The list has no name that could be shared: rows are not remembered.
        for table in rows.tables():
            self.put_table(table)
            if self._on_rows is not None:
                self._on_rows(row_count(table))
        return 0

    cdef int put_table(self, table) except -1:
        cdef Step steps[MAX_STEPS]
        cdef Step* step
        cdef Py_ssize_t count = row_count(table)
        cdef Py_ssize_t row, i, n_steps, left = 0
        cdef const int64_t[::1] numbers
        cdef const uint64_t[::1] unsigned
        cdef const int32_t[::1] index
        cdef uint32_t[::1] memo
        cdef int32_t place
        if not count:
            return 0
        plan = []
        rest = bytearray()
        self.plan(table, plan, rest)
        plan.append((bytes(rest), None))
        if len(plan) > MAX_STEPS or sum(len(f) for f, _ in plan) > MAX_KEYS:
            raise ValueError("a table has too many columns")
        objects = []
        n_steps = len(plan)
        memset(steps, 0, sizeof(steps))
        for i, (fixed, column) in enumerate(plan):
            step = &steps[i]
            step.fixed = PyBytes_AS_STRING(fixed)
            step.n_fixed = PyBytes_GET_SIZE(fixed)
            objects.append(None)
            if column is None:
                step.kind = NOTHING
                continue
            values = column.index if type(column) is Shared else column
            if len(values) != count:
                raise ValueError(f"a column has {len(values)} rows, not {count}")
            if type(column) is Shared:
                step.kind = SHARED
                index = values
                step.index = &index[0]
                memo = self.numbers_of(column.objects)
                step.memo = &memo[0]
                step.n_objects = len(column.objects)
                objects[i] = column.objects
            elif column.dtype.kind == "u":
                step.kind = UNSIGNED
                unsigned = objects[i] = np.ascontiguousarray(column, np.uint64)
                step.numbers = <const int64_t*>&unsigned[0]
            elif column.dtype.kind == "i":
                step.kind = SIGNED
                numbers = objects[i] = np.ascontiguousarray(column, np.int64)
                step.numbers = &numbers[0]
            else:
                raise TypeError(f"no column of integers: {column.dtype}")
        for row in range(count):
            self.reserve(MARGIN)
            if left == 0:
                self.put_byte(b"(")
                left = BATCH
            for i in range(n_steps):
                step = &steps[i]
                memcpy(self._buffer + self._used, step.fixed, step.n_fixed)
                self._used += step.n_fixed
                if step.kind == SIGNED:
                    self.put_int(step.numbers[row])
                elif step.kind == UNSIGNED:
                    self.put_uint(<uint64_t>step.numbers[row])
                elif step.kind == SHARED:
                    place = step.index[row]
                    if not 0 <= place < step.n_objects:
                        raise IndexError(f"row {row} names object {place}")
                    if step.memo[place] == UNWRITTEN:
                        # May flush; room for the rest of the row is made again.
                        step.memo[place] = self.put_shared(objects[i][place])
                        self.reserve(MARGIN)
                    else:
                        self.put_get(step.memo[place])
            left -= 1
            if left == 0 or row == count - 1:
                self.put_byte(b"e")
        return 0

    cdef int plan(self, table, list plan, rest) except -1:
        """Split a row into fixed bytes, each with the column that follows them."""
        rest += b"}("
        for key, column in table.items():
            rest += self.known(key)
            if type(column) is Shared or isinstance(column, np.ndarray):
                plan.append((bytes(rest), column))
                rest.clear()
            elif isinstance(column, Mapping):
                rest += b"]"
                self.plan(column, plan, rest)
                rest += b"a"
            else:
                rest += self.known(column)
        rest += b"u"
        return 0

    cdef numbers_of(self, list objects):
        """Return the memo numbers of a Shared's objects, UNWRITTEN for new ones."""
        numbers = self._numbers.get(id(objects))
        if numbers is None:
            numbers = np.empty(0, np.uint32)
            self._keep.append(objects)
        if len(numbers) < len(objects):
            grown = np.full(2 * len(objects), UNWRITTEN, np.uint32)
            grown[:len(numbers)] = numbers
            numbers = self._numbers[id(objects)] = grown
        return numbers

    cdef uint32_t put_shared(self, value) except? 0:
        """Put an object of a Shared for the first time; return its memo number."""
        if type(value) not in (str, list, dict):
            raise TypeError(f"no shared value: {value!r}")
        self.put(value)
        return self._memo[value if type(value) is str else id(value)]


cdef bytes _int(value):
    if 0 <= value <= 0xFF:
        return b"K" + struct.pack("<B", value)
    if 0 <= value <= 0xFFFF:
        return b"M" + struct.pack("<H", value)
    if INT32_MIN <= value <= INT32_MAX:
        return b"J" + struct.pack("<i", value)
    count = (value if value >= 0 else ~value).bit_length() // 8 + 1
    if count > 0xFF:
        raise OverflowError(f"an integer of {count} bytes")
    return bytes((0x8A, count)) + value.to_bytes(count, "little", signed=True)


cdef bytes _get(number):
    if number <= 0xFF:
        return b"h" + struct.pack("<B", number)
    return b"j" + struct.pack("<I", number)


cdef bytes _str(value):
    data = value.encode("utf-8", "surrogatepass")
    if len(data) <= 0xFF:
        return b"\x8c" + struct.pack("<B", len(data)) + data
    return b"X" + struct.pack("<I", len(data)) + data


def dump(value, write, *, first=(), on_rows=None):
    """Pickle a dict of plain objects and `Rows`.

    Parameters
    ----------
    value : dict of str
        Of dict, list, tuple, str, int, float, bool, None and `mlxmem.tables.Rows`.
        `pickle.load` returns what `mlxmem.tables.to_objects` makes of it.
    write : callable
        Gets each piece of the file as a memoryview, about 1 MiB, and must write all
        of it before it returns. Signals are handled between two pieces.
    first : sequence of str or tuple
        What rows often need: the first 256 objects of a file take the fewest bytes.
    on_rows : callable, optional
        Called with the number of rows after each table.

    Raises
    ------
    TypeError, ValueError, OverflowError
        `value` holds something else, or a table is malformed.
    OSError
        From `write`.
    """
    cdef _Writer writer = _Writer(write, on_rows)
    writer.put_bytes(b"\x80\x04}(")
    if first and value:
        # A value that the real one below replaces: no opcode that the viewer knows
        # removes an object again.
        writer.put(next(iter(value)))
        writer.put_bytes(b"](")
        for item in first:
            writer.put(item)
        writer.put_bytes(b"e")
    for key, item in value.items():
        writer.put(key)
        writer.put(item)
    writer.put_bytes(b"u.")
    writer.flush()
