"""Modules of a model: what they create carries their path, and nothing else changes."""

from __future__ import annotations

import gc
import os
import pickle
import sys
import threading
import warnings
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from books import Books

import mlxmem
from mlxmem import modules
from mlxmem._interner import resolve_context, set_context
from mlxmem.events import Action


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Linear(16, 16)
        self.gates = {"up": nn.Linear(16, 16), "norm": nn.RMSNorm(16)}

    def __call__(self, x: mx.array) -> mx.array:
        return self.gates["up"](self.gates["norm"](self.attention(x))) + x


class Quiet(Block):
    def __call__(self, x: mx.array) -> mx.array:
        return super().__call__(x) * 2


class Compiled(nn.Module):
    @partial(mx.compile, shapeless=True)
    def __call__(self, x: mx.array) -> mx.array:
        return mx.exp(x) + 1


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = [Block(), Quiet()]
        self.head = nn.Linear(16, 4)
        self.tied = self.head

    def __call__(self, x: mx.array) -> mx.array:
        for layer in self.layers:
            x = layer(x)
        return self.head(x) * mx.array(3.0)


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    assert set_context(0) == 0
    gc.collect()
    assert modules._patched == {}
    assert modules._paths == modules._tracked == {}


@pytest.fixture
def model() -> Model:
    mx.random.seed(0)
    model = Model()
    mx.eval(model.parameters())
    return model


def tagged(books: Books) -> dict[str, set[str]]:
    """Operations of each module's allocations."""
    recording = books.check()
    found: dict[str, set[str]] = {}
    for row in recording.events:
        if row["action"] <= Action.AllocMakeBuffer:
            name = recording.primitives[row["primitive_id"]]
            context = resolve_context(row["traceback_id"])
            found.setdefault(context.module, set()).add(name)
    return found


INPUT = mx.ones((64, 16))


def test_allocations_carry_the_path_of_their_module(model: Model) -> None:
    # GIVEN a model with modules in lists, dicts, twice, and with an inherited call
    mx.eval(INPUT)
    with Books() as books, mlxmem.track_modules(model):
        # WHEN it runs
        mx.eval(model(INPUT))
        outside = INPUT + 1
        mx.eval(outside)
        found = tagged(books)
    # THEN each allocation has the innermost module's path, the root its class's name
    paths = {
        f"layers.{i}.{name}"
        for i in (0, 1)
        for name in ("attention", "gates.up", "gates.norm")
    }
    assert paths | {"head"} <= set(found)
    assert set(found) <= paths | {"head", "Model", "layers.0", "layers.1", ""}
    assert "" in found["Model"]  # the constant is a leaf
    assert found[""] == {"Add", ""}


def test_ranges_and_modules_go_together(model: Model) -> None:
    with Books() as books, mlxmem.track_modules(model):
        # GIVEN a tracked model in a range
        with mlxmem.annotate("forward"):
            mx.eval(model(INPUT))
        # WHEN its contexts are read
        recording = books.check()
        contexts = {resolve_context(i) for i in recording.events["traceback_id"]}
    # THEN both are there
    assert (("forward",), "head") in contexts
    assert not any(c.module and not c.ranges for c in contexts)


def test_nothing_of_the_model_changes(model: Model, tmp_path: Path) -> None:
    # GIVEN what can be seen of a model and its training
    def look() -> list[Any]:
        mx.random.seed(1)
        model.save_weights(str(tmp_path / "w.npz"))
        loss_and_grad = nn.value_and_grad(model, lambda m, x: m(x).square().mean())
        loss, grads = loss_and_grad(model, INPUT)
        compiled = mx.compile(model)
        return [
            repr(model),
            [type(each) for each in model.modules()],
            [sorted(vars(each)) for each in model.modules()],
            loss.item(),
            [(k, v.tolist()) for k, v in nn.utils.tree_flatten(grads)],
            compiled(INPUT).tolist(),
            mx.load(str(tmp_path / "w.npz")).keys(),
            [name for name, _ in model.named_modules()],
            pickle.dumps(Block),
        ]

    before = look()
    # WHEN it is tracked
    with mlxmem.track_modules(model):
        during = look()
    # THEN it is the same, and so it is afterwards
    assert during == before
    assert look() == before


