"""The names of the MLX fork that records memory events: change only the import."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from mlxmem import _hook, recorder, snapshot as _snapshot
from mlxmem.events import from_dicts


def record_memory_events(enabled: bool = True, max_entries: int = 0) -> None:
    """Start a new session, or stop the running one.

    Parameters
    ----------
    enabled : bool
    max_entries : int
        Keep the last `max_entries` events; 0 = keep all.

    Raises
    ------
    TypeError, ValueError, UnsupportedMLXError
        As `mlxmem.enable`.
    """
    if not isinstance(enabled, bool):
        raise TypeError(f"enabled must be True or False, not {enabled!r}")
    if enabled:
        recorder.enable(max_entries)
    else:
        recorder.disable()


def get_memory_events() -> list[dict[str, Any]]:
    """Return the retained events, oldest first; see `mlxmem.events`."""
    return recorder.events()


def to_snapshot(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Turn events into PyTorch's memory snapshot.

    Only what the events show is known: buffers that neither they nor their frees name
    are missing. `mlxmem.snapshot` knows the rest.

    Parameters
    ----------
    events : iterable of dict
        As `mlxmem.events` returns them; their times count from the start of this
        process's session, or from the Unix epoch where there was none, and the
        backend is the session's.

    Raises
    ------
    TypeError, ValueError
        An event is malformed; the message names it.
    """
    if not isinstance(events, Iterable):
        raise TypeError(f"events must be an iterable of dicts, not {events!r}")
    start_us = recorder.session_start_us()
    # The backend tells what the addresses are of.
    settings = {"backend": _hook.backend()} if start_us else {}
    return _snapshot.build(from_dicts(events, start_us=start_us, settings=settings))


def dump_snapshot(
    events: Iterable[Mapping[str, Any]], path: str | os.PathLike[str]
) -> pathlib.Path:
    """Write `to_snapshot(events)` as a pickle; see `mlxmem.dump`.

    Raises
    ------
    TypeError, ValueError, OSError
    """
    return _snapshot.write(to_snapshot(events), path)
