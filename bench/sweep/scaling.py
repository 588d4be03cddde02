"""Fit how the data that a return needs depends on the updates per step, and predict a setting that was not run.

Rybkin et al. 2025, "Value-Based Deep RL Scales Predictably", arXiv 2502.04327. σ is the update-to-data ratio (`--utd`),
D the environment steps to a return. The best batch size and the best learning rate are power laws of σ, and
D(σ) = D_min + (β / σ)^α with them.

    python bench/sweep/scaling.py runs/utd-scaling --returns -300 -200
    python bench/sweep/scaling.py runs/utd-scaling --returns -300 -200 --held-out 8 --csv curves.csv

The runs are those of one task, with `--utd`, `--batch-size` and `--critic-lr`. docs/scaling.md has the whole recipe.
"""

import common.start

import contextlib
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import tyro
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression, least_squares

from bench.report.tables import Table
from common.command_line import command_line
from common.errors import InputError
from common.files import replacing
from common.messages import print_result
from common.run_folder import CONFIG, EVALUATIONS, Curve, mean_by_step, read_config, read_evaluations, task_name

RESAMPLES = 1_000  # of the seeds
COLUMNS = ("utd", "batch_size", "critic_lr", "seed", "step", "return")


@dataclass
class Args:
    runs: Annotated[Path, tyro.conf.Positional]
    """A folder with runs, or a file that --csv wrote."""
    returns: tuple[float, ...]
    """Returns whose cost is fitted."""
    held_out: int | None = None
    """σ that the fit leaves out and predicts."""
    csv: Path | None = None
    """File for the runs' curves, to keep them."""


class Setting(NamedTuple):
    utd: int
    batch_size: int
    critic_lr: float


class Best(NamedTuple):
    """At one σ: the best batch size and learning rate, and D of each resample of the seeds [RESAMPLES]."""

    batch_size: float
    critic_lr: float
    data: NDArray[np.float64]


class Law(NamedTuple):
    """D(σ) = d_min + (β / σ)^α."""

    d_min: float
    beta: float
    alpha: float

    def __call__(self, utd: float) -> float:
        return float(self.d_min + (self.beta / utd) ** self.alpha)


class Power(NamedTuple):
    """factor · σ^exponent."""

    factor: float
    exponent: float

    def __call__(self, utd: float) -> float:
        return float(self.factor * utd**self.exponent)


Runs = dict[Setting, list[Curve]]


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[Path]:
    """Yield `path`. Raises InputError, which names it, if the block finds it missing or damaged."""
    try:
        yield path
    except FileNotFoundError:
        raise InputError(f"{path} is missing: restore it from a copy, or give other runs") from None
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is damaged ({error}): restore it from a copy, or give other runs") from None


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is not finite")
    return number


def read(path: Path) -> Runs:
    """Return the curves by setting.

    Raises InputError if there are none or those of several tasks or algorithms, if two runs have the same setting and
    seed, or if a file is missing or damaged.
    """
    folders: dict[tuple[Setting, int], Path] = {}
    runs: dict[Setting, dict[str, Curve]] = defaultdict(lambda: defaultdict(dict))
    if path.suffix == ".csv":
        with _naming(path):
            for row in read_evaluations(path):
                setting = Setting(int(row["utd"]), int(row["batch_size"]), _finite(row["critic_lr"]))
                runs[setting][row["seed"]][int(row["step"])] = _finite(row["return"])
    else:
        configs = {found.parent: read_config(found.parent, "is not a run's") for found in sorted(path.rglob(CONFIG))}
        kinds = sorted({f"{config['algo']} on {task_name(config['arguments'])}" for config in configs.values()})
        if len(kinds) > 1:
            raise InputError(f"{path} has runs of {' and '.join(kinds)}: give a folder that has those of one")
        for folder, config in configs.items():
            arguments = config["arguments"]
            if missing := [name for name in Setting._fields if name not in arguments]:
                raise InputError(f"{folder} has no --{missing[0].replace('_', '-')}: leave it out")
            setting = Setting(*(arguments[name] for name in Setting._fields))
            if (other := folders.setdefault((setting, arguments["seed"]), folder)) != folder:
                same = "--utd, --batch-size, --critic-lr and --seed"
                raise InputError(f"{other} and {folder} have the same {same}: leave one out")
            with _naming(folder / EVALUATIONS) as evaluations:
                curve = mean_by_step(read_evaluations(evaluations), lambda row: _finite(row["return"]))
            runs[setting][arguments["seed"]] = curve
    if not runs:
        raise InputError(f"{path} holds no runs: give the folder of a suite")
    return {setting: list(seeds.values()) for setting, seeds in sorted(runs.items())}


