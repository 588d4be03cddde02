"""The README's tables come from the raw data, and are what the data says."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT

from bench import offline_report, report
from bench.alternate import Slice
from bench.keep import keep
from bench.rounds import write_rounds


@pytest.mark.parametrize("page", report.TABLES)
def test_pages_are_what_results_say(page):
    """Fails on a figure changed by hand, and on data that came without `make report`."""
    text = (ROOT / page).read_text()
    assert report.with_tables(text, report.TABLES[page]) == text


def test_interpolation():
    curve = {0: 1.0, 10: 5.0, 40: -1.0}
    for step in (0, 3, 10, 25, 40):
        assert report.at(curve, step) == pytest.approx(np.interp(step, list(curve), list(curve.values())))
    assert report.at(curve, 41) is None


def test_spread_counts_the_seeds_that_got_there():
    seeds = {"1": {0: 0.0, 10: 10.0}, "2": {0: 0.0, 10: 20.0, 20: 7.0}}
    assert report.spread(seeds, 10) == "15 ± 7 (2)"
    assert report.spread(seeds, 20) == "7 (1)"
    assert report.spread(seeds, 30) == "not run"


def test_interquartile_mean_is_scipys_trimmed_mean_and_needs_four_seeds():
    """scipy.stats.trim_mean(values, 0.25), which rliable uses, of the numbers below: 4, 4.5, 4."""
    for values, expected in (([9, 1, 5, 3], 4.0), ([1, 100, 3, 4, 5, 6, -50, 7], 4.5), ([2, 30, 5, 5, -7], 4.0)):
        assert report.interquartile_mean(np.array(values, float)) == pytest.approx(expected)
    seeds = {str(i): {0: 0.0, 10: float(i)} for i in range(5)}
    shown = report.interquartile(seeds, 10)
    assert shown.startswith("2 (")
    low, high = (float(part) for part in shown[3:-1].split(" to "))
    assert 0 <= low < 2 < high <= 4
    assert report.interquartile({k: seeds[k] for k in "012"}, 10) == ""
    assert report.interquartile({key: {0: 3.0, 10: 3.0} for key in "abcde"}, 10) == "3 (3 to 3)"


def test_speed_table_is_of_medians_and_of_ratios_within_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "speed").mkdir()
    rows = ["round,contender,steps,seconds,steps_per_second,cores,cores_of_others"]
    for i, factor in enumerate([1.0, 0.5, 2.0]):  # the machine drifts; within a round the ratios stay
        rates = {"ours": 150, "sb3": 100, "sbx": 120, "floor": 300}
        rows += [f"{i},{name},1,1,{rate * factor},1,0" for name, rate in rates.items()]
    facts = ["# algorithm: sac on X", "# our update alone in ms: 5.0"]
    (tmp_path / "speed" / "a.csv").write_text("\n".join(facts + rows))
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    assert report.speed_table().splitlines()[2:] == ["| sac on X | 150 | 100 | 120 | 1.50 | 1.25 | 1.50 |"]
    assert len(report.speed_beside("d3rlpy").splitlines()) == 2


@pytest.mark.parametrize(("floor", "shown"), [({"floor": 60}, "2.00"), ({}, "-")])
def test_each_other_peer_has_a_table_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, floor: dict[str, float], shown: str
):
    rounds = [[Slice(i, name, n * i, float(i), 2.0, 0.0) for name, n in ({"ours": 30, "d3rlpy": 20} | floor).items()]
              for i in (1, 2, 3)]  # fmt: skip
    write_rounds(tmp_path / "speed" / "a.csv", {"algorithm": "cql on D"}, rounds)
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    assert report.speed_beside("d3rlpy").splitlines()[2:] == [f"| cql on D | 30.0 | 20.0 | 1.50 | {shown} |"]
    assert len(report.speed_beside("loop").splitlines()) == 2
    assert len(report.speed_table().splitlines()) == 2


class TestFromDatasets:
    """Tables of bench/offline_report.py, of runs made up here: returns of Hopper-v4, whose scores are known."""

    LOW, HIGH = -20.272305, 3234.3  # D4RL's: what scores 0 and 100

    @pytest.fixture
    def results(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
        monkeypatch.setattr(offline_report, "RESULTS", tmp_path)
        (tmp_path / "datasets").mkdir()
        for name in ("a", "b"):
            facts = {"environment": "Hopper-v4", "score": 31.0}
            (tmp_path / "datasets" / f"{name}.json").write_text(json.dumps(facts))

        def add(folder: str, algo: str, dataset: str, seed: int, env: str = "Hopper-v4", **scores: float) -> None:
            """Two episodes an evaluation, 10 points below and above; s5=30.0 is score 30 at step 5, m5 at step -5."""
            path = tmp_path / folder / algo / dataset / str(seed) / "evaluations.csv"
            path.parent.mkdir(parents=True)
            (path.parent / "config.json").write_text(json.dumps({"arguments": {"env": env, "offline_steps": 100_000}}))
            lines = ["step,episode,return,length,success,normalized_score"]
            for key, score in scores.items():
                step = int(key[1:]) * (-1 if key[0] == "m" else 1)
                for i, of in enumerate((score - 10, score + 10)):
                    solved = "" if env == "Hopper-v4" else int(of > 50)
                    lines.append(f"{step},{i},{self.LOW + of / 100 * (self.HIGH - self.LOW)},1000,{solved},")
            path.write_text("\n".join(lines) + "\n")

        return add

    def test_offline_scores_are_those_after_so_many_updates(self, results: Callable[..., None]):
        results("offline", "iql", "a", 1, m70000=70.0, s0=40.0)
        results("offline", "iql", "a", 2, s0=60.0)
        results("offline", "iql", "a", 3, m5=99.0)  # not there yet
        results("offline", "d3rlpy-iql", "a", 1, s0=30.0)
        early, late = (line.split(" | ") for line in offline_report.offline_table().splitlines()[2:])
        assert early[:3] == ["| a", "30,000", "31.0"]
        assert late[:3] == ["| a", "100,000", "31.0"]
        column = {name: 3 + i for i, name in enumerate(offline_report.ALGORITHMS)}
        assert early[column["iql"]] == "70.0 (1)"
        assert late[column["iql"]] == "50.0 ± 14.1 (2)"
        assert late[column["d3rlpy-iql"]] == "30.0 (1)"
        assert (early[column["d3rlpy-iql"]], late[column["bc"]]) == ("not run", "not run")

    def test_both_are_compared_on_what_both_ran(self, results: Callable[..., None]):
        for seed, score in ((1, 40.0), (2, 50.0), (3, 90.0)):
            results("offline", "iql", "a", seed, s0=score)
        results("offline", "iql", "b", 1, s0=99.0)
        for seed, score in ((1, 20.0), (2, 30.0)):
            results("offline", "d3rlpy-iql", "a", seed, s0=score)
        early, late, cql, _ = offline_report.d3rlpy_table().splitlines()[2:]
        assert late == "| IQL | 100,000 | 1, 2 | 45.0 (40.0 to 50.0) | 25.0 (20.0 to 30.0) |"
        assert early == "| IQL | 30,000 | not run |  |  |"
        assert cql == "| CQL | 30,000 | not run |  |  |"

    def test_bootstrap_is_within_each_dataset(self):
        """A dataset whose seeds agree adds nothing to the interval, however far it is from the others."""
        assert offline_report.over_datasets([[10.0] * 4, [90.0] * 4]) == (50.0, 50.0, 50.0)
        middle, low, high = offline_report.over_datasets([[0.0, 10.0], [50.0, 60.0]])
        assert (middle, low, high) == (30.0, 25.0, 35.0)  # without the lowest and the highest

    def test_online_scores_and_regret(self, results: Callable[..., None]):
        results("online", "cql-mix", "a", 1, s0=20.0, s1=10.0, s5=40.0, s10=70.0)
        results("online", "cql-mix", "a", 2, s0=30.0, s1=30.0, s5=30.0, s10=30.0, s20=90.0)
        row = offline_report.online_table().splitlines()[2]
        assert row == "| cql-mix, a | 10 | 25.0 ± 7.1 (2) | 50.0 ± 28.3 (2) | 0.65 |"

    def test_wsrl_beside_its_variants(self, results: Callable[..., None]):
        """At the switch, the lowest until 20 000, at 20 000, and where the shortest run ends; solved episodes in per
        cent where returns have no scale.
        """
        results("wsrl", "wsrl", "a", 1, s0=30.0, s5000=10.0, s10000=25.0, s20000=40.0, s25000=5.0, s40000=80.0)
        results("wsrl", "wsrl", "a", 2, s0=50.0, s10000=20.0, s20000=60.0, s40000=90.0, s60000=0.0)
        results("wsrl", "mix", "a", 1, s0=30.0, s10000=40.0, s20000=50.0, s40000=60.0)
        results("wsrl", "wsrl", "pen", 1, env="unheard-of-v0", s0=50.0, s20000=90.0)
        assert offline_report.wsrl_table().splitlines()[2:] == [
            "| a, 40,000 steps | WSRL | 40.0 ± 14.1 (2) | 15.0 ± 7.1 (2) | 50.0 ± 14.1 (2) | 85.0 ± 7.1 (2) |",
            "| a, 40,000 steps | data retained | 30.0 (1) | 40.0 (1) | 50.0 (1) | 60.0 (1) |",
            "| pen, 20,000 steps | WSRL | 50.0 (1) | 100.0 (1) | 100.0 (1) | 100.0 (1) |",
        ]


def test_what_is_kept_of_a_run_names_no_folder_of_this_machine(tmp_path: Path):
    (tmp_path / "run").mkdir()
    arguments = {"dataset": "/somewhere/data/a.hdf5", "run_dir": str(tmp_path), "init_from": "/runs/b", "gamma": 0.9}
    (tmp_path / "run" / "config.json").write_text(json.dumps({"algo": "iql", "arguments": arguments, "commit": "c"}))
    (tmp_path / "run" / "evaluations.csv").write_text("step\n0\n")
    keep(tmp_path / "run", tmp_path / "kept" / "1")
    assert json.loads((tmp_path / "kept" / "1" / "config.json").read_text()) == {
        "algo": "iql", "arguments": {"dataset": "a.hdf5", "init_from": "b", "gamma": 0.9}, "commit": "c",
    }  # fmt: skip
    assert (tmp_path / "kept" / "1" / "evaluations.csv").read_text() == "step\n0\n"
