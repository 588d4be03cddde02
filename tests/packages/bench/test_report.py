"""The README's tables come from the raw data, and are what the data says."""

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT

from bench.pages.code_links import with_links
from bench.report import aggregates, curves, offline_report, report
from bench.report.archive_run import Args, keep, kept_runs, main, time_taken
from bench.speed.interleaved_timing import Slice, write_rounds
from common.command_line import command_line
from common.errors import InputError


@pytest.mark.parametrize("page", report.pages(), ids=lambda page: page.name)
def test_pages_are_what_results_and_code_say(page: Path):
    """Fails on a figure or line number changed by hand, and on data or code that came without `make report`."""
    assert report.remade(page) == page.read_text()


@pytest.mark.parametrize("name", ["Run", "Run.steps", "COUNT", "Run.size"])
def test_links_to_code_get_the_line_of_the_definition(name: str, tmp_path: Path):
    lines = {"COUNT": 3, "Run": 6, "Run.size": 7, "Run.steps": 9}
    (tmp_path / "mine.py").write_text(
        "import os\n\nCOUNT: int = 3\n\n\nclass Run:\n    size = 1\n\n    def steps(self):\n        pass\n"
    )
    text = f"See [`{name}`](mine.py#L77) and [`{name}`](mine.py)."
    assert with_links(text, tmp_path) == f"See [`{name}`](mine.py#L{lines[name]}) and [`{name}`](mine.py)."


@pytest.mark.parametrize(("name", "file"), [("Run", "gone.py"), ("Gone", "mine.py"), ("Run.gone", "mine.py")])
def test_a_link_to_code_that_is_gone_is_refused(name: str, file: str, tmp_path: Path):
    (tmp_path / "mine.py").write_text("class Run:\n    pass\n")
    with pytest.raises(InputError, match="a page links to"):
        with_links(f"[`{name}`]({file}#L1)", tmp_path)


def test_archive_run_without_arguments_prints_its_usage():
    """What is missing, and an example."""
    line = [sys.executable, str(ROOT / "bench" / "report" / "archive_run.py")]
    result = subprocess.run(line, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) <= 2
    for said in (
        "archive_run.py: give RUN (Run folder",
        ") and KEPT (Folder",
        "\nfor example: python bench/report/archive_run.py runs/",
        "--help",
    ):
        assert said in result.stderr


def test_archive_run_refuses_what_is_no_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """For a folder that is no run it says what a run has."""
    monkeypatch.setattr(sys, "argv", ["archive_run.py", "nowhere", "kept"])
    with pytest.raises(SystemExit, match="2"):
        command_line(main, Args)
    assert capsys.readouterr().err == (
        "archive_run.py: nowhere has no config.json: give a run folder, then the folder to keep it in\n"
    )


def test_interpolation():
    curve = {0: 1.0, 10: 5.0, 40: -1.0}
    for step in (0, 3, 10, 25, 40):
        assert curves.at(curve, step) == pytest.approx(np.interp(step, list(curve), list(curve.values())))
    assert curves.at(curve, 41) is None


def test_only_steps_that_all_seeds_have_are_put_together():
    steps, values = curves.aligned({"1": {0: 1.0, 5: 2.0, 10: 3.0}, "2": {5: 5.0, 0: 4.0, 7: 9.0}})
    assert steps == [0, 5]
    assert values.tolist() == [[1.0, 2.0], [4.0, 5.0]]
    assert curves.aligned({"1": {0: 1.0, 5: 2.0}}, 4)[0] == [0]


def test_spread_counts_the_seeds_that_got_there():
    seeds = {"1": {0: 0.0, 10: 10.0}, "2": {0: 0.0, 10: 20.0, 20: 7.0}}
    assert aggregates.spread_at(seeds, 10) == "15 ± 7 (2)"
    assert aggregates.spread_at(seeds, 20) == "7 (1)"
    assert aggregates.spread_at(seeds, 30) == "not run"


def test_interquartile_mean_needs_four_seeds_that_got_there():
    seeds = {str(i): {0: 0.0, 10: 3.0} for i in range(4)}
    assert aggregates.interquartile(seeds, 10) == "3 (3 to 3)"
    seeds["3"] = {0: 0.0, 9: 3.0}
    assert aggregates.interquartile(seeds, 10) == ""


