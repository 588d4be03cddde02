"""WSRL against formulas written a second time, one action at a time; its three phases; its traps."""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import COMMON, same
from formulas import (
    Array,
    Drawn,
    assert_targets_follow_each_step,
    forward,
    layers,
    log_density,
    log_sum_exp,
    make_batch,
    parameters,
    values,
)

from algos.wsrl import PRESETS, WSRL, Args
from common.checkpoint import restore, state_of
from common.optim import Adam
from common.replay_buffer import Batch, ReplayBuffer

SMALL = COMMON | {
    "batch_size": 16, "buffer_size": 10_000, "critic_hidden": (16, 16), "critics": 3, "cql_actions": 2,
    "calibrated": True, "warmup_steps": 70,
}  # fmt: skip
N = 3  # actions from each source
E, S = 5, 2  # critics, and how many are drawn
SETTINGS = PRESETS["locomotion"] | {
    "hidden": (16, 16), "critic_hidden": (16, 8), "critics": E, "target_critics": S, "cql_actions": N,
    "batch_size": 64, "dataset": "none.hdf5",
}  # fmt: skip
ADAPTIVE = ("log_alpha", "raw_lagrange")


def float32_agent(**changed: Any) -> WSRL:
    return WSRL(Args(**(SETTINGS | changed)), 3, 2, torch.device("cpu"))


def make_agent(**changed: Any) -> WSRL:
    agent = float32_agent(**changed)
    noise = torch.Generator().manual_seed(7)
    with torch.no_grad():  # no scale at 1, no shift at 0, targets unlike the critics
        for _, parameter in parameters(agent):
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=noise))
    for network in (agent.actor, agent.critic, agent.target_critic):
        network.double()
    agent.log_alpha.data = torch.tensor(-0.7, dtype=torch.float64)
    agent.raw_lagrange.data = torch.tensor(0.3, dtype=torch.float64)
    agent.actor_optimizer = Adam(agent.actor.parameters(), 1e-3)
    agent.critic_optimizer = Adam(agent.critic.parameters(), 1e-3)
    agent.alpha_optimizer = Adam([agent.log_alpha], 1e-3)
    agent.raw_lagrange_optimizer = Adam([agent.raw_lagrange], 1e-3)
    return agent


def batch_with_returns() -> Batch:
    return make_batch()._replace(returns_to_go=torch.tensor([-2.0, 3.0, 0.1, -0.3, 0.5], dtype=torch.float64))


def float32_batch(size: int = 5) -> Batch:
    return Batch(*(part.float() for part in make_batch(size)[:5]))


def drawn_from_policy(agent: WSRL, obs: Array, noise: Array) -> tuple[Array, Array]:
    outputs = forward(obs, layers(agent.actor))
    if agent.args.std == "exp":
        mean, log_std = np.split(outputs, 2, axis=-1)
    else:
        mean, log_std = outputs, agent.actor.log_std.detach().numpy()
    std = np.clip(np.exp(log_std), 1e-5, 10)
    u = mean + std * noise
    return np.tanh(u), log_density(mean, np.broadcast_to(std, mean.shape), u)


def bellman_target(agent: WSRL, batch: Batch, drawn: Drawn, count: int) -> Array:
    _, _, rewards, next_obs, terminations = (part.numpy() for part in batch[:5])
    noise = drawn.normal(count, 5, 2)
    chosen = drawn.integers(E, S)
    best = np.full(5, -np.inf)
    for each in noise:
        actions, _ = drawn_from_policy(agent, next_obs, each)
        by_all = values(agent.target_critic, next_obs, actions, E)
        smallest = np.min([by_all[i] for i in chosen], axis=0)
        best = np.maximum(best, smallest)
    return rewards + 0.99 * (1 - terminations) * best


