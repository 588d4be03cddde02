"""bench/report/compare.py on made-up run folders: what it reads, which seeds it asks for, and when it stops."""

import gzip
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT
from filelock import FileLock
from stand_ins import HEADER, write_run
from test_runs_page import add

from bench.report import compare
from bench.report.compare import Args, Run, next_seeds, read_curve, until_decided
from bench.sweep import sweep
from common.command_line import parse
from common.errors import InputError, RunError

Score = Callable[[Run], float]


def simulated(folder: Path, asked: list[list[Run]], score: Score) -> Callable[[list[Run]], None]:
    """Makes the runs that are asked for, and notes them."""

    def run(runs: list[Run]) -> None:
        asked.append(runs)
        for name, task, seed in runs:
            value = score((name, task, seed))
            write_run(folder / name / task / str(seed), {0: [0.0], 1_000: [value - 1.0, value + 1.0]})

    return run


def drawn(means: dict[str, float]) -> Score:
    """Normal, with deviation 1, a function of the run."""
    return lambda run: means[run[0]] + np.random.default_rng([ord(run[0]), len(run[1]), run[2]]).normal()


def test_the_page_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str]):
    """The example of docs/many-runs.md, on the runs that are kept."""
    page = (ROOT / "docs" / "many-runs.md").read_text()
    words = page.split('(`ARGS="')[1].split('"`')[0].split()
    assert words[0] == "results"
    compare.main(parse(Args, [str(ROOT / "results"), *words[1:]]))
    said = capsys.readouterr()
    assert f"```\n{said.out}```" in page


