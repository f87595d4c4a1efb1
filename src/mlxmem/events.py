"""What was recorded: the seven actions, the raw records and their decoding."""

from __future__ import annotations

import contextlib
import enum
import gc
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Frame = tuple[str, str, int]  # filename, qualified name, line
Setting = str | int | float | bool | None
Records = npt.NDArray[np.void]


class Action(enum.IntEnum):
    """A transition of one buffer between OS, active and cache."""

    AllocNew = 0
    AllocReuse = 1
    AllocMakeBuffer = 2
    FreeActiveToCache = 3
    FreeActiveToOS = 4
    Release = 5
    FreeCacheToOS = 6


class State(enum.IntEnum):
    """Where a known buffer is, as in the `state` field of RAW_BUFFER."""

    Active = 0
    Cached = 1


# Both layouts are written by the native log: 48 bytes, no padding.
RAW_EVENT = np.dtype(
    [
        ("addr", "u8"),
        ("size", "u8"),
        ("requested_size", "u8"),
        ("timestamp_us", "i8"),
        ("traceback_id", "u4"),
        ("primitive_id", "u2"),
        ("action", "u1"),
        ("after_look", "u1"),  # see csrc/event.h
        ("stream", "i4"),
        ("thread_id", "u4"),
    ]
)
RAW_BUFFER = np.dtype(
    [
        ("addr", "u8"),
        ("size", "u8"),
        ("requested_size", "u8"),
        ("timestamp_us", "i8"),
        ("traceback_id", "u4"),
        ("primitive_id", "u2"),
        ("state", "u1"),
        ("flags", "u1"),
        ("stream", "i4"),
        ("thread_id", "u4"),
    ]
)
# A live array node, as the native side finds it.
RAW_NODE = np.dtype(
    [
        ("nbytes", "u8"),  # elements times the size of one
        ("buffer", "u8"),  # address of its buffer, 0 without one
        ("traceback_id", "u4"),
        ("pending", "u4"),  # 1 = not evaluated
    ]
)
# A buffer in MLX's cache.
RAW_CACHED = np.dtype([("addr", "u8"), ("size", "u8")])
# Node totals at a moment; `at` as in Mark.
RAW_NODE_SAMPLE = np.dtype(
    [("at", "u8"), ("timestamp_us", "i8"), ("live", "u8"), ("pending", "u8")]
)
EVENT = np.dtype(
    [
        ("addr", "u8"),
        ("size", "u8"),
        ("requested_size", "u8"),
        ("timestamp_us", "i8"),
        ("action", "u1"),
        ("primitive_name", "O"),
        ("stream", "i4"),
        ("thread_id", "u4"),
    ]
)

FIELDS = (
    "addr",
    "size",
    "requested_size",
    "timestamp_us",
    "action",
    "primitive_name",
    "traceback",
    "stream",
    "thread_id",
)


# The numbers of a decoded event and where they must lie: [low, high).
_RANGES = (
    ("addr", 0, 2**64),
    ("size", 0, 2**63),
    ("requested_size", 0, 2**63),
    ("timestamp_us", -(2**63), 2**63),
    ("stream", -(2**31), 2**31),
    ("thread_id", 0, 2**32),
)


def no_stacks(traceback_id: int) -> list[Frame] | None:
    """Resolve every id to None, for recordings without stacks."""
    return None


@dataclass(frozen=True)
class Mark:
    """A named moment.

    Attributes
    ----------
    at : int
        How many events had been recorded in the session, dropped ones included.
    timestamp_us : int
        Microseconds since the session began.
    thread_id : int
        Of the operating system.
    name : str
    """

    at: int
    timestamp_us: int
    thread_id: int
    name: str


@dataclass(frozen=True)
class Range:
    """A named stretch of one thread's time.

    Attributes
    ----------
    start, end : Mark
        `end` has the position of the recording's end while the range is open.
    path : tuple of str
        Names of the ranges around it on its thread, outermost first, then its own.
    open : bool
        Whether it had not ended when the recording was read.
    """

    start: Mark
    end: Mark
    path: tuple[str, ...]
    open: bool = False


