"""What the commands that show a report have in common."""

from __future__ import annotations

import functools
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import click
from rich.console import Console, RenderableType

from mlxmem.reports import grouping, history
from mlxmem.reports.reading import SnapshotError

_Function = TypeVar("_Function", bound=Callable[..., Any])

FILE = click.argument("file", type=click.Path(dir_okay=False))


def options(top: int | None = 20, by: bool = True) -> Callable[[_Function], _Function]:
    """Add the options of every report: --by, --top, --device, --json."""

    def add(function: _Function) -> _Function:
        decorators = [
            click.option("--json", "as_json", is_flag=True, help="Print JSON."),
            click.option(
                "--device", type=click.IntRange(min=0), help="Which device of the file."
            ),
        ]
        if top is not None:
            decorators.append(
                click.option(
                    "--top",
                    default=top,
                    show_default=True,
                    type=click.IntRange(min=1),
                    help="Rows in each table.",
                )
            )
        if by:
            decorators.append(
                click.option(
                    "--by",
                    type=click.Choice(grouping.KEYS),
                    default="line",
                    show_default=True,
                    help="Group by this.",
                )
            )
        for decorator in decorators:
            function = decorator(function)
        return function

    return add


def one_line_errors(function: _Function) -> _Function:
    """Turn a file that is no snapshot, and a bad value, into one line on stderr.

    The exit code is 1 for a file, 2 for a value.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except SnapshotError as error:
            raise click.ClickException(str(error)) from None
        except ValueError as error:
            raise click.UsageError(str(error)) from None
        except OverflowError as error:
            raise click.ClickException(f"a number is out of range: {error}") from None
        except MemoryError:
            raise click.ClickException("out of memory") from None

    return call  # type: ignore[return-value]


def read(path: str, device: int | None = None) -> history.History:
    """Read a snapshot, and say so on a terminal while it takes long."""
    with working(f"reading {path}"):
        return history.read(path, device)


def moment_name(at: int | None) -> str:
    """Return what the moment of `--at` is called."""
    return "Peak" if at is None else f"After entry {at}"


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show what is being done, on stderr if that is a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(what):
        yield


def show(report: dict[str, Any], as_json: bool, *parts: RenderableType) -> None:
    """Print a report, as JSON or as its rendered parts."""
    # A name that this terminal can't show is no reason to fail.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        if as_json:
            json.dump(report, sys.stdout, indent=2, allow_nan=False)
            sys.stdout.write("\n")
        else:
            console = Console(highlight=False)
            if not console.is_terminal and "COLUMNS" not in os.environ:
                console = Console(highlight=False, width=160)  # for files and pipes
            for part in parts:
                console.print(part)
        sys.stdout.flush()
    except BrokenPipeError:
        # `mlxmem summary out.pickle | head`: no message, as other tools do.
        sys.stdout = None
        raise SystemExit(1) from None
