"""The pytest plugin: limits, messages, the table; each in a pytest of its own."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PRELUDE = "import mlx.core as mx, mlxmem, pytest\n"


def run_pytest(
    folder: Path, source: str, *options: str, prelude: str = PRELUDE
) -> tuple[int, str]:
    """Return the exit code and the output."""
    (folder / "test_it.py").write_text(prelude + textwrap.dedent(source))
    points = importlib.metadata.entry_points(group="pytest11")
    plugin = [] if "mlxmem" in points.names else ["-p", "mlxmem_pytest"]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider"),
            *("--strict-markers", "-c", "/dev/null", "--rootdir", str(folder)),
            *(*plugin, *options, "test_it.py"),
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout + done.stderr


def outcomes(output: str) -> dict[str, str]:
    pattern = r"^(PASSED|FAILED|ERROR|XFAIL) test_it\.py::(?:\w+::)?(\w+)"
    found = re.findall(pattern, output, re.M)
    return {name: outcome for outcome, name in found}


def test_a_peak_above_the_limit_fails_and_names_the_lines(tmp_path: Path) -> None:
    # GIVEN tests that hold 2 MB and 1 MB at their peak, beside 8 MB of a fixture
    code, output = run_pytest(
        tmp_path,
        """
        @pytest.fixture
        def weights():
            array = mx.zeros((2000, 1000)); mx.eval(array)
            return array

        @pytest.mark.limit_mlx_memory("2 MB")
        def test_over(weights):
            array = mx.zeros((250, 1000)); mx.eval(array)
            more = []
            for _ in range(2):
                more.append(mx.zeros((125, 1000)))
            mx.eval(more)
            del array, more

        @pytest.mark.limit_mlx_memory(2_100_000)
        def test_under(weights):
            for _ in range(9):
                array = mx.zeros((250, 1000)); mx.eval(array)
        """,
    )
    # WHEN they run
    # THEN the first fails with bytes and counts of its lines, the largest first
    assert code == 1
    assert outcomes(output) == {"test_over": "FAILED", "test_under": "PASSED"}
    assert re.search(r"rose by 1\.9 MiB \(2,000,0\d\d bytes\) during the test", output)
    assert "the limit is 1.9 MiB (2,000,000 bytes)" in output
    # The scalar that zeros() makes is a buffer, too.
    pattern = r"\(1,000,\d{3} bytes\) in (\d) buffers?: test_it\.py:(\d+) test_over"
    found = {line: int(count) for count, line in re.findall(pattern, output)}
    assert set(found) == {"10", "13"}
    assert found["13"] >= 2 * found["10"] > 0
    assert "Traceback" not in output


def test_a_leak_above_the_limit_fails_and_names_its_line(tmp_path: Path) -> None:
    # GIVEN tests that leave arrays behind: each time, or the first time only
    code, output = run_pytest(
        tmp_path,
        """
        kept, cache = [], {}

        def keep():
            kept.append(mx.zeros((250, 1000))); mx.eval(kept)

        @pytest.mark.limit_mlx_leaks("0.9 MB")
        def test_leaks():
            keep()

        @pytest.mark.limit_mlx_leaks("0.9 MB")
        def test_caches():
            if "table" not in cache:
                cache["table"] = mx.zeros((250, 1000)); mx.eval(cache["table"])

        @pytest.mark.limit_mlx_leaks("0.9 MB", warmups=0)
        def test_caches_from_the_first_time_on():
            cache.clear(); test_caches()

        @pytest.mark.limit_mlx_leaks("0.9 MB")
        def test_in_a_cycle():
            cycle = [mx.zeros((250, 1000))]; mx.eval(cycle)
            cycle.append(cycle)
        """,
    )
    # WHEN they run
    # THEN what was there after the warmup is no leak, nor is what a collection frees
    assert code == 1
    assert outcomes(output) == {
        "test_leaks": "FAILED",
        "test_caches": "PASSED",
        "test_caches_from_the_first_time_on": "FAILED",
        "test_in_a_cycle": "PASSED",
    }
    assert "left more of MLX's memory behind than the limit of 878.9 KiB" in output
    assert "976.6 KiB (1,000,000 bytes) in 1 buffer: test_it.py:6 keep\n" in output


@pytest.mark.parametrize(
    ("mark", "message"),
    [
        ('limit_mlx_memory("64 MX")', "'64 MX' is no size; write a number of bytes"),
        ("limit_mlx_memory()", "missing 1 required positional argument: 'size'"),
        ("limit_mlx_memory(-1)", "a size can't be negative: -1"),
        ('limit_mlx_leaks("1 MB", warmups=-1)', "warmups must be a number from 0 on"),
        ('limit_mlx_leaks("1 MB", warmup=1)', "unexpected keyword argument 'warmup'"),
    ],
)
def test_bad_limits_are_refused_before_the_first_test(
    tmp_path: Path, mark: str, message: str
) -> None:
    # GIVEN a limit that is none
    source = f"@pytest.mark.{mark}\ndef test_it():\n    pass\n"
    # WHEN tests are collected
    code, output = run_pytest(tmp_path, source)
    # THEN the message names the test and the mistake
    assert code == pytest.ExitCode.USAGE_ERROR
    assert "test_it.py::test_it: " in output
    assert message in output


def test_a_test_with_a_session_of_its_own_is_not_measured(tmp_path: Path) -> None:
    # GIVEN tests that begin or end a session themselves
    code, output = run_pytest(
        tmp_path,
        """
        @pytest.mark.limit_mlx_memory("1 GB")
        def test_enables():
            mlxmem.enable()

        @pytest.mark.limit_mlx_memory("1 GB")
        def test_disables():
            mlxmem.disable()

        @pytest.mark.limit_mlx_memory("1 GB")
        def test_records():
            with mlxmem.record():
                mx.eval(mx.zeros(3))

        def test_is_off():
            assert not mlxmem.is_enabled()
        """,
        "-p",
        "no:randomly",
    )
    # WHEN they have a limit
    # THEN it says that it can't be checked, but for record(), which shares a session
    assert outcomes(output)["test_disables"] == "FAILED"
    assert outcomes(output)["test_enables"] == "FAILED"
    assert outcomes(output)["test_records"] == "PASSED"
    assert code == 1
    assert "called mlxmem.enable() or disable()" in output


def test_a_running_session_goes_on(tmp_path: Path) -> None:
    # GIVEN a session around all tests
    code, output = run_pytest(
        tmp_path,
        """
        @pytest.fixture(scope="session", autouse=True)
        def recording():
            mlxmem.enable()
            before = mx.zeros((2000, 1000)); mx.eval(before)
            yield
            assert len(mlxmem.events()) >= 4

        @pytest.mark.limit_mlx_memory("1.1 MB")
        def test_one():
            array = mx.zeros((250, 1000)); mx.eval(array)

        @pytest.mark.limit_mlx_memory("0.9 MB")
        def test_two():
            array = mx.zeros((250, 1000)); mx.eval(array)
        """,
    )
    # WHEN tests with limits run inside it
    # THEN only what they did counts
    assert code == 1
    assert outcomes(output) == {"test_one": "PASSED", "test_two": "FAILED"}


def test_a_failing_test_fails_for_its_own_reason(tmp_path: Path) -> None:
    code, output = run_pytest(
        tmp_path,
        """
        @pytest.mark.limit_mlx_memory("1 kB")
        def test_it():
            array = mx.zeros((250, 1000)); mx.eval(array)
            assert array.size == 1
        """,
    )
    assert code == 1
    assert "assert 250000 == 1" in output
    assert "the limit is" not in output


TABLE = """
@pytest.mark.parametrize("mb", [1, 3, 2])
def test_mb(mb):
    for _ in range(2):
        array = mx.zeros((mb * 250, 1000)); mx.eval(array); del array

