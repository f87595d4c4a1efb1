"""Contract tests use the hand-made recordings of the unit tests."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "unit"))
