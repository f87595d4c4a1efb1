"""`mlxmem run`: the program runs as under plain python, and leaves a recording."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

MEGABYTE = 1_000_000
# One megabyte that is recorded as this line's.
ALLOCATE = "import mlx.core as mx; kept = mx.zeros((250, 1000)); mx.eval(kept)"


class Ended(NamedTuple):
    """How a program ended."""

    code: int
    out: str
    err: str


def command(*options: str, python: Sequence[str] = ()) -> list[str]:
    return [sys.executable, *python, "-m", "mlxmem", "run", *options]


def finish(args: Sequence[str], folder: Path, stdin: str = "", **env: str) -> Ended:
    done = subprocess.run(
        args,
        cwd=folder,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **env},
    )
    return Ended(done.returncode, no_addresses(done.stdout), no_addresses(done.stderr))


def no_addresses(text: str) -> str:
    return re.sub(r"\b0x[0-9a-f]+", "0x", text)


def path_with(folder: Path) -> str:
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))


def script(folder: Path, source: str, name: str = "program.py") -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(source))
    return name


def load(path: Path) -> dict[str, Any]:
    snapshot: dict[str, Any] = pickle.loads(path.read_bytes())
    return snapshot


def allocated(path: Path) -> dict[tuple[str, int], int]:
    """Bytes that each (file, line) allocated in pieces of a megabyte or more."""
    found: dict[tuple[str, int], int] = {}
    for entry in load(path)["device_traces"][0]:
        if entry["action"] == "alloc" and entry["size"] >= MEGABYTE:
            frame = entry["frames"][0]
            if frame["filename"] == "mlxmem":
                continue  # what was there before enable()
            line = (os.path.basename(frame["filename"]), frame["line"])
            found[line] = found.get(line, 0) + entry["size"]
    return found


def same(
    folder: Path,
    program: Sequence[str],
    *,
    stdin: str = "",
    options: Sequence[str] = (),
    **env: str,
) -> Ended:
    """Run a program without and with mlxmem; assert that nobody could tell."""
    plain = finish([sys.executable, *program], folder, stdin, **env)
    run = command("-q", "-o", "out.pickle", *options)
    recorded = finish([*run, *program], folder, stdin, **env)
    assert recorded == plain
    return plain


# --- the program does not notice -------------------------------------------

ENDINGS = {
    "falls off its end": ("print('done')", 0),
    "exit()": ("raise SystemExit", 0),
    "exit(3)": ("raise SystemExit(3)", 3),
    "exit(True)": ("raise SystemExit(True)", 1),
    "exit(-1)": ("raise SystemExit(-1)", 255),
    "exit(text)": ("raise SystemExit('text')", 1),
    "exit(object)": ("raise SystemExit({'a': (1, 2)})", 1),
    "exception": ("1 / 0", 1),
    "exception from another": (
        "try: {}['a']\nexcept KeyError as e: raise ValueError('b') from e",
        1,
    ),
    "exception in MLX": ("mx.ones((2, 3)) @ mx.ones((2, 3))", 1),
    "exception group of frames": ("def f(n): return f(n - 1) + 1 / n\nf(4)", 1),
    "KeyboardInterrupt": ("raise KeyboardInterrupt", -signal.SIGINT),
    "failing import": ("import mlx.missing", 1),
    "recursion": ("def f(): f()\nf()", 1),
    "os.abort": ("import os; os.abort()", -signal.SIGABRT),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_endings_are_those_of_plain_python(tmp_path: Path, ending: str) -> None:
    # GIVEN a program that allocates and then ends in this way
    source, code = ENDINGS[ending]
    program = script(tmp_path, f"{ALLOCATE}\nprint('out')\n{source}\n")
    # WHEN it runs with and without mlxmem
    ended = same(tmp_path, [program])
    # THEN its output and exit code are the same, and the recording is there
    assert ended.code == code
    assert ended.out.startswith("out\n")
    if ending != "os.abort":
        assert allocated(tmp_path / "out.pickle") == {("program.py", 1): MEGABYTE}


WAYS = {
    "script": (["program.py"], ""),
    "script elsewhere": (["folder/program.py"], ""),
    "module": (["-m", "package.module"], ""),
    "package": (["-m", "package"], ""),
    "code": (["-c"], ""),
    "stdin": (["-"], "stdin"),
    "folder": (["folder"], ""),
    "options of python": (["-O", "-W", "error", "program.py"], ""),
}

SHOW = f"""
import sys, os, threading, warnings
{ALLOCATE}
main = sys.modules["__main__"]
print(sys.argv, sys.path, sys.flags, sys.warnoptions)
print(__name__, globals().get("__file__"), __package__)
print(__spec__ and (__spec__.name, __spec__.origin, __spec__.cached))
print(type(globals().get("__loader__")), sorted(vars(main)), main.__dict__ is globals())
print("sitecustomize" in sys.modules, [m for m in sys.modules if m.startswith("site")])
print(sorted(os.environ.items()))
print([type(finder) for finder in sys.meta_path])
print([t.name for t in threading.enumerate()], sys.excepthook)
print(os.getcwd(), sys.stdin.read())
print(type(mx.__loader__), vars(mx.__loader__), mx.__spec__.loader is mx.__loader__)
import signal; print([signal.getsignal(n) for n in sorted(signal.valid_signals())])
"""


@pytest.mark.parametrize("way", WAYS)
def test_the_program_finds_what_plain_python_gives_it(tmp_path: Path, way: str) -> None:
    # GIVEN a program that prints all that it can see of itself
    for name in (
        "program.py",
        "folder/program.py",
        "folder/__main__.py",
        "package/__init__.py",
        "package/__main__.py",
        "package/module.py",
    ):
        script(tmp_path, SHOW if "init" not in name else "", name)
    program, stdin = WAYS[way]
    flags = [p for p in program if p in ("-O", "-W", "error")]
    rest = [p for p in program if p not in flags]
    if way == "code":
        rest.append(SHOW)
    rest += ["--epochs", "3", "-q", "-o", "x", "--", "-m", "ünï", ""]
    if way == "stdin":
        stdin = SHOW.replace("sys.stdin.read()", "''")
    # WHEN it runs with and without mlxmem
    plain = finish([sys.executable, *flags, *rest], tmp_path, stdin)
    recorded = finish(
        [*command("-q", "-o", "out.pickle", python=flags), *rest], tmp_path, stdin
    )
    # THEN both see the same
    assert recorded == plain
    assert plain.code == 0, plain.err
    assert sum(allocated(tmp_path / "out.pickle").values()) == MEGABYTE


def test_the_users_own_environment_stays(tmp_path: Path) -> None:
    # GIVEN a PYTHONPATH with a sitecustomize of the user's
    script(tmp_path, "import sys; sys.marker = sys._getframe(0).f_code.co_filename")
    (tmp_path / "program.py").rename(tmp_path / "sitecustomize.py")
    source = "print(sys.marker, sys.modules['sitecustomize'].__file__)"
    program = script(tmp_path, SHOW + source)
    # WHEN a program runs
    ended = same(
        tmp_path, [program], PYTHONPATH=path_with(tmp_path), PYTHONHASHSEED="7"
    )
    # THEN both are there
    assert ended.code == 0
    assert str(tmp_path / "sitecustomize.py") in ended.out


@pytest.mark.parametrize(
    "source", ["1 / 0", "raise ImportError('other', name='other')", "import nope"]
)
def test_a_sitecustomize_that_fails(tmp_path: Path, source: str) -> None:
    # GIVEN a sitecustomize of the user's that raises
    script(tmp_path, source, "sitecustomize.py")
    program = script(tmp_path, ALLOCATE)
    # WHEN a program runs
    path = path_with(tmp_path)
    plain = finish([sys.executable, program], tmp_path, PYTHONPATH=path)
    run = command("-q", "-o", "out.pickle")
    recorded = finish([*run, program], tmp_path, PYTHONPATH=path)
    # THEN python says so as always, in mlxmem's process and in the program's
    assert "Error in sitecustomize" in plain.err
    assert recorded == (0, "", plain.err * 2)
    assert allocated(tmp_path / "out.pickle") == {("program.py", 1): MEGABYTE}


def test_modules_beside_the_program_are_its_own(tmp_path: Path) -> None:
    # GIVEN modules beside the program that are named as ones that mlxmem needs
    for name in ("secrets", "shlex", "shutil", "contextvars", "mlxmem"):
        script(tmp_path, "print(__name__)", f"{name}.py")
    program = script(tmp_path, f"{ALLOCATE}\nimport shlex\n")
    # WHEN the program runs
    # THEN they are imported by it alone
    plain = finish([sys.executable, program], tmp_path)
    recorded = finish([os.path.join(sys.prefix, "bin", "python"), "-c", RUN], tmp_path)
    assert plain.code == 0
    assert recorded.code == 0, recorded.err
    assert allocated(tmp_path / "out.pickle") == {("program.py", 1): MEGABYTE}


RUN = """
import sys
sys.path[:] = [path for path in sys.path if path]
sys.argv = ["mlxmem", "run", "-q", "-o", "out.pickle", "program.py"]
from mlxmem.cli import main
main()
"""


def test_the_end_comes_in_its_order(tmp_path: Path) -> None:
    # GIVEN a program with a thread that outlives its main one, and atexit functions
    program = script(
        tmp_path,
        """
        import atexit, threading, time
        import mlx.core as mx
        keep = []
        def allocate(name):
            keep.append(mx.zeros((250, 1000))); mx.eval(keep)
            print(name, flush=True)
        def work():
            time.sleep(0.5); allocate("thread")
        def fail():
            raise ValueError("in atexit")
        atexit.register(allocate, "atexit")
        atexit.register(fail)
        threading.Thread(target=work).start()
        print("main")
        """,
    )
    # WHEN it runs
    ended = same(tmp_path, [program])
    # THEN both are part of the recording
    assert ended.out == "main\nthread\natexit\n"
    assert "ValueError: in atexit" in ended.err
    assert allocated(tmp_path / "out.pickle") == {("program.py", 6): 2 * MEGABYTE}


def test_exceptions_in_threads(tmp_path: Path) -> None:
    # GIVEN threads that fail, one of them a daemon that never ends
    program = script(
        tmp_path,
        f"""
        import threading, sys, time
        {ALLOCATE}
        def fail(): raise ValueError("in a thread")
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
        for target in (fail, sys.exit):
            thread = threading.Thread(target=target, name="failing")
            thread.start(); thread.join()
        """,
    )
    # WHEN they run
    ended = same(tmp_path, [program])
    # THEN python's own words are there
    assert "ValueError: in a thread" in ended.err
    assert allocated(tmp_path / "out.pickle") == {("program.py", 3): MEGABYTE}


def test_a_syntax_error_and_a_missing_file(tmp_path: Path) -> None:
    program = script(tmp_path, "def (:")
    assert same(tmp_path, [program]).code == 1
    assert same(tmp_path, ["missing.py"]).code == 2
    assert same(tmp_path, ["-m", "missing"]).code == 1
    assert not (tmp_path / "out.pickle").exists()


def test_a_closed_pipe_is_pythons_own_matter(tmp_path: Path) -> None:
    # GIVEN a program whose reader goes away
    program = script(tmp_path, f"{ALLOCATE}\nprint('x' * 100_000)\n")
    codes = []
    for run in ([sys.executable], command("-q", "-o", "out.pickle")):
        # WHEN it writes
        process = subprocess.Popen(
            [*run, program], cwd=tmp_path, stdout=subprocess.PIPE, stderr=-3
        )
        assert process.stdout is not None
        process.stdout.close()
        codes.append(process.wait(timeout=120))
    # THEN it ends as always
    assert codes[0] == codes[1] != 0
    assert allocated(tmp_path / "out.pickle") == {("program.py", 1): MEGABYTE}


MULTIPROCESSING = """
import multiprocessing, os, pickle, sys
class Box:
    def __init__(self, value): self.value = value
