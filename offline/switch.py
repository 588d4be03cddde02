"""From a dataset to online learning: steps run from -offline_steps to online_steps, and 0 is the switch.

Before it a step is an update on the dataset; behind it a step of the environment. `--retain` says what is sampled then:

- none: online transitions alone, once the frozen policy has collected `--warmup-steps` (WSRL, Zhou et al. 2025);
- append: dataset and online transitions alike, as from one growing buffer (IQL, Kostrikov et al. 2021);
- mix: a fixed share of the dataset in every batch, spread evenly over it (RLPD, Ball et al. 2023; Cal-QL).
"""

import dataclasses
import itertools
import json
import re
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common import checkpoint
from common.arguments import OffPolicyArgs
from common.errors import InputError
from common.replay_buffer import Batch, ReplayBuffer, pack, uniform
from common.run import Run
from offline.dataset import load, read
from offline.scores import normalized, reference

Array = NDArray[np.float32]


@dataclass
class OfflineArgs(OffPolicyArgs):
    """What every algorithm takes that begins with a dataset."""

    may_be_zero: ClassVar[tuple[str, ...]] = ("offline_steps", "online_steps", "warmup_steps")

    env: str = ""
    """Gymnasium id of the environment; the dataset's own unless given."""
    eval_every: int = 5_000
    """Steps between evaluations, beside those on both sides of the switch."""
    checkpoint_every: int = 10_000
    """Steps between checkpoints."""

    # From data to online
    dataset: str = ""
    """A D4RL id, a Minari id, or the path of an HDF5 file in D4RL's layout."""
    offline_steps: int = 1_000_000
    """Updates on the dataset alone."""
    online_steps: int = 0
    """Environment steps behind them, those of all environments added up."""
    retain: Literal["none", "append", "mix"] = "append"
    """What is sampled online: no dataset (none), both as one buffer (append), a fixed share of it (mix)."""
    offline_ratio: float = 0.5
    """With --retain mix: the dataset's share of each batch."""
    warmup_steps: int = 5_000
    """With --retain none: environment steps with the frozen policy before the first online update."""
    utd: int = 1
    """Updates for each environment step (update-to-data ratio)."""
    buffer_size: int = 1_000_000
    """Online transitions that the replay buffer holds."""
    init_from: Path | None = None
    """A run folder of the same algorithm, with whose networks this run begins (wsrl: of cql and iql too; expo: its base
    policy alone)."""
    d4rl_compat: bool = False
    """Convert D4RL files exactly as D4RL's qlearning_dataset does."""
    horizon: int | None = None
    """Time limit of a dataset's file that marks no time-outs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.dataset:
            raise InputError("--dataset is missing: give a D4RL id, a Minari id or the path of a file (docs/data.md)")
        if self.offline_steps == 0 == self.online_steps:
            raise InputError("--offline-steps and --online-steps are 0: give one of them")
        if not 0 < self.offline_ratio < 1:
            raise InputError(f"--offline-ratio is {self.offline_ratio}: give a number between 0 and 1")
        batch_size = getattr(self, "batch_size", 256)
        if self.retain == "mix" and not 0 < round(self.offline_ratio * batch_size) < batch_size:
            raise InputError(
                f"--offline-ratio {self.offline_ratio} of {batch_size} transitions leaves none of one kind: "
                "give a larger --batch-size, or another --retain"
            )

    @property
    def task(self) -> str:
        return Path(self.dataset).stem if self.dataset.endswith((".hdf5", ".h5")) else self.dataset

    @property
    def span(self) -> tuple[int, int]:
        return -self.offline_steps, self.online_steps


T = TypeVar("T", bound=OfflineArgs)


def with_presets(args: T, presets: dict[str, dict[str, Any]]) -> T:
    """The arguments with the dataset's environment, and with what was left at None as the paper has it in the domain,
    which it says.

    `presets`: by domain, locomotion, antmaze, maze2d, adroit, adroit-binary or kitchen; those of adroit for the binary
    tasks and of locomotion for others where one has none of its own; empty where nothing depends on it.
    """
    recording = read(args.dataset, args.d4rl_compat, args.horizon)
    env = args.env or recording.env or ""
    chosen: dict[str, Any] = {} if args.env or recording.env_kwargs else {"env": env}
    of = domain(env, args.task)
    nearest = next((name for name in (of, of.removesuffix("-binary"), "locomotion") if name in presets), None)
    if args.online_steps and of == "adroit-binary" != domain(env, ""):  # Gymnasium-Robotics' sparse ones pay 10, -0.1
        sys.stderr.write(f"warning: {args.dataset} has sparse rewards, {env} perhaps not: --env adroit-binary/… has\n")
    if args.init_from and args.offline_steps is None:
        chosen["offline_steps"] = 0
    found = presets[nearest] if nearest else {}
    preset = {k: v for k, v in found.items() if getattr(args, k) is None and k not in chosen and v is not None}
    if preset:
        none = "" if nearest == of else f", there is none for {of}"
        sys.stderr.write(f"preset for {nearest}{none}: {', '.join(f'{k} {v}' for k, v in preset.items())}\n")
    return dataclasses.replace(args, **chosen, **preset)


def run_config(folder: Path) -> dict[str, Any]:
    """The config.json of a run folder that holds a checkpoint. Raises InputError where it is none."""
    if not checkpoint.exists(folder / "checkpoint" / "state.pt"):
        raise InputError(f"{folder} is not a run folder with a checkpoint: give another --init-from")
    try:
        config: dict[str, Any] = json.loads(checkpoint.read_bytes(folder / "config.json"))
    except (FileNotFoundError, ValueError):
        raise InputError(f"{folder}/config.json is missing or damaged: give another --init-from") from None
    return config


def domain(env: str, dataset: str) -> str:
    """What `with_presets` tells apart, by the names of the environment and the dataset."""
    name = f"{env} {dataset}".lower()
    words = {"antmaze": "antmaze", "kitchen": "kitchen", "maze2d": "maze2d|pointmaze"}
    words["adroit"] = r"adroit|\b(pen|door|hammer|relocate)-"  # not open-, not indoor-
    found = next((found for found, marks in words.items() if re.search(marks, name)), "locomotion")
    binary = "binary" in name or "sparse" in dataset.lower()
    return "adroit-binary" if found == "adroit" and binary else found


class Switch:
    """The dataset, the online transitions, and what of them is sampled when."""

    def __init__(
        self,
        args: OfflineArgs,
        run: Run,
        reward_scale: float = 1.0,
        reward_shift: float = 0.0,
        normalize_returns: bool = False,
        top: float = 1.0,
        discount: float | None = None,
        failure: float | None = None,
        online_returns: bool = True,
        full_batch: int = 0,
    ) -> None:
        """The rewards' arguments are those of `offline.dataset.load`; online rewards get the same.

        `top`: the share of the transitions that is kept, those of the best episodes (`Dataset.top`).
        `discount`: batches get returns-to-go with it (Cal-QL); an online episode is sampled once it is finished then.
        `failure`: as in `Dataset.return_to_go`, but of the raw reward. `online_returns`: false where they are needed
        before the switch alone. `full_batch`: the first online update waits until there are more online transitions
        than a batch of this size takes, as in WSRL's code; else half of the first batches would be one transition.

        Raises InputError as `load` does, and where nobody knows the dataset's environment.
        """
        self.args, self._algo, self._full_batch = args, run.config["algo"], full_batch
        self.dataset = load(
            args.dataset, run.device, reward_scale=reward_scale, reward_shift=reward_shift,
            normalize_returns=normalize_returns, compat=args.d4rl_compat, horizon=args.horizon,
            env=args.env,
        )  # fmt: skip
        if top < 1.0:
            self.dataset = self.dataset.top(top)
        self.env, self.env_kwargs = self.dataset.evaluation_env(args.env)
        data = self.dataset.buffer
        # Nothing is overwritten when the last turn of all environments goes beyond the end: a run can be given more.
        capacity = min(args.buffer_size, args.online_steps + args.num_envs)
        self.online_returns = online_returns and discount is not None
        self.online = ReplayBuffer(
            capacity, data.obs_dim, data.action_dim, run.device, returns_to_go=self.online_returns
        )
        self._rewards = scale, shift = self.dataset.reward_scale, self.dataset.reward_shift
        self.discount, self.failure = discount, None if failure is None else failure * scale + shift
        self._unfinished: list[list[Array]] = [[] for _ in range(args.num_envs)]  # packed rows
        self._returns_to_go: Tensor | None = None
        if discount is not None:
            to_go = self.dataset.return_to_go(discount, self.failure)
            self._returns_to_go = torch.from_numpy(to_go).to(run.device)
        self._order: Tensor | None = None
        self._fingerprint = self.dataset.fingerprint()
        new = not checkpoint.exists(run.folder / "checkpoint" / "state.pt")
        self._begins_with = args.init_from if new else None

    def begin(
        self,
        agent: object,
        obs_dim: int,
        action_dim: int,
        also: tuple[str, ...] = (),
        parts: tuple[str, ...] = (),
        alike: tuple[str, ...] = (),
    ) -> None:
        """Gives the agent of a new run the networks of --init-from, and the moments of their optimisers; before `open`,
        so that what does not fit leaves no folder behind.

        From a run of one of the algorithms `also` it takes what both have; given `parts`, those attributes alone, for
        which rewards do not matter; the arguments `alike` must be the same there. Raises InputError where it cannot,
        and where dataset and environment (obs_dim, action_dim) differ in their shapes.
        """
        data = self.dataset.buffer
        if (data.obs_dim, data.action_dim) != (obs_dim, action_dim):
            raise InputError(
                f"{self.args.dataset} has {data.obs_dim} observations and {data.action_dim} actions, "
                f"{self.env} has {obs_dim} and {action_dim}: give another --env"
            )
        folder = self._begins_with
        if folder is None:
            return
        config, saved = run_config(folder), checkpoint.load(folder / "checkpoint" / "state.pt")
        algo, theirs = config["algo"], saved["agent"]
        if algo not in (self._algo, *also):
            raise InputError(f"{folder} was trained by {algo}: give --init-from a run of {self._algo}")
        for name in alike:
            if (there := config["arguments"][name]) != getattr(self.args, name):
                raise InputError(f"{folder} was trained with --{name.replace('_', '-')} {there}: give the same here")
        if not parts and not np.allclose(saved.get("rewards", self._rewards), self._rewards):
            (scale, shift), (own_scale, own_shift) = saved["rewards"], self._rewards
            flags = f"--reward-scale {scale:g} --reward-shift {shift:g}"
            raise InputError(  # the critics' values are of them
                f"{folder} learned from rewards {scale:g} · r {shift:+g}, this run would from {own_scale:g} · r "
                f"{own_shift:+g}: give {flags if hasattr(self.args, 'reward_scale') else 'both the same scale'}"
            )
        if not (folder / "DONE").exists():
            sys.stderr.write(f"warning: {folder} is not finished: this run begins with its last checkpoint\n")
        own = checkpoint.state_of(agent)
        if algo in also:
            theirs = {name: theirs.get(name, state) for name, state in own.items()}
        if parts:
            theirs = own | {name: theirs[name] for name in parts}
        for name, state in own.items():  # settings, counters and noise are this run's
            kind = vars(agent)[name]
            if isinstance(kind, torch.Generator | int | float | torch.optim.lr_scheduler.LRScheduler):
                theirs[name] = state
            elif isinstance(kind, torch.optim.Optimizer) and name in theirs:
                theirs[name]["param_groups"] = state["param_groups"]
        checkpoint.restore(agent, theirs, f"{folder}'s networks do not fit: give another --init-from, or its flags")

    def open(self, run: Run) -> dict[str, Any] | None:
        """`run.open()`, and what the run must know and say of the dataset. Returns the state to go on from.

        Raises InputError where the dataset is not the one that the run began with.
        """
        saved = run.open()
        dataset = self.dataset
        other = dataset.env and self.env != dataset.env  # which may pay otherwise
        given = reference(self.env) if other else None
        if between := given or dataset.reference or reference(self.env):
            run.logger.score = partial(normalized, reference=between)
        run.logger.say(
            f"{self.args.dataset}: {len(dataset):,} transitions in {len(dataset.ends):,} episodes, "
            f"evaluated in {self.env}"
        )
        if self._bounds_exceed_values():
            run.logger.say(
                "warning: rewards before a truncation are negative, so Cal-QL's bounds there exceed the true values\n"
                "if every step without success pays the same, give that reward as --failure-reward"
            )
        warmup = self.args.warmup_steps if self.args.retain == "none" else 0
        run.warn_if_idle(max(warmup, self.online_share(self._full_batch)), "--warmup-steps, or the first batch,")
        if saved:
            if saved["dataset"] != self._fingerprint:
                raise InputError(
                    f"{self.args.dataset} is not the dataset any more that {run.folder} began with: "
                    "give another --run-dir to start afresh"
                )
            self.online.load(run.folder / "checkpoint" / "replay", saved["buffer"])
            self._unfinished = [list(rows) for rows in saved["unfinished"]]
        return saved

    def _bounds_exceed_values(self) -> bool:
        """Return whether rewards before some truncation are negative: their sum ends there, the true value does not."""
        if self.discount is None or self.failure is not None:
            return False
        data, horizon = self.dataset, round(1.0 / max(1.0 - self.discount, 1e-9))
        sums = np.append(0.0, data.column("rewards").cumsum(dtype=np.float64))
        tails = sums[data.ends] - sums[np.maximum(data.starts, data.ends - horizon)]
        return bool((data.truncations[data.ends - 1] & (tails < 0)).any())

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs beside the online transitions."""
        unfinished = [np.array(rows, np.float32) for rows in self._unfinished]
        return {"dataset": self._fingerprint, "unfinished": unfinished, "rewards": self._rewards}

    def add(
        self,
        obs: Array,
        actions: Array,
        rewards: Array,
        next_obs: Array,
        terminations: NDArray[np.bool_],
        truncations: NDArray[np.bool_],
    ) -> None:
        """Online transitions, one of each environment, with raw rewards."""
        transitions = obs, actions, self.dataset.scale(rewards), next_obs, terminations
        if not self.online_returns:
            self.online.add(*transitions)
            return
        for i, row in enumerate(pack(self.online.widths[:5], self.online.added, *transitions)):
            self._unfinished[i].append(row)
            if terminations[i] or truncations[i]:
                parts = np.split(np.stack(self._unfinished[i]), np.cumsum(self.online.widths[:4]), axis=1)
                parts.append(self.returns_to_go(parts[2][:, 0], bool(terminations[i])))
                self.online.add(*(part[-self.online.capacity :] for part in parts))
                self._unfinished[i].clear()

    def returns_to_go(self, rewards: Array, terminated: bool) -> Array:
        """[n], of a whole episode's scaled rewards [n], by the rule of `Dataset.return_to_go`."""
        discount, rest = self.discount, 0.0
        assert discount is not None
        if self.failure is not None:
            fails = np.isclose(rewards, self.failure)
            rest = self.failure / (1.0 - discount) if fails.all() or (fails[-1] and not terminated) else 0.0
        backwards = itertools.accumulate(rewards[::-1].tolist(), lambda after, r: r + discount * after, initial=rest)
        return np.array([*backwards][1:], np.float32)[::-1]

    def give_up(self, exact: list[bool]) -> None:
        """Forgets the unfinished episodes of those environments [num_envs] that were not restored exactly."""
        self._unfinished = [rows if whole else [] for rows, whole in zip(self._unfinished, exact, strict=True)]

    def online_share(self, batch_size: int) -> int:
        """Return how many transitions of an online batch are online ones."""
        if self.args.retain == "append":
            return 0
        return batch_size - (round(self.args.offline_ratio * batch_size) if self.args.retain == "mix" else 0)

    def updates(self, step: int) -> int:
        """Return how many updates belong to the step that ended at `step`."""
        if step <= 0:
            return 1
        frozen = self.args.retain == "none" and step <= self.args.warmup_steps
        waits = self.args.retain != "append" and self.online.added <= self.online_share(self._full_batch)
        return 0 if frozen or waits else self.args.utd * self.args.num_envs

    def evaluates(self, run: Run) -> bool:
        """At every multiple of --eval-every, and on both sides of the switch."""
        return run.due(self.args.eval_every) or 0 <= run.step <= self.args.num_envs

    def sample(self, batch_size: int, online: bool, generator: torch.Generator) -> Batch:
        """A batch for an update, before the switch or behind it; all on the device, as in a CUDA graph."""
        if not online:
            return self._from_dataset(batch_size, generator, self._returns_to_go)
        if self.args.retain == "none":
            return self.online.sample(batch_size, generator)
        if self.args.retain == "append":
            return self._from_both(batch_size, generator)
        offline = batch_size - self.online_share(batch_size)
        to_go = self._returns_to_go if self.online_returns else None
        parts = self._from_dataset(offline, generator, to_go), self.online.sample(batch_size - offline, generator)
        order = self._interleaved(offline, batch_size)
        return Batch(*(torch.cat(pair).index_select(0, order) for pair in zip(*map(_fields, parts), strict=True)))

    def _from_dataset(self, batch_size: int, generator: torch.Generator, to_go: Tensor | None) -> Batch:
        data = self.dataset.buffer
        return self._data_at(torch.randint(len(data), (batch_size,), generator=generator, device=data.device), to_go)

    def _data_at(self, where: Tensor, to_go: Tensor | None) -> Batch:
        batch = self.dataset.buffer.at(where)
        return batch if to_go is None else batch._replace(returns_to_go=to_go[where])

    def _from_both(self, batch_size: int, generator: torch.Generator) -> Batch:
        """Uniform over the rows of both buffers, as if they were one."""
        data, online = self.dataset.buffer, self.online
        where = uniform(online.size + len(data), batch_size, generator)
        to_go = self._returns_to_go if self.online_returns else None
        parts = self._data_at(where.clamp(max=len(data) - 1), to_go), online.at((where - len(data)).clamp(min=0))
        from_data = where < len(data)
        chosen = (
            torch.where(from_data.view(-1, *[1] * (a.dim() - 1)), a, b)
            for a, b in zip(*map(_fields, parts), strict=True)
        )
        return Batch(*chosen)

    def _interleaved(self, offline: int, batch_size: int) -> Tensor:
        """An order in which neighbours have nearly the same share of the dataset: RLPD slices its batches."""
        if self._order is None or len(self._order) != batch_size:
            places = [(torch.arange(n) + 0.5) / n for n in (offline, batch_size - offline)]
            self._order = torch.cat(places).argsort(stable=True).to(self.online.device)
        return self._order


def _fields(batch: Batch) -> list[Tensor]:
    return [part for part in batch if part is not None]
