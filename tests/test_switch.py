"""The switch: what is sampled before it and behind it, when the policy is frozen, and when evaluations are due."""

import csv
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import OFFLINE, PENDULUM, final_state, module, replay_bytes, same, stored
from d4rl_file import make
from test_bad_input import bound_by_permissions

from algos.iql import PRESETS, Args
from common.errors import InputError
from common.replay_buffer import Batch
from common.run import Run
from offline.dataset import load
from offline.policies import read_run
from offline.switch import Switch, domain, with_presets


@pytest.fixture
def switch(tmp_path: Path) -> Any:
    """A switch over 30 transitions whose obs are 0, 1, 2, …; of `online` transitions, obs are 1000, 1001, …."""

    def build(
        online: int = 20,
        num_envs: int = 1,
        scale: float = 1.0,
        shift: float = 0.0,
        discount: float | None = None,
        failure: float | None = None,
        full_batch: int = 0,
        **changed: Any,
    ) -> Switch:
        path = make(tmp_path / "data.hdf5", ".............................t", actions=np.zeros((30, 1)))
        args = Args(dataset=str(path), env="Pendulum-v1", run_dir=tmp_path / "run", online_steps=100, **changed)
        args.num_envs = num_envs
        made = Switch(args, Run("iql", args), scale, shift, discount=discount, failure=failure, full_batch=full_batch)
        for i in range(online):
            made.add(
                *(np.full((1, n) if n else 1, 1000.0 + i) for n in (2, 1, 0, 2)), np.zeros(1, bool), np.zeros(1, bool)
            )
        return made

    return build


def sampled(switch: Switch, size: int, step: int, seed: int = 0) -> list[float]:
    return switch.sample(size, step > 0, torch.Generator().manual_seed(seed)).obs[:, 0].tolist()


@pytest.mark.parametrize("retain", ["none", "append", "mix"])
def test_before_the_switch_the_dataset_alone(switch: Any, retain: str) -> None:
    for step in (-5, 0):
        assert set(sampled(switch(retain=retain), 2_000, step)) == set(range(30))


def test_none_samples_online_transitions_alone(switch: Any) -> None:
    assert set(sampled(switch(retain="none"), 2_000, 1)) == {1000.0 + i for i in range(20)}


def test_append_is_one_buffer(switch: Any) -> None:
    """Every one of the 50 transitions is equally likely."""
    drawn = sampled(switch(retain="append"), 50_000, 1)
    values, counts = np.unique(drawn, return_counts=True)
    assert values.tolist() == [*range(30), *(1000.0 + i for i in range(20))]
    assert np.abs(counts - 1000).max() < 5 * np.sqrt(1000)


@pytest.mark.parametrize(("ratio", "size", "offline"), [(0.5, 256, 128), (0.25, 256, 64), (0.7, 10, 7), (0.5, 5, 2)])
def test_mix_has_a_fixed_share_spread_evenly(switch: Any, ratio: float, size: int, offline: int) -> None:
    mixed = switch(retain="mix", offline_ratio=ratio)
    for seed in range(3):
        of_data = [value < 1000 for value in sampled(mixed, size, 1, seed)]
        assert sum(of_data) == offline
        for first in range(size - 3):  # RLPD slices its batches: each slice must have its share
            assert abs(sum(of_data[first : first + 4]) - 4 * ratio) <= 1.5


def test_fields_of_a_mixed_batch_stay_together(switch: Any) -> None:
    for retain in ("append", "mix"):
        batch = switch(retain=retain).sample(500, True, torch.Generator().manual_seed(0))
        online = batch.obs[:, 0] >= 1000
        assert torch.equal(batch.next_obs[online], batch.obs[online])  # as `switch` made them
        assert torch.equal(batch.rewards[online], batch.obs[online, 0])
        assert torch.equal(batch.rewards[~online], 100 + batch.obs[~online, 0])
        assert batch.terminations[~online].sum() == (batch.obs[~online, 0] == 29).sum()


