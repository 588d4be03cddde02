"""Make a dataset from a random policy, a checkpoint, a Stable-Baselines3 file, or a run's whole replay buffer.

    python -m tools.collect --env Hopper-v4 --policy random --output hopper-random.hdf5
    python -m tools.collect --policy runs/sac__Hopper-v4__1 --output minari:hopper/medium-v0
    python -m tools.collect --policy runs/sac__Hopper-v4__1 tqc-hopper-v3.zip --output hopper-medium-expert.hdf5
    python -m tools.collect --replay runs/sac__Hopper-v4__1 --output hopper-medium-replay.hdf5

The data are a function of these arguments: sync and async give bit-identical data. The environments of a policy share
its transitions evenly, so that short episodes are not favoured. Each environment's last episode is cut at the end of
its share, and stored as one that timed out. The same command again does nothing.
"""

import common.start

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
from gymnasium.spaces import Box, flatdim
from gymnasium.vector import VectorEnv
from gymnasium.wrappers.utils import rescale_box
from tqdm import tqdm

from common.arguments import at_least, json_object
from common.command_line import command_line
from common.errors import Finished, InputError, require_finite
from common.messages import log
from common.plans import Plans
from common.provenance import commit, versions
from common.replay_buffer import ReplayBuffer
from common.seeding import seeds
from envs.make import make, make_vector, unwrapped
from envs.settings import is_same_variant, require_constructor_arguments
from offline.arrays import Transitions
from offline.minari import require_vectors
from offline.write import MINARI, Infos, reserved, write_d4rl, write_minari
from tools.policies import Array, Policy, Trained, is_trained, load_policy, read_run, read_trained, require_source


@dataclasses.dataclass
class Args:
    output: str
    """Dataset to write: a file that ends in .hdf5 (D4RL's layout), or minari:namespace/name-v0."""
    env: str | None = None
    """Gymnasium id of the environment. By default it is the run folder's."""
    policy: tuple[str, ...] = ()
    """random, waypoints (maze2d), a run folder, a file of its policy/, a name such as sac/Hopper-v4 (docs/policies.md),
    or a Stable-Baselines3 .zip.
    Several policies share the transitions evenly."""
    replay: Path | None = None
    """Run folder, instead of --policy. All transitions in its checkpoint's replay buffer become the dataset."""
    ref_scores: tuple[float, float] | None = None
    """Two returns to store with the data: the one that scores 0, and the one that scores 100."""

    # With --policy
    transitions: int = 1_000_000
    """Number of transitions to collect."""
    seed: int = 1
    """Random seed of the environments and of the policies' noise."""
    num_envs: int = 10
    """Number of environments stepped together."""
    vectorizer: Literal["sync", "async"] = "sync"
    """How environments are stepped. sync: one after another. async: each in its own process."""
    deterministic: bool = False
    """Act without the policy's noise."""

    # The environment
    env_kwargs: str = "{}"
    """Arguments of the environment's constructor, as a dict in JSON. They are stored with the data.
    A run folder's environment keeps those that the run was trained with."""

    def __post_init__(self) -> None:
        if bool(self.policy) == bool(self.replay):
            raise InputError("give either --policy or --replay")
        with_policy = ("transitions", "seed", "num_envs", "vectorizer", "deterministic")
        changed = [f.name for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]
        if self.replay and (meant := [f"--{name.replace('_', '-')}" for name in with_policy if name in changed]):
            raise InputError(f"--replay takes the whole buffer unchanged: leave out {', '.join(meant)}")
        at_least(0, seed=self.seed)
        at_least(1, num_envs=self.num_envs, transitions=self.transitions)
        if self.transitions < len(self.policy) * self.num_envs:
            raise InputError(
                f"--transitions is {self.transitions}: give at least one for each policy in each environment, "
                f"{len(self.policy) * self.num_envs}"
            )
        if self.ref_scores and not (np.isfinite(self.ref_scores).all() and self.ref_scores[0] < self.ref_scores[1]):
            raise InputError(f"--ref-scores are {self.ref_scores}: give two numbers, the smaller one first")


