"""`mlxmem doctor`: whether recording works here."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import click
from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from mlxmem import doctor
from mlxmem._hook import Fact
from mlxmem.commands import _report
from mlxmem.commands._help import examples
from mlxmem.reports import render

_SITE = re.compile(r"/[^ :]*/(?:site|dist)-packages/")


@click.command(
    short_help="Check whether recording works here.",
    epilog=examples(
        "mlxmem doctor",
        "mlxmem doctor --verbose > report.txt           for a bug report",
        "mlxmem doctor --json | jq .works",
    ),
)
@click.option("-v", "--verbose", is_flag=True, help="List every fact.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(verbose: bool, as_json: bool) -> None:
    """Check whether recording works here, and say what was found.

    Checks the facts about MLX that recording relies on, and records a tiny program in
    a process of its own, where all must be to the byte what MLX says.

    The exit code is 0 if recording works, else 1.
    """
    with _report.working("checking whether recording works"):
        found = doctor.examine(doctor.LIMIT_S)
    _report.show(found.as_json(), as_json, *parts(found, verbose))
    if not found.works:
        raise SystemExit(1)


def parts(found: doctor.Examination, verbose: bool = False) -> list[RenderableType]:
    """Return what is printed."""
    shown: list[RenderableType] = []
    if found.problem is None:
        shown += [Text("Recording works here.", style="bold green")]
    else:
        shown += [Text("Recording does not work here.", style="bold red")]
        shown += [_indented(found.problem.text), _indented(found.problem.advice)]
    shown += [Text(), *_pairs("System", _system(found))]
    if found.variables:
        shown += [Text(), *_pairs("Environment", found.variables)]
    if found.facts:
        shown += [Text(), *_facts(found.facts, verbose)]
    if found.patches:
        shown += [Text(), *_patches(found)]
    if found.comparisons:
        shown += [Text(), *_comparisons(found)]
    if found.problem and found.problem.details:
        shown += [Text(), Text(f"While {found.problem.step}", style="bold")]
        shown += [Text(line, overflow="fold") for line in found.problem.details]
    return shown


def _system(found: doctor.Examination) -> dict[str, str]:
    names = {"version": "MLX", "file": "from", "device": "device", "backend": "backend"}
    pairs = dict(found.system)
    pairs |= {
        name: _short(found.mlx[key]) for key, name in names.items() if key in found.mlx
    }
    if found.packages:
        pairs["packages"] = ", ".join(map(" ".join, found.packages.items()))
    return pairs


def _pairs(title: str, pairs: Mapping[str, str]) -> list[RenderableType]:
    width = max(map(len, pairs))
    lines: list[RenderableType] = [Text(title, style="bold")]
    for name, value in pairs.items():
        lines.append(_indented(value, f"{name:{width}}  "))
    return lines


def _indented(text: str, label: str = "") -> RenderableType:
    return _moved(Text(f"{label}{text}"), 2)


def _moved(text: Text, columns: int) -> RenderableType:
    text.overflow = "fold"
    return Padding(text, (0, 0, 0, columns), expand=False)


def _facts(facts: list[Fact], verbose: bool) -> list[RenderableType]:
    failed = [fact for fact in facts if not fact.holds]
    end = "the last one does not hold" if failed else "all hold"
    title = f"Facts checked: {len(facts)}, {end}"
    shown: list[RenderableType] = []
    if verbose:
        shown.append(Text(title, style="bold"))
        group = None
        for fact in facts:
            if fact.group != group:
                shown.append(_indented(f"{fact.group}:"))
                group = fact.group
            shown.append(_fact(fact))
        return shown
    counts = Counter(fact.group for fact in facts)
    rows = [(render.count(count), group) for group, count in counts.items()]
    shown += _table(title, ("facts", "about"), rows)
    shown += [_fact(fact) for fact in failed]
    return shown


def _fact(fact: Fact) -> RenderableType:
    if fact.holds:
        text = f"{fact.text}: {fact.found}" if fact.found else fact.text
        return _moved(Text(_short(text)), 4)
    lines = [
        "does not hold:",
        f"  fact:  {fact.text}",
        f"  found: {fact.found or 'nothing'}",
        f"  so:    {fact.otherwise}",
    ]
    text = _short("\n".join(lines))
    return _moved(Text(text, style="red"), 2)


def _patches(found: doctor.Examination) -> list[RenderableType]:
    total = sum(patch.count for patch in found.patches)
    rows = [
        (
            render.count(patch.count),
            f"{patch.what}, {_short(patch.library)}" if patch.library else patch.what,
        )
        for patch in found.patches
    ]
    title = f"Words that recording patches: {render.count(total)}"
    return _table(title, ("words", "what, and in which library"), rows)


def _comparisons(found: doctor.Examination) -> list[RenderableType]:
    wrong = sum(not each.agrees for each in found.comparisons)
    end = f"{wrong} differ" if wrong else "all agree"
    rows: list[tuple[Any, ...]] = []
    for each in found.comparisons:
        style = "" if each.agrees else "red"
        cells = (_value(each.recorded), _value(each.expected), each.what)
        rows.append(tuple(Text(cell, style=style) for cell in cells))
    title = f"A tiny program, recorded: {len(rows)} comparisons, {end}"
    return _table(title, ("recorded", "expected", "what"), rows)


def _table(
    title: str, columns: tuple[str, ...], rows: Sequence[Sequence[Any]]
) -> list[RenderableType]:
    # A table's own title has no more columns than the table.
    return [Text(title, style="bold"), render.table("", columns, rows)]


def _value(value: Any) -> str:
    return render.count(value) if isinstance(value, (int, float)) else str(value)


def _short(text: str) -> str:
    return _SITE.sub("", text)
