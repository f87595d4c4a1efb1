"""One HTML file that shows a recording: no server, no network, nothing to install."""

from mlxmem.view.figure import figure, fragment
from mlxmem.view.page import render

__all__ = ["figure", "fragment", "render"]
