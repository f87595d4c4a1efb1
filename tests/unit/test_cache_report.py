"""The report of the cache on a program made by hand: exact counts, lines and calls."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from handmade import STACKS, THREAD, Heap

import mlxmem
from mlxmem.cache import CpuPolicy, CudaPolicy, MetalPolicy
from mlxmem.cache.advice import recommend
from mlxmem.cache.contents import contents
from mlxmem.cache.replay import follow, predict
from mlxmem.cache.rounding import round_up
from mlxmem.cache.trace import UNSEEN_CLEAR, of_recording
from mlxmem.cli import main
from mlxmem.events import RAW_CACHED, Action, AllocatorTimes, Mark, SettingCall
from mlxmem.reports.cache import cache
from mlxmem.reports.cache_trace import of_history
from mlxmem.reports.history import History, from_snapshot, read
from mlxmem.reports.reading import SnapshotError
from mlxmem.snapshot import build, dump, write

MODEL = "/app/model.py:12 Block.__call__"
TRAIN = "/app/train.py:41 <module>"
KiB, MiB = 1 << 10, 1 << 20
SETTINGS = {"backend": "cpu", "mlx_version": "0.32.4"}


class Cpu(Heap):
    """A heap with the CPU allocator's rules, and calls that change its limit."""

    def __init__(self, limit: int = 32 * MiB) -> None:
        super().__init__()
        self.first_limit = self.limit = limit
        self.order: list[int] = []  # cached addresses, oldest first
        self.calls: list[SettingCall] = []

    def alloc(self, size: int, stack: int = 1) -> int:
        end = min(2 * size, size + 8 * KiB)
        fit = [a for a in self.order if size <= self.buffers[a].size]
        best = min(fit, key=lambda a: self.buffers[a].size, default=None)
        if best is None or self.buffers[best].size >= end:
            return self.new(size, stack=stack)
        self.order.remove(best)
        return self.reuse(best, requested=size, stack=stack)

    def drop(self, addr: int) -> None:
        if self.totals()[1] + self.buffers[addr].size <= self.limit:
            self.free(addr)
            self.order.append(addr)
        else:
            self.free(addr, Action.FreeActiveToOS)

    def clear(self, stack: int = 2) -> None:
        before, began = self.totals()[1], len(self.rows)
        for addr in sorted(self.order, key=lambda a: self.buffers[a].size):
            self.trim(addr)
        self.order.clear()
        self._called("clear_cache", 0, before, began, stack)

    def set_limit(self, limit: int, stack: int = 4) -> None:
        before, began = self.limit, len(self.rows)
        excess = self.totals()[1] - limit
        if excess >= 0.9 * self.totals()[1]:
            self.order.sort(key=lambda a: self.buffers[a].size)
        while self.totals()[1] > limit:
            self.trim(self.order.pop(0))
        self.limit = limit
        self._called("set_cache_limit", limit, before, began, stack)

    def _called(self, name: str, value: int, old: int, began: int, stack: int) -> None:
        at = len(self.rows)
        mark = Mark(at, 10 * at, THREAD, name)
        self.calls.append(SettingCall(mark, value, old, STACKS[stack - 1], began))

    def history(self, **changes: Any) -> History:
        return from_snapshot(build(self.made(**changes)), name="out.pickle")

    def made(self, **changes: Any) -> Any:
        settings = {**SETTINGS, "cache_limit_at_start": self.first_limit}
        fields = {"calls": self.calls, "settings": settings}
        return self.recording(**{**fields, **changes})


def jumping_sizes() -> History:
    """Twenty sizes that come and go, then a clear, a limit of 0, and times."""
    cpu = Cpu()
    keep = cpu.alloc(100 * KiB, stack=2)
    for n in range(20):
        cpu.drop(cpu.alloc((600 - 20 * n) * KiB))
    cpu.drop(cpu.alloc(600 * KiB))
    cpu.clear()
    cpu.drop(cpu.alloc(600 * KiB))
    cpu.set_limit(0)
    cpu.drop(cpu.alloc(600 * KiB))
    cpu.drop(cpu.alloc(600 * KiB))
    cpu.drop(keep)
    return cpu.history(times=AllocatorTimes(4, 8000, 2, 1000))


