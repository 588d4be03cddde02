"""From a dataset to online learning: steps run from -offline_steps to online_steps, with the switch at 0.

Before the switch, a step is an update on the dataset. After it, a step is one of the environment. `--retain` selects
what is sampled after the switch:

- none: only online transitions, after the frozen policy has collected `--warmup-steps` (WSRL, Zhou et al. 2024).
- append: dataset and online transitions alike, as from one growing buffer (IQL, Kostrikov et al. 2021).
- mix: a fixed share of the dataset in every batch, spread evenly over it (RLPD, Ball et al. 2023; Cal-QL).
"""

import itertools
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common import checkpoint
from common.arguments import BY_DOMAIN, NonNegativeInt, OffPolicyArgs, OpenFraction, Unset, env_settings
from common.errors import InputError
from common.messages import log
from common.replay_buffer import Batch, ReplayBuffer, pack, random_rows
from common.run import Run
from common.run_folder import has_checkpoint, read_state, run_config, warn_of_init_from
from envs.make import find
from envs.rollout import Rollout, Transitions
from envs.settings import is_plain, is_same_variant
from offline.dataset import load, plain_id, read
from offline.environments import domain
from offline.rewards import IDENTITY, RewardTransform
from offline.sampling import concatenated, cut_windows, even_order, selected, weighted_rows
from offline.scores import reference, scorer

Array = NDArray[np.float32]


