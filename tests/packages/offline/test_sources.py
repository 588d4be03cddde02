"""Every algorithm that takes a dataset trains on a D4RL id, a Minari id and a file, then online, and is scored."""

import csv
import shutil
from pathlib import Path
from typing import Any

import gymnasium as gym
import h5py
import minari
import numpy as np
import pytest
from conftest import OFFLINE, PENDULUM, module
from d4rl_file import make
from minari.data_collector import EpisodeBuffer

every_offline_algorithm = pytest.mark.parametrize("algo", OFFLINE)


def trained(small: Any, algo: str, dataset: str, env: str) -> list[dict[str, str]]:
    """The rows of evaluations.csv after 3 updates and 5 steps; `env` "" is the dataset's own."""
    steps = {"offline_steps": 3, "online_steps": 5}
    args = small(algo, dataset=dataset, env=env, time_limit=None, eval_episodes=1, **steps)  # others have no reference
    module(algo).train(args)
    rows = list(csv.DictReader((args.run_dir / "evaluations.csv").open()))
    assert {int(row["step"]) for row in rows} == {-3, 0, 1, 5}
    return rows


def assert_scores(rows: list[dict[str, str]], low: float, high: float) -> None:
    scores = [float(row["normalized_score"]) for row in rows]
    assert scores == pytest.approx([100 * (float(row["return"]) - low) / (high - low) for row in rows])


@every_offline_algorithm
def test_a_d4rl_id(small: Any, algo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("D4RL_DATASET_DIR", str(tmp_path / "d4rl"))
    (tmp_path / "d4rl").mkdir()
    random = np.random.default_rng(0)
    parts = {"observations": random.normal(size=(40, 11)), "actions": random.uniform(-1, 1, (40, 3))}
    make(tmp_path / "d4rl" / "hopper_medium-v2.hdf5", ("." * 19 + "t") * 2, **parts)
    assert_scores(trained(small, algo, "hopper-medium-v2", ""), -20.272305, 3234.3)


@every_offline_algorithm
@pytest.mark.filterwarnings("ignore::UserWarning")  # Minari's, that no author is named and the like
def test_a_minari_id(small: Any, algo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    random = np.random.default_rng(0)
    episodes = [
        EpisodeBuffer(
            observations=random.normal(size=(21, 3)).astype(np.float32),
            actions=random.uniform(-2, 2, (20, 1)).astype(np.float32), rewards=random.normal(size=20),
            terminations=np.zeros(20, bool), truncations=np.arange(20) == 19,
        ) for _ in range(2)
    ]  # fmt: skip
    env = gym.make("Pendulum-v1", max_episode_steps=20)  # soon evaluated
    minari.create_dataset_from_buffers(
        "mine/pendulum-v0", buffer=episodes, env=env, ref_min_score=-1500.0, ref_max_score=-100.0
    )
    assert_scores(trained(small, algo, "mine/pendulum-v0", ""), -1500.0, -100.0)


@every_offline_algorithm
def test_a_file_without_a_reference(small: Any, algo: str, tmp_path: Path) -> None:
    shutil.copy(PENDULUM, path := tmp_path / "mine.hdf5")
    with h5py.File(path, "a") as file:
        file.attrs["env_kwargs"] = '{"max_episode_steps": 20}'  # soon evaluated
    rows = trained(small, algo, str(path), "")
    assert {row["normalized_score"] for row in rows} == {""}


@every_offline_algorithm
def test_a_file_without_a_reference_in_an_environment_that_has_one(small: Any, algo: str, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    parts = {"observations": random.normal(size=(40, 11)), "actions": random.uniform(-1, 1, (40, 3))}
    make(tmp_path / "mine.hdf5", ("." * 19 + "t") * 2, **parts)
    assert_scores(trained(small, algo, str(tmp_path / "mine.hdf5"), "Hopper-v4"), -20.272305, 3234.3)