def test_remove_puts_the_classes_back(model: Model) -> None:
    # GIVEN two handles of models that share classes
    originals = {cls: cls.__dict__["__call__"] for cls in (Model, Block, nn.Linear)}
    first = mlxmem.track_modules(model)
    second = mlxmem.track_modules(Block())
    assert nn.Linear.__dict__["__call__"] is not originals[nn.Linear]
    # WHEN they are removed, one of them twice
    first.remove()
    first.remove()
    # THEN what the other needs stays until it goes, too
    assert Model.__dict__["__call__"] is originals[Model]
    assert Block.__dict__["__call__"] is not originals[Block]
    second.remove()
    for cls, original in originals.items():
        assert cls.__dict__["__call__"] is original
        assert cls.__call__.__qualname__ == f"{cls.__name__}.__call__"


def test_the_stack_is_that_of_the_users_code(model: Model) -> None:
    def stacks(tracked: bool) -> set[tuple[Any, ...]]:
        handle = mlxmem.track_modules(model) if tracked else None
        with Books() as books:
            mx.eval(model(INPUT))
            found = {tuple(e["traceback"]) for e in books.allocs() if e["traceback"]}
        if handle:
            handle.remove()
        return found

    # GIVEN a model
    # WHEN it runs once as it is and once tracked
    plain, tracked = (stacks(tracked) for tracked in (False, True))
    # THEN the stacks are the same
    assert tracked == plain
    assert any("attention" in str(stack) or "Linear" in str(stack) for stack in plain)


def test_an_exception_leaves_the_module(model: Model) -> None:
    with mlxmem.track_modules(model):
        # GIVEN a tracked model
        # WHEN a module of it raises
        with pytest.raises(ValueError, match=r"^\["):
            model(mx.ones((3, 5)))
        # THEN the thread is in none
        assert set_context(0) == 0


def test_a_compiled_call_is_called_as_before() -> None:
    # GIVEN a module whose __call__ is no function
    module = Compiled()
    try:
        expected: Any = module(INPUT).tolist()
    except Exception as error:
        expected = type(error)
    # WHEN it is tracked
    with mlxmem.track_modules(module):
        try:
            found: Any = module(INPUT).tolist()
        except Exception as error:
            found = type(error)
    # THEN it does what it did
    assert found == expected


def test_training_goes_on_as_without(model: Model) -> None:
    def train() -> list[float]:
        mx.random.seed(3)
        trained = Model()
        optimizer = optim.Adam(0.01)
        step = nn.value_and_grad(trained, lambda m, x: m(x).square().mean())
        losses = []
        tracked = mlxmem.track_modules(trained) if tracking else None
        for _ in range(5):
            loss, grads = step(trained, INPUT)
            optimizer.update(trained, grads)
            mx.eval(trained.parameters(), optimizer.state)
            losses.append(loss.item())
        if tracked:
            tracked.remove()
        return losses

    # GIVEN the losses of a training
    tracking = False
    expected = train()
    # WHEN it is tracked and recorded
    tracking = True
    with Books():
        found = train()
    # THEN they are equal to the bit
    assert found == expected


def test_a_model_that_dies_is_forgotten() -> None:
    # GIVEN a tracked model whose handle nobody keeps
    model = Block()
    handle = mlxmem.track_modules(model)
    assert len(modules._paths) == 4
    # WHEN it dies
    del model
    gc.collect()
    # THEN nothing of it is left
    assert modules._paths == modules._tracked == {}
    handle.remove()


# --- several handles --------------------------------------------------------


def test_a_part_of_two_tracked_models_has_the_newest_path(model: Model) -> None:
    def heads() -> set[str]:
        with Books() as books:
            mx.eval(model(INPUT))
            return {
                name for name in tagged(books) if "head" in name or "Linear" in name
            }

    # GIVEN a module that is tracked alone
    part = mlxmem.track_modules(model.head)
    assert heads() == {"Linear"}
    # WHEN the model that contains it is tracked, too
    whole = mlxmem.track_modules(model)
    # THEN it has the path in that model, also when the first handle goes
    assert heads() == {"head"}
    part.remove()
    assert heads() == {"head"}
    # AND with a newer one removed, the older one's path again
    part = mlxmem.track_modules(model.head)
    assert heads() == {"Linear"}
    part.remove()
    assert heads() == {"head"}
    whole.remove()
    assert heads() == set()


def test_a_shared_part_may_outlive_one_of_its_models() -> None:
    # GIVEN a part that two models share
    first, second = Model(), Model()
    first.head = first.tied = second.head
    handles = [mlxmem.track_modules(each) for each in (second, first)]
    # WHEN one of them dies
    del first
    gc.collect()
    handles.pop().remove()
    # THEN the other is tracked as it was
    assert set(modules._paths.values()) == {
        path or "Model" for path, _ in second.named_modules() if path != "tied"
    }
    handles.pop().remove()


