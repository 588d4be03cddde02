"""IQL against formulas written a second time, known answers, and the traps of its public versions."""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from conftest import COMMON, PENDULUM, same
from formulas import Drawn, forward, layers, make_batch, values

from algos.iql import IQL, PRESETS, Args
from common.checkpoint import restore, state_of
from common.optim import Adam
from common.replay_buffer import Batch, ReplayBuffer
from offline.offline_to_online import with_presets

SMALL = COMMON | {"batch_size": 16, "buffer_size": 10_000}


def make_agent(double: bool = True, **changed: Any) -> IQL:
    small = {name: SMALL[name] for name in ("hidden", "batch_size")}
    args = with_presets(Args(**({"dataset": str(PENDULUM)} | small | changed)), PRESETS)
    agent = IQL(args, 3, 2, torch.device("cpu"))
    with torch.no_grad():
        agent.actor.log_std.copy_(torch.tensor([-0.3, 0.4]))
        for parameter in agent.target_critic.parameters():  # so that a target taken from the online critic shows
            parameter.mul_(1.3)
    if double:
        for network in (agent.actor, agent.critic, agent.target_critic, agent.value):
            network.double()
        agent.actor_optimizer = Adam(agent.actor.parameters(), 1e-3)
        agent.critic_optimizer = Adam(agent.critic.parameters(), 1e-3)
        agent.value_optimizer = Adam(agent.value.parameters(), 1e-3)
    return agent


def target_values(agent: IQL, batch: Batch) -> np.ndarray:
    return np.min(values(agent.target_critic, batch.obs.numpy(), batch.actions.numpy(), agent.args.critics), axis=0)


def value(agent: IQL, obs: torch.Tensor) -> np.ndarray:
    return forward(obs.numpy(), layers(agent.value))[:, 0]


def starts(agent: IQL) -> list[list[np.ndarray]]:
    """Weight [inputs, outputs] and bias of every layer."""
    critics = [layers(agent.critic, member) for member in range(agent.args.critics)]
    return [layer for network in (layers(agent.actor), layers(agent.value), *critics) for layer in network]


def test_networks_start_as_pytorchs_layers() -> None:
    for weight, bias in starts(make_agent()):
        bound = 1 / math.sqrt(len(weight))
        assert 0 < np.abs(bias).max() <= bound
        assert 0.8 * bound < np.abs(weight).max() <= bound


def test_networks_start_as_the_authors() -> None:
    for weight, bias in starts(make_agent(orthogonal=True)):
        gram = weight.T @ weight if weight.shape[1] <= weight.shape[0] else weight @ weight.T
        np.testing.assert_allclose(gram, 2 * np.eye(len(gram)), atol=1e-5)
        assert not bias.any()


@pytest.mark.parametrize("expectile", [0.5, 0.7, 0.9])
def test_value_loss_is_the_expectile_regression(expectile: float) -> None:
    agent, batch = make_agent(expectile=expectile), make_batch(40)
    target = target_values(agent, batch)
    expected = np.mean([abs(expectile - (u < 0)) * u**2 for u in target - value(agent, batch.obs)])
    loss, _ = agent.value_loss(batch, torch.from_numpy(target))
    assert loss.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_actor_loss_is_the_advantage_weighted_regression(dropout: float) -> None:
    """The weight is cut off at 100, the advantage is not; the density is that of the actions given."""
    agent, batch = make_agent(temperature=3.0, dropout=dropout), make_batch(40)
    advantages = np.linspace(-2, 3, 40)  # e⁹ is far above 100
    drawn = Drawn(agent.generator)
    kept = [drawn.kept(dropout, 40, 16) for _ in range(2)]
    mean = np.tanh(forward(batch.obs.numpy(), layers(agent.actor), kept))
    std = np.exp(np.clip(agent.actor.log_std.detach().numpy(), -5, 2))
    density = np.exp(-0.5 * ((batch.actions.numpy() - mean) / std) ** 2) / (std * math.sqrt(2 * math.pi))
    expected = -np.mean(np.minimum(np.exp(3 * advantages), 100) * np.log(density).sum(1))
    loss, _ = agent.actor_loss(batch, torch.from_numpy(advantages))
    assert loss.item() == pytest.approx(expected, rel=1e-6)