def collect(args: Args) -> None:
    """Make the dataset and print what is in it. Raise Finished if the same dataset exists already.

    Raise InputError if the arguments, a policy or the output do not fit. Raise RunError if the data are not finite.
    """
    # The sums in a matrix product, and so the data, may depend on the number of threads.
    torch.set_num_threads(1)
    run = read_run(args.replay) if args.replay else None
    env_id, settings = _environment(args, run)
    make(env_id, **settings).close()  # registers it, or raises InputError
    env = unwrapped(env_id, **settings)
    if args.output.startswith(MINARI):
        require_vectors(env.observation_space)
    policies = [
        load_policy(source, env, seeds(args.seed, f"policy {i}", 1)[0], args.deterministic)
        for i, source in enumerate(args.policy)
    ]
    arguments = {k: str(v) if isinstance(v, Path) else v for k, v in dataclasses.asdict(args).items()}
    recipe: dict[str, Any] = {
        "arguments": arguments | {"env": env_id, "env_kwargs": json.dumps(settings, sort_keys=True)},
        "sources": [run.facts | {"kind": "replay buffer"}] if run else [policy.facts for policy in policies],
        "versions": versions(),
        "commit": commit(),
    }
    with reserved(args.output) as before:
        if before is not None:
            _same_or_refuse(args.output, before, recipe)
        try:
            data, infos = _replayed(run, env) if run else _collected(args, env_id, settings, policies)
            data = _in_own_units(data, env)
            facts = _facts(data)
            recipe |= facts
            if args.output.startswith(MINARI):
                write_minari(args.output.removeprefix(MINARI), data, env, recipe, args.ref_scores, infos)
            else:
                write_d4rl(Path(args.output), data, env_id, env, recipe, args.ref_scores, settings)
        except KeyboardInterrupt:
            log.info("interrupted: nothing was written")
            raise SystemExit(130) from None
    said = f"{facts['transitions']:,} transitions, {facts['episodes']:,} episodes "
    said += f"({facts['cut_episodes']:,} of them unfinished)"
    if facts["return"]:
        said += ", return of the others: mean {mean:,.1f}, min {min:,.1f}, max {max:,.1f}".format(**facts["return"])
    log.info(f"{said}\nwritten to {args.output}")


def _environment(args: Args, run: Trained | None) -> tuple[str, dict[str, Any]]:
    """Return the environment's id and the arguments of `make`, which are those of the trained policies."""
    for source in args.policy:
        require_source(source)
    folders = [run] if run else [read_trained(source) for source in args.policy if is_trained(source)]
    trained_on = (str(folders[0].arguments["env"]) or None) if folders else None
    if run and trained_on and args.env not in (None, trained_on):
        raise InputError(f"--env is {args.env}, but the transitions in {run.path} are {trained_on}'s")
    if run and not trained_on and args.env:
        log.warning(f"{run.path} used its dataset's environment: check that {args.env} is the same")
    env_id = args.env or trained_on
    if env_id is None:
        raise InputError("none of the policies names its environment: give --env")
    asked = json.loads(json_object("--env-kwargs", args.env_kwargs))
    require_constructor_arguments(asked)
    settings = [each.environment(env_id, args.env_kwargs)[1] for each in folders] or [asked]
    for folder, own in zip(folders, settings, strict=False):
        limits = own.get("max_episode_steps"), settings[0].get("max_episode_steps")
        if limits[0] != limits[1] or not is_same_variant(env_id, own, settings[0]):
            raise InputError(f"{folder.path} and {folders[0].path} were trained with other arguments of {env_id}")
    return env_id, settings[0]