def test_seeds_are_added_until_the_decision(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """c is decided at the second interim, the first at which three pairs can be; a and b, who are nearer, later."""
    asked: list[list[Run]] = []
    args = Args(tmp_path, names=("a", "b", "c"), tasks=("T",))
    end = until_decided(args, simulated(tmp_path, asked, drawn({"a": 51.0, "b": 50.0, "c": 0.0})))
    assert end.found.better == {("a", "b"): "a", ("a", "c"): "a", ("b", "c"): "b"}
    assert asked[0] == [(name, "T", seed) for seed in range(1, 6) for name in "abc"]
    assert asked[1] == [(name, "T", seed) for seed in range(6, 11) for name in "abc"]
    for i, runs in enumerate(asked[2:], 2):
        assert runs == [(name, "T", seed) for seed in range(5 * i + 1, 5 * i + 6) for name in "ab"]
    assert 2 < len(asked) == end.found.interims < 5
    said = capsys.readouterr().out
    assert f"T at step 1,000: {end.found.interims} of 5 interims" in said
    assert "a against b: undecided; mean not run and not run" in said.split("T at step 1,000")[0]
    assert "a against b: better; mean 5" in said
    assert "next: c on T, seeds 1 2 3 4 5\n" in said


def test_equal_ones_end_at_the_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    asked: list[list[Run]] = []
    end = until_decided(
        Args(tmp_path, names=("a", "b"), tasks=("T", "Task"), interims=3),
        simulated(tmp_path, asked, lambda run: float(run[2] % 3 + (run[0] == "b") * (run[2] % 2))),
    )
    assert (end.found.better, end.found.undecided) == ({}, [("a", "b")])
    assert sorted(itertools.chain(*asked)) == [
        (name, t, seed) for name in "ab" for t in ("T", "Task") for seed in range(1, 16)
    ]
    assert "equal within the limit: no difference shown by 15 seeds" in capsys.readouterr().out


def test_runs_that_are_there_are_used_and_others_are_asked_for(tmp_path: Path):
    for name in "ab":
        for seed in (0, 1, 2, 4, 5, 6, 7, 30):  # 3 is missing; 0 and 30 belong to no interim
            write_run(tmp_path / name / "T" / str(seed), {1_000: [float(seed)]})
    found = compare.compare(Args(tmp_path))  # names and tasks of the folder
    assert (found.names, found.tasks, found.found.interims) == (("a", "b"), ("T",), 0)
    assert next_seeds(found) == [("a", "T", 3), ("b", "T", 3)]
    (tmp_path / "a" / "T" / "5" / "checkpoint").mkdir()  # it is being trained
    assert next_seeds(compare.compare(Args(tmp_path))) == [("a", "T", 3), ("b", "T", 3), ("a", "T", 5)]
    (tmp_path / "a" / "T" / "5" / "DONE").touch()
    assert next_seeds(compare.compare(Args(tmp_path))) == next_seeds(found)


def test_a_step_that_no_run_of_a_name_reaches_is_told(tmp_path: Path):
    """The seeds are there, so it would be wrong to ask for them. A suite may make longer runs."""
    for name, end in (("a", 2_000), ("b", 1_000)):
        write_run(tmp_path / name / "T" / "1", {0: [0.0], end: [1.0]})
    for step, asked, name, there in (
        (1_500, "1,500", "b", 1_000),
        (None, "2,000", "b", 1_000),
        (9_000, "9,000", "a", 2_000),
    ):
        told = f"no run of {name} on T reaches step {asked}: give --step {there}, or train longer"
        with pytest.raises(InputError, match=told):
            compare.compare(Args(tmp_path, step=step))
    assert len(compare.compare(Args(tmp_path, step=1_000)).scores) == 2
    assert compare.compare(Args(tmp_path, suite="own", step=9_000)).scores == {}


def test_the_score_is_that_of_the_tables_or_the_mean_of_the_last_evaluations(tmp_path: Path):
    for name in "ab":
        write_run(tmp_path / name / "T" / "1", {0: [1.0, 3.0], 10: [4.0, 6.0], 20: [9.0], 30: [100.0]})
    write_run(tmp_path / "b" / "T" / "2", {0: [1.0], 10: [2.0]})
    for step, last, expected in (
        (None, 1, 100.0),
        (20, 1, 9.0),
        (25, 1, 54.5),
        (20, 2, 7.0),
        (25, 2, 7.0),
        (20, 3, 16 / 3),
    ):
        found = compare.compare(Args(tmp_path, step=step, last=last))
        assert found.scores == {("a", "T", 1): expected, ("b", "T", 1): expected}  # b's second did not get there
    assert compare.compare(Args(tmp_path, step=20, last=4)).scores == {}
    assert compare.compare(Args(tmp_path, step=10)).scores[("b", "T", 2)] == 2.0


def test_runs_that_end_later_by_their_number_of_environments(tmp_path: Path):
    """64 environments make 320 steps of 300, and are compared with one environment at 300."""
    for name, last in (("a", 320), ("b", 300), ("c", 320)):
        write_run(tmp_path / name / "T" / "1", {-10: [5.0], 0: [0.0], last: [float(last)]})
        config = {"algo": "sac", "arguments": {"total_steps": 300}}
        (tmp_path / name / "T" / "1" / "config.json").write_text(json.dumps(config))
    found = compare.compare(Args(tmp_path))
    assert found.steps == {"T": 300}
    assert set(found.scores.values()) == {300.0}
    assert compare.compare(Args(tmp_path, names=("a", "c"))).steps == {"T": 320}
    assert set(compare.compare(Args(tmp_path, step=-5)).scores.values()) == {2.5}  # of updates on a dataset


def test_all_against_one(tmp_path: Path):
    end = until_decided(
        Args(tmp_path, names=("a", "b", "c"), tasks=("T",), against="b"),
        simulated(tmp_path, [], drawn({"a": 9.0, "b": 0.0, "c": 9.0})),
    )
    assert (end.found.better, end.found.undecided) == ({("a", "b"): "a", ("b", "c"): "c"}, [])


def test_runs_that_end_elsewhere_are_not_asked_for_forever(tmp_path: Path):
    def run(runs: list[Run]) -> None:
        for name, task, seed in runs:
            write_run(tmp_path / name / task / str(seed), {1_000 if name == "a" else 500: [1.0]})

    with pytest.raises(RunError, match=r"b/T/1, b/T/2.*give --step"):
        until_decided(Args(tmp_path, names=("a", "b"), tasks=("T",), suite="own"), run)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"names": ("a",)}, r"two or more different --names: you gave a$"),
        ({"names": ("a", "a")}, r"two or more different --names: you gave a, a$"),
        ({"against": "d"}, "--against is d: give one of a, b"),
        ({"folder": Path("nowhere")}, r"nowhere holds no run, .*--suite"),
        ({"folder": Path("nowhere"), "names": ("a", "b")}, r"nowhere holds no run, .*--suite"),
        ({"names": ("a", "d")}, "no task that a, d all have"),
        ({"column": "success"}, "does not give success as numbers"),
        ({"alpha": 1.5}, "^--alpha is 1.5: give a number between 0 and 1$"),
        ({"seeds": 0}, "^--seeds is 0: give a number of 1 or more$"),
        (
            {"seeds": 1, "interims": 2},
            r"^whatever the scores, --seeds 1 .*can decide none of 1 pairs: give more --seeds",
        ),
    ],
)
def test_bad_input(tmp_path: Path, changed: dict[str, object], named: str):
    for name in "ab":
        write_run(tmp_path / name / "T" / "1", {0: [1.0]})
    with pytest.raises(InputError, match=named):
        compare.compare(Args(**({"folder": tmp_path} | changed)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"tasks": ("Hoper-v4",)}, r"has no run of Hoper-v4, which --tasks names: did you mean Hopper-v4\?"),
        (
            {"tasks": ("Ant-v4",)},
            r"no run of Ant-v4, which --tasks names: there are Hopper-v4\nto run a new one, add it to ",
        ),
        ({"names": ("sac", "td")}, r"has no run of td, which --names names: did you mean td3\?"),
    ],
)
@pytest.mark.parametrize("suite", [False, True])
def test_a_typing_error_is_no_new_task(tmp_path: Path, arguments: dict[str, object], named: str, suite: bool):
    """It is refused with what is there, in a folder of runs and in a suite; nothing is run."""
    path = tmp_path / "mine.toml"
    path.write_text('[[runs]]\nalgo = ["sac", "td3"]\nenvs = "Hopper-v4"\n')
    for name in ("sac", "td3"):
        write_run(tmp_path / "runs" / name / "Hopper-v4" / "1", {0: [1.0]})
    with pytest.raises(InputError, match=named):
        compare.main(Args(tmp_path / "runs", str(path) if suite else None, **arguments))  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [{}, {"names": ("sac", "td3")}, {"names": ("sac", "td3"), "tasks": ("Hoper-v4",)}])