def two_sizes() -> History:
    """Two sizes in turn, fifty times: 300 KiB keep both."""
    cpu = Cpu()
    for _ in range(50):
        for size in (100 * KiB, 200 * KiB):
            cpu.drop(cpu.alloc(size))
    return cpu.history()


def test_totals_and_reasons() -> None:
    report = cache(jumping_sizes())

    assert report["agreement"] == {
        "checked": 71,  # 25 requests, 25 frees, 21 evictions
        "mismatches": 0,
        "raced": 0,
        "unseen": 0,
        "first_at": None,
    }
    assert report["policy"] == {
        "name": "cpu",
        "has_cache": True,
        "page": 4096,
        "cache_limit": 32 * MiB,
        "memory_limit": None,
    }
    totals = report["totals"]
    # 1 + 20 + 1 + 1 + 2 requests: 600 KiB again hits, after the clear it misses, the
    # limit of 0 trims it, and the last one finds nothing that was kept.
    assert (totals["allocations"], totals["hits"]) == (25, 1)
    assert totals["hit_rate"] == 0.04
    sizes = sum(600 - 20 * n for n in range(20))
    assert totals["requested_bytes"] == (100 + sizes + 4 * 600) * KiB
    assert totals["system_allocations"] == 24
    assert totals["peak_cache"] == sizes * KiB
    assert totals["peak_reserved"] == (100 + sizes) * KiB
    assert totals["peak_active"] == 700 * KiB
    assert (totals["evictions"], totals["waste_bytes"]) == (21, 0)
    counts = {row["kind"]: row["count"] for row in report["misses"]}
    assert counts == {
        "cold": 2,  # 100 and the first 600 KiB
        "in_use": 0,
        "window": 19,
        "cleared": 1,
        "trimmed": 1,
        "reclaimed": 0,
        "limit": 1,
    }


def test_lost_buffers_name_the_call() -> None:
    rows = cache(jumping_sizes())["evicted_by"]

    shown = {(r["kind"], r["call"], r["value"], r["frames"][0]["line"]) for r in rows}
    assert shown == {
        ("cleared", "clear_cache", 0, 41),
        ("trimmed", "set_cache_limit", 0, 7),
        ("limit", "set_cache_limit", 0, 7),
    }
    assert all((row["misses"], row["bytes"]) == (1, 600 * KiB) for row in rows)


def test_lines_and_which_jump() -> None:
    first, second = cache(jumping_sizes())["lines"]

    assert (first["label"], first["allocations"], first["hits"]) == (MODEL, 24, 1)
    assert (first["sizes"], first["smallest"], first["largest"]) == (
        20,
        220 * KiB,
        600 * KiB,
    )
    assert first["jumps"]
    assert first["misses"]["window"] == 19
    assert (second["label"], second["missed_bytes"]) == (TRAIN, 100 * KiB)
    assert not second["jumps"]


def test_weights_of_many_shapes_do_not_jump() -> None:
    cpu = Cpu()
    for n in range(20):
        cpu.alloc((600 - 20 * n) * KiB)

    (line,) = cache(cpu.history())["lines"]

    assert line["sizes"] == 20
    assert not line["jumps"]


def test_contents_at_the_fullest_and_at_the_end() -> None:
    contents = cache(jumping_sizes())["contents"]

    most = contents["most"]
    sizes = [(600 - 20 * n) * KiB for n in range(20)]
    assert (most["bytes"], most["buffers"]) == (sum(sizes), 20)
    assert [(row["from_bytes"], row["to_bytes"]) for row in most["sizes"]] == [
        (128 * KiB, 256 * KiB),
        (256 * KiB, 512 * KiB),
        (512 * KiB, 1024 * KiB),
    ]
    by_size = [
        sum(low <= n < 2 * low for n in sizes) for low in (131072, 262144, 524288)
    ]
    assert [row["buffers"] for row in most["sizes"]] == by_size
    # Two events of 10 us each between one and the next.
    assert [(row["from_us"], row["buffers"]) for row in most["ages"]] == [(0, 20)]
    assert contents["end"]["bytes"] == contents["end"]["buffers"] == 0


