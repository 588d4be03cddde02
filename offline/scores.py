"""Normalised scores: 0 for a random policy and 100 for an expert, as a dataset's makers measured both.

Source: Fu et al. 2020, "D4RL", section 4. Minari's datasets hold their own constants for the same formula.
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from offline import d4rl, minari


def reference(name: str) -> tuple[float, float] | None:
    """Return the returns that score 0 and 100 for `name`, or None if they are unknown.

    They are known for D4RL's ids, for Minari datasets in Minari's folder that state them, and for environments whose
    returns D4RL measured. For Adroit's binary tasks that continue after success, they are those of no and all steps
    solved.
    """
    return d4rl.reference(name) or minari.reference(name)


def normalized(returns: ArrayLike, reference: tuple[float, float]) -> NDArray[Any]:
    """Return 100 · (return − low) / (high − low), for undiscounted returns of raw rewards, of any shape."""
    low, high = reference
    return 100.0 * (np.asarray(returns, np.float64) - low) / (high - low)
