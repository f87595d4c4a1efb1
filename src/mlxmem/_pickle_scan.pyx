# cython: language_level=3
# cython: boundscheck=False, wraparound=False, initializedcheck=False
"""A look through a pickle before it is loaded: nothing but plain data may be in it.

Snapshots hold dicts, lists, tuples, strings, numbers, booleans and None. The opcodes
that make these, of protocols 2 to 5, are let through; one that names a class or calls
anything ends the scan. So do sizes and memo numbers that a small file could use to ask
for all memory. The format is described in CPython's Lib/pickletools.py.
"""

from libc.stdint cimport uint8_t, uint32_t, uint64_t

# What is wrong, and where: 0 is fine.
cdef enum:
    FINE = 0
    TRUNCATED = 1
    RUNS_CODE = 2
    NOT_DATA = 3
    NO_PICKLE = 4
    BAD_MEMO = 5


cdef uint64_t little_endian(const uint8_t* data, int bytes) noexcept nogil:
    cdef uint64_t value = 0
    cdef int i
    for i in range(bytes):
        value |= <uint64_t>data[i] << (8 * i)
    return value


cdef int scan_bytes(
    const uint8_t* data, uint64_t size, uint64_t* where
) noexcept nogil:
    cdef uint64_t at = 0
    cdef uint64_t memo = 0  # how many objects were memoized
    cdef uint64_t extent
    cdef uint8_t op
    if size < 2 or data[0] != 0x80 or data[1] > 5 or data[1] < 2:
        where[0] = 0
        return NO_PICKLE
    while at < size:
        where[0] = at
        op = data[at]
        at += 1
        extent = 0
        if op == b".":
            return FINE
        # Containers, their ends, None, booleans.
        elif op in (
            b"}", b"]", b")", b"(", b"u", b"s", b"e", b"a", b"t", b"N",
            0x85, 0x86, 0x87, 0x88, 0x89,
        ):
            continue
        elif op == 0x94:  # memoize
            memo += 1
            continue
        elif op == b"q" or op == b"h" or op == b"K" or op == 0x80:
            extent = 1
        elif op == b"M":
            extent = 2
        elif op == b"r" or op == b"j" or op == b"J":
            extent = 4
        elif op == b"G" or op == 0x95:  # float; frame
            extent = 8
        elif op == 0x8C or op == 0x8A:  # short string; integer
            if at + 1 > size:
                return TRUNCATED
            extent = 1 + data[at]
        elif op == b"X":
            if at + 4 > size:
                return TRUNCATED
            extent = 4 + little_endian(data + at, 4)
        elif op == 0x8D:
            if at + 8 > size:
                return TRUNCATED
            extent = little_endian(data + at, 8)
            if extent > size:
                return TRUNCATED
            extent += 8
        elif op in (
            b"c", b"R", b"i", b"o", b"b", b"P", b"Q",
            0x81, 0x82, 0x83, 0x84, 0x92, 0x93,
        ):
            return RUNS_CODE
        else:
            return NOT_DATA
        if extent > size - at:
            return TRUNCATED
        if op == b"q" or op == b"r":
            # Picklers number one by one; a jump would make a table of that size.
            if little_endian(data + at, <int>extent) > memo:
                return BAD_MEMO
            memo += 1
        at += extent
    where[0] = size
    return TRUNCATED


_REASONS = {
    TRUNCATED: "it ends in the middle",
    RUNS_CODE: "it wants to run code, which a snapshot never needs",
    NOT_DATA: "it holds something else than plain data",
    NO_PICKLE: "it is no pickle of protocol 2 to 5",
    BAD_MEMO: "it asks for more memory than its size allows",
}


def scan(data):
    """Return what is wrong with a pickle as (reason, offset), None if nothing is.

    Parameters
    ----------
    data : bytes-like
        The whole file.

    Returns
    -------
    tuple of (str, int) or None
        The reason in words, and the offset of the opcode, in bytes.
    """
    cdef const uint8_t[::1] view
    cdef uint64_t where = 0
    cdef int found
    if not len(data):
        return _REASONS[TRUNCATED], 0
    view = data
    with nogil:
        found = scan_bytes(&view[0], <uint64_t>view.shape[0], &where)
    return None if found == FINE else (_REASONS[found], where)
