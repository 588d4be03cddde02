"""SAC against formulas written a second time, a known answer, and a real environment."""

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import COMMON, long
from formulas import Array, assert_log_std_is_clamped, forward, layers, make_batch, normed, parameters, values
from test_resume import assert_kills_change_nothing

from algos.sac import SAC, Args
from common.checkpoint import state_of
from common.errors import InputError
from common.hl_gauss import C51, HLGauss
from common.networks import Critic
from common.optim import Adam
from common.replay_buffer import Batch, ReplayBuffer

SMALL = COMMON | {"batch_size": 16, "learning_starts": 50, "buffer_size": 10_000}


def make_agent(**changed: Any) -> SAC:
    agent = SAC(Args(**(SMALL | changed)), 3, 2, torch.device("cpu"))
    for module in (agent.actor, agent.critic, agent.target_critic):
        module.double()
    agent.log_alpha.data = torch.tensor(-0.7, dtype=torch.float64)
    agent.actor_optimizer = Adam(agent.actor.parameters(), 1e-3)
    agent.critic_optimizer = Adam(agent.critic.parameters(), 1e-3)
    agent.alpha_optimizer = Adam([agent.log_alpha], 1e-3)
    with torch.no_grad():  # so that a target taken from the online critic shows
        for parameter in agent.target_critic.parameters():
            parameter.mul_(1.3)
    return agent


def sampled(agent: SAC, obs: Array, noise: Array) -> tuple[Array, Array]:
    mean, log_std = np.split(forward(obs, layers(agent.actor)), 2, axis=-1)
    std = np.exp(np.clip(log_std, -20, 2))
    u = mean + std * noise
    log_normal = -0.5 * ((u - mean) / std) ** 2 - np.log(std) - 0.5 * math.log(2 * math.pi)
    return np.tanh(u), (log_normal - np.log(1 - np.tanh(u) ** 2)).sum(-1)


def noise_of(agent: SAC, size: int) -> Array:
    """The noise that the agent is about to draw; its generator stays where it is."""
    generator = torch.Generator()
    generator.set_state(agent.generator.get_state())
    return torch.randn(size, 2, generator=generator).double().numpy()


@pytest.mark.parametrize("critics", [1, 2, 5])
def test_critic_loss_equals_an_independent_formula(critics: int):
    agent, batch = make_agent(critics=critics), make_batch()
    obs, actions, rewards, next_obs, terminations = (part.numpy() for part in batch[:5])
    next_actions, next_log_prob = sampled(agent, next_obs, noise_of(agent, 5))
    smallest = np.min(values(agent.target_critic, next_obs, next_actions, critics), axis=0)
    target = rewards + 0.99 * (1 - terminations) * (smallest - math.exp(-0.7) * next_log_prob)
    expected = sum(((q - target) ** 2).mean() for q in values(agent.critic, obs, actions, critics))
    assert agent.critic_loss(batch)[0].item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("critics", [1, 2, 5])
def test_actor_loss_equals_an_independent_formula(critics: int):
    agent, batch = make_agent(critics=critics), make_batch()
    obs = batch.obs.numpy()
    actions, log_prob = sampled(agent, obs, noise_of(agent, 5))
    smallest = np.min(values(agent.critic, obs, actions, critics), axis=0)
    loss, returned, _ = agent.actor_loss(batch)
    assert loss.item() == pytest.approx((math.exp(-0.7) * log_prob - smallest).mean(), rel=1e-6)
    np.testing.assert_allclose(returned.numpy(), log_prob, rtol=1e-6)


def test_alpha_loss_and_its_gradient():
    agent, log_prob = make_agent(), torch.tensor([1.0, 2.5, -0.5]).double()
    loss, _ = agent.alpha_loss(log_prob)
    assert loss.item() == pytest.approx(-math.exp(-0.7) * (1.0 - 2.0))
    loss.backward()
    step = 1e-6
    difference = -(math.exp(-0.7 + step) - math.exp(-0.7 - step)) / (2 * step) * (1.0 - 2.0)
    assert agent.log_alpha.grad.item() == pytest.approx(difference, rel=1e-6)


@pytest.mark.parametrize(("log_prob", "direction"), [(5.0, 1), (-5.0, -1)])
def test_temperature_rises_when_entropy_is_below_its_target(log_prob: float, direction: int):
    agent = make_agent()
    agent.alpha_optimizer.minimize(agent.alpha_loss(torch.full((4,), log_prob).double())[0])
    assert np.sign(agent.log_alpha.item() + 0.7) == direction


