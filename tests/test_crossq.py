"""CrossQ against formulas written a second time: the joint pass, which statistics serve where, and its delays."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from conftest import COMMON
from formulas import Array, make_batch, parameters
from test_resume import assert_kills_change_nothing

from algos.crossq import CROSSQ, Args
from common.batch_renorm import BatchRenorm, NormalizedMLP
from common.optim import Adam
from common.replay_buffer import ReplayBuffer

SMALL = COMMON | {
    "critic_hidden": (16, 16),
    "batch_size": 16,
    "learning_starts": 50,
    "buffer_size": 10_000,
    "renorm_after": 100,
}


def make_agent(**changed: Any) -> CROSSQ:
    """With running statistics that differ from the start and from those of a batch."""
    agent = CROSSQ(Args(**(SMALL | changed)), 3, 2, torch.device("cpu"))
    rng = torch.Generator().manual_seed(0)
    for module in (agent.actor, agent.critic):
        module.double()
        for norm in module.net.norms:
            norm.mean += 0.3 * torch.randn(norm.mean.shape, generator=rng)
            norm.variance.mul_(torch.rand(norm.variance.shape, generator=rng) + 0.5)
    agent.log_alpha.data = torch.tensor(-0.7, dtype=torch.float64)
    agent.actor_optimizer = Adam(agent.actor.parameters(), 1e-3)
    agent.critic_optimizer = Adam(agent.critic.parameters(), 1e-3)
    agent.alpha_optimizer = Adam([agent.log_alpha], 1e-3)
    return agent


def statistics(norm: BatchRenorm, member: int | None) -> tuple[Array, ...]:
    parts = (part.detach().numpy() for part in (norm.weight, norm.bias, norm.mean, norm.variance))
    return tuple(part if member is None else part[member] for part in parts)


def outputs(network: NormalizedMLP, inputs: Array, by_batch: bool, member: int | None = None) -> Array:
    """Of one member, by the statistics of these inputs or by the running ones."""
    layers = [layer for layer in network.net if hasattr(layer, "weight")]
    for i, (norm, layer) in enumerate(zip(network.norms, layers, strict=True)):
        inputs = np.maximum(inputs, 0) if i else inputs
        scale, shift, mean, variance = statistics(norm, member)
        if by_batch:
            mean, variance = inputs.mean(0), inputs.var(0)
        inputs = (inputs - mean) / np.sqrt(variance + 1e-3) * scale + shift
        weight, bias = (part.detach().numpy() for part in (layer.weight, layer.bias))
        inputs = inputs @ (weight if member is None else weight[member]).T + (bias if member is None else bias[member])
    return inputs


def sampled(agent: CROSSQ, obs: Array, noise: Array, by_batch: bool) -> tuple[Array, Array]:
    mean, log_std = np.split(outputs(agent.actor.net, obs, by_batch), 2, axis=-1)
    std = np.exp(np.clip(log_std, -20, 2))
    u = mean + std * noise
    log_normal = -0.5 * noise**2 - np.log(std) - 0.5 * math.log(2 * math.pi)
    return np.tanh(u), (log_normal - np.log(1 - np.tanh(u) ** 2)).sum(-1)


def noise_of(agent: CROSSQ, size: int) -> Array:
    """The noise that the agent is about to draw; its generator stays where it is."""
    generator = torch.Generator()
    generator.set_state(agent.generator.get_state())
    return torch.randn(size, 2, generator=generator).double().numpy()


@pytest.mark.parametrize("critics", [1, 2, 3])
def test_critic_loss_equals_an_independent_formula(critics: int):
    """Both halves of one pass share its statistics. Two passes, each with its own, would give another loss."""
    agent, batch = make_agent(critics=critics), make_batch()
    obs, actions, rewards, next_obs, terminations = (part.numpy() for part in batch[:5])
    next_actions, next_log_prob = sampled(agent, next_obs, noise_of(agent, 5), by_batch=False)
    pairs, next_pairs = np.concatenate([obs, actions], -1), np.concatenate([next_obs, next_actions], -1)
    each = range(critics)
    joint = [outputs(agent.critic.net, np.concatenate([pairs, next_pairs]), True, i)[:, 0] for i in each]
    apart = [np.concatenate([outputs(agent.critic.net, p, True, i)[:, 0] for p in (pairs, next_pairs)]) for i in each]
    losses = []
    for values in (joint, apart):
        smallest = np.min([value[5:] for value in values], axis=0)
        target = rewards + 0.99 * (1 - terminations) * (smallest - math.exp(-0.7) * next_log_prob)
        losses.append(0.5 * sum(((value[:5] - target) ** 2).mean() for value in values))
    loss = agent.critic_loss(batch)[0].item()
    assert loss == pytest.approx(losses[0], rel=1e-6)
    assert abs(loss - losses[1]) > 0.01


@pytest.mark.parametrize("critics", [1, 2, 3])
def test_actor_loss_equals_an_independent_formula(critics: int):
    """The actor by its batch, the critics by their running statistics."""
    agent, batch = make_agent(critics=critics), make_batch()
    obs = batch.obs.numpy()
    actions, log_prob = sampled(agent, obs, noise_of(agent, 5), by_batch=True)
    pairs = np.concatenate([obs, actions], -1)
    smallest = np.min([outputs(agent.critic.net, pairs, False, i)[:, 0] for i in range(critics)], axis=0)
    loss, returned, _ = agent.actor_loss(batch)
    assert loss.item() == pytest.approx((math.exp(-0.7) * log_prob - smallest).mean(), rel=1e-6)
    np.testing.assert_allclose(returned.numpy(), log_prob, rtol=1e-6)


def test_critic_gradient_against_finite_differences():
    """The target is constant, while the statistics that the next state's half shares are not."""
    agent, batch = make_agent(), make_batch()
    obs, actions, rewards, next_obs, terminations = (part.numpy() for part in batch[:5])
    next_actions, next_log_prob = sampled(agent, next_obs, noise_of(agent, 5), by_batch=False)
    both = np.concatenate([np.concatenate([obs, actions], -1), np.concatenate([next_obs, next_actions], -1)])

    def halves() -> tuple[Array, Array]:
        values = np.stack([outputs(agent.critic.net, both, True, i)[:, 0] for i in range(2)])
        return values[:, :5], values[:, 5:]

    smallest = halves()[1].min(0)
    target = rewards + 0.99 * (1 - terminations) * (smallest - math.exp(-0.7) * next_log_prob)
    weight = agent.critic.net.net[0].weight
    (gradient,) = torch.autograd.grad(agent.critic_loss(batch)[0], weight)
    for place in [(0, 0, 0), (1, 3, 2), (0, 15, 4), (1, 7, 1)]:
        sides = []
        for step in (1e-6, -1e-6):
            with torch.no_grad():
                weight[place] += step
                sides.append(0.5 * ((halves()[0] - target) ** 2).mean(1).sum())
                weight[place] -= step
        assert gradient[place].item() == pytest.approx((sides[0] - sides[1]) / 2e-6, rel=1e-4, abs=1e-8)


