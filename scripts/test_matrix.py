"""Run the tests on the supported versions of MLX and Python.

By default the cross: every Python found with the newest MLX, and every MLX with the
Python that runs this script. ``--full`` runs all the pairs. Each pair has a venv of
its own under ``.venv-matrix``, kept for the next run; the wheels are built once per
Python, from an sdist, which shows that the sdist is complete.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

MLX_VERSIONS = ("0.30.6", "0.31.2", "0.32.1", "0.32.4")
PYTHON_VERSIONS = ("3.10", "3.11", "3.12", "3.13")
# Minutes under valgrind for each pair; `make test` counts on the default one.
LEFT_OUT = ("--ignore=tests/integration/test_off_costs_nothing.py",)
ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / ".venv-matrix"
# Prints the version when this Python can build an extension and make a venv.
CHECK = """
import os, sys, sysconfig
if sysconfig.get_config_var("Py_GIL_DISABLED"):
    sys.exit("is free-threaded")
if not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")):
    sys.exit("has no headers")
try:
    import ensurepip, venv
except ImportError:
    sys.exit("can't make a venv")
print("%d.%d" % sys.version_info[:2])
"""


@dataclass
class Result:
    """What one pair came to; ``outcome`` is passed, failed, skipped or not run."""

    python: str
    mlx: str
    outcome: str
    detail: str
    seconds: float = 0.0


class StepError(Exception):
    """A command failed; carries what it printed."""


def call(command: Sequence[str | Path], cwd: Path = ROOT) -> str:
    """Run a command and return what it printed, both streams together.

    Raises
    ------
    StepError
        The command could not be started or exited with another code than 0.
    """
    # A PYTHONPATH of the caller would put other packages into the pair's venv.
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    try:
        done = subprocess.run(
            [str(part) for part in command],
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise StepError(str(error)) from error
    if done.returncode != 0:
        raise StepError(f"{done.stdout}\n(exit code {done.returncode})")
    return done.stdout


def candidates(version: str) -> Iterator[str]:
    """Paths that may be a Python of this version, the likeliest first."""
    if sys.version_info[:2] == tuple(map(int, version.split("."))):
        yield sys.executable
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        found = shutil.which(f"python{version}", path=folder)
        if found is not None:
            yield found
    # pyenv's shims work only for versions that are switched on, so ask for the rest.
    if shutil.which("pyenv"):
        try:
            names = call(["pyenv", "versions", "--bare"]).split()
            for name in names:
                if re.fullmatch(rf"{re.escape(version)}\.\d+", name):
                    prefix = call(["pyenv", "prefix", name]).strip()
                    yield str(Path(prefix, "bin", "python"))
        except StepError:
            return


def find_python(version: str) -> tuple[str | None, str]:
    """Return a Python of this version that can be used, or None and the reason."""
    reasons = []
    for path in candidates(version):
        try:
            answer = call([path, "-c", CHECK]).strip()
        except StepError as error:
            reasons.append(f"{path} {str(error).strip().splitlines()[0]}")
            continue
        if answer == version:
            return path, ""
    return None, "; ".join(dict.fromkeys(reasons)) or "not found on this machine"


def pairs(pythons: Sequence[str], default: str, full: bool) -> list[tuple[str, str]]:
    """List (Python, MLX) pairs, those that tell most first."""
    newest = MLX_VERSIONS[-1]
    wanted = [(default, newest), (default, MLX_VERSIONS[0])]
    wanted += [(python, newest) for python in reversed(pythons)]
    wanted += [(default, mlx) for mlx in MLX_VERSIONS]
    if full:
        wanted += [(python, mlx) for python in pythons for mlx in MLX_VERSIONS]
    return list(dict.fromkeys(wanted))


def build_wheel(python: str, version: str, sdist: Path) -> Path:
    """Build the wheel of one Python from the sdist."""
    folder = HOME / "wheels" / version
    shutil.rmtree(folder, ignore_errors=True)
    call([python, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, sdist])
    return next(folder.glob("mlxmem-*.whl"))


def build_sdist() -> Path:
    """Build the sdist with a venv of its own."""
    venv, folder = HOME / "build", HOME / "sdist"
    shutil.rmtree(folder, ignore_errors=True)
    call([sys.executable, "-m", "venv", venv])
    call([venv / "bin" / "python", "-m", "pip", "install", "-q", "build"])
    call([venv / "bin" / "python", "-m", "build", "-q", "--sdist", "-o", folder, ROOT])
    return next(folder.glob("mlxmem-*.tar.gz"))


def run_pair(
    python: str, version: str, mlx: str, wheel: Path, pytest_args: Sequence[str]
) -> Result:
    """Install one pair into its venv and run the tests there."""
    started = time.monotonic()
    venv = HOME / f"py{version}-mlx{mlx}"
    inside = venv / "bin" / "python"
    log = HOME / f"py{version}-mlx{mlx}.log"

    def result(outcome: str, detail: str) -> Result:
        return Result(version, mlx, outcome, detail, time.monotonic() - started)

    try:
        call([python, "-m", "venv", venv])
        install = [str(inside), "-m", "pip", "install", "-q"]
        call([*install, f"{wheel}[test]", f"mlx[cpu]=={mlx}"])
        # The venv may hold an older build of the same version.
        call([*install, "--no-deps", "--force-reinstall", str(wheel)])
    except StepError as error:
        log.write_text(str(error))
        offered = re.search(r"\(from versions: (.*?)\)", str(error))
        # "none" would mean that the registry offered nothing at all.
        if "found for mlx" in str(error) and offered and offered[1] != "none":
            return result("skipped", "no wheel of this MLX for this Python")
        return result("failed", f"installation, see {log.relative_to(ROOT)}")

    try:
        output = call([inside, "-m", "pytest", "-q", *LEFT_OUT, *pytest_args])
        outcome = "passed"
    except StepError as error:
        output, outcome = str(error), "failed"
    log.write_text(output)
    counts = re.findall(
        r"^=*\s*(\d+ (?:passed|failed|error|skipped).*?)\s*=*$", output, re.M
    )
    detail = counts[-1] if counts else "no test ran"
    if outcome == "failed":
        detail += f", see {log.relative_to(ROOT)}"
    return result(outcome, detail)


def print_table(results: Sequence[Result]) -> None:
    """Print one line per pair and the sums."""
    print(f"\n{'Python':8}{'MLX':9}{'outcome':9}{'time':>7}  detail")
    for row in results:
        seconds = f"{row.seconds:.0f} s" if row.seconds else ""
        print(f"{row.python:8}{row.mlx:9}{row.outcome:9}{seconds:>7}  {row.detail}")


def main() -> int:
    """Parse the arguments, run the pairs and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="all pairs, not the cross")
    parser.add_argument(
        "--without-default",
        action="store_true",
        help="leave out this Python with the newest MLX, which `make test` runs",
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=math.inf,
        metavar="MINUTES",
        help="start no pair that would end later, going by the slowest so far",
    )
    parser.add_argument("--jobs", type=int, default=1, help="pairs at a time")
    parser.add_argument("--only", metavar="TEXT", help='pairs like "3.13 0.30.6"')
    parser.add_argument("--list", action="store_true", help="name the pairs and stop")
    parser.add_argument("pytest_args", nargs="*", help="passed on to pytest, after --")
    options = parser.parse_args()

    started = time.monotonic()
    default = f"{sys.version_info[0]}.{sys.version_info[1]}"
    found = {version: find_python(version) for version in PYTHON_VERSIONS}
    wanted = pairs(PYTHON_VERSIONS, default, options.full)
    if options.without_default:
        wanted.remove((default, MLX_VERSIONS[-1]))
    if options.only:
        wanted = [pair for pair in wanted if options.only in " ".join(pair)]

    results: list[Result] = []
    todo: list[tuple[str, str, str]] = []
    for version, mlx in wanted:
        path, reason = found.get(version, (sys.executable, ""))
        if path is None:
            results.append(Result(version, mlx, "skipped", f"Python {reason}"))
        else:
            todo.append((version, mlx, path))
    if options.list:
        for version, mlx, path in todo:
            print(f"Python {version} ({path}) with MLX {mlx}")
        print_table(results)
        return 0

    HOME.mkdir(exist_ok=True)
    try:
        sdist = build_sdist()
    except StepError as error:
        print(f"The sdist can't be built:\n{error}")
        return 1
    wheels: dict[str, Path | str] = {}
    for version, path in dict.fromkeys((version, path) for version, _, path in todo):
        try:
            wheels[version] = build_wheel(path, version, sdist)
        except StepError as error:
            print(f"The wheel of Python {version} can't be built:\n{error}")
            wheels[version] = "the wheel can't be built"

    slowest = 0.0

    def work(pair: tuple[str, str, str]) -> Result:
        nonlocal slowest
        version, mlx, path = pair
        wheel = wheels[version]
        if isinstance(wheel, str):
            return Result(version, mlx, "failed", wheel)
        if time.monotonic() - started + slowest > options.budget * 60:
            return Result(version, mlx, "not run", "no time left in the budget")
        row = run_pair(path, version, mlx, wheel, options.pytest_args)
        slowest = max(slowest, row.seconds)
        print(f"Python {version}, MLX {mlx}: {row.outcome}, {row.detail}", flush=True)
        return row

    with concurrent.futures.ThreadPoolExecutor(max(1, options.jobs)) as pool:
        results += pool.map(work, todo)
    for row in results:
        log = HOME / f"py{row.python}-mlx{row.mlx}.log"
        if row.outcome == "failed" and log.exists():
            tail = log.read_text().splitlines()[-60:]
            print(f"\n--- Python {row.python}, MLX {row.mlx}", *tail, sep="\n")
    print_table(results)
    return any(row.outcome == "failed" for row in results)


if __name__ == "__main__":
    sys.exit(main())
