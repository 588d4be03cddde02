"""The scaling law on curves that follow it exactly, and its parts by brute force."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
from conftest import module

from bench.sweep import scaling
from bench.sweep.scaling import Runs, Setting, best, fitted, law, power, predictions_table, read, steps_to, write
from common.errors import InputError

UTDS = (1, 2, 3, 4, 6, 8)


def needed(setting: Setting) -> float:
    """D = 600 + (4,000 / σ)^0.9 at the batch size 200 σ^-0.5 and the rate 0.002 σ^-0.25, and more at others."""
    off = math.log(setting.batch_size * setting.utd**0.5 / 200) ** 2
    off += math.log(setting.critic_lr * setting.utd**0.25 / 0.002) ** 2
    return (600 + (4_000 / setting.utd) ** 0.9) * (1 + off)


def runs_of(*, utds: tuple[int, ...] = UTDS, seeds: int = 3, every: int = 1) -> Runs:
    """Curves that rise to 100 at D and are evaluated at every `every`-th step, of the best setting and of others."""
    runs: Runs = {}
    for utd in utds:
        for wide in (0.5, 1.0, 2.0):
            for fast in (0.5, 1.0, 2.0):
                setting = Setting(utd, round(wide * 200 * utd**-0.5), fast * 0.002 * utd**-0.25)
                data = needed(setting)
                runs[setting] = [{step: 100.0 * step / data for step in range(0, 9_000, every)}] * seeds
    return runs


def test_the_law_is_recovered_and_predicts_the_ratio_held_out():
    fit = fitted(runs_of(), 100.0, held_out=8)
    assert 8 not in fit.by_utd
    assert (fit.batch_size.exponent, fit.critic_lr.exponent) == pytest.approx((-0.5, -0.25), abs=0.01)
    assert (fit.batch_size.factor, fit.critic_lr.factor) == pytest.approx((200, 0.002), rel=0.02)
    assert (fit.data.d_min, fit.data.beta, fit.data.alpha) == pytest.approx((600, 4_000, 0.9), rel=0.02)
    assert fit.data(8) == pytest.approx(600 + 500**0.9, rel=0.005)


def test_a_law_without_a_minimum_and_points_with_noise():
    assert law((1, 2, 4, 8), [800, 400, 200, 100])[0] == pytest.approx(0, abs=2)
    rng = np.random.default_rng(0)
    data = [(300 + 1_000 / utd) * rng.uniform(0.98, 1.02) for utd in range(1, 17)]
    assert law(range(1, 17), data)(20) == pytest.approx(350, rel=0.05)


def test_power_law_through_points():
    assert power((1, 2, 4), (8.0, 4.0, 2.0)) == pytest.approx((8.0, -1.0))
    assert power((1, 2, 4), (8.0, 4.0, 2.0))(16) == pytest.approx(0.5)


def test_steps_to_a_return_by_the_best_rising_fit():
    """Brute force: the fit at step k is the largest minimum, over where a block begins, of means that end later."""
    rng = np.random.default_rng(1)
    for _ in range(20):
        values = rng.normal(size=12).cumsum()
        fit = [max(min(values[i : j + 1].mean() for j in range(k, 12)) for i in range(k + 1)) for k in range(12)]
        curve = {100 * k: float(value) for k, value in enumerate(values)}
        for wanted in (-1.0, 0.5, 2.0):
            assert steps_to(curve, wanted) == next((100.0 * k for k in range(12) if fit[k] >= wanted), math.inf)


def test_a_single_lucky_evaluation_does_not_count():
    assert steps_to({0: 0.0, 1: 10.0, 2: 0.0, 3: 0.0, 4: 10.0}, 9.0) == 4.0


def test_the_best_setting_varies_with_the_seeds():
    """Two settings, each better in half of the resamples: the geometric mean lies between them."""
    curves = [{0: 0.0, 10: 1.0}, {0: 0.0, 20: 1.0}]
    runs: Runs = {Setting(1, 64, 1e-3): curves * 4, Setting(1, 256, 4e-3): curves * 4}
    found = best(runs, 1, 1.0)
    assert 64 < found.batch_size < 256
    assert found.batch_size / 64 == pytest.approx(found.critic_lr / 1e-3)
    assert 10 < found.data.mean() < 15


def test_too_little_to_fit_is_refused():
    with pytest.raises(InputError, match="--returns has no number"):
        scaling.main(scaling.Args(Path("runs"), ()))
    with pytest.raises(InputError, match="3 values of σ"):
        fitted(runs_of(utds=(1, 2, 4)), 100.0)
    runs = runs_of(utds=(1,))
    with pytest.raises(InputError, match="at σ = 1, no setting reaches 2000"):
        best(runs, 1, 2_000.0)
    with pytest.raises(InputError, match="at σ = 1, 0 is reached before the first step"):
        best(runs, 1, 0.0)


def test_curves_survive_a_file_and_a_ratio_that_was_not_run_is_said(tmp_path: Path):
    runs = {s: [{0: 0.5, 1_000: 100.0 + s.utd}] for s in runs_of(utds=(1, 2, 3, 4))}
    write(tmp_path / "curves.csv", runs)
    assert read(tmp_path / "curves.csv") == dict(sorted(runs.items()))
    (row,) = predictions_table(runs_of(utds=(1, 2, 3, 4, 6)), [100.0], 8).rows
    assert row[-2:] == ["not run", "not run"]
    assert float(row[4].replace(",", "")) == pytest.approx(600 + 500**0.9, rel=0.01)
    with pytest.raises(InputError, match="holds no runs"):
        read(tmp_path)


def test_a_prediction_stands_next_to_the_nearest_and_the_best_setting():
    """At σ = 8, the fit asks for 71 and 0.0012. 64 and 0.001 are nearest, and 128 and 0.002 happen to be better."""
    settings = {(64, 0.001): 2_000.0, (32, 0.0011): 3_000.0, (128, 0.002): 1_500.0}
    runs = runs_of(utds=(1, 2, 3, 4, 6)) | {Setting(8, *s): [{0: 0.0, int(d): 100.0}] for s, d in settings.items()}
    (row,) = predictions_table(runs, [100.0], 8).rows
    assert row[-3:] == ["64, 0.001", "2,000 (2,000 to 2,000)", "1,500 (1,500 to 1,500)"]
    del runs[Setting(8, 128, 0.002)], runs[Setting(8, 32, 0.0011)]
    (row,) = predictions_table(runs, [100.0], 8).rows
    assert row[-2:] == ["2,000 (2,000 to 2,000)", "not run"]


def test_reads_runs_of_sac(small, tmp_path: Path):
    for utd in (1, 2):
        folder = tmp_path / "runs" / "suite" / str(utd)
        module("sac").train(small(total_steps=100, eval_every=50, utd=utd, run_dir=folder))
    runs = read(tmp_path / "runs")
    assert list(runs) == [Setting(1, 16, 1e-3), Setting(2, 16, 1e-3)]
    assert [list(curve) for curves in runs.values() for curve in curves] == [[0, 50, 100]] * 2


def test_prints_three_tables_and_keeps_the_curves(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write(tmp_path / "curves.csv", runs_of(seeds=2, every=10))
    scaling.main(scaling.Args(tmp_path / "curves.csv", (60.0, 100.0), 8, tmp_path / "kept" / "curves.csv"))
    bests, laws, predictions = capsys.readouterr().out.strip().split("\n\n")
    assert [len(table.splitlines()) for table in (bests, laws, predictions)] == [12, 4, 4]
    assert " 0.90 |" in laws
    assert read(tmp_path / "kept" / "curves.csv") == read(tmp_path / "curves.csv")


def test_runs_of_several_tasks_or_without_a_setting_are_refused(small, tmp_path: Path):
    """Else one task's curves would take the place of the other's."""
    module("sac").train(small(total_steps=20, run_dir=tmp_path / "runs" / "a" / "1"))
    module("sac").train(small(total_steps=20, env="Hopper-v4", run_dir=tmp_path / "runs" / "b" / "1"))
    with pytest.raises(InputError, match="has runs of sac on Hopper-v4 and sac on Pendulum-v1: give a folder"):
        read(tmp_path / "runs")
    module("ppo").train(small("ppo", total_steps=20, run_dir=tmp_path / "ppo" / "1"))
    with pytest.raises(InputError, match=r"ppo/1 has no --utd: leave it out"):
        read(tmp_path / "ppo")


def test_two_runs_of_one_setting_and_seed_are_refused(small, tmp_path: Path):
    """They differ in another flag. One would take the place of the other."""
    for name, gamma in (("a", 0.9), ("b", 0.99)):
        module("sac").train(small(total_steps=20, gamma=gamma, run_dir=tmp_path / name))
    with pytest.raises(InputError, match=r"/a and .*/b have the same --utd, .* and --seed: leave one out"):
        read(tmp_path)


def test_a_damaged_or_missing_file_is_refused(small, tmp_path: Path):
    """The message names the file: evaluations.csv of a run, or the file that --csv wrote."""
    module("sac").train(small(total_steps=20, run_dir=tmp_path / "runs" / "1"))
    write(tmp_path / "curves.csv", {Setting(1, 16, 1e-3): [{0: -1.0, 10: 2.0}]})
    for runs, path in (
        (tmp_path / "runs", tmp_path / "runs" / "1" / "evaluations.csv"),
        (tmp_path / "curves.csv",) * 2,
    ):
        header, first, *rest = path.read_text().splitlines()
        for damaged in (
            [header, first[: first.index(",")]],
            [header, first.replace(".", "x")],
            [header, re.sub(r"-?\d+\.\d+", "nan", first)],
            [header.replace("return", "returns"), first],
            [header, first, "1" * 131_073],
        ):
            path.write_text("\n".join([*damaged, *rest]))
            with pytest.raises(InputError, match=f"{re.escape(str(path))} is damaged"):
                read(runs)
        path.unlink()
        with pytest.raises(InputError, match=f"{re.escape(str(path))} is missing"):
            read(runs)
