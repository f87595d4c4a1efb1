"""mlxmem's plugin for pytest: limits on MLX's memory, a table of the hungriest tests.

A module of its own, since every run of pytest loads it: nothing of mlxmem, NumPy or
MLX is imported for a run that uses none of it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import os
import sys
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import pytest

if TYPE_CHECKING:
    from mlxmem.events import Frame, Recording

_MEMORY = "limit_mlx_memory"
_LEAKS = "limit_mlx_leaks"
_LINES = 10  # that a failure names
# Of a report, also in JUnit's XML; numbers pass from xdist's workers as they are.
_PROPERTIES = ("mlxmem_peak_bytes", "mlxmem_allocated_bytes", "mlxmem_allocations")

_MEASURED = pytest.StashKey[bool]()


@dataclass(frozen=True)
class _Limits:
    memory: int | None = None  # bytes
    leaks: int | None = None  # bytes
    warmups: int = 1

    @property
    def runs_before(self) -> int:
        return self.warmups if self.leaks is not None else 0


@dataclass
class _Measured:
    """What a test did; bytes above its start."""

    peak: int
    allocated: int
    allocations: int
    at_peak: list[tuple[int, int]]  # (bytes, traceback id) of each buffer
    left: list[tuple[int, int]]
    recording: Recording


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--mlxmem` and `--mlxmem-most`."""
    group = parser.getgroup("mlxmem", "memory of MLX")
    group.addoption(
        "--mlxmem",
        action="store_true",
        help="record each test and show those that used most of MLX's memory",
    )
    group.addoption(
        "--mlxmem-most",
        type=int,
        default=10,
        metavar="N",
        help="how many tests --mlxmem shows, 0 = all (default: 10)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Describe the two marks."""
    config.addinivalue_line(
        "markers",
        f'{_MEMORY}(size): fail if the test\'s own MLX memory peaks above "64 MB"; '
        "fixtures do not count",
    )
    config.addinivalue_line(
        "markers",
        f'{_LEAKS}(size, warmups=1): fail if a line leaves more than "1 MB" behind '
        "that the test allocated; the test runs `warmups` times before it counts",
    )
    if config.getoption("mlxmem"):
        config.pluginmanager.register(_Table(config), "mlxmem-table")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse bad limits before the first test runs."""
    for item in items:
        _limits(item)


def _limits(item: pytest.Item) -> _Limits:
    memory, leaks = item.get_closest_marker(_MEMORY), item.get_closest_marker(_LEAKS)
    if memory is None and leaks is None:
        return _Limits()
    from mlxmem.units import parse_bytes

    def read(mark: pytest.Mark, size: Any) -> int:
        try:
            return parse_bytes(size)
        except (TypeError, ValueError) as error:
            raise pytest.UsageError(f"{item.nodeid}: {mark.name}: {error}") from None

    def memory_size(size: Any) -> Any:
        return size

    def leaks_size(size: Any, warmups: int = 1) -> Any:
        if isinstance(warmups, bool) or not isinstance(warmups, int) or warmups < 0:
            raise TypeError(f"warmups must be a number from 0 on, not {warmups!r}")
        return size, warmups

    try:
        found = _Limits()
        if memory is not None:
            size = memory_size(*memory.args, **memory.kwargs)
            found = _Limits(memory=read(memory, size))
        if leaks is not None:
            size, warmups = leaks_size(*leaks.args, **leaks.kwargs)
            found = _Limits(found.memory, read(leaks, size), warmups)
    except TypeError as error:
        text = str(error).replace("_limits.<locals>.", "").replace("_size()", "()")
        raise pytest.UsageError(f"{item.nodeid}: bad limit: {text}") from None
    return found


# Innermost, so that what other plugins make of a coroutine is a function by now.
@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Measure the test function alone, after its warm-ups."""
    limits = _limits(pyfuncitem)
    if limits == _Limits() and not pyfuncitem.config.getoption("mlxmem"):
        return (yield)
    if limits.runs_before:
        if inspect.iscoroutinefunction(pyfuncitem.obj):
            _refuse_warmups("a coroutine function")
        names = pyfuncitem._fixtureinfo.argnames
        for number in range(limits.runs_before):
            with _warmup(pyfuncitem, limits, number):
                pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})
    with _measuring(pyfuncitem, limits):
        return (yield)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Measure what never comes to pytest_pyfunc_call, such as unittest's methods."""
    limits = _limits(item)
    if limits == _Limits() and not item.config.getoption("mlxmem"):
        return (yield)
    if _is_method_of_test_case(item):
        with _measured_method(item, limits):
            return (yield)
    if not isinstance(item, pytest.Function):
        if limits.runs_before:
            _refuse_warmups(f"a {type(item).__name__}")
        with _measuring(item, limits):
            return (yield)
    item.stash[_MEASURED] = False
    result = yield
    if limits != _Limits() and not item.stash[_MEASURED]:
        pytest.fail(
            "the limit on MLX's memory can't be checked, since another plugin runs "
            f"this {type(item).__name__} in a way of its own",
            pytrace=False,
        )
    return result


