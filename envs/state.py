"""The exact state of any environment, saved and restored without knowing its simulator.

A state is: every random generator as it was just before the last reset, the reset's arguments, and the actions since.
To restore it, set the generators, reset, replay. MuJoCo's own integration state would not do: some rewards read
quantities that lag behind it, and Adroit and the mazes keep state in Python and in the model.
"""

import copy
import json
from collections.abc import Iterator
from typing import Any, SupportsFloat

import gymnasium as gym
import numpy as np
from gymnasium.utils import RecordConstructorArgs
from gymnasium.vector import VectorEnv

from common.errors import InputError
from envs.vector import Array, EnvPool

Env = gym.Env[Any, Any]

# What a saved state holds.
KINDS = {
    "seed": int | None,
    "options": dict | None,
    "generators_before": dict,
    "generators": dict,
    "actions": np.ndarray,
    "obs": np.ndarray,
    "return": float,
    "done": bool,
}


def _environments(env: Env, path: str = "env", seen: set[int] | None = None) -> Iterator[tuple[str, Env]]:
    """`env`, what it wraps, and the environments those hold: a maze holds an ant, which has a generator of its own."""
    seen = set() if seen is None else seen
    if id(env) in seen:  # an inner environment may know the outer one
        return
    seen.add(id(env))
    yield path, env
    for name, value in list(vars(env).items()):
        if isinstance(value, gym.Env):
            yield from _environments(value, f"{path}.{name}", seen)


def _generators(env: Env) -> dict[str, str]:
    """The state of every generator under `env`, as JSON (it holds 128-bit integers), by its attribute path."""
    found = {}
    for path, owner in _environments(env):
        if not isinstance(owner, gym.Wrapper):
            _ = owner.np_random  # made at first use: make it now, so that even an unseeded first episode is replayed
        for name, value in vars(owner).items():
            if isinstance(value, np.random.Generator):
                found[f"{path}.{name}"] = json.dumps(value.bit_generator.state, default=np.ndarray.tolist)
    return found


def _set_generators(env: Env, states: dict[str, str]) -> None:
    owners = dict(_environments(env))
    for path, text in states.items():
        owner, name = path.rpartition(".")[::2]
        try:
            state = json.loads(text)
            generator = vars(owners[owner]).get(name)
            kind = getattr(np.random, state["bit_generator"])
            if not isinstance(generator, np.random.Generator) or type(generator.bit_generator) is not kind:
                generator = np.random.Generator(kind())
                setattr(owners[owner], name, generator)
            generator.bit_generator.state = state  # in place: two environments may share one generator
        except (AttributeError, KeyError, TypeError, ValueError):
            raise InputError(
                f"The saved random generator {path} does not fit this environment: it is the state of another one."
            ) from None


