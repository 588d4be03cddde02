"""The environments of a run: those for training, which are stepped together, and those for evaluation."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from gymnasium.spaces import flatdim
from numpy.typing import NDArray

from common.acting import uniform_actions
from common.arguments import RunArgs
from common.checkpoint import RESTORE_OR_RESTART, Part
from common.errors import InputError, require_finite
from common.evaluate import MAX_EVAL_ENVS, Act, Episode, evaluate
from common.plans import Plans
from common.schema import Schema
from common.seeding import seeds
from common.timings import Timings
from envs.make import make, make_vector
from envs.settings import require_constructor_arguments
from envs.state import evaluation_generators, get_states, set_generators, set_states
from envs.vector import AsyncEnvs, Step

Array = NDArray[np.float32]


class Transitions(NamedTuple):
    """One transition of each environment.

    obs and next_obs are [num_envs, obs_dim], actions [num_envs, action_dim] as they were chosen. rewards, terminations
    and truncations are [num_envs]. At an episode's end, next_obs is the true successor.
    """

    obs: Array
    actions: Array
    rewards: NDArray[np.float64]
    next_obs: Array
    terminations: NDArray[np.bool_]
    truncations: NDArray[np.bool_]


def nothing() -> None:
    """Do nothing while the environments step."""


class Rollout(Part):
    """Steps the environments, resets those whose episode ended, and keeps the statistics of training episodes."""

    schema: ClassVar[Schema] = {
        "envs": [{str: object}], "steps": int, "returns": [float], "lengths": [int], "finished": [(float, int)],
        "plans?": [np.ndarray], "evaluation?": [{str: str}],
    }  # fmt: skip

    def __init__(self, env: str, args: RunArgs, settings: dict[str, Any] | None = None) -> None:
        """Make the environments: `env` and `settings` are for `envs.make.make`. By default, they are the flags'.

        Raises InputError as `make` does.
        """
        settings = args.env_settings if settings is None else settings
        require_constructor_arguments(settings)
        self.envs = make_vector(env, args.num_envs, args.seed, vectorizer=args.vectorizer, **settings)
        self._eval_envs = [make(env, **settings) for _ in range(min(MAX_EVAL_ENVS, args.eval_episodes))]
        self._eval_generators = [evaluation_generators(env) for env in self._eval_envs]  # before each evaluation
        self._eval_seeds = seeds(args.seed, "evaluation", args.eval_episodes)
        self.obs_dim = flatdim(self.envs.single_observation_space)
        self.action_dim = flatdim(self.envs.single_action_space)
        self.obs: Array  # [num_envs, obs_dim], on which the policy acts next
        self.steps = 0  # environment steps so far, summed over all environments
        self.exact = [True] * args.num_envs  # whether `load` restored each environment bit for bit
        self._returns, self._lengths = np.zeros(args.num_envs), np.zeros(args.num_envs, np.int64)
        self._finished: list[tuple[float, int]] = []  # return and length of episodes since the last `statistics`
        self._plans = Plans(args.num_envs, self.action_dim)
        self._timings = Timings()

    def reset(self) -> None:
        """Start the first episodes."""
        self.obs, _ = self.envs.reset()

    def act(self, policy: Act) -> Array:
        """Return each environment's next action, for a policy that plans several at once (`Plans.act`)."""
        return self._plans.act(policy, self.obs)

    def step(self, actions: Array, meanwhile: Callable[[], None] = nothing) -> Transitions:
        """Step every environment and return what happened. `meanwhile` runs first, or while other processes step.

        The environments get the actions clipped to [-1, 1].
        """
        result = self._step(actions.clip(-1.0, 1.0), meanwhile)
        next_obs, rewards, terminations, truncations, _ = result
        require_finite(self.steps, next_obs=next_obs, rewards=rewards)
        transitions = Transitions(self.obs, actions, rewards, next_obs, terminations, truncations)
        self.steps += len(rewards)
        self._returns += rewards
        self._lengths += 1
        dones = terminations | truncations
        self.obs = next_obs
        if dones.any():
            self._finished += zip(self._returns[dones].tolist(), self._lengths[dones].tolist(), strict=True)
            self._returns[dones], self._lengths[dones] = 0.0, 0
            self._plans.drop(dones)
            self.obs, _ = self.envs.reset(options={"reset_mask": dones})
        return transitions

    def _step(self, actions: Array, meanwhile: Callable[[], None]) -> Step:
        if not isinstance(self.envs, AsyncEnvs):
            meanwhile()
            with self._timings("env_step"):
                return self.envs.step(actions)
        with self._timings("env_step"):  # includes `meanwhile` if that takes longer
            self.envs.step_async(actions)
            meanwhile()
            return self.envs.step_wait()

    def random_actions(self, generator: torch.Generator) -> Array:
        """Return uniform actions [num_envs, action_dim] in [-1, 1]."""
        return uniform_actions(self.envs.num_envs, self.action_dim, generator)

    def evaluate(self, policy: Act) -> list[Episode]:
        """Run the evaluation episodes and return them. Their starts are the same each time; training is unchanged."""
        for env, states in zip(self._eval_envs, self._eval_generators, strict=False):
            set_generators(env, states)
        return evaluate(policy, self._eval_envs, self._eval_seeds)

    def statistics(self) -> dict[str, float]:
        """Return the means of the training episodes that ended since the last call, and the time of a step."""
        means: dict[str, float] = {}
        if self._finished:
            returns, lengths = zip(*self._finished, strict=True)
            means = {
                "charts/episodic_return": float(np.mean(returns)),
                "charts/episodic_length": float(np.mean(lengths)),
            }
            self._finished.clear()
        return means | self._timings.take()

    def save(self, folder: Path) -> dict[str, Any]:
        """Return the exact state of the training environments and the statistics, and the generators of evaluations."""
        return {
            "envs": get_states(self.envs),
            "steps": self.steps,
            "returns": self._returns.tolist(),
            "lengths": self._lengths.tolist(),
            "finished": [list(episode) for episode in self._finished],
            "plans": self._plans.left,
            "evaluation": self._eval_generators if any(self._eval_generators) else [],  # else the number is no state
        }

    def load(self, folder: Path, state: dict[str, Any]) -> None:
        """Restore what `save` returned. `exact` [num_envs] is False for environments that start a new episode."""
        try:
            if not len(state["returns"]) == len(state["lengths"]) == self.envs.num_envs:
                raise InputError(
                    f"It has {len(state['returns'])} returns, but there are {self.envs.num_envs} environments."
                )
            self.obs, self.exact = set_states(self.envs, state["envs"])
        except InputError as error:
            raise InputError(f"{folder.parent} does not fit the environment: {RESTORE_OR_RESTART}\n{error}") from None
        self.steps = state["steps"]
        self._returns[:], self._lengths[:] = state["returns"], state["lengths"]
        self._finished = [(return_, length) for return_, length in state["finished"]]
        self._plans.left = state.get("plans", self._plans.left)
        self._eval_generators = state.get("evaluation", self._eval_generators)
        self.discard_unfinished_episodes(self.exact)

    def discard_unfinished_episodes(self, exact: list[bool]) -> None:
        """Forget what belongs to episodes that were not restored exactly (`exact` [num_envs]): new ones started."""
        restarted = np.logical_not(exact)
        self._returns[restarted], self._lengths[restarted] = 0.0, 0
        self._plans.drop(restarted)

    def close(self) -> None:
        """Close the environments and end their processes."""
        self.envs.close()
        for env in self._eval_envs:
            env.close()