def test_online_rewards_are_scaled_as_the_datasets(switch: Any) -> None:
    made = switch(online=1, scale=10.0, shift=-5.0)
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
def test_updates(switch: Any, retain: str, num_envs: int, expected: dict[int, int]) -> None:
    made = switch(retain=retain, num_envs=num_envs, warmup_steps=7, utd=3, full_batch=4)
    assert {step: made.updates(step) for step in expected} == expected


@pytest.mark.parametrize(
    ("retain", "warmup_steps", "first"), [("mix", 5_000, 9), ("none", 0, 17), ("none", 30, 31), ("append", 5_000, 1)]
)
@pytest.mark.parametrize("algo", ["bc", "cql", "iql", "td3_bc"])
def test_the_first_online_update_has_a_full_batch(
    algo: str, retain: str, warmup_steps: int, first: int, small: Any
) -> None:
    """Of 16 transitions, with `mix` 8 of them online ones. In version 0.1 it came at step 1."""
    steps = {"offline_steps": 0, "online_steps": 40, "warmup_steps": warmup_steps}
    args = small(algo, retain=retain, batch_size=16, **steps, **({"calibrated": False} if algo == "cql" else {}))
    module(algo).train(args)
    optimizer = "actor_optimizer" if algo == "bc" else "critic_optimizer"
    updates = int(final_state(args.run_dir)["agent"][optimizer]["state"][0]["step"])
    assert updates == 40 - first + 1


