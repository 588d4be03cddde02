"""Normalised scores: 0 for a random policy and 100 for an expert, as a dataset's makers measured both.

Source: Fu et al. 2020, "D4RL", section 4. Minari's datasets hold their own constants for the same formula. The score of
an OGBench task is its success rate in per cent (Park et al. 2025, arXiv 2410.20092).
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from common.evaluate import Episode
from envs.ogbench import is_task
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


def scorer(
    env_id: str, between: tuple[float, float] | None
) -> Callable[[Sequence[Episode]], NDArray[np.float64]] | None:
    """Return a function that gives evaluation episodes their scores, or None if they have none.

    In OGBench's tasks, a success scores 100 and another episode 0. Elsewhere, returns score 0 and 100 at the two
    returns `between`.
    """
    if is_task(env_id.rpartition(":")[2]):
        return lambda episodes: 100.0 * np.array([bool(episode.success) for episode in episodes], np.float64)
    if between is None:
        return None
    return lambda episodes: normalized([episode.return_ for episode in episodes], between)
