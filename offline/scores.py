"""Normalised scores: 0 for a random policy, 100 for an expert, as a dataset's makers measured both.

Source: Fu et al. 2020, "D4RL", section 4. Minari's datasets carry constants of their own for the same formula.
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from offline import d4rl, minari


def reference(name: str) -> tuple[float, float] | None:
    """The returns that score 0 and 100: of one of D4RL's ids, of a Minari dataset that is here, or of an environment
    whose returns D4RL measured; of one of Adroit's binary tasks that go on, no step solved and all. None elsewhere.
    """
    return d4rl.reference(name) or minari.reference(name)


def normalized(returns: ArrayLike, reference: tuple[float, float]) -> NDArray[Any]:
    """100 · (return − low) / (high − low), for undiscounted returns of raw rewards, of any shape."""
    low, high = reference
    return 100.0 * (np.asarray(returns, np.float64) - low) / (high - low)
