"""What rounding sizes up would do for the cache."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
STEPS = (8, 4, 2, 1)  # sizes in each doubling, from fine to coarse


def round_up(sizes: Ints, steps: int) -> Ints:
    """Round sizes up so that each doubling has `steps` of them.

    Parameters
    ----------
    sizes : ndarray of int64, shape (n,)
        Bytes, below 2**53.
    steps : int
        A power of two; 1 gives powers of two.

    Returns
    -------
    ndarray of int64, shape (n,)

    Examples
    --------
    >>> round_up(np.array([1000, 1025, 1200]), 4)
    array([1024, 1280, 1280])
    """
    _, exponent = np.frexp(sizes.astype(np.float64))
    power: Ints = np.int64(1) << np.maximum(exponent.astype(np.int64) - 1, 0)
    unit = np.maximum(power // steps, 1)
    rounded: Ints = -(-sizes // unit) * unit
    return rounded
