"""D4RL's datasets, and any HDF5 file in their layout, read with h5py alone.

Source: Fu et al. 2020, "D4RL: Datasets for Deep Data-Driven Reinforcement Learning", arXiv 2004.07219. `d4rl.csv` holds
the ids, files and reference scores of its package, version 1.1 (Apache-2.0). docs/d4rl.md: the files' known faults.
"""

import csv
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
from numpy.typing import NDArray

from common.errors import InputError
from offline.download import download
from offline.environments import BINARY_SCORES, ENVIRONMENTS
from offline.hdf5 import BAD_FILE, opened, unreadable
from offline.recording import Array, RawDataset, TransitionBlock, checked_attributes, named_environment, nearest

SERVER = "http://rail.eecs.berkeley.edu/datasets/offline_rl/"
BLOCK_ROWS = 16_384


class Entry(NamedTuple):
    """One of D4RL's ids: its file below SERVER, the returns that score 0 and 1, its time limit."""

    file: str
    reference: tuple[float, float] | None
    max_episode_steps: int
    action_bound: float
    """Its environment's box of actions is ± this in D4RL's source, also if that environment does not run here."""


def _ids() -> dict[str, Entry]:
    with Path(__file__).with_name("d4rl.csv").open() as file:
        return {
            row["id"]: Entry(
                row["file"],
                (float(row["ref_min_score"]), float(row["ref_max_score"])) if row["ref_min_score"] else None,
                int(row["max_episode_steps"]),
                action_bound=1.5 if row["id"].startswith("flow-merge") else 1.0,  # max_accel in d4rl/flow/merge.py
            )
            for row in csv.DictReader(file)
        }


IDS = _ids()


# D4RL measured its scores in environments whose dynamics and rewards these keep (docs/d4rl.md).
_SCORES = {env: IDS[dataset_id].reference for dataset_id, env in ENVIRONMENTS.items() if IDS[dataset_id].reference}
_SCORES |= BINARY_SCORES


def reference(name: str | None) -> tuple[float, float] | None:
    """The returns that score 0 and 100 for one of D4RL's ids, in an environment whose returns D4RL measured, or in an
    Adroit binary task that goes on.
    """
    entry = IDS.get(name or "")
    if entry:
        return entry.reference
    registered = (name or "").removeprefix("envs.d4rl:")  # an environment may also be given by its module or its name
    return _SCORES.get(registered, _SCORES.get(f"offline.environments:{registered}"))


def folder() -> Path:
    """D4RL's own cache: $D4RL_DATASET_DIR, else ~/.d4rl/datasets."""
    return Path(os.environ.get("D4RL_DATASET_DIR", "~/.d4rl/datasets")).expanduser()


def url(dataset_id: str) -> str:
    """Where D4RL keeps the file; $D4RL_MIRROR, a copy of that server's folder, takes its place."""
    return os.environ.get("D4RL_MIRROR", SERVER).rstrip("/") + "/" + IDS[dataset_id].file


def read(source: str | Path, compat: bool = False, horizon: int | None = None) -> RawDataset:
    """The recording of a D4RL id (downloaded at first use) or of the HDF5 file at a path.

    An episode ends where `terminals` or `timeouts` is set, at the file's end and, in a file without `timeouts`, after
    `horizon` steps (the id's time limit unless given). No transition joins two episodes. The step
    at a time-out is a transition only where the file holds its `next_observations`; else its reward still counts in
    the episode's return. A terminal step always is one; where its successor is unknown it is its own, which the
    termination masks.

    `compat`: instead exactly what D4RL's `qlearning_dataset` makes of the file, in which `next_observations` are not
    read, terminal steps lead into the next episode, and the last row is dropped.

    Raises InputError where the id is unknown, the file cannot be had, is damaged, or is not in this layout.
    """
    source = str(source)
    path, entry = _locate(source)
    with _Layout(path) as layout:
        return _recording(layout, source, entry, compat, horizon)


def _locate(source: str) -> tuple[Path, Entry | None]:
    """The file of an id, downloaded where it is not yet here, or at a path."""
    if source not in IDS:
        if not source.endswith((".hdf5", ".h5")) and not Path(source).is_file():
            raise InputError(f"there is no dataset {source}{nearest(source, list(IDS))}")
        return Path(source), None
    path = folder() / Path(IDS[source].file).name
    if not path.exists():
        download(url(source), path, check=_check_layout)
    return path, IDS[source]


def _check_layout(path: Path) -> None:
    with _Layout(path):
        pass


def trajectories(source: str | Path, compat: bool = False, horizon: int | None = None) -> Iterator[dict[str, Array]]:
    """The episodes of a file row by row: observations [steps, obs_dim], actions, rewards, terminals; nothing dropped.

    `compat`: as D4RL's `sequence_dataset` cuts them, which leaves out an unfinished last one. Raises as `read` does.
    """
    path, entry = _locate(str(source))
    with _Layout(path) as layout:
        terminals = layout.column("terminals") != 0
        # D4RL's own count starts at 1 in every episode but the first, so that only that one is whole.
        finals = _finals(layout, terminals, entry, horizon, after_limit=1 if compat else None)
        last_rows = np.flatnonzero(terminals | finals) if compat else _last_rows(terminals, finals)
        first = 0
        for last in (last_rows + 1).tolist():
            keys = ("observations", "actions", "rewards", "terminals")
            yield {key: layout.file[key][first:last].reshape(last - first, *layout.file[key].shape[1:]) for key in keys}
            first = last


