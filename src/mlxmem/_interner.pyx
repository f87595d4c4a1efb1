# cython: language_level=3
# cython: boundscheck=False, wraparound=False, initializedcheck=False
# cython: cdivision=True, annotation_typing=False, embedsignature=True
"""The stack interner: equal Python stacks get the same 32-bit traceback id.

A stack is the innermost `MAX_FRAMES` frames as machine words (see frame_walk.h),
hashed with FNV-1a and looked up in an open addressing table. A hit allocates
nothing, counts no reference and makes no system call. Line numbers and names
are worked out when somebody reads them.

A stack can have a context: an id that the thread set before. Such a stack has an id
of its own, whose record names the stack's id and the context, so a context costs
some words and not the frames a second time.

Threads: every access to the table happens with the GIL held and without running
Python code halfway, so the GIL is the lock. This module does not declare that
it can do without: importing it in a free-threaded build turns the GIL back on.
Where the user forbids that (``PYTHON_GIL=0``), nothing is captured.
"""

import sys
from builtins import id as builtin_id
from operator import index as _index

from libc.stdint cimport UINT32_MAX, int64_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc, qsort, realloc
from libc.string cimport memcmp, memcpy, memset

from mlxmem.events import NO_CONTEXT, Context


cdef extern from "frame_walk.h" nogil:
    enum:
        FAST_WALK "MLXMEM_FAST_WALK"
        FRAMES_AT_MOST "MLXMEM_MAX_FRAMES"
        FRAME_WORDS "MLXMEM_FRAME_WORDS"
    int PY_VERSION_HEX
    ctypedef struct PyCodeObject:
        pass
    ctypedef struct PyThreadState:
        pass
    ctypedef struct Stack "mlxmem_stack":
        uint64_t hash
        int count
        uintptr_t* words        # arrays in C
        PyCodeObject** codes
    ctypedef struct PyInterpreterState:
        pass
    # Of the calling thread; 0 = none.
    uint32_t context "mlxmem_context"
    PyThreadState* attached_state "mlxmem_attached_state" ()
    PyThreadState* capturing_state "mlxmem_capturing_state" (
        const PyInterpreterState* owner)
    void walk_quick "mlxmem_walk_quick" (PyThreadState* state, Stack* stack)
    void walk_exact "mlxmem_walk_exact" (PyThreadState* state, Stack* stack)
    void walk_portable "mlxmem_walk_portable" (Stack* stack)
    int byte_offset "mlxmem_byte_offset" (
        PyCodeObject* code, const uintptr_t* words)
    uintptr_t benchmark_chase "mlxmem_benchmark_chase" (PyThreadState* state)
    PyInterpreterState* PyInterpreterState_Get()
    int PyCode_Addr2Line(PyCodeObject* code, int offset)
    void incref "Py_INCREF" (PyCodeObject* code)
    void decref "Py_DECREF" (PyCodeObject* code)


MAX_FRAMES = FRAMES_AT_MOST

cdef enum:
    FIRST_SLOTS = 1024
    FIRST_CODES = 256
    FIRST_STACKS = 512
    # Names can have numbers in them: what they may cost has an end.
    MOST_CONTEXTS = 1 << 16
    MOST_PAIRS = 1 << 22

# Hash, id and position stand together, so that a probe touches one cache line.
cdef struct Slot:
    uint64_t hash
    uint32_t id         # 0: the slot is empty
    uint32_t position   # of the stack's record in `pool`, in words

cdef struct Table:
    Slot* slots
    uint64_t slot_mask
    # A record is the number of frames, then the frames' words, innermost first. Or
    # it is 0 and a pair: the id of a stack, and in the high half its context.
    uintptr_t* pool
    uint64_t pool_used
    uint64_t pool_size
    # positions[id - base] is where the record of `id` begins.
    uint32_t* positions
    uint64_t count
    uint64_t pairs
    uint64_t positions_size
    uint64_t base
    # A set: each distinct code object once, with one reference.
    PyCodeObject** codes
    uint64_t code_mask
    uint64_t code_count
    # The same sorted by address, made when somebody reads.
    PyCodeObject** sorted_codes
    uint64_t sorted_count