def work(box):
    import mlx.core as mx
    array = mx.zeros((250, 1000)); mx.eval(array)
    return Box(box.value + int(array.sum().item()) + 1)
if __name__ == "__main__":
    import mlx.core as mx
    array = mx.zeros((500, 1000)); mx.eval(array)
    assert type(pickle.loads(pickle.dumps(Box(1)))) is Box
    context = multiprocessing.get_context(sys.argv[1])
    with context.Pool(2) as pool:
        print([box.value for box in pool.map(work, [Box(1), Box(2)], chunksize=1)])
        pool.close(); pool.join()
    process = context.Process(target=sys.exit, args=(5,))
    process.start(); process.join(); print(process.exitcode)
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_multiprocessing_starts_anew(tmp_path: Path, method: str) -> None:
    # GIVEN a program whose children import its main module again
    program = script(tmp_path, MULTIPROCESSING)
    # WHEN they run
    ended = same(tmp_path, [program, method])
    # THEN the recording is that of the program alone
    assert ended == (0, "[2, 3]\n5\n", "")
    assert allocated(tmp_path / "out.pickle") == {("program.py", 11): 2 * MEGABYTE}
    assert list(tmp_path.glob("*.pickle")) == [tmp_path / "out.pickle"]


# --- signals ----------------------------------------------------------------


