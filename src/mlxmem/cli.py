"""The command `mlxmem`; each verb is a module of `mlxmem.commands`."""

from __future__ import annotations

import importlib

import click

from mlxmem._version import __version__
from mlxmem.commands._help import examples

# A verb's module has a command `command`. It is imported when the verb is used:
# `mlxmem run` must not load what a report needs into the program that it runs.
VERBS = {
    "doctor": "doctor",
    "run": "run",
    "summary": "summary",
    "peak": "peak",
    "leaks": "leaks",
    "tree": "tree",
    "timeline": "timeline",
    "cache": "cache",
    "diff": "diff",
    "merge": "merge",
    "view": "view",
    "export": "export",
}


class _Verbs(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in VERBS:
            return None
        module = importlib.import_module(f"mlxmem.commands.{VERBS[name]}")
        command: click.Command = module.command
        return command


@click.group(
    cls=_Verbs,
    epilog=examples(
        "mlxmem doctor                                  does recording work here?",
        "mlxmem run -o out.pickle train.py --epochs 3   record a program",
        "mlxmem summary out.pickle                      who holds memory at the peak",
        "mlxmem leaks out.pickle                        what grows, what stayed",
        "mlxmem view out.pickle                         look at it in the browser",
    ),
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, package_name="mlxmem")
def main() -> None:
    """Record the memory of a program that uses MLX, and find out who holds it."""
