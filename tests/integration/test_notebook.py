"""`%%mlxmem`: a cell runs as it would, and what it used is shown."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mlxmem

pytest.importorskip("IPython")

from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

CELL = """
import mlx.core as mx
kept = mx.zeros((250, 1000)); mx.eval(kept)
kept.shape
"""


@pytest.fixture
def shell() -> Iterator[Any]:
    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "mlxmem")
    yield shell
    InteractiveShell.clear_instance()


def run(shell: Any, cell: str) -> Any:
    """Return what was printed and displayed."""
    with capture_output() as captured:
        shell.run_cell(cell)
    return captured


def test_a_cell_shows_its_peak_and_its_line(shell: Any, tmp_path: Path) -> None:
    # GIVEN a cell that allocates a megabyte
    # WHEN it runs under the magic
    path = tmp_path / "out.pickle"
    captured = run(shell, f"%%mlxmem --no-chart -o '{path}'\n{CELL}")
    # THEN its own output is there, its variables are, and the table names its line
    assert "(250, 1000)" in captured.stdout
    assert shell.user_ns["kept"].size == 250_000
    [shown] = [each for each in captured.outputs if "text/html" in each.data]
    text = shown.data["text/plain"]
    assert "976.6 KiB" in text
    assert re.search(r":2 <module>", text)
    assert "<pre>" in shown.data["text/html"]
    assert path.exists()
    assert not mlxmem.is_enabled()


def test_a_running_recording_goes_on(shell: Any) -> None:
    # GIVEN a recording
    mlxmem.enable()
    # WHEN a cell runs under the magic
    run(shell, f"%%mlxmem --no-chart\n{CELL}")
    # THEN it goes on
    assert mlxmem.is_enabled()


def test_an_error_stops_the_cell_and_is_shown_once(shell: Any) -> None:
    # GIVEN a cell that fails after it has allocated
    with capture_output() as captured:
        # WHEN it runs
        result = shell.run_cell(f"%%mlxmem --no-chart\n{CELL}\n1 / 0\n")
    # THEN the notebook sees an error, and the table is there
    assert not result.success
    text = re.sub(r"\x1b\[[0-9;]*m", "", captured.stdout)
    assert text.count("ZeroDivisionError: division by zero") == 1
    assert any("976.6 KiB" in str(each.data) for each in captured.outputs)
    assert not mlxmem.is_enabled()


def test_the_chart_is_a_page_of_its_own(shell: Any) -> None:
    pytest.importorskip("plotly")
    captured = run(shell, f"%%mlxmem\n{CELL}")
    pages = [each.data.get("text/html", "") for each in captured.outputs]
    assert any("Plotly" in page and "<script" in page for page in pages)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--nope", "unrecognized arguments: --nope"),
        ("-o /missing/out.pickle", "No such file"),
        ("--top x", "invalid int value"),
    ],
)
def test_bad_options_are_refused(shell: Any, line: str, message: str) -> None:
    # GIVEN an option that is none
    # WHEN the cell is run
    captured = run(shell, f"%%mlxmem {line}\nran = True")
    # THEN it does not run, and one line says why
    assert message in captured.stdout + captured.stderr
    assert "Traceback" not in captured.stdout
    assert "ran" not in shell.user_ns
