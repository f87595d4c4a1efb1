"""Count the instructions of a training step of the example, recorded or not.

A ratio near 1 can't be timed on a machine that does other things as well. Instructions
can be counted there, with callgrind as in off_cost.py; what they leave out is the time
that memory takes. It takes minutes.

    python benchmarks/step_instructions.py
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from off_cost import Count, least, missing, read_counts, run_counted

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

STEPS = 2  # counted


def run(recorded: bool) -> None:
    """Take some steps, and mark the counted ones."""
    from train_transformer import Trainer

    import mlxmem

    trainer = Trainer()
    mlxmem.enable(max_entries=10_000)
    if not recorded:
        mlxmem.disable()
    trainer.step()
    os.getppid()
    for _ in range(STEPS):
        trainer.step()
        os.getppid()


def count(recorded: bool, folder: Path) -> Count:
    """Return the instructions of one step, each function with the least of all."""
    out = folder / f"callgrind.{int(recorded)}"
    run_counted([__file__, str(int(recorded))], out)
    parts = [read_counts(Path(f"{out}.{2 + step}")) for step in range(STEPS)]
    return least(parts, 1)


def main() -> None:
    """Count and print."""
    if len(sys.argv) > 1:
        run(sys.argv[1] == "1")
        return
    if reason := missing():
        sys.exit(reason)
    with tempfile.TemporaryDirectory() as folder:
        off, on = (count(recorded, Path(folder)) for recorded in (False, True))
    python = "{}.{}.{}".format(*sys.version_info[:3])
    print(f"Python {python}, MLX {version('mlx')}, {platform.machine()}")
    print(f"not recorded  {off.total:18,.0f} instructions a step")
    print(f"recorded      {on.total:18,.0f}, {on.mlxmem:,.0f} of them in mlxmem")
    print(f"ratio         {on.total / off.total:18.5f}")


if __name__ == "__main__":
    main()
