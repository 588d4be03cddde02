"""Make an environment from its id, in the one form that every algorithm here takes."""

import contextlib
import difflib
import importlib
import importlib.util
import multiprocessing
import os
import sys
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, TypeGuard

import gymnasium as gym
import numpy as np
from farama_notifications import notifications
from gymnasium.spaces import Box, Dict
from gymnasium.utils import RecordConstructorArgs
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers import FlattenObservation, RescaleAction

from common.errors import InputError, RunError, Stopped, require_finite_actions
from common.messages import log
from common.seeding import seeds
from envs import ogbench
from envs.returned import entries, is_true, number, reason, short
from envs.spaces import in_alphabetical_order
from envs.state import Env, ExactState
from envs.vector import Array, AsyncEnvs, EnvPool

# The families of Gymnasium-Robotics. For their ids, an error names the missing package and not an unknown id.
ROBOTICS = ("AntMaze", "PointMaze", "Adroit", "FrankaKitchen", "Fetch", "Hand")
# What to install if an environment's package is missing. Gymnasium's MuJoCo environments also import imageio, which
# MuJoCo does not install. Those of Box2D also import pygame.
PINS = {
    "mujoco": "mujoco==3.11.0 imageio",
    "gymnasium_robotics": "gymnasium-robotics==1.4.2",
    "Box2D": "'gymnasium[box2d]==1.4.0'",
}
# Gymnasium-Robotics' notices by version. It would print them at each import, whatever is made. They are taken from it,
# and `_print_notice` prints them.
NOTICES = notifications.pop("gymnasium_robotics", {})


SUCCESS = ("success", "is_success")  # entries of `info`: mazes and Adroit; Fetch and Hand
NUMBERS = (bool, int, float, np.bool_, np.integer, np.floating)