cdef Table table
# What an empty table points at, so that a lookup needs no check for it.
cdef Slot empty_slot
cdef PyCodeObject* empty_code = NULL
memset(&empty_slot, 0, sizeof(Slot))
memset(&table, 0, sizeof(Table))
table.slots = &empty_slot
table.codes = &empty_code

# Ids go on through sessions, so that an old one can never mean a new stack.
cdef uint64_t next_id = 1
cdef uint64_t sessions = 0
cdef uint64_t hash_bits = ~<uint64_t>0
cdef uint64_t next_hash_bits = ~<uint64_t>0
cdef bint fast = False

# Code objects must not mix between interpreters: only the one that imported
# the module captures, and only after its first begin_session().
cdef PyInterpreterState* importer = PyInterpreterState_Get()
cdef PyInterpreterState* capturer = NULL

# Contexts by id, from first_context on, and the other way round. They outlive
# sessions, since threads may be inside them.
cdef uint32_t first_context = 1
cdef list contexts = []
cdef dict context_ids = {}

# Qualified names by id(code), for Python 3.10 alone; renewed by each session.
cdef dict names_310 = {}


# --- capture: with the GIL, without the Python API -------------------------


cdef uint32_t capture() noexcept nogil:
    cdef PyThreadState* state = capturing_state(capturer)
    cdef Stack stack
    cdef uint32_t id
    if state == NULL:
        return 0
    if not fast:
        id = capture_slowly(state)
    else:
        walk_quick(state, &stack)
        id = find(&stack)
        if id == 0:
            id = capture_slowly(state)
    if context != 0 and id != 0:
        return pair(id, context)
    return id


# Not known yet, or a stack whose quick walk shows frames that do not count.
cdef uint32_t capture_slowly(PyThreadState* state) noexcept nogil:
    cdef Stack stack
    cdef uint32_t id
    if fast:
        walk_exact(state, &stack)
    else:
        walk_portable(&stack)
    if stack.count == 0:
        return 0
    id = find(&stack)
    if id != 0:
        return id
    return add(&stack)


cdef inline uint32_t find(const Stack* stack) noexcept nogil:
    cdef uint64_t hash = stack.hash & hash_bits
    cdef uint64_t at = first_slot(hash) & table.slot_mask
    cdef Slot* slot
    cdef uintptr_t* record
    while True:
        slot = &table.slots[at]
        if slot.id == 0:
            return 0
        if slot.hash == hash:
            record = &table.pool[slot.position]
            if record[0] == <uintptr_t>stack.count and memcmp(
                record + 1, stack.words, words_size(stack.count)
            ) == 0:
                return slot.id
        at = (at + 1) & table.slot_mask


# Id of a stack in a context; the stack's own where there is no room for one more.
cdef uint32_t pair(uint32_t stack, uint32_t context) noexcept nogil:
    cdef uintptr_t word = stack | <uintptr_t>context << 32
    cdef uint64_t hash = word * <uint64_t>0x9E3779B97F4A7C15 & hash_bits
    cdef uint64_t at = first_slot(hash) & table.slot_mask
    cdef Slot* slot
    cdef uintptr_t* record
    cdef uint32_t id
    while True:
        slot = &table.slots[at]
        if slot.id == 0:
            break
        if slot.hash == hash:
            record = &table.pool[slot.position]
            if record[0] == 0 and record[1] == word:
                return slot.id
        at = (at + 1) & table.slot_mask
    if table.pairs == MOST_PAIRS or not reserve(1, 0):
        return stack
    id = new_record(hash, 0, &word, 1)
    table.pairs += 1
    return id


cdef inline uint64_t first_slot(uint64_t hash) noexcept nogil:
    # The low bits of a product depend on low bits only: mix in the high ones.
    return hash ^ (hash >> 32)


cdef inline size_t words_size(int frames) noexcept nogil:
    return frames * FRAME_WORDS * sizeof(uintptr_t)


cdef uint32_t add(const Stack* stack) noexcept nogil:
    cdef uint32_t id
    cdef int i
    # Everything that can fail comes first: a stack is there whole or not at all.
    if not reserve(stack.count * FRAME_WORDS, stack.count):
        return 0
    id = new_record(
        stack.hash & hash_bits,
        stack.count,
        stack.words,
        stack.count * FRAME_WORDS,
    )
    for i in range(stack.count):
        own(stack.codes[i])
    return id


