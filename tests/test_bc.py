"""Behaviour cloning against a formula written a second time, a known expert, and episodes of which one is the best."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import COMMON, PENDULUM, final_state, module, same
from d4rl_file import make
from formulas import forward, layers, make_batch

from algos.bc import BC, Args
from common.checkpoint import restore, state_of
from common.optim import Adam
from common.replay_buffer import ReplayBuffer

SMALL = COMMON | {"batch_size": 16, "buffer_size": 10_000}
MEAN, DEVIATION = np.float32([2.0, -30.0, 0.0]), np.float32([0.5, 4.0, 0.0])  # the last is the same everywhere


def make_agent(double: bool = True, **changed: Any) -> BC:
    small = {name: SMALL[name] for name in ("hidden", "batch_size")}
    agent = BC(Args(**({"dataset": str(PENDULUM)} | small | changed)), 3, 2, torch.device("cpu"))
    if double:
        agent.actor.double()
        agent.obs_normalizer.double()
        agent.actor_optimizer = Adam(agent.actor.parameters(), 1e-3)
    agent.obs_normalizer.set_statistics(MEAN, DEVIATION)
    return agent


def test_loss_is_the_mean_over_transitions_and_dimensions() -> None:
    agent, batch = make_agent(), make_batch(40)
    chosen = np.tanh(forward(batch.obs.numpy(), layers(agent.actor)))
    expected = ((chosen - batch.actions.numpy()) ** 2).sum() / (40 * 2)
    assert agent.actor_loss(batch)[0].item() == pytest.approx(expected, rel=1e-6)


def test_updates_and_actions_normalise_and_a_restored_agent_too() -> None:
    """By (s - mean) / (std + 1e-3)."""
    agent, other, batch = make_agent(), make_agent(seed=2), make_batch(40)
    other.obs_normalizer.set_statistics(0 * MEAN, DEVIATION + 1)
    obs = (batch.obs.numpy() - MEAN.astype(np.float64)) / (DEVIATION + 1e-3)
    by_hand = agent.actor_loss(batch._replace(obs=torch.from_numpy(obs)))[0].item()
    assert agent.update(batch)["losses/actor"].item() == pytest.approx(by_hand, rel=1e-6)
    restore(other, copy.deepcopy(state_of(agent)))
    for each in (agent, other):
        for deterministic in (True, False):
            found = each.act(batch.obs.numpy(), deterministic=deterministic)
            np.testing.assert_allclose(found, np.tanh(forward(obs, layers(agent.actor))), rtol=1e-6)


def test_it_recovers_a_known_expert() -> None:
    """a = tanh(W s + b) of observations far from the unit cube, in states that it has not seen."""
    rng = np.random.default_rng(0)
    weight, bias = rng.normal(size=(3, 2)), rng.normal(size=2)
    unit = rng.normal(size=(4_000, 3)).astype(np.float32)
    obs, actions = MEAN + unit * (DEVIATION + 1e-3), np.tanh(0.7 * unit @ weight + bias)
    agent, buffer = make_agent(False, hidden=(64, 64), actor_lr=3e-3), ReplayBuffer(3_000, 3, 2)
    buffer.add(obs[:3_000], actions[:3_000], np.zeros(3_000), obs[:3_000], np.zeros(3_000))
    for _ in range(1_500):
        agent.update(buffer.sample(128, agent.generator))
    assert np.abs(agent.act(obs[3_000:].astype(np.float32)) - actions[3_000:]).mean() < 0.02


@pytest.mark.parametrize(("top", "expected"), [(0.1, 0.5), (1.0, -0.4)])
def test_10_percent_bc_imitates_the_best_episodes_only(small: Any, tmp_path: Path, top: float, expected: float) -> None:
    """Nine episodes do -0.5, the fourth does 0.5 and has the highest return; online too, where it imitates itself."""
    best = np.repeat(np.arange(10) == 3, 10)
    obs = np.random.default_rng(0).normal(np.where(best, 3.0, 0.0)[:, None], 1.0, (100, 3)).astype(np.float32)
    actions, rewards = np.where(best, 0.5, -0.5)[:, None], np.where(best, 2.0, 1.0)
    path = make(tmp_path / "data.hdf5", ".........t" * 10, observations=obs, actions=actions, rewards=rewards)
    args = small(
        "bc", dataset=str(path), offline_steps=400, online_steps=20, top_fraction=top, actor_lr=3e-3, hidden=(1,)
    )
    module("bc").train(args)
    agent = BC(args, 3, 1, torch.device("cpu"))
    restore(agent, final_state(args.run_dir)["agent"])
    chosen = obs[best] if top < 1 else obs
    np.testing.assert_allclose(agent.obs_normalizer.mean, chosen.mean(0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(agent.obs_normalizer.scale, chosen.std(0) + 1e-3, rtol=1e-4)
    assert agent.act(chosen).mean() == pytest.approx(expected, abs=0.1)


def test_a_restored_agent_goes_on_bit_for_bit() -> None:
    agent, other = make_agent(False), make_agent(False, seed=2)
    buffer, rng = ReplayBuffer(100, 3, 2), np.random.default_rng(0)
    parts = rng.normal(size=(100, 3)), rng.uniform(-1, 1, (100, 2)), rng.normal(size=100), rng.normal(size=(100, 3))
    buffer.add(*parts, np.zeros(100))
    for _ in range(3):
        agent.update(buffer.sample(16, agent.generator))
    restore(other, copy.deepcopy(state_of(agent)))  # as from a file: nothing shared
    for each in (agent, other):
        for _ in range(3):
            each.update(buffer.sample(16, each.generator))
    assert same(state_of(agent), state_of(other))
