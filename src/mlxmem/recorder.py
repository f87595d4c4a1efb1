"""A recording session: enable, disable, and what was recorded."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any, TypedDict

import numpy as np

from mlxmem import (
    _collections,
    _hook,
    _interner,
    _library_loads,
    _oom,
    _setting_calls,
    distributed,
    limits,
    marks,
    metal,
    snapshot as _snapshot,
)
from mlxmem._version import __version__
from mlxmem.dump_file import check_path, check_target
from mlxmem.errors import UnsupportedMLXError
from mlxmem.events import (
    RAW_EVENT,
    Mark,
    Range,
    Recording,
    Records,
    Setting,
    SettingCall,
    decode,
    to_array,
)


class Stats(TypedDict):
    """What `stats()` returns; sizes in bytes."""

    active: int
    cache: int
    reserved: int
    peak: int
    live_buffers: int
    allocs: int
    reuses: int
    frees: int
    events_recorded: int
    events_dropped: int


# Serialises enable() and disable(). Reentrant, since a fork in the same thread takes
# it too. Never held while user code runs.
_lock = threading.RLock()
_session_pid: int | None = None  # the process whose session the hook holds
_session = 0  # how many were begun
_stacks = True  # whether that session captures stacks
_in_transition = False  # inside enable() or disable()


def enable(
    max_entries: int = 100_000,
    *,
    stacks: bool = True,
    dump_on_oom: str | os.PathLike[str] | None = None,
) -> None:
    """Start recording MLX's allocator, in a new session.

    Forgets what an earlier session collected, also when one is running. Arrays and
    cached buffers that exist already are part of the totals from the first event on.
    Should memory for the events run out, the session ends and its snapshot says so
    (`ran_out_of_memory`); MLX goes on.

    Parameters
    ----------
    max_entries : int
        Keep the last `max_entries` events (48 bytes each); 0 = keep all.
    stacks : bool
        Capture the Python stack of each array's creation.
    dump_on_oom : str or os.PathLike, optional
        Dump to this path when an allocation fails, before MLX hears of it: its CPU
        backend crashes then. Each failure replaces the file of the one before.

    Raises
    ------
    TypeError, ValueError
        An argument is bad; the message names it.
    OSError
        No file can be at `dump_on_oom`.
    UnsupportedMLXError
        The MLX of this process failed a check. Nothing was changed.
    ImportError
        MLX is not installed, or has no backend.
    """
    global _session_pid, _session, _stacks
    max_entries = check_options(max_entries, stacks=stacks, dump_on_oom=dump_on_oom)
    if dump_on_oom is not None:
        check_target(dump_on_oom)
    mx = _import_mlx()
    with _transition():
        running = is_enabled()
        try:
            _hook.attach(mx.__version__)
            _hook.stop_session()
            # Stacks of the old session go before the first capture of the new one.
            _interner.begin_session()
            _hook.set_traceback_capture_func(_interner.capture_func_address())
            _hook.set_traceback_tracking(stacks)
            _library_loads.watch(_attach_new_library)
            _setting_calls.watch(mx, _position)
            _collections.watch(_hook.position)
            if dump_on_oom is None:
                _oom.ignore_failures()
            else:
                _oom.dump_on_failure(os.fspath(dump_on_oom), dump)
            _hook.start_session(max_entries)
        except BaseException:
            if not running:
                _undo()
            raise
        _session_pid = os.getpid()
        _session += 1
        _stacks = stacks


def disable() -> None:
    """Stop recording and put MLX back as it was; keep what was collected.

    No effect when nothing is recording.

    Raises
    ------
    RuntimeError
        Another tool changed, after enable(), a word that had to be restored; or a
        signal handler called this in the middle of enable().
    """
    with _transition():
        _hook.stop_session()
        _undo()


def is_enabled() -> bool:
    """Tell whether a session is recording in this process.

    A forked child starts without one.
    """
    return _hook.is_enabled()


def recording() -> Recording:
    """Return what the running or last session recorded, as it is now.

    This is the raw material of every reader in this package.

    Raises
    ------
    RuntimeError
        enable() was never called in this process.
    """
    if not _has_session():
        raise RuntimeError(
            "nothing has been recorded in this process: call mlxmem.enable() first"
        )
    totals, events, buffers = _hook.copy_session()
    named, ranges = marks.collect()
    calls = _calls()
    settings, crossings = _settings(totals, events, calls)
    return Recording(
        events=events,
        buffers=buffers,
        primitives=_hook.primitive_names(),
        active=totals.active,
        cache=totals.cache,
        peak=totals.peak,
        active_at_enable=totals.active_at_enable,
        cache_at_enable=totals.cache_at_enable,
        peak_at_enable=totals.peak_at_enable,
        start_us=totals.start_us,
        dropped=totals.dropped,
        max_entries=totals.max_entries,
        stacks=_stacks,
        resolve=functools.cache(_interner.resolve_traceback),
        settings=settings,
        context=functools.cache(_interner.resolve_context),
        marks=named,
        ranges=sorted((*ranges, *_collections.collect()), key=_begin),
        calls=calls,
        ooms=_oom.ooms(),
        nodes=_hook.copy_nodes(),
        cached_at_enable=_hook.cache_at_start(),
        crossings=crossings,
        times=_hook.allocator_times(),
    )


def session_start_us() -> int:
    """Return when the running or last session began, 0 before any enable().

    Microseconds since the Unix epoch.
    """
    return _hook.totals().start_us if _has_session() else 0


def events() -> list[dict[str, Any]]:
    """Return the retained events, oldest first; empty before any enable().

    Returns
    -------
    list of dict
        `addr`, `size` (of the buffer, bytes), `requested_size` (bytes),
        `timestamp_us` (microseconds since the session began), `action` (a name of
        `Action`), `primitive_name` ("" for frees and leaf arrays), `traceback` (list
        of (filename, function, line), outermost first; None for frees and where none
        was captured), `stream` (-1 outside a primitive and for frees), `thread_id`
        (of the operating system).
    """
    return decode(recording()) if _has_session() else []


def events_array() -> Records:
    """Return the retained events without their stacks, oldest first.

    Returns
    -------
    ndarray of EVENT, shape (n,)
        The fields of `events()` but for the traceback; `action` compares with
        `mlxmem.Action`. Sizes in bytes, times in microseconds.
    """
    if not _has_session():
        return to_array(Recording(events=np.empty(0, RAW_EVENT)))
    return to_array(recording())


def stats() -> Stats:
    """Return the totals of the running or last session; zeros before any enable().

    Returns
    -------
    dict
        `active`, `cache`, `reserved` (= active + cache): bytes now, or when the
        session ended, equal to MLX's counters. `peak`: the highest active since
        enable(), bytes. `live_buffers`: buffers allocated since enable() that are
        active. `allocs` (with reuses), `reuses`, `frees`: how many since enable().
        `events_recorded`, and `events_dropped` of these.
    """
    if not _has_session():
        return Stats(
            active=0,
            cache=0,
            reserved=0,
            peak=0,
            live_buffers=0,
            allocs=0,
            reuses=0,
            frees=0,
            events_recorded=0,
            events_dropped=0,
        )
    totals = _hook.totals()
    return Stats(
        active=totals.active,
        cache=totals.cache,
        reserved=totals.active + totals.cache,
        peak=totals.peak,
        live_buffers=totals.live_buffers,
        allocs=totals.allocations,
        reuses=totals.reuses,
        frees=totals.frees,
        events_recorded=totals.events,
        events_dropped=totals.dropped,
    )


def snapshot() -> dict[str, Any]:
    """Return PyTorch's memory snapshot of now, also while recording goes on.

    Returns
    -------
    dict
        `segments`, `device_traces`, `allocator_settings`, `external_annotations`, as
        `torch.cuda.memory._snapshot()` has them.

    Raises
    ------
    RuntimeError
        enable() was never called in this process.
    """
    return _snapshot.build(recording())


def dump(path: str | os.PathLike[str]) -> pathlib.Path:
    """Write the snapshot of now as a pickle for PyTorch's memory viewer.

    The file is written beside `path` and renamed, so that it is never half there.
    It holds what `snapshot()` returns, but is made without its dicts. On a terminal,
    a dump of more than a second shows how far it is.

    Parameters
    ----------
    path : str or os.PathLike
        Open the file at https://docs.pytorch.org/memory_viz.

    Returns
    -------
    pathlib.Path

    Raises
    ------
    RuntimeError
        enable() was never called in this process.
    OSError
        The file can't be written. The events are kept.

    Warns
    -----
    UserWarning
        Another rank of a distributed program has just written to `path`.
    """
    made = recording()
    distributed.warn_if_shared(path, made.start_us)
    written = _snapshot.dump(made, path)
    distributed.note_written(written)
    return written


def _forget_parent() -> None:
    # The hook put MLX back in the child before Python runs there again.
    _library_loads.unwatch()
    _setting_calls.unwatch()
    _collections.unwatch()
    _lock.release()


# A child must find the lock free, whatever another thread was doing.
os.register_at_fork(
    before=_lock.acquire,
    after_in_parent=_lock.release,
    after_in_child=_forget_parent,
)


@contextlib.contextmanager
def _transition() -> Iterator[None]:
    """Hold the lock, and refuse a second change in the middle of the first."""
    global _in_transition
    with _lock:
        if _in_transition:  # only this thread can have set it
            raise RuntimeError(
                "enable() or disable() was called in the middle of another one, by a "
                "signal handler or a finalizer; call it later"
            )
        _in_transition = True
        try:
            yield
        finally:
            _in_transition = False


def session_number() -> int:
    """Return how many sessions were begun; tells one from the next."""
    return _session


def _undo() -> None:
    _library_loads.unwatch()
    _setting_calls.unwatch()
    _collections.unwatch()
    _oom.ignore_failures()
    _hook.detach()


def check_options(
    max_entries: int = 100_000,
    *,
    stacks: bool = True,
    dump_on_oom: str | os.PathLike[str] | None = None,
) -> int:
    """Check the arguments of enable() and return max_entries as an int."""
    if isinstance(max_entries, bool) or not hasattr(max_entries, "__index__"):
        raise TypeError(f"max_entries must be an int, not {max_entries!r}")
    number = int(max_entries.__index__())
    if not 0 <= number < 2**48:
        raise ValueError(
            "max_entries must be 0 (unlimited) or a positive number of events, "
            f"not {number}"
        )
    if not isinstance(stacks, bool):
        raise TypeError(f"stacks must be True or False, not {stacks!r}")
    if dump_on_oom is not None:
        check_path(dump_on_oom, "dump_on_oom")
    return number


def _has_session() -> bool:
    return _session_pid == os.getpid()


def _import_mlx() -> Any:
    try:
        import mlx.core
    except ImportError as error:
        raise ImportError(
            "mlxmem needs MLX with a backend: pip install 'mlxmem[cpu]', "
            f"'mlxmem[cuda12]' or 'mlxmem[cuda13]' ({error})"
        ) from error
    return mlx.core


def _begin(span: Range) -> tuple[int, int, int]:
    return span.start.timestamp_us, span.start.at, len(span.path)


def _position() -> tuple[int, int]:
    _hook.observe()
    return _hook.position()


def _attach_new_library() -> None:
    # A library that can't be patched goes unseen; an import must not fail for it.
    with contextlib.suppress(UnsupportedMLXError):
        _hook.attach_new_images()


def _calls() -> tuple[SettingCall, ...]:
    changes = _hook.limit_changes()  # before the calls, which explain them
    return limits.with_unseen(_setting_calls.collect(), changes)


def _settings(
    totals: _hook.Totals, events: Records, calls: Sequence[SettingCall]
) -> tuple[dict[str, Setting], Sequence[Mark]]:
    """Return the snapshot's settings, and the crossings of the memory limit."""
    mx = _import_mlx()
    begin = _hook.limits_at_start()
    at_end = _hook.cache_limit(), _memory_limit(mx, calls, begin[1])
    cache_limit, memory_limit = (
        limits.limit_at_start(
            calls, name, dropped=totals.dropped, begin=first, end=last
        )
        for name, first, last in zip(limits.FUNCTIONS, begin, at_end, strict=True)
    )
    crossings, count = limits.crossings(
        events,
        calls,
        active=totals.active,
        peak=totals.peak,
        limit=memory_limit,
        dropped=totals.dropped,
    )
    rank = distributed.current()
    backend = _hook.backend()
    settings: dict[str, Setting] = {
        "recorder": f"mlxmem {__version__}",
        "mlx_version": mx.__version__,
        "backend": backend,
        **(metal.settings(mx, _hook.metal_resources()) if backend == "metal" else {}),
        **(rank._asdict() if rank else {}),
        **limits.settings(
            calls,
            at_start=(cache_limit, memory_limit),
            at_end=at_end,
            crossing_count=count,
        ),
        "unexplained_bytes": totals.unexplained,
        "ran_out_of_memory": _hook.ran_out_of_memory(),
    }
    return settings, crossings


def _memory_limit(
    mx: Any, calls: Sequence[SettingCall], begin: int | None
) -> int | None:
    """Return the memory limit of now; before 0.32.4 MLX tells only who sets it."""
    get_memory_limit = getattr(mx, "get_memory_limit", None)
    if get_memory_limit is not None:
        return int(get_memory_limit())
    last = limits.last_set(calls, "set_memory_limit")
    return begin if last is None else last