def test_speed_table_is_of_medians_and_of_ratios_within_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "speed").mkdir()
    rows = ["round,contender,steps,seconds,steps_per_second,cores,cores_of_others"]
    for i, factor in enumerate([1.0, 0.5, 2.0]):  # the machine drifts; within a round the ratios stay
        rates = {"ours": 150, "sb3": 100, "sbx": 120, "floor": 300}
        rows += [f"{i},{name},1,1,{rate * factor},1,0" for name, rate in rates.items()]
    facts = [
        "# algorithm: sac on X",
        "# our update alone in ms: 5.0",
        "# processor: Intel(R) Xeon(R) Processor, 2 cores",
        "# instructions: fma avx avx2",
    ]
    (tmp_path / "speed" / "a.csv").write_text("\n".join(facts + rows))
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    assert report.speed_table().markdown().splitlines()[2:] == [
        "| sac on X | Intel Xeon without AVX-512 | 150 | 100 | 120 | 1.50 | 1.25 | 1.50 |"
    ]
    assert report.speed_beside("d3rlpy").rows == []


@pytest.mark.parametrize(("floor", "shown"), [({"floor": 60}, "2.00"), ({}, "-")])
def test_each_other_peer_has_a_table_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, floor: dict[str, float], shown: str
):
    rounds = [Slice(i, name, n * i, float(i), 2.0, 0.0)
              for name, n in ({"ours": 30, "d3rlpy": 20} | floor).items() for i in (1, 2, 3)]  # fmt: skip
    write_rounds(
        tmp_path / "speed" / "a.csv",
        {"algorithm": "cql on D", "processor": "AMD EPYC, 2 cores", "form": "recorded"},
        rounds,
    )
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    [row] = report.speed_beside("d3rlpy").markdown().splitlines()[2:]
    assert row == f"| cql on D | AMD EPYC, recorded | 30.0 | 20.0 | 1.50 | {shown} |"
    assert report.speed_beside("loop").rows == []
    assert report.speed_table().rows == []


def test_an_interrupted_measurement_and_one_of_a_gpu_have_dashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The first has no time of the update alone. The second has no SBX and no floor, and README leaves it out."""
    facts = {"algorithm": "sac on X", "processor": "AMD EPYC, 2 cores", "form": "recorded"}
    for name, rates, device in (
        ("sac-2", {"ours": 30, "sb3": 20, "sbx": 10, "floor": 60}, "the processor"),
        ("sac-1", {"ours": 30, "sb3": 10}, "NVIDIA H200, 570.1, 143771 MiB"),
    ):
        rounds = [Slice(1, contender, rate, 1.0, 2.0, 0.0) for contender, rate in rates.items()]
        write_rounds(tmp_path / "speed" / f"{name}.csv", facts | {"device": device}, rounds)
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    assert report.speed_of("sac") == ""  # of twenty rounds only
    assert report.speed_table().markdown().splitlines()[2:] == [
        "| sac on X | NVIDIA H200, AMD EPYC, recorded | 30 | 10 | - | 3.00 | - | - |",
        "| sac on X | AMD EPYC, recorded | 30 | 20 | 10 | 1.50 | 3.00 | - |",
    ]


def test_readmes_speed_is_of_its_processor_and_of_all_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Another measurement of the same algorithm does not replace it by its name."""
    for name, processor, ours, rounds in (
        ("sac-a", "AMD EPYC", 60, 20),
        ("sac-b", "Intel Xeon", 70, 19),
        ("sac-c", "Intel Xeon", 30, 20),
        ("sac-d", "Intel Xeon", 80, 20),
        ("td3-a", "AMD EPYC", 90, 20),
    ):
        facts = {"algorithm": "sac on X", "processor": processor, "device": "the processor", "form": "recorded"}
        found = [Slice(i, who, rate, 1.0, 2.0, 0.0) for who, rate in (("ours", ours), ("sb3", 20), ("sbx", 10))
                 for i in range(rounds)]  # fmt: skip
        write_rounds(tmp_path / "speed" / f"{name}.csv", facts, found)
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    assert report.speed_of("sac") == "1.50 × SB3 (1.50 to 1.50)"
    assert report.speed_of("td3") == "4.50 × SB3 (4.50 to 4.50)"  # there is no other
    assert report.speed_of("ppo") == ""


