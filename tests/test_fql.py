"""FQL against formulas written a second time in float64, and a problem whose answer is known."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import COMMON, PENDULUM, module, same
from formulas import Array, Drawn, joined, make_batch

from algos import bc
from algos.fql import FQL, PRESETS, Args, presets_for
from common.arguments import Unset
from common.checkpoint import restore, state_of
from common.errors import InputError
from common.optim import Adam
from common.replay_buffer import Batch, ReplayBuffer
from offline.dataset import read
from offline.offline_to_online import with_presets

SMALL = COMMON | {"batch_size": 16, "buffer_size": 10_000, "flow_steps": 3, "time_limit": 50}
STEPS = 4


def make_agent(double: bool = True, **changed: Any) -> FQL:
    given = {"dataset": str(PENDULUM), "hidden": (16, 8), "flow_steps": STEPS, "alpha": 2.0} | changed
    args = Args(**given)
    agent = FQL(with_presets(args, presets_for(args)), 3, 2, torch.device("cpu"))
    if double:
        noise = torch.Generator().manual_seed(7)
        for network in (agent.flow, agent.actor, agent.critic, agent.target_critic):
            network.double()
            for parameter in network.parameters():  # no scale at 1, no shift at 0, targets unlike the critics
                parameter.data += 0.3 * torch.randn(parameter.shape, generator=noise)
        for name in ("flow", "actor", "critic"):
            setattr(agent, f"{name}_optimizer", Adam(getattr(agent, name).parameters(), 1e-3))
        draw = agent.noise
        agent.noise = lambda *given: draw(*given).double()
    return agent


def test_a_policy_that_was_not_distilled_is_not_started_from(small: Any, tmp_path: Path):
    """A run of best-of-n trains none. The other way is allowed, because best-of-n needs the flow and critics alone."""
    for theirs, ours in (("best-of-n", "one-step"), ("one-step", "best-of-n")):
        given = {"offline_steps": 2, "online_steps": 0, "eval_episodes": 0}
        module("fql").train(small("fql", extraction=theirs, run_dir=tmp_path / theirs, **given))
        args = small("fql", extraction=ours, init_from=tmp_path / theirs, run_dir=tmp_path / f"from-{theirs}", **given)
        if ours == "one-step":
            with pytest.raises(InputError, match="with --extraction best-of-n: give the same here"):
                module("fql").train(args)
        else:
            assert module("fql").train(args).step == 0


def values(critic: Any, obs: Array, actions: Array, critics: int) -> Array:
    return np.stack([joined(critic, obs, actions, member=i)[:, 0] for i in range(critics)])


def flow_actions(agent: FQL, obs: Array, noise: Array) -> Array:
    """Euler steps at t = 0, 1/4, 2/4, 3/4; clipped once, at the end."""
    x = noise
    for k in range(STEPS):
        x = x + joined(agent.flow, obs, x, np.full((len(x), 1), k / STEPS)) / STEPS
    return np.clip(x, -1, 1)


@pytest.mark.parametrize("critics", [1, 2, 5])
@pytest.mark.parametrize("q_aggregation", ["mean", "min"])
def test_critic_loss_equals_an_independent_formula(critics: int, q_aggregation: str) -> None:
    agent, batch = make_agent(critics=critics, q_aggregation=q_aggregation, gamma=0.9), make_batch(40)
    obs, actions, rewards, next_obs, terminations = (part.numpy() for part in batch[:5])
    chosen = joined(agent.actor, next_obs, Drawn(agent.generator).normal(40, 2))
    assert (np.abs(chosen) > 1).any()
    following = getattr(np, q_aggregation)(values(agent.target_critic, next_obs, np.clip(chosen, -1, 1), critics), 0)
    target = rewards + 0.9 * (1 - terminations) * following
    expected = np.mean([(q - target) ** 2 for q in values(agent.critic, obs, actions, critics)])
    assert agent.critic_loss(batch)[0].item() == pytest.approx(expected, rel=1e-6)


def test_flow_loss_equals_an_independent_formula() -> None:
    agent, batch = make_agent(), make_batch(40)
    obs, actions = batch.obs.numpy(), batch.actions.numpy()
    drawn = Drawn(agent.generator)
    noise, t = drawn.normal(40, 2), torch.rand(40, generator=drawn.generator).double().numpy()[:, None]
    found = joined(agent.flow, obs, (1 - t) * noise + t * actions, t)
    expected = ((found - (actions - noise)) ** 2).sum() / actions.size
    assert agent.flow_loss(batch)[0].item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("critics", "normalize_q"), [(1, False), (2, False), (2, True), (5, True)])
def test_actor_loss_equals_an_independent_formula(critics: int, normalize_q: bool) -> None:
    """The distance is that of the unclipped action, the value that of the clipped one, of the same noise.

    Q is the mean of the critics, also if the target has the smallest. λ = 1 / mean |Q|.
    """
    agent, batch = make_agent(critics=critics, normalize_q=normalize_q, q_aggregation="min"), make_batch(40)
    obs, noise = batch.obs.numpy(), Drawn(agent.generator).normal(40, 2)
    chosen, wanted = joined(agent.actor, obs, noise), flow_actions(agent, obs, noise)
    assert (np.abs(chosen) > 1).any()
    assert (np.abs(wanted) == 1).any()
    distance = ((chosen - wanted) ** 2).sum() / wanted.size
    q = values(agent.critic, obs, np.clip(chosen, -1, 1), critics).mean(0)
    assert q.min() < 0 < q.max()
    scale = 1 / np.abs(q).mean() if normalize_q else 1.0
    loss, metrics = agent.actor_loss(batch)
    assert loss.item() == pytest.approx(2.0 * distance - scale * q.mean(), rel=1e-6)
    assert metrics["losses/distillation"].item() == pytest.approx(distance, rel=1e-6)


def test_distillation_gives_the_flow_no_gradient() -> None:
    agent = make_agent()
    loss, _ = agent.actor_loss(make_batch(40))
    gradients = torch.autograd.grad(loss, [*agent.flow.parameters()], allow_unused=True)
    assert all(gradient is None for gradient in gradients)
    gradients = torch.autograd.grad(agent.actor_loss(make_batch(40))[0], [*agent.actor.parameters()])
    assert all(gradient.abs().max() > 0 for gradient in gradients)


def test_an_update_takes_all_gradients_at_the_old_networks() -> None:
    """It equals one Adam on the sum of the three losses, as in the authors' code, then the soft update."""
    agent, other, batch = make_agent(), make_agent(), make_batch(40)
    networks = [other.flow, other.actor, other.critic]
    adam = torch.optim.Adam([p for network in networks for p in network.parameters()], 1e-3)
    for _ in range(3):
        agent.update(batch)
        adam.zero_grad()
        sum(loss for loss, _ in (other.critic_loss(batch), other.flow_loss(batch), other.actor_loss(batch))).backward()
        adam.step()
        with torch.no_grad():
            for target, online in zip(other.target_critic.parameters(), other.critic.parameters(), strict=True):
                target.copy_(0.995 * target + 0.005 * online)
    for name in ("flow", "actor", "critic", "target_critic"):
        for a, b in zip(getattr(agent, name).parameters(), getattr(other, name).parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def two_modes(count: int, rng: torch.Generator) -> Batch:
    """One step: actions ±0.6 with standard deviation 0.1, three quarters at -0.6; the reward is -(a - 0.6)²."""
    sign = 2.0 * (torch.rand(count, 1, generator=rng) < 0.25) - 1.0
    actions = 0.6 * sign + 0.1 * torch.randn(count, 1, generator=rng)
    rewards = -(actions[:, 0] - 0.6).square()
    return Batch(torch.ones(count, 3), actions, rewards, torch.ones(count, 3), torch.ones(count))


def test_flow_has_both_modes_policy_the_better_one_gaussian_neither() -> None:
    """The flow's weights are right within 3 %, cloning with a mean is at -0.3, FQL's policy at the better mode.

    With α = 0.1 its loss is smallest at (0.1 f + 0.6) / 1.1, f = ±0.6 the flow's action: from 0.49 to 0.6.
    """
    args = Args(dataset=str(PENDULUM), hidden=(64, 64), alpha=0.1, normalize_q=False, q_aggregation="mean",
                gamma=0.99, critic_lr=2e-3)  # fmt: skip
    agent = FQL(args, 3, 1, torch.device("cpu"))
    clone = bc.BC(bc.Args(dataset=str(PENDULUM), hidden=(64, 64)), 3, 1, torch.device("cpu"))
    rng, updates = torch.Generator().manual_seed(0), 1_000
    for update in range(updates):
        for optimizer in (agent.flow_optimizer, agent.actor_optimizer, clone.actor_optimizer):
            optimizer.lr = 2e-3 * (1 - update / updates)
        batch = two_modes(256, rng)
        agent.update(batch)
        clone.update(batch)
    obs, noise = torch.ones(20_000, 3), torch.randn(20_000, 1, generator=rng)
    with torch.no_grad():
        sampled = agent.process.sample(lambda x, t: agent.flow(obs, x, t), noise, rng)
    assert (sampled > 0).float().mean().item() == pytest.approx(0.25, abs=0.03)
    near = [((sampled - mode).abs() < 0.35).float().mean().item() for mode in (-0.6, 0.6)]  # 3.5 deviations
    assert near == [pytest.approx(0.72, abs=0.06), pytest.approx(0.22, abs=0.06)]
    actions = agent.act(obs.numpy())
    assert (actions > 0.3).all()
    assert 0.45 < actions.mean() < 0.64
    assert clone.act(obs[:1].numpy()).item() == pytest.approx(-0.3, abs=0.05)


def test_actions_are_clipped_samples_and_evaluations_have_noise_of_their_own() -> None:
    agent, obs = make_agent(False), np.random.default_rng(0).normal(size=(30, 3)).astype(np.float32)
    with torch.no_grad():
        agent.actor.net[-1].bias += 1.0
    expected = np.clip(joined(agent.actor, obs, Drawn(agent.generator).normal(30, 2)), -1, 1)
    before = agent.generator.get_state()
    evaluated = agent.eval_policy()
    first, second = evaluated(obs), evaluated(obs)
    assert not np.array_equal(first, second)
    assert np.array_equal(first, agent.eval_policy()(obs))
    assert torch.equal(agent.generator.get_state(), before)  # an evaluation does not change the training
    np.testing.assert_allclose(agent.act(obs), expected, atol=1e-6)
    assert (np.abs(expected) == 1).any()
    assert not np.array_equal(agent.act(obs), agent.act(obs))


@pytest.mark.parametrize(
    ("dataset", "online_steps", "expected"),
    [  # α, aggregation, γ, offline steps, reward shift: commands of the authors, QC's and QAM's
        ("cube-single-play-singletask-task2-v0", 0, (300, "mean", 0.99, 1_000_000, 0)),
        ("cube-double-play-singletask-v0", 1, (300, "mean", 0.99, 1_000_000, 0)),
        ("scene-play-singletask-task1-v0", 0, (300, "mean", 0.99, 1_000_000, 0)),
        ("puzzle-3x3-play-singletask-task4-v0", 0, (1000, "mean", 0.99, 1_000_000, 0)),
        ("puzzle-3x3-play-sparse-singletask-task1-v0", 0, (300, "mean", 0.99, 1_000_000, 0)),
        ("puzzle-4x4-play-sparse-singletask-v0", 0, (1, "mean", 0.99, 1_000_000, 0)),
        ("puzzle-4x4-play-singletask-v0", 0, (1000, "mean", 0.99, 1_000_000, 0)),
        ("cube-triple-play-singletask-v0", 0, (100, "mean", 0.99, 1_000_000, 0)),
        ("cube-quadruple-play-singletask-v0", 1, (100, "mean", 0.99, 1_000_000, 0)),
        ("antmaze-large-navigate-singletask-task1-v0", 0, (10, "min", 0.99, 1_000_000, 0)),
        ("antmaze-giant-navigate-singletask-v0", 0, (10, "min", 0.995, 1_000_000, 0)),
        ("humanoidmaze-medium-navigate-singletask-v0", 0, (30, "mean", 0.995, 1_000_000, 0)),
        ("humanoidmaze-medium-navigate-singletask-v0", 1, (100, "mean", 0.995, 1_000_000, 0)),
        ("antsoccer-arena-navigate-singletask-v0", 0, (10, "mean", 0.995, 1_000_000, 0)),
        ("antsoccer-arena-navigate-singletask-v0", 1, (30, "mean", 0.995, 1_000_000, 0)),
        ("antmaze-umaze-v2", 0, (10, "mean", 0.99, 500_000, -1)),
        ("antmaze-medium-diverse-v2", 1, (10, "mean", 0.99, 1_000_000, -1)),
        ("antmaze-large-play-v2", 0, (3, "mean", 0.99, 500_000, -1)),
        ("D4RL/antmaze/large-diverse-v1", 1, (3, "mean", 0.99, 1_000_000, -1)),
        ("pen-human-v1", 0, (1e4, "min", 0.99, 500_000, 0)),
        ("D4RL/pen/cloned-v2", 0, (1e4, "min", 0.99, 500_000, 0)),
        ("minari:D4RL/pen/cloned-v2", 0, (1e4, "min", 0.99, 500_000, 0)),
        ("hf://farama-minari/D4RL/pen/cloned-v2", 0, (1e4, "min", 0.99, 500_000, 0)),
        ("pen-cloned-v1", 1, (1e3, "min", 0.99, 1_000_000, 0)),
        ("pen-expert-v1", 0, (3e3, "min", 0.99, 500_000, 0)),
        ("door-cloned-v1", 0, (3e4, "min", 0.99, 500_000, 0)),
        ("hammer-human-v1", 0, (3e4, "min", 0.99, 500_000, 0)),
        ("hammer-cloned-v1", 0, (1e4, "min", 0.99, 500_000, 0)),
        ("relocate-human-v1", 0, (1e4, "min", 0.99, 500_000, 0)),
        ("relocate-expert-v1", 0, (3e4, "min", 0.99, 500_000, 0)),
        ("relocate-cloned-v1", 1, (1e4, "min", 0.99, 1_000_000, 0)),
    ],
)
def test_presets_are_the_authors(
    dataset: str, online_steps: int, expected: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    pendulum = read(str(PENDULUM), False, None)
    monkeypatch.setattr("offline.offline_to_online.read", lambda *_: pendulum)  # the names alone choose
    args = Args(dataset=dataset, online_steps=online_steps)
    args = with_presets(args, presets_for(args))
    assert (args.alpha, args.q_aggregation, args.gamma, args.offline_steps, args.reward_shift) == expected
    assert not args.normalize_q


def test_every_preset_fills_in_every_flag() -> None:
    wanted = {name for name, value in vars(Args).items() if isinstance(value, Unset)} - {"compile", "overlap"}
    assert all(preset.keys() == wanted for preset in PRESETS.values())
    assert all(preset.keys() == wanted for preset in presets_for(Args(dataset="a", online_steps=1)).values())


def test_defaults_are_the_authors() -> None:
    args = Args(dataset="none.hdf5")
    assert (args.actor_lr, args.critic_lr, args.tau, args.flow_steps) == (3e-4, 3e-4, 5e-3, 10)
    assert (args.hidden, args.critics, args.batch_size, args.layer_norm) == ((512,) * 4, 2, 256, True)
    assert (args.retain, args.utd, args.normalize_obs) == ("append", 1, False)


def test_a_restored_agent_resumes_bit_for_bit() -> None:
    agent, other = make_agent(False), make_agent(False, seed=2)
    buffer, rng = ReplayBuffer(100, 3, 2), np.random.default_rng(0)
    parts = rng.normal(size=(100, 3)), rng.uniform(-1, 1, (100, 2)), rng.normal(size=100), rng.normal(size=(100, 3))
    buffer.add(*parts, np.zeros(100))
    for _ in range(3):
        agent.update(buffer.sample(16, agent.generator))
    restore(other, copy.deepcopy(state_of(agent)))  # as from a file: nothing shared
    for each in (agent, other):
        for _ in range(3):
            each.update(buffer.sample(16, each.generator))
    assert same(state_of(agent), state_of(other))
