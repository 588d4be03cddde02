"""SAC against formulas written a second time, a known answer, and a real environment."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from conftest import SMALL, same
from numpy.typing import NDArray

from algos import sac
from algos.sac import SAC, Args
from common.checkpoint import state_of
from common.networks import Adam
from common.replay_buffer import Batch, ReplayBuffer

Array = NDArray[np.float64]


def make_agent(**changed: Any) -> SAC:
    agent = SAC(Args(**(SMALL | changed)), 3, 2, torch.device("cpu"))
    for module in (agent.actor, agent.critic, agent.critic_target):
        module.double()
    agent.log_alpha.data = torch.tensor(-0.7, dtype=torch.float64)
    agent.actor_optimizer = Adam(agent.actor.parameters(), 1e-3)
    agent.critic_optimizer = Adam(agent.critic.parameters(), 1e-3)
    agent.alpha_optimizer = Adam([agent.log_alpha], 1e-3)
    with torch.no_grad():  # so that a target taken from the online critic shows
        for parameter in agent.critic_target.parameters():
            parameter.mul_(1.3)
    return agent


def make_batch(size: int = 5) -> Batch:
    rng = np.random.default_rng(3)
    parts = [
        rng.normal(size=(size, 3)),
        rng.uniform(-1, 1, (size, 2)),
        rng.normal(size=size),
        rng.normal(size=(size, 3)),
    ]
    return Batch(*(torch.from_numpy(part) for part in [*parts, (np.arange(size) % 2).astype(np.float64)]))


# The same networks and losses, in NumPy, one sample and one critic at a time.


def layers(network: torch.nn.Module, member: int | None = None) -> list[tuple[Array, Array]]:
    found = []
    for layer in network.net:
        if hasattr(layer, "weight"):
            weight, bias = layer.weight.detach().numpy(), layer.bias.detach().numpy()
            found.append((weight.T, bias) if member is None else (weight[member].T, bias[member]))
    return found


def forward(inputs: Array, weights: list[tuple[Array, Array]]) -> Array:
    for i, (weight, bias) in enumerate(weights):
        inputs = inputs @ weight + bias
        inputs = np.maximum(inputs, 0) if i < len(weights) - 1 else inputs
    return inputs


def sampled(agent: SAC, obs: Array, noise: Array) -> tuple[Array, Array]:
    mean, log_std = np.split(forward(obs, layers(agent.actor)), 2, axis=-1)
    std = np.exp(np.clip(log_std, -20, 2))
    u = mean + std * noise
    log_normal = -0.5 * ((u - mean) / std) ** 2 - np.log(std) - 0.5 * math.log(2 * math.pi)
    return np.tanh(u), (log_normal - np.log(1 - np.tanh(u) ** 2)).sum(-1)


def values(critic: torch.nn.Module, obs: Array, actions: Array, critics: int) -> list[Array]:
    return [forward(np.concatenate([obs, actions], -1), layers(critic, i))[:, 0] for i in range(critics)]


def noise_of(agent: SAC, size: int) -> Array:
    """The noise that the agent is about to draw; its generator stays where it is."""
    generator = torch.Generator()
    generator.set_state(agent.generator.get_state())
    return torch.randn(size, 2, generator=generator).double().numpy()


@pytest.mark.parametrize("critics", [1, 2, 5])
def test_critic_loss_equals_an_independent_formula(critics: int):
    agent, batch = make_agent(critics=critics), make_batch()
    obs, actions, rewards, next_obs, terminations = (part.numpy() for part in batch)
    next_actions, next_log_prob = sampled(agent, next_obs, noise_of(agent, 5))
    smallest = np.min(values(agent.critic_target, next_obs, next_actions, critics), axis=0)
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
    agent.alpha_optimizer.descend(agent.alpha_loss(torch.full((4,), log_prob).double())[0])
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
    before = {name: parameter.detach().clone() for name, parameter in named(agent)}
    gradients = {}
    for loss, network in ((agent.critic_loss(batch)[0], "critic."),):
        names = [name for name, _ in named(agent) if name.startswith(network)]
        gradients |= dict(zip(names, torch.autograd.grad(loss, [dict(named(agent))[n] for n in names]), strict=True))
    agent.generator.manual_seed(1)
    agent.update(batch)
    after = dict(named(agent))
    for name, gradient in gradients.items():
        step = 1e-3 * gradient / (gradient.abs() + 1e-8)
        torch.testing.assert_close(after[name].detach(), before[name] - step, rtol=0, atol=1e-9)
        target = name.replace("critic.", "critic_target.")
        torch.testing.assert_close(after[target].detach(), 0.995 * before[target] + 0.005 * after[name].detach())
    assert all(not torch.equal(after[name], before[name]) for name in before)
    assert agent.critic_target.net[0].weight.grad is None


def named(agent: SAC) -> list[tuple[str, torch.Tensor]]:
    networks = {"actor": agent.actor, "critic": agent.critic, "critic_target": agent.critic_target}
    return [(f"{n}.{p}", value) for n, network in networks.items() for p, value in network.named_parameters()]


def test_critics_reach_the_values_of_a_known_mdp():
    """Two states that take turns for ever, reward 1 in the first; and a third that ends with reward 5.

    With γ = 0.5 and no entropy: Q = 4/3, 2/3 and 5, whatever the action. A truncated episode (the first state's, in
    half of its rows) bootstraps like any other; a terminated one does not.
    """
    agent = SAC(Args(**(SMALL | {"gamma": 0.5, "tau": 0.05, "critic_lr": 3e-3})), 3, 2, torch.device("cpu"))
    buffer, rng, states = ReplayBuffer(600, 3, 2), np.random.default_rng(0), np.eye(3)
    for _ in range(200):
        actions = rng.uniform(-1, 1, (3, 2))
        buffer.add(states, actions, [1.0, 0.0, 5.0], states[[1, 0, 0]], [0, 0, 1])
    for _ in range(1_500):
        agent.log_alpha.data.fill_(-30.0)  # no entropy
        agent.update(buffer.sample(64, agent.generator))
    batch = buffer.sample(300, agent.generator)
    expected = batch.obs @ torch.tensor([4 / 3, 2 / 3, 5.0])
    torch.testing.assert_close(agent.critic(batch.obs, batch.actions), expected.expand(2, -1), rtol=0, atol=0.1)


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


def test_actions_lie_in_the_box_and_differ_where_they_should():
    agent, obs = SAC(Args(**SMALL), 3, 2, torch.device("cpu")), np.zeros((4, 3), np.float32)
    uniform = agent.explore(1_000)
    assert uniform.dtype == np.float32
    assert abs(uniform.mean()) < 0.05
    assert uniform.min() < -0.99
    assert uniform.max() > 0.99
    assert agent.act(obs).shape == (4, 2)
    assert not np.array_equal(agent.act(obs), agent.act(obs))
    assert np.array_equal(agent.act(obs, deterministic=True), agent.act(obs, deterministic=True))


@pytest.mark.parametrize(("utd", "num_envs"), [(1, 1), (3, 1), (2, 4)])
def test_updates_for_each_environment_step(
    small: Callable[..., Args], monkeypatch: pytest.MonkeyPatch, utd: int, num_envs: int
):
    """`--utd` updates a step of each environment after the first random steps; every step is stored, none twice."""
    updates, added = [], []
    update, add = SAC.update, ReplayBuffer.add
    monkeypatch.setattr(SAC, "update", lambda self, batch: updates.append(1) or update(self, batch))
    monkeypatch.setattr(ReplayBuffer, "add", lambda self, *parts: added.append(parts) or add(self, *parts))
    sac.train(small(utd=utd, num_envs=num_envs, total_steps=440, learning_starts=40))
    assert len(updates) == utd * 400
    assert sum(len(parts[2]) for parts in added) == 440


def test_truncated_episodes_are_not_stored_as_terminated(small: Callable[..., Args], tmp_path):
    """Pendulum only ever times out: no stored transition may cut the bootstrap."""
    args = small(total_steps=410)
    sac.train(args)
    rows = np.fromfile(next((args.run_dir / "checkpoint" / "replay").glob("*.rows")), np.float32).reshape(410, -1)
    assert not rows[:, -1].any()
    joined = (rows[:-1, 5:8] == rows[1:, 0:3]).all(1)  # next_obs of a row is obs of the next, but at the two ends
    assert np.flatnonzero(~joined).tolist() == [199, 399]


def test_compiled_equals_eager():
    """Trap 7's other branch, and the promise of --compile: the same update to rounding.

    In float64: in float32 Adam's first steps turn a gradient of mere rounding into a whole step of either sign.
    """
    pytest.importorskip("torch._inductor")
    batch, agents = make_batch(16), [make_agent() for _ in range(2)]
    compiled = torch.compile(agents[1].update)
    for _ in range(5):
        agents[0].update(batch)
        compiled(batch)
    for (name, eager), (_, other) in zip(named(agents[0]), named(agents[1]), strict=True):
        torch.testing.assert_close(eager, other, rtol=1e-6, atol=1e-9, msg=name)


def test_learns_pendulum(small: Callable[..., Args]):
    """From about -1 200 (random) to better than -250 in 4 000 steps (its best is about -150)."""
    args = small(hidden=(64, 64), batch_size=128, total_steps=4_000, learning_starts=500, eval_every=4_000,
                 eval_episodes=10, checkpoint_every=4_000)  # fmt: skip
    sac.train(args)
    step, returns = np.loadtxt(args.run_dir / "evaluations.csv", delimiter=",", skiprows=1, usecols=(0, 2)).T
    assert returns[step == 0].mean() < -800
    assert returns[step == 4_000].mean() > -250


def test_initial_target_is_a_copy_and_state_covers_all():
    agent = SAC(Args(**SMALL), 3, 2, torch.device("cpu"))
    assert same(agent.critic.state_dict(), agent.critic_target.state_dict())
    networks = {"actor", "critic", "critic_target", "log_alpha", "generator"}
    assert networks | {"actor_optimizer", "critic_optimizer", "alpha_optimizer"} <= state_of(agent).keys()
