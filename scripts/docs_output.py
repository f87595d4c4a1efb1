"""Run the commands that the documentation shows, and write down what they print.

    python scripts/docs_output.py                      # renews all pages
    python scripts/docs_output.py docs/find-a-leak.md  # renews one
    python scripts/docs_output.py --check              # only runs: exit code 1 if one
                                                       # ends otherwise than shown

It needs mlxmem with its `cpu` extra, and `mlxmem` on the PATH. A page is Markdown, and
its comments say what is to be done, in the order of the page:

    <!-- file: train.py -->     the code block that follows is written to that file
    <!-- edit: train.py -->     the diff that follows is applied to that file
    <!-- run: COMMAND -->       the block that follows gets the command and its output
    <!-- run exit=2 lines=9: COMMAND -->   its exit code, and how much is shown of it
    <!-- hidden: COMMAND -->    is run, not shown
    <!-- needs: leak.pickle --> is made first, see RECIPES

All pages share one new folder in which the commands run.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
COLUMNS = 96

# How to make what several pages need: a command, or the page that shows it.
RECIPES: dict[str, str | Path] = {
    "train.pickle": "mlxmem run -q -o train.pickle --unlimited "
    "train_transformer.py --no-record --steps 3",
    "leak.pickle": DOCS / "find-a-leak.md",
    "fixed.pickle": DOCS / "find-a-leak.md",
    "steps.pickle": DOCS / "tune-the-cache.md",
    "ranks.rank0.pickle": DOCS / "distributed.md",
}

_STEP = re.compile(
    r"^<!-- (?P<what>file|edit|run|hidden|needs)(?P<options>( \w+=\d+)*): (?P<rest>.+?)"
    r" -->\n(?P<fence>```\w*[^\n]*\n(?P<body>.*?)^```\n)?",
    re.MULTILINE | re.DOTALL,
)


class StepError(Exception):
    """A step of a page that went otherwise than the page says."""


class Workspace:
    """The folder in which the commands of all pages run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self._pages: dict[Path, str] = {}
        for program in (ROOT / "examples").glob("*.py"):
            shutil.copy(program, self.folder)

    def renew(self, page: Path) -> str:
        """Do what a page says, once, and return its text with the new output."""
        if page not in self._pages:
            self._pages[page] = _STEP.sub(self._step, page.read_text())
        return self._pages[page]

    def _step(self, match: re.Match[str]) -> str:
        what, rest, body = match["what"], match["rest"], match["body"]
        if what == "needs":
            self._need(rest)
        elif what == "hidden":
            self._run(rest, 0)
        elif body is None:
            raise StepError(f"no code block follows {match[0].strip()!r}")
        elif what == "file":
            (self.folder / rest).write_text(body)
        elif what == "edit":
            self._edit(self.folder / rest, body)
        else:
            return self._shown(match)
        return match[0]

    def _need(self, name: str) -> None:
        if (self.folder / name).exists():
            return
        recipe = RECIPES[name]
        if isinstance(recipe, Path):
            self.renew(recipe)
        else:
            self._run(recipe, 0)

    def _edit(self, path: Path, diff: str) -> None:
        lines = diff.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] in " -")
        new = "".join(line[1:] for line in lines if line[0] in " +")
        text = path.read_text()
        if text.count(old) != 1:
            raise StepError(f"{path.name} has not once the lines of a diff:\n{old}")
        path.write_text(text.replace(old, new))

    def _shown(self, match: re.Match[str]) -> str:
        words = dict(word.split("=") for word in match["options"].split())
        output = self._run(match["rest"], int(words.get("exit", 0)))
        lines = [line.rstrip() for line in output.rstrip().splitlines()]
        limit = int(words.get("lines", 0))
        if limit and len(lines) > limit:
            lines = [*lines[:limit], "..."]
        head, _, _ = match[0].partition("\n")
        text = "\n".join([f"$ {match['rest']}", *lines])
        return f"{head}\n```text\n{text}\n```\n"

    def _run(self, command: str, expected: int) -> str:
        scripts = sysconfig.get_path("scripts")
        environment = os.environ | {
            "PATH": f"{scripts}{os.pathsep}{os.environ.get('PATH', '')}",
            "COLUMNS": str(COLUMNS),
            "TERM": "dumb",
        }
        print(f"  $ {command}", flush=True)
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode != expected:
            raise StepError(
                f"{command!r} ended with {done.returncode}, not {expected}:\n"
                f"{done.stdout}"
            )
        # A reader's machine has other folders than this one.
        output = done.stdout.replace(str(self.folder), "/home/me/project")
        return output.replace(sys.prefix, "/home/me/.venv")


def main() -> int:
    """Renew pages, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pages", nargs="*", type=Path, help="default: all")
    parser.add_argument("--check", action="store_true", help="change no page")
    options = parser.parse_args()
    pages = [page.resolve() for page in options.pages] or sorted(DOCS.rglob("*.md"))
    with tempfile.TemporaryDirectory(prefix="docs-") as folder:
        workspace = Workspace(Path(folder))
        for page in pages:
            if not _STEP.search(page.read_text()):
                continue
            print(page.relative_to(ROOT), flush=True)
            try:
                text = workspace.renew(page)
            except StepError as error:
                print(f"{page.relative_to(ROOT)}: {error}", file=sys.stderr)
                return 1
            if not options.check:
                page.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
