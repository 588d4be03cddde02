"""`make report RUNS=...`: a page of a user's own runs says what is in their folders."""

import json
import re
from pathlib import Path

import pytest

from bench.pages.runs_page import own_lines, own_runs, own_table, runs_page
from bench.report import report
from common.errors import InputError

COLUMNS = "step,episode,return,length,success,normalized_score"


def add(folder: Path, algo: str, env: str, seed: int, returns: dict[int, tuple[float, ...]], done: bool = True) -> None:
    folder.mkdir(parents=True)
    rows = [f"{step},{i},{value},10,," for step, values in returns.items() for i, value in enumerate(values)]
    (folder / "evaluations.csv").write_text("\n".join([COLUMNS, *rows]) + "\n")
    (folder / "config.json").write_text(json.dumps({"algo": algo, "arguments": {"env": env, "seed": seed}}))
    if done:
        (folder / "DONE").touch()


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    add(tmp_path / "sac__Hopper-v4__1", "sac", "Hopper-v4", 1, {0: (1.0, 3.0), 1000: (50.0, 70.0), 2000: (10.0, 30.0)})
    add(tmp_path / "td3__Hopper-v4__2", "td3", "Hopper-v4", 2, {0: (1.0, 3.0), 1000: (7.0, 7.0)}, done=False)
    (tmp_path / "notes").mkdir()
    return tmp_path


def test_each_run_has_a_row(runs: Path):
    """Its last evaluation with the spread over its episodes, its best one, and whether it is finished."""
    rows = [list(row) for row in own_table(own_runs([runs])).rows]
    assert rows == [
        ["sac__Hopper-v4__1", "SAC", "Hopper-v4", "1", "2,000", "20.0 ± 14.1 (2)", "60.0", "finished"],
        ["td3__Hopper-v4__2", "TD3", "Hopper-v4", "2", "1,000", "7.0 ± 0.0 (2)", "7.0", "unfinished"],
    ]


def test_the_runs_of_a_sweep_are_found_at_any_depth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Their rows are named by their folders below the common one, also if paths are relative and absolute."""
    for name, seed in (("a", 1), ("a", 2), ("b", 1)):
        add(tmp_path / "sweep" / name / "Hopper-v4" / str(seed), "sac", "Hopper-v4", seed, {0: (1.0,)})
    monkeypatch.chdir(tmp_path)
    for given in ([Path("sweep")], [Path("sweep/a"), tmp_path / "sweep" / "b"]):
        rows = own_table(own_runs(given)).rows
        assert [row[0] for row in rows] == ["a/Hopper-v4/1", "a/Hopper-v4/2", "b/Hopper-v4/1"]


def test_the_page_contains_figures_and_needs_nothing_else(runs: Path, capsys: pytest.CaptureFixture[str]):
    report.main(report.Args(runs=runs))
    made = (runs / "report.html").read_text()
    assert made == runs_page(own_runs([runs]), runs.name)
    assert made.count("<img") == 1
    assert "SAC ends at 20 after 2,000; TD3 ends at 7 after 1,000" in made
    assert not re.search(r"""(src|href)=["'](?!data:)""", made)
    assert capsys.readouterr().out == f"report: 2 runs in {runs}\nreport: wrote {runs / 'report.html'}\n"


def test_the_page_of_this_folder_has_its_name(runs: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(runs)
    report.main(report.Args(runs=Path()))
    assert f"<title>{runs.name}: " in (runs / "report.html").read_text()


def test_a_folder_without_runs_is_refused(tmp_path: Path):
    with pytest.raises(InputError, match="has no run with evaluations"):
        own_runs([tmp_path])


@pytest.mark.parametrize(
    ("first", "second", "tasks", "lines"),
    [
        ({"dataset": "D4RL/pen/human-v2"}, {"dataset": "D4RL/door/human-v2"},
         ["D4RL/door/human-v2", "D4RL/pen/human-v2"], ["IQL", "IQL"]),
        ({"dataset": "a/x.hdf5"}, {"dataset": "b/x.hdf5"},
         ["x.hdf5"], ["IQL, dataset a/x.hdf5", "IQL, dataset b/x.hdf5"]),
        ({"dataset": "x.hdf5", "env": "A-v0"}, {"dataset": "x.hdf5", "env": "B-v0"},
         ["x.hdf5"], ["IQL, env A-v0", "IQL, env B-v0"]),
        ({"env": "a/X-v0"}, {"env": "b/X-v0"}, ["a/X-v0", "b/X-v0"], ["IQL", "IQL"]),
    ],
)  # fmt: skip
def test_runs_of_different_data_share_no_curve(
    first: dict[str, str], second: dict[str, str], tasks: list[str], lines: list[str], tmp_path: Path
):
    for seed, arguments in enumerate((first, second)):
        add(tmp_path / str(seed), "iql", "", seed, {0: (1.0,)})
        config = {"algo": "iql", "arguments": {"env": "", "seed": seed} | arguments}
        (tmp_path / str(seed) / "config.json").write_text(json.dumps(config))
    found = own_lines(own_runs([tmp_path]))
    assert list(found) == tasks
    assert [line.name for of_task in found.values() for line in of_task] == lines


@pytest.mark.parametrize(
    ("algo", "is_extendable"),
    [("sac", True), ("stream_ac", True), ("ppo", False), ("simba_v2", False), ("mine", False)],
)
def test_runs_of_two_lengths_are_one_if_one_can_become_the_other(algo: str, is_extendable: bool, tmp_path: Path):
    """The schedules of PPO and SimbaV2 depend on the length. That of an absent algorithm is unknown."""
    for seed, steps in ((1, 1000), (2, 2000)):
        add(folder := tmp_path / str(seed), algo, "Hopper-v4", seed, {0: (1.0,), 1000: (2.0,)})
        arguments = {"env": "Hopper-v4", "seed": seed, "total_steps": steps, "overlap": False}
        (folder / "config.json").write_text(json.dumps({"algo": algo, "arguments": arguments}))
    lines = own_lines(own_runs([tmp_path]))["Hopper-v4"]
    assert len(lines) == (1 if is_extendable else 2)
