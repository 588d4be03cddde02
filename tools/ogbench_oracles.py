"""Record episodes of OGBench's scripted oracles, by the rules of its authors' programs.

The oracles and the mazes of the package draw from NumPy's global generator. So does this module, in the order of the
authors' programs: with the same seeds, every row is the same (test_ogbench_data.py).

Source: Park et al. 2025, "OGBench", arXiv 2410.20092, and its repository (MIT), commit 1d41409.
"""

# ruff: noqa: NPY002

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

from common.errors import InputError, RunError
from envs import ogbench as environments
from offline.arrays import Array

MAX_ATTEMPTS = 100  # at a healthy episode
NOISE = 0.1  # of the manipulation oracles
# Chance that the next cube is stacked on another one. Each episode draws it from this range.
STACKING = {
    "double": (0.0, 0.25),
    "triple": (0.05, 0.35),
    "quadruple": (0.1, 0.5),
}


# Scale of the noise in the five actions of "noisy": the position, the angle and the gripper.
NOISE_SCALES = np.array([1, 1, 1, 3, 10])
TYPES = {
    "observations": np.float32,
    "actions": np.float32,
    "terminals": bool,
    "qpos": np.float32,
    "qvel": np.float32,
    "button_states": np.int64,
}
Info = dict[str, Any]
Rows = dict[str, Array]


class Task(NamedTuple):
    """One of OGBench's datasets: "scene-play" has the environment "scene" and the behaviour "play"."""

    env: str
    behaviour: str

    @property
    def steps(self) -> int:
        """Steps of an episode: its transitions, and one more that gives the last observation."""
        return 2001 if "giant" in self.env else 1001


class Manipulator:
    """Records episodes of a scripted arm, which gets a new subtask whenever it has finished one.

    "play" follows plans between keyframes, with smooth noise. "noisy" reacts to the state, with Gaussian noise of a
    level that each episode draws, and some actions that are uniformly random.
    """

    def __init__(self, task: Task) -> None:
        self.env: Any = gym.make(
            f"{task.env}-v0", mode="data_collection", terminate_at_goal=False, max_episode_steps=task.steps
        )
        self.noisy, (self.kind, _, self.size) = task.behaviour == "noisy", task.env.partition("-")
        subtasks = {"scene": ("cube", "button", "drawer", "window"), "puzzle": ("button",), "cube": ("cube",)}
        self.oracles = {subtask: self._oracle(subtask) for subtask in subtasks[self.kind]}
        self.random_actions = (0.2 if self.kind == "puzzle" else 0.1) if self.noisy else 0.0

    def _oracle(self, subtask: str) -> Any:
        style = "markov" if self.noisy else "plan"
        module = importlib.import_module(f"ogbench.manipspace.oracles.{style}.{subtask}_{style}")
        settings: dict[str, Any] = {"min_norm": 0.4} if self.noisy else {"noise": NOISE, "noise_smoothing": 0.5}
        if self.kind == "puzzle":
            settings["gripper_always_closed"] = True
        return getattr(module, f"{subtask.title()}{style.title()}Oracle")(env=self.env, **settings)

    def episode(self) -> Rows:
        for _ in range(MAX_ATTEMPTS):
            rows = self._attempt()
            if self.kind != "scene" or is_in_reach(rows["qpos"][:, 14:17]):
                return rows
        raise RuntimeError(f"the cube left the arm's reach in {MAX_ATTEMPTS} episodes")

    def _attempt(self) -> Rows:
        obs, info = self.env.reset()
        stacking = np.random.uniform(*STACKING[self.size]) if self.size in STACKING else 0.5
        level = np.random.uniform(0, NOISE) if self.noisy else 0.0
        oracle = self.oracles[info["privileged/target_task"]]
        oracle.reset(obs, info)

        def act(obs: Array, info: Info) -> Array:
            if np.random.rand() < self.random_actions:
                return np.random.uniform(-1, 1, 5)
            action = np.array(oracle.select_action(obs, info))
            return action + np.random.normal(0, NOISE_SCALES * level) if self.noisy else action

        def retarget(_: Info) -> None:
            nonlocal oracle
            if oracle.done:
                obs, info = self.env.unwrapped.set_new_target(p_stack=stacking)
                oracle = self.oracles[info["privileged/target_task"]]
                oracle.reset(obs, info)

        return recorded(self.env, obs, info, act, retarget)


