"""Whole runs from a dataset to online learning, on Pendulum's data."""

import csv
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import OFFLINE, PENDULUM, bound_by_permissions, final_state, module, replay_bytes, same, stored, with_flag
from d4rl_file import make

from common.errors import InputError
from common.replay_buffer import Batch
from offline.dataset import load
from offline.offline_to_online import OfflineToOnline
from tools.policies import read_run


class TestRuns:
    """IQL's, unless a test names the algorithms."""

    def test_steps_evaluations_and_transitions(self, small: Any) -> None:
        args = small("iql", offline_steps=60, online_steps=50, eval_every=1_000, num_envs=2, retain="append")
        module("iql").train(args)
        rows = list(csv.DictReader((args.run_dir / "evaluations.csv").open()))
        assert sorted({int(row["step"]) for row in rows}) == [-60, 0, 2, 50]
        state = final_state(args.run_dir)
        assert (state["logger"]["step"], state["data"]["buffer"]["added"]) == (50, 50)

    @pytest.mark.parametrize("offline_steps", [0, 7])
    @pytest.mark.parametrize("num_envs", [1, 3])
    def test_evaluations_on_both_sides_of_the_switch(self, small: Any, offline_steps: int, num_envs: int) -> None:
        """Once just before it and once just after, whatever else is due; a run without offline steps begins there."""
        args = small("iql", offline_steps=offline_steps, online_steps=12, num_envs=num_envs, eval_every=1_000)
        module("iql").train(args)
        rows = list(csv.DictReader((args.run_dir / "evaluations.csv").open()))
        assert [int(row["step"]) for row in rows if row["episode"] == "0"] == sorted({-offline_steps, 0, num_envs, 12})

    def test_an_environment_of_other_sizes_is_refused(self, small: Any) -> None:
        """Before anything is written."""
        for env, sizes in (("Hopper-v4", "11 and 3"), ("MountainCarContinuous-v0", "2 and 1")):
            said = f"has 3 observations and 1 actions, {env} has {sizes}: give another --env"
            with pytest.raises(InputError, match=said):
                module("iql").train(args := small("iql", env=env))
            assert not args.run_dir.exists()

    def test_the_policy_is_frozen_while_none_warms_up(self, small: Any, tmp_path: Path) -> None:
        agents = {}
        for steps in (0, 30, 31):
            args = small("iql", offline_steps=60, online_steps=steps, retain="none", warmup_steps=30,
                         run_dir=tmp_path / str(steps))  # fmt: skip
            module("iql").train(args)
            agents[steps] = final_state(args.run_dir)["agent"]
        networks = ("actor", "critic", "target_critic", "value")
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

    def test_an_unfit_run_to_begin_with_is_refused_without_a_folder(self, small: Any, tmp_path: Path) -> None:
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

    @pytest.mark.parametrize(
        ("trained", "algo", "known"),
        [
            ("bc", "iql", "iql"),
            ("bc", "expo", "expo"),
            ("cql", "dsrl", "dsrl or an algorithm with --policy or --flow-steps"),
        ],
    )
    def test_another_algorithms_run_is_refused(
        self, small: Any, tmp_path: Path, trained: str, algo: str, known: str
    ) -> None:
        """Whatever its rewards: those of iql's are scaled. The message names the algorithms whose runs can be taken."""
        first = small(trained, offline_steps=5, online_steps=0, run_dir=tmp_path / "first")
        module(trained).train(first)
        with pytest.raises(InputError, match=f"was trained by {trained}: give --init-from a run of {known}$"):
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
        with pytest.raises(InputError, match="--offline-steps and --online-steps are both 0"):
            small("iql", offline_steps=0, online_steps=0)

    @pytest.mark.parametrize("ratio", [0.99, 0.01])
    def test_a_share_that_rounds_to_nothing_is_refused(self, small: Any, ratio: float) -> None:
        with pytest.raises(InputError, match="of 16 transitions leaves none of one kind"):
            small("iql", retain="mix", offline_ratio=ratio)
        assert small("iql", retain="append", offline_ratio=ratio)
        assert small("iql", retain="mix", offline_ratio=ratio, batch_size=256)

    @pytest.mark.parametrize("algo", sorted({*OFFLINE} - {*with_flag("random_steps")}))
    def test_no_losses_are_logged_where_nothing_is_learned(
        self, small: Any, capsys: pytest.CaptureFixture[str], algo: str
    ) -> None:
        """Those of the last update before a warm-up are not repeated in it; that it lasts to the end is said."""
        args = small(algo, env="Failing-v0", offline_steps=10, online_steps=1_000, retain="none", warmup_steps=1_000)
        module(algo).train(args)
        rows = csv.DictReader((args.run_dir / "metrics.csv").open())
        steps = {int(row["step"]) for row in rows if row["name"].startswith("losses/")}
        assert steps == {0}
        said = capsys.readouterr().err
        assert said.count("nothing is learned") == said.count("environment steps: --warmup-steps covers 1,000") == 1

    @pytest.mark.parametrize(("algo", "limit"), [("cql", 100), ("pa_rl", 100), ("cql", 20)])
    def test_no_finished_episode_to_learn_from_is_told(
        self, small: Any, capsys: pytest.CaptureFixture[str], algo: str, limit: int
    ) -> None:
        """At the end, because until then an episode may end."""
        args = small(algo, calibrated=True, offline_steps=10, online_steps=60, retain="mix", time_limit=limit)
        module(algo).train(args)
        assert ("nothing was learned after the switch" in capsys.readouterr().err) == (limit == 100)

    @pytest.mark.parametrize("place", ["checkpoint", "config.json", "checkpoint/state.pt"])
    def test_a_run_that_may_not_be_read_gives_the_reason(
        self, place: str, small: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """At a resume, with --init-from and as a policy: in version 0.1 a traceback, or "damaged"."""
        with tempfile.TemporaryDirectory() as home:  # another user may read it, unlike pytest's own
            os.chmod(home, 0o755)
            monkeypatch.setenv("MINARI_DATASETS_PATH", home)  # that user's own
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
        with pytest.raises(InputError, match=r"differs from the dataset that .* began with"):
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
        monkeypatch.setattr("offline.offline_to_online.reference", known.get)
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
def test_reward_flags_reach_the_dataset_and_online_transitions(
    small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    algo: str, changed: dict[str, Any], failure: float, success: float,
) -> None:  # fmt: skip
    """Scaled and shifted; and with returns-to-go an episode that only failed fails forever."""
    solved = np.repeat([0.0, 1.0], 5)  # the second of two episodes, at its end
    path = make(tmp_path / "data.hdf5", "....o....t", observations=np.tile(solved[:, None], 3),
                actions=np.zeros((10, 1)), rewards=np.eye(10)[9] - 1)  # fmt: skip
    drawn: list[Batch] = []
    sample = OfflineToOnline.sample
    monkeypatch.setattr(OfflineToOnline, "sample", lambda *args: drawn.append(batch := sample(*args)) or batch)
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
