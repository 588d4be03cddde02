"""The tables of README and docs and the figures in results/, from the raw data there and nothing else.

python bench/report.py            # rewrites them
python bench/report.py --check    # ends with 1 where they are not what the data says
"""

import csv
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import matplotlib as mpl
import numpy as np
import tyro

from bench.offline_report import d3rlpy_table, interquartile_mean, offline_table, online_table, wsrl_table
from bench.rounds import read_rounds

mpl.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"
STEPS = (100_000, 300_000, 1_000_000)
Curve = dict[int, float]  # mean return of an evaluation's episodes, by step


@dataclass(frozen=True)
class Args:
    """What to do."""

    check: bool = False
    """Only compare."""


def our_curves() -> dict[tuple[str, str], dict[str, Curve]]:
    """(algorithm, environment) to seed to curve, from `results/<algorithm>/<environment>/<seed>/evaluations.csv`."""
    curves: dict[tuple[str, str], dict[str, Curve]] = defaultdict(dict)
    for path in sorted(RESULTS.glob("*/*/*/evaluations.csv")):
        algo, env, seed = path.parts[-4:-1]
        episodes: dict[int, list[float]] = defaultdict(list)
        for row in csv.DictReader(path.open()):
            episodes[int(row["step"])].append(float(row["return"]))
        curves[algo, env][seed] = {step: statistics.mean(returns) for step, returns in episodes.items()}
    return curves


def published_curves() -> dict[tuple[str, str], dict[str, Curve]]:
    """The same of `results/published.csv`."""
    curves: dict[tuple[str, str], dict[str, Curve]] = defaultdict(lambda: defaultdict(dict))
    for row in csv.DictReader((RESULTS / "published.csv").open()):
        curves[row["algo"], row["env"]][row["seed"]][int(row["step"])] = float(row["return"])
    return curves


def at(curve: Curve, step: int) -> float | None:
    """Return at `step`, linear between two evaluations; None outside of the curve."""
    below, above = [s for s in curve if s <= step], [s for s in curve if s >= step]
    if not below or not above:
        return None
    a, b = max(below), min(above)
    return curve[a] if a == b else curve[a] + (curve[b] - curve[a]) * (step - a) / (b - a)


def spread(seeds: dict[str, Curve], step: int) -> str:
    """Mean ± standard deviation over the seeds that got there, and how many those are."""
    there = {seed: value for seed, curve in seeds.items() if (value := at(curve, step)) is not None}
    if not there:
        return "not run"
    deviation = f" ± {statistics.stdev(there.values()):,.0f}" if len(there) > 1 else ""
    return f"{statistics.mean(there.values()):,.0f}{deviation} ({number_of(there)})"


def interquartile(seeds: dict[str, Curve], step: int, resamples: int = 20_000) -> str:
    """Interquartile mean and its 95 % percentile bootstrap interval over the seeds that got there, of four or more.

    Source: Agarwal et al. 2021, "Deep Reinforcement Learning at the Edge of the Statistical Precipice".
    """
    there = np.array([value for curve in seeds.values() if (value := at(curve, step)) is not None])
    if len(there) < 4:
        return ""
    drawn = np.random.default_rng(0).choice(there, (resamples, len(there)))
    low, high = np.percentile(interquartile_mean(drawn), [2.5, 97.5])
    return f"{interquartile_mean(there):,.0f} ({low:,.0f} to {high:,.0f})"


def number_of(seeds: Iterable[str]) -> int:
    """How many seeds these are; one called mean10 is the mean of ten, of which no more was published."""
    return sum(int(seed.removeprefix("mean")) if seed.startswith("mean") else 1 for seed in seeds)


def learning_table() -> str:
    """Return at equal steps, ours beside the published."""
    lines = ["| | steps | onramp | interquartile mean | published |", "|---|---|---|---|---|"]
    published = published_curves()
    for (algo, env), seeds in our_curves().items():
        for step in STEPS:
            row = f"{spread(seeds, step)} | {interquartile(seeds, step)} | {spread(published[algo, env], step)}"
            lines.append(f"| {algo.upper()}, {env} | {step:,} | {row} |")
    return "\n".join(lines)


def draw(algo: str, env: str, path: Path) -> None:
    """Every seed's curve, over the range and the mean of the published ones."""
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    published, ours = published_curves()[algo, env], our_curves()[algo, env]
    last = max(max(curve) for curve in ours.values())
    grid = [step for step in sorted(next(iter(published.values()))) if step <= last]
    columns = [[value for c in published.values() if (value := at(c, step)) is not None] for step in grid]
    axes.fill_between(grid, [min(c) for c in columns], [max(c) for c in columns], color="0.9")
    axes.plot(
        grid, [statistics.mean(c) for c in columns], color="0.5", label=f"published, {number_of(published)} seeds"
    )
    for seed, curve in ours.items():
        axes.plot(list(curve), list(curve.values()), linewidth=1.2, label=f"onramp, seed {seed}")
    axes.set(xlabel="environment steps", ylabel="return (deterministic)", title=f"{algo.upper()}, {env}")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def speeds(peer: str) -> Iterator[tuple[dict[str, str], dict[str, float], dict[str, float]]]:
    """Of each measurement beside `peer`: facts, medians over the rounds, and medians of the rounds' ratios to ours."""
    for path in sorted((RESULTS / "speed").glob("*.csv")):
        facts, rates = read_rounds(path)
        if peer in rates:
            median = {name: statistics.median(values) for name, values in rates.items()}
            ratio = {n: statistics.median(a / b for a, b in zip(rates["ours"], rates[n], strict=True)) for n in rates}
            yield facts, median, ratio


