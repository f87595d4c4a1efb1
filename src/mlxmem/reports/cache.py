"""The cache: hits, why the others missed, and what another limit would have done."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from mlxmem.cache import advice
from mlxmem.cache.contents import Contents, cached_bytes, contents
from mlxmem.cache.outcomes import MISSES, Outcome
from mlxmem.cache.policies import NO_LIMIT, Policy
from mlxmem.cache.replay import Followed, Predicted, Sums, follow, predict
from mlxmem.cache.rounding import STEPS, round_up
from mlxmem.cache.trace import CALLS, FREE, Trace, TraceError
from mlxmem.reports.cache_trace import of_history
from mlxmem.reports.grouping import Groups, group
from mlxmem.reports.history import Call, History, Ints, Mask
from mlxmem.reports.reading import SnapshotError
from mlxmem.reports.rows import Row, call_rows, frames_of, heading, row_of, share

# A line's sizes jump when it misses with so many sizes, of which each serves few of the
# misses, and memory comes and goes: weights of many shapes stay.
_JUMPING_SIZES = 8
_JUMPING_MISSES = 4  # a size
_JUMPING_TURNOVER = 4  # missed bytes by the most of them that lived at a time
_MOST_LIMITS = 20  # that are listed
# Ages in the cache, microseconds.
_AGES = (0, 1_000, 10_000, 100_000, 1_000_000, 10_000_000, 60_000_000)

_LOST = (Outcome.Cleared, Outcome.Trimmed, Outcome.Reclaimed, Outcome.NotKept)
KINDS = {
    Outcome.Cold: "cold",
    Outcome.InUse: "in_use",
    Outcome.Window: "window",
    Outcome.Cleared: "cleared",
    Outcome.Trimmed: "trimmed",
    Outcome.Reclaimed: "reclaimed",
    Outcome.NotKept: "limit",
}

# What people read, by kind of miss: the reason,
MISS_REASONS = {
    "cold": "no buffer of such a size was there before",
    "in_use": "all buffers of such a size were in use",
    "window": "a buffer was cached, but larger than the window of reuse",
    "cleared": "one was cached, and clear_cache() gave it back",
    "trimmed": "one was cached, and went for the cache limit",
    "reclaimed": "one was cached, and went for the memory limit",
    "limit": "one was freed, and did not fit under the cache limit",
}
# what took the buffer where no call is known, and what is said beside one.
TAKERS = {
    "cleared": "a clear_cache() that was not seen",
    "trimmed": "the cache limit",
    "reclaimed": "the memory limit, at an allocation",
    "limit": "the cache limit of the start, when they were freed",
}
WHEN_TAKEN = {"limit": ", when they were freed"}


def cache(
    history: History,
    by: str = "line",
    top: int = 20,
    limits: Sequence[int] = (),
    policy: Policy | None = None,
) -> Row:
    """Report what the buffer cache did, and what it would have done.

    Parameters
    ----------
    history : History
    by : str
        One of `grouping.KEYS`.
    top : int
        Most rows in `lines` and `evicted_by`.
    limits : sequence of int
        Cache limits to replay under, bytes, beside 0, the recommended one, and one
        that is never reached.
    policy : Policy, optional
        Whose rules to replay under; those of the recording if left out.

    Returns
    -------
    dict
        Plain data, described key by key in docs/json.md.

    Raises
    ------
    SnapshotError
        The file has nothing about MLX's cache.
    """
    try:
        followed = follow(of_history(history))
    except TraceError as error:
        raise SnapshotError(str(error)) from None
    trace = followed.trace
    groups = group(history, by)
    lines = _lines(followed, groups)[:top]
    chosen = trace.policy if policy is None else policy
    points = advice.curve(trace, chosen)
    best = advice.recommend(trace, chosen, points)
    report = heading("cache", history)
    report |= {
        "by": by,
        "policy": _policy(trace.policy),
        "agreement": _agreement(followed),
        "totals": _totals(followed, history),
        "misses": _misses(followed),
        "limits": _limits(history),
        "evicted_by": _evicted_by(followed, history)[:top],
        "contents": _contents(trace),
        "lines": lines,
        "times": _times(followed, history),
        "what_if": {
            "policy": _policy(chosen),
            "recorded": policy is None,
            "exact": trace.is_exact,
            "rows": _what_if(trace, chosen, limits, best, policy is None),
            "curve": [_point(point) for point in points],
            "recommendation": _recommendation(best),
            "rounding": _rounding(followed, chosen, group(history, "caller")),
        },
    }
    return report


def _policy(policy: Policy) -> Row:
    def limit(value: int) -> int | None:
        return value if value < NO_LIMIT else None

    return {
        "name": policy.name,
        "has_cache": policy.has_cache,
        "page": policy.page,
        "cache_limit": limit(policy.cache_limit),
        "memory_limit": limit(policy.memory_limit),
    }


def _recommendation(best: advice.CacheLimit) -> Row:
    found = dataclasses.asdict(best)
    found["cache_limit"] = found.pop("limit")
    return {
        key: round(value, 4) if isinstance(value, float) else value
        for key, value in found.items()
    }


def _limits(history: History) -> list[Row]:
    """Return the limits that the cache was given, the last ones."""
    rows = [row for row in call_rows(history) if row["name"] == "set_cache_limit"]
    keys = ("value", "at", "time_us", "frames")
    return [{key: row[key] for key in keys} for row in rows[-_MOST_LIMITS:]]


def _agreement(followed: Followed) -> Row:
    totals, trace = followed.totals, followed.trace
    known = [row for row in followed.mismatches if row < len(trace)]
    return {
        "checked": totals["checked"],
        "mismatches": totals["mismatches"],
        "raced": totals["raced"],
        "unseen": totals["unseen"],
        "first_at": int(trace.event[known[0]]) if known else None,
    }


def _sums(sums: Sums) -> Row:
    totals = sums.totals
    return {
        "allocations": sums.allocations,
        "requested_bytes": sums.requested,
        "hits": sums.hits,
        "hit_rate": round(sums.hit_rate, 4),
        "hit_rate_bytes": round(sums.hit_rate_bytes, 4),
        "system_allocations": totals["system_allocations"],
        "system_bytes": totals["system_bytes"],
        "evictions": totals["evictions"],
        "evicted_bytes": totals["evicted_bytes"],
        "peak_active": totals["peak_active"],
        "peak_cache": totals["peak_cache"],
        "peak_reserved": totals["peak_reserved"],
        "waste_bytes": totals["waste"],
        "peak_waste": totals["peak_waste"],
    }


def _totals(followed: Followed, history: History) -> Row:
    trace = followed.trace
    duration_us = history.time_after(history.end)
    if trace.dropped and len(trace):  # all numbers are of what was kept
        duration_us = int(trace.time_us[-1] - trace.time_us[0])
    seconds = max(duration_us, 1) / 1e6
    totals = followed.totals
    return _sums(followed) | {
        "duration_us": duration_us,
        "system_allocations_per_s": round(totals["system_allocations"] / seconds, 1),
        "system_bytes_per_s": round(totals["system_bytes"] / seconds),
    }


def _misses(followed: Followed) -> list[Row]:
    totals, all_ = followed.totals, followed.allocations
    return [
        {
            "kind": KINDS[outcome],
            "count": totals["count"][outcome],
            "bytes": totals["requested"][outcome],
            "share": share(totals["count"][outcome], all_),
        }
        for outcome in MISSES
    ]


def _evicted_by(followed: Followed, history: History) -> list[Row]:
    """Sum the misses whose buffer went by what took it."""
    trace, outcomes = followed.trace, followed.outcomes
    if not trace.policy.has_cache:
        return []  # no call is to blame
    found: dict[tuple[Any, ...], Row] = {}
    missed = np.flatnonzero(np.isin(outcomes, _LOST))
    columns = zip(
        outcomes[missed].tolist(),
        followed.causes[missed].tolist(),
        trace.rows["requested"][missed].tolist(),
        strict=True,
    )
    for outcome, cause, asked in columns:
        call = _call_of(trace, cause, history)
        key = (outcome, call and (call.name, call.value, call.stack))
        row = found.get(key)
        if row is None:
            row = found[key] = {
                "kind": KINDS[Outcome(outcome)],
                "call": call and call.name,
                "value": call and call.value,
                "frames": frames_of(call.stack) if call else [],
                "misses": 0,
                "bytes": 0,
            }
        row["misses"] += 1
        row["bytes"] += asked
    return sorted(found.values(), key=lambda row: -row["misses"])


def _call_of(trace: Trace, cause: int, history: History) -> Call | None:
    if cause < 0 or trace.rows["op"][cause] <= FREE:
        return None
    number = int(trace.number[cause])
    if not 0 <= number < len(history.calls):
        return None
    call = history.calls[number]
    return call if call.name in CALLS else None


def _contents(trace: Trace) -> Row:
    after = cached_bytes(trace)
    last = len(trace) - 1
    start = int(trace.cached["size"].sum()) + trace.unknown
    highest = int(after.argmax()) if len(trace) else -1
    if len(trace) and start > int(after[highest]):
        highest = -1
    return {
        name: {
            "at": int(trace.event[row]) if row >= 0 else -1,
            "time_us": int(trace.time_us[row]) if row >= 0 else 0,
            "bytes": int(after[row]) if row >= 0 else start,
            **_histograms(contents(trace, row)),
        }
        for name, row in (("end", last), ("most", highest))
    }


def _histograms(found: Contents) -> Row:
    edges = [int(edge) for edge in _powers(found.sizes)]
    return {
        "buffers": len(found.sizes),
        "unknown_bytes": found.unknown,
        "sizes": _histogram(found.sizes, found.sizes, edges, "bytes"),
        "ages": _histogram(found.ages_us, found.sizes, list(_AGES), "us"),
    }


def _powers(sizes: Ints) -> list[int]:
    if not len(sizes):
        return []
    first = max(int(sizes.min()).bit_length() - 1, 0)
    return [1 << power for power in range(first, int(sizes.max()).bit_length() + 1)]


def _histogram(values: Ints, sizes: Ints, edges: list[int], unit: str) -> list[Row]:
    """Count buffers and bytes in [edge, next edge); the last one has no end."""
    if not len(values):
        return []
    place = np.searchsorted(np.array(edges, np.int64), values, side="right") - 1
    place = np.maximum(place, 0)
    buffers = np.bincount(place, minlength=len(edges))
    total = np.zeros(len(buffers), np.int64)
    np.add.at(total, place, sizes)
    ends = [*edges[1:], None]
    return [
        {
            f"from_{unit}": edge,
            f"to_{unit}": end,
            "buffers": int(count),
            "bytes": int(sum_),
        }
        for edge, end, count, sum_ in zip(edges, ends, buffers, total, strict=True)
        if count
    ]


def _lines(followed: Followed, groups: Groups) -> list[Row]:
    """Return the groups that allocate, most missed bytes first."""
    trace = followed.trace
    asked = trace.allocations
    block = trace.number[asked]
    of_group = groups.index[block]
    requested = trace.rows["requested"][asked]
    outcome = followed.outcomes[asked]
    count = len(groups)
    by_kind = np.zeros((len(Outcome), count), np.int64)
    np.add.at(by_kind, (outcome, of_group), 1)
    total = np.bincount(of_group, minlength=count)
    bytes_ = np.zeros(count, np.int64)
    np.add.at(bytes_, of_group, requested)
    missed = np.zeros(count, np.int64)
    misses = outcome != Outcome.Hit
    np.add.at(missed, of_group[misses], requested[misses])
    sizes = _distinct_sizes(of_group, requested, count)
    smallest = np.full(count, np.iinfo(np.int64).max)
    largest = np.zeros(count, np.int64)
    np.minimum.at(smallest, of_group, requested)
    np.maximum.at(largest, of_group, requested)
    jumps = _jumping(followed, groups)
    order = np.lexsort((-total, -missed))
    found = []
    for place in order[total[order] > 0].tolist():
        hits = int(by_kind[Outcome.Hit][place])
        row = row_of(groups, place) | {
            "allocations": int(total[place]),
            "bytes": int(bytes_[place]),
            "hits": hits,
            "hit_rate": share(hits, int(total[place])),
            "missed_bytes": int(missed[place]),
            "misses": {KINDS[kind]: int(by_kind[kind][place]) for kind in MISSES},
            "sizes": int(sizes[place]),
            "smallest": int(smallest[place]),
            "largest": int(largest[place]),
        }
        row["jumps"] = bool(jumps[place])
        found.append(row)
    return found


def _distinct_sizes(of_group: Ints, size: Ints, groups: int) -> Ints:
    """Count the different sizes of each group, shape (groups,)."""
    distinct, place = np.unique(size, return_inverse=True)
    pairs = np.unique(of_group * max(len(distinct), 1) + place)
    owner = pairs // max(len(distinct), 1)
    return np.bincount(owner, minlength=groups).astype(np.int64)


def _jumping(followed: Followed, groups: Groups) -> Mask:
    """Tell of which groups the sizes jump, shape (groups,).

    Small requests don't count: up to two pages nearly any larger buffer serves.
    """
    trace, count = followed.trace, len(groups)
    asked = trace.allocations
    size = trace.rows["requested"][asked]
    large = size > 2 * trace.policy.page
    missed = asked[large & (followed.outcomes[asked] != Outcome.Hit)]
    block = trace.number[missed]
    of_group = groups.index[block]
    size = trace.rows["requested"][missed]
    misses = np.bincount(of_group, minlength=count)
    sizes = _distinct_sizes(of_group, size, count)
    total = np.zeros(count, np.int64)
    np.add.at(total, of_group, size)

    # The most bytes of each group that lived at a time.
    blocks = groups.history.blocks[block]
    time = np.concatenate([blocks["start"], blocks["end"]])
    change = np.concatenate([size, -size])
    owner = np.concatenate([of_group, of_group])
    order = np.lexsort((time, owner))
    live = np.cumsum(change[order])
    most = np.ones(count, np.int64)
    # Each group's changes add up to 0, so that the next one begins at 0.
    np.maximum.at(most, owner[order], live)
    jumps: Mask = sizes >= _JUMPING_SIZES
    jumps &= sizes * _JUMPING_MISSES >= misses
    return jumps & (total >= _JUMPING_TURNOVER * most)


def _times(followed: Followed, history: History) -> Row | None:
    """Return what the allocator's calls took, None where nobody measured."""
    times = history.times
    if times is None or not times.new:
        return None
    new = times.new_ns / times.new
    reused = times.reused_ns / times.reused if times.reused else None
    misses = followed.allocations - followed.hits
    return {
        "measured_new": times.new,
        "measured_reused": times.reused,
        "new_us": round(new / 1e3, 3),
        "reused_us": None if reused is None else round(reused / 1e3, 3),
        "lost_us": round(max(new - (reused or 0), 0) * misses / 1e3),
    }


