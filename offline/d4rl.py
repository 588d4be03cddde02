"""Read D4RL's datasets, and any HDF5 file in their layout, with h5py alone.

Source: Fu et al. 2020, "D4RL: Datasets for Deep Data-Driven Reinforcement Learning", arXiv 2004.07219. `d4rl.csv` holds
the ids, files, reference scores and time limits of its package, version 1.1 (Apache-2.0), and the sizes of files that
TensorFlow Datasets has recorded (Apache-2.0). docs/d4rl.md lists the files' known faults.
"""

import contextlib
import csv
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
from numpy.typing import NDArray

from common.errors import InputError
from envs.settings import is_plain
from offline.download import cache_folder, download, note_of, require_same
from offline.environments import BINARY_SCORES, ENVIRONMENTS
from offline.hdf5 import BAD_FILE, opened, unreadable
from offline.recording import Array, RawDataset, TransitionBlock, checked_attributes, nearest

SERVER = "https://rail.eecs.berkeley.edu/datasets/offline_rl/"
BLOCK_ROWS = 16_384
KEYS = ("observations", "actions", "rewards", "terminals")  # every file has them


class Entry(NamedTuple):
    """One of D4RL's ids: its file below SERVER, the returns that score 0 and 100, its time limit."""

    file: str
    reference: tuple[float, float] | None
    max_episode_steps: int
    action_bound: float
    """Bound (±) of its environment's actions in D4RL's source, also if that environment does not run here."""
    size: int | None
    """Bytes of the file, if they are known."""


def _ids() -> dict[str, Entry]:
    with Path(__file__).with_name("d4rl.csv").open() as file:
        return {
            row["id"]: Entry(
                row["file"],
                (float(row["ref_min_score"]), float(row["ref_max_score"])) if row["ref_min_score"] else None,
                int(row["max_episode_steps"]),
                action_bound=1.5 if row["id"].startswith("flow-merge") else 1.0,  # max_accel in d4rl/flow/merge.py
                size=int(row["bytes"]) if row["bytes"] else None,
            )
            for row in csv.DictReader(file)
        }


IDS = _ids()


# These environments keep the dynamics and rewards of those in which D4RL measured its scores (docs/d4rl.md).
_SCORES = {env: IDS[dataset_id].reference for dataset_id, env in ENVIRONMENTS.items() if IDS[dataset_id].reference}
_SCORES |= BINARY_SCORES


def reference(name: str | None) -> tuple[float, float] | None:
    """Return the returns that score 0 and 100 for `name`, or None if they are unknown.

    They are known for D4RL's ids, for environments whose returns D4RL measured, and for Adroit's binary tasks that
    continue after success.
    """
    entry = IDS.get(name or "")
    if entry:
        return entry.reference
    registered = (name or "").removeprefix("envs.d4rl:")  # an environment may also be given by its module or its name
    return _SCORES.get(registered, _SCORES.get(f"offline.environments:{registered}"))


def folder() -> Path:
    """Return D4RL's own cache: $D4RL_DATASET_DIR, else ~/.d4rl/datasets."""
    return cache_folder("D4RL_DATASET_DIR", "~/.d4rl/datasets")


def url(dataset_id: str) -> str:
    """Return the address of the file on D4RL's server, or in $D4RL_MIRROR, a copy of that server's folder."""
    return os.environ.get("D4RL_MIRROR", SERVER).rstrip("/") + "/" + IDS[dataset_id].file