class _Layout:
    """An HDF5 file in D4RL's layout, its keys, shapes and types checked; a hostile one is refused before it is read.

    It is open only within `with`, so that the caller can open the file in any mode afterwards. Raises InputError if it
    has not the `shape` [rows, obs_dim, action_dim] that it had before.
    """

    def __init__(self, path: Path, shape: tuple[int, int, int] | None = None) -> None:
        self.path, self._expected = path, shape

    def __enter__(self) -> "_Layout":
        self.file = opened(self.path)
        try:
            self._check()
        except InputError:
            self.file.close()
            raise
        except (*BAD_FILE, TypeError, AttributeError) as error:
            self.file.close()
            raise unreadable(self.path, error) from None
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.file.close()
        if isinstance(error, BAD_FILE):
            raise unreadable(self.path, error) from None

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.rows, self.obs_dim, self.action_dim

    def _check(self) -> None:
        missing = [key for key in ("observations", "actions", "rewards", "terminals") if key not in self.file]
        if missing:
            raise InputError(f"{self.path} has no {', '.join(missing)}: it is not in D4RL's layout")
        self.rows = self._dataset("rewards").shape[0]
        if self.rows == 0:
            raise InputError(f"{self.path} is empty: it holds no transitions")
        self.obs_dim = self._width("observations")
        self.action_dim = self._width("actions")
        if "next_observations" in self.file and self._width("next_observations") != self.obs_dim:
            raise InputError(f"{self.path}: observations and next_observations have different widths")
        for key in ("rewards", "terminals", *(["timeouts"] if "timeouts" in self.file else [])):
            if self._dataset(key).shape not in ((self.rows,), (self.rows, 1)):
                raise InputError(f"{self.path}: {key} has shape {self.file[key].shape}, not {(self.rows,)}")
        if self._expected not in (None, self.shape):
            raise InputError(f"{self.path} was changed while it was read: run the same command again")

    def _width(self, key: str) -> int:
        shape = self._dataset(key).shape
        if len(shape) != 2 or shape[0] != self.rows or shape[1] == 0:
            raise InputError(f"{self.path}: {key} has shape {shape}, not ({self.rows}, n): one vector a transition")
        return int(shape[1])

    def _dataset(self, key: str) -> Any:
        """The dataset `key`, if its numbers are in this very file and were really written."""
        link = self.file.get(key, getlink=True)
        data = self.file[key] if isinstance(link, h5py.HardLink) else None
        if not isinstance(data, h5py.Dataset) or data.external or data.is_virtual:
            raise InputError(f"{self.path}: {key} is not an array in this file but leads elsewhere: it is not read")
        if data.dtype.kind not in "biuf" or data.ndim == 0:
            raise InputError(
                f"{self.path}: {key} holds {data.dtype}, shape {data.shape}: an array of numbers is needed"
            )
        stored, promised = data.id.get_storage_size(), data.size * data.dtype.itemsize
        if promised > max(2**26, 2000 * stored):  # gzip packs no denser: it would fill memory or disk with nothing
            raise InputError(f"{self.path}: {key} promises {promised:,} bytes but stores {stored:,}: it is not read")
        return data

    def block_rows(self) -> int:
        """About BLOCK_ROWS, in whole chunks, so that each is unpacked once."""
        chunks = self.file["observations"].chunks
        rows = int(chunks[0]) if chunks else 1
        return rows * max(1, BLOCK_ROWS // rows)

    def column(self, key: str) -> Array:
        """A whole array of one number a row."""
        values: Array = self.file[key][:]
        return values.reshape(self.rows)


def _recording(layout: _Layout, source: str, entry: Entry | None, compat: bool, horizon: int | None) -> RawDataset:
    attributes = checked_attributes(layout.path, layout.file.attrs, layout.action_dim)
    envs = {"env": ENVIRONMENTS.get(source)} if entry else named_environment(attributes.get("env"))
    rewards = layout.column("rewards").astype(np.float64)
    # A kitchen's episode ends when all four tasks are complete, which its files do not say (WSRL's fork of D4RL does).
    complete = 4.0 if entry and source.startswith("kitchen") and not compat else np.nan
    terminals = (layout.column("terminals") != 0) | (rewards == complete)
    finals = _finals(layout, terminals, entry, horizon, after_limit=0 if compat else None)
    next_known = "next_observations" in layout.file and not compat
    last_rows = _last_rows(terminals, finals)
    keep = np.full(layout.rows, True) if next_known else _kept(terminals, finals, last_rows, compat)
    # Episodes of which at least one step is kept.
    kept_before = np.concatenate([[0], np.cumsum(keep)])
    ends = kept_before[last_rows + 1]
    some = np.diff(ends, prepend=0) > 0
    lost = np.where(np.isnan(rewards), np.inf, rewards)[last_rows]  # NaN marks an episode that lost none
    lost[keep[last_rows]] = np.nan
    if not some.any():
        raise InputError(f"{layout.path}: no step has a successor, so it holds no transitions")

    path, shape = layout.path, layout.shape

    def blocks() -> Iterator[TransitionBlock]:
        with _Layout(path, shape) as layout:
            step = layout.block_rows()
            for first in range(0, layout.rows, step):
                block = _block(layout, first, min(first + step, layout.rows), next_known, last_rows, compat)
                block = block._replace(terminations=block.terminations | (block.rewards == complete))
                rows = keep[first : first + step]
                yield block if rows.all() else TransitionBlock(*(part[rows] for part in block))

    def kept_rewards() -> Array:
        with _Layout(path, shape) as layout:
            return layout.column("rewards")[keep]

    stat, bound = path.stat(), entry.action_bound if entry else None
    return RawDataset(
        source, layout.obs_dim, layout.action_dim, ends[some], lost[some], blocks, kept_rewards,
        **envs, env_kwargs=attributes.get("env_kwargs", {}),
        action_low=attributes.get("action_low", bound and -bound), action_high=attributes.get("action_high", bound),
        reference=attributes.get("reference", entry.reference if entry else reference(envs["env"])),
        version=(str(path.resolve()), stat.st_size, stat.st_mtime_ns, compat, horizon),
        bad_reward_rows=np.flatnonzero(~np.isfinite(rewards)),
    )  # fmt: skip


def _block(layout: _Layout, first: int, last: int, next_known: bool, last_rows: Array, compat: bool) -> TransitionBlock:
    file = layout.file
    read_ahead = not next_known and last < layout.rows
    obs: Array = file["observations"][first : last + 1 if read_ahead else last]
    actions: Array = file["actions"][first:last]
    rewards: Array = file["rewards"][first:last].reshape(-1)
    terminations: Array = file["terminals"][first:last].reshape(-1) != 0
    if next_known:
        return TransitionBlock(obs, actions, rewards, file["next_observations"][first:last], terminations)
    n = last - first
    next_obs = obs[1:] if read_ahead else np.concatenate([obs[1:], obs[-1:]])
    if not compat:  # what follows an episode's last step belongs to another episode
        inside = last_rows[(last_rows >= first) & (last_rows < last)] - first
        next_obs = next_obs.copy()
        next_obs[inside] = obs[inside]
    return TransitionBlock(obs[:n], actions, rewards, next_obs, terminations)


def _kept(terminals: NDArray[np.bool_], finals: NDArray[np.bool_], last_rows: Array, compat: bool) -> NDArray[np.bool_]:
    """Which rows become transitions where only the next row tells a step's successor."""
    keep = ~finals
    if not compat:
        keep[last_rows] = False
        keep |= terminals
    else:
        keep[-1] = False
    return keep


def _last_rows(terminals: NDArray[np.bool_], finals: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The last row of each episode; the file's last row ends one too."""
    ends = terminals | finals
    ends[-1] = True
    return np.flatnonzero(ends)


def _finals(
    layout: _Layout, terminals: NDArray[np.bool_], entry: Entry | None, horizon: int | None, after_limit: int | None
) -> NDArray[np.bool_]:
    """Which rows a time limit ends: as the file says, else by count (D4RL's own, where `after_limit` is given)."""
    if horizon is not None and not (isinstance(horizon, int | np.integer) and horizon >= 1):
        raise InputError(f"--horizon is {horizon}: give the time limit in steps, a whole number of at least 1")
    if "timeouts" in layout.file:
        if horizon is not None:
            raise InputError(f"{layout.path} marks its time-outs itself (timeouts): leave --horizon out")
        finals: NDArray[np.bool_] = layout.column("timeouts") != 0
        return finals
    limit = horizon or _horizon(layout, entry)
    return _time_limits(terminals, limit) if after_limit is None else _count_to(limit, terminals, after_limit)


def _time_limits(terminals: NDArray[np.bool_], horizon: int) -> NDArray[np.bool_]:
    """Where a time limit of `horizon` steps ends an episode, for files that do not say (D4RL's v0)."""
    starts = np.concatenate([[0], np.flatnonzero(terminals[:-1]) + 1])
    step = np.arange(len(terminals)) - np.repeat(starts, np.diff(starts, append=len(terminals)))
    limits: NDArray[np.bool_] = step % horizon == horizon - 1
    return limits


def _count_to(horizon: int, terminals: NDArray[np.bool_], after_limit: int) -> NDArray[np.bool_]:
    """D4RL's own count of steps: after a terminal step it goes on with 1, after a time limit with `after_limit`."""
    limits, step = np.zeros(len(terminals), bool), 0
    for row, terminal in enumerate(terminals.tolist()):
        limits[row] = step == horizon - 1
        step = after_limit if limits[row] else (0 if terminal else step) + 1
    return limits


def _horizon(layout: _Layout, entry: Entry | None) -> int:
    if entry is not None:
        return entry.max_episode_steps
    raise InputError(
        f"{layout.path} has no timeouts, so it does not say where episodes are cut: give their time limit as --horizon"
    )
