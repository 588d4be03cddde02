"""Keep the best of several runs' last policies in results/policies, where its name is enough to use it.

    python -m tools.keep_policy sac/Hopper-v4 runs/sac__Hopper-v4__1 runs/sac__Hopper-v4__2 runs/sac__Hopper-v4__3
    python -m tools.keep_policy iql/hopper-medium runs/iql__hopper-medium__1 runs/iql__hopper-medium__2

The best is the one with the highest mean return over 20 episodes. It is then evaluated on 100 other episodes, because
the highest of several means is too high. The file stores these returns and the candidates.
"""

import common.start

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro
from gymnasium.spaces import flatdim

from common.acting import eval_policy
from common.command_line import command_line
from common.errors import InputError
from common.evaluate import MAX_EVAL_ENVS, evaluate
from common.messages import print_result
from common.policy_file import SUFFIX, names_for_acting, read_policy, write_policy
from common.run_folder import task_name, without_folders
from common.seeding import seeds
from envs.make import make
from tools.policies import POLICIES, Trained, load_agent, read_trained

TO_CHOOSE, TO_REPORT = (1_000_001, 20), (1_000_002, 100)  # seed and number of episodes; no training uses these seeds


@dataclass(frozen=True)
class Args:
    name: Annotated[str, tyro.conf.Positional]
    """Name of the policy: <algorithm>/<environment or dataset>."""
    runs: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Runs of the same algorithm and environment or dataset, or policy files.
    If one of them is a kept policy, the file also lists the candidates of that one."""


def name_of(run: Trained) -> str:
    """Return <algorithm>/<environment or dataset>."""
    return f"{run.algo}/{task_name(run.arguments)}"


def returns_of(run: Trained, seed: int, episodes: int) -> list[float]:
    """Return the returns of evaluation episodes with this seed, in the run's environment."""
    env_id, settings = run.environment()
    envs = [make(env_id, **settings) for _ in range(min(MAX_EVAL_ENVS, episodes))]
    sizes = flatdim(envs[0].observation_space), flatdim(envs[0].action_space)
    policy = eval_policy(load_agent(run, *sizes, run.arguments["seed"]))
    each = seeds(seed, "kept", episodes)
    return [episode.return_ for episode in evaluate(policy, envs, each)]


def candidates(run: Trained, mean: float) -> list[list[float]]:
    """Return the run's seed and mean return, or those of all seeds that a kept policy was chosen from."""
    kept = read_policy(run.path).facts if run.path.is_file() else {}
    chosen_from: list[list[float]] = kept.get("chosen_from", [[run.arguments["seed"], mean]])
    return chosen_from


def main(args: Args) -> Path:
    """Write the policy and return its file. Raise InputError if the runs are of another algorithm or task."""
    if not args.runs:
        raise InputError(f"no run is given: give runs of {args.name}")
    torch.set_num_threads(1)
    runs = [read_trained(source) for source in args.runs]
    for run in runs:
        if (made := name_of(run)) != args.name:
            raise InputError(f"{run.path} is a policy of {made}: give runs of {args.name}")
    means = [statistics.mean(returns_of(run, *TO_CHOOSE)) for run in runs]
    best = runs[means.index(max(means))]
    returns = returns_of(best, *TO_REPORT)
    env_id, settings = best.environment()
    env = make(env_id, **settings)
    obs = env.reset(seed=0)[0][None]
    agent = load_agent(best, obs.shape[1], flatdim(env.action_space), best.arguments["seed"])
    chosen_from = [pair for run, mean in zip(runs, means, strict=True) for pair in candidates(run, mean)]
    mean = statistics.mean(returns)
    facts = {"algo": best.algo, "arguments": without_folders(best.arguments), "obs_dim": obs.shape[1],
             "step": best.facts["step"], "return": mean, "returns": returns, "chosen_from": chosen_from}  # fmt: skip
    path = POLICIES / f"{args.name}{SUFFIX}"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_policy(path, agent, names_for_acting(agent, eval_policy(agent), obs), facts)
    print_result(f"seed {best.arguments['seed']}, {mean:,.1f} over {len(returns)} episodes, in {path}")
    return path


if __name__ == "__main__":
    command_line(main, Args)
