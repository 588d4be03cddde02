"""Whole runs of EXPO on Pendulum's data."""

import json
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from conftest import COMMON, final_state, module, same, stored

from algos.expo import EXPO
from common.arguments import BY_DOMAIN, BY_SIZE
from common.errors import InputError
from common.replay_buffer import Batch, ReplayBuffer
from envs import rollout
from offline.offline_to_online import OfflineToOnline

SMALL = COMMON | {
    "time_limit": 50,
    "size": "small", "batch_size": 16, "buffer_size": 10_000, "width": 16, "blocks": 1, "denoising_steps": 3,
    "critics": 3, "target_critics": 2, "dropout": 0.1, "utd": 2, "base_samples": 2, "edits": 2, "random_steps": 70,
    "edit_scale": 0.3,
}  # fmt: skip


class TestRuns:
    """Whole runs on Pendulum's data."""

    def test_stored_actions_are_unclipped_those_taken_are_clipped(
        self, small: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stored, taken = [], []
        add = ReplayBuffer.add
        monkeypatch.setattr(ReplayBuffer, "add", lambda self, *parts: stored.append(parts[1]) or add(self, *parts))
        made = rollout.make_vector

        def watched(*args: Any, **kwargs: Any) -> Any:
            envs = made(*args, **kwargs)
            step = envs.step
            envs.step = lambda actions: taken.append(actions) or step(actions)
            return envs

        monkeypatch.setattr(rollout, "make_vector", watched)
        module("expo").train(small("expo", offline_steps=10, online_steps=60, edit_scale=3.0))
        stored, taken = np.array(stored[-60:]), np.array(taken)
        assert np.abs(stored).max() > 1
        assert np.array_equal(stored.clip(-1, 1), taken)

    @pytest.mark.parametrize(("size", "utd"), [("paper", 20), ("small", 4)])
    def test_the_size_said_is_the_size_run(self, small: Any, size: str, utd: int) -> None:
        args = small("expo", size=size, utd=BY_SIZE, offline_steps=1, online_steps=0)
        module("expo").train(args)
        assert json.loads((args.run_dir / "config.json").read_text())["arguments"]["utd"] == utd

    def test_without_pre_training_the_random_steps_teach_nothing(self, small: Any, tmp_path: Any) -> None:
        states = []
        for online in (30, 40, 41):
            args = small("expo", offline_steps=0, online_steps=online, random_steps=40, run_dir=tmp_path / str(online))
            module("expo").train(args)
            states.append(final_state(args.run_dir)["agent"])
        assert same(states[0]["critic"], states[1]["critic"])
        assert same(states[0]["base"], states[1]["base"])
        assert not same(states[1]["critic"], states[2]["critic"])

    def test_without_the_data_nothing_is_learned_in_the_warm_up(self, small: Any, tmp_path: Any) -> None:
        states = []
        for online in (30, 40, 41):
            args = small("expo", offline_steps=20, online_steps=online, retain="none", warmup_steps=40,
                         run_dir=tmp_path / str(online))  # fmt: skip
            module("expo").train(args)
            states.append(final_state(args.run_dir)["agent"])
        assert same(states[0]["critic"], states[1]["critic"])
        assert not same(states[1]["critic"], states[2]["critic"])

    @pytest.mark.parametrize("offline", [0, 20])
    def test_random_steps_are_uniform_but_none_after_pre_training(self, small: Any, offline: int) -> None:
        args = small("expo", env="Failing-v0", offline_steps=offline, online_steps=150, random_steps=150,
                     retain="none", warmup_steps=150)  # fmt: skip
        module("expo").train(args)
        actions = stored(args.run_dir).actions[:, 0].sort().values
        distance = (actions - torch.linspace(-1, 1, 150)).abs().max().item() / 2  # Kolmogorov and Smirnov's
        assert (distance < 1.63 / math.sqrt(150)) is (offline == 0)

    def test_learning_rates_decay_in_a_run(self, small: Any) -> None:
        args = small("expo", env="Failing-v0", offline_steps=10, online_steps=20, decay_updates=60, actor_lr=1e-3)
        module("expo").train(args)
        agent = final_state(args.run_dir)["agent"]
        rates = {name: agent[f"{name}_optimizer"]["param_groups"][0]["lr"] for name in ("base", "edit")}
        assert rates == pytest.approx({"base": 0.5e-3, "edit": 0.75e-3}, rel=1e-12)  # cos π/2 and cos π/3

    def test_after_pre_training_no_step_is_random(self, small: Any, tmp_path: Any) -> None:
        args = small("expo", offline_steps=20, online_steps=1, random_steps=40, run_dir=tmp_path / "a")
        module("expo").train(args)
        assert int(final_state(args.run_dir)["agent"]["critic_optimizer"]["state"][0]["step"]) == args.utd

    def test_updates_follow_each_step_of_each_environment(self, small: Any) -> None:
        args = small("expo", offline_steps=20, online_steps=10, num_envs=2, utd=3)
        module("expo").train(args)
        agent = final_state(args.run_dir)["agent"]
        steps = [int(agent[f"{name}_optimizer"]["state"][0]["step"]) for name in ("critic", "base", "edit", "alpha")]
        assert steps == [30, 30, 10, 10]

    def test_sizes_of_the_batches_before_and_after_the_switch(
        self, small: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sizes: list[tuple[bool, int]] = []
        sample = OfflineToOnline.sample

        def noted(self: OfflineToOnline, online: bool, generator: torch.Generator) -> Batch:
            batch = sample(self, online, generator)
            sizes.append((online, len(batch.obs)))
            return batch

        monkeypatch.setattr(OfflineToOnline, "sample", noted)
        args = small("expo", offline_steps=20, online_steps=10, utd=3)
        module("expo").train(args)
        assert Counter(sizes) == {(False, args.batch_size): 20, (True, 3 * args.batch_size): 10}

    def test_each_evaluation_has_a_policy_of_its_own(self, small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its noise starts from the same seed each time, and differs from step to step."""
        made: list[Any] = []
        eval_policy = EXPO.eval_policy
        monkeypatch.setattr(EXPO, "eval_policy", lambda agent: made.append(eval_policy(agent)) or made[-1])
        evaluated: list[Any] = []
        evaluate = rollout.evaluate
        monkeypatch.setattr(rollout, "evaluate", lambda act, *rest: evaluated.append(act) or evaluate(act, *rest))
        monkeypatch.setattr("common.run.stoppable", lambda act, signal: act)
        module("expo").train(small("expo", offline_steps=20, online_steps=20, eval_every=20))
        assert len(made) >= 3
        assert all(a is b for a, b in zip(made, evaluated, strict=True))

    def test_one_pre_training_serves_many_runs(self, small: Any, tmp_path: Any) -> None:
        """--init-from gives its base policy; critics and edits start untrained, as they do after pre-training."""
        before = small("expo", offline_steps=30, online_steps=0, run_dir=tmp_path / "before")
        module("expo").train(before)
        taken = small("expo", offline_steps=BY_DOMAIN, online_steps=1, utd=1, seed=2, random_steps=40,
                      init_from=before.run_dir, actor_lr=1e-12, base_tau=1e-9, run_dir=tmp_path / "after")  # fmt: skip
        module("expo").train(taken)
        first, second = (final_state(args.run_dir)["agent"] for args in (before, taken))
        for base in ("base", "base_average"):
            assert all(torch.allclose(first[base][name], second[base][name]) for name in first[base])
        weights = [name for name, value in first["critic"].items() if value.dim() > 2]
        assert weights
        assert int(second["base_optimizer"]["state"][0]["step"]) == 31
        assert int(second["critic_optimizer"]["state"][0]["step"]) == 1  # --random-steps are for a start from nothing
        assert not any(torch.allclose(first["critic"][name], second["critic"][name], atol=1e-2) for name in weights)

    @pytest.mark.parametrize(
        "changed", [{"policy": "flow"}, {"denoising_steps": 4}, {"width": 8}, {"blocks": 2}], ids=str
    )
    def test_a_base_policy_of_another_kind_is_refused(self, small: Any, tmp_path: Any, changed: dict[str, Any]) -> None:
        """Its networks would fit, and what they give be taken for something else. Rewards do not matter."""
        before = small("expo", offline_steps=5, online_steps=0, reward_shift=-1.0, run_dir=tmp_path / "before")
        module("expo").train(before)
        begun = {"offline_steps": 5, "online_steps": 0, "init_from": before.run_dir}
        with pytest.raises(
            InputError, match=r"was trained with --(policy diffusion|denoising-steps 3|width 16|blocks 1): give"
        ):
            module("expo").train(small("expo", **begun, **changed))
        assert not (tmp_path / "run").exists()
        module("expo").train(small("expo", **begun))

    @pytest.mark.parametrize(
        ("changed", "said"),
        [
            ({"edits": 9, "base_samples": 4}, "at most --base-samples, 4"),
            ({"edits": 0, "base_candidates": False}, "at least 1"),
            ({"critics": 3, "target_critics": 4}, "at most --critics, 3"),
        ],
    )
    def test_impossible_candidates_are_refused(self, small: Any, changed: dict[str, Any], said: str) -> None:
        with pytest.raises(InputError, match=said):
            module("expo").train(small("expo", **changed))
