"""TD3+BC against formulas written a second time, known answers, and the statistics that its policy carries with it."""

import copy
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from conftest import COMMON, PENDULUM, final_state, module, same
from d4rl_file import make
from formulas import Array, forward, layers, make_batch, parameters, values

from algos.td3_bc import TD3BC, Args
from common.checkpoint import restore, state_of
from common.optim import Adam
from common.replay_buffer import ReplayBuffer

SMALL = COMMON | {"batch_size": 16, "buffer_size": 10_000}
MEAN, DEVIATION = np.float32([2.0, -30.0, 0.0]), np.float32([0.5, 4.0, 0.0])  # the last is the same everywhere


def make_agent(double: bool = True, **changed: Any) -> TD3BC:
    small = {name: SMALL[name] for name in ("hidden", "batch_size")}
    agent = TD3BC(Args(**({"dataset": str(PENDULUM)} | small | changed)), 3, 2, torch.device("cpu"))
    if double:
        for network in (agent.actor, agent.target_actor, agent.critic, agent.target_critic, agent.obs_normalizer):
            network.double()
        agent.actor_optimizer = Adam(agent.actor.parameters(), 1e-3)
        agent.critic_optimizer = Adam(agent.critic.parameters(), 1e-3)
        with torch.no_grad():  # so that a target taken from an online network shows
            for network in (agent.target_actor, agent.target_critic):
                for parameter in network.parameters():
                    parameter.mul_(1.3)
    return agent


def policy(actor: torch.nn.Module, obs: Array) -> Array:
    return np.tanh(forward(obs, layers(actor)))


def normalised(obs: Array) -> Array:
    return (obs - MEAN.astype(np.float64)) / (DEVIATION + 1e-3)


@pytest.mark.parametrize("critics", [1, 2, 5])
def test_critic_loss_equals_an_independent_formula(critics: int) -> None:
    """With noise so large that it is clipped, and the action with it."""
    agent, batch = make_agent(critics=critics, target_noise=0.8), make_batch(40)
    obs, actions, rewards, next_obs, terminations = (part.numpy() for part in batch[:5])
    generator = torch.Generator()
    generator.set_state(agent.generator.get_state())
    noise = np.clip(0.8 * torch.randn(40, 2, generator=generator).double().numpy(), -0.5, 0.5)
    smoothed = np.clip(policy(agent.target_actor, next_obs) + noise, -1, 1)
    smallest = np.min(values(agent.target_critic, next_obs, smoothed, critics), axis=0)
    target = rewards + 0.99 * (1 - terminations) * smallest
    expected = sum(((q - target) ** 2).mean() for q in values(agent.critic, obs, actions, critics))
    assert agent.critic_loss(batch)[0].item() == pytest.approx(expected, rel=1e-6)


def terms(agent: TD3BC, obs: Array, actions: Array) -> tuple[Array, float]:
    """Q_1 [batch] of the policy's actions, and the mean over transitions and dimensions of their squared distances."""
    chosen = policy(agent.actor, obs)
    return values(agent.critic, obs, chosen, 1)[0], ((chosen - actions) ** 2).sum() / actions.size


@pytest.mark.parametrize(("critics", "alpha"), [(1, 2.5), (2, 2.5), (5, 0.3)])
def test_actor_loss_equals_an_independent_formula(critics: int, alpha: float) -> None:
    """λ = α / mean |Q_1|, of the batch and of the policy's actions."""
    agent, batch = make_agent(critics=critics, alpha=alpha), make_batch(40)
    q, _ = terms(agent, batch.obs.numpy(), batch.actions.numpy())
    with torch.no_grad():
        agent.critic.net[-1].bias[0] += 0.5 * q.std() - q.mean()
    q, distance = terms(agent, batch.obs.numpy(), batch.actions.numpy())
    assert q.min() < 0 < q.max()  # the mean of |Q| is not |mean of Q|
    loss, metrics = agent.actor_loss(batch)
    assert loss.item() == pytest.approx(-alpha / np.abs(q).mean() * q.mean() + distance, rel=1e-6)
    assert metrics["losses/imitation"].item() == pytest.approx(distance, rel=1e-6)


