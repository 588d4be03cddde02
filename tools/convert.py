"""Convert a file of another project, or another kind of dataset, into one that `--dataset` takes.

    python -m tools.convert cube.npz --env cube-single-singletask-task2-v0 --output data/cube.hdf5
    python -m tools.convert expert_hopper.npz --env Hopper-v4 --output data/hopper-expert.hdf5
    python -m tools.convert low_dim.hdf5 --obs-keys robot0_eef_pos object --output minari:robomimic/lift-v0
    python -m tools.convert data/hopper.hdf5 --output minari:mine/hopper-v0
    python -m tools.convert mine/hopper-v0 --output data/hopper.hdf5

The format is recognised from the contents, and printed. docs/data.md describes the formats. Nothing is ever unpickled.
"""

import common.start

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import gymnasium as gym
import h5py
import numpy as np
import tyro

from common.command_line import command_line
from common.errors import InputError
from common.messages import log
from envs.make import make
from envs.ogbench import is_task
from offline import d4rl, dataset, ogbench
from offline.arrays import Array
from offline.hdf5 import BAD_FILE, kind_of, opened, unreadable
from offline.npz import Archive
from offline.write import MINARI, write_dataset

Arrays = dict[str, Any]  # arguments of `write_dataset`


@dataclass
class Args:
    file: Annotated[str, tyro.conf.Positional]
    """File to convert, or the id of a dataset."""
    output: str
    """Dataset to write: a file that ends in .hdf5 (D4RL's layout), or minari:namespace/name-v0."""
    env: str | None = None
    """Gymnasium id of the environment for evaluation, by default the dataset's own. For OGBench's files, a task."""
    horizon: int | None = None
    """Time limit in steps, for files that do not distinguish terminations from time limits.
    Episodes of this length are truncated, shorter ones terminated. By default it is the limit of --env, and for
    robomimic there is none."""
    obs_keys: tuple[str, ...] = ()
    """Observations of a robomimic file, joined in this order. By default, all vectors by name."""
    action_low: tuple[float, ...] = ()
    """Lowest action, one number or one for each dimension. By default it is the dataset's own, that of --env, or -1."""
    action_high: tuple[float, ...] = ()
    """Highest action, as --action-low."""
    ref_scores: tuple[float, float] | None = None
    """Two returns to store with the data: the one that scores 0, and the one that scores 100."""

    @property
    def path(self) -> Path:
        return Path(self.file)

    def __post_init__(self) -> None:
        if self.horizon is not None and self.horizon < 1:
            raise InputError(f"--horizon is {self.horizon}: give a number of 1 or more")


class Format(NamedTuple):
    """A format of .npz files: it is recognised by `keys`."""

    name: str
    keys: tuple[str, ...]
    read: Callable[[Args, Archive], Arrays]


def of_d4rl(args: Args, file: Archive) -> Arrays:
    """Return D4RL's arrays, which have their names."""
    _leave_out(args, "horizon", "obs_keys")
    arrays = {"observations": "observations", "actions": "actions", "rewards": "rewards"}
    arrays |= {"terminations": "terminals", "truncations": "timeouts"}
    arrays |= {"next_observations": "next_observations"} if "next_observations" in file else {}
    return {name: file[key] for name, key in arrays.items()}


def of_ogbench(args: Args, file: Archive) -> Arrays:
    """Return OGBench's transitions, from its own file (for the task --env) or from what its loader returns.

    `terminals` are the ends of trajectories. `masks` are 0 where the task is solved, which terminates. Without
    next_observations, a trajectory's last row holds its last observation and is no transition (`offline.ogbench`).
    """
    _leave_out(args, "horizon", "obs_keys")
    if "rewards" in file and "masks" not in file:
        raise InputError(
            f"{args.file} has rewards and terminals, but no ends of episodes\n"
            "add timeouts (D4RL's name) or masks (OGBench's name), as docs/data.md shows"
        )
    if "rewards" not in file and not is_task(args.env or ""):
        raise InputError(
            f"{args.file} has no rewards, because OGBench computes them for one task\n"
            "give the task as --env, for example cube-single-singletask-task2-v0"
        )
    names = ("observations", "actions", "rewards", "masks", "terminals", "valids", "next_observations")
    rows = {name: file[name] for name in names if name in file}
    if "rewards" not in rows:
        goal = ogbench.goal_of(str(args.env))
        ogbench.require_task(file, goal, str(args.env))
        rows["rewards"], rows["masks"] = ogbench.relabelled(file, goal)
    _same_length(args, rows)
    if "next_observations" in rows:
        ends = _marks(args, "terminals", rows["terminals"])
    else:
        is_last = ogbench.last_rows(file)
        following = np.flatnonzero(~is_last) + 1
        next_obs, ends = rows["observations"][following], is_last[following]
        rows = {name: values[~is_last] for name, values in rows.items()} | {"next_observations": next_obs}
    arrays = {name: rows[name] for name in ("observations", "actions", "rewards", "next_observations")}
    return arrays | {"terminations": ~_marks(args, "masks", rows["masks"]), "episode_ends": ends} | _unit_box(args)


