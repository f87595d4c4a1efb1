"""torch's own `_memory_viz.py` reads what we write.

The script imports no torch. It is taken from an installed torch, or from the file that
the environment variable MLXMEM_TORCH_VIZ names.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import pytest
import viewer
from handmade import Heap, PointerHeap, busy_heap

from mlxmem.events import Recording
from mlxmem.snapshot import BEFORE_ENABLE, build, write


def find_script() -> pathlib.Path | None:
    """Find the script without importing torch."""
    named = os.environ.get("MLXMEM_TORCH_VIZ")
    if named:
        return pathlib.Path(named)
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    script = pathlib.Path(spec.origin).parent / "cuda" / "_memory_viz.py"
    return script if script.exists() else None


SCRIPT = find_script()
pytestmark = pytest.mark.skipif(
    SCRIPT is None,
    reason="needs `pip install torch==2.13.0`, or MLXMEM_TORCH_VIZ=<_memory_viz.py>",
)

# Stands in for flamegraph.pl, which the script would download: echoes its input.
FLAMEGRAPH = "#!/bin/sh\ncat\n"
TRAIN = """
import mlx.core as mx
import mlxmem

before = mx.zeros((1000, 100))
mx.eval(before)
mlxmem.enable({max_entries})

def product():
    return mx.ones((311, 77)) @ mx.ones((77, 43))

keep = []
for step in range(20):
    keep.append(product())
    mx.eval(keep[-1])
    if step % 3 == 0:
        keep.clear()
    if step == 10:
        mx.clear_cache()
del before
mlxmem.dump({path!r})
"""


def read(command: str, path: pathlib.Path, *options: str) -> str:
    """Run one command of the script on a file and return what it shows."""
    home = path.parent / "home"
    script = home / ".cache" / "flamegraph.pl"
    if not script.exists():
        script.parent.mkdir(parents=True)
        script.write_text(FLAMEGRAPH)
        script.chmod(0o755)
    out = path.with_suffix(f".{command}")
    if command not in ("stats", "trace"):
        options = (*options, "-o", str(out))
    done = subprocess.run(
        [sys.executable, str(SCRIPT), command, str(path), *options],
        capture_output=True,
        env={**os.environ, "HOME": str(home), "PYTHONIOENCODING": "utf-8"},
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return out.read_text() if out.exists() else done.stdout


def dump(recording: Recording, folder: pathlib.Path) -> pathlib.Path:
    return write(build(recording), folder / "out.pickle")


RECORDINGS = {
    "busy": lambda: busy_heap().recording(),
    "overflow": lambda: busy_heap().recording(7),
    "pointers": lambda: busy_heap(PointerHeap).recording(),
    "pointers-overflow": lambda: busy_heap(PointerHeap).recording(7),
    "empty": lambda: Heap().recording(),
    "only-before": lambda: Heap(active=100, cached=50).recording(),
}


def test_the_script_is_of_the_torch_that_the_contract_was_read_from() -> None:
    # Of a script outside of a torch nobody knows the version; whoever names it does.
    assert SCRIPT is not None
    version = SCRIPT.parents[1] / "version.py"
    if not version.exists():
        pytest.skip(f"{SCRIPT} does not lie in a torch")
    names: dict[str, Any] = {}
    exec(version.read_text(), names)
    assert names["__version__"]
    if not re.match(r"2\.13\.", names["__version__"]):
        # Another torch that happens to be installed is no fault of this project.
        pytest.skip(f"the contract is of torch 2.13, not {names['__version__']}")


@pytest.mark.parametrize("name", RECORDINGS)
@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("stats", ()),
        ("trace", ()),
        ("segments", ()),
        ("memory", ()),
        ("trace_plot", ()),
        ("trace_plot", ("--segments",)),
        ("trace_plot", ("--filter_freed",)),
        ("segment_plot", ()),
    ],
)
def test_every_command_reads_a_recording(
    tmp_path: pathlib.Path, name: str, command: str, options: tuple[str, ...]
) -> None:
    # GIVEN
    path = dump(RECORDINGS[name](), tmp_path)

    # WHEN
    shown = read(command, path, *options)

    # THEN
    if command.endswith("plot"):
        assert "add_local_files" in shown
    assert "without free_requested" not in shown


def test_stats_shows_the_totals(tmp_path: pathlib.Path) -> None:
    # GIVEN
    heap = Heap(active=30 << 20, cached=2 << 20)
    heap.new(8 << 20, requested=7 << 20, stack=1)

    # WHEN
    shown = read("stats", dump(heap.recording(), tmp_path))

    # THEN
    assert "total_reserved: 40.0MiB" in shown
    assert "total_allocated: 37.0MiB" in shown
    assert "total_free: 3.0MiB" in shown


@pytest.mark.parametrize("kind", [Heap, PointerHeap])
def test_trace_names_every_block_and_segment(
    tmp_path: pathlib.Path, kind: type[Heap]
) -> None:
    # GIVEN
    path = dump(busy_heap(kind).recording(), tmp_path)

    # WHEN
    shown = read("trace", path)

    # THEN no address stands where a name belongs
    assert not re.search(r"(del|for|cudaFree\()\s*\d{6,}", shown)
    assert "MEM[" not in shown


def test_memory_shows_bytes_by_line(tmp_path: pathlib.Path) -> None:
    # GIVEN
    heap = Heap(active=5_000, cached=70)
    heap.new(53_492, primitive=1, stack=1, stream=1)

    # WHEN
    lines = read("memory", dump(heap.recording(), tmp_path)).splitlines()

    # THEN outermost first, as flame graphs want it
    assert f"stream_0;active_allocated;mlxmem:0:{BEFORE_ENABLE} 5000" in lines
    assert f"stream_0;inactive;mlxmem:0:{BEFORE_ENABLE} 70" in lines
    stack = "train.py:40:<module>;model.py:12:Block.__call__"
    assert f"stream_1;active_allocated;{stack} 53492" in lines
    assert len(lines) == 3


@pytest.mark.parametrize("max_entries", [0, 40])
def test_a_real_recording_is_read(tmp_path: pathlib.Path, max_entries: int) -> None:
    # GIVEN a dump of real MLX
    pytest.importorskip("mlx.core", reason="needs `pip install 'mlx[cpu]'`")
    path = tmp_path / "out.pickle"
    script = tmp_path / "train.py"
    script.write_text(TRAIN.format(path=str(path), max_entries=max_entries))
    subprocess.run([sys.executable, str(script)], check=True, timeout=120)

    # WHEN
    result: dict[str, Any] = viewer.check_pickle(path.read_bytes())
    commands = "stats", "trace", "segments", "memory", "trace_plot", "segment_plot"
    shown = {command: read(command, path) for command in commands}

    # THEN
    assert "total_reserved" in shown["stats"]
    assert result["allocator_settings"]["trace_alloc_overflowed"] == bool(max_entries)
    assert result["allocator_settings"]["inconsistent_events"] == 0
    if not max_entries:
        assert f"train.py:{_line_of('return', TRAIN)}:product" in shown["memory"]


def _line_of(word: str, source: str) -> int:
    lines = source.splitlines()
    return next(i for i, line in enumerate(lines, 1) if word in line)
