"""`mlxmem doctor`: what it finds here, and what it says where something is wrong."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from books import HAS_CPU_CACHE, ON_CUDA
from click.testing import CliRunner, Result

import mlxmem
import mlxmem_command
from mlxmem import _doctor_child, _hook, doctor
from mlxmem.cli import main
from mlxmem.commands.doctor import parts


def doctor_command(*options: str) -> Result:
    return CliRunner().invoke(main, ["doctor", *options])


def beside_mlx(folder: Path, monkeypatch: pytest.MonkeyPatch, **files: str) -> None:
    """Let the child find these modules first; `mlx_core` is mlx/core.py."""
    for name, text in files.items():
        path = folder / f"{name.replace('mlx_core', 'mlx/core')}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text))
    # The child has this process's path, and Python's own start that of the variable.
    monkeypatch.syspath_prepend(str(folder))
    old = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(folder), old] if old else [str(folder)])
    monkeypatch.setenv("PYTHONPATH", path)


# --- where recording works ----------------------------------------------------


def test_recording_works_here() -> None:
    # GIVEN what an attach checks and patches in this process
    mlxmem.enable()
    attached = _hook.check()
    words = len(_hook.patched_words())
    mlxmem.disable()

    # WHEN the doctor looks
    done = doctor_command("--json")

    # THEN it found the same
    assert done.exit_code == 0, done.output
    report = json.loads(done.output)
    assert list(report) == [
        "report",
        "format",
        "works",
        "system",
        "packages",
        "variables",
        "mlx",
        "facts",
        "patches",
        "comparisons",
        "problem",
    ]
    assert (report["report"], report["format"]) == ("doctor", 1)
    assert (report["works"], report["problem"]) == (True, None)
    assert report["system"]["mlxmem"] == mlxmem.__version__
    assert report["system"]["executable"] == sys.executable
    assert report["mlx"] == {
        "version": mx.__version__,
        "file": mx.__file__,
        "device": str(mx.default_device()),
        "backend": _hook.backend(),
    }
    facts = report["facts"]
    assert len(facts) > 20
    assert [fact for fact in facts if not fact["holds"]] == []
    mine = [(fact.group, fact.text) for fact in attached.facts]
    assert [(fact["group"], fact["text"]) for fact in facts] == mine
    patches = {(p["what"], p["library"]): p["count"] for p in report["patches"]}
    assert patches == {(p.what, p.library): p.count for p in attached.patches}
    assert sum(patches.values()) == words


def test_the_tiny_program_is_recorded_to_the_byte() -> None:
    # WHEN
    found = doctor.examine()

    # THEN the books are those of the program: 300 x 200, 200 x 100 and 300 x 100
    # floats, and what was patched is what is put back
    assert found.problem is None
    recorded = {each.what: each.recorded for each in found.comparisons}
    assert all(each.agrees for each in found.comparisons)
    assert len(recorded) == len(found.comparisons)
    words = sum(patch.count for patch in found.patches)
    assert recorded["words patched"] == recorded["words restored"] == words > 100
    assert recorded["words still patched"] == 0
    assert recorded["bytes of <mlxmem doctor>:3"] == 300 * 100 * 4
    assert recorded["operation of that line"] == "Matmul"
    assert recorded["frees of that buffer"] == 1
    assert recorded["arrays not evaluated"] == 3
    if not ON_CUDA:
        kept = 4 * (300 * 200 + 200 * 100 + 300 * 100)
        # MLX before 0.31 holds two scalars from its first operations on.
        held = recorded["active bytes, after frees"]
        assert held in (0, 8)
        assert recorded["active bytes"] == kept + held
        assert kept + held <= recorded["peak bytes"] < kept + held + 1000
        assert recorded["cached bytes"] >= (kept if HAS_CPU_CACHE else 0)
    assert recorded["cached bytes, after clear_cache"] == 0


def test_what_is_printed_is_80_columns_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN a terminal of 80 columns
    monkeypatch.setenv("COLUMNS", "80")
    # WHEN facts are grouped, and all are listed
    brief, whole = doctor_command(), doctor_command("--verbose")
    # THEN
    for done in (brief, whole):
        assert done.exit_code == 0
        assert done.output.startswith("Recording works here.\n")
        assert max(map(len, done.output.splitlines())) <= 80
    check = _hook.check()
    title = f"Facts checked: {len(check.facts)}, all hold"
    groups = Counter(fact.group for fact in check.facts)
    for group, count in groups.items():
        assert f"{count:6}  {group}" in brief.output
    assert title in brief.output
    assert title in whole.output
    text = "".join(whole.output.split())
    for fact in check.facts:
        if "/" not in fact.text:
            assert "".join(fact.text.split()) in text


def test_facts_are_told_one_by_one() -> None:
    # WHEN a check tells each fact at once
    told: list[_hook.Fact] = []
    check = _hook.check(told.append)
    # THEN these are the facts that it returns, and those of an attach the same
    assert len(told) > 20
    assert told == check.facts
    mlxmem.enable()
    again: list[_hook.Fact] = []
    assert _hook.check(again.append).facts == again
    assert [fact.text for fact in again] == [fact.text for fact in told]


# --- where something is wrong ---------------------------------------------------


def test_no_mlx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN a Python without MLX
    beside_mlx(
        tmp_path,
        monkeypatch,
        mlx_core="raise ModuleNotFoundError(\"No module named 'mlx'\")",
    )
    monkeypatch.setattr(doctor, "_installed", dict)
    # WHEN
    done = doctor_command()
    # THEN it says what to install, without a traceback
    assert done.exit_code == 1
    assert done.output.startswith(
        "Recording does not work here.\n"
        "  MLX is not installed (ModuleNotFoundError: No module named 'mlx')\n"
        "  pip install 'mlx[cpu]'\n"
    )
    assert "Traceback" not in done.output


def test_mlx_without_a_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN what `pip install mlx` alone brings on Linux
    text = "libmlx.so: cannot open shared object file: No such file or directory"
    beside_mlx(tmp_path, monkeypatch, mlx_core=f"raise ImportError({text!r})")
    monkeypatch.setattr(doctor, "_installed", lambda: {"mlx": "0.32.4"})
    # WHEN
    found = doctor.examine()
    # THEN
    assert found.problem is not None
    assert found.problem.text == f"MLX can't be imported: ImportError: {text}"
    assert "pip install 'mlx[cpu]'" in found.problem.advice
    assert (found.mlx, found.facts, found.comparisons) == ({}, [], [])


def test_a_gpu_that_mlx_cannot_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN an MLX whose every computation fails
    beside_mlx(
        tmp_path,
        monkeypatch,
        mlx_core="""
            __version__ = "0.0"
            def default_device(): return "Device(gpu, 0)"
            def ones(shape): raise RuntimeError("[metal] no device")
        """,
    )
    # WHEN
    found = doctor.examine()
    # THEN it is MLX's failure, not ours
    assert found.problem is not None
    assert found.problem.step == _doctor_child.COMPUTE
    assert found.problem.text == (
        "MLX itself can't compute here: RuntimeError: [metal] no device"
    )
    assert "mx.set_default_device(mx.cpu)" in found.problem.advice
    assert found.mlx["device"] == "Device(gpu, 0)"


CRASH_IN_CHECK = """
    import sys
    if "-c" in sys.orig_argv:
        import ctypes
        import mlxmem._hook as hook
        def check(on_fact):
            on_fact(hook.Fact("a group", "a fact", "a place", "no fact", True))
            ctypes.string_at(8)
        hook.check = check