def _marks(args: Args, name: str, values: Array) -> Array:
    """Return where `values` are not 0. Raises InputError if one is no finite number."""
    if values.dtype.kind not in "biuf" or not np.isfinite(values).all():
        raise InputError(f"{args.file}: {name} has values that are not finite numbers: put a whole copy there")
    return np.asarray(values != 0)


def of_stable_baselines(args: Args, file: Archive) -> Arrays:
    """Return what Stable-Baselines 2 records of an expert. It marks starts only, and has no last observations.

    Source: Hill et al., `generate_expert_traj` of stable-baselines 2.10.2 (MIT).
    """
    _leave_out(args, "obs_keys")
    ends = np.append(_marks(args, "episode_starts", file["episode_starts"])[1:], True)
    arrays = {"observations": file["obs"], "actions": file["actions"], "rewards": file["rewards"]}
    return arrays | {"episode_ends": ends, "terminations": _terminations(args, ends)}


def of_imitation(args: Args, file: Archive) -> Arrays:
    """Return the trajectories of imitation, which have one more observation than actions. `infos` are not read.

    `terminal` is set for whole episodes, also for those that a time limit ended.

    Source: Gleave et al. 2022, "imitation", arXiv 2211.11972, and `types.save` of its package (MIT), version 0.3.1.
    """
    _leave_out(args, "obs_keys")
    if "rews" not in file:
        raise InputError(
            f"{args.file} has no rewards (rews): for imitation alone, write it with zeros by "
            "offline.write.write_dataset (docs/data.md)"
        )
    obs, actions, starts, terminal = file["obs"], file["acts"], file["indices"], file["terminal"]
    bounds = np.concatenate([[0], starts, [len(actions)]]).astype(np.int64)
    count = len(bounds) - 1
    if not (np.diff(bounds) > 0).all() or len(obs) != len(actions) + count or terminal.shape != (count,):
        raise InputError(f"{args.file}: indices, obs, acts and terminal do not fit together: put a whole copy there")
    ends = np.isin(np.arange(len(actions)), bounds[1:] - 1)
    last = bounds[1:] + np.arange(count)  # rows of the trajectories' last observations
    terminations = _terminations(args, ends)
    terminations[bounds[1:] - 1] &= terminal
    return {
        "observations": np.delete(obs, last, axis=0),
        "next_observations": np.delete(obs, np.append(0, last[:-1] + 1), axis=0),
        "actions": actions,
        "rewards": file["rews"],
        "terminations": terminations,
        "episode_ends": ends,
    }


FORMATS = (
    Format("an npz with D4RL's names", ("observations", "actions", "rewards", "terminals", "timeouts"), of_d4rl),
    Format("OGBench's npz", ("observations", "actions", "terminals"), of_ogbench),
    Format(
        "an expert's npz of Stable-Baselines 2", ("obs", "actions", "rewards", "episode_starts"), of_stable_baselines
    ),
    Format("an expert's npz of imitation", ("obs", "acts", "terminal", "indices"), of_imitation),
)
ROBOMIMIC = ("data/demo_0/obs", "data/demo_0/actions", "data/demo_0/rewards", "data/demo_0/dones")


def is_demo(name: str) -> bool:
    return re.fullmatch(r"demo_\d+", name) is not None