def _is_method_of_test_case(item: pytest.Item) -> TypeGuard[pytest.Function]:
    unittest = sys.modules.get("unittest")
    if unittest is None or not isinstance(item, pytest.Function):
        return False
    return isinstance(getattr(item.obj, "__self__", None), unittest.TestCase)


@contextlib.contextmanager
def _measured_method(item: pytest.Function, limits: _Limits) -> Iterator[None]:
    """Let unittest call a method that measures, between its setUp and tearDown."""
    method = item.obj
    case = method.__self__

    @functools.wraps(method)
    def measured() -> object:
        __tracebackhide__ = True
        for number in range(limits.runs_before):
            with _warmup(item, limits, number):
                method()
        with _measuring(item, limits):
            return method()

    @functools.wraps(method)
    async def measured_coroutine() -> object:
        __tracebackhide__ = True
        for number in range(limits.runs_before):
            with _warmup(item, limits, number):
                await method()
        with _measuring(item, limits):
            return await method()

    # pytest hands a plain method over itself, a coroutine method unittest looks up.
    if inspect.iscoroutinefunction(method):
        setattr(case, item.name, measured_coroutine)
    else:
        item.obj = measured
    try:
        yield
    finally:
        item.obj = method
        vars(case).pop(item.name, None)


def _refuse_warmups(kind: str) -> None:
    pytest.fail(
        f"{_LEAKS} can't run {kind} before the test; write warmups=0", pytrace=False
    )


@contextlib.contextmanager
def _warmup(item: pytest.Item, limits: _Limits, number: int) -> Iterator[None]:
    """Around a run that does not count; a failure says that it was one."""
    __tracebackhide__ = True
    try:
        yield
    except BaseException:
        item.add_report_section(
            "call",
            "mlxmem",
            f"The test ended in warm-up {number + 1} of {limits.warmups}, which "
            f"{_LEAKS} runs before what counts; with warmups=0 there is none.",
        )
        raise


@contextlib.contextmanager
def _measuring(item: pytest.Item, limits: _Limits) -> Iterator[None]:
    """Measure what happens inside, and check it when it succeeds."""
    __tracebackhide__ = True
    from mlxmem import recorder

    item.stash[_MEASURED] = True
    _settle()
    ours = not recorder.is_enabled()
    if ours:
        recorder.enable(max_entries=0)
    session = recorder.session_number()
    start = recorder.stats()["events_recorded"]
    try:
        yield
    except BaseException:
        if limits.runs_before:
            item.add_report_section(
                "call",
                "mlxmem",
                f"The test had run {limits.warmups} time(s) before, as the warm-up of "
                f"{_LEAKS}, with the same fixtures; with warmups=0 it runs once.",
            )
        raise
    finally:
        # A test that failed is left alone: its traceback keeps its arrays.
        kept = recorder.session_number() == session and recorder.is_enabled()
        measured = None
        if kept:
            _settle()
            measured = _measure(recorder.recording(), start)
            if ours:
                recorder.disable()
        if measured is not None:
            values = measured.peak, measured.allocated, measured.allocations
            item.user_properties.extend(zip(_PROPERTIES, values, strict=True))
    if limits != _Limits():
        if measured is None:
            pytest.fail(
                "the limit on MLX's memory can't be checked, since the test itself "
                "called mlxmem.enable() or disable(), or the recording that was "
                "running before it dropped events; remove one of the two",
                pytrace=False,
            )
        _check(item, limits, measured)


def _measure(recording: Recording, start: int) -> _Measured | None:
    """Replay what happened since event number `start`; None if it was dropped."""
    from mlxmem.events import Action

    first = start - recording.dropped
    if first < 0:
        return None
    live: dict[int, tuple[int, int]] = {}
    at_peak: dict[int, tuple[int, int]] = {}
    active = peak = allocated = allocations = 0
    rising = False
    rows = recording.events[first:]
    for action, address, size, stack in zip(
        rows["action"].tolist(),
        rows["addr"].tolist(),
        rows["size"].tolist(),
        rows["traceback_id"].tolist(),
        strict=True,
    ):
        if action <= Action.AllocMakeBuffer:
            live[address] = size, stack
            active += size
            allocated += size
            allocations += 1
            if active > peak:
                peak, rising = active, True
        elif action <= Action.Release:
            if rising:
                # Only now, since each allocation on the way up is a peak, too.
                at_peak, rising = dict(live), False
            live.pop(address, None)
            active -= size
    if rising:
        at_peak = dict(live)
    return _Measured(
        peak,
        allocated,
        allocations,
        list(at_peak.values()),
        list(live.values()),
        recording,
    )


