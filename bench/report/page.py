"""Build results/report.html: figures and tables on one page that contains all it needs and makes no request."""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from matplotlib.figure import Figure

from bench.report import aggregates, curves, offline_report
from bench.report.aggregates import STEPS, online_runs, only_means, profiles, reached
from bench.report.archive_run import Kept, kept_runs
from bench.report.curves import Curves, aligned, by_updates, number_of, online, published, scores, there
from bench.report.figures import (
    GREY,
    Line,
    colour_of,
    data_uri,
    learning_figure,
    points_figure,
    profile_figure,
    scores_figure,
    styled,
)
from bench.report.intervals import MIN_SEEDS_FOR_CI, estimate, interquartile_mean
from bench.report.offline_report import ALGORITHMS, UPDATES
from bench.report.tables import Table, display_name
from bench.sweep.suite import PEER, Planned, labels, planned
from common.run_folder import Curve

ONLINE = labels("online-1m")
# Title of each comparison, its suite, and the function that reads the curves of its runs in results/.
STUDIES: tuple[tuple[str, str, Callable[[], Curves]], ...] = (
    ("Online", "online-1m", online),
    ("Offline", "offline-own", by_updates),
    ("From offline to online", "off2on-own", partial(scores, "online")),
    ("WSRL's comparison", "wsrl", partial(scores, "wsrl")),
    ("WSRL's comparison, longer", "wsrl-longer", partial(scores, "wsrl-longer")),
    ("EXPO's comparison", "expo", partial(scores, "expo")),
    ("After SAC", "after-sac", lambda: online("ablations") | online()),
    ("Weighted sampling", "weighting", partial(by_updates, "weighting")),
    ("OGBench", "ogbench", partial(scores, "ogbench")),  # their steps end at 0, as its plan does
    ("OGBench, online", "ogbench-online", partial(scores, "ogbench-online")),
    ("DSRL and PA-RL", "steering", partial(scores, "steering")),
)


class Image:
    """A figure as a data URI, and its description in words."""

    def __init__(self, figure: Figure, text: str) -> None:
        self.text, self.uri = text, data_uri(figure)
        self.width, self.height = (round(72 * inches) for inches in figure.get_size_inches())


def whole_page() -> str:
    """Return the whole page; the same data give the same bytes."""
    kept = every_run()
    return template("page.html").render(
        episodes=f"{sum(len(run.rows) for _, run in kept):,}",
        runs=len(kept),
        enough=MIN_SEEDS_FOR_CI,
        aggregates=aggregates,
        offline=offline_report,
        successes=curves.successes,
        online_curves=list(online_curves()),
        published=published_table(),
        online_profiles=list(online_profiles()),
        online_improvements=aggregates.online_improvements(ONLINE, STEPS),
        offline_curves=list(offline_curves()),
        offline_aggregates=list(offline_aggregates()),
        offline_improvements=[(n, aggregates.improvements(reached(by_updates(), n), ALGORITHMS)) for n in UPDATES],
        switch_curves=list(switch_curves()),
        missing=missing(),
        machines=machines_table([run for _, run in kept]),
        all_runs=runs_table(kept),
    )


def every_run() -> list[tuple[str, Kept]]:
    """Return each run of results/, with the folder of results/ that holds it, or "" for results/ itself."""
    folders = "", *sorted(path.name for path in curves.RESULTS.iterdir() if path.is_dir())
    return [(folder, run) for folder in folders for run in kept_runs(curves.RESULTS / folder)]


def template(name: str) -> Template:
    """Return a template of this folder."""
    loader = FileSystemLoader(Path(__file__).parent)
    jinja = Environment(loader=loader, autoescape=True, trim_blocks=True, undefined=StrictUndefined)
    return jinja.get_template(name)


def online_curves() -> Iterator[Image]:
    theirs = published()
    for (algo, env), seeds in online().items():
        text = f"Return of {display_name(algo)} on {env} over environment steps: onramp ends at {ends(seeds)}"
        yield Image(learning_figure(algo, env, seeds, theirs[algo, env]), text)


