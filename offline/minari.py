"""Read Minari's datasets, local or remote, with Minari's own library.

An episode has one more observation than actions, so every step is a transition with its true successor. Dict
observations are joined as `envs.make.make` joins those of the environment. `minari.txt` lists the datasets of D4RL and
MuJoCo on Minari's server.
"""

import contextlib
import functools
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, flatdim, flatten
from huggingface_hub import constants
from minari import MinariDataset, download_dataset, list_local_datasets, load_dataset
from minari.dataset.minari_storage import MinariStorage
from minari.storage import get_dataset_path
from minari.storage.remotes import DEFAULT_REMOTE

from common.errors import InputError
from common.messages import log
from envs.make import register_robotics
from envs.spaces import alphabetical
from offline.download import locked, require_connection
from offline.recording import Array, RawDataset, TransitionBlock, checked_attributes, nearest

SMALLEST_EPISODE = 100  # bytes; in HDF5, the names and shapes of its arrays take more
HARMLESS = ("RecordEpisodeStatistics", "FlattenObservation")  # wrappers that change no data, or as we do
BLOCK_ROWS = 10_000  # short episodes are joined into blocks of about this many transitions

# What the library raises on files that are damaged, missing or of another version.
_BAD_FILES = (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError, RuntimeError)


def is_id(name: str) -> bool:
    """Return whether `name` has the form of a Minari id: namespace/name-v0, possibly with a remote before it (hf://…).

    A name without a namespace is an id only if such a dataset is in Minari's folder, because Minari's server has none.
    """
    if re.fullmatch(r"(\w+://[-\w.]+/)?([-\w]+/)+[-\w]+-v\d+", name):
        return True
    return re.fullmatch(r"[-\w]+-v\d+", name) is not None and (get_dataset_path(name) / "data").exists()


def known() -> list[str]:
    """Return the ids in Minari's folder, and those of D4RL's and MuJoCo's datasets on Minari's server."""
    with Path(__file__).with_name("minari.txt").open() as file:
        return [*list_local_datasets(), *file.read().split()]


def read(source: str) -> RawDataset:
    """Read a Minari id, downloaded at first use into Minari's own folder ($MINARI_DATASETS_PATH).

    Raises InputError if the dataset does not exist, cannot be downloaded or read, or if its observations or actions are
    not vectors of numbers.
    """
    dataset_id = without_remote(source)
    folder = get_dataset_path(dataset_id)
    if not _is_here(dataset_id):
        _download(source, dataset_id)
    try:
        return _recording(_loaded(dataset_id), source)
    except _BAD_FILES as error:
        raise _damaged(folder, error) from None


def without_remote(source: str) -> str:
    """Return the id without the remote before it: D4RL/pen/human-v2 of hf://farama-minari/D4RL/pen/human-v2."""
    return source.rpartition("://")[2].partition("/")[2] if "://" in source else source


def _unfinished(dataset_id: str) -> Path:
    """Return the path of a file that is there while the dataset is downloaded, and after a kill."""
    return Path(get_dataset_path(), f".{dataset_id.replace('/', '-')}.part")


def _is_here(dataset_id: str) -> bool:
    is_there = (get_dataset_path(dataset_id) / "data" / "metadata.json").exists()  # which may arrive before the data
    return is_there and not _unfinished(dataset_id).exists()


def _loaded(dataset_id: str) -> MinariDataset:
    """Return the dataset in Minari's folder. Raises InputError if a package for it is missing, or one of _BAD_FILES."""
    data = get_dataset_path(dataset_id) / "data"
    episodes = int(MinariStorage.read_raw_metadata(data)["total_episodes"])
    size = sum(path.stat().st_size for path in data.rglob("*"))
    if not 0 <= episodes <= size // SMALLEST_EPISODE:  # the library allocates a number for each
        raise ValueError(f"its metadata.json has {episodes:,} episodes, its files have {size:,} bytes")
    try:
        return load_dataset(dataset_id)
    except ImportError as error:
        raise InputError(f"{data} cannot be read ({' '.join(str(error).split())})") from None


def reference(dataset_id: str) -> tuple[float, float] | None:
    """Return the returns that score 0 and 100, as a dataset in Minari's folder states them, else None."""
    try:
        is_here = is_id(dataset_id) and _is_here(dataset_id)
    except OSError:  # Minari makes its folder, which can be forbidden
        is_here = False
    if not is_here:
        return None
    try:
        scores = _scores(_loaded(dataset_id).storage.metadata)
    except _BAD_FILES as error:
        raise _damaged(get_dataset_path(dataset_id), error) from None
    return checked_attributes(dataset_id, scores, action_dim=0).get("reference")


