"""Make the tables of README and docs, the figures in results/ and the page results/report.html.

All of them come from the raw data in results/ alone.

    python bench/report/report.py                 # rewrites them
    python bench/report/report.py --check         # exits with 1 if they differ from what the data give
    python bench/report/report.py --runs runs     # writes a page of your own runs, runs/report.html
"""

import common.start

import ast
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pandas as pd
from scipy import stats

from bench.pages.code_links import with_links
from bench.pages.runs_page import own_runs, runs_page
from bench.report.aggregates import (
    learning_table,
    online_improvements,
    published_returns,
    returns_table,
    settings_table,
    spread_at,
)
from bench.report.curves import online, published, successes
from bench.report.figures import learning_figure, overview_figure, save
from bench.report.offline_report import (
    ALGORITHMS,
    d3rlpy_table,
    expo_differences,
    offline_table,
    online_table,
    rlpd_table,
    switch_table,
    updates_table,
    wsrl_table,
)
from bench.report.page import whole_page
from bench.report.tables import Table, display_name, spread
from bench.speed.interleaved_timing import ON_CPU, read_rounds
from bench.sweep.packing import ALONE
from bench.sweep.scaling import bests_table, laws_table, predictions_table, read
from bench.sweep.suite import labels
from common.command_line import command_line
from common.messages import print_result
from common.policy_file import SUFFIX, read_policy
from common.run_folder import CONFIG

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results"
PEERS = {"sb3": "SB3", "sbx": "SBX", "d3rlpy": "d3rlpy", "loop": "a plain loop"}
HEADLINE = ("HalfCheetah-v4", 300_000)  # the task of the README's table, and the number of steps
SCALING = RESULTS / "scaling" / "Pendulum-v1.csv"
SCALING_RETURNS, HELD_OUT = (-400.0, -300.0, -200.0), 8  # of docs/scaling.md


@dataclass(frozen=True)
class Args:
    """Rewrite the tables, figures and page, or check the tables."""

    check: bool = False
    """Compare the tables and links with results/ and the code, and write nothing."""
    runs: Path | None = None
    """Folder with your own run folders at any depth. Write only report.html there, about these runs."""


def speeds(peer: str) -> Iterator[tuple[dict[str, str], pd.Series, pd.Series]]:
    """Yield facts, medians over the rounds, and medians of ours / contender for each measurement against `peer`."""
    for path in sorted((RESULTS / "speed").glob("*.csv")):
        facts, rates = read_rounds(path)
        if peer in rates:
            yield facts, rates.median(), rates.rdiv(rates["ours"], axis=0).median()


def speed_table() -> Table:
    """Return our and the peers' environment steps per second, a row for each measurement."""
    heads = "", "measured on", "onramp", "SB3", "SBX", "onramp / SB3", "onramp / SBX", "update / floor"
    table = Table(heads)
    for facts, median, ratio in speeds("sb3"):
        alone, floor = facts.get("our update alone in ms"), median.get("floor")
        update = f"{float(alone) * floor / 1000:.2f}" if alone and floor else "-"
        rates = [f"{median[name]:,.0f}" if name in median else "-" for name in ("ours", "sb3", "sbx")]
        ratios = [f"{ratio[name]:.2f}" if name in ratio else "-" for name in ("sb3", "sbx")]
        table.rows.append([facts["algorithm"], measured(facts), *rates, *ratios, update])
    return table


def measured(facts: dict[str, str]) -> str:
    """Return the GPU of a measurement, if any, its processor, and the form of our updates if it was recorded."""
    cpu = re.sub(r"\(R\)|,.*| Processor", "", facts["processor"])
    cpu += " without AVX-512" if "avx512f" not in facts.get("instructions", "avx512f") else ""
    gpu = "" if is_on_cpu(facts) else facts["device"].partition(",")[0]
    return ", ".join(filter(None, (gpu, cpu, facts.get("form"))))


def is_on_cpu(facts: dict[str, str]) -> bool:
    """Return whether the programs of a measurement computed on the CPU, as all did before the device was recorded."""
    return facts.get("device", ON_CPU) == ON_CPU