def test_the_weight_has_no_gradient() -> None:
    """Against finite differences of the formula with λ held fixed. Where all Q_1 > 0 its own would cancel theirs."""
    agent, batch = make_agent(), make_batch(40)
    with torch.no_grad():
        agent.critic.net[-1].bias.add_(5.0)
    weight, data = agent.actor.net[0].weight, (batch.obs.numpy(), batch.actions.numpy())
    gradient = torch.autograd.grad(agent.actor_loss(batch)[0], weight)[0]
    q, _ = terms(agent, *data)
    assert q.min() > 0
    for i, j in [(0, 0), (3, 2), (7, 1), (15, 0)]:
        sides = []
        for step in (1e-6, -1e-6):
            with torch.no_grad():
                weight[i, j] += step
                moved, distance = terms(agent, *data)
                sides.append(-2.5 / np.abs(q).mean() * moved.mean() + distance)
                weight[i, j] -= step
        assert gradient[i, j].item() == pytest.approx((sides[0] - sides[1]) / 2e-6, rel=1e-4, abs=1e-9)


def test_the_scale_of_rewards_does_not_move_the_balance() -> None:
    agent, batch = make_agent(), make_batch(40)
    before = agent.actor_loss(batch)[0].item()
    with torch.no_grad():
        for parameter in (agent.critic.net[-1].weight, agent.critic.net[-1].bias):
            parameter.mul_(1000.0)
    assert agent.actor_loss(batch)[0].item() == pytest.approx(before, rel=1e-6)


def test_actor_and_targets_move_at_every_second_update_only() -> None:
    agent, batch = make_agent(tau=0.1), make_batch()
    for update in range(1, 7):
        before = {name: parameter.detach().clone() for name, parameter in parameters(agent)}
        agent.update(batch, with_actor=update % 2 == 0)
        for name, parameter in parameters(agent):
            network, _, rest = name.partition(".")
            assert torch.equal(parameter, before[name]) == (update % 2 == 1 and network != "critic"), (update, name)
            if update % 2 == 0 and network.startswith("target_"):
                online = dict(parameters(agent))[f"{network.removeprefix('target_')}.{rest}"]
                torch.testing.assert_close(parameter.data, 0.9 * before[name] + 0.1 * online.data)


def test_updates_see_both_observations_normalised() -> None:
    """Four updates on raw observations are those of an agent without statistics on (s - mean) / (std + 1e-3)."""
    agent, other, batch = make_agent(), make_agent(), make_batch(40)
    agent.obs_normalizer.set_statistics(MEAN, DEVIATION)
    by_hand = {name: torch.from_numpy(normalised(getattr(batch, name).numpy())) for name in ("obs", "next_obs")}
    for update in range(1, 5):
        agent.update(batch, with_actor=update % 2 == 0)
        other.update(batch._replace(**by_hand), with_actor=update % 2 == 0)
    for (name, one), (_, two) in zip(parameters(agent), parameters(other), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-9, msg=name)


def test_acting_normalises_too_and_a_restored_agent_by_the_same_statistics() -> None:
    agent, other = make_agent(), make_agent(seed=2)
    agent.obs_normalizer.set_statistics(MEAN, DEVIATION)
    restore(other, copy.deepcopy(state_of(agent)))
    obs = MEAN + np.random.default_rng(0).normal(size=(50, 3)) * (DEVIATION + 1e-3)
    for each in (agent, other):
        expected = policy(agent.actor, normalised(obs))
        np.testing.assert_allclose(each.act(obs, deterministic=True), expected, rtol=1e-6)


def test_exploration_noise_is_of_the_size_asked_for() -> None:
    agent, obs = make_agent(False), np.zeros((4_000, 3), np.float32)
    assert (agent.act(obs) - agent.act(obs, deterministic=True)).std() == pytest.approx(0.1, rel=0.05)
    with torch.no_grad():
        agent.actor.net[-1].bias.fill_(3.0)
    assert agent.act(obs).max() == 1.0


def test_critics_reach_the_values_of_a_known_mdp() -> None:
    """Two states that take turns for ever, reward 1 in the first, and a third that ends with reward 5; γ = 0.5."""
    agent = make_agent(False, gamma=0.5, tau=0.05, critic_lr=3e-3)
    buffer, rng, states = ReplayBuffer(600, 3, 2), np.random.default_rng(0), 100.0 * np.eye(3)
    for _ in range(200):
        buffer.add(states, rng.uniform(-1, 1, (3, 2)), [1.0, 0.0, 5.0], states[[1, 0, 0]], [0, 0, 1])
    obs = buffer.rows[:, :3].numpy()
    agent.obs_normalizer.set_statistics(obs.mean(0), obs.std(0))
    for update in range(1, 1_501):
        agent.update(buffer.sample(64, agent.generator), with_actor=update % 2 == 0)
    batch = buffer.sample(300, agent.generator)
    found = agent.critic(agent.obs_normalizer(batch.obs), batch.actions)
    expected = batch.obs @ torch.tensor([4 / 3, 2 / 3, 5.0]) / 100.0
    torch.testing.assert_close(found, expected.expand(2, -1), rtol=0, atol=0.1)