def test_ages_are_from_the_free_to_the_moment() -> None:
    # GIVEN three buffers freed by events 3, 4 and 6, 10 us from one to the next
    cpu = Cpu()
    first, second, third = (cpu.alloc(n * KiB) for n in (30, 50, 90))
    cpu.drop(first)
    cpu.drop(second)
    cpu.alloc(500 * KiB)
    cpu.drop(third)
    trace = of_history(cpu.history())

    # WHEN / THEN
    found = contents(trace, 6)
    ages = dict(zip(found.sizes.tolist(), found.ages_us.tolist(), strict=True))
    assert ages == {30 * KiB: 30, 50 * KiB: 20, 90 * KiB: 0}
    earlier = contents(trace, 4)
    assert sorted(earlier.ages_us.tolist()) == [0, 10]
    assert contents(trace, -1).sizes.tolist() == []


def test_what_was_cached_before_counts() -> None:
    cpu = Cpu()
    old, young = (
        cpu.existing(50 * KiB, cached=True),
        cpu.existing(70 * KiB, cached=True),
    )
    cpu.order += [old, young]
    cpu.nameless_cache = 30 * KiB
    cpu.drop(cpu.alloc(70 * KiB))
    cpu.set_limit(100 * KiB)

    report = cache(cpu.history())

    assert report["agreement"]["mismatches"] == 0
    assert report["totals"]["hits"] == 1
    assert report["contents"]["most"]["unknown_bytes"] == 30 * KiB
    assert report["contents"]["end"]["bytes"] == 100 * KiB
    assert report["totals"]["peak_reserved"] == 150 * KiB


def test_what_if_and_recommendation() -> None:
    what_if = cache(two_sizes(), limits=[250 * KiB])["what_if"]

    shown = [(r["label"], r["cache_limit"], r["hits"]) for r in what_if["rows"]]
    assert shown == [
        ("no cache", 0, 0),
        # 100 KiB is kept first, and 200 KiB never fits beside it.
        ("", 250 * KiB, 49),
        ("recommended", MiB, 98),
        ("no limit", None, 98),
    ]
    assert what_if["exact"]
    best = what_if["recommendation"]
    assert best["cache_limit"] == MiB
    assert (best["hit_rate"], best["best_hit_rate"]) == (0.98, 0.98)
    assert best["peak_reserved"] == 300 * KiB
    limits = [point["cache_limit"] for point in what_if["curve"]]
    assert limits == sorted(limits)
    assert (limits[0], limits[-1]) == (0, 300 * KiB)
    assert what_if["rounding"] is None


def test_rounding_up_the_lines_that_jump() -> None:
    steps = cache(jumping_sizes())["what_if"]["rounding"]["steps"]

    assert [row["steps_per_doubling"] for row in steps] == [None, 8, 4, 2, 1]
    assert steps[0]["hits"] == 1
    # Powers of two: 1 MiB, 512 and 256 KiB, each missed once, and after the clear.
    powers = {1 << (n * KiB - 1).bit_length() for n in range(220, 601, 20)}
    assert len(powers) == 3
    assert steps[-1]["hits"] == 21 - 3
    assert steps[-1]["allocations"] == 25


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (1, [1, 2, 4, 1024, 2048, 2048]),
        (2, [1, 2, 3, 1024, 1536, 1536]),
        (4, [1, 2, 3, 1024, 1280, 1280]),
        (8, [1, 2, 3, 1024, 1152, 1280]),
    ],
)
def test_round_up(steps: int, expected: list[int]) -> None:
    sizes = np.array([1, 2, 3, 1024, 1025, 1200])

    assert round_up(sizes, steps).tolist() == expected
    assert round_up(np.array([2**50, 2**50 + 1]), 1).tolist() == [2**50, 2**51]


def test_times() -> None:
    times = cache(jumping_sizes())["times"]

    # 2 us a new buffer, 0.5 us a cached one, 24 misses.
    assert times == {
        "measured_new": 4,
        "measured_reused": 2,
        "new_us": 2.0,
        "reused_us": 0.5,
        "lost_us": 36,
    }
    assert cache(Cpu().history())["times"] is None


