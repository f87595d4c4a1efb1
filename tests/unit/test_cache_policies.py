"""The rules of the three allocators: their numbers, and what is said of wrong ones."""

from __future__ import annotations

from typing import Any

import pytest

from mlxmem.cache.policies import (
    NO_LIMIT,
    CpuPolicy,
    CudaPolicy,
    MetalPolicy,
    Policy,
    Reclaim,
    Rounding,
    named_policy,
    usual_working_set,
)

KiB, MiB, GiB = 1 << 10, 1 << 20, 1 << 30


def test_cpu() -> None:
    policy = CpuPolicy()
    assert policy.cache_limit == 33_554_432
    assert policy.page == 4096
    assert policy.memory_limit == NO_LIMIT  # it is for eval alone
    assert (policy.rounding, policy.reclaim) == (Rounding.Exact, Reclaim.Never)
    assert policy.keeps_only_whole
    assert policy.trims_at_once
    assert policy.has_cache
    assert not CpuPolicy(has_cache=False).has_cache
    assert CpuPolicy("1.5 MiB").cache_limit == 1_572_864
    assert CpuPolicy(2**64 - 1).cache_limit == NO_LIMIT


@pytest.mark.parametrize(
    ("working_set", "ram", "limit", "collection"),
    [
        # 1.5 of the working set, then 0.95 of the memory is less.
        (10_000_000_000, 16_000_000_000, 15_000_000_000, 9_500_000_000),
        (11_453_251_584, 17_179_869_184, 16_320_875_724, 10_880_589_004),
        ("48GiB", "64GiB", 65_283_502_899, 48_962_627_174),
        # Fractions of a byte are cut off.
        (7, 100, 10, 6),
        (1, 1, 0, 0),
        ("0.000001GB", "16GB", 1500, 950),
    ],
)
def test_metal(
    working_set: int | str, ram: int | str, limit: int, collection: int
) -> None:
    policy = MetalPolicy(working_set, ram)
    assert (policy.cache_limit, policy.memory_limit) == (limit, limit)
    assert policy.collection_base == collection
    assert (policy.page, policy.resource_limit) == (16_384, 499_000)
    assert (policy.slab_size, policy.slab_blocks) == (255, 4096)
    assert policy.rounding == Rounding.Pages
    assert policy.reclaim == Reclaim.AtCollectionLimit
    assert not policy.keeps_only_whole
    assert not policy.trims_at_once


@pytest.mark.parametrize(
    ("total", "limit"),
    [
        (80_000_000_000, 76_000_000_000),
        (85_899_345_920, 81_604_378_624),
        ("24GiB", 24_481_313_587),
        (1, 0),
        (19, 18),
    ],
)
def test_cuda(total: int | str, limit: int) -> None:
    policy = CudaPolicy(total)
    assert (policy.cache_limit, policy.memory_limit) == (limit, limit)
    assert (policy.page, policy.slab_size, policy.slab_blocks) == (16_384, 8, 8192)
    assert policy.rounding == Rounding.Classes
    assert policy.reclaim == Reclaim.AboveMemoryLimit
    assert not policy.keeps_only_whole
    assert not policy.trims_at_once


@pytest.mark.parametrize(
    ("policy", "n", "end"),
    [
        (CpuPolicy(), 1, 2),
        (CpuPolicy(), 100, 200),
        (CpuPolicy(), 8191, 16_382),
        (CpuPolicy(), 8192, 16_384),  # here both rules say the same
        (CpuPolicy(), 8193, 16_385),
        (CpuPolicy(), MiB, MiB + 8192),
        (MetalPolicy("10GB", "16GB"), 32_767, 65_534),
        (MetalPolicy("10GB", "16GB"), 32_769, 65_537),
        (CudaPolicy("80GB"), MiB, MiB + 32_768),
    ],
)
def test_window(policy: Policy, n: int, end: int) -> None:
    assert policy.window(n) == (n, end)


