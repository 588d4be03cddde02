"""Learning curves of our runs and of published ones, from the raw data in results/ and nothing else.

In results/offline/<algorithm>/<dataset>/<seed> steps count up to 0, the end of the updates in its config.json. The run
may have ended before. Steps continue after 0 in results/online/<algorithm>-<retain>/, and in <variant>/ of
results/wsrl, results/wsrl-longer and results/expo.
"""

import csv
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.report.archive_run import Kept, kept_runs
from common.run_folder import Curve, mean_by_step
from common.schema import read_json
from offline.scores import normalized, reference

RESULTS = Path(__file__).resolve().parents[2] / "results"
Curves = dict[tuple[str, str], dict[str, Curve]]  # by (algorithm, environment or dataset), then by seed


def curves_of(folder: str, curve_of: Callable[[Kept], Curve | None]) -> Curves:
    """Return the curve of every run in results/<folder>/<algorithm>/<environment or dataset>/<seed> that has one."""
    curves: Curves = defaultdict(dict)
    for run in kept_runs(RESULTS / folder):
        if (curve := curve_of(run)) is not None:
            curves[run.algo, run.task][run.seed] = curve
    return curves


def online(folder: str = "") -> Curves:
    """Return the curves of returns in results/<folder>, whose runs learned only online."""
    return curves_of(folder, lambda run: mean_by_step(run.rows, lambda row: float(row["return"])))


def published() -> Curves:
    """Return the curves of returns in results/published.csv."""
    curves: Curves = defaultdict(lambda: defaultdict(dict))
    with (RESULTS / "published.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            curves[row["algo"], row["env"]][row["seed"]][int(row["step"])] = float(row["return"])
    return curves


def scores(folder: str) -> Curves:
    """Return the curves of scores in results/<folder>, as `score_curve` computes them."""
    return curves_of(folder, score_curve)


def score_curve(run: Kept) -> Curve:
    """Return a run's normalised scores, or the percentage of solved episodes if there is no normalised score.

    The reference of `offline.scores` is preferred. If it has none for the environment, the run's own scores are used.
    """
    between = reference(run.config["arguments"]["env"])

    def score(row: dict[str, str]) -> float:
        if between is not None:
            return float(normalized(float(row["return"]), between))
        if row["normalized_score"]:
            return float(row["normalized_score"])
        where = f"{run.algo}/{run.task}/{run.seed}"
        assert row["success"], f"{where} has neither success nor a return with published reference scores"
        return 100.0 * float(row["success"])

    return mean_by_step(run.rows, score)


def successes(folder: str) -> Curves:
    """Return for results/<folder> the percentage of episodes that succeed at some step, of runs that recorded it."""

    def per_cent(run: Kept) -> Curve | None:
        is_known = all(row["success"] for row in run.rows)
        return mean_by_step(run.rows, lambda row: 100.0 * float(row["success"])) if is_known else None

    return curves_of(folder, per_cent)


def by_updates(folder: str = "offline") -> Curves:
    """Return the curves of scores in results/<folder>, with steps counted from the first update."""

    def shifted(run: Kept) -> Curve:
        total = run.config["arguments"]["offline_steps"]
        return {total + step: score for step, score in score_curve(run).items()}

    return curves_of(folder, shifted)


def minutes_per_step(folder: str) -> dict[tuple[str, str], list[float]]:
    """Return for results/<folder> the wall-clock minutes per step of each run, by (algorithm, dataset).

    Evaluations are included. Runs without a recorded time are left out.
    """
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for run in kept_runs(RESULTS / folder):
        steps = [int(row["step"]) for row in run.rows]
        if time := run.config.get("time"):
            found[run.algo, run.task].append(time["seconds"] / 60 / (max(steps) - min(steps)))
    return found


def behaviour(dataset: str) -> float | None:
    """Return the mean score of a dataset's episodes, as `tools/datasets.py` wrote it, or None outside our suite."""
    path = RESULTS / "datasets" / f"{dataset}.json"
    score: float | None = read_json(path, {"score": float | None}, "is damaged: restore it").get("score")
    return score


def at(curve: Curve, step: int) -> float | None:
    """Return the value at `step`, interpolated linearly between two evaluations, or None outside the curve."""
    below, above = [s for s in curve if s <= step], [s for s in curve if s >= step]
    if not below or not above:
        return None
    a, b = max(below), min(above)
    return curve[a] if a == b else curve[a] + (curve[b] - curve[a]) * (step - a) / (b - a)


def there(seeds: dict[str, Curve], step: int) -> dict[str, float]:
    """Return the values at `step` of the seeds that reached it."""
    return {seed: value for seed, curve in seeds.items() if (value := at(curve, step)) is not None}


def aligned(seeds: dict[str, Curve], last: int | None = None) -> tuple[list[int], NDArray[np.float64]]:
    """Return the steps until `last` at which all seeds were evaluated, and the values [seeds, steps]."""
    common = set.intersection(*map(set, seeds.values()))
    steps = sorted(step for step in common if last is None or step <= last)
    return steps, np.array([[curve[step] for step in steps] for curve in seeds.values()])


def number_of(seeds: Iterable[str]) -> int:
    """Return the number of seeds. One called mean10 is the mean of ten, whose single curves were not published."""
    return sum(int(seed.removeprefix("mean")) if seed.startswith("mean") else 1 for seed in seeds)
