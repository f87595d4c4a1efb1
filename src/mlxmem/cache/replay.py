"""Replays of a trace: as it was recorded, and as it would have been."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from mlxmem.cache import _replay
from mlxmem.cache.outcomes import Outcome, Totals
from mlxmem.cache.policies import Policy
from mlxmem.cache.trace import EVICT, UNSEEN_CLEAR, Trace

Ints = npt.NDArray[np.int64]
Outcomes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Sums:
    """What a replay adds up to; sizes in bytes."""

    totals: Totals

    @property
    def allocations(self) -> int:
        """Requests of more than 0 bytes."""
        return sum(self.totals["count"])

    @property
    def requested(self) -> int:
        """Bytes that were asked for."""
        return sum(self.totals["requested"])

    @property
    def hits(self) -> int:
        """Requests that the cache served."""
        return self.totals["count"][Outcome.Hit]

    @property
    def hit_rate(self) -> float:
        """Hits by requests, 0 of none."""
        return self.hits / self.allocations if self.allocations else 0.0

    @property
    def hit_rate_bytes(self) -> float:
        """Bytes that hits asked for by bytes that were asked for, 0 of none."""
        asked = self.requested
        return self.totals["requested"][Outcome.Hit] / asked if asked else 0.0


@dataclass(frozen=True)
class Followed(Sums):
    """A trace as it was recorded, and whether the model would have decided the same.

    Attributes
    ----------
    outcomes : ndarray of uint8, shape (n,)
        An `Outcome` for each row.
    causes : ndarray of int64, shape (n,)
        Row of the call that took what would have served, or that set the limit for
        which it went; -1 = none.
    mismatches : list of int
        The first 100 rows at which the model decides otherwise.
    trace : Trace
        With the clears marked that no recorded call explains.
    """

    outcomes: Outcomes
    causes: Ints
    mismatches: list[int]
    trace: Trace


@dataclass(frozen=True)
class Predicted(Sums):
    """A trace as it would have been.

    Attributes
    ----------
    policy : Policy
    outcomes, causes : ndarray, shape (n,), or None
        As in `Followed`.
    reserved : ndarray of int64, shape (n,), or None
        Bytes after each row.
    """

    policy: Policy
    outcomes: Outcomes | None = None
    causes: Ints | None = None
    reserved: Ints | None = None


def follow(trace: Trace) -> Followed:
    """Replay what was recorded, and compare each decision with the model's.

    Checked are, for each request, whether the cache served it and with which buffer;
    for each freed buffer, whether it was kept; for each buffer that the cache gave
    back, that it was its turn. Where two threads raced, one of them in a call that
    clears or trims the cache, the free just before its evictions and the allocation
    just after may stand on the other side; that is tried before it counts as a
    mismatch.

    Parameters
    ----------
    trace : Trace

    Returns
    -------
    Followed
    """
    totals, outcomes, causes, unseen, mismatches = _replay.follow(
        trace.rows, trace.cached, trace.unknown, trace.active, trace.policy
    )
    if trace.dropped:
        # A ring that cuts a clear or a trim in two lost the call with its first half.
        begins = np.flatnonzero(trace.rows["op"] < EVICT)
        unseen[: begins[0] if len(begins) else len(unseen)] = False
    if unseen.any():
        rows = trace.rows.copy()
        rows["call"][unseen & (rows["op"] == EVICT)] = UNSEEN_CLEAR
        trace = replace(trace, rows=rows)
    return Followed(totals, outcomes, causes, mismatches, trace)


def predict(
    trace: Trace,
    policy: Policy | None = None,
    *,
    fixed_limit: bool = True,
    requested: Ints | None = None,
    outcomes: bool = False,
    curve: bool = False,
) -> Predicted:
    """Replay the requests of a trace and let a policy decide.

    Parameters
    ----------
    trace : Trace
        As `Followed` has it.
    policy : Policy, optional
        The recorded one if left out.
    fixed_limit : bool
        Whether the policy's cache limit holds throughout, whatever limits the program
        set; else its calls change it.
    requested : ndarray of int64, shape (n,), optional
        Sizes to ask for instead of the recorded ones, bytes.
    outcomes, curve : bool
        What to return beside the totals.

    Returns
    -------
    Predicted
    """
    policy = trace.policy if policy is None else policy
    rows = trace.rows
    if requested is not None:
        rows = rows.copy()
        rows["requested"] = requested
    totals, whats, causes, reserved = _replay.predict(
        rows,
        trace.cached,
        trace.unknown,
        trace.active,
        policy,
        fixed_limit=fixed_limit,
        outcomes=outcomes,
        curve=curve,
    )
    return Predicted(totals, policy, whats, causes, reserved)
