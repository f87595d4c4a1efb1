"""Which cache limit a program needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlxmem.cache.policies import NO_LIMIT, Policy
from mlxmem.cache.replay import Predicted, predict
from mlxmem.cache.trace import Trace
from mlxmem.units import format_bytes

TOLERANCE = 0.01  # of the hit rate, by which a limit may stay below the best
_SMALLEST = 4096  # bytes: a limit below keeps hardly anything
_STEPS_PER_DOUBLING = 2
_REFINEMENTS = 7
_BITS = 8  # of a limit that is recommended, one part in 128


@dataclass(frozen=True)
class CacheLimit:
    """A cache limit that the recorded requests call for.

    Attributes
    ----------
    limit : int
        Bytes, for `mx.set_cache_limit`.
    hit_rate, best_hit_rate : float
        What part of the requests the cache serves at this limit, and at the best one.
    hit_rate_bytes, best_hit_rate_bytes : float
        What part of the requested bytes.
    peak_reserved : int
        The highest active + cache at this limit, bytes.
    reason : str
        Why this one.
    """

    limit: int
    hit_rate: float
    best_hit_rate: float
    hit_rate_bytes: float
    best_hit_rate_bytes: float
    peak_reserved: int
    reason: str


def curve(trace: Trace, policy: Policy | None = None) -> list[Predicted]:
    """Replay under limits from nothing to all that could ever be cached.

    There is no shorter way than a replay for each: a larger cache can have fewer hits,
    since what it keeps may leave no room for the buffer that is wanted next.

    Parameters
    ----------
    trace : Trace
    policy : Policy, optional
        The recorded one if left out.

    Returns
    -------
    list of Predicted
        By rising limit; the last one is never reached.
    """
    policy = trace.policy if policy is None else policy
    largest = predict(trace, policy.with_limits(cache_limit=NO_LIMIT))
    most = largest.totals["peak_cache"]
    limits = {0, most}
    limit, step = float(most), 2 ** (1 / _STEPS_PER_DOUBLING)
    while limit > _SMALLEST:
        limits.add(int(limit))
        limit /= step
    found = [predict(trace, policy.with_limits(cache_limit=n)) for n in sorted(limits)]
    return found


def recommend(
    trace: Trace,
    policy: Policy | None = None,
    points: Sequence[Predicted] | None = None,
) -> CacheLimit:
    """Return the smallest limit whose hit rate is within 1 % of the best.

    That holds for requests and for bytes: a small cache that serves each scalar and no
    large array would pass by requests alone.

    Parameters
    ----------
    trace : Trace
    policy : Policy, optional
        The recorded one if left out.
    points : sequence of Predicted, optional
        What `curve` returned.

    Returns
    -------
    CacheLimit
    """
    policy = trace.policy if policy is None else policy
    points = curve(trace, policy) if points is None else points
    best = max(points, key=lambda point: (point.hit_rate, -_limit(point)))
    best_bytes = max(point.hit_rate_bytes for point in points)

    def is_enough(point: Predicted) -> bool:
        return (
            point.hit_rate >= best.hit_rate - TOLERANCE
            and point.hit_rate_bytes >= best_bytes - TOLERANCE
        )

    place = next(
        (i for i, point in enumerate(points) if is_enough(point)), points.index(best)
    )
    chosen = points[place]
    if place and best.hits:
        low, high = _limit(points[place - 1]), _limit(chosen)
        for _ in range(_REFINEMENTS):
            middle = _rounded((low + high) // 2)
            if not low < middle < high:
                break
            tried = predict(trace, policy.with_limits(cache_limit=middle))
            if is_enough(tried):
                high, chosen = middle, tried
            else:
                low = middle
        neat = _rounded(_limit(chosen))
        tried = predict(trace, policy.with_limits(cache_limit=neat))
        if is_enough(tried):
            chosen = tried
    return CacheLimit(
        _limit(chosen),
        chosen.hit_rate,
        best.hit_rate,
        chosen.hit_rate_bytes,
        best_bytes,
        chosen.totals["peak_reserved"],
        _reason(chosen, best, best_bytes, points[-1]),
    )


def _limit(point: Predicted) -> int:
    return point.policy.cache_limit


def _rounded(limit: int) -> int:
    """Round up to a number with few significant bits."""
    unit = 1 << max(limit.bit_length() - _BITS, 0)
    return -(-limit // unit) * unit


def _reason(
    chosen: Predicted, best: Predicted, best_bytes: float, largest: Predicted
) -> str:
    if not best.allocations:
        return "nothing was allocated"
    if not best.hits:
        return (
            "no limit serves a single request from the cache: each asks for a size "
            "that nothing freed before has"
        )
    reserved = format_bytes(chosen.totals["peak_reserved"])
    most = format_bytes(largest.totals["peak_reserved"])
    limit = "no cache at all is" if not _limit(chosen) else "the smallest limit"
    text = (
        f"{limit} within 1 % of the best hit rate: {chosen.hit_rate:.1%} of requests "
        f"and {chosen.hit_rate_bytes:.1%} of bytes, the best are {best.hit_rate:.1%} "
        f"and {best_bytes:.1%}; reserved peaks at {reserved}"
    )
    if chosen.totals["peak_reserved"] < largest.totals["peak_reserved"]:
        text += f", {most} without a limit"
    return text
