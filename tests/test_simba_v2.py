"""SimbaV2 against formulas written a second time, and what its geometry promises: norms of 1, and scales that move."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from conftest import COMMON
from formulas import Array, Drawn, log_density, make_batch
from test_resume import assert_kills_change_nothing

from algos.simba_v2 import SIMBAV2, Args
from common.errors import InputError
from common.optim import Adam
from common.replay_buffer import Batch, ReplayBuffer
from common.sphere import Block, Features, Scale, UnitLinear, project, unit

SMALL = COMMON | {
    "critic_hidden": (16, 16), "batch_size": 16, "learning_starts": 50, "buffer_size": 10_000, "time_limit": 50,
}  # fmt: skip


def make_agent(**changed: Any) -> SIMBAV2:
    """In float64, with biases and scales that differ from their start."""
    agent = SIMBAV2(Args(**(SMALL | changed)), 3, 2, torch.device("cpu"))
    rng = torch.Generator().manual_seed(0)
    for module in (agent.actor, agent.critic, agent.target_critic):
        module.double()
        for name, parameter in module.named_parameters():
            if "w1" not in name and "w2" not in name and "embedding" not in name:
                parameter.data += 0.2 * torch.randn(parameter.shape, generator=rng)
    for critic in (agent.critic, agent.target_critic):  # so that each has the smallest value somewhere
        critic.head.scale.weight.data *= 5.0
        critic.returns.set_range(-5.0, 5.0)
    agent.log_alpha.data = torch.tensor(-0.7, dtype=torch.float64)
    agent.actor_optimizer = Adam(agent.actor.parameters(), 1e-3)
    agent.critic_optimizer = Adam(agent.critic.parameters(), 1e-3)
    agent.alpha_optimizer = Adam([agent.log_alpha], 1e-3)
    return agent


def normed(x: Array) -> Array:
    return x / np.sqrt((x**2).sum(-1, keepdims=True))


def part(module: torch.nn.Module, name: str, member: int) -> Array:
    return module.get_parameter(name)[member].detach().numpy()


def features(network: Features, x: Array, member: int, blocks: int) -> Array:
    """Of one member, with the authors' numbers: s starts at √(2 / width), in a block at half of it, α at 1/(blocks + 1)
    and its parameter at 1 / √width."""
    x = normed(np.concatenate([x, np.full((len(x), 1), 3.0)], -1))
    h = normed(part(network, "scale.weight", member) * (x @ part(network, "embedding.weight", member).T))
    for i in range(blocks):
        w1, w2, s, alpha = (
            part(network, f"blocks.{i}.{name}.weight", member) for name in ("w1", "w2", "scale", "alpha")
        )
        towards = normed(np.maximum(s * (h @ w1.T), 0) @ w2.T)
        h = normed(h + alpha * math.sqrt(h.shape[-1]) / (blocks + 1) * (towards - h))
    return h


def head(network: torch.nn.Module, h: Array, member: int) -> Array:
    w1, w2, s, bias = (part(network, name, member) for name in ("w1.weight", "w2.weight", "scale.weight", "bias"))
    return (s * (h @ w1.T)) @ w2.T + bias


def shares(critic: torch.nn.Module, obs: Array, actions: Array, critics: int) -> Array:
    """Of each atom: [critics, batch, bins]."""
    x = np.concatenate([obs, actions], -1)
    logits = np.stack([head(critic.head, features(critic.features, x, i, 2), i) for i in range(critics)])
    exp = np.exp(logits - logits.max(-1, keepdims=True))
    return exp / exp.sum(-1, keepdims=True)


def sampled(actor: torch.nn.Module, obs: Array, noise: Array) -> tuple[Array, Array]:
    h = features(actor.features, obs, 0, 2)
    mean, std = head(actor.mean, h, 0), np.exp(-10 + 6 * (1 + np.tanh(head(actor.log_std, h, 0))))
    return np.tanh(mean + std * noise), log_density(mean, std, mean + std * noise)


ATOMS = np.linspace(-5, 5, 101)


def projected(probabilities: Array, returns: Array) -> Array:
    """C51's projection, atom by atom."""
    found = np.zeros(101)
    for probability, value in zip(probabilities, np.clip(returns, -5, 5), strict=True):
        place = (value + 5) / 0.1
        low = min(int(place), 99)
        found[low] += probability * (low + 1 - place)
        found[low + 1] += probability * (place - low)
    return found


