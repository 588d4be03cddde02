"""`--env-kwargs`, `--time-limit` and `--action-repeat`: every environment of a run gets them, and files state them."""

import dataclasses
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import h5py
import numpy as np
import pytest
from conftest import OFFLINE, PENDULUM, every_algorithm, final_state, module, same
from gymnasium.spaces import Box

from algos.sac import Args
from common.arguments import env_settings
from common.errors import Finished, InputError
from envs import make as environments
from envs.make import action_box, make
from envs.rollout import Rollout
from envs.settings import RESERVED
from offline.dataset import load
from offline.write import write_dataset
from tools.collect import Args as Collection
from tools.collect import collect
from tools.evaluate import Args as Evaluation
from tools.evaluate import main as evaluate
from tools.policies import read_trained
from tools.video import seconds_per_step


class Counting(gym.Env[Any, Any]):
    """Step k observes and pays k; the fifth ends the episode. `success` is true in the steps of `solved_at`."""

    observation_space = Box(-np.inf, np.inf, (1,), np.float32)

    def __init__(self, solved_at: tuple[int, ...] = (), strength: float = 1.0) -> None:
        self.action_space = Box(-strength, strength, (1,), np.float32)
        self.solved_at, self.steps = solved_at, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: np.ndarray) -> Any:
        self.steps += 1
        obs = np.full(1, self.steps, np.float32)
        return obs, float(self.steps), self.steps == 5, False, {"success": self.steps in self.solved_at}


gym.register("Counting-v0", entry_point=Counting)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of each environment that is made."""
    found: list[dict[str, Any]] = []
    original = environments.gym.make

    def note(spec: Any, **kwargs: Any) -> Any:
        found.append({k: v for k, v in kwargs.items() if k != "disable_env_checker"})
        return original(spec, **kwargs)

    monkeypatch.setattr(environments.gym, "make", note)
    return found


def dataset(path: Path, **attributes: Any) -> str:
    """Return the path of a copy of the Pendulum dataset with these attributes."""
    path.write_bytes(PENDULUM.read_bytes())
    with h5py.File(path, "a") as file:
        file.attrs.update(attributes)
    return str(path)


def run(env: Any, actions: int) -> list[tuple[float, float, bool, bool, Any]]:
    """Return observation, reward, both ends and success of each step of an episode."""
    env.reset(seed=0)
    steps = []
    for _ in range(actions):
        obs, reward, terminated, truncated, info = env.step(np.zeros(1, np.float32))
        steps.append((float(obs[0]), reward, terminated, truncated, info.get("success")))
    return steps


def test_an_action_is_repeated_and_its_rewards_summed() -> None:
    """Also at the end of the episode, which comes in the middle of the last action."""
    steps = run(make("Counting-v0", action_repeat=2, solved_at=(1,)), 3)
    assert steps == [
        (2.0, 1.0 + 2.0, False, False, True),  # solved in the first of both steps
        (4.0, 3.0 + 4.0, False, False, False),
        (5.0, 5.0, True, False, False),
    ]


def test_a_time_limit_counts_the_environments_own_steps() -> None:
    assert [step[2:4] for step in run(make("Counting-v0", max_episode_steps=4), 4)] == [(False, False)] * 3 + [
        (False, True)
    ]
    assert [step[2:4] for step in run(make("Counting-v0", max_episode_steps=4, action_repeat=2), 2)] == [
        (False, False),
        (False, True),
    ]


def test_repeated_actions_are_restored_exactly() -> None:
    """In the middle of an episode, as a checkpoint does."""
    env = make("Pendulum-v1", action_repeat=3, g=5.0)
    env.reset(seed=4)
    actions = np.random.default_rng(0).uniform(-1, 1, (20, 1)).astype(np.float32)
    for action in actions[:10]:
        env.step(action)
    other = make("Pendulum-v1", action_repeat=3, g=5.0)
    assert other.set_state(env.get_state())
    for action in actions[10:]:
        one, two = env.step(action), other.step(action)
        np.testing.assert_array_equal(one[0], two[0])
        assert one[1:4] == two[1:4]


@every_algorithm
def test_every_environment_of_a_run_gets_the_settings(
    algo: str, small: Callable[..., Any], made: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Those of training and of evaluations. Each episode has 60 steps of the environment, 30 actions."""
    steps: dict[str, Any] = {"total_steps": 40}
    if algo in OFFLINE:
        path = dataset(tmp_path / "data.hdf5", env_kwargs='{"g": 7.0, "action_repeat": 2}')
        steps = {"offline_steps": 1, "online_steps": 40, "dataset": path}
    args = small(algo, env_kwargs={"g": 7.0}, time_limit=60, action_repeat=2, **steps)
    result = module(algo).train(args)
    assert made
    assert all(kwargs == {"g": 7.0, "max_episode_steps": 60} for kwargs in made)
    assert {episode.length for episode in result.episodes} == {30}
    stored = json.loads((args.run_dir / "config.json").read_text())["arguments"]
    assert env_settings(**stored) == {"g": 7.0, "max_episode_steps": 60, "action_repeat": 2}


