"""What a dataset file holds, before it becomes a replay buffer: its facts at once, its transitions in blocks."""

import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class Block(NamedTuple):
    """n consecutive transitions: obs and next_obs [n, obs_dim], actions [n, action_dim] in the environment's own units,
    rewards and terminations [n].
    """

    obs: Array
    actions: Array
    rewards: Array
    next_obs: Array
    terminations: Array


@dataclass
class Recording:
    """Transitions as they were recorded, episode after episode: nothing scaled, clipped or checked for finiteness."""

    id: str
    obs_dim: int
    action_dim: int
    ends: NDArray[np.int64]
    """[episodes]: one past each episode's last transition, ascending; the last is the number of transitions."""
    lost_rewards: NDArray[np.float64]
    """[episodes]: the reward of an episode's last step where that step is not among the transitions, else NaN."""
    blocks: Callable[[], Iterator[Block]]
    """Reads all transitions, in order."""
    rewards: Callable[[], Array]
    """Reads their rewards alone."""
    env: str | None = None
    """The environment that evaluates it, as `envs.make.make` takes it."""
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments for its constructor."""
    action_low: Array | float = -1.0
    action_high: Array | float = 1.0
    """The environment's own box of actions, [action_dim] or the same for all."""
    reference: tuple[float, float] | None = None
    """Returns that stand for the scores 0 and 100."""
    version: tuple[Any, ...] = ()
    """What changes when the files do."""

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def returns(self) -> NDArray[np.float64]:
        """Undiscounted return of each episode [episodes], its lost reward included."""
        return np.add.reduceat(self.rewards().astype(np.float64), self.starts) + np.nan_to_num(
            self.lost_rewards, posinf=np.inf, neginf=-np.inf
        )

    @property
    def starts(self) -> NDArray[np.int64]:
        """[episodes]: each episode's first transition."""
        return np.concatenate([[0], self.ends[:-1]])


def nearest(name: str, known: list[str]) -> str:
    """The known ids that look like `name`, as the end of an error message."""
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f": did you mean {', '.join(close)}?" if close else ": give a D4RL id, a Minari id or the path of a file"


def trusted_environment(name: object) -> str | None:
    """The environment that a dataset names, unless making it would import a module of the dataset's choice."""
    return name if isinstance(name, str) and name.rpartition(":")[0] in ("", "offline.environments") else None