def conservative_term(agent: WSRL, batch: Batch, drawn: Drawn) -> float:
    obs, actions, _, next_obs, _ = (part.numpy() for part in batch[:5])
    sources = [(drawn.uniform(N, 5, 2), None), (drawn.normal(N, 5, 2), obs), (drawn.normal(N, 5, 2), next_obs)]
    chosen = drawn.integers(E, S)
    data = values(agent.critic, obs, actions, E)
    found = []
    for i in chosen:
        for b in range(5):
            entries = [] if agent.args.importance_sampling else [data[i][b] - math.log(3 * N + 1)]
            for noise, states in sources:
                for j in range(N):
                    proposed, density = noise[j, b], 2 * math.log(0.5)
                    if states is not None:
                        proposed, density = drawn_from_policy(agent, states[b], noise[j, b])
                    q = values(agent.critic, obs[b : b + 1], proposed[None], E)[i][0]  # at s, for all three
                    if agent.args.calibrated and states is not None:
                        q = max(q, batch.returns_to_go[b].item())
                    entries.append(q - (density if agent.args.importance_sampling else math.log(3 * N + 1)))
            found.append(log_sum_exp(entries) - data[i][b])
    return float(np.mean(found))


VARIANTS: list[dict[str, Any]] = [
    {},
    {"std": "uniform"},
    {"layer_norm": False},
    {"calibrated": True},
    {"calibrated": True, "importance_sampling": False},
    {"lagrange_gap": 0.8, "calibrated": True},
    {"online_max_target_backup": True},
    {"online_cql": True, "calibrated": True},
    {"shared_head": True},
]


@pytest.mark.parametrize("online", [False, True])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_critic_loss_equals_an_independent_formula(variant: dict[str, Any], online: bool) -> None:
    agent, batch = make_agent(**variant), batch_with_returns()
    drawn = Drawn(agent.generator)
    best_of = N if not online or variant.keys() & {"online_max_target_backup", "online_cql"} else 1
    target = bellman_target(agent, batch, drawn, best_of)
    data = values(agent.critic, batch.obs.numpy(), batch.actions.numpy(), E)
    expected, expected_term = float(np.mean([(q - target) ** 2 for q in data])), None
    if not online or variant.get("online_cql"):
        expected_term = conservative_term(agent, batch, drawn)
        expected += (math.log1p(math.exp(0.3)) if variant.get("lagrange_gap") else 5.0) * expected_term
    loss, term, _ = agent.critic_loss(batch, online)
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert (term is None) == (expected_term is None)
    assert term is None or term.item() == pytest.approx(expected_term, rel=1e-6)


def test_actor_loss_equals_an_independent_formula() -> None:
    """Of all critics, not of those that a target would draw."""
    agent, batch = make_agent(), make_batch()
    obs = batch.obs.numpy()
    actions, log_prob = drawn_from_policy(agent, obs, Drawn(agent.generator).normal(5, 2))
    value = np.min(values(agent.critic, obs, actions, E), axis=0)
    loss, returned, _ = agent.actor_loss(batch)
    assert loss.item() == pytest.approx((math.exp(-0.7) * log_prob - value).mean(), rel=1e-6)
    np.testing.assert_allclose(returned.numpy(), log_prob, rtol=1e-6)


def test_alpha_losses() -> None:
    agent = make_agent(lagrange_gap=0.8)
    loss, _ = agent.alpha_loss(torch.tensor([1.0, 2.5, -0.5]).double())
    assert loss.item() == pytest.approx(-math.exp(-0.7) * (1.0 - 2.0))
    loss, _ = agent.lagrange_loss(torch.tensor(2.0).double())
    assert loss.item() == pytest.approx(-math.log1p(math.exp(0.3)) * (2.0 - 0.8))
    loss.backward()
    assert agent.raw_lagrange.grad.item() == pytest.approx(-1.2 / (1.0 + math.exp(-0.3)))
    assert float32_agent(lagrange_gap=0.8).lagrange_loss(torch.zeros(()))[0].item() == pytest.approx(0.8)  # α' = 1
    loss, _ = agent.alpha_loss(torch.tensor([2.0, 2.5, 1.5]).double())  # their mean is -H̄, two dimensions' of -1
    assert loss.item() == pytest.approx(0.0)