def online_profiles() -> Iterator[Image]:
    """Yield for each algorithm the profile of our and the published runs, at the last step that our runs reached."""
    for algo, name in ONLINE.items():
        got = [step for step in STEPS if algo in online_runs(step)[0]]
        if not got:
            continue
        ours, theirs = (runs[algo] for runs in online_runs(got[-1]))
        runs = {"onramp": ours} | ({} if algo in only_means() else {"published": theirs})
        thresholds, found = profiles(runs)
        lines = {"onramp": Line("onramp", colour_of(algo)), "published": Line("published", GREY, "--")}
        shares = {lines[who]: profile for who, profile in found.items()}
        title, label = f"{name}, {got[-1]:,} steps", "return / published return at a million steps"
        seeds = ", ".join(f"{who} {sum(map(len, tasks.values()))}" for who, tasks in runs.items())
        text = f"Performance profile of {name} after {got[-1]:,} steps over {len(ours)} environments; runs: {seeds}"
        yield Image(profile_figure(title, label, thresholds, shares), text)


def offline_curves() -> Iterator[Image]:
    found = by_updates()
    for dataset in sorted({dataset for _, dataset in found}):
        own = {algo: found[algo, dataset] for algo in ALGORITHMS if (algo, dataset) in found}
        lines = {algorithm_line(algo): seeds for algo, seeds in own.items()}
        text = "; ".join(f"{ALGORITHMS[algo]} ends at {ends(seeds, 1)}" for algo, seeds in own.items())
        figure = scores_figure(dataset, "updates", lines, curves.behaviour(dataset))
        yield Image(figure, f"Score on {dataset} over updates: {text}")


def offline_aggregates() -> Iterator[Image]:
    """Yield interquartile means and profiles of the algorithms run on every dataset, at the last number of updates."""
    runs = reached(by_updates(), UPDATES[-1])
    datasets = {dataset for tasks in runs.values() for dataset in tasks}
    whole = {algo: runs[algo] for algo in ALGORITHMS if set(runs.get(algo, ())) == datasets}
    if not whole:
        return
    means = {algo: estimate(interquartile_mean, list(tasks.values())) for algo, tasks in whole.items()}
    after = f"after {UPDATES[-1]:,} updates, over {len(datasets)} datasets"
    said = "; ".join(f"{ALGORITHMS[algo]} {found.text(1)}" for algo, found in means.items())
    points = [(algorithm_line(algo), found) for algo, found in means.items()]
    yield Image(points_figure("Interquartile mean", "score", points), f"Interquartile mean {after}: {said}")
    thresholds, found = profiles(whole)
    profile = {algorithm_line(algo): shares for algo, shares in found.items()}
    seeds = ", ".join(f"{ALGORITHMS[algo]} {sum(map(len, tasks.values()))}" for algo, tasks in whole.items())
    figure = profile_figure("Performance profile", "score", thresholds, profile)
    yield Image(figure, f"Performance profile {after}; runs: {seeds}")


def switch_curves() -> Iterator[Image]:
    """Yield for each comparison and dataset the scores before and after the switch to online training."""
    for folder, suite in (("online", "off2on-own"), ("wsrl", "wsrl"), ("wsrl-longer", "wsrl-longer"), ("expo", "expo")):
        found, names = scores(folder), labels(suite)
        for dataset in sorted({dataset for _, dataset in found}):
            own = {algo: seeds for (algo, of), seeds in found.items() if of == dataset}
            line_of = styled({algo: names.get(algo, algo) for algo in own})
            lines = {line_of[algo]: seeds for algo, seeds in own.items()}
            text = "; ".join(f"{line_of[algo].name} ends at {ends(seeds, 1)}" for algo, seeds in own.items())
            title = dataset + ("" if folder == "online" else f", {folder.partition('-')[0].upper()}'s comparison")
            figure = scores_figure(title, "steps relative to the switch", lines, None)
            yield Image(figure, f"Score on {dataset} before and after the switch: {text}")


def published_table() -> Table:
    """Return the source of each published curve, the environment it was measured on, its seeds and its last step."""
    table = Table(("", "measured on", "seeds", "steps", f"return at {STEPS[-1]:,}", "source"))
    rows = pd.read_csv(curves.RESULTS / "published.csv", dtype={"seed": str})
    for (algo, env, measured_on, source), own in rows.groupby(["algo", "env", "measured_on", "source"]):
        runs = published()[algo, env]
        last = min(max(curve) for curve in runs.values())
        mean = np.mean(list(there(runs, STEPS[-1]).values()))
        numbers = str(number_of(own["seed"].unique())), f"{last:,}", f"{mean:,.0f}"
        table.rows.append([f"{display_name(algo)}, {env}", measured_on, *numbers, source])
    return table


