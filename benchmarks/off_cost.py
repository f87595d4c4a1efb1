"""Count the instructions of an operation without mlxmem and after it was on.

`off_cost_driver.py` runs under valgrind's callgrind, which counts the instructions of
all threads, function by function. Two processes, equal but for this: in one mlxmem is
imported, enabled and disabled between two rounds of blocks, in the other it never is.
So there are three rounds without mlxmem to compare with the one after it. A third
process leaves mlxmem on: that shows what recording adds.

What is compared is the same machine code; what decides how often parts of it run is
no property of the operation and differs between any two blocks, with mlxmem or
without:

- which of the heap's free lists has a fitting block (glibc's malloc and free);
- how often a thread has to wait for another, when an operation is evaluated: MLX does
  that on a thread of its own (glibc's locks, and the loops in MLX that call them);
- which of two threads drops the last reference to a node, and has to free it;
- which addresses share a bucket in a hash table that is keyed by addresses.

Every block is measured several times at other addresses, and each function counts
with its least. That settles it where a graph is only built. For evaluation,
`Count.steady` leaves out libc and the functions of `UNSTEADY`.

    python benchmarks/off_cost.py
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from off_cost_driver import BLOCKS, NEVER, OFF, ON, operations

DRIVER = Path(__file__).with_name("off_cost_driver.py")
# Operations in a block: a multiple of the 16 tasks in a node of MLX's queue.
TIMES = 256
ROUNDS = ("before", "after")

UNSTEADY = (
    # These wait for another thread, or are woken by one.
    "mlx::core::Event::wait",
    "mlx::core::array::wait",
    "mlx::core::array::is_available",
    "mlx::core::scheduler::StreamThread::thread_fn",
    "std::condition_variable::",
    # Has more to do on the thread that drops the last reference.
    "mlx::core::array::ArrayDesc::~ArrayDesc",
    # Hash tables keyed by addresses; the second one has its table inlined.
    "std::_Hashtable<",
    "mlx::core::cpu::eval(mlx::core::array&)",
)
# Stubs through which a library calls another one; callgrind knows no file for them.
_STUBS = "???"
_LIBC = re.compile(r"/(libc|libpthread|ld-linux[^/]*)[.-][^/]*$")

# (file of the machine code, function) -> instructions
Counts = Counter[tuple[str, str]]


def is_steady(file: str, function: str) -> bool:
    """Tell whether neither the heap, nor the threads, nor addresses matter to it."""
    return (
        file != _STUBS and not _LIBC.search(file) and not function.startswith(UNSTEADY)
    )


@dataclass(frozen=True)
class Count:
    """Instructions of one operation, each function with the least of its blocks."""

    functions: dict[tuple[str, str], float]

    @property
    def total(self) -> float:
        """All of them."""
        return sum(self.functions.values())

    @property
    def steady(self) -> float:
        """Those outside libc, `UNSTEADY` and the stubs that call these."""
        return sum(
            count
            for (file, function), count in self.functions.items()
            if is_steady(file, function)
        )

    @property
    def mlxmem(self) -> float:
        """Those in mlxmem's own libraries."""
        return sum(
            count
            for (file, _), count in self.functions.items()
            if "/mlxmem/" in file or "mlxmem" in file.rpartition("/")[2]
        )