def test_subsets_are_drawn_with_replacement_and_uniformly() -> None:
    agent = float32_agent()
    drawn = torch.stack([agent.subset() for _ in range(10_000)])
    counts = torch.bincount(drawn.flatten(), minlength=E).double()
    assert (counts - 4_000).abs().max() < 5 * math.sqrt(4_000)
    twice = (drawn[:, 0] == drawn[:, 1]).double().mean().item()
    assert twice == pytest.approx(1 / E, abs=5 * math.sqrt(0.16 / 10_000))


def test_each_loss_reaches_its_own_network_and_no_other() -> None:
    agent, batch = make_agent(lagrange_gap=1.0, calibrated=True), batch_with_returns()
    named = {**dict(parameters(agent)), **{name: getattr(agent, name) for name in ADAPTIVE}}
    losses = {
        "critic.": agent.critic_loss(batch, online=False)[0],
        "actor.": agent.actor_loss(batch)[0],
        "log_alpha": agent.alpha_loss(torch.zeros(5).double())[0],
        "raw_lagrange": agent.lagrange_loss(torch.ones(()).double())[0],
    }
    for owner, loss in losses.items():
        gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        reached = {name for name, gradient in zip(named, gradients, strict=True) if gradient is not None}
        assert reached == {name for name in named if (name.startswith(owner) if owner[-1] == "." else name == owner)}


def test_an_online_update_steps_the_critics_on_each_slice_and_the_actor_once_on_all() -> None:
    agent, batch = float32_agent(batch_size=16), float32_batch(64)
    seen: list[tuple[str, torch.Tensor]] = []
    critic_loss, actor_loss = agent.critic_loss, agent.actor_loss
    agent.critic_loss = lambda part, online: seen.append(("critic", part.obs)) or critic_loss(part, online)
    agent.actor_loss = lambda part: seen.append(("actor", part.obs)) or actor_loss(part)
    before = [p.clone() for p in agent.target_critic.parameters()]
    agent.update(batch, online=True)
    assert [name for name, _ in seen] == ["critic"] * 4 + ["actor"]
    assert torch.equal(torch.cat([obs for _, obs in seen[:4]]), batch.obs)
    assert torch.equal(seen[4][1], batch.obs)
    # Trap (reference 8.3): an optimiser that is not asked does not move, nor do its moments.
    steps = {name: int(getattr(agent, f"{name}_optimizer").step_count) for name in ("critic", "actor", "alpha")}
    assert steps == {"critic": 4, "actor": 1, "alpha": 1}
    assert int(agent.raw_lagrange_optimizer.step_count) == 0
    assert all(not torch.equal(a, b) for a, b in zip(before, agent.target_critic.parameters(), strict=True))


def test_the_multiplier_steps_once_on_all_slices() -> None:
    """As in the authors' code, with the critics after all slices. In version 0.1 it stepped on each slice."""
    agent = make_agent(lagrange_gap=0.8, online_cql=True, batch_size=16)
    batch, before = make_batch(64), agent.raw_lagrange.item()
    terms: list[tuple[int, float]] = []
    conservative_term, lagrange_loss = agent.conservative_term, agent.lagrange_loss

    def noted(part: Batch, data: torch.Tensor) -> torch.Tensor:
        torch.testing.assert_close(data, agent.critic(part.obs, part.actions))  # of the critics as they stand
        term = conservative_term(part, data)
        terms.append((len(part.obs), term.item()))
        return term

    agent.conservative_term = noted
    given: list[float] = []
    agent.lagrange_loss = lambda term: given.append(term.item()) or lagrange_loss(term)
    agent.update(batch, online=True)
    assert [size for size, _ in terms] == [16] * 4 + [64]
    assert given == [terms[-1][1]]
    assert int(agent.raw_lagrange_optimizer.step_count) == 1
    assert agent.raw_lagrange_optimizer.lr == 1e-3
    assert abs(agent.raw_lagrange.item() - before) == pytest.approx(1e-3, rel=1e-3)  # Adam's first step, and no second
    assert np.sign(agent.raw_lagrange.item() - before) == np.sign(given[0] - 0.8)