def _as_from_a_terminal() -> None:
    # Under nohup, or in the background, the tests' own process ignores these.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def running(
    folder: Path, source: str, run: Sequence[str] = ()
) -> Iterator[subprocess.Popen[str]]:
    """Start a program and wait until it prints "ready"."""
    program = script(folder, source)
    process = subprocess.Popen(
        [*(run or command("-o", "out.pickle")), program],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_as_from_a_terminal,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


NAP = "[time.sleep(0.1) for _ in range(10_000)]"
BUSY = {
    "in Python": "while True: pass",
    "asleep": "import time; time.sleep(1000)",
    "waiting for a lock": "import threading; threading.Semaphore(0).acquire()",
    "in MLX": "mx.eval(*[mx.linalg.svd(mx.random.normal((600, 600)), stream=mx.cpu)"
    "[0] for _ in range(10_000)])",
}


@pytest.mark.parametrize("busy", BUSY)
def test_sigterm_dumps_and_kills(tmp_path: Path, busy: str) -> None:
    # GIVEN a program that is busy
    source = f"{ALLOCATE}\nprint('ready', flush=True)\n{BUSY[busy]}\n"
    with running(tmp_path, source) as process:
        time.sleep(0.3)
        # WHEN it is terminated
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    # THEN it dies of the signal, and the recording is there
    assert (process.returncode, out) == (-signal.SIGTERM, "")
    assert re.fullmatch(r"mlxmem: .* events, peak .*\n", err)
    assert allocated(tmp_path / "out.pickle")["program.py", 1] == MEGABYTE


def test_ctrl_c_ends_as_without_mlxmem(tmp_path: Path) -> None:
    # GIVEN a program that sleeps, without and with mlxmem; in short naps, since a
    # signal just before a long one would be noticed after it
    source = f"import time\n{ALLOCATE}\nprint('ready', flush=True)\n{NAP}\n"
    ended = []
    for run in ([sys.executable], command("-q", "-o", "out.pickle")):
        with running(tmp_path, source, run) as process:
            time.sleep(0.3)
            # WHEN it is interrupted
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
            # Where in the line it was is marked from Python 3.11 on.
            err = re.sub(r"^ *[\^~]+\n", "", err, flags=re.MULTILINE)
            ended.append((out, err, process.returncode))
    # THEN it shows the same traceback and dies of the signal
    assert ended[0] == ended[1]
    assert ended[0][1].endswith("KeyboardInterrupt\n")
    assert ended[0][2] == -signal.SIGINT
    assert allocated(tmp_path / "out.pickle") == {("program.py", 2): MEGABYTE}


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_programs_own_handler_is_the_one(tmp_path: Path, when: str) -> None:
    # GIVEN a program that handles SIGTERM itself, set before or after MLX is there
    handle = "import signal, sys; signal.signal(15, lambda *_: sys.exit(7))"
    lines = [handle, ALLOCATE] if when == "before" else [ALLOCATE, handle]
    lines += ["print('ready', flush=True)", f"import time; {NAP}"]
    with running(tmp_path, "\n".join(lines)) as process:
        # WHEN it is terminated
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    # THEN its handler runs, and the recording is written at the end
    assert process.returncode == 7
    assert "events, peak" in err
    assert sum(allocated(tmp_path / "out.pickle").values()) == MEGABYTE


def test_an_ignored_sigterm_stays_ignored(tmp_path: Path) -> None:
    # GIVEN a program that ignores SIGTERM, and forks a child that does not
    program = script(
        tmp_path,
        f"""
        import os, signal, time
        {ALLOCATE}
        pid = os.fork()
        if pid == 0:
            time.sleep(1000)
        time.sleep(0.2)
        os.kill(pid, signal.SIGTERM)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)
        print("alive")
        """,
    )
    # WHEN both get one; Python 3.12 and later warn of threads, with the process's id
    ended = same(tmp_path, [program], PYTHONWARNINGS="ignore")
    # THEN each does what it would have done
    assert ended.out == "-15\nalive\n"
    assert ended.code == 0


SLOW_DUMP = """
import os, sys, time
import mlxmem.recorder
dump = mlxmem.recorder.dump
def slow_dump(path):
    print("dumping", flush=True)
    half = os.path.join(os.path.dirname(path), f".mlxmem-{os.getpid()}-half")
    open(half, "w").close()
    for _ in range(30):
        time.sleep(0.1)
    os.unlink(half)
    return dump(path)
mlxmem.recorder.dump = slow_dump
"""


@contextlib.contextmanager
def dumping(folder: Path, source: str = "") -> Iterator[subprocess.Popen[str]]:
    """Run a program until it writes its recording, which takes three seconds."""
    source = f"{ALLOCATE}\n{SLOW_DUMP}\n{source}\nprint('ready', flush=True)\n"
    with running(folder, source) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "dumping\n"
        time.sleep(0.5)
        yield process


def test_one_ctrl_c_does_not_lose_the_recording(tmp_path: Path) -> None:
    # GIVEN a program that is at its end, and whose recording is being written
    with dumping(tmp_path) as process:
        # WHEN Ctrl-C is hit once
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    # THEN the file is there, and a line said how to get rid of it
    first, second = err.splitlines()
    assert first == (
        "mlxmem: still writing out.pickle; Ctrl-C again leaves it unwritten"
    )
    assert "events, peak" in second
    assert process.returncode == 0
    assert allocated(tmp_path / "out.pickle") == {("program.py", 1): MEGABYTE}


def test_a_second_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    # GIVEN a recording that is being written
    with dumping(tmp_path) as process:
        # WHEN Ctrl-C is hit twice
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    # THEN there is neither a file nor a part of one, and a line says so
    assert err.endswith("mlxmem: interrupted; out.pickle was not written\n")
    assert process.returncode == 0
    assert os.listdir(tmp_path) == ["program.py"]


def test_a_handler_that_exits_comes_after_the_recording(tmp_path: Path) -> None:
    # GIVEN a program that ends itself at SIGTERM
    handler = """
def stop(*_):
    print("stopped", flush=True)
    sys.exit(7)
import signal; signal.signal(signal.SIGTERM, stop)
"""
    with dumping(tmp_path, handler) as process:
        # WHEN one comes while the recording is being written
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    # THEN the file is there, and the handler was called
    assert "events, peak" in err
    assert "Traceback" not in err
    assert (out, process.returncode) == ("stopped\n", 0)
    assert allocated(tmp_path / "out.pickle") == {("program.py", 1): MEGABYTE}


SLEEP = "time.sleep(1000)"


def terminated(folder: Path, *numbers: int) -> tuple[int, str]:
    """Send a sleeping program signals; return how it ended."""
    source = f"{ALLOCATE}\n{SLOW_DUMP}\nprint('ready', flush=True)\n{SLEEP}\n"
    with running(folder, source) as process:
        for number in numbers:
            process.send_signal(number)
            time.sleep(0.7)
        _, err = process.communicate(timeout=60)
    return process.returncode, err


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGHUP])
def test_sigterm_and_sighup_together_dump_once(tmp_path: Path, first: int) -> None:
    # GIVEN a program that sleeps
    # WHEN its session ends, which some do with one or both signals
    code, err = terminated(tmp_path, first, signal.SIGHUP, signal.SIGHUP)
    # THEN it dies of the first, and the recording is there
    assert code == -first
    assert re.fullmatch(r"mlxmem: .* events, peak .*\n", err)
    assert allocated(tmp_path / "out.pickle") == {("program.py", 1): MEGABYTE}


