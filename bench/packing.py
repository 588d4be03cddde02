# ruff: noqa: T201
"""As many SAC runs of one thread as there are cores, beside one run of as many threads: steps per second in sum.

python bench/packing.py
"""

import os
import random
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import tyro

from bench.alternate import Contender, Slice, busy_seconds, contest
from bench.machine import processor, versions
from bench.rounds import write_rounds
from bench.speed import FOREVER, LEARNING_STARTS, ROOT, WARM_UP_TIMEOUT, environment, has_losses
from bench.step_counter import counted

ALONE = "one run of all threads"


@dataclass(frozen=True)
class Args:
    """What is measured, and for how long."""

    env: str = "HalfCheetah-v4"
    """Any environment that Gymnasium itself registers."""
    cores: int = os.cpu_count() or 1
    """Threads, and runs of one thread."""
    rounds: int = 10
    """Rounds; in each both sides run once, in a random order."""
    slice_seconds: float = 6.0
    """How long each runs in a round."""
    out: Path = ROOT / "results" / "speed" / "packing.csv"
    """Where the raw rounds go."""


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
    facts = {
        "algorithm": f"{args.cores} runs of sac on {args.env}",
        "measured": f"{args.rounds} rounds of {args.slice_seconds:g} s each",
        "processor": processor(),
        "versions of ours": versions(sys.executable),
    }
    flags = f"--learning-starts {LEARNING_STARTS} --total-steps {FOREVER} --eval-every {FOREVER}".split()
    with contest() as (contenders, folder):
        sides: dict[str, list[Contender]] = {"ours": [], ALONE: []}
        for side, threads, i in [(ALONE, args.cores, 0), *(("ours", 1, i) for i in range(args.cores))]:
            run = folder / f"{side}-{i}"
            command = [sys.executable, "algos/sac.py", "--env", counted(args.env), *flags, "--run-dir", str(run)]
            env = environment() | {"OMP_NUM_THREADS": str(threads)}
            learns = partial(has_losses, run / "metrics.csv")
            contenders.append(Contender(run.name, command, env, folder, LEARNING_STARTS + 300, ROOT, learns))
            contenders[-1].warm_up(WARM_UP_TIMEOUT)
            sides[side].append(contenders[-1])
        rounds: list[list[Slice]] = []
        for i in range(1, args.rounds + 1):
            order = random.Random(i).sample(list(sides.items()), 2)
            rounds.append([together(side, runs, i, args.slice_seconds) for side, runs in order])
            print(f"round {i}: {', '.join(f'{s.contender} {s.steps_per_second:.1f}' for s in rounds[-1])}", flush=True)
            write_rounds(args.out, facts, rounds)


if __name__ == "__main__":
    main(tyro.cli(Args))
