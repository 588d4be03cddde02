"""The table of what was learned online, from results/ alone."""

import statistics

from bench.aggregates import STEPS
from bench.curves import Curve, number_of, online, published, there
from bench.intervals import ENOUGH, estimate, interquartile_mean


def spread(seeds: dict[str, Curve], step: int) -> str:
    """Mean ± standard deviation over the seeds that got there, and how many those are."""
    found = there(seeds, step)
    if not found:
        return "not run"
    deviation = f" ± {statistics.stdev(found.values()):,.0f}" if len(found) > 1 else ""
    return f"{statistics.mean(found.values()):,.0f}{deviation} ({number_of(found)})"


def interquartile(seeds: dict[str, Curve], step: int) -> str:
    """Interquartile mean over the seeds that got there, and its 95 % interval, of four or more."""
    values = list(there(seeds, step).values())
    return estimate(interquartile_mean, [values]).text() if len(values) >= ENOUGH else ""


def learning_table() -> str:
    """Return at equal steps, ours beside the published."""
    lines = ["| | steps | onramp | interquartile mean | published |", "|---|---|---|---|---|"]
    theirs = published()
    for (algo, env), seeds in online().items():
        for step in STEPS:
            row = f"{spread(seeds, step)} | {interquartile(seeds, step)} | {spread(theirs[algo, env], step)}"
            lines.append(f"| {algo.upper()}, {env} | {step:,} | {row} |")
    return "\n".join(lines)