def test_a_terminated_row_leaves_its_value_to_the_reward_but_enters_the_statistics():
    agent, batch = make_agent(), make_batch()
    batch.terminations.fill_(1.0)
    state, losses = agent.generator.get_state(), []
    for shift in (0.0, 5.0):
        batch.next_obs.add_(shift)
        agent.generator.set_state(state)
        losses.append(agent.critic_loss(batch)[0].item())
    assert losses[0] != pytest.approx(losses[1], rel=1e-3)


def test_only_its_own_loss_moves_a_networks_statistics():
    """The critics' those of the critics, the actor's those of the actor. Acting moves none."""
    agent, batch = make_agent(), make_batch()

    def moved_by(action: Any) -> set[str]:
        before = {n: b.clone() for m in ("actor", "critic") for n, b in getattr(agent, m).named_buffers(m)}
        action()
        after = {n: b for m in ("actor", "critic") for n, b in getattr(agent, m).named_buffers(m)}
        return {name.partition(".")[0] for name in before if not torch.equal(before[name], after[name])}

    assert moved_by(lambda: agent.critic_loss(batch)) == {"critic"}
    assert moved_by(lambda: agent.actor_loss(batch)) == {"actor"}
    agent.actor.float()
    for deterministic in (False, True):
        assert moved_by(lambda d=deterministic: agent.act(np.ones((4, 3), np.float32), deterministic=d)) == set()