def speed_table() -> str:
    """Environment steps per second beside the peers."""
    lines = ["| | onramp | SB3 | SBX | onramp / SB3 | onramp / SBX | update / floor |", "|---|---|---|---|---|---|---|"]
    for facts, median, ratio in speeds("sb3"):
        update = "-"
        if "floor" in median:
            update = f"{float(facts['our update alone in ms']) * median['floor'] / 1000:.2f}"
        lines.append(
            f"| {facts['algorithm']} | {median['ours']:.0f} | {median['sb3']:.0f} | {median['sbx']:.0f} "
            f"| {ratio['sb3']:.2f} | {ratio['sbx']:.2f} | {update} |"
        )
    return "\n".join(lines)


def speed_beside(peer: str) -> str:
    """Steps per second beside one peer, d3rlpy on a dataset or a plain loop."""
    lines = [f"| | onramp | {peer} | onramp / {peer} | step / floor |", "|---|---|---|---|---|"]
    for facts, median, ratio in speeds(peer):
        step = f"{1 / ratio['floor']:.2f}" if "floor" in ratio else "-"
        lines.append(
            f"| {facts['algorithm']} | {median['ours']:.1f} | {median[peer]:.1f} | {ratio[peer]:.2f} | {step} |"
        )
    return "\n".join(lines)


def datasets_table() -> str:
    """What is in each dataset of our own suite."""
    lines = [
        "| | transitions | episodes, terminated | return: mean, min to max | score | TQ | SACo |",
        "|---|---|---|---|---|---|---|",
    ]
    for path in sorted((RESULTS / "datasets").glob("*.json")):
        found = json.loads(path.read_text())
        r = found["returns"]
        lines.append(
            f"| {path.stem} | {found['transitions']:,} | {found['episodes']:,}, {found['terminated episodes']:,} "
            f"| {r['mean']:,.0f}, {r['min']:,.0f} to {r['max']:,.0f} "
            f"| {found['score']:.1f} | {found['TQ']:.3f} | {found['SACo']:.3f} |"
        )
    return "\n".join(lines)


def loading_table() -> str:
    """Seconds and memory of each loader, medians over the rounds."""
    lines = ["| | seconds | at the peak | transitions |", "|---|---|---|---|"]
    rows = list(csv.DictReader(line for line in (RESULTS / "loading.csv").open() if not line.startswith("#")))
    names = {"ours": "onramp", "d3rlpy": "d3rlpy 2.8.1", "qlearning_dataset": "D4RL's qlearning_dataset"}
    for contender, name in names.items():
        own = [row for row in rows if row["contender"] == contender]
        seconds, peak = (statistics.median(float(row[key]) for row in own) for key in ("seconds", "peak_bytes"))
        lines.append(f"| {name} | {seconds:.2f} | {peak / 1e6:,.0f} MB | {int(own[0]['transitions']):,} |")
    return "\n".join(lines)


TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {
        "learning": learning_table,
        "speed": speed_table,
        "offline speed": partial(speed_beside, "d3rlpy"),
        "loop speed": partial(speed_beside, "loop"),
    },
    "docs/data.md": {"datasets": datasets_table, "loading": loading_table},
    "docs/offline.md": {"offline": offline_table, "d3rlpy": d3rlpy_table, "online": online_table},
    "docs/wsrl.md": {"wsrl": wsrl_table},
}


def with_tables(text: str, tables: dict[str, Callable[[], str]]) -> str:
    """A page with what stands between its markers made anew."""
    for name, table in tables.items():
        before, rest = text.split(f"<!-- {name}, by make report -->\n", 1)
        after = rest.split("<!-- end -->", 1)[1]
        text = f"{before}<!-- {name}, by make report -->\n{table()}\n<!-- end -->{after}"
    return text


def main(args: Args) -> None:
    for name, tables in TABLES.items():
        page = ROOT / name
        text = page.read_text()
        made = with_tables(text, tables)
        if args.check and made != text:
            sys.exit(f"report: the tables of {name} are not what results/ says: run make report")
        if not args.check:
            page.write_text(made)
    if args.check:
        return
    for algo, env in our_curves():
        draw(algo, env, RESULTS / algo / f"{env}.png")


if __name__ == "__main__":
    main(tyro.cli(Args))