def _scores(metadata: dict[str, Any]) -> dict[str, Any]:
    return {name: metadata[name] for name in ("ref_min_score", "ref_max_score") if metadata.get(name) is not None}


def _download(source: str, dataset_id: str) -> None:
    remote = source if "://" in source else os.environ.get("MINARI_REMOTE", DEFAULT_REMOTE)
    mark, data = _unfinished(dataset_id), get_dataset_path(dataset_id) / "data"
    try:
        if remote.startswith("hf://"):
            require_connection(constants.ENDPOINT)
        with locked(mark):  # another process may be downloading it: wait for that
            if not _is_here(dataset_id):
                mark.touch()
                try:
                    download_dataset(source, force_download=True)  # forced: a killed download may have left a folder
                except Exception:
                    if not data.exists():
                        mark.unlink()
                    raise
                mark.unlink()
    except Exception as error:  # each remote raises errors of its own library, and all are reported here
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        is_known = source.rpartition("farama-minari/")[2] in known()
        by_hand = f": get that folder by other means and put it into {get_dataset_path()}"
        by_hand += f", then delete {mark}" if mark.exists() else ""
        cure = by_hand if is_known else nearest(source, known())
        raise InputError(f"{source} is not in {get_dataset_path()} and cannot be downloaded ({reason}){cure}") from None


