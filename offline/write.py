"""Write a dataset as one HDF5 file in D4RL's layout or as a Minari dataset, either completely or not at all."""

import contextlib
import dataclasses
import io
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import h5py
import minari
import numpy as np
from filelock import Timeout
from gymnasium.envs.registration import EnvSpec
from gymnasium.spaces import Box, Dict, flatdim, unflatten
from minari.data_collector import EpisodeBuffer
from minari.dataset.minari_dataset import parse_dataset_id
from minari.dataset.minari_storage import MinariStorage
from minari.namespace import create_namespace, list_local_namespaces
from minari.storage import get_dataset_path
from numpy.typing import ArrayLike

from common import files
from common.errors import InputError, RunError
from common.messages import log
from common.provenance import versions
from envs.make import unwrapped
from envs.settings import fits_json, require_constructor_arguments
from envs.spaces import alphabetical
from offline.arrays import Array, Transitions, checked, with_successors
from offline.minari import joined, require_vectors
from offline.recording import checked_attributes, distance_outside

Infos = dict[str, Array]  # by name [2, n]: each transition's number that came with obs, and with next_obs
MINARI = "minari:"  # prefix of an output that is a dataset's id, not a file


class Spaces(NamedTuple):
    """What a dataset stores of its environment, if that is unknown or if the actions have units of their own."""

    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    spec: EnvSpec | None


def write_dataset(
    output: str | Path,
    *,
    observations: ArrayLike,
    actions: ArrayLike,
    rewards: ArrayLike,
    terminations: ArrayLike,
    truncations: ArrayLike | None = None,
    episode_ends: ArrayLike | None = None,
    next_observations: ArrayLike | None = None,
    env: str | None = None,
    env_kwargs: dict[str, Any] | None = None,
    action_low: ArrayLike | None = None,
    action_high: ArrayLike | None = None,
    ref_scores: tuple[float, float] | None = None,
    source: str = "arrays",
) -> None:
    """Write arrays of your own as a dataset, completely or not at all. All are checked first.

    One row is one step of n, and episodes follow one another.

    - `output`: a file that ends in .hdf5, or minari:namespace/name-v0. It must not exist.
    - `observations` [n, obs_dim]: before each step. `next_observations`: after it, also at the end of an episode.
    - `actions` [n, action_dim]: in the units of their box. `rewards` [n].
    - `terminations` [n]: whether the MDP ended with this step, so that no value follows.
    - `truncations` [n]: whether a time limit or the recording ended the episode here. Instead you can give
      `episode_ends` [n], the last step of every episode. Of these, steps that do not terminate are truncated.
    - `env`: Gymnasium id of the environment for evaluation, as `--env` takes it, with its arguments `env_kwargs`.
    - `action_low`, `action_high`: box of the actions, one number or [action_dim]. By default it is that of `env`.
    - `ref_scores`: returns that score 0 and 100. `source`: a note on the data's origin, which the dataset keeps.

    Raises InputError if something is missing, does not fit or exists. Raises RunError if the disk has no room.
    """
    output = str(output)
    data = checked(observations, actions, rewards, terminations, truncations, episode_ends, next_observations)
    low_high = {"action_low": action_low, "action_high": action_high}
    attributes = {name: end for name, end in low_high.items() if end is not None}
    if not fits_json(env_kwargs):
        raise InputError(f"env_kwargs do not fit into JSON: {env_kwargs}")
    attributes |= {"env": env, "env_kwargs": json.dumps(env_kwargs or {})} if env else {}
    box = checked_attributes(output, attributes, data.actions.shape[1]).get("box")
    require_constructor_arguments(env_kwargs or {})
    if env_kwargs and not env:
        raise InputError("env_kwargs are given without env: give both")
    if ref_scores is not None and not _is_increasing(ref_scores):
        raise InputError(f"ref_scores are {ref_scores}: give two numbers, the smaller one first")
    spaces = _spaces(data, env, env_kwargs or {}, box)
    actions_box: Any = spaces.action_space
    if outside := int((distance_outside(data.actions, actions_box.low, actions_box.high) > 0).any(axis=1).sum()):
        share = outside / len(data.rewards)
        log.warning(f"{share:.2%} of the steps have actions outside their box: they are clipped when they are loaded")
    lost = int((data.timeouts & ~data.terminations).sum()) if next_observations is None else 0
    if lost == len(data.rewards):
        raise InputError("no step has a successor: give next_observations, or mark the last step of each episode only")
    in_minari = output.startswith(MINARI)
    if lost:
        fate = "are left out" if in_minari else "count in the returns only"
        log.warning(f"without next_observations, the last steps of {lost:,} cut episodes {fate}")
    if lost and in_minari:
        data = with_successors(data)
    episodes, cut = len(list(data.episodes())), int((data.timeouts & ~data.terminations).sum())
    recipe: dict[str, Any] = {
        "arguments": {"env": env} if env else {},
        "sources": [{"kind": source}],
        "transitions": len(data.rewards),
        "episodes": episodes,
        "versions": versions(),
    }
    with reserved(output) as before:
        if before is not None:
            raise InputError(f"{output} exists: give another output")
        if in_minari:
            data = data._replace(actions=data.actions.astype(actions_box.dtype))
            write_minari(output.removeprefix(MINARI), data, spaces, recipe, ref_scores)
        else:
            arrays = _d4rl_arrays(data)
            if next_observations is None:
                del arrays["next_observations"]
            attributes |= {"action_low": actions_box.low, "action_high": actions_box.high}
            _write_hdf5(Path(output), arrays, attributes | _recipe_and_scores(recipe, ref_scores))
    log.info(
        f"{len(data.rewards):,} steps in {episodes:,} episodes ({episodes - cut:,} terminated, {cut:,} cut) are "
        f"written to {output}"
    )


