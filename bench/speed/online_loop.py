"""The loop around a plain learner: act, store, update, without evaluation, log or checkpoint."""

import itertools
import sys
from collections.abc import Callable
from typing import Protocol

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import flatdim
from torch import Tensor

from common.replay_buffer import Batch, ReplayBuffer


class Learner(Protocol):
    def act(self, obs: Tensor) -> Tensor:
        """Return actions [n, action_dim] for obs [n, obs_dim]."""

    def update(self, batch: Batch) -> None: ...


def run(learner_of: Callable[[int, int], Learner], batch_size: int) -> None:
    """Train a learner, made from obs_dim and action_dim, until killed, in the environment of the command line.

    It is updated once for each step, on `batch_size` transitions, as soon as there are more.
    """
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    env = gymnasium.make(sys.argv[1])
    obs_dim, action_dim = flatdim(env.observation_space), flatdim(env.action_space)
    learner, buffer = learner_of(obs_dim, action_dim), ReplayBuffer(1_000_000, obs_dim, action_dim)
    obs, _ = env.reset(seed=0)
    for step in itertools.count(1):
        with torch.no_grad():
            action = learner.act(torch.as_tensor(obs, dtype=torch.float32)[None]).numpy()
        next_obs, reward, terminated, truncated, _ = env.step(action[0])
        buffer.add(obs[None], action, np.array([reward]), next_obs[None], np.array([terminated]))
        obs = env.reset()[0] if terminated or truncated else next_obs
        if step > batch_size:
            learner.update(buffer.sample(batch_size, generator))
