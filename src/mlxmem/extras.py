"""What PyTorch's snapshot format has no place for: the snapshot's key "mlxmem".

Marks, ranges, failed allocations, changes of the allocator's settings, crossings of its
limit, what its calls take, and live array nodes. Ranges stand in
`external_annotations`, too, and in the metadata of the entries inside them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt

from mlxmem.address_ranges import Addresses, ShownAddresses
from mlxmem.events import Mark, Range, Recording, Records, State, no_context
from mlxmem.frames import Entry, Frames, text
from mlxmem.ledger import Ledger

FORMAT = 1  # of the key; raised when a reader must know
Ints = npt.NDArray[np.int64]


class Extras:
    """The parts of one snapshot that are not events.

    Parameters
    ----------
    recording : Recording
    frames : Frames
        The snapshot's stacks.
    """

    def __init__(self, recording: Recording, frames: Frames) -> None:
        self._recording = recording
        self._frames = frames
        self._ranges = recording.ranges  # outer ones first
        # Places in these lists stand for a context and a range in metadata.
        self._contexts: list[tuple[str, str]] = [("", "")]
        self._context_places: dict[tuple[str, str], int] = {("", ""): 0}
        self._context_of: dict[int, int] = {0: 0}
        self._paths: list[str] = [""]
        self._during = self._find_during()

    # For the metadata of entries.

    def contexts(self, ids: npt.NDArray[Any]) -> Ints:
        """Return a number for the context of each traceback id, shape (n,) -> (n,)."""
        if self._recording.context is no_context:
            return np.zeros(len(ids), np.int64)
        distinct, index = np.unique(ids, return_inverse=True)
        places = [self._context(number) for number in distinct.tolist()]
        return np.array(places or [0], np.int64)[index]

    def during(self, part: slice) -> Ints:
        """Return a number for the range in which each of some events happened."""
        if self._during is None:
            return np.zeros(part.stop - part.start, np.int64)
        return self._during[part]

    def metadata(self, context: int, during: int) -> Entry:
        """Return what the two numbers mean, for user_metadata."""
        in_range, module = self._contexts[context]
        path = self._paths[during]
        found: Entry = {}
        if in_range or path:
            found["range"] = in_range or path
        if path:
            found["during"] = path
        if module:
            found["module"] = module
        return found

    def _context(self, traceback_id: int) -> int:
        place = self._context_of.get(traceback_id)
        if place is None:
            context = self._recording.context(traceback_id)
            key = (_path(context.ranges), text(context.module))
            place = self._context_places.setdefault(key, len(self._contexts))
            if place == len(self._contexts):
                self._contexts.append(key)
            self._context_of[traceback_id] = place
        return place

    def _find_during(self) -> Ints | None:
        """Tell in which range each event happened: the last one begun on its thread."""
        if not self._ranges:
            return None
        events = self._recording.events
        during = np.zeros(len(events), np.int64)
        places: dict[str, int] = {"": 0}
        of_thread: dict[int, list[Range]] = {}
        for span in self._ranges:
            of_thread.setdefault(span.start.thread_id, []).append(span)
        for thread, ranges in of_thread.items():
            mine = np.flatnonzero(events["thread_id"] == thread)
            edges, which = self._stretches(ranges, places)
            during[mine] = which[np.searchsorted(edges, mine, side="right")]
        self._paths = list(places)
        return during

    def _stretches(
        self, ranges: Sequence[Range], places: dict[str, int]
    ) -> tuple[Ints, Ints]:
        """Cut one thread's time where a range begins or ends.

        Returns
        -------
        edges : ndarray of int64, shape (n,)
            Events before which a stretch begins.
        which : ndarray of int64, shape (n + 1,)
            The place of the range of each stretch; [0] is before the first edge.
        """
        turns = []
        for number, span in enumerate(ranges):
            begin, stop = self.event_of(span.start), self.event_of(span.end)
            if begin < stop:
                turns += [(begin, 1, number), (stop, 0, number)]
        turns.sort()  # ends come before beginnings
        edges, which = [], [0]
        opened: dict[int, int] = {}  # in the order of their beginning
        for at, begins, number in turns:
            if begins:
                path = _path(ranges[number].path)
                opened[number] = places.setdefault(path, len(places))
            else:
                del opened[number]
            edges.append(at)
            which.append(next(reversed(opened.values()), 0))
        return np.array(edges, np.int64), np.array(which, np.int64)

    # For the snapshot.

    def event_of(self, mark: Mark) -> int:
        """Return how many of the retained events came before a mark."""
        return self._retained(mark.at)

    def _retained(self, at: int) -> int:
        count = len(self._recording.events)
        return min(max(at - self._recording.dropped, 0), count)

    def annotations(self) -> list[Entry]:
        """Return the ranges as torch's annotations, in the order of time."""
        found = []
        for span in self._ranges:
            for mark, stage in ((span.start, "START"), (span.end, "END")):
                if stage == "START" or not span.open:
                    found.append(
                        {
                            "name": _path(span.path),
                            "stage": stage,
                            "device": 0,
                            "time_us": self._time(mark),
                        }
                    )
        return sorted(found, key=lambda entry: entry["time_us"])

    def build(
        self,
        entry_of: Callable[[int], int],
        ledger: Ledger,
        shown_addresses: ShownAddresses,
    ) -> Entry:
        """Return the value of the key "mlxmem".

        Parameters
        ----------
        entry_of : callable
            Number of retained events before a moment -> the first entry of the trace
            that comes after it.
        ledger : Ledger
            Of the recording.
        shown_addresses : ShownAddresses
            The snapshot's.

        Returns
        -------
        dict
            Plain data. `at` counts entries of the trace, `time_us` is microseconds
            since the Unix epoch, sizes are bytes.
        """

        def place(mark: Mark) -> Entry:
            return {
                "name": text(mark.name),
                "at": entry_of(self.event_of(mark)),
                "time_us": self._time(mark),
                "thread": mark.thread_id,
            }

        recording = self._recording
        start = shown_addresses.cached
        return {
            "format": FORMAT,
            "start_us": recording.start_us,
            "marks": [place(mark) for mark in recording.marks],
            "ranges": [self._range(span, place) for span in self._ranges],
            "ooms": [
                place(oom.mark)
                | {
                    "size": oom.size,
                    "free": oom.free,
                    "active": oom.active,
                    "cache": oom.cache,
                    "frames": self._frames.stack(oom.traceback_id) or [],
                    "primitive": self._primitive(oom.primitive_id),
                    "stream": oom.stream,
                }
                for oom in recording.ooms
            ],
            "calls": [
                place(call.mark)
                | {
                    "from_at": entry_of(self._retained(call.began)),
                    "value": call.value,
                    "previous": call.previous,
                    "frames": self._frames.of(call.stack),
                }
                for call in recording.calls
            ],
            "crossings": [place(mark) for mark in recording.crossings],
            "times": asdict(recording.times) if recording.times else None,
            "nodes": self._nodes(entry_of),
            "hidden": self._hidden(ledger.final, shown_addresses.final),
            "cache_at_start": {
                "addresses": start.addresses.tolist(),
                "sizes": start.sizes.tolist(),
                "unknown": start.unknown,
            },
            "looks": self._looks(entry_of),
        }

    def _looks(self, entry_of: Callable[[int], int]) -> Entry:
        """Return how long before some new buffers MLX looked into the cache for them.

        By the entry of the allocation: how many events of other threads came after the
        look. Where none did, nothing is said.
        """
        after = self._recording.events["after_look"]
        late = np.flatnonzero(after)
        return {
            "at": [entry_of(event + 1) - 1 for event in late.tolist()],
            "after": after[late].tolist(),
        }

    def _range(self, span: Range, place: Callable[[Mark], Entry]) -> Entry:
        end = place(span.end)
        return place(span.start) | {
            "name": text(span.path[-1]),
            "path": [text(name) for name in span.path],
            "end_at": end["at"],
            "end_time_us": end["time_us"],
            "open": span.open,
        }

    def _nodes(self, entry_of: Callable[[int], int]) -> Entry | None:
        """Return the live nodes by stack, most first, and their totals over time."""
        nodes = self._recording.nodes
        if nodes is None:
            return None
        ids, index = np.unique(nodes.live["traceback_id"], return_inverse=True)
        live = np.bincount(index, minlength=len(ids))
        pending = np.bincount(
            index, weights=nodes.live["pending"], minlength=len(ids)
        ).astype(np.int64)
        lines = []
        for place in np.argsort(-live, kind="stable").tolist():
            in_range, module = self._contexts[self._context(int(ids[place]))]
            lines.append(
                {
                    "frames": self._frames.stack(int(ids[place])) or [],
                    "range": in_range,
                    "module": module,
                    "live": int(live[place]),
                    "pending": int(pending[place]),
                }
            )
        samples = nodes.samples
        dropped, count = self._recording.dropped, len(self._recording.events)
        at = np.clip(samples["at"].astype(np.int64) - dropped, 0, count)
        return {
            "live": len(nodes.live),
            "pending": int(pending.sum()),
            "lines": lines,
            "samples": [
                [entry_of(event), time + self._recording.start_us, alive, waiting]
                for event, time, alive, waiting in zip(
                    at.tolist(),
                    samples["timestamp_us"].tolist(),
                    samples["live"].tolist(),
                    samples["pending"].tolist(),
                    strict=True,
                )
            ],
        }

    def _hidden(self, final: Records, addresses: Addresses) -> Entry | None:
        """Return the live buffers of which arrays show less than was asked for.

        `addresses` are those that the snapshot shows for the buffers of `final`.

        A slice keeps all of its parent's buffer. Arrays that overlap count twice, but
        no buffer shows more than it has. One that no counted array shows at all may
        belong to an array from before the recording: nothing is said of it.
        """
        nodes = self._recording.nodes
        if nodes is None:
            return None
        live = nodes.live[(nodes.live["pending"] == 0) & (nodes.live["buffer"] > 0)]
        is_active = (final["state"] == State.Active) & (final["size"] > 0)
        active = final[is_active]
        order = np.argsort(active["addr"])
        addr, asked = active["addr"][order], active["requested_size"][order]
        asked = np.minimum(asked, active["size"][order]).astype(np.int64)
        shown = np.zeros(len(addr), np.int64)
        if len(addr):
            place = np.minimum(np.searchsorted(addr, live["buffer"]), len(addr) - 1)
            known = addr[place] == live["buffer"]
            np.add.at(shown, place[known], live["nbytes"][known].astype(np.int64))
        short = (shown > 0) & (shown < asked)
        return {
            "addresses": addresses[is_active][order][short].tolist(),
            "visible": shown[short].tolist(),
        }

    def _primitive(self, number: int) -> str:
        names: Sequence[str] = self._recording.primitives
        return text(names[number]) if number < len(names) else ""

    def _time(self, mark: Mark) -> int:
        return mark.timestamp_us + self._recording.start_us


def _path(names: Sequence[str]) -> str:
    return "/".join(text(name) for name in names)
