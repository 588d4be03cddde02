"""IFQL against formulas written a second time in float64, and a problem whose answer is known."""

from typing import Any

import numpy as np
import pytest
import torch
from conftest import COMMON, PENDULUM
from formulas import Array, Drawn, joined, make_batch

from algos.ifql import IFQL, PRESETS, Args
from common.arguments import Unset
from common.optim import Adam
from common.replay_buffer import Batch
from offline.dataset import read
from offline.offline_to_online import with_presets

SMALL = COMMON | {"batch_size": 16, "buffer_size": 10_000, "flow_steps": 3, "samples": 4, "time_limit": 50}
STEPS, SAMPLES = 4, 6


def make_agent(double: bool = True, **changed: Any) -> IFQL:
    given = {"dataset": str(PENDULUM), "hidden": (16, 8), "flow_steps": STEPS, "samples": SAMPLES} | changed
    agent = IFQL(with_presets(Args(**given), PRESETS), 3, 2, torch.device("cpu"))
    noise = torch.Generator().manual_seed(7)
    for network in (agent.flow, agent.value, agent.critic, agent.target_critic):
        for parameter in network.parameters():  # no scale at 1, no shift at 0, targets unlike the critics
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=noise)
        if double:
            network.double()
    if double:
        for name in ("flow", "value", "critic"):
            setattr(agent, f"{name}_optimizer", Adam(getattr(agent, name).parameters(), 1e-3))
        draw = agent.normal
        agent.normal = lambda *shape, generator: draw(*shape, generator=generator).double()
    return agent


def values(critic: Any, obs: Array, actions: Array, critics: int) -> Array:
    return np.stack([joined(critic, obs, actions, member=i)[:, 0] for i in range(critics)])


def value(agent: IFQL, obs: Array) -> Array:
    return joined(agent.value, obs)[:, 0]


@pytest.mark.parametrize("expectile", [0.5, 0.9])
@pytest.mark.parametrize("q_aggregation", ["mean", "min"])
def test_value_loss_is_the_expectile_regression(expectile: float, q_aggregation: str) -> None:
    agent, batch = make_agent(expectile=expectile, q_aggregation=q_aggregation, critics=3), make_batch(40)
    obs, actions = batch.obs.numpy(), batch.actions.numpy()
    target = getattr(np, q_aggregation)(values(agent.target_critic, obs, actions, 3), 0)
    expected = np.mean([abs(expectile - (u < 0)) * u**2 for u in target - value(agent, obs)])
    assert agent.value_loss(batch)[0].item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("critics", [1, 2, 5])
def test_critic_loss_is_the_bellman_residual_of_v(critics: int) -> None:
    agent, batch = make_agent(critics=critics, gamma=0.9), make_batch(40)
    target = batch.rewards.numpy() + 0.9 * (1 - batch.terminations.numpy()) * value(agent, batch.next_obs.numpy())
    q = values(agent.critic, batch.obs.numpy(), batch.actions.numpy(), critics)
    expected = sum(((each - target) ** 2).mean() for each in q)
    assert agent.critic_loss(batch)[0].item() == pytest.approx(expected, rel=1e-6)


def test_flow_loss_equals_an_independent_formula() -> None:
    agent, batch = make_agent(), make_batch(40)
    obs, actions = batch.obs.numpy(), batch.actions.numpy()
    drawn = Drawn(agent.generator)
    noise, t = drawn.normal(40, 2), torch.rand(40, generator=drawn.generator).double().numpy()[:, None]
    found = joined(agent.flow, obs, (1 - t) * noise + t * actions, t)
    expected = ((found - (actions - noise)) ** 2).sum() / actions.size
    assert agent.flow_loss(batch)[0].item() == pytest.approx(expected, rel=1e-6)