def test_a_stopped_run_with_settings_resumes_exactly(small: Callable[..., Any], tmp_path: Path) -> None:
    """In the middle of an episode, bit for bit."""
    settings = {"env_kwargs": '{"g": 7.0}', "time_limit": 90, "action_repeat": 2, "checkpoint_every": 25}
    module("sac").train(small(total_steps=200, run_dir=tmp_path / "a", **settings))
    for steps in (125, 200):
        module("sac").train(small(total_steps=steps, run_dir=tmp_path / "b", **settings))
    one, other = final_state(tmp_path / "a"), final_state(tmp_path / "b")
    assert same(one["agent"], other["agent"])
    assert same(one["rollout"], other["rollout"])


def test_settings_are_part_of_the_runs_name() -> None:
    """Two variants of an environment do not share a folder, however their JSON is written."""
    labels = [Args(env_kwargs=text).label for text in ('{"g": 5, "x": 1}', '{"x":1,"g":5}', '{"g": 6}', "{}")]
    assert labels[0] == labels[1]
    assert len(set(labels)) == 3
    assert "time-limit-50" in Args(time_limit=50).label
    assert "action-repeat-2" in Args(action_repeat=2).label


@pytest.mark.parametrize("text", ["{", "[1]", "7", '"g"', "[" * 100_000])
def test_settings_that_are_no_dict_are_refused(text: str, small: Callable[..., Any]) -> None:
    with pytest.raises(InputError, match=r"--env-kwargs is .*: give a dict in JSON, such as"):
        small(env_kwargs=text)


@pytest.mark.parametrize("name", RESERVED)
def test_settings_of_our_own_functions_are_refused(name: str, small: Callable[..., Any]) -> None:
    args = small(env_kwargs={name: 1})
    with pytest.raises(InputError, match=f"--env-kwargs has {name}, which no constructor gets: leave it out, or"):
        Rollout(args.env, args)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "2", 2**40, None])
def test_wrong_counts_in_settings_are_refused(value: Any, small: Callable[..., Any]) -> None:
    """None is the registered time limit; there is no registered number of repeats."""
    for name in ("action_repeat", "max_episode_steps")[: 1 if value is None else 2]:
        args = small(env_kwargs={name: value})
        with pytest.raises(InputError, match=f"{name} is .*: give a whole number above 0"):
            Rollout(args.env, args)


def test_a_constructor_that_does_not_know_them_is_named(small: Callable[..., Any]) -> None:
    args = small(env_kwargs={"wind": 1})
    with pytest.raises(InputError, match=r"(?s)unexpected keyword.*Check the arguments of its constructor"):
        Rollout(args.env, args)