def of_robomimic(args: Args, file: h5py.File) -> Arrays:
    """Return the demonstrations of robomimic, in the order of their numbers.

    Depending on the options of its scripts, `dones` are 1 where the task is solved, at the end of every demonstration,
    or both. If rewards are 0 and 1, an end with reward 0 is therefore a truncation.

    Source: Mandlekar et al. 2021, "What Matters in Learning from Offline Human Demonstrations", arXiv 2108.03298, and
    docs/datasets and scripts of its package (MIT).
    """
    data = file["data"]
    made_in = json.loads(data.attrs.get("env_args", "{}")).get("env_name", "an unknown environment")
    if made_in in d4rl.IDS:
        raise InputError(f"{args.file} is D4RL's {made_in} with time limits as terminations: give --dataset {made_in}")
    demos = [data[name] for name in sorted(filter(is_demo, data), key=lambda name: int(name[5:]))]
    keys = _obs_keys(args, demos[0]["obs"])
    log.info(f"{len(demos):,} demonstrations in {made_in}; observations: {', '.join(keys)}")
    arrays = {
        "observations": _joined(demos, "obs", keys),
        "actions": np.concatenate([demo["actions"][()] for demo in demos]),
        "rewards": np.concatenate([demo["rewards"][()] for demo in demos]),
    }
    if all("next_obs" in demo for demo in demos):
        arrays["next_observations"] = _joined(demos, "next_obs", keys)
    terminations = _marks(args, "dones", np.concatenate([demo["dones"][()] for demo in demos]))
    last = np.cumsum([len(demo["actions"]) for demo in demos]) - 1
    ends = np.isin(np.arange(len(terminations)), last)
    _same_length(args, arrays | {"dones": terminations, "ends": ends})
    if args.horizon:
        terminations &= ~ends | _terminations(args, ends)
    elif set(np.unique(arrays["rewards"])) <= {0, 1}:
        terminations &= ~ends | (arrays["rewards"] == 1)
    elif terminations[last].all():
        log.warning("every demonstration ends with a termination: give --horizon if a time limit ended some of them")
    return arrays | {"terminations": terminations, "episode_ends": ends} | _unit_box(args)


def _obs_keys(args: Args, group: h5py.Group) -> list[str]:
    """Return the observations to join. Images are left out. Raises InputError if one that is asked for is none."""
    vectors = [key for key in group if isinstance(group[key], h5py.Dataset) and group[key].ndim <= 2]
    if wrong := [key for key in args.obs_keys if key not in vectors]:
        what = "no vector" if wrong[0] in group else "not in the file"
        raise InputError(f"--obs-keys: {wrong[0]} is {what}: choose from {', '.join(vectors) or 'none'}")
    if not vectors:
        raise InputError(f"{args.file} has images only ({', '.join(group)}): the algorithms here take vectors")
    if images := [key for key in group if key not in vectors]:
        log.warning(f"images are left out: {', '.join(images)}")
    return list(args.obs_keys or vectors)


def _joined(demos: list[h5py.Group], group: str, keys: list[str]) -> Array:
    """Return the observations of all demonstrations side by side, [n, obs_dim]."""
    parts = [[demo[group][key][()].reshape(len(demo[group][key]), -1) for key in keys] for demo in demos]
    return np.concatenate([np.concatenate(part, axis=1) for part in parts])


def of_dataset(args: Args) -> Arrays:
    """Return all of a dataset that `--dataset` takes, with its environment, box and reference scores."""
    _leave_out(args, "obs_keys")
    recording = dataset.read(args.file, horizon=args.horizon)
    parts = (np.concatenate(part) for part in zip(*recording.blocks(), strict=True))
    names = "observations", "actions", "rewards", "next_observations", "terminations"
    arrays: Arrays = dict(zip(names, parts, strict=True))
    arrays["episode_ends"] = np.isin(np.arange(len(recording)), recording.ends - 1)
    if lost := int(np.isfinite(recording.dropped_final_rewards).sum()):
        log.warning(f"the last steps of {lost:,} episodes have no successor: they are left out")
    if args.env in (None, recording.env, recording.untrusted_env):
        arrays["ref_scores"] = recording.reference
        if env := args.env or recording.env:
            arrays |= {"env": env, "env_kwargs": recording.env_kwargs}
    if recording.untrusted_env and not args.env:
        log.warning(f"{recording.untrusted_env} is left out: give --env {recording.untrusted_env} to keep it")
    if recording.box is not None:
        arrays["action_low"], arrays["action_high"] = recording.box
    return arrays


