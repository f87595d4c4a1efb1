"""The cache of this process: statistics, and the limit that it needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mlxmem import recorder
from mlxmem.cache.policies import Policy, named_policy
from mlxmem.units import parse_bytes

if TYPE_CHECKING:
    from mlxmem.cache.advice import CacheLimit


def cache_stats(
    by: str = "line",
    top: int = 20,
    *,
    limits: Sequence[int | str] = (),
    policy: Policy | str | None = None,
    ram: int | str | None = None,
    working_set: int | str | None = None,
    total: int | str | None = None,
) -> dict[str, Any]:
    """Return what the buffer cache did in the running or last session.

    The same as `mlxmem cache --json` prints of a dump. Takes some seconds for a million
    events, since the session is replayed under some thirty limits.

    Parameters
    ----------
    by : str
        What a row of `lines` stands for, as `--by`.
    top : int
        Most rows.
    limits : sequence of int or str
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

    sizes = [parse_bytes(limit) for limit in limits]
    chosen = _chosen(policy, ram, working_set, total)
    return cache(from_snapshot(recorder.snapshot()), by, top, sizes, chosen)


def recommend_cache_limit(
    policy: Policy | str | None = None,
    *,
    ram: int | str | None = None,
    working_set: int | str | None = None,
    total: int | str | None = None,
) -> CacheLimit:
    """Return the smallest cache limit whose hit rate is within 1 % of the best.

    It holds for what the running or last session recorded, by requests and by bytes.
    Record a phase that is typical, not the start alone.

    Parameters
    ----------
    policy, ram, working_set, total
        As for `cache_stats`.

    Returns
    -------
    CacheLimit
        `limit` (bytes), `hit_rate`, `best_hit_rate`, `hit_rate_bytes`,
        `best_hit_rate_bytes` (0 to 1), `peak_reserved` (bytes) and `reason`.

    Raises
    ------
    RuntimeError
        enable() was never called in this process.
    TypeError, ValueError
        The policy or its numbers are bad; the message shows valid forms.

    Examples
    --------
    >>> mx.set_cache_limit(mlxmem.recommend_cache_limit().limit)
    """
    from mlxmem.cache.advice import recommend
    from mlxmem.cache.replay import follow
    from mlxmem.cache.trace import of_recording

    chosen = _chosen(policy, ram, working_set, total)
    return recommend(follow(of_recording(recorder.recording())).trace, chosen)


def _chosen(
    policy: Policy | str | None,
    ram: int | str | None,
    working_set: int | str | None,
    total: int | str | None,
) -> Policy | None:
    numbers = {"ram": ram, "working_set": working_set, "total": total}
    if isinstance(policy, str):
        return named_policy(policy, **numbers)
    for name, value in numbers.items():
        if value is not None:
            raise ValueError(
                f'{name} is a number of a named policy: say policy="metal", '
                'ram="16 GB", or policy="cuda", total="80 GB"'
            )
    if policy is not None and not isinstance(policy, Policy):
        raise TypeError(
            f'policy must be one of mlxmem.cache, "cpu", "metal" or "cuda", not '
            f"{policy!r}"
        )
    return policy
