"""Tables of runs on datasets, and of online learning after them, from the runs in results/ alone.

Scores are those of `offline.scores`, or the share of episodes that succeed, in the runs' evaluations.
"""

import statistics
from collections.abc import Callable

from bench.report.curves import Curves, behaviour, by_updates, minutes_per_step, scores
from bench.report.intervals import estimate, interquartile_mean, mean_difference
from bench.report.tables import Table, display_name, spread
from bench.sweep.suite import PEER, PEERS, labels
from common.run_folder import Curve

ALGORITHMS = labels("offline-own")
UPDATES = (20_000, 100_000)  # the tables show the scores after these
Column = Callable[[Curve, int], float]  # of a seed's curve, and of the last step that all seeds reached


def offline_table() -> Table:
    """Return the scores of every algorithm on every dataset after UPDATES, next to the behaviour policy's."""
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
    """Return the mean of the last five evaluations up to `last`, without that of the untrained networks."""
    return statistics.mean(score for _, score in sorted(c for c in curve.items() if 0 < c[0] <= last)[-5:])


def d3rlpy_table() -> Table:
    """Return our and d3rlpy's interquartile means over the datasets and seeds that both were run on."""
    found = by_updates()
    heads = "", "updates", "datasets, seeds of each", "onramp", "d3rlpy", "onramp, last evaluations", "d3rlpy"
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
            table.rows.append([display_name(algo), f"{updates:,}", *cells])
    return table


def online_table() -> Table:
    """Return the scores at the switch and at the end, and the regret: 1 - (mean of the online evaluations) / 100."""
    table = Table(("", "online steps", "before", "after", "regret"))
    for (algo, dataset), seeds in scores("online").items():
        last = min(max(curve) for curve in seeds.values())
        before, after = spread([c[0] for c in seeds.values()]), spread([c[last] for c in seeds.values()])
        regret = statistics.mean(1 - mean_online(curve, last) / 100 for curve in seeds.values())
        table.rows.append([f"{algo}, {dataset}", f"{last:,}", before, after, f"{regret:.2f}"])
    return table


def updates_table(suite: str) -> Table:
    """Return the scores, or success rates in %, of the suite's variants on every dataset, by updates on it."""
    found, updates = by_updates(suite), range(20_000, 100_001, 20_000)
    table = Table(["", "", *(f"{each:,}" for each in updates)])
    for task in sorted({task for _, task in found}):
        for algo, name in labels(suite).items():
            if curves := found.get((algo, task)):
                rates = ([curve[each] for curve in curves.values() if each in curve] for each in updates)
                table.rows.append([task, name, *map(spread, rates)])
    return table


def comparison(suite: str, of: Callable[[str], Curves] = scores) -> dict[str, dict[str, dict[str, Curve]]]:
    """Return dataset to label, in the suite's order, to seed to curve, of results/<suite>/<name>/<dataset>/<seed>."""
    found, variants = of(suite), labels(suite)
    datasets = sorted({dataset for _, dataset in found})
    return {d: {name: found[v, d] for v, name in variants.items() if (v, d) in found} for d in datasets}


def comparison_table(suite: str, columns: dict[str, Column], of: Callable[[str], Curves] = scores) -> Table:
    """Return a row for each dataset and variant. `columns` take a seed's curve, and the last step that all reached.

    The minutes include the updates before the switch, if the same run performed them, and then state their number.
    If two variants or more have every seed of every dataset, their interquartile means over all runs follow.
    """
    table = Table(["", "", *columns, "minutes"])
    compared, took, variants = comparison(suite, of), minutes_per_step(suite), labels(suite)
    whole: dict[str, list[list[list[float]]]] = {name: [] for name in variants.values()}
    for dataset, found in compared.items():
        last = min(max(curve) for seeds in found.values() for curve in seeds.values())
        for variant, name in variants.items():
            if name in found:
                whole[name].append([[value(c, last) for c in found[name].values()] for value in columns.values()])
                first = min(0, *map(min, found[name].values()))
                minutes = [(last - first) * each for each in took[variant, dataset]]
                updates = f" with {-first:,} offline updates" if first else ""
                cells = [*map(spread, whole[name][-1]), f"{statistics.median(minutes):.1f}{updates}" if minutes else ""]
                table.rows.append([f"{dataset}, {last:,} steps", name, *cells])
    everything = [(found, set().union(*found.values())) for found in compared.values()]
    complete = [name for name in whole if all(found.get(name, {}).keys() == seeds for found, seeds in everything)]
    for name in complete if len(compared) > 1 < len(complete) else ():
        means = [estimate(interquartile_mean, column).text(1) for column in zip(*whole[name], strict=True)]
        table.rows.append(["interquartile mean", name, *means, ""])
    return table