def test_packed_runs_on_a_gpu_have_the_same_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Their single run has another name than that of the CPU."""
    for name in ("one run", "one run of all threads"):
        rounds = [Slice(1, contender, rate, 1.0, 2.0, 0.0) for contender, rate in (("ours", 30), (name, 20))]
        write_rounds(tmp_path / "speed" / f"{name}.csv", {"algorithm": name, "processor": "AMD EPYC"}, rounds)
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    table = report.TABLES["docs/sweeps.md"]["packing"]()
    assert [row[0] for row in table.rows] == ["one run", "one run of all threads"]
    assert {row[4] for row in table.rows} == {"1.50"}


class TestFromDatasets:
    """Tables of bench/report/offline_report.py, of runs made up here: returns of Hopper-v4, whose scores are known."""

    LOW, HIGH = -20.272305, 3234.3  # D4RL's: what scores 0 and 100

    @pytest.fixture
    def results(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
        monkeypatch.setattr(curves, "RESULTS", tmp_path)
        (tmp_path / "datasets").mkdir()
        for name in ("a", "b"):
            facts = {"environment": "Hopper-v4", "score": 31.0}
            (tmp_path / "datasets" / f"{name}.json").write_text(json.dumps(facts))

        def add(
            folder: str, algo: str, dataset: str, seed: int, env: str = "Hopper-v4", seconds: int = 0, **scores: float
        ) -> None:
            """Two episodes an evaluation, 10 points below and above; s5=30.0 is score 30 at step 5, m5 at step -5; all
            took so many seconds.
            """
            path = tmp_path / folder / algo / dataset / str(seed) / "evaluations.csv"
            path.parent.mkdir(parents=True)
            (path.parent / "config.json").write_text(
                json.dumps({"algo": algo, "arguments": {"env": env, "offline_steps": 100_000}})
            )
            if seconds:  # its log: a third of the time for the first thousand steps, the rest for the second
                log = f"-99000,time/steps_per_second,{3_000 / seconds}\n-98000,time/steps_per_second,{1_500 / seconds}"
                (path.parent / "metrics.csv").write_text(f"step,name,value\n{log}\n")
            lines = ["step,episode,return,length,success,normalized_score"]
            for key, score in scores.items():
                step = int(key[1:]) * (-1 if key[0] == "m" else 1)
                for i, of in enumerate((score - 10, score + 10)):
                    solved = "" if env == "Hopper-v4" else int(of > 50)
                    scored = "" if env else of
                    lines.append(f"{step},{i},{self.LOW + of / 100 * (self.HIGH - self.LOW)},1000,{solved},{scored}")
            path.write_text("\n".join(lines) + "\n")
            (path.parent / "DONE").touch()
            keep(path.parent, path.parent)

        return add

    def test_offline_scores_are_those_after_so_many_updates(self, results: Callable[..., None]):
        results("offline", "iql", "a", 1, m80000=70.0, s0=40.0)
        results("offline", "iql", "a", 2, s0=60.0)
        results("offline", "iql", "a", 3, m5=99.0)  # not there yet
        results("offline", "d3rlpy-iql", "a", 1, s0=30.0)
        results("offline", "iql", "others", 1, s0=70.0)
        early, late, *others = offline_report.offline_table().rows
        assert others[1][:3] == ["others", "100,000", ""]  # of no known behaviour
        assert early[:3] == ["a", "20,000", "31.0"]
        assert late[:3] == ["a", "100,000", "31.0"]
        column = {name: 3 + i for i, name in enumerate(offline_report.ALGORITHMS)}
        assert early[column["iql"]] == "70.0 (1)"
        assert late[column["iql"]] == "50.0 ± 14.1 (2)"
        assert late[column["d3rlpy-iql"]] == "30.0 (1)"
        assert (early[column["d3rlpy-iql"]], late[column["bc"]]) == ("not run", "not run")

    def test_a_suite_by_updates(self, results: Callable[..., None]):
        """In the suite's order; an evaluation that only some seeds reached has their number."""
        results("ogbench", "fql", "task", 1, m80000=10.0, m60000=20.0, m40000=30.0, m20000=40.0, s0=50.0)
        results("ogbench", "fql", "task", 2, m80000=20.0)
        results("ogbench", "bc", "task", 1, s0=5.0)
        bc, fql = offline_report.updates_table("ogbench").rows
        assert bc == ["task", "BC", *4 * ["not run"], "5.0 (1)"]
        assert fql == ["task", "FQL", "15.0 ± 7.1 (2)", "20.0 (1)", "30.0 (1)", "40.0 (1)", "50.0 (1)"]
        results("weighting", "iql-return", "mixture", 1, m80000=1.0, s0=2.0)
        (weighted,) = offline_report.updates_table("weighting").rows
        assert weighted == ["mixture", "IQL, by return", "1.0 (1)", *3 * ["not run"], "2.0 (1)"]

    def test_both_are_compared_on_what_both_ran(self, results: Callable[..., None]):
        for seed, score in ((1, 40.0), (2, 50.0), (3, 90.0)):
            results("offline", "iql", "a", seed, m100000=99.0, m5=score - 10, s0=score)
        results("offline", "iql", "b", 1, s0=99.0)
        for seed, score in ((1, 20.0), (2, 30.0)):
            before = {f"m{5 * n}": score - 10 * n for n in range(5)}
            results("offline", "d3rlpy-iql", "a", seed, **before, m40=1e6)
        early, late, cql, _ = offline_report.d3rlpy_table().markdown().splitlines()[2:]
        assert late == "| IQL | 100,000 | 1, 2 | 45.0 | 25.0 | 40.0 | 5.0 |"
        assert early == "| IQL | 20,000 | not run | | | | |"
        assert cql == "| CQL | 20,000 | not run | | | | |"

    def test_online_scores_and_regret(self, results: Callable[..., None]):
        results("online", "cql-mix", "a", 1, s0=20.0, s1=10.0, s5=40.0, s10=70.0)
        results("online", "cql-mix", "a", 2, s0=30.0, s1=30.0, s5=30.0, s10=30.0, s20=90.0)
        row = offline_report.online_table().markdown().splitlines()[2]
        assert row == "| cql-mix, a | 10 | 25.0 ± 7.1 (2) | 50.0 ± 28.3 (2) | 0.65 |"

    def test_wsrl_beside_its_variants(self, results: Callable[..., None]):
        """At the switch, the lowest and the mean until where the shortest run ends, and there; solved episodes in per
        cent where returns have no scale; how long it took, a longer run its share; then the variants that have run
        everywhere.
        """
        results("wsrl", "wsrl", "a", 1, seconds=60, s0=30.0, s5000=10.0, s10000=25.0, s20000=40.0, s25000=5.0, s40000=8)
        results("wsrl", "wsrl", "a", 2, seconds=120, s0=50.0, s10000=20.0, s20000=60.0, s40000=90.0, s60000=0.0)
        results("wsrl", "mix", "a", 1, s0=30.0, s10000=40.0, s20000=50.0, s40000=60.0)
        results("wsrl", "wsrl", "pen", 1, env="unheard-of-v0", s0=50.0, s20000=90.0)
        results("wsrl", "wsrl", "scored", 1, env="", s0=50.0, s20000=90.0)  # its environment came with the dataset
        results("wsrl", "mix", "scored", 1, env="", s0=50.0, s20000=80.0)
        assert offline_report.wsrl_table().markdown().splitlines()[2:] == [
            "| a, 40,000 steps | WSRL | 40.0 ± 14.1 (2) | 12.5 ± 10.6 (2) | 37.1 ± 27.6 (2) | 49.0 ± 58.0 (2) | 1.2 |",
            "| a, 40,000 steps | data retained | 30.0 (1) | 40.0 (1) | 50.0 (1) | 60.0 (1) | |",
            "| pen, 20,000 steps | WSRL | 50.0 (1) | 100.0 (1) | 100.0 (1) | 100.0 (1) | |",
            "| scored, 20,000 steps | WSRL | 50.0 (1) | 90.0 (1) | 90.0 (1) | 90.0 (1) | |",
            "| scored, 20,000 steps | data retained | 50.0 (1) | 80.0 (1) | 80.0 (1) | 80.0 (1) | |",
        ]
        results("wsrl", "mix", "pen", 1, env="unheard-of-v0", s0=50.0, s20000=90.0)
        assert "interquartile" not in offline_report.wsrl_table().markdown()  # WSRL alone has every seed of "a"
        results("wsrl", "mix", "a", 2, s0=30.0, s10000=40.0, s20000=50.0, s40000=60.0)
        assert offline_report.wsrl_table().markdown().splitlines()[-2:] == [
            "| interquartile mean | WSRL | 50.0 | 55.0 | 73.3 | 90.0 | |",
            "| interquartile mean | data retained | 40.0 | 60.0 | 65.0 | 70.0 | |",
        ]

    def test_minutes_of_both_phases(self, results: Callable[..., None]):
        """The run took a minute for 100 updates and 100 steps; another began at the switch."""
        results("steering", "pa_rl", "a", 1, seconds=60, m100=0.0, s0=1.0, s100=2.0)
        results("steering", "dsrl", "a", 1, seconds=60, s0=1.0, s100=2.0)
        rows = offline_report.switch_table("steering").rows
        assert [row[-1] for row in rows] == ["1.0", "1.0 with 100 offline updates"]

    def test_expo_beside_its_ablations(self, results: Callable[..., None]):
        """At the switch, half way and at the end of the shortest run; of a task without an end the share of its steps
        that is solved; then by seed how far above the others.
        """
        assert "not run" in offline_report.switch_table("expo").markdown()
        assert "not run" in offline_report.expo_differences().markdown()
        results("expo", "rlpd", "a", 1, s0=1.0, s5=10.0, s10=30.0)
        results("expo", "expo", "a", 1, s0=0.0, s4=20.0, s6=40.0, s10=60.0, s20=99.0)  # none at 5
        assert offline_report.switch_table("expo").markdown().splitlines()[2:] == [
            "| a, 10 steps | EXPO | 0.0 (1) | 20.0 (1) | 60.0 (1) | 40.0 (1) | |",
            "| a, 10 steps | RLPD | 1.0 (1) | 10.0 (1) | 30.0 (1) | 20.0 (1) | |",
        ]
        assert offline_report.expo_differences().markdown().splitlines()[2:] == [
            "| a, 10 steps | RLPD | 1 | 30.0 | 20.0 |"
        ]
        assert "not run" in offline_report.switch_table("expo", curves.successes).markdown()  # Hopper has none
        assert "not run" in offline_report.expo_differences(curves.successes).markdown()
        results("expo", "base", "a", 2, s0=0.0, s10=10.0)  # has no run of EXPO's with its seed
        assert "base" not in offline_report.expo_differences().markdown()
        results("expo", "expo", "a", 2, s0=0.0, s10=16.0)
        results("expo", "rlpd", "a", 2, s0=0.0, s10=6.0)
        results("expo", "rlpd", "a", 3, s0=0.0, s10=6.0)
        assert offline_report.expo_differences().markdown().splitlines()[2:] == [
            "| a, 10 steps | base policy alone | 1 | 6.0 | 6.0 |",
            "| a, 10 steps | RLPD | 2 | 20.0 | 15.0 |",
        ]
        results("expo", "expo", "a", 3, s0=0.0, s10=26.0)
        last = offline_report.expo_differences().markdown().splitlines()[-1]
        # Of 30, 10, 20 and of 20, 10, 20: 4.303 / √3 standard deviations, which are 10 and 5.774.
        assert last == "| a, 10 steps | RLPD | 3 | 20.0 (-4.8 to 44.8) | 16.7 (2.3 to 31.0) |"

    def test_successes_of_expo_are_episodes(self, results: Callable[..., None]):
        """Two an evaluation, of scores 10 above and below; above 50 is success, whatever the score."""
        results("expo", "expo", "maze", 1, env="unheard-of-v0", s0=0.0, s5=55.0, s10=70.0)
        results("expo", "rlpd", "maze", 1, env="unheard-of-v0", s0=99.0, s5=0.0, s10=50.0)
        assert offline_report.switch_table("expo", curves.successes).markdown().splitlines()[2:] == [
            "| maze, 10 steps | EXPO | 0.0 (1) | 50.0 (1) | 100.0 (1) | 75.0 (1) | |",
            "| maze, 10 steps | RLPD | 100.0 (1) | 0.0 (1) | 50.0 (1) | 25.0 (1) | |",
        ]
        differences = offline_report.expo_differences(curves.successes).markdown().splitlines()[2:]
        assert differences == ["| maze, 10 steps | RLPD | 1 | 50.0 | 50.0 |"]

    def test_rlpd_beside_its_earlier_runs(self, results: Callable[..., None]):
        """At the last step that the runs of the shared seeds all reached."""
        results("expo", "rlpd", "a", 1, s0=0.0, s10=30.0)
        assert "not run" in offline_report.rlpd_table().markdown()
        results("ablations", "rlpd-by-wsrl", "a", 1, s0=0.0, s10=10.0, s20=90.0)
        results("ablations", "rlpd-by-wsrl", "a", 2, s0=0.0, s5=1.0)  # a seed that the other does not have
        results("expo", "base", "a", 1, s0=0.0, s10=30.0)
        row = "| a, 10 steps | 30.0 (1) | 10.0 (1) | 20.0 | 20.0 |"
        assert offline_report.rlpd_table().markdown().splitlines()[2:] == [row]