@pytest.mark.parametrize("folder", ["nowhere", "empty"])
def test_a_folder_without_runs_is_named(tmp_path: Path, given: dict[str, Any], folder: str):
    """Whatever else is given, no comparison begins in a folder that holds no run."""
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=rf"{folder} holds no run, .*: give the folder of a sweep's suite, or the --s"):
        compare.main(Args(tmp_path / folder, **given))


def test_a_single_name_is_traced_to_where_it_is(tmp_path: Path):
    """The folder's or the suite's is not called the user's; in a suite no message advises --suite."""
    write_run(tmp_path / "sac" / "Hopper-v4" / "1", {0: [1.0]})
    path = tmp_path / "mine.toml"
    path.write_text('[[runs]]\nalgo = "sac"\nenvs = "Hopper-v4"\n')
    for suite, where in ((None, str(tmp_path)), (str(path), "suite mine")):
        with pytest.raises(InputError, match=f"different --names: {where} has only sac$"):
            compare.main(Args(tmp_path, suite))
    with pytest.raises(InputError, match=r"there are Hopper-v4\nto run a new one, add it to that suite$"):
        compare.main(Args(tmp_path, str(path), tasks=("Ant-v4",)))


def test_a_suite_without_a_common_task_is_refused(tmp_path: Path):
    """With the suite, not the empty folder that its runs would go to."""
    path = tmp_path / "mine.toml"
    runs = ('algo = "sac"\nenvs = "Hopper-v4"\n', 'algo = "td3"\nenvs = "Ant-v4"\n')
    path.write_text("".join(f"[[runs]]\n{each}" for each in runs))
    with pytest.raises(InputError, match="suite mine has no task that sac, td3 all have: give other --names, or"):
        compare.main(Args(tmp_path, str(path)))