def test_alpha_loss_and_its_gradient():
    agent, log_prob = make_agent(), torch.tensor([1.0, 2.5, -0.5]).double()
    loss, _ = agent.alpha_loss(log_prob)
    assert loss.item() == pytest.approx(-math.exp(-0.7) * (1.0 - 2.0))
    loss.backward()
    assert agent.log_alpha.grad.item() == pytest.approx(-math.exp(-0.7) * (1.0 - 2.0))


def test_a_delayed_actor_and_temperature_stay_while_the_critics_move():
    agent, batch = make_agent(), make_batch()
    for with_actor, expected in ((False, {"critic"}), (True, {"actor", "critic", "α"})):
        before = {name: value.detach().clone() for name, value in parameters(agent)} | {
            "α": agent.log_alpha.detach().clone()
        }
        agent.update(batch, with_actor)
        after = dict(parameters(agent)) | {"α": agent.log_alpha}
        assert {n.partition(".")[0] for n, value in before.items() if not torch.equal(value, after[n])} == expected


def test_policy_reaches_the_entropy_and_the_optimum_of_a_known_bandit():
    """As SAC: one step, reward -(a - 0.4)², so π* has the entropy -2 for α = e⁻² / (πe) = 0.0158.

    Without renormalisation and with batches of 64, the optimum would be too far out by 0.05 to 0.09.
    """
    learning = {"hidden": (64, 64), "critic_hidden": (64, 64), "alpha_lr": 5e-3}
    agent = CROSSQ(Args(**(SMALL | learning)), 3, 2, torch.device("cpu"))
    agent.log_alpha.data.fill_(math.log(0.05))
    buffer, rng = ReplayBuffer(2_000, 3, 2), np.random.default_rng(0)
    obs, actions = rng.normal(size=(2_000, 3)), rng.uniform(-1, 1, (2_000, 2))
    buffer.add(obs, actions, -((actions - 0.4) ** 2).sum(1), obs, np.ones(2_000))
    for step in range(1_500):
        metrics = agent.update(buffer.sample(256, agent.generator), with_actor=step % 3 == 2)
    assert metrics["losses/critic"] < 0.02
    policy = agent.act(np.float32(rng.normal(size=(200, 3))), deterministic=True)
    np.testing.assert_allclose(policy.mean(0), [0.4, 0.4], atol=0.05)
    assert agent.log_alpha.exp().item() == pytest.approx(math.exp(-2) / (math.pi * math.e), rel=0.5)


def test_defaults_are_the_authors():
    args = Args()
    assert (args.actor_lr, args.critic_lr, args.alpha_lr, args.beta1) == (1e-3, 1e-3, 1e-3, 0.5)
    assert (args.hidden, args.critic_hidden, args.critics) == ((256, 256), (2048, 2048), 2)
    assert (args.policy_delay, args.utd, args.batch_size, args.learning_starts) == (3, 1, 256, 5_000)
    agent = CROSSQ(Args(**SMALL), 3, 2, torch.device("cpu"))
    betas = [o.param_groups[0]["betas"] for o in (agent.actor_optimizer, agent.critic_optimizer, agent.alpha_optimizer)]
    assert betas == [(0.5, 0.999), (0.5, 0.999), (0.9, 0.999)]


def test_log_deviation_is_held_in_wide_bounds():
    """As in SAC."""
    agent = CROSSQ(Args(**SMALL), 3, 2, torch.device("cpu"))
    for log_std in (-30.0, -19.0, 1.9, 5.0):
        with torch.no_grad():
            agent.actor.net.net[-1].weight.zero_()
            agent.actor.net.net[-1].bias[2:] = log_std
        expected = torch.full((1, 2), min(max(log_std, -20.0), 2.0))
        torch.testing.assert_close(agent.actor(torch.zeros(1, 3), by_batch=False).log_std, expected)


def test_kills_change_nothing_when_renormalisation_begins(tmp_path: Any):
    """The count of passes is in the checkpoint."""
    changed = {"renorm_after": 100, "num_envs": 2, "env": "Hopper-v4", "checkpoint_every": 20, "total_steps": 400}
    assert_kills_change_nothing("crossq", changed, [("step", 130), ("update", 150), ("any", 3)], tmp_path)