def test_an_update_takes_all_gradients_at_the_old_networks() -> None:
    """It equals one Adam on the sum of the three losses, as in the authors' code, then the soft update."""
    agent, other, batch = make_agent(), make_agent(), make_batch(40)
    networks = [other.flow, other.value, other.critic]
    adam = torch.optim.Adam([p for network in networks for p in network.parameters()], 1e-3)
    for _ in range(3):
        agent.update(batch)
        adam.zero_grad()
        sum(loss for loss, _ in (other.value_loss(batch), other.critic_loss(batch), other.flow_loss(batch))).backward()
        adam.step()
        with torch.no_grad():
            for target, online in zip(other.target_critic.parameters(), other.critic.parameters(), strict=True):
                target.copy_(0.995 * target + 0.005 * online)
    for name in ("flow", "value", "critic", "target_critic"):
        for a, b in zip(getattr(agent, name).parameters(), getattr(other, name).parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_the_action_is_the_sample_of_the_highest_smallest_q() -> None:
    """One state and one sample at a time, with the online critics, each sample by four Euler steps."""
    agent, obs = make_agent(False, critics=3), np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    noise = Drawn(agent.generator).normal(SAMPLES, 5, 2)
    actions = agent.act(obs)
    for i in range(5):
        state, found = obs[i : i + 1].astype(np.float64), []
        for sample in noise[:, i : i + 1]:
            for k in range(STEPS):
                sample = sample + joined(agent.flow, state, sample, np.full((1, 1), k / STEPS)) / STEPS
            sample = np.clip(sample, -1, 1)
            found.append((values(agent.critic, state, sample, 3).min(), sample[0]))
        np.testing.assert_allclose(actions[i], max(found, key=lambda pair: pair[0])[1], atol=1e-4)


def test_evaluations_have_noise_of_their_own() -> None:
    agent, obs = make_agent(False), np.random.default_rng(0).normal(size=(30, 3)).astype(np.float32)
    before = agent.generator.get_state()
    evaluated = agent.eval_policy()
    first, second = evaluated(obs), evaluated(obs)
    assert not np.array_equal(first, second)
    assert np.array_equal(first, agent.eval_policy()(obs))
    assert torch.equal(agent.generator.get_state(), before)
    assert not np.array_equal(agent.act(obs), agent.act(obs))


def test_flow_has_both_modes_and_the_critics_choose_the_better() -> None:
    """One step, actions ±0.6 with standard deviation 0.1, three quarters at -0.6; the reward is -(a - 0.6)²."""
    args = with_presets(Args(dataset=str(PENDULUM), hidden=(64, 64), critic_lr=2e-3), PRESETS)
    agent = IFQL(args, 3, 1, torch.device("cpu"))
    rng, updates = torch.Generator().manual_seed(0), 800
    for update in range(updates):
        agent.flow_optimizer.lr = 2e-3 * (1 - update / updates)
        sign = 2.0 * (torch.rand(256, 1, generator=rng) < 0.25) - 1.0
        actions = 0.6 * sign + 0.1 * torch.randn(256, 1, generator=rng)
        obs = torch.ones(256, 3)
        agent.update(Batch(obs, actions, -(actions[:, 0] - 0.6).square(), obs, torch.ones(256)))
    obs, noise = torch.ones(20_000, 3), torch.randn(20_000, 1, generator=rng)
    with torch.no_grad():
        sampled = agent.process.sample(lambda x, t: agent.flow(obs, x, t), noise, rng)
    assert (sampled > 0).float().mean().item() == pytest.approx(0.25, abs=0.03)
    actions = agent.act(np.ones((2_000, 3), np.float32))
    assert (actions > 0).mean() > 0.999  # 32 samples miss a mode of weight 0.22 in 0.04 % of the cases
    assert np.abs(actions - 0.6).mean() < 0.1


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [  # expectile, γ, offline steps, reward shift: the authors' code, and experiments/reproduce.py of QAM
        ("scene-play-singletask-task1-v0", (0.9, 0.99, 1_000_000, 0)),
        ("cube-double-play-singletask-v0", (0.9, 0.99, 1_000_000, 0)),
        ("puzzle-3x3-play-singletask-task1-v0", (0.95, 0.99, 1_000_000, 0)),
        ("puzzle-4x4-play-singletask-task1-v0", (0.9, 0.99, 1_000_000, 0)),
        ("cube-triple-play-singletask-task1-v0", (0.95, 0.99, 1_000_000, 0)),
        ("antmaze-large-navigate-singletask-task1-v0", (0.9, 0.99, 1_000_000, 0)),
        ("antmaze-giant-navigate-singletask-task1-v0", (0.8, 0.995, 1_000_000, 0)),
        ("humanoidmaze-medium-navigate-singletask-v0", (0.7, 0.995, 1_000_000, 0)),
        ("humanoidmaze-large-navigate-singletask-v0", (0.8, 0.995, 1_000_000, 0)),
        ("antmaze-large-play-v2", (0.9, 0.99, 500_000, -1)),
        ("pen-cloned-v1", (0.9, 0.99, 500_000, 0)),
    ],
)
def test_presets_are_published(dataset: str, expected: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    pendulum = read(str(PENDULUM), False, None)
    monkeypatch.setattr("offline.offline_to_online.read", lambda *_: pendulum)  # the names alone choose
    args = with_presets(Args(dataset=dataset), PRESETS)
    assert (args.expectile, args.gamma, args.offline_steps, args.reward_shift) == expected


def test_defaults_are_the_authors() -> None:
    args = Args(dataset="none.hdf5")
    assert (args.actor_lr, args.critic_lr, args.value_lr, args.tau, args.flow_steps) == (3e-4, 3e-4, 3e-4, 5e-3, 10)
    assert (args.hidden, args.critics, args.samples, args.layer_norm) == ((512,) * 4, 2, 32, True)
    assert (args.q_aggregation, args.batch_size) == ("min", 256)
    wanted = {name for name, value in vars(Args).items() if isinstance(value, Unset)} - {"compile", "overlap"}
    assert all(preset.keys() == wanted for preset in PRESETS.values())
