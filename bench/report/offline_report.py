"""Tables of what was learned from datasets, and online behind them, from the runs in results/ alone.

Scores are those of `offline.scores`, or the share of the episodes that succeed, of the policy as it is evaluated.
"""

import statistics
from collections.abc import Callable

from bench.report.curves import Curve, Curves, behaviour, by_updates, minutes_per_step, scores
from bench.report.intervals import estimate, interquartile_mean, mean_difference
from bench.report.tables import Table, spread
from bench.sweep.suite import PEER, PEERS, labels

ALGORITHMS = labels("offline-own")
UPDATES = (20_000, 100_000)  # after which the tables show the scores
Column = Callable[[Curve, int], float]  # of a seed's curve, and of the last step that all got to


def offline_table() -> Table:
    """Scores after so many updates of every algorithm on every dataset, beside the behaviour's."""
    found = by_updates()
    table = Table(["", "updates", "behaviour", *ALGORITHMS.values()])
    for dataset in sorted({dataset for _, dataset in found}):
        for updates in UPDATES:
            reached = [[c[updates] for c in found[algo, dataset].values() if updates in c] for algo in ALGORITHMS]
            of_data = behaviour(dataset)
            first = "" if of_data is None else f"{of_data:.1f}"
            table.rows.append([dataset, f"{updates:,}", first, *map(spread, reached)])
    return table


def last_five(curve: Curve, last: int) -> float:
    """The mean of the last five evaluations until `last`, that of the untrained networks not among them."""
    return statistics.mean(score for _, score in sorted(c for c in curve.items() if 0 < c[0] <= last)[-5:])


def d3rlpy_table() -> Table:
    """Ours beside d3rlpy's over the datasets and seeds that both were run on: interquartile means."""
    found = by_updates()
    heads = "", "updates", "datasets, seeds of each", "onramp", "d3rlpy", "onramp, last five evaluations", "d3rlpy"
    table = Table(heads)
    for algo in PEERS:
        for updates in UPDATES:
            runs: dict[str, list[list[Curve]]] = {"": [], PEER: []}
            for dataset in sorted({dataset for _, dataset in found}):
                both = [found[f"{who}{algo}", dataset] for who in runs]
                seeds = sorted(set.intersection(*({s for s, c in by_seed.items() if updates in c} for by_seed in both)))
                for who, by_seed in zip(runs, both, strict=True):
                    runs[who] += [[by_seed[seed] for seed in seeds]] if seeds else []
            cells = ["not run", *4 * [""]]
            if runs[""]:
                cells = [f"{len(runs[''])}, {' + '.join(str(len(seeds)) for seeds in runs[''])}"]
                for of in (Curve.__getitem__, last_five):
                    scores_of = ([[of(curve, updates) for curve in seeds] for seeds in who] for who in runs.values())
                    cells += [estimate(interquartile_mean, each).text(1) for each in scores_of]
            table.rows.append([algo.upper(), f"{updates:,}", *cells])
    return table


def online_table() -> Table:
    """Before the switch, behind it, at the end, and the regret: 1 less a hundredth of the online evaluations' mean."""
    table = Table(("", "online steps", "before", "after", "regret"))
    for (algo, dataset), seeds in scores("online").items():
        last = min(max(curve) for curve in seeds.values())
        before, after = spread([c[0] for c in seeds.values()]), spread([c[last] for c in seeds.values()])
        regret = statistics.mean(1 - mean_online(curve, last) / 100 for curve in seeds.values())
        table.rows.append([f"{algo}, {dataset}", f"{last:,}", before, after, f"{regret:.2f}"])
    return table


def comparison(suite: str, of: Callable[[str], Curves] = scores) -> dict[str, dict[str, dict[str, Curve]]]:
    """Return dataset to label, in the suite's order, to seed to curve, of results/<suite>/<name>/<dataset>/<seed>."""
    found, variants = of(suite), labels(suite)
    datasets = sorted({dataset for _, dataset in found})
    return {d: {name: found[v, d] for v, name in variants.items() if (v, d) in found} for d in datasets}


