"""Load a dataset into a full replay buffer, with its episodes, evaluation environment and reward transform."""

import contextlib
import hashlib
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from numpy.typing import NDArray
from torch import nn

from common.errors import InputError, RunError
from common.files import replacing
from common.memory import free_address_space, free_memory, report_out_of_memory
from common.normalize import FixedNormalizer
from common.replay_buffer import Batch, ReplayBuffer, pack
from envs.ogbench import hint
from offline import d4rl, minari, ogbench
from offline.download import cache_folder
from offline.recording import (
    Array,
    Episodes,
    RawDataset,
    TransitionBlock,
    action_box,
    distance_outside,
    nearest,
    warn_of_actions_outside,
    warn_of_another_box,
)
from offline.rewards import IDENTITY, RewardTransform

TANH_LIMIT = 1.0 - 1e-5  # the log-probability of an action of exactly ±1 is infinite under a tanh-Gaussian


@dataclass(kw_only=True)
class Dataset(Episodes):
    """Episodes one after another: the first `len(dataset)` rows of `buffer`.

    All rewards are scaled, `dropped_final_rewards` too.
    """

    buffer: ReplayBuffer
    rewards: RewardTransform = IDENTITY
    """The transform that was applied to the rewards. Online rewards need the same, once."""

    @property
    def truncations(self) -> NDArray[np.bool_]:
        """Return whether an episode was cut after each transition, by a time limit or the end of the data: [n]."""
        cut = np.zeros(len(self), bool)
        cut[self.ends - 1] = ~(self.column("terminations")[self.ends - 1] > 0)
        return cut

    def column(self, name: str) -> NDArray[np.float32]:
        """Return obs, actions, rewards, next_obs or terminations: [n, dim] or [n], on the CPU a view of the buffer."""
        parts = self.buffer.rows[: len(self)].split(self.buffer.widths, dim=1)
        values: NDArray[np.float32] = parts[Batch._fields.index(name)].cpu().numpy()
        return values[:, 0] if name in ("rewards", "terminations") else values

    def returns(self) -> NDArray[np.float64]:
        """Return the undiscounted sum of each episode's scaled rewards, a dropped one included: [episodes]."""
        return self.returns_of(self.column("rewards"))

    def return_to_go(self, gamma: float, failure: float | None = None) -> NDArray[np.float32]:
        """Return the discounted sum of the scaled rewards from each transition to its episode's end: [n].

        A termination ends the sum, also one inside an episode (OGBench).

        `failure`: in sparse-reward tasks, the scaled reward of a step without success. An episode with no other rewards
        is assumed to fail forever: each of its steps gets failure / (1 - gamma). Raises InputError if gamma is 1 then.

        Source: Nakamoto et al. 2023, "Cal-QL", arXiv 2303.05479, section 5 and its authors' code. Their tasks end with
        success. Here an episode that is cut while it fails, after a success, is also assumed to fail forever. With a
        finite sum, a failing state would be worth more the nearer the time limit is.
        """
        rewards, continues = self.column("rewards").astype(np.float64), 1.0 - self.column("terminations")
        if failure is not None and gamma == 1.0:
            raise InputError("--gamma is 1: returns-to-go of endless failure need a smaller one")
        to_go = np.empty_like(rewards)
        longest_first = np.argsort(-self.lengths, kind="stable")
        ends, lengths = self.ends[longest_first], self.lengths[longest_first]
        following = np.nan_to_num(self.dropped_final_rewards)
        if failure is not None:
            last = np.where(np.isnan(self.dropped_final_rewards), rewards[self.ends - 1], self.dropped_final_rewards)
            cut = self.column("terminations")[self.ends - 1] == 0
            following[cut & np.isclose(last, failure)] = failure / (1.0 - gamma)
        following = following[longest_first]
        for steps in range(1, int(lengths[0]) + 1):  # for all episodes at once, from their ends
            episodes = int(np.searchsorted(-lengths, -steps, side="right"))
            rows = ends[:episodes] - steps
            to_go[rows] = following = rewards[rows] + gamma * continues[rows] * following[:episodes]
        if failure is not None:
            failed = np.logical_and.reduceat(np.isclose(rewards, failure), self.starts)
            failed &= np.isnan(self.dropped_final_rewards) | np.isclose(self.dropped_final_rewards, failure)
            to_go[np.repeat(failed, self.lengths)] = failure / (1.0 - gamma)
        return to_go.astype(np.float32)

    def is_cut_while_negative(self, gamma: float) -> bool:
        """Return whether the last 1/(1 - gamma) rewards before some truncation sum to less than 0.

        The returns-to-go there exceed the true values, because their sum ends and the rewards would not.
        """
        horizon = round(1.0 / max(1.0 - gamma, 1e-9))
        sums = np.append(0.0, self.column("rewards").cumsum(dtype=np.float64))
        tails = sums[self.ends] - sums[np.maximum(self.starts, self.ends - horizon)]
        return bool((self.truncations[self.ends - 1] & (tails < 0)).any())

    def next_actions(self) -> NDArray[np.float32]:
        """Return the episode's next action after each transition: [n, action_dim], NaN after its last one."""
        following = np.roll(self.column("actions"), -1, axis=0)
        following[self.ends - 1] = np.nan
        return following

    def obs_statistics(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return the mean and standard deviation of obs: [obs_dim] each."""
        total, squares, n = 0.0, 0.0, len(self)
        obs = self.column("obs")
        shift = obs[0].astype(np.float64)  # near the mean, so that the difference of squares keeps its precision
        for first in range(0, n, 100_000):
            part = obs[first : first + 100_000] - shift
            total, squares = total + part.sum(0), squares + np.square(part).sum(0)
        mean = total / n
        deviation = np.sqrt(np.maximum(squares / n - np.square(mean), 0.0))
        return (mean + shift).astype(np.float32), deviation.astype(np.float32)

    def fit(self, normalizer: nn.Module) -> None:
        """Give a `FixedNormalizer` the statistics of obs. Another module, as without `--normalize-obs`, has none."""
        if isinstance(normalizer, FixedNormalizer):
            normalizer.set_statistics(*self.obs_statistics())

    def top(self, fraction: float) -> "Dataset":
        """Return the episodes of highest return that together hold `fraction` of the transitions, the best first.

        At least one episode is kept. Raises InputError if `fraction` is not in (0, 1].

        Source: "%BC" of Chen et al. 2021, "Decision Transformer", arXiv 2106.01345, section 5.1.
        """
        if not 0 < fraction <= 1:
            raise InputError(f"the top fraction is {fraction}: give a number in (0, 1]")
        best = np.argsort(-self.returns(), kind="stable")
        count = int(np.searchsorted(np.cumsum(self.lengths[best]), fraction * len(self) * (1 + 1e-12), side="right"))
        best = best[: max(1, count)]
        rows = torch.from_numpy(np.concatenate([np.arange(self.starts[i], self.ends[i]) for i in best]))
        buffer = ReplayBuffer(len(rows), self.buffer.obs_dim, self.buffer.action_dim, self.buffer.device)
        buffer.rows.copy_(self.buffer.rows[rows.to(self.buffer.device)])
        buffer.added = len(rows)
        lost = self.dropped_final_rewards[best]
        return replace(self, buffer=buffer, ends=np.cumsum(self.lengths[best]), dropped_final_rewards=lost)

    def weights(self, temperature: float = 0.1, baseline: bool = False) -> NDArray[np.float64]:
        """Return probabilities [n] that prefer good episodes: the softmax of normalised return / temperature.

        Raw returns are scaled to [0, 1] over the dataset, so the transform of rewards changes nothing. A larger
        temperature gives more uniform probabilities. With `baseline`, a linear regression on the episode's first obs is
        subtracted from its return, so that lucky starts do not count. Raises InputError if no difference is left.

        Source: Hong et al. 2023, "Harnessing Mixed Offline RL Datasets via Trajectory Weighting", arXiv 2306.13085:
        return weighting (section 4.1), with `baseline` advantage weighting (4.2).
        """
        scaled = self.returns()
        value = scaled - self.rewards.shift * (self.lengths + ~np.isnan(self.dropped_final_rewards))
        if baseline:
            first = np.column_stack([self.column("obs")[self.starts].astype(np.float64), np.ones(len(value))])
            value = value - first @ np.linalg.lstsq(first, value, rcond=None)[0]
        spread = np.ptp(value)
        if spread <= 1e-6 * np.abs(scaled).max():  # float32 rewards: a smaller spread is rounding
            what, other = ("advantage", "return or none") if baseline else ("return", "none")
            raise InputError(
                f"--weighting {what}: the episodes of {self.id} ({len(value):,}) all have the same {what}: "
                f"give --weighting {other}"
            )
        value = (value - value.min()) / spread
        each = np.repeat(np.exp((value - 1.0) / temperature), self.lengths)  # the largest is 1, so nothing overflows
        probabilities: NDArray[np.float64] = each / each.sum()
        return probabilities

    def fingerprint(self) -> str:
        """Return a checksum of the episodes and of the transitions as they are sampled (scaled, clipped)."""
        checksum = zlib.crc32(self.ends.tobytes())
        for first in range(0, len(self), 100_000):
            rows = self.buffer.rows[first : min(first + 100_000, len(self))]
            checksum = zlib.crc32(rows.cpu().contiguous().numpy().data, checksum)
        return f"{checksum:08x}"


def plain_id(source: str) -> str:
    """Return a dataset's name without `minari:`, the form of an output, and without its remote (hf://…)."""
    return minari.without_remote(source.removeprefix("minari:"))


def read(source: str | Path, compat: bool = False, horizon: int | None = None) -> RawDataset:
    """Read a D4RL id, the path of a file in D4RL's layout, an OGBench id, or a Minari id.

    `compat`: convert it exactly as D4RL's `qlearning_dataset` does. `horizon`: the time limit of a file that marks
    none. Both are for D4RL's files only.

    Raises InputError if there is no such dataset, or if it cannot be downloaded or read.
    """
    source = str(source).removeprefix("minari:")  # as an output of `offline.write`
    if source in d4rl.IDS or source.endswith((".hdf5", ".h5")) or Path(source).is_file():
        return d4rl.read(source, compat, horizon)
    for other, is_id, read_id in (
        ("OGBench", ogbench.IDS.__contains__, ogbench.read),
        ("Minari", minari.is_id, minari.read),
    ):
        if is_id(source):
            if compat or horizon is not None:
                raise InputError(f"--d4rl-compat and --horizon are for D4RL's files: {source} is {other}'s")
            return read_id(source)
    if named := hint(source):
        raise InputError(f"there is no dataset {source}. {named}")
    raise InputError(f"there is no dataset {source}{nearest(source, [*d4rl.IDS, *minari.known()])}")


@report_out_of_memory
def load(
    source: str | Path,
    device: torch.device | str = "cpu",
    capacity: int | None = None,
    rewards: RewardTransform = IDENTITY,
    normalize_returns: bool = False,
    max_action: float | None = TANH_LIMIT,
    compat: bool = False,
    horizon: int | None = None,
    mapped: bool | None = None,
    env: str | None = None,
    asked: dict[str, Any] | None = None,
) -> Dataset:
    """Load the dataset `source` (as `read` takes it) into a replay buffer.

    - `capacity`: rows of the buffer, at least the dataset's, which is the default.
    - `rewards`: each reward r becomes `rewards(r)`. With `normalize_returns`, r is first multiplied by
      1000 / (best − worst return), as in IQL on locomotion (Kostrikov et al. 2021, appendix B).
    - `max_action`: actions are rescaled from the environment's box to [-1, 1] and clipped to ±max_action. They are not
      clipped if it is None or with `compat`.
    - `mapped`: keep the rows on the disk, in a file in $ONRAMP_CACHE (default ~/.cache/onramp), instead of in memory.
      None: only on the CPU, and only if they take more than 80 % of the free memory.
    - `env`: the environment whose box of actions is used if the dataset states none. By default, it is the environment
      that the dataset names.
    - `asked`: the user's arguments for that environment, which must not differ from the dataset's.

    Raises InputError if the dataset cannot be downloaded or read, holds non-finite numbers or does not fit. It raises
    InputError too if the box of actions is unknown, or if `normalize_returns` finds equal returns. Raises RunError if
    an allocation fails, or if the disk has no room.
    """
    recording = read(source, compat, horizon)
    if len(rows := recording.bad_reward_rows):
        raise _not_finite(source, f"rewards of row {rows[0]:,}")
    capacity = len(recording) if capacity is None else capacity
    if capacity < len(recording):
        raise InputError(
            f"{source} has {len(recording):,} transitions, the replay buffer has room for {capacity:,}: "
            "give a larger capacity"
        )
    if normalize_returns:
        returns = recording.returns()
        if not np.isfinite(returns).all():
            bad = np.flatnonzero(~np.isfinite(recording.rewards()))
            raise _not_finite(source, f"rewards of transition {bad[0]:,}" if len(bad) else "returns")
        if (spread := float(np.ptp(returns))) == 0.0:
            raise InputError(f"{source}: all returns are equal, {returns[0]:g}: give --no-normalize-returns")
        rewards = rewards._replace(scale=rewards.scale * 1000.0 / spread)
    box = action_box(recording, env, asked)
    with contextlib.suppress(InputError):  # an environment that does not start has no box to compare with
        if env or recording.id not in d4rl.IDS:  # D4RL's boxes are known to be those of its environments
            warn_of_another_box(recording, env, asked)
    blocks = _Prepared(recording, box, rewards, None if compat else max_action)
    is_mapped = _should_map(4 * capacity * sum(blocks.widths), torch.device(device), mapped)
    file = _on_disk(blocks) if is_mapped else None
    buffer = ReplayBuffer(capacity, recording.obs_dim, recording.action_dim, device, file)
    if is_mapped:
        buffer.added = len(recording)
    else:
        for block in blocks.read():
            buffer.add(*block)
    warn_of_actions_outside(recording, env, box, blocks.outside, blocks.farthest, blocks.max_action is None)
    same = {each.name: getattr(recording, each.name) for each in fields(Episodes)}
    lost = rewards(recording.dropped_final_rewards)
    return Dataset(**same | {"dropped_final_rewards": lost}, buffer=buffer, rewards=rewards)


def _should_map(num_bytes: int, device: torch.device, asked: bool | None) -> bool:
    """Return whether rows of `num_bytes` stay on the disk. In memory they must fit, or `ReplayBuffer` refuses them.

    Raises InputError if the process has no addresses left to map them.
    """
    mapped = device.type == "cpu" and num_bytes > 0.8 * free_memory(device) if asked is None else asked
    if mapped and num_bytes > (free := free_address_space()):
        raise InputError(
            f"the dataset takes {num_bytes:,} bytes, in memory or mapped from the disk, and the limit of this process "
            f"(ulimit -v) leaves {free:,}: raise it"
        )
    return mapped


@dataclass
class _Prepared:
    """A recording's transitions in the form in which the buffer holds them."""

    recording: RawDataset
    box: tuple[Array, Array]
    """The lowest and the highest action, [action_dim]."""
    rewards: RewardTransform
    max_action: float | None
    outside: int = 0
    farthest: Array = field(default_factory=lambda: np.zeros(1))
    """After `read`: `outside` transitions have actions outside the box, by at most `farthest` [action_dim]."""

    @property
    def widths(self) -> tuple[int, ...]:
        return (self.recording.obs_dim, self.recording.action_dim, 1, self.recording.obs_dim, 1)

    def read(self) -> Iterator[TransitionBlock]:
        low, high = self.box
        unit = bool((low == -1).all() and (high == 1).all())
        first, self.outside, self.farthest = 0, 0, np.zeros(self.recording.action_dim)
        for recorded in self.recording.blocks():
            rewards, actions = np.asarray(recorded.rewards, np.float64), recorded.actions
            if self.rewards != IDENTITY:
                rewards = self.rewards(rewards)
            distance = distance_outside(actions, low, high)
            self.outside += int((distance > 0).any(1).sum())
            self.farthest = np.maximum(self.farthest, distance.max(0, initial=0.0))
            if not unit:
                actions = 2.0 * (actions - low) / (high - low) - 1.0
            with np.errstate(over="ignore"):  # numbers too large for float32 are refused below
                parts = (
                    part.astype(np.float32, copy=False) for part in recorded._replace(rewards=rewards, actions=actions)
                )
                block = TransitionBlock(*parts)
            for name, part in zip(TransitionBlock._fields, block, strict=True):
                if not np.isfinite(part).all():
                    row = first + int(np.argwhere(~np.isfinite(part))[0][0])
                    raise _not_finite(self.recording.id, f"{name} of transition {row:,}")
            first += len(rewards)
            if self.max_action is not None:
                block = block._replace(actions=np.clip(block.actions, -self.max_action, self.max_action))
            yield block


def _not_finite(source: str | Path, what: str) -> InputError:
    return InputError(
        f"{source}: {what} are not finite: give a dataset without such values "
        f"(`python -m tools.inspect_dataset {source}` counts them)"
    )


def _write(blocks: _Prepared, path: Path, warned: Path) -> None:
    with replacing(path) as file:
        first = 0
        for block in blocks.read():
            rows = pack(blocks.widths, first, *block)
            file.write(rows.data)
            first += len(rows)
        file.flush()  # a full disk raises here, before the .json file is written
        if blocks.outside:
            with replacing(warned) as facts:
                facts.write(json.dumps([blocks.outside, *blocks.farthest.tolist()]).encode())
        else:
            warned.unlink(missing_ok=True)  # a damaged one


def _facts(blocks: _Prepared, path: Path, warned: Path) -> tuple[int, Array] | None:
    """Return `outside` and `farthest` of the rows in `path`, or None if one of the two files must be written again."""
    try:
        if path.stat().st_size < 4 * len(blocks.recording) * sum(blocks.widths):  # a larger one has room for added rows
            return None
        none = [0] * (1 + blocks.recording.action_dim)
        outside, *farthest = json.loads(warned.read_text()) if warned.exists() else none
        return (int(outside), np.array(farthest, float)) if len(farthest) == len(none) - 1 else None
    except (FileNotFoundError, ValueError, TypeError):
        return None


def _on_disk(blocks: _Prepared) -> Path:
    """Return the file of packed rows, written at the first call. A .json file next to it holds facts for warnings."""
    cache = cache_folder("ONRAMP_CACHE", "~/.cache/onramp")
    recording = blocks.recording
    box = tuple(end.tolist() for end in blocks.box)
    made_of = (2, recording.version, box, *blocks.rewards, blocks.max_action, len(recording))
    name = hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]
    path = cache / f"{Path(recording.id).name}-{name}.rows"
    warned = path.with_suffix(".json")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        if (facts := _facts(blocks, path, warned)) is None:
            with FileLock(cache / ".lock"):  # another process may be writing it
                if (facts := _facts(blocks, path, warned)) is None:
                    _write(blocks, path, warned)
    except OSError as error:
        raise RunError(f"{path} cannot be written ({error.strerror}): make room, or set ONRAMP_CACHE") from None
    if facts is not None:
        blocks.outside, blocks.farthest = facts
    return path