def test_the_model_says_where_it_differs() -> None:
    cpu = Cpu()
    cpu.drop(cpu.alloc(1000))
    cpu.order.clear()  # so that it takes a new one, which MLX would not
    cpu.alloc(1000)

    report = cache(cpu.history())

    assert report["agreement"]["mismatches"] == 1
    # 2 + 2 entries of the first buffer.
    assert report["agreement"]["first_at"] == 5


def test_a_clear_that_nobody_noted_is_found() -> None:
    cpu = Cpu()
    cpu.drop(cpu.alloc(1000))
    cpu.clear()
    cpu.drop(cpu.alloc(1000))

    report = cache(cpu.history(calls=[]))

    assert report["agreement"]["mismatches"] == 0
    assert report["agreement"]["unseen"] == 1
    assert [(r["kind"], r["call"]) for r in report["evicted_by"]] == [("cleared", None)]
    # The clear stays a clear under any other limit.
    assert report["what_if"]["rows"][-1]["hits"] == 0


def test_without_a_cache_every_miss_is_for_the_limit() -> None:
    heap = Heap()
    for _ in range(3):
        heap.free(heap.new(1000), Action.FreeActiveToOS)

    report = cache(from_snapshot(build(heap.recording())))

    assert report["policy"]["has_cache"] is False
    assert report["agreement"]["mismatches"] == 0
    counts = {row["kind"]: row["count"] for row in report["misses"]}
    assert (counts["cold"], counts["limit"]) == (1, 2)


def test_rules_of_another_backend() -> None:
    report = cache(jumping_sizes(), policy=MetalPolicy("10 GB", "16 GB"))

    what_if = report["what_if"]
    assert (report["policy"]["name"], what_if["policy"]["name"]) == ("cpu", "metal")
    assert not what_if["recorded"]
    row = what_if["rows"][-1]
    assert row["label"] == "the default of metal"
    assert row["cache_limit"] == int(1.5 * 10**10)
    # Pages of 16 KiB round up, and the window is 32 KiB: every second size hits.
    assert row["hits"] > 1
    assert row["waste_bytes"] > 0


def test_an_empty_recording() -> None:
    report = cache(Cpu().history())

    assert report["totals"]["allocations"] == 0
    assert report["lines"] == report["evicted_by"] == []
    assert report["what_if"]["recommendation"]["cache_limit"] is None
    assert report["what_if"]["recommendation"]["reason"] == "nothing was allocated"


def test_files_without_a_cache_are_refused() -> None:
    snapshot = build(Cpu().made())
    snapshot["mlxmem"].pop("cache_at_start")
    with pytest.raises(SnapshotError, match="record again with this version"):
        cache(from_snapshot(snapshot))
    snapshot.pop("mlxmem")
    with pytest.raises(SnapshotError, match="PyTorch wrote it"):
        cache(from_snapshot(snapshot))
    with pytest.raises(SnapshotError, match="which backend and MLX"):
        cache(Cpu().history(settings={}))


@pytest.fixture
def pickled(tmp_path: Any) -> str:
    cpu = Cpu()
    for n in range(20):
        cpu.drop(cpu.alloc((600 - 20 * n) * KiB))
    cpu.clear()
    cpu.drop(cpu.alloc(600 * KiB))
    path = tmp_path / "out.pickle"
    dump(cpu.made(), path)
    return str(path)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["cache", *arguments])


def test_command_prints_what_people_need(pickled: str) -> None:
    done = run(pickled, "--limit", "64MB")

    assert done.exit_code == 0, done.output
    text = " ".join(done.output.split())
    assert "Hits: 0.0% of 21 requests" in text
    assert "window: a buffer was cached, but larger than the window" in text
    assert "clear_cache() at /app/train.py:41 <module>" in text
    assert "the replay took all 62 decisions as MLX did" in text
    assert "61.0 MiB" in text
    assert "Recommended: nothing: no request was recorded that a cache" in text
    assert "powers of two" in text