def test_critic_loss_is_the_bellman_residual_of_v() -> None:
    agent, batch = make_agent(), make_batch(40)
    target = batch.rewards.numpy() + 0.99 * (1 - batch.terminations.numpy()) * value(agent, batch.next_obs)
    expected = sum(
        np.mean((q - target) ** 2) for q in values(agent.critic, batch.obs.numpy(), batch.actions.numpy(), 2)
    )
    loss, _ = agent.critic_loss(batch, torch.from_numpy(value(agent, batch.next_obs)))
    assert loss.item() == pytest.approx(expected, rel=1e-6)


def test_an_update_goes_in_the_authors_order() -> None:
    """V first; then the actor with the new V and the old targets; then the critics with the new V; then the targets."""
    agent, batch = make_agent(), make_batch(40)
    old_targets = target_values(agent, batch)
    old_value = value(agent, batch.obs)
    seen: dict[str, torch.Tensor] = {}
    actor_loss, critic_loss = agent.actor_loss, agent.critic_loss
    agent.actor_loss = lambda b, advantages: seen.update(advantages=advantages) or actor_loss(b, advantages)
    agent.critic_loss = lambda b, following: seen.update(following=following) or critic_loss(b, following)
    agent.update(batch)
    new_value = value(agent, batch.obs)
    assert not np.allclose(new_value, old_value)
    assert np.allclose(seen["advantages"], old_targets - new_value)
    assert np.allclose(seen["following"], value(agent, batch.next_obs))
    assert not np.allclose(target_values(agent, batch), old_targets)


def test_critics_reach_the_values_of_the_best_actions_in_the_data() -> None:
    """One state that lasts for ever, four actions with rewards 0 to 3, γ = 0.5.

    With τ near 1 V goes to 3 / (1 - γ) = 6, and Q(a) to r(a) + 3; with τ = 0.5 V is the mean, 1.5 / (1 - γ) = 3, and
    Q(a) r(a) + 1.5.
    """
    actions = np.array([[-0.9, 0], [-0.3, 0], [0.3, 0], [0.9, 0]], np.float32)
    for expectile, best, extra in ((0.99, 6.0, 3.0), (0.5, 3.0, 1.5)):
        agent = make_agent(
            False, expectile=expectile, gamma=0.5, tau=0.05, critic_lr=3e-3, value_lr=3e-3, hidden=(64, 64)
        )
        buffer = ReplayBuffer(4, 3, 2)
        buffer.add(np.ones((4, 3)), actions, [0, 1, 2, 3], np.ones((4, 3)), np.zeros(4))
        for _ in range(2_500):
            agent.update(buffer.sample(64, agent.generator))
        obs = torch.ones(4, 3)
        assert agent.value(obs[:1]).item() == pytest.approx(best, abs=0.25)
        expected = torch.tensor([0.0, 1.0, 2.0, 3.0]) + extra
        torch.testing.assert_close(agent.critic(obs, torch.tensor(actions)), expected.expand(2, -1), rtol=0, atol=0.25)
        # The policy prefers the best action of the data to their mean.
        assert agent.act(np.ones((1, 3), np.float32), deterministic=True)[0, 0] > 0.5


def test_sigma_is_clipped_and_drawn_actions_too() -> None:
    agent = make_agent(False)
    obs = np.zeros((2_000, 3), np.float32)
    with torch.no_grad():
        agent.actor.log_std.copy_(torch.tensor([-50.0, 50.0]))
    drawn = agent.act(obs)
    mean = agent.act(obs, deterministic=True)
    assert np.std(drawn[:, 0] - mean[:, 0]) == pytest.approx(math.exp(-5), rel=0.1)
    assert np.abs(drawn).max() == 1.0
    assert np.abs(mean).max() < 1.0
    log_prob = agent.actor.log_prob(torch.zeros(1, 2), torch.tensor([[1e-3, 1.0]])).item()  # of N(0, e⁻⁵), N(0, e²)
    noise, std = np.array([1e-3, 1.0]), np.exp([-5, 2])
    expected = np.sum(-0.5 * (noise / std) ** 2 - np.log(std * math.sqrt(2 * math.pi)))
    assert log_prob == pytest.approx(expected, rel=1e-5)


