"""Work of many kinds on the GPU, after which the books balance to the byte."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import workloads
from books import Books, rounded

import mlxmem

pytestmark = pytest.mark.cuda

KiB, MiB = 1 << 10, 1 << 20


def since(books: Books, at: int, *, least: int = 0) -> list[dict[str, Any]]:
    """Check the books and return the events from `at` on, of that size or more."""
    return [event for event in books.events()[at:] if event["size"] >= least]


def test_the_gpu_is_used(books: Books) -> None:
    x = mx.random.normal((300, 300))
    mx.eval(x @ x)

    assert mx.default_device() == mx.Device(mx.gpu, 0)
    assert mlxmem.snapshot()["allocator_settings"]["backend"] == "cuda"
    assert "Matmul" in {event["primitive_name"] for event in books.allocs()}


def test_training_steps(books: Books) -> None:
    step = workloads.training()
    losses = []
    for _ in range(6):
        losses.append(step())
        books.check(readers=False)

    assert losses[-1] < losses[0]
    names = {event["primitive_name"] for event in books.allocs()}
    assert {"Matmul", ""} <= names


def test_generation_with_a_kv_cache(books: Books) -> None:
    expected = workloads.generate(100)
    books.check(readers=False)

    assert workloads.generate(100) == expected
    assert len(expected) == 100
    grown = [e for e in books.allocs() if e["primitive_name"] == "Concatenate"]
    row = workloads.WIDTH * 4
    assert {32 * row, 64 * row, 96 * row, 128 * row} <= {
        e["requested_size"] for e in grown
    }


def test_threads_with_streams_of_their_own(books: Books) -> None:
    ids: set[int] = set()
    results: list[float] = []
    failed: list[BaseException] = []

    def work(seed: int) -> None:
        ids.add(threading.get_native_id())
        try:
            with mx.stream(mx.new_stream(mx.default_device())):
                x = mx.full((64, 64), seed / 100)
                for _ in range(50):
                    x = mx.sin(x @ x) + mx.array([0.1])
                    mx.eval(x)
                results.append(x.sum().item())
        except BaseException as error:
            failed.append(error)

    # GIVEN four threads, WHEN all evaluate at once
    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    # THEN each thread's allocations carry its id
    assert failed == []
    assert len(results) == 4
    allocs = books.allocs()
    assert {event["thread_id"] for event in allocs} == ids
    streams = {e["stream"] for e in allocs if e["primitive_name"] == "Matmul"}
    assert len(streams) == 4


def test_several_streams(books: Books) -> None:
    streams = [mx.new_stream(mx.default_device()) for _ in range(3)]
    x = mx.random.normal((128, 128))
    for _ in range(10):
        for stream in streams:
            with mx.stream(stream):
                x = mx.tanh(x @ x)
        mx.eval(x)
    for stream in streams:
        mx.synchronize(stream)

    seen = {event["stream"] for event in books.allocs()}
    assert len(seen - {-1}) >= 3


def test_async_eval_while_the_next_graph_is_built(books: Books) -> None:
    x = mx.random.normal((256, 256))
    for _ in range(50):
        x = mx.sigmoid(x @ x)
        mx.async_eval(x)
        mx.array(list(range(100)))  # a leaf in between, dropped at once
    mx.eval(x)

    allocs = books.allocs()
    leaves = [e for e in allocs if e["requested_size"] == 400]
    assert len(leaves) == 50
    assert {e["primitive_name"] for e in leaves} == {""}
    products = [e for e in allocs if e["primitive_name"] == "Matmul"]
    assert len([e for e in products if e["requested_size"] == 256 * KiB]) >= 1


def test_cpu_and_gpu_in_one_graph(books: Books) -> None:
    # GIVEN a graph whose operations alternate between the devices, all of which stay
    keep = [mx.full((128, 130), 0.5)]
    mx.eval(keep)
    at = len(books.events())
    for _ in range(4):
        keep.append(mx.exp(keep[-1], stream=mx.cpu))
        keep.append(mx.log(keep[-1], stream=mx.default_device()))

    # WHEN it is evaluated
    mx.eval(keep[-1])
    for device in (mx.Device(mx.cpu, 0), mx.default_device()):
        mx.synchronize(mx.default_stream(device))
    made = [e for e in since(books, at) if e["action"].startswith("Alloc")]

    # THEN each result is its operation's, on a stream of its device, and right
    sizes: dict[str, list[int]] = {}
    streams: dict[str, set[int]] = {}
    for event in made:
        if event["requested_size"] == 128 * 130 * 4:
            sizes.setdefault(event["primitive_name"], []).append(event["size"])
            streams.setdefault(event["primitive_name"], set()).add(event["stream"])
    assert sizes == {name: [rounded(128 * 130 * 4)] * 4 for name in ("Exp", "Log")}
    assert streams["Exp"].isdisjoint(streams["Log"])
    assert float(mx.abs(keep[-1] - 0.5).max().item()) < 1e-5


def test_compiled_functions(books: Books) -> None:
    @mx.compile
    def f(x: mx.array, y: mx.array) -> mx.array:
        return mx.exp(x * 2.0) + mx.sin(y) * x

    for n in (100, 100, 300):  # the third shape is traced anew
        mx.eval(f(mx.ones((n,)), mx.zeros((n,))))

    state = [mx.array(0.0)]

    def step(x: mx.array) -> mx.array:
        state[0] = state[0] + x.sum()
        return state[0] * x

    compiled = mx.compile(step, inputs=state, outputs=state)
    for _ in range(5):
        mx.eval(compiled(mx.ones((33,))), state)
    assert state[0].item() == 5 * 33


def test_a_freed_buffer_is_used_again(books: Books) -> None:
    # GIVEN an array of a size that no other has, which is dropped
    mx.clear_cache()
    at = len(books.events())
    x = mx.array(np.ones(70_000, np.float32))
    (new,) = since(books, at, least=200_000)
    del x
    (_, freed) = since(books, at, least=200_000)

    # WHEN the same is asked for again
    at = len(books.events())
    y = mx.array(np.ones(70_000, np.float32))

    # THEN it is the same buffer, from the cache
    (again,) = since(books, at, least=200_000)
    actions = [event["action"] for event in (new, freed, again)]
    assert actions == ["AllocNew", "FreeActiveToCache", "AllocReuse"]
    assert new["addr"] == freed["addr"] == again["addr"] != 0
    assert new["requested_size"] == again["requested_size"] == 280_000
    assert new["size"] == again["size"] == 18 * 16_384
    del y


def test_a_freed_buffer_of_a_kernel_is_used_again(books: Books) -> None:
    mx.clear_cache()
    ones = mx.ones((1,))
    mx.eval(ones)
    at = len(books.events())
    for _ in range(3):
        mx.eval(mx.broadcast_to(ones, (300, 1000)) + mx.zeros((300, 1000)))
        books.check(readers=False)  # waits until its buffers are back

    made = [e for e in since(books, at, least=MiB) if e["action"].startswith("Alloc")]
    assert {event["size"] for event in made} == {rounded(1_200_000)}
    assert made[0]["action"] == "AllocNew"
    assert made[-1]["action"] == "AllocReuse"
    new = {event["addr"] for event in made if event["action"] == "AllocNew"}
    assert {event["addr"] for event in made} == new


@pytest.mark.parametrize("how", ["now", "old reference"])
def test_clear_cache(how: str) -> None:
    clear = mx.clear_cache
    clear()
    with Books() as books:
        if how == "now":
            clear = mx.clear_cache
        mx.eval(mx.random.normal((300, 300)))
        events = books.events()
        cached = mx.get_cache_memory()
        assert cached >= 360_000
        kept = [e["addr"] for e in events if e["action"] == "FreeActiveToCache"]
        gone = [e["addr"] for e in events if e["action"] == "AllocReuse"]

        # WHEN the cache is cleared
        clear()

        # THEN each cached buffer is returned, also for the totals read at once
        assert mx.get_cache_memory() == 0
        assert mlxmem.stats()["cache"] == 0
        last = since(books, len(events))
        assert {event["action"] for event in last} == {"FreeCacheToOS"}
        assert sum(event["size"] for event in last) == cached
        assert sorted(gone + [e["addr"] for e in last]) == sorted(kept)


def test_the_cache_limit_trims_at_the_next_allocation(books: Books) -> None:
    # GIVEN 12 MiB in the cache
    arrays = [mx.array(np.ones((512, 512), np.float32)) for _ in range(12)]
    arrays.clear()
    books.check(readers=False)
    assert mx.get_cache_memory() >= 12 * MiB
    at = len(books.events())

    # WHEN the limit falls below that
    mx.set_cache_limit(5 * MiB)

    # THEN nothing happens before something is allocated, and then the oldest go
    assert mx.get_cache_memory() >= 12 * MiB
    x = mx.array(np.ones((777, 777), np.float32))
    events = since(books, at, least=MiB)
    assert mx.get_cache_memory() <= 5 * MiB
    assert [e["size"] for e in events if e["action"] == "AllocNew"] == [148 * 16_384]
    gone = [e["size"] for e in events if e["action"] == "FreeCacheToOS"]
    assert gone in ([MiB] * 7, [MiB] * 8)  # 8 where something small lay there, too

    # AND what is freed with a limit of nothing goes to the system
    mx.set_cache_limit(0)
    del x
    last = since(books, at, least=MiB)[-1]
    assert (last["action"], last["size"]) == ("FreeActiveToOS", rounded(777 * 777 * 4))


def test_a_memory_limit_empties_the_cache(books: Books) -> None:
    # GIVEN 24 MiB in the cache, and a limit that is just above what there is
    arrays = [mx.array(np.ones(2 * MiB, np.uint8)) for _ in range(12)]
    arrays.clear()
    books.check(readers=False)
    at = len(books.events())
    total = mx.get_active_memory() + mx.get_cache_memory()
    mx.set_memory_limit(total + 100 * KiB)

    # WHEN something new would exceed it
    x = mx.array(np.ones(5 * MiB, np.uint8))

    # THEN the oldest cached buffers are returned first
    events = since(books, at, least=MiB)
    assert [event["action"] for event in events] == ["FreeCacheToOS"] * 3 + ["AllocNew"]
    assert x.nbytes == events[-1]["requested_size"]


@pytest.mark.parametrize("count", [10, 20_000])
def test_scalars(books: Books, count: int) -> None:
    # GIVEN more of them than the slab of 8192 pieces holds, or fewer
    at = len(books.events())
    keep = [mx.array(i) for i in range(count)]

    # THEN each has a buffer of 8 bytes and an address of its own
    made = [e for e in since(books, at) if e["action"].startswith("Alloc")]
    assert len(made) == count
    assert {(e["requested_size"], e["size"]) for e in made} == {(4, 8)}
    assert len({event["addr"] for event in made}) == count
    assert {event["primitive_name"] for event in made} == {""}

    # AND they come back
    keep.clear()
    freed = since(books, at)[count:]
    assert {e["action"] for e in freed} == {"FreeActiveToCache"}
    assert sorted(e["addr"] for e in freed) == sorted(e["addr"] for e in made)
    mx.clear_cache()
    assert sum(e["action"] == "FreeCacheToOS" for e in since(books, at)) >= count


def test_a_move_to_unified_memory_is_one_life(books: Books) -> None:
    # GIVEN an array that a kernel made in the GPU's own memory
    at = len(books.events())
    x = mx.broadcast_to(mx.array([1.5]), (700, 300)) + mx.zeros((700, 300))
    mx.eval(x)
    active = mx.get_active_memory()

    # WHEN it is read on the CPU, which moves its bytes elsewhere
    view = memoryview(x)
    assert view.nbytes == 840_000
    total = float(np.asarray(view).sum())
    copied = np.array(x, copy=True)

    # THEN nothing is allocated or freed for it
    assert (total, copied[699, 299]) == (315_000.0, 1.5)
    lives = [e for e in since(books, at) if e["requested_size"] == 840_000]
    actions = [e["action"] for e in lives if e["action"].startswith("Alloc")]
    assert mx.get_active_memory() <= active
    owner = lives[-1]["addr"]
    assert len(actions) in (1, 2)  # the zeros may have lent their buffer

    # AND it ends once, when the view is gone, too
    del x
    books.check(readers=False)
    held = mx.get_active_memory()
    del view, copied
    gc.collect()
    last = [e for e in since(books, at) if e["requested_size"] == 840_000][-1]
    assert last["action"] == "FreeActiveToCache"
    assert last["addr"] == owner or len(actions) == 2
    assert mx.get_active_memory() <= held - rounded(840_000)


def test_arrays_of_size_zero(books: Books) -> None:
    at = len(books.events())
    empty = [mx.zeros((0,)), mx.array([]), mx.ones((3, 0, 2)) + 1]
    mx.eval(empty, mx.concatenate([empty[0], mx.ones((4,))]))
    mx.eval(mx.zeros((0, 5)) @ mx.zeros((5, 0)))
    none = [e for e in since(books, at) if e["size"] == 0]
    assert {e["requested_size"] for e in none} <= {0}
    del empty


def conv() -> Any:
    x, w = mx.random.normal((2, 20, 20, 8)), mx.random.normal((16, 3, 3, 8))
    return mx.conv2d(x, w, padding=1)


def quantize() -> Any:
    packed = mx.quantize(mx.random.normal((128, 256)), group_size=64, bits=4)
    return mx.quantized_matmul(mx.random.normal((5, 256)), *packed)


def gather_scatter() -> Any:
    x = mx.random.normal((50, 20))
    x[mx.array([1, 5, 9])] = 0.0
    return x.at[mx.array([2, 2, 3])].add(mx.ones((3, 20))), x[mx.array([4, 4, 4])]


def sort_and_scan() -> Any:
    x = mx.random.normal((33, 65))
    return mx.sort(x), mx.cumsum(x), mx.argmax(x, axis=1), mx.logsumexp(x, axis=-1)


def attention() -> Any:
    q = mx.random.normal((1, 4, 32, 64)).astype(mx.bfloat16)
    return mx.fast.scaled_dot_product_attention(q, q, q, scale=0.25, mask="causal")


def norms() -> Any:
    x = mx.random.normal((16, 256))
    return nn.LayerNorm(256)(x), nn.RMSNorm(256)(x), mx.softmax(x, axis=-1)


def views_and_types() -> Any:
    x = mx.arange(1000).reshape(10, 100)
    bits = x.astype(mx.float32).view(mx.int32)
    return mx.contiguous(x[::2, 5:50].T), bits, mx.exp(mx.broadcast_to(x[0], (50, 100)))


@pytest.mark.parametrize(
    "build",
    [conv, quantize, gather_scatter, sort_and_scan, attention, norms, views_and_types],
)
def test_kinds_of_operations(build: Callable[[], Any]) -> None:
    try:
        mx.eval(build())
    except (RuntimeError, ValueError) as error:
        pytest.skip(f"this MLX can't do it on the GPU: {error}")
    with Books() as books:
        for _ in range(3):
            result = build()
            mx.eval(result)
            books.check(readers=False)
        del result


def test_a_small_ring(books: Books) -> None:
    books.max_entries = 50
    books.restart()
    keep = [mx.full((n,), n) for n in range(1, 40)]
    mx.eval(keep)
    for n in range(100):
        mx.eval(mx.exp(mx.ones((n + 1,))))

    recording = books.check()
    assert len(recording.events) == 50
    assert recording.dropped > 100
    assert len(recording.buffers) >= len(keep)


def test_arrays_and_a_cache_from_before() -> None:
    old = [mx.random.normal((600 + n, 50)) for n in range(8)]
    mx.eval(old)
    lazy = mx.exp(old[0]) @ old[0].T
    del old[1:4]
    with Books() as books:
        mx.eval(lazy)
        old.pop()
        x = mx.random.normal((600, 50))
        mx.eval(x)
        recording = books.check()
        assert recording.active_at_enable > 4 * 600 * 50 * 4
        del x
