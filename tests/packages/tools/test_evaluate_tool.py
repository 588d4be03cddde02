"""tools/evaluate.py: the table, the files, and what is refused."""

import csv
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from conftest import Failing, module, some

import tools.evaluate
from common.errors import InputError
from tools.evaluate import Args, main


def last_evaluation(folder: Path) -> list[float]:
    rows = list(csv.DictReader((folder / "evaluations.csv").open()))
    return [float(row["return"]) for row in rows if row["step"] == rows[-1]["step"]]


@pytest.mark.parametrize("algo", some("sac", "ppo", "expo", "dsrl"))
def test_the_first_episodes_are_those_of_the_runs_last_evaluation(algo: str, small: Callable[..., Any]) -> None:
    folder = module(algo).train(small(algo, total_steps=60, eval_episodes=10)).folder
    main(Args((str(folder),), episodes=13, csv=folder / "episodes.csv"))
    rows = list(csv.DictReader((folder / "episodes.csv").open()))
    assert [float(row["return"]) for row in rows][:10] == last_evaluation(folder)
    assert len({row["seed"] for row in rows}) == len(rows) == 13


def test_table_and_files(small: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each number against Python's statistics of the episodes in the CSV file."""
    folder = module("sac").train(small(total_steps=60)).folder
    sources = (str(folder), str(folder / "policy" / "best.safetensors"))
    capsys.readouterr()
    found = main(Args(sources, episodes=5, csv=tmp_path / "e.csv", json=tmp_path / "s.json"))
    assert json.loads((tmp_path / "s.json").read_text()) == found
    for row in found:
        returns = [
            float(r["return"]) for r in csv.DictReader((tmp_path / "e.csv").open()) if r["policy"] == row["policy"]
        ]
        assert row["mean"] == pytest.approx(statistics.mean(returns))
        assert row["std"] == pytest.approx(statistics.pstdev(returns))
        assert row["median"] == pytest.approx(statistics.median(returns))
        assert (row["min"], row["max"], row["episodes"]) == (min(returns), max(returns), len(returns))
        assert (row["length"], row["success"], row["score"]) == (200, None, None)
    said = capsys.readouterr()
    printed = said.out.splitlines()
    for line, row in zip(said.err.splitlines()[-2:], found, strict=True):
        assert line.startswith(f"{row['policy']}: step 60, episodes 5, mean {row['mean']:,.1f}, std {row['std']:,.1f}")
    assert printed[0].split() == ["policy", "step", "episodes", "mean", "std", "median", "min", "max", "length"]
    assert [line.split()[0] for line in printed[1:]] == list(sources)
    assert len({len(line) for line in printed}) == 1


def test_a_policy_that_fails_loses_no_evaluation_before_it(
    small: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = module("sac").train(small(total_steps=60)).folder
    real, calls = tools.evaluate.episodes_of, iter(range(2))
    monkeypatch.setattr(tools.evaluate, "episodes_of", lambda *given: real(*given) if next(calls) == 0 else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(Args((str(folder), str(folder)), episodes=2, csv=tmp_path / "e.csv", json=tmp_path / "s.json"))
    assert len(json.loads((tmp_path / "s.json").read_text())) == 1
    assert len(list(csv.DictReader((tmp_path / "e.csv").open()))) == 2


def test_the_step_is_that_of_the_policy_that_acted(small: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A run may learn on between the check of all policies and the evaluation of this one."""
    args = small(total_steps=60)
    folder = module("sac").train(args).folder
    plan_of = tools.evaluate.plan_of

    def then_learn(*given: Any) -> Any:
        plan = plan_of(*given)
        module("sac").train(small(total_steps=80))
        return plan

    monkeypatch.setattr(tools.evaluate, "plan_of", then_learn)
    assert [row["step"] for row in main(Args((str(folder),), episodes=1))] == [80]


def test_one_file_for_both_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--csv and --json are both .*e.out: give two files"):
        Args(("run",), csv=tmp_path / "e.out", json=tmp_path / "." / "e.out")


def test_the_files_come_before_the_table(small: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader of a pipe may have gone, which ends the program."""
    folder = module("sac").train(small(total_steps=60)).folder

    def gone(text: str) -> None:
        raise SystemExit(1)

    monkeypatch.setattr(tools.evaluate, "print_result", gone)
    with pytest.raises(SystemExit):
        main(Args((str(folder),), episodes=1, csv=folder / "e.csv", json=folder / "s.json"))
    assert (folder / "e.csv").read_text().count("\n") == 2
    assert len(json.loads((folder / "s.json").read_text())) == 1


class Solved(Failing):
    """Every other episode succeeds."""

    episodes = 0

    def reset(self, **kwargs: Any) -> Any:
        Solved.episodes += 1
        self.solves = Solved.episodes % 2 == 0
        return super().reset(**kwargs)

    def step(self, action: Any) -> Any:
        *result, info = super().step(action)
        return *result, info | {"success": self.solves}


gym.register("Solved-v0", entry_point=Solved)


def test_scores_and_successes_of_an_environment_that_has_them(small: Callable[..., Any]) -> None:
    folder = module("sac").train(small(env="Solved-v0", total_steps=20, eval_episodes=1)).folder
    (row,) = main(Args((str(folder),), episodes=4))
    assert row["success"] == 0.5
    hopper = module("sac").train(small(env="Hopper-v4", total_steps=20, eval_episodes=1, run_dir=folder / "b")).folder
    (row,) = main(Args((str(hopper),), episodes=2))
    assert row["score"] == pytest.approx(100 * (row["mean"] + 20.272305) / (3234.3 + 20.272305))  # D4RL's constants


def test_sampled_actions_and_another_seed_give_other_episodes(small: Callable[..., Any]) -> None:
    folder = str(module("sac").train(small(total_steps=60)).folder)
    means = [
        main(Args((folder,), episodes=3, **changed))[0]["mean"] for changed in ({}, {"sampled": True}, {"seed": 9})
    ]
    assert len(set(means)) == 3


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"policies": ()}, "no policy is given"),
        ({"episodes": 0}, "--episodes is 0"),
        ({"policies": ("nowhere",)}, "nowhere does not exist: .*\ngive a run folder"),
        ({"policies": ("nowhere.safetensors",)}, "nowhere.safetensors does not exist: .*\ngive a run folder"),
        ({"policies": ("sac/Hoper-v4",)}, "sac/Hoper-v4 does not exist: .*\ndid you mean sac/Hopper-v4"),
        ({"csv": Path("/proc/no/x.csv")}, "/proc/no/x.csv cannot be written .*: give another --csv"),
        ({"json": Path("/proc/no/x.json")}, "/proc/no/x.json cannot be written .*: give another --json"),
        ({"env": "Hopper-v4"}, "does not fit an environment of 11 observations"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(
    changed: dict[str, Any], said: str, small: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first evaluation."""
    folder = str(module("sac").train(small(total_steps=60)).folder)
    monkeypatch.setattr(tools.evaluate, "evaluate", lambda *_: pytest.fail("an evaluation began"))
    with pytest.raises(InputError, match=said):
        main(Args(**{"policies": (folder,)} | changed))
    if names := changed.get("policies"):  # after one that could be evaluated
        with pytest.raises(InputError, match=said):
            main(Args((folder, *names)))
