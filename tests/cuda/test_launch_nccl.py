"""Ranks on a GPU each, joined by NCCL: a file each, and one for both of them."""

from __future__ import annotations

import re
from pathlib import Path

import mlx.core as mx
import pytest
import viewer
from test_launch import MEGABYTE, allocated, launch, line_of

import mlxmem
from mlxmem.reports import history

RANKS = 2

# Each rank sees its own GPU alone, which mlx.launch takes care of.
PROGRAM = f"""
import mlx.core as mx

group = mx.distributed.init(strict=True, backend="nccl")
kept = mx.zeros({MEGABYTE // 4} * (group.rank() + 1))
mx.eval(kept)
total = mx.distributed.all_sum(mx.full({MEGABYTE}, 1.0 + group.rank()))
mx.eval(total)
print("sum", total[0].item(), flush=True)
"""


def _missing() -> str:
    """Return what this machine lacks for the test, "" if nothing."""
    if not mx.cuda.is_available():
        return f"MLX {mx.__version__} has no CUDA GPU here"
    if not mx.distributed.is_available("nccl"):
        return f"MLX {mx.__version__} was built without NCCL"
    count = mx.device_count(mx.gpu)
    return f"needs {RANKS} GPUs, there is {count}" if count < RANKS else ""


@pytest.mark.cuda
@pytest.mark.skipif(bool(_missing()), reason=_missing() or "nothing is missing")
def test_two_gpus(tmp_path: Path) -> None:
    # GIVEN
    (tmp_path / "program.py").write_text(PROGRAM)

    # WHEN
    command = "-m", "mlxmem", "run", "-o", "out.pickle", "program.py"
    ended = launch(tmp_path, *command, backend="nccl")
    paths = [tmp_path / f"out.rank{rank}.pickle" for rank in range(RANKS)]
    out = mlxmem.merge(paths, tmp_path / "all.pickle")

    # THEN each rank has its bytes at its lines, alone and in the merged file
    assert ended.out.splitlines() == ["sum 3.0"] * RANKS
    said = re.findall(r"^mlxmem: rank (\d) of 2: \d+ events", ended.err, re.MULTILINE)
    assert sorted(said) == ["0", "1"]
    merged = viewer.check_pickle(out.read_bytes(), devices=RANKS)
    for rank, path in enumerate(paths):
        alone = viewer.check_pickle(path.read_bytes())
        (trace,) = alone["device_traces"]
        assert merged["device_traces"][rank] == trace
        assert allocated(trace, line_of("kept =", PROGRAM)) == [MEGABYTE * (rank + 1)]
        # The sum may take over its input's buffer, and need scratch memory.
        sums = allocated(trace, line_of("total =", PROGRAM))
        assert 4 * MEGABYTE in sums
        settings = alone["allocator_settings"]
        assert settings["backend"] == "cuda"
        assert (settings["rank"], settings["world_size"]) == (rank, RANKS)
        assert history.read(out, rank).peak == history.read(path).peak