def test_a_dataset_brings_its_settings(tmp_path: Path) -> None:
    """They hold for the environment that it names, and the user's for another one."""
    data = load(dataset(tmp_path / "a.hdf5", env="Pendulum-v1", env_kwargs='{"g": 7.0, "action_repeat": 2}'))
    own = {"g": 7.0, "action_repeat": 2}
    assert data.evaluation_env("", {}) == ("Pendulum-v1", own)
    assert data.evaluation_env("Pendulum-v1", {"g": 7}) == ("Pendulum-v1", own)
    assert data.evaluation_env("", {"max_episode_steps": 50}) == ("Pendulum-v1", own | {"max_episode_steps": 50})
    assert data.evaluation_env("Counting-v0", {"strength": 2.0}) == ("Counting-v0", {"strength": 2.0})


def test_a_dataset_that_states_none_takes_the_users(tmp_path: Path) -> None:
    """An older file may have been made in any variant. One that states `{}` was made in the plain one."""
    silent, plain = dataset(tmp_path / "a.hdf5"), dataset(tmp_path / "b.hdf5", env_kwargs="{}")
    with h5py.File(silent, "a") as file:
        del file.attrs["env_kwargs"]
    assert load(silent).evaluation_env("", {"g": 5.0}) == ("Pendulum-v1", {"g": 5.0})
    with pytest.raises(InputError, match=r'b.hdf5 was made in Pendulum-v1 with the arguments {}, not {"g": 5.0}'):
        load(plain).evaluation_env("", {"g": 5.0})


@pytest.mark.parametrize("algo", OFFLINE)
def test_data_of_another_variant_are_refused(algo: str, small: Callable[..., Any], tmp_path: Path) -> None:
    """Before anything is written."""
    path = dataset(tmp_path / "a.hdf5", env_kwargs='{"g": 7.0}')
    for asked in ({"env_kwargs": {"g": 5.0}}, {"action_repeat": 2}):
        with pytest.raises(InputError, match="was made in Pendulum-v1 with the arguments"):
            module(algo).train(small(algo, dataset=path, **asked))
    assert not (tmp_path / "run").exists()


def test_the_box_of_actions_is_that_of_the_variant(tmp_path: Path) -> None:
    """An argument may change it, so an action of the data has another place in [-1, 1]."""
    assert action_box("Counting-v0", strength=4.0).high.tolist() == [4.0]
    path = dataset(tmp_path / "a.hdf5", env="Counting-v0", env_kwargs='{"strength": 4.0}')
    with h5py.File(path, "a") as file:
        del file.attrs["action_low"], file.attrs["action_high"]
        actions = file["actions"][:, 0]
    np.testing.assert_allclose(load(path).column("actions")[:, 0], actions / 4.0, atol=1e-6)


