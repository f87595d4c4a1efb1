"""`%%mlxmem`: record a notebook's cell and show who held its memory."""

from __future__ import annotations

import argparse
import importlib
import io
import shlex
from collections.abc import Callable
from typing import Any, NoReturn

from mlxmem import recorder
from mlxmem.dump_file import check_path, check_target


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; {self.format_usage().strip()}")


class _CellFailed(Exception):  # noqa: N818 - shown as what it is about
    """Stops a notebook's run after an error that was shown already."""

    def _render_traceback_(self) -> list[str]:
        return []


def load_ipython_extension(ipython: Any) -> None:
    """Add the magic, for `%load_ext mlxmem`.

    Parameters
    ----------
    ipython : IPython.core.interactiveshell.InteractiveShell
    """

    def cell_magic(line: str, cell: str) -> None:
        _run(ipython, line, cell)

    cell_magic.__doc__ = _parser().format_help()
    ipython.register_magic_function(cell_magic, "cell", "mlxmem")


def unload_ipython_extension(ipython: Any) -> None:
    """Take the magic away, for `%unload_ext mlxmem`."""
    ipython.magics_manager.magics["cell"].pop("mlxmem", None)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="%%mlxmem",
        description="Record the cell; show the peak, who made it up, and a chart. "
        "Inside a running recording the whole of that is shown, and it goes on.",
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="also write a recording")
    parser.add_argument("--by", default="line", help="line, caller, range, ...")
    parser.add_argument("--top", type=int, default=10, help="rows of each table")
    parser.add_argument("--no-chart", action="store_true", help="tables only")
    return parser


def _run(ipython: Any, line: str, cell: str) -> None:
    usage_error = importlib.import_module("IPython.core.error").UsageError
    try:
        options = _parser().parse_args(shlex.split(line))
        if options.output is not None:
            check_path(options.output)
            check_target(options.output)
    except (ValueError, OSError) as error:
        raise usage_error(str(error)) from None
    ours = not recorder.is_enabled()
    if ours:
        recorder.enable(max_entries=0)
    try:
        result = ipython.run_cell(cell)
    finally:
        if ours:
            recorder.disable()
    if options.output is not None:
        recorder.dump(options.output)
    _show(
        options,
        ipython.display_pub.publish,
        html=type(ipython).__name__ != "TerminalInteractiveShell",
    )
    if not result.success:
        raise _CellFailed


def _show(
    options: argparse.Namespace, publish: Callable[[dict[str, str]], Any], html: bool
) -> None:
    from rich.console import Console

    from mlxmem.commands import summary as command
    from mlxmem.reports.history import from_snapshot
    from mlxmem.reports.summary import summary

    history = from_snapshot(recorder.snapshot(), name="this cell")
    console = Console(record=True, file=io.StringIO(), width=120, highlight=False)
    for part in command.parts(summary(history, options.by, options.top)):
        console.print(part)
    shown = {"text/plain": console.export_text(clear=False)}
    if html:
        shown["text/html"] = console.export_html(
            inline_styles=True, code_format="<pre>{code}</pre>"
        )
    publish(shown)
    if html and not options.no_chart:
        try:
            from mlxmem.view.figure import fragment
        except ImportError as error:
            publish({"text/plain": f"no chart: {error}"})
            return
        chart = fragment(history, options.by)
        publish({"text/plain": "(a chart)", "text/html": chart})
