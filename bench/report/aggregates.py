"""Tables of the returns of online runs, and statistics across environments or datasets.

Returns of online runs are divided by the return that was published of the same algorithm and environment after a
million steps. So 1 is the published result. Runs on datasets have normalised scores.
"""

from collections import defaultdict
from itertools import combinations
from statistics import median

import numpy as np

from bench.report.curves import Curves, minutes_per_step, number_of, online, published, there
from bench.report.intervals import (
    MIN_SEEDS_FOR_CI,
    Estimate,
    Values,
    estimate,
    improvement,
    interquartile_mean,
    profile,
)
from bench.report.tables import Table, display_name, spread
from common.run_folder import Curve

STEPS = (100_000, 300_000, 1_000_000)
Runs = dict[str, dict[str, list[float]]]  # each seed's score, by algorithm and by environment or dataset


def reached(curves: Curves, step: int) -> Runs:
    """Return the scores at `step` of the seeds that reached it."""
    runs: Runs = defaultdict(dict)
    for (algo, task), seeds in curves.items():
        if values := list(there(seeds, step).values()):
            runs[algo][task] = values
    return runs


def online_runs(step: int) -> tuple[Runs, Runs]:
    """Return our and the published runs at `step`, divided by the published mean at the last of STEPS.

    Both have the same tasks, those on which both have runs that reached the step.
    """
    theirs = published()
    unit = {key: np.mean(list(there(seeds, STEPS[-1]).values())) for key, seeds in theirs.items()}
    ours = {key: seeds for key, seeds in online().items() if key in unit}
    both: list[Runs] = [reached(ours, step), reached({key: theirs[key] for key in ours}, step)]
    shared = {(algo, env) for algo, tasks in both[0].items() for env in tasks if env in both[1].get(algo, {})}
    scaled: list[Runs] = [defaultdict(dict), defaultdict(dict)]
    for runs, found in zip(both, scaled, strict=True):
        for algo, env in sorted(shared):
            found[algo][env] = [float(value / unit[algo, env]) for value in runs[algo][env]]
    return scaled[0], scaled[1]


def only_means() -> set[str]:
    """Return the algorithms of which only the mean over the runs was published."""
    return {algo for (algo, _), seeds in published().items() if any(seed.startswith("mean") for seed in seeds)}


def compared(ours: dict[str, list[float]], theirs: dict[str, list[float]]) -> tuple[str, str]:
    """Return the number of common tasks and their seeds, and the probability that a run of `ours` scores higher."""
    both = [task for task in ours if task in theirs]
    if not both:
        return "", "not run"
    tasks = [ours[task] for task in both], [theirs[task] for task in both]
    seeds = [" + ".join(str(len(seeds)) for seeds in side) for side in tasks]
    return f"{len(both)}: {seeds[0]} and {seeds[1]}", estimate(improvement, [*tasks[0], *tasks[1]]).text(2)


def online_aggregates() -> Table:
    """Return our and the published interquartile means over the environments, and the probability of improvement."""
    heads = "", "steps", "onramp", "published", "probability of improvement", "environments: seeds of each"
    table = Table(heads)
    for algo in sorted({algo for algo, _ in online()}):
        for step in STEPS:
            ours, theirs = (runs.get(algo, {}) for runs in online_runs(step))
            if not ours:
                table.rows.append([display_name(algo), f"{step:,}", "not run", "", "", ""])
                continue
            cells = [estimate(interquartile_mean, list(runs.values())).text(2) for runs in (ours, theirs)]
            cells[1] = "" if algo in only_means() else cells[1]
            seeds = f"{len(ours)}: {' + '.join(str(len(values)) for values in ours.values())}"
            better = "only means were published" if algo in only_means() else compared(ours, theirs)[1]
            table.rows.append([display_name(algo), f"{step:,}", *cells, better, seeds])
    return table


def improvements(runs: Runs, names: dict[str, str]) -> Table:
    """Return the probability of improvement of each algorithm in `names` over each later one, on their common tasks.

    Scores of the same task must have the same unit.
    """
    table = Table(("", "probability", "tasks: seeds of each"))
    for a, b in combinations([name for name in names if name in runs], 2):
        tasks, probability = compared(runs[a], runs[b])
        table.rows.append([f"{names[a]} better than {names[b]}", probability, tasks])
    return table


