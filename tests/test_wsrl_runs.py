"""Whole runs of WSRL on Pendulum's data: its three phases, and the networks it begins with."""

import dataclasses
import json
import math
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import final_state, module, same, stored

from algos.wsrl import WSRL
from common.arguments import BY_DOMAIN
from common.errors import InputError
from common.replay_buffer import Batch
from envs.rollout import Rollout


class TestRuns:
    """Whole runs on Pendulum's data."""

    def agents(self, small: Any, tmp_path: Path, *steps: int, **changed: Any) -> list[dict[str, Any]]:
        found = []
        for online in steps:
            args = small("wsrl", offline_steps=30, online_steps=online, run_dir=tmp_path / str(online), **changed)
            module("wsrl").train(args)
            found.append(final_state(args.run_dir)["agent"])
        return found

    @pytest.mark.parametrize("retain", ["none", "mix"])
    def test_the_policy_is_frozen_in_the_warm_up(self, small: Any, tmp_path: Path, retain: str) -> None:
        """And only there: after 80 steps it is the pre-trained one bit for bit, after 81 it is not."""
        before, warm, after = self.agents(small, tmp_path, 0, 80, 81, warmup_steps=80, retain=retain)
        names = ("actor", "critic", "target_critic", "log_alpha", "actor_optimizer", "critic_optimizer")
        assert all(same(before[name], warm[name]) for name in names)
        assert not any(same(before[name], after[name]) for name in names)

    @pytest.mark.parametrize("overlap", [False, True])
    @pytest.mark.parametrize("num_envs", [1, 3])
    @pytest.mark.parametrize("retain", ["none", "append", "mix"])
    def test_the_three_phases_follow_one_another(
        self, small: Any, monkeypatch: pytest.MonkeyPatch, retain: str, num_envs: int, overlap: bool
    ) -> None:
        """No environment step in pre-training, no update in the warm-up, and after it one update for each step."""
        events: list[str] = []
        update, step = WSRL.update, Rollout.step

        def noted_update(agent: WSRL, batch: Batch, online: bool) -> Any:
            events.append("online" if online else "offline")
            return update(agent, batch, online)

        def noted_step(self: Rollout, *given: Any, **named: Any) -> Any:
            transitions = step(self, *given, **named)
            events.append("step")
            return transitions

        monkeypatch.setattr(WSRL, "update", noted_update)
        monkeypatch.setattr(Rollout, "step", noted_step)
        args = small("wsrl", offline_steps=10, online_steps=30, warmup_steps=12, batch_size=4, utd=2, retain=retain,
                     num_envs=num_envs, overlap=overlap, calibrated=False)  # fmt: skip
        module("wsrl").train(args)
        iterations = 18 // num_envs
        turn = ["step", *["online"] * num_envs]
        # With --overlap updates run before the next step returns, and those of the last step at the end.
        assert events == ["offline"] * 10 + ["step"] * (12 // num_envs) + turn * iterations

    def test_the_warm_up_can_be_random(self, small: Any, tmp_path: Path) -> None:
        """Pendulum's random actions are uniform; those of the policy are not."""
        spread = {}
        for who in ("policy", "random"):
            args = small("wsrl", offline_steps=30, online_steps=150, warmup_steps=150, warmup=who, actor_lr=1e-3,
                         run_dir=tmp_path / who)  # fmt: skip
            module("wsrl").train(args)
            actions = stored(args.run_dir).actions[:, 0].sort().values
            spread[who] = (actions - torch.linspace(-1, 1, 150)).abs().max().item() / 2  # Kolmogorov and Smirnov's
        assert spread["random"] < 1.63 / math.sqrt(150) < spread["policy"]

    @pytest.mark.parametrize(
        ("changed", "turns"),
        [  # of 64 online transitions, four slices of 16, or of half as many
            ({"warmup_steps": 80}, 20),
            ({"warmup_steps": 1}, 36),
            ({"warmup_steps": 1, "retain": "mix"}, 68),
            ({"warmup_steps": 80, "num_envs": 2}, 20),
        ],
        ids=str,
    )
    def test_updates_of_each_step_begin_once_a_batch_can_be_filled(
        self, small: Any, changed: dict[str, Any], turns: int
    ) -> None:
        args = small("wsrl", offline_steps=0, online_steps=100, utd=4, batch_size=16, **changed)
        module("wsrl").train(args)
        agent = final_state(args.run_dir)["agent"]
        steps = {name: int(agent[f"{name}_optimizer"]["state"][0]["step"]) for name in ("critic", "actor", "alpha")}
        assert steps == {"critic": 4 * turns, "actor": turns, "alpha": turns}

    @pytest.mark.parametrize("algo", ["cql", "iql", "wsrl"])
    def test_it_begins_with_another_algorithms_networks(self, small: Any, tmp_path: Path, algo: str) -> None:
        raw = {"normalize_returns": False} if algo == "iql" else {}
        first = small(algo, offline_steps=20, online_steps=0, run_dir=tmp_path / "first", **raw)
        module(algo).train(first)
        critics = small(algo).critics
        args = small(
            "wsrl", offline_steps=0, online_steps=30, warmup_steps=30, critics=critics, init_from=first.run_dir
        )
        module("wsrl").train(args)
        theirs, ours = final_state(first.run_dir)["agent"], final_state(args.run_dir)["agent"]
        also = {"iql": (), "cql": ("log_alpha",), "wsrl": ("log_alpha", "raw_lagrange")}[algo]
        for name in ("actor", "critic", "target_critic", *also):
            assert same(theirs[name], ours[name])
        for name in ("actor", "critic", *(other.removeprefix("log_") for other in also)):
            moments = [agent[f"{name}_optimizer"]["state"] for agent in (theirs, ours)]
            assert same(*moments)
        if algo != "wsrl":  # whose multiplier is another, and starts from scratch
            assert not ours["raw_lagrange_optimizer"]["state"][0]["exp_avg"].any()
        # The policies act alike: the mean of both is a tanh.
        rows = [(folder / "evaluations.csv").read_text().splitlines()[-1] for folder in (first.run_dir, args.run_dir)]
        returns = [float(row.split(",")[2]) for row in rows]
        assert returns[0] == pytest.approx(returns[1], rel=1e-5)

    def test_critics_of_other_rewards_are_refused_with_the_cure(self, small: Any, tmp_path: Path) -> None:
        first = small("iql", offline_steps=20, online_steps=0, normalize_returns=True, run_dir=tmp_path / "first")
        module("iql").train(first)
        begun = {"offline_steps": 0, "online_steps": 30, "warmup_steps": 30, "critics": 2, "init_from": first.run_dir}
        with pytest.raises(InputError, match=r"learned from rewards .* give --reward-scale") as refused:
            module("wsrl").train(small("wsrl", **begun))
        scale, shift = re.findall(r"--reward-s\w+ (\S+)", str(refused.value))
        module("wsrl").train(small("wsrl", **begun, reward_scale=float(scale), reward_shift=float(shift)))

    def test_a_run_that_continues_does_not_need_what_it_began_with(self, small: Any, tmp_path: Path) -> None:
        first = small("cql", offline_steps=20, online_steps=0, run_dir=tmp_path / "first")
        module("cql").train(first)
        args = small("wsrl", offline_steps=0, online_steps=30, warmup_steps=30, critics=2, init_from=first.run_dir)
        module("wsrl").train(args)
        shutil.rmtree(first.run_dir)
        (args.run_dir / "DONE").unlink()  # as if it had been killed after its last checkpoint
        module("wsrl").train(args)
        assert module("wsrl").train(args).step == 30

    def test_a_kill_while_the_first_checkpoint_is_written(self, small: Any, tmp_path: Path) -> None:
        """After the replay rows, before the state: the same command starts from scratch."""
        first = small("cql", offline_steps=20, online_steps=0, run_dir=tmp_path / "first")
        module("cql").train(first)
        args = small("wsrl", offline_steps=0, online_steps=30, warmup_steps=30, critics=2, init_from=first.run_dir)
        module("wsrl").train(args)
        for name in ("DONE", "checkpoint/state.pt"):
            (args.run_dir / name).unlink()
        assert [*(args.run_dir / "checkpoint").iterdir()]
        module("wsrl").train(args)
        assert (args.run_dir / "DONE").exists()

    def test_steps_and_networks_are_those_of_init_from(
        self, small: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        first = small("cql", offline_steps=20, online_steps=0, run_dir=tmp_path / "first")
        module("cql").train(first)
        continued = partial(small, "wsrl", offline_steps=BY_DOMAIN, online_steps=30, init_from=first.run_dir)
        with pytest.raises(InputError, match=r"--critics is 7, but .*first has 2: leave --critics out"):
            module("wsrl").train(continued(critics=7))
        with pytest.raises(InputError, match="--critics is 10, but"):  # the default, but given
            module("wsrl").train(continued(critics=10))
        module("wsrl").train(args := dataclasses.replace(continued(critics=10), seed=3))  # which gives every argument
        arguments = json.loads((args.run_dir / "config.json").read_text())["arguments"]
        assert (arguments["offline_steps"], arguments["critics"], arguments["layer_norm"]) == (0, 2, False)
        assert "first: hidden (16, 16), critic_hidden (16, 16), critics 2, layer_norm False" in capsys.readouterr().err

    def test_another_kind_of_run_is_refused(self, small: Any, tmp_path: Path) -> None:
        first = small("bc", offline_steps=20, online_steps=0, run_dir=tmp_path / "first")
        module("bc").train(first)
        with pytest.raises(InputError, match="was trained by bc"):
            module("wsrl").train(small("wsrl", offline_steps=0, online_steps=30, init_from=first.run_dir))