def test_acting_leaves_no_unit_out() -> None:
    agent, obs = make_agent(dropout=0.5), make_batch(40).obs
    mean = agent.actor(obs).detach().numpy()
    assert np.array_equal(agent.act(obs.numpy(), deterministic=True), mean)
    noise = np.exp([-0.3, 0.4]) * Drawn(agent.generator).normal(40, 2)
    np.testing.assert_allclose(agent.act(obs.numpy()), np.clip(mean + noise, -1, 1), rtol=1e-6)


def test_the_actors_learning_rate_falls_as_a_cosine_where_nothing_follows() -> None:
    agent = make_agent(offline_steps=1_000, actor_lr=2e-4)
    rates = {}
    for step in (-999, -500, 0):
        agent.decay(step)
        rates[step] = agent.actor_optimizer.lr
    assert rates[-999] == pytest.approx(2e-4)
    assert rates[-500] == pytest.approx(1e-4, rel=1e-2)
    assert rates[0] == pytest.approx(0.0, abs=1e-8)
    online = make_agent(offline_steps=1_000, online_steps=10, actor_lr=2e-4)
    online.actor_optimizer.lr = 2e-4
    online.decay(-1)
    assert online.actor_optimizer.lr == 2e-4


@pytest.mark.parametrize(
    ("domain", "expected"),
    [  # τ, β, dropout, rewards normalised, shift: appendix B and the authors' configurations
        ("locomotion", (0.7, 3.0, 0.0, True, 0.0)),
        ("antmaze", (0.9, 10.0, 0.0, False, -1.0)),
        ("adroit", (0.7, 0.5, 0.1, False, 0.0)),
        ("kitchen", (0.7, 0.5, 0.1, False, 0.0)),
        ("ogbench", (0.9, 10.0, 0.0, False, 0.0)),  # agents/iql.py of FQL's authors
    ],
)
def test_presets_are_the_authors(domain: str, expected: tuple[Any, ...]) -> None:
    args = Args(dataset="none.hdf5", **PRESETS[domain])
    found = args.expectile, args.temperature, args.dropout, args.normalize_returns, args.reward_shift
    assert found == expected
    assert len(PRESETS[domain]) == len(expected)
    assert len(PRESETS) == 5


def test_defaults_are_the_authors() -> None:
    args = Args(dataset="none.hdf5")
    assert (args.actor_lr, args.critic_lr, args.value_lr, args.gamma, args.tau) == (3e-4, 3e-4, 3e-4, 0.99, 5e-3)
    assert (args.hidden, args.critics, args.batch_size, args.max_weight) == ((256, 256), 2, 256, 100)
    assert (args.retain, args.utd, args.offline_steps) == ("append", 1, 1_000_000)


def test_a_restored_agent_continues_bit_for_bit() -> None:
    """Optimisers stay bound to what they move, and targets are not rebuilt from the critics."""
    agent, other = make_agent(False), make_agent(False, seed=2)
    buffer = ReplayBuffer(100, 3, 2)
    rng = np.random.default_rng(0)
    parts = rng.normal(size=(100, 3)), rng.uniform(-1, 1, (100, 2)), rng.normal(size=100), rng.normal(size=(100, 3))
    buffer.add(*parts, np.zeros(100))
    for _ in range(3):
        agent.update(buffer.sample(16, agent.generator))
    restore(other, copy.deepcopy(state_of(agent)))  # as from a file: nothing shared
    for each in (agent, other):
        for _ in range(3):
            each.update(buffer.sample(16, each.generator))
    assert same(state_of(agent), state_of(other))
