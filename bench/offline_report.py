"""Tables of what was learned from datasets, and online behind them, from results/offline and results/online alone.

In results/offline/<algorithm>/<dataset>/<seed>/evaluations.csv steps count up to 0, the end of the updates that its
config.json asks for, whether the run got there or not; in results/online/<algorithm>-<retain>/ they count on from 0.
Scores are those of `offline.scores`, of the deterministic policy over each evaluation's episodes.
"""

import csv
import json
import statistics
from collections import defaultdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from offline.scores import normalized, reference

RESULTS = Path(__file__).resolve().parents[1] / "results"
ALGORITHMS = {
    "bc": "BC", "td3_bc": "TD3+BC", "iql": "IQL", "d3rlpy-iql": "d3rlpy's IQL", "cql": "CQL",
    "d3rlpy-cql": "d3rlpy's CQL",
}  # fmt: skip
UPDATES = (30_000, 100_000)  # after which the tables show the scores
Curve = dict[int, float]  # mean score of an evaluation's episodes, by step, or by number of updates


def facts(dataset: str) -> dict[str, str]:
    """What `bench/datasets.py` wrote of the dataset."""
    found: dict[str, str] = json.loads((RESULTS / "datasets" / f"{dataset}.json").read_text())
    return found


def curves(folder: str) -> dict[tuple[str, str], dict[str, Curve]]:
    """(algorithm, dataset) to seed to curve, of results/<folder>: normalised scores, or where episodes are solved or
    not, how many per cent of them are.
    """
    found: dict[tuple[str, str], dict[str, Curve]] = defaultdict(dict)
    for path in sorted((RESULTS / folder).glob("*/*/*/evaluations.csv")):
        algo, dataset, seed = path.parts[-4:-1]
        between = reference(json.loads((path.parent / "config.json").read_text())["arguments"]["env"])
        episodes: dict[int, list[float]] = defaultdict(list)
        for row in csv.DictReader(path.open()):
            if between is None:
                assert row["success"], f"{path}: neither success, nor a return that anyone published a scale for"
                episodes[int(row["step"])].append(100.0 * float(row["success"]))
            else:
                episodes[int(row["step"])].append(float(normalized(float(row["return"]), between)))
        found[algo, dataset][seed] = {step: statistics.mean(scores) for step, scores in episodes.items()}
    return found


def by_updates() -> dict[tuple[str, str], dict[str, Curve]]:
    """The curves of results/offline, their steps counted from the first update."""
    found = curves("offline")
    for (algo, dataset), seeds in found.items():
        for seed, curve in seeds.items():
            config = json.loads((RESULTS / "offline" / algo / dataset / seed / "config.json").read_text())
            total = config["arguments"]["offline_steps"]
            seeds[seed] = {total + step: score for step, score in curve.items()}
    return found


def spread(values: list[float]) -> str:
    """Mean ± standard deviation (how many)."""
    deviation = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{deviation} ({len(values)})" if values else "not run"


def offline_table() -> str:
    """Scores after so many updates of every algorithm on every dataset, beside the behaviour's."""
    found = by_updates()
    lines = [
        "| | updates | behaviour | " + " | ".join(ALGORITHMS.values()) + " |",
        "|---" * (len(ALGORITHMS) + 3) + "|",
    ]
    for dataset in sorted({dataset for _, dataset in found}):
        for updates in UPDATES:
            reached = [[c[updates] for c in found[algo, dataset].values() if updates in c] for algo in ALGORITHMS]
            behaviour = f"{float(facts(dataset)['score']):.1f}"
            lines.append(f"| {dataset} | {updates:,} | {behaviour} | {' | '.join(map(spread, reached))} |")
    return "\n".join(lines)


