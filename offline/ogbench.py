"""Read OGBench's datasets, with the rewards and terminations of one task.

Source: Park et al. 2025, "OGBench", arXiv 2410.20092, and its package (MIT), version 1.2.2. docs/ogbench.md explains
names and files.
"""

import functools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common.errors import InputError, RunError
from common.messages import log
from envs.make import unwrapped
from envs.ogbench import ARM, DATASETS
from offline.download import cache_folder, download, require_same
from offline.npz import Archive
from offline.recording import Array, RawDataset, TransitionBlock

BLOCK_ROWS = 16_384
SERVER = "https://rail.eecs.berkeley.edu/datasets/ogbench"
MIRROR = "https://huggingface.co/datasets/zhouzypaul/ogbench_datasets/resolve/main"
ARM_JOINTS = 14  # in qpos, before the objects of the arm's tasks
CUBE_JOINTS = 7  # position and quaternion
IDS = tuple(
    f"{name}{form}-singletask{task}-v0"
    for name in DATASETS
    for form in (("", "-sparse") if name.startswith(ARM) else ("",))
    for task in ("", *(f"-task{i}" for i in range(1, 6)))
)


def folder() -> Path:
    """Return the package's own folder of datasets: $OGBENCH_DATASET_DIR, else ~/.ogbench/data."""
    return cache_folder("OGBENCH_DATASET_DIR", "~/.ogbench/data")


def dataset_and_environment(dataset_id: str) -> tuple[str, str]:
    """Return the file's name without its ending, and the environment, of an id among IDS."""
    name, task = re.fullmatch(r"(.+?)((?:-sparse)?-singletask.*)", dataset_id).groups()  # type: ignore[union-attr]
    return f"{name}-v0", DATASETS[name] + task


class Goal(NamedTuple):
    """What solves a task: bodies, joints and buttons must be where the goal has them."""

    columns: Array
    """[bodies, 2 or 3]: columns of qpos that hold the positions of the bodies."""
    positions: Array
    """[bodies, 2 or 3]: their goals."""
    radius: float
    """How near a body must be, in m."""
    joints: dict[int, float]
    """Goals of drawer and window, in m, by column of qpos."""
    buttons: Array | None
    """Goals of the buttons, if the task has some."""
    sparse: bool
    """Whether an unsolved state costs 1, not 1 for each unsolved part."""
    widths: dict[str, int]
    """Width of each array of the files."""

    def solved(self, qpos: Array, buttons: Array | None) -> Array:
        """Return which parts of the task each state solves, bool [n, parts]."""
        near = np.linalg.norm(qpos[:, self.columns] - self.positions, axis=-1) <= self.radius
        slides = [np.abs(qpos[:, [column]] - goal) <= 0.04 for column, goal in self.joints.items()]
        pressed = [] if buttons is None else [buttons == self.buttons]
        return np.concatenate([near, *slides, *pressed], axis=1)


@functools.cache
def goal_of(env_id: str) -> Goal:
    """Return the goal of a single task, which the package's environment knows. Raises InputError as `make` does."""
    env = unwrapped(env_id)
    env.reset(seed=0)
    inner: Any = env.unwrapped
    kind = env_id.partition("-")[0]
    widths = {"observations": env.observation_space.shape[0], "actions": env.action_space.shape[0]}  # type: ignore[index]
    widths |= {"qpos": int(inner.model.nq)}
    buttons: Array | None = None
    joints: dict[int, float] = {}
    if kind in ARM:
        cubes, radius = 0 if kind == "puzzle" else inner._num_cubes, 0.04
        columns = ARM_JOINTS + CUBE_JOINTS * np.arange(cubes)[:, None] + np.arange(3)
        positions = inner._data.mocap_pos[:cubes].copy()
        if kind != "cube":
            buttons = inner._target_button_states.copy()
            widths["button_states"] = len(inner._target_button_states)
        if kind == "scene":
            drawer = ARM_JOINTS + CUBE_JOINTS * cubes + inner._num_buttons
            joints = {drawer: inner._target_drawer_pos, drawer + 1: inner._target_window_pos}
    else:
        columns = np.array([[15, 16] if kind == "antsoccer" else [0, 1]])  # the ball, or the robot itself
        positions, radius = np.array([inner.cur_goal_xy]), inner._goal_tol
    env.close()
    return Goal(columns, positions, radius, joints, buttons, "-sparse-" in env_id, widths)


def relabelled(file: Archive, goal: Goal) -> tuple[Array, Array]:
    """Return each row's reward, and its mask, 0 if all parts are solved: [n] each.

    The reward is minus the number of unsolved parts; if the goal is sparse, minus 1 if there are any.
    """
    states = _numbers(file, "qpos")
    buttons: Iterator[Array | None] = iter(lambda: None, 0)
    if goal.buttons is not None:
        buttons = _numbers(file, "button_states")
    found = [goal.solved(*row) for row in zip(states, buttons, strict=False)]
    solved = np.concatenate(found)
    masks: Array = np.where(solved.all(1), np.float32(0), np.float32(1))
    rewards: Array = (solved.sum(1) - solved.shape[1]).astype(np.float32)
    return np.sign(rewards) if goal.sparse else rewards, masks


def last_rows(file: Archive) -> Array:
    """Return which rows [n] are the last of a trajectory. They hold its last observation and are no transitions.

    `terminals` mark them. In the loader's compact form, `valids` are 0 there, and `terminals` mark other rows too.
    """
    is_last: Array = column(file, "valids") == 0 if "valids" in file else column(file, "terminals") != 0
    is_last[-1:] = True
    return is_last


