"""`make plot RUNS=...`: the learning curves of chosen runs, as PNG and HTML."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from matplotlib.figure import Figure
from test_runs_page import add

from bench.pages import plot
from bench.pages.plot import Args
from bench.pages.runs_page import own_lines, own_runs, read_runs
from bench.report.figures import COLOURS, OTHERS, Line, colours_of, draw_curves, panels_figure
from common.command_line import parse
from common.errors import InputError

RETURNS = {0: (1.0, 3.0), 1000: (5.0, 7.0)}


def add_with(folder: Path, algo: str, seed: int, returns: dict[int, tuple[float, ...]] = RETURNS, **flags: Any) -> Path:
    """Add a run on Hopper-v4 with these arguments."""
    add(folder, algo, "Hopper-v4", seed, returns)
    config = json.loads((folder / "config.json").read_text())
    config["arguments"] |= flags
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def lines_of(*folders: Path) -> dict[str, list[Line]]:
    """Return the lines of each task."""
    return {task: list(lines) for task, lines in own_lines(read_runs(list(folders))).items()}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for seed in (1, 2, 3, 4):
        add(tmp_path / f"sac__Hopper-v4__{seed}", "sac", "Hopper-v4", seed, {0: (1.0,), 1000: (10.0 * seed,)})
    add(tmp_path / "lr" / "td3" / "Walker2d-v4" / "1", "td3", "Walker2d-v4", 1, RETURNS)
    add(tmp_path / "ppo__Hopper-v4__1", "ppo", "Hopper-v4", 1, RETURNS)
    return tmp_path


def test_a_picture_and_a_page_are_written(runs: Path, capsys: pytest.CaptureFixture[str]):
    """Of the runs that are given, a sweep's folder among them, and of no others."""
    output = runs / "new" / "mine.png"
    plot.main(Args((*sorted(runs.glob("sac*")), runs / "lr"), output))
    assert output.read_bytes().startswith(b"\x89PNG")
    page = output.with_suffix(".html").read_text()
    assert not re.search(r"""(src|href)=["'](?!data:)""", page)
    assert page.count("<img") == 2
    assert "SAC ends at 25 (10 to 40) after 1,000" in page
    assert "PPO" not in page
    assert capsys.readouterr().out.splitlines() == [
        "Hopper-v4: SAC, 4 seeds, to step 1,000",
        "Walker2d-v4: TD3, 1 seed, to step 1,000",
        f"written to {output} and {output.with_suffix('.html')}",
    ]


@pytest.mark.parametrize(("suffix", "start"), [(".pdf", b"%PDF"), (".svg", b"<?xml")])
def test_the_suffix_selects_the_format(tmp_path: Path, suffix: str, start: bytes):
    run = add_with(tmp_path / "a", "sac", 1)
    plot.main(Args((run,), output := tmp_path / f"mine{suffix}"))
    assert output.read_bytes().startswith(start)
    assert output.with_suffix(".html").exists()


