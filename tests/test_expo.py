"""EXPO against closed forms, brute force and formulas written a second time; its ablations; its traps."""

import copy
import itertools
import json
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from conftest import final_state, module, same, stored
from formulas import (
    Array,
    Drawn,
    assert_targets_follow_each_step,
    forward,
    layers,
    log_density,
    make_batch,
    parameters,
    values,
)

from algos.expo import EXPO, PRESETS, SIZES, Args
from common.checkpoint import restore, state_of
from common.denoiser import Denoiser
from common.errors import InputError
from common.networks import Adam, EnsembleLinear, LayerNorm
from common.replay_buffer import Batch, ReplayBuffer
from offline.switch import Switch

E, S = 5, 2  # critics, and how many are drawn
SMALL = PRESETS["locomotion"] | SIZES["small"] | {
    "hidden": (16, 8), "width": 16, "critics": E, "batch_size": 64, "edit_scale": 0.4, "base_samples": 3, "edits": 2,
    "dataset": "none.hdf5", "online_steps": 1,
}  # fmt: skip
MEAN, DEVIATION = 0.25, 0.1  # of Gaussian data, for which the best network is known


NO_BEST_BACKUP: list[dict[str, Any]] = [{}, {"edits": 0}, {"base_candidates": False}]


def float32_agent(action_dim: int = 2, **changed: Any) -> EXPO:
    return EXPO(Args(**(SMALL | changed)), 3, action_dim, torch.device("cpu"))


def make_agent(**changed: Any) -> EXPO:
    agent = float32_agent(**changed)
    noise = torch.Generator().manual_seed(7)
    with torch.no_grad():  # no scale at 1, no shift at 0, targets unlike the critics
        for _, parameter in parameters(agent):
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=noise))
    for network in (agent.base, agent.base_average, agent.edit, agent.critic, agent.critic_target):
        network.double()
    agent.betas, agent.alpha_bars = agent.betas.double(), agent.alpha_bars.double()
    agent.log_alpha.data = torch.tensor(-0.7, dtype=torch.float64)
    for name, lr in (("base", 1e-3), ("edit", 1e-3), ("critic", 1e-3)):
        setattr(agent, f"{name}_optimizer", Adam(getattr(agent, name).parameters(), lr))
    agent.alpha_optimizer = Adam([agent.log_alpha], 1e-3)
    return agent


def float32_batch(size: int = 5) -> Batch:
    return Batch(*(part.float() for part in make_batch(size)[:5]))


