"""results/report.html: the figures and tables on one page that holds all it needs and makes no request."""

import csv
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path
from string import Template

import numpy as np
from matplotlib.figure import Figure

from bench import curves
from bench.aggregates import STEPS, improvements, online_aggregates, online_runs, only_means, profiles, reached
from bench.curves import (
    Curve,
    aligned,
    behaviour,
    by_updates,
    number_of,
    online,
    published,
    scores,
    successes,
    there,
)
from bench.figures import (
    COLOURS,
    GREY,
    OTHERS,
    Line,
    data_uri,
    learning_figure,
    points_figure,
    profile_figure,
    scores_figure,
)
from bench.intervals import ENOUGH, estimate, interquartile_mean
from bench.keep import Kept, kept_runs
from bench.not_run import ONLINE, SWITCHES, missing_list
from bench.offline_report import (
    ALGORITHMS,
    EXPO,
    UPDATES,
    VARIANTS,
    d3rlpy_table,
    expo_differences,
    expo_table,
    offline_table,
    online_table,
    wsrl_table,
)
from bench.online_report import learning_table

FOLDERS = ("", "offline", "online", "wsrl", "wsrl-longer", "expo", "ablations")


def whole_page() -> str:
    """The whole page; the same data give the same bytes."""
    kept = [(folder, run) for folder in FOLDERS for run in kept_runs(curves.RESULTS / folder)]
    higher = "the probability that a run ends higher, averaged over what both were run on."
    slots = {
        "episodes": f"{sum(len(run.rows) for _, run in kept):,}",
        "runs": str(len(kept)),
        "enough": str(ENOUGH),
        "online_curves": grid(online_curves()),
        "learning": html_table(
            learning_table(), "Return: mean ± standard deviation (seeds); interquartile mean (interval)."
        ),
        "published": html_table(
            published_table(), "What stands beside ours: on which version, how many seeds, how far."
        ),
        "online_aggregates": html_table(
            online_aggregates(),
            "Interquartile mean over all runs (interval); how probably ours is higher than a published.",
        ),
        "online_profiles": grid(online_profiles()),
        "online_improvements": "\n".join(
            html_table(improvements(reached(online(), step), ONLINE), f"At {step:,} steps: {higher}") for step in STEPS
        ),
        "offline_curves": grid(offline_curves()),
        "offline": html_table(
            offline_table(), "Score: mean ± standard deviation (seeds). Behaviour: the dataset's episodes."
        ),
        "d3rlpy": html_table(d3rlpy_table(), "Interquartile mean over the datasets and seeds that both were run on."),
        "offline_aggregates": grid(offline_aggregates()),
        "offline_improvements": "\n".join(
            html_table(improvements(reached(by_updates(), updates), ALGORITHMS), f"After {updates:,} updates: {higher}")
            for updates in UPDATES
        ),
        "switch_curves": grid(switch_curves()),
        "switch": html_table(online_table(), "Before, after, regret."),
        "wsrl": html_table(
            wsrl_table(), "WSRL beside the paper's comparisons: scores, or per cent of the episodes solved."
        ),
        "wsrl_longer": html_table(wsrl_table("wsrl-longer"), "The same, with more steps."),
        "expo": html_table(expo_table(), "EXPO beside its ablations and RLPD: scores, per cent of the steps solved."),
        "expo_differences": html_table(
            expo_differences(), "EXPO less each of the others, and from three seeds on its interval."
        ),
        "expo_successes": html_table(
            expo_table(successes), "The same, per cent of episodes with success at some step."
        ),
        "expo_differences_of_successes": html_table(
            expo_differences(successes), "EXPO less each of the others, and from three seeds on its interval."
        ),
        "missing": missing_list(),
        "machines": html_table(machines_table([run for _, run in kept]), "Machines and versions."),
        "all_runs": html_table(runs_table(kept), "Every run, in the order of the folders of results/."),
    }
    return Template(Path(__file__).with_suffix(".html").read_text()).substitute(slots)


def online_curves() -> Iterator[tuple[Figure, str]]:
    theirs = published()
    for (algo, env), seeds in online().items():
        text = f"Return of {algo.upper()} on {env} over environment steps: onramp ends at {ends(seeds)}"
        yield learning_figure(algo, env, seeds, theirs[algo, env]), text