@pytest.mark.parametrize("large", [False, True])
def test_a_shared_head_is_one_layer_of_all_critics(large: bool) -> None:
    """By autograd on one critic at a time, also with the products of large networks."""
    size = 512 if large else 16
    agent = float32_agent(shared_head=True, critic_hidden=(size, size))
    batch = float32_batch(64)
    head = agent.critic.net[-1]
    assert head.weight.shape == (1, 1, size)
    gradients = torch.autograd.grad(agent.critic(batch.obs, batch.actions).square().sum(), [head.weight, head.bias])
    expected = [torch.zeros_like(head.weight), torch.zeros_like(head.bias)]
    for member in range(E):
        value = agent.critic(batch.obs, batch.actions, torch.tensor([member]))
        for total, part in zip(
            expected, torch.autograd.grad(value.square().sum(), [head.weight, head.bias]), strict=True
        ):
            total += part
    for found, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_the_last_hidden_layer_starts_at_its_scale() -> None:
    """Orthogonal with gain 0.01, the others with √2: columns or rows of that length."""
    agent = float32_agent(last_scale=0.01, hidden=(16, 16), critic_hidden=(16, 16))
    for network in (layers(agent.actor), layers(agent.critic, 1)):
        for (weight, *_), gain in zip(network, (math.sqrt(2), 0.01, math.sqrt(2)), strict=True):
            gram = weight.T @ weight if weight.shape[1] <= weight.shape[0] else weight @ weight.T
            np.testing.assert_allclose(gram, gain**2 * np.eye(len(gram)), atol=1e-5)


def test_target_critics_follow_behind_each_slice() -> None:
    agent = make_agent(batch_size=16, tau=0.1)
    assert_targets_follow_each_step(agent, 0.1, lambda: agent.update(make_batch(64), online=True))


@pytest.mark.parametrize(("gap", "direction"), [(0.01, 1), (50.0, -1), (0.0, 0)])
def test_pre_training_raises_the_multiplier_where_the_gap_is_exceeded(gap: float, direction: int) -> None:
    """Lowers it where it is not; and leaves it alone without a gap."""
    agent = make_agent(lagrange_gap=gap)
    metrics = agent.update(make_batch(), online=False)
    assert np.sign(agent.raw_lagrange.item() - 0.3) == direction
    assert ("charts/alpha_prime" in metrics) is bool(gap)
    assert not gap or np.sign(metrics["losses/conservative"].item() - gap) == direction


def test_critics_reach_the_values_of_a_known_mdp_online() -> None:
    """That of test_off_policy: two states in turn, reward 1 in the first, and one that ends with 5; γ = 0.5."""
    agent = float32_agent(gamma=0.5, tau=0.05, critic_lr=3e-3)
    buffer, rng, states = ReplayBuffer(600, 3, 2), np.random.default_rng(0), np.eye(3)
    for _ in range(200):
        buffer.add(states, rng.uniform(-1, 1, (3, 2)), [1.0, 0.0, 5.0], states[[1, 0, 0]], [0, 0, 1])
    for _ in range(400):
        agent.update(buffer.sample(256, agent.generator), online=True)
    batch = buffer.sample(300, agent.generator)
    expected = batch.obs @ torch.tensor([4 / 3, 2 / 3, 5.0])
    torch.testing.assert_close(agent.critic(batch.obs, batch.actions), expected.expand(E, -1), rtol=0, atol=0.15)


def test_a_restored_agent_continues_bit_for_bit() -> None:
    first, second = (float32_agent(lagrange_gap=0.8, online_cql=True, seed=seed) for seed in (1, 2))
    batch = float32_batch()
    first.update(batch, online=False)
    restore(second, copy.deepcopy(state_of(first)))  # as from a file
    for agent in (first, second):
        agent.update(batch, online=True)
    assert same(state_of(first), state_of(second))


