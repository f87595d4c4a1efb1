"""One snapshot out of those of a distributed program's ranks, a device for each.

A file is read, turned into columns and forgotten before the next one is read, so that
the dicts of all ranks are never there at once. Equal stacks and metadata of all ranks
are one object in the result, as they are in a single recording.
"""

from __future__ import annotations

import itertools
import os
import pathlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from mlxmem import _columns, _pickle_writer, dump_file
from mlxmem.distributed import MOST_RANKS
from mlxmem.dump_file import check_path
from mlxmem.events import no_collector
from mlxmem.extras import FORMAT
from mlxmem.frames import Entry, text
from mlxmem.reports.reading import DAMAGE, SnapshotError, damaged, load
from mlxmem.tables import Rows, Shared, Table, row_count

# Ranks begin together; clocks of several hosts differ, and so do their start-ups.
_SLACK_US = 60_000_000
_UNSIGNED = ("addr", "address")


class Device(NamedTuple):
    """A device of a merged snapshot; `rank` is None where the file has none."""

    number: int
    rank: int | None
    file: str
    entries: int


class Merged(NamedTuple):
    """What `merge_files` wrote; `missing` are the ranks without a file."""

    path: pathlib.Path
    devices: list[Device]
    missing: list[int]


def merge(
    paths: Iterable[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    different_runs: bool = False,
) -> pathlib.Path:
    """Merge the dumps of a distributed program's ranks into one, a device for each.

    A device's number is its rank; where the dumps have none, it is their place in
    `paths`. Addresses, times and stacks stay as they are.

    Parameters
    ----------
    paths : iterable of str or os.PathLike
        Files of `dump` or `mlxmem run`, in any order.
    out : str or os.PathLike
        The file to write; it is replaced if it exists.
    different_runs : bool
        Merge recordings that do not overlap in time, or of programs with different
        numbers of ranks, too.

    Returns
    -------
    pathlib.Path
        `out`.

    Raises
    ------
    ValueError
        A file can't be read, is not mlxmem's, or does not go with the others; the
        message names it. Nothing was written.
    OSError
        `out` can't be written.
    """
    return merge_files(paths, out, different_runs=different_runs).path


def merge_files(
    paths: Iterable[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    different_runs: bool = False,
) -> Merged:
    """Do what `merge` does, and return what is in the file."""
    if isinstance(paths, (str, os.PathLike)):
        raise TypeError(f"paths must be several paths, not the one {paths!r}")
    names = [check_path(path) for path in paths]
    _check_names(names, check_path(out, "out"))
    dump_file.check_target(out)
    pool = _Pool()
    with no_collector():
        parts = [_read(name, pool) for name in names]
        parts = _sorted(parts)
        if not different_runs:
            _check_run(parts)
        snapshot = _joined(parts)

        def fill(file: BinaryIO) -> None:
            with dump_file.Progress(out) as progress:
                progress.total = sum(part.count for part in parts)
                _pickle_writer.dump(
                    snapshot, file.write, first=pool.first(), on_rows=progress.add
                )

        try:
            written = dump_file.replace(out, fill)
        # The files' own plain data, but of a kind that no snapshot holds.
        except (TypeError, OverflowError) as error:
            raise SnapshotError(f"these files can't be merged: {error}") from error
    there = {part.device for part in parts}
    return Merged(
        written,
        [Device(p.device, p.rank, p.name, p.count) for p in parts],
        [number for number in range(_device_count(parts)) if number not in there],
    )


@dataclass
class _Part:
    """One rank's snapshot; its trace as columns."""

    name: str
    rank: int | None
    world_size: int | None
    count: int  # of entries
    tables: list[Table]
    segments: list[Entry]
    settings: Entry
    annotations: list[Entry]
    extra: Entry
    start_us: int
    end_us: int
    device: int = 0


class _Pool:
    """Objects that several ranks share: one for all equal ones."""

    def __init__(self) -> None:
        self._lists: dict[str, list[Any]] = {}  # key of an entry -> distinct values
        self._places: dict[tuple[str, Hashable], int] = {}
        self._tuples: dict[Hashable, tuple[Any, ...]] = {}
        self._frames: dict[Hashable, Entry] = {}
        self._keys: dict[str, None] = {}

    def column(self, rows: list[Any], key: str) -> Any:
        """Return a column of a table; see `mlxmem.tables.Table`."""
        self._keys.setdefault(key)
        if type(rows[0][key]) is int:
            return _columns.numbers(rows, key, unsigned=key in _UNSIGNED)
        index, values = _columns.distinct(rows, key)
        if isinstance(values[0], (str, list, dict)):
            places = [self._place(key, value) for value in values]
            return Shared(self._lists[key], np.array(places, np.int32)[index])
        if any(type(value) is not tuple or value != values[0] for value in values):
            raise ValueError(f"entries with {key!r} {values[0]!r} and others"[:80])
        return self._tuples.setdefault(_frozen(values[0]), values[0])

    def stack(self, frames: list[Any]) -> list[Any]:
        """Return the one list of frames that is equal to this one."""
        place = self._place("frames", frames)
        stack: list[Any] = self._lists["frames"][place]
        return stack

    def share(self, value: Any) -> Any:
        """Put the pool's stacks into nested dicts and lists."""
        if type(value) is dict:
            return {
                key: self.stack(item)
                if key == "frames" and type(item) is list
                else self.share(item)
                for key, item in value.items()
            }
        if type(value) is list and value and type(value[0]) in (dict, list):
            return [self.share(item) for item in value]
        return value

    def first(self) -> list[str | tuple[int, ...]]:
        """Return what the rows of the file mention most often."""
        words = [*self._keys, *self._lists.get("action", ())]
        return [*dict.fromkeys(words), *self._tuples.values()]

    def _place(self, key: str, value: Any) -> int:
        values = self._lists.setdefault(key, [])
        frozen = (key, _frozen(value))
        place = self._places.get(frozen)
        if place is None:
            place = self._places[frozen] = len(values)
            if key == "frames":
                value = [self._frames.setdefault(_frozen(f), f) for f in value]
            values.append(value)
        return place


def _frozen(value: Any) -> Hashable:
    """Return a key that is the same for equal values alone; 1 and True differ."""
    if isinstance(value, dict):
        return tuple((key, _frozen(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return (type(value), *map(_frozen, value))
    return type(value), value


def _check_names(names: Sequence[str], out: str) -> None:
    if not names:
        raise ValueError("there is nothing to merge: name the files of the ranks")
    seen = set()
    target = os.path.realpath(out)
    for name in names:
        real = os.path.realpath(name)
        if real in seen:
            raise ValueError(f"{text(name)} is named twice")
        if real == target:
            raise ValueError(f"{text(name)} would be overwritten; name another output")
        seen.add(real)


def _read(name: str, pool: _Pool) -> _Part:
    """Read one rank's file."""
    snapshot = load(name)
    shown = text(name)
    extra = snapshot.get("mlxmem")
    if not isinstance(extra, dict) or "format" not in extra:
        raise SnapshotError(
            f"{shown}: not written by mlxmem; only its own recordings can be merged"
        )
    if "devices" in extra:
        raise SnapshotError(
            f"{shown}: is merged already; name the files that it was made of"
        )
    try:
        return _part(snapshot, extra, shown, pool)
    except (*DAMAGE, RecursionError) as error:
        raise damaged(shown, error) from error


def _part(snapshot: Entry, extra: Entry, name: str, pool: _Pool) -> _Part:
    (trace,) = snapshot["device_traces"]
    settings = snapshot["allocator_settings"]
    annotations = snapshot["external_annotations"]
    _check_settings(settings)
    _check_annotations(annotations)
    rank, size = settings.get("rank"), settings.get("world_size")
    for what, value in (("rank", rank), ("world_size", size)):
        if value is not None and (type(value) is not int or value < 0):
            raise ValueError(f"its {what} is {value!r}"[:80])
    if rank is not None and rank >= (MOST_RANKS if size is None else size):
        raise ValueError(f"it is of rank {rank} of {size}")
    start_us = _number(extra, "start_us")
    end_us = _number(trace[-1], "time_us") if trace else start_us
    segments = snapshot["segments"]
    for segment in segments:
        for owner in (segment, *segment["blocks"]):
            owner["frames"] = pool.stack(owner["frames"])
    tables = [_table(list(rows), pool) for _, rows in itertools.groupby(trace, tuple)]
    return _Part(
        name=name,
        rank=rank,
        world_size=size,
        count=len(trace),
        tables=tables,
        segments=segments,
        settings=settings,
        annotations=annotations,
        extra=pool.share(extra),
        start_us=start_us,
        end_us=max(start_us, end_us),
    )


def _check_settings(settings: Entry) -> None:
    """Raise an error if `_settings` can't use them."""
    for key in ("trace_alloc_max_entries", "trace_alloc_dropped"):
        if _number(settings, key) < 0:
            raise ValueError(f"{key!r} is negative")
    if type(settings["trace_alloc_overflowed"]) is not bool:
        raise TypeError("'trace_alloc_overflowed' is no bool")
    _frozen(settings)  # Raises RecursionError if they hold themselves.


def _check_annotations(annotations: list[Entry]) -> None:
    """Raise an error if they can't be sorted among those of other ranks."""
    if type(annotations) is not list:
        raise TypeError("'external_annotations' is no list")
    for entry in annotations:
        if type(entry) is not dict:
            raise TypeError("an annotation is no dict")
        _number(entry, "time_us")


def _number(entry: Entry, key: str) -> int:
    """Return an entry's number if it is an int of 64 bits."""
    value = entry[key]
    if type(value) is not int:
        raise TypeError(f"{key!r} is no int")
    if not -(2**63) <= value < 2**63:
        raise OverflowError(f"{key!r} is out of range")
    return value


def _table(rows: list[Any], pool: _Pool) -> Table:
    """Return entries of the same keys as columns."""
    if type(rows[0]) is not dict:
        raise TypeError(f"an entry is a {type(rows[0]).__name__}, not a dict")
    table = {key: pool.column(rows, key) for key in rows[0]}
    row_count(table)
    return table


def _sorted(parts: list[_Part]) -> list[_Part]:
    """Return the parts by rank, and give each its device."""
    with_rank = [part for part in parts if part.rank is not None]
    if with_rank and len(with_rank) < len(parts):
        other = next(part for part in parts if part.rank is None)
        raise SnapshotError(
            f"{other.name}: has no rank, but {with_rank[0].name} is of rank "
            f"{with_rank[0].rank}; merge files that all have one, or none"
        )
    for place, part in enumerate(parts):
        part.device = place if part.rank is None else part.rank
    parts = sorted(parts, key=lambda part: part.device)
    for one, other in itertools.pairwise(parts):
        if one.device == other.device:
            raise SnapshotError(
                f"{one.name} and {other.name} are both of rank {one.rank}; name one "
                "file of each rank"
            )
    return parts


def _check_run(parts: Sequence[_Part]) -> None:
    """Raise SnapshotError if the parts can't be of one run of one program."""
    sized = [part for part in parts if part.world_size is not None]
    for part in sized:
        if part.world_size != sized[0].world_size:
            raise SnapshotError(
                f"{part.name} is of a program of {part.world_size} ranks, and "
                f"{sized[0].name} of one of {sized[0].world_size}: of different runs"
            )
    by_time = sorted(parts, key=lambda part: part.start_us)
    last = by_time[0]
    for part in by_time[1:]:
        gap_us = part.start_us - last.end_us
        if gap_us > _SLACK_US:
            raise SnapshotError(
                f"{part.name} begins {gap_us // 1_000_000:,} s after {last.name} ends: "
                "of different runs"
            )
        last = max(last, part, key=lambda part: part.end_us)


def _device_count(parts: Sequence[_Part]) -> int:
    """Return how many devices there are: all ranks, also those without a file."""
    known = [p.world_size or 0 for p in parts if p.rank is not None]
    # A wrong number in a file must not make a list of a million devices.
    sizes = [size for size in known if size <= MOST_RANKS]
    return max([*sizes, *(part.device + 1 for part in parts)])


def _joined(parts: Sequence[_Part]) -> dict[str, Any]:
    count = _device_count(parts)
    traces: list[Any] = [[] for _ in range(count)]
    extras: list[Entry | None] = [None] * count
    for part in parts:
        traces[part.device] = Rows(part.count, _tables_of(part))
        extras[part.device] = part.extra
        for entry in (*part.segments, *part.annotations):
            entry["device"] = part.device
    annotations = [entry for part in parts for entry in part.annotations]
    # The traces come first: what is mentioned early takes fewer bytes.
    return {
        "device_traces": traces,
        "segments": [segment for part in parts for segment in part.segments],
        "allocator_settings": _settings(parts, count),
        "external_annotations": sorted(annotations, key=lambda e: e["time_us"]),
        "mlxmem": {"format": FORMAT, "devices": extras},
    }


def _tables_of(part: _Part) -> Callable[[], Any]:
    return lambda: iter(part.tables)


def _settings(parts: Sequence[_Part], count: int) -> Entry:
    """Return what all ranks have in common, and under "ranks" what each has besides.

    What PyTorch defines is there in any case.
    """
    every = [part.settings for part in parts]
    common = {
        key: value
        for key, value in every[0].items()
        if all(
            key in other and _frozen(other[key]) == _frozen(value) for other in every
        )
    }
    common |= {
        "trace_alloc_overflowed": any(s["trace_alloc_overflowed"] for s in every),
        # 0 keeps all events, which is more than any number.
        "trace_alloc_max_entries": max(
            (s["trace_alloc_max_entries"] for s in every), key=lambda n: n or 2**53
        ),
        "trace_alloc_dropped": sum(s["trace_alloc_dropped"] for s in every),
    }
    ranks: list[Entry] = [{} for _ in range(count)]
    for part in parts:
        ranks[part.device] = {"file": os.path.basename(part.name)} | {
            key: value
            for key, value in part.settings.items()
            if key not in common or _frozen(common[key]) != _frozen(value)
        }
    return {**common, "ranks": ranks}
