"""Evaluation episodes, stepped together in environments of their own and with seeds of their own."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium.spaces import flatdim
from numpy.typing import NDArray

from common.errors import RunError

Act = Callable[[NDArray[Any]], NDArray[np.float32]]
MAX_EVAL_ENVS = 10  # most environments that an evaluation makes: one of OGBench's cubes takes 160 MB
MAX_EPISODE_STEPS = 100_000  # an episode that never ends would stall the run without a message


class EvaluationStopped(Exception):
    """A signal stopped the evaluation before its end. It has no result."""


def stoppable(act: Act, signal: Callable[[], int]) -> Act:
    """Return `act`, which raises EvaluationStopped once `signal()` is not 0."""

    def act_or_stop(obs: NDArray[Any]) -> NDArray[np.float32]:
        if signal():
            raise EvaluationStopped
        return act(obs)

    return act_or_stop


class Episode(NamedTuple):
    """Return, length in steps, and whether any step succeeded (None: the environment reports none).

    The return is the undiscounted sum of raw rewards, or the environment's own `info["return"]`.
    """

    return_: float
    length: int
    success: bool | None


def evaluate(act: Act, envs: Sequence[gym.Env[Any, Any]], seeds: Sequence[int]) -> list[Episode]:
    """Run an episode for each seed, as many at a time as there are environments, which are stepped together.

    `act` maps obs [n, obs_dim] to actions [n, action_dim], or to plans [n, h · action_dim] of the next h actions, which
    are executed open loop. Every call resets with the same seeds, so only the policy differs between evaluations. An
    evaluation keeps no state and does not affect training. Raises RunError if an episode does not end, or if an
    observation, a reward or `info["return"]` is not finite.
    """
    episodes: list[Episode] = []
    while len(episodes) < len(seeds):
        group = seeds[len(episodes) :][: len(envs)]
        episodes += _together(act, envs[: len(group)], group, len(episodes))
    return episodes


def _together(act: Act, envs: Sequence[gym.Env[Any, Any]], seeds: Sequence[int], first: int) -> list[Episode]:
    """Run one episode in each environment. `first` is the number of the first one, for messages."""
    obs = np.stack([env.reset(seed=seed)[0] for env, seed in zip(envs, seeds, strict=True)])
    returns, lengths = np.zeros(len(envs)), np.zeros(len(envs), np.int64)
    successes: list[bool | None] = [None] * len(envs)
    running, plans = np.arange(len(envs)), np.empty((0, 0, 0), np.float32)
    while len(running):
        is_running = np.ones(len(running), bool)
        if not plans.size:  # all running episodes are in the same step, and so in the same place of their plans
            plans = act(obs[running]).reshape(len(running), -1, flatdim(envs[0].action_space))
        for k, (i, action) in enumerate(zip(running.tolist(), plans[:, 0], strict=True)):
            obs[i], reward, terminated, truncated, info = envs[i].step(action)
            returns[i] = info.get("return", returns[i] + float(reward))
            lengths[i] += 1
            if not (math.isfinite(returns[i]) and np.isfinite(obs[i]).all()):
                what = "return" if math.isfinite(reward) else f"reward of {reward}"
                what = f'info["return"] of {returns[i]}' if "return" in info else what
                what = "observation" if math.isfinite(returns[i]) else what
                raise RunError(
                    f"the environment gave a non-finite {what} in step {lengths[i]:,} "
                    f"of evaluation episode {first + i}\n"
                    "check whether it diverges (actions, time step), or give another --env"
                )
            if "success" in info:
                successes[i] = bool(successes[i]) or bool(info["success"])
            is_running[k] = not (terminated or truncated)
        running, plans = running[is_running], plans[is_running, 1:]
        if len(running) and lengths[running[0]] >= MAX_EPISODE_STEPS:  # all running episodes have this length
            raise RunError(
                f"an evaluation episode did not end in {MAX_EPISODE_STEPS:,} steps: "
                "give a time limit, as --env-kwargs '{\"max_episode_steps\": 1000}'"
            )
    return [Episode(*episode) for episode in zip(returns.tolist(), lengths.tolist(), successes, strict=True)]
