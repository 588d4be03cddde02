"""Environments that step in parallel, each in its own process or all in EnvPool's threads.

Both kinds keep the contract of `envs.make.make_vector`, which makes them.
"""

import contextlib
import importlib
import os
import signal
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Box
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, VectorEnv
from gymnasium.vector.async_vector_env import _async_worker
from gymnasium.vector.utils import batch_space

from common.errors import InputError, RunError, require_finite_actions

Array = npt.NDArray[Any]
Step = tuple[Array, Array, Array, Array, dict[str, Any]]

# EnvPool's environments that are verified equal to Gymnasium's (test_envpool.py, docs/environments.md).
ENVPOOL_IDS = tuple(
    f"{name}-{version}"
    for name in ("Ant", "HalfCheetah", "Hopper", "InvertedPendulum", "Swimmer", "Walker2d")
    for version in ("v4", "v5")
)


class AsyncEnvs(AsyncVectorEnv[Array, Array]):
    """Gymnasium's AsyncVectorEnv without autoreset. Each of `env_fns` has a process, which ends with this one."""

    def __init__(self, env_fns: list[Any]) -> None:
        with self._alive():
            super().__init__(env_fns, worker=_work, autoreset_mode=AutoresetMode.DISABLED)

    def step_async(self, actions: Array) -> None:
        require_finite_actions(actions)  # here, because an error in a worker prints a traceback
        with self._alive():
            super().step_async(actions)

    def step_wait(self, timeout: float | None = None) -> Step:
        with self._alive():
            return super().step_wait(timeout)

    def reset(self, **kwargs: Any) -> tuple[Array, dict[str, Any]]:
        with self._alive():
            return super().reset(**kwargs)

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        with self._alive():
            return super().call(name, *args, **kwargs)

    def set_attr(self, name: str, values: Any) -> None:
        with self._alive():
            super().set_attr(name, values)

    def _raise_if_errors(self, successes: Iterable[bool]) -> None:
        """Raise an error of this project, or a lack of memory, unchanged, without Gymnasium's traceback."""
        successes = list(successes)
        failed = [self.error_queue.get() for success in successes if not success]
        for _, kind, error, trace in failed:
            if issubclass(kind, InputError | RunError | MemoryError):
                for process in self.processes:
                    process.terminate()
                self.closed = True  # otherwise Gymnasium would wait for their answers
                error.add_note(trace)
                raise error
        for each in failed:
            self.error_queue.put(each)
        super()._raise_if_errors(successes)

    @contextlib.contextmanager
    def _alive(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, ConnectionError):
            self.closed = True  # otherwise Gymnasium would wait for its answer; the other processes end with this one
            raise RunError(
                "the process of an environment was killed (is there enough memory for all of them?): "
                "run the same command: it resumes from the last checkpoint, if any"
            ) from None


def _work(*args: Any) -> None:
    os.setpgrp()  # a terminal's Ctrl-C and timeout's SIGTERM reach a whole group, but the run must write a checkpoint
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the parent was killed: end silently
        _async_worker(*args)


class EnvPool(VectorEnv[Array, Array, Array]):
    """`num_envs` of EnvPool's environment `env_id`, with float32 obs [num_envs, obs_dim] and actions in [-1, 1].

    Begin with `reset(seed=[...])`. Equal seeds give equal runs on any number of threads, but other episodes than
    Gymnasium's. Raises InputError if EnvPool is not installed, or if the id is not in ENVPOOL_IDS.
    """

    def __init__(self, env_id: str, num_envs: int) -> None:
        if env_id not in ENVPOOL_IDS:
            raise InputError(
                f"EnvPool's {env_id} is not verified equal to Gymnasium's: give --vectorizer sync or async.\n"
                f"Verified are {', '.join(ENVPOOL_IDS)}."
            )
        try:
            self._make = importlib.import_module("envpool").make_gymnasium
        except ImportError:
            raise InputError("--vectorizer envpool needs EnvPool: pip install envpool==1.2.5") from None
        self.num_envs, self._env_id = num_envs, env_id
        spec = importlib.import_module("envpool").make_spec(env_id)
        box = spec.gymnasium_action_space
        self._low, self._high = box.low, box.high
        self.single_action_space = Box(-1.0, 1.0, box.shape, np.float32)
        self.single_observation_space = Box(-np.inf, np.inf, spec.gymnasium_observation_space.shape, np.float32)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self._obs = np.zeros(self.observation_space.shape or (), np.float32)
        self._dones = np.zeros(num_envs, bool)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        """Start new episodes in all environments, or in those of `options["reset_mask"]`, bool [num_envs].

        `seed` is a list with a number in [0, 2³²) for each environment. It seeds everything random again.
        """
        if seed is not None:  # EnvPool takes seeds only at construction, and only of 31 bits
            self._pool = self._make(self._env_id, num_envs=self.num_envs, seed=[each >> 1 for each in seed])
            self._seeds, self._steps = list(seed), 0
        mask = options["reset_mask"] if options else np.ones(self.num_envs, bool)
        self._obs = self._obs.copy()
        self._obs[mask] = self._pool.reset(np.flatnonzero(mask).astype(np.int32))[0]
        self._dones = self._dones & ~mask
        return self._obs.copy(), {}

    def step(self, actions: Array) -> Step:
        require_finite_actions(actions)
        # EnvPool would use this step to reset them, and the action would be lost.
        assert not self._dones.any(), f"reset first what has ended: {np.flatnonzero(self._dones)}"
        own = self._low + (actions.astype(np.float64) + 1.0) / 2.0 * (self._high - self._low)
        obs, rewards, terminations, truncations, _ = self._pool.step(own)
        self._obs, self._dones, self._steps = obs.astype(np.float32), terminations | truncations, self._steps + 1
        return self._obs.copy(), rewards.astype(np.float64), terminations, truncations, {}

    def next_seeds(self) -> list[int]:
        """Return a seed for each environment, with which a run that resumes here does not repeat its first episodes."""
        streams = [np.random.SeedSequence([seed, self._steps]) for seed in self._seeds]
        return [int(stream.generate_state(1)[0]) for stream in streams]