# Room must have been reserved.
cdef uint32_t new_record(
    uint64_t hash, uintptr_t head, const uintptr_t* words, int n
) noexcept nogil:
    global next_id
    cdef uint64_t at = free_slot(table.slots, table.slot_mask, hash)
    cdef uint32_t id = <uint32_t>next_id
    next_id += 1
    table.slots[at].hash = hash
    table.slots[at].id = id
    table.slots[at].position = <uint32_t>table.pool_used
    table.positions[table.count] = <uint32_t>table.pool_used
    table.count += 1
    table.pool[table.pool_used] = head
    memcpy(&table.pool[table.pool_used + 1], words, n * sizeof(uintptr_t))
    table.pool_used += 1 + n
    return id


cdef uint64_t free_slot(
    Slot* slots, uint64_t mask, uint64_t hash
) noexcept nogil:
    cdef uint64_t at = first_slot(hash) & mask
    while slots[at].id != 0:
        at = (at + 1) & mask
    return at


cdef uint64_t code_place(
    PyCodeObject** codes, uint64_t mask, PyCodeObject* code
) noexcept nogil:
    cdef uint64_t at = <uint64_t><uintptr_t>code * <uint64_t>0x9E3779B97F4A7C15
    at = (at >> 32) & mask
    while codes[at] != NULL and codes[at] != code:
        at = (at + 1) & mask
    return at


cdef void own(PyCodeObject* code) noexcept nogil:
    cdef uint64_t at = code_place(table.codes, table.code_mask, code)
    if table.codes[at] == NULL:
        incref(code)
        table.codes[at] = code
        table.code_count += 1


cdef bint reserve(int words, int codes) noexcept nogil:
    """Make room for one more record; False, and nothing changed, without memory."""
    cdef uint64_t needed = table.pool_used + 1 + words
    cdef uint64_t size
    cdef void* grown
    if next_id > UINT32_MAX or needed > UINT32_MAX:
        return False
    if needed > table.pool_size:
        size = table.pool_size + table.pool_size // 2 + FIRST_STACKS * 8
        grown = realloc(table.pool, size * sizeof(uintptr_t))
        if grown == NULL:
            return False
        table.pool = <uintptr_t*>grown
        table.pool_size = size
    if table.count == table.positions_size:
        size = table.positions_size + table.positions_size // 2 + FIRST_STACKS
        grown = realloc(table.positions, size * sizeof(uint32_t))
        if grown == NULL:
            return False
        table.positions = <uint32_t*>grown
        table.positions_size = size
    # At most two thirds full; the static empty slot has mask 0.
    if (table.count + 1) * 3 > (table.slot_mask + 1) * 2 or table.slot_mask == 0:
        if not grow_slots():
            return False
    if codes and (table.code_count + codes) * 2 > table.code_mask + 1:
        return grow_codes()
    return True


cdef bint grow_slots() noexcept nogil:
    cdef uint64_t size = (
        FIRST_SLOTS if table.slot_mask == 0 else (table.slot_mask + 1) * 2
    )
    cdef Slot* slots = <Slot*>calloc(size, sizeof(Slot))
    cdef uint64_t i
    if slots == NULL:
        return False
    for i in range(table.slot_mask + 1):
        if table.slots[i].id != 0:
            slots[free_slot(slots, size - 1, table.slots[i].hash)] = table.slots[i]
    if table.slots != &empty_slot:
        free(table.slots)
    table.slots = slots
    table.slot_mask = size - 1
    return True


cdef bint grow_codes() noexcept nogil:
    cdef uint64_t size = (
        FIRST_CODES if table.code_mask == 0 else (table.code_mask + 1) * 2
    )
    cdef PyCodeObject** codes = <PyCodeObject**>calloc(size, sizeof(void*))
    cdef PyCodeObject* code
    cdef uint64_t i
    if codes == NULL:
        return False
    for i in range(table.code_mask + 1):
        code = table.codes[i]
        if code != NULL:
            codes[code_place(codes, size - 1, code)] = code
    if table.codes != &empty_code:
        free(table.codes)
    table.codes = codes
    table.code_mask = size - 1
    return True


# --- sessions ---------------------------------------------------------------