def _terminations(args: Args, ends: Array) -> Array:
    """Return which steps [n] end an episode before the time limit, if `ends` [n] marks the last step of each."""
    limit = args.horizon
    if limit is None and args.env:
        make(args.env).close()  # registers it
        limit = gym.registry[args.env.rpartition(":")[2]].max_episode_steps
    if limit is None:
        raise InputError(
            f"{args.file} does not distinguish terminations from time limits: give the time limit in steps as --horizon"
            " (episodes that are shorter have terminated)"
        )
    last = np.flatnonzero(ends)
    lengths = np.diff(last, prepend=-1)
    if lengths.max() > limit:
        raise InputError(f"{args.file} has an episode of {lengths.max():,} steps: give that or more as --horizon")
    terminations = np.zeros(len(ends), bool)
    terminations[last[lengths < limit]] = True
    return terminations


def _unit_box(args: Args) -> Arrays:
    """Return the box of formats whose actions are in [-1, 1], unless the user gives it or an environment."""
    given = args.env or args.action_low or args.action_high
    return {} if given else {"action_low": -1.0, "action_high": 1.0}


def _leave_out(args: Args, *names: str) -> None:
    if given := [f"--{name.replace('_', '-')}" for name in names if getattr(args, name)]:
        raise InputError(f"{args.file} needs no {' and no '.join(given)}: leave it out")


def _same_length(args: Args, arrays: Arrays) -> None:
    lengths = {name: len(values) for name, values in arrays.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} {length:,}" for name, length in lengths.items())
        raise InputError(f"{args.file}: the arrays have different lengths ({listed}): put a whole copy there")


def read(args: Args) -> tuple[str, Arrays]:
    """Return the name of the file's format, which is printed, and its arrays as arguments of `write_dataset`.

    Raises InputError if the file is missing or damaged, or if its format is unknown.
    """
    if not args.path.is_file():
        if args.path.suffix in (".npz", ".hdf5", ".h5"):
            raise InputError(f"there is no file {args.file}")
        return "a dataset", of_dataset(args)
    try:
        with args.path.open("rb") as file:
            head = file.read(512)
    except OSError as error:
        raise unreadable(args.path, error) from None
    if h5py.is_hdf5(args.path):
        return _read_hdf5(args)
    if not head.startswith(b"PK"):
        raise _unknown(args, f"{kind_of(head)}no .npz or HDF5 file")
    archive = Archive(args.path)
    found = next((each for each in FORMATS if all(key in archive for key in each.keys)), None)
    if found is None:
        raise _unknown(args, f"an archive of {', '.join(archive.keys)}")
    log.info(f"{args.file} is {found.name}")
    try:
        return found.name, found.read(args, archive)
    except (ValueError, TypeError, IndexError) as error:
        raise InputError(f"{args.file} does not fit {found.name} ({error}): put a whole copy in its place") from None


def _read_hdf5(args: Args) -> tuple[str, Arrays]:
    try:
        with opened(args.path) as file:
            if all(key in file for key in d4rl.KEYS):
                if not args.output.startswith(MINARI):
                    raise InputError(f"{args.file} is in D4RL's layout already: give it as --dataset")
                return "D4RL's layout", of_dataset(args)
            demos = list(filter(is_demo, file.get("data", ())))
            missing = {key for name in demos for key in ROBOMIMIC if key.replace("demo_0", name) not in file}
            if not demos:
                raise _unknown(args, f"an HDF5 file of {', '.join(file)}")
            if missing:
                raise InputError(
                    f"{args.file} has demonstrations without {', '.join(sorted(key.split('/')[-1] for key in missing))}"
                    ": extract them with robomimic's dataset_states_to_obs.py"
                )
            log.info(f"{args.file} is robomimic's HDF5")
            return "robomimic's HDF5", of_robomimic(args, file)
    except (*BAD_FILE, TypeError, AttributeError) as error:  # the latter: a group in place of an array, or the reverse
        raise unreadable(args.path, error) from None


def _unknown(args: Args, what: str) -> InputError:
    known = "; ".join(f"{each.name} ({', '.join(each.keys)})" for each in FORMATS)
    return InputError(
        f"{args.file} is {what}, of no known format\nknown: {known}; robomimic's HDF5 (data/demo_0); "
        "docs/data.md has a recipe for pickles"
    )


def main(args: Args) -> None:
    """Convert the file. Raises InputError or RunError as `read` and `write_dataset` do."""
    kind, arrays = read(args)
    given = {name: np.squeeze(value) for name in ("action_low", "action_high") if (value := getattr(args, name))}
    given |= {name: value for name in ("env", "ref_scores") if (value := getattr(args, name))}
    write_dataset(args.output, **arrays | given, source=f"{args.path.name}, {kind}")


if __name__ == "__main__":
    command_line(main, Args)
