"""EnvPool against Gymnasium: the same environments, the same contract. Skipped if EnvPool is not installed."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import command, flags, killed_at, replay_bytes

from algos import sac
from common.errors import InputError, RunError
from common.seeding import seeds
from envs.make import make_vector
from envs.state import get_states, set_states
from envs.vector import ENVPOOL_IDS


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "envpool", None)
    with pytest.raises(InputError, match="pip install envpool=="):
        make_vector("Hopper-v4", 1, seed=0, vectorizer="envpool")


def test_ids_that_were_not_found_equal_are_refused() -> None:
    for env_id in ("Humanoid-v4", "Pendulum-v1", "Nothing-v0"):
        with pytest.raises(InputError, match=f"{env_id}(.|\n)*HalfCheetah-v4") as caught:
            make_vector(env_id, 1, seed=0, vectorizer="envpool")
        assert len(str(caught.value).splitlines()) <= 2


def near(env_id: str) -> bool:
    """Whether EnvPool's environment is Gymnasium's as far as this machine can tell."""
    pytest.importorskip("envpool")
    found = importlib.import_module("envpool_comparison").compare(env_id)  # which imports EnvPool itself
    assert found["limits"][0] == found["limits"][1]
    assert found["unequal_ends"] == 0
    assert found["starts"] < 0.1  # beyond 0.087 by chance once in a thousand coordinates
    return all(found["obs"][i] < max(10 * found["nudged"][i], 1e-6) for i in range(3)) and found["rewards"][1] < 1e-6


@pytest.mark.parametrize("env_id", ENVPOOL_IDS)
def test_environments_offered_are_gymnasiums(env_id: str) -> None:
    assert near(env_id)


def test_humanoid_is_not_offered_because_it_differs() -> None:
    assert not near("Humanoid-v4")


@pytest.fixture
def pool() -> Any:
    return pytest.importorskip("envpool")


def play(envs: Any, actions: np.ndarray) -> list[list[tuple[bytes, ...]]]:
    """For each environment its transitions: obs, reward, next_obs, termination, truncation."""
    obs, _ = envs.reset()
    got: list[list[tuple[bytes, ...]]] = [[] for _ in obs]
    for action in actions:
        next_obs, *parts = envs.step(action)[:4]
        for i, seen in enumerate(got):
            seen.append(tuple(part[i].tobytes() for part in (obs, next_obs, *parts)))
        dones = parts[1] | parts[2]
        obs = envs.reset(options={"reset_mask": dones})[0] if dones.any() else next_obs
    return got


def test_what_is_stored_is_what_single_environments_give(pool: Any, small: Callable[..., sac.Args]) -> None:
    """Of EnvPool's own, one in a pool each, whose counter of steps shows that none was lost to an automatic reset."""
    n, steps = 3, 200
    args = small(env="Hopper-v4", num_envs=n, vectorizer="envpool", total_steps=n * steps, learning_starts=n * steps)
    sac.train(args)
    stored = np.frombuffer(replay_bytes(args.run_dir), np.float32).reshape(steps, n, -1)
    ends = 0
    for i, seed in enumerate(seeds(args.seed, "training", n)):
        env = pool.make_gymnasium("Hopper-v4", num_envs=1, seed=[seed >> 1], num_threads=1)
        env.reset()
        obs, length = env.reset()[0], 0
        for row in stored[:, i]:
            action = row[11:14]
            next_obs, reward, termination, truncation, info = env.step(action[None].astype(np.float64))
            length += 1
            assert info["elapsed_step"] == length
            assert row.tobytes() == np.float32([*obs[0], *action, *reward, *next_obs[0], *termination]).tobytes()
            obs, ended = next_obs, termination | truncation
            if ended:
                obs, info = env.reset()
                assert info["elapsed_step"] == 0
                ends, length = ends + 1, 0
    assert ends > 10