def test_a_design_without_seeds_is_refused_before_its_runs():
    with pytest.raises(InputError, match=r"^--seeds is 0: give a number of 1 or more$"):
        compare.main(Args(suite="smoke", seeds=0))


def test_a_suite_runs_only_what_it_has(tmp_path: Path):
    """A name and a task that it has, but not together."""
    path = tmp_path / "mine.toml"
    runs = ('algo = "sac"\nenvs = "Hopper-v4"\n', 'algo = "td3"\nenvs = ["Ant-v4", "Hopper-v4"]\n')
    path.write_text("".join(f"[[runs]]\n{each}" for each in runs))
    with pytest.raises(InputError, match="suite mine does not run sac on Ant-v4: give other --names or --tasks"):
        compare.main(Args(tmp_path, str(path), tasks=("Ant-v4", "Hopper-v4")))


@pytest.mark.parametrize("text", ["", HEADER, HEADER + "0,0,nan,1,,\n", HEADER + "0,0,one,1,,\n", "step\n3\n"])
def test_damaged_evaluations(tmp_path: Path, text: str):
    (tmp_path / "evaluations.csv").write_text(text)
    with pytest.raises(InputError, match=r"evaluations\.csv .*(try another --column|move that run's folder away)"):
        read_curve(tmp_path / "evaluations.csv", "return")


def test_runs_as_they_are_kept(tmp_path: Path):
    for name in "ab":
        write_run(tmp_path / name / "T" / "1", {0: [1.0], 10: [4.0, 6.0]})
        path = tmp_path / name / "T" / "1" / "evaluations.csv"
        path.with_suffix(".csv.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    assert compare.compare(Args(tmp_path)).scores == {("a", "T", 1): 5.0, ("b", "T", 1): 5.0}
    whole = path.with_suffix(".csv.gz").read_bytes()
    for damaged in (whole[:30], b"text", whole[:15] + b"xxxx" + whole[19:]):
        path.with_suffix(".csv.gz").write_bytes(damaged)
        with pytest.raises(InputError, match=r"evaluations\.csv\.gz"):
            compare.compare(Args(tmp_path))


def test_single_runs_are_found_by_their_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Their folders may have any name. A deeper folder of a sweep is not read, nor an unfinished run."""
    for seed in (1, 2, 3):
        add(tmp_path / f"sac__Hopper-v4__{seed}", "sac", "Hopper-v4", seed, {0: (0.0,), 1000: (10.0 * seed,)})
        add(tmp_path / f"mine-{seed}", "td3", "Hopper-v4", seed, {0: (0.0,), 1000: (1.0 * seed,)})
    add(tmp_path / "smoke" / "sac" / "Hopper-v4" / "1", "sac", "Hopper-v4", 1, {0: (0.0,), 1000: (7.0,)})
    (tmp_path / "mine-3" / "checkpoint").mkdir()
    (tmp_path / "mine-3" / "DONE").unlink(missing_ok=True)
    compare.main(Args(tmp_path, names=("sac", "td3"), tasks=("Hopper-v4",)))
    assert "sac against td3: undecided; mean 20.0 (3 runs) and 1.5 (2 runs)\n" in capsys.readouterr().out
    assert compare.runs_in(tmp_path) == [("sac", "Hopper-v4"), ("td3", "Hopper-v4")]


def test_means_are_those_of_each_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A mean over both tasks would put b first here, because b has more runs where returns are large."""
    for name, counts, means in (("a", (10, 5), (11.0, 1_010.0)), ("b", (5, 10), (10.0, 1_000.0))):
        for task, count, mean in zip("ST", counts, means, strict=True):
            for seed in range(1, count + 1):
                write_run(tmp_path / name / task / str(seed), {0: [0.0], 1_000: [mean + 0.01 * seed]})
    compare.main(Args(tmp_path, names=("a", "b")))
    said = capsys.readouterr().out
    assert "a against b: better; mean on S 11.1 (10 runs) and 10.0 (5 runs)" in said
    assert "; mean on T 1,010.0 (5 runs) and 1,000.1 (10 runs)\n" in said


def test_single_runs_with_other_flags_have_another_name(tmp_path: Path):
    """Two runs with the same flags and seed are refused, because only one could count."""
    for gamma in (0.9, 0.99):
        add(folder := tmp_path / f"sac-{gamma}", "sac", "Hopper-v4", 1, {1000: (10.0 * gamma,)})
        config = json.loads((folder / "config.json").read_text())
        config["arguments"]["gamma"] = gamma
        (folder / "config.json").write_text(json.dumps(config))
    found = compare.compare(Args(tmp_path))
    assert found.scores == {("sac, gamma 0.9", "Hopper-v4", 1): 9.0, ("sac, gamma 0.99", "Hopper-v4", 1): 9.9}
    config["arguments"]["gamma"] = 0.9
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        InputError, match=r"sac-0\.9 and .*sac-0\.99 have the same flags and seed: move one of them away"
    ):
        compare.compare(Args(tmp_path))