def speed_beside(*names: str) -> Table:
    """Return our steps per second and one peer's: d3rlpy on a dataset, a plain loop, or another script.

    `names` are those that the peer has in the files. The first one heads its columns.
    """
    table = Table(("", "measured on", "onramp", names[0], f"onramp / {names[0]}", "step / floor"))
    for peer in names:
        for facts, median, ratio in speeds(peer):
            step = f"{1 / ratio['floor']:.2f}" if "floor" in ratio else "-"
            rates = f"{median['ours']:.1f}", f"{median[peer]:.1f}", f"{ratio[peer]:.2f}"
            table.rows.append([facts["algorithm"], measured(facts), *rates, step])
    return table


def after_sac_table() -> Table:
    """Return environment steps per second of SAC and of what came after it, and the ratio of a step's time to SAC's."""
    table = Table(("", "measured on", "steps/s", "a step, in ms", "step / SAC's (range)"))
    for path in sorted((RESULTS / "speed").glob("after-sac-*.csv")):
        facts, rates = read_rounds(path)
        ratios = rates.rdiv(rates["ours"], axis=0)
        for name, rate in rates.median().sort_values(ascending=False).items():
            ratio = f"{ratios[name].median():.2f} ({ratios[name].min():.2f} to {ratios[name].max():.2f})"
            cells = f"{rate:,.1f}", f"{1e3 / rate:,.2f}", "" if name == "ours" else ratio
            table.rows.append(["SAC" if name == "ours" else f"`{name}`", measured(facts), *cells])
    return table


def datasets_table() -> Table:
    """Return the contents of each dataset that was made here."""
    heads = "", "transitions", "episodes, terminated", "return: mean, min to max", "score", "TQ", "SACo"
    table = Table(heads)
    for path in sorted((RESULTS / "datasets").glob("*.json")):
        found = json.loads(path.read_text("utf-8"))
        r = found["returns"]
        sizes = f"{found['transitions']:,}", f"{found['episodes']:,}, {found['terminated episodes']:,}"
        returns = f"{r['mean']:,.0f}, {r['min']:,.0f} to {r['max']:,.0f}"
        digits = {"score": 1, "TQ": 3, "SACo": 3}
        measures = ("-" if found[key] is None else f"{found[key]:.{n}f}" for key, n in digits.items())
        table.rows.append([path.stem, *sizes, returns, *measures])
    return table


def algorithms_table() -> Table:
    """Return the algorithms: name, paper, file and its length, kind of data, and returns against published ones."""
    table = Table(
        ["algorithm", "paper", "file, lines", "data", f"return on {HEADLINE[0]}, {HEADLINE[1]:,} steps", "speed"]
    )
    ran = {json.loads(config.read_text("utf-8"))["algo"] for config in RESULTS.rglob(CONFIG)}
    for path in sorted((ROOT / "algos").glob("*.py")):
        text = path.read_text("utf-8")
        if not ast.get_docstring(ast.parse(text)):
            continue
        name, paper = path.stem, re.search(r"arXiv\s(\d+\.\d+)", text)
        seeds, theirs = (runs.get((name, HEADLINE[0]), {}) for runs in (online(), published()))
        is_offline = "OfflineArgs" in text
        page = "offline.md" if name in ALGORITHMS else f"{name}.md#results"
        results = f"[{'on our own datasets' if is_offline else 'with other flags'}](docs/{page})"
        returns = results if name in ran else "not run"
        if seeds:
            known = f"; published {spread_at(theirs, HEADLINE[1])}" if theirs else ""
            returns = f"{spread_at(seeds, HEADLINE[1])}{known}"
        data = "offline to online" if is_offline else "online"
        table.rows.append(
            [
                f"[{display_name(name)}](docs/{name}.md)",
                f"[{paper[1]}](https://arxiv.org/abs/{paper[1]})" if paper else "",
                f"[`algos/{name}.py`](algos/{name}.py), {len(text.splitlines())}",
                data,
                returns,
                speed_of(name),
            ]
        )
    return table


ROUNDS, PROCESSOR = 20, "Intel"  # of the speeds in README, as it says below the table


def speed_of(algo: str) -> str:
    """Return the ratio of our speed to the fastest peer's with its range over the rounds, or "" if it is not measured.

    Of the whole measurements on a CPU that state the form of our updates, use one on README's processor if there is
    one, and of these the first by name.
    """
    found: dict[tuple[bool, str], str] = {}
    for path in (RESULTS / "speed").glob(f"{algo}-*.csv"):
        facts, rates = read_rounds(path)
        peers = [peer for peer in PEERS if peer in rates]
        if peers and "form" in facts and is_on_cpu(facts) and len(rates) >= ROUNDS:
            fastest = rates[peers].median().idxmax()
            ratio = rates["ours"] / rates[fastest]
            text = f"{ratio.median():.2f} × {PEERS[fastest]} ({ratio.min():.2f} to {ratio.max():.2f})"
            found[PROCESSOR not in facts.get("processor", ""), path.name] = text
    return found[min(found)] if found else ""


