"""RLPD against formulas written a second time; its slices, subsets and batches; its settings."""

import itertools
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import COMMON, PENDULUM, final_state, same
from d4rl_file import make
from formulas import (
    Array,
    Drawn,
    assert_log_std_is_clamped,
    assert_targets_follow_each_step,
    forward,
    layers,
    log_density,
    make_batch,
    parameters,
    values,
)

from algos.rlpd import PRESETS, RLPD, Args, train
from common.checkpoint import state_of
from common.errors import InputError
from common.networks import EnsembleLinear, LayerNorm
from common.optim import Adam
from common.replay_buffer import Batch
from offline.offline_to_online import with_presets

SMALL = COMMON | {
    "batch_size": 16, "buffer_size": 10_000, "critics": 3, "target_critics": 2, "utd": 2, "random_steps": 70,
}  # fmt: skip
E, S = 5, 2  # critics, and how many are drawn
SETTINGS = PRESETS["locomotion"] | {
    "hidden": (16, 8), "critics": E, "target_critics": S, "batch_size": 16, "dataset": "none.hdf5",
}  # fmt: skip


def float32_agent(**changed: Any) -> RLPD:
    return RLPD(Args(**(SETTINGS | changed)), 3, 2, torch.device("cpu"))


def make_agent(**changed: Any) -> RLPD:
    agent = float32_agent(**changed)
    noise = torch.Generator().manual_seed(7)
    with torch.no_grad():  # no scale at 1, no shift at 0, targets unlike the critics
        for _, parameter in parameters(agent):
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=noise))
    for network in (agent.actor, agent.critic, agent.target_critic):
        network.double()
    agent.log_alpha.data = torch.tensor(-0.7, dtype=torch.float64)
    agent.actor_optimizer = Adam(agent.actor.parameters(), 1e-3)
    agent.critic_optimizer = Adam(agent.critic.parameters(), 1e-3)
    agent.alpha_optimizer = Adam([agent.log_alpha], 1e-3)
    return agent


def float32_batch(size: int) -> Batch:
    return Batch(*(part.float() for part in make_batch(size)[:5]))


def sampled(agent: RLPD, obs: Array, noise: Array) -> tuple[Array, Array]:
    mean, log_std = np.split(forward(obs, layers(agent.actor)), 2, axis=-1)
    std = np.exp(np.clip(log_std, -20, 2))
    u = mean + std * noise
    return np.tanh(u), log_density(mean, std, u)


@pytest.mark.parametrize("backup_entropy", [True, False])
@pytest.mark.parametrize("drawn_critics", [1, 2, E])
def test_critic_loss_equals_an_independent_formula(drawn_critics: int, backup_entropy: bool) -> None:
    """The smallest of the target critics drawn, with entropy or without; the mean over all critics and the batch."""
    agent, batch = make_agent(target_critics=drawn_critics, backup_entropy=backup_entropy), make_batch()
    obs, actions, rewards, next_obs, terminations = (part.numpy() for part in batch[:5])
    drawn = Drawn(agent.generator)
    next_actions, next_log_prob = sampled(agent, next_obs, drawn.normal(5, 2))
    chosen = np.argsort(torch.rand(E, generator=drawn.generator).numpy())[:drawn_critics]
    by_all = values(agent.target_critic, next_obs, next_actions, E)
    next_value = np.min([by_all[i] for i in chosen], axis=0)
    if backup_entropy:
        next_value = next_value - math.exp(-0.7) * next_log_prob
    target = rewards + 0.99 * (1 - terminations) * next_value
    expected = np.mean([(q - target) ** 2 for q in values(agent.critic, obs, actions, E)])
    assert agent.critic_loss(batch)[0].item() == pytest.approx(expected, rel=1e-6)


def test_actor_loss_is_that_of_the_mean_of_all_critics() -> None:
    agent, batch = make_agent(), make_batch()
    obs = batch.obs.numpy()
    actions, log_prob = sampled(agent, obs, Drawn(agent.generator).normal(5, 2))
    mean = np.mean(values(agent.critic, obs, actions, E), axis=0)
    loss, returned, _ = agent.actor_loss(batch)
    assert loss.item() == pytest.approx((math.exp(-0.7) * log_prob - mean).mean(), rel=1e-6)
    np.testing.assert_allclose(returned.numpy(), log_prob, rtol=1e-6)


def test_alpha_loss_and_its_gradient() -> None:
    """H̄ is half a nat below 0 for each of two dimensions: -1."""
    agent, log_prob = make_agent(), torch.tensor([1.0, 2.5, -0.5]).double()
    loss, _ = agent.alpha_loss(log_prob)
    assert loss.item() == pytest.approx(-math.exp(-0.7) * (1.0 - 1.0), abs=1e-12)
    loss, _ = agent.alpha_loss(log_prob + 3.0)
    loss.backward()
    step = 1e-6
    difference = -(math.exp(-0.7 + step) - math.exp(-0.7 - step)) / (2 * step) * 3.0
    assert agent.log_alpha.grad.item() == pytest.approx(difference, rel=1e-6)