def test_actor_gradient_against_finite_differences():
    """Through both critics' minimum and the reparameterised sample, with the same noise on both sides."""
    agent, batch = make_agent(), make_batch()
    state, weight = agent.generator.get_state(), agent.actor.net[0].weight
    loss = agent.actor_loss(batch)[0]
    gradient = torch.autograd.grad(loss, weight)[0]
    for i, j in [(0, 0), (3, 2), (7, 1), (15, 0)]:
        sides = []
        for step in (1e-6, -1e-6):
            with torch.no_grad():
                weight[i, j] += step
                agent.generator.set_state(state)
                sides.append(agent.actor_loss(batch)[0].item())
                weight[i, j] -= step
        assert gradient[i, j].item() == pytest.approx((sides[0] - sides[1]) / 2e-6, rel=1e-4, abs=1e-9)


def test_update_moves_every_network_with_its_own_loss():
    """One Adam step by hand: the first step moves a parameter by lr · g / (|g| + 1e-8)."""
    agent, batch = make_agent(), make_batch()
    before = {name: parameter.detach().clone() for name, parameter in parameters(agent)}
    gradients, noise = {}, agent.generator.get_state()
    names = [name for name in before if name.startswith("critic.")]
    loss = agent.critic_loss(batch)[0]
    gradients |= dict(zip(names, torch.autograd.grad(loss, [*agent.critic.parameters()]), strict=True))
    twin = make_agent()
    twin.critic_optimizer.minimize(twin.critic_loss(batch)[0])
    actor_loss, log_prob, _ = twin.actor_loss(batch)
    names = [name for name in before if name.startswith("actor.")]
    gradients |= dict(zip(names, torch.autograd.grad(actor_loss, [*twin.actor.parameters()]), strict=True))
    (slope,) = torch.autograd.grad(twin.alpha_loss(log_prob)[0], [twin.log_alpha])
    agent.generator.set_state(noise)
    agent.update(batch)
    assert agent.log_alpha.item() == pytest.approx(twin.log_alpha.item() - 1e-3 * math.copysign(1, slope), abs=1e-9)
    after = dict(parameters(agent))
    for name, gradient in gradients.items():
        step = 1e-3 * gradient / (gradient.abs() + 1e-8)
        torch.testing.assert_close(after[name].detach(), before[name] - step, rtol=0, atol=1e-9)
    for name in (name for name in before if name.startswith("critic.")):
        target = name.replace("critic.", "target_critic.")
        torch.testing.assert_close(after[target].detach(), 0.995 * before[target] + 0.005 * after[name].detach())
    assert all(not torch.equal(after[name], before[name]) for name in before)


def test_policy_reaches_the_entropy_and_the_optimum_of_a_known_bandit():
    """One step, reward -(a - 0.4)² in each dimension, so π*(a) ∝ exp(-(a - 0.4)² / α), a Gaussian of variance α / 2.

    Its entropy, ½ log(2πe α/2) a dimension, is -1 (that is, H̄ = -|A|) for α = e⁻² / (πe) = 0.0158.
    """
    learning = {"hidden": (64, 64), "alpha_lr": 5e-3, "critic_lr": 3e-3}
    agent = SAC(Args(**(SMALL | learning)), 3, 2, torch.device("cpu"))
    agent.log_alpha.data.fill_(math.log(0.05))
    buffer, rng = ReplayBuffer(2_000, 3, 2), np.random.default_rng(0)
    obs, actions = np.ones((2_000, 3)), rng.uniform(-1, 1, (2_000, 2))
    buffer.add(obs, actions, -((actions - 0.4) ** 2).sum(1), obs, np.ones(2_000))
    metrics = [agent.update(buffer.sample(64, agent.generator)) for _ in range(4_000)][-500:]
    assert np.mean([m["losses/entropy"].mean().item() for m in metrics]) == pytest.approx(-2.0, abs=0.25)
    alpha = np.mean([m["charts/alpha"].item() for m in metrics])
    assert alpha == pytest.approx(math.exp(-2) / (math.pi * math.e), rel=0.25)
    np.testing.assert_allclose(agent.act(np.ones((1, 3), np.float32), deterministic=True), [[0.4, 0.4]], atol=0.05)


def test_defaults_are_the_papers():
    """But for the rates: those of the best public curves."""
    args = Args()
    assert (args.actor_lr, args.critic_lr, args.alpha_lr) == (1e-3, 1e-3, 1e-3)
    assert (args.gamma, args.tau, args.batch_size, args.hidden) == (0.99, 5e-3, 256, (256, 256))
    assert (args.critics, args.learning_starts, args.utd, args.buffer_size) == (2, 5_000, 1, 1_000_000)
    agent = SAC(Args(**SMALL), 3, 2, torch.device("cpu"))
    assert (agent.log_alpha.item(), agent.target_entropy) == (0, -2)