def at(curve: Curve, step: int) -> float:
    """Return the value of the last evaluation up to that step."""
    return curve[max(evaluated for evaluated in curve if evaluated <= step)]


def behind_switch(curve: Curve, last: int) -> list[float]:
    """Return the evaluations after the switch, up to `last`."""
    return [score for step, score in curve.items() if 0 < step <= last]


def mean_online(curve: Curve, last: int) -> float:
    """Return the mean of the evaluations after the switch, up to `last`."""
    return statistics.mean(behind_switch(curve, last))


def wsrl_table(suite: str = "wsrl") -> Table:
    """Return the scores of WSRL and the paper's comparisons: at the switch, the lowest, the mean, and at the end."""
    columns: dict[str, Column] = {
        "at the switch": lambda curve, _: curve[0],
        "lowest": lambda curve, last: min(behind_switch(curve, last)),
        "mean of all evaluations": mean_online,
        "at the end": at,
    }
    return comparison_table(suite, columns)


def switch_table(suite: str, of: Callable[[str], Curves] = scores) -> Table:
    """Return the scores, or success rates, of the suite's variants from the switch on.

    Columns are at the switch, halfway and at the end of the shortest run, and the mean of all evaluations.
    """
    columns: dict[str, Column] = {
        "at the switch": lambda curve, _: curve[0],
        "halfway": lambda curve, last: at(curve, last // 2),
        "at the end": at,
        "mean of all evaluations": mean_online,
    }
    return comparison_table(suite, columns, of)


def of_shared_seeds(ours: dict[str, Curve], theirs: dict[str, Curve]) -> tuple[list[list[Curve]], int]:
    """Return the curves of the seeds that both have, in the same order, and the last step that all of these reached."""
    seeds = sorted(ours.keys() & theirs.keys())
    both = [[runs[seed] for seed in seeds] for runs in (ours, theirs)]
    return both, min((max(curve) for runs in both for curve in runs), default=0)


def expo_differences(of: Callable[[str], Curves] = scores) -> Table:
    """Return by how much EXPO is above each of the others, seed by seed, after the same number of steps."""
    table = Table(("", "EXPO minus", "seeds", "at the end", "mean of all evaluations"))
    for dataset, found in comparison("expo", of).items():
        ours = found.pop(labels("expo")["expo"], {})
        for name, theirs in found.items():
            both, last = of_shared_seeds(ours, theirs)
            if last:
                values = ([[value(curve, last) for curve in runs] for runs in both] for value in (at, mean_online))
                cells = [mean_difference(*each).text(1) for each in values]
                table.rows.append([f"{dataset}, {last:,} steps", name, str(len(both[0])), *cells])
    return table


def rlpd_table(of: Callable[[str], Curves] = scores) -> Table:
    """Return what `rlpd.py` scores, and what `wsrl.py` with RLPD's losses scored, which made these runs in 0.1."""
    ends = "rlpd.py at the end", "wsrl.py at the end"
    table = Table(("", *ends, "difference", "difference of all evaluations"))
    before = of("ablations")
    for (variant, dataset), ours in sorted(of("expo").items()):
        both, last = of_shared_seeds(ours, before.get(("rlpd-by-wsrl", dataset), {}))
        if variant == "rlpd" and last:
            last_values, all_values = (
                [[value(curve, last) for curve in runs] for runs in both] for value in (at, mean_online)
            )
            cells = [*map(spread, last_values), *(mean_difference(*each).text(1) for each in (last_values, all_values))]
            table.rows.append([f"{dataset}, {last:,} steps", *cells])
    return table