def read(source: str | Path, compat: bool = False, horizon: int | None = None) -> RawDataset:
    """Read a D4RL id, downloaded at first use, or the HDF5 file at a path.

    An episode ends at each row whose `terminals` or `timeouts` is set, and at the file's end. In a file without
    `timeouts`, it also ends after `horizon` steps (default: the id's time limit). No transition joins two episodes.

    The step at a time-out is a transition only if the file holds its `next_observations`. Otherwise its reward still
    counts in the return of the episode, if that has other steps. A terminal step is always a transition. If its
    successor is unknown, its own observation takes its place, and the termination masks it.

    `compat`: convert the file exactly as D4RL's `qlearning_dataset` does instead. Then `next_observations` are not
    read, terminal steps lead into the next episode, and the last row is dropped.

    Raises InputError if the id is unknown, or if the file cannot be downloaded, is damaged or is not in this layout.
    """
    path, entry = _locate(str(source))
    with _layout(path) as layout:
        return _recording(layout, str(source), entry, compat, horizon)


def _locate(source: str) -> tuple[Path, Entry | None]:
    """Return the file of an id, downloaded at first use, with the id's entry; or the file at a path, with None."""
    if source not in IDS:
        if not source.endswith((".hdf5", ".h5")) and not Path(source).is_file():
            raise InputError(f"there is no dataset {source}{nearest(source, list(IDS))}")
        return Path(source), None
    path = folder() / Path(IDS[source].file).name
    if not path.exists():
        download(url(source), path, check=_check_layout, size=IDS[source].size)
    if not note_of(path).exists():  # later files are compared with it, so it must be whole
        _check_layout(path)
    require_same(path)
    return path, IDS[source]


def _check_layout(path: Path) -> None:
    with _layout(path):
        pass


def trajectories(source: str | Path, compat: bool = False, horizon: int | None = None) -> Iterator[dict[str, Array]]:
    """Yield each episode of a file: observations [steps, obs_dim], actions, rewards and terminals. No row is dropped.

    `compat`: cut the episodes as D4RL's `sequence_dataset` does, which leaves out an unfinished last one. Raises
    InputError as `read` does.
    """
    path, entry = _locate(str(source))
    with _layout(path) as layout:
        terminals = layout.marks("terminals")
        # D4RL's own count starts at 1 in every episode but the first, so only the first has its full length.
        ends = terminals | _finals(layout, terminals, entry, horizon, (1, 1) if compat else (0, 0))
        ends[-1] |= not compat
        first = 0
        for end in (np.flatnonzero(ends) + 1).tolist():
            yield {key: layout.file[key][first:end].reshape(end - first, *layout.file[key].shape[1:]) for key in KEYS}
            first = end


@contextlib.contextmanager
def _layout(path: Path, shape: tuple[int, int, int] | None = None) -> Iterator["_Layout"]:
    """Open a file in D4RL's layout. It is closed after `with`, so the caller can then open it in any mode.

    Raises InputError if it is damaged, not in this layout, or not of the `shape` that it had before.
    """
    try:
        with opened(path) as file:
            try:
                layout = _Layout(path, file)
            except (TypeError, AttributeError) as error:  # a key is not an array
                raise unreadable(path, error) from None
            if shape not in (None, layout.shape):
                raise InputError(f"{path} was changed while it was read: run the same command again")
            yield layout
    except BAD_FILE as error:
        raise unreadable(path, error) from None