def test_a_fixed_temperature_and_another_target_entropy():
    """α moves, at its rate, towards the policy of this entropy, and not at all at the rate 0."""
    agents = [SAC(Args(**SMALL, alpha=0.2, alpha_lr=rate), 3, 2, torch.device("cpu")) for rate in (0.0, 1e-2)]
    batch = Batch(*(part.float() for part in make_batch()[:5]))
    for agent in agents:
        for _ in range(3):
            agent.update(batch)
    assert agents[0].log_alpha.item() == pytest.approx(math.log(0.2))
    assert abs(agents[1].log_alpha.item() - math.log(0.2)) == pytest.approx(3e-2, rel=0.1)
    low, high = (make_agent(target_entropy=each) for each in (-0.5, -2.0))
    assert (low.target_entropy, high.target_entropy) == (-1, -4)  # of two actions


def test_state_covers_all():
    agent = SAC(Args(**SMALL), 3, 2, torch.device("cpu"))
    networks = {"actor", "critic", "target_critic", "log_alpha", "generator"}
    assert networks | {"actor_optimizer", "critic_optimizer", "alpha_optimizer"} <= state_of(agent).keys()


def test_log_deviation_is_held_in_wide_bounds():
    assert_log_std_is_clamped(SAC(Args(**SMALL), 3, 2, torch.device("cpu")).actor, -20.0, 2.0)


def test_a_target_draws_its_critics_and_the_actor_takes_the_mean():
    """REDQ: the smallest of two of five target critics, without replacement, drawn again for each target."""
    agent, batch = make_agent(critics=5, target_critics=2, actor_value="mean"), make_batch()
    pairs = list(itertools.combinations(range(5), 2))
    assert {tuple(sorted(agent.subset().tolist())) for _ in range(200)} == set(pairs)
    obs, actions, rewards, next_obs, terminations = (part.numpy() for part in batch[:5])
    for _ in range(5):
        state = agent.generator.get_state()
        next_actions, next_log_prob = sampled(agent, next_obs, noise_of(agent, 5))
        next_values = values(agent.target_critic, next_obs, next_actions, 5)
        loss = agent.critic_loss(batch)[0].item()
        agent.generator.set_state(state)
        torch.randn(5, 2, generator=agent.generator)
        smallest = np.min([next_values[i] for i in agent.subset().tolist()], axis=0)
        target = rewards + 0.99 * (1 - terminations) * (smallest - math.exp(-0.7) * next_log_prob)
        expected = sum(((q - target) ** 2).mean() for q in values(agent.critic, obs, actions, 5))
        assert loss == pytest.approx(expected, rel=1e-6)
    policy_actions, log_prob = sampled(agent, obs, noise_of(agent, 5))
    mean = np.mean(values(agent.critic, obs, policy_actions, 5), axis=0)
    assert agent.actor_loss(batch)[0].item() == pytest.approx((math.exp(-0.7) * log_prob - mean).mean(), rel=1e-6)


def test_dropout_before_the_layer_norm_in_every_pass_of_the_critics():
    """DroQ: for the targets, for the critics' values, and for the actor. Each pass draws its own units."""
    agent, batch = make_agent(critics=2, layer_norm=True, dropout=0.25), make_batch()
    obs, actions, rewards, next_obs, terminations = (part.numpy() for part in batch[:5])
    generator = torch.Generator()
    generator.set_state(agent.generator.get_state())

    def dropped(critic: Critic, *inputs: Array) -> list[Array]:
        kept = [(torch.rand(2, 5, 16, generator=generator) >= 0.25).double().numpy() / 0.75 for _ in range(2)]
        found = []
        for member in range(2):
            units = np.concatenate(inputs, axis=-1)
            for i, (weight, bias, *norm) in enumerate(layers(critic, member)):
                units = units @ weight + bias
                units = np.maximum(normed(units * kept[i][member], *norm), 0) if norm else units
            found.append(units[:, 0])
        return found

    noise = torch.randn(5, 2, generator=generator).double().numpy()
    next_actions, next_log_prob = sampled(agent, next_obs, noise)
    smallest = np.min(dropped(agent.target_critic, next_obs, next_actions), axis=0)
    target = rewards + 0.99 * (1 - terminations) * (smallest - math.exp(-0.7) * next_log_prob)
    expected = sum(((q - target) ** 2).mean() for q in dropped(agent.critic, obs, actions))
    assert agent.critic_loss(batch)[0].item() == pytest.approx(expected, rel=1e-6)
    policy_actions, log_prob = sampled(agent, obs, torch.randn(5, 2, generator=generator).double().numpy())
    smallest = np.min(dropped(agent.critic, obs, policy_actions), axis=0)
    expected = (math.exp(-0.7) * log_prob - smallest).mean()
    assert agent.actor_loss(batch)[0].item() == pytest.approx(expected, rel=1e-6)


