"""Makes what the checks for macOS share importable: checks.py and cross.py."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "macos"))