def machines_table(kept: list[Kept]) -> Table:
    """Return the number of runs on each machine, and with each set of package versions."""
    machines = Counter(map(machine, kept))
    versions = Counter(", ".join(f"{name} {v}" for name, v in run.config["versions"].items()) for run in kept)
    rows = [(str(n), what) for found in (machines, versions) for what, n in sorted(found.items())]
    return Table(("runs", "machine, or versions"), [*rows])


def machine(run: Kept) -> str:
    """Return the description of a run's machine from its config.json."""
    if (found := run.config.get("hardware")) is None:
        return "not recorded"
    return f"{found['cpu']}, {found['cores']} cores{', ' + found['gpu'] if found['gpu'] else ''}"


def runs_table(kept: list[tuple[str, Kept]]) -> Table:
    """Return a row for each run: folder, seed, steps, time, speed, threads, form of the update, commit and episodes."""
    times = "hours", "steps/s", "threads", "update"
    table = Table(("", "seed", "steps", "episodes per evaluation", *times, "commit", "episodes"))
    for folder, run in kept:
        what = "/".join(filter(None, (folder, run.algo, run.task)))
        steps = [int(row["step"]) for row in run.rows]
        reach, episodes = f"{min(steps):,} to {max(steps):,}", str(max(Counter(steps).values()))
        time = run.config.get("time")
        took = [f"{time['seconds'] / 3600:.2f}", f"{time['steps_per_second']:,.1f}"] if time else 2 * ["not recorded"]
        threads = str(run.config.get("hardware", run.config).get("threads", "not recorded"))
        form, commit = run.config.get("form", "not recorded"), run.config.get("commit", "external")[:8]
        table.rows.append([what, run.seed, reach, episodes, *took, threads, form, commit, str(len(steps))])
    return table


def algorithm_line(algo: str) -> Line:
    return Line(ALGORITHMS[algo], colour_of(algo), "--" if algo.startswith(PEER) else "-")


def ends(seeds: dict[str, Curve], digits: int = 0) -> str:
    """Return the last values of the curves in words, for readers who cannot see the figure."""
    steps, values = aligned(seeds)
    if not steps:
        return " and ".join(f"{curve[max(curve)]:,.{digits}f} after {max(curve):,}" for curve in seeds.values())
    final = [f"{value:,.{digits}f}" for value in values[:, -1]]
    if len(final) >= MIN_SEEDS_FOR_CI:
        return f"{estimate(interquartile_mean, [values[:, -1]]).text(digits)} after {steps[-1]:,}"
    return f"{' and '.join(final)} after {steps[-1]:,}"


def missing() -> list[tuple[str, list[str], list[tuple[str, str]]]]:
    """Return for each study its title, the plans with their tasks, and (label, missing runs) of each label."""
    found = []
    for title, suite, curves_of in STUDIES:
        runs, plans = curves_of(), planned(suite)
        plans_of: dict[str, set[Planned]] = {}
        for task, plan in (pair for tasks in plans.values() for pair in tasks.items()):
            plans_of.setdefault(task, set()).add(plan)
        groups: dict[str, list[str]] = {}
        for task, of_task in plans_of.items():
            groups.setdefault(in_words(of_task), []).append(task)
        asked = [words.format(", ".join(tasks)) for words, tasks in groups.items()]
        names = labels(suite).items()
        lacks = [(label, missing_runs({t: runs.get((n, t), {}) for t in plans[n]}, plans[n])) for n, label in names]
        found.append((title, asked, lacks))
    return found


def in_words(plans: set[Planned]) -> str:
    """Return the smallest plan of a task, with {} for the tasks. Step 0 is the end of the updates on a dataset."""
    seeds, step = min(plans)
    more = " or more" if len({plan.step for plan in plans}) > 1 else ""
    return f"{seeds} seeds on each of {{}}, to {f'{step:,}{more}' if step else 'the end of the updates'}"


def missing_runs(found: dict[str, dict[str, Curve]], plan: dict[str, Planned]) -> str:
    """Return in words the tasks on which fewer seeds than planned reached the planned step."""
    unfinished, unknown = [], [task for task in plan if not found.get(task)]
    for task, (wanted, step) in plan.items():
        seeds = found.get(task, {})
        early = [max(curve) for curve in seeds.values() if max(curve) < step]
        if seeds and len(seeds) - len(early) < wanted:
            more = f" ({len(early)} more, to {max(early):,} at most)" if early else ""
            unfinished.append(f"{task}: {len(seeds) - len(early)} of {wanted} seeds{more}")
    if len(unknown) == len(plan):
        return "not run"
    return "; ".join(unfinished + ([f"not run: {', '.join(unknown)}"] if unknown else [])) or "complete"