def test_log_deviation_is_held_in_wide_bounds() -> None:
    assert_log_std_is_clamped(float32_agent().actor, -20.0, 2.0)


def test_subsets_are_without_replacement_and_equally_likely() -> None:
    """Never a critic twice; each pair of critics in a tenth of the draws, within five standard deviations."""
    agent, draws = float32_agent(), 5_000
    drawn = [tuple(sorted(agent.subset().tolist())) for _ in range(draws)]
    pairs = Counter(drawn)
    assert pairs.keys() == set(itertools.combinations(range(E), S))
    share = 1 / len(pairs)
    bound = 5 * math.sqrt(draws * share * (1 - share))
    assert all(abs(count - draws * share) < bound for count in pairs.values())


def test_each_target_draws_its_own_critics() -> None:
    agent, drawn = float32_agent(), []
    subset = agent.subset
    agent.subset = lambda: drawn.append(subset()) or drawn[-1]
    agent.update(float32_batch(16 * 20))
    assert len(drawn) == 20
    assert len({tuple(each.tolist()) for each in drawn}) > 5


def test_critics_step_on_each_slice_actor_and_temperature_on_the_last() -> None:
    agent, batch = float32_agent(), float32_batch(16 * 4)
    seen: list[tuple[str, torch.Tensor]] = []
    for name in ("critic_loss", "actor_loss"):
        loss = getattr(agent, name)
        setattr(agent, name, lambda part, n=name, f=loss: seen.append((n, part.obs)) or f(part))
    agent.update(batch)
    assert [name for name, _ in seen] == ["critic_loss"] * 4 + ["actor_loss"]
    assert torch.equal(torch.cat([obs for _, obs in seen[:4]]), batch.obs)
    assert torch.equal(seen[-1][1], batch.obs[48:])
    steps = [int(getattr(agent, f"{name}_optimizer").step_count) for name in ("critic", "actor", "alpha")]
    assert steps == [4, 1, 1]


def test_targets_follow_each_step_of_the_critics() -> None:
    agent = make_agent(tau=0.3)
    assert_targets_follow_each_step(agent, 0.3, lambda: agent.update(make_batch(16 * 4)))


def test_update_moves_every_network_by_its_own_loss() -> None:
    """One Adam step by hand: the first step moves a parameter by lr · g / (|g| + 1e-8)."""
    agent, batch = make_agent(), make_batch()
    before = {name: parameter.detach().clone() for name, parameter in parameters(agent)}
    noise = agent.generator.get_state()
    names = [name for name in before if name.startswith("critic.")]
    found = torch.autograd.grad(agent.critic_loss(batch)[0], [dict(parameters(agent))[name] for name in names])
    twin = make_agent()
    twin.critic_optimizer.minimize(twin.critic_loss(batch)[0])
    actor_loss, log_prob, _ = twin.actor_loss(batch)
    names += [name for name in before if name.startswith("actor.")]
    found += torch.autograd.grad(actor_loss, [*twin.actor.parameters()])
    (slope,) = torch.autograd.grad(twin.alpha_loss(log_prob)[0], [twin.log_alpha])
    agent.generator.set_state(noise)
    agent.update(batch)
    after = {name: parameter.detach() for name, parameter in parameters(agent)}
    for name, gradient in zip(names, found, strict=True):
        step = 1e-3 * gradient / (gradient.abs() + 1e-8)
        torch.testing.assert_close(after[name], before[name] - step, rtol=0, atol=1e-9)
    assert not any(torch.equal(after[name], before[name]) for name in before)
    assert agent.log_alpha.item() == pytest.approx(-0.7 - 1e-3 * math.copysign(1, slope), abs=1e-9)


def test_networks_begin_as_glorots_and_critics_alone_are_normalised() -> None:
    agent = float32_agent(hidden=(256, 256))
    for network in (agent.actor, agent.critic):
        for layer in network.net:
            if isinstance(layer, torch.nn.Linear | EnsembleLinear):
                inputs, outputs = sorted(layer.weight.shape[-2:])
                bound = math.sqrt(6 / (inputs + outputs))
                assert 0.95 * bound < layer.weight.abs().max() <= bound
                assert layer.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.1)
                assert not layer.bias.any()
    assert not any(isinstance(layer, LayerNorm | torch.nn.LayerNorm) for layer in agent.actor.net)
    kinds = [type(layer) for layer in agent.critic.net]
    assert kinds == [EnsembleLinear, LayerNorm, torch.nn.ReLU] * 2 + [EnsembleLinear]
    first = agent.critic.net[0].weight
    assert len({tuple(member.flatten().tolist()) for member in first}) == E  # no two critics are alike


