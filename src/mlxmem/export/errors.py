"""What an export can't do."""

from __future__ import annotations


class ExportError(RuntimeError):
    """A format that can't be written here; the message is one line and says why."""