@pytest.mark.parametrize("retain", ["mix", "none"])
def test_an_online_phase_without_a_full_batch_warns(
    retain: str, small: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 256 transitions, 128 or all of them online ones: in 100 steps nothing is learned."""
    module("iql").train(small("iql", retain=retain, batch_size=256, offline_steps=0, online_steps=100, warmup_steps=0))
    assert (
        "nothing is learned in 100 environment steps: --warmup-steps, or the first batch, are"
        in capsys.readouterr().err
    )


def test_evaluations_are_due_on_both_sides_of_the_switch(switch: Any) -> None:
    made = switch()
    run: Any = SimpleNamespace(due=lambda _: False)
    due = [step for step in range(-3, 5) if made.evaluates(SimpleNamespace(**vars(run), step=step))]
    assert due == [0, 1]


class TestReturnsToGo:
    """Cal-QL's: of the dataset, and of online episodes once they are finished."""

    def episodes(self, made: Switch, num_envs: int, steps: int, seed: int = 0) -> list[list[tuple[float, float]]]:
        """Adds `steps` steps of every environment; returns the finished episodes as (obs, scaled reward)."""
        random = np.random.default_rng(seed)
        running: list[list[tuple[float, float]]] = [[] for _ in range(num_envs)]
        finished = []
        for step in range(steps):
            obs = np.array([[100.0 * i + step, 0.0] for i in range(num_envs)])
            rewards = random.normal(size=num_envs)
            terminations, truncations = random.random((2, num_envs)) < 0.1
            made.add(obs, np.zeros((num_envs, 1)), rewards, obs + 1, terminations, truncations)
            for i in range(num_envs):
                running[i].append((obs[i, 0], rewards[i] * made.dataset.reward_scale + made.dataset.reward_shift))
                if terminations[i] or truncations[i]:
                    finished.append(running[i])
                    running[i] = []
        return finished

    @pytest.mark.parametrize("num_envs", [1, 3])
    def test_of_online_episodes_are_discounted_sums(self, switch: Any, num_envs: int) -> None:
        made = switch(online=0, num_envs=num_envs, scale=2.0, shift=-1.0, discount=0.9)
        expected = {}
        for episode in self.episodes(made, num_envs, 30):
            for t, (obs, _) in enumerate(episode):
                expected[obs] = sum(0.9**k * reward for k, (_, reward) in enumerate(episode[t:]))
        assert len(made.online) == len(expected) > 10 * num_envs
        batch = made.online.at(torch.arange(len(expected)))
        for obs, to_go in zip(batch.obs[:, 0].tolist(), batch.returns_to_go.tolist(), strict=True):
            assert to_go == pytest.approx(expected[obs], rel=1e-5)

    def test_an_episode_that_only_failed_goes_on_for_ever(self, switch: Any) -> None:
        made = switch(online=0, scale=10.0, shift=-5.0, discount=0.9, failure=0.0)
        for reward in (0.0, 1.0):  # two episodes, the second succeeds at its end
            for last in (False, True):
                made.add(np.zeros((1, 2)), np.zeros((1, 1)), np.array([reward * last]), np.zeros((1, 2)),
                         np.zeros(1, bool), np.array([last]))  # fmt: skip
        found = made.online.at(torch.arange(4)).returns_to_go.tolist()
        assert found == pytest.approx([-50.0, -50.0, -5.0 + 0.9 * 5.0, 5.0])

    @pytest.mark.parametrize(("terminates", "expected"), [(False, [5 - 0.9 * 50, -50]), (True, [5 - 0.9 * 5, -5])])
    def test_an_episode_that_is_cut_behind_its_success_goes_on(
        self, switch: Any, terminates: bool, expected: list[float]
    ) -> None:
        made = switch(online=0, scale=10.0, shift=-5.0, discount=0.9, failure=0.0)
        for last in (False, True):
            made.add(np.zeros((1, 2)), np.zeros((1, 1)), np.array([not last], np.float32), np.zeros((1, 2)),
                     np.array([last and terminates]), np.array([last and not terminates]))  # fmt: skip
        assert made.online.at(torch.arange(2)).returns_to_go.tolist() == pytest.approx(expected)

    @pytest.mark.parametrize("retain", ["none", "append", "mix"])
    def test_batches_hold_those_of_their_rows(self, switch: Any, retain: str) -> None:
        made = switch(online=0, retain=retain, discount=0.9)
        self.episodes(made, 1, 100)
        of_data = dict(zip(made.dataset.column("obs")[:, 0], made.dataset.return_to_go(0.9), strict=True))
        rows = made.online.at(torch.arange(len(made.online)))
        of_online = dict(zip(rows.next_obs[:, 0].tolist(), rows.returns_to_go.tolist(), strict=True))
        for online in (False, True):
            batch = made.sample(200, online, torch.Generator().manual_seed(0))
            for obs, next_obs, action, to_go in zip(
                batch.obs[:, 0].tolist(), batch.next_obs[:, 0].tolist(), batch.rewards.tolist(),
                batch.returns_to_go.tolist(), strict=True,
            ):  # fmt: skip
                is_data = action == 100 + obs  # as d4rl_file makes rewards
                assert to_go == pytest.approx(of_data[obs] if is_data else of_online[next_obs])

    @pytest.mark.parametrize(("retain", "expected"), [("none", 0), ("mix", 0), ("append", 1)])
    def test_nothing_is_learned_from_an_empty_buffer(self, switch: Any, retain: str, expected: int) -> None:
        made = switch(online=0, retain=retain, discount=0.9, warmup_steps=3)
        assert made.updates(0) == 1
        assert made.updates(5) == expected
        self.episodes(made, 1, 50)
        assert made.updates(50) == 1

    def test_an_episode_given_up_is_forgotten(self, switch: Any) -> None:
        made = switch(online=0, num_envs=2, discount=0.9)
        for step, truncated in enumerate((False, True)):
            if step:
                made.give_up([True, False])
            obs = np.array([[1.0, step], [2.0, step]])
            made.add(obs, np.zeros((2, 1)), np.ones(2), obs, np.zeros(2, bool), np.full(2, truncated))
        assert made.online.at(torch.arange(3)).obs.tolist() == [[1, 0], [1, 1], [2, 1]]

    def test_an_episode_longer_than_the_buffer_leaves_its_end(self, switch: Any) -> None:
        made = switch(online=0, buffer_size=5, discount=0.9)
        for step in range(8):
            obs = np.full((1, 2), float(step))
            made.add(obs, np.zeros((1, 1)), np.ones(1), obs, np.zeros(1, bool), np.array([step == 7]))
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
        ],
    )
    def test_domains(self, env: str, dataset: str, expected: str) -> None:
        assert domain(env, dataset) == expected

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


