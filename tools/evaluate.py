"""Evaluate trained policies on new episodes, and print a table.

    make evaluate RUN=runs/sac__Hopper-v4__1 ARGS="--episodes 100"
    python -m tools.evaluate runs/sac__Hopper-v4__* --csv episodes.csv --json summary.json
    python -m tools.evaluate runs/sac__Hopper-v4__1/policy/best.safetensors

A run folder stands for its last checkpoint. The first episodes are those of the run's own evaluations. More episodes
describe one policy better, but they say nothing about other seeds of the training (docs/many-runs.md).
"""

import common.start

import contextlib
import csv
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import tyro
from gymnasium.spaces import flatdim

from common.arguments import at_least
from common.command_line import command_line
from common.errors import InputError
from common.evaluate import MAX_EVAL_ENVS, Episode, evaluate
from common.files import prepare_output, replacing
from common.messages import log, print_result
from common.seeding import seeds
from envs.make import make
from envs.settings import is_plain
from offline.scores import reference, scorer
from tools.policies import load_agent, load_policy, read_trained

COLUMNS = ("policy", "episode", "seed", "return", "length", "success", "normalized_score")
HEADINGS = ("policy", "step", "episodes", "mean", "std", "median", "min", "max", "length", "success", "score")


@dataclass(frozen=True)
class Args:
    """Policies and episodes."""

    policies: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Run folders that have a checkpoint, files of their policy/, or names such as sac/Hopper-v4 (docs/policies.md)."""
    episodes: int = 100
    """Number of episodes for each policy."""
    sampled: bool = False
    """Act with the policy's noise. By default the policy acts as in evaluations."""
    seed: int | None = None
    """Seed of the episodes, as a run's --seed gives those of its evaluations. By default it is the run's own."""
    env: str | None = None
    """Environment to use instead of the run's, with the same observations and actions."""
    env_kwargs: str = "{}"
    """Arguments of the environment's constructor, as a dict in JSON. In the run's own environment, those that you leave
    out are the run's, and a changed one gives a warning."""
    csv: Path | None = None
    """File to write with a row for each episode."""
    json: Path | None = None
    """File to write with the numbers of the table."""

    def __post_init__(self) -> None:
        at_least(1, episodes=self.episodes)
        at_least(0, seed=self.seed)
        if not self.policies:
            raise InputError("no policy is given: give a run folder, a policy file or a name such as sac/Hopper-v4")
        if self.csv and self.json and self.csv.resolve() == self.json.resolve():
            raise InputError(f"--csv and --json are both {self.csv}: give two files")


@dataclass(frozen=True)
class Plan:
    """A policy that was read once, and how to evaluate it. It holds no weights, because there may be many policies."""

    name: str
    env_id: str
    settings: dict[str, Any]
    seed: int


def plan_of(args: Args, name: str) -> Plan:
    """Return how to evaluate a policy. Raise InputError if it cannot be read or does not fit the environment."""
    trained = read_trained(name)
    env_id, settings = trained.environment(args.env, args.env_kwargs, may_differ=True)
    seed = int(trained.arguments["seed"]) if args.seed is None else args.seed
    with contextlib.closing(make(env_id, **settings)) as env:
        load_agent(trained, flatdim(env.observation_space), flatdim(env.action_space), seed)
    return Plan(name, env_id, settings, seed)


def episodes_of(args: Args, plan: Plan) -> tuple[int, list[tuple[int, Episode]]]:
    """Return the policy's step, and each episode with its seed. The run may have learned on since `plan_of`."""
    each = seeds(plan.seed, "evaluation", args.episodes)
    with contextlib.ExitStack() as stack:
        envs = [
            stack.enter_context(contextlib.closing(make(plan.env_id, **plan.settings)))
            for _ in range(min(MAX_EVAL_ENVS, args.episodes))
        ]
        policy = load_policy(plan.name, envs[0], plan.seed, deterministic=not args.sampled)
        return policy.facts["step"], list(zip(each, evaluate(policy, envs, each), strict=True))


def summary(episodes: list[Episode], scores: list[float] | None) -> dict[str, Any]:
    """Return the numbers of the table. The standard deviation divides by the number of episodes, as a run's does."""
    returns = np.array([episode.return_ for episode in episodes])
    solved = [episode.success for episode in episodes if episode.success is not None]
    return {
        "episodes": len(episodes),
        "mean": float(returns.mean()),
        "std": float(returns.std()),
        "median": float(np.median(returns)),
        "min": float(returns.min()),
        "max": float(returns.max()),
        "length": float(np.mean([episode.length for episode in episodes])),
        "success": float(np.mean(solved)) if solved else None,
        "score": float(np.mean(scores)) if scores else None,
    }


def main(args: Args) -> list[dict[str, Any]]:
    """Evaluate all policies, print the table, write the files, and return the table's rows.

    Raise InputError before the first evaluation if a policy cannot be evaluated or a file cannot be written.
    """
    torch.set_num_threads(1)
    plans = [plan_of(args, name) for name in args.policies]
    for flag, path in (("--csv", args.csv), ("--json", args.json)):
        if path:
            prepare_output(path, flag)
    found, rows = [], []
    for plan in plans:
        step, pairs = episodes_of(args, plan)
        seeds_used, episodes = zip(*pairs, strict=True)
        score = scorer(plan.env_id, reference(plan.env_id)) if is_plain(plan.env_id, plan.settings) else None
        scores = score(episodes).tolist() if score else None
        found.append({"policy": plan.name, "step": step, **summary(list(episodes), scores)})
        if len(plans) > 1:  # the table comes after the last one
            row = {heading: _text(heading, found[-1][heading]) for heading in HEADINGS[1:]}
            log.info(f"{plan.name}: {', '.join(f'{heading} {text}' for heading, text in row.items() if text)}")
        for i, (seed, episode) in enumerate(zip(seeds_used, episodes, strict=True)):
            success = "" if episode.success is None else int(episode.success)
            rows.append((plan.name, i, seed, episode.return_, episode.length, success, scores[i] if scores else ""))
        if args.csv:  # after each policy, so that an error in the next one loses nothing
            text = io.StringIO()
            csv.writer(text, lineterminator="\n").writerows([COLUMNS, *rows])
            with replacing(args.csv) as file:
                file.write(text.getvalue().encode())
        if args.json:
            with replacing(args.json) as file:
                file.write((json.dumps(found, indent=2) + "\n").encode())
    print_result(table(found))  # after the files: it ends the program if the reader of a pipe has gone
    return found


def table(found: list[dict[str, Any]]) -> str:
    """Return the rows as aligned text, without columns that are empty in all rows."""
    headings = [name for name in HEADINGS if any(row[name] is not None for row in found)]
    cells = [headings, *([_text(name, row[name]) for name in headings] for row in found)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for first, *others in cells:
        aligned = [text.rjust(width) for text, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *aligned]))
    return "\n".join(lines)


def _text(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name == "success":
        return f"{value:.0%}"
    return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


if __name__ == "__main__":
    command_line(main, Args)