def test_command_and_function_agree(pickled: str) -> None:
    done = run(
        pickled, "--json", "--limit", "1GB", "--policy", "cuda", "--total", "80GB"
    )

    report = json.loads(done.output)
    mine = cache(read(pickled), limits=[10**9], policy=CudaPolicy("80GB"))
    assert report == json.loads(json.dumps(mine | {"file": report["file"]}))
    assert report["what_if"]["rows"][1]["cache_limit"] == 10**9
    assert report["what_if"]["policy"]["name"] == "cuda"
    assert report["what_if"]["policy"]["memory_limit"] == int(80e9 * 0.95)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--limit", "64 XB"], "--limit: '64 XB' is no size; write a number of bytes"),
        (["--limit", "-5"], "--limit: '-5' is no size"),
        (["--policy", "gpu"], "only cpu, metal, cuda; valid forms:"),
        (["--policy", "metal"], "needs ram"),
        (["--policy", "cuda"], "needs total"),
        (["--policy", "cpu", "--ram", "1GB"], "takes no ram; valid forms:"),
        (["--ram", "1GB"], "ram is a number of a named policy; valid forms:"),
        (["--policy", "metal", "--ram", "0"], "ram must be more than 0; valid forms"),
        (
            ["--policy", "metal", "--ram", "1GB", "--working-set", "2GB"],
            "can't be more",
        ),
    ],
)
def test_bad_values_name_valid_forms(
    pickled: str, arguments: list[str], message: str
) -> None:
    done = run(pickled, *arguments)

    assert done.exit_code == 2
    assert message in " ".join(done.output.split())