class PointNavigator:
    """Records episodes of a point that follows the shortest way, with Gaussian noise, from one goal to the next."""

    def __init__(self, task: Task) -> None:
        self.env: Any = gym.make(f"{task.env}-v0", terminate_at_goal=False, max_episode_steps=task.steps)
        self.free, self.goals = cells(self.env.get_wrapper_attr("maze_map"))

    def episode(self) -> Rows:
        maze: Any = self.env.unwrapped
        start, goal = (choices[np.random.randint(len(choices))] for choices in (self.free, self.goals))
        obs, info = self.env.reset(options={"task_info": {"init_ij": start, "goal_ij": goal}})

        def act(_: Array, __: Info) -> Array:
            way: Array = maze.get_oracle_subgoal(maze.get_xy(), maze.cur_goal_xy)[0] - maze.get_xy()
            way /= np.linalg.norm(way) + 1e-6
            return way + np.random.normal(0, 0.5, 2)

        def retarget(info: Info) -> None:
            if info["success"]:
                maze.set_goal(self.goals[np.random.randint(len(self.goals))])

        return recorded(self.env, obs, info, act, retarget)


def is_in_reach(xyz: Array) -> bool:
    """Return whether a cube's positions [steps, 3] stay in sight: outside are the right edge, and left of the drawer.

    On the left, only a cube that lies in the drawer is in sight.
    """
    y, z = xyz[:, 1], xyz[:, 2]
    in_drawer = (z >= 0.06) & (z <= 0.08)
    return bool((y < 0.29).all() and ((y > -0.3) | in_drawer).all())


def cells(maze: Array) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return a maze's free cells, and those that are goals: all but the ones inside a straight corridor."""
    free = [(int(i), int(j)) for i, j in np.argwhere(maze == 0)]
    corridors = ([0, 0, 1, 1], [1, 1, 0, 0])  # walls above, below, left and right
    around = {
        (i, j): [int(maze[i - 1, j]), int(maze[i + 1, j]), int(maze[i, j - 1]), int(maze[i, j + 1])] for i, j in free
    }
    return free, [cell for cell in free if around[cell] not in corridors]


def recorded(
    env: Any, obs: Array, info: Info, act: Callable[[Array, Info], Array], after: Callable[[Info], None]
) -> Rows:
    """Return the rows of an episode in the files' form. The last row holds the last observation.

    `act` returns an action for an observation and its `info`. `after` is called after each step.
    """
    rows: dict[str, list[Any]] = {key: [] for key in TYPES}
    while not rows["terminals"] or not rows["terminals"][-1]:
        action = np.clip(act(obs, info), -1, 1)
        following, _, termination, truncation, info = env.step(action)
        after(info)
        row = {"observations": obs, "actions": action, "terminals": termination or truncation}
        for key, value in (row | {key: info.get(f"prev_{key}") for key in ("qpos", "qvel", "button_states")}).items():
            rows[key].append(value)
        obs = following
    return {key: np.array(rows[key], kind) for key, kind in TYPES.items() if rows[key][0] is not None}


@functools.cache
def recorder(task: Task) -> Manipulator | PointNavigator:
    """Return what records this process's episodes: compiling an environment takes a second."""
    environments.register(task.env)
    with environments.quiet():
        return PointNavigator(task) if task.env.startswith("pointmaze") else Manipulator(task)


def make_episode(task: Task, seed: int) -> Rows:
    """Return the rows of the episode with this seed. Raises RunError if its oracle fails."""
    try:
        with environments.quiet():
            source = recorder(task)
            source.env.reset(seed=seed)
            np.random.seed(seed)
            rows = source.episode()
    except InputError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__} {error}".split())[:200]
        raise RunError(
            f"the oracle of {task.env}-{task.behaviour} failed in the episode of seed {seed}: {reason}\n"
            "install the pinned versions (docs/ogbench.md), or give another --seed"
        ) from error
    if bad := [key for key, values in rows.items() if not np.isfinite(values).all()]:
        raise RunError(
            f"{task.env}-{task.behaviour}: the episode of seed {seed} has {', '.join(bad)} that are not finite"
        )
    return rows