def test_equal_seeds_give_equal_runs_on_any_number_of_threads(pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    actions = np.random.default_rng(0).uniform(-1, 1, (200, 4, 3)).astype(np.float32)
    original, runs = pool.make_gymnasium, []
    for threads in (0, 1, 2, 4):
        monkeypatch.setattr(
            pool, "make_gymnasium", lambda *a, threads=threads, **k: original(*a, num_threads=threads, **k)
        )
        runs.append(play(make_vector("Hopper-v4", 4, seed=3, vectorizer="envpool"), actions))
    assert all(run == runs[0] for run in runs)
    assert runs[0] != play(make_vector("Hopper-v4", 4, seed=4, vectorizer="envpool"), actions)
    fewer = play(make_vector("Hopper-v4", 2, seed=3, vectorizer="envpool"), actions[:, :2])
    assert fewer == runs[0][:2]
    assert len({episode[0][0] for episode in runs[0]}) == 4, "four environments, four seeds"


def test_actions_are_rescaled_and_the_time_limit_truncates(pool: Any) -> None:
    raw = pool.make_gymnasium("InvertedPendulum-v4", num_envs=1, seed=[seeds(0, "training", 1)[0] >> 1])
    envs = make_vector("InvertedPendulum-v4", 1, seed=0, vectorizer="envpool")
    assert raw.action_space.high == 3
    envs.reset()
    for _ in range(2):  # make_vector resets once to set the seeds
        raw.reset()
    for unit in (-1.0, 0.5):
        obs, *_ = envs.step(np.array([[unit]], np.float32))
        assert obs.dtype == np.float32
        np.testing.assert_array_equal(obs, raw.step(np.array([[3 * unit]]))[0].astype(np.float32))

    envs = make_vector("HalfCheetah-v4", 2, seed=0, vectorizer="envpool")
    first, _ = envs.reset()
    for step in range(1, 1001):
        _, rewards, terminations, truncations, _ = envs.step(np.zeros((2, 6), np.float32))
        assert truncations.tolist() == [step == 1000] * 2
        assert not terminations.any()
    assert rewards.dtype == np.float64
    with pytest.raises(AssertionError, match="reset first"):
        envs.step(np.zeros((2, 6), np.float32))
    one = envs.reset(options={"reset_mask": np.array([False, True])})[0]
    both = envs.reset(options={"reset_mask": np.array([True, False])})[0]
    np.testing.assert_array_equal(one[1], both[1])
    assert not np.isin(both, first).any()
    with pytest.raises(RunError, match="non-finite actions"):
        envs.step(np.full((2, 6), np.nan, np.float32))


def test_a_run_that_continues_begins_new_episodes(pool: Any) -> None:
    actions = np.random.default_rng(0).uniform(-1, 1, (60, 2, 3)).astype(np.float32)
    envs = make_vector("Hopper-v4", 2, seed=3, vectorizer="envpool")
    begun = [episode[0][0] for episode in play(envs, actions)]
    states = get_states(envs)
    assert states == get_states(envs)
    resumed = [make_vector("Hopper-v4", 2, seed=3, vectorizer="envpool") for _ in range(2)]
    for each in resumed:
        obs, exact = set_states(each, states)
        assert exact == [False, False]
        assert not {row.tobytes() for row in obs} & set(begun), "the first episodes again"
    assert play(resumed[0], actions) == play(resumed[1], actions)
    play(envs, actions)
    assert get_states(envs) != states, "each checkpoint leads to other episodes"


def test_a_stopped_run_continues_and_says_what_it_lost(pool: Any, tmp_path: Path) -> None:
    arguments = flags(env="Hopper-v4", num_envs=2, vectorizer="envpool", run_dir=tmp_path / "run")
    assert killed_at("sac", [("update", 200)], *arguments).returncode == 0
    result = command(*arguments)
    assert result.returncode == 0, result.stderr
    assert "EnvPool cannot save the state of its environments, so they start new episodes" in result.stderr