def test_the_help_has_an_example_in_each_line(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        parse(Args, ["--help"])
    shown = capsys.readouterr().out
    assert len(re.findall("^ +make plot RUNS=", shown, re.MULTILINE)) == 2


def test_in_a_locale_without_greek_letters(tmp_path: Path):
    add(tmp_path / "sac__Hopper-v4__1", "sac", "Hopper-v4", 1, {0: (1.0,), 1000: (9.0,)})
    line = [sys.executable, "bench/pages/plot.py", str(tmp_path), "--output", str(tmp_path / "mine.png")]
    poor = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(line, cwd=ROOT, env=poor, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_each_task_has_a_panel_and_an_algorithm_one_colour(runs: Path):
    """Four seeds are one line with a band, and fewer are one line each, to its own end."""
    add(runs / "td3__Hopper-v4__1", "td3", "Hopper-v4", 1, RETURNS)
    add(runs / "td3__Hopper-v4__2", "td3", "Hopper-v4", 2, RETURNS | {2000: (9.0,)})
    lines = own_lines(own_runs((runs,)))
    figure = panels_figure(lines)
    hopper, walker = figure.axes
    assert [axes.get_title() for axes in figure.axes] == ["Hopper-v4", "Walker2d-v4"]
    drawn = [(line.get_color(), list(line.get_xdata())) for line in hopper.lines]
    steps = [0, 1000]
    assert drawn == [
        (COLOURS["ppo"], steps), (COLOURS["sac"], steps), (COLOURS["td3"], steps), (COLOURS["td3"], [*steps, 2000]),
    ]  # fmt: skip
    assert len(hopper.collections) == 1
    assert [line.get_color() for line in walker.lines] == [COLOURS["td3"]]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["PPO", "SAC", "TD3"]


def test_seeds_that_ran_longer_continue_beyond_the_band():
    """As TD3's: five seeds to 100,000 steps, three of them to 300,000."""
    axes = Figure().add_subplot()
    draw_curves(
        axes, Line("a", "red"), {seed: {0: 1.0, 5: 2.0, **({9: 7.0} if seed == "2" else {})} for seed in "1234"}
    )
    band, longer = axes.lines
    assert list(band.get_xdata()) == [0, 5]
    assert longer.get_xydata().tolist() == [[5, 2], [9, 7]]


def test_flags_have_styles_and_labels_of_their_own(tmp_path: Path):
    """What a run's name, length and place are is no difference, nor is a flag that an older run does not have."""
    common = {"overlap": False, "total_steps": 1000, "run_dir": "a", "gamma": 0.99}
    default = add_with(tmp_path / "a", "sac", 1, **common, actor_lr=1e-4)
    longer = add_with(tmp_path / "b", "sac", 2, **common | {"total_steps": 2000, "run_dir": "b"}, actor_lr=1e-4)
    other = add_with(tmp_path / "c", "sac", 1, **common, actor_lr=3e-4, newer=True)
    found = lines_of(default, longer, other)["Hopper-v4"]
    assert [line.name for line in found] == ["SAC, actor-lr 0.0001", "SAC, actor-lr 0.0003"]
    assert {line.colour for line in found} == {COLOURS["sac"]}
    assert len({str(line.style) for line in found}) == 2
    assert lines_of(default, longer)["Hopper-v4"] == [Line("SAC", COLOURS["sac"])]
    short, long = (add_with(tmp_path / f"ppo{n}", "ppo", 1, total_steps=n) for n in (1000, 2000))
    assert len(lines_of(short, long)["Hopper-v4"]) == 2  # PPO's schedule depends on its length


def test_an_older_run_without_a_flag_has_its_default(tmp_path: Path):
    """So it does not hide that other runs differ in this flag."""
    old, plain = add_with(tmp_path / "a", "sac", 1), add_with(tmp_path / "b", "sac", 2, action_repeat=None)
    repeated = add_with(tmp_path / "c", "sac", 3, action_repeat=4)
    found = own_lines(read_runs([old, plain, repeated]))["Hopper-v4"]
    assert [(line.name, list(seeds)) for line, seeds in found.items()] == [
        ("SAC, action-repeat 4", ["3"]),
        ("SAC, action-repeat None", ["1", "2"]),
    ]


def test_runs_of_one_seed_are_both_drawn(tmp_path: Path):
    folders = [add_with(tmp_path / name, "sac", 1) for name in "ab"]
    (seeds,) = own_lines(read_runs(folders))["Hopper-v4"].values()
    assert list(seeds) == ["1", f"1 ({folders[1]})"]


def test_new_algorithms_have_colours_without_an_edit():
    """Different ones, also where their names would give the same."""
    new = [f"new{i}" for i in range(len(OTHERS))]
    found = colours_of(["sac", *new])
    assert found["sac"] == COLOURS["sac"]
    assert sorted(found[name] for name in new) == sorted(OTHERS)


def test_runs_of_the_repository_can_be_drawn():
    """Their evaluations are compressed."""
    (runs,) = own_lines(own_runs((ROOT / "results" / "sac" / "Hopper-v4",))).values()
    assert [len(seeds) for seeds in runs.values()] == [3]


def test_what_cannot_be_drawn_is_refused(tmp_path: Path):
    def refused(named: str, *runs: Path, **changed: Any) -> None:
        with pytest.raises(InputError, match=named):
            plot.main(Args(runs, **{"output": tmp_path / "plot.png"} | changed))
        assert not (tmp_path / "plot.png").exists()

    refused("no run is given: make plot RUNS=")
    refused(r"sac\* matches no run: give run folders", tmp_path / "sac*")
    refused("has no run with evaluations", tmp_path)
    early = add_with(tmp_path / "early", "sac", 1, {})
    refused("early has no evaluation yet: wait", early)
    torn = add_with(tmp_path / "torn", "sac", 1)
    (torn / "evaluations.csv").write_text("step,episode,return\n0,0,1.0\n100")
    refused("torn/evaluations.csv is damaged: resume the run", torn)
    refused(r"plot\.jpg: give a path that ends in \.png, \.pdf or \.svg", torn, output=tmp_path / "plot.jpg")
    refused(r"/proc/no/x\.png cannot be written .*: give another --output", torn, output=Path("/proc/no/x.png"))