def online_improvements(names: dict[str, str], steps: tuple[int, ...]) -> Table:
    """Return `improvements` of the online runs at each of `steps`, with a column for the step."""
    table = Table(("", "steps", "probability of improvement", "environments: seeds of each"))
    for step in steps:
        for better, probability, tasks in improvements(reached(online(), step), names).rows:
            table.rows.append([better, f"{step:,}", probability, tasks])
    return table


def profiles(runs: dict[str, dict[str, list[float]]]) -> tuple[Values, dict[str, Estimate]]:
    """Return thresholds from 0 to above the best run, and for each of `runs` the share above each threshold."""
    best = max(max(seeds) for tasks in runs.values() for seeds in tasks.values())
    thresholds = np.linspace(0.0, 1.05 * best, 106)
    return thresholds, {name: estimate(profile(thresholds), list(tasks.values())) for name, tasks in runs.items()}


def spread_at(seeds: dict[str, Curve], step: int) -> str:
    """Return "mean ± standard deviation (number)" of the seeds that reached `step`."""
    found = there(seeds, step)
    return spread(found.values(), 0, number_of(found))


def interquartile(seeds: dict[str, Curve], step: int) -> str:
    """Return the interquartile mean and 95 % interval of the seeds that reached `step`, or "" for fewer than four."""
    values = list(there(seeds, step).values())
    return estimate(interquartile_mean, [values]).text() if len(values) >= MIN_SEEDS_FOR_CI else ""


def learning_table(only: str = "") -> Table:
    """Return the table of our and the published returns at equal steps, of all algorithms or one.

    The minutes are the steps times a run's mean wall-clock time for a step. They are the median over the runs whose
    time was recorded.
    """
    table = Table(("", "steps", "onramp", "interquartile mean", "published", "minutes"))
    theirs, took = published(), minutes_per_step("")
    for (algo, env), seeds in online().items():
        for step in STEPS if only in ("", algo) else ():
            known = spread_at(theirs[algo, env], step) if theirs[algo, env] else ""
            rates = took.get((algo, env), []) if there(seeds, step) else []
            minutes = f"{step * median(rates):,.1f}" if rates else ""
            row = spread_at(seeds, step), interquartile(seeds, step), known, minutes
            table.rows.append([f"{display_name(algo)}, {env}", f"{step:,}", *row])
    return table


def returns_table(algo: str) -> Table:
    """Return our returns of one algorithm: a row for each environment, a column for each of STEPS."""
    table = Table(("", *(f"{step:,}" for step in STEPS)))
    for (name, env), seeds in online().items():
        if name == algo:
            table.rows.append([env, *(spread_at(seeds, step) for step in STEPS)])
    return table


def published_returns(algo: str) -> Table:
    """Return the published returns of one algorithm: a row for each of STEPS, a column for each environment."""
    theirs = {env: seeds for (name, env), seeds in sorted(published().items()) if name == algo}
    return Table(("steps", *theirs), [[f"{n:,}", *(spread_at(seeds, n) for seeds in theirs.values())] for n in STEPS])


def settings_table(algo: str, other: str, label: str, steps: tuple[int, ...], default_label: str = "defaults") -> Table:
    """Return the table of returns at equal steps with an algorithm's defaults and in other runs.

    The latter are in results/ablations/<other>, or in results/<other> if they are of another algorithm with its own
    defaults. The labels head their columns. The last column is the probability that such a run returns more than one
    with the defaults.
    """
    table = Table(("", "steps", default_label, label, "probability of improvement"))
    kept = online()
    others = sorted((online("ablations") | kept).items())
    pairs = {env: (seeds, kept[algo, env]) for (name, env), seeds in others if name == other}
    for step in steps:
        found = {env: [list(there(seeds, step).values()) for seeds in pair] for env, pair in pairs.items()}
        found = {env: values for env, values in found.items() if all(values)}
        for env, values in found.items():
            theirs, ours = (
                f"{spread_at(seeds, step)}; {interquartile(seeds, step)}".strip("; ") for seeds in pairs[env]
            )
            table.rows.append([env, f"{step:,}", ours, theirs, estimate(improvement, values).text(2)])
        if len(found) > 1:
            overall = estimate(improvement, [values[i] for i in (0, 1) for values in found.values()])
            table.rows.append(["all", f"{step:,}", "", "", overall.text(2)])
    return table