def test_a_delayed_actor_and_temperature_stay_while_the_critics_move():
    agent, batch = make_agent(policy_delay=2), make_batch()
    before = {name: parameter.detach().clone() for name, parameter in parameters(agent)} | {
        "α": agent.log_alpha.detach().clone()
    }
    agent.update(batch, with_actor=False)
    after = dict(parameters(agent)) | {"α": agent.log_alpha}
    moved = {name.partition(".")[0] for name, value in before.items() if not torch.equal(value, after[name])}
    assert moved == {"critic", "target_critic"}


def test_more_critics_in_a_target_than_there_are_is_refused():
    with pytest.raises(InputError, match="--target-critics is 3: give at most --critics, 2"):
        Args(target_critics=3)


@pytest.mark.parametrize("critic", ["hl-gauss", "c51"])
def test_histograms_learn_the_soft_target_and_act_by_their_mean(critic: str):
    """The target holds the entropy, rewards are scaled, and a termination leaves the reward alone."""
    agent, batch = make_agent(critic=critic, bins=11, critics=3), make_batch(40)
    agent.histogram.double().set_range(-5.0, 5.0)
    agent.reward_scaler.scale.fill_(0.5)
    support = {"hl-gauss": HLGauss, "c51": C51}[critic](11).double()
    support.set_range(-5.0, 5.0)
    obs, actions, rewards, next_obs, terminations = (part.numpy() for part in batch[:5])
    noise = noise_of(agent, 40)
    next_actions, next_log_prob = sampled(agent, next_obs, noise)
    logits, next_logits = (
        np.stack([forward(np.concatenate(pair, -1), layers(net, member)) for member in range(3)])
        for net, pair in ((agent.critic, (obs, actions)), (agent.target_critic, (next_obs, next_actions)))
    )
    parts = 0.5 * rewards, 0.99 * (1 - terminations), -math.exp(-0.7) * next_log_prob
    labels = support.target(*map(torch.from_numpy, (next_logits, *parts)))[0].numpy()
    assert np.abs(labels[terminations == 1] @ support.centres.numpy() - 0.5 * rewards[terminations == 1]).max() < 0.02
    shares = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    loss, metrics = agent.critic_loss(batch)
    assert loss.item() == pytest.approx(-(labels * np.log(shares)).sum(-1).mean(1).sum(), rel=1e-6)
    np.testing.assert_allclose(metrics["losses/q"], shares @ support.centres.numpy(), rtol=1e-6)
    policy_actions, log_prob = sampled(agent, obs, noise_of(agent, 40))
    pairs = np.concatenate([obs, policy_actions], -1)
    values_ = [
        support.mean(torch.from_numpy(forward(pairs, layers(agent.critic, member)))).numpy() for member in range(3)
    ]
    expected = (math.exp(-0.7) * log_prob - np.min(values_, axis=0)).mean()
    assert agent.actor_loss(batch)[0].item() == pytest.approx(expected, rel=1e-6)


def test_a_given_range_leaves_rewards_as_they_are():
    agent = make_agent(critic="c51", bins=11, q_min=-100.0, q_max=300.0)
    assert agent.histogram.centres[[0, -1]].tolist() == pytest.approx([-100.0, 300.0])
    agent.observe(np.zeros((1, 3)), np.array([50.0]), np.array([False]))
    assert agent.reward_scaler(torch.tensor(50.0)) == 50.0
    assert make_agent().histogram is None


@pytest.mark.parametrize("critic", [pytest.param("hl-gauss", marks=long), "c51"])
def test_kills_change_nothing_with_histograms(critic: str, tmp_path: Path):
    """In two environments. The reward scale and its sums are in the checkpoint."""
    changed = {"critic": critic, "bins": 11, "dropout": 0.1, "layer_norm": True, "critics": 3, "target_critics": 2,
               "policy_delay": 3, "num_envs": 2, "env": "Hopper-v4", "checkpoint_every": 20,
               "total_steps": 400}  # fmt: skip
    assert_kills_change_nothing("sac", changed, [("step", 130), ("update", 100), ("any", 3)], tmp_path)
