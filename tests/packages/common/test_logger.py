"""The logs: long-format CSV, TensorBoard, optional Weights & Biases."""

import csv
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import module
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from common import process
from common.errors import InputError, RunError
from common.evaluate import Episode
from common.logger import Logger, start_wandb
from common.timings import Timings


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_a_metric_that_first_appears_late_is_kept(tmp_path: Path):
    logger = Logger(tmp_path, (0, 100), None)
    logger.advance(10)
    logger.log({"losses/critic": torch.tensor([[1.0, 2.0]])})
    logger.advance(10)
    logger.log({"losses/critic": 2.5, "exploration/late": 7.0})
    logger.close()
    kept = {(row["step"], row["name"]): float(row["value"]) for row in rows(tmp_path / "metrics.csv")}
    assert kept["10", "losses/critic"] == 1.5
    assert kept["20", "losses/critic"] == 2.5
    assert kept["20", "exploration/late"] == 7.0


def test_tensorboard_has_what_the_csv_has_also_after_a_resume(tmp_path: Path):
    logger = Logger(tmp_path, (0, 100), None)
    logger.advance(10)
    logger.log({"losses/a": 1.0})
    state = logger.state()
    logger.advance(10)
    logger.log({"losses/a": 99.0})  # after the checkpoint: lost in a kill
    logger.close()
    logger = Logger(tmp_path, (0, 100), state)
    assert logger.step == 10
    logger.advance(5)
    logger.log({"losses/a": 3.0})
    logger.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("losses/a")] == [(10, 1.0), (15, 3.0)]
    written = [(row["step"], row["value"]) for row in rows(tmp_path / "metrics.csv") if row["name"] == "losses/a"]
    assert written == [("10", "1.0"), ("15", "3.0")]


def test_evaluations_have_a_row_an_episode(tmp_path: Path):
    logger = Logger(tmp_path, (0, 100), None)
    logger.advance(5)
    logger.log_evaluation([Episode(1.25, 10, None), Episode(0.1 + 0.2, 20, True)])
    logger.close()
    assert (tmp_path / "evaluations.csv").read_text().splitlines() == [
        "step,episode,return,length,success,normalized_score",
        "5,0,1.25,10,,",
        "5,1,0.30000000000000004,20,1,",
    ]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_loss_ends_the_run(tmp_path: Path, bad: float):
    logger = Logger(tmp_path, (0, 100), None)
    with pytest.raises(RunError, match=r"losses/critic is .* at step 0"):
        logger.log({"losses/critic": torch.tensor(bad)})


def test_times_are_medians_since_they_were_taken(monkeypatch: pytest.MonkeyPatch):
    """One stall does not move them; what was taken does not count again."""
    clock = iter([0.0, 0.001, 1.0, 1.002, 2.0, 6.0, 7.0, 7.005, 8.0, 8.003])
    monkeypatch.setattr("common.timings.time", types.SimpleNamespace(perf_counter=lambda: next(clock)))
    timings = Timings()
    for name in ("update", "update", "update", "act"):
        with timings(name):
            pass
    assert timings.take() == pytest.approx({"time/update_ms": 2.0, "time/act_ms": 5.0})
    with timings("update"):
        pass
    assert timings.take() == pytest.approx({"time/update_ms": 3.0})
    assert timings.take() == {}


def test_times_without_a_log_do_not_fill_the_memory():
    """The last 10,000 of a block count: a run may log once in a million steps."""
    timings = Timings()
    for _ in range(12_000):
        with timings("update"):
            pass
    assert [len(times) for times in timings._milliseconds.values()] == [10_000]


def test_weights_and_biases_only_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    Logger(tmp_path, (0, 100), None).log({"a": 1.0})  # never imports it

    calls: list[Any] = []
    run = types.SimpleNamespace(
        log=lambda values, step: calls.append((step, values)), finish=lambda exit_code: calls.append(exit_code)
    )

    def init(**arguments: Any) -> Any:
        calls.append(arguments)
        return run

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    logger = Logger(tmp_path, (0, 100), None, start_wandb("sac__Hopper-v4__1", tmp_path, {"seed": 1}))
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    start_wandb("sac__Hopper-v4__1", tmp_path, {"seed": 1})
    assert (calls[0].pop("project"), calls[1].pop("project")) == ("onramp", "mine")
    assert calls[0] == calls[1]  # the same id after a resume
    assert calls[0]["group"] == "sac__Hopper-v4"
    logger.is_evaluated = True
    logger.advance(3)
    logger.log({"a": 1.0})
    logger.log_evaluation([Episode(2.0, 1, None)])
    assert len(calls) == 2  # a step is sent once, when it ends
    logger.advance(1)
    step, values = calls.pop()
    assert (step, values["a"], values["eval/return"]) == (3, 1.0, 2.0)
    logger.log({"a": 4.0})
    logger.close()
    assert [(step, values["a"]) for step, values in calls[2:-1]] == [(4, 4.0)]
    assert calls[-1] == 0