def test_what_is_kept_of_a_run_names_no_folder_of_this_machine(tmp_path: Path):
    (tmp_path / "run").mkdir()
    arguments = {
        "dataset": "/somewhere/data/a.hdf5",
        "run_dir": str(tmp_path),
        "init_from": "/runs/b/a/1",
        "gamma": 0.9,
    }
    (tmp_path / "run" / "config.json").write_text(json.dumps({"algo": "iql", "arguments": arguments, "commit": "c"}))
    (tmp_path / "run" / "evaluations.csv").write_text("step,return\n0,1.5\n")
    (tmp_path / "run" / "DONE").touch()
    keep(tmp_path / "run", tmp_path / "iql" / "a" / "1")
    (run,) = kept_runs(tmp_path)
    assert run == (
        "iql", "a", "1",
        {"algo": "iql", "arguments": {"dataset": "a.hdf5", "init_from": "b/a/1", "gamma": 0.9}, "commit": "c"},
        [{"step": "0", "return": "1.5"}],
    )  # fmt: skip


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_a_run_that_has_not_ended_is_not_kept(tmp_path: Path, has_checkpoint: bool):
    """The report would compare all other runs at its last step. The first checkpoint may come after evaluations."""
    if has_checkpoint:
        (tmp_path / "checkpoint").mkdir()
    (tmp_path / "config.json").write_text('{"algo": "iql", "arguments": {}}')
    (tmp_path / "evaluations.csv").write_text("step,return\n0,1.5\n")
    with pytest.raises(InputError, match=r"has not ended: resume it first$"):
        keep(tmp_path, tmp_path / "kept")
    assert not (tmp_path / "kept").exists()
    (tmp_path / "DONE").touch()
    keep(tmp_path, tmp_path / "kept")
    assert len(list((tmp_path / "kept").iterdir())) == 2