def online_profiles() -> Iterator[tuple[Figure, str]]:
    """Of each algorithm, ours and the published runs at the last step that ours got to."""
    for algo, name in ONLINE.items():
        got = [step for step in STEPS if algo in online_runs(step)[0]]
        if not got:
            continue
        ours, theirs = (runs[algo] for runs in online_runs(got[-1]))
        runs = {"onramp": ours} | ({} if algo in only_means() else {"published": theirs})
        thresholds, found = profiles(runs)
        lines = {"onramp": Line("onramp", COLOURS[algo]), "published": Line("published", GREY, "--")}
        figure = profile_figure(
            f"{name}, {got[-1]:,} steps", "return, the published one at a million being 1", thresholds,
            {lines[who]: profile for who, profile in found.items()},
        )  # fmt: skip
        seeds = ", ".join(f"{who} {sum(map(len, tasks.values()))}" for who, tasks in runs.items())
        yield (
            figure,
            f"Performance profile of {name} after {got[-1]:,} steps over {len(ours)} environments; runs: {seeds}",
        )


def offline_curves() -> Iterator[tuple[Figure, str]]:
    found = by_updates()
    for dataset in sorted({dataset for _, dataset in found}):
        own = {algo: found[algo, dataset] for algo in ALGORITHMS if (algo, dataset) in found}
        lines = {algorithm_line(algo): seeds for algo, seeds in own.items()}
        text = "; ".join(f"{ALGORITHMS[algo]} ends at {ends(seeds, 1)}" for algo, seeds in own.items())
        yield scores_figure(dataset, "updates", lines, behaviour(dataset)), f"Score on {dataset} over updates: {text}"


def offline_aggregates() -> Iterator[tuple[Figure, str]]:
    """Interquartile means and profiles, at the last number of updates, of the algorithms run on every dataset."""
    runs = reached(by_updates(), UPDATES[-1])
    datasets = {dataset for tasks in runs.values() for dataset in tasks}
    whole = {algo: runs[algo] for algo in ALGORITHMS if set(runs.get(algo, ())) == datasets}
    if not whole:
        return
    means = {algo: estimate(interquartile_mean, list(tasks.values())) for algo, tasks in whole.items()}
    after = f"after {UPDATES[-1]:,} updates, over {len(datasets)} datasets"
    said = "; ".join(f"{ALGORITHMS[algo]} {found.text(1)}" for algo, found in means.items())
    points = [(algorithm_line(algo), found) for algo, found in means.items()]
    yield points_figure("Interquartile mean", "score", points), f"Interquartile mean {after}: {said}"
    thresholds, found = profiles(whole)
    profile = {algorithm_line(algo): shares for algo, shares in found.items()}
    seeds = ", ".join(f"{ALGORITHMS[algo]} {sum(map(len, tasks.values()))}" for algo, tasks in whole.items())
    yield (
        profile_figure("Performance profile", "score", thresholds, profile),
        f"Performance profile {after}; runs: {seeds}",
    )


def switch_curves() -> Iterator[tuple[Figure, str]]:
    """Scores before and behind the switch, of all runs that went on online."""
    for folder, names in (("online", SWITCHES), ("wsrl", VARIANTS), ("wsrl-longer", VARIANTS), ("expo", EXPO)):
        found = scores(folder)
        for dataset in sorted({dataset for _, dataset in found}):
            own = {names.get(algo, algo): seeds for (algo, of), seeds in found.items() if of == dataset}
            styles = [(colour, style) for style in ("-", "--", ":") for colour in OTHERS]
            lines = {Line(name, *style): seeds for (name, seeds), style in zip(own.items(), styles, strict=False)}
            text = "; ".join(f"{name} ends at {ends(seeds, 1)}" for name, seeds in own.items())
            title = dataset + ("" if folder == "online" else f", {folder.partition('-')[0].upper()}'s comparison")
            figure = scores_figure(title, "steps from the switch", lines, None)
            yield figure, f"Score on {dataset} before and behind the switch: {text}"


