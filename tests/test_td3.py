"""TD3 against formulas written a second time, and its order of updates."""

from typing import Any

import numpy as np
import pytest
import torch
from conftest import COMMON
from formulas import Array, forward, layers, make_batch, parameters, values

from algos.td3 import TD3, Args
from common.checkpoint import state_of
from common.hl_gauss import C51, HLGauss
from common.optim import Adam
from common.replay_buffer import ReplayBuffer

SMALL = COMMON | {"batch_size": 16, "learning_starts": 50, "buffer_size": 10_000}


def make_agent(**changed: Any) -> TD3:
    agent = TD3(Args(**(SMALL | changed)), 3, 2, torch.device("cpu"))
    for module in (agent.actor, agent.target_actor, agent.critic, agent.target_critic):
        module.double()
    agent.actor_optimizer = Adam(agent.actor.parameters(), 1e-3)
    agent.critic_optimizer = Adam(agent.critic.parameters(), 1e-3)
    with torch.no_grad():  # so that a target taken from an online network shows
        for network in (agent.target_actor, agent.target_critic):
            for parameter in network.parameters():
                parameter.mul_(1.3)
    return agent


def policy(actor: torch.nn.Module, obs: Array) -> Array:
    return np.tanh(forward(obs, layers(actor)))


@pytest.mark.parametrize("critics", [1, 2, 5])
def test_critic_loss_equals_an_independent_formula(critics: int):
    """With noise so large that it is clipped, and the action with it."""
    agent, batch = make_agent(critics=critics, target_noise=0.8), make_batch(40)
    obs, actions, rewards, next_obs, terminations = (part.numpy() for part in batch[:5])
    generator = torch.Generator()
    generator.set_state(agent.generator.get_state())
    noise = 0.8 * torch.randn(40, 2, generator=generator).double().numpy()
    smoothed = policy(agent.target_actor, next_obs) + np.clip(noise, -0.5, 0.5)
    assert (np.abs(noise) > 0.5).any()
    smallest = np.min(values(agent.target_critic, next_obs, np.clip(smoothed, -1, 1), critics), axis=0)
    target = rewards + 0.99 * (1 - terminations) * smallest
    expected = sum(((q - target) ** 2).mean() for q in values(agent.critic, obs, actions, critics))
    assert agent.critic_loss(batch)[0].item() == pytest.approx(expected, rel=1e-6)


def test_target_actions_stay_in_the_box():
    agent, seen = make_agent(target_noise=0.8), []
    target = agent.target_critic.forward
    agent.target_critic.forward = lambda obs, actions: seen.append(actions) or target(obs, actions)
    with torch.no_grad():
        agent.target_actor.net[-1].bias.fill_(3.0)  # tanh(3) = 0.995: noise would leave the box
    agent.critic_loss(make_batch(40))
    assert seen[0].max() == 1.0


@pytest.mark.parametrize("critics", [1, 2, 5])
def test_actor_loss_is_the_first_critics_value(critics: int):
    agent, batch = make_agent(critics=critics), make_batch()
    first = values(agent.critic, batch.obs.numpy(), policy(agent.actor, batch.obs.numpy()), critics)[0]
    assert agent.actor_loss(batch)[0].item() == pytest.approx(-first.mean(), rel=1e-6)


def test_actor_gradient_against_finite_differences():
    agent, batch = make_agent(), make_batch()
    weight = agent.actor.net[0].weight
    gradient = torch.autograd.grad(agent.actor_loss(batch)[0], weight)[0]
    for i, j in [(0, 0), (3, 2), (7, 1), (15, 0)]:
        sides = []
        for step in (1e-6, -1e-6):
            with torch.no_grad():
                weight[i, j] += step
                sides.append(agent.actor_loss(batch)[0].item())
                weight[i, j] -= step
        assert gradient[i, j].item() == pytest.approx((sides[0] - sides[1]) / 2e-6, rel=1e-4, abs=1e-9)


@pytest.mark.parametrize("delay", [2, 3])
def test_actor_and_targets_move_at_every_delayed_update_only(delay: int):
    agent, batch = make_agent(tau=0.1, policy_delay=delay), make_batch()
    for update in range(1, 7):
        before = {name: parameter.detach().clone() for name, parameter in parameters(agent)}
        agent.update(batch, with_actor=update % delay == 0)
        for name, parameter in parameters(agent):
            network, _, rest = name.partition(".")
            assert torch.equal(parameter, before[name]) == (update % delay > 0 and network != "critic"), (update, name)
            if update % delay == 0 and network.startswith("target_"):
                online = dict(parameters(agent))[f"{network.removeprefix('target_')}.{rest}"]
                torch.testing.assert_close(parameter.data, 0.9 * before[name] + 0.1 * online.data)


