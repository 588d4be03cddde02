"""DSAC-T against formulas written a second time: which target serves what, the clipping, and the running σ."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import COMMON
from formulas import Array, Drawn, assert_log_std_is_clamped, gelu_forward, layers, log_density, make_batch, parameters
from test_resume import assert_kills_change_nothing

from algos.dsac_t import DSACT, Args
from common.optim import Adam
from common.replay_buffer import ReplayBuffer

SMALL = COMMON | {"batch_size": 16, "learning_starts": 50, "buffer_size": 10_000}


def make_agent(**changed: Any) -> DSACT:
    agent = DSACT(Args(**(SMALL | changed)), 3, 2, torch.device("cpu"))
    for module in (agent.actor, agent.target_actor, agent.critic, agent.target_critic):
        module.double()
    agent.log_alpha.data = torch.tensor(-0.7, dtype=torch.float64)
    agent.mean_sigma = agent.mean_sigma.double()
    agent.actor_optimizer = Adam(agent.actor.parameters(), 1e-3)
    agent.critic_optimizer = Adam(agent.critic.parameters(), 1e-3)
    agent.alpha_optimizer = Adam([agent.log_alpha], 1e-3)
    with torch.no_grad():  # so that a target taken from an online network shows
        for network in (agent.target_actor, agent.target_critic):
            for parameter in network.parameters():
                parameter.mul_(1.3)
    return agent


def sampled(actor: torch.nn.Module, obs: Array, noise: Array) -> tuple[Array, Array]:
    mean, log_std = np.split(gelu_forward(obs, layers(actor)), 2, axis=-1)
    std = np.exp(np.clip(log_std, -20, 0.5))
    return np.tanh(mean + std * noise), log_density(mean, std, mean + std * noise)


def distributions(critic: torch.nn.Module, obs: Array, actions: Array, critics: int) -> tuple[Array, Array]:
    """Means and deviations, [critics, batch] each."""
    inputs = np.concatenate([obs, actions], -1)
    outputs = np.stack([gelu_forward(inputs, layers(critic, member)) for member in range(critics)])
    return outputs[..., 0], np.logaddexp(0, outputs[..., 1])


def half_square_then_linear(error: Array) -> Array:
    return np.where(np.abs(error) < 50, 0.5 * error**2, 50 * (np.abs(error) - 25))


@pytest.mark.parametrize("critics", [1, 2, 4])
def test_critic_loss_equals_an_independent_formula(critics: int):
    """In two updates, so that b is once a mean and then a moving one. Some errors exceed 50, some 3 b."""
    agent, batch, b = make_agent(critics=critics, tau=0.1), make_batch(40), None
    batch.rewards.mul_(40.0)
    obs, actions, rewards, next_obs, terminations = (part.numpy() for part in batch[:5])
    for _ in range(2):
        drawn = Drawn(agent.generator)
        next_actions, next_log_prob = sampled(agent.target_actor, next_obs, drawn.normal(40, 2))
        noise = np.clip(drawn.normal(critics, 40), -3, 3)
        means, sigmas = distributions(agent.target_critic, next_obs, next_actions, critics)
        rows, smallest = np.arange(40), means.argmin(0)
        samples = means + noise * sigmas
        y, y_z = (
            rewards + 0.99 * (1 - terminations) * (values[smallest, rows] - math.exp(-0.7) * next_log_prob)
            for values in (means, samples)
        )
        q, sigma = distributions(agent.critic, obs, actions, critics)
        now = sigma.mean(1, keepdims=True)
        assert b is None or (np.abs(now - b) > 1e-3 * b).all()
        b = now if b is None else 0.9 * b + 0.1 * now
        y_b = q + np.clip(y_z - q, -3 * b, 3 * b)
        assert (np.abs(y_z - q) > 3 * b).any()
        assert (np.abs(y - q) > 50).any()
        weight = np.clip(b**2 / (sigma**2 + 0.1), 0.1, 10)
        of_sigma = sigma * (sigma**2 - half_square_then_linear(y_b - q)) / (sigma + 0.1)
        expected = (weight * (half_square_then_linear(y - q) + of_sigma)).mean(1).sum()
        assert agent.critic_loss(batch)[0].item() == pytest.approx(expected, rel=1e-6)
        np.testing.assert_allclose(agent.mean_sigma.numpy(), b, rtol=1e-12)
        with torch.no_grad():  # otherwise the second mean is the first one, and any rate would do
            for parameter in agent.critic.parameters():
                parameter.mul_(1.3)


def test_critic_gradient_is_that_of_a_normal_distributions_likelihood():
    """Times b² and but for the 0.1: -(y - Q) / σ² for the mean, (σ² - ½ (y_b - Q)²) / σ³ for the deviation."""
    agent, batch = make_agent(), make_batch(40)
    agent.mean_sigma.fill_(0.6)
    outputs = torch.stack(agent.critic.distribution(batch.obs, batch.actions)).detach().requires_grad_()
    agent.critic.distribution = lambda *_: tuple(outputs)  # type: ignore[method-assign]
    state = agent.generator.get_state()
    y, y_z = agent.targets(batch)
    agent.generator.set_state(state)
    (gradient,) = torch.autograd.grad(agent.critic_loss(batch)[0], outputs)
    b, (q, sigma) = agent.mean_sigma, outputs.detach()
    weight = (b**2 / (sigma**2 + 0.1)).clamp(0.1, 10) / 40
    y_b = q + (y_z - q).clamp(-3 * b, 3 * b)
    torch.testing.assert_close(gradient[0], weight * (q - y))
    torch.testing.assert_close(gradient[1], weight * (sigma**2 - 0.5 * (y_b - q) ** 2) / (sigma + 0.1))


@pytest.mark.parametrize("critics", [1, 2, 4])
def test_actor_loss_equals_an_independent_formula(critics: int):
    """By the means alone."""
    agent, batch = make_agent(critics=critics), make_batch()
    obs = batch.obs.numpy()
    actions, log_prob = sampled(agent.actor, obs, Drawn(agent.generator).normal(5, 2))
    smallest = distributions(agent.critic, obs, actions, critics)[0].min(0)
    loss, returned, _ = agent.actor_loss(batch)
    assert loss.item() == pytest.approx((math.exp(-0.7) * log_prob - smallest).mean(), rel=1e-6)
    np.testing.assert_allclose(returned.numpy(), log_prob, rtol=1e-6)


def test_alpha_loss_and_its_gradient():
    agent, log_prob = make_agent(), torch.tensor([1.0, 2.5, -0.5]).double()
    loss, _ = agent.alpha_loss(log_prob)
    assert loss.item() == pytest.approx(0.7 * (1.0 - 2.0))
    loss.backward()
    assert agent.log_alpha.grad.item() == pytest.approx(-(1.0 - 2.0))


def test_actor_and_targets_wait_and_use_the_critics_from_before_their_step():
    agent, batch = make_agent(), make_batch()
    before = {name: value.detach().clone() for name, value in parameters(agent)}
    agent.update(batch, with_actor=False)
    after = dict(parameters(agent))
    assert {n.partition(".")[0] for n, value in before.items() if not torch.equal(value, after[n])} == {"critic"}
    state = agent.generator.get_state()
    agent.critic_loss(batch)  # draws what the update will draw before it
    loss = agent.actor_loss(batch)[0].item()
    agent.generator.set_state(state)
    assert agent.update(batch, with_actor=True)["losses/actor"].item() == loss
    assert all(not torch.equal(before[name], value) for name, value in parameters(agent))


def test_the_deviation_is_that_of_random_rewards_by_the_root_of_two():
    """One step with rewards N(1, 2²): Q is 1 and σ is 2 / √2, because the loss has half a square."""
    learning = {"hidden": (64, 64), "critic_lr": 1e-3}
    agent = DSACT(Args(**(SMALL | learning)), 3, 2, torch.device("cpu"))
    buffer, rng = ReplayBuffer(20_000, 3, 2), np.random.default_rng(0)
    obs, actions = np.ones((20_000, 3)), rng.uniform(-1, 1, (20_000, 2))
    buffer.add(obs, actions, rng.normal(1.0, 2.0, 20_000), obs, np.ones(20_000))
    found = []
    for step in range(3_000):
        batch = buffer.sample(256, agent.generator)
        agent.update(batch, with_actor=False)
        if step >= 2_500:
            found.append(torch.stack(agent.critic.distribution(batch.obs, batch.actions)).detach().mean((1, 2)))
    mean, deviation = torch.stack(found).mean(0).tolist()
    assert mean == pytest.approx(1.0, abs=0.1)
    assert deviation == pytest.approx(2 / math.sqrt(2), rel=0.1)


def test_defaults_are_the_authors():
    """But for the rates, which are those of their port."""
    args = Args()
    assert (args.actor_lr, args.critic_lr, args.alpha_lr, args.log_alpha) == (3e-4, 3e-4, 3e-4, 1.0)
    assert (args.hidden, args.critics, args.policy_delay, args.batch_size) == ((256, 256, 256), 2, 2, 256)
    assert (args.gamma, args.tau, args.utd, args.learning_starts) == (0.99, 0.005, 1, 10_000)
    agent = DSACT(Args(**SMALL), 3, 2, torch.device("cpu"))
    assert (agent.log_alpha.item(), agent.target_entropy) == (1, -2)


def test_log_deviation_is_held_in_its_bounds():
    assert_log_std_is_clamped(DSACT(Args(**SMALL), 3, 2, torch.device("cpu")).actor, -20.0, 0.5)


def test_kills_change_nothing_with_the_running_deviation(tmp_path: Path):
    """It is in the checkpoint."""
    changed = {"num_envs": 2, "env": "Hopper-v4", "checkpoint_every": 20, "total_steps": 400, "tau": 0.1}
    assert_kills_change_nothing("dsac_t", changed, [("step", 130), ("update", 150), ("any", 3)], tmp_path)
