import numpy as np
import numpy.typing as npt

from mlxmem.cache.outcomes import Totals
from mlxmem.cache.policies import Policy

ROW: np.dtype[np.void]
CACHED: np.dtype[np.void]

def predict(
    rows: npt.NDArray[np.void],
    cached: npt.NDArray[np.void],
    unknown: int,
    active: int,
    policy: Policy,
    *,
    fixed_limit: bool,
    outcomes: bool = False,
    curve: bool = False,
) -> tuple[
    Totals,
    npt.NDArray[np.uint8] | None,
    npt.NDArray[np.int64] | None,
    npt.NDArray[np.int64] | None,
]: ...
def follow(
    rows: npt.NDArray[np.void],
    cached: npt.NDArray[np.void],
    unknown: int,
    active: int,
    policy: Policy,
) -> tuple[
    Totals,
    npt.NDArray[np.uint8],
    npt.NDArray[np.int64],
    npt.NDArray[np.bool_],
    list[int],
]: ...