def begin_session() -> int:
    """Forget all stacks and start to capture.

    Ids of earlier sessions never resolve again and are never used again. The
    references to code objects are dropped.

    Returns
    -------
    int
        How many sessions have begun in this process, this one included.
    """
    global table, sessions, capturer, names_310, hash_bits, fast
    global first_context, contexts, context_ids
    cdef Table old
    cdef uint64_t begun
    cdef uint64_t i
    cdef bint agrees = walks_agree()
    # Free-threaded with the GIL forced off: the table would have no lock.
    gil_enabled = getattr(sys, "_is_gil_enabled", None)
    cdef bint locked = gil_enabled is None or gil_enabled()
    old_names = names_310
    names_310 = {}
    # Half full: better forget them now than have no room in this session. A thread
    # that is inside one has none until it sets the next.
    old_contexts = contexts
    if len(contexts) * 2 > MOST_CONTEXTS:
        first_context += <uint32_t>len(contexts)
        contexts = []
        context_ids = {}
    # Nothing between here and the end of the new table runs Python code.
    old = table
    memset(&table, 0, sizeof(Table))
    table.slots = &empty_slot
    table.codes = &empty_code
    table.base = next_id
    hash_bits = next_hash_bits
    fast = agrees
    capturer = importer if locked else NULL
    sessions += 1
    begun = sessions
    # The last reference to a code object can run anything, also a capture or
    # another begin_session(): the old table is out of reach by now.
    if old.codes != &empty_code:
        for i in range(old.code_mask + 1):
            if old.codes[i] != NULL:
                decref(old.codes[i])
        free(old.codes)
    if old.slots != &empty_slot:
        free(old.slots)
    free(old.pool)
    free(old.positions)
    free(old.sorted_codes)
    del old_names, old_contexts
    return begun


def session_number() -> int:
    """How many sessions have begun in this process, or in the one it was forked from."""
    return sessions


cdef bint walks_agree():
    """Whether the fast walk sees what the interpreter's own API sees here."""
    cdef Stack seen
    cdef Stack expected
    if not FAST_WALK:
        return False
    walk_portable(&expected)
    walk_exact(attached_state(), &seen)
    return (
        seen.count == expected.count
        and seen.hash == expected.hash
        and memcmp(seen.words, expected.words, words_size(seen.count)) == 0
        and memcmp(seen.codes, expected.codes, seen.count * sizeof(void*)) == 0
    )


# --- what Python sees -------------------------------------------------------


def capture_traceback() -> int:
    """Id of the calling Python stack, its innermost `MAX_FRAMES` frames.

    Returns
    -------
    int
        The same for an equal stack (same code objects at the same
        instructions); 0 before the first `begin_session`, in an interpreter
        that did not import the module, and when there is no room for one more.
    """
    return capture()


def capture_func_address() -> int:
    """Address of ``uint32_t capture(void)``.

    It may be called on any thread, with or without the GIL, which it never
    takes: 0 where the calling thread does not hold it.
    """
    return <uintptr_t><void*>&capture


def resolve_traceback(id):
    """Frames of a traceback id.

    Parameters
    ----------
    id : int
        What `capture_traceback` or the C function returned.

    Returns
    -------
    list of (str, str, int), or None
        File name, qualified name and line of each frame, outermost first, so
        the frame that captured is the last. The line is 0 where the instruction
        has none. None for 0, for unknown ids and for those of earlier sessions.

    Raises
    ------
    TypeError
        When `id` is not an integer.

    Notes
    -----
    Python 3.10 has no ``co_qualname``. There the name is looked for when it is
    first read: see `_qualnames_310.find_names`.
    """
    cdef Stack stack
    cdef int line
    cdef int i
    try:
        number = _index(id)
    except TypeError:
        raise TypeError(f"id must be an integer, not {id!r}") from None
    if not 0 < number <= UINT32_MAX:
        return None
    if not look_up(number, &stack):
        raise MemoryError("no memory to resolve a traceback")
    if stack.count == 0:
        return None
    # From here on Python code may run and begin another session; the frames and
    # a reference to each code object are ours.
    try:
        names = names_310
        if PY_VERSION_HEX < 0x030B0000:
            from mlxmem._qualnames_310 import find_names

            wanted = [<object>stack.codes[i] for i in range(stack.count)]
            if any(builtin_id(code) not in names for code in wanted):
                find_names(wanted + owned_codes(), names)
        found = []
        for i in range(stack.count - 1, -1, -1):
            code = <object>stack.codes[i]
            if PY_VERSION_HEX < 0x030B0000:
                name = names[builtin_id(code)]
            else:
                name = code.co_qualname
            line = PyCode_Addr2Line(
                stack.codes[i],
                byte_offset(stack.codes[i], &stack.words[i * FRAME_WORDS]),
            )
            found.append((code.co_filename, name, line if line > 0 else 0))
        return found
    finally:
        for i in range(stack.count):
            decref(stack.codes[i])