class CanonicalEnv(gym.Wrapper[Array, Array, Any, Any], RecordConstructorArgs):
    """An environment with float32 observations, float32 actions in [-1, 1], and few entries in `info`.

    At each step, `info` holds `success` and `return`, if they are known. Training reads no other entries. They are
    dropped because a vector environment spends 1 µs a step to gather each: four in HalfCheetah-v4, nine in Ant-v4.
    With `all_infos`, every number is kept. `name`: the environment's id in messages.
    """

    def __init__(self, env: Env, all_infos: bool = False, name: str = "") -> None:
        RecordConstructorArgs.__init__(self, all_infos=all_infos, name=name)
        gym.Wrapper.__init__(self, env)
        self._all_infos, self._name = all_infos, str(name or (env.spec and env.spec.id))
        self._has_begun = False  # whether an episode has started
        self._dtype, self._shape = env.action_space.dtype, env.observation_space.shape
        self.action_space = Box(-1.0, 1.0, env.action_space.shape, np.float32)
        self.observation_space = Box(-np.inf, np.inf, env.observation_space.shape, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        try:
            obs, info = self.env.reset(seed=seed, options=options)
        except (InputError, RunError, MemoryError, Stopped):
            raise
        except (Exception, SystemExit) as error:
            why = reason(error)
            if self._has_begun:
                raise RunError(
                    f"{self._name} cannot start another episode: {why}\n"
                    "Correct its reset, then run the same command: it resumes from the last checkpoint, if any."
                ) from error
            raise InputError(
                f"{self._name} is created but cannot start an episode: {why}\n"
                "Check that its files exist, that its package fits MuJoCo, and that its reset returns obs and info."
            ) from error
        shaped, self._has_begun = self._shaped(obs), True
        if not np.isfinite(shaped).all():
            raise RunError(f"{self._name} starts an episode with a non-finite observation: correct its reset")
        return shaped, self._numbers(entries(info, self._name)) if self._all_infos else {}

    def step(self, action: Array) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        require_finite_actions(action)
        try:
            obs, reward, termination, truncation, info = self.env.step(np.asarray(action, self._dtype))
        except (InputError, RunError, MemoryError, Stopped):
            raise
        except (Exception, SystemExit) as error:
            raise RunError(
                f"{self._name} failed in a step: {reason(error)}\n"
                "Correct it, then run the same command: it resumes from the last checkpoint, if any."
            ) from error
        info = entries(info, self._name)
        kept = self._numbers(info) | self._evaluation_infos(info) if self._all_infos else self._evaluation_infos(info)
        ends = is_true("termination", termination, self._name), is_true("truncation", truncation, self._name)
        return self._shaped(obs), number("reward", reward, self._name), *ends, kept

    def close(self) -> None:
        try:
            self.env.close()
        except (MemoryError, Stopped):
            raise
        except (Exception, SystemExit) as error:  # no result depends on it
            log.warning(f"{self._name} failed to close: {reason(error)}")

    def _shaped(self, obs: Any) -> Array:
        try:
            shaped = np.array(obs, np.float32)
        except (TypeError, ValueError):
            raise InputError(f"{self._name} gave an observation that is no vector of numbers, {short(obs)}") from None
        if shaped.shape != self._shape:
            raise InputError(
                f"{self._name} gave an observation of shape {shaped.shape}, but its observation_space is {self._shape}"
            )
        return shaped

    def _numbers(self, info: dict[str, Any]) -> dict[str, Any]:
        """Return the entries that are one number, as float or np.bool_: a vector environment keeps these types apart.

        "/" in a name becomes ".", because HDF5 would nest it. Names that begin with "_" are left out, because they are
        a vector environment's own.
        """
        numbers: dict[str, Any] = {}
        for name, value in info.items():
            if isinstance(name, str) and name[:1] != "_" and isinstance(value, NUMBERS):
                with contextlib.suppress(OverflowError):  # an int too large for a float
                    is_bool = isinstance(value, bool | np.bool_)
                    numbers[name.replace("/", ".")] = np.bool_(value) if is_bool else float(value)
        return numbers

    def _evaluation_infos(self, info: dict[str, Any]) -> dict[str, Any]:
        """Return what evaluations read: `success`, and `return` if that is not the sum of the rewards."""
        kept = {"return": number("return", info["return"], self._name)} if "return" in info else {}
        for key in SUCCESS:
            if key in info:
                return kept | {"success": is_true(key, info[key], self._name)}
        if "episode_task_completions" in info:  # Franka kitchen: success means all tasks
            kept["success"] = len(info["episode_task_completions"]) == len(self.get_wrapper_attr("goal"))
        return kept


class ActionRepeat(gym.Wrapper[Array, Array, Any, Any], RecordConstructorArgs):
    """Takes each action `times` times, until the episode ends, and sums the rewards.

    The step is a success if one of its steps is.
    """

    def __init__(self, env: Env, times: int) -> None:
        RecordConstructorArgs.__init__(self, times=times)
        gym.Wrapper.__init__(self, env)
        self.action_repeat = times

    def step(self, action: Array) -> tuple[Array, Any, bool, bool, dict[str, Any]]:
        total, successes, name = 0.0, dict[str, bool](), str(self.spec and self.spec.id)
        for _ in range(self.action_repeat):
            obs, reward, termination, truncation, info = self.env.step(action)
            total += number("reward", reward, name)
            found = {key: is_true(key, info[key], name) for key in SUCCESS if key in info}
            successes |= {key: value or successes.get(key, False) for key, value in found.items()}
            if is_true("termination", termination, name) or is_true("truncation", truncation, name):
                break
        return obs, total, termination, truncation, info | successes


class InBounds(gym.ActionWrapper[Array, Array, Array], RecordConstructorArgs):
    """Clips actions to the environment's box, because rescaling can round them out of it."""

    def __init__(self, env: Env) -> None:
        RecordConstructorArgs.__init__(self)
        gym.ActionWrapper.__init__(self, env)

    def action(self, action: Array) -> Array:
        box: Any = self.action_space
        return np.clip(action, box.low, box.high)


def make(env_id: str, all_infos: bool = False, **kwargs: Any) -> ExactState:
    """Make the environment `env_id`, ready for an agent: "Name-v0", or "module:Name-v0" to import its module first.

    - Observations: float32 [obs_dim]. A dict's entries are joined in alphabetical order, at each level.
    - Actions: float32 [action_dim] in [-1, 1], rescaled to the environment's own box.
    - `info["success"]`: bool, at each step, if the environment has the notion.
    - `info["return"]`: float, the episode's return so far, if that is not the sum of the rewards.

    With `all_infos`, `info` holds every other number too. The exact state of the environment can be saved and restored
    (`envs.state`).

    `kwargs` go to the environment's constructor, except two. `max_episode_steps` replaces its time limit.
    `action_repeat` is the number of its steps for each action, whose rewards are summed.

    Raises InputError if the id is unknown, a package is missing, the environment does not start, or its actions or
    observations are not continuous vectors.
    """
    env = unwrapped(env_id, **kwargs)
    if isinstance(env.observation_space, Dict):
        env = FlattenObservation(in_alphabetical_order(env))
    box: Any = env.action_space
    if (box.low != -1).any() or (box.high != 1).any():
        one = box.dtype.type(1)  # in the box's own precision: otherwise Gymnasium warns of a lower one
        env = RescaleAction(InBounds(env), -one, one)
    return ExactState(CanonicalEnv(env, all_infos, env_id))


def action_box(env_id: str, **kwargs: Any) -> Box:
    """Return the environment's own box of actions, finite and [action_dim]. Raises InputError as `make` does."""
    with contextlib.closing(unwrapped(env_id, **kwargs)) as env:
        assert isinstance(env.action_space, Box)
        return env.action_space


def unwrapped(env_id: str, action_repeat: int = 1, **kwargs: Any) -> Env:
    """Return the environment with its own spaces, which are checked. Arguments and errors are those of `make`."""
    spec = find(env_id)
    try:
        # From its spec: for an id, Gymnasium warns that v4 is out of date. Published results use v4.
        env = gym.make(spec, disable_env_checker=True, **kwargs)
    except (Exception, SystemExit) as error:
        _require(env_id, error)
        raise InputError(
            f"{env_id} cannot be made with {_versions()}: {reason(error)}\n" + _cure(env_id, kwargs)
        ) from error
    _check_spaces(env, env_id)
    return ActionRepeat(env, action_repeat) if action_repeat > 1 else env


def _cure(name: str, kwargs: dict[str, Any]) -> str:
    if kwargs:
        text = ", ".join(f"{key}={value!r}" for key, value in kwargs.items())
        return f"Check the arguments of its constructor: {text[:200]}"
    if ogbench.is_task(name):
        return f"Get the versions known to work: {ogbench.INSTALL}"
    if ":" in name:
        return "Its own code failed: correct its constructor."
    return _alike(name) or "`pip install -r requirements.txt` brings the versions known to work."


def make_vector(
    env_id: str,
    num_envs: int,
    seed: int,
    purpose: str = "training",
    vectorizer: Literal["sync", "async", "envpool"] = "sync",
    **kwargs: Any,
) -> VectorEnv[Array, Array, Array]:
    """Make `num_envs` environments, stepped together; the i-th is seeded with `seeds(seed, purpose, num_envs)[i]`.

    `vectorizer` selects how they are stepped (docs/environments.md explains when to use which):
    - sync: one after another.
    - async: each in its own process, with bit-identical results.
    - envpool: in the threads of EnvPool, with other episodes of the same distribution.

    `kwargs` go to each environment's constructor (EnvPool takes none). Call `envs.close()` at the end.

    The seeds are set here, so begin with a bare `envs.reset()`. An episode that ended is not reset automatically, so
    `next_obs` is always the true successor. The caller resets all episodes that ended:

        if dones.any():  # a bool array [num_envs]; a mask that is all False is an error
            obs, _ = envs.reset(options={"reset_mask": dones})  # the other rows do not change

    Raises InputError as `make` does, and if EnvPool is missing or its environment is not known to equal Gymnasium's.
    """
    if num_envs < 1:
        raise InputError(f"num_envs is {num_envs}: give 1 or more.")
    if kwargs and vectorizer == "envpool":
        raise InputError(f"EnvPool's {env_id} does not take {', '.join(kwargs)}: give --vectorizer sync")
    each = seeds(seed, purpose, num_envs)
    env_fns = [partial(make, env_id, **kwargs)] * num_envs
    envs: VectorEnv[Array, Array, Array]
    if vectorizer == "sync":
        envs = SyncVectorEnv(env_fns, autoreset_mode=AutoresetMode.DISABLED)
    else:
        envs = AsyncEnvs(env_fns) if vectorizer == "async" else EnvPool(env_id, num_envs)
    envs.reset(seed=list(each))
    return envs


def find(env_id: str) -> gym.envs.registration.EnvSpec:
    """Return the spec of an environment, after the import that registers it. Raises InputError if there is none."""
    module, _, name = env_id.rpartition(":")
    if module:
        if os.getcwd() not in sys.path:  # `python algos/sac.py` puts algos/ there, not the current folder
            sys.path.append(os.getcwd())
        try:
            importlib.import_module(module)
        except (Exception, SystemExit) as error:
            raise InputError(
                f"The module of {env_id} cannot be imported. {type(error).__name__}: {error}\n"
                "Install it, run the command in its folder, or add its folder to PYTHONPATH."
            ) from error
    if ogbench.is_task(name):
        ogbench.register(name)
    elif name not in gym.registry:
        register_robotics(name)
    if name in gym.registry and (module or ogbench.is_task(name) or not ogbench.hint(name)):
        _print_notice(name)
        return gym.registry[name]
    hint = ogbench.hint(name) or _alike(name) or "Give an environment of your own as module:Name-v0."
    if module:
        if registered := _registered_by(module):
            hint = f"It registers {', '.join(registered)}."
        file, own = getattr(sys.modules[module], "__file__", None) or module, f"{module.replace('.', '/')}.py"
        if os.path.exists(own) and not os.path.samefile(own, file):
            hint = f"It was imported instead of {os.path.abspath(own)}: rename that file."
        raise InputError(f"{file} has no environment {name}.\n{hint}")
    raise InputError(f"There is no environment {env_id}. {hint}")


def _registered_by(module: str) -> list[str]:
    """Return up to three ids whose environment is defined in this module."""

    def defined_in(entry: Any) -> str:
        return entry.partition(":")[0] if isinstance(entry, str) else getattr(entry, "__module__", "")

    return [spec.id for spec in gym.registry.values() if defined_in(spec.entry_point) == module][:3]


def _alike(name: str) -> str:
    """Suggest up to three registered environments with similar names that start here and that an agent can act in."""
    found: list[str] = []
    for each in difflib.get_close_matches(name, set(gym.registry) - {name}, n=12):
        with contextlib.suppress(Exception):  # for example, MuJoCo's v2 and v3 need a package that is gone
            env = gym.make(gym.registry[each], disable_env_checker=True)
            _check_spaces(env, each)
            env.close()
            found.append(each)
        if len(found) == 3:
            break
    return f"Did you mean {', '.join(found)}?" if found else ""


def _print_notice(name: str) -> None:
    """Print Gymnasium-Robotics' notice if it concerns `name`: once, and not in worker processes."""
    text = NOTICES.get(getattr(sys.modules.get("gymnasium_robotics"), "__version__", ""), "")
    if name.replace("-v", "Dense-v") in text:  # the notice names the variants with dense rewards
        NOTICES.clear()
        if multiprocessing.parent_process() is None:
            log.warning(text)


def register_robotics(name: str) -> None:
    """Import Gymnasium-Robotics, which registers its ids. Call it only when needed, as the import takes a second.

    Raises InputError if the import fails and `name` is one of its ids.
    """
    try:
        importlib.import_module("gymnasium_robotics")
    except Exception as error:
        if name.startswith(ROBOTICS):
            _require(name, error)
            raise InputError(f"{name} needs gymnasium-robotics, which fails with {_versions()}: {error}") from error


def _require(env_id: str, error: BaseException) -> None:
    """Raise InputError if the cause of `error` is that one of `PINS` is not installed."""
    for module, pin in PINS.items():
        if module.lower() in str(error).lower() and importlib.util.find_spec(module) is None:
            raise InputError(f"{env_id} needs {module}, which is not installed: pip install {pin}") from None


def _versions() -> str:
    def installed(package: str) -> str:
        try:
            return f"{package} {version(package)}"
        except PackageNotFoundError:
            return f"no {package}"

    return ", ".join(map(installed, ("gymnasium", "gymnasium-robotics", "mujoco")))


def _is_vector(space: gym.Space[Any]) -> TypeGuard[Box]:
    return isinstance(space, Box) and len(space.shape) == 1 and space.shape[0] > 0


def _check_spaces(env: Env, env_id: str) -> None:
    actions, flat = env.action_space, env.observation_space
    if not _is_vector(actions) or not np.issubdtype(actions.dtype, np.floating):
        raise InputError(
            f"The actions of {env_id} are {actions}: choose an environment with a continuous Box of shape (n,)."
        )
    with np.errstate(over="ignore"):
        is_bounded = np.isfinite(actions.high - actions.low).all()
    if not is_bounded:
        raise InputError(
            f"The actions of {env_id} are unbounded, {actions}, and cannot be rescaled from [-1, 1].\n"
            "Register it with an action space whose low and high are finite, or in a wrapper that gives it one."
        )
    if (actions.low >= actions.high).any():
        raise InputError(f"The actions of {env_id} are {actions}: low must be below high in every dimension.")
    if isinstance(flat, Dict) and flat.is_np_flattenable:
        flat = gym.spaces.flatten_space(flat)
    if not _is_vector(flat):
        raise InputError(
            f"The observations of {env_id} are {env.observation_space}, not a Box of shape (n,) or a Dict of Boxes.\n"
            "Flatten them in a wrapper of your own and register that."
        )