class BestNoise(torch.nn.Module):
    """E[ε|x, t] of x = √ᾱ a + √(1 - ᾱ) ε where a is normal."""

    def __init__(self, alpha_bars: torch.Tensor) -> None:
        super().__init__()
        self.alpha_bars = alpha_bars.double()

    def forward(self, obs: torch.Tensor, noisy: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        bar = self.alpha_bars[time.long()].unsqueeze(-1)
        found = (1 - bar).sqrt() * (noisy.double() - bar.sqrt() * MEAN) / (bar * DEVIATION**2 + 1 - bar)
        return found.to(noisy.dtype)


class BestVelocity(torch.nn.Module):
    """E[a - ε|x, t] of x = (1 - t) ε + t a where a is normal."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps

    def slope_and_offset(self, time: Any) -> tuple[Any, Any]:
        t = time / self.steps
        slope = (t * DEVIATION**2 - (1 - t)) / (t**2 * DEVIATION**2 + (1 - t) ** 2)
        return slope, MEAN - slope * t * MEAN

    def forward(self, obs: torch.Tensor, noisy: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        slope, offset = self.slope_and_offset(time.unsqueeze(-1))
        return slope * noisy + offset


class BestOfModes(torch.nn.Module):
    """The same of either policy, where a is one of `modes` [n, action_dim], all alike."""

    def __init__(self, agent: EXPO, modes: torch.Tensor) -> None:
        super().__init__()
        self.agent, self.modes = agent, modes

    def forward(self, obs: torch.Tensor, noisy: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        of_data, of_noise = time / self.agent.T, 1 - time / self.agent.T
        if self.agent.args.policy == "diffusion":
            bar = self.agent.alpha_bars[time.long()]
            of_data, of_noise = bar.sqrt(), (1 - bar).sqrt()
        distances = (noisy.unsqueeze(-2) - of_data * self.modes).square().sum(-1)
        mean = torch.softmax(-0.5 * distances / of_noise**2, -1) @ self.modes  # E[a|x]
        noise = (noisy - of_data * mean) / of_noise
        return noise if self.agent.args.policy == "diffusion" else mean - noise


class TestBasePolicy:
    @pytest.mark.parametrize("steps", [5, 10, 50])
    def test_schedule_is_variance_preserving(self, steps: int) -> None:
        """ᾱ_T = exp(-∫ 0.1 + 9.9 t dt) whatever T is; little noise first, most at the end."""
        agent = float32_agent(denoising_steps=steps)
        assert agent.alpha_bars[-1].item() == pytest.approx(math.exp(-0.1 - 9.9 / 2), rel=1e-5)
        assert agent.alpha_bars[0].item() == pytest.approx(math.exp(-0.1 / steps - 4.95 / steps**2), rel=1e-5)
        torch.testing.assert_close((1 - agent.betas).cumprod(0), agent.alpha_bars)
        assert (agent.betas.diff() > 0).all()

    def test_denoising_loss_of_the_best_network_is_the_noise_that_nobody_can_tell(self) -> None:
        """Σ_dim E[Var(ε|x)] = 2 · mean_t ᾱ σ² / (ᾱ σ² + 1 - ᾱ); and a network that is off loses more."""
        agent, size = float32_agent(), 400_000
        batch = float32_batch()
        actions = MEAN + DEVIATION * torch.randn(size, 2, generator=torch.Generator().manual_seed(0))
        batch = batch._replace(obs=torch.zeros(size, 3), actions=actions)
        bar = agent.alpha_bars.double()
        expected = 2 * (bar * DEVIATION**2 / (bar * DEVIATION**2 + 1 - bar)).mean().item()
        agent.base = BestNoise(agent.alpha_bars)
        assert agent.base_loss(batch)[0].item() == pytest.approx(expected, rel=0.02)
        agent.base = BestNoise(agent.alpha_bars * 0.9)
        assert agent.base_loss(batch)[0].item() > 1.1 * expected

    def test_flow_loss_of_the_best_network_is_what_nobody_can_tell(self) -> None:
        """Σ_dim E[Var(a - ε|x)] = 2 · ∫ σ² / (t² σ² + (1 - t)²) dt, which is π/2 σ and more."""
        agent, size = float32_agent(policy="flow"), 400_000
        actions = MEAN + DEVIATION * torch.randn(size, 2, generator=torch.Generator().manual_seed(0))
        batch = float32_batch()._replace(obs=torch.zeros(size, 3), actions=actions)
        t = np.linspace(0, 1, 1_000_001)
        expected = 2 * np.mean(DEVIATION**2 / (t**2 * DEVIATION**2 + (1 - t) ** 2))
        agent.base = BestVelocity(agent.T)
        assert agent.base_loss(batch)[0].item() == pytest.approx(expected, rel=0.02)

    @pytest.mark.parametrize("steps", [5, 10])
    def test_sampler_transports_a_density_as_computed_on_a_grid(self, steps: int) -> None:
        """From N(0, 1) back to the data, with the best network, clipped to [-1, 1] on the way."""
        agent = float32_agent(action_dim=1, denoising_steps=steps)
        got = agent.sample(BestNoise(agent.alpha_bars), torch.zeros(1, 3), 400_000, agent.generator).flatten().double()
        betas, bars = agent.betas.double().numpy(), agent.alpha_bars.double().numpy()
        places = np.linspace(-6, 6, 2_401)
        mass = np.exp(-0.5 * places**2)
        mass /= mass.sum()
        edges = np.linspace(-1, 1, 401)
        for k in reversed(range(steps)):
            noise = np.sqrt(1 - bars[k]) * (places - np.sqrt(bars[k]) * MEAN) / (bars[k] * DEVIATION**2 + 1 - bars[k])
            means = (places - betas[k] / np.sqrt(1 - bars[k]) * noise) / np.sqrt(1 - betas[k])
            if k == 0:
                places = means.clip(-1, 1)
            else:  # the last cells take what is clipped
                below = torch.special.ndtr(torch.from_numpy((edges[1:-1, None] - means) / np.sqrt(betas[k]))).numpy()
                mass = np.diff(np.vstack([np.zeros_like(means), below, np.ones_like(means)]), axis=0) @ mass
                places = 0.5 * (edges[1:] + edges[:-1])
        mean = (mass * places).sum()
        deviation = math.sqrt((mass * (places - mean) ** 2).sum())
        assert got.mean().item() == pytest.approx(mean, abs=5 * deviation / math.sqrt(400_000) + 1e-4)
        assert got.std().item() == pytest.approx(deviation, rel=0.01)
        assert mean == pytest.approx(MEAN, abs=0.02)  # what it is all for

    def test_euler_steps_of_the_flow(self) -> None:
        """With the best velocity each step is affine, and so is the whole."""
        agent = float32_agent(action_dim=1, policy="flow", denoising_steps=10)
        best = BestVelocity(10)
        scale, shift = 1.0, 0.0
        for k in range(10):
            slope, offset = best.slope_and_offset(float(k))
            scale, shift = scale * (1 + slope / 10), shift * (1 + slope / 10) + offset / 10
        noise = Drawn(agent.generator).normal(1_000, 1, 1)
        got = agent.sample(best, torch.zeros(1, 3), 1_000, agent.generator).double().numpy()
        np.testing.assert_allclose(got, (scale * noise + shift).clip(-1, 1), atol=1e-5)

    @pytest.mark.parametrize("policy", ["diffusion", "flow"])
    def test_samples_stay_in_bounds(self, policy: str) -> None:
        """Whatever the network makes of them."""
        agent = float32_agent(policy=policy)
        got = agent.sample(
            lambda obs, noisy, time: 9.0 * torch.ones_like(noisy), torch.zeros(50, 3), 4, agent.generator
        )
        assert got.abs().max() == 1

    @pytest.mark.parametrize("policy", ["diffusion", "flow"])
    def test_learns_two_modes_that_depend_on_the_state(self, policy: str) -> None:
        """Actions are (±0.7, ±0.7 s): a Gaussian could only learn their middle. Nearly as many samples come near as
        the best network's do.
        """
        updates = 1_000
        agent = float32_agent(policy=policy, width=64, actor_lr=3e-3, denoising_steps=10, decay_updates=updates,
                              offline_steps=updates)  # fmt: skip
        rng = torch.Generator().manual_seed(0)
        for step in range(-updates, 0):
            agent.decay(step)
            state = 2.0 * torch.randint(2, (256, 1), generator=rng) - 1.0
            sign = 2.0 * torch.randint(2, (256, 1), generator=rng) - 1.0
            actions = torch.cat([0.7 * sign, 0.7 * sign * state], 1)
            agent.imitate(float32_batch()._replace(obs=state.expand(-1, 3), actions=actions))
        for state in (-1.0, 1.0):
            modes = 0.7 * torch.tensor([[1.0, state], [-1.0, -state]])
            near = []
            for base in (agent.base, BestOfModes(agent, modes)):
                drawn = agent.sample(base, torch.full((1, 3), state), 4_000, agent.generator)[:, 0]
                at = torch.cdist(drawn, modes) < 0.25
                near.append(at.any(1).float().mean().item())
                assert at[:, 0].float().mean().item() == pytest.approx(near[-1] / 2, abs=0.15)
            assert near[0] > near[1] - 0.1
            assert near[1] > 0.95

    def test_denoiser_is_the_same_with_and_without_autograd(self) -> None:
        """Of a size where oneDNN multiplies, against float64."""
        net = Denoiser(17, 6, 64, 2, torch.Generator().manual_seed(0))
        obs, noisy, time = torch.randn(300, 17), torch.randn(4, 300, 6), torch.full((), 3.0)
        expected = copy.deepcopy(net).double()(obs.double(), noisy.double(), time.double())
        with torch.no_grad():
            torch.testing.assert_close(net(obs, noisy, time).double(), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(net(obs, noisy, time).double(), expected, rtol=1e-4, atol=1e-5)

    def test_denoiser_is_one_layer_on_all_three_side_by_side(self) -> None:
        """Against the plain form: actions, state and time joined for every sample, layer by layer in NumPy."""
        net = Denoiser(3, 2, 16, 2, torch.Generator().manual_seed(0)).double()
        rng = np.random.default_rng(0)
        obs, noisy, time = rng.normal(size=(5, 3)), rng.normal(size=(4, 5, 2)), rng.uniform(0, 10, (4, 5))
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(0.3 * torch.from_numpy(rng.normal(size=parameter.shape)))
            got = net(torch.from_numpy(obs), torch.from_numpy(noisy), torch.from_numpy(time)).numpy()
        w = {name: value.detach().numpy() for name, value in net.named_parameters()}

        def dense(x: Array, name: str) -> Array:
            return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

        def swish(x: Array) -> Array:
            return x / (1 + np.exp(-x))

        for k, b in itertools.product(range(4), range(5)):
            angles = 2 * np.pi * time[k, b] * w["frequencies"]
            features = np.concatenate([np.cos(angles), np.sin(angles)])
            embedding = dense(swish(dense(features, "of_time.0")), "of_time.2")
            x = dense(np.concatenate([noisy[k, b], obs[b], embedding]), "first")
            for i in range(2):
                normal = (x - x.mean()) / np.sqrt(x.var() + 1e-6)
                normal = normal * w[f"blocks.{i}.norm.weight"] + w[f"blocks.{i}.norm.bias"]
                x = x + dense(swish(dense(normal, f"blocks.{i}.up")), f"blocks.{i}.down")
            np.testing.assert_allclose(got[k, b], dense(swish(x), "last"), rtol=1e-9)

    @pytest.mark.parametrize("width", [3, 4])
    def test_the_narrowest_denoiser_too_is_told_the_time(self, width: int) -> None:
        net = Denoiser(3, 2, width, 1, torch.Generator().manual_seed(0))
        first, second = (net(torch.zeros(1, 3), torch.zeros(1, 2), torch.full((), t)) for t in (1.0, 7.0))
        assert not torch.allclose(first, second)


def edited(
    agent: EXPO, obs: Array, actions: Array, noise: Array, kept: list[Array] | None = None
) -> tuple[Array, Array]:
    """Edits drawn, and their log-probabilities before they are scaled."""
    mean, log_std = np.split(forward(np.concatenate([obs, actions], -1), layers(agent.edit), kept), 2, axis=-1)
    std = np.exp(np.clip(log_std, -20, 2))
    u = mean + std * noise
    return np.tanh(u), log_density(mean, std, u)


def drawn_subset(drawn: Drawn) -> list[int]:
    return torch.rand(E, generator=drawn.generator).argsort()[:S].tolist()


class TestSelection:
    def test_best_is_that_of_brute_force_over_all_candidates(self) -> None:
        agent, obs = make_agent(), make_batch().obs
        candidates = torch.from_numpy(np.random.default_rng(1).uniform(-1.4, 1.4, (7, 5, 2)))
        chosen = drawn_subset(Drawn(agent.generator))
        got = agent.best(obs, candidates, agent.generator)
        for b in range(5):
            scores = []
            for candidate in candidates[:, b].numpy():
                by_all = values(agent.critic_target, obs[b : b + 1].numpy(), candidate[None], E)
                scores.append(min(by_all[i][0] for i in chosen))
            assert torch.equal(got[b], candidates[int(np.argmax(scores)), b])

    @pytest.mark.parametrize("base_candidates", [True, False])
    def test_candidates_are_base_samples_and_edits_of_the_first_of_them_unclipped(self, base_candidates: bool) -> None:
        agent, obs = make_agent(base_candidates=base_candidates, dropout=0.5), make_batch().obs  # none of it here
        base = torch.from_numpy(np.random.default_rng(1).choice([-0.9, 0.9], (3, 5, 2)))
        agent.sample = lambda *_: base
        noise = Drawn(agent.generator).normal(2, 5, 2)
        got = agent.candidates(agent.base, obs, agent.generator).numpy()
        expected = [base[j].numpy() + 0.4 * edited(agent, obs.numpy(), base[j].numpy(), noise[j])[0] for j in range(2)]
        np.testing.assert_allclose(got[-2:], expected, rtol=1e-9)
        assert np.abs(expected).max() > 1
        assert np.array_equal(got[:-2], base.numpy() if base_candidates else base.numpy()[:0])

    def test_soft_selection_draws_as_the_softmax_of_values(self) -> None:
        agent = make_agent(soft_selection=2.0)
        obs = make_batch().obs[:1].expand(20_000, -1)
        candidates = torch.from_numpy(np.random.default_rng(1).uniform(-1, 1, (4, 1, 2))).expand(4, 20_000, 2)
        chosen = drawn_subset(Drawn(agent.generator))
        got = agent.best(obs, candidates, agent.generator)
        by_all = [values(agent.critic_target, obs[:4].numpy(), candidates[:, 0].numpy(), E)[i] for i in chosen]
        weights = np.exp(2.0 * np.min(by_all, axis=0))
        counts = np.array([(got == candidates[k, 0]).all(1).sum().item() for k in range(4)])
        expected = 20_000 * weights / weights.sum()
        assert (np.abs(counts - expected) < 5 * np.sqrt(expected)).all()
        assert counts.sum() == 20_000

    def test_subsets_are_drawn_without_replacement_and_independently(self) -> None:
        """S₁ chooses and S₂ values: the same critics for both would be biased upward."""
        agent, batch = float32_agent(), float32_batch()
        drawn: list[tuple[int, ...]] = []
        subset = agent.subset
        agent.subset = lambda generator: drawn.append(tuple(sorted((s := subset(generator)).tolist()))) or s
        candidates = agent.candidates(agent.base, batch.next_obs, agent.generator)
        for _ in range(2_000):
            agent.target(batch, candidates)
        assert all(len(set(s)) == S for s in drawn)
        pairs = Counter(zip(drawn[::2], drawn[1::2], strict=True))
        assert len(pairs) == 100  # every S₁ with every S₂, 20 times each
        assert max(abs(count - 20) for count in pairs.values()) < 5 * math.sqrt(20)

    def test_evaluation_draws_with_noise_of_its_own_and_stays_in_bounds(self) -> None:
        """The same in each evaluation, another at each of its steps; without it, the same at each call."""
        agent, obs = float32_agent(edit_scale=3.0), float32_batch(50).obs.numpy()
        before = agent.generator.get_state()
        policy = agent.for_evaluation()
        first, second = policy(obs), policy(obs)
        assert not np.array_equal(first, second)
        assert np.array_equal(first, agent.for_evaluation()(obs))
        assert np.array_equal(agent.act(obs, deterministic=True), agent.act(obs, deterministic=True))
        assert torch.equal(agent.generator.get_state(), before)
        other = float32_agent(edit_scale=3.0, seed=2)
        restore(other, state_of(agent))
        assert not np.array_equal(first, other.for_evaluation()(obs))  # of another seed, with the same weights
        assert np.abs(first).max() <= 1
        assert np.abs(agent.act(obs)).max() > 1

    def test_soft_selection_too_draws_on_evaluations_noise_alone(self) -> None:
        agent, obs = float32_agent(soft_selection=1.0), float32_batch(50).obs.numpy()
        before = agent.generator.get_state()
        assert np.array_equal(agent.for_evaluation()(obs), agent.for_evaluation()(obs))
        assert torch.equal(agent.generator.get_state(), before)

    def test_the_average_of_the_base_policy_acts_and_the_one_that_learns_is_backed_up(self) -> None:
        agent, batch = float32_agent(), float32_batch(64)
        asked: list[Any] = []
        candidates = agent.candidates
        agent.candidates = lambda base, *rest: asked.append(base) or candidates(base, *rest)
        agent.act(batch.obs.numpy())
        agent.for_evaluation()(batch.obs.numpy())
        agent.update(batch)
        assert [base is agent.base_average for base in asked] == [True, True, False]
        assert asked[2] is agent.base


class TestLosses:
    @pytest.mark.parametrize("variant", [{}, *({"best_backup": False} | v for v in NO_BEST_BACKUP)], ids=str)
    def test_critic_loss_equals_an_independent_formula(self, variant: dict[str, Any]) -> None:
        agent, batch = make_agent(**variant), make_batch()
        obs, actions, rewards, next_obs, terminations = (part.numpy() for part in batch[:5])
        rng = np.random.default_rng(1)
        first_edited = 3 if agent.edits and agent.args.base_candidates else 0
        candidates = rng.uniform(-1, 1, (first_edited + (2 if agent.edits else 3), 5, 2))
        drawn = Drawn(agent.generator)
        if variant:  # the first sample, or the first edited one
            best = candidates[first_edited]
        else:
            choosers, best = drawn_subset(drawn), np.empty((5, 2))
            for b in range(5):
                by_all = values(agent.critic_target, next_obs[b : b + 1].repeat(5, 0), candidates[:, b], E)
                best[b] = candidates[np.argmax(np.min([by_all[i] for i in choosers], axis=0)), b]
        valuers = drawn_subset(drawn)
        next_value = np.min([values(agent.critic_target, next_obs, best, E)[i] for i in valuers], axis=0)
        target = rewards + 0.99 * (1 - terminations) * next_value
        expected = np.mean([(q - target) ** 2 for q in values(agent.critic, obs, actions, E)])
        assert agent.critic_loss(batch, torch.from_numpy(candidates))[0].item() == pytest.approx(expected, rel=1e-6)

    @pytest.mark.parametrize(("adjusted", "dropout"), [(False, 0.0), (True, 0.0), (False, 0.3)])
    def test_edit_and_alpha_loss_equal_an_independent_formula(self, adjusted: bool, dropout: float) -> None:
        """The mean of all critics; the entropy is that of β ê, lower by log β in each dimension."""
        agent, batch = make_agent(adjust_target_entropy=adjusted, dropout=dropout), make_batch()
        obs, actions = batch.obs.numpy(), batch.actions.numpy()
        drawn = Drawn(agent.generator)
        kept = [drawn.kept(dropout, 5, width) for width in (16, 8)] if dropout else None
        edits, log_prob = edited(agent, obs, actions, drawn.normal(5, 2), kept)
        scaled = log_prob - 2 * math.log(0.4)
        value = np.mean(values(agent.critic, obs, actions + 0.4 * edits, E), axis=0)
        loss, returned, _ = agent.edit_loss(batch)
        assert loss.item() == pytest.approx((math.exp(-0.7) * scaled - value).mean(), rel=1e-6)
        np.testing.assert_allclose(returned.numpy(), scaled, rtol=1e-6)
        target_entropy = -1.0 + (2 * math.log(0.4) if adjusted else 0.0)
        expected = math.exp(-0.7) * (-scaled.mean() - target_entropy)
        assert agent.alpha_loss(returned)[0].item() == pytest.approx(expected, rel=1e-6)

    @pytest.mark.parametrize(("bias", "bound"), [(-30.0, -20.0), (-12.0, None), (5.0, 2.0)])
    def test_deviation_of_edits_is_held_in_wide_bounds(self, bias: float, bound: float | None) -> None:
        agent = float32_agent()
        with torch.no_grad():
            agent.edit.net[-1].bias[2:] = bias
        found = agent.edit(torch.zeros(1, 3), torch.zeros(1, 2), agent.generator).log_std
        torch.testing.assert_close(found, torch.full((1, 2), bias if bound is None else bound))

    def test_dropout_leaves_out_that_share_of_units_in_learning_alone(self) -> None:
        agent = float32_agent(dropout=0.5, hidden=(400,))
        obs, actions = torch.randn(1, 3).expand(500, -1), torch.zeros(500, 2)
        means = agent.edit(obs, actions, agent.generator, 0.5).mean
        exact = agent.edit(obs, actions, agent.generator).mean
        assert means[:, 0].unique().numel() > 400
        torch.testing.assert_close(means.mean(0), exact[0], atol=5 * means.std().item() / math.sqrt(500), rtol=0)
        assert torch.equal(exact, exact[:1].expand(500, -1))

    def test_each_loss_reaches_its_own_network_and_no_other(self) -> None:
        agent, batch = make_agent(), make_batch()
        named = {**dict(parameters(agent)), "log_alpha": agent.log_alpha}
        candidates = torch.zeros(4, 5, 2).double()
        losses = {
            "critic.": agent.critic_loss(batch, candidates)[0],
            "base.": agent.base_loss(batch)[0],
            "edit.": agent.edit_loss(batch)[0],
            "log_alpha": agent.alpha_loss(torch.zeros(5).double())[0],
        }
        for owner, loss in losses.items():
            gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
            reached = {name for name, gradient in zip(named, gradients, strict=True) if gradient is not None}
            assert reached == {n for n in named if (n.startswith(owner) if owner[-1] == "." else n == owner)}


class TestUpdate:
    def test_critics_step_on_each_slice_and_the_others_once_on_the_last(self) -> None:
        agent, batch = float32_agent(batch_size=16), float32_batch(64)
        with torch.no_grad():  # so far from the base policy that a step towards it shows
            for parameter in agent.base_average.parameters():
                parameter.add_(1.0)
        seen: list[tuple[str, torch.Tensor]] = []
        for name in ("critic_loss", "base_loss", "edit_loss"):
            loss = getattr(agent, name)
            setattr(agent, name, lambda part, *rest, n=name, f=loss: seen.append((n, part.obs)) or f(part, *rest))
        before = {name: value.clone() for name, value in parameters(agent)}
        agent.update(batch)
        assert [name for name, _ in seen] == ["critic_loss"] * 4 + ["base_loss", "edit_loss"]
        assert torch.equal(torch.cat([obs for _, obs in seen[:4]]), batch.obs)
        assert all(torch.equal(obs, batch.obs[48:]) for _, obs in seen[3:])
        steps = [int(getattr(agent, f"{n}_optimizer").step_count) for n in ("critic", "base", "edit", "alpha")]
        assert steps == [4, 1, 1, 1]
        for name, value in parameters(agent):
            if name.startswith("base_average."):
                learned = dict(parameters(agent))[name.replace("_average", "")]
                torch.testing.assert_close(value, before[name] + 0.001 * (learned - before[name]), rtol=0, atol=1e-6)

    def test_each_slice_is_backed_up_by_its_own_candidates_and_the_critics_of_then(self) -> None:
        """Base samples and edits of its next_obs; the choice among them falls behind the step of the slice before."""
        agent, batch = float32_agent(batch_size=16, tau=0.5, critic_lr=1e-2), float32_batch(64)
        agent.sample = lambda base, obs, count, generator: obs[:, :2].expand(count, -1, -1)
        agent.edit_scale = 1e-3
        seen, best, target = [], agent.best, [parameter.clone() for parameter in agent.critic_target.parameters()]

        def chosen(obs: torch.Tensor, candidates: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
            seen.append((obs, candidates, [parameter.clone() for parameter in agent.critic_target.parameters()]))
            return best(obs, candidates, generator)

        agent.best = chosen
        agent.update(batch)
        assert [len(obs) for obs, _, _ in seen] == [16] * 4
        for part, (obs, candidates, now) in zip(batch.next_obs.split(16), seen, strict=True):
            assert torch.equal(obs, part)
            torch.testing.assert_close(candidates, part[:, :2].expand(5, -1, -1), rtol=0, atol=1e-3)
            assert same(now, target) is (obs is seen[0][0])

    def test_target_critics_follow_behind_each_slice(self) -> None:
        agent = make_agent(batch_size=16, tau=0.1)
        agent.candidates = lambda *_: torch.zeros(5, 64, 2).double()
        assert_targets_follow_each_step(agent, 0.1, lambda: agent.update(make_batch(64)))

    def test_candidates_of_all_slices_in_one_batch_are_those_of_each_alone(self) -> None:
        """With the same noise: it is only drawn in another order."""
        agent, obs = make_agent(), make_batch(12).next_obs
        noise = {True: torch.randn(agent.T + 1, 3, 12, 2).double(), False: torch.randn(1, 2, 12, 2).double()}

        def sampled(rows: slice) -> torch.Tensor:
            calls = {True: iter(noise[True]), False: iter(noise[False])}
            agent.normal = lambda *shape, generator: next(calls[shape[0] == 3])[:, rows]
            return agent.sample(agent.base, obs[rows], 3, agent.generator)

        together = sampled(slice(None))
        apart = torch.cat([sampled(slice(4 * i, 4 * i + 4)) for i in range(3)], dim=1)
        torch.testing.assert_close(together, apart, rtol=1e-12, atol=1e-12)

    def test_the_base_policys_weights_decay_and_no_others(self) -> None:
        """AdamW: without a gradient a weight shrinks by lr · decay."""
        agent = float32_agent(weight_decay=0.1, actor_lr=1e-2)
        for optimizer, shrunk in ((agent.base_optimizer, 1 - 1e-3), (agent.edit_optimizer, 1.0)):
            parameters = optimizer.param_groups[0]["params"]
            before = [parameter.detach().clone() for parameter in parameters]
            optimizer.descend(sum((0.0 * parameter).sum() for parameter in parameters))
            for parameter, old in zip(parameters, before, strict=True):
                torch.testing.assert_close(parameter.detach(), shrunk * old)

    def test_start(self) -> None:
        """α at 1; layers as Glorot's; every hidden layer of the critics normalised, none of the edits'."""
        agent = float32_agent(hidden=(256, 256), width=256)
        assert agent.log_alpha.item() == 0
        for layer in (layer for network in (agent.critic, agent.edit, agent.base) for layer in network.modules()):
            if isinstance(layer, torch.nn.Linear | EnsembleLinear):
                bound = math.sqrt(6 / sum(layer.weight.shape[-2:]))
                assert 0.8 * bound < layer.weight.abs().max() <= bound
                assert not layer.bias.any()
        assert [sum(isinstance(layer, LayerNorm) for layer in net.net) for net in (agent.critic, agent.edit)] == [2, 0]

    def test_pre_training_moves_the_base_policy_alone(self) -> None:
        agent, batch = float32_agent(), float32_batch()
        before = copy.deepcopy(state_of(agent))
        agent.imitate(batch)
        after = state_of(agent)
        moved = {name for name in after if not same(before[name], after[name])}
        assert moved == {"base", "base_average", "base_optimizer", "generator"}

    def test_without_edits_no_edit_is_learned(self) -> None:
        agent = float32_agent(edits=0)
        before = copy.deepcopy(state_of(agent))
        metrics = agent.update(float32_batch(64))
        assert same(before["edit"], state_of(agent)["edit"])
        assert same(before["log_alpha"], state_of(agent)["log_alpha"])
        assert "losses/edit" not in metrics

    def test_alpha_stays_finite_where_the_target_entropy_is_out_of_reach(self) -> None:
        """β = 0.05: its edits have at most log 0.1 of entropy a dimension, the target is -0.5. α would overflow."""
        agent, batch = float32_agent(edit_scale=0.05, alpha_lr=1.0), float32_batch(64)
        for _ in range(60):
            metrics = agent.update(batch)
        assert agent.log_alpha.item() == metrics["charts/log_alpha"].item() == 20.0
        assert all(torch.isfinite(value).all() for value in metrics.values())
        assert metrics["losses/entropy"].mean() < 2 * math.log(2 * 0.05) + 0.1 < 2 * -0.5

    def test_alpha_falls_as_far_as_it_takes(self) -> None:
        agent = float32_agent(edit_scale=0.7)
        agent.log_alpha.data.fill_(-30.0)
        agent.update(float32_batch(64))
        assert agent.log_alpha < -29

    def test_learning_rates_fall_as_cosines_of_their_own_updates(self) -> None:
        agent = float32_agent(offline_steps=100, decay_updates=1_000, actor_lr=1e-3)
        for step, base, edit in ((-100, 1.0, 1.0), (0, 0.975528, 1.0), (400, 0.5, 0.654508), (2_000, 0.0, 0.0)):
            agent.decay(step)
            assert agent.base_optimizer.param_groups[0]["lr"] == pytest.approx(1e-3 * base, abs=1e-9)
            assert agent.edit_optimizer.param_groups[0]["lr"] == pytest.approx(1e-3 * edit, abs=1e-9)

    def test_critics_reach_the_values_of_a_known_mdp(self) -> None:
        """That of test_off_policy: two states in turn, reward 1 in the first, and one that ends with 5; γ = 0.5."""
        agent = float32_agent(gamma=0.5, tau=0.05, critic_lr=3e-3)
        buffer, rng, states = ReplayBuffer(600, 3, 2), np.random.default_rng(0), np.eye(3)
        for _ in range(200):
            buffer.add(states, rng.uniform(-1, 1, (3, 2)), [1.0, 0.0, 5.0], states[[1, 0, 0]], [0, 0, 1])
        for _ in range(150):
            agent.update(buffer.sample(256, agent.generator))
        batch = buffer.sample(300, agent.generator)
        expected = batch.obs @ torch.tensor([4 / 3, 2 / 3, 5.0])
        torch.testing.assert_close(agent.critic(batch.obs, batch.actions), expected.expand(E, -1), rtol=0, atol=0.15)

    def test_edits_go_where_the_critics_see_more(self) -> None:
        """r = a₁ in a bandit: edits learn to add β to the first dimension of every action."""
        agent = float32_agent(actor_lr=3e-3, alpha_lr=1e-2, critic_lr=3e-3, adjust_target_entropy=True)
        rng = torch.Generator().manual_seed(0)
        for _ in range(300):
            actions = 2 * torch.rand(256, 2, generator=rng) - 1
            batch = Batch(torch.zeros(256, 3), actions, actions[:, 0], torch.zeros(256, 3), torch.ones(256))
            agent.update(batch)
        edits = agent.edit(torch.zeros(256, 3), actions, agent.generator).mode
        assert edits[:, 0].mean() > 0.5
        assert edits[:, 1].abs().mean() < 0.3

    def test_a_restored_agent_goes_on_bit_for_bit(self) -> None:
        first, second = (float32_agent(dropout=0.1, seed=seed) for seed in (1, 2))
        batch = float32_batch(64)
        first.update(batch)
        first.act(batch.obs.numpy())
        restore(second, copy.deepcopy(state_of(first)))  # as from a file
        for agent in (first, second):
            agent.update(batch)
            agent.act(batch.obs.numpy())
        assert same(state_of(first), state_of(second))


@pytest.mark.parametrize("domain", PRESETS)
@pytest.mark.parametrize("size", SIZES)
def test_presets_fill_what_is_left_open(domain: str, size: str) -> None:
    """Nothing stays at None but what may: the environment's, the device's, and where to begin."""
    assert PRESETS[domain].keys() == PRESETS["locomotion"].keys()
    assert SIZES[size].keys() == SIZES["paper"].keys()
    args = Args(dataset="none.hdf5", online_steps=1, **PRESETS[domain], **SIZES[size])
    left = {name for name, value in vars(args).items() if value is None}
    assert left == {"run_dir", "init_from", "horizon", "overlap"}


@pytest.mark.parametrize(
    ("domain", "expected"),
    [
        ("antmaze", (500_000, 0.05, 1, 0, 5000, -1)),
        ("adroit-binary", (0, 0.7, 2, 0.1, 0, 0)),
        ("adroit", (0, 0.7, 2, 0.1, 0, 0)),  # from here on ours
        ("maze2d", (0, 0.2, 1, 0, 5000, -1)),
        ("locomotion", (0, 0.05, 2, 0, 5000, 0)),
    ],
)
def test_presets_are_the_authors(domain: str, expected: tuple[float, ...]) -> None:
    found = PRESETS[domain]
    names = ("offline_steps", "edit_scale", "target_critics", "dropout", "random_steps", "reward_shift")
    assert tuple(found[name] for name in names) == expected


def test_defaults_and_size_are_the_papers() -> None:
    args = Args(dataset="none.hdf5", **SIZES["paper"])
    assert (args.size, args.policy, args.utd, args.batch_size) == ("paper", "diffusion", 20, 256)
    assert (args.hidden, args.width, args.blocks, args.critics) == ((256, 256, 256), 256, 3, 10)
    assert (args.denoising_steps, args.base_samples, args.edits) == (10, 8, 8)
    assert (args.actor_lr, args.critic_lr, args.alpha_lr) == (3e-4, 3e-4, 3e-4)
    assert (args.decay_updates, args.weight_decay) == (3_000_000, 1e-4)
    assert (args.gamma, args.tau, args.base_tau) == (0.99, 5e-3, 1e-3)
    assert (args.retain, args.offline_ratio, args.adjust_target_entropy) == ("mix", 0.5, False)
    assert (args.base_candidates, args.best_backup, args.soft_selection) == (True, True, 0)
    assert float32_agent().target_entropy == -1  # of two actions
    base = float32_agent(**SIZES["paper"]).base
    assert [tuple(layer.weight.shape) for layer in base.of_time if isinstance(layer, torch.nn.Linear)] == [
        (256, 128),
        (256, 256),
    ]
    assert [tuple(block.up.weight.shape) for block in base.blocks] == 3 * [(1024, 256)]
    assert base.frequencies.std().item() == pytest.approx(0.2, rel=0.5)  # of 64


class TestRuns:
    """Whole runs on Pendulum's data."""

    def test_actions_are_stored_as_chosen_and_clipped_for_the_environment(
        self, small: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stored, taken = [], []
        add = ReplayBuffer.add
        monkeypatch.setattr(ReplayBuffer, "add", lambda self, *parts: stored.append(parts[1]) or add(self, *parts))
        made = module("expo").make_vector

        def watched(*args: Any, **kwargs: Any) -> Any:
            envs = made(*args, **kwargs)
            step = envs.step
            envs.step = lambda actions: taken.append(actions) or step(actions)
            return envs

        monkeypatch.setattr(module("expo"), "make_vector", watched)
        module("expo").train(small("expo", offline_steps=10, online_steps=60, edit_scale=3.0))
        stored, taken = np.array(stored[-60:]), np.array(taken)
        assert np.abs(stored).max() > 1
        assert np.array_equal(stored.clip(-1, 1), taken)

    @pytest.mark.parametrize(("size", "utd"), [("paper", 20), ("small", 4)])
    def test_the_size_said_is_the_size_run(self, small: Any, size: str, utd: int) -> None:
        args = small("expo", size=size, utd=None, offline_steps=1, online_steps=0)
        module("expo").train(args)
        assert json.loads((args.run_dir / "config.json").read_text())["arguments"]["utd"] == utd

    def test_from_nothing_the_first_steps_are_random_and_nothing_is_learned(self, small: Any, tmp_path: Any) -> None:
        states = []
        for online in (30, 40, 41):
            args = small("expo", offline_steps=0, online_steps=online, random_steps=40, run_dir=tmp_path / str(online))
            module("expo").train(args)
            states.append(final_state(args.run_dir)["agent"])
        assert same(states[0]["critic"], states[1]["critic"])
        assert same(states[0]["base"], states[1]["base"])
        assert not same(states[1]["critic"], states[2]["critic"])

    def test_without_the_data_nothing_is_learned_in_the_warm_up(self, small: Any, tmp_path: Any) -> None:
        states = []
        for online in (30, 40, 41):
            args = small("expo", offline_steps=20, online_steps=online, retain="none", warmup_steps=40,
                         run_dir=tmp_path / str(online))  # fmt: skip
            module("expo").train(args)
            states.append(final_state(args.run_dir)["agent"])
        assert same(states[0]["critic"], states[1]["critic"])
        assert not same(states[1]["critic"], states[2]["critic"])

    @pytest.mark.parametrize("offline", [0, 20])
    def test_random_steps_are_uniform_and_there_are_none_behind_pre_training(self, small: Any, offline: int) -> None:
        args = small("expo", env="Failing-v0", offline_steps=offline, online_steps=150, random_steps=150,
                     retain="none", warmup_steps=150)  # fmt: skip
        module("expo").train(args)
        actions = stored(args.run_dir).actions[:, 0].sort().values
        distance = (actions - torch.linspace(-1, 1, 150)).abs().max().item() / 2  # Kolmogorov and Smirnov's
        assert (distance < 1.63 / math.sqrt(150)) is (offline == 0)

    def test_learning_rates_decay_in_a_run(self, small: Any) -> None:
        args = small("expo", env="Failing-v0", offline_steps=10, online_steps=20, decay_updates=60, actor_lr=1e-3)
        module("expo").train(args)
        agent = final_state(args.run_dir)["agent"]
        rates = {name: agent[f"{name}_optimizer"]["param_groups"][0]["lr"] for name in ("base", "edit")}
        assert rates == pytest.approx({"base": 0.5e-3, "edit": 0.75e-3}, rel=1e-12)  # cos π/2 and cos π/3

    def test_behind_pre_training_no_step_is_random(self, small: Any, tmp_path: Any) -> None:
        args = small("expo", offline_steps=20, online_steps=1, random_steps=40, run_dir=tmp_path / "a")
        module("expo").train(args)
        assert int(final_state(args.run_dir)["agent"]["critic_optimizer"]["state"][0]["step"]) == args.utd

    def test_updates_follow_each_step_of_each_environment(self, small: Any) -> None:
        args = small("expo", offline_steps=20, online_steps=10, num_envs=2, utd=3)
        module("expo").train(args)
        agent = final_state(args.run_dir)["agent"]
        steps = [int(agent[f"{name}_optimizer"]["state"][0]["step"]) for name in ("critic", "base", "edit", "alpha")]
        assert steps == [30, 30, 10, 10]

    def test_pre_training_takes_one_batch_and_a_step_one_for_each_update(
        self, small: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sizes: list[tuple[bool, int]] = []
        sample = Switch.sample
        monkeypatch.setattr(
            Switch,
            "sample",
            lambda self, size, online, *rest: sizes.append((online, size)) or sample(self, size, online, *rest),
        )
        args = small("expo", offline_steps=20, online_steps=10, utd=3)
        module("expo").train(args)
        assert Counter(sizes) == {(False, args.batch_size): 20, (True, 3 * args.batch_size): 10}

    def test_each_evaluation_has_a_policy_of_its_own(self, small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whose noise begins anew, and goes on from step to step."""
        made: list[Any] = []
        for_evaluation = EXPO.for_evaluation
        monkeypatch.setattr(EXPO, "for_evaluation", lambda agent: made.append(for_evaluation(agent)) or made[-1])
        evaluated: list[Any] = []
        evaluate = module("expo").evaluate
        monkeypatch.setattr(
            module("expo"), "evaluate", lambda act, *rest: evaluated.append(act) or evaluate(act, *rest)
        )
        module("expo").train(small("expo", offline_steps=20, online_steps=20, eval_every=20))
        assert len(made) >= 3
        assert all(a is b for a, b in zip(made, evaluated, strict=True))

    def test_one_pre_training_serves_many_runs(self, small: Any, tmp_path: Any) -> None:
        """--init-from gives its base policy; critics and edits begin anew, as they do behind a pre-training."""
        before = small("expo", offline_steps=30, online_steps=0, run_dir=tmp_path / "before")
        module("expo").train(before)
        taken = small("expo", offline_steps=None, online_steps=1, utd=1, seed=2, random_steps=40,
                      init_from=before.run_dir, actor_lr=1e-12, base_tau=1e-9, run_dir=tmp_path / "after")  # fmt: skip
        module("expo").train(taken)
        first, second = (final_state(args.run_dir)["agent"] for args in (before, taken))
        for base in ("base", "base_average"):
            assert all(torch.allclose(first[base][name], second[base][name]) for name in first[base])
        weights = [name for name, value in first["critic"].items() if value.dim() > 2]
        assert weights
        assert int(second["base_optimizer"]["state"][0]["step"]) == 31
        assert int(second["critic_optimizer"]["state"][0]["step"]) == 1  # --random-steps are for a start from nothing
        assert not any(torch.allclose(first["critic"][name], second["critic"][name], atol=1e-2) for name in weights)

    @pytest.mark.parametrize(
        "changed", [{"policy": "flow"}, {"denoising_steps": 4}, {"width": 8}, {"blocks": 2}], ids=str
    )
    def test_a_base_policy_of_another_kind_is_refused(self, small: Any, tmp_path: Any, changed: dict[str, Any]) -> None:
        """Its networks would fit, and what they give be taken for something else. Rewards do not matter."""
        before = small("expo", offline_steps=5, online_steps=0, reward_shift=-1.0, run_dir=tmp_path / "before")
        module("expo").train(before)
        begun = {"offline_steps": 5, "online_steps": 0, "init_from": before.run_dir}
        with pytest.raises(
            InputError, match=r"was trained with --(policy diffusion|denoising-steps 3|width 16|blocks 1): give"
        ):
            module("expo").train(small("expo", **begun, **changed))
        assert not (tmp_path / "run").exists()
        module("expo").train(small("expo", **begun))

    @pytest.mark.parametrize(
        ("changed", "said"),
        [
            ({"edits": 9, "base_samples": 4}, "at most --base-samples, 4"),
            ({"edits": 0, "base_candidates": False}, "some"),
            ({"critics": 3, "target_critics": 4}, "at most --critics, 3"),
        ],
    )
    def test_impossible_candidates_are_refused(self, small: Any, changed: dict[str, Any], said: str) -> None:
        with pytest.raises(InputError, match=said):
            module("expo").train(small("expo", **changed))
