"""The linear transform of rewards, the same for a dataset and for online transitions."""

from typing import Any, NamedTuple, TypeVar

from numpy.typing import NDArray

Rewards = TypeVar("Rewards", float, NDArray[Any])


class RewardTransform(NamedTuple):
    """scale · r + shift, for one reward or an array."""

    scale: float = 1.0
    shift: float = 0.0

    def __call__(self, rewards: Rewards) -> Rewards:
        """Return the transformed rewards, of the same shape."""
        return rewards * self.scale + self.shift


IDENTITY = RewardTransform()