class TestRuns:
    """Whole runs of IQL on Pendulum's data."""

    def test_steps_evaluations_and_transitions(self, small: Any) -> None:
        args = small("iql", offline_steps=60, online_steps=50, eval_every=1_000, num_envs=2, retain="append")
        module("iql").train(args)
        rows = list(csv.DictReader((args.run_dir / "evaluations.csv").open()))
        assert sorted({int(row["step"]) for row in rows}) == [-60, 0, 2, 50]
        state = final_state(args.run_dir)
        assert (state["logger"]["step"], state["buffer"]["added"]) == (50, 50)

    def test_the_policy_is_frozen_while_none_warms_up(self, small: Any, tmp_path: Path) -> None:
        agents = {}
        for steps in (0, 30, 31):
            args = small("iql", offline_steps=60, online_steps=steps, retain="none", warmup_steps=30,
                         run_dir=tmp_path / str(steps))  # fmt: skip
            module("iql").train(args)
            agents[steps] = final_state(args.run_dir)["agent"]
        networks = ("actor", "critic", "critic_target", "value")
        assert all(same(agents[30][name], agents[31][name]) is False for name in networks)
        # Without online steps the actor's learning rate decays: the others are as they were at the switch.
        assert all(same(agents[0][name], agents[30][name]) for name in networks[1:])

    def test_a_run_begins_with_another_runs_agent(self, small: Any, tmp_path: Path) -> None:
        first = small("iql", offline_steps=60, online_steps=0, run_dir=tmp_path / "first")
        module("iql").train(first)
        args = small("iql", offline_steps=0, online_steps=10, retain="none", warmup_steps=100, init_from=first.run_dir,
                     actor_lr=1e-3, temperature=7.0, seed=2)  # fmt: skip
        module("iql").train(args)
        states = [final_state(folder)["agent"] for folder in (first.run_dir, args.run_dir)]
        assert all(same(states[0][name], states[1][name]) for name in ("actor", "critic", "value"))
        moments = [state["actor_optimizer"]["state"] for state in states]
        assert same(*moments)
        assert all(moment["exp_avg"].any() for moment in moments[0].values())
        # The first run's learning rate had fallen to 0 as a cosine: this run's own flags hold.
        rates = [state["actor_optimizer"]["param_groups"][0]["lr"] for state in states]
        assert rates == pytest.approx([0.0, 1e-3], abs=1e-6)
        assert (states[0]["temperature"], states[1]["temperature"]) == (3.0, 7.0)
        assert not same(states[0]["generator"], states[1]["generator"])

    def test_what_cannot_be_begun_with_is_refused_and_leaves_no_folder(self, small: Any, tmp_path: Path) -> None:
        first = small("iql", offline_steps=5, online_steps=0, run_dir=tmp_path / "first")
        module("iql").train(first)
        for changed, said in (
            ({"init_from": tmp_path / "nowhere"}, "nowhere is not a run folder"),
            ({"hidden": (8, 8)}, "does not fit actor: size mismatch .* give another --init-from, or its flags"),
            ({"normalize_returns": False}, "learned from rewards .* give both the same scale"),
        ):
            with pytest.raises(InputError, match=said):
                module("iql").train(small("iql", **({"init_from": first.run_dir} | changed)))
            assert not (tmp_path / "run").exists()

    @pytest.mark.parametrize("algo", ["iql", "expo"])
    def test_another_algorithms_run_is_refused(self, small: Any, tmp_path: Path, algo: str) -> None:
        """Whatever its rewards: those of iql's are scaled."""
        first = small("bc", offline_steps=5, online_steps=0, run_dir=tmp_path / "first")
        module("bc").train(first)
        with pytest.raises(InputError, match=f"was trained by bc: give --init-from a run of {algo}"):
            module(algo).train(small(algo, init_from=first.run_dir))
        assert not (tmp_path / "run").exists()

    @pytest.mark.parametrize("finished", [True, False])
    def test_beginning_with_a_run_that_is_not_finished_is_said(
        self, small: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], finished: bool
    ) -> None:
        first = small("iql", offline_steps=5, online_steps=0, run_dir=tmp_path / "first")
        module("iql").train(first)
        if not finished:
            (first.run_dir / "DONE").unlink()
        module("iql").train(small("iql", offline_steps=5, online_steps=0, init_from=first.run_dir))
        assert ("first is not finished" in capsys.readouterr().err) is not finished

    def test_neither_offline_nor_online_steps_are_refused(self, small: Any) -> None:
        with pytest.raises(InputError, match="--offline-steps and --online-steps are 0"):
            small("iql", offline_steps=0, online_steps=0)

    @pytest.mark.parametrize("ratio", [0.99, 0.01])
    def test_a_share_that_rounds_to_nothing_is_refused(self, small: Any, ratio: float) -> None:
        with pytest.raises(InputError, match="of 16 transitions leaves none of one kind"):
            small("iql", retain="mix", offline_ratio=ratio)
        assert small("iql", retain="append", offline_ratio=ratio)
        assert small("iql", retain="mix", offline_ratio=ratio, batch_size=256)

    @pytest.mark.parametrize("algo", sorted({*OFFLINE} - {"expo"}))
    def test_no_losses_are_logged_where_nothing_is_learned(
        self, small: Any, capsys: pytest.CaptureFixture[str], algo: str
    ) -> None:
        """Those of the last update before a warm-up are not repeated in it; that it lasts to the end is said."""
        retain = "append" if algo == "wsrl" else "none"  # it warms up whatever is retained
        args = small(algo, env="Failing-v0", offline_steps=10, online_steps=1_000, retain=retain, warmup_steps=1_000)
        module(algo).train(args)
        rows = csv.DictReader((args.run_dir / "metrics.csv").open())
        steps = {int(row["step"]) for row in rows if row["name"].startswith("losses/")}
        assert steps == {0}
        said = capsys.readouterr().err
        assert said.count("nothing is learned in 1,000 environment steps: --warmup-steps") == 1

    @pytest.mark.parametrize("place", ["checkpoint", "config.json", "checkpoint/state.pt"])
    def test_a_run_that_may_not_be_read_gives_the_reason(self, place: str, small: Any) -> None:
        """At a resume, with --init-from and as a policy: in version 0.1 a traceback, or "damaged"."""
        with tempfile.TemporaryDirectory() as home:  # another user may read it, unlike pytest's own
            os.chmod(home, 0o755)
            folder = Path(home, "first")
            first = small("iql", offline_steps=20, online_steps=0, run_dir=folder)
            module("iql").train(first)
            (folder / "DONE").unlink()
            begun = small("iql", offline_steps=0, online_steps=10, init_from=folder, run_dir=Path(home, "second"))
            path = folder / place
            mode = path.stat().st_mode
            path.chmod(0)
            with bound_by_permissions(folder):
                for use in (lambda: module("iql").train(first), lambda: module("iql").train(begun),
                            lambda: read_run(folder)):  # fmt: skip
                    with pytest.raises(InputError, match=rf"{place}\S* cannot be read \(Permission denied\): .*permi"):
                        use()
            path.chmod(mode)

    def test_another_dataset_at_resume_is_refused(self, small: Any, tmp_path: Path) -> None:
        path = tmp_path / "data.hdf5"
        path.write_bytes(PENDULUM.read_bytes())
        arguments = {"dataset": str(path), "env": "Pendulum-v1", "offline_steps": 60, "online_steps": 10}
        module("iql").train(small("iql", **arguments))
        folder = small("iql").run_dir
        (folder / "DONE").unlink()
        make(path, "." * 300 + "o" + "." * 199 + "t", observations=np.zeros((501, 3)), actions=np.zeros((501, 1)))
        with pytest.raises(InputError, match=r"is not the dataset any more that .* began with"):
            module("iql").train(small("iql", **arguments))

    def test_scores_are_logged_where_a_reference_exists(self, small: Any, tmp_path: Path) -> None:
        import h5py

        path = tmp_path / "data.hdf5"
        path.write_bytes(PENDULUM.read_bytes())
        with h5py.File(path, "a") as file:
            file.attrs["ref_min_score"], file.attrs["ref_max_score"] = -2000.0, 0.0
        args = small("iql", dataset=str(path), offline_steps=20, online_steps=0)
        module("iql").train(args)
        rows = list(csv.DictReader((args.run_dir / "evaluations.csv").open()))
        for row in rows:
            assert float(row["normalized_score"]) == pytest.approx(100 * (float(row["return"]) + 2000) / 2000)

    @pytest.mark.parametrize(
        ("env", "named", "low"),
        [
            ("Pendulum-v1", True, -2000),
            ("Failing-v0", True, -100),
            ("Unscored-v0", True, -2000),
            ("Failing-v0", False, -2000),
        ],
    )
    def test_another_environment_scores_by_its_own_reference(
        self, small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, env: str, named: bool, low: float
    ) -> None:
        """Than that which the file names, where it names one."""
        import h5py

        path = tmp_path / "data.hdf5"
        path.write_bytes(PENDULUM.read_bytes())
        with h5py.File(path, "a") as file:
            file.attrs["ref_min_score"], file.attrs["ref_max_score"] = -2000.0, 0.0
            if not named:
                del file.attrs["env"]
        known = {"Failing-v0": (-100.0, 0.0), "Pendulum-v1": (-1.0, 0.0)}  # the file's own goes before the latter
        monkeypatch.setattr("offline.switch.reference", known.get)
        args = small("iql", dataset=str(path), env=env, offline_steps=1, online_steps=0)
        module("iql").train(args)
        rows = list(csv.DictReader((args.run_dir / "evaluations.csv").open()))
        for row in rows:
            assert float(row["normalized_score"]) == pytest.approx(100 * (float(row["return"]) - low) / -low)

    def test_what_a_checkpoint_holds_does_not_grow_with_the_dataset(self, small: Any) -> None:
        args = small("iql", offline_steps=40, online_steps=40, retain="append")
        module("iql").train(args)
        row = 4 * sum(load(str(PENDULUM)).buffer.widths)
        assert len(replay_bytes(args.run_dir)) == 40 * row


