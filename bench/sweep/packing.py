"""Compare total steps per second: one-thread SAC runs, one for each core, with one run of as many threads.

python bench/sweep/packing.py
python bench/sweep/packing.py --device cuda --runs 12      # 12 runs that share a card, compared with one
"""

import contextlib
import os
import sys
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Literal

import tyro

from bench.speed.interleaved_timing import ROOT, Contender, ContenderError, contest, machine_facts, measure, versions
from bench.speed.speed import FOREVER, LEARNING_STARTS, WARM_UP_TIMEOUT, environment, form_of, has_losses
from bench.speed.step_counter import counted
from bench.sweep.mps import shared_card
from common.cuda import GPU_SHARE_ENV

ALONE = {"cuda": "one run", "cpu": "one run of all threads"}  # the first heads the table of docs/sweeps.md


@dataclass(frozen=True)
class Args:
    """Runs and duration of the measurement."""

    env: str = "HalfCheetah-v4"
    """Any environment that Gymnasium itself registers."""
    runs: int = os.cpu_count() or 1
    """Number of one-thread runs. On the CPU, the single run has as many threads."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device of all runs. On a GPU, each run has its share of the memory."""
    rounds: int = 10
    """Number of rounds. In each, both sides run once, in a random order."""
    slice_seconds: float = 6.0
    """Seconds that each side runs in a round."""
    out: Path | None = None
    """File for the raw rounds. By default, a new one in results/speed, named after device and time."""


def main(args: Args) -> None:
    """Warm up each run alone, run both sides in alternation, and write the rounds.

    Raise ContenderError if a run fails, or if there is no GPU and one is needed.
    """
    on_card, alone = args.device == "cuda", ALONE[args.device]
    name = f"packing-{args.device}-{datetime.now():%Y-%m-%dT%H%M%S}.csv"
    out = args.out or ROOT / "results" / "speed" / name
    facts = {
        "algorithm": f"{args.runs} runs of sac on {args.env}",
        "measured": f"{args.rounds} rounds of {args.slice_seconds:g} s each",
        **machine_facts(args.device),
        "versions of ours": versions(sys.executable),
    }
    line = (
        f"algos/sac.py --env {counted(args.env)} --learning-starts {LEARNING_STARTS} --total-steps {FOREVER} "
        f"--eval-every {FOREVER} --device {args.device} --run-dir"
    )
    with contextlib.ExitStack() as stack:
        if on_card:
            facts["sharing"] = stack.enter_context(shared_card())
        contenders, folder = stack.enter_context(contest())
        threads = {f"{alone}-0": 1 if on_card else args.runs} | {f"ours-{i}": 1 for i in range(args.runs)}
        for name, number in threads.items():
            command = [sys.executable, *line.split(), str(folder / name)]
            env = environment(args.device) | {"OMP_NUM_THREADS": str(number), GPU_SHARE_ENV: str(1 / (args.runs + 1))}
            contenders.append(Contender(name, command, env, folder, LEARNING_STARTS + 300))
            contenders[-1].learns = partial(has_losses, folder / name / "metrics.csv")
            contenders[-1].warm_up(WARM_UP_TIMEOUT)
            facts[f"threads of {name}"] = str(contenders[-1].threads())
        facts |= form_of(folder / "ours-0")
        measure({"ours": contenders[1:], alone: contenders[:1]}, args.rounds, args.slice_seconds, out, facts)


if __name__ == "__main__":
    try:
        main(tyro.cli(Args))
    except ContenderError as error:
        sys.exit(f"packing: {error}")