class _Layout:
    """An open file in D4RL's layout. Keys, shapes and types are checked; a hostile file is refused before reading."""

    def __init__(self, path: Path, file: h5py.File) -> None:
        self.path, self.file = path, file
        if missing := [key for key in KEYS if key not in file]:
            raise InputError(
                f"{path} has no {', '.join(missing)}: it is not in D4RL's layout; see tools.convert (docs/data.md)"
            )
        self.rows = self._dataset("rewards").shape[0]
        if self.rows == 0:
            raise InputError(f"{path} is empty: it holds no transitions")
        self.obs_dim, self.action_dim = self._width("observations"), self._width("actions")
        if "next_observations" in file and self._width("next_observations") != self.obs_dim:
            raise InputError(f"{path}: observations and next_observations have different widths")
        for key in ("rewards", "terminals", *(["timeouts"] if "timeouts" in file else [])):
            if self._dataset(key).shape not in ((self.rows,), (self.rows, 1)):
                raise InputError(f"{path}: {key} has shape {file[key].shape}, not {(self.rows,)}")

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return rows, obs_dim and action_dim."""
        return self.rows, self.obs_dim, self.action_dim

    def _width(self, key: str) -> int:
        shape = self._dataset(key).shape
        if len(shape) != 2 or shape[0] != self.rows or shape[1] == 0:
            raise InputError(f"{self.path}: {key} has shape {shape}, not ({self.rows}, n): one vector a transition")
        return int(shape[1])

    def _dataset(self, key: str) -> Any:
        """Return the array `key`. Raises InputError unless its numbers are in this very file and were written."""
        link = self.file.get(key, getlink=True)
        data = self.file[key] if isinstance(link, h5py.HardLink) else None
        if not isinstance(data, h5py.Dataset) or data.external or data.is_virtual:
            raise InputError(f"{self.path}: {key} is stored outside this file: give a file that holds the array itself")
        if data.dtype.kind not in "biuf" or data.ndim == 0:
            raise InputError(
                f"{self.path}: {key} holds {data.dtype}, shape {data.shape}: an array of numbers is needed"
            )
        stored, promised = data.id.get_storage_size(), data.size * data.dtype.itemsize
        if promised > max(2**26, 2000 * stored):  # denser than gzip can pack: it would fill memory or disk with nothing
            raise InputError(
                f"{self.path}: {key} promises {promised:,} bytes but stores {stored:,}: give a complete file"
            )
        return data

    def block_rows(self) -> int:
        """Return about BLOCK_ROWS, in whole chunks, so that each chunk is unpacked once."""
        chunks = self.file["observations"].chunks
        rows = int(chunks[0]) if chunks else 1
        return rows * max(1, BLOCK_ROWS // rows)

    def column(self, key: str, first: int = 0, last: int | None = None) -> Array:
        """Return the rows from `first` up to `last` of an array with one number a row: [n]."""
        values: Array = self.file[key][first:last]
        return values.reshape(-1)

    def marks(self, key: str, first: int = 0, last: int | None = None) -> NDArray[np.bool_]:
        """Return which rows are marked, by a number other than 0: [n]. Raises InputError if one is not finite."""
        values = self.column(key, first, last)
        if len(bad := np.flatnonzero(~np.isfinite(values))):
            row = first + int(bad[0])
            raise InputError(f"{self.path}: {key} of row {row:,} is {values[bad[0]]}: give 0 or 1")
        return np.asarray(values != 0)


def _recording(layout: _Layout, source: str, entry: Entry | None, compat: bool, horizon: int | None) -> RawDataset:
    path, shape = layout.path, layout.shape
    facts = checked_attributes(path, layout.file.attrs, layout.action_dim)
    if entry:
        bound = np.full(layout.action_dim, entry.action_bound)
        facts = {"box": (-bound, bound), "reference": entry.reference} | facts
        facts |= {"env": ENVIRONMENTS.get(source), "untrusted_env": None}
    else:
        env, kwargs = facts.get("env"), facts.get("env_kwargs")
        known = reference(env)
        if known and env and kwargs and not is_plain(env, kwargs):  # which asks an environment that must be here
            known = None
        facts = {"reference": known} | facts
    rewards = layout.column("rewards")
    # A kitchen episode ends when all four tasks are complete. Its files do not mark that; WSRL's fork of D4RL does.
    complete = 4.0 if entry and source.startswith("kitchen") and not compat else np.nan
    terminals = layout.marks("terminals") | (rewards == complete)
    finals = _finals(layout, terminals, entry, horizon, (1, 0) if compat else (0, 0))
    ends = terminals | finals  # of episodes, the file's last row included
    ends[-1] = True
    next_known = "next_observations" in layout.file and not compat
    # The rows that become transitions. A step's successor is in the next row, unless the file holds it.
    if next_known:
        keep = np.full(layout.rows, True)
    elif compat:
        keep = ~finals
        keep[-1] = False
    else:
        keep = terminals | ~ends
    last_rows = np.flatnonzero(ends)
    counts = np.cumsum(keep)[last_rows]  # of transitions, up to each episode's end
    some = np.diff(counts, prepend=0) > 0
    lost = rewards[last_rows].astype(np.float64)
    lost[np.isnan(lost)] = np.inf  # NaN marks an episode that dropped none
    lost[keep[last_rows]] = np.nan
    if not some.any():
        raise InputError(f"{path}: no step has a successor, so it holds no transitions")

    def blocks() -> Iterator[TransitionBlock]:
        with _layout(path, shape) as layout:
            step = layout.block_rows()
            for first in range(0, layout.rows, step):
                rows = slice(first, min(first + step, layout.rows))
                if not keep[rows].any():
                    continue
                block = _block(layout, rows.start, rows.stop, next_known, None if compat else ends[rows])
                block = block._replace(terminations=block.terminations | (block.rewards == complete))
                yield block if keep[rows].all() else TransitionBlock(*(part[keep[rows]] for part in block))

    stat = path.stat()
    return RawDataset(
        id=source, obs_dim=layout.obs_dim, action_dim=layout.action_dim, ends=counts[some],
        dropped_final_rewards=lost[some], blocks=blocks, rewards=lambda: rewards[keep],
        version=(str(path.resolve()), stat.st_size, stat.st_mtime_ns, compat, horizon),
        bad_reward_rows=np.flatnonzero(~np.isfinite(rewards)), **facts,
    )  # fmt: skip


def _block(layout: _Layout, first: int, last: int, next_known: bool, ends: Array | None) -> TransitionBlock:
    """Return the rows from `first` up to `last`, with the file's successors if they are `next_known`.

    Otherwise the successor is the next row. Rows in the mask `ends` [n] then are their own successors, since their next
    row is another episode's.
    """
    file = layout.file
    obs: Array = file["observations"][first : last if next_known else last + 1]
    if next_known:
        next_obs: Array = file["next_observations"][first:last]
    else:
        next_obs = np.concatenate([obs[1 : last - first], obs[-1:]])
        obs = obs[: last - first]
        if ends is not None:
            next_obs[ends] = obs[ends]
    rewards, terminations = layout.column("rewards", first, last), layout.marks("terminals", first, last)
    return TransitionBlock(obs, file["actions"][first:last], rewards, next_obs, terminations)


def _finals(
    layout: _Layout, terminals: NDArray[np.bool_], entry: Entry | None, horizon: int | None, restart: tuple[int, int]
) -> NDArray[np.bool_]:
    """Return which rows a time limit ends, bool [rows]: as the file marks them, else by a count of steps.

    `restart`: the counts to restart from after a terminal step and after a time limit. D4RL's are not both 0.
    Raises InputError if the time limit is unknown, is not a whole number of at least 1, or is not needed.
    """
    if horizon is not None and not (isinstance(horizon, int | np.integer) and horizon >= 1):
        raise InputError(f"--horizon is {horizon}: give the time limit in steps, a whole number of at least 1")
    if "timeouts" in layout.file:
        if horizon is not None:
            raise InputError(f"{layout.path} marks its time-outs itself (timeouts): leave --horizon out")
        return layout.marks("timeouts")
    limit = horizon or (entry and entry.max_episode_steps)
    if not limit:
        raise InputError(
            f"{layout.path} has no timeouts, so the ends of its episodes are unknown: give their time limit as "
            "--horizon"
        )
    finals, step, (after_terminal, after_limit) = np.zeros(layout.rows, bool), 0, restart
    for row, terminal in enumerate(terminals.tolist()):
        finals[row] = step == limit - 1
        step = after_limit if finals[row] else after_terminal if terminal else step + 1
    return finals
