"""Which cache limit a program needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlxmem.cache.policies import NO_LIMIT, MiB, Policy
from mlxmem.cache.replay import Predicted, predict
from mlxmem.cache.trace import Trace
from mlxmem.units import format_bytes

TOLERANCE = 0.01  # by which a hit rate may stay below the best one
_SMALLEST = 4096  # bytes: a limit below keeps hardly anything
_REFINEMENTS = 8  # halvings, down to the unit that a limit is rounded to
_BITS = 8  # of a limit that is recommended, one part in 128


@dataclass(frozen=True)
class CacheLimit:
    """A cache limit that the recorded requests call for.

    Rates are 0 to 1: of requests, and of the bytes that they ask for.

    Attributes
    ----------
    limit : int or None
        Bytes, for `mx.set_cache_limit`; None where no limit gives any hit.
    hit_rate, hit_rate_bytes : float
        At this limit.
    best_hit_rate, best_hit_rate_bytes : float
        At the best limit for each.
    recorded_hit_rate, recorded_hit_rate_bytes : float
        As recorded.
    peak_reserved, recorded_peak_reserved : int
        The highest active + cache at this limit and as recorded, bytes.
    reason : str
        Why this one.
    """

    limit: int | None
    hit_rate: float
    hit_rate_bytes: float
    best_hit_rate: float
    best_hit_rate_bytes: float
    recorded_hit_rate: float
    recorded_hit_rate_bytes: float
    peak_reserved: int
    recorded_peak_reserved: int
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
    limit = most
    while limit > _SMALLEST:
        limits.add(limit)
        limit //= 2
    found = [predict(trace, policy.with_limits(cache_limit=n)) for n in sorted(limits)]
    return found


def recommend(
    trace: Trace,
    policy: Policy | None = None,
    points: Sequence[Predicted] | None = None,
) -> CacheLimit:
    """Return the smallest limit within one percentage point of the best hit rate.

    That holds for requests and for bytes: a small cache that serves each scalar and no
    large array would pass by requests alone. The limit is rounded up to a MiB.

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
    recorded = predict(trace, fixed_limit=False)
    useful = policy.has_cache and best.hits > 0
    return CacheLimit(
        limit=_limit(chosen) if useful else None,
        hit_rate=chosen.hit_rate,
        hit_rate_bytes=chosen.hit_rate_bytes,
        best_hit_rate=best.hit_rate,
        best_hit_rate_bytes=best_bytes,
        recorded_hit_rate=recorded.hit_rate,
        recorded_hit_rate_bytes=recorded.hit_rate_bytes,
        peak_reserved=chosen.totals["peak_reserved"],
        recorded_peak_reserved=recorded.totals["peak_reserved"],
        reason=_reason(chosen, best, best_bytes, recorded),
    )


def _limit(point: Predicted) -> int:
    return point.policy.cache_limit


def _rounded(limit: int) -> int:
    """Round up to a whole MiB, and where that is many to few significant bits."""
    unit = max(MiB, 1 << max(limit.bit_length() - _BITS, 0))
    return -(-limit // unit) * unit


def _reason(
    chosen: Predicted, best: Predicted, best_bytes: float, recorded: Predicted
) -> str:
    if not best.policy.has_cache:
        return "this MLX caches nothing on the CPU, so no limit changes anything"
    if not best.allocations:
        return "nothing was allocated"
    if not best.hits:
        return (
            "no request was recorded that a cache could serve, at any limit; record "
            "some whole steps"
        )
    limit = "no cache at all" if not _limit(chosen) else "the smallest limit"
    return (
        f"{limit} within one percentage point of the best hit rate: "
        f"{_percent(chosen.hit_rate)} of requests and "
        f"{_percent(chosen.hit_rate_bytes)} of bytes hit (at best "
        f"{_percent(best.hit_rate)} and {_percent(best_bytes)}, as recorded "
        f"{_percent(recorded.hit_rate)} and {_percent(recorded.hit_rate_bytes)}); "
        f"reserved peaks at {format_bytes(chosen.totals['peak_reserved'])}, as "
        f"recorded at {format_bytes(recorded.totals['peak_reserved'])}"
    )


def _percent(rate: float) -> str:
    # Rounded as in the reports' JSON first, so that tables show the same.
    return f"{round(rate, 4):.1%}"