def _is_increasing(scores: object) -> bool:
    """Return whether these are two finite numbers, the smaller one first."""
    try:
        low, high = np.asarray(scores, np.float64)
    except (TypeError, ValueError):
        return False
    return bool(np.isfinite([low, high]).all() and low < high)


def _spaces(data: Transitions, env_id: str | None, kwargs: dict[str, Any], box: tuple[Array, Array] | None) -> Spaces:
    """Return the spaces of the environment, with the `box` of the data if it is given.

    Raises InputError if the box is unknown, or if the environment does not start or does not fit the data.
    """
    obs_dim, action_dim = data.obs.shape[1], data.actions.shape[1]
    own_box = box and Box(box[0].astype(np.float32), box[1].astype(np.float32), dtype=np.float32)
    if env_id is None:
        if own_box is None:
            raise InputError("the box of the actions is unknown: give action_low and action_high, or env")
        return Spaces(Box(-np.inf, np.inf, (obs_dim,), np.float32), own_box, None)
    env = unwrapped(env_id, **kwargs)
    env.close()
    sizes = flatdim(env.observation_space), flatdim(env.action_space)
    if sizes != (obs_dim, action_dim):
        raise InputError(
            f"the arrays have {obs_dim} observations and {action_dim} actions, {env_id} has {sizes[0]} and {sizes[1]}: "
            "give another env, or none"
        )
    return Spaces(env.observation_space, own_box or env.action_space, env.spec)


@contextlib.contextmanager
def reserved(output: str) -> Iterator[dict[str, Any] | None]:
    """Yield the recipe of the dataset at `output`, or None if nothing is there and a dataset can be written.

    No other command can write there until the block ends. Raises InputError if one is writing, if something else is
    there, or if `output` cannot be written.
    """
    path = _path_of(output)
    with contextlib.ExitStack() as stack:
        try:
            if not path.exists():
                stack.enter_context(files.only_writer(path))
                _require_writable(output, path)
            recipe = _recipe_of(output, path) if path.exists() else None  # another command may just have ended
        except Timeout:
            raise InputError(f"another command is writing {output}: wait for it, or give another --output") from None
        except OSError as error:
            raise InputError(f"{output} cannot be written ({error.strerror or error}): give another --output") from None
        yield recipe


def _path_of(output: str) -> Path:
    if output.startswith(MINARI):
        try:
            parse_dataset_id(output.removeprefix(MINARI))
        except (ValueError, TypeError):
            raise InputError(f"--output {output}: give {MINARI}namespace/name-v0") from None
        return Path(get_dataset_path(output.removeprefix(MINARI)))
    if Path(output).suffix != ".hdf5":
        raise InputError(f"--output {output}: give a file that ends in .hdf5, or {MINARI}namespace/name-v0")
    return Path(output)