def _same_or_refuse(output: str, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise Finished if the dataset at `output` was made by the same recipe, otherwise InputError."""
    # Paths and the vectorizer do not change the data. The policies' bytes do, and "sources" holds their hashes.
    irrelevant = ("output", "policy", "replay", "vectorizer")
    try:
        there, here = ({"sources": _nameless(r["sources"]), "env_kwargs": "{}"} | r["arguments"] for r in (before, now))
    except (KeyError, TypeError):
        there, here = {}, {"recipe": None}
    here = {k: list(v) if isinstance(v, tuple) else v for k, v in here.items()}  # JSON stores a tuple as a list
    differ = [k for k in here if k not in irrelevant and there.get(k) != here[k]]
    if differ:
        listed = ", ".join(f"{k} ({there.get(k)} there, {here[k]} here)" for k in differ if k != "sources")
        raise InputError(
            f"{output} exists and holds other data: {listed or 'the policies differ'}\ngive another --output"
        )
    raise Finished(f"{output} was already made by the same command: nothing to do")


def _nameless(sources: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in source.items() if key != "name"} for source in sources]


def _collected(args: Args, env_id: str, settings: dict[str, Any], policies: list[Policy]) -> tuple[Transitions, Infos]:
    """Return the policies' transitions, and their infos: all numbers for Minari, which stores infos."""
    parts: list[Transitions] = []
    infos = _Told(args.transitions)
    kwargs = settings | ({"all_infos": True} if args.output.startswith(MINARI) else {})
    with tqdm(total=args.transitions, unit=" transitions", disable=None) as progress:
        for i, policy in enumerate(policies):
            share = args.transitions // len(policies) + (i < args.transitions % len(policies))
            envs = make_vector(env_id, args.num_envs, args.seed, f"collection {i}", args.vectorizer, **kwargs)
            with contextlib.closing(envs):
                parts.append(_roll_out(policy, envs, share, progress, infos, sum(len(part.rewards) for part in parts)))
    return Transitions(*map(np.concatenate, zip(*parts, strict=True))), infos.finished()


class _Told:
    """The infos of all transitions, by name: NaN, or False for a bool, if an environment gave none."""

    def __init__(self, transitions: int) -> None:
        self.transitions, self.values, self.numeric = transitions, dict[str, Array](), set[str]()

    def add(self, when: int, rows: Array, told: dict[str, Any]) -> None:
        """Add the infos that came with obs (`when` is 0) or next_obs (1) of the transitions `rows` [n].

        `told` are a vector environment's infos, of which the first n environments count. Names of masks begin with "_".
        """
        for name in (name for name in told if name[:1] != "_"):
            known = told[f"_{name}"][: len(rows)]
            values = told[name][: len(rows)][known]
            if not all(isinstance(value, bool | np.bool_) for value in values):
                self.numeric.add(name)
            if name not in self.values:
                self.values[name] = np.full((2, self.transitions), np.nan)
            self.values[name][when, rows[known]] = values.astype(np.float64)

    def finished(self) -> Infos:
        return {name: values if name in self.numeric else values == 1.0 for name, values in self.values.items()}


def _roll_out(
    policy: Policy, envs: VectorEnv[Array, Array, Array], transitions: int, progress: Any, infos: _Told, first: int
) -> Transitions:
    """Collect that many transitions, evenly from each of `envs` (new ones), and sort them by environment.

    Actions are in [-1, 1], as the policy gave them. `infos` receives the environments' infos. In it `first` is the
    number of the first transition. Raise RunError if an environment gives a number that is not finite.
    """
    n = envs.num_envs
    counts = [transitions // n + (i < transitions % n) for i in range(n)]
    obs_dim, action_dim = flatdim(envs.single_observation_space), flatdim(envs.single_action_space)
    floats = [np.empty((counts[0], n, *shape), np.float32) for shape in ([obs_dim], [action_dim], [], [obs_dim])]
    data = Transitions(*floats, *(np.zeros((counts[0], n), bool) for _ in range(3)))
    starts = first + np.cumsum([0, *counts[:-1]])
    plans = Plans(n, action_dim)
    obs, info = envs.reset()
    for step in range(counts[0]):
        rows = step + starts[: min(n, transitions - step * n)]
        infos.add(0, rows, info)
        actions = plans.act(policy, obs)
        next_obs, rewards, terminations, truncations, info = envs.step(actions)
        require_finite(step * n, obs=next_obs, rewards=rewards)
        infos.add(1, rows, info)
        for values, new in zip(data, (obs, actions, rewards, next_obs, terminations, truncations), strict=False):
            values[step] = new
        dones = terminations | truncations
        plans.drop(dones)
        obs, info = envs.reset(options={"reset_mask": dones}) if dones.any() else (next_obs, {})
        progress.update(len(rows))
    for i, count in enumerate(counts):
        data.cuts[count - 1, i] = not (data.terminations[count - 1, i] or data.truncations[count - 1, i])
    return Transitions(*(np.concatenate([values[:count, i] for i, count in enumerate(counts)]) for values in data))


def _replayed(run: Trained, env: gym.Env[Any, Any]) -> tuple[Transitions, Infos]:
    """Return all transitions in a run's replay buffer, by environment, with the rewards that it gave.

    An episode ends at a stored termination. It also ends, by a time limit, if the environment's next row begins with
    another observation, or begins an episode where the buffer stores that. The newest episode of each environment is
    cut. If the buffer is full, the oldest episode of each may lack its beginning.
    """
    if run.arguments.get("recipe") == "sac":  # DSRL's
        raise InputError(f"{run.path} stores the noise of its policy, not its actions: give it as --policy")
    data = run.state.get("data", run.state)  # a run that began with a dataset stores it under "data"
    if "buffer" not in data or "buffer_size" not in run.arguments:
        raise InputError(f"{run.path} keeps no replay buffer ({run.algo}): give it as --policy")
    obs_dim, action_dim = flatdim(env.observation_space), flatdim(env.action_space)
    starts = run.arguments.get("chunk", 1) > 1  # the buffer marks the first transition of each episode
    # With returns-to-go (Cal-QL) the buffer holds whole episodes in sequence, else a step of each environment in turn.
    whole = not starts and len(data["buffer"]["widths"]) > len(ReplayBuffer(1, obs_dim, action_dim).widths)
    num_envs = 1 if whole else int(run.arguments["num_envs"])
    size = min(int(run.arguments["buffer_size"]), max(1, int(data["buffer"]["added"])))
    buffer = ReplayBuffer(size, obs_dim, action_dim, returns_to_go=whole, starts=starts)
    buffer.load(run.path / "checkpoint" / "replay", data["buffer"])
    if not len(buffer):
        raise InputError(f"{run.path} has an empty replay buffer: give a run with online steps")
    numbers = np.arange(buffer.added - len(buffer), buffer.added)  # numbers of the transitions, the oldest first
    numbers = numbers[np.argsort(numbers % num_envs, kind="stable")]
    rows = buffer.rows[torch.from_numpy(numbers % buffer.capacity)].numpy()
    obs, actions, rewards, next_obs, terminations, *further = np.split(rows, np.cumsum(buffer.widths)[:-1], axis=1)
    scale, shift = data.get("rewards", (1.0, 0.0))
    rewards = ((rewards.astype(np.float64) - shift) / scale).astype(np.float32)
    ends = terminations[:, 0] > 0
    newest = np.append(np.diff(numbers % num_envs) != 0, not whole)  # not ended yet
    # Observations are compared bit by bit.
    breaks = np.append((obs[1:].view(np.int32) != next_obs[:-1].view(np.int32)).any(axis=1), True)
    if starts:
        breaks[:-1] |= further[0][1:, 0] > 0
    truncations, cuts = breaks & ~ends & ~newest, newest & ~ends
    return Transitions(obs, actions, rewards[:, 0], next_obs, ends, truncations, cuts), {}  # no infos are stored there


def _in_own_units(data: Transitions, env: gym.Env[Any, Any]) -> Transitions:
    """Return the data with the actions that the environment got, in its own units.

    As in envs.make, actions in [-1, 1] or slightly outside are rescaled and clipped.
    """
    box = env.action_space
    assert isinstance(box, Box)
    actions = data.actions.astype(box.dtype)
    if (box.low != -1).any() or (box.high != 1).any():
        one = np.ones_like(box.low)
        actions = rescale_box(box, -one, one)[2](actions)
    return data._replace(actions=np.clip(actions, box.low, box.high))


def _facts(data: Transitions) -> dict[str, Any]:
    """Return counts, and mean, min and max return of the episodes that were not cut."""
    episodes = list(data.episodes())
    whole = [float(data.rewards[e].sum(dtype=np.float64)) for e in episodes if not data.cuts[e.stop - 1]]
    returns = {"mean": float(np.mean(whole)), "min": min(whole), "max": max(whole)} if whole else None
    return {
        "transitions": len(data.rewards),
        "episodes": len(episodes),
        "cut_episodes": len(episodes) - len(whole),
        "return": returns,
    }


if __name__ == "__main__":
    command_line(collect, Args)