SPARSE = {"reward_scale": 10.0, "reward_shift": 5.0, "failure_reward": -1.0, "calibrated": True}


@pytest.mark.parametrize(
    ("algo", "changed", "failure", "success"),
    [
        ("cql", SPARSE, -5, 5),
        ("wsrl", SPARSE | {"online_cql": True}, -5, 5),
        ("iql", {"reward_shift": -3.0, "normalize_returns": False}, -4, -3),
        ("expo", {"reward_shift": -3.0}, -4, -3),
    ],
)
def test_a_runs_reward_flags_reach_the_dataset_and_what_is_stored_online(
    small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    algo: str, changed: dict[str, Any], failure: float, success: float,
) -> None:  # fmt: skip
    """Scaled and shifted; and with returns-to-go an episode that only failed goes on for ever."""
    solved = np.repeat([0.0, 1.0], 5)  # the second of two episodes, at its end
    path = make(tmp_path / "data.hdf5", "....o....t", observations=np.tile(solved[:, None], 3),
                actions=np.zeros((10, 1)), rewards=np.eye(10)[9] - 1)  # fmt: skip
    drawn: list[Batch] = []
    sample = Switch.sample
    monkeypatch.setattr(Switch, "sample", lambda *args: drawn.append(batch := sample(*args)) or batch)
    args = small(algo, dataset=str(path), env="Failing-v0", gamma=0.9, batch_size=64, offline_steps=1, online_steps=4,
                 **changed)  # fmt: skip
    module(algo).train(args)
    data, online = drawn[0], stored(args.run_dir)
    assert set(data.rewards.tolist()) == {failure, success}
    assert online.rewards.tolist() == [failure] * 4
    if "failure_reward" in changed:
        for to_go in (data.returns_to_go[data.obs[:, 0] == 0], online.returns_to_go):
            assert to_go.tolist() == pytest.approx([failure / (1 - 0.9)] * len(to_go))
        assert data.returns_to_go.max().item() == success
