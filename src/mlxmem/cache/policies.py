"""The rules of MLX's three allocators, as data.

All three keep freed buffers in one kind of cache. They differ in how a request is
rounded, which freed buffer is kept, and when the cache gives buffers back. The rules
are those of MLX's sources (`BufferCache`, and the allocators of the backends no_gpu,
metal and cuda) at v0.32.1.
"""

from __future__ import annotations

import copy
import enum
from dataclasses import dataclass

from mlxmem.units import format_bytes, parse_bytes

KiB, MiB = 1 << 10, 1 << 20
NO_LIMIT = 2**62  # more than any machine has, and sums of it stay exact


class Rounding(enum.IntEnum):
    """What size a request is given."""

    Exact = 0
    Pages = 1  # whole pages, above one page
    Classes = 2  # 8 bytes, powers of two up to a page, whole pages


class Reclaim(enum.IntEnum):
    """When an allocation makes the cache give buffers back first."""

    Never = 0
    AtCollectionLimit = 1
    AboveMemoryLimit = 2


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What one allocator does with requests and freed buffers.

    A cached buffer serves a request of n bytes if its size is in
    [n, min(2n, n + 2 * page)); the smallest such, the oldest of equal ones. What the
    cache gives back are its oldest buffers, or all of them where at least nine tenths
    are to go.

    Attributes
    ----------
    name : str
        "cpu", "metal" or "cuda".
    page : int
        Unit of the window, bytes.
    cache_limit, memory_limit : int
        Bytes, as `mx.set_cache_limit` and `mx.set_memory_limit` set them.
    rounding : Rounding
    reclaim : Reclaim
    collection_base : int
        The collection limit is this or the memory limit, the smaller one; bytes.
    resource_limit : int
        Buffers, active and cached, from which on the cache is emptied.
    slab_size, slab_blocks : int
        The largest buffer that is cut out of memory held anyway, bytes, and how many
        there can be.
    has_cache : bool
        False for the CPU before 0.32.0, which keeps nothing.
    keeps_only_whole : bool
        Whether a freed buffer must fit under the cache limit to be kept; else it is
        kept while the cache is below it.
    trims_at_once : bool
        Whether `set_cache_limit` trims the cache; else the next allocation does.
    """

    name: str
    page: int
    cache_limit: int
    memory_limit: int = NO_LIMIT
    rounding: Rounding = Rounding.Exact
    reclaim: Reclaim = Reclaim.Never
    collection_base: int = NO_LIMIT
    resource_limit: int = NO_LIMIT
    slab_size: int = 0
    slab_blocks: int = 0
    has_cache: bool = True
    keeps_only_whole: bool = False
    trims_at_once: bool = False

    def with_limits(
        self,
        cache_limit: int | str | None = None,
        memory_limit: int | str | None = None,
    ) -> Policy:
        """Return the same policy under other limits; bytes, or a size with a unit."""
        changed = copy.copy(self)
        for name, limit in (
            ("cache_limit", cache_limit),
            ("memory_limit", memory_limit),
        ):
            if limit is not None:
                object.__setattr__(changed, name, min(parse_bytes(limit), NO_LIMIT))
        return changed

    def window(self, n: int) -> tuple[int, int]:
        """Return the sizes that serve a request of n bytes, the last one excluded."""
        return n, min(2 * n, n + 2 * self.page)


class CpuPolicy(Policy):
    """The CPU backend on Linux.

    Parameters
    ----------
    cache_limit : int or str
        Bytes, or a size with a unit; MLX's default is 32 MiB.
    has_cache : bool
        False for MLX before 0.32.0.
    """

    def __init__(
        self, cache_limit: int | str = 32 * MiB, *, has_cache: bool = True
    ) -> None:
        super().__init__(
            name="cpu",
            page=4 * KiB,
            cache_limit=min(parse_bytes(cache_limit), NO_LIMIT),
            has_cache=has_cache,
            keeps_only_whole=True,
            trims_at_once=True,
        )


class MetalPolicy(Policy):
    """The Metal backend on Apple silicon.

    Not modelled: that a virtual machine has no heap for buffers below 256 bytes.

    Parameters
    ----------
    working_set : int or str
        `mx.device_info()["max_recommended_working_set_size"]`.
    ram : int or str
        Memory of the machine.
    """

    def __init__(self, working_set: int | str, ram: int | str) -> None:
        recommended = _positive(working_set, "working_set")
        memory = _positive(ram, "ram")
        if recommended > memory:
            raise ValueError(
                f"working_set ({format_bytes(recommended)}) can't be more than ram "
                f"({format_bytes(memory)})"
            )
        limit = min(int(min(1.5 * recommended, 0.95 * memory)), NO_LIMIT)
        super().__init__(
            name="metal",
            page=16 * KiB,
            cache_limit=limit,
            memory_limit=limit,
            rounding=Rounding.Pages,
            reclaim=Reclaim.AtCollectionLimit,
            collection_base=min(int(0.95 * recommended), NO_LIMIT),
            resource_limit=499_000,
            slab_size=255,
            slab_blocks=4096,  # 1 MiB in blocks of 256 bytes
        )


class CudaPolicy(Policy):
    """The CUDA backend.

    Not modelled: the check of the device's memory pools, which gives cached buffers
    back once a pool has reserved 0.95 of the device.

    Parameters
    ----------
    total : int or str
        Memory of the device.
    """

    def __init__(self, total: int | str) -> None:
        limit = min(int(_positive(total, "total") * 0.95), NO_LIMIT)
        super().__init__(
            name="cuda",
            page=16 * KiB,
            cache_limit=limit,
            memory_limit=limit,
            rounding=Rounding.Classes,
            reclaim=Reclaim.AboveMemoryLimit,
            slab_size=8,
            slab_blocks=8192,  # 64 KiB in blocks of 8 bytes
        )


def usual_working_set(ram: int) -> int:
    """Return what Metal usually recommends on a machine with this much memory, bytes.

    Two thirds up to 36 GB, three quarters above; a machine's own number is
    `mx.device_info()["max_recommended_working_set_size"]`.
    """
    return ram * 2 // 3 if ram <= 36 * 10**9 else ram * 3 // 4


def named_policy(
    name: str,
    *,
    ram: int | str | None = None,
    working_set: int | str | None = None,
    total: int | str | None = None,
) -> Policy:
    """Return the policy of a backend.

    Parameters
    ----------
    name : str
        "cpu", "metal" or "cuda".
    ram, working_set, total : int or str, optional
        Numbers of the machine: the first two are Metal's, where `working_set` may be
        left out, `total` is CUDA's.

    Raises
    ------
    TypeError, ValueError
        There is no such policy, a number is missing, bad, or of another policy; the
        message shows a form that works.
    """
    name = name.lower()
    given = {"ram": ram, "working_set": working_set, "total": total}
    takes = {"cpu": (), "metal": ("ram", "working_set"), "cuda": ("total",)}
    if name not in takes:
        raise ValueError(
            f"there is no policy {name!r}, only {', '.join(takes)}; {_FORMS}"
        )
    for key, value in given.items():
        if value is not None and key not in takes[name]:
            raise ValueError(f"the policy {name} takes no {key}; {_FORMS}")
    if name == "cpu":
        return CpuPolicy()
    if name == "cuda":
        if total is None:
            raise ValueError(
                f"the policy cuda needs total, the device's memory; {_FORMS}"
            )
        return CudaPolicy(total)
    if ram is None:
        raise ValueError(f"the policy metal needs ram, the machine's memory; {_FORMS}")
    memory = _positive(ram, "ram")
    if working_set is None:
        working_set = max(usual_working_set(memory), 1)
    return MetalPolicy(working_set, memory)


def chosen_policy(
    policy: Policy | str | None,
    ram: int | str | None,
    working_set: int | str | None,
    total: int | str | None,
) -> Policy | None:
    """Return the policy that was asked for by object or name, None for none.

    Raises
    ------
    TypeError, ValueError
        As from `named_policy`; or numbers were given without a name.
    """
    numbers = {"ram": ram, "working_set": working_set, "total": total}
    if isinstance(policy, str):
        return named_policy(policy, **numbers)
    for name, value in numbers.items():
        if value is not None:
            raise ValueError(f"{name} is a number of a named policy; {_FORMS}")
    if policy is not None and not isinstance(policy, Policy):
        raise TypeError(
            'policy must be one of mlxmem.cache, "cpu", "metal" or "cuda", not '
            f"{policy!r}"
        )
    return policy


_FORMS = (
    'valid forms: policy "cpu"; "metal" with ram "16GB" and, if known, working_set '
    '"10.7GB"; "cuda" with total "80GB"'
)


def _positive(size: int | str, name: str) -> int:
    try:
        number = parse_bytes(size)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from None
    if not number:
        raise ValueError(f"{name} must be more than 0; {_FORMS}")
    return number
