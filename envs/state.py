"""Save and restore the exact state of any environment, without knowledge of its simulator.

A state holds every random generator as it was just before the last reset, the reset's arguments, and the actions since.
To restore it, set the generators, reset and replay. MuJoCo's own integration state is not enough. Some rewards read
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

# The entries of a saved state, with their types.
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
    """Yield `env` and every environment inside it, with attribute paths: a maze holds an ant with its own generator."""
    seen = set() if seen is None else seen
    if id(env) in seen:  # an inner environment may refer to the outer one
        return
    seen.add(id(env))
    yield path, env
    for name, value in list(vars(env).items()):
        if isinstance(value, gym.Env):
            yield from _environments(value, f"{path}.{name}", seen)


def _generators(env: Env) -> dict[str, str]:
    """Return the state of every generator in `env`, by attribute path, as JSON because it holds 128-bit integers."""
    found = {}
    for path, owner in _environments(env):
        if not isinstance(owner, gym.Wrapper):
            own = owner.np_random  # made at first use: make it now, so that even an unseeded first episode is replayed
            if isinstance(own, np.random.RandomState):  # dm_control's, as Shimmy gives it; it is no attribute
                found[f"{path}.np_random"] = _text(own.get_state(legacy=False))
        for name, value in vars(owner).items():
            if isinstance(value, np.random.Generator):
                found[f"{path}.{name}"] = _text(value.bit_generator.state)
            elif isinstance(value, np.random.RandomState):
                found[f"{path}.{name}"] = _text(value.get_state(legacy=False))
    return found


def evaluation_generators(env: Env) -> dict[str, str]:
    """Return the state of every generator in `env` but the one that `reset(seed=…)` sets, by attribute path."""
    base = next(path for path, owner in _environments(env) if owner is env.unwrapped)
    seeded = f"{base}.np_random", f"{base}._np_random"
    return {path: state for path, state in _generators(env).items() if path not in seeded}


def _text(state: Any) -> str:
    return json.dumps(state, default=np.ndarray.tolist)


def set_generators(env: Env, states: dict[str, str]) -> None:
    """Set the generators at these paths. Raises InputError if `states` are those of another environment."""
    owners = dict(_environments(env))
    for path, text in states.items():
        owner, name = path.rpartition(".")[::2]
        try:
            state = json.loads(text)
            if "has_gauss" in state:  # of a RandomState
                getattr(owners[owner], name).set_state(state)
                continue
            generator = vars(owners[owner]).get(name)
            kind = getattr(np.random, state["bit_generator"])
            if not isinstance(generator, np.random.Generator) or type(generator.bit_generator) is not kind:
                generator = np.random.Generator(kind())
                setattr(owners[owner], name, generator)
            generator.bit_generator.state = state  # in place: two environments may share one generator
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
            raise InputError(
                f"The saved random generator {path} does not fit this environment: it is the state of another one."
            ) from None


class ExactState(gym.Wrapper[Array, Array, Array, Array], RecordConstructorArgs):
    """Records what restores the environment exactly. Make it the outermost wrapper. It costs about 1 µs a step.

    The actions of the current episode are kept, so an environment without a time limit grows by one action a step.
    Generators (`np.random.Generator` and `RandomState`) are covered if the environment, or one inside it, has them as
    attributes. `set_state` detects other randomness, and what else is carried from one episode to the next, if it has
    changed the episode so far. It then returns False.
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
        """Start a new episode, or restore `next_state` if that is set: `info["exact"]` is then `set_state`'s result."""
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
        """Return everything that `set_state` needs, as plain values, dicts and numpy arrays, without pickle.

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
        """Restore `state` and return whether the result is bit-identical.

        Compared are the observation, the episode's return so far, whether it has ended, and every generator's state. If
        one differs, the environment is not reproducible. It then starts a new episode with the saved generators, and
        the result is False. Raises InputError if `state` is not a state of such an environment.
        """
        self._check(state)
        set_generators(self.env, state["generators_before"])
        self.reset(seed=state["seed"], options=copy.deepcopy(state["options"]))
        for action in state["actions"]:
            if self._done:  # only if the replay has diverged: another step could raise
                break
            self.step(action)
        now = self.get_state()
        exact = bool(now["generators"] == state["generators"]) and all(
            np.asarray(now[key]).tobytes() == np.asarray(state[key]).tobytes() for key in ("obs", "return", "done")
        )
        if not exact:
            set_generators(self.env, state["generators"])
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
    """Return the state of each sub-environment. Raises InputError before the first reset."""
    if isinstance(envs, EnvPool):  # its state is not accessible
        return [{"seed": seed} for seed in envs.next_seeds()]
    try:
        return list(envs.call("get_state"))  # type: ignore[attr-defined]
    except AttributeError:
        raise InputError("These environments cannot be saved: make them with envs.make.make_vector.") from None


def set_states(envs: VectorEnv[Array, Array, Array], states: list[dict[str, Any]]) -> tuple[Array, list[bool]]:
    """Restore each sub-environment. Return the observations [num_envs, obs_dim], and for each whether it is exact.

    One that is not exact is at the start of a new episode. Raises InputError if `states` do not fit.
    """
    if len(states) != envs.num_envs:
        raise InputError(f"{len(states)} environments were saved, but there are {envs.num_envs} now.")
    if isinstance(envs, EnvPool):
        return envs.reset(seed=[state["seed"] for state in states])[0], [False] * envs.num_envs
    # By a reset, so that the vector environment's own record of observations and ended episodes is updated too.
    envs.set_attr("next_state", states)  # type: ignore[attr-defined]
    obs, info = envs.reset()
    return obs, info["exact"].tolist()