def _recipe_of(output: str, path: Path) -> dict[str, Any]:
    try:
        if output.startswith(MINARI):
            return dict(json.loads(str(MinariStorage.read_raw_metadata(path / "data")["recipe"])))
        with h5py.File(path) as file:
            return dict(json.loads(file.attrs["recipe"]))
    except (KeyError, TypeError, ValueError, OSError):  # an OSError where it is not HDF5 at all
        raise InputError(f"{output} exists and was not written by this command: give another --output") from None


def _require_writable(output: str, path: Path) -> None:
    if output.startswith(MINARI):
        aside = _aside(path)
        shutil.rmtree(aside, ignore_errors=True)  # left by a command that was killed
        aside.mkdir()
        aside.rmdir()
    else:
        aside = path.with_name(path.name + ".part")
        aside.unlink(missing_ok=True)
        aside.touch(exist_ok=False)  # it follows no link
        aside.unlink()


def write_d4rl(
    path: Path,
    transitions: Transitions,
    env_id: str,
    env: gym.Env[Any, Any],
    recipe: dict[str, Any],
    ref_scores: tuple[float, float] | None = None,
    settings: dict[str, Any] | None = None,
) -> None:
    """Write D4RL's arrays: observations, actions, rewards, next_observations (float32), terminals, timeouts (bool).

    Attributes: env and env_kwargs (to make the environment), action_low and action_high (the box of its actions), the
    recipe (JSON), and ref_min_score and ref_max_score if given. `env`: the environment as gym.make makes it.
    `settings`: the arguments that `envs.make.make` got. Arguments of the registration that do not fit into JSON, such
    as a class, are left to it.

    Raises RunError if the file cannot be written.
    """
    box: Any = env.action_space
    assert env.spec is not None  # an environment made by gym.make has one
    attributes = {
        "env": env_id,
        "env_kwargs": json.dumps({k: v for k, v in (env.spec.kwargs | (settings or {})).items() if fits_json(v)}),
        "action_low": box.low,
        "action_high": box.high,
    }
    _write_hdf5(path, _d4rl_arrays(transitions), attributes | _recipe_and_scores(recipe, ref_scores))


def _d4rl_arrays(transitions: Transitions) -> dict[str, Array]:
    return {
        "observations": transitions.obs,
        "actions": transitions.actions.astype(np.float32),
        "rewards": transitions.rewards,
        "terminals": transitions.terminations,
        "timeouts": transitions.timeouts,
        "next_observations": transitions.next_obs,
    }


def _recipe_and_scores(recipe: dict[str, Any], ref_scores: tuple[float, float] | None) -> dict[str, Any]:
    return {"recipe": json.dumps(recipe, indent=2), **_scores(ref_scores)}


def _write_hdf5(path: Path, arrays: dict[str, Array], attributes: dict[str, Any]) -> None:
    data = io.BytesIO()  # in memory first: on a full disk, HDF5 raises errors of its own, more than once
    with h5py.File(data, "w") as file:
        for name, values in arrays.items():
            file.create_dataset(name, data=values, compression="gzip", shuffle=True, fletcher32=True)
        file.attrs.update(attributes)
    try:
        with files.replacing(path) as out:
            out.write(data.getbuffer())
    except OSError as error:
        raise _no_room(path, error.strerror) from None