def test_with_limits() -> None:
    policy = MetalPolicy("10GB", "16GB")

    changed = policy.with_limits("1 MiB", memory_limit=5)

    assert (changed.cache_limit, changed.memory_limit) == (MiB, 5)
    assert (changed.name, changed.collection_base) == ("metal", 9_500_000_000)
    # The first is as it was, and what is not said stays.
    assert policy == MetalPolicy("10GB", "16GB")
    assert policy.with_limits() == policy
    assert policy.with_limits(cache_limit=0).memory_limit == policy.memory_limit
    assert policy.with_limits(cache_limit=0).cache_limit == 0
    assert policy.with_limits(2**64 - 1, 2**64 - 1).cache_limit == NO_LIMIT
    with pytest.raises(ValueError, match="can't be negative: -1"):
        policy.with_limits(-1)
    with pytest.raises(ValueError, match="'64 XB' is no size"):
        policy.with_limits(memory_limit="64 XB")


def test_usual_working_set() -> None:
    assert usual_working_set(16 * GiB) == 11_453_246_122
    assert usual_working_set(36 * 10**9) == 24_000_000_000
    assert usual_working_set(64 * GiB) == 48 * GiB


def test_named_policies() -> None:
    assert named_policy("cpu") == CpuPolicy()
    assert named_policy("cuda", total="80GB") == CudaPolicy(80 * 10**9)
    assert named_policy("metal", ram="16GB", working_set="10GB") == MetalPolicy(
        10 * 10**9, 16 * 10**9
    )
    # The working set is guessed from the memory.
    assert named_policy("metal", ram=16 * GiB) == MetalPolicy(
        11_453_246_122, 17_179_869_184
    )


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("gpu", {}, "there is no policy 'gpu', only cpu, metal, cuda; valid forms"),
        ("", {}, "there is no policy ''"),
        ("metal", {}, "the policy metal needs ram, the machine's memory; valid forms"),
        ("metal", {"working_set": "10GB"}, "the policy metal needs ram"),
        ("cuda", {}, "the policy cuda needs total, the device's memory; valid forms"),
        ("cpu", {"ram": "16GB"}, "the policy cpu takes no ram; valid forms"),
        ("cuda", {"ram": "16GB"}, "the policy cuda takes no ram"),
        (
            "cuda",
            {"working_set": 1, "total": 2},
            "the policy cuda takes no working_set",
        ),
        ("metal", {"total": "16GB"}, "the policy metal takes no total"),
        ("metal", {"ram": "64 XB"}, "ram: '64 XB' is no size; write a number of bytes"),
        ("metal", {"ram": "16GB", "working_set": "x"}, "working_set: 'x' is no size"),
        ("metal", {"ram": -1}, "ram: a size can't be negative: -1"),
        ("metal", {"ram": 0}, "ram must be more than 0; valid forms"),
        ("metal", {"ram": 9, "working_set": 0}, "working_set must be more than 0"),
        ("cuda", {"total": "0 GB"}, "total must be more than 0"),
        (
            "metal",
            {"ram": "16GiB", "working_set": "32GiB"},
            "working_set (32.0 GiB) can't be more than ram (16.0 GiB)",
        ),
    ],
)
def test_what_is_wrong_is_said(name: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r"\S") as caught:
        named_policy(name, **given)
    assert str(caught.value).startswith(message)
    if "valid forms" in message:
        assert '"cuda" with total "80GB"' in str(caught.value)


def test_no_size_at_all() -> None:
    with pytest.raises(TypeError, match=r"total: a size must be an int or a str"):
        CudaPolicy(1.5)  # type: ignore[arg-type]


def test_sizes_beyond_any_machine_are_no_limit() -> None:
    huge = "99999999999999999TB"

    assert CudaPolicy(huge).memory_limit == NO_LIMIT
    metal = MetalPolicy(huge, huge)
    assert metal.memory_limit == metal.collection_base == NO_LIMIT