def loading_table() -> Table:
    """Return seconds and memory of each loader, as medians over the rounds."""
    table = Table(("", "seconds", "peak memory", "transitions"))
    median = pd.read_csv(RESULTS / "loading.csv", comment="#").groupby("contender").median()
    names = {"ours": "onramp", "d3rlpy": "d3rlpy 2.8.1", "qlearning_dataset": "D4RL's qlearning_dataset"}
    for contender, name in names.items():
        seconds, peak, transitions = median.loc[contender, ["seconds", "peak_bytes", "transitions"]]
        table.rows.append([name, f"{seconds:.2f}", f"{peak / 1e6:,.0f} MB", f"{transitions:,.0f}"])
    return table


def policies_table() -> Table:
    """Return a row for each policy in results/policies."""
    table = Table(("name", "steps", "return", "seed", "chosen from", "products"))
    for path in sorted((RESULTS / "policies").glob(f"*/*{SUFFIX}")):
        facts = read_policy(path).facts
        name = path.relative_to(RESULTS / "policies").with_suffix("")
        chosen_from = ", ".join(f"{mean:,.0f}" for _, mean in facts["chosen_from"])
        seed, products = (str(facts["arguments"][key]) for key in ("seed", "products"))
        steps = f"{facts['step']:,}" if facts["step"] else f"{facts['arguments']['offline_steps']:,} updates"
        table.rows.append([f"`{name}`", steps, spread(facts["returns"]), seed, chosen_from, products])
    return table


def products_table() -> Table:
    """Return the means over all evaluations of SAC and TD3 with products in float32 and in bfloat16, by seed.

    The last column is bfloat16 minus float32, with Welch's 95 % interval.
    """
    table, kept = Table(("", "float32", "bfloat16", "difference")), online()
    rounded = {key: seeds for key, seeds in online("ablations").items() if key[0].endswith("-bfloat16")}
    for (name, env), seeds in sorted(rounded.items()):
        algo = name.removesuffix("-bfloat16")
        forms = [{seed: kept[algo, env][seed] for seed in seeds}, seeds]
        last = min(max(curve) for runs in forms for curve in runs.values())
        means = [[statistics.mean(m for at, m in c.items() if at <= last) for c in runs.values()] for runs in forms]
        welch = stats.ttest_ind(means[1], means[0], equal_var=False).confidence_interval(0.95)
        difference = statistics.mean(means[1]) - statistics.mean(means[0])
        cells = [", ".join(f"{mean:,.0f}" for mean in each) for each in means]
        table.rows.append(
            [f"{display_name(algo)}, {env}", *cells, f"{difference:,.0f} ({welch.low:,.0f} to {welch.high:,.0f})"]
        )
    return table


