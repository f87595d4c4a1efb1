"""The text of `--help`."""

from __future__ import annotations


def examples(*lines: str) -> str:
    """Return the last part of a help: examples, each on its line."""
    # click fills paragraphs, but not one that begins with this character.
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)
