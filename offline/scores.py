"""Normalised scores: 0 for a random policy, 100 for an expert, as the dataset's makers measured both.

Source: Fu et al. 2020 (D4RL), section 4; the same formula with Minari's own constants, which its datasets carry.
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from offline import d4rl

# D4RL's constants belong to an environment: one id of each tells those of the environment that evaluates it today.
_ENVIRONMENTS = {
    "HalfCheetah-v4": "halfcheetah-medium-v2",
    "Hopper-v4": "hopper-medium-v2",
    "Walker2d-v4": "walker2d-medium-v2",
}


def reference(name: str) -> tuple[float, float] | None:
    """The returns that score 0 and 100 for a D4RL id, or for a Gymnasium environment whose returns D4RL measured.

    None where nobody published them.
    """
    entry = d4rl.IDS.get(_ENVIRONMENTS.get(name, name))
    return entry.reference if entry else None


def normalized(returns: ArrayLike, reference: tuple[float, float]) -> NDArray[Any]:
    """100 · (return − low) / (high − low), for undiscounted returns of raw rewards of any shape."""
    low, high = reference
    return 100.0 * (np.asarray(returns, np.float64) - low) / (high - low)
