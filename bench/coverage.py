"""How often the report's 95 % intervals hold the true interquartile mean, on simulated runs.

python bench/coverage.py    # the table of docs/results.md, two minutes
"""

import sys
from collections.abc import Callable

import numpy as np
import scipy.stats

from bench.intervals import Values, estimate, interquartile_mean

SEEDS = (2, 3, 4, 5, 10, 20)
Shape = Callable[[np.random.Generator, tuple[int, ...]], Values]
SHAPES: dict[str, Shape] = {
    "normal": lambda random, size: random.normal(size=size),
    "skewed (exponential)": lambda random, size: random.exponential(size=size),
    "three runs in ten succeed": lambda random, size: random.normal(0.0, 0.3, size) + 2.0 * (random.random(size) < 0.3),
}


def coverage(shape: Shape, tasks: int, seeds: int, simulations: int) -> float:
    """Share of the simulations whose interval holds the interquartile mean of two million runs; each task lies one
    above the last.
    """
    random = np.random.default_rng(0)
    runs = [shape(random, (seeds, simulations)) + task for task in range(tasks)]
    many = np.concatenate([shape(random, (2_000_000 // tasks,)) + task for task in range(tasks)])
    truth = scipy.stats.trim_mean(many, 0.25)
    found = estimate(interquartile_mean, runs, enough=1)
    assert found.low is not None
    assert found.high is not None
    return float(np.mean((found.low <= truth) & (truth <= found.high)))


def main() -> None:
    heads = ["", "tasks", *(f"{seeds} seeds" for seeds in SEEDS)]
    sys.stdout.write(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|\n")
    for name, shape in SHAPES.items():
        for tasks in (1, 3, 5):
            shares = [f"{100 * coverage(shape, tasks, seeds, 500):.0f} %" for seeds in SEEDS]
            sys.stdout.write(f"| {name} | {tasks} | {' | '.join(shares)} |\n")


if __name__ == "__main__":
    main()
