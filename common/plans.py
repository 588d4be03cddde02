"""Plans of several actions, which environments execute open loop: one after another, without observing again."""

import numpy as np
from numpy.typing import NDArray

from common.evaluate import Act

Array = NDArray[np.float32]


class Plans:
    """The actions that each environment has left of its plan.

    A policy of chunks maps obs [n, obs_dim] to plans [n, h · action_dim] of h actions. h = 1 is a usual policy.
    Source: Li, Zhou and Levine 2025, "Reinforcement Learning with Action Chunking", arXiv 2507.07969.
    """

    def __init__(self, num_envs: int, action_dim: int) -> None:
        self.left: list[Array] = [np.empty((0, action_dim), np.float32)] * num_envs  # [0 to h, action_dim] each

    def act(self, policy: Act, obs: Array) -> Array:
        """Return the next action of each environment: [num_envs, action_dim].

        If one of them has none left, the policy plans for all. The others keep their plans.
        """
        if not all(map(len, self.left)):
            new = policy(obs).reshape(len(self.left), -1, self.left[0].shape[1])
            self.left = [old if len(old) else plan for old, plan in zip(self.left, new, strict=True)]
        actions = np.stack([plan[0] for plan in self.left])
        self.left = [plan[1:] for plan in self.left]
        return actions

    def drop(self, ended: NDArray[np.bool_]) -> None:
        """Forget the plans of the environments [num_envs] whose episode ended."""
        self.left = [plan[:0] if end else plan for plan, end in zip(self.left, ended, strict=True)]