@dataclass(frozen=True)
class OutOfMemory:
    """An allocation that failed.

    Attributes
    ----------
    mark : Mark
        When, and on which thread; its name is the allocator's message or "".
    size : int
        Bytes that were asked for.
    free : int
        Bytes that the device had left, -1 where that is not known.
    active, cache : int
        MLX's bytes at that moment.
    traceback_id, primitive_id : int
        Whose the allocation was, as in RAW_EVENT.
    stream : int
        -1 outside a primitive.
    """

    mark: Mark
    size: int
    free: int
    active: int
    cache: int
    traceback_id: int = 0
    primitive_id: int = 0
    stream: int = -1


@dataclass(frozen=True)
class SettingCall:
    """A call that changes what MLX's allocator keeps, while a session recorded.

    Attributes
    ----------
    mark : Mark
        When, and on which thread; its name is the function's.
    value : int or None
        The argument, bytes; None without one.
    previous : int or None
        What it was before, as MLX returned it, bytes.
    stack : sequence of Frame
        The line of the call, outermost first; empty where nobody saw the call, only
        what it changed.
    began : int
        How many events had been recorded when it began, dropped ones included: it
        took effect between that and its mark.
    """

    mark: Mark
    value: int | None
    previous: int | None
    stack: Sequence[Frame] = ()
    began: int = 0


@dataclass(frozen=True)
class AllocatorTimes:
    """Nanoseconds inside the allocator's malloc, measured on some of its calls.

    Attributes
    ----------
    new, reused : int
        How many calls were measured that got memory of the system, and from the cache.
    new_ns, reused_ns : int
        What they took together.
    """

    new: int = 0
    new_ns: int = 0
    reused: int = 0
    reused_ns: int = 0


class Context(NamedTuple):
    """Where in a program a line ran, apart from its stack.

    Attributes
    ----------
    ranges : tuple of str
        Names of the `annotate` ranges that were open, outermost first.
    module : str
        Path of the nn.Module that ran, "" outside any.
    """

    ranges: tuple[str, ...] = ()
    module: str = ""


NO_CONTEXT = Context()


def no_context(traceback_id: int) -> Context:
    """Give every id the empty context."""
    return NO_CONTEXT


@dataclass(frozen=True)
class Nodes:
    """Array nodes: live ones at the end, and their totals over time.

    Attributes
    ----------
    live : ndarray of RAW_NODE, shape (n,)
    samples : ndarray of RAW_NODE_SAMPLE, shape (m,)
        In the order of time, thinned out to some thousands.
    """

    live: Records
    samples: Records