def test_a_suite_is_run_until_the_decision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The suite's own jobs of the seeds that are needed, with its flags, into its folders; its seeds do not matter."""
    suite = tmp_path / "mine.toml"
    suite.write_text(
        '[[runs]]\nalgo = ["sac", "td3"]\nenvs = ["Pendulum-v1"]\nseeds = 2\nflags = "--total-steps 3000"\n'
    )
    lines: list[str] = []

    def execute(running: object, args: object) -> None:
        for job in running.waiting:  # type: ignore[attr-defined]
            lines.append(" ".join(job.argv))
            write_run(job.folder, {3_000: [job.seed + 100.0 * ("sac" in job.folder.parts)]})

    monkeypatch.setattr(sweep, "execute", execute)
    compare.main(Args(tmp_path / "runs", suite=str(suite)))
    assert len(lines) == 10
    assert all("--env Pendulum-v1" in line and "--total-steps 3000" in line for line in lines)
    assert (tmp_path / "runs" / "mine" / "td3" / "Pendulum-v1" / "5" / "evaluations.csv").exists()
    with pytest.raises(InputError, match="suite mine has no run of ppo, which --names names"):
        compare.main(Args(tmp_path / "runs", suite=str(suite), names=("sac", "ppo"), tasks=("Pendulum-v1",)))


@pytest.mark.parametrize(
    "name", ["evaluations.csv.part", "evaluations.csv.bak", "evaluations.csv2", "evaluations.csv.zip"]
)
def test_other_files_next_to_the_evaluations_are_no_evaluations(name: str, tmp_path: Path):
    for run in "ab":
        write_run(tmp_path / run / "T" / "1", {0: [1.0], 10: [5.0]})
        (tmp_path / run / "T" / "1" / name).write_text(HEADER + "20,0,-99.0,1,,\n")
    write_run(tmp_path / "c" / "T" / "1", {0: [1.0]})
    (tmp_path / "c" / "T" / "1" / "evaluations.csv").rename(tmp_path / "c" / "T" / "1" / name)
    found = compare.compare(Args(tmp_path))
    assert found.names == ("a", "b")
    assert found.scores == {("a", "T", 1): 5.0, ("b", "T", 1): 5.0}


def test_a_suite_that_another_command_runs_is_left_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    suite = tmp_path / "mine.toml"
    suite.write_text('[[runs]]\nalgo = ["sac", "td3"]\nenvs = "Pendulum-v1"\nseeds = 2\n')
    monkeypatch.setattr(sweep, "execute", None)
    (folder := tmp_path / "runs" / "mine").mkdir(parents=True)
    with FileLock(folder / ".lock"), pytest.raises(InputError, match=f"another sweep is running in {folder}: wait"):
        compare.main(Args(tmp_path / "runs", suite=str(suite)))
