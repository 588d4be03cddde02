"""One order for the entries of dict observations: Gymnasium keeps a space's own order, and Minari sorts by name."""

from typing import Any

import gymnasium as gym
from gymnasium.spaces import Dict, Space
from gymnasium.utils import RecordConstructorArgs


def alphabetical(space: Space[Any]) -> Space[Any]:
    """Return the space with the entries of each dict in alphabetical order."""
    if not isinstance(space, Dict):
        return space
    return Dict([(key, alphabetical(space[key])) for key in sorted(space, key=str)])


class Alphabetical(gym.ObservationWrapper[Any, Any, Any], RecordConstructorArgs):
    """Gives an environment the `alphabetical` space. The observations stay the same dicts."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        RecordConstructorArgs.__init__(self)
        gym.ObservationWrapper.__init__(self, env)
        self.observation_space = alphabetical(env.observation_space)

    def observation(self, observation: Any) -> Any:
        return observation


def in_alphabetical_order(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    """Return the environment, wrapped if the dicts of its observation space have another order."""
    is_sorted = repr(alphabetical(env.observation_space)) == repr(env.observation_space)
    return env if is_sorted else Alphabetical(env)
