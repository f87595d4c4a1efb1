"""What is left behind on the GPU: nothing; and `mlxmem run` writes its file."""

from __future__ import annotations

import ctypes
import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import mlx.core as mx
import pytest
import workloads
from books import Books, read_counters, settle

import mlxmem
from mlxmem import _hook

pytestmark = pytest.mark.cuda

UNDONE = Path(__file__).resolve().parents[1] / "integration" / "targets" / "undone.py"
MEGABYTE = 1_000_000


def word(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value


def test_every_patched_word_is_restored() -> None:
    # In a process of its own, where the loader has filled every import slot.
    done = subprocess.run(
        [sys.executable, str(UNDONE)],
        env={**os.environ, "LD_BIND_NOW": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


def test_every_word_is_what_it_was() -> None:
    # GIVEN an MLX that has worked
    workloads.generate(5)
    settle()

    # WHEN sessions record work
    for _ in range(3):
        with Books() as books:
            workloads.generate(10)
            words = _hook.patched_words()
            wrong = [
                (hex(address), hex(word(address)), hex(replacement))
                for address, _, replacement in words
                if word(address) != replacement
            ]
            assert wrong == []
            books.check(readers=False)

        # THEN each word is MLX's again
        left = [
            (hex(address), hex(word(address)), hex(original))
            for address, original, _ in words
            if word(address) != original
        ]
        assert left == []
        assert len(words) > 100
        assert _hook.patched_words() == []


def test_results_and_counters_are_the_same() -> None:
    expected = workloads.generate(40)
    mx.clear_cache()
    plain = settle()
    with Books():
        recorded = workloads.generate(40)
    assert recorded == expected
    mx.clear_cache()
    assert settle().active == plain.active
    assert read_counters().cache == 0


@pytest.mark.parametrize("ending", ["", "raise SystemExit(3)"])
def test_mlxmem_run_writes_a_file(tmp_path: Path, ending: str) -> None:
    # GIVEN a program that knows nothing of mlxmem
    (tmp_path / "program.py").write_text(
        textwrap.dedent(
            """\
            import mlx.core as mx
            kept = mx.full((250, 1000), 3.0)
            mx.eval(kept)
            print(mx.default_device(), int(kept.sum().item()))
            """
        )
        + ending
    )

    # WHEN it is run
    done = subprocess.run(
        [sys.executable, "-m", "mlxmem", "run", "-o", "out.pickle", "program.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )

    # THEN it ran as it would have, and its megabyte is in the file with its line
    assert done.returncode == (3 if ending else 0), done.stderr
    assert done.stdout == f"{mx.default_device()} 750000\n"
    assert done.stderr.startswith("mlxmem: "), done.stderr
    snapshot = pickle.loads((tmp_path / "out.pickle").read_bytes())
    assert snapshot["allocator_settings"]["backend"] == "cuda"
    made = [
        (entry["size"], entry["frames"][0]["line"])
        for entry in snapshot["device_traces"][0]
        if entry["action"] == "alloc" and entry["size"] >= MEGABYTE
    ]
    assert made == [(MEGABYTE, 2)]

    # AND the reports read it
    shown = subprocess.run(
        [sys.executable, "-m", "mlxmem", "summary", "out.pickle"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert shown.returncode == 0, shown.stderr
    assert "program.py:2" in shown.stdout


def test_enable_and_disable_again_and_again() -> None:
    x = mx.random.normal((100, 100))
    for _ in range(100):
        mlxmem.enable()
        mx.eval(x @ x)
        mlxmem.disable()
    assert _hook.patched_words() == []
    with Books() as books:
        mx.eval(x @ x)
        assert "Matmul" in {event["primitive_name"] for event in books.allocs()}