def interquartile_mean(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Over the last axis: the mean without the lowest and the highest quarter, rounded down."""
    cut = scores.shape[-1] // 4
    inner: NDArray[np.float64] = np.sort(scores, axis=-1)[..., cut : scores.shape[-1] - cut].mean(-1)
    return inner


def over_datasets(runs: list[list[float]], resamples: int = 20_000) -> tuple[float, float, float]:
    """Interquartile mean of all runs, and its 95 % bootstrap interval, stratified: each dataset's runs are drawn anew.

    `runs`: by dataset, the score of each seed. Source: Agarwal et al. 2021, "Deep Reinforcement Learning at the Edge of
    the Statistical Precipice".
    """
    random = np.random.default_rng(0)
    drawn = np.concatenate([random.choice(scores, (resamples, len(scores))) for scores in runs], axis=1)
    low, high = np.percentile(interquartile_mean(drawn), [2.5, 97.5])
    return float(interquartile_mean(np.concatenate(runs))), float(low), float(high)


def d3rlpy_table() -> str:
    """Ours beside d3rlpy's over the datasets and seeds that both were run on."""
    found = by_updates()
    lines = ["| | updates | datasets, seeds of each | onramp: interquartile mean | d3rlpy |", "|---|---|---|---|---|"]
    for algo in ("iql", "cql"):
        for updates in UPDATES:
            runs: dict[str, list[list[float]]] = {"": [], "d3rlpy-": []}
            for dataset in sorted({dataset for _, dataset in found}):
                both = [found[f"{who}{algo}", dataset] for who in runs]
                seeds = sorted(set.intersection(*({s for s, c in by_seed.items() if updates in c} for by_seed in both)))
                for who, by_seed in zip(runs, both, strict=True):
                    runs[who] += [[by_seed[seed][updates] for seed in seeds]] if seeds else []
            cells = ["not run", "", ""]
            if runs[""]:
                several = any(len(scores) > 1 for scores in runs[""])  # else there is nothing to draw from
                cells = [
                    f"{m:.1f} ({low:.1f} to {high:.1f})" if several else f"{m:.1f}"
                    for m, low, high in map(over_datasets, runs.values())
                ]
                cells.insert(0, f"{len(runs[''])}, {' + '.join(str(len(scores)) for scores in runs[''])}")
            lines.append(f"| {algo.upper()} | {updates:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def online_table() -> str:
    """Before the switch, behind it, at the end, and the regret: 1 less a hundredth of the online evaluations' mean."""
    lines = ["| | online steps | before | after | regret |", "|---|---|---|---|---|"]
    for (algo, dataset), seeds in curves("online").items():
        last = min(max(curve) for curve in seeds.values())
        online = [[score for step, score in c.items() if 0 < step <= last] for c in seeds.values()]
        before, after = spread([c[0] for c in seeds.values()]), spread([c[last] for c in seeds.values()])
        regret = statistics.mean(1 - statistics.mean(scores) / 100 for scores in online)
        lines.append(f"| {algo}, {dataset} | {last:,} | {before} | {after} | {regret:.2f} |")
    return "\n".join(lines if len(lines) > 2 else [*lines, "| not run | | | | |"])


VARIANTS = {
    "wsrl": "WSRL", "no-warmup": "no warm-up", "random-warmup": "random warm-up", "online-cql": "pessimism kept",
    "mix": "data retained", "rlpd": "RLPD",
}  # fmt: skip
SOON = 20_000  # steps behind the switch


def wsrl_curves() -> dict[str, dict[str, dict[str, Curve]]]:
    """Dataset to variant, in the order of VARIANTS, to seed to curve, of results/wsrl/<variant>/<dataset>/<seed>."""
    found = curves("wsrl")
    datasets = sorted({dataset for _, dataset in found})
    return {d: {name: found[v, d] for v, name in VARIANTS.items() if (v, d) in found} for d in datasets}


def wsrl_table() -> str:
    """What WSRL and the paper's comparisons score at the switch, at worst soon behind it, then, and at the end."""
    lines = ["| | | at the switch | lowest until 20,000 | at 20,000 | at the end |", "|---|---|---|---|---|---|"]
    for dataset, variants in wsrl_curves().items():
        last = min(max(curve) for seeds in variants.values() for curve in seeds.values())
        for name, seeds in variants.items():
            runs = list(seeds.values())
            lowest = [min(score for step, score in c.items() if 0 < step <= SOON) for c in runs]
            columns = [[c[0] for c in runs], lowest, [c[SOON] for c in runs], [c[last] for c in runs]]
            lines.append(f"| {dataset}, {last:,} steps | {name} | {' | '.join(map(spread, columns))} |")
    return "\n".join(lines if len(lines) > 2 else [*lines, "| not run | | | | | |"])
