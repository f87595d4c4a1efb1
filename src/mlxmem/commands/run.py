"""`mlxmem run`: record a program from the import of mlx.core to its end.

The program runs in a Python of its own that takes the place of this one, so that
nothing about it differs: sys.argv, `__main__`, tracebacks, signals, the exit code. What
it needs to know travels in environment variables that it deletes again, and
`mlxmem/_site/sitecustomize.py` is what it runs first:

=====================  ==========================================================
MLXMEM_RUN_OUT         the file, as the user has given it, without a rank
MLXMEM_RUN_FOLDER      the folder that it is relative to
MLXMEM_RUN_PID         the process of the program; others are children
MLXMEM_RUN_MAX_ENTRIES events to keep, 0 = all
MLXMEM_RUN_NO_STACKS   set: no stacks
MLXMEM_RUN_QUIET       set: no line on stderr
MLXMEM_RUN_FOLLOW      set: children are recorded, too, and find these variables
MLXMEM_RUN_RANK        which rank of a distributed program this is, as it is shown
MLXMEM_RUN_PYTHONPATH  the user's own PYTHONPATH, where there is one
=====================  ==========================================================
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

import mlxmem
from mlxmem import distributed
from mlxmem.commands._help import examples
from mlxmem.dump_file import check_folder, check_path, check_target, is_plain

_SITE = os.path.join(os.path.dirname(os.path.abspath(mlxmem.__file__)), "_site")
_EXAMPLES = examples(
    "mlxmem run train.py --epochs 3",
    "mlxmem run -o out.pickle --unlimited -m my_package.train --lr 0.1",
    "mlxmem run -c 'import mlx.core as mx; mx.eval(mx.ones(10))'",
    "mlx.launch -n 2 -- mlxmem run -o out.pickle train.py",
)


class _RunCommand(click.Command):
    """Leaves all that follows the program's name to the program."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own, program = self._split(ctx, args)
        return super().parse_args(ctx, [*own, "--", *program])

    def _split(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[list[str], list[str]]:
        takes_value = {
            name: not option.is_flag
            for option in self.get_params(ctx)
            if isinstance(option, click.Option)
            for name in option.opts
        }
        at = 0
        while at < len(args):
            arg = args[at]
            if arg == "--":
                return args[:at], args[at + 1 :]
            if arg == "-" or not arg.startswith("-"):
                break
            at += 1
            if arg.startswith("--"):
                if takes_value.get(arg):
                    at += 1
                continue
            # Several short options can stand in one word, the last with its value.
            for place, letter in enumerate(arg[1:], 1):
                if not takes_value.get(f"-{letter}"):
                    continue
                if place == len(arg) - 1:
                    at += 1
                if letter in "mc":
                    return args[:at], args[at:]
                break
        return args[:at], args[at:]


@click.command(
    "run",
    cls=_RunCommand,
    epilog=_EXAMPLES,
    options_metavar="[OPTIONS]",
    add_help_option=True,
    short_help="Record a program, unchanged.",
)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    help="Where to write the recording; an existing file is replaced.  "
    "[default: mlxmem-<program>.<pid>.pickle]",
)
@click.option("-m", "module", metavar="MODULE", help="Run a module, as python -m does.")
@click.option("-c", "code", metavar="CODE", help="Run code, as python -c does.")
@click.option(
    "--max-entries",
    type=click.IntRange(min=0),
    default=100_000,
    show_default=True,
    metavar="N",
    help="Keep the last N events; 0 keeps all.",
)
@click.option("--unlimited", is_flag=True, help="Keep all events: --max-entries 0.")
@click.option("--no-stacks", is_flag=True, help="Don't record Python stacks.")
@click.option(
    "--follow-children",
    is_flag=True,
    help="Record child processes, too, a file each: out.<pid>.pickle.",
)
@click.option("-q", "--quiet", is_flag=True, help="No line on stderr at the end.")
@click.argument(
    "program",
    nargs=-1,
    type=click.UNPROCESSED,
    metavar="{SCRIPT | -m MODULE | -c CODE} [ARGS]...",
)
def command(
    output: str | None,
    module: str | None,
    code: str | None,
    max_entries: int,
    unlimited: bool,
    no_stacks: bool,
    follow_children: bool,
    quiet: bool,
    program: tuple[str, ...],
) -> NoReturn:
    """Run a Python program and record the memory of its MLX.

    Recording begins when the program imports mlx.core. The file is written when it
    ends: normally, by an exception, by Ctrl-C, SIGTERM or SIGHUP, and when MLX runs
    out of memory. The program's arguments, output and exit code are as without
    mlxmem; all that follows SCRIPT, MODULE or CODE belongs to it.

    Under mlx.launch each rank writes a file of its own: out.rank0.pickle.

    The exit code is the program's, or 2 when it was not started.
    """
    if module is not None and code is not None:
        raise click.UsageError("-m and -c can't be used together")
    if module is not None:
        command, name = ["-m", module, *program], module
    elif code is not None:
        command, name = ["-c", code, *program], "code"
    elif program:
        command = list(program)
        name = os.path.splitext(os.path.basename(os.path.realpath(program[0])))[0]
        if program[0] == "-":
            name = "stdin"
    else:
        raise click.UsageError("name a SCRIPT, or use -m MODULE or -c CODE")
    if sys.flags.isolated or sys.flags.ignore_environment or sys.flags.no_site:
        raise click.UsageError(
            "mlxmem run reaches the program by PYTHONPATH, which python's options -I, "
            "-E and -S turn off; start it without them"
        )
    if output is None:
        output = f"mlxmem-{_file_name(name)}.{os.getpid()}.pickle"
    try:
        target = check_path(output)
        rank = distributed.current()
        if rank and is_plain(output):
            target = distributed.with_rank(output, rank)
        check_target(target)
        check_folder(target)
    except OSError as error:
        raise click.BadParameter(
            f"{target!r} can't be written: {error.strerror}; name another file with -o",
            param_hint="'-o'",
        ) from None
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="'-o'") from None
    if follow_children and not is_plain(output):
        raise click.BadParameter(
            f"{output!r} is no plain file, and --follow-children writes one for each "
            "child beside it",
            param_hint="'-o'",
        )

    flags = {
        "NO_STACKS": no_stacks,
        "QUIET": quiet,
        "FOLLOW": follow_children,
    }
    variables = {
        "OUT": output,
        "FOLDER": os.getcwd(),
        "PID": str(os.getpid()),
        "MAX_ENTRIES": str(0 if unlimited else max_entries),
        **{name: "1" for name, on in flags.items() if on},
    }
    if rank:
        variables["RANK"] = str(rank)
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("MLXMEM_RUN_")
    }
    path = os.environ.get("PYTHONPATH")
    if path is not None:
        variables["PYTHONPATH"] = path
    # An empty entry would mean the current folder.
    environment["PYTHONPATH"] = f"{_SITE}{os.pathsep}{path}" if path else _SITE
    environment.update({f"MLXMEM_RUN_{name}": v for name, v in variables.items()})
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # closed by the one who started us
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
    os.execve(
        sys.executable, [sys.executable, *_python_options(), *command], environment
    )


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.-]", "_", name) or "program"


def _python_options() -> Sequence[str]:
    """Return the options that this Python was started with."""
    options: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    if getattr(sys.stdout, "write_through", False):
        options.append("-u")
    return options
