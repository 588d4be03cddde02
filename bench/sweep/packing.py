# ruff: noqa: T201
"""As many SAC runs of one thread as there are cores, beside one run of as many threads: steps per second in sum.

python bench/sweep/packing.py
python bench/sweep/packing.py --device cuda --runs 12      # runs that share a card, beside one of them
"""

import contextlib
import os
import random
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import tyro

from bench.speed.interleaved_timing import (
    Contender,
    Slice,
    accelerator,
    busy_seconds,
    contest,
    processor,
    versions,
    write_rounds,
)
from bench.speed.speed import FOREVER, LEARNING_STARTS, ROOT, WARM_UP_TIMEOUT, environment, has_losses
from bench.speed.step_counter import counted
from bench.sweep.mps import shared_card
from common.cuda import GPU_SHARE_ENV

ALONE = {"cpu": "one run of all threads", "cuda": "one run"}


@dataclass(frozen=True)
class Args:
    """What is measured, and for how long."""

    env: str = "HalfCheetah-v4"
    """Any environment that Gymnasium itself registers."""
    runs: int = os.cpu_count() or 1
    """How many, of one thread each; on the CPU one run has as many threads."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where they compute; on a card each has its share of the memory."""
    rounds: int = 10
    """Rounds; in each both sides run once, in a random order."""
    slice_seconds: float = 6.0
    """How long each runs in a round."""
    out: Path | None = None
    """Where the raw rounds go; by default results/speed/packing.csv or packing-cuda.csv."""


def together(side: str, runs: list[Contender], round_: int, seconds: float) -> Slice:
    """One slice of all these runs at once, from standstill to standstill; their steps and cores are summed."""
    steps, cpu, machine = sum(run.steps() for run in runs), sum(run.cpu_seconds() for run in runs), busy_seconds()
    start = time.perf_counter()
    for run in runs:
        run.resume()
    time.sleep(seconds)
    for run in runs:
        run.stop()
    wall = time.perf_counter() - start
    own = sum(run.cpu_seconds() for run in runs) - cpu
    others = max(busy_seconds() - machine - own, 0.0)
    return Slice(round_, side, sum(run.steps() for run in runs) - steps, wall, own / wall, others / wall)


def main(args: Args) -> None:
    """Warm every run up alone, alternate, report."""
    on_card, alone = args.device == "cuda", ALONE[args.device]
    out = args.out or ROOT / "results" / "speed" / ("packing-cuda.csv" if on_card else "packing.csv")
    facts = {
        "algorithm": f"{args.runs} runs of sac on {args.env}",
        "measured": f"{args.rounds} rounds of {args.slice_seconds:g} s each",
        "processor": processor(),
        "versions of ours": versions(sys.executable),
    }
    flags = f"--learning-starts {LEARNING_STARTS} --total-steps {FOREVER} --eval-every {FOREVER}".split()
    with contextlib.ExitStack() as stack:
        if on_card:
            facts |= {"device": accelerator(), "sharing": stack.enter_context(shared_card())}
        contenders, folder = stack.enter_context(contest())
        sides: dict[str, list[Contender]] = {"ours": [], alone: []}
        one = (alone, 1 if on_card else args.runs, 0)
        for side, threads, i in [one, *(("ours", 1, i) for i in range(args.runs))]:
            run = folder / f"{side}-{i}"
            command = [
                sys.executable,
                "algos/sac.py",
                "--env",
                counted(args.env),
                *flags,
                "--run-dir",
                str(run),
                "--device",
                args.device,
            ]
            env = environment(args.device) | {"OMP_NUM_THREADS": str(threads), GPU_SHARE_ENV: str(1 / (args.runs + 1))}
            learns = partial(has_losses, run / "metrics.csv")
            contenders.append(Contender(run.name, command, env, folder, LEARNING_STARTS + 300, ROOT, learns))
            contenders[-1].warm_up(WARM_UP_TIMEOUT)
            sides[side].append(contenders[-1])
        rounds: list[list[Slice]] = []
        for i in range(1, args.rounds + 1):
            order = random.Random(i).sample(list(sides.items()), 2)
            rounds.append([together(side, runs, i, args.slice_seconds) for side, runs in order])
            print(f"round {i}: {', '.join(f'{s.contender} {s.steps_per_second:.1f}' for s in rounds[-1])}", flush=True)
            write_rounds(out, facts, rounds)


if __name__ == "__main__":
    main(tyro.cli(Args))