def _what_if(
    trace: Trace,
    policy: Policy,
    limits: Sequence[int],
    best: advice.CacheLimit,
    is_recorded: bool,
) -> list[Row]:
    asked: list[tuple[str, int]] = [("no cache", 0)]
    asked += [("", limit) for limit in limits]
    if best.limit is not None:
        asked.append(("recommended", best.limit))
    asked.append(("no limit", NO_LIMIT))
    if not is_recorded:
        asked.append((f"the default of {policy.name}", policy.cache_limit))
    return [
        _point(predict(trace, policy.with_limits(cache_limit=limit))) | {"label": label}
        for label, limit in asked
    ]


def _point(found: Predicted) -> Row:
    limit = found.policy.cache_limit
    return {"cache_limit": limit if limit < NO_LIMIT else None, **_sums(found)}


def _rounding(followed: Followed, policy: Policy, callers: Groups) -> Row | None:
    """Return what rounding up the sizes of the callers whose sizes jump would do."""
    trace = followed.trace
    jumps = _jumping(followed, callers)
    if not jumps.any():
        return None
    asked = trace.allocations
    chosen = asked[jumps[callers.index[trace.number[asked]]]]
    before = predict(trace, policy, fixed_limit=False)
    steps = [{"steps_per_doubling": None, **_point(before)}]
    for count in STEPS:
        requested = trace.rows["requested"].copy()
        requested[chosen] = round_up(requested[chosen], count)
        found = predict(trace, policy, fixed_limit=False, requested=requested)
        steps.append({"steps_per_doubling": count, **_point(found)})
    labels = [callers.labels[place] for place in np.flatnonzero(jumps).tolist()]
    return {"lines": labels, "steps": steps}