def test_fails():
    array = mx.zeros((1000, 1000)); mx.eval(array)
    assert False
"""


def table(output: str) -> list[list[str]]:
    """Cells of the rows."""
    lines = output.splitlines()
    [start] = [i for i, line in enumerate(lines) if "the hungriest tests" in line]
    rows = lines[start + 2 :]
    rows = [row.strip() for row in rows if re.search(r"  test_it\.py::", row)]
    return [re.split(r"\s{2,}", row) for row in rows]


@pytest.mark.parametrize("workers", [[], ["-n", "2"]])
def test_the_table_shows_the_hungriest_first(
    tmp_path: Path, workers: list[str]
) -> None:
    if workers and importlib.util.find_spec("xdist") is None:
        pytest.skip("pytest-xdist is not installed")
    # GIVEN tests of 1 to 4 MB, one of which fails
    # WHEN they run with --mlxmem, also on workers
    _, output = run_pytest(tmp_path, TABLE, "--mlxmem", "-rN", *workers)
    # THEN all are there, sorted by peak
    rows = table(output)
    assert [row[-1] for row in rows] == [
        "test_it.py::test_fails",
        "test_it.py::test_mb[3]",
        "test_it.py::test_mb[2]",
        "test_it.py::test_mb[1]",
    ]
    assert [row[0] for row in rows] == ["3.8 MiB", "2.9 MiB", "1.9 MiB", "976.6 KiB"]
    assert [row[1] for row in rows] == ["3.8 MiB", "5.7 MiB", "3.8 MiB", "1.9 MiB"]


def test_the_table_can_be_shorter(tmp_path: Path) -> None:
    _, output = run_pytest(tmp_path, TABLE, "--mlxmem", "--mlxmem-most", "1", "-rN")
    assert [row[-1] for row in table(output)] == ["test_it.py::test_fails"]
    assert "3 more tests; --mlxmem-most 0 shows all" in output


def test_nothing_is_loaded_where_nothing_is_asked_for(tmp_path: Path) -> None:
    # GIVEN tests that know nothing of MLX
    source = """
    import sys

    def test_it(request):
        assert request.config.pluginmanager.hasplugin("mlxmem_pytest") or (
            request.config.pluginmanager.hasplugin("mlxmem")
        )
        names = {name.partition(".")[0] for name in sys.modules}
        assert not names & {"mlx", "mlxmem", "numpy"}
    """
    # WHEN they run with the plugin
    code, output = run_pytest(tmp_path, source, prelude="")
    # THEN neither MLX nor mlxmem nor NumPy is imported
    assert (code, outcomes(output)) == (0, {"test_it": "PASSED"}), output


# --- what is no plain function ----------------------------------------------


def test_methods_of_unittest_are_measured(tmp_path: Path) -> None:
    # GIVEN methods of test cases that use 1 MB, beside 8 MB of their setUp
    code, output = run_pytest(
        tmp_path,
        """
        import unittest

        def allocate():
            array = mx.zeros((250, 1000)); mx.eval(array)
            return array

        class Case(unittest.TestCase):
            def setUp(self):
                self.weights = mx.zeros((2000, 1000)); mx.eval(self.weights)

            def tearDown(self):
                more = mx.zeros((2000, 1000)); mx.eval(more)

            @pytest.mark.limit_mlx_memory("0.9 MB")
            def test_over(self):
                allocate()

            @pytest.mark.limit_mlx_memory("1.1 MB")
            def test_under(self):
                allocate()

            @pytest.mark.limit_mlx_memory("0.9 MB")
            @unittest.expectedFailure
            def test_expected(self):
                allocate()

            @pytest.mark.limit_mlx_memory("0.9 MB")
            @unittest.skip("for a reason")
            def test_skipped(self):
                allocate()

        def teardown_module():
            assert not mlxmem.is_enabled()

        kept = []

        @pytest.mark.limit_mlx_leaks("0.9 MB")
        class Coroutines(unittest.IsolatedAsyncioTestCase):
            async def test_leaks(self):
                kept.append(allocate())

            async def test_caches(self):
                if not hasattr(type(self), "cache"):
                    type(self).cache = allocate()
        """,
        "--mlxmem",
        "--show-capture=no",  # asyncio logs what is slow, with its file
    )
    # WHEN they run with limits
    # THEN each is judged by what the method itself did
    assert code == 1
    assert outcomes(output) == {
        "test_over": "FAILED",
        "test_under": "PASSED",
        "test_expected": "XFAIL",
        "test_leaks": "FAILED",
        "test_caches": "PASSED",
    }
    assert re.search(r"rose by 976\.6 KiB \(1,000,\d{3} bytes\) during", output)
    assert "(1,000,000 bytes) in 1 buffer: test_it.py:6 allocate\n" in output
    assert "mlxmem_pytest.py" not in output
    # AND so it is in the table
    rows = {row[-1].rpartition("::")[2]: row[0] for row in table(output)}
    assert rows["test_under"] == "976.6 KiB"


@pytest.mark.parametrize(
    ("mark", "message"),
    [
        ('limit_mlx_memory("0.9 MB")', "MLX's memory rose by 976."),
        ('limit_mlx_memory("1.1 MB")', None),
        ('limit_mlx_leaks("1 MB", warmups=0)', None),
        ('limit_mlx_leaks("1 MB")', "can't run a Other before the test; write"),
    ],
)
def test_items_of_other_kinds_are_measured_as_a_whole(
    tmp_path: Path, mark: str, message: str | None
) -> None:
    # GIVEN a plugin with items of its own
    (tmp_path / "conftest.py").write_text(
        textwrap.dedent(
            f"""
            import pytest

            class Other(pytest.Item):
                def runtest(self):
                    import mlx.core as mx
                    array = mx.zeros((250, 1000)); mx.eval(array)

            def pytest_pycollect_makeitem(collector, name, obj):
                if name == "other":
                    item = Other.from_parent(collector, name=name)
                    item.add_marker(pytest.mark.{mark})
                    return item
            """
        )
    )
    # WHEN one has a limit
    code, output = run_pytest(tmp_path, "other = 1\n")
    # THEN it is checked, or the test fails
    assert outcomes(output) == {"other": "FAILED" if message else "PASSED"}
    assert code == bool(message)
    assert message is None or message in output


def test_a_function_that_runs_out_of_sight_fails(tmp_path: Path) -> None:
    # GIVEN a plugin that runs functions in a way of its own
    (tmp_path / "conftest.py").write_text(
        textwrap.dedent(
            """
            import pytest

            class Own(pytest.Function):
                def runtest(self):
                    self.obj()

            def pytest_pycollect_makeitem(collector, name, obj):
                if name.startswith("test"):
                    return Own.from_parent(collector, name=name)
            """
        )
    )
    # WHEN one has a limit
    code, output = run_pytest(
        tmp_path,
        """
        @pytest.mark.limit_mlx_memory("1 GB")
        def test_limit(): pass

        def test_none(): pass
        """,
    )
    # THEN it says that nothing was checked
    assert code == 1
    assert outcomes(output) == {"test_limit": "FAILED", "test_none": "PASSED"}
    assert "since another plugin runs this Own in a way of its own" in output


def test_a_failure_names_the_warmup(tmp_path: Path) -> None:
    # GIVEN tests that fail in their second warm-up, or in what counts
    code, output = run_pytest(
        tmp_path,
        """
        runs = []

        @pytest.fixture
        def numbers():
            return iter([1, 2, 3])

        @pytest.mark.limit_mlx_leaks("1 MB", warmups=3)
        def test_warmup():
            runs.append(1)
            assert len(runs) == 1

        @pytest.mark.limit_mlx_leaks("1 MB", warmups=3)
        def test_counts(numbers):
            next(numbers)

        @pytest.mark.limit_mlx_leaks("1 MB", warmups=0)
        def test_once():
            assert False
        """,
        "-rN",
    )
    # WHEN they fail
    # THEN the report says where, and that fixtures were used before
    assert code == 1
    assert output.count("The test ended in warm-up 2 of 3") == 1
    assert output.count("The test had run 3 time(s) before") == 1
    assert "with the same fixtures" in output