def _check(item: pytest.Item, limits: _Limits, measured: _Measured) -> None:
    from mlxmem.units import format_bytes

    def exact(n: int) -> str:
        return f"{format_bytes(n)} ({n:,} bytes)"

    if limits.memory is not None and measured.peak > limits.memory:
        lines = _by_line(item, measured.at_peak, measured.recording)
        pytest.fail(
            f"MLX's memory rose by {exact(measured.peak)} during the test; the limit "
            f"is {exact(limits.memory)}. The lines that made it up:\n"
            + "\n".join(_described(lines)),
            pytrace=False,
        )
    if limits.leaks is not None:
        lines = _by_line(item, measured.left, measured.recording)
        over = [line for line in lines if line[0] > limits.leaks]
        if over:
            pytest.fail(
                f"{'A line' if len(over) == 1 else f'{len(over)} lines'} of the test "
                "left more of MLX's memory behind than the limit of "
                f"{exact(limits.leaks)} each:\n" + "\n".join(_described(over)),
                pytrace=False,
            )


_Line = tuple[int, int, str]  # bytes, buffers, where


def _by_line(
    item: pytest.Item, buffers: list[tuple[int, int]], recording: Recording
) -> list[_Line]:
    sums: dict[str, tuple[int, int]] = {}
    places: dict[int, str] = {}
    for size, stack in buffers:
        if stack not in places:
            frames = recording.resolve(stack) if stack else None
            places[stack] = _place(item, frames)
        total, count = sums.get(places[stack], (0, 0))
        sums[places[stack]] = total + size, count + 1
    lines = [(total, count, place) for place, (total, count) in sums.items()]
    return sorted(lines, reverse=True)


def _place(item: pytest.Item, frames: list[Frame] | None) -> str:
    if not frames:
        return "(no stack)"

    def show(frame: Frame) -> str:
        path = os.path.relpath(frame[0], item.config.rootpath)
        # What lies elsewhere is better known by its whole path.
        return f"{frame[0] if path.startswith('..') else path}:{frame[2]} {frame[1]}"

    text = show(frames[-1])
    mine = [frame for frame in frames if frame[0] == str(item.path)]
    if mine and mine[-1] != frames[-1]:
        text += f", called at {show(mine[-1])}"
    return text


def _described(lines: list[_Line]) -> Iterator[str]:
    from mlxmem.units import format_bytes

    for size, count, place in lines[:_LINES]:
        buffers = "1 buffer" if count == 1 else f"{count:,} buffers"
        yield f"  {format_bytes(size):>10} ({size:,} bytes) in {buffers}: {place}"
    rest = lines[_LINES:]
    if rest:
        yield f"  {format_bytes(sum(line[0] for line in rest)):>10} in {len(rest)} more"


def _settle() -> None:
    """Wait until nothing is freed any more: stream workers do so after eval."""
    import mlx.core as mx

    gc.collect()
    mx.synchronize()
    before, same = mx.get_active_memory(), 0
    for _ in range(200):
        time.sleep(0.001)
        now = mx.get_active_memory()
        same = same + 1 if now == before else 0
        if same == 3:
            return
        before = now


class _Table:
    """The table of `--mlxmem`; with xdist, only the controller has one to show."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.rows: list[tuple[int, int, int, str]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note what a test used."""
        found = dict(report.user_properties)
        if report.when == "call" and all(name in found for name in _PROPERTIES):
            peak, allocated, count = (int(str(found[name])) for name in _PROPERTIES)
            self.rows.append((peak, allocated, count, report.nodeid))

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter
    ) -> None:
        """Show the rows with the highest peaks."""
        from mlxmem.units import format_bytes

        rows = sorted(self.rows, reverse=True)
        most = self.config.getoption("mlxmem_most")
        shown = rows[:most] if most > 0 else rows
        terminalreporter.section("MLX memory: the hungriest tests")
        if not rows:
            terminalreporter.line("no test was recorded")
            return
        terminalreporter.line(f"{'peak':>10}  {'allocated':>10}  {'buffers':>9}  test")
        for peak, allocated, count, name in shown:
            terminalreporter.line(
                f"{format_bytes(peak):>10}  {format_bytes(allocated):>10}  "
                f"{count:>9,}  {name}"
            )
        if len(shown) < len(rows):
            terminalreporter.line(
                f"{len(rows) - len(shown)} more tests; --mlxmem-most 0 shows all"
            )