@pytest.mark.parametrize("text", ["{}", "[]", "{", '{"arguments": []}', '{"arguments": {"dataset": 3}}'])
def test_a_config_that_is_no_runs_is_not_kept(tmp_path: Path, text: str):
    """It is refused in words, and nothing is written."""
    (tmp_path / "config.json").write_text(text)
    (tmp_path / "evaluations.csv").write_text("step,return\n0,1.5\n")
    with pytest.raises(InputError, match=r"config\.json does not hold a run's arguments: give a run folder"):
        main(Args(tmp_path, tmp_path / "kept"))
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize("rows", ["0,0,1.5\n9,0,12", "0,0,1.5\n9,0\n", "0,0,1.5\n9,0,1.5,\n"])
def test_an_incomplete_row_is_not_kept(tmp_path: Path, rows: str):
    """A power cut may have torn the last number, which would be another one."""
    (tmp_path / "config.json").write_text('{"algo": "iql", "arguments": {}}')
    (tmp_path / "evaluations.csv").write_text(f"step,episode,return\n{rows}")
    with pytest.raises(InputError, match=r"evaluations\.csv has an incomplete row: resume the run"):
        keep(tmp_path, tmp_path / "kept")
    assert not (tmp_path / "kept").exists()


def test_what_was_not_kept_is_refused_and_can_be_kept_where_it_is(tmp_path: Path):
    folder = tmp_path / "iql" / "a" / "1"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"algo": "iql", "arguments": {}}')
    (folder / "evaluations.csv").write_text("step,return\n0,1.5\n")
    (folder / "metrics.csv").write_text("step,name,value\n")
    with pytest.raises(InputError, match="has no evaluations"):
        list(kept_runs(tmp_path))
    with pytest.raises(InputError, match="has not ended"):
        keep(folder, folder)
    (folder / "DONE").touch()  # its checksums would no longer be right
    (folder / "checkpoint").mkdir()
    with pytest.raises(InputError, match="still has its checkpoint: keep the run in another folder"):
        keep(folder, folder)
    for name in ("checkpoint", "metrics.csv"):
        path = folder / name
        path.rmdir() if path.is_dir() else path.unlink()
    keep(folder, folder)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "evaluations.csv.gz"]
    first = (folder / "evaluations.csv.gz").read_bytes()
    assert gzip.decompress(first) == b"step,return\n0,1.5\n"
    assert first[4:8] == bytes(4)  # no time of writing (RFC 1952): the same rows are the same bytes


