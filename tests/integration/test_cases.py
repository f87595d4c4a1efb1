"""The case scripts, each in a process of its own under recording.

Their headers name the diagnosis that a recorder must make possible; here it is found
in the events by value: which line of the script, how many bytes, how many buffers.
Lines are looked up by their text.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import viewer
from books import HAS_CPU_CACHE, ON_CUDA, VERSION
from case_run import CASES, Alloc, CaseRun, recorded, run_case, sizes

from mlxmem.events import Action

KiB = 1 << 10
MiB = 1 << 20
# The diagnosis of these is not in the events: test_case_reports.py looks for it.
BALANCE_ONLY = (
    "case16_cache_limit_clobbered",
    "case27_deep_lazy_graph",
    "case32_allocation_failure",
    "case33_memory_limit_is_soft",
)
# On a GPU a worker lets go of a kernel's inputs a little after `eval` has returned, and
# a matrix product may ask for scratch memory: some counts are bounds there.


def case01(run: CaseRun) -> None:
    text = "ema = 0.99 * ema + 0.01 * target"
    for steps in (500, 1000, 1500, 2000):
        live = run.live(run.at(f"after {steps} lazy"), text)
        assert sizes(live) == [4] * (2 * steps)
        assert {alloc.primitive for alloc in live} == {""}
    assert not [a for a in run.live(run.at("after mx.eval"), text) if a.asked == 4]


def case02(run: CaseRun) -> None:
    out, metric = "out = batch @ w", "running = running + mx.abs"
    for step in range(8):
        live = run.live(run.at(f"step {step}"), out)
        assert sizes(live) == [MiB] * (step + 1)
        assert {alloc.primitive for alloc in live} == {"Matmul"}
    # The holder, the chain of the metric, has not run: it owns not one array yet.
    last = run.at("step 7")
    assert not [alloc for alloc in run.made(metric, 0, last) if alloc.primitive]
    assert {alloc.primitive for alloc in run.made(metric, last)} >= {"Abs"}
    assert not run.live(run.at("after evaluating"), out)


def case04(run: CaseRun) -> None:
    text = "self.left_padding = self.left_padding - n"
    for tokens in (1000, 2000, 3000, 4000):
        live = run.live(run.at(f"{tokens} tokens"), text)
        assert sizes(live) == [4] * (8 * tokens)
        assert {alloc.primitive for alloc in live} == {""}
        assert {alloc.function for alloc in live} == {"Slot.advance"}
    after = run.live(run.at("after evaluating"), text)
    assert len(after) <= 8


def case07(run: CaseRun) -> None:
    def weights(label: str) -> list[Alloc]:
        live = run.live(run.at(label), "nn.Linear(512, 512)")
        return [alloc for alloc in live if alloc.asked == MiB]

    for unload in range(4):
        assert len(weights(f"load/unload {unload}")) == 4 * (unload + 1)
    inits = [frame[1] for frame in weights("load/unload 3")[0].traceback]
    assert any(name.endswith("__init__") for name in inits)
    assert weights("after clearing the registry") == []


def case08(run: CaseRun) -> None:
    text = "k = mx.ones((256, 1024))"
    live = [a for a in run.live(run.at("4 live worker"), text) if a.asked == MiB]
    threads = {alloc.thread for alloc in live}
    assert len(live) == len(threads) == 4
    assert run.main_thread not in threads
    if VERSION >= (0, 31, 0):  # 0.30.6 keeps the traces for the process
        assert not run.live(run.at("threads ended"), text)
    assert {alloc.function.split(".")[-1] for alloc in live} == {"body"}


def case10(run: CaseRun) -> None:
    made = [a for a in run.made("kv = mx.zeros") if a.asked >= MiB]
    assert sizes(made) == [2 * MiB * i for i in range(1, 9)]
    assert {alloc.action for alloc in made} == {Action.AllocNew}  # reuse rate 0 %
    at = [run.at(f"request {i}") for i in range(1, 9)]
    reserved = [int(run.active[i - 1] + run.cache[i - 1]) for i in at]
    if HAS_CPU_CACHE:
        assert [r // MiB for r in reserved] == [i * (i + 1) for i in range(1, 9)]
        returned = run.rows[run.at("idle") : run.at("after clear_cache")]
        assert {row["action"] for row in returned} == {Action.FreeCacheToOS}
        assert sum(row["size"] for row in returned) // MiB == 72
    else:
        assert [r // MiB for r in reserved] == [2 * i for i in range(1, 9)]


def case11(run: CaseRun) -> None:
    equal, random = run.at("64 batches of equal"), run.at("64 batches of random")
    batch = "h = mx.random.normal((n, 256)) @ w"

    def big(first: int, last: int) -> list[Alloc]:
        return [a for a in run.made(batch, first, last) if a.asked >= 256 * KiB]

    same, various = big(0, equal), big(equal, random)
    if ON_CUDA:
        # Its window is four times as wide, so more of the various ones fit.
        same = [alloc for alloc in same if alloc.asked == MiB]
        new = [
            [a for a in part if a.action is Action.AllocNew] for part in (same, various)
        ]
        assert len(same) >= 64
        assert len(set(sizes(various))) > 55
        assert len(new[0]) <= 16 < len(new[1])
        return
    assert len(set(sizes(same))) == 1
    assert len(set(sizes(various))) > 60
    if HAS_CPU_CACHE:
        misses = [alloc for alloc in various if alloc.action is Action.AllocNew]
        assert len(misses) > 0.5 * len(various)
        assert len([a for a in same if a.action is Action.AllocNew]) <= 4
        reserved = run.active + run.cache
        active_peak = run.active[equal:random].max()
        assert reserved[equal:random].max() > 15 * active_peak


def case13(run: CaseRun) -> None:
    grow = "k = mx.concatenate"
    grown = [a for a in run.made(grow) if a.primitive == "Concatenate"]
    assert sizes(grown) == [2 * MiB, 3 * MiB, 4 * MiB]
    for count, alloc in enumerate(grown, 1):
        first, last = run.resets[count - 1], run.at(f"resize to {256 * (count + 1)}")
        live = run.live(run.peak(first, last))
        assert alloc in live
        # the old cache still lives, and beside it the new part
        assert sorted(a.asked for a in live if a.asked >= MiB) == sorted(
            [count * MiB, MiB, (count + 1) * MiB]
        )


def is_scratch(run: CaseRun, alloc: Alloc) -> bool:
    """Tell whether it is a product's scratch: the result is the product's other one."""
    if alloc.primitive != "Matmul":
        return False
    near = [a for a in run.allocs if 0 < abs(a.index - alloc.index) <= 4]
    return any(
        a.primitive == "Matmul"
        and a.index < alloc.index
        and a.event["traceback_id"] == alloc.event["traceback_id"]
        for a in near
    )


def case14(run: CaseRun) -> None:
    one_shot = run.at("one shot")
    kernels = [a for a in run.allocs if not (ON_CUDA and is_scratch(run, a))]
    largest = max(kernels, key=lambda alloc: alloc.asked)
    assert largest.asked == 4 * 1024 * 1024 * 4
    assert largest.line == run.line("s = mx.matmul(")
    assert (largest.primitive, largest.function) == ("Matmul", "attend")
    later = [alloc for alloc in kernels if alloc.index >= one_shot]
    chunked = max(later, key=lambda alloc: alloc.asked)
    assert chunked.asked == 4 * 128 * 1024 * 4
    assert chunked.line == largest.line


def case17(run: CaseRun) -> None:
    loaded, deleted = run.at("model loaded"), run.at("model deleted")
    cleared = run.at("after clear_cache")
    weights = run.live(loaded, "nn.Linear(1024, 1024)")
    assert sum(alloc.asked == 4 * MiB for alloc in weights) == 8
    left = run.live(deleted, "nn.Linear(1024, 1024)")
    assert sum(alloc.size for alloc in left) <= 16  # the random state
    assert run.active[deleted - 1] <= 16
    if HAS_CPU_CACHE:
        freed = [a.freed for a in weights if a.freed is not None]
        frees = {run.rows[index]["action"] for index in freed}
        assert frees == {Action.FreeActiveToCache}
        assert run.cache[deleted - 1] >= 32 * MiB
        gone = run.rows[deleted:cleared]
        gone = [r for r in gone if r["action"] == Action.FreeCacheToOS]
        assert sum(row["size"] for row in gone) == run.mark("model deleted")["cache"]
    assert run.cache[cleared - 1] == 0


def case18(run: CaseRun) -> None:
    row = 37 * 4096 * 4  # on CUDA, too, its buffers have just that size
    if ON_CUDA:
        made = [a for a in run.made("mx.ones((n * 37, 4096)) + 1") if a.asked >= row]
        assert {n * row for n in range(1, 33)} == set(sizes(made))
        assert 32 <= run.active.max() // row < 64
        assert (run.active + run.cache).max() // row >= sum(range(1, 33))
        return
    assert run.active.max() // row == 32
    reserved = run.active + run.cache
    if HAS_CPU_CACHE:
        assert reserved.max() // row == sum(range(1, 33))
    else:
        assert reserved.max() == run.active.max()
    made = [a for a in run.made("mx.ones((n * 37, 4096)) + 1") if a.asked >= row]
    assert sizes(made) == [n * row for n in range(1, 33)]
    # Both peaks come with the 32nd buffer: active then is that one alone, reserved
    # the 31 earlier ones too, which are all in the cache.
    last = made[-1]
    for total in (run.active, reserved):
        at = int(np.argmax(total)) + 1
        assert at == last.index + 1
        assert [a for a in run.live(at) if a.asked >= row] == [last]
        assert run.rows[at - 1]["timestamp_us"] == last.event["timestamp_us"]
        gone = [a for a in made if a.index < at and not a.live(at)]
        assert sizes(gone) == [n * row for n in range(1, 32)]
        assert [run.kept(a, at) for a in gone] == [HAS_CPU_CACHE] * 31
    ends = [run.rows[a.freed]["timestamp_us"] for a in made if a.freed is not None]
    assert len(ends) == 32
    assert ends[-2] <= last.event["timestamp_us"] <= ends[-1]


def case19(run: CaseRun) -> None:
    for text, size in (
        ("dev = mx.array(host)", 16 * MiB),
        ("dev64 = mx.array", MiB),
        ("alias = mx.asarray(host)", 16 * MiB),
    ):
        (leaf,) = run.made(text)
        assert (leaf.asked, leaf.primitive, leaf.freed) == (size, "", None)
        assert (leaf.thread, leaf.event["stream"]) == (run.main_thread, -1)
        assert leaf.action is Action.AllocNew


def case21(run: CaseRun) -> None:
    big = "big = mx.random.normal"

    def pinned(label: str) -> list[int]:
        live = run.live(run.at(label), big)
        return [alloc.asked for alloc in live if alloc.asked == 4 * MiB]

    assert len(pinned("views: nbytes=49152")) == 6
    assert pinned("mx.contiguous of view") == []
    assert pinned("copied by arithmetic") == []
    copies = run.live(run.at("mx.contiguous of view"), "mx.contiguous(a[-2:])")
    assert sizes(copies) == [2 * 1024 * 4] * 6
    sums = run.live(run.at("copied by arithmetic"), "a[-2:] + 0")
    assert [alloc.asked for alloc in sums if alloc.asked > 4] == [2 * 1024 * 4] * 6


def case22(run: CaseRun) -> None:
    lazy, eager = (run.at(f"8 micro-batches, eval {how}") for how in ("at", "each"))
    activation = 2048 * 64 * 4
    forward, backward = "h = mx.tanh(h @ w)", "acc = acc + g(w, x)"

    def at_peak(first: int, last: int, text: str) -> list[Alloc]:
        live = run.live(run.peak(first, last), text)
        return [alloc for alloc in live if alloc.asked == activation]

    # Flat until eval: the loop itself makes scalars only.
    start = run.resets[0]
    first = min(a.index for a in run.made(forward, start, lazy) if a.primitive)
    assert int(run.active[start:first].max()) - int(run.active[start - 1]) < KiB

    # One micro-batch has four activations of Tanh, and at most four are live when
    # each is evaluated alone; together those of at least six of the eight are.
    def tanhs(allocs: list[Alloc]) -> int:
        return sum(alloc.primitive == "Tanh" for alloc in allocs)

    if ON_CUDA:
        first, second = run.resets
        peaks = [
            int(run.active[a:b].max()) for a, b in ((first, lazy), (second, eager))
        ]
        assert peaks[0] > 2 * peaks[1], peaks
        assert len(at_peak(start, lazy, forward)) >= 8
        return
    together = at_peak(start, lazy, forward)
    alone = at_peak(run.resets[1], eager, forward)
    assert {alloc.primitive for alloc in together} == {"Matmul", "Tanh"}
    assert tanhs(run.made(forward, start, lazy)) == 8 * 4
    assert tanhs(alone) <= 4
    assert tanhs(together) > 5 * 4
    # Eight graphs at once need what one needs several times over, backwards too.
    together += at_peak(start, lazy, backward)
    alone += at_peak(run.resets[1], eager, backward)
    assert len(together) >= 3 * len(alone)


def case24(run: CaseRun) -> None:
    def most(reset: int, label: str) -> int:
        """How many full-precision layers lived at once, at most."""
        first, last = run.resets[reset], run.at(label)
        loads = [a for a in run.made("w = mx.load(", first, last) if a.asked == 4 * MiB]
        assert {a.primitive for a in loads} == {"Load"}
        assert len(loads) == 8
        return max(sum(a.live(load.index + 1) for a in loads) for load in loads)

    assert most(0, "eager load") == 8
    assert most(1, "lazy, eval per layer") <= (3 if ON_CUDA else 2)
    # A worker frees while the next ones are loaded.
    assert most(2, "lazy, eval all") >= (2 if ON_CUDA else 4)
    first, last = run.resets[0], run.at("eager load")
    quantised = run.made("mx.quantize(w.pop(k))", first, last)
    # four bits for each weight of four bytes
    packed = [a for a in quantised if a.asked == 512 * KiB]
    assert len(packed) == 8
    assert any(a in run.live(run.peak(first, last)) for a in packed)


def case26(run: CaseRun) -> None:
    plain, copied = run.at("save row contiguous"), run.at("save transposed views")
    save = "mx.save_safetensors("
    assert not [a for a in run.made(None, run.resets[0], plain) if a.asked >= MiB]
    copies = [a for a in run.made(save, plain, copied) if a.asked >= MiB]
    assert sizes(copies) == [4 * MiB] * 8
    assert all(alloc.freed is not None for alloc in copies)
    live = run.live(run.peak(run.resets[1], copied))
    assert all(alloc in live for alloc in copies)


def case28(run: CaseRun) -> None:
    at = run.at("3 streams, 1 MiB each")
    outs = [a for a in run.made("outs.append(", 0, at) if a.asked == MiB]
    streams = {alloc.event["stream"] for alloc in outs if alloc.live(at)}
    assert len(streams) == 3
    products = run.made("mx.eval(mx.ones((512, 512)) @ w)", at)
    products = [alloc for alloc in products if alloc.primitive == "Matmul"]
    if ON_CUDA:
        products = [alloc for alloc in products if alloc.asked == MiB]
    assert sizes(products) == [MiB] * 60
    assert {alloc.function for alloc in products} == {"worker"}
    threads = {alloc.thread for alloc in products}
    assert len(threads) == 3
    assert run.main_thread not in threads
    assert len({alloc.event["stream"] for alloc in products} - streams) == 3
    # The inputs of the products go when their stream's worker is done with them:
    # three more threads, none of which ever allocates, and the stack is known.
    inputs = run.made("mx.eval(mx.ones((512, 512)) @ w)", at)
    inputs = [alloc for alloc in inputs if alloc.asked == MiB and alloc.primitive]
    inputs = [alloc for alloc in inputs if alloc.primitive != "Matmul"]
    assert len(inputs) == 60
    assert all(alloc.freed is not None for alloc in inputs)
    if ON_CUDA:
        return  # which of MLX's threads frees is not told
    workers = {alloc.freed_by for alloc in inputs}
    assert len(workers) == 3
    assert not workers & {0, run.main_thread, *(a.thread for a in run.allocs)}
    assert {a.traceback[-1][1].split(".")[-1] for a in inputs} == {"worker"}


def case30(run: CaseRun) -> None:
    text = "self.model = nn.Linear(1024, 1024)"
    for i in range(4):
        live = run.live(run.at(f"trainer {i} deleted"), text)
        assert sum(alloc.asked == 4 * MiB for alloc in live) == i + 1
    before, after = run.at("trainer 3 deleted"), run.at("after gc.collect()")
    big = [a for a in run.made(text) if a.asked == 4 * MiB]
    assert all(before <= (alloc.freed or 0) < after for alloc in big)
    assert {alloc.freed_by for alloc in big} == {run.main_thread}


def case34(run: CaseRun) -> None:
    last = run.at("broadcast difference")
    live = run.live(run.peak(run.resets[0], last))
    *rest, top = sorted(live, key=lambda alloc: alloc.asked)
    assert top.asked == 512 * 512 * 64 * 4
    assert top.primitive == "Subtract"
    assert top.line == run.line("d = ((a[:, None, :] - b[None, :, :]) ** 2).sum(-1)")
    assert top.asked > 40 * max(alloc.asked for alloc in rest)
    expanded = run.made(None, run.resets[1])
    if ON_CUDA:
        expanded = [alloc for alloc in expanded if not is_scratch(run, alloc)]
    assert max(alloc.asked for alloc in expanded) <= MiB


def case36(run: CaseRun) -> None:
    single = run.at("single handle")
    text = "x = mx.abs(x)"
    alone = run.made(text, 0, single)
    if ON_CUDA:  # its kernels donate less
        assert sizes(alone) == [8 * MiB] * len(alone)
    else:
        assert alone == []
    steps = run.made(text, single)
    assert sizes(steps) == [8 * MiB] * 4
    assert {alloc.primitive for alloc in steps} == {"Abs"}
    live = run.live(run.peak(run.resets[1], run.at("second handle kept")))
    held = sum(alloc.asked == 8 * MiB for alloc in live)
    assert 2 <= held <= (5 if ON_CUDA else 2)  # its frees come late


def case38(run: CaseRun) -> None:
    update = "opt.update(model, grads)"
    parameters = 2 * (512 * 512 + 512) * 4

    def state(label: str) -> int:
        return sum(alloc.asked for alloc in run.live(run.at(label), update))

    assert state("step 0") < 4 * KiB
    assert state("step 1") >= 2 * parameters
    assert state("step 2") == pytest.approx(state("step 1"), abs=4 * KiB)


DIAGNOSES: dict[str, Callable[[CaseRun], None]] = {
    name: found for name, found in globals().items() if name.startswith("case")
}


def names() -> list[str]:
    return sorted(path.stem for path in CASES.glob("case*.py"))


def test_there_are_26_cases_and_each_has_a_test() -> None:
    done = {f"case{name[4:6]}" for name in BALANCE_ONLY} | {"case42"} | set(DIAGNOSES)
    assert len(names()) == 26
    assert {name[:6] for name in names()} == done


@pytest.mark.parametrize("name", [name for name in names() if name[:6] in DIAGNOSES])
def test_case_balances_and_shows_its_diagnosis(name: str) -> None:
    run = recorded(name)

    DIAGNOSES[name[:6]](run)


@pytest.mark.parametrize("name", BALANCE_ONLY)
def test_case_runs_and_balances(name: str) -> None:
    run = recorded(name)

    assert run.recording.dropped == 0
    if name.startswith("case32") and not ON_CUDA:
        # The child has no books: it dies of a signal inside MLX.
        assert "child returncode -11" in run.output


def test_event_flood_says_what_it_dropped(tmp_path: Path) -> None:
    # GIVEN a case that makes far more events than may be kept, and its dump
    dump = tmp_path / "dump.pickle"
    run = run_case("case42_event_flood", tmp_path, max_entries=10_000, dump=dump)

    # THEN the newest ones are kept, the others counted, and the books balance
    assert len(run.recording.events) == run.recording.max_entries == 10_000
    assert run.recording.dropped > 30_000
    assert run.recording.active == run.marks[-1]["active"]

    # AND the dump is bounded, keeps every rule of its readers, and says so, too
    snapshot = viewer.check_pickle(dump.read_bytes())
    settings = snapshot["allocator_settings"]
    assert settings["trace_alloc_overflowed"] is True
    assert settings["trace_alloc_max_entries"] == 10_000
    assert settings["trace_alloc_dropped"] == run.recording.dropped
    assert dump.stat().st_size < 10_000 * 400
    blocks = [b for segment in snapshot["segments"] for b in segment["blocks"]]
    active = [b["size"] for b in blocks if b["state"] == "active_allocated"]
    assert sum(active) == run.recording.active