def test_policy_reaches_the_optimum_of_a_known_bandit():
    """One step, reward -(a - 0.4)² in each dimension."""
    buffer, rng = ReplayBuffer(2_000, 3, 2), np.random.default_rng(0)
    obs, actions = np.ones((2_000, 3)), rng.uniform(-1, 1, (2_000, 2))
    buffer.add(obs, actions, -((actions - 0.4) ** 2).sum(1), obs, np.ones(2_000))
    found = []
    for seed in (1, 2):
        agent = TD3(Args(**(SMALL | {"hidden": (64, 64), "seed": seed})), 3, 2, torch.device("cpu"))
        for update in range(1, 3_001):
            agent.update(buffer.sample(64, agent.generator), with_actor=update % 2 == 0)
            if update > 2_000:
                found.append(agent.act(np.ones((1, 3), np.float32), deterministic=True)[0])
    np.testing.assert_allclose(np.mean(found, axis=0), [0.4, 0.4], atol=0.05)  # each wavers about the optimum


@pytest.mark.parametrize("size", [0.1, 0.2])
def test_exploration_noise_is_of_the_size_asked_for(size: float):
    args = Args(**SMALL, exploration_noise=size)
    agent, obs = TD3(args, 3, 2, torch.device("cpu")), np.zeros((4_000, 3), np.float32)
    noise = agent.act(obs) - agent.act(obs, deterministic=True)
    assert noise.std() == pytest.approx(size, rel=0.05)
    with torch.no_grad():
        agent.actor.net[-1].bias.fill_(3.0)
    assert agent.act(obs).max() == 1.0


def test_defaults_are_the_papers():
    """But for those that its docs page says are not."""
    args = Args()
    assert (args.actor_lr, args.critic_lr, args.gamma, args.tau) == (1e-3, 1e-3, 0.99, 5e-3)
    assert (args.target_noise, args.target_noise_clip, args.policy_delay) == (0.2, 0.5, 2)
    assert (args.exploration_noise, args.batch_size, args.hidden) == (0.1, 256, (256, 256))
    assert (args.critics, args.learning_starts, args.utd, args.buffer_size) == (2, 5_000, 1, 1_000_000)


def test_state_covers_all():
    """The number of updates is the run's, not the agent's: test_update_counts.py."""
    agent = TD3(Args(**SMALL), 3, 2, torch.device("cpu"))
    networks = {"actor", "target_actor", "critic", "target_critic", "generator"}
    assert networks | {"actor_optimizer", "critic_optimizer"} <= state_of(agent).keys()


@pytest.mark.parametrize("critic", ["hl-gauss", "c51"])
def test_histograms_learn_the_target_and_the_actor_climbs_their_mean(critic: str):
    """Of clipped double Q, with smoothed actions and scaled rewards. The actor uses the first critic."""
    agent, batch = make_agent(critic=critic, bins=11, critics=2, target_noise=0.8), make_batch(40)
    agent.histogram.double().set_range(-5.0, 5.0)
    agent.reward_scaler.scale.fill_(0.5)
    support = {"hl-gauss": HLGauss, "c51": C51}[critic](11).double()
    support.set_range(-5.0, 5.0)
    obs, actions, rewards, next_obs, terminations = (part.numpy() for part in batch[:5])
    generator = torch.Generator()
    generator.set_state(agent.generator.get_state())
    noise = 0.8 * torch.randn(40, 2, generator=generator).double().numpy()
    smoothed = np.clip(policy(agent.target_actor, next_obs) + np.clip(noise, -0.5, 0.5), -1, 1)
    logits, next_logits = (
        np.stack([forward(np.concatenate(pair, -1), layers(net, member)) for member in range(2)])
        for net, pair in ((agent.critic, (obs, actions)), (agent.target_critic, (next_obs, smoothed)))
    )
    parts = 0.5 * rewards, 0.99 * (1 - terminations), 0 * rewards
    labels = support.target(*map(torch.from_numpy, (next_logits, *parts)))[0].numpy()
    shares = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    assert agent.critic_loss(batch)[0].item() == pytest.approx(
        -(labels * np.log(shares)).sum(-1).mean(1).sum(), rel=1e-6
    )
    pairs = np.concatenate([obs, policy(agent.actor, obs)], -1)
    means = support.mean(torch.from_numpy(forward(pairs, layers(agent.critic, 0))))
    assert agent.actor_loss(batch)[0].item() == pytest.approx(-means.mean().item(), rel=1e-6)