@pytest.mark.parametrize("critics", [1, 2, 3])
def test_critic_loss_equals_an_independent_formula(critics: int):
    """The target is the distribution of the smallest mean, and some of its returns leave the range."""
    agent, batch = make_agent(critics=critics), make_batch(40)
    batch.rewards.mul_(3.0)
    agent.reward_scaler.scale.fill_(0.5)
    obs, actions, rewards, next_obs, terminations = (part.numpy() for part in batch[:5])
    next_actions, log_prob = sampled(agent.actor, next_obs, Drawn(agent.generator).normal(40, 2))
    targets = shares(agent.target_critic, next_obs, next_actions, critics)
    smallest = (targets @ ATOMS).argmin(0)
    assert critics == 1 or len(set(smallest)) > 1
    predicted, loss = shares(agent.critic, obs, actions, critics), 0.0
    for row in range(40):
        bootstrap = 0.995 * (1 - terminations[row]) * (ATOMS - math.exp(-0.7) * log_prob[row])
        label = projected(targets[smallest[row], row], 0.5 * rewards[row] + bootstrap)
        loss -= (label * np.log(predicted[:, row])).sum() / 40
    found, metrics = agent.critic_loss(batch)
    assert found.item() == pytest.approx(loss, rel=1e-6)
    assert metrics["losses/clamped"].max() > 0
    np.testing.assert_allclose(metrics["losses/q"].numpy(), predicted @ ATOMS, atol=1e-6)


@pytest.mark.parametrize("critics", [1, 2, 3])
def test_actor_loss_equals_an_independent_formula(critics: int):
    agent, batch = make_agent(critics=critics), make_batch()
    obs = batch.obs.numpy()
    actions, log_prob = sampled(agent.actor, obs, Drawn(agent.generator).normal(5, 2))
    smallest = (shares(agent.critic, obs, actions, critics) @ ATOMS).min(0)
    loss, returned, _ = agent.actor_loss(batch)
    assert loss.item() == pytest.approx((math.exp(-0.7) * log_prob - smallest).mean(), rel=1e-6)
    np.testing.assert_allclose(returned.numpy(), log_prob, rtol=1e-6)


def test_alpha_loss_and_its_gradient():
    """H̄ is half of -|A|."""
    agent, log_prob = make_agent(), torch.tensor([1.0, 2.5, -0.5]).double()
    loss, _ = agent.alpha_loss(log_prob)
    assert loss.item() == pytest.approx(-math.exp(-0.7) * (1.0 - 1.0))
    loss, _ = agent.alpha_loss(log_prob + 1.0)
    loss.backward()
    assert agent.log_alpha.grad.item() == pytest.approx(-math.exp(-0.7))


def unit_weights(network: torch.nn.Module) -> list[torch.Tensor]:
    return [layer.weight for layer in network.modules() if isinstance(layer, UnitLinear)]


def test_weights_have_norm_1_at_first_and_after_each_update():
    """Those of the target drift from it, as the authors' do. Biases and scales are free."""
    agent = SIMBAV2(Args(**(SMALL | {"critic_lr": 0.01, "actor_lr": 0.01, "tau": 0.5})), 3, 2, torch.device("cpu"))
    batch = Batch(*(part.float() for part in make_batch()[:5]))
    for _ in range(3):
        for network in (agent.actor, agent.critic):
            for weight in unit_weights(network):
                torch.testing.assert_close(weight.norm(dim=-1), torch.ones(weight.shape[:-1]))
        agent.update(batch)
    assert max((weight.norm(dim=-1) - 1).abs().max() for weight in unit_weights(agent.target_critic)) > 1e-6
    assert (agent.critic.head.scale.weight.norm(dim=-1) - 1).abs().min() > 1e-3


def test_the_matrices_start_orthogonal():
    matrix = UnitLinear(1, 16, 8, torch.Generator()).weight[0]
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(8))


def test_features_are_on_the_sphere_and_keep_the_norm_of_the_inputs():
    """Without the constant, inputs of one direction would be one point."""
    network = Features(2, 3, (16, 16), 3.0, torch.Generator().manual_seed(0))
    x = torch.tensor([[1.0, 2.0, -1.0]])
    one, other = network(x), network(2.0 * x)
    torch.testing.assert_close(one.norm(dim=-1), torch.ones(2, 1))
    assert (one - other).norm(dim=-1).min() > 0.05


def test_a_block_starts_as_a_step_of_one_share_towards_its_mlp():
    block = Block(1, 16, 1.0 / 3.0, torch.Generator().manual_seed(0))
    h = unit(torch.randn(1, 5, 16, generator=torch.Generator().manual_seed(1)))
    towards = unit(block.w2(block.scale(block.w1(h)).relu()))
    torch.testing.assert_close(block(h), unit(2.0 * h + towards))


