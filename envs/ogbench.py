"""OGBench's single-task environments: its package registers them, and this module makes them reproducible.

Source: Park et al. 2025, "OGBench", arXiv 2410.20092, and its package (MIT), version 1.2.2.
"""

import contextlib
import dataclasses
import importlib
import re
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import WrapperSpec
from gymnasium.utils import RecordConstructorArgs

from common.errors import InputError
from envs.returned import reason
from envs.vector import Array

INSTALL = "pip install -e '.[ogbench]'"
if sys.version_info >= (3, 13):
    INSTALL = "use Python 3.11 or 3.12, because its dependency labmaze has no wheel for later ones"
ARM = ("cube", "scene", "puzzle")
"""The families of tasks with an arm, whose goals have several parts."""
_FAMILIES = "|".join(("pointmaze", "antmaze", "humanoidmaze", "antsoccer", *ARM))


def _datasets() -> dict[str, str]:
    sizes = {
        "pointmaze": ("medium large giant teleport", "navigate stitch"),
        "antmaze": ("medium large giant teleport", "navigate stitch explore"),
        "humanoidmaze": ("medium large giant", "navigate stitch"),
        "antsoccer": ("arena medium", "navigate stitch"),
        "cube": ("single double triple quadruple", "play noisy"),
        "puzzle": ("3x3 4x4 4x5 4x6", "play noisy"),
    }
    found = {"scene-play": "scene", "scene-noisy": "scene"}
    for kind, (each_size, behaviours) in sizes.items():
        for size in each_size.split():
            found |= {f"{kind}-{size}-{behaviour}": f"{kind}-{size}" for behaviour in behaviours.split()}
    del found["antmaze-giant-explore"]
    return found


DATASETS = _datasets()
"""The environment of each dataset whose observations are states: "scene-play" has "scene"."""


def is_task(name: str) -> bool:
    """Return whether `name` has the form of a single task: of an environment, or of a dataset for it."""
    return bool(re.fullmatch(rf"({_FAMILIES})-(.+-)?singletask(-task\d+)?-v0", name))


def hint(name: str) -> str:
    """Return how OGBench's tasks are named if `name` looks like one of its other ids, else an empty text."""
    elsewhere = name in gym.registry and not str(gym.registry[name].entry_point).startswith("ogbench.")
    is_d4rl = re.match("antmaze-(umaze|.*(play|diverse))", name)
    if elsewhere or is_d4rl or not re.fullmatch(rf"(visual-)?({_FAMILIES})-(.+-)?v0", name):
        return ""
    return (
        "OGBench's tasks have one goal each, and states as observations: give a name such as "
        "cube-single-play-singletask-task2-v0, with task1 to task5 (docs/ogbench.md)"
    )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the warnings of the package: GLFW finds no display, and boxes are rounded to float32."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def register(name: str) -> None:
    """Import OGBench's package, and register its single tasks under their names and those of their datasets.

    Each task with an arm gets a second form, with `-sparse` before `-singletask`: the reward is -1 until all parts are
    solved, then 0.

    Raises InputError, with `name` in the message, if the package is missing or fails.
    """
    try:
        with quiet():  # the arm's modules import dm_control, which looks for a display
            importlib.import_module("ogbench.manipspace.envs.manipspace_env" if name.startswith(ARM) else "ogbench")
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and str(error.name).startswith(("ogbench", "dm_control")):
            raise InputError(f"{name} needs OGBench's package, which is not installed: {INSTALL}") from None
        why = f"{name} needs OGBench's package, which fails: {reason(error)}"
        raise InputError(f"{why}\nget its pins: {INSTALL}") from error
    if "scene-play-singletask-v0" in gym.registry:
        return
    fix = WrapperSpec("Reproducible", "envs.ogbench:Reproducible", {})
    clip = WrapperSpec("ClipReward", "gymnasium.wrappers:ClipReward", {"min_reward": -1.0, "max_reward": 0.0})
    for env_id, spec in list(gym.registry.items()):
        if is_task(env_id):
            env, _, task = env_id.partition("-singletask")
            forms = {"": (fix,)} | ({"-sparse": (fix, clip)} if env.startswith(ARM) else {})
            for prefix in (env, *(dataset for dataset, of in DATASETS.items() if of == env)):
                for form, wrappers in forms.items():
                    alias = f"{prefix}{form}-singletask{task}"
                    gym.registry[alias] = dataclasses.replace(spec, id=alias, additional_wrappers=wrappers)


class Reproducible(gym.Wrapper[Array, Array, Any, Any], RecordConstructorArgs):
    """Takes all random numbers of an environment from seeded generators, so that its state can be restored.

    A reset of the package takes some steps with random actions, from a space without a seed. They change the solver's
    warm start. The mazes draw positions, and teleports, from NumPy's global generator. Here a generator of the wrapper
    seeds both. The arm's environments make new spaces at each access, so here they keep the first ones.
    """

    def __init__(self, env: gym.Env[Array, Array]) -> None:
        RecordConstructorArgs.__init__(self)
        gym.Wrapper.__init__(self, env)
        self._generator = np.random.default_rng()
        inner = type(env.unwrapped)
        if isinstance(getattr(inner, "action_space", None), property):
            with quiet():
                spaces = {"action_space": env.action_space, "observation_space": env.observation_space}
            env.unwrapped.__class__ = type(inner.__name__, (inner,), spaces)
        self._teleports = getattr(env.unwrapped, "_teleport_info", None) is not None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        if seed is not None:
            self._generator = np.random.default_rng((seed, 1))  # another stream than the environment has
        with self._seeded():
            return self.env.reset(seed=seed, options=options)

    def step(self, action: Array) -> tuple[Array, Any, bool, bool, dict[str, Any]]:
        if not self._teleports:
            return self.env.step(action)
        with self._seeded():
            return self.env.step(action)

    @contextlib.contextmanager
    def _seeded(self) -> Iterator[None]:
        """Seed NumPy's global generator and the space of actions, and give the global generator its state back."""
        before, drawn = np.random.get_state(), int(self._generator.integers(2**32))  # noqa: NPY002
        np.random.seed(drawn)  # noqa: NPY002
        self.env.unwrapped.action_space.seed(drawn)
        try:
            yield
        finally:
            np.random.set_state(before)  # noqa: NPY002
