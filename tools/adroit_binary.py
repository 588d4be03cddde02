"""The Adroit binary tasks' datasets: human demonstrations and rollouts of a policy that imitates them.

    make binary ARGS="--demonstrations D4RL/pen/human-v2 --task pen --output data/pen-binary.hdf5"
    make binary ARGS="--demonstrations data/pen-human.hdf5 --task pen --goes-on --output data/pen-binary-time.hdf5"

The papers' datasets were made this way (Nair et al. 2020, "AWAC", arXiv 2006.09359): 25 demonstrations, and 500
episodes of behaviour cloning. Cal-QL, RLPD, WSRL and EXPO read them by AWAC's loaders. Rewards are computed again from
the observations, 0 if the task is solved and -1 otherwise, because rewards from other recordings disagree. There are
two conventions:

- Cal-QL and WSRL leave out episodes that never succeed. The others end at their last success, and every solved step is
  terminal.
- RLPD and EXPO (`--goes-on`) keep all episodes whole, and nothing is terminal.

The same command resumes an interrupted build, and does nothing if its result exists.
"""

import common.start

import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import numpy as np

from common.arguments import at_least
from common.command_line import command_line
from common.errors import Finished, InputError, RunError
from common.messages import log
from common.provenance import commit, versions
from envs.d4rl import solved
from offline import d4rl
from offline.arrays import Transitions
from offline.dataset import Dataset, load
from offline.environments import BINARY
from offline.write import reserved, write_d4rl


@dataclass
class Args:
    """Demonstrations, output and imitating policy."""

    demonstrations: str
    """Minari id, or path of an HDF5 file in D4RL's layout. D4RL's own files cut demonstrations in two."""
    output: str
    """File to write, which ends in .hdf5."""
    task: Literal["pen", "door", "relocate"] = "pen"
    """Task of the demonstrations."""
    goes_on: bool = False
    """Follow RLPD's and EXPO's convention instead of Cal-QL's and WSRL's."""
    rollouts: int = 500
    """Number of episodes of the imitating policy."""
    updates: int = 20_000
    """Gradient steps of the imitating policy."""
    seed: int = 1
    """Random seed."""


def parts(dataset: Dataset, task: str) -> Transitions:
    """Return a dataset's transitions with binary rewards and its episodes marked as cut."""
    obs, actions, next_obs = (dataset.column(name) for name in ("obs", "actions", "next_obs"))
    nothing, cuts = np.zeros(len(dataset), bool), np.zeros(len(dataset), bool)
    cuts[dataset.ends - 1] = True
    rewards = solved(task, next_obs).astype(np.float32) - 1.0
    return Transitions(obs, actions, rewards, next_obs, nothing, nothing, cuts)


def until_solved(data: Transitions) -> Transitions:
    """Return the episodes that succeed, each up to its last success. Raise InputError if none does."""
    kept, terminations = np.zeros(len(data.rewards), bool), data.rewards == 0
    for episode in data.episodes():
        successes = np.flatnonzero(terminations[episode])
        if len(successes):
            kept[episode.start : episode.start + successes[-1] + 1] = True
    if not kept.any():
        raise InputError("no episode solves the task: give other --demonstrations or the right --task")
    left = Transitions(*(values[kept] for values in data))
    return left._replace(terminations=left.rewards == 0, cuts=np.zeros(len(left.rewards), bool))


def main(args: Args) -> None:
    at_least(1, rollouts=args.rollouts)
    if not args.output.endswith(".hdf5"):
        raise InputError(f"--output is {args.output}: give a file that ends in .hdf5")
    if args.demonstrations in d4rl.IDS and "-human-" in args.demonstrations:
        raise InputError(
            f"{args.demonstrations} marks time-outs inside its demonstrations, which are cut there (docs/d4rl.md): "
            f"give Minari's, D4RL/{args.task}/human-v2"
        )
    arguments = asdict(args)
    with reserved(args.output) as before:
        if before is not None:
            if before.get("arguments", {}) | {"output": args.output} != arguments:
                raise InputError(f"{args.output} exists and was made with other arguments: give another --output")
            raise Finished(f"{args.output} was already made by the same command: nothing to do")
        make(args)


def make(args: Args) -> None:
    """Train the imitating policy, collect its episodes, and write them with the demonstrations."""
    env_id = BINARY[args.task, False]
    env = gym.make(env_id.partition(":")[2])
    assert env.spec is not None
    horizon = env.spec.max_episode_steps
    assert horizon is not None
    work = Path(args.output).with_suffix("")  # next to the result, for the policy and its rollouts
    policy, rollouts = work / f"bc-{args.updates}-{args.seed}", work / f"rollouts-{args.rollouts}-{args.seed}.hdf5"
    side_by_side = max(n for n in range(1, 11) if args.rollouts % n == 0)  # so that all episodes are whole
    shared = ["--env", env_id, "--seed", str(args.seed)]
    run("algos.bc", "--dataset", args.demonstrations, *shared, "--offline-steps", str(args.updates),
        "--eval-every", str(args.updates), "--run-dir", str(policy))  # fmt: skip
    run("tools.collect", "--policy", str(policy), *shared, "--num-envs", str(side_by_side),
        "--transitions", str(args.rollouts * horizon), "--output", str(rollouts))  # fmt: skip
    both = [parts(load(source), args.task) for source in (args.demonstrations, str(rollouts))]
    counts = [sum(bool((part.rewards[e] == 0).any()) for e in part.episodes()) for part in both]
    data = Transitions(*map(np.concatenate, zip(*both, strict=True)))
    data = data if args.goes_on else until_solved(data)
    recipe: dict[str, Any] = {"arguments": asdict(args), "versions": versions(), "commit": commit()}
    recipe |= {"solved demonstrations": counts[0], "solved roll-outs": counts[1], "transitions": len(data.rewards)}
    env_id = BINARY[args.task, not args.goes_on]
    write_d4rl(Path(args.output), data, env_id, gym.make(env_id.partition(":")[2]), recipe)
    log.info(
        f"{len(data.rewards):,} transitions in {args.output}, {(data.rewards == 0).mean():.0%} of them solved\n"
        f"solved at some step: {counts[0]} demonstrations, {counts[1]} of {args.rollouts} rollouts of {horizon} steps"
    )


def run(module: str, *arguments: str) -> None:
    """Run one of our commands to its end. Raise RunError if it fails."""
    if subprocess.run([sys.executable, "-m", module, *arguments], check=False).returncode:
        raise RunError(f"{module} failed: see above")


if __name__ == "__main__":
    command_line(main, Args)
