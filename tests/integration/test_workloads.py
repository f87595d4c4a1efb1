"""Real work of many kinds, after which the books must balance to the byte."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from books import HAS_CPU_CACHE, VERSION, Books

import mlxmem
from mlxmem.events import Action

KiB = 1 << 10
MiB = 1 << 20
# From 0.32.0 on MLX carries an error of a stream worker over to eval; before, a
# worker that fails ends the process.
WORKER_ERRORS = VERSION >= (0, 32, 1)


def actions(books: Books) -> list[str]:
    return [event["action"] for event in books.events()]


def test_several_streams(books: Books) -> None:
    # GIVEN work on three streams, with results of one used on the next
    streams = [mx.new_stream(mx.cpu) for _ in range(3)]
    x = mx.random.normal((128, 128))

    # WHEN they run
    for _ in range(10):
        for stream in streams:
            with mx.stream(stream):
                x = mx.tanh(x @ x)
        mx.eval(x)

    # THEN the streams are told apart
    seen = {event["stream"] for event in books.allocs()}
    assert len(seen - {-1}) >= 3


def test_python_threads_with_streams_of_their_own(books: Books) -> None:
    ids: set[int] = set()
    results: list[float] = []

    def work(seed: int) -> None:
        ids.add(threading.get_native_id())
        with mx.stream(mx.new_stream(mx.cpu)):
            x = mx.full((64, 64), seed / 100)
            for _ in range(50):
                x = mx.sin(x @ x) + mx.array([0.1])
                mx.eval(x)
            results.append(x.sum().item())

    # GIVEN four threads, WHEN all evaluate at once
    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    # THEN each thread's allocations carry its id
    assert len(results) == 4
    assert {event["thread_id"] for event in books.allocs()} == ids


def test_async_eval_while_the_next_graph_is_built(books: Books) -> None:
    x = mx.random.normal((256, 256))
    for _ in range(20):
        x = mx.sigmoid(x @ x)
        mx.async_eval(x)
        mx.array(list(range(100)))  # a leaf in between, dropped at once
    mx.eval(x)
    names = {event["primitive_name"] for event in books.allocs()}
    assert {"", "Matmul"} <= names


def test_compiled_function(books: Books) -> None:
    @mx.compile
    def f(x: mx.array, y: mx.array) -> mx.array:
        return mx.exp(x * 2.0) + mx.sin(y) * x

    for n in (100, 100, 300):  # the third shape is traced anew
        mx.eval(f(mx.ones((n,)), mx.zeros((n,))))


def test_compiled_function_with_captured_state(books: Books) -> None:
    state = [mx.array(0.0)]

    def step(x: mx.array) -> mx.array:
        state[0] = state[0] + x.sum()
        return state[0] * x

    compiled = mx.compile(step, inputs=state, outputs=state)
    for _ in range(5):
        mx.eval(compiled(mx.ones((33,))), state)
    assert state[0].item() == 5 * 33


def test_training_steps(books: Books) -> None:
    # GIVEN a small model with an optimiser
    model = nn.Sequential(
        nn.Linear(48, 96), nn.ReLU(), nn.LayerNorm(96), nn.Linear(96, 8)
    )
    optimizer = optim.AdamW(1e-2)

    def loss(model: Any, x: mx.array, y: mx.array) -> mx.array:
        return nn.losses.cross_entropy(model(x), y).mean()

    grad = nn.value_and_grad(model, loss)
    x, y = mx.random.normal((64, 48)), mx.random.randint(0, 8, (64,))

    # WHEN it trains
    losses = []
    for _ in range(10):
        value, grads = grad(model, x, y)
        optimizer.update(model, grads)
        mx.eval(value, model.parameters(), optimizer.state)
        losses.append(value.item())
        books.check(readers=False)

    # THEN it learns and the books balanced after each step
    assert losses[-1] < losses[0]


def test_higher_transforms(books: Books) -> None:
    def f(x: mx.array) -> mx.array:
        return (mx.sin(x) * x).sum()

    x = mx.random.normal((40,))
    mx.eval(mx.grad(mx.grad(lambda x: f(x)))(mx.array(0.5)))
    mx.eval(mx.vmap(lambda row: row * row.sum())(mx.ones((7, 13))))
    mx.eval(mx.jvp(f, [x], [mx.ones((40,))]), mx.vjp(f, [x], [mx.array(1.0)]))
    checkpointed = mx.checkpoint(f)
    mx.eval(mx.grad(checkpointed)(x))


def test_custom_function(books: Books) -> None:
    @mx.custom_function
    def f(x: mx.array) -> mx.array:
        return mx.exp(x)

    @f.vjp
    def f_vjp(primals: Any, cotangent: Any, output: Any) -> mx.array:
        return cotangent * output

    x = mx.random.normal((77,))
    mx.eval(mx.grad(lambda x: f(x).sum())(x))


# Inputs are evaluated first: an eval that throws while a worker still writes them
# makes MLX 0.31.2 and older crash by themselves.
def failing_gather() -> mx.array:
    a = mx.ones((8, 8), dtype=mx.float16)
    b = mx.ones((2, 8, 8), dtype=mx.float16)
    indices = mx.array([0, 1])
    mx.eval(a, b, indices)
    return mx.gather_mm(a, b, rhs_indices=indices)


def failing_mask() -> mx.array:
    a = mx.ones((64, 64), dtype=mx.float16)
    mask = mx.ones((2, 2), dtype=mx.bool_)
    mx.eval(a, mask)
    return mx.block_masked_mm(a, a, 32, mask_out=mask)


def failing_inverse() -> mx.array:
    return mx.linalg.inv(mx.zeros((6, 6)), stream=mx.cpu)


def failing_svd() -> mx.array:
    nan = mx.array(np.full((5, 5), np.nan, np.float32))
    return mx.linalg.svd(nan, stream=mx.cpu)[0]


def failing_load() -> mx.array:
    whole = io.BytesIO()
    mx.save(whole, mx.ones((300, 300)))
    short = io.BytesIO(whole.getvalue()[:2000])
    return mx.load(short, format="npy")


FAILURES: list[Callable[[], mx.array]] = [failing_gather, failing_mask]
if WORKER_ERRORS:
    FAILURES += [failing_inverse, failing_svd, failing_load]


def message(build: Callable[[], mx.array]) -> tuple[type[BaseException], str]:
    with pytest.raises(RuntimeError) as caught:
        mx.eval(mx.exp(build()) + 1)
    return type(caught.value), str(caught.value)


@pytest.mark.parametrize("build", FAILURES)
def test_exception_inside_eval(build: Callable[[], mx.array]) -> None:
    # GIVEN what the failure says when nothing records
    expected = message(build)

    with Books() as books:
        # WHEN it happens under recording, alone and twice in a row
        raised = [message(build), message(build)]
        failed_at = len(books.events())
        leaf = mx.array([1.0, 2.0, 3.0])
        mx.eval(leaf * 2)

        # THEN it passes unchanged, and nothing later is charged to the failed op
        assert raised == [expected] * 2
        later = [e for e in books.events()[failed_at:] if e["traceback"]]
        later = [e for e in later if e["action"].startswith("Alloc")]
        assert {"Multiply", ""} >= {e["primitive_name"] for e in later}
        assert later[0]["requested_size"] == 12
        assert later[0]["primitive_name"] == ""
        assert later[0]["stream"] == -1


def test_exception_in_the_traced_python_function(books: Books) -> None:
    def broken(x: mx.array) -> mx.array:
        y = mx.exp(x)
        mx.eval(mx.ones((10,)))
        raise KeyError(str(y.shape))

    with pytest.raises(KeyError):
        mx.grad(broken)(mx.ones((20,)))
    with pytest.raises(KeyError):
        mx.compile(broken)(mx.ones((20,)))
    leaf = mx.array([1, 2, 3])
    last = books.allocs()[-1]
    assert (last["requested_size"], last["primitive_name"]) == (leaf.nbytes, "")


@pytest.mark.usefixtures("cpu_cache")
def test_cache_limit_change_in_the_middle(books: Books) -> None:
    # GIVEN 12 MiB in the cache
    arrays = [mx.random.normal((512, 512)) for _ in range(12)]
    mx.eval(arrays)
    arrays.clear()
    books.check()
    assert mx.get_cache_memory() >= 12 * MiB
    before = len(books.events())

    # WHEN the limit falls below that
    old = mx.set_cache_limit(5 * MiB)

    # THEN the difference left the cache, and what is freed now goes to the OS
    books.check()
    trimmed = [e for e in books.events()[before:] if e["action"] == "FreeCacheToOS"]
    assert sum(event["size"] for event in trimmed) >= 7 * MiB
    assert all(event["size"] == MiB for event in trimmed if event["size"] > KiB)
    mx.eval([mx.random.normal((700, 700)) for _ in range(8)])
    assert "FreeActiveToOS" in actions(books)[before:]
    mx.set_cache_limit(old)


@pytest.mark.usefixtures("cpu_cache")
@pytest.mark.parametrize("how", ["now", "old reference", "metal alias"])
def test_clear_cache(how: str) -> None:
    # GIVEN a reference to clear_cache from before enable(), or one from within
    clear = mx.clear_cache
    clear()
    with Books() as books:
        assert clear is not mx.clear_cache
        if how == "now":
            clear = mx.clear_cache
        elif how == "metal alias":
            if not hasattr(getattr(mx, "metal", None), "clear_cache"):
                pytest.skip("this MLX has no mx.metal.clear_cache")
            clear = mx.metal.clear_cache
        mx.eval(mx.random.normal((300, 300)))
        events = books.events()
        cached = mx.get_cache_memory()
        assert cached >= 360_000
        kept = [e["addr"] for e in events if e["action"] == "FreeActiveToCache"]
        gone = [e["addr"] for e in events if e["action"] == "AllocReuse"]

        # WHEN the cache is cleared
        clear()

        # THEN each cached buffer went to the OS, also for the totals read at once
        assert mx.get_cache_memory() == 0
        assert mlxmem.stats()["cache"] == 0
        last = books.events()[len(events) :]
        gone += [event["addr"] for event in last]
        assert {event["action"] for event in last} == {"FreeCacheToOS"}
        assert sum(event["size"] for event in last) == cached
        assert sorted(gone) == sorted(kept)
        assert {event["primitive_name"] for event in last} == {""}
        assert {event["traceback"] for event in last} == {None}


@pytest.mark.usefixtures("cpu_cache")
@pytest.mark.parametrize("how", ["clear_cache", "set_cache_limit", "metal alias"])
def test_a_returned_cache_has_the_time_and_thread_of_the_call(
    books: Books, how: str
) -> None:
    # GIVEN something in the cache
    function = mx.clear_cache
    if how == "metal alias":
        function = getattr(getattr(mx, "metal", None), "clear_cache", None)
        if function is None:
            pytest.skip("this MLX has no mx.metal.clear_cache")
    old = mx.set_cache_limit(32 * MiB)
    mx.eval(mx.random.normal((300, 300)))
    events = books.events()
    call: dict[str, int] = {}

    def clear() -> None:
        call["thread"] = threading.get_native_id()
        call["from"] = time.time_ns() // 1000
        if how == "set_cache_limit":
            mx.set_cache_limit(0)
        else:
            function()
        call["to"] = time.time_ns() // 1000

    # WHEN another thread returns it, long after and long before anything else
    time.sleep(0.05)
    thread = threading.Thread(target=clear)
    thread.start()
    thread.join()
    time.sleep(0.05)

    # THEN it is booked there and then
    recording = books.check()
    gone = recording.events[len(events) :]
    assert len(gone) > 0
    assert set(gone["action"].tolist()) == {Action.FreeCacheToOS}
    assert set(gone["thread_id"].tolist()) == {call["thread"]}
    times = recording.start_us + gone["timestamp_us"]
    slack = 5_000  # the two clocks are read one after the other
    assert call["from"] - slack <= int(times.min())
    assert int(times.max()) <= call["to"] + slack
    mx.set_cache_limit(old)


@pytest.mark.usefixtures("cpu_cache")
def test_limits_and_clears_while_threads_evaluate(books: Books) -> None:
    stop = threading.Event()

    def work() -> None:
        with mx.stream(mx.new_stream(mx.cpu)):
            n = 0
            while not stop.is_set():
                n = (n + 37) % 200
                mx.eval(mx.exp(mx.random.normal((64 + n, 64))))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for limit in (1 * MiB, 100 * KiB, 32 * MiB) * 10:
        mx.set_cache_limit(limit)
        mx.eval(mx.random.normal((100, 100)))
        mx.clear_cache()
    stop.set()
    for thread in threads:
        thread.join()


def test_peak_after_a_reset(books: Books) -> None:
    mx.eval(mx.random.normal((1024, 512)))
    books.check()
    mx.reset_peak_memory()
    before = mx.get_active_memory()  # what earlier tests left counts in both peaks
    small = mx.random.normal((64, 64))
    mx.eval(small)
    recording = books.check()
    assert mx.get_peak_memory() - before < MiB < recording.peak - before


def test_arrays_of_size_zero(books: Books) -> None:
    empty = [mx.zeros((0,)), mx.array([]), mx.ones((3, 0, 2)) + 1]
    mx.eval(empty, mx.concatenate([empty[0], mx.ones((4,))]))
    del empty
    mx.eval(mx.zeros((0, 5)) @ mx.zeros((5, 0)))


@pytest.mark.parametrize("op", ["svd", "eigh", "inv", "qr", "cholesky", "solve", "lu"])
def test_linalg(books: Books, op: str) -> None:
    # LAPACK's scratch buffers are made on stream workers.
    n = 24
    half = mx.random.normal((n, n))
    matrix = half @ half.T + n * mx.eye(n)
    with mx.stream(mx.cpu):
        results: Any = {
            "svd": mx.linalg.svd,
            "eigh": mx.linalg.eigh,
            "inv": mx.linalg.inv,
            "qr": mx.linalg.qr,
            "cholesky": mx.linalg.cholesky,
            "solve": lambda m: mx.linalg.solve(m, mx.ones((n, 1))),
            "lu": mx.linalg.lu,
        }[op](matrix)
        mx.eval(results)
    names = {event["primitive_name"] for event in books.allocs()}
    expected = {"svd": "SVD", "eigh": "Eigh", "inv": "Inverse", "qr": "QRF"}
    expected |= {"cholesky": "Cholesky", "solve": "LUF", "lu": "LUF"}
    assert expected[op] in names


@pytest.mark.skipif(VERSION < (0, 31, 0), reason="0.30.6 names no op on workers")
@pytest.mark.parametrize(
    ("op", "name"),
    [("svd", "SVD"), ("eigh", "Eigh"), ("inv", "Inverse"), ("qr", "QRF")],
)
def test_scratch_of_stream_workers_names_the_op(
    books: Books, op: str, name: str
) -> None:
    x = mx.random.normal((40, 40))
    x = x + x.T + 80 * mx.eye(40)
    mx.eval(x)
    before = len(books.events())
    mx.eval(getattr(mx.linalg, op)(x, stream=mx.cpu))
    made = [e for e in books.events()[before:] if e["action"].startswith("Alloc")]
    me = threading.get_native_id()
    on_workers = [event for event in made if event["thread_id"] != me]
    if op in ("svd", "eigh"):
        assert on_workers
    for event in on_workers:
        assert event["primitive_name"] == name
        assert event["traceback"][-1][1] == (
            "test_scratch_of_stream_workers_names_the_op"
        )


def fft() -> Any:
    x = mx.random.normal((16, 64))
    return mx.fft.rfft2(x), mx.fft.ifft(mx.fft.fft(x))


def conv() -> Any:
    x, w = mx.random.normal((2, 20, 20, 8)), mx.random.normal((16, 3, 3, 8))
    y = mx.conv2d(x, w, padding=1)
    flat = mx.conv1d(mx.ones((1, 30, 4)), mx.ones((5, 3, 4)))
    return y, flat, mx.conv_transpose2d(x, mx.ones((4, 3, 3, 8)))


def quantize() -> Any:
    w = mx.random.normal((128, 256))
    packed = mx.quantize(w, group_size=64, bits=4)
    x = mx.random.normal((5, 256))
    return mx.quantized_matmul(x, *packed), mx.dequantize(*packed)


def gather_scatter() -> Any:
    x = mx.random.normal((50, 20))
    x[mx.array([1, 5, 9])] = 0.0
    y = x.at[mx.array([2, 2, 3])].add(mx.ones((3, 20)))
    return y, x[mx.array([4, 4, 4])], mx.take(x, mx.array([0, 7]), axis=1)


def sort_and_scan() -> Any:
    x = mx.random.normal((33, 65))
    return mx.sort(x), mx.argpartition(x, 5), mx.cumsum(x), mx.topk(x, 3)


def random_kinds() -> Any:
    key = mx.random.key(3)
    return (
        mx.random.uniform(shape=(100,), key=key),
        mx.random.categorical(mx.zeros((10, 5)), key=key),
        mx.random.permutation(100),
        mx.random.bernoulli(0.3, (77,)),
        mx.random.truncated_normal(-1.0, 1.0, (50,)),
        mx.random.multivariate_normal(mx.zeros(3), mx.eye(3), [20], stream=mx.cpu),
    )


def attention() -> Any:
    q = mx.random.normal((1, 4, 32, 16))
    masked = mx.fast.scaled_dot_product_attention(q, q, q, scale=0.25, mask="causal")
    return masked, mx.fast.rope(
        q, 16, traditional=False, base=10000.0, scale=1.0, offset=0
    )


def views_and_types() -> Any:
    x = mx.arange(1000).reshape(10, 100)
    bits = x.astype(mx.float32).view(mx.int32)
    return x[::2, 5:50].T, bits, mx.broadcast_to(x[0], (50, 100)), mx.split(x, 5)


@pytest.mark.parametrize(
    "build",
    [
        fft,
        conv,
        quantize,
        gather_scatter,
        sort_and_scan,
        random_kinds,
        attention,
        views_and_types,
    ],
)
def test_kinds_of_operations(books: Books, build: Callable[[], Any]) -> None:
    for _ in range(3):
        result = build()
        mx.eval(result)
    books.check()
    del result


@pytest.mark.parametrize("suffix", ["npy", "npz", "safetensors", "gguf"])
def test_save_and_load(books: Books, tmp_path: Path, suffix: str) -> None:
    path = str(tmp_path / f"weights.{suffix}")
    arrays = {"a": mx.random.normal((40, 30)), "b": mx.random.normal((30, 40)).T}
    if suffix == "npy":
        mx.save(path, arrays["a"])
    elif suffix == "npz":
        mx.savez(path, **arrays)
    elif suffix == "safetensors":
        mx.save_safetensors(path, arrays)
    else:
        mx.save_gguf(path, arrays)
    loaded = mx.load(path)
    mx.eval(loaded)
    del arrays
    books.check()


def test_numpy_in_and_out(books: Books) -> None:
    x = mx.array(np.arange(500, dtype=np.float64))
    out = np.array(x * 2)
    view = np.asarray(memoryview(x))
    books.check()
    del x
    books.check()  # the view still holds the buffer
    assert out[3] == 6
    assert view[3] == 3


def test_in_place_updates_and_donation(books: Books) -> None:
    x = mx.ones((512, 512))
    mx.eval(x)
    before = len(books.events())
    for _ in range(5):
        x = mx.abs(x)
        mx.eval(x)
    # The input's buffer is handed on: nothing is allocated for it.
    assert actions(books)[before:] == []
    x += 1
    x[3:5] = 7
    mx.eval(x)


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


def test_without_stacks() -> None:
    with Books(stacks=False) as books:
        x = mx.random.normal((90, 90))
        mx.eval(x @ x)
        allocs = books.allocs()
        assert {event["traceback"] for event in allocs} == {None}
        assert "Matmul" in {event["primitive_name"] for event in allocs}


def test_every_action_of_this_backend_was_seen(books: Books) -> None:
    for _ in range(2):
        mx.eval(mx.exp(mx.random.normal((1000,))))
    mx.clear_cache()
    mx.eval(mx.zeros((0,)))
    seen = set(actions(books))
    if HAS_CPU_CACHE:
        assert seen == {
            "AllocNew",
            "AllocReuse",
            "FreeActiveToCache",
            "FreeActiveToOS",
            "FreeCacheToOS",
        }
    else:
        assert seen == {"AllocNew", "FreeActiveToOS"}