def test_wandb_gets_the_step_of_a_stopped_evaluation_once(tmp_path: Path):
    """It ignores a second row of a step. So the first process sends none, and the resumed one sends all values."""
    calls: list[Any] = []
    run = types.SimpleNamespace(log=lambda values, step: calls.append((step, values)), finish=lambda exit_code: None)
    logger = Logger(tmp_path, (0, 100), None, run)
    logger.advance(3)
    logger.log({"a": 1.0})
    state = logger.state()
    logger.close()
    assert calls == []
    logger = Logger(tmp_path, (0, 100), state, run)
    assert not logger.is_evaluated
    logger.log_evaluation([Episode(2.0, 1, None)])
    logger.is_evaluated = True
    assert logger.state()["unsent"] == {}
    logger.close()
    ((step, values),) = calls
    assert (step, values["a"], values["eval/return"]) == (3, 1.0, 2.0)


def test_wandb_gets_the_last_step_of_a_failed_run(tmp_path: Path):
    """It also gets the step of a checkpoint before the next step begins."""
    calls: list[Any] = []
    run = types.SimpleNamespace(
        log=lambda values, step: calls.append((step, values["a"])), finish=lambda exit_code: calls.append(exit_code)
    )

    def fail_after_a_checkpoint() -> None:
        logger = Logger(tmp_path, (0, 100), None, run)
        logger.is_evaluated = True
        logger.advance(3)
        logger.log({"a": 1.0})
        logger.state()
        assert calls == [(3, 1.0)]  # a kill from here on loses nothing of the checkpoint
        logger.advance(1)
        logger.log({"a": 2.0})
        raise RunError("failed in an evaluation")

    with pytest.raises(RunError), process.as_before():
        fail_after_a_checkpoint()
    assert calls == [(3, 1.0), (4, 2.0), 1]


def test_weights_and_biases_ends_with_a_failed_run(small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Else the next run of the process would log to it. A refusal is told without a traceback."""
    wandb, ended = types.ModuleType("wandb"), []
    wandb.__spec__, wandb.Error = ModuleSpec("wandb", None), type("Error", (Exception,), {})
    wandb.init = lambda **_: types.SimpleNamespace(
        log=lambda values, step: 1 / 0, finish=lambda exit_code: ended.append(exit_code)
    )
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with pytest.raises(ZeroDivisionError):
        module("sac").train(small(track=True))
    assert ended == [1]

    def refuse(**_: Any) -> None:
        raise wandb.Error("not logged in")

    wandb.init = refuse
    with pytest.raises(
        InputError, match=r"--track: not logged in: correct that \(`wandb login`\), or leave --track out"
    ):
        module("sac").train(args := small(track=True, run_dir=tmp_path / "refused"))
    assert not (args.run_dir / "config.json").exists()


def test_steps_on_a_dataset_are_below_0_and_returns_get_scores(tmp_path: Path):
    logger = Logger(tmp_path, (-2, 5), None)
    logger.score = lambda episodes: np.array([100 * episode.return_ / 8 for episode in episodes])
    logger.advance(1)
    logger.log_evaluation([Episode(2.0, 7, None), Episode(4.0, 7, None)])
    logger.advance(1)
    logger.advance(1)
    assert logger.step == 1
    logger.close()
    rows = [line.split(",") for line in (tmp_path / "evaluations.csv").read_text().splitlines()[1:]]
    assert [(row[0], float(row[2]), float(row[5])) for row in rows] == [("-1", 2.0, 25.0), ("-1", 4.0, 50.0)]
    assert "-1,eval/normalized_score,37.5" in (tmp_path / "metrics.csv").read_text()