def test_a_second_sigterm_leaves_nothing_behind(tmp_path: Path) -> None:
    # GIVEN a program that sleeps
    # WHEN it is terminated twice
    code, err = terminated(tmp_path, signal.SIGTERM, signal.SIGTERM)
    # THEN it dies at once, and there is no part of a file
    assert (code, err) == (-signal.SIGTERM, "")
    assert os.listdir(tmp_path) == ["program.py"]


def test_ctrl_c_after_sigterm_waits_for_the_recording(tmp_path: Path) -> None:
    # GIVEN a program that sleeps
    # WHEN it is terminated, and interrupted while the recording is being written
    code, err = terminated(tmp_path, signal.SIGTERM, signal.SIGINT)
    # THEN it dies of one of them, and the recording is there
    assert code in (-signal.SIGTERM, -signal.SIGINT)
    assert err.count("events, peak") == 1
    assert allocated(tmp_path / "out.pickle") == {("program.py", 1): MEGABYTE}


def test_an_ignored_sighup_stays_ignored(tmp_path: Path) -> None:
    # GIVEN a program that runs under nohup
    source = f"{ALLOCATE}\nprint('ready', flush=True)\nimport time; {NAP[:-8]}20)]\n"
    nohup = ["nohup", *command("-o", "out.pickle")]
    with running(tmp_path, source, nohup) as process:
        # WHEN its terminal closes
        process.send_signal(signal.SIGHUP)
        process.communicate(timeout=60)
    # THEN it goes on to its end
    assert process.returncode == 0
    assert allocated(tmp_path / "out.pickle") == {("program.py", 1): MEGABYTE}


