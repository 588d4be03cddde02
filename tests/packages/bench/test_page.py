"""results/report.html needs nothing but itself, says what the data says, and what has not been run."""

import base64
import csv
import html
import json
import re
import shutil
import subprocess
from collections.abc import Iterable
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from conftest import ALGORITHMS, ROOT

from bench.report import aggregates, curves, figures, intervals, page
from bench.report.aggregates import compared, improvements, online_runs, profiles, reached
from bench.report.archive_run import keep
from bench.report.page import missing_runs
from bench.sweep.suite import SUITES, Planned

EVALUATION = "step,episode,return,length,success,normalized_score"


def add(folder: Path, env: str, evaluations: dict[int, float], **more: object) -> None:
    """A run of two episodes an evaluation, 1 below and 1 above; `more` goes into its config.json."""
    folder.mkdir(parents=True)
    rows = [f"{step},{i},{value + i * 2 - 1},10,," for step, value in evaluations.items() for i in (0, 1)]
    (folder / "evaluations.csv").write_text("\n".join([EVALUATION, *rows]) + "\n")
    config = {
        "algo": "sac",
        "arguments": {"env": env, "offline_steps": 100_000},
        "versions": {"torch": "2"},
        "commit": "abcdef0123",
    }
    (folder / "config.json").write_text(json.dumps(config | more))
    keep(folder, folder)