@pytest.mark.parametrize(
    "text", ["a,b\n1,2\n", "step,name,value\n1,time/steps_per_second,0\n", "step,name,value\n1,time/steps_per_second\n",
             "step,name,value\nx,time/steps_per_second,2\n", "step,name,value\n\udc80"],
)  # fmt: skip
def test_a_damaged_log_has_no_time(text: str, tmp_path: Path):
    """That of an older run, which has no checksums."""
    path = tmp_path / "metrics.csv"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(InputError, match=r"metrics\.csv is damaged: restore it from a copy"):
        time_taken(path, 0)


def test_time_taken_is_of_the_logs_intervals(tmp_path: Path):
    """From step -200: 100 steps at 10 a second, 100 at 50, and 300 at 100."""
    rows = ["step,name,value", "-200,eval/return,1.0"]
    rows += [f"{step},time/steps_per_second,{rate}" for step, rate in ((-100, 10.0), (0, 50.0), (300, 100.0))]
    (tmp_path / "metrics.csv").write_text("\n".join(rows) + "\n")
    assert time_taken(tmp_path / "metrics.csv", -200) == {"seconds": 10 + 2 + 3, "steps_per_second": 50.0}


def test_results_hold_no_run_in_another_form():
    """`make report` would leave out what `bench/report/archive_run.py` did not write."""
    folders = {path.parent for path in (ROOT / "results").rglob("config.json")}
    assert folders == {path.parent for path in (ROOT / "results").rglob("evaluations.csv*")} != set()
    assert not list((ROOT / "results").rglob("evaluations.csv"))


