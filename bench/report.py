"""The tables of README and docs, the figures in results/ and the page results/report.html, from the raw data there and
nothing else.

python bench/report.py            # rewrites them
python bench/report.py --check    # ends with 1 where they are not what the data says
"""

import csv
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.curves import online, published, successes
from bench.figures import learning_figure, png
from bench.offline_report import d3rlpy_table, expo_differences, expo_table, offline_table, online_table, wsrl_table
from bench.online_report import learning_table, settings_table
from bench.page import whole_page
from bench.rounds import read_rounds
from common.command_line import command_line

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"


@dataclass(frozen=True)
class Args:
    """What to do."""

    check: bool = False
    """Only compare."""


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
    "docs/ppo.md": {
        "ppo settings": partial(settings_table, "ppo", "ppo-tianshou", "Tianshou's form", (100_000, 300_000, 1_000_000))
    },
    "docs/td3.md": {"td3 settings": partial(settings_table, "td3", "td3-authors", "the authors' setting", (100_000,))},
    "docs/sweeps.md": {"packing": partial(speed_beside, "one run of all threads")},
    "docs/wsrl.md": {"wsrl": wsrl_table, "wsrl longer": partial(wsrl_table, "wsrl-longer")},
    "docs/expo.md": {
        "expo": expo_table,
        "expo differences": expo_differences,
        "expo successes": partial(expo_table, successes),
        "expo differences of successes": partial(expo_differences, successes),
    },
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
    for (algo, env), seeds in online().items():
        png(learning_figure(algo, env, seeds, published()[algo, env], (6.0, 3.8)), RESULTS / algo / f"{env}.png")
    (RESULTS / "report.html").write_text(whole_page())


if __name__ == "__main__":
    command_line(main, Args)