"""


def test_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN a check that reads where no memory is
    beside_mlx(tmp_path, monkeypatch, sitecustomize=CRASH_IN_CHECK)
    # WHEN
    done = doctor_command("--json")
    # THEN this process lives, and knows how far the other came and where it was
    assert done.exit_code == 1
    report = json.loads(done.output)
    problem = report["problem"]
    assert problem["text"] == "the process was ended by SIGSEGV, while checking MLX"
    assert "Please report it with this output." in problem["advice"]
    assert problem["details"][0] == "Fatal Python error: Segmentation fault"
    assert any("_doctor_child.py" in line for line in problem["details"])
    assert [fact["text"] for fact in report["facts"]] == ["a fact"]
    assert report["mlx"]["version"] == mx.__version__


def test_a_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN an MLX that never ends its import, and little patience
    beside_mlx(tmp_path, monkeypatch, mlx_core="import time; time.sleep(600)")
    monkeypatch.setattr(doctor, "LIMIT_S", 5.0)
    # WHEN
    began = time.monotonic()
    done = doctor_command()
    # THEN it ended, and says where it hung
    assert 5 <= time.monotonic() - began < 60
    assert done.exit_code == 1
    assert "not done after 5 s, while importing mlx.core" in done.output
    assert f'File "{tmp_path}/mlx/core.py", line 1' in "".join(
        done.output.splitlines()
    ).replace("  ", " ")


def test_numbers_that_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN books that are one byte off
    beside_mlx(
        tmp_path,
        monkeypatch,
        sitecustomize="""
            import sys
            if "-c" in sys.orig_argv:
                import mlxmem
                right = mlxmem.stats
                mlxmem.stats = lambda: {**right(), "active": right()["active"] + 1}
        """,
    )
    # WHEN
    found = doctor.examine()
    # THEN that is no recording that works, and everything is put back
    wrong = {each.what: each for each in found.comparisons if not each.agrees}
    assert sorted(wrong) == ["active bytes", "active bytes, after frees"]
    first = wrong["active bytes"]
    assert first.recorded == first.expected + 1
    assert found.problem is not None
    assert found.problem.text == (
        f"active bytes: {first.recorded:,}, not {first.expected:,}"
    )
    assert found.problem.advice == "Please report it with this output."
    assert found.comparisons[-1].what == "value afterwards"


def test_a_fact_that_does_not_hold_is_shown_whole() -> None:
    # GIVEN a refusal
    fact = _hook.Fact(
        "nodes", "a is at 8", "16 in /x/site-packages/l", "a isn't", False
    )
    sound = _hook.Fact("nodes", "b is at 8", "8", "b isn't", True)
    found = examination(facts=[sound, fact])
    # WHEN
    text = rendered(found)
    # THEN
    assert "Facts checked: 2, the last one does not hold" in text
    assert text.count("b is at 8") == 0
    for line in ("fact:  a is at 8", "found: 16 in l", "so:    a isn't"):
        assert line in text
    assert "b is at 8: 8" in rendered(found, verbose=True)


def examination(**changes: Any) -> doctor.Examination:
    values: dict[str, Any] = {
        "system": {"system": "Here"},
        "packages": {},
        "variables": {},
        "mlx": {},
        "facts": [],
        "patches": [],
        "comparisons": [],
        "problem": doctor.Problem("checking MLX", "a text", "an advice"),
    }
    return doctor.Examination(**{**values, **changes})


def rendered(found: doctor.Examination, verbose: bool = False) -> str:
    from rich.console import Console

    console = Console(width=80)
    with console.capture() as captured:
        for part in parts(found, verbose):
            console.print(part)
    return captured.get()


def test_the_command_does_not_import_mlx() -> None:
    # WHEN the doctor's own process has done its work
    code = """
        import sys
        from mlxmem import doctor
        doctor.examine()
        print(sorted(name for name in sys.modules if name.startswith("mlx.")))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True
    )
    # THEN a broken MLX could not have hurt it
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.parametrize("left_out", ["_native", "_interner"])
def test_a_compiled_module_that_is_missing(tmp_path: Path, left_out: str) -> None:
    # GIVEN mlxmem without one of its compiled modules
    package = Path(mlxmem.__file__).parent
    (tmp_path / "mlxmem").mkdir()
    for path in package.iterdir():
        if not path.name.startswith(f"{left_out}."):
            (tmp_path / "mlxmem" / path.name).symlink_to(path)
    command = Path(mlxmem_command.__file__)
    shutil.copy(command, tmp_path)
    # WHEN
    done = subprocess.run(
        [sys.executable, str(tmp_path / command.name), "doctor"],
        capture_output=True,
        text=True,
    )
    # THEN lines that help, no traceback
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("mlxmem can't be imported: ")
    assert f"\n  mlxmem    {tmp_path / 'mlxmem'}\n" in done.stderr
    assert (
        f"\n  Python    {platform.python_version()}, {sys.executable}\n" in done.stderr
    )
    (compiled,) = (line for line in done.stderr.splitlines() if "  compiled" in line)
    assert f" {left_out}." not in compiled
    assert " _columns." in compiled
    assert "please report it with this output" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_command_of_the_package_is_the_same() -> None:
    # WHEN the module that the command `mlxmem` starts is run
    done = subprocess.run(
        [sys.executable, mlxmem_command.__file__, "--version"],
        capture_output=True,
        text=True,
    )
    # THEN
    assert done.stdout == f"mlxmem, version {mlxmem.__version__}\n"
    assert (done.returncode, done.stderr) == (0, "")
