"""The native hook: what csrc/hook_api.h offers, with Python's types and errors."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlxmem.errors import UnsupportedMLXError
from mlxmem.events import (
    RAW_BUFFER,
    RAW_CACHED,
    RAW_EVENT,
    RAW_NODE,
    RAW_NODE_SAMPLE,
    AllocatorTimes,
    Nodes,
    Records,
)

VERSIONS_KNOWN_TO_WORK = "0.30.6, 0.31.2, 0.32.1 and 0.32.4"

_OK, _UNSUPPORTED, _NO_MEMORY = 0, 1, 2


# A failed allocation; the fields of OutOfMemory.
RAW_FAILURE = np.dtype(
    [
        ("at", "u8"),
        ("timestamp_us", "i8"),
        ("size", "u8"),
        ("free", "i8"),
        ("active", "u8"),
        ("cache", "u8"),
        ("traceback_id", "u4"),
        ("stream", "i4"),
        ("thread_id", "u4"),
        ("primitive_id", "u2"),
        ("reserved", "u2"),
        ("message", "S128"),
    ]
)
_MOST_FAILURES = 64
# A change of one of MLX's limits, of which 0 is the cache's and 1 the memory's; bytes.
RAW_LIMIT_CHANGE = np.dtype(
    [
        ("at", "u8"),
        ("timestamp_us", "i8"),
        ("previous", "u8"),
        ("value", "u8"),
        ("thread_id", "u4"),
        ("which", "u4"),
    ]
)
_MOST_LIMIT_CHANGES = 10_000
_FACT_VISITOR = ctypes.CFUNCTYPE(None, *[ctypes.c_char_p] * 4, ctypes.c_int)
_PATCH_VISITOR = ctypes.CFUNCTYPE(None, *[ctypes.c_char_p] * 2, ctypes.c_uint64)
_FAILURE_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_failure_handler: Callable[[], None] | None = None
_c_failure_handler: Any = None


class _Totals(ctypes.Structure):
    _fields_ = [
        ("active", ctypes.c_uint64),
        ("cache", ctypes.c_uint64),
        ("peak", ctypes.c_uint64),
        ("active_at_enable", ctypes.c_uint64),
        ("cache_at_enable", ctypes.c_uint64),
        ("peak_at_enable", ctypes.c_uint64),
        ("start_us", ctypes.c_int64),
        ("events", ctypes.c_uint64),
        ("dropped", ctypes.c_uint64),
        ("max_entries", ctypes.c_uint64),
        ("live_buffers", ctypes.c_uint64),
        ("allocations", ctypes.c_uint64),
        ("reuses", ctypes.c_uint64),
        ("frees", ctypes.c_uint64),
        ("unexplained", ctypes.c_uint64),
    ]
    names = tuple(field[0] for field in _fields_)


class _Copy(ctypes.Structure):
    _fields_ = [
        ("totals", _Totals),
        ("n_events", ctypes.c_uint64),
        ("events", ctypes.c_void_p),
        ("n_buffers", ctypes.c_uint64),
        ("buffers", ctypes.c_void_p),
        ("owner", ctypes.c_void_p),
    ]


class _Nodes(ctypes.Structure):
    _fields_ = [
        ("n_live", ctypes.c_uint64),
        ("live", ctypes.c_void_p),
        ("n_samples", ctypes.c_uint64),
        ("samples", ctypes.c_void_p),
        ("owner", ctypes.c_void_p),
    ]


class _Times(ctypes.Structure):
    _fields_ = [
        ("new", ctypes.c_uint64),
        ("new_ns", ctypes.c_uint64),
        ("reused", ctypes.c_uint64),
        ("reused_ns", ctypes.c_uint64),
    ]


class _Metal(ctypes.Structure):
    _fields_ = [
        ("gc_limit", ctypes.c_uint64),
        ("wired_limit", ctypes.c_uint64),
        ("resources", ctypes.c_uint64),
        ("resource_limit", ctypes.c_uint64),
    ]
    names = tuple(field[0] for field in _fields_)


class _Word(ctypes.Structure):
    _fields_ = [
        ("address", ctypes.c_uint64),
        ("original", ctypes.c_uint64),
        ("replacement", ctypes.c_uint64),
    ]


@dataclass(frozen=True)
class Fact:
    """A fact about the running MLX that attach() relies on."""

    group: str  # what it is about
    text: str
    found: str  # an address, a name, a number; may be empty
    otherwise: str  # what is said of it where it does not hold
    holds: bool


@dataclass(frozen=True)
class PatchedWords:
    """Words of one kind in one library that attach() changes."""

    what: str
    library: str  # its path; "" for memory that is no library's
    count: int


@dataclass(frozen=True)
class Check:
    """What attach() checks and changes, or would."""

    facts: list[Fact]  # up to the first one that does not hold
    patches: list[PatchedWords]  # none when one does not hold
    refusal: str  # what attach() says; "" where it works


@dataclass(frozen=True)
class Totals:
    """The session's totals by the books. Bytes, microseconds and counts.

    `unexplained` counts bytes by which MLX's counters moved without a call that the
    probes saw: 0 unless something is wrong. Calls that were under way when the session
    began belong to its start.
    """

    active: int
    cache: int
    peak: int
    active_at_enable: int
    cache_at_enable: int
    peak_at_enable: int
    start_us: int
    events: int
    dropped: int
    max_entries: int
    live_buffers: int
    allocations: int
    reuses: int
    frees: int
    unexplained: int


def _load() -> ctypes.CDLL:
    spec = importlib.util.find_spec("mlxmem._native")
    if spec is None or spec.origin is None:
        raise ImportError(
            "mlxmem's native library is missing; install the package (pip install .) "
            "rather than importing it from its source folder"
        )
    # CDLL releases the GIL around each call: the hook's locks are never waited for
    # with the GIL held.
    library = ctypes.CDLL(spec.origin)
    text = [ctypes.c_char_p, ctypes.c_size_t]
    for name, result, arguments in (
        ("attach", ctypes.c_int, text),
        ("check", ctypes.c_int, [_FACT_VISITOR, _PATCH_VISITOR, *text]),
        ("detach", ctypes.c_int, text),
        ("start_session", None, [ctypes.c_uint64]),
        ("stop_session", None, []),
        ("is_enabled", ctypes.c_int, []),
        ("ran_out_of_memory", ctypes.c_int, []),
        (
            "position",
            None,
            [ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_int64)],
        ),
        ("set_traceback_capture_func", None, [ctypes.c_void_p]),
        ("set_traceback_tracking", None, [ctypes.c_int]),
        ("copy_session", ctypes.c_int, [ctypes.c_int, ctypes.POINTER(_Copy)]),
        ("free_copy", None, [ctypes.POINTER(_Copy)]),
        ("copy_nodes", ctypes.c_int, [ctypes.POINTER(_Nodes)]),
        ("free_nodes", None, [ctypes.POINTER(_Nodes)]),
        ("copy_failures", ctypes.c_size_t, [ctypes.c_void_p, ctypes.c_size_t]),
        ("copy_limit_changes", ctypes.c_size_t, [ctypes.c_void_p, ctypes.c_size_t]),
        ("limits_at_start", None, [ctypes.POINTER(ctypes.c_int64)] * 2),
        (
            "cache_at_start",
            ctypes.c_int,
            [ctypes.c_void_p, ctypes.c_size_t, ctypes.POINTER(ctypes.c_size_t)],
        ),
        ("allocator_times", ctypes.c_int, [ctypes.POINTER(_Times)]),
        ("set_failure_handler", None, [ctypes.c_void_p] * 3),
        ("primitive_name", ctypes.c_char_p, [ctypes.c_uint32]),
        ("attach_new_images", ctypes.c_int64, text),
        (
            "patched_words",
            ctypes.c_size_t,
            [ctypes.POINTER(_Word), ctypes.c_size_t],
        ),
        ("backend", None, text),
        ("cache_limit", ctypes.c_int64, []),
        ("metal_resources", ctypes.c_int, [ctypes.POINTER(_Metal)]),
    ):
        function = getattr(library, f"mlxmem_{name}")
        function.restype, function.argtypes = result, arguments
    return library


_native = _load()


def known_to_work() -> str:
    """Return a clause that says with which versions of MLX mlxmem works."""
    if sys.platform == "darwin":
        return (
            f"For MLX {VERSIONS_KNOWN_TO_WORK} on macOS mlxmem is built and statically "
            "verified, not yet run on a Mac"
        )
    return f"MLX {VERSIONS_KNOWN_TO_WORK} on Linux are known to work"


def attach(mlx_version: str) -> None:
    """Check the running MLX and put the probes in; no effect when they are in.

    Raises
    ------
    UnsupportedMLXError
        A fact about MLX's binary interface does not hold. Nothing was changed.
    MemoryError
    """
    message = ctypes.create_string_buffer(1024)
    status = _native.mlxmem_attach(message, len(message))
    if status == _NO_MEMORY:
        raise MemoryError("mlxmem cannot attach to MLX")
    if status != _OK:
        raise UnsupportedMLXError(
            f"mlxmem cannot record this MLX ({mlx_version}): {_text(message)}. "
            f"Nothing was changed. {known_to_work()}; install one of these or a newer "
            "mlxmem. Please report this with the output of `mlxmem doctor`."
        )


def check(on_fact: Callable[[Fact], None] | None = None) -> Check:
    """Check the running MLX as attach() does, and change nothing.

    While the probes are in, this is what attach() found and what it changed.

    Parameters
    ----------
    on_fact : callable, optional
        Called with each fact as soon as it was checked; may call nothing of this
        module.

    Raises
    ------
    MemoryError
    """
    facts: list[Fact] = []
    patches: list[PatchedWords] = []

    def add_fact(
        group: bytes, text: bytes, found: bytes, otherwise: bytes, holds: int
    ) -> None:
        fact = Fact(
            _decoded(group),
            _decoded(text),
            _decoded(found),
            _decoded(otherwise),
            bool(holds),
        )
        facts.append(fact)
        if on_fact is not None:
            on_fact(fact)

    def add_patch(what: bytes, image: bytes, count: int) -> None:
        patches.append(PatchedWords(_decoded(what), _decoded(image), count))

    message = ctypes.create_string_buffer(1024)
    status = _native.mlxmem_check(
        _FACT_VISITOR(add_fact), _PATCH_VISITOR(add_patch), message, len(message)
    )
    if status == _NO_MEMORY:
        raise MemoryError("mlxmem cannot check MLX")
    return Check(facts, patches, _text(message))


def detach() -> None:
    """Restore every word that attach() changed.

    Raises
    ------
    RuntimeError
        Somebody else changed one of these words meanwhile; it was left alone.
    """
    message = ctypes.create_string_buffer(1024)
    status = _native.mlxmem_detach(message, len(message))
    if status == _NO_MEMORY:
        raise MemoryError("mlxmem cannot detach from MLX")
    if status != _OK:
        raise RuntimeError(
            "mlxmem could not restore everything, since another tool changed it after "
            f"enable(): {_text(message)}"
        )


def start_session(max_entries: int) -> None:
    """Begin a session; forgets the events of the last one. 0 = unlimited."""
    _native.mlxmem_start_session(max_entries)


def stop_session() -> None:
    """End the session and keep its events."""
    _native.mlxmem_stop_session()


def is_enabled() -> bool:
    """Tell whether a session is recording in this process."""
    return bool(_native.mlxmem_is_enabled())


def ran_out_of_memory() -> bool:
    """Tell whether the last session ended because its log could not grow."""
    return bool(_native.mlxmem_ran_out_of_memory())


def position() -> tuple[int, int]:
    """Return where the running session stands, or where the last one ended.

    Returns
    -------
    events : int
        How many were recorded, dropped ones included: the number of the next one.
    us : int
        Microseconds since the session began. No later event has an earlier time.

    Threads are numbered as by `threading.get_native_id()`.
    """
    events, us = ctypes.c_uint64(), ctypes.c_int64()
    try:
        _native.mlxmem_position(ctypes.byref(events), ctypes.byref(us))
    except ctypes.ArgumentError:
        # ctypes turns any error of its own checks into this; with these arguments
        # there is one only, and programs handle it.
        raise RecursionError("maximum recursion depth exceeded") from None
    return events.value, us.value


def set_traceback_capture_func(address: int) -> None:
    """Set the C function `uint32_t (*)(void)` that captures a Python stack.

    It is called on any thread and returns 0 where the GIL is not held.
    """
    _native.mlxmem_set_traceback_capture_func(address)


def set_traceback_tracking(tracking: bool) -> None:
    """Choose whether the capture function is called."""
    _native.mlxmem_set_traceback_tracking(tracking)


def totals() -> Totals:
    """Return the totals of the running or last session."""
    return copy_session(with_events=False)[0]


def copy_session(with_events: bool = True) -> tuple[Totals, Records, Records]:
    """Copy the running or last session as it is now.

    Returns
    -------
    totals : Totals
    events : ndarray of RAW_EVENT, shape (n,)
        Oldest first; empty without `with_events`.
    buffers : ndarray of RAW_BUFFER, shape (m,)
        Buffers that are there now and whose last event is no longer retained.

    Raises
    ------
    MemoryError
    """
    copy = _Copy()
    if _native.mlxmem_copy_session(with_events, ctypes.byref(copy)) != _OK:
        raise MemoryError("the recorded events do not fit into memory a second time")
    try:
        return (
            Totals(*(getattr(copy.totals, name) for name in _Totals.names)),
            _records(copy.events, copy.n_events, RAW_EVENT),
            _records(copy.buffers, copy.n_buffers, RAW_BUFFER),
        )
    finally:
        _native.mlxmem_free_copy(ctypes.byref(copy))


def copy_nodes() -> Nodes | None:
    """Return the session's live array nodes, now or when it ended.

    Nodes that were made before enable() are not counted. While arrays come and go, a
    node that goes is left out.

    Returns
    -------
    Nodes or None
        None without a session, and where the system lets nobody read the process's
        memory safely.

    Raises
    ------
    MemoryError
    """
    nodes = _Nodes()
    if _native.mlxmem_copy_nodes(ctypes.byref(nodes)) != _OK:
        raise MemoryError("the list of array nodes does not fit into memory")
    if not nodes.owner:
        return None
    try:
        return Nodes(
            live=_records(nodes.live, nodes.n_live, RAW_NODE),
            samples=_records(nodes.samples, nodes.n_samples, RAW_NODE_SAMPLE),
        )
    finally:
        _native.mlxmem_free_nodes(ctypes.byref(nodes))


def copy_failures() -> Records:
    """Return the last failed allocations of the session, oldest first.

    Returns
    -------
    ndarray of RAW_FAILURE, shape (n,)
    """
    failures = np.zeros(_MOST_FAILURES, RAW_FAILURE)
    n = _native.mlxmem_copy_failures(failures.ctypes.data, len(failures))
    return failures[: min(n, len(failures))]


def limit_changes() -> Records:
    """Return the last changes of MLX's limits in the session, oldest first.

    They are seen by value at each allocation and free, and whenever the session is
    asked for its position or its events. So they are seen whoever makes them, by a
    thread that need not be theirs; a limit that is set and set back in between is not.
    No change lies after the events of the buffers that it made the cache return.

    Returns
    -------
    ndarray of RAW_LIMIT_CHANGE, shape (n,)
        Empty where MLX does not show its limits.
    """
    changes = np.zeros(_MOST_LIMIT_CHANGES, RAW_LIMIT_CHANGE)
    n = _native.mlxmem_copy_limit_changes(changes.ctypes.data, len(changes))
    return changes[: min(n, len(changes))]


def limits_at_start() -> tuple[int | None, int | None]:
    """Return MLX's cache limit and memory limit when the session began.

    Returns
    -------
    cache_limit, memory_limit : int or None
        Bytes; None where MLX does not show it, and before any session.
    """
    cache, memory = ctypes.c_int64(), ctypes.c_int64()
    _native.mlxmem_limits_at_start(ctypes.byref(cache), ctypes.byref(memory))
    return (
        cache.value if cache.value >= 0 else None,
        memory.value if memory.value >= 0 else None,
    )


def cache_at_start() -> Records | None:
    """Return the buffers that lay in MLX's cache when the session began.

    They add up to the session's `cache_at_enable`.

    Returns
    -------
    ndarray of RAW_CACHED, shape (n,), or None
        Oldest first. None where they are not known: before any session, where another
        thread was emptying the cache, and on a GPU, unless nothing was cached.
    """
    count = ctypes.c_size_t()
    cached = np.empty(0, RAW_CACHED)
    while _native.mlxmem_cache_at_start(
        cached.ctypes.data, len(cached), ctypes.byref(count)
    ):
        if count.value <= len(cached):
            return cached[: count.value]
        cached = np.empty(count.value, RAW_CACHED)
    return None


def allocator_times() -> AllocatorTimes | None:
    """Return what MLX's allocator took for the session's allocations.

    One of 16 allocations of a thread is measured on average, chosen at random, without
    those of 0 bytes.

    Returns
    -------
    AllocatorTimes or None
        None where that is not measured: on CUDA.
    """
    times = _Times()
    if not _native.mlxmem_allocator_times(ctypes.byref(times)):
        return None
    return AllocatorTimes(times.new, times.new_ns, times.reused, times.reused_ns)


def set_failure_handler(handler: Callable[[], None] | None) -> None:
    """Choose what is called when an allocation failed, before MLX hears of it.

    It runs on any thread, and must not raise. MLX waits for it: for half a minute at
    most where the thread that allocates does not hold the GIL.
    """
    global _failure_handler, _c_failure_handler
    _failure_handler = handler
    if handler is None:
        _native.mlxmem_set_failure_handler(None, None, None)
        return
    if _c_failure_handler is None:  # for the life of the process: it may run late
        _c_failure_handler = _FAILURE_HANDLER(_call_failure_handler)
    # Two that together tell whether a thread holds the GIL, without waiting for it.
    api = ctypes.pythonapi
    unchecked = "PyThreadState_GetUnchecked"  # its name from Python 3.13 on
    current = getattr(api, unchecked, None) or api["_PyThreadState_UncheckedGet"]
    _native.mlxmem_set_failure_handler(
        ctypes.cast(_c_failure_handler, ctypes.c_void_p),
        ctypes.cast(current, ctypes.c_void_p),
        ctypes.cast(api.PyGILState_GetThisThreadState, ctypes.c_void_p),
    )


def _call_failure_handler(_: int) -> None:
    handler = _failure_handler
    if handler is not None:
        handler()


def observe() -> None:
    """Book now what left the cache since the last allocation or free."""
    copy_session(with_events=False)


def primitive_names() -> list[str]:
    """Return the names of primitives, by the ids in events; [0] is ""."""
    names: list[str] = []
    while (name := _native.mlxmem_primitive_name(len(names))) is not None:
        names.append(name.decode(errors="replace"))
    return names


def attach_new_images() -> int:
    """Patch libraries that were loaded since; return how many words that were.

    Raises
    ------
    UnsupportedMLXError
        A library's import slot does not hold what it should; it is not patched.
    """
    message = ctypes.create_string_buffer(1024)
    changed: int = _native.mlxmem_attach_new_images(message, len(message))
    if changed < 0:
        raise UnsupportedMLXError(_text(message))
    return changed


def patched_words() -> list[tuple[int, int, int]]:
    """Return (address, original, replacement) of every word that is changed now."""
    n = _native.mlxmem_patched_words(None, 0)
    words = (_Word * n)()
    n = min(n, _native.mlxmem_patched_words(words, n))
    return [(w.address, w.original, w.replacement) for w in words[:n]]


def backend() -> str:
    """Return "cpu", "cuda" or "metal"; "" before the first attach."""
    name = ctypes.create_string_buffer(16)
    _native.mlxmem_backend(name, len(name))
    return _text(name)


def cache_limit() -> int | None:
    """Return MLX's cache limit in bytes, None where MLX does not show it."""
    limit: int = _native.mlxmem_cache_limit()
    return limit if limit >= 0 else None


def metal_resources() -> dict[str, int] | None:
    """Return what only Metal's allocator has; None where that is not known.

    Returns
    -------
    dict or None
        `gc_limit`, `wired_limit`: bytes. `resources`: buffers that there are, cached
        ones included; `resource_limit` of these.
    """
    found = _Metal()
    if not _native.mlxmem_metal_resources(ctypes.byref(found)):
        return None
    return {name: getattr(found, name) for name in _Metal.names}


def _records(address: int | None, n: int, dtype: np.dtype[np.void]) -> Records:
    if not address or not n:
        return np.empty(0, dtype)
    raw = (ctypes.c_ubyte * (n * dtype.itemsize)).from_address(address)
    records: Records = np.frombuffer(memoryview(raw), dtype).copy()
    return records


def _text(buffer: ctypes.Array[ctypes.c_char]) -> str:
    return _decoded(buffer.value)


def _decoded(text: bytes) -> str:
    return text.decode(errors="replace")