def write(path: Path, runs: Runs) -> None:
    """Write the curves to a CSV file, which `read` reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        rows = [
            (*setting, seed, step, value)
            for setting, curves in runs.items()
            for seed, curve in enumerate(curves, 1)
            for step, value in curve.items()
        ]
        file.write("\n".join(",".join(map(str, row)) for row in [COLUMNS, *rows]).encode() + b"\n")


def steps_to(curve: Curve, wanted: float) -> float:
    """Return the first step at which the best non-decreasing fit of the curve reaches `wanted`, or infinity."""
    if not curve:  # a run that stopped in its first evaluation
        return math.inf
    steps = sorted(curve)
    fit = isotonic_regression([curve[step] for step in steps]).x
    return next((float(step) for step, value in zip(steps, fit, strict=True) if value >= wanted), math.inf)


def best(runs: Runs, utd: int, wanted: float) -> Best:
    """Return what costs the least data at this σ, over resamples of the seeds (section 5 of the paper).

    Batch size and learning rate are geometric means of the best of each resample, so they may lie between those tried.
    Raises InputError if no setting reaches the return with every seed, or if one needs no step for it.
    """
    needed = {s: np.array([steps_to(c, wanted) for c in curves]) for s, curves in runs.items() if s.utd == utd}
    settings, rng = list(needed), np.random.default_rng(0)
    means = np.stack([rng.choice(needed[s], (RESAMPLES, len(needed[s]))).mean(1) for s in settings])
    if np.isinf(means.min(0)).any():
        raise InputError(f"at σ = {utd}, no setting reaches {wanted:g} with every seed: give lower --returns")
    if not means.min():
        raise InputError(f"at σ = {utd}, {wanted:g} is reached before the first step: give higher --returns")
    chosen = means.argmin(0)
    logs = np.log([[s.batch_size, s.critic_lr] for s in settings])[chosen].mean(0)
    batch_size, critic_lr = np.exp(logs)
    return Best(float(batch_size), float(critic_lr), means.min(0))


def power(utds: Sequence[int], values: Sequence[float]) -> Power:
    """Return the power law through the points, by least squares of the logarithms."""
    exponent, log_factor = np.polyfit(np.log(utds), np.log(values), 1)
    return Power(math.exp(log_factor), float(exponent))


def law(utds: Sequence[int], data: Sequence[float]) -> Law:
    """Return the law of least squared error, from the best of many starts, with α in [0.1, 5].

    Raises InputError with fewer than four points, which three parameters would fit exactly.
    """
    if len(utds) < 4:
        raise InputError(f"there are runs with {len(utds)} values of σ: three parameters need four")
    x, y = np.array(utds, float), np.array(data) / max(data)

    def errors(p: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.asarray(p[0] + p[1] * x ** -p[2] - y)  # linear in two of three, unlike (β / σ)^α

    starts = itertools.product((0.0, 0.3, 0.6, 0.9), (0.3, 1.0, 2.0))
    fits = [least_squares(errors, (low, 1.0 - low, a), bounds=((0, 1e-9, 0.1), (1, 10, 5))) for low, a in starts]
    d_min, scale, alpha = min(fits, key=lambda fit: float(fit.cost)).x
    return Law(d_min * max(data), float((scale * max(data)) ** (1 / alpha)), float(alpha))


class Fit(NamedTuple):
    """What was fitted for one return: the best of each σ, and the laws of batch size, learning rate and data."""

    by_utd: dict[int, Best]
    batch_size: Power
    critic_lr: Power
    data: Law


def fitted(runs: Runs, wanted: float, held_out: int | None = None) -> Fit:
    """Fit the laws for one return, without the σ that is held out."""
    utds = sorted({setting.utd for setting in runs} - {held_out})
    by_utd = {utd: best(runs, utd, wanted) for utd in utds}
    values = list(by_utd.values())
    return Fit(
        by_utd,
        power(utds, [each.batch_size for each in values]),
        power(utds, [each.critic_lr for each in values]),
        law(utds, [float(each.data.mean()) for each in values]),
    )


def bests_table(runs: Runs, returns: Sequence[float], held_out: int | None = None) -> Table:
    """Return a row for each return and σ: the best setting, D with its 95 % interval over resamples, transitions."""
    table = Table(("return", "σ", "batch size", "learning rate", "steps D (95 %)", "transitions in updates"))
    for wanted in returns:
        for utd, each in fitted(runs, wanted, held_out).by_utd.items():
            compute = utd * each.data.mean() * each.batch_size
            cells = [f"{each.batch_size:,.0f}", f"{each.critic_lr:.2g}", interval(each.data), f"{compute:,.0f}"]
            table.rows.append([f"{wanted:g}", str(utd), *cells])
    return table


def laws_table(runs: Runs, returns: Sequence[float], held_out: int | None = None) -> Table:
    """Return a row for each return: the laws of batch size, learning rate and data."""
    table = Table(("return", "batch size", "learning rate", "D_min", "β", "α"))
    for wanted in returns:
        fit = fitted(runs, wanted, held_out)
        powers = [f"{p.factor:.3g} σ^{p.exponent:.2f}" for p in (fit.batch_size, fit.critic_lr)]
        cells = [f"{fit.data.d_min:,.0f}", f"{fit.data.beta:,.4g}", f"{fit.data.alpha:.2f}"]
        table.rows.append([f"{wanted:g}", *powers, *cells])
    return table


def predictions_table(runs: Runs, returns: Sequence[float], held_out: int) -> Table:
    """Return a row for each return: the predicted setting and D of the σ held out, and what its runs needed.

    These are the runs with the setting that is nearest to the predicted one, and those with the best of all settings.
    """
    predicted = ("return", "σ", "batch size", "learning rate", "predicted D")
    table = Table((*predicted, "measured with", "measured D (95 %)", "D of the best setting (95 %)"))
    measured_runs = {setting: curves for setting, curves in runs.items() if setting.utd == held_out}
    for wanted in returns:
        fit = fitted(runs, wanted, held_out)
        cells = [f"{fit.batch_size(held_out):,.0f}", f"{fit.critic_lr(held_out):.2g}", f"{fit.data(held_out):,.0f}"]
        measured = ["", "not run", "not run"]
        if measured_runs:
            near = nearest(measured_runs, fit.batch_size(held_out), fit.critic_lr(held_out))
            alone = best({near: measured_runs[near]}, held_out, wanted)
            measured[:2] = f"{near.batch_size}, {near.critic_lr:.2g}", interval(alone.data)
        if len(measured_runs) > 1:
            measured[2] = interval(best(measured_runs, held_out, wanted).data)
        table.rows.append([f"{wanted:g}", str(held_out), *cells, *measured])
    return table


def nearest(settings: Iterable[Setting], batch_size: float, critic_lr: float) -> Setting:
    """Return the setting whose batch size and learning rate are nearest, by the sum of distances in logarithms."""
    asked = (batch_size, critic_lr)
    return min(settings, key=lambda each: float(np.abs(np.log(np.divide(each[1:], asked))).sum()))


def interval(data: NDArray[np.float64]) -> str:
    low, high = np.quantile(data, [0.025, 0.975])
    return f"{data.mean():,.0f} ({low:,.0f} to {high:,.0f})"


def main(args: Args) -> None:
    if not args.returns:
        raise InputError("--returns has no number: give at least one")
    runs = read(args.runs)
    if args.csv is not None:
        write(args.csv, runs)
    tables = [bests_table(runs, args.returns, args.held_out), laws_table(runs, args.returns, args.held_out)]
    if args.held_out is not None:
        tables.append(predictions_table(runs, args.returns, args.held_out))
    print_result("\n\n".join(table.markdown() for table in tables))


if __name__ == "__main__":
    command_line(main, Args)
