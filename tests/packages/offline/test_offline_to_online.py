"""From a dataset to online learning: what is sampled before and after the switch, returns-to-go, and presets."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import OFFLINE, PENDULUM, final_state, module, with_flag
from d4rl_file import make

from algos.iql import PRESETS, Args
from common.replay_buffer import Batch
from common.run import Run
from envs.rollout import Transitions
from offline.dataset import read
from offline.environments import domain
from offline.offline_to_online import OfflineToOnline, with_presets
from offline.rewards import RewardTransform


def transitions(obs: np.ndarray, rewards: Any, terminated: Any = False, truncated: Any = False) -> Transitions:
    """One of each environment, obs [num_envs, 2], which are the next obs too; the action is 0."""
    n = len(obs)
    ends = (np.broadcast_to(end, n) for end in (terminated, truncated))
    return Transitions(obs, np.zeros((n, 1)), np.broadcast_to(np.float64(rewards), n), obs, *ends)


@pytest.fixture
def offline_to_online(tmp_path: Path) -> Any:
    """Make one over 30 transitions whose obs are 0, 1, 2, …; of `online` transitions, obs are 1000, 1001, …."""

    def build(
        online: int = 20,
        num_envs: int = 1,
        scale: float = 1.0,
        shift: float = 0.0,
        discount: float | None = None,
        failure: float | None = None,
        full_batch: int = 0,
        **changed: Any,
    ) -> OfflineToOnline:
        path = make(tmp_path / "data.hdf5", ".............................t", actions=np.zeros((30, 1)))
        args = Args(dataset=str(path), env="Pendulum-v1", run_dir=tmp_path / "run", online_steps=100, **changed)
        args.num_envs = num_envs
        made = OfflineToOnline(
            args,
            Run("iql", args),
            RewardTransform(scale, shift),
            discount=discount,
            failure=failure,
            online_batch=full_batch or None,
            wait_for_full_batch=full_batch > 0,
        )
        for i in range(online):
            made.add(transitions(np.full((1, 2), 1000.0 + i), 1000.0 + i))
        return made

    return build


def sampled(data: OfflineToOnline, size: int, step: int, seed: int = 0) -> list[float]:
    return batch_of(data, size, step > 0, seed).obs[:, 0].tolist()


def batch_of(data: OfflineToOnline, size: int, online: bool, seed: int = 0) -> Batch:
    data._set_batch_sizes(size, size)
    return data.sample(online, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("recorded", "of"), [("Other-v0", " of Other-v0"), ("Pendulum-v1", ""), (None, "")])
def test_data_of_another_environment_are_named(
    offline_to_online: Any, caplog: pytest.LogCaptureFixture, recorded: str | None, of: str
) -> None:
    """Their sizes may fit."""
    made = offline_to_online()
    made.dataset.env = recorded
    caplog.clear()
    made._report(SimpleNamespace(learns_after=lambda *_: None))
    assert f"30 transitions in 1 episodes{of}, evaluated in Pendulum-v1" in caplog.text


@pytest.mark.parametrize("retain", ["none", "append", "mix"])
def test_before_the_switch_the_dataset_alone(offline_to_online: Any, retain: str) -> None:
    for step in (-5, 0):
        assert set(sampled(offline_to_online(retain=retain), 2_000, step)) == set(range(30))


def test_none_samples_online_transitions_alone(offline_to_online: Any) -> None:
    assert set(sampled(offline_to_online(retain="none"), 2_000, 1)) == {1000.0 + i for i in range(20)}


def test_append_is_one_buffer(offline_to_online: Any) -> None:
    """Every one of the 50 transitions is equally likely."""
    drawn = sampled(offline_to_online(retain="append"), 50_000, 1)
    values, counts = np.unique(drawn, return_counts=True)
    assert values.tolist() == [*range(30), *(1000.0 + i for i in range(20))]
    assert np.abs(counts - 1000).max() < 5 * np.sqrt(1000)


@pytest.mark.parametrize(("ratio", "size", "offline"), [(0.5, 256, 128), (0.25, 256, 64), (0.7, 10, 7), (0.5, 5, 2)])
def test_mix_has_a_fixed_share_spread_evenly(offline_to_online: Any, ratio: float, size: int, offline: int) -> None:
    mixed = offline_to_online(retain="mix", offline_ratio=ratio)
    for seed in range(3):
        of_data = [value < 1000 for value in sampled(mixed, size, 1, seed)]
        assert sum(of_data) == offline
        for first in range(size - 3):  # RLPD slices its batches: each slice must have its share
            assert abs(sum(of_data[first : first + 4]) - 4 * ratio) <= 1.5


def test_fields_of_a_mixed_batch_stay_together(offline_to_online: Any) -> None:
    for retain in ("append", "mix"):
        batch = batch_of(offline_to_online(retain=retain), 500, True)
        online = batch.obs[:, 0] >= 1000
        assert torch.equal(batch.next_obs[online], batch.obs[online])  # as the fixture made them
        assert torch.equal(batch.rewards[online], batch.obs[online, 0])
        assert torch.equal(batch.rewards[~online], 100 + batch.obs[~online, 0])
        assert batch.terminations[~online].sum() == (batch.obs[~online, 0] == 29).sum()


def test_online_rewards_are_scaled_as_the_datasets(offline_to_online: Any) -> None:
    made = offline_to_online(online=1, scale=10.0, shift=-5.0)
    assert made.online.rows[0, 3].item() == 1000 * 10 - 5
    assert made.dataset.column("rewards")[0] == 100 * 10 - 5


@pytest.mark.parametrize(
    ("retain", "num_envs", "expected"),
    [
        ("none", 1, {-1: 1, 0: 1, 1: 0, 7: 0, 8: 3}),
        ("none", 2, {0: 1, 2: 0, 6: 0, 8: 6}),
        ("append", 1, {0: 1, 1: 3, 7: 3}),
        ("mix", 2, {0: 1, 2: 6}),
    ],
)
def test_updates_due(offline_to_online: Any, retain: str, num_envs: int, expected: dict[int, int]) -> None:
    """Three for each environment step, one for each offline step; none in the warm-up."""
    made = offline_to_online(retain=retain, num_envs=num_envs, warmup_steps=7, full_batch=4)
    assert {step: made.updates_due(step, utd=3) for step in expected} == expected


@pytest.mark.parametrize(
    ("retain", "warmup_steps", "first"), [("mix", 5_000, 9), ("none", 0, 17), ("none", 30, 31), ("append", 5_000, 1)]
)
@pytest.mark.parametrize("algo", sorted({*OFFLINE} - {*with_flag("random_steps"), *with_flag("warmup")}))
def test_the_first_online_update_has_a_full_batch(
    algo: str, retain: str, warmup_steps: int, first: int, small: Any
) -> None:
    """Of 16 transitions, with `mix` 8 of them online ones. In version 0.1 it came at step 1."""
    steps = {"offline_steps": 0, "online_steps": 40, "warmup_steps": warmup_steps}
    args = small(
        algo,
        retain=retain,
        batch_size=16,
        **steps,
        **({"calibrated": False} if algo in with_flag("calibrated") else {}),
    )
    module(algo).train(args)
    optimizer = "critic_optimizer" if algo in with_flag("critic_lr") else "actor_optimizer"
    updates = int(final_state(args.run_dir)["agent"][optimizer]["state"][0]["step"])
    assert updates == 40 - first + 1


@pytest.mark.parametrize("retain", ["mix", "none"])
def test_an_online_phase_without_a_full_batch_warns(
    retain: str, small: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 256 transitions, 128 or all of them online ones: in 100 steps nothing is learned."""
    module("iql").train(small("iql", retain=retain, batch_size=256, offline_steps=0, online_steps=100, warmup_steps=0))
    covered = 128 if retain == "mix" else 256
    said = f"nothing is learned in 100 environment steps: the first batch covers {covered}"
    assert said in capsys.readouterr().err


