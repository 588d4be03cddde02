"""CQL and Cal-QL against formulas written a second time, one action at a time, and known answers."""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from conftest import COMMON, same
from formulas import (
    Array,
    Drawn,
    assert_log_std_is_clamped,
    forward,
    layers,
    log_density,
    log_sum_exp,
    make_batch,
    parameters,
    values,
)

from algos.cql import CQL, Args, train
from common.checkpoint import restore, state_of
from common.optim import Adam
from common.replay_buffer import Batch, ReplayBuffer

SMALL = COMMON | {
    "batch_size": 16, "buffer_size": 10_000, "critic_hidden": (16, 16), "cql_actions": 2, "calibrated": True,
}  # fmt: skip
N = 3  # actions from each source
SETTINGS = {"hidden": (16, 16), "critic_hidden": (16, 8), "max_target_backup": False, "cql_weight": 5.0,
         "lagrange_gap": 0.0, "importance_sampling": True, "cql_actions": N, "batch_size": 64,
         "dataset": "none.hdf5"}  # fmt: skip


def float32_agent(**changed: Any) -> CQL:
    return CQL(Args(**(SETTINGS | changed)), 3, 2, torch.device("cpu"))


def make_agent(**changed: Any) -> CQL:
    agent = float32_agent(**changed)
    for module in (agent.actor, agent.critic, agent.target_critic):
        module.double()
    agent.log_alpha.data = torch.tensor(-0.7, dtype=torch.float64)
    agent.log_lagrange.data = torch.tensor(0.3, dtype=torch.float64)
    agent.actor_optimizer = Adam(agent.actor.parameters(), 1e-3)
    agent.critic_optimizer = Adam(agent.critic.parameters(), 1e-3)
    agent.alpha_optimizer = Adam([agent.log_alpha], 1e-3)
    agent.lagrange_optimizer = Adam([agent.log_lagrange], 1e-3)
    with torch.no_grad():  # values far enough apart that every maximum, minimum and bound below has work to do
        for parameter in agent.critic.parameters():
            parameter.mul_(2.5)
        for parameter in agent.target_critic.parameters():
            parameter.mul_(3.0)
    return agent


def calibrated_batch() -> Batch:
    return make_batch()._replace(returns_to_go=torch.tensor([-2.0, 3.0, 0.1, -0.3, 0.5], dtype=torch.float64))


def gaussian(agent: CQL, obs: Array) -> tuple[Array, Array]:
    mean, log_std = np.split(forward(obs, layers(agent.actor)), 2, axis=-1)
    return mean, np.exp(np.clip(log_std, -20, 2))


def drawn_from_policy(agent: CQL, obs: Array, noise: Array) -> tuple[Array, Array]:
    mean, std = gaussian(agent, obs)
    u = mean + std * noise
    return np.tanh(u), log_density(mean, std, u)


def terms(agent: CQL, args: Args, batch: Batch, drawn: Drawn) -> Array:
    """The conservative term of every critic and transition, [critics, batch]."""
    obs, actions, _, next_obs, _ = (part.numpy() for part in batch[:5])
    sources = [(drawn.uniform(N, 5, 2), None), (drawn.normal(N, 5, 2), obs), (drawn.normal(N, 5, 2), next_obs)]
    data = values(agent.critic, obs, actions, args.critics)
    found = np.zeros((args.critics, 5))
    for i in range(args.critics):
        for b in range(5):
            entries = [] if args.importance_sampling else [data[i][b]]
            for noise, states in sources:
                for j in range(N):
                    proposed, density = noise[j, b], 2 * math.log(0.5)
                    if states is not None:
                        proposed, density = drawn_from_policy(agent, states[b], noise[j, b])
                    q = values(agent.critic, obs[b : b + 1], proposed[None], args.critics)[i][0]  # at s, for all three
                    if args.calibrated and states is not None:
                        q = max(q, batch.returns_to_go[b].item())
                    entries.append(q - density if args.importance_sampling else q)
            t = args.cql_temperature
            found[i, b] = t * log_sum_exp([entry / t for entry in entries]) - data[i][b]
            if args.cql_clip_min is not None:
                found[i, b] = max(found[i, b], args.cql_clip_min)
    return found


