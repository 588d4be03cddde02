"""The README's tables come from the raw data, and are what the data says."""

from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT

from bench import report
from bench.alternate import Slice
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
    assert len(report.offline_speed_table().splitlines()) == 2


@pytest.mark.parametrize(("floor", "shown"), [({"floor": 60}, "2.00"), ({}, "-")])
def test_offline_speed_has_a_table_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, floor: dict[str, float], shown: str
):
    rounds = [[Slice(i, name, n * i, float(i), 2.0, 0.0) for name, n in ({"ours": 30, "d3rlpy": 20} | floor).items()]
              for i in (1, 2, 3)]  # fmt: skip
    write_rounds(tmp_path / "speed" / "a.csv", {"algorithm": "cql on D"}, rounds)
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    assert report.offline_speed_table().splitlines()[2:] == [f"| cql on D | 30.0 | 20.0 | 1.50 | {shown} |"]
    assert len(report.speed_table().splitlines()) == 2
