from collections.abc import Callable
from typing import Any

def in_module(
    original: Any, paths: dict[int, str], enter: Callable[[str], str]
) -> Callable[..., Any]: ...