def comparison_table(suite: str, columns: dict[str, Column], of: Callable[[str], Curves] = scores) -> Table:
    """A line for each dataset and variant: `columns` are of its seeds' curves and the last step that all got to. Behind
    them, where there are two such variants, those that have every seed of every dataset: each column's interquartile
    mean over all of these.
    """
    table = Table(["", "", *columns, "minutes"])
    compared, took, variants = comparison(suite, of), minutes_per_step(suite), labels(suite)
    whole: dict[str, list[list[list[float]]]] = {name: [] for name in variants.values()}
    for dataset, found in compared.items():
        last = min(max(curve) for seeds in found.values() for curve in seeds.values())
        for variant, name in variants.items():
            if name in found:
                whole[name].append([[value(c, last) for c in found[name].values()] for value in columns.values()])
                minutes = [last * each for each in took[variant, dataset]]
                cells = [*map(spread, whole[name][-1]), f"{statistics.median(minutes):.1f}" if minutes else ""]
                table.rows.append([f"{dataset}, {last:,} steps", name, *cells])
    everything = [(found, set().union(*found.values())) for found in compared.values()]
    complete = [name for name in whole if all(found.get(name, {}).keys() == seeds for found, seeds in everything)]
    for name in complete if len(compared) > 1 < len(complete) else ():
        means = [estimate(interquartile_mean, column).text(1) for column in zip(*whole[name], strict=True)]
        table.rows.append(["interquartile mean", name, *means, ""])
    return table


def at(curve: Curve, step: int) -> float:
    """The last evaluation not behind that step."""
    return curve[max(evaluated for evaluated in curve if evaluated <= step)]


def behind_switch(curve: Curve, last: int) -> list[float]:
    """The evaluations behind the switch, until `last`."""
    return [score for step, score in curve.items() if 0 < step <= last]


def mean_online(curve: Curve, last: int) -> float:
    """The mean of the evaluations behind the switch, until `last`."""
    return statistics.mean(behind_switch(curve, last))


def wsrl_table(suite: str = "wsrl") -> Table:
    """What WSRL and the paper's comparisons score at the switch, at worst behind it, on the way, and at the end."""
    columns: dict[str, Column] = {
        "at the switch": lambda curve, _: curve[0],
        "lowest": lambda curve, last: min(behind_switch(curve, last)),
        "mean of all evaluations": mean_online,
        "at the end": at,
    }
    return comparison_table(suite, columns)


def expo_table(of: Callable[[str], Curves] = scores) -> Table:
    """What EXPO, its ablations and RLPD score, or how often they succeed, at the switch, half way and at the end of the
    shortest run, and on the way."""
    columns: dict[str, Column] = {
        "at the switch": lambda curve, _: curve[0],
        "half way": lambda curve, last: at(curve, last // 2),
        "at the end": at,
        "mean of all evaluations": mean_online,
    }
    return comparison_table("expo", columns, of)


def expo_differences(of: Callable[[str], Curves] = scores) -> Table:
    """By how much EXPO is above each of the others, seed by seed, at the same number of steps."""
    table = Table(("", "EXPO less", "seeds", "at the end", "mean of all evaluations"))
    for dataset, found in comparison("expo", of).items():
        ours = found.get(labels("expo")["expo"], {})
        for name, theirs in found.items():
            seeds = sorted(ours.keys() & theirs.keys())
            if theirs is ours or not seeds:
                continue
            last = min(max(runs[seed]) for runs in (ours, theirs) for seed in seeds)
            both = [[runs[seed] for seed in seeds] for runs in (ours, theirs)]
            cells = [
                mean_difference(*([value(curve, last) for curve in runs] for runs in both)).text(1)
                for value in (at, mean_online)
            ]
            table.rows.append([f"{dataset}, {last:,} steps", name, str(len(seeds)), *cells])
    return table