def write_minari(
    dataset_id: str,
    transitions: Transitions,
    env: gym.Env[Any, Any] | Spaces,
    recipe: dict[str, Any],
    ref_scores: tuple[float, float] | None = None,
    infos: Infos | None = None,
) -> None:
    """Write the Minari dataset `dataset_id` into $MINARI_DATASETS_PATH (default: ~/.minari/datasets).

    `env` is the environment as gym.make makes it. Observations and actions have the structure and precision of its own
    spaces, and its whole spec is stored. A cut is stored as a truncation. An episode's `infos` begin with those of its
    reset. The recipe (JSON) is in the metadata.

    Raises InputError if an observation is not in its space, and RunError if the dataset cannot be written.
    """
    require_vectors(env.observation_space)
    folder = get_dataset_path(dataset_id)
    aside = _aside(folder)
    try:
        (aside / "data").mkdir(parents=True)
        # Through the storage: create_dataset_from_buffers writes bit by bit into the folder that readers use.
        storage = MinariStorage.new(aside / "data", env.observation_space, env.action_space, _whole_spec(env))
        storage.update_metadata(
            {
                "dataset_id": dataset_id,
                "minari_version": minari.__version__,
                "algorithm_name": ", ".join(s.get("algorithm", s["kind"]) for s in recipe["sources"]),
                "description": "Written by onramp, as the entry recipe describes.",
                "recipe": json.dumps(recipe),
                **_scores(ref_scores),
            }
        )
        # In memory first: on a full disk, HDF5 crashes the process. h5py takes a file object as well as a path.
        path, empty = storage._file_path, Path(storage._file_path).read_bytes()
        storage._file_path = io.BytesIO(empty)
        try:
            storage.update_episodes(_buffers(transitions, env, infos or {}))
        except Exception as error:
            if not infos:
                raise
            log.warning(f"the infos cannot be stored, so the dataset has none: {error}")
            storage._file_path = io.BytesIO(empty)
            storage.update_episodes(_buffers(transitions, env, {}))
        Path(path).write_bytes(storage._file_path.getbuffer())
        storage.update_metadata({"dataset_size": storage.get_size()})
        for path in (aside / "data").iterdir():
            files.sync(path)
        if (namespace := parse_dataset_id(dataset_id)[0]) and namespace not in list_local_namespaces():
            with contextlib.suppress(ValueError):  # another process has just made it
                create_namespace(namespace)
        aside.rename(folder)
    except OSError as error:
        raise _no_room(folder, error.strerror) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _whole_spec(env: gym.Env[Any, Any] | Spaces) -> EnvSpec | None:
    """Return the spec with its time limit, as `gym.make` of its id gives it.

    A class that was registered itself is stored as module:Class, so that readers find it too. If the spec does not fit
    into JSON, print a warning and return None.
    """
    if env.spec is None:
        return None
    known = gym.registry.get(env.spec.id, env.spec)
    spec = dataclasses.replace(env.spec, disable_env_checker=known.disable_env_checker)
    module, name = (getattr(spec.entry_point, key, "") for key in ("__module__", "__qualname__"))
    found = None if module == "__main__" else getattr(sys.modules.get(module), name, None)
    if callable(found) and found is spec.entry_point:
        spec.entry_point = f"{module}:{name}"
    try:
        spec.to_json()
    except (TypeError, ValueError):
        log.warning(
            f"readers cannot make {spec.id} from the dataset, because its registration does not fit into "
            'JSON: register it with "module:Class" and plain arguments'
        )
        return None
    return spec


def _buffers(transitions: Transitions, env: gym.Env[Any, Any] | Spaces, infos: Infos) -> Iterator[EpisodeBuffer]:
    for episode in transitions.episodes():
        part = Transitions(*(values[episode] for values in transitions))
        obs = np.concatenate([part.obs, part.next_obs[-1:]])
        observations = _structured(alphabetical(env.observation_space), obs)
        if not np.allclose(joined(env.observation_space, observations), obs, rtol=1e-3, atol=1e-6):  # float16 rounds
            raise InputError("some observations are not in the environment's observation_space: leave env out")
        yield EpisodeBuffer(
            observations=observations,
            actions=part.actions,
            rewards=part.rewards,
            terminations=part.terminations,
            truncations=part.timeouts,
            infos={name: np.append(values[0, episode][:1], values[1, episode]) for name, values in infos.items()},
        )


def _structured(space: gym.Space[Any], obs: Array) -> Any:
    """Return flat obs [n, obs_dim] in the form of `space`: an array [n, ...], or a dict of them."""
    if not isinstance(space, Dict):
        return np.stack([unflatten(space, row) for row in obs])
    ends = np.cumsum([flatdim(each) for each in space.values()])
    parts = np.split(obs, ends[:-1], axis=1)
    return {key: _structured(each, part) for (key, each), part in zip(space.items(), parts, strict=True)}


def _scores(between: tuple[float, float] | None) -> dict[str, float]:
    return {"ref_min_score": between[0], "ref_max_score": between[1]} if between else {}


def _aside(folder: Path) -> Path:
    """Return a hidden folder next to `folder`, so that Minari does not list it."""
    return folder.with_name(f".{folder.name}.part")


def _no_room(path: Path, reason: str | None) -> RunError:
    return RunError(f"{path} cannot be written ({reason}): make room, then run the same command again")