def test_half_of_each_slice_is_from_the_dataset(small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its observations are all 7, those of the environment all 0."""
    path = make(tmp_path / "data.hdf5", "." * 39 + "t", observations=np.full((40, 3), 7.0), actions=np.zeros((40, 1)))
    shares: list[list[int]] = []
    update = RLPD.update

    def noted(agent: RLPD, batch: Batch) -> Any:
        shares.append([int((part.obs[:, 0] == 7).sum()) for part in batch.slices(16)])
        return update(agent, batch)

    monkeypatch.setattr(RLPD, "update", noted)
    train(small("rlpd", dataset=str(path), env="Failing-v0", offline_steps=0, online_steps=60, random_steps=40, utd=4))
    assert shares == [[8] * 4] * 20


def test_nothing_is_learned_in_the_random_steps(small: Any) -> None:
    """After them, each environment step is `utd` steps of the critics and one of actor and temperature."""
    args = small("rlpd", offline_steps=0, online_steps=60, random_steps=40, utd=3)
    train(args)
    agent = final_state(args.run_dir)["agent"]
    steps = {name: int(agent[f"{name}_optimizer"]["state"][0]["step"]) for name in ("critic", "actor", "alpha")}
    assert steps == {"critic": 60, "actor": 20, "alpha": 20}


def test_the_reward_shift_reaches_the_dataset(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shift of -1, as on antmaze, makes each reward smaller by 1."""
    drawn: list[float] = []
    update = RLPD.update
    monkeypatch.setattr(
        RLPD, "update", lambda self, batch: drawn.append(batch.rewards.mean().item()) or update(self, batch)
    )
    for shift in (0.0, -1.0):
        args = small("rlpd", offline_steps=1, online_steps=0, reward_shift=shift)
        train(args.__class__(**vars(args) | {"run_dir": args.run_dir / str(shift)}))
    assert drawn[0] - 1.0 == pytest.approx(drawn[1], rel=1e-5)


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ("HalfCheetah-v4", (250_000, (256, 256), 2, True, 0.0)),
        ("AntMaze_Large-v4", (300_000, (256,) * 3, 1, False, -1.0)),
        ("PointMaze_Large-v3", (300_000, (256,) * 3, 1, False, -1.0)),
        ("AdroitHandPen-v1", (1_000_000, (256,) * 3, 2, False, 0.0)),
        ("adroit-binary/pen-v0", (1_000_000, (256,) * 3, 2, False, 0.0)),
        ("FrankaKitchen-v1", (250_000, (256, 256), 2, True, 0.0)),  # which has no preset
    ],
)
def test_presets_by_domain(env: str, expected: tuple[Any, ...]) -> None:
    names = ("online_steps", "hidden", "target_critics", "backup_entropy", "reward_shift")
    args = with_presets(Args(dataset=str(PENDULUM), env=env), PRESETS)
    assert tuple(getattr(args, name) for name in names) == expected


def test_a_flag_overrides_its_preset() -> None:
    given = {"hidden": (64,), "target_critics": 2, "backup_entropy": True, "reward_shift": 0.0, "online_steps": 7}
    args = with_presets(Args(dataset=str(PENDULUM), env="AntMaze_Large-v4", **given), PRESETS)
    assert {name: getattr(args, name) for name in given} == given


def test_defaults_are_the_authors() -> None:
    args = Args(dataset="none.hdf5")
    assert (args.utd, args.batch_size, args.critics, args.offline_steps, args.random_steps) == (20, 256, 10, 0, 5_000)
    assert (args.gamma, args.tau, args.actor_lr, args.critic_lr, args.alpha_lr) == (0.99, 0.005, 3e-4, 3e-4, 3e-4)
    assert (args.retain, args.offline_ratio, args.target_entropy) == ("mix", 0.5, -0.5)
    agent = float32_agent()
    assert (agent.log_alpha.item(), agent.target_entropy) == (0, -1)  # of two actions


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"critics": 3, "target_critics": 4}, "--target-critics is 4: give at most --critics, 3"),
        ({"target_critics": 0}, "--target-critics is 0: give a number above 0"),
        ({"utd": 0}, "--utd is 0: give a number above 0"),
        ({"random_steps": -1}, "--random-steps is -1: give a number of 0 or more"),
        ({"gamma": 1.1}, r"--gamma is 1.1: give a number in \(0, 1\]"),
        ({"tau": 0.0}, r"--tau is 0.0: give a number in \(0, 1\]"),
    ],
)
def test_bad_flags_are_refused(changed: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=named):
        Args(dataset="none.hdf5", **changed)


def test_all_critics_may_be_in_the_target() -> None:
    agent = float32_agent(critics=2, target_critics=2)
    assert sorted(agent.subset().tolist()) == [0, 1]


def test_state_covers_all() -> None:
    agent, other = float32_agent(), float32_agent(seed=2)
    networks = {"actor", "critic", "target_critic", "log_alpha", "generator"}
    assert networks | {"actor_optimizer", "critic_optimizer", "alpha_optimizer"} <= state_of(agent).keys()
    assert not same(state_of(agent)["critic"], state_of(other)["critic"])