@dataclass(frozen=True)
class Recording:
    """One session's events and the totals that they must add up to.

    Attributes
    ----------
    events : ndarray of RAW_EVENT, shape (n,)
        The retained events, oldest first. A free carries the traceback, primitive
        and requested size of its allocation, 0 (and size) where that is unknown.
    buffers : ndarray of RAW_BUFFER, shape (m,)
        Buffers that live or are cached at the end and whose last event fell out of
        the ring. Empty without overflow.
    primitives : sequence of str
        Primitive names, indexed by `primitive_id`; the first is "".
    active, cache, peak : int
        Bytes at the end, what was there before enable() included; `peak` is the
        highest active since enable().
    active_at_enable, cache_at_enable, peak_at_enable : int
        MLX's counters when the session began, bytes.
    start_us : int
        Start of the session, microseconds since the Unix epoch.
    dropped : int
        Events that fell out of the ring.
    max_entries : int
        Size of the ring in events, 0 = unlimited.
    stacks : bool
        Whether stacks were captured.
    resolve : callable
        Traceback id -> frames, outermost first, or None.
    settings : mapping
        What the snapshot shows in `allocator_settings`.
    context : callable
        Traceback id -> Context.
    marks, ranges, ooms, calls : sequence of Mark, Range, OutOfMemory, SettingCall
        In the order of their beginning.
    nodes : Nodes or None
        None where the nodes were not counted.
    crossings : sequence of Mark
        Each moment at which active rose above the memory limit.
    times : AllocatorTimes or None
        None where the allocator's calls can't be measured.
    cached_at_enable : ndarray of RAW_CACHED, shape (k,), or None
        MLX's cache when the session began, oldest buffer first; None where it can't be
        read.
    """

    events: Records
    buffers: Records = field(default_factory=lambda: np.empty(0, RAW_BUFFER))
    primitives: Sequence[str] = ("",)
    active: int = 0
    cache: int = 0
    peak: int = 0
    active_at_enable: int = 0
    cache_at_enable: int = 0
    peak_at_enable: int = 0
    start_us: int = 0
    dropped: int = 0
    max_entries: int = 0
    stacks: bool = True
    resolve: Callable[[int], list[Frame] | None] = no_stacks
    settings: Mapping[str, Setting] = field(default_factory=dict)
    context: Callable[[int], Context] = no_context
    marks: Sequence[Mark] = ()
    ranges: Sequence[Range] = ()
    ooms: Sequence[OutOfMemory] = ()
    calls: Sequence[SettingCall] = ()
    nodes: Nodes | None = None
    crossings: Sequence[Mark] = ()
    times: AllocatorTimes | None = None
    cached_at_enable: Records | None = None


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    """Keep the cycle collector from walking millions of new dicts again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def is_alloc(action: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    """Tell which actions hand a buffer out, shape (n,) -> (n,)."""
    return action <= Action.AllocMakeBuffer


def primitive_ids(recording: Recording) -> npt.NDArray[np.uint16]:
    """Return the events' primitive ids, 0 where the id has no name.

    Parameters
    ----------
    recording : Recording

    Returns
    -------
    ndarray of uint16, shape (n,)
    """
    ids = recording.events["primitive_id"]
    return np.where(ids < len(recording.primitives), ids, 0).astype(np.uint16)


def decode(recording: Recording) -> list[dict[str, Any]]:
    """Turn the raw events into dicts with the keys of `FIELDS`.

    Parameters
    ----------
    recording : Recording

    Returns
    -------
    list of dict
        One per event, oldest first. Sizes in bytes, `timestamp_us` in microseconds
        since the session began, `traceback` a list of (filename, function, line),
        outermost first, or None. Equal ids share one list. Frees have no primitive
        and no traceback.
    """
    events = recording.events
    allocs = is_alloc(events["action"])
    ids, which = np.unique(
        np.where(allocs, events["traceback_id"], 0), return_inverse=True
    )
    stacks = [recording.resolve(i) if i else None for i in ids.tolist()]
    actions = [action.name for action in Action]
    primitives = recording.primitives
    columns = zip(
        events["addr"].tolist(),
        events["size"].tolist(),
        events["requested_size"].tolist(),
        events["timestamp_us"].tolist(),
        events["action"].tolist(),
        np.where(allocs, primitive_ids(recording), 0).tolist(),
        which.tolist(),
        events["stream"].tolist(),
        events["thread_id"].tolist(),
        strict=True,
    )
    with no_collector():
        return [
            {
                "addr": addr,
                "size": size,
                "requested_size": requested,
                "timestamp_us": time,
                "action": actions[action],
                "primitive_name": primitives[primitive] if primitive else "",
                "traceback": stacks[stack],
                "stream": stream,
                "thread_id": thread,
            }
            for (
                addr,
                size,
                requested,
                time,
                action,
                primitive,
                stack,
                stream,
                thread,
            ) in columns
        ]


def to_array(recording: Recording) -> Records:
    """Copy the events into a structured array without the stacks.

    Parameters
    ----------
    recording : Recording

    Returns
    -------
    ndarray of EVENT, shape (n,)
        `action` compares with `Action`; `primitive_name` holds str, "" for frees.
    """
    events = recording.events
    # np.empty would fill in None, object by object: most of the time of this copy.
    array = np.zeros(len(events), EVENT)
    for name in EVENT.names or ():
        if name != "primitive_name":
            array[name] = events[name]
    names = np.array(["", *recording.primitives[1:]], dtype=object)
    allocs = is_alloc(events["action"])
    array["primitive_name"] = names[np.where(allocs, primitive_ids(recording), 0)]
    return array


@no_collector()
def from_dicts(
    events: Iterable[Mapping[str, Any]],
    *,
    start_us: int = 0,
    settings: Mapping[str, Setting] | None = None,
) -> Recording:
    """Make a recording of decoded events, the inverse of `decode`.

    Nothing but the events is known: what was active or cached before the first one
    is what their frees and reuses show.

    Parameters
    ----------
    events : iterable of mapping
        Dicts with the keys of `FIELDS`, oldest first; other keys are ignored.
    start_us : int
        Microseconds since the Unix epoch at `timestamp_us` 0.
    settings : mapping, optional
        What the snapshot shows in `allocator_settings`.

    Returns
    -------
    Recording

    Raises
    ------
    TypeError
        An event is no mapping or a field has the wrong type.
    ValueError
        A field is missing, out of range, or names no action.
    """
    rows: list[tuple[int, ...]] = []
    primitives: dict[str, int] = {"": 0}
    stacks: dict[tuple[Frame, ...], int] = {}
    ids: dict[int, int] = {}  # by identity, since decode() shares lists
    keep: list[object] = []
    seen: set[int] = set()
    actions = dict(Action.__members__)
    fields = operator.itemgetter("action", "primitive_name", "traceback")
    numbers = operator.itemgetter(*(name for name, _, _ in _RANGES))
    active = cache = start_active = start_cache = peak = 0
    for index, event in enumerate(events):
        if not isinstance(event, Mapping):
            raise TypeError(f"events[{index}] must be a dict, not {event!r}")
        try:
            name, primitive, stack = fields(event)
            values = numbers(event)
        except KeyError as error:
            raise ValueError(f"events[{index}] has no {error}") from None
        action = actions.get(name) if isinstance(name, str) else None
        if action is None:
            raise ValueError(
                f"events[{index}]['action'] is {name!r}, not one of "
                + ", ".join(actions)
            )
        stack_id = ids.get(id(stack), 0) if stack else 0
        if stack and not stack_id:
            try:
                key = tuple((str(f), str(n), int(line)) for f, n, line in stack)
            except (TypeError, ValueError):
                raise ValueError(
                    f"events[{index}]['traceback'] must be None or a list of "
                    f"(filename, function, line), not {stack!r}"
                ) from None
            stack_id = ids[id(stack)] = stacks.setdefault(key, len(stacks) + 1)
            keep.append(stack)
        for (field_name, low, high), value in zip(_RANGES, values, strict=True):
            if type(value) is not int:
                value = _integer(value, f"events[{index}][{field_name!r}]")
            if not low <= value < high:
                raise ValueError(
                    f"events[{index}][{field_name!r}] is out of range: {value}"
                )
        addr, size, asked, time, stream, thread = map(int, values)
        primitive_id = primitives.setdefault(str(primitive), len(primitives))
        if primitive_id >= 2**16:
            raise ValueError(f"events[{index}]: more than 65,536 primitive names")
        rows.append(
            (
                addr,
                size,
                asked,
                time,
                stack_id,
                primitive_id,
                int(action),
                0,
                stream,
                thread,
            )
        )
        frees = Action.FreeActiveToCache <= action <= Action.Release
        uncaches = action in (Action.AllocReuse, Action.FreeCacheToOS)
        if addr == 0 or addr not in seen:
            seen.add(addr)
            start_active += size if frees else 0
            start_cache += size if uncaches else 0
        if action <= Action.AllocMakeBuffer:
            active += size
        elif frees:
            active -= size
        cache -= size if uncaches else 0
        cache += size if action is Action.FreeActiveToCache else 0
        # The start only rises while reading, by what was there all along.
        peak = max(peak, active)
    resolved: list[list[Frame] | None] = [None, *(list(stack) for stack in stacks)]
    return Recording(
        events=np.array(rows, RAW_EVENT),
        primitives=tuple(primitives),
        active=max(start_active + active, 0),
        cache=max(start_cache + cache, 0),
        peak=max(start_active + peak, 0),
        active_at_enable=start_active,
        cache_at_enable=start_cache,
        peak_at_enable=start_active,
        start_us=start_us,
        resolve=resolved.__getitem__,
        settings=dict(settings or {}),
    )


def _integer(value: Any, name: str) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, not {value!r}") from None
