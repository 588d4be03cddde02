"""The policies in results/policies: each still acts as well as its file states, under its name."""

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import EVERYTHING, ROOT, module

from common.errors import InputError
from common.policy_file import read_policy
from common.run_folder import task_name, without_folders
from tools import keep_policy, policies
from tools.keep_policy import TO_REPORT, Args, main, name_of, returns_of
from tools.policies import read_trained

NAMES = sorted(
    path.relative_to(ROOT / "results" / "policies").with_suffix("").as_posix()
    for path in (ROOT / "results" / "policies").glob("*/*.safetensors")
)
FIRST = {name.split("/")[0]: name for name in reversed(NAMES)}  # of each algorithm


def test_there_are_policies_and_they_are_small() -> None:
    assert NAMES
    sizes = [path.stat().st_size for path in (ROOT / "results" / "policies").rglob("*.safetensors")]
    assert sum(sizes) < 20e6


@pytest.mark.parametrize("name", NAMES if EVERYTHING else sorted(FIRST.values()))
def test_a_policy_returns_what_its_file_states(name: str) -> None:
    """The first three of its episodes. Another machine may round differently, which long episodes amplify."""
    trained = read_trained(name)
    facts = read_policy(trained.path).facts
    assert name_of(trained) == name
    assert len(facts["returns"]) == TO_REPORT[1]
    assert facts["return"] == pytest.approx(statistics.mean(facts["returns"]))
    if "-singletask" in name:
        pytest.importorskip("ogbench", reason="OGBench's package is not installed: make .venv/ogbench")
    returns = returns_of(trained, TO_REPORT[0], 3)
    spread = max(statistics.stdev(facts["returns"]), 0.01 * abs(facts["return"]))
    assert statistics.mean(returns) == pytest.approx(statistics.mean(facts["returns"][:3]), abs=2 * spread)


def test_the_best_is_kept(small: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chosen by some episodes, and reported by others."""
    monkeypatch.setattr(policies, "POLICIES", tmp_path / "kept")
    monkeypatch.setattr(keep_policy, "POLICIES", tmp_path / "kept")
    monkeypatch.setattr(keep_policy, "TO_CHOOSE", (1, 3))
    monkeypatch.setattr(keep_policy, "TO_REPORT", (2, 4))
    runs = [module("sac").train(small(seed=i, total_steps=60, run_dir=tmp_path / str(i))).folder for i in range(3)]
    facts = read_policy(main(Args("sac/Pendulum-v1", tuple(map(str, runs))))).facts
    means = dict(facts["chosen_from"])
    assert means == {
        i: pytest.approx(statistics.mean(returns_of(read_trained(run), 1, 3))) for i, run in enumerate(runs)
    }
    assert facts["arguments"]["seed"] == max(means, key=lambda seed: means[seed])
    assert facts["returns"] == returns_of(read_trained("sac/Pendulum-v1"), 2, 4)
    again = read_policy(main(Args("sac/Pendulum-v1", ("sac/Pendulum-v1", str(runs[0]))))).facts
    assert again["chosen_from"] == [*facts["chosen_from"], facts["chosen_from"][0]]
    assert again["returns"] == facts["returns"]
    with pytest.raises(InputError, match="no run is given: give runs of sac/Pendulum-v1"):
        main(Args("sac/Pendulum-v1", ()))
    with pytest.raises(InputError, match="is a policy of sac/Pendulum-v1: give runs of td3/Pendulum-v1"):
        main(Args("td3/Pendulum-v1", (str(runs[0]),)))


def test_an_id_is_not_shortened_like_a_path() -> None:
    """Minari's ids hold slashes, and the last parts of two can be equal."""
    for dataset, name in (
        ("D4RL/pen/human-v2", "D4RL_pen_human-v2"),
        ("minari:mujoco/hopper/medium-v0", "minari_mujoco_hopper_medium-v0"),
        ("/home/me/data/mine.hdf5", "mine"),
    ):
        arguments = without_folders({"dataset": dataset, "env": "Hopper-v4", "run_dir": "/home/me/runs/1"})
        assert task_name(arguments) == name
        assert "/home" not in str(arguments)
    assert task_name({"env": "Hopper-v4"}) == "Hopper-v4"


def test_a_policy_of_a_dataset_has_the_datasets_name(
    small: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It acts in the dataset's environment without the dataset, and names no folder of this machine."""
    monkeypatch.setattr(policies, "POLICIES", tmp_path / "kept")
    monkeypatch.setattr(keep_policy, "POLICIES", tmp_path / "kept")
    monkeypatch.setattr(keep_policy, "TO_CHOOSE", (1, 1))
    monkeypatch.setattr(keep_policy, "TO_REPORT", (2, 3))
    pretrained = module("iql").train(small("iql", run_dir=tmp_path / "1")).folder
    run = module("iql").train(small("iql", init_from=pretrained, run_dir=tmp_path / "2", seed=2)).folder
    facts = read_policy(main(Args("iql/pendulum-random", (str(pretrained), str(run))))).facts
    assert facts["returns"] == returns_of(read_trained("iql/pendulum-random"), 2, 3)
    assert facts["arguments"]["dataset"] == "pendulum-random.hdf5"
    assert "run_dir" not in facts["arguments"]
    assert str(tmp_path) not in str(facts["arguments"])
    with pytest.raises(InputError, match="is a policy of iql/pendulum-random: give runs of iql/Pendulum-v1"):
        main(Args("iql/Pendulum-v1", (str(run),)))