def test_each_file_that_is_written_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Pages only if they change. What is in results/ and docs is replaced by two pages and one figure."""
    changed, same = tmp_path / "changed.md", tmp_path / "same.md"
    changed.write_text("old")
    same.write_text("new")
    (tmp_path / "sac").mkdir()
    for name, value in {
        "RESULTS": tmp_path,
        "pages": lambda: [changed, same],
        "remade": lambda page: "new",
        "online": lambda: {("sac", "Hopper-v4"): {}},
        "published": lambda: {("sac", "Hopper-v4"): {}},
        "learning_figure": lambda *given: None,
        "overview_figure": lambda *given: None,
        "save": lambda figure, path: path.touch(),
        "whole_page": lambda: "whole",
    }.items():
        monkeypatch.setattr(report, name, value)
    report.main(report.Args())
    out = capsys.readouterr().out
    assert "report: 1 of 2 pages of README and docs change\n" in out
    written = [changed, tmp_path / "sac" / "Hopper-v4.png", tmp_path / "overview.png", tmp_path / "report.html"]
    assert [line for line in out.splitlines() if "wrote" in line] == [f"report: wrote {path}" for path in written]
    assert (changed.read_text(), written[-1].read_text()) == ("new", "whole")
    assert all(path.exists() for path in written)