# --- the file and the closing line -----------------------------------------


def test_the_closing_line_names_the_next_step(tmp_path: Path) -> None:
    # GIVEN a program of one allocation, and an older file
    program = script(tmp_path, ALLOCATE)
    (tmp_path / "my out.pickle").write_text("old")
    # WHEN it runs
    ended = finish([*command("-o", "my out.pickle"), program], tmp_path)
    # THEN one line says what there is and what to do with it
    match = re.fullmatch(
        r"mlxmem: (\d+) events, peak 976\.6 KiB\. "
        r"Next: mlxmem summary 'my out\.pickle'\n",
        ended.err,
    )
    assert match, ended.err
    assert (ended.code, ended.out) == (0, "")
    assert allocated(tmp_path / "my out.pickle") == {("program.py", 1): MEGABYTE}


def test_the_file_is_named_after_the_program(tmp_path: Path) -> None:
    # GIVEN no -o
    script(tmp_path, ALLOCATE, "a/train step.py")
    # WHEN programs run, one of which changes its folder
    ended = finish([*command(), "a/train step.py"], tmp_path)
    finish([*command("-q"), "-c", f"import os; os.chdir('a'); {ALLOCATE}"], tmp_path)
    # THEN their files are in the folder where they were started
    first, second = sorted(path.name for path in tmp_path.glob("*.pickle"))
    assert re.fullmatch(r"mlxmem-code\.\d+\.pickle", first)
    assert re.fullmatch(r"mlxmem-train_step\.\d+\.pickle", second)
    assert ended.err.endswith(f"Next: mlxmem summary {second}\n")


