"""Whether recording works on this machine, and what was found on the way."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mlxmem import _doctor_child
from mlxmem._hook import Fact, PatchedWords, known_to_work
from mlxmem._version import __version__

LIMIT_S = 60.0

REPORT_IT = "Please report it with this output."
_PACKAGES = ("mlx", "mlx-cpu", "mlx-metal", "mlx-cuda-12", "mlx-cuda-13", "numpy")
_VARIABLES = ("MLX_", "MLXMEM_", "MTL_", "DYLD_", "LD_")
_MOST_LINES = 60  # of what the process that died wrote last
_CODE = (
    "import sys; sys.path[:] = {path!r}; "
    "from mlxmem import _doctor_child; _doctor_child.run({file!r}, {limit!r})"
)


@dataclass(frozen=True)
class Comparison:
    """Something that was recorded, and what it must be."""

    what: str
    recorded: Any
    expected: Any

    @property
    def agrees(self) -> bool:
        """Whether it is what it must be."""
        return bool(self.recorded == self.expected)


@dataclass(frozen=True)
class Problem:
    """Why recording does not work."""

    step: str  # what was being done
    text: str
    advice: str
    details: list[str] = field(default_factory=list)  # lines: a traceback, stderr


@dataclass(frozen=True)
class Examination:
    """What `examine` found."""

    system: dict[str, str]
    packages: dict[str, str]  # versions of those that are installed
    variables: dict[str, str]  # of the environment, which may change what MLX does
    mlx: dict[str, str]  # version, file, device, backend, as far as known
    facts: list[Fact]  # up to the first that does not hold
    patches: list[PatchedWords]
    comparisons: list[Comparison]
    problem: Problem | None  # None: recording works

    @property
    def works(self) -> bool:
        """Whether recording works."""
        return self.problem is None

    def as_json(self) -> dict[str, Any]:
        """Return all of it for `json.dump`."""
        return {
            "report": "doctor",
            "format": 1,
            "works": self.works,
            "system": self.system,
            "packages": self.packages,
            "variables": self.variables,
            "mlx": self.mlx,
            "facts": [asdict(fact) for fact in self.facts],
            "patches": [asdict(patch) for patch in self.patches],
            "comparisons": [
                {**asdict(each), "agrees": each.agrees} for each in self.comparisons
            ],
            "problem": asdict(self.problem) if self.problem else None,
        }


def examine(limit_s: float = LIMIT_S) -> Examination:
    """Record a tiny program in a child process and compare with what MLX says.

    MLX is not imported in this process.

    Parameters
    ----------
    limit_s : float
        Seconds after which the child is killed.
    """
    found: dict[str, list[Any]] = {}
    with tempfile.TemporaryDirectory(prefix="mlxmem-") as folder:
        path = os.path.join(folder, "found")
        stderr = os.path.join(folder, "stderr")
        with open(path, "w"), open(stderr, "wb") as errors:
            code = _run_child(path, limit_s, errors.fileno())
        for key, value in _read_lines(path):
            found.setdefault(key, []).append(value)
        with open(stderr, encoding="utf-8", errors="replace") as file:
            said = file.read().splitlines()[-_MOST_LINES:]

    packages = _installed()
    comparisons = [Comparison(**each) for each in found.get("comparison", [])]
    mlx = dict(*found.get("mlx", []))
    for key in ("device", "backend"):
        if key in found:
            mlx[key] = found[key][-1]
    return Examination(
        system=_system(),
        packages=packages,
        variables={
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_VARIABLES)
        },
        mlx=mlx,
        facts=[Fact(**fact) for fact in found.get("fact", [])],
        patches=[PatchedWords(**patch) for patch in found.get("patch", [])],
        comparisons=comparisons,
        problem=_problem(found, comparisons, packages, code, said, limit_s),
    )


def _run_child(path: str, limit_s: float, stderr: int) -> int | None:
    """Return the exit code of the child, None if it took too long."""
    code = _CODE.format(path=sys.path, file=path, limit=limit_s)
    with subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-c", code],
        stdin=subprocess.DEVNULL,
        stdout=stderr,
        stderr=stderr,
    ) as child:
        try:
            return child.wait(limit_s)
        except subprocess.TimeoutExpired:
            child.kill()
            return None
        except BaseException:
            child.kill()
            raise


def _read_lines(path: str) -> list[tuple[str, Any]]:
    with open(path, encoding="utf-8", errors="replace") as file:
        lines = file.read().splitlines()
    found: list[tuple[str, Any]] = []
    for line in lines:
        try:
            found += json.loads(line).items()
        except ValueError:
            break  # the child died while it wrote this one
    return found


def _problem(
    found: Mapping[str, Sequence[Any]],
    comparisons: Sequence[Comparison],
    packages: Mapping[str, str],
    code: int | None,
    said: list[str],
    limit_s: float,
) -> Problem | None:
    step = found["step"][-1] if "step" in found else "starting Python"
    if "refusal" in found:
        return Problem(
            step,
            f"mlxmem does not know this MLX: {found['refusal'][-1]}",
            f"{known_to_work()}; install one of these or a newer mlxmem. {REPORT_IT}",
        )
    if code is None:
        text = f"not done after {limit_s:g} s, while {step}"
        return Problem(step, text, REPORT_IT, said)
    if "error" in found:
        details = found["traceback"][-1].splitlines()
        return _failed(step, found["error"][-1], details, packages)
    if code != 0:
        return Problem(step, f"{_death(code)}, while {step}", _crash_advice(step), said)
    wrong = [each for each in comparisons if not each.agrees]
    if wrong:
        first = wrong[0]
        text = f"{first.what}: {_number(first.recorded)}, not {_number(first.expected)}"
        return Problem(step, text, REPORT_IT)
    if "done" not in found:
        return Problem(step, f"the process ended while {step}", REPORT_IT, said)
    return None


def _failed(
    step: str, error: str, details: list[str], packages: Mapping[str, str]
) -> Problem:
    if step == _doctor_child.IMPORT:
        if "mlx" not in packages:
            kind = "" if sys.platform == "darwin" else "[cpu]"
            return Problem(
                step, f"MLX is not installed ({error})", f"pip install 'mlx{kind}'"
            )
        advice = "Make `import mlx.core` work first; mlxmem has done nothing yet."
        if sys.platform == "linux" and not any(
            name.startswith(("mlx-cpu", "mlx-cuda")) for name in packages
        ):
            advice = (
                "On Linux `pip install mlx` alone brings no backend: pip install "
                "'mlx[cpu]', 'mlx[cuda12]' or 'mlx[cuda13]'."
            )
        return Problem(step, f"MLX can't be imported: {error}", advice, details)
    if step == _doctor_child.COMPUTE:
        return Problem(
            step,
            f"MLX itself can't compute here: {error}",
            "mlxmem has done nothing yet. If it is the GPU that MLX can't use, "
            "`mx.set_default_device(mx.cpu)` keeps a program off it.",
            details,
        )
    return Problem(step, f"{error}, while {step}", REPORT_IT, details)


def _crash_advice(step: str) -> str:
    advice = REPORT_IT
    if step in (_doctor_child.IMPORT, _doctor_child.COMPUTE):
        advice = "mlxmem has done nothing to MLX yet: MLX itself does not work here."
    if sys.platform == "darwin":
        advice += (
            " macOS wrote a report of the crash to ~/Library/Logs/DiagnosticReports; "
            "add the newest one of Python."
        )
    return advice


def _death(code: int) -> str:
    if code > 0:
        return f"the process ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"the process was ended by {name}"


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _installed() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _system() -> dict[str, str]:
    threads = ", free-threaded" if sysconfig.get_config_var("Py_GIL_DISABLED") else ""
    version = f"{platform.python_implementation()} {platform.python_version()}{threads}"
    return {
        "system": _operating_system(),
        "machine": platform.machine(),
        **(_mac() if sys.platform == "darwin" else {}),
        "python": version,
        "executable": sys.executable,
        "mlxmem": __version__,
    }


def _operating_system() -> str:
    if sys.platform == "darwin":
        return f"macOS {platform.mac_ver()[0]}, Darwin {platform.release()}"
    return f"{platform.system()}, {' '.join(platform.libc_ver())}"


def _mac() -> dict[str, str]:
    """Return what only macOS tells of the machine; what it does not tell is missing."""
    names = {
        "model": "hw.model",
        "processor": "machdep.cpu.brand_string",
        "memory": "hw.memsize",
        "virtual machine": "kern.hv_vmm_present",
        "translated by Rosetta": "sysctl.proc_translated",
    }
    found = {}
    for name, key in names.items():
        try:
            done = subprocess.run(
                ["/usr/sbin/sysctl", "-n", key],
                capture_output=True,
                text=True,
                timeout=10,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):
            continue
        found[name] = done.stdout.strip()
    return found
