"""What may be said across environments or datasets: interquartile means, probabilities of improvement, profiles.

Returns of online runs are divided by the return that was published of the same algorithm in the same environment after
a million steps: 1 is the published result. Datasets have their normalised scores.
"""

from collections import defaultdict
from itertools import combinations

import numpy as np

from bench.curves import Curves, online, published, there
from bench.intervals import Estimate, Values, estimate, improvement, interquartile_mean, profile

STEPS = (100_000, 300_000, 1_000_000)
Runs = dict[str, dict[str, list[float]]]  # algorithm to environment or dataset to each seed's score


def reached(curves: Curves, step: int) -> Runs:
    """The scores at `step` of the seeds that got there."""
    runs: Runs = defaultdict(dict)
    for (algo, task), seeds in curves.items():
        if values := list(there(seeds, step).values()):
            runs[algo][task] = values
    return runs


def online_runs(step: int) -> tuple[Runs, Runs]:
    """Ours and the published at `step`, by the published mean after the last of STEPS, where there is one."""
    theirs = published()
    unit = {key: np.mean(list(there(seeds, STEPS[-1]).values())) for key, seeds in theirs.items()}
    ours = {key: seeds for key, seeds in online().items() if key in unit}
    both: list[Runs] = [reached(ours, step), reached({key: theirs[key] for key in ours}, step)]
    for runs in both:
        for algo, tasks in runs.items():
            runs[algo] = {env: [float(value / unit[algo, env]) for value in values] for env, values in tasks.items()}
    return both[0], both[1]


def only_means() -> set[str]:
    """The algorithms of whose published runs there is no more than their mean."""
    return {algo for (algo, _), seeds in published().items() if any(seed.startswith("mean") for seed in seeds)}


def beside(ours: dict[str, list[float]], theirs: dict[str, list[float]]) -> tuple[str, str]:
    """On how many tasks and seeds both were run, and the probability that a run of the first is the better one."""
    both = [task for task in ours if task in theirs]
    if not both:
        return "", "not run"
    tasks = [ours[task] for task in both], [theirs[task] for task in both]
    seeds = [" + ".join(str(len(seeds)) for seeds in side) for side in tasks]
    return f"{len(both)}: {seeds[0]} and {seeds[1]}", estimate(improvement, [*tasks[0], *tasks[1]]).text(2)


def online_aggregates() -> str:
    """Interquartile means over the environments, ours beside the published, and the probability of being better."""
    lines = [
        "| | steps | onramp | published | a run of onramp is better | environments: seeds of each |",
        "|---|---|---|---|---|---|",
    ]
    for algo in sorted({algo for algo, _ in online()}):
        for step in STEPS:
            ours, theirs = (runs.get(algo, {}) for runs in online_runs(step))
            if not ours:
                lines.append(f"| {algo.upper()} | {step:,} | not run | | | |")
                continue
            cells = [estimate(interquartile_mean, list(runs.values())).text(2) for runs in (ours, theirs)]
            seeds = f"{len(ours)}: {' + '.join(str(len(values)) for values in ours.values())}"
            better = "only means were published" if algo in only_means() else beside(ours, theirs)[1]
            lines.append(f"| {algo.upper()} | {step:,} | {' | '.join(cells)} | {better} | {seeds} |")
    return "\n".join(lines)


def improvements(runs: Runs, names: dict[str, str]) -> str:
    """Every algorithm of `names` against every later one, on the tasks that both were run on; scores of one task have
    one unit.
    """
    lines = ["| | probability | tasks: seeds of each |", "|---|---|---|"]
    for a, b in combinations([name for name in names if name in runs], 2):
        tasks, probability = beside(runs[a], runs[b])
        lines.append(f"| {names[a]} better than {names[b]} | {probability} | {tasks} |")
    return "\n".join(lines if len(lines) > 2 else [*lines, "| not run | | |"])


def profiles(runs: dict[str, dict[str, list[float]]]) -> tuple[Values, dict[str, Estimate]]:
    """Thresholds from 0 to above the best run, and of each of `runs` the share above them."""
    best = max(max(seeds) for tasks in runs.values() for seeds in tasks.values())
    thresholds = np.linspace(0.0, 1.05 * best, 106)
    return thresholds, {name: estimate(profile(thresholds), list(tasks.values())) for name, tasks in runs.items()}
