"""What `mlxmem doctor` does in a process of its own, since any step may crash there.

Each finding is a line of JSON in a file, written at once, so that what was found before
a crash is known. `mlxmem.doctor` starts this and reads the file.
"""

from __future__ import annotations

import ctypes
import dataclasses
import faulthandler
import gc
import importlib
import json
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

STEPS = (
    IMPORT := "importing mlx.core",
    COMPUTE := "computing with MLX, not recorded",
    CHECK := "checking MLX",
    RECORD := "recording a tiny program",
    UNDO := "putting MLX back",
)
# Its lines have numbers in the stacks. The product is computed by one operation, and
# no other buffer has its size.
PROGRAM_FILE = "<mlxmem doctor>"
PROGRAM = """\
left = mx.ones((300, 200))
right = mx.full((200, 100), 2.0)
product = left @ right
mx.eval(product)
"""
PRODUCT_LINE = 3
PRODUCT_BYTES = 300 * 100 * 4
PRODUCT_VALUE = 400.0  # 200 times 1 * 2
_WAITING = 3  # arrays that are made and not evaluated

Emit = Callable[..., None]


def run(path: str, limit_s: float) -> None:
    """Do all steps, up to the first that fails, and write what is found to a file.

    Parameters
    ----------
    path : str
        The file; it is there already.
    limit_s : float
        After so many seconds this process is killed; shortly before, the stacks of its
        threads go to stderr.
    """
    faulthandler.enable()
    faulthandler.dump_traceback_later(0.8 * limit_s)
    with open(path, "a", encoding="utf-8") as file:

        def emit(**found: Any) -> None:
            file.write(json.dumps(found) + "\n")
            file.flush()

        try:
            _examine(emit)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            emit(error=text, traceback=traceback.format_exc())
            return
        emit(done=True)


def _examine(emit: Emit) -> None:
    emit(step=IMPORT)
    mx: Any = importlib.import_module("mlx.core")
    emit(mlx={"version": mx.__version__, "file": mx.__file__})

    emit(step=COMPUTE)
    emit(device=str(mx.default_device()))
    _compare(emit, "value without recording", _run_program(mx)[1], PRODUCT_VALUE)
    gc.collect()

    emit(step=CHECK)
    # Not before: MLX alone must have been seen to work.
    from mlxmem import _hook

    check = _hook.check(lambda fact: emit(fact=dataclasses.asdict(fact)))
    for patch in check.patches:
        emit(patch=dataclasses.asdict(patch))
    if check.refusal:
        emit(refusal=check.refusal)
        return

    _record(emit, mx, sum(patch.count for patch in check.patches))


def _record(emit: Emit, mx: Any, patch_count: int) -> None:
    import mlxmem
    from mlxmem import _hook, recorder
    from mlxmem.events import Action
    from mlxmem.ledger import Ledger

    emit(step=RECORD)
    mx.clear_cache()
    _settle(mx)
    mx.reset_peak_memory()
    mlxmem.enable(max_entries=0)
    emit(backend=_hook.backend())
    words = _hook.patched_words()
    changed = sum(_word(address) == new for address, _, new in words)
    _compare(emit, "words patched", changed, patch_count)

    arrays, value = _run_program(mx)
    _compare(emit, "value while recording", value, PRODUCT_VALUE)
    waiting = [mx.exp(arrays["product"]) for _ in range(_WAITING)]
    nodes = _hook.copy_nodes()
    # Some systems let no process read even its own memory safely.
    pending = None if nodes is None else int(nodes.live["pending"].sum())
    if pending is not None:
        _compare(emit, "arrays not evaluated", pending, _WAITING)
    waiting.clear()

    _settle(mx)
    stats = mlxmem.stats()
    _compare(emit, "active bytes", stats["active"], mx.get_active_memory())
    _compare(emit, "peak bytes", stats["peak"], mx.get_peak_memory())
    arrays.clear()
    gc.collect()
    _settle(mx)
    stats = mlxmem.stats()
    _compare(emit, "active bytes, after frees", stats["active"], mx.get_active_memory())
    _compare(emit, "cached bytes", stats["cache"], mx.get_cache_memory())
    mx.clear_cache()
    _settle(mx)
    cached = mlxmem.stats()["cache"]
    _compare(emit, "cached bytes, after clear_cache", cached, mx.get_cache_memory())

    recording = recorder.recording()
    ledger = Ledger(recording)
    active = int(ledger.active[-1]) if len(ledger.active) else 0
    _compare(emit, "active bytes, by the events", active, mx.get_active_memory())
    _compare(emit, "peak bytes, by the events", ledger.peak, mx.get_peak_memory())
    _compare(emit, "events that contradict others", len(ledger.faults), 0)
    _compare(emit, "bytes without an event", _hook.totals().unexplained, 0)

    events = recording.events
    is_product = events["requested_size"] == PRODUCT_BYTES
    made = events[is_product & (events["action"] <= Action.AllocMakeBuffer)]
    frees = (Action.FreeActiveToCache, Action.FreeActiveToOS, Action.Release)
    freed = events[is_product & np.isin(events["action"], frees)]
    found = sum(
        int(event["requested_size"])
        for event in made
        if _innermost(recording.resolve(int(event["traceback_id"])))
        == (PROGRAM_FILE, PRODUCT_LINE)
    )
    _compare(emit, f"bytes of {PROGRAM_FILE}:{PRODUCT_LINE}", found, PRODUCT_BYTES)
    names = ", ".join(
        recording.primitives[int(event["primitive_id"])] for event in made
    )
    _compare(emit, "operation of that line", names, "Matmul")
    _compare(emit, "frees of that buffer", len(freed), 1)

    emit(step=UNDO)
    mlxmem.disable()
    restored = sum(_word(address) == original for address, original, _ in words)
    _compare(emit, "words restored", restored, len(words))
    _compare(emit, "words still patched", len(_hook.patched_words()), 0)
    _compare(emit, "value afterwards", _run_program(mx)[1], PRODUCT_VALUE)


def _compare(emit: Emit, what: str, recorded: Any, expected: Any) -> None:
    emit(comparison={"what": what, "recorded": recorded, "expected": expected})


def _run_program(mx: Any) -> tuple[dict[str, Any], float]:
    """Run the program; return its arrays and one value of the product."""
    arrays: dict[str, Any] = {"mx": mx}
    exec(compile(PROGRAM, PROGRAM_FILE, "exec"), arrays)
    # By numpy: MLX would make another array to show one of its elements.
    return arrays, float(np.asarray(arrays["product"])[299, 99])


def _innermost(stack: list[tuple[str, str, int]] | None) -> tuple[str, int] | None:
    return (stack[-1][0], stack[-1][2]) if stack else None


def _settle(mx: Any) -> None:
    """Wait until nothing allocates or frees: streams free a little after eval()."""
    mx.synchronize()
    before, same = None, 0
    while same < 5:
        time.sleep(0.002)
        now = mx.get_active_memory(), mx.get_cache_memory(), mx.get_peak_memory()
        same = same + 1 if now == before else 0
        before = now


def _word(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value