def test_functions_before_enable_say_what_to_call() -> None:
    code = (
        "import mlxmem\n"
        "for call in (mlxmem.cache_stats, mlxmem.recommend_cache_limit):\n"
        "    try:\n"
        "        call()\n"
        "    except RuntimeError as error:\n"
        "        print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert done.stdout.count("call mlxmem.enable() first") == 2, done.stderr


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"policy": "gpu"}, ValueError, "only cpu, metal, cuda"),
        ({"policy": "metal"}, ValueError, 'ram "16GB"'),
        ({"ram": "16 GB"}, ValueError, "named policy; valid forms"),
        ({"policy": 3}, TypeError, "one of mlxmem.cache"),
        ({"policy": CpuPolicy(), "total": 3}, ValueError, "named policy"),
        ({"policy": "cuda", "total": -1}, ValueError, "can't be negative"),
        ({"policy": "cuda", "total": 1.5}, TypeError, "must be an int or a str"),
    ],
)
def test_functions_refuse_bad_values(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    for call in (mlxmem.cache_stats, mlxmem.recommend_cache_limit):
        with pytest.raises(error, match=message):
            call(**arguments)
    with pytest.raises(ValueError, match="is no size"):
        mlxmem.cache_stats(limits=["64 XB"])


def test_the_recommendation_is_the_smallest_in_whole_mib() -> None:
    # GIVEN buffers of 1 to 20 MiB, the small ones far more often
    cpu = Cpu(limit=1 << 40)
    pick = np.random.default_rng(5)
    for _ in range(600):
        cpu.drop(cpu.alloc(MiB * min(int(pick.exponential(4)) + 1, 20)))
    trace = of_history(cpu.history())

    # WHEN every limit is tried
    tried = [predict(trace, CpuPolicy(n * MiB)) for n in range(300)]
    best = max(found.hit_rate for found in tried)
    best_bytes = max(found.hit_rate_bytes for found in tried)
    good = [
        n
        for n, found in enumerate(tried)
        if found.hit_rate >= best - 0.01 and found.hit_rate_bytes >= best_bytes - 0.01
    ]

    # THEN none below the recommended one is good
    found = recommend(trace)
    assert found.limit == good[0] * MiB
    assert found.best_hit_rate == best
    assert good[0] > 20  # which takes a search


def test_a_full_cache_at_the_start_gives_way_to_a_lower_limit() -> None:
    # GIVEN 20 MiB cached before, of which nothing is known, and two sizes in turn
    cpu = Cpu()
    cpu.nameless_cache = 20 * MiB
    for _ in range(50):
        for size in (100 * KiB, 200 * KiB):
            cpu.drop(cpu.alloc(size))
    history = cpu.history()

    # WHEN
    report = cache(history, limits=[MiB, 25 * MiB])

    # THEN a limit of 1 MiB would have emptied it, and serves as well as any
    rows = {row["cache_limit"]: row for row in report["what_if"]["rows"]}
    assert rows[MiB]["hits"] == rows[25 * MiB]["hits"] == 98
    assert rows[MiB]["peak_cache"] == 300 * KiB
    assert rows[25 * MiB]["peak_cache"] == 20 * MiB + 300 * KiB
    assert report["what_if"]["recommendation"]["cache_limit"] == MiB
    assert not report["what_if"]["exact"]


def test_what_mlx_listed_at_the_start_is_known() -> None:
    # GIVEN three buffers that were cached before, the middle one of which is reused
    cpu = Cpu()
    old = [cpu.existing(n * 100 * KiB, cached=True) for n in (3, 2, 1)]
    cpu.order += old
    listed = np.array([(a, cpu.buffers[a].size) for a in old], RAW_CACHED)
    cpu.drop(cpu.alloc(200 * KiB))

    # WHEN
    history = cpu.history(cached_at_enable=listed)

    # THEN all three are there in the order of their age
    start = history.cache_at_start
    assert start is not None
    assert start.sizes.tolist() == [300 * KiB, 200 * KiB, 100 * KiB]
    assert start.unknown == 0
    assert cache(history)["what_if"]["exact"]


def test_listed_buffers_are_the_oldest_where_events_were_dropped() -> None:
    cpu = Cpu()
    listed = np.array([(1 << 30, 50 * KiB)], RAW_CACHED)
    cpu.nameless_cache = 50 * KiB
    for _ in range(10):
        cpu.drop(cpu.alloc(100 * KiB))

    start = cpu.history(cached_at_enable=listed, max_entries=5).cache_at_start

    assert start is not None
    assert start.sizes.tolist()[0] == 50 * KiB
    assert start.unknown == 0


def test_rates_are_of_the_time_that_was_kept() -> None:
    cpu = Cpu()
    for n in range(1, 101):
        cpu.drop(cpu.alloc(n * MiB))

    totals = cache(cpu.history(max_entries=20))["totals"]

    # Twenty events, 10 us from one to the next.
    assert totals["duration_us"] == 190
    assert totals["system_allocations_per_s"] == round(10 / 190e-6, 1)


def test_a_ring_that_cuts_a_clear_makes_no_clear_of_the_rest() -> None:
    cpu = Cpu()
    for n in (1, 2, 3):
        cpu.alloc(n * 100 * KiB)
    for addr in list(cpu.buffers):
        cpu.drop(addr)
    cpu.clear()
    cpu.drop(cpu.alloc(100 * KiB))

    followed = follow(of_history(cpu.history(max_entries=4)))

    assert followed.totals["mismatches"] == 0
    assert UNSEEN_CLEAR not in followed.trace.rows["call"]


def test_a_limit_that_changed_unseen_explains_its_evictions() -> None:
    # GIVEN a change that was noticed before the evictions that belong to it
    cpu = Cpu()
    for n in (1, 2, 3):
        cpu.alloc(n * 100 * KiB)
    for addr in list(cpu.buffers):
        cpu.drop(addr)
    began = len(cpu.rows)
    cpu.set_limit(350 * KiB)
    mark = Mark(began, 10 * began, THREAD, "set_cache_limit")
    change = SettingCall(mark, 350 * KiB, 32 * MiB, (), began)
    cpu.drop(cpu.alloc(50 * KiB))

    # WHEN
    totals = follow(of_history(cpu.history(calls=[change]))).totals

    # THEN
    assert (totals["mismatches"], totals["unseen"]) == (0, 0)
    assert totals["evictions"] == 2


def test_a_file_tells_when_mlx_looked_into_the_cache() -> None:
    # GIVEN new buffers, of which one was looked for three events before it counted
    cpu = Cpu()
    cpu.drop(cpu.alloc(1000))
    for _ in range(4):
        cpu.alloc(5000)
    recording = cpu.made()
    recording.events["after_look"][4] = 3

    # WHEN, THEN
    one, other = of_recording(recording), of_history(from_snapshot(build(recording)))
    assert one.rows["after_look"].tolist() == [0, 0, 0, 0, 3, 0]
    assert other.rows["after_look"].tolist() == [0, 0, 0, 0, 3, 0]


@pytest.mark.parametrize(
    "edit",
    [
        {"cache_at_start": {"addresses": [1], "sizes": [0], "unknown": 0}},
        {"cache_at_start": {"addresses": [1], "sizes": [-5], "unknown": 0}},
        {"cache_at_start": {"addresses": [1], "sizes": [2**63 - 1], "unknown": 0}},
        {"cache_at_start": {"addresses": [1, 2], "sizes": [2**62] * 2, "unknown": 0}},
        {"cache_at_start": {"addresses": [1], "sizes": [], "unknown": 0}},
        {"cache_at_start": {"addresses": [], "sizes": [], "unknown": -1}},
        {"cache_at_start": {"addresses": [], "sizes": [], "unknown": 2**64}},
        {"cache_at_start": {"addresses": [-1], "sizes": [5], "unknown": 0}},
        {"looks": {"at": [1], "after": []}},
        {"looks": {"at": [1], "after": [256]}},
        {"looks": {"at": [-1], "after": [1]}},
        {"looks": {"at": [2**70], "after": [1]}},
        {"start_us": -(2**63) - 1},
        {"value": -(2**70)},
        {"value": 2**64},
        {"version": "9" * 5000},
        {"size": 2**63 - 1},
        {"size": 2**59},
    ],
    ids=str,
)
def test_damaged_files_are_one_line(edit: dict[str, Any], tmp_path: Any) -> None:
    # GIVEN a file with one number that cannot be
    cpu = Cpu()
    cpu.drop(cpu.alloc(1000))
    cpu.clear()
    snapshot = build(cpu.made())
    extra = snapshot["mlxmem"]
    for key, value in edit.items():
        if key == "value":
            extra["calls"][0]["value"] = value
        elif key == "version":
            snapshot["allocator_settings"]["mlx_version"] = value
        elif key == "size":
            snapshot["device_traces"][0][-1]["size"] = value
        else:
            extra[key] = value
    path = tmp_path / "out.pickle"
    write(snapshot, path)

    # WHEN
    done = run(str(path), "--json")

    # THEN it is refused in a line, or read
    assert done.exit_code in (0, 1), done.output
    if done.exit_code:
        assert len(done.stderr.strip().splitlines()) == 1
        assert "Traceback" not in done.stderr
    else:
        json.loads(done.stdout)


def test_a_replay_that_goes_wrong_everywhere_still_ends() -> None:
    """A hostile file: each request misses, and nothing that should go goes."""
    heap = Heap()
    count = 20_000
    kept = [heap.new(16 * KiB) for _ in range(count // 100)]
    for addr in kept:
        heap.free(addr)
    for _ in range(count):
        heap.rows.append({**heap.rows[0], "addr": 2**40 + 2**15 * len(heap.rows)})
    settings = {"backend": "cuda", "mlx_version": "0.32.4", "memory_limit_at_start": 1}
    recording = heap.recording(settings=settings)

    totals = follow(of_recording(recording)).totals

    assert totals["mismatches"] >= count


def test_ctrl_c_ends_a_replay() -> None:
    # GIVEN a replay of some seconds, and an interrupt in the middle
    code = (
        "import os, signal, threading\n"
        "import numpy as np\n"
        "from mlxmem.cache import CpuPolicy, _replay\n"
        "rows = np.zeros(3_000_000, _replay.ROW)\n"
        "rows['requested'] = rows['size'] = np.arange(1, len(rows) + 1)\n"
        "nothing = np.zeros(0, _replay.CACHED)\n"
        "stop = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))\n"
        "stop.start()\n"
        "try:\n"
        "    for _ in range(1000):\n"
        "        _replay.predict(rows, nothing, 0, 0, CpuPolicy(), fixed_limit=True,"
        " outcomes=True)\n"
        "except KeyboardInterrupt:\n"
        "    print('stopped')\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert done.stdout == "stopped\n", done.stderr