def bellman_target(agent: CQL, args: Args, batch: Batch, drawn: Drawn) -> Array:
    _, _, rewards, next_obs, terminations = (part.numpy() for part in batch[:5])
    backed_up = np.full(5, -np.inf)
    entropy = np.zeros(5)
    for noise in drawn.normal(N if args.max_target_backup else 1, 5, 2):
        actions, log_prob = drawn_from_policy(agent, next_obs, noise)
        smallest = np.min(values(agent.target_critic, next_obs, actions, args.critics), axis=0)
        entropy = np.where(smallest > backed_up, -log_prob, entropy)
        backed_up = np.maximum(smallest, backed_up)
    if args.backup_entropy:
        backed_up = backed_up + math.exp(-0.7) * entropy
    return rewards + 0.99 * (1 - terminations) * backed_up


VARIANTS: list[dict[str, Any]] = [  # with a clip above 0, so that it has something to clip
    {},
    {"critics": 1},
    {"critics": 5},
    {"importance_sampling": False},
    {"cql_temperature": 0.5},
    {"cql_clip_min": 3.5},
    {"lagrange_gap": 2.0},
    {"max_target_backup": True},
    {"backup_entropy": True},
    {"max_target_backup": True, "backup_entropy": True},
    {"calibrated": True},
    {"calibrated": True, "importance_sampling": False},
    {"calibrated": True, "max_target_backup": True, "lagrange_gap": 0.8, "cql_clip_min": 3.5, "critics": 3},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_critic_loss_equals_an_independent_formula(variant: dict[str, Any]):
    agent, args, batch = make_agent(**variant), Args(**(SETTINGS | variant)), calibrated_batch()
    drawn = Drawn(agent.generator)
    target = bellman_target(agent, args, batch, drawn)
    term = terms(agent, args, batch, drawn)
    weight = 5.0 * (math.exp(0.3) if args.lagrange_gap else 1.0)
    data = values(agent.critic, batch.obs.numpy(), batch.actions.numpy(), args.critics)
    expected = sum(((q - target) ** 2).mean() + weight * term[i].mean() for i, q in enumerate(data))
    loss, returned, _ = agent.critic_loss(batch)
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    np.testing.assert_allclose(returned.numpy(), term.mean(1), rtol=1e-6)


@pytest.mark.parametrize("variant", VARIANTS[3:], ids=str)
def test_every_variant_differs_from_the_plain_loss(variant: dict[str, Any]):
    """So that the comparison above is of the variant and not of something it leaves unchanged."""
    plain, other = (make_agent(**changed) for changed in ({}, variant))
    batch = calibrated_batch()
    assert abs(plain.critic_loss(batch)[0].item() - other.critic_loss(batch)[0].item()) > 1e-3


@pytest.mark.parametrize("imitate", [False, True])
def test_actor_loss_equals_an_independent_formula(imitate: bool):
    """While it imitates, the log-probability is that of the data's actions, not of fresh ones."""
    agent, batch = make_agent(), make_batch()
    obs, data = batch.obs.numpy(), batch.actions.numpy()
    actions, log_prob = drawn_from_policy(agent, obs, Drawn(agent.generator).normal(5, 2))
    value = np.min(values(agent.critic, obs, actions, 2), axis=0)
    if imitate:
        value = log_density(*gaussian(agent, obs), np.arctanh(data))
    loss, returned, _ = agent.actor_loss(batch, imitate)
    assert loss.item() == pytest.approx((math.exp(-0.7) * log_prob - value).mean(), rel=1e-6)
    np.testing.assert_allclose(returned.numpy(), log_prob, rtol=1e-6)


def test_imitation_ends_after_its_steps(small, monkeypatch: pytest.MonkeyPatch):
    asked, actor_loss = [], CQL.actor_loss
    monkeypatch.setattr(CQL, "actor_loss", lambda self, *args: asked.append(args[1]) or actor_loss(self, *args))
    train(small("cql", offline_steps=4, online_steps=3, bc_steps=5, calibrated=False, retain="append"))
    assert asked == [True] * 5 + [False] * 2


def test_alpha_loss_and_its_gradient():
    agent, log_prob = make_agent(), torch.tensor([1.0, 2.5, -0.5]).double()
    loss, _ = agent.alpha_loss(log_prob)
    assert loss.item() == pytest.approx(0.7 * (1.0 - 2.0))
    loss.backward()
    assert agent.log_alpha.grad.item() == pytest.approx(1.0)


def test_alpha_prime_loss_and_its_gradient():
    """-½ Σ_i α' w (Δ_i - gap), and the same again as its slope in log α'."""
    agent, term = make_agent(lagrange_gap=0.8), torch.tensor([2.0, 0.5]).double()
    loss, _ = agent.lagrange_loss(term)
    expected = -0.5 * math.exp(0.3) * 5.0 * ((2.0 - 0.8) + (0.5 - 0.8))
    assert loss.item() == pytest.approx(expected)
    loss.backward()
    assert agent.log_lagrange.grad.item() == pytest.approx(expected)


@pytest.mark.parametrize(("gap", "direction"), [(0.01, 1), (50.0, -1)])
def test_multiplier_rises_when_the_gap_is_exceeded(gap: float, direction: int):
    agent = make_agent(lagrange_gap=gap)
    metrics = agent.update(make_batch())
    assert (metrics["losses/conservative"].mean() - gap).sign() == direction
    assert (agent.log_lagrange.item() - 0.3) * direction > 0


def test_multiplier_is_bounded_and_comes_back():
    agent = make_agent(lagrange_gap=0.01)
    agent.log_lagrange.data.fill_(math.log(1e6) - 1e-6)
    agent.update(make_batch())
    assert agent.log_lagrange.item() == math.log(1e6)
    agent.lagrange_gap = 1e9
    for _ in range(5):
        agent.update(make_batch())
    assert agent.log_lagrange.item() < math.log(1e6)


def test_multiplier_stays_out_without_a_gap():
    agent = make_agent()
    metrics = agent.update(make_batch())
    assert agent.log_lagrange.item() == 0.3
    assert "charts/alpha_prime" not in metrics


@pytest.mark.parametrize("imitate", [False, True])
def test_each_loss_reaches_its_own_network_and_no_other(imitate: bool):
    agent, batch = make_agent(lagrange_gap=1.0, calibrated=True, backup_entropy=True), calibrated_batch()
    named = {**dict(parameters(agent)), "log_alpha": agent.log_alpha, "log_lagrange": agent.log_lagrange}
    losses = {
        "critic.": agent.critic_loss(batch)[0],
        "actor.": agent.actor_loss(batch, imitate)[0],
        "log_alpha": agent.alpha_loss(torch.zeros(5).double())[0],
        "log_lagrange": agent.lagrange_loss(torch.ones(2).double())[0],
    }
    for owner, loss in losses.items():
        gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        reached = {name for name, gradient in zip(named, gradients, strict=True) if gradient is not None}
        assert reached == {name for name in named if (name.startswith(owner) if owner[-1] == "." else name == owner)}


@pytest.mark.parametrize("importance_sampling", [False, True])
def test_nothing_below_the_return_to_go_is_lowered(importance_sampling: bool):
    """Cal-QL: no gradient in the policy's entries below G; uniform entries and those above G have one."""
    agent = make_agent(calibrated=True, importance_sampling=importance_sampling)
    q = torch.randn(2, 3 * N + 1, 5, dtype=torch.float64, requires_grad=True)
    returns_to_go = torch.tensor([-9.0, 9.0, 0.0, 0.2, -0.2]).double()
    term = agent.conservative_term(q, torch.zeros(3 * N, 5).double(), returns_to_go)
    (gradient,) = torch.autograd.grad(term.sum(), q)
    by_policy = torch.zeros(3 * N + 1, dtype=torch.bool)
    by_policy[N:-1] = True
    bounded = (q < returns_to_go) & by_policy[:, None]
    assert 0 < bounded.sum() < 2 * 2 * N * 5
    assert (gradient[bounded] == 0).all()
    assert (gradient[:, :-1][~bounded[:, :-1]] > 0).all()
    assert (gradient[:, -1] < 0).all()


def test_calibration_without_returns_to_go_is_refused():
    with pytest.raises(ValueError, match="returns_to_go"):
        make_agent(calibrated=True).critic_loss(make_batch())


def test_several_actions_of_a_state_are_valued_as_one_by_one():
    agent, batch = make_agent(), make_batch()
    actions = torch.rand(4, 5, 2).double()
    together = agent.critic(batch.obs, actions)
    assert together.shape == (2, 4, 5)
    torch.testing.assert_close(together, torch.stack([agent.critic(batch.obs, a) for a in actions], dim=1))


class Slope:
    """In an optimiser's place: a step along the gradient, whose length Adam's first step does not show."""

    def __init__(self, *parameters: torch.Tensor) -> None:
        self.parameters = parameters

    def minimize(self, loss: torch.Tensor) -> None:
        for parameter, gradient in zip(self.parameters, torch.autograd.grad(loss, self.parameters), strict=True):
            parameter.data -= 1e-3 * gradient


@pytest.mark.parametrize("imitate", [False, True])
def test_update_moves_every_network_by_its_loss_before_any_moved(imitate: bool):
    changed = {"lagrange_gap": 1.0, "calibrated": True}
    agent, twin, batch = make_agent(**changed), make_agent(**changed), calibrated_batch()
    agent.actor_optimizer, agent.critic_optimizer = Slope(*agent.actor.parameters()), Slope(*agent.critic.parameters())
    agent.alpha_optimizer, agent.lagrange_optimizer = Slope(agent.log_alpha), Slope(agent.log_lagrange)
    actor_loss, log_prob, _ = twin.actor_loss(batch, imitate)
    critic_loss, term, _ = twin.critic_loss(batch)
    losses = actor_loss + critic_loss + twin.alpha_loss(log_prob)[0] + twin.lagrange_loss(term)[0]
    losses.backward()
    agent.update(batch, imitate)
    moved = dict(parameters(agent)) | {name: getattr(agent, name) for name in ("log_alpha", "log_lagrange")}
    before = dict(parameters(twin)) | {name: getattr(twin, name) for name in ("log_alpha", "log_lagrange")}
    for name, old in before.items():
        if name.startswith("target_critic."):
            expected = 0.995 * old + 0.005 * moved[name.replace("target_", "", 1)]
            assert old.grad is None
        else:
            expected = old - 1e-3 * old.grad
        torch.testing.assert_close(moved[name].detach(), expected.detach(), rtol=0, atol=1e-15, msg=name)


def test_critics_reach_the_values_of_a_known_mdp_without_the_conservative_term():
    """That of test_off_policy: two states in turn, reward 1 in the first, and one that ends with 5; γ = 0.5."""
    agent = float32_agent(gamma=0.5, tau=0.05, critic_lr=3e-3, cql_weight=0.0, cql_actions=1)
    buffer, rng, states = ReplayBuffer(600, 3, 2), np.random.default_rng(0), np.eye(3)
    for _ in range(200):
        buffer.add(states, rng.uniform(-1, 1, (3, 2)), [1.0, 0.0, 5.0], states[[1, 0, 0]], [0, 0, 1])
    for _ in range(1_500):
        agent.update(buffer.sample(64, agent.generator))
    batch = buffer.sample(300, agent.generator)
    expected = batch.obs @ torch.tensor([4 / 3, 2 / 3, 5.0])
    torch.testing.assert_close(agent.critic(batch.obs, batch.actions), expected.expand(2, -1), rtol=0, atol=0.1)


def values_around_a_hole(returns_to_go: float | None = None, **changed: Any) -> tuple[float, float]:
    """Mean Q of seen and of unseen actions: every action ends with reward 1, and the data have none above 0."""
    agent = float32_agent(critic_lr=3e-3, calibrated=returns_to_go is not None, **changed)
    obs, rng = torch.ones(64, 3), np.random.default_rng(0)
    for _ in range(600):
        actions = torch.from_numpy(np.column_stack([rng.uniform(-1, 0, 64), rng.uniform(-1, 1, 64)])).float()
        to_go = None if returns_to_go is None else torch.full((64,), returns_to_go)
        agent.update(Batch(obs, actions, torch.ones(64), obs, torch.ones(64), to_go))
    unseen = actions * torch.tensor([-1.0, 1.0])
    unseen[:, 0].clamp_(min=0.3)
    with torch.no_grad():
        return agent.critic(obs, actions).mean().item(), agent.critic(obs, unseen).mean().item()


@pytest.mark.parametrize("importance_sampling", [False, True])
def test_conservative_term_lowers_what_was_never_seen(importance_sampling: bool):
    seen, unseen = values_around_a_hole(cql_weight=1.0, importance_sampling=importance_sampling)
    assert unseen < 1.0 - 0.5
    assert unseen < seen - 0.5


@pytest.mark.parametrize("variant", [{}, {"max_target_backup": True}, {"lagrange_gap": 3.0}], ids=str)
def test_values_of_what_was_never_seen_stay_below_those_of_a_known_chain(variant: dict[str, Any]):
    """s₀ → s₁ → the end, reward 1 on the second step and γ = 0.9, whatever is done: Q* is 0.9, then 1. Backed up, the
    value of a hole at s₁ would raise s₀'s."""
    agent = float32_agent(gamma=0.9, tau=0.05, critic_lr=3e-3, cql_weight=1.0, **variant)
    first, second = torch.eye(3)[0].expand(32, -1), torch.eye(3)[1].expand(32, -1)
    obs, next_obs = torch.cat([first, second]), torch.cat([second, first])
    ends, rng = torch.arange(64) >= 32, np.random.default_rng(0)
    for _ in range(1_000):
        actions = torch.from_numpy(np.column_stack([rng.uniform(-1, 0, 64), rng.uniform(-1, 1, 64)])).float()
        agent.update(Batch(obs, actions, ends.float(), next_obs, ends.float()))
    unseen = torch.column_stack([actions[:, 0].neg().clamp(min=0.3), actions[:, 1]])
    with torch.no_grad():
        seen, never = (agent.critic(obs, at).mean(0).view(2, 32).mean(1) for at in (actions, unseen))
    known = torch.tensor([0.9, 1.0])
    assert (never < known - 5.0).all()
    torch.testing.assert_close(seen, known, rtol=0, atol=0.4)


def test_calibration_lowers_less_where_the_data_are_better_and_nothing_changes_where_they_are_not():
    _, plain = values_around_a_hole(cql_weight=1.0)
    _, bounded = values_around_a_hole(1.0, cql_weight=1.0)  # nothing above the data's return is pushed below it
    _, below = values_around_a_hole(-50.0, cql_weight=1.0)
    assert plain + 0.5 < bounded
    assert below == plain


def test_without_its_weight_nothing_is_lowered():
    seen, unseen = values_around_a_hole(cql_weight=0.0)
    assert seen == pytest.approx(1.0, abs=0.1)
    assert unseen == pytest.approx(1.0, abs=0.25)


def test_actions_lie_in_the_box_and_differ_where_they_should():
    agent, obs = float32_agent(), np.zeros((4, 3), np.float32)
    actions = agent.act(obs)
    assert actions.shape == (4, 2)
    assert actions.dtype == np.float32
    assert np.abs(actions).max() < 1
    assert not np.array_equal(actions, agent.act(obs))
    assert np.array_equal(agent.act(obs, deterministic=True), agent.act(obs, deterministic=True))


def test_restored_agent_continues_as_the_first_would():
    """Traps 3 and 4: after a restore α and α' still move, each by its own optimiser; the target is not the critic."""
    changed = {"lagrange_gap": 0.8}
    first, second = float32_agent(**changed), float32_agent(**changed, seed=2)
    batch = Batch(*(part.float() for part in make_batch()[:5]))
    for _ in range(2):
        first.update(batch, imitate=True)
    restore(second, copy.deepcopy(state_of(first)))  # as from a file
    assert same(state_of(first), state_of(second))
    saved = {name: getattr(second, name).item() for name in ("log_alpha", "log_lagrange")}
    for agent in (first, second):
        agent.update(batch)
    assert same(state_of(first), state_of(second))
    assert all(getattr(second, name).item() != value for name, value in saved.items())
    assert second.alpha_optimizer.param_groups[0]["params"] == [second.log_alpha]
    assert second.lagrange_optimizer.param_groups[0]["params"] == [second.log_lagrange]
    assert not same(second.critic.state_dict(), second.target_critic.state_dict())


def test_state_covers_all():
    agent = float32_agent()
    networks = {"actor", "critic", "target_critic", "log_alpha", "log_lagrange", "generator"}
    optimizers = {f"{name}_optimizer" for name in ("actor", "critic", "alpha", "lagrange")}
    assert networks | optimizers <= state_of(agent).keys()


def test_log_deviation_is_held_in_wide_bounds():
    assert_log_std_is_clamped(float32_agent().actor, -20.0, 2.0)