TABLES: dict[str, dict[str, Callable[[], Table]]] = {
    "README.md": {
        "algorithms": algorithms_table,
    },
    "docs/results.md": {
        "learning": learning_table,
        "improvements": partial(online_improvements, labels("online-1m"), (100_000, 300_000)),
    },
    "docs/sac.md": {"learning": partial(learning_table, "sac")},
    "docs/cpu.md": {"products": products_table},
    "docs/policies.md": {"policies": policies_table},
    "docs/speed.md": {
        "speed": speed_table,
        "offline speed": partial(speed_beside, "d3rlpy"),
        "loop speed": partial(speed_beside, "loop"),
        "after sac": after_sac_table,
        "script speed": partial(speed_beside, "script"),
    },
    "docs/critics.md": {
        "sac settings": partial(settings_table, "sac", "sac-hl-gauss", "HL-Gauss, α = 0.01", (100_000, 300_000))
    },
    "docs/crossq.md": {
        "sac and crossq": partial(
            settings_table, "sac", "crossq-256", "CrossQ, critics of 256", (100_000, 300_000), default_label="SAC"
        ),
        "published": partial(published_returns, "crossq"),
    },
    "docs/data.md": {"datasets": datasets_table, "loading": loading_table},
    "docs/dsac_t.md": {
        "sac and dsac-t": partial(settings_table, "sac", "dsac_t", "DSAC-T", (100_000, 300_000), default_label="SAC")
    },
    "docs/offline.md": {"offline": offline_table, "d3rlpy": d3rlpy_table, "online": online_table},
    "docs/offline-to-online.md": {"weighting": partial(updates_table, "weighting")},
    "docs/ogbench.md": {
        "ogbench": partial(updates_table, "ogbench"),
        "ogbench online": partial(switch_table, "ogbench-online"),
    },
    "docs/ppo.md": {
        "ppo settings": partial(settings_table, "ppo", "ppo-tianshou", "Tianshou's form", (100_000, 300_000, 1_000_000))
    },
    "docs/simba_v2.md": {
        "sac and simba_v2": partial(
            settings_table, "sac", "simba_v2-small", "SimbaV2, small", (100_000, 300_000), default_label="SAC"
        ),
        "published": partial(published_returns, "simba_v2"),
    },
    "docs/stream_ac.md": {"returns": partial(returns_table, "stream_ac")},
    "docs/td3.md": {"td3 settings": partial(settings_table, "td3", "td3-authors", "the authors' setting", (100_000,))},
    "docs/rlpd.md": {"rlpd": rlpd_table, "rlpd successes": partial(rlpd_table, successes)},
    "docs/scaling.md": {
        "scaling settings": lambda: bests_table(read(SCALING), SCALING_RETURNS, HELD_OUT),
        "scaling laws": lambda: laws_table(read(SCALING), SCALING_RETURNS, HELD_OUT),
        "scaling predictions": lambda: predictions_table(read(SCALING), SCALING_RETURNS, HELD_OUT),
    },
    "docs/sweeps.md": {"packing": partial(speed_beside, *ALONE.values())},
    "docs/wsrl.md": {"wsrl": wsrl_table},
    "docs/notes/wsrl.md": {"wsrl longer": partial(wsrl_table, "wsrl-longer")},
    "docs/expo.md": {
        "expo": partial(switch_table, "expo"),
        "expo differences": expo_differences,
    },
    "docs/dsrl.md": {"steering": partial(switch_table, "steering")},
    "docs/pa_rl.md": {"steering": partial(switch_table, "steering")},
    "docs/notes/expo.md": {
        "expo successes": partial(switch_table, "expo", successes),
        "expo differences of successes": partial(expo_differences, successes),
    },
}


def with_tables(text: str, tables: dict[str, Callable[[], Table]]) -> str:
    """Return the page with new tables between its markers."""
    for name, table in tables.items():
        before, rest = text.split(f"<!-- {name}, by make report -->\n", 1)
        after = rest.split("<!-- end -->", 1)[1]
        text = f"{before}<!-- {name}, by make report -->\n{table().markdown()}\n<!-- end -->{after}"
    return text


def pages() -> list[Path]:
    """Return README and every page of docs."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def remade(page: Path) -> str:
    """Return the text of a page with new tables and new line numbers in its links to code."""
    name = page.relative_to(ROOT).as_posix()
    return with_links(with_tables(page.read_text("utf-8"), TABLES.get(name, {})), page.parent)


def write(path: Path, text: str) -> None:
    """Write the text, and print which file it is."""
    path.write_text(text, "utf-8")
    print_result(f"report: wrote {path}")


def main(args: Args) -> None:
    if args.runs is not None:
        runs = own_runs([args.runs])
        print_result(f"report: {len(runs)} runs in {args.runs}")
        write(args.runs / "report.html", runs_page(runs, args.runs.resolve().name))
        return
    changed = {page: text for page in pages() if (text := remade(page)) != page.read_text("utf-8")}
    if args.check:
        for page in changed:
            sys.exit(f"report: {page.relative_to(ROOT)} differs from what results/ and the code give: run make report")
        return
    print_result(f"report: {len(changed)} of {len(pages())} pages of README and docs change")
    for page, text in changed.items():
        write(page, text)
    for (algo, env), seeds in online().items():
        path = RESULTS / algo / f"{env}.png"
        save(learning_figure(algo, env, seeds, published()[algo, env], (6.0, 3.8)), path)
        print_result(f"report: wrote {path}")
    save(overview_figure(online(), published()), RESULTS / "overview.png")
    print_result(f"report: wrote {RESULTS / 'overview.png'}\nreport: making the page, which takes a minute")
    write(RESULTS / "report.html", whole_page())


if __name__ == "__main__":
    command_line(main, Args)