def test_a_program_without_mlx_leaves_no_file(tmp_path: Path) -> None:
    # GIVEN a program that never imports MLX
    # WHEN it runs
    ended = finish([*command("-o", "out.pickle"), "-c", "print(1)"], tmp_path)
    # THEN a line says so
    assert ended == (
        0,
        "1\n",
        "mlxmem: nothing was recorded, since the program did not import mlx.core\n",
    )
    assert not (tmp_path / "out.pickle").exists()


@pytest.mark.parametrize(
    ("options", "events", "dropped"),
    [([], 0, False), (["--max-entries", "5"], 5, True), (["--unlimited"], 0, False)],
)
def test_entries_are_as_many_as_asked_for(
    tmp_path: Path, options: list[str], events: int, dropped: bool
) -> None:
    # GIVEN a program with more than five events
    program = script(tmp_path, f"for _ in range(5):\n    {ALLOCATE}\n")
    # WHEN it is recorded
    ended = finish([*command("-o", "out.pickle", *options), program], tmp_path)
    # THEN the file and the line say what was kept
    settings = load(tmp_path / "out.pickle")["allocator_settings"]
    assert settings["trace_alloc_overflowed"] is dropped
    unlimited = 0 if "--unlimited" in options else events or 100_000
    assert settings["trace_alloc_max_entries"] in (unlimited, 2**53 - 1, sys.maxsize)
    assert ("were dropped, --unlimited keeps all" in ended.err) is dropped


def test_no_stacks(tmp_path: Path) -> None:
    program = script(tmp_path, ALLOCATE)
    finish([*command("-o", "out.pickle", "--no-stacks"), program], tmp_path)
    entries = load(tmp_path / "out.pickle")["device_traces"][0]
    assert any(entry["size"] == MEGABYTE for entry in entries)
    assert not any("program.py" in str(entry["frames"]) for entry in entries)


def test_a_file_that_cannot_be_written_any_more(tmp_path: Path) -> None:
    # GIVEN a program that takes away the folder of its recording
    (tmp_path / "gone").mkdir()
    program = script(
        tmp_path, f"{ALLOCATE}\nimport os, sys; os.rmdir('gone')\nsys.exit(4)"
    )
    # WHEN it ends
    ended = finish([*command("-o", "gone/out.pickle"), program], tmp_path)
    # THEN one line says so, and the exit code is the program's
    assert ended.code == 4
    assert re.fullmatch(r"mlxmem: gone/out.pickle was not written: .*\n", ended.err)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-o", "missing/out.pickle", "program.py"], "can't be written: No such file"),
        (["-o", ".", "program.py"], "can't be written: Is a directory"),
        (["-o", "", "program.py"], "must name a file"),
        ([], "name a SCRIPT, or use -m MODULE or -c CODE"),
        (["--max-entries", "-1", "program.py"], "Invalid value for '--max-entries'"),
        (["--max-entires", "5", "program.py"], "No such option"),
        (["-x", "program.py"], "No such option"),
    ],
)
def test_what_cannot_be_done_is_refused_before_the_start(
    tmp_path: Path, args: list[str], message: str
) -> None:
    # GIVEN a program that would leave a trace
    script(tmp_path, "open('started', 'w')")
    # WHEN it is run in a way that can't be
    ended = finish([*command(), *args], tmp_path)
    # THEN it is not, and one line says why
    assert ended.code == 2
    assert message in ended.err
    assert "Traceback" not in ended.err
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams(tmp_path: Path, closed: str) -> None:
    # GIVEN a shell that closes the program's streams
    program = script(tmp_path, f"{ALLOCATE}\nraise SystemExit(4)\n")
    run = command("-o", "out.pickle")
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh"]
    # WHEN it runs with and without mlxmem
    plain = finish([*shell, sys.executable, program], tmp_path)
    ended = finish([*shell, *run, program], tmp_path)
    # THEN it runs as always, and is recorded
    assert ended.code == plain.code == 4
    assert ended.out == plain.out == ""
    assert "Traceback" not in ended.err
    assert allocated(tmp_path / "out.pickle") == {("program.py", 1): MEGABYTE}


@pytest.mark.parametrize("options", [(), ("-o", "out.pickle")])
def test_a_folder_that_takes_no_file(tmp_path: Path, options: Sequence[str]) -> None:
    # GIVEN a folder in which nobody can make a file, whatever its permissions are
    started = tmp_path / "started"
    # WHEN a program is run there
    code = f"open({str(started)!r}, 'w')"
    ended = finish([*command(*options), "-c", code], Path("/proc"))
    # THEN it is not started, and one line says what to do
    assert ended.code == 2
    assert "name another file with -o" in " ".join(ended.err.split())
    assert "Traceback" not in ended.err
    assert not started.exists()