@pytest.mark.parametrize("alpha", [0.01, 2.5])
def test_policy_reaches_the_balance_of_a_known_bandit(alpha: float) -> None:
    """One step, reward 5 + a_1 + a_2, the data's actions uniform about 0.

    With the mean over both dimensions and λ = α / (5 + 2 a) the loss is stationary at a = λ in each.
    """
    agent = make_agent(False, hidden=(64, 64), alpha=alpha, actor_lr=1e-3, critic_lr=1e-3)
    buffer, rng = ReplayBuffer(2_000, 3, 2), np.random.default_rng(0)
    obs, actions = np.ones((2_000, 3)), rng.uniform(-1, 1, (2_000, 2))
    actions -= actions.mean(0)
    buffer.add(obs, actions, 5.0 + actions.sum(1), obs, np.ones(2_000))
    found = []
    for update in range(1, 2_001):
        agent.update(buffer.sample(64, agent.generator), with_actor=update % 2 == 0)
        found.append(agent.act(np.ones((1, 3), np.float32), deterministic=True)[0])
    expected = (np.sqrt(25 + 8 * alpha) - 5) / 4  # 0.002 and 0.427
    np.testing.assert_allclose(np.mean(found[-500:], axis=0), [expected] * 2, atol=0.03)


def test_a_restored_agent_continues_bit_for_bit() -> None:
    """With the moments of both optimisers and the noise: the next updates are equal."""
    agent, other = make_agent(False), make_agent(False, seed=2)
    agent.obs_normalizer.set_statistics(MEAN, DEVIATION)
    buffer, rng = ReplayBuffer(100, 3, 2), np.random.default_rng(0)
    parts = rng.normal(size=(100, 3)), rng.uniform(-1, 1, (100, 2)), rng.normal(size=100), rng.normal(size=(100, 3))
    buffer.add(*parts, np.zeros(100))
    for update in range(1, 4):
        agent.update(buffer.sample(16, agent.generator), with_actor=update % 2 == 0)
    restore(other, copy.deepcopy(state_of(agent)))  # as from a file: nothing shared
    for each in (agent, other):
        for update in range(4, 7):
            each.update(buffer.sample(16, each.generator), with_actor=update % 2 == 0)
    assert same(state_of(agent), state_of(other))


def test_defaults_are_the_papers() -> None:
    args = Args(dataset="none.hdf5")
    assert (args.alpha, args.actor_lr, args.critic_lr, args.gamma, args.tau) == (2.5, 3e-4, 3e-4, 0.99, 5e-3)
    assert (args.hidden, args.critics, args.batch_size, args.policy_delay) == ((256, 256), 2, 256, 2)
    assert (args.target_noise, args.target_noise_clip, args.exploration_noise) == (0.2, 0.5, 0.1)


def test_a_restored_agent_keeps_its_own_flags() -> None:
    """`--init-from` with another α means that α."""
    agent, other = make_agent(alpha=1.0), make_agent(alpha=2.0)
    restore(other, copy.deepcopy(state_of(agent)))
    weights = [each.actor_loss(make_batch())[1]["charts/weight"].item() for each in (agent, other)]
    assert weights[1] == pytest.approx(2 * weights[0])


class TestRuns:
    """Whole runs on Pendulum's data."""

    def test_statistics_are_the_datasets_on_both_sides_of_the_switch(self, small: Any) -> None:
        args = small("td3_bc", offline_steps=40, online_steps=60)
        module("td3_bc").train(args)
        found = final_state(args.run_dir)["agent"]["obs_normalizer"]
        with h5py.File(PENDULUM) as file:
            obs = file["observations"][:].astype(np.float64)
        np.testing.assert_allclose(found["mean"], obs.mean(0), atol=1e-3)
        np.testing.assert_allclose(found["scale"], obs.std(0) + 1e-3, rtol=1e-3)

    def test_another_runs_agent_brings_its_own(self, small: Any, tmp_path: Path) -> None:
        """Its networks know observations normalised as they were when it learned."""
        first = small("td3_bc", offline_steps=20, online_steps=0, run_dir=tmp_path / "first")
        module("td3_bc").train(first)
        path = make(tmp_path / "data.hdf5", "." * 99 + "t", observations=np.full((100, 3), 9.0))
        args = small("td3_bc", dataset=str(path), offline_steps=20, online_steps=0, init_from=first.run_dir)
        module("td3_bc").train(args)
        states = [final_state(folder)["agent"] for folder in (first.run_dir, args.run_dir)]
        assert same(states[0]["obs_normalizer"], states[1]["obs_normalizer"])
        assert not same(states[0]["actor"], states[1]["actor"])
