"""The cache of this process: statistics, and the limit that it needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mlxmem import recorder
from mlxmem.cache.policies import Policy, chosen_policy
from mlxmem.units import parse_bytes

if TYPE_CHECKING:
    from mlxmem.cache.advice import CacheLimit


def cache_stats(
    by: str = "line",
    top: int = 20,
    *,
    limits: int | str | Sequence[int | str] = (),
    policy: Policy | str | None = None,
    ram: int | str | None = None,
    working_set: int | str | None = None,
    total: int | str | None = None,
) -> dict[str, Any]:
    """Return what the buffer cache did in the running or last session.

    The same as `mlxmem cache --json` prints of a dump. The session is replayed under
    some thirty limits: expect ten seconds for a million events.

    Parameters
    ----------
    by : str
        What a row of `lines` stands for, as `--by`.
    top : int
        Most rows.
    limits : int, str or sequence of these
        Cache limits to replay under: bytes, or sizes like "64 MB".
    policy : Policy or str, optional
        Whose rules to replay under: one of `mlxmem.cache`, or "cpu", "metal" (needs
        `ram`) or "cuda" (needs `total`); those of the recording if left out.
    ram, working_set, total : int or str, optional
        Numbers of a named policy, bytes or sizes.

    Returns
    -------
    dict
        `totals` with `hits`, `hit_rate`, `system_allocations` and others, `misses` by
        kind, `lines`, `contents`, `what_if` and more; docs/json.md has every key.

    Raises
    ------
    RuntimeError
        enable() was never called in this process.
    TypeError, ValueError
        A size, the policy or its numbers are bad; the message shows valid forms.
    """
    # What reports need is not loaded into every program that records.
    from mlxmem.reports.cache import cache
    from mlxmem.reports.history import from_snapshot

    several = [limits] if isinstance(limits, (int, str)) else limits
    sizes = [parse_bytes(limit) for limit in several]
    chosen = chosen_policy(policy, ram, working_set, total)
    return cache(from_snapshot(recorder.snapshot()), by, top, sizes, chosen)


def recommend_cache_limit(
    policy: Policy | str | None = None,
    *,
    ram: int | str | None = None,
    working_set: int | str | None = None,
    total: int | str | None = None,
) -> CacheLimit:
    """Return the smallest cache limit within one percentage point of the best hit rate.

    It holds for what the running or last session recorded, by requests and by bytes,
    and is rounded up to a MiB. Record a phase that is typical, not the start alone.

    Parameters
    ----------
    policy, ram, working_set, total
        As for `cache_stats`.

    Returns
    -------
    CacheLimit
        `limit` (bytes; None where no limit gives any hit), `hit_rate`,
        `hit_rate_bytes` and both as recorded and at best (0 to 1), `peak_reserved`
        (bytes), at this limit and as recorded, and `reason`.

    Raises
    ------
    RuntimeError
        enable() was never called in this process.
    TypeError, ValueError
        The policy or its numbers are bad; the message shows valid forms.

    Examples
    --------
    >>> best = mlxmem.recommend_cache_limit()
    >>> if best.limit is not None:
    ...     mx.set_cache_limit(best.limit)
    """
    from mlxmem.cache.advice import recommend
    from mlxmem.cache.replay import follow
    from mlxmem.cache.trace import of_recording

    chosen = chosen_policy(policy, ram, working_set, total)
    return recommend(follow(of_recording(recorder.recording())).trace, chosen)