def test_children_are_not_followed_beside_a_device(tmp_path: Path) -> None:
    # GIVEN a file that is none
    fifo = tmp_path / "out.fifo"
    os.mkfifo(fifo)
    script(tmp_path, "open('started', 'w')")
    # WHEN children are to write theirs beside it
    run = command("--follow-children", "-o", "out.fifo")
    ended = finish([*run, "program.py"], tmp_path)
    # THEN the program is not started
    assert ended.code == 2
    assert "'out.fifo' is no plain file" in " ".join(ended.err.split())
    assert sorted(os.listdir(tmp_path)) == ["out.fifo", "program.py"]


@pytest.mark.parametrize("flag", ["-I", "-E"])
def test_an_isolated_python_is_refused(tmp_path: Path, flag: str) -> None:
    # GIVEN a Python that does not read PYTHONPATH
    script(tmp_path, "open('started', 'w')")
    # WHEN it is asked to run a program
    ended = finish([sys.executable, flag, "-c", RUN], tmp_path)
    # THEN it says why not
    assert ended.code == 2, ended.err
    assert "-I, -E and -S turn off" in " ".join(ended.err.split())
    assert not (tmp_path / "started").exists()


def test_running_out_of_memory_leaves_a_recording(tmp_path: Path) -> None:
    # GIVEN a program with 8 GiB of address space that asks MLX for 16 GiB
    program = script(
        tmp_path,
        f"""
        import resource
        {ALLOCATE}
        resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
        mx.eval(mx.zeros((16 << 20, 256)))
        """,
    )
    # WHEN MLX crashes, since the CPU allocator returned nothing
    plain = finish([sys.executable, program], tmp_path)
    ended = finish([*command("-q", "-o", "out.pickle"), program], tmp_path)
    # THEN the program dies in the same way, and the recording names the line
    assert ended.code == plain.code == -signal.SIGSEGV
    assert allocated(tmp_path / "out.pickle") == {("program.py", 3): MEGABYTE}
    entries = load(tmp_path / "out.pickle")["device_traces"][0]
    [failed] = [entry for entry in entries if entry["action"] == "oom"]
    assert failed["size"] == 16 << 30
    assert failed["frames"][0]["line"] == 5


# --- a program that uses mlxmem itself ---------------------------------------


def test_the_programs_own_calls_work(tmp_path: Path) -> None:
    # GIVEN a program that begins a session of its own, and dumps and stops it
    program = script(
        tmp_path,
        f"""
        {ALLOCATE}
        import mlxmem
        print(mlxmem.is_enabled())
        mlxmem.enable()
        more = mx.zeros((500, 1000)); mx.eval(more)
        mlxmem.dump("mine.pickle")
        mlxmem.disable()
        late = mx.zeros((750, 1000)); mx.eval(late)
        """,
    )
    # WHEN it runs
    ended = finish([*command("-o", "out.pickle"), program], tmp_path)
    # THEN both files have its session, and the line says so
    assert (ended.code, ended.out) == (0, "True\n")
    expected = {("program.py", 6): 2 * MEGABYTE}
    assert allocated(tmp_path / "mine.pickle") == expected
    assert allocated(tmp_path / "out.pickle") == expected
    assert "began the recording anew with mlxmem.enable()" in ended.err


@pytest.mark.parametrize("own", ["", "dump_on_oom='mine.pickle'"])
def test_a_session_of_its_own_that_runs_out_of_memory(tmp_path: Path, own: str) -> None:
    # GIVEN a program that begins a session, with or without a file for this case
    program = script(
        tmp_path,
        f"""
        import resource
        {ALLOCATE}
        import mlxmem; mlxmem.disable(); mlxmem.enable({own})
        more = mx.zeros((500, 1000)); mx.eval(more)
        resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
        mx.eval(mx.zeros((16 << 20, 256)))
        """,
    )
    # WHEN an allocation fails
    ended = finish([*command("-o", "out.pickle"), program], tmp_path)
    # THEN the file of the command is there, and that of the program's choice
    assert ended.code == -signal.SIGSEGV
    files = sorted(path.name for path in tmp_path.glob("*.pickle"))
    assert files == (["mine.pickle", "out.pickle"] if own else ["out.pickle"])
    for name in files:
        assert allocated(tmp_path / name) == {("program.py", 5): 2 * MEGABYTE}
        entries = load(tmp_path / name)["device_traces"][0]
        assert [e["size"] for e in entries if e["action"] == "oom"] == [16 << 30]
    assert ended.err.count("what was recorded until then is in") == len(files)