def column(file: Archive, key: str) -> Array:
    """Return an array whole. A header cannot promise more than the file holds, as NumPy's own reader believes."""
    return np.concatenate([*_numbers(file, key)])


def _numbers(file: Archive, key: str) -> Iterator[Array]:
    """Yield an array's blocks. Raises InputError if one is not of finite numbers."""
    for number, block in enumerate(file.blocks(key, BLOCK_ROWS)):
        if block.dtype.kind not in "biuf":
            raise InputError(f"{file.path}: {key} holds {block.dtype}, not numbers: put a whole copy there")
        if len(bad := np.flatnonzero(~np.isfinite(block.reshape(len(block), -1)).all(1))):
            row = number * BLOCK_ROWS + int(bad[0])
            raise InputError(f"{file.path}: {key} of row {row:,} is not finite: put a whole copy there")
        yield block


def require_task(file: Archive, goal: Goal, name: str) -> int:
    """Return the number of rows. Raises InputError if the file is not one of the task `name`."""
    if missing := [key for key in (*goal.widths, "terminals") if key not in file]:
        raise InputError(f"{file.path} has no {', '.join(missing)}: it is not OGBench's file for {name}")
    rows = file.shape("terminals")[0]
    for key in ("terminals", *(["valids"] if "valids" in file else [])):
        if file.shape(key) != (rows,):
            raise InputError(f"{file.path}: {key} has shape {file.shape(key)}, not ({rows},): put a whole copy there")
    for key, width in goal.widths.items():
        if len(shape := file.shape(key)) != 2 or shape[1] != width:
            raise InputError(
                f"{file.path} has {key} of shape {shape}, {name} has {width} columns: "
                "it is another task's file, put the right one there"
            )
        if shape[0] != rows:
            raise InputError(f"{file.path}: {key} has {shape[0]:,} rows, terminals {rows:,}: put a whole copy there")
    return rows


def read(dataset_id: str, path: Path | None = None) -> RawDataset:
    """Read the dataset of an id among IDS, with its task's rewards and terminations.

    A trajectory is an episode. A step from a solved state terminates, and the episode continues after it. `path`: the
    file, by default that of the name in `folder`, which is downloaded at first use.

    Raises InputError if the package is missing, if the file cannot be downloaded, or if it is damaged or another
    task's.
    """
    name, env_id = dataset_and_environment(dataset_id)
    goal, path = goal_of(env_id), path or folder() / f"{name}.npz"
    if not path.exists():
        _download(name, path, goal)
    _mention_origin(path)
    file = Archive(path)
    require_task(file, goal, name)
    is_last = last_rows(file)
    starts_only = is_last & np.append(True, is_last[:-1])
    if is_last.all():
        raise InputError(f"{path} holds no transitions: put a whole copy there")
    rewards, masks = relabelled(file, goal)
    require_same(path)  # not before, because its note must not be of a damaged file
    ends = np.cumsum(~is_last)[is_last & ~starts_only]
    bound = np.ones(goal.widths["actions"])

    def blocks() -> Iterator[TransitionBlock]:
        first, obs, actions = 0, *(np.empty((0, n), np.float32) for n in (goal.widths["observations"], len(bound)))
        parts = (file.blocks(key, BLOCK_ROWS) for key in ("observations", "actions"))
        for more_obs, more_actions in zip(*parts, strict=True):
            obs, actions = (np.concatenate(pair) for pair in ((obs, more_obs), (actions, more_actions)))
            rows = np.flatnonzero(~is_last[first : first + len(obs) - 1])
            here = first + rows
            if len(rows):
                yield TransitionBlock(obs[rows], actions[rows], rewards[here], obs[rows + 1], masks[here] == 0)
            first, obs, actions = first + len(obs) - 1, obs[-1:], actions[-1:]

    stat = path.stat()
    return RawDataset(
        id=dataset_id, env=env_id, obs_dim=goal.widths["observations"], action_dim=len(bound), ends=ends,
        dropped_final_rewards=np.full(len(ends), np.nan), blocks=blocks, rewards=lambda: rewards[~is_last],
        box=(-bound, bound), version=(str(path.resolve()), stat.st_size, stat.st_mtime_ns, env_id),
    )  # fmt: skip


def _download(name: str, path: Path, goal: Goal) -> None:
    """Download a file from the first address that has it: $OGBENCH_MIRROR alone, or the authors' server and a copy."""
    failed = []
    addresses = [os.environ["OGBENCH_MIRROR"]] if "OGBENCH_MIRROR" in os.environ else [SERVER, MIRROR]
    for address in addresses:
        try:
            return download(
                f"{address.rstrip('/')}/{path.name}", path, lambda part: require_task(Archive(part), goal, name),
                variable="OGBENCH_DATASET_DIR",
            )  # fmt: skip
        except (InputError, RunError) as error:
            failed.append(error)
            if address != addresses[-1]:
                log.warning(f"{str(error).partition(': get')[0]}; {addresses[-1]} is tried next")
    raise failed[-1]


@functools.cache  # a run reads its dataset more than once
def _mention_origin(path: Path) -> None:
    if path.with_suffix(".json").exists():
        log.info(f"{path} was made here: another sample from OGBench's generator, not the published file")
