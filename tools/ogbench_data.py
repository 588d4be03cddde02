"""Make OGBench's datasets with the scripted oracles of its package: another sample from the same generator.

    make ogbench TASKS="scene-play puzzle-3x3-play cube-single-play" TRANSITIONS=1000000
    python -m tools.ogbench_data pointmaze-medium-navigate --transitions 100000 --jobs 4

The published files were made by the same oracles and rules, with random numbers that nobody recorded. Results on data
made here must say so. Files have the package's names and arrays, and `--dataset` finds them. A tenth as many episodes
again are for validation.

Each episode has a seed of its own, so the number of processes does not change the data. The same command resumes an
interrupted one, at most ten episodes for each process are lost, and it does nothing if its result exists.

Source: Park et al. 2025, "OGBench", arXiv 2410.20092, appendix on datasets, and the settings of its repository (MIT).
"""

import functools
import importlib
import json
import multiprocessing
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import gymnasium as gym
import numpy as np
import tyro
from filelock import FileLock, Timeout
from tqdm import tqdm

from common.checkpoint import replacing
from common.command_line import command_line
from common.errors import InputError, RunError
from common.messages import log
from common.provenance import commit, versions
from common.seeding import seeds
from envs import ogbench as environments
from offline import ogbench
from offline.arrays import Array

SHARD = 10  # episodes in one file of an unfinished dataset
MAX_ATTEMPTS = 100  # at a healthy episode
NOISE = 0.1  # of the manipulation oracles
# Chance that the next cube goes onto another one: each episode draws it from this range.
STACKING = {
    "double": (0.0, 0.25),
    "triple": (0.05, 0.35),
    "quadruple": (0.1, 0.5),
    "octuple": (0.0, 0.35),
}


# Scale of the noise in the five actions of "noisy": the position, the angle and the gripper.
NOISE_SCALES = np.array([1, 1, 1, 3, 10])
SOURCE = "made here by OGBench's scripted oracles: another sample from the same generator, not the published file"
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


@dataclass
class Args:
    tasks: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Datasets to make, such as scene-play, cube-double-noisy or pointmaze-medium-navigate."""
    transitions: int = 1_000_000
    """Transitions for training, in episodes of 1,000 (pointmaze-giant: 2,000)."""
    folder: Path = field(default_factory=ogbench.folder)
    """Folder of the files. --dataset looks into $OGBENCH_DATASET_DIR, or ~/.ogbench/data."""
    jobs: int = 2
    """Number of processes, with one thread each."""
    seed: int = 0
    """Random seed."""


def parsed(name: str) -> Task:
    """Return the task of a dataset's name. Raises InputError if it cannot be made here."""
    environments.register(name)
    env, _, behaviour = name.removesuffix("-v0").rpartition("-")
    if f"{env}-v0" in gym.registry and not env.startswith("visual"):
        if env.startswith(("cube", "scene", "puzzle")) and behaviour in ("play", "noisy"):
            return Task(env, behaviour)
        if env.startswith("pointmaze") and behaviour == "navigate":
            return Task(env, behaviour)
    raise InputError(
        f"{name} cannot be made here: give cube-, scene- or puzzle- names that end in -play or -noisy, or "
        "pointmaze-<size>-navigate (docs/ogbench.md lists them)"
    )


# The oracles and mazes of the package draw from NumPy's global generator. So does this file, in the same order as the
# authors' programs: the same seed then gives the same rows.
# ruff: noqa: NPY002


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


class Shard(NamedTuple):
    """Episodes that are made, and kept on the disk, together."""

    task: Task
    split: str
    first: int
    seeds: tuple[int, ...]
    folder: Path

    @property
    def path(self) -> Path:
        return self.folder / f"{self.split}-{self.first:05}-{len(self.seeds)}.npz"