class ExactState(gym.Wrapper[Array, Array, Array, Array], RecordConstructorArgs):
    """Remembers what restores the environment exactly; wrap it outermost. Costs about 1 µs a step.

    The actions of the current episode are kept, so an environment without a time limit grows by one action a step.
    Covers generators (`np.random.Generator`) that are attributes of the environment or of environments inside it.
    One with other randomness, or that carries anything else from one episode into the next, is found out by
    `set_state`, which then returns False.
    """

    _obs: Array

    def __init__(self, env: Env) -> None:
        RecordConstructorArgs.__init__(self)
        gym.Wrapper.__init__(self, env)
        self._dtype = env.action_space.dtype
        self._start: dict[str, Any] | None = None
        self._done = False
        self.next_state: dict[str, Any] | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        """A new episode, or `next_state` where that was set: then `info["exact"]` is what `set_state` says."""
        if self.next_state is not None:
            state, self.next_state = self.next_state, None
            exact = self.set_state(state)
            return self._obs.copy(), {"exact": exact}
        start = {"generators_before": _generators(self.env), "seed": seed, "options": copy.deepcopy(options)}
        obs, info = self.env.reset(seed=seed, options=options)
        self._start, self._actions, self._obs, self._return, self._done = start, list[Array](), obs.copy(), 0.0, False
        return obs, info

    def step(self, action: Array) -> tuple[Array, SupportsFloat, bool, bool, dict[str, Any]]:
        assert not self._done, "the episode has ended: reset it first"
        action = np.asarray(action, self._dtype)
        self._actions.append(action.copy())  # a vector environment hands out views of the caller's array
        obs, reward, termination, truncation, info = self.env.step(action)
        self._obs = obs.copy()
        self._return += float(reward)
        self._done = termination or truncation
        return obs, reward, termination, truncation, info

    def get_state(self) -> dict[str, Any]:
        """Everything `set_state` needs: plain values, dicts and numpy arrays, nothing that needs pickle.

        Raises InputError before the first reset.
        """
        if self._start is None:
            raise InputError("This environment has no state to save yet: reset it first.")
        return copy.deepcopy(self._start) | {
            "generators": _generators(self.env),
            "actions": np.array(self._actions, self._dtype).reshape(-1, *(self.action_space.shape or ())),
            "obs": self._obs.copy(),
            "return": self._return,
            "done": bool(self._done),
        }

    def set_state(self, state: dict[str, Any]) -> bool:
        """Bring the environment to `state`; True if it is there bit for bit.

        Compared are the observation, the return of the episode so far, and where every generator stands. Where one
        differs the environment is not reproducible: it starts a new episode, its generators go on from the saved ones,
        and the answer is False. Raises InputError on what is not a state of such an environment.
        """
        self._check(state)
        _set_generators(self.env, state["generators_before"])
        self.reset(seed=state["seed"], options=copy.deepcopy(state["options"]))
        for action in state["actions"]:
            if self._done:  # only where the replay has gone astray: stepping on could raise
                break
            self.step(action)
        now = self.get_state()
        exact = bool(now["generators"] == state["generators"]) and all(
            np.asarray(now[key]).tobytes() == np.asarray(state[key]).tobytes() for key in ("obs", "return", "done")
        )
        if not exact:
            _set_generators(self.env, state["generators"])
            self.reset()
        return exact

    def _check(self, state: dict[str, Any]) -> None:
        for key, kind in KINDS.items():
            if not isinstance(state, dict) or not isinstance(state.get(key, ...), kind):
                raise InputError(f"This is not the saved state of an environment: {key!r} is missing or not as saved.")
        for key, space in (("actions", self.action_space), ("obs", self.observation_space)):
            shape = state[key].shape[1:] if key == "actions" else state[key].shape
            if (shape, state[key].dtype) != (space.shape, space.dtype):
                raise InputError(
                    f"The saved state is of another environment: its {key} are {state[key].dtype} of shape {shape}, "
                    f"here {space.dtype} of shape {space.shape}."
                )


def get_states(envs: VectorEnv[Array, Array, Array]) -> list[dict[str, Any]]:
    """The state of each sub-environment. Raises InputError before the first reset."""
    if isinstance(envs, EnvPool):  # gives no state out
        return [{"seed": seed} for seed in envs.next_seeds()]
    try:
        return list(envs.call("get_state"))  # type: ignore[attr-defined]
    except AttributeError:
        raise InputError("These environments cannot be saved: make them with envs.make.make_vector.") from None


def set_states(envs: VectorEnv[Array, Array, Array], states: list[dict[str, Any]]) -> tuple[Array, list[bool]]:
    """Restore each sub-environment: the current observations [num_envs, obs_dim], and for each whether it is exact.

    One that is not exact stands at the start of a new episode. Raises InputError where `states` do not fit.
    """
    if len(states) != envs.num_envs:
        raise InputError(f"{len(states)} environments were saved, but there are {envs.num_envs} now.")
    if isinstance(envs, EnvPool):
        return envs.reset(seed=[state["seed"] for state in states])[0], [False] * envs.num_envs
    # By a reset, so that the vector environment's own memory of observations and ended episodes follows.
    envs.set_attr("next_state", states)  # type: ignore[attr-defined]
    obs, info = envs.reset()
    return obs, info["exact"].tolist()