def test_an_unsupported_mlx_runs_unrecorded(tmp_path: Path) -> None:
    # GIVEN an MLX that fails a check
    script(
        tmp_path,
        """
        import mlxmem.recorder
        from mlxmem.errors import UnsupportedMLXError
        def enable(*args, **options): raise UnsupportedMLXError("a check failed")
        mlxmem.recorder.enable = enable
        """,
        "sitecustomize.py",
    )
    program = script(tmp_path, f"{ALLOCATE}\nprint(kept.size)\nraise SystemExit(3)")
    # WHEN a program runs
    ended = finish(
        [*command("-o", "out.pickle"), program],
        tmp_path,
        PYTHONPATH=path_with(tmp_path),
    )
    # THEN it runs as always, and one line says that it is not recorded
    assert ended == (3, "250000\n", "mlxmem: not recording: a check failed\n")
    assert not (tmp_path / "out.pickle").exists()


# --- children ----------------------------------------------------------------


def recordings(folder: Path) -> list[dict[tuple[str, int], int]]:
    """What each child's file has, and that there is one for the program."""
    assert (folder / "out.pickle").exists()
    files = [path for path in folder.glob("*.pickle") if path.name != "out.pickle"]
    assert all(re.fullmatch(r"out\.\d+\.pickle", path.name) for path in files)
    return [allocated(path) for path in files]


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_multiprocessing_children_are_followed(tmp_path: Path, method: str) -> None:
    # GIVEN a program with a pool of two
    program = script(tmp_path, MULTIPROCESSING)
    # WHEN children are followed
    run = command("-q", "-o", "out.pickle", "--follow-children")
    ended = finish([*run, program, method], tmp_path)
    # THEN each that used MLX has a file of its own
    assert ended == (0, "[2, 3]\n5\n", "")
    children = recordings(tmp_path)
    total = sum(child.get(("program.py", 7), 0) for child in children)
    assert total == 2 * MEGABYTE
    assert 1 <= len(children) <= 2
    assert allocated(tmp_path / "out.pickle") == {("program.py", 11): 2 * MEGABYTE}


FORKS = """
import multiprocessing, os, sys, time
import mlx.core as mx
def work(how):
    leaf = mx.array(list(range(250_000)))
    if how == "killed":
        ready.set(); time.sleep(1000)
ready = multiprocessing.Event()
if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    for how in ("ends", "killed"):
        process = context.Process(target=work, args=(how,))
        process.start()
        if how == "killed":
            ready.wait(); process.terminate()
        process.join(); print(process.exitcode)
    pid = os.fork()
    if pid == 0:
        work("ends"); sys.exit(3)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    mx.eval(mx.zeros((500, 1000)))
"""


@pytest.mark.filterwarnings("ignore")
def test_forked_children_are_followed(tmp_path: Path) -> None:
    # GIVEN a program that forks: with multiprocessing, one that is terminated, and bare
    program = script(tmp_path, FORKS)
    # WHEN children are followed
    run = command("-q", "-o", "out.pickle", "--follow-children")
    ended = finish([*run, program], tmp_path, PYTHONWARNINGS="ignore")
    # THEN each has a file of its own
    assert ended == (0, "0\n-15\n3\n", "")
    assert recordings(tmp_path) == [{("program.py", 5): MEGABYTE}] * 3
    assert allocated(tmp_path / "out.pickle") == {("program.py", 21): 2 * MEGABYTE}


def test_forked_children_leave_the_file_alone(tmp_path: Path) -> None:
    # GIVEN the same program
    program = script(tmp_path, FORKS)
    # WHEN children are not followed
    ended = same(tmp_path, [program], PYTHONWARNINGS="ignore")
    # THEN the only file is the program's
    assert ended == (0, "0\n-15\n3\n", "")
    assert recordings(tmp_path) == []
    assert allocated(tmp_path / "out.pickle") == {("program.py", 21): 2 * MEGABYTE}


def test_subprocesses_are_followed(tmp_path: Path) -> None:
    # GIVEN a program without MLX that starts others, one of which has none either
    script(tmp_path, ALLOCATE, "child.py")
    program = script(
        tmp_path,
        f"""
        import subprocess, sys
        {ALLOCATE}
        for args in (["child.py"], ["-c", "print('no mlx')"], ["-m", "child"]):
            subprocess.run([sys.executable, *args], check=True)
        """,
    )
    # WHEN children are followed
    run = command("-o", "out.pickle", "--follow-children")
    ended = finish([*run, program], tmp_path)
    # THEN those that used MLX have a file, and say so
    assert (ended.code, ended.out) == (0, "no mlx\n")
    assert recordings(tmp_path) == [{("child.py", 1): MEGABYTE}] * 2
    assert len(re.findall(r"Next: mlxmem summary out\.\d+\.pickle", ended.err)) == 2
    assert ended.err.count("\n") == 3