def _recording(dataset: MinariDataset, source: str) -> RawDataset:
    metadata, folder = dataset.storage.metadata, dataset.storage.data_path
    obs_space, action_space = dataset.observation_space, dataset.action_space
    if not isinstance(action_space, Box) or len(action_space.shape) != 1 or not _is_vector(obs_space):
        raise InputError(
            f"{source}: observations are {obs_space}, actions {action_space}; "
            "the algorithms here take vectors of numbers"
        )
    lengths = [int(facts["total_steps"]) for facts in dataset.storage.get_episode_metadata(dataset.episode_indices)]
    if sum(lengths) == 0:
        raise InputError(f"{source} is empty: it holds no transitions")
    ends = np.cumsum([length for length in lengths if length > 0])

    def blocks() -> Iterator[TransitionBlock]:
        waiting: list[TransitionBlock] = []
        for episode in _episodes(dataset, lengths):
            obs = joined(obs_space, episode.observations)
            if len(obs) != len(episode.rewards) + 1:
                raise _damaged(folder, ValueError("an episode lacks its last observation"))
            waiting.append(TransitionBlock(obs[:-1], episode.actions, episode.rewards, obs[1:], episode.terminations))
            if sum(len(block.rewards) for block in waiting) >= BLOCK_ROWS:
                yield _concatenated(waiting)
                waiting = []
        if waiting:
            yield _concatenated(waiting)

    attributes = _scores(metadata) | _environment(metadata, folder)
    low, high = action_space.low.astype(np.float64), action_space.high.astype(np.float64)
    if (high - low < np.finfo(np.float32).max).all():  # otherwise it is unbounded, and the environment's may be finite
        attributes |= {"action_low": low, "action_high": high}
    action_dim = int(action_space.shape[0])
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return RawDataset(
        id=source, obs_dim=flatdim(obs_space), action_dim=action_dim, ends=ends,
        dropped_final_rewards=np.full(len(ends), np.nan), blocks=blocks,
        rewards=lambda: np.concatenate([episode.rewards for episode in _episodes(dataset, lengths)]),
        version=tuple((str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files),
        **checked_attributes(source, attributes, action_dim),
    )  # fmt: skip


def _episodes(dataset: MinariDataset, lengths: list[int]) -> Iterator[Any]:
    """Yield the episodes that hold a step. Raises InputError for the library's errors."""
    try:
        for episode, length in zip(dataset.iterate_episodes(), lengths, strict=True):
            if len(episode.rewards) != length:
                raise ValueError("the length of an episode differs from its metadata")
            if length:
                yield episode
    except _BAD_FILES as error:
        raise _damaged(dataset.storage.data_path, error) from None


def _environment(metadata: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the attributes env and env_kwargs of the evaluation environment, else of the one that made the data.

    Minari's AntMaze datasets name evaluation environments with other walls than their data have (its issues 301 and
    304). In that case, the maze is that of the data. Marks of start and goal alone do not count as a difference.
    """
    specs = [json.loads(text) for key in ("eval_env_spec", "env_spec") if isinstance(text := metadata.get(key), str)]
    collected_in = _collected_in(metadata)
    if not specs:
        return {"env": collected_in} if collected_in else {}
    name, limit = str(specs[0].get("id")), specs[0].get("max_episode_steps")
    kwargs = dict(specs[0].get("kwargs") or {})
    if any("maze_map" in (spec.get("kwargs") or {}) for spec in specs):
        maze, data_maze = _maze(specs[0]), _maze(specs[-1])
        if maze and data_maze and _walls(maze) != _walls(data_maze):
            kwargs["maze_map"] = data_maze
            _warn_of_walls(path)
    for wrapper in specs[0].get("additional_wrappers") or []:
        if wrapper.get("name") == "ActionRepeat":
            kwargs["action_repeat"] = wrapper["kwargs"]["times"]
        elif wrapper.get("name") not in HARMLESS:
            _warn_of_wrapper(path, str(wrapper.get("name")))
    registered = gym.registry.get(name)
    if limit and not (registered and registered.max_episode_steps == limit):
        kwargs["max_episode_steps"] = limit
    if name.startswith("d4rl/"):  # registered by envs.d4rl, which offline.environments imports
        name = f"offline.environments:{name}"
    elif collected_in and collected_in.rpartition(":")[2] == name:
        name = collected_in
    return {"env": name, "env_kwargs": kwargs}


def _collected_in(metadata: dict[str, Any]) -> str | None:
    """Return the environment of tools.collect's recipe, else None. Unlike a spec, the recipe names its module."""
    with contextlib.suppress(KeyError, TypeError, ValueError):
        return str(json.loads(metadata["recipe"])["arguments"]["env"])
    return None


def _maze(spec: dict[str, Any]) -> Any:
    """Return the map of a spec's maze, the registered one if the spec has none of its own; None if it is unknown."""
    name, kwargs = str(spec.get("id")), spec.get("kwargs") or {}
    if "maze_map" not in kwargs and name not in gym.registry:
        with contextlib.suppress(InputError):  # without the package, the map is unknown
            register_robotics(name)
    registered = gym.registry[name].kwargs if name in gym.registry else {}
    return (registered | kwargs).get("maze_map")


def _walls(maze: list[list[Any]]) -> list[list[bool]]:
    return [[cell == 1 for cell in row] for row in maze]


@functools.cache  # a run reads its dataset more than once
def _warn_of_walls(path: Path) -> None:
    said = "the walls of its evaluation environment differ from those of its data: the data's maze is used"
    log.warning(f"{path.parent}: {said}")


@functools.cache
def _warn_of_wrapper(path: Path, name: str) -> None:
    log.warning(f"{path.parent}: its environment has the wrapper {name}, evaluations have not: give --env one with it")


def _is_vector(space: Space[Any]) -> bool:
    """Return whether it is a vector, or a dict of boxes and of what Gymnasium flattens to zeros and ones."""
    if not isinstance(space, Dict):
        return isinstance(space, Box) and len(space.shape) == 1
    kinds = Box | Discrete | MultiBinary | MultiDiscrete
    return all(isinstance(entry, kinds) or _is_vector(entry) for entry in space.spaces.values())


def require_vectors(space: Space[Any]) -> None:
    """Raise InputError if observations of this space cannot be read from a Minari dataset."""
    if not _is_vector(space):
        raise InputError(f"a Minari dataset cannot hold observations of {space}: write a file that ends in .hdf5")


def joined(space: Space[Any], values: Any) -> Array:
    """Return observations [steps, obs_dim], with a dict's entries in alphabetical order, as in `envs.make.make`."""
    if isinstance(space, Dict):
        entries = alphabetical(space).spaces.items()  # type: ignore[attr-defined]
        return np.concatenate([joined(entry, values[key]) for key, entry in entries], axis=1)
    array = np.asarray(values)
    if not isinstance(space, Box):
        array = np.stack([np.asarray(flatten(space, value)) for value in array])
    return array.reshape(len(array), -1)


def _concatenated(blocks: list[TransitionBlock]) -> TransitionBlock:
    return TransitionBlock(*(np.concatenate(parts) for parts in zip(*blocks, strict=True)))


def _damaged(path: Path, error: Exception) -> InputError:
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return InputError(f"{path} is not a whole Minari dataset ({reason}): put a whole copy in its place")