def write_shard(shard: Shard) -> int:
    """Write the episodes of a shard, unless they are there. Return how many there are.

    Raises RunError if an oracle fails, and OSError if the disk is full.
    """
    if not shard.path.exists():
        episodes = [make_episode(shard.task, seed) for seed in shard.seeds]
        with replacing(shard.path) as file:
            np.savez(file, **joined(episodes))  # type: ignore[arg-type]
    return len(shard.seeds)


def make_episode(task: Task, seed: int) -> Rows:
    """Return the rows of the episode with this seed. Raises RunError if its oracle fails."""
    try:
        with environments.quiet():
            source = recorder(task)
            source.env.reset(seed=seed)
            np.random.seed(seed)
            rows = source.episode()
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


def joined(parts: list[Rows]) -> Rows:
    return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}


def shards(task: Task, args: Args, folder: Path) -> list[Shard]:
    """Return the shards of both splits, those of the training data first."""
    count = -(-args.transitions // (task.steps - 1))
    found = []
    for split, episodes in (("train", count), ("val", -(-count // 10))):
        each = seeds(args.seed, f"{task.env}-{task.behaviour} {split}", episodes)
        found += [Shard(task, split, i, tuple(each[i : i + SHARD]), folder) for i in range(0, episodes, SHARD)]
    return found


def make(task: Task, args: Args) -> None:
    """Write the training and the validation file of a task, and a note on how they were made."""
    name = f"{task.env}-{task.behaviour}-v0"
    paths = {"train": args.folder / f"{name}.npz", "val": args.folder / f"{name}-val.npz"}
    recipe = {"task": f"{task.env}-{task.behaviour}", "transitions": args.transitions, "seed": args.seed}
    note = args.folder / f"{name}.json"
    if note.exists() and json.loads(note.read_text())["arguments"] == recipe and all(map(Path.exists, paths.values())):
        return log.info(f"{paths['train']} was already made by the same command")
    if existing := [str(path) for path in (note, *paths.values()) if path.exists() and not note.exists()]:
        raise InputError(f"{existing[0]} exists and is not this command's: give another --folder")
    if note.exists() and all(map(Path.exists, paths.values())):
        raise InputError(f"{paths['train']} was made with other arguments: give another --folder")
    folder = args.folder / f"{name}.seed{args.seed}.parts"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / "lock", timeout=0):
            parts = shards(task, args, folder)
            generate(name, parts, args.jobs)
            statement = {"arguments": recipe, "source": SOURCE, "versions": versions(), "commit": commit()}
            with replacing(note) as file:
                file.write((json.dumps(statement, indent=1) + "\n").encode())
            for split, path in paths.items():
                with replacing(path) as file:
                    rows = joined([dict(np.load(part.path)) for part in parts if part.split == split])
                    np.savez_compressed(file, **rows)  # type: ignore[arg-type]
    except Timeout:
        raise InputError(f"another command is making {paths['train']}: wait for it") from None
    shutil.rmtree(folder)
    log.info(f"{args.transitions:,} transitions are in {paths['train']}")
    return None


def generate(name: str, parts: list[Shard], jobs: int) -> None:
    """Write all shards, in `jobs` processes that end with this one."""
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    total = sum(len(part.seeds) for part in parts)
    with ProcessPoolExecutor(jobs, context, initializer=end_with_parent) as pool, tqdm(total=total, desc=name) as bar:
        try:
            for future in as_completed([pool.submit(write_shard, part) for part in parts]):
                bar.update(future.result())
        except BrokenProcessPool:
            raise RunError("a process was killed (is there enough memory?): run the same command to resume") from None
        finally:
            pool.shutdown(cancel_futures=True)


def end_with_parent() -> None:
    """Start a thread that ends this process when its parent ends, also if that is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main(args: Args) -> None:
    if args.transitions < 1 or args.jobs < 1:
        raise InputError("--transitions and --jobs: give whole numbers from 1 up")
    for task in [parsed(name) for name in args.tasks]:
        make(task, args)


if __name__ == "__main__":
    command_line(main, Args)
