"""The tables of what was learned online, from results/ alone."""

import statistics

from bench.aggregates import STEPS
from bench.curves import Curve, number_of, online, published, there
from bench.intervals import ENOUGH, estimate, improvement, interquartile_mean


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


def settings_table(algo: str, other: str, label: str, steps: tuple[int, ...]) -> str:
    """Return at equal steps of an algorithm's defaults and of another setting, in results/ablations/<other>.

    The last column is the probability that a run of the other setting returns more than one of the defaults.
    """
    lines = [f"| | steps | defaults | {label} | probability of improvement |", "|---|---|---|---|---|"]
    kept, changed = online(), online("ablations")
    pairs = {env: (seeds, kept[algo, env]) for (name, env), seeds in sorted(changed.items()) if name == other}
    for step in steps:
        found = {env: [list(there(seeds, step).values()) for seeds in pair] for env, pair in pairs.items()}
        found = {env: values for env, values in found.items() if all(values)}
        for env, values in found.items():
            theirs, ours = (f"{spread(seeds, step)}; {interquartile(seeds, step)}".strip("; ") for seeds in pairs[env])
            lines.append(f"| {env} | {step:,} | {ours} | {theirs} | {estimate(improvement, values).text(2)} |")
        if len(found) > 1:
            overall = estimate(improvement, [values[i] for i in (0, 1) for values in found.values()])
            lines.append(f"| all | {step:,} | | | {overall.text(2)} |")
    return "\n".join(lines if len(lines) > 2 else [*lines, "| not run | | | | |"])