def test_the_longest_of_several_waits_is_named(small: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The random steps, and half of the first batch. Only one warning is printed."""
    module("rlpd").train(small("rlpd", batch_size=256, online_steps=100, random_steps=300))
    said = capsys.readouterr().err
    assert said.count("nothing is learned") == said.count("environment steps: --random-steps covers 300") == 1


class TestReturnsToGo:
    """Cal-QL's: of the dataset, and of online episodes once they are finished."""

    def episodes(
        self, made: OfflineToOnline, num_envs: int, steps: int, seed: int = 0
    ) -> list[list[tuple[float, float]]]:
        """Adds `steps` steps of every environment; returns the finished episodes as (obs, scaled reward)."""
        random = np.random.default_rng(seed)
        running: list[list[tuple[float, float]]] = [[] for _ in range(num_envs)]
        finished = []
        for step in range(steps):
            obs = np.array([[100.0 * i + step, 0.0] for i in range(num_envs)])
            rewards = random.normal(size=num_envs)
            terminations, truncations = random.random((2, num_envs)) < 0.1
            made.add(transitions(obs, rewards, terminations, truncations)._replace(next_obs=obs + 1))
            for i in range(num_envs):
                running[i].append((obs[i, 0], made.dataset.rewards(rewards[i])))
                if terminations[i] or truncations[i]:
                    finished.append(running[i])
                    running[i] = []
        return finished

    @pytest.mark.parametrize("num_envs", [1, 3])
    def test_of_online_episodes_are_discounted_sums(self, offline_to_online: Any, num_envs: int) -> None:
        made = offline_to_online(online=0, num_envs=num_envs, scale=2.0, shift=-1.0, discount=0.9)
        expected = {}
        for episode in self.episodes(made, num_envs, 30):
            for t, (obs, _) in enumerate(episode):
                expected[obs] = sum(0.9**k * reward for k, (_, reward) in enumerate(episode[t:]))
        assert len(made.online) == len(expected) > 10 * num_envs
        batch = made.online.at(torch.arange(len(expected)))
        for obs, to_go in zip(batch.obs[:, 0].tolist(), batch.returns_to_go.tolist(), strict=True):
            assert to_go == pytest.approx(expected[obs], rel=1e-5)

    def test_an_episode_that_only_failed_continues_for_ever(self, offline_to_online: Any) -> None:
        made = offline_to_online(online=0, scale=10.0, shift=-5.0, discount=0.9, failure=0.0)
        for reward in (0.0, 1.0):  # two episodes, the second succeeds at its end
            for last in (False, True):
                made.add(transitions(np.zeros((1, 2)), reward * last, truncated=last))
        found = made.online.at(torch.arange(4)).returns_to_go.tolist()
        assert found == pytest.approx([-50.0, -50.0, -5.0 + 0.9 * 5.0, 5.0])

    @pytest.mark.parametrize(("terminates", "expected"), [(False, [5 - 0.9 * 50, -50]), (True, [5 - 0.9 * 5, -5])])
    def test_an_episode_that_is_cut_behind_its_success_continues(
        self, offline_to_online: Any, terminates: bool, expected: list[float]
    ) -> None:
        made = offline_to_online(online=0, scale=10.0, shift=-5.0, discount=0.9, failure=0.0)
        for last in (False, True):
            made.add(transitions(np.zeros((1, 2)), not last, last and terminates, last and not terminates))
        assert made.online.at(torch.arange(2)).returns_to_go.tolist() == pytest.approx(expected)

    @pytest.mark.parametrize("retain", ["none", "append", "mix"])
    def test_batches_hold_those_of_their_rows(self, offline_to_online: Any, retain: str) -> None:
        made = offline_to_online(online=0, retain=retain, discount=0.9)
        self.episodes(made, 1, 100)
        of_data = dict(zip(made.dataset.column("obs")[:, 0], made.dataset.return_to_go(0.9), strict=True))
        rows = made.online.at(torch.arange(len(made.online)))
        of_online = dict(zip(rows.next_obs[:, 0].tolist(), rows.returns_to_go.tolist(), strict=True))
        for online in (False, True):
            batch = batch_of(made, 200, online)
            for obs, next_obs, action, to_go in zip(
                batch.obs[:, 0].tolist(), batch.next_obs[:, 0].tolist(), batch.rewards.tolist(),
                batch.returns_to_go.tolist(), strict=True,
            ):  # fmt: skip
                is_data = action == 100 + obs  # as d4rl_file makes rewards
                assert to_go == pytest.approx(of_data[obs] if is_data else of_online[next_obs])

    @pytest.mark.parametrize(("retain", "expected"), [("none", 0), ("mix", 0), ("append", 1)])
    def test_nothing_is_learned_from_an_empty_buffer(self, offline_to_online: Any, retain: str, expected: int) -> None:
        made = offline_to_online(online=0, retain=retain, discount=0.9, warmup_steps=3)
        assert made.updates_due(0) == 1
        assert made.updates_due(5) == expected
        self.episodes(made, 1, 50)
        assert made.updates_due(50) == 1

    def test_a_discarded_episode_is_forgotten(self, offline_to_online: Any) -> None:
        made = offline_to_online(online=0, num_envs=2, discount=0.9)
        for step, truncated in enumerate((False, True)):
            if step:
                made.discard_unfinished_episodes([True, False])
            obs = np.array([[1.0, step], [2.0, step]])
            made.add(transitions(obs, 1.0, truncated=truncated))
        assert made.online.at(torch.arange(3)).obs.tolist() == [[1, 0], [1, 1], [2, 1]]

    def test_an_episode_longer_than_the_buffer_leaves_its_end(self, offline_to_online: Any) -> None:
        made = offline_to_online(online=0, buffer_size=5, discount=0.9)
        for step in range(8):
            obs = np.full((1, 2), float(step))
            made.add(transitions(obs, 1.0, truncated=step == 7))
        assert sorted(made.online.rows[:, 0].tolist()) == [3, 4, 5, 6, 7]
        assert made.online.at(torch.arange(5)).returns_to_go.max().item() == pytest.approx(
            sum(0.9**k for k in range(5))
        )


class TestPresets:
    @pytest.mark.parametrize(
        ("env", "dataset", "expected"),
        [
            ("Hopper-v4", "data/hopper-medium", "locomotion"),
            ("offline.environments:d4rl/antmaze-umaze-v2", "antmaze-umaze-v2", "antmaze"),
            ("AntMaze_UMaze-v4", "mine", "antmaze"),
            ("offline.environments:d4rl/pen-v1", "pen-human-v1", "adroit"),
            ("AdroitHandDoor-v1", "D4RL/door/human-v2", "adroit"),
            ("AdroitHandPen-v1", "pen-human-sparse", "adroit-binary"),
            ("AdroitHandPenSparse-v1", "mine", "adroit"),
            ("FrankaKitchen-v1", "D4RL/kitchen/mixed-v2", "kitchen"),
            ("PointMaze_UMaze-v3", "D4RL/pointmaze/umaze-v2", "maze2d"),
            ("Pendulum-v1", "pendulum-random", "locomotion"),  # not pen-
            ("Hopper-v4", "open-loop", "locomotion"),
            ("Hopper-v4", "indoor-runs", "locomotion"),
            ("", "antmaze-large-navigate-singletask-task1-v0", "ogbench"),  # not D4RL's antmaze
            ("cube-single-v0", "cube-single-play-singletask-v0", "ogbench"),
        ],
    )
    def test_domains(self, env: str, dataset: str, expected: str) -> None:
        assert domain(env, dataset) == expected

    @pytest.mark.parametrize(
        ("dataset", "expected"),
        [("pen-human-v1", 2), ("D4RL/pen/human-v2", 2), ("pen-human-sparse", 3), ("pen-cloned-v1", 1)],
    )
    def test_a_pattern_of_names_comes_before_the_domain(
        self, dataset: str, expected: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        found = read(str(PENDULUM), False, None)
        monkeypatch.setattr("offline.offline_to_online.read", lambda *_: found)
        table = {name: {**PRESETS["adroit"], "temperature": value}
                 for name, value in (("adroit", 1.0), ("pen-human-v*", 2.0), ("adroit-binary", 3.0))}  # fmt: skip
        assert with_presets(Args(dataset=dataset), table).temperature == expected
        assert "there is none" not in capsys.readouterr().err

    def test_they_fill_in_what_no_flag_says_and_say_so(self, capsys: pytest.CaptureFixture[str]) -> None:
        args = with_presets(Args(dataset=str(PENDULUM), env="AntMaze_UMaze-v4", temperature=3.5), PRESETS)
        assert (args.expectile, args.temperature, args.reward_shift) == (0.9, 3.5, -1.0)
        said = capsys.readouterr().err
        assert said.startswith("preset for antmaze: expectile 0.9, ")
        assert "temperature" not in said
        with_presets(Args(dataset=str(PENDULUM), env="PointMaze_UMaze-v3"), PRESETS)
        assert capsys.readouterr().err.startswith("preset for locomotion, there is none for maze2d: ")
        sparse = "offline.environments:adroit-binary/pen-v0"  # as dense Adroit, where there is nothing nearer
        assert with_presets(Args(dataset=str(PENDULUM), env=sparse), PRESETS).temperature == 0.5
        assert capsys.readouterr().err.startswith("preset for adroit, there is none for adroit-binary: ")
        args = with_presets(Args(dataset=str(PENDULUM)), PRESETS)
        assert (args.env, args.expectile, args.temperature, args.normalize_returns) == ("Pendulum-v1", 0.7, 3.0, True)
        assert None not in [getattr(args, name) for name in PRESETS["locomotion"]]

    @pytest.mark.parametrize(
        ("env", "online_steps", "warns"),
        [
            ("AdroitHandPen-v1", 10, True),
            ("AdroitHandPen-v1", 0, False),
            ("AdroitHandPenSparse-v1", 10, True),  # pays 10 and -0.1
            ("adroit-binary/pen-v0", 10, False),
        ],
    )
    def test_sparse_data_and_an_environment_that_may_pay_otherwise(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], env: str, online_steps: int, warns: bool
    ) -> None:
        path = tmp_path / "pen-human-sparse.hdf5"
        path.write_bytes(PENDULUM.read_bytes())
        with_presets(Args(dataset=str(path), env=env, online_steps=online_steps), PRESETS)
        assert ("has sparse rewards" in capsys.readouterr().err) is warns