def test_a_block_with_dead_units_gives_numbers():
    block = Block(1, 8, 0.5, torch.Generator().manual_seed(0))
    block.scale.weight.data.fill_(-1.0)
    block.w1.weight.data.abs_()
    h = torch.full((1, 2, 8), 8**-0.5, requires_grad=True)
    block(h).square().sum().backward()
    assert h.grad.isfinite().all()


def test_a_scale_starts_at_its_value_and_moves_at_its_own_rate():
    scale = Scale(1, 4, initial=0.5, start=0.1)
    inputs = torch.tensor([1.0, -2.0, 3.0, 4.0])
    torch.testing.assert_close(scale(inputs)[0, 0], 0.5 * inputs)
    scale.weight.data += 0.01  # a step of Adam
    torch.testing.assert_close(scale(inputs)[0, 0], 0.55 * inputs)


def test_actor_and_temperature_move_before_the_critics():
    """The critics' target is that of the actor and of α after their step."""
    agent, other, batch = make_agent(), make_agent(), make_batch(40)
    agent.update(batch)
    loss, log_prob, _ = other.actor_loss(batch)
    other.actor_optimizer.minimize(loss)
    other.alpha_optimizer.minimize(other.alpha_loss(log_prob)[0])
    project(other.actor)
    other.critic_optimizer.minimize(other.critic_loss(batch)[0])
    project(other.critic)
    for one, expected in zip(agent.critic.parameters(), other.critic.parameters(), strict=True):
        torch.testing.assert_close(one, expected)


def test_learning_rates_fall_linearly_and_observations_are_not_clipped():
    agent = make_agent()
    for passed, rate in ((0.0, 1e-4), (0.5, 7.5e-5), (1.0, 5e-5)):
        agent.decay(passed)
        rates = [o.lr for o in (agent.actor_optimizer, agent.critic_optimizer, agent.alpha_optimizer)]
        assert rates == pytest.approx([rate] * 3)
    agent.observe(np.array([[1.0, 0.0, 0.0]], np.float32), np.zeros(1), np.zeros(1, bool))
    agent.observe(np.array([[3.0, 0.0, 0.0]], np.float32), np.zeros(1), np.zeros(1, bool))
    assert agent.obs_normalizer(torch.tensor([[102.0, 0.0, 0.0]]))[0].tolist() == pytest.approx([100.0, 0.0, 0.0])


def test_sizes_and_a_number_of_bins_that_is_none():
    def width(**flags: Any) -> int:
        return SIMBAV2(Args(**flags), 3, 2, torch.device("cpu")).critic.head.w1.weight.shape[-1]

    assert (width(), width(size="small"), width(size="small", critic_hidden=(32,))) == (512, 128, 32)
    with pytest.raises(InputError, match="blocks are"):
        make_agent(hidden=(16, 8))
    with pytest.raises(InputError, match="--bins is 1"):
        make_agent(bins=1)


def test_policy_reaches_the_entropy_and_the_optimum_of_a_known_bandit():
    """As SAC: one step, reward -(a - 0.4)², so π* has the entropy -1 for α = 1 / (πe²) = 0.043."""
    learning = {"hidden": (64,), "critic_hidden": (64, 64), "actor_lr": 2e-3, "critic_lr": 2e-3, "alpha_lr": 2e-3}
    agent = SIMBAV2(Args(**(SMALL | learning)), 3, 2, torch.device("cpu"))
    buffer, rng = ReplayBuffer(2_000, 3, 2), np.random.default_rng(0)
    obs, actions = rng.normal(size=(2_000, 3)), rng.uniform(-1, 1, (2_000, 2))
    buffer.add(obs, actions, -((actions - 0.4) ** 2).sum(1), obs, np.ones(2_000))
    for _ in range(1_500):
        agent.update(buffer.sample(64, agent.generator))
    policy = agent.act(np.float32(rng.normal(size=(200, 3))), deterministic=True)
    np.testing.assert_allclose(policy.mean(0), [0.4, 0.4], atol=0.05)
    assert agent.log_alpha.exp().item() == pytest.approx(math.exp(-2) / math.pi, rel=0.5)


def test_kills_change_nothing_with_several_updates_and_environments(tmp_path):
    """The learning rates, the running statistics and the sums of rewards are those of the checkpoint."""
    changed = {"utd": 2, "num_envs": 2, "env": "Hopper-v4", "checkpoint_every": 20}
    assert_kills_change_nothing("simba_v2", changed, [("step", 130), ("update", 150), ("any", 3)], tmp_path)