@pytest.mark.parametrize("domain", PRESETS)
def test_a_preset_fills_what_a_domain_decides(domain: str) -> None:
    assert PRESETS[domain].keys() == PRESETS["locomotion"].keys()
    agent = WSRL(Args(dataset="none.hdf5", **PRESETS[domain]), 3, 2, torch.device("cpu"))
    batch = float32_batch()._replace(returns_to_go=torch.zeros(5))
    for online in (False, True):
        assert all(torch.isfinite(value).all() for value in agent.update(batch, online).values())


@pytest.mark.parametrize(
    ("domain", "expected"),
    [  # (Cal-QL, weight, gap, importance sampling), online best of ten, (scale, shift, failure), widths, σ, updates
        ("locomotion", ((False, 5, 0, True), False, (1, 0, None), (256,) * 2, (256,) * 2, "exp", 250_000)),
        ("antmaze", ((True, 5, 0.8, True), True, (10, -5, 0), (256,) * 2, (256,) * 4, "uniform", 1_000_000)),
        ("adroit-binary", ((True, 1, 0, True), False, (10, 5, -1), (512,) * 2, (512,) * 3, "exp", 20_000)),
        ("kitchen", ((True, 5, 0, False), False, (1, -4, None), (512,) * 3, (512,) * 3, "exp", 250_000)),
    ],
)
def test_presets_are_the_authors(domain: str, expected: tuple[Any, ...]) -> None:
    args = Args(dataset="none.hdf5", **PRESETS[domain])
    term = args.calibrated, args.cql_weight, args.lagrange_gap, args.importance_sampling
    rewards = args.reward_scale, args.reward_shift, args.failure_reward
    found = term, args.online_max_target_backup, rewards, args.hidden, args.critic_hidden, args.std
    assert (*found, args.offline_steps) == expected


def test_defaults_are_the_authors() -> None:
    args = Args(dataset="none.hdf5")
    assert (args.actor_lr, args.critic_lr, args.alpha_lr, args.gamma, args.tau) == (1e-4, 3e-4, 1e-4, 0.99, 5e-3)
    assert (args.critics, args.target_critics, args.layer_norm, args.cql_actions) == (10, 2, True, 10)
    assert (args.utd, args.utd * args.batch_size, args.warmup_steps) == (4, 1024, 5000)
    assert (args.retain, args.warmup, args.online_cql) == ("none", "policy", False)
    agent = WSRL(Args(dataset="none.hdf5", **PRESETS["locomotion"]), 3, 2, torch.device("cpu"))
    rates = {name: getattr(agent, f"{name}_optimizer").lr for name in ("actor", "critic", "alpha", "raw_lagrange")}
    assert rates == {"actor": 1e-4, "critic": 3e-4, "alpha": 1e-4, "raw_lagrange": 3e-4}


def test_networks_start_as_the_authors() -> None:
    """Orthogonal times √2, no bias, the temperature at 1; every hidden layer normalised, or none with the flag off."""
    agent = float32_agent(hidden=(16, 16), critic_hidden=(16, 16))
    assert (agent.log_alpha.item(), F.softplus(agent.raw_lagrange).item()) == (0.0, pytest.approx(1.0))
    critics = [layers(agent.critic, member) for member in range(agent.args.critics)]
    for network in (layers(agent.actor), *critics):
        assert [len(layer) for layer in network] == [4, 4, 2]  # weight, bias; scale and shift
        for weight, bias, *_ in network:
            gram = weight.T @ weight if weight.shape[1] <= weight.shape[0] else weight @ weight.T
            np.testing.assert_allclose(gram, 2 * np.eye(len(gram)), atol=1e-5)
            assert not bias.any()
    plain = float32_agent(layer_norm=False)
    assert {len(layer) for layer in (*layers(plain.actor), *layers(plain.critic, 0))} == {2}
