"""CQL's and Cal-QL's settings: presets and defaults of their sources, and the warning of bounds that are too high."""

import dataclasses
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from conftest import PENDULUM
from formulas import layers, make_batch

from algos.cql import CQL, PRESETS, Args, train
from common.arguments import Unset
from common.replay_buffer import Batch
from offline.offline_to_online import with_presets


@pytest.mark.parametrize("domain", PRESETS)
def test_a_preset_fills_what_a_domain_decides(domain: str):
    defaults = {field.name: field.default for field in dataclasses.fields(Args)}
    assert PRESETS[domain].keys() == PRESETS["locomotion"].keys()
    assert all(isinstance(defaults[name], Unset) for name in PRESETS[domain])
    agent = CQL(Args(dataset="none.hdf5", **PRESETS[domain]), 3, 2, torch.device("cpu"))
    assert len(layers(agent.critic, 0)) == len(PRESETS[domain]["critic_hidden"]) + 1
    batch = Batch(*(part.float() for part in make_batch()[:5]))
    assert all(torch.isfinite(value).all() for value in agent.update(batch).values())


@pytest.mark.parametrize(
    ("domain", "term", "rewards"),
    [  # weight, gap, best of ten next actions; scale, shift, failure
        ("locomotion", (5, 0, False), (1, 0, None)),  # young-geng/CQL
        ("antmaze", (5, 0.8, True), (10, -5, 0)),  # Cal-QL
        ("adroit-binary", (1, 0, True), (10, 5, -1)),  # Cal-QL
        ("kitchen", (5, 0, True), (1, -4, None)),  # WSRL
        ("adroit", (1, 0, False), (1, 0, None)),  # CORL
        ("maze2d", (10, 5, False), (1, 0, None)),  # CORL
    ],
)
def test_presets_are_those_of_their_sources(domain: str, term: tuple[Any, ...], rewards: tuple[Any, ...]):
    args = Args(dataset="none.hdf5", **PRESETS[domain])
    assert (args.cql_weight, args.lagrange_gap, args.max_target_backup) == term
    assert (args.reward_scale, args.reward_shift, args.failure_reward) == rewards


@pytest.mark.parametrize(
    ("domain", "actor", "critics"),
    [
        ("locomotion", (256,) * 2, (256,) * 2),
        ("antmaze", (256,) * 2, (256,) * 4),
        ("adroit-binary", (512,) * 2, (512,) * 3),
        ("kitchen", (512,) * 3, (512,) * 3),
        ("adroit", (256,) * 3, (256,) * 3),
        ("maze2d", (256,) * 3, (256,) * 3),
    ],
)
def test_networks_have_the_widths_of_their_sources(domain: str, actor: tuple[int, ...], critics: tuple[int, ...]):
    assert (PRESETS[domain]["hidden"], PRESETS[domain]["critic_hidden"]) == (actor, critics)


@pytest.mark.parametrize(
    ("domain", "steps"),
    [("adroit-binary", 20_000), ("kitchen", 500_000), ("antmaze", 1_000_000), ("locomotion", 1_000_000),
     ("maze2d", 1_000_000), ("adroit", 1_000_000)],
)  # fmt: skip
def test_pre_training_is_as_long_as_its_sources(domain: str, steps: int):
    """Cal-QL's on Adroit's binary tasks, the kitchen and AntMaze. In version 0.1, a million everywhere."""
    env = {"maze2d": "PointMaze_Medium-v3", "adroit": "AdroitHandPen-v1", "antmaze": "AntMaze_Medium-v4",
           "adroit-binary": "adroit-binary/pen-v0", "kitchen": "FrankaKitchen-v1",
           "locomotion": "Hopper-v4"}  # fmt: skip
    assert with_presets(Args(dataset=str(PENDULUM), env=env[domain]), PRESETS).offline_steps == steps
    assert with_presets(Args(dataset=str(PENDULUM), env=env[domain], offline_steps=5), PRESETS).offline_steps == 5
    begun = Args(dataset=str(PENDULUM), env=env[domain], online_steps=9, init_from=Path("run"))
    assert with_presets(begun, PRESETS).offline_steps == 0


@pytest.mark.parametrize(
    ("changed", "warns"),
    [({}, True), ({"failure_reward": -20.0}, False), ({"calibrated": False}, False), ({"reward_shift": 20.0}, False)],
    ids=str,
)
def test_cal_ql_warns_of_bounds_that_are_too_high(small, changed: dict[str, Any], warns: bool, capsys):
    """Pendulum pays less than 0 at each step and is cut after 200: the sum ends there, the true value does not."""
    train(small("cql", **{"offline_steps": 2, "online_steps": 0, "calibrated": True} | changed))
    assert ("exceed the true values" in capsys.readouterr().err) is warns


@pytest.mark.parametrize(("last", "warns"), [(-1.0, True), (1.0, False)])
def test_the_end_of_an_episode_decides_that_warning(small, tmp_path: Path, last: float, warns: bool, capsys):
    """Rewards before the truncation, not the sum of the whole episode, which a bonus may make positive."""
    rewards = np.full(200, last, np.float32)
    rewards[3] = -500.0 * last
    with h5py.File(PENDULUM) as source, h5py.File(tmp_path / "data.hdf5", "w") as file:
        for name in ("observations", "actions", "terminals", "timeouts", "next_observations"):
            if name in source:
                file[name] = source[name][:200]
        file["rewards"] = rewards
        for name, value in source.attrs.items():
            file.attrs[name] = value
    train(small("cql", dataset=str(tmp_path / "data.hdf5"), offline_steps=2, online_steps=0, gamma=0.9))
    assert ("exceed the true values" in capsys.readouterr().err) is warns


def test_actions_are_weighted_by_their_density_but_in_the_kitchen():
    assert {domain for domain, preset in PRESETS.items() if not preset["importance_sampling"]} == {"kitchen"}


def test_defaults_are_those_of_cal_ql():
    args = Args(dataset="none.hdf5")
    assert (args.actor_lr, args.critic_lr, args.alpha_lr, args.batch_size) == (1e-4, 3e-4, 1e-4, 256)
    assert (args.gamma, args.tau, args.critics) == (0.99, 5e-3, 2)
    assert (args.cql_actions, args.cql_temperature, args.cql_clip_min) == (10, 1, None)
    assert not args.backup_entropy
    assert (args.retain, args.offline_ratio, args.utd, args.bc_steps) == ("mix", 0.5, 1, 0)
    agent = CQL(Args(dataset="none.hdf5", **PRESETS["locomotion"]), 3, 2, torch.device("cpu"))
    assert agent.target_entropy == -2  # of two actions
    assert (agent.log_alpha.item(), agent.log_lagrange.item()) == (0, 1)
