"""What a recording on Metal says of its machine; the warning of too many buffers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from test_reports import read, two_lines

from mlxmem import _hook, metal, recorder
from mlxmem.cache.trace import policy_of
from mlxmem.commands import summary as command
from mlxmem.reports.summary import summary

INFO = {
    "memory_size": 16 << 30,
    "max_recommended_working_set_size": 11 << 30,
    "max_buffer_length": 9 << 30,
    "resource_limit": 499_000,
    "architecture": "applegpu_g13g",
}
RESOURCES = {
    "gc_limit": 10 << 30,
    "wired_limit": 0,
    "resources": 1234,
    "resource_limit": 498_000,
}
OF_DEVICE = {name: value for name, value in INFO.items() if name != "architecture"}
OF_ALLOCATOR = {
    "page_size": 16_384,
    "small_buffers_below": 256,
    "small_buffers_heap": 1_048_576,
}


def of_the_gpu(device: str) -> dict[str, Any]:
    return INFO if device == "gpu" else {}


def fail(*_: Any) -> dict[str, Any]:
    raise RuntimeError("no device")


@pytest.mark.parametrize(
    "mx",
    [
        SimpleNamespace(device_info=of_the_gpu, gpu="gpu"),
        SimpleNamespace(device_info=lambda: INFO, gpu="gpu"),
        SimpleNamespace(metal=SimpleNamespace(device_info=lambda: INFO)),
    ],
    ids=["of a device", "of the only device", "of Metal's module"],
)
def test_the_gpu_is_asked_where_mlx_has_it(mx: Any) -> None:
    # WHEN / THEN
    assert metal.settings(mx, None) == {**OF_DEVICE, **OF_ALLOCATOR}
    # and what the allocator itself says goes first
    assert metal.settings(mx, RESOURCES) == {
        **OF_DEVICE,
        **OF_ALLOCATOR,
        "gc_limit": 10 << 30,
        "wired_limit_now": 0,
        "resources": 1234,
        "resource_limit": 498_000,
    }


def test_a_device_that_tells_nothing_is_left_out() -> None:
    mx = SimpleNamespace(device_info=fail, gpu="gpu")
    assert metal.settings(mx, None) == OF_ALLOCATOR


def test_a_snapshot_has_them_on_metal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN a session whose allocator is said to be Metal's
    mx = SimpleNamespace(
        __version__="0.32.4", device_info=lambda: INFO, get_memory_limit=lambda: 5
    )
    monkeypatch.setattr(recorder, "_import_mlx", lambda: mx)
    monkeypatch.setattr(_hook, "metal_resources", lambda: RESOURCES)
    found: dict[str, dict[str, Any]] = {}
    for backend in ("metal", "cpu"):
        monkeypatch.setattr(_hook, "backend", lambda name=backend: name)
        # WHEN its settings are made
        totals, events, _ = _hook.copy_session()
        found[backend], _ = recorder._settings(totals, events, ())
    # THEN
    more = metal.settings(mx, RESOURCES)
    assert {name: found["metal"][name] for name in more} == more
    assert sorted(set(found["metal"]) - set(found["cpu"])) == sorted(more)
    assert found["metal"]["wired_limit"] is None


def test_there_are_none_on_another_backend() -> None:
    assert _hook.metal_resources() is None


@pytest.mark.parametrize(
    ("resources", "limit", "close"),
    [
        (900, 1000, (900, 1000)),
        (1000, 1000, (1000, 1000)),
        (899, 1000, None),
        (0, 0, None),
        (None, 1000, None),
        ("950", 1000, None),
        (True, 1, None),
    ],
)
def test_nine_tenths_of_the_limit_are_close(
    resources: Any, limit: int, close: tuple[int, int] | None
) -> None:
    settings = {"resources": resources, "resource_limit": limit}
    assert metal.near_resource_limit(settings) == close


def test_the_summary_warns() -> None:
    # GIVEN a recording that ended with nearly all buffers taken, and one with half
    texts = []
    for resources in (450_000, 250_000):
        report = summary(read(two_lines()))
        report["settings"] = {"resources": resources, "resource_limit": 499_000}
        # WHEN
        texts.append("\n".join(map(str, command.parts(report))))
    # THEN
    warning = (
        "Metal allows 499,000 buffers, cached ones included, and there were 450,000"
    )
    assert warning in texts[0]
    assert "Metal allows" not in texts[1]


def test_the_replay_takes_the_numbers_of_the_machine() -> None:
    # GIVEN the settings of a recording on Metal
    settings = {"backend": "metal", "mlx_version": "0.32.4", "memory_limit": 8 << 30}
    # WHEN
    policy = policy_of({**settings, **OF_DEVICE})
    # THEN buffers are collected from 0.95 of what the machine recommends
    assert policy.name == "metal"
    assert policy.collection_base == int(0.95 * (11 << 30))
    assert policy.memory_limit == policy.cache_limit == 8 << 30
    # and where a recording does not tell it, of its memory limit
    assert policy_of(settings).collection_base == int(0.95 * (8 << 30))