@pytest.fixture(scope="module", autouse=True)
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterable[Path]:
    folder = tmp_path_factory.mktemp("results")
    for seed in range(1, 6):
        final = 1000.0 * seed
        add(folder / "sac" / "Hopper-v4" / str(seed), "Hopper-v4", {0: 0.0, 100_000: 600.0, 1_000_000: final})
    add(folder / "ppo" / "Hopper-v4" / "1", "Hopper-v4", {0: 0.0, 100_000: 500.0, 300_000: 600.0},
        time={"seconds": 5400.0, "steps_per_second": 55.5})  # fmt: skip
    add(folder / "offline" / "iql" / "hopper-medium" / "1", "Hopper-v4", {-100_000: 0.0, 0: 1000.0})
    add(folder / "online" / "cql-mix" / "hopper-medium" / "1", "Hopper-v4", {-9: 0.0, 0: 1000.0, 9: 2000.0})
    add(folder / "unheard-of" / "sac-new" / "Hopper-v4" / "1", "Hopper-v4", {0: 0.0}, form="recorded")
    (folder / "datasets").mkdir()
    (folder / "datasets" / "hopper-medium.json").write_text(json.dumps({"score": 31.0}))
    lines = ["source,algo,env,seed,step,return,measured_on"]
    for seed, value in enumerate((1000, 2000, 3000, 4000)):  # the last step is not the one that is the unit
        for step, factor in ((0, 0.0), (100_000, 0.5), (1_000_000, 1.0), (2_000_000, 3.0)):
            lines.append(f"sfujim/TD3,sac,Hopper-v4,{seed},{step},{value * factor},Hopper-v1")
    lines.append("sfujim/TD3,sac,Ant-v4,0,1000000,7,Ant-v4")
    lines += [f"thu-ml/tianshou,ppo,Hopper-v4,mean10,{step},{step / 1000},Hopper-v3" for step in (0, 1_000_000)]
    (folder / "published.csv").write_text("\n".join(lines) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(curves, "RESULTS", folder)
        patch.setattr(intervals, "RESAMPLES", 200)
        yield folder


@pytest.fixture(scope="module")
def made(results: Path) -> str:
    return page.whole_page()


class Reader(HTMLParser):
    """Fails on a tag that does not close; keeps every tag with its attributes, and the text."""

    VOID = ("meta", "img")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_nothing_is_loaded_from_elsewhere(made: str):
    """Nothing but links has an address, nothing but data: is an image, and neither style nor images name a file."""
    for tag, attributes in Reader(made).tags:
        assert tag not in ("script", "link", "iframe", "object", "embed", "base", "video", "source")
        assert "src" not in attributes or (tag == "img" and attributes["src"].startswith("data:image/svg+xml;base64,"))
        assert "href" not in attributes or tag == "a"
        assert not any(name.startswith("on") or name in ("srcset", "style", "data", "action") for name in attributes)
    assert not re.search(r"url\(|@import", made)
    images = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', made)
    assert images
    for image in map(base64.b64decode, images):
        assert not re.search(rb"<script|<image|<foreignObject|@import", image)
        assert all(found.startswith(b"#") for found in re.findall(rb'href="([^"]*)"', image))
        assert all(found.startswith(b"#") for found in re.findall(rb"url\(([^)]*)\)", image))


def test_structure(made: str):
    tags = Reader(made).tags
    ids = [attributes["id"] for _, attributes in tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = [a["href"] for tag, a in tags if tag == "a"]
    assert {link[1:] for link in links if link.startswith("#")} == {a["id"] for tag, a in tags if tag == "section"}
    assert all(link.startswith(("#", "https://")) for link in links)
    levels = [int(tag[1]) for tag, _ in tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert all(a["alt"] for tag, a in tags if tag == "img")
    assert ("html", {"lang": "en"}) in tags
    assert any(a.get("name") == "viewport" for tag, a in tags if tag == "meta")


def test_same_data_same_bytes(made: str):
    assert page.whole_page() == made


def test_every_run_and_its_time_are_there(made: str):
    text = Reader(made).text
    assert "48 evaluation episodes of 9 runs" in text
    rows = re.findall(r"<tr>.*?</tr>", made)
    (ppo,) = (row for row in rows if ">ppo/Hopper-v4<" in row)
    assert re.findall(r">([^<]+)</t[dh]>", ppo) == [
        "ppo/Hopper-v4", "1", "0 to 300,000", "2", "1.50", "55.5", "not recorded", "not recorded", "abcdef01", "6",
    ]  # fmt: skip
    (new,) = (row for row in rows if ">unheard-of/sac-new/Hopper-v4<" in row)
    assert re.findall(r">([^<]+)</t[dh]>", new)[-4:] == ["not recorded", "recorded", "abcdef01", "2"]
    assert len([row for row in rows if "abcdef01" in row]) == 9


def test_every_run_that_the_repository_keeps_is_on_the_page(monkeypatch: pytest.MonkeyPatch):
    """In whatever folder of results/ it is."""
    monkeypatch.setattr(curves, "RESULTS", ROOT / "results")
    found = [ROOT / "results" / folder / run.algo / run.task / run.seed for folder, run in page.every_run()]
    assert sorted(found) == sorted(path.parent for path in (ROOT / "results").rglob("evaluations.csv.gz"))


def test_page_lists_missing_runs_of_each_suite_in_results():
    """Most suites have a folder of their name. That of the suite offline-own is results/offline."""
    suites = {suite for _, suite, _ in page.STUDIES}
    kept = {path.parents[3].name for path in (ROOT / "results").glob("*/*/*/*/evaluations.csv.gz")} - {"offline"}
    assert suites >= {"online-1m", "offline-own", "off2on-own", "after-sac"}
    assert suites >= {path.stem for path in SUITES.glob("*.toml")} & kept


def test_what_has_not_been_run_is_said(made: str):
    said = Reader(made).text
    assert "SAC: Hopper-v4: 5 of 10 seeds; not run: HalfCheetah-v4, Walker2d-v4, Ant-v4, Humanoid-v4." in said
    assert "PPO: Hopper-v4: 0 of 10 seeds (1 more, to 300,000 at most); not run" in said
    assert "TD3: not run." in said
    assert "IQL: hopper-medium: 1 of 4 seeds; not run: halfcheetah-medium," in said
    assert "CQL, half of each batch data: hopper-medium: 0 of 2 seeds (1 more, to 9 at most)." in said
    assert "pessimism kept: not run." in said
    assert "Stream AC(λ): not run." in said
    assert "3 seeds on each of HalfCheetah-v4, Hopper-v4, Walker2d-v4, Ant-v4, to 100,000 or more." in said
    assert "cube-single-play-singletask-task2-v0, to the end of the updates." in said
    seeds = {seed: {0: 0.0, 9: float(seed)} for seed in "1234"}
    assert missing_runs({"a": seeds}, {"a": Planned(4, 9)}) == "complete"
    assert missing_runs({"a": seeds}, {"a": Planned(4, 10)}) == "a: 0 of 4 seeds (4 more, to 9 at most)"


def test_switch_is_on_the_page_with_its_curve(made: str):
    """Returns of Hopper-v4: 1000 scores 31.35, 2000 scores 62.07; one evaluation behind the switch."""
    row = next(row for row in re.findall(r"<tr>.*?</tr>", made) if "cql-mix, hopper-medium" in row)
    assert re.findall(r">([^<]+)</t[dh]>", row) == ["cql-mix, hopper-medium", "9", "31.3 (1)", "62.1 (1)", "0.38"]
    assert 'alt="Score on hopper-medium before and after the switch: CQL, half of each batch data ends at 62.1' in made


def test_online_unit_is_the_published_return_at_a_million_steps():
    ours, theirs = online_runs(1_000_000)
    assert ours == {"sac": {"Hopper-v4": pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0])}}
    assert theirs["sac"]["Hopper-v4"] == pytest.approx([0.4, 0.8, 1.2, 1.6])
    table = aggregates.online_aggregates().markdown().splitlines()
    assert "| PPO | 1,000,000 | not run | | | |" in table
    row = next(line for line in table if line.startswith("| SAC | 1,000,000"))
    assert row.startswith("| SAC | 1,000,000 | 1.20 (")
    pairs = [(x > y) + 0.5 * (x == y) for x in range(1, 6) for y in range(1, 5)]
    assert f"| {sum(pairs) / len(pairs):.2f} (" in row
    assert "| only means were published |" in next(line for line in table if line.startswith("| PPO | 100,000"))


def test_learning_table_has_minutes_of_runs_with_a_recorded_time():
    """PPO needed 5,400 s for 300,000 steps; no time of SAC was recorded."""
    assert aggregates.learning_table("ppo").rows == [
        ["PPO, Hopper-v4", "100,000", "500 (1)", "", "100 (10)", "30.0"],
        ["PPO, Hopper-v4", "300,000", "600 (1)", "", "300 (10)", "90.0"],
        ["PPO, Hopper-v4", "1,000,000", "not run", "", "1,000 (10)", ""],
    ]
    assert {row[-1] for row in aggregates.learning_table("sac").rows} == {""}


def test_published_returns_have_a_column_for_each_environment():
    table = aggregates.published_returns("sac")
    assert list(table.heads) == ["steps", "Ant-v4", "Hopper-v4"]
    assert table.rows[0] == ["100,000", "not run", "1,250 ± 645 (4)"]
    assert table.rows[2] == ["1,000,000", "7 (1)", "2,500 ± 1,291 (4)"]


def test_each_published_algorithm_has_one_source():
    """Authors have different settings, and the interquartile mean is over environments."""
    rows = csv.DictReader((ROOT / "results" / "published.csv").read_text().splitlines())
    sources = {(row["algo"], row["source"]) for row in rows}
    assert len({algo for algo, _ in sources}) == len(sources)


def test_algorithms_are_compared_by_their_returns(made: str):
    """Not in the units above, in which SAC's 600 of 2500 would be less than PPO's 500 of 1000."""
    assert reached(curves.online(), 100_000) == {"sac": {"Hopper-v4": [600.0] * 5}, "ppo": {"Hopper-v4": [500.0]}}
    row = next(row for row in re.findall(r"<tr>.*?</tr>", made) if "SAC better than PPO" in row)
    assert re.findall(r">([^<]+)</t[dh]>", row) == ["SAC better than PPO", "100,000", "1.00", "1: 5 and 1"]
    assert improvements({"sac": {"a": [1.0]}}, {"sac": "SAC", "ppo": "PPO"}).rows == []


def test_only_shared_tasks_are_compared():
    ours, theirs = {"a": [1.0], "b": [2.0, 0.0], "c": [9.0]}, {"b": [1.0], "d": [9.0], "c": [9.0]}
    assert compared(ours, theirs) == ("2: 2 + 1 and 1 + 1", "0.50")
    assert compared(ours, {"e": [1.0]}) == ("", "not run")


def test_profiles_go_from_all_runs_to_none():
    thresholds, found = profiles({"a": {"x": [1.0, 3.0], "y": [2.0, 4.0]}})
    assert (thresholds[0], thresholds[-1]) == (0.0, pytest.approx(4.2))
    assert found["a"].value == pytest.approx([sum(s > tau for s in (1, 2, 3, 4)) / 4 for tau in thresholds])


def test_pages_sources_are_all_explained():
    template = (ROOT / "bench" / "report" / "page.html").read_text()
    sources = {line.split(",")[0] for line in (ROOT / "results" / "published.csv").read_text().splitlines()[1:]}
    assert sources
    assert all(f"https://github.com/{source}" in template for source in sources)


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
@pytest.mark.parametrize("width", [360, 1280])
def test_browser_scrolls_nothing_sideways_and_asks_for_nothing(made: str, tmp_path: Path, width: int):
    """In a frame as wide as a phone: the page is no wider, and all that was loaded is data."""
    (tmp_path / "frame.html").write_text(
        f'<iframe id="f" width="{width}" height="800" style="border:0" srcdoc="{html.escape(made)}"></iframe>'
        "<script>onload = () => { const w = document.getElementById('f').contentWindow;"
        " const own = w.document.documentElement;"
        " const images = [...w.document.images].filter(i => i.naturalWidth > 0).length;"
        " document.title = [own.scrollWidth, images, ...w.performance.getEntriesByType('resource')"
        ".map(e => e.name.slice(0, 5))].join(' ') }</script>"
    )
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
        "--disable-component-update --disable-sync --dump-dom --window-size=1400,900 "
        f"--user-data-dir={tmp_path / 'profile'}"
    )
    command = [CHROMIUM, *flags.split(), (tmp_path / "frame.html").as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    title = re.search("<title>(.*?)</title>", dom)
    assert title, dom[-300:]
    found, images, *loaded = title[1].split()
    assert int(found) <= width
    assert int(images) == made.count("<img ")
    assert set(loaded) <= {"data:"}


def test_seeds_without_a_common_step_have_a_line_each():
    """Four of them, which otherwise have one mean and an interval."""
    seeds = {str(seed): {seed: 1.0, 10 * seed: 2.0} for seed in (1, 3, 4, 7)}
    (axes,) = figures.scores_figure("", "steps", {figures.Line("SAC", "#000000"): seeds}, None).axes
    assert [list(line.get_xdata()) for line in axes.lines] == [[1, 10], [3, 30], [4, 40], [7, 70]]
    assert page.ends(seeds) == "2 after 10 and 2 after 30 and 2 after 40 and 2 after 70"


def test_each_algorithm_has_one_colour_and_its_variants_differ_in_style():
    """In every figure: also if an algorithm is new, or a library's of the same name."""
    lines = figures.styled({"cql-mix": "Cal-QL", "cql-none": "CQL", "wsrl": "WSRL", "mine": "Mine"})
    assert (
        lines["cql-mix"].colour == lines["cql-none"].colour == figures.colour_of("d3rlpy-cql") == figures.COLOURS["cql"]
    )
    assert lines["cql-mix"].style != lines["cql-none"].style
    assert len({line.colour for line in lines.values()}) == 3
    assert len(set(figures.COLOURS.values()) | set(figures.OTHERS)) == len(figures.COLOURS) + len(figures.OTHERS)
    assert len(set(figures.colours_of(ALGORITHMS).values())) == len(ALGORITHMS)


def test_ours_and_the_published_are_of_the_same_environments(monkeypatch: pytest.MonkeyPatch):
    """At a step that runs of ours have reached on one of two."""
    curve = {step: float(step) for step in aggregates.STEPS}
    ours = {("sac", "A"): {"1": curve}, ("sac", "B"): {"1": {100_000: 1.0}}}
    theirs = {("sac", env): {"1": curve, "2": curve} for env in "ABC"}
    monkeypatch.setattr(aggregates, "online", lambda: ours)
    monkeypatch.setattr(aggregates, "published", lambda: theirs)
    assert [sorted(runs["sac"]) for runs in online_runs(100_000)] == [["A", "B"]] * 2
    assert [dict(runs) for runs in online_runs(1_000_000)] == [{"sac": {"A": [1.0]}}, {"sac": {"A": [1.0, 1.0]}}]
