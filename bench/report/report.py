"""Make the tables of README and docs, the figures in results/ and the page results/report.html.

They are made from the raw data in results/ and nothing else.

python bench/report/report.py            # rewrites them
python bench/report/report.py --check    # exits with 1 if they differ from what the data give
"""

import ast
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pandas as pd

from bench.report.aggregates import learning_table, settings_table
from bench.report.curves import online, published, successes
from bench.report.figures import learning_figure, png
from bench.report.offline_report import (
    d3rlpy_table,
    expo_differences,
    expo_table,
    offline_table,
    online_table,
    rlpd_table,
    wsrl_table,
)
from bench.report.page import whole_page
from bench.report.tables import Table
from bench.speed.interleaved_timing import read_rounds
from common.command_line import command_line

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results"


@dataclass(frozen=True)
class Args:
    """Rewrite, or check."""

    check: bool = False
    """Only compare; write nothing."""


def speeds(peer: str) -> Iterator[tuple[dict[str, str], pd.Series, pd.Series]]:
    """Yield facts, medians over the rounds, and medians of ours / contender for each measurement against `peer`."""
    for path in sorted((RESULTS / "speed").glob("*.csv")):
        facts, rates = read_rounds(path)
        if peer in rates:
            yield facts, rates.median(), rates.rdiv(rates["ours"], axis=0).median()


def speed_table() -> Table:
    """Return our and the peers' environment steps per second, a row for each measurement."""
    heads = "", "measured", "onramp", "SB3", "SBX", "onramp / SB3", "onramp / SBX", "update / floor"
    table = Table(heads)
    for facts, median, ratio in speeds("sb3"):
        alone, floor = float(facts.get("our update alone in ms", "nan")), median.get("floor")
        update = f"{alone * floor / 1000:.2f}" if floor else "-"
        rates = [f"{median[name]:,.0f}" for name in ("ours", "sb3", "sbx")]
        ratios = f"{ratio['sb3']:.2f}", f"{ratio['sbx']:.2f}"
        table.rows.append([facts["algorithm"], measured(facts), *rates, *ratios, update])
    return table


def measured(facts: dict[str, str]) -> str:
    """Return the processor of a measurement, and the form of our updates if it was noted."""
    cpu = re.sub(r"\(R\)|,.*| Processor", "", facts["processor"])
    return f"{cpu}, {facts['form']}" if "form" in facts else cpu


def speed_beside(peer: str) -> Table:
    """Return our steps per second and one peer's: d3rlpy on a dataset, or a plain loop."""
    table = Table(("", "measured", "onramp", peer, f"onramp / {peer}", "step / floor"))
    for facts, median, ratio in speeds(peer):
        step = f"{1 / ratio['floor']:.2f}" if "floor" in ratio else "-"
        rates = f"{median['ours']:.1f}", f"{median[peer]:.1f}", f"{ratio[peer]:.2f}"
        table.rows.append([facts["algorithm"], measured(facts), *rates, step])
    return table


def datasets_table() -> Table:
    """Return the contents of each dataset of our own suite."""
    heads = "", "transitions", "episodes, terminated", "return: mean, min to max", "score", "TQ", "SACo"
    table = Table(heads)
    for path in sorted((RESULTS / "datasets").glob("*.json")):
        found = json.loads(path.read_text())
        r = found["returns"]
        sizes = f"{found['transitions']:,}", f"{found['episodes']:,}, {found['terminated episodes']:,}"
        returns = f"{r['mean']:,.0f}, {r['min']:,.0f} to {r['max']:,.0f}"
        measures = f"{found['score']:.1f}", f"{found['TQ']:.3f}", f"{found['SACo']:.3f}"
        table.rows.append([path.stem, *sizes, returns, *measures])
    return table


def algorithms_table() -> Table:
    """Return the algorithms: the title of each file's docstring, the file and its page."""
    table = Table(["algorithm", "file", "page"])
    for path in sorted((ROOT / "algos").glob("*.py")):
        if title := ast.get_docstring(ast.parse(path.read_text())):
            name, title = path.stem, " ".join(title.partition("\n\n")[0].split()).rstrip(".")
            table.rows.append([title, f"[`algos/{name}.py`](algos/{name}.py)", f"[docs/{name}.md](docs/{name}.md)"])
    return table


def loading_table() -> Table:
    """Return seconds and memory of each loader, as medians over the rounds."""
    table = Table(("", "seconds", "at the peak", "transitions"))
    median = pd.read_csv(RESULTS / "loading.csv", comment="#").groupby("contender").median()
    names = {"ours": "onramp", "d3rlpy": "d3rlpy 2.8.1", "qlearning_dataset": "D4RL's qlearning_dataset"}
    for contender, name in names.items():
        seconds, peak, transitions = median.loc[contender, ["seconds", "peak_bytes", "transitions"]]
        table.rows.append([name, f"{seconds:.2f}", f"{peak / 1e6:,.0f} MB", f"{transitions:,.0f}"])
    return table


TABLES: dict[str, dict[str, Callable[[], Table]]] = {
    "README.md": {
        "algorithms": algorithms_table,
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
    "docs/rlpd.md": {"rlpd": rlpd_table, "rlpd successes": partial(rlpd_table, successes)},
    "docs/sweeps.md": {"packing": partial(speed_beside, "one run of all threads")},
    "docs/wsrl.md": {"wsrl": wsrl_table, "wsrl longer": partial(wsrl_table, "wsrl-longer")},
    "docs/expo.md": {
        "expo": expo_table,
        "expo differences": expo_differences,
        "expo successes": partial(expo_table, successes),
        "expo differences of successes": partial(expo_differences, successes),
    },
}


def with_tables(text: str, tables: dict[str, Callable[[], Table]]) -> str:
    """Return a page with the tables between its markers made again."""
    for name, table in tables.items():
        before, rest = text.split(f"<!-- {name}, by make report -->\n", 1)
        after = rest.split("<!-- end -->", 1)[1]
        text = f"{before}<!-- {name}, by make report -->\n{table().markdown()}\n<!-- end -->{after}"
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