def missing() -> str:
    """Return why nothing can be counted here, or ""."""
    if not sys.platform.startswith("linux"):
        return f"callgrind is used on Linux, not on {sys.platform}"
    for program in ("valgrind", "setarch"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    return ""


def read_counts(path: Path) -> Counts:
    """Return the instructions of each function, those of its callees left out.

    The format is described in valgrind's manual, "Callgrind Format Specification".
    A name is written once, with a number, and as the number alone after that.
    """
    names: dict[str, dict[str, str]] = {"fn": {}, "ob": {}}
    counts: Counts = Counter()
    file = function = ""
    callees = False  # the next line has what a call cost
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line[0] in "0123456789+-*":
                if callees:
                    callees = False
                else:
                    counts[file, function] += int(line.split()[1])
                continue
            key, _, value = line.rstrip("\n").partition("=")
            if key == "calls":
                callees = True
            elif key in ("fn", "ob", "cfn", "cob"):
                table = names[key[-2:]]
                number, _, name = value.partition(" ")
                if name:
                    table[number] = name
                if key == "fn":
                    function = table[number]
                elif key == "ob":
                    file = table[number]
    return counts


def least(blocks: Iterable[Counts], times: int) -> Count:
    """Return the count of one operation from the blocks of one round."""
    blocks = list(blocks)
    return Count(
        {
            key: min(block[key] for block in blocks) / times
            for key in set().union(*blocks)
        }
    )


def run_counted(script: Sequence[str], out: Path) -> None:
    """Run a script, and write the counts of each part that ends with `os.getppid`.

    Parameters
    ----------
    script : sequence of str
        Its file and its arguments.
    out : Path
        The parts are beside it: out.1, out.2, ...

    Raises
    ------
    subprocess.CalledProcessError
        The script failed; its output is on standard error.
    """
    environment = {
        **os.environ,
        "PYTHONHASHSEED": "0",
        # Python's own pools would add where an object lies in its pool.
        "PYTHONMALLOC": "malloc",
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
    subprocess.run(
        [
            "setarch",
            platform.machine(),
            "-R",
            "valgrind",
            "--tool=callgrind",
            "--quiet",
            "--fair-sched=try",
            "--dump-before=getppid",
            f"--callgrind-out-file={out}",
            sys.executable,
            *script,
        ],
        env=environment,
        check=True,
        stdout=sys.stderr,
    )


def count(mode: int, times: int, folder: Path) -> dict[tuple[str, str], Count]:
    """Run the driver under callgrind.

    Parameters
    ----------
    mode : int
        `NEVER`, `OFF` or `ON`: what becomes of mlxmem half-way.
    times : int
        Operations in a block.
    folder : Path
        Where callgrind's files go.

    Returns
    -------
    dict of (round, operation) to Count
        The rounds are those of `ROUNDS`. ("between", "") is what happened between
        them, divided by `times`: the import, and what was recorded.

    Raises
    ------
    subprocess.CalledProcessError
        The driver failed; its output is on standard error.
    """
    out = folder / f"callgrind.{mode}"
    run_counted([str(DRIVER), str(mode), str(times)], out)
    counts: dict[tuple[str, str], Count] = {}
    mark = 0
    for turn in ROUNDS:
        if turn == "after":
            counts["between", ""] = least(
                [read_counts(Path(f"{out}.{mark + 1}"))], times
            )
        for name in operations():
            blocks = []
            for _ in range(BLOCKS):
                # A file has what came before its mark: first a gap, then a block.
                mark += 2
                blocks.append(read_counts(Path(f"{out}.{mark}")))
            counts[turn, name] = least(blocks, times)
    return counts


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--times", type=int, default=TIMES, help="operations a block")
    parser.add_argument("--differences", type=int, default=6, help="functions to show")
    options = parser.parse_args()
    reason = missing()
    if reason:
        parser.exit(1, reason + "\n")

    with tempfile.TemporaryDirectory() as folder:
        never = count(NEVER, options.times, Path(folder))
        once = count(OFF, options.times, Path(folder))
        now = count(ON, options.times, Path(folder))
    python = "{}.{}.{}".format(*sys.version_info[:3])
    print(f"Python {python}, MLX {version('mlx')}, {platform.machine()}")
    print("instructions an operation; steady: see `Count.steady`\n")
    print(f"{'':24}{'all':>14}{'steady':>14}{'in mlxmem':>14}")
    for name in operations():
        print(name)
        rows = (
            ("never imported", never["before", name]),
            ("never imported, later", never["after", name]),
            ("before the import", once["before", name]),
            ("enabled and disabled", once["after", name]),
            ("recording", now["after", name]),
        )
        for label, found in rows:
            print(
                f"  {label:22}{found.total:>14,.3f}{found.steady:>14,.3f}"
                f"{found.mlxmem:>14,.3f}"
            )
        # What differs between the two off rounds with the same past but for mlxmem.
        before, after = never["after", name].functions, once["after", name].functions
        changes = {
            key: after.get(key, 0) - before.get(key, 0) for key in {*before, *after}
        }
        largest = sorted(
            changes.items(), key=lambda item: (not is_steady(*item[0]), -abs(item[1]))
        )
        largest = [(key, change) for key, change in largest if change]
        for (file, function), change in largest[: options.differences]:
            mark = "steady  " if is_steady(file, function) else ""
            place = f"{mark}{file.rpartition('/')[2]}: {function}"
            print(f"    {change:+10.3f}  {place[:72]}")


if __name__ == "__main__":
    main()