def published_table() -> str:
    """Where the published curves come from, what they were measured on, and how far they go."""
    where: dict[tuple[str, str, str, str], list[str]] = {}
    with (curves.RESULTS / "published.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            seeds = where.setdefault((row["algo"], row["env"], row["measured_on"], row["source"]), [])
            if row["seed"] not in seeds:
                seeds.append(row["seed"])
    lines = [f"| | measured on | seeds | steps | return at {STEPS[-1]:,} | source |", "|---|---|---|---|---|---|"]
    for (algo, env, measured_on, source), seeds in sorted(where.items()):
        runs = published()[algo, env]
        last = min(max(curve) for curve in runs.values())
        mean = np.mean(list(there(runs, STEPS[-1]).values()))
        lines.append(
            f"| {algo.upper()}, {env} | {measured_on} | {number_of(seeds)} | {last:,} | {mean:,.0f} | {source} |"
        )
    return "\n".join(lines)


def machines_table(kept: list[Kept]) -> str:
    """How many runs were made where, and with what."""
    machines = Counter(map(machine, kept))
    versions = Counter(", ".join(f"{name} {v}" for name, v in run.config["versions"].items()) for run in kept)
    rows = [f"| {n} | {what} |" for found in (machines, versions) for what, n in sorted(found.items())]
    return "\n".join(["| runs | machine, or versions |", "|---|---|", *rows])


def runs_table(kept: list[tuple[str, Kept]]) -> str:
    return "\n".join([
        "| | seed | steps | episodes an evaluation | hours | steps/s | threads | commit | episodes |",
        "|---|---|---|---|---|---|---|---|---|",
        *(run_row(folder, run) for folder, run in kept),
    ])  # fmt: skip


def run_row(folder: str, run: Kept) -> str:
    steps = [int(row["step"]) for row in run.rows]
    time = run.config.get("time")
    took = f"{time['seconds'] / 3600:.2f} | {time['steps_per_second']:,.1f}" if time else "not recorded | not recorded"
    threads = run.config.get("hardware", run.config).get("threads", "not recorded")
    what = "/".join(filter(None, (folder, run.algo, run.task)))
    commit = run.config.get("commit", "not ours")[:8]
    cells = (
        what, run.seed, f"{min(steps):,} to {max(steps):,}", max(Counter(steps).values()), took, threads, commit,
        len(steps),
    )  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def machine(run: Kept) -> str:
    """In words, what config.json has of it."""
    if (found := run.config.get("hardware")) is None:
        return "not recorded"
    return f"{found['cpu']}, {found['cores']} cores{', ' + found['gpu'] if found['gpu'] else ''}"


def algorithm_line(algo: str) -> Line:
    return Line(ALGORITHMS[algo], COLOURS[algo], "--" if algo.startswith("d3rlpy") else "-")


def ends(seeds: dict[str, Curve], digits: int = 0) -> str:
    """Where the curves end, for who cannot see them."""
    steps, values = aligned(seeds)
    final = [f"{value:,.{digits}f}" for value in values[:, -1]]
    if len(final) >= ENOUGH:
        return f"{estimate(interquartile_mean, [values[:, -1]]).text(digits)} after {steps[-1]:,}"
    return f"{' and '.join(final)} after {steps[-1]:,}"


def image(figure: Figure, text: str) -> str:
    """A figure with what it shows in words."""
    width, height = (round(72 * inches) for inches in figure.get_size_inches())
    return (
        f'<figure><img src="{data_uri(figure)}" width="{width}" height="{height}" alt="{escape(text)}">'
        f"<figcaption>{escape(text)}.</figcaption></figure>"
    )


def grid(figures: Iterable[tuple[Figure, str]]) -> str:
    """Figures beside one another, as many as there is room for."""
    images = "\n".join(image(figure, text) for figure, text in figures)
    return f'<div class="figures">\n{images}\n</div>' if images else ""


def html_table(markdown: str, caption: str) -> str:
    """A table of pipes as one of HTML, in a box that scrolls by itself, below a caption that does not."""
    rows = [
        re.split(r"\s*\|\s*", line.removeprefix("|").removesuffix("|").strip(" ")) for line in markdown.splitlines()
    ]
    if rows[2:] and rows[2][0] == "not run":
        return f'<p class="caption">{escape(caption)} <em class="missing">Not run.</em></p>'
    heads = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in rows[0])
    body = "\n".join(f"<tr>{''.join(map(html_cell, row, range(len(row))))}</tr>" for row in rows[2:])
    return (
        f'<p class="caption">{escape(caption)}</p>\n'
        f'<div class="table" tabindex="0" role="region" aria-label="{escape(caption)}">\n<table>\n'
        f"<thead><tr>{heads}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>\n</div>"
    )


def html_cell(cell: str, column: int) -> str:
    if column == 0:
        return f'<th scope="row">{escape(cell)}</th>'
    kind = ' class="missing"' if cell in ("not run", "not recorded") else ""
    return f"<td{kind}>{escape(cell)}</td>"
