"""Learning curves of our runs and of published ones, from the raw data in results/ and nothing else.

In results/offline/<algorithm>/<dataset>/<seed> steps count up to 0, the end of the updates that its config.json asks
for, whether the run got there or not; in results/online/<algorithm>-<retain>/ and in <variant>/ of results/wsrl,
results/wsrl-longer and results/expo they count on from 0.
"""

import csv
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.report.archive_run import Kept, kept_runs
from offline.scores import normalized, reference

RESULTS = Path(__file__).resolve().parents[2] / "results"
Curve = dict[int, float]  # mean of an evaluation's episodes, by step
Curves = dict[tuple[str, str], dict[str, Curve]]  # (algorithm, environment or dataset) to seed to curve


def means(rows: Iterable[dict[str, str]], of: Callable[[dict[str, str]], float]) -> Curve:
    """The mean of `of` over each evaluation's episodes, of which evaluations.csv has a row each."""
    episodes: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        episodes[int(row["step"])].append(of(row))
    return {step: statistics.mean(values) for step, values in episodes.items()}


def curves_of(folder: str, curve_of: Callable[[Kept], Curve | None]) -> Curves:
    """The curve of every run in results/<folder>/<algorithm>/<environment or dataset>/<seed> that has one."""
    curves: Curves = defaultdict(dict)
    for run in kept_runs(RESULTS / folder):
        if (curve := curve_of(run)) is not None:
            curves[run.algo, run.task][run.seed] = curve
    return curves


def online(folder: str = "") -> Curves:
    """The returns of what learned online alone."""
    return curves_of(folder, lambda run: means(run.rows, lambda row: float(row["return"])))


def published() -> Curves:
    """The same of `results/published.csv`."""
    curves: Curves = defaultdict(lambda: defaultdict(dict))
    with (RESULTS / "published.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            curves[row["algo"], row["env"]][row["seed"]][int(row["step"])] = float(row["return"])
    return curves


def scores(folder: str) -> Curves:
    """Of results/<folder>: scores, as `score_curve` has them."""
    return curves_of(folder, score_curve)


def score_curve(run: Kept) -> Curve:
    """Normalised scores (`offline.scores`), the run's own where its environment came with the dataset; or where
    episodes are solved or not, how many per cent of them are.
    """
    between = reference(run.config["arguments"]["env"])

    def score(row: dict[str, str]) -> float:
        if between is not None:
            return float(normalized(float(row["return"]), between))
        if row["normalized_score"]:
            return float(row["normalized_score"])
        where = f"{run.algo}/{run.task}/{run.seed}"
        assert row["success"], f"{where}: neither success, nor a return that anyone published a scale for"
        return 100.0 * float(row["success"])

    return means(run.rows, score)


def successes(folder: str) -> Curves:
    """Of results/<folder>: how many per cent of an evaluation's episodes succeed at some step, where that is known."""

    def per_cent(run: Kept) -> Curve | None:
        is_known = all(row["success"] for row in run.rows)
        return means(run.rows, lambda row: 100.0 * float(row["success"])) if is_known else None

    return curves_of(folder, per_cent)


def by_updates() -> Curves:
    """The scores of results/offline, their steps counted from the first update."""

    def shifted(run: Kept) -> Curve:
        total = run.config["arguments"]["offline_steps"]
        return {total + step: score for step, score in score_curve(run).items()}

    return curves_of("offline", shifted)


def minutes_per_step(folder: str) -> dict[tuple[str, str], list[float]]:
    """Of results/<folder>: wall-clock minutes of the runs of each (algorithm, dataset), evaluations included, divided
    by their steps.
    """
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for run in kept_runs(RESULTS / folder):
        steps = [int(row["step"]) for row in run.rows]
        if time := run.config.get("time"):
            found[run.algo, run.task].append(time["seconds"] / 60 / (max(steps) - min(steps)))
    return found


def behaviour(dataset: str) -> float | None:
    """Mean score of the episodes of a dataset of our suite, as `tools/datasets.py` wrote it; None of any other."""
    path = RESULTS / "datasets" / f"{dataset}.json"
    return float(json.loads(path.read_text())["score"]) if path.exists() else None


def at(curve: Curve, step: int) -> float | None:
    """Value at `step`, linear between two evaluations; None outside of the curve."""
    below, above = [s for s in curve if s <= step], [s for s in curve if s >= step]
    if not below or not above:
        return None
    a, b = max(below), min(above)
    return curve[a] if a == b else curve[a] + (curve[b] - curve[a]) * (step - a) / (b - a)


def there(seeds: dict[str, Curve], step: int) -> dict[str, float]:
    """The values at `step` of the seeds that got there."""
    return {seed: value for seed, curve in seeds.items() if (value := at(curve, step)) is not None}


def aligned(seeds: dict[str, Curve], last: int | None = None) -> tuple[list[int], NDArray[np.float64]]:
    """The steps until `last` at which all seeds were evaluated, and their values [seeds, steps]."""
    common = set.intersection(*map(set, seeds.values()))
    steps = sorted(step for step in common if last is None or step <= last)
    return steps, np.array([[curve[step] for step in steps] for curve in seeds.values()])


def number_of(seeds: Iterable[str]) -> int:
    """How many seeds these are; one called mean10 is the mean of ten, of which no more was published."""
    return sum(int(seed.removeprefix("mean")) if seed.startswith("mean") else 1 for seed in seeds)