@dataclass
class OfflineArgs(OffPolicyArgs):
    """Arguments of every algorithm that begins with a dataset."""

    switch_step: ClassVar[int | None] = 0
    task_flag: ClassVar[str] = "dataset"

    env: str = ""
    """Gymnasium id of the environment. By default it is the dataset's own."""
    eval_every: int = 5_000
    """Steps between evaluations, in addition to those on both sides of the switch."""
    checkpoint_every: int = 10_000
    """Steps between checkpoints."""

    # From data to online
    dataset: str = ""
    """A D4RL id, an OGBench task, a Minari id, or the path of an HDF5 file in D4RL's layout."""
    offline_steps: NonNegativeInt = 1_000_000
    """Updates on the dataset alone."""
    online_steps: NonNegativeInt = 0
    """Environment steps after the switch, summed over all environments."""
    retain: Literal["none", "append", "mix"] = "append"
    """Data for online updates. none: online transitions. append: dataset and online transitions as one buffer.
    mix: a fixed share of each batch from the dataset."""
    offline_ratio: OpenFraction = 0.5
    """With --retain mix: the dataset's share of each batch."""
    weighting: Literal["none", "return", "advantage"] = "none"
    """Which of the dataset's episodes are sampled more often. none: no episode. return: those of high return.
    advantage: those whose return is high for their first observation."""
    weighting_temperature: float = 0.1
    """With --weighting return or advantage: the best rows are exp(1/temperature) times as likely as the worst."""
    warmup_steps: NonNegativeInt = 5_000
    """With --retain none: environment steps with the frozen policy before the first online update."""
    utd: int = 1
    """Updates for each environment step (update-to-data ratio)."""
    batch_size: int = 256
    """Transitions in each update."""
    buffer_size: int = 1_000_000
    """Capacity of the replay buffer, in online transitions."""
    init_from: Path | None = None
    """Run folder of the same algorithm whose networks this run starts from.
    wsrl also takes cql and iql. expo takes only the base policy. So do dsrl and pa_rl, also of other algorithms."""
    normalize_obs: bool = False
    """Normalise observations by the mean and standard deviation of the dataset's."""
    d4rl_compat: bool = False
    """Convert D4RL files exactly as D4RL's qlearning_dataset does."""
    horizon: int | None = None
    """Time limit in steps, for a dataset file that marks no time-outs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.dataset:
            raise InputError("--dataset is missing: give an id, an OGBench task or the path of a file (docs/data.md)")
        if self.offline_steps == 0 == self.online_steps:
            raise InputError("--offline-steps and --online-steps are both 0: give one of them")
        if self.weighting != "none" and self.retain == "none" and self.offline_steps == 0:
            raise InputError(f"--weighting {self.weighting}: no update uses the dataset, so give --retain mix")
        size = self.batch_size
        if self.retain == "mix" and isinstance(size, int) and not 0 < round(self.offline_ratio * size) < size:
            raise InputError(
                f"--offline-ratio {self.offline_ratio} of {self.batch_size} transitions leaves none of one kind: "
                "give a larger --batch-size, or another --retain"
            )

    @property
    def task(self) -> str:
        return Path(self.dataset).stem if self.dataset.endswith((".hdf5", ".h5")) else plain_id(self.dataset)

    @property
    def span(self) -> tuple[int, int]:
        return -self.offline_steps, self.online_steps


T = TypeVar("T", bound=OfflineArgs)


def with_presets(args: T, presets: dict[str, dict[str, Any]]) -> T:
    """Return the arguments with the dataset's environment and the domain's presets, which are printed.

    The keys of `presets` are domains: locomotion, antmaze, maze2d, adroit, adroit-binary, kitchen or ogbench. A domain
    without presets gets those of locomotion, and adroit-binary those of adroit. A key with `*` is a pattern of dataset
    names, which comes first. A given flag overrides its preset. With `--init-from`, a domain's offline steps are 0.
    """
    recording = read(args.dataset, args.d4rl_compat, args.horizon)
    env = args.env or recording.env or ""
    chosen: dict[str, Any] = {}
    if env:
        chosen["env"], chosen["env_kwargs"] = recording.evaluation_env(args.env, args.env_settings)
    of = domain(env, args.task)
    name = args.task.lower().removeprefix("d4rl/").replace("/", "-")  # Minari's D4RL/pen/human-v2 is pen-human-v2
    own = next((key for key in presets if "*" in key and fnmatchcase(name, key)), of)
    nearest = next((key for key in (own, of, of.removesuffix("-binary"), "locomotion") if key in presets), "")
    if args.online_steps and of == "adroit-binary" != domain(env, ""):  # Gymnasium-Robotics pays 10 and -0.1
        log.warning(f"{args.dataset} has sparse rewards, but {env} may not: --env adroit-binary/… does")
    if args.init_from and args.offline_steps is BY_DOMAIN:
        chosen["offline_steps"] = 0
    found = presets.get(nearest, {})
    preset = {k: v for k, v in found.items() if isinstance(getattr(args, k), Unset) and k not in chosen}
    if preset:
        none = "" if nearest in (own, of) else f", there is none for {of}"
        log.info(f"preset for {nearest}{none}: {', '.join(f'{k} {v}' for k, v in preset.items())}")
    return args.filled_in(**chosen, **preset)


class OfflineToOnline(checkpoint.Part):
    """The dataset, the online transitions, and which of them are sampled when."""

    schema: ClassVar[Any] = {
        "dataset": str, "unfinished": [np.ndarray], "rewards": [float], "buffer": ReplayBuffer.schema,
        "starts?": [bool],
    }  # fmt: skip

    def __init__(
        self,
        args: OfflineArgs,
        run: Run,
        rewards: RewardTransform = IDENTITY,
        normalize_returns: bool = False,
        top: float = 1.0,
        discount: float | None = None,
        failure: float | None = None,
        next_actions: bool = False,
        online_returns: bool = True,
        online_batch: int | None = None,
        wait_for_full_batch: bool = True,
        windows: tuple[int, float] = (1, 1.0),
    ) -> None:
        """Load the dataset. `rewards` and `normalize_returns` are those of `offline.dataset.load`.

        `top`: the share of the transitions that is kept, those of the best episodes (`Dataset.top`).
        `discount`: batches get returns-to-go with it (Cal-QL). Online episodes are then sampled only after they end.
        `failure`: as in `Dataset.return_to_go`, but as a raw reward. `next_actions`: offline batches get those of
        `Dataset.next_actions`. `online_returns`: false if returns-to-go are needed only before the switch.
        `online_batch`: size of an online batch, by default `args.batch_size`. `wait_for_full_batch`: the first online
        update waits for more transitions than it takes, as in WSRL. Else the first batches repeat a few of them.
        `windows`: number of transitions and discount factor of the windows that batches hold (`Batch`).

        Raises InputError as `load` does, and if the dataset's environment is unknown or no episode has a window.
        """
        self.args, self._algo, self._folder = args, run.algo, run.folder
        self.dataset = dataset = load(
            args.dataset, run.device, rewards=rewards, normalize_returns=normalize_returns, compat=args.d4rl_compat,
            horizon=args.horizon, env=args.env, asked=args.env_settings,
        )  # fmt: skip
        self.dataset = dataset = dataset.top(top) if top < 1.0 else dataset
        self.env, self.settings = dataset.evaluation_env(args.env, args.env_settings)
        data = dataset.buffer
        # The last step of all environments can pass the end. It must overwrite nothing, so that a run can be extended.
        capacity = min(args.buffer_size, args.online_steps + args.num_envs)
        self.online_returns = online_returns and discount is not None
        self.online = ReplayBuffer(
            capacity, data.obs_dim, data.action_dim, run.device, None, self.online_returns, starts=windows[0] > 1
        )
        self._starts = [True] * args.num_envs  # whether the next transition is the first of its episode
        if windows[0] > 1:
            limit = self.settings.get("max_episode_steps") or find(self.env).max_episode_steps
            longest = limit and -(-limit // (self.settings.get("action_repeat") or 1))
            cut_windows(dataset, self.online, *windows, args.num_envs, longest)
        self.discount, self.failure = discount, None if failure is None else dataset.rewards(failure)
        self._unfinished: list[list[Array]] = [[] for _ in range(args.num_envs)]  # packed rows
        columns: dict[str, Array] = {}  # of the dataset's transitions, in addition to the buffer's
        if discount is not None:
            columns["returns_to_go"] = dataset.return_to_go(discount, self.failure)
        if next_actions:
            columns["next_actions"] = dataset.next_actions()
        self._columns = {name: torch.from_numpy(column).to(run.device) for name, column in columns.items()}
        self._fingerprint = dataset.fingerprint()
        self._weighted = weighted_rows(dataset, args.weighting, args.weighting_temperature)
        # --retain: the sampler, the dataset's share of a batch, and the steps without updates.
        self._sample_online, self._offline_share, self._warmup_steps = {
            "none": (self.online.sample, 0.0, args.warmup_steps),
            "append": (self._from_both, 1.0, 0),
            "mix": (self._from_each, args.offline_ratio, 0),
        }[args.retain]
        share = self._set_batch_sizes(offline=args.batch_size, online=online_batch or args.batch_size)
        self._first_batch = (share if wait_for_full_batch else 0) if self._offline_share < 1.0 else -1
        other = dataset.env and self.env != dataset.env  # its rewards may differ
        plain = is_plain(self.env, self.settings)  # a variant has the scores of its own dataset only
        of_env, own = reference(self.env) if plain else None, dataset.reference if plain or not other else None
        run.score = scorer(self.env, (of_env if other else None) or own or of_env) if plain or own else None
        self._report(run)

    def _set_batch_sizes(self, offline: int, online: int) -> int:
        """Set the sizes of offline and online batches, and return the online transitions in an online batch."""
        self._batch_sizes = {False: offline, True: online}
        self._order = even_order(online - (share := self._online_share(online)), share).to(self.online.device)
        return share

    def _report(self, run: Run) -> None:
        """Print the dataset's size, and warnings."""
        dataset = self.dataset
        size = f"{len(dataset):,} transitions in {len(dataset.ends):,} episodes"
        of = "" if dataset.env in (None, "", self.env) else f" of {dataset.env}"
        log.info(f"{self.args.dataset}: {size}{of}, evaluated in {self.env}")
        if self.discount is not None and self.failure is None and dataset.is_cut_while_negative(self.discount):
            log.warning(
                "rewards before a truncation are negative, so Cal-QL's bounds there exceed the true values\n"
                "if every step without success pays the same, give that reward as --failure-reward"
            )
        run.learns_after(self._warmup_steps, "--warmup-steps")
        run.learns_after(self._first_batch, "the first batch")

    def rollout(self) -> Rollout:
        """Return the run's environments. Raises InputError if their observations or actions have other sizes."""
        rollout, data = Rollout(self.env, self.args, self.settings), self.dataset.buffer
        if (data.obs_dim, data.action_dim) != (rollout.obs_dim, rollout.action_dim):
            raise InputError(
                f"{self.args.dataset} has {data.obs_dim} observations and {data.action_dim} actions, "
                f"{self.env} has {rollout.obs_dim} and {rollout.action_dim}: give another --env"
            )
        return rollout

    def load_pretrained(
        self, agent: object, from_algos: tuple[str, ...] = (), only: tuple[str, ...] = (),
        must_match: tuple[str, ...] = (), base_names: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        """Give the agent of a new run the networks of `--init-from`, and the moments of their optimisers.

        From a run of one of `from_algos`, take what both have. With `only`, take only those attributes; rewards do not
        matter. Both runs must share the arguments `must_match`. With `base_names`, also take a run of any algorithm
        with one of these arguments; the last attribute in `base_names` that the run has becomes `base`. Raises
        InputError if the run does not fit, before `Run.resume` makes a folder.
        """
        if base_names and self.args.init_from is None and self.args.offline_steps == 0:
            log.warning("the base policy is never trained: give --init-from or --offline-steps")
        if (folder := self.args.init_from) is None or has_checkpoint(self._folder):
            return
        config, own = run_config(folder), self.dataset.rewards
        algo, was = config["algo"], config["arguments"]
        flags = " or ".join(f"--{name.replace('_', '-')}" for name in must_match)
        known = sorted({self._algo, *from_algos}) + [f"an algorithm with {flags}"] * bool(base_names)
        if algo not in known and not (base_names and was.keys() & {*must_match}):
            raise InputError(f"{folder} was trained by {algo}: give --init-from a run of {' or '.join(known)}")
        for name in (*must_match, "normalize_obs"):
            here, default, flag = getattr(self.args, name), getattr(type(self.args), name), name.replace("_", "-")
            there = was.get(name, default if algo == self._algo or name not in must_match else here)
            if there != here:  # an older run had the default, and another algorithm may not have the argument
                cure = "the same here" if self.args.allows(name, there) else "another --init-from"
                raise InputError(f"{folder} was trained with --{flag} {there}: give {cure}")
        if was.get("env") == self.env and not is_same_variant(self.env, env_settings(**was), self.settings):
            raise InputError(f"{folder} was trained in {self.env} with other arguments: give the same --env-kwargs")
        saved = read_state(folder, agent, "give another --init-from")
        theirs = saved["agent"]
        if bases := [theirs[name] for name in base_names if name in theirs]:
            theirs["base"] = bases[-1]
        scale, shift = saved.get("data", saved).get("rewards", own)
        if not only and not np.allclose((scale, shift), own):
            flags = f"--reward-scale {scale:g} --reward-shift {shift:g}"
            raise InputError(  # the critics' values depend on them
                f"{folder} learned from rewards {scale:g} · r {shift:+g}, this run from {own.scale:g} · r "
                f"{own.shift:+g}: give {flags if hasattr(self.args, 'reward_scale') else 'both the same scale'}"
            )
        warn_of_init_from(folder, was, {} if only else vars(self.args))
        state_now = checkpoint.state_of(agent)
        if algo in from_algos:
            theirs = {name: theirs.get(name, state) for name, state in state_now.items()}
        if only:
            theirs = state_now | {name: theirs.get(name, {}) for name in only if name in state_now}
        for name, state in state_now.items():  # settings, counters and noise remain this run's
            kind = vars(agent)[name]
            if isinstance(kind, torch.Generator | int | float | torch.optim.lr_scheduler.LRScheduler):
                theirs[name] = state
            elif isinstance(kind, torch.optim.Optimizer) and name in theirs:
                theirs[name]["param_groups"] = state["param_groups"]
        checkpoint.restore(agent, theirs, f"{folder}'s networks do not fit: give another --init-from, or its flags")

    def save(self, folder: Path) -> dict[str, Any]:
        """Write the new online transitions. Return what a checkpoint needs besides them."""
        unfinished = [np.array(rows, np.float32) for rows in self._unfinished]
        state = {"dataset": self._fingerprint, "unfinished": unfinished, "rewards": list(self.dataset.rewards)}
        return state | {"buffer": self.online.save(folder), "starts": self._starts}

    def load(self, folder: Path, state: dict[str, Any]) -> None:
        """Restore what `save` returned and wrote. Raises InputError if the run began with another dataset."""
        if state["dataset"] != self._fingerprint:
            raise InputError(
                f"{self.args.dataset} differs from the dataset that {self._folder} began with: "
                "restore that dataset, or give another --run-dir to start from scratch"
            )
        self.online.load(folder, state["buffer"])
        self._unfinished = [list(rows) for rows in state["unfinished"]]
        self._starts = state.get("starts", self._starts)

    def drop_old(self, folder: Path) -> None:
        """Delete the files of online transitions that only earlier states need."""
        self.online.drop_old(folder)

    def add(self, transitions: Transitions) -> None:
        """Add online transitions, one of each environment, with raw rewards."""
        obs, actions, rewards, next_obs, terminations, truncations = transitions
        scaled = obs, actions, self.dataset.rewards(rewards), next_obs, terminations
        starts, self._starts = self._starts, np.logical_or(terminations, truncations).tolist()
        if not self.online_returns:
            self.online.add(*scaled, *[starts] * self.online.has_starts)
            return
        for i, row in enumerate(pack(self.online.widths[:5], self.online.added, *scaled)):
            self._unfinished[i].append(row)
            if terminations[i] or truncations[i]:
                parts = np.split(np.stack(self._unfinished[i]), np.cumsum(self.online.widths[:4]), axis=1)
                parts.append(self.returns_to_go(parts[2][:, 0], bool(terminations[i])))
                self.online.add(*(part[-self.online.capacity :] for part in parts))
                self._unfinished[i].clear()

    def returns_to_go(self, rewards: Array, terminated: bool) -> Array:
        """Return the returns-to-go [n] of an episode's scaled `rewards` [n], by the rule of `Dataset.return_to_go`."""
        discount, rest = self.discount, 0.0
        assert discount is not None
        if self.failure is not None:
            fails = np.isclose(rewards, self.failure)
            rest = self.failure / (1.0 - discount) if fails.all() or (fails[-1] and not terminated) else 0.0
        backwards = itertools.accumulate(rewards[::-1].tolist(), lambda after, r: r + discount * after, initial=rest)
        return np.array([*backwards][1:], np.float32)[::-1]

    def discard_unfinished_episodes(self, exact: list[bool]) -> None:
        """Forget the unfinished episodes of those environments [num_envs] that were not restored exactly."""
        self._unfinished = [rows if whole else [] for rows, whole in zip(self._unfinished, exact, strict=True)]
        self._starts = [start or not whole for start, whole in zip(self._starts, exact, strict=True)]

    def _online_share(self, batch_size: int) -> int:
        """Return how many transitions of an online batch are online ones, at least."""
        return batch_size - round(self._offline_share * batch_size)

    def updates_due(self, step: int, utd: int = 1) -> int:
        """Return the updates of `step`: one before the switch, then `utd` for each environment once they may begin."""
        if step <= 0:
            return 1
        too_few = self.online.added <= self._first_batch
        if too_few and self.online_returns and step >= self.args.online_steps > self._first_batch:
            log.warning("nothing was learned after the switch: batches hold finished episodes, and there were too few")
        return 0 if too_few or step <= self._warmup_steps else utd * self.args.num_envs

    def sample(self, online: bool, generator: torch.Generator) -> Batch:
        """Return a batch for an update, offline or `online`. All work is on the device, as a CUDA graph requires."""
        if online:
            return self._sample_online(self._batch_sizes[True], generator)
        return self._data_at(self._rows(self._batch_sizes[False], generator), online)

    def _from_each(self, batch_size: int, generator: torch.Generator) -> Batch:
        """Return a batch with a fixed share of the dataset, spread evenly over it: RLPD slices its batches."""
        offline = batch_size - self._online_share(batch_size)
        from_data = self._data_at(self._rows(offline, generator), online=True)
        return concatenated(from_data, self.online.sample(batch_size - offline, generator), self._order)

    def _from_both(self, batch_size: int, generator: torch.Generator) -> Batch:
        """Return a batch drawn uniformly from the rows of both buffers. `--weighting` chooses among the dataset's."""
        data, online = self.dataset.buffer, self.online
        where = random_rows(online.size + len(data), batch_size, generator)
        rows = self._rows(batch_size, generator) if self._weighted else where.clamp(max=len(data) - 1)
        return selected(where < len(data), self._data_at(rows, True), online.at((where - len(data)).clamp(min=0)))

    def _rows(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw rows of the dataset."""
        if self._weighted:
            return self._weighted.draw(count, generator)
        return torch.randint(len(self.dataset), (count,), generator=generator, device=self.online.device)

    def _data_at(self, rows: Tensor, online: bool) -> Batch:
        columns = {} if online and not self.online_returns else self._columns
        return self.dataset.buffer.at(rows)._replace(**{name: column[rows] for name, column in columns.items()})