# --- contexts ---------------------------------------------------------------


def intern_context(wanted) -> int:
    """Id of a context, for `set_context`.

    Parameters
    ----------
    wanted : Context
        Or the plain tuple that equals it, which is faster made.

    Returns
    -------
    int
        The same for an equal context, until a session begins; 0 for `NO_CONTEXT` and
        when there are 65,536 others.
    """
    found = context_ids.get(wanted)
    if found is not None:
        return found
    if wanted == NO_CONTEXT or len(contexts) >= MOST_CONTEXTS:
        return 0
    if first_context + <uint64_t>len(contexts) > UINT32_MAX:
        return 0
    id = first_context + len(contexts)
    contexts.append(Context(*wanted))
    context_ids[wanted] = id
    return id


def set_context(uint32_t id) -> int:
    """Let the calling thread's captures from now on be in a context.

    Parameters
    ----------
    id : int
        What `intern_context` returned; 0 = none.

    Returns
    -------
    int
        The thread's context before.
    """
    global context
    cdef uint32_t old = context
    context = id
    return old


def resolve_context(id):
    """Context of a traceback id.

    Parameters
    ----------
    id : int
        What `capture_traceback` or the C function returned.

    Returns
    -------
    Context
        `NO_CONTEXT` for 0, for unknown ids and for those of earlier sessions.
    """
    cdef uint64_t number
    cdef uintptr_t* record
    cdef uint64_t at
    if not 0 < id <= UINT32_MAX:
        return NO_CONTEXT
    number = id
    if number < table.base or number - table.base >= table.count:
        return NO_CONTEXT
    record = &table.pool[table.positions[number - table.base]]
    if record[0] != 0 or record[1] >> 32 < first_context:
        return NO_CONTEXT
    at = (record[1] >> 32) - first_context
    return contexts[at] if at < <uint64_t>len(contexts) else NO_CONTEXT


def interner_stats() -> dict:
    """Size of the current session's table.

    Returns
    -------
    dict of str to int
        ``tracebacks``: distinct stacks; ``pairs``: stacks in a context, each counted
        once for each of its contexts; ``frames``: frames stored, of all
        stacks; ``codes``: distinct code objects, each held by one reference;
        ``bytes``: memory that the table has reserved.
    """
    cdef uint64_t size = 0
    if table.slots != &empty_slot:
        size += (table.slot_mask + 1) * sizeof(Slot)
    if table.codes != &empty_code:
        size += (table.code_mask + 1) * sizeof(void*)
    size += table.pool_size * sizeof(uintptr_t)
    size += table.positions_size * sizeof(uint32_t)
    size += table.sorted_count * sizeof(void*)
    return {
        "tracebacks": table.count - table.pairs,
        "pairs": table.pairs,
        "frames": (table.pool_used - table.count - table.pairs) // FRAME_WORDS,
        "bytes": size,
        "codes": table.code_count,
    }


# Frames of `id` with a new reference to each code object, none if there is no
# such stack; False without memory. Runs no Python code.
cdef bint look_up(uint64_t id, Stack* stack) noexcept:
    cdef uintptr_t* record
    cdef int i
    stack.count = 0
    if id < table.base or id - table.base >= table.count:
        return True
    if FRAME_WORDS == 1 and not sort_codes():
        return False
    record = &table.pool[table.positions[id - table.base]]
    if record[0] == 0:
        id = record[1] & UINT32_MAX
        record = &table.pool[table.positions[id - table.base]]
    stack.count = <int>record[0]
    memcpy(stack.words, record + 1, words_size(stack.count))
    for i in range(stack.count):
        if FRAME_WORDS == 1:
            stack.codes[i] = code_around(stack.words[i])
        else:
            stack.codes[i] = <PyCodeObject*>stack.words[i * FRAME_WORDS]
        incref(stack.codes[i])
    return True