def test_threads_track_and_remove_at_once() -> None:
    # GIVEN a shared module, and a class that is replaced and put back all the time
    shared = nn.Linear(4, 4)
    original = nn.Linear.__dict__["__call__"]
    start = threading.Barrier(4)
    interval = sys.getswitchinterval()

    def work(_: int) -> None:
        mine = nn.Linear(4, 4)
        start.wait()
        for _ in range(500):
            mlxmem.track_modules(mine).remove()
            mlxmem.track_modules(shared).remove()

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            # WHEN threads track and remove at once
            list(pool.map(work, range(4)))
    finally:
        sys.setswitchinterval(interval)
    # THEN none fails, and nothing stays replaced
    assert nn.Linear.__dict__["__call__"] is original
    assert modules._patched == modules._paths == {}


def test_a_forked_child_does_not_wait_for_a_thread_of_its_parent(model: Model) -> None:
    # GIVEN a thread that is tracking something
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with modules._lock:
            held.set()
            done.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    # WHEN the process forks
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads and fork
        pid = os.fork()
    if pid == 0:
        mlxmem.track_modules(model).remove()
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    done.set()
    holder.join()
    # THEN the child can track
    assert os.waitstatus_to_exitcode(status) == 0


# --- classes that are different ---------------------------------------------


class Refusing(type):
    def __setattr__(cls, name: str, value: object) -> None:
        raise AttributeError(f"{cls.__name__} is sealed")


class Sealed(nn.Module, metaclass=Refusing):
    def __call__(self, x: mx.array) -> mx.array:
        return x


def test_a_class_that_refuses_leaves_all_as_it_was(model: Model) -> None:
    # GIVEN a model with a module of a class that can't be changed
    original = nn.Linear.__dict__["__call__"]
    model.sealed = Sealed()
    # WHEN it is tracked
    # THEN the message names the class, and nothing has changed
    with pytest.raises(TypeError, match=r"Sealed'>, which refuses it \(Sealed is seal"):
        mlxmem.track_modules(model)
    assert nn.Linear.__dict__["__call__"] is original
    assert modules._patched == modules._paths == {}


class Coroutine(Block):
    async def __call__(self, x: mx.array) -> mx.array:  # type: ignore[override]
        return Block.__call__(self, x)


class Generator(nn.Module):
    def __call__(self, x: mx.array) -> Iterator[mx.array]:
        yield x + 1


class AsyncGenerator(nn.Module):
    async def __call__(self, x: mx.array) -> AsyncIterator[mx.array]:
        yield x + 1


@pytest.mark.parametrize("cls", [Coroutine, Generator, AsyncGenerator])
def test_a_call_that_runs_later_is_left_alone_with_a_warning(
    cls: type[nn.Module],
) -> None:
    # GIVEN a module whose call returns before its body runs
    original = cls.__dict__["__call__"]
    parent = Model()
    parent.layers = [cls(), cls()]
    # WHEN it is tracked
    with pytest.warns(
        UserWarning, match=f"what {cls.__module__}.{cls.__name__} c"
    ) as w:
        handle = mlxmem.track_modules(parent)
    # THEN a warning at the caller says so, once, and its class is as it was
    assert [each.filename for each in w] == [__file__]
    assert cls.__dict__["__call__"] is original
    handle.remove()


class Endless(nn.Module):
    def __call__(self, x: mx.array) -> mx.array:
        return self(x)


def test_a_recursion_error_leaves_the_module() -> None:
    def deeper(frames: int) -> None:
        if frames:
            deeper(frames - 1)
        else:
            model(INPUT)

    model = Endless()
    with Books(), mlxmem.track_modules(model):
        # GIVEN a tracked module that calls itself without end
        for frames in range(12):
            # WHEN the limit is met, each time at another place
            with pytest.raises(RecursionError):
                deeper(frames)
            # THEN the thread is in no module
            mlxmem.mark("after")
            assert set_context(0) == 0


@pytest.mark.parametrize("bad", [None, {}, nn.Linear, "model"])
def test_what_is_no_module_is_refused(bad: Any) -> None:
    with pytest.raises(TypeError, match=r"takes an mlx\.nn\.Module, not"):
        mlxmem.track_modules(bad)
