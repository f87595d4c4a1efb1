from typing import Any

import numpy as np
import numpy.typing as npt

def numbers(
    entries: list[Any], key: str, unsigned: bool = False
) -> npt.NDArray[Any]: ...
def distinct(
    entries: list[Any], key: str
) -> tuple[npt.NDArray[np.int32], list[Any]]: ...