cdef int by_address(const void* left, const void* right) noexcept nogil:
    cdef uintptr_t a = (<uintptr_t*>left)[0]
    cdef uintptr_t b = (<uintptr_t*>right)[0]
    return (a > b) - (a < b)


cdef bint sort_codes() noexcept:
    cdef PyCodeObject** codes
    cdef uint64_t at = 0
    cdef uint64_t i
    if table.sorted_count == table.code_count:
        return True
    codes = <PyCodeObject**>realloc(
        table.sorted_codes, table.code_count * sizeof(void*)
    )
    if codes == NULL:
        return False
    for i in range(table.code_mask + 1):
        if table.codes[i] != NULL:
            codes[at] = table.codes[i]
            at += 1
    qsort(codes, at, sizeof(void*), by_address)
    table.sorted_codes = codes
    table.sorted_count = at
    return True


# The code object that an instruction lies in: the last one that begins before
# it. Its code object is in the set, and code objects do not overlap.
cdef PyCodeObject* code_around(uintptr_t instruction) noexcept:
    cdef uint64_t low = 0
    cdef uint64_t high = table.sorted_count
    cdef uint64_t middle
    while high - low > 1:
        middle = (low + high) // 2
        if <uintptr_t>table.sorted_codes[middle] <= instruction:
            low = middle
        else:
            high = middle
    return table.sorted_codes[low]


# --- Python 3.10: qualified names -------------------------------------------


cdef list owned_codes():
    # Making the list can run Python code, so the set is copied before.
    cdef uint64_t count = table.code_count
    cdef PyCodeObject** codes = <PyCodeObject**>malloc(
        (count + 1) * sizeof(void*)
    )
    cdef uint64_t at = 0
    cdef uint64_t i
    if codes == NULL:
        raise MemoryError("no memory to resolve a traceback")
    for i in range(table.code_mask + 1):
        if table.codes[i] != NULL:
            incref(table.codes[i])
            codes[at] = table.codes[i]
            at += 1
    try:
        return [<object>codes[i] for i in range(count)]
    finally:
        for i in range(count):
            decref(codes[i])
        free(codes)



# --- for tests and benchmarks -----------------------------------------------


def _walks_fast() -> bool:
    """Whether this session reads the frame chain itself."""
    return fast


def _walk(portable) -> list:
    """(code, byte offset) of the calling frames, innermost first, not interned."""
    cdef Stack stack
    cdef int i
    if portable:
        walk_portable(&stack)
    else:
        walk_exact(attached_state(), &stack)
    return [
        (
            <object>stack.codes[i],
            byte_offset(stack.codes[i], &stack.words[i * FRAME_WORDS]),
        )
        for i in range(stack.count)
    ]


def _weaken_hash(bits) -> None:
    """Let the next session use that many bits of the hash, so that stacks collide."""
    global next_hash_bits
    next_hash_bits = (1 << bits) - 1


def _skip_ids(id) -> None:
    """Let the next session begin at `id`, if that is further on."""
    global next_id
    if table.count:
        raise RuntimeError("ids can be skipped only before the first capture")
    if not next_id <= id <= 1 << 32:
        raise ValueError(f"id must be from {next_id} to 2**32, not {id}")
    next_id = id
    table.base = id


def _time_captures(n) -> float:
    """Seconds that `n` captures of the calling stack take."""
    from time import perf_counter

    # Through a pointer, as the recorder calls it.
    cdef CaptureFunc function = capture
    cdef int64_t left = n
    begin = perf_counter()
    while left > 0:
        function()
        left -= 1
    return perf_counter() - begin


def _time_pointer_chase(n) -> float:
    """Seconds that `n` walks take which follow the frame chain and read nothing."""
    from time import perf_counter

    cdef uintptr_t sum = 0
    cdef int64_t left = n
    begin = perf_counter()
    while left > 0:
        sum += benchmark_chase(attached_state())
        left -= 1
    elapsed = perf_counter() - begin
    return elapsed if sum else 0.0