def test_a_policy_acts_in_its_own_variant(
    small: Callable[..., Any], made: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Other arguments give a warning, or are refused for data. Another environment takes the user's."""
    folder = module("sac").train(small(total_steps=60, env_kwargs={"g": 7.0}, time_limit=20)).folder
    made.clear()
    (row,) = evaluate(Evaluation((str(folder),), episodes=2))
    assert row["length"] == 20
    assert all(kwargs == {"g": 7.0, "max_episode_steps": 20} for kwargs in made)
    made.clear()
    (row,) = evaluate(Evaluation((str(folder),), episodes=2, env_kwargs='{"g": 5.0}'))
    assert row["length"] == 20
    assert all(kwargs == {"g": 5.0, "max_episode_steps": 20} for kwargs in made)
    there, here = '{"g": 7.0, "max_episode_steps": 20}', '{"g": 5.0, "max_episode_steps": 20}'
    said = capsys.readouterr().err
    assert said.count(f"was made in Pendulum-v1 with the arguments {there}, and is used with {here}") == 1
    with pytest.raises(InputError, match="leave its settings out to use those"):
        read_trained(folder).environment(env_kwargs='{"g": 5.0}')
    trained = read_trained(folder / "policy" / "last.safetensors")
    assert trained.environment("Counting-v0", '{"strength": 2.0}') == ("Counting-v0", {"strength": 2.0})


@pytest.mark.parametrize("algo", OFFLINE)
def test_networks_of_another_variant_are_refused(algo: str, small: Callable[..., Any], tmp_path: Path) -> None:
    """`--init-from` takes a policy that was trained in the same environment only."""
    path = dataset(tmp_path / "a.hdf5")
    with h5py.File(path, "a") as file:
        del file.attrs["env_kwargs"]
    arguments = {"dataset": path, "offline_steps": 5, "online_steps": 0}
    module(algo).train(small(algo, run_dir=tmp_path / "first", env_kwargs={"g": 7.0}, **arguments))
    first = {"init_from": tmp_path / "first", "run_dir": tmp_path / "second"}
    with pytest.raises(InputError, match="was trained in Pendulum-v1 with other arguments: give the same --env-kwargs"):
        module(algo).train(small(algo, **arguments, **first))
    assert not (tmp_path / "second").exists()


@pytest.mark.parametrize("output", ["data.hdf5", "minari:test/variant-v0"])
def test_collected_data_state_their_variant(output: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Both formats bring it back, so that a run on them needs no flag, and a run with other flags is refused."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    settings = {"g": 5.0, "max_episode_steps": 60, "action_repeat": 2}
    arguments: dict[str, Any] = {"env_kwargs": json.dumps(settings), "transitions": 60, "num_envs": 1}
    collect(Collection(output, "Pendulum-v1", ("random",), **arguments))
    data = load(output.removeprefix("minari:"))
    assert data.ends.tolist() == [30, 60]
    env, found = data.evaluation_env("", {})
    assert (env, {name: found[name] for name in settings}) == ("Pendulum-v1", settings)
    again = make(env, **found)
    obs, _ = again.reset(seed=0)
    again.unwrapped.state = np.arctan2(data.column("obs")[0, 1], data.column("obs")[0, 0]), data.column("obs")[0, 2]
    obs, reward, *_ = again.step(data.column("actions")[0])
    np.testing.assert_allclose(obs, data.column("next_obs")[0], atol=1e-4)
    assert reward == pytest.approx(float(data.column("rewards")[0]), abs=1e-3)
    with pytest.raises(InputError, match="was made in Pendulum-v1 with the arguments"):
        data.evaluation_env("", {"g": 9.0})


def test_collected_data_have_the_variant_of_the_policies(small: Callable[..., Any], tmp_path: Path) -> None:
    """A run's own, which the same command finds again. Policies of two variants do not fit together."""
    for name, g in (("a", 7.0), ("b", 8.0)):
        module("sac").train(small(total_steps=60, env_kwargs={"g": g}, run_dir=tmp_path / name))
    arguments: dict[str, Any] = {"transitions": 20, "num_envs": 1}
    first = Collection("data.hdf5", policy=(str(tmp_path / "a"),), **arguments)
    collect(first)
    assert load("data.hdf5").evaluation_env("", {}) == ("Pendulum-v1", {"g": 7.0})
    with pytest.raises(Finished):
        collect(first)
    with pytest.raises(InputError, match="were trained with other arguments of Pendulum-v1"):
        collect(Collection("both.hdf5", policy=(str(tmp_path / "a"), str(tmp_path / "b")), **arguments))
    with pytest.raises(InputError, match="leave its settings out"):
        collect(dataclasses.replace(first, output="other.hdf5", env_kwargs='{"g": 8.0}'))


def test_policies_with_unequal_time_limits_collect_no_data_together(small: Callable[..., Any], tmp_path: Path) -> None:
    """One file has one limit. With equal limits, episodes end at it."""
    for name, limit in (("a", 5), ("b", 6), ("c", 5)):
        module("sac").train(small(total_steps=60, time_limit=limit, run_dir=tmp_path / name))

    def collected(*names: str) -> Collection:
        folders = tuple(str(tmp_path / name) for name in names)
        return Collection("".join(names) + ".hdf5", policy=folders, transitions=20, num_envs=1)

    with pytest.raises(InputError, match="were trained with other arguments of Pendulum-v1"):
        collect(collected("a", "b"))
    collect(collected("a", "c"))
    with h5py.File("ac.hdf5") as file:
        assert np.flatnonzero(file["timeouts"]).tolist() == [4, 9, 14, 19]


def test_an_action_repeat_of_one_is_a_setting(tmp_path: Path) -> None:
    """Given, it is not the same as left out: data that repeat actions are refused."""
    path = dataset(tmp_path / "a.hdf5", env_kwargs='{"action_repeat": 4}')
    assert load(path).evaluation_env("", Args().env_settings)[1] == {"action_repeat": 4}
    with pytest.raises(InputError, match="was made in Pendulum-v1"):
        load(path).evaluation_env("", Args(action_repeat=1).env_settings)


def test_a_video_shows_repeated_actions_at_their_speed() -> None:
    """An action of four steps takes four times as long, by the environment's `dt` or by MuJoCo's clock."""
    for env_id in ("Pendulum-v1", "InvertedPendulum-v5"):
        once, repeated = (seconds_per_step(make(env_id, action_repeat=times)) for times in (1, 4))
        assert repeated == pytest.approx(4 * once)


def test_scores_are_those_of_the_registered_environment(small: Callable[..., Any], tmp_path: Path) -> None:
    """Published reference scores do not apply to a variant, so it has none."""
    for name, settings in (("plain", {}), ("short", {"time_limit": 100}), ("other", {"action_repeat": 2})):
        run_dir = tmp_path / name
        module("sac").train(small(env="Hopper-v4", total_steps=60, eval_episodes=1, run_dir=run_dir, **settings))
        (row,) = evaluate(Evaluation((str(run_dir),), episodes=1))
        assert (row["score"] is not None) == (name == "plain")


def test_training_on_a_dataset_gives_a_variant_no_score(small: Callable[..., Any], tmp_path: Path) -> None:
    """Neither of the registered environment nor of a dataset that was made in another one; its own apply."""
    noisy = {"reset_noise_scale": 0.1}
    for name, kwargs, own, scored in (
        ("plain", {}, None, True),
        ("variant", noisy, None, False),
        ("with its own", noisy, (0.0, 5.0), True),
    ):
        path, rng, steps = tmp_path / f"{name}.hdf5", np.random.default_rng(1), np.arange(60)
        write_dataset(
            path,
            observations=rng.normal(size=(60, 11)),
            actions=rng.uniform(-1.0, 1.0, (60, 3)),
            rewards=np.ones(60),
            terminations=np.zeros(60, bool),
            episode_ends=steps % 20 == 19,
            env="Hopper-v4",
            env_kwargs=kwargs,
            ref_scores=own,
        )
        args = small("bc", dataset=str(path), env="", run_dir=tmp_path / name, eval_episodes=1)
        module("bc").train(args)
        scores = np.genfromtxt(args.run_dir / "evaluations.csv", delimiter=",", names=True)["normalized_score"]
        assert (not np.isnan(scores).any()) == scored, name


def test_settings_that_are_dropped_are_named(small: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    """A policy that is used in another environment leaves its own settings behind."""
    folder = module("sac").train(small(total_steps=60, time_limit=20)).folder
    caplog.set_level("WARNING", "onramp")
    logging.getLogger("onramp").addHandler(caplog.handler)
    assert read_trained(folder).environment("Counting-v0") == ("Counting-v0", {})
    assert "was trained in Pendulum-v1 with {'max_episode_steps': 20}, which do not apply to Counting-v0" in caplog.text
