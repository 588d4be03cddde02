"""EXPO's base policy, a denoiser, against closed forms and networks for which the best answer is known."""

import copy
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from expo_agents import float32_agent, float32_batch
from formulas import Array, Drawn

from algos.expo import EXPO
from common.diffusion import Denoiser

MEAN, DEVIATION = 0.25, 0.1  # of Gaussian data, for which the best network is known


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
        of_data, of_noise = time / self.agent.args.denoising_steps, 1 - time / self.agent.args.denoising_steps
        if self.agent.args.policy == "diffusion":
            bar = self.agent.process.alpha_bars[time.long()]
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
        assert agent.process.alpha_bars[-1].item() == pytest.approx(math.exp(-0.1 - 9.9 / 2), rel=1e-5)
        assert agent.process.alpha_bars[0].item() == pytest.approx(math.exp(-0.1 / steps - 4.95 / steps**2), rel=1e-5)
        torch.testing.assert_close((1 - agent.process.betas).cumprod(0), agent.process.alpha_bars)
        assert (agent.process.betas.diff() > 0).all()

    def test_denoising_loss_of_the_best_network_is_the_variance_left(self) -> None:
        """Σ_dim E[Var(ε|x)] = 2 · mean_t ᾱ σ² / (ᾱ σ² + 1 - ᾱ); and a network that is off loses more."""
        agent, size = float32_agent(), 400_000
        batch = float32_batch()
        actions = MEAN + DEVIATION * torch.randn(size, 2, generator=torch.Generator().manual_seed(0))
        batch = batch._replace(obs=torch.zeros(size, 3), actions=actions)
        bar = agent.process.alpha_bars.double()
        expected = 2 * (bar * DEVIATION**2 / (bar * DEVIATION**2 + 1 - bar)).mean().item()
        agent.base = BestNoise(agent.process.alpha_bars)
        assert agent.base_loss(batch)[0].item() == pytest.approx(expected, rel=0.02)
        agent.base = BestNoise(agent.process.alpha_bars * 0.9)
        assert agent.base_loss(batch)[0].item() > 1.1 * expected

    def test_flow_loss_of_the_best_network_is_the_variance_left(self) -> None:
        """Σ_dim E[Var(a - ε|x)] = 2 · ∫ σ² / (t² σ² + (1 - t)²) dt, which is π/2 σ and more."""
        agent, size = float32_agent(policy="flow"), 400_000
        actions = MEAN + DEVIATION * torch.randn(size, 2, generator=torch.Generator().manual_seed(0))
        batch = float32_batch()._replace(obs=torch.zeros(size, 3), actions=actions)
        t = np.linspace(0, 1, 1_000_001)
        expected = 2 * np.mean(DEVIATION**2 / (t**2 * DEVIATION**2 + (1 - t) ** 2))
        agent.base = BestVelocity(agent.args.denoising_steps)
        assert agent.base_loss(batch)[0].item() == pytest.approx(expected, rel=0.02)

    @pytest.mark.parametrize("steps", [5, 10])
    def test_sampler_transports_a_density_as_computed_on_a_grid(self, steps: int) -> None:
        """From N(0, 1) back to the data, with the best network, clipped to [-1, 1] on the way."""
        agent = float32_agent(action_dim=1, denoising_steps=steps)
        got = (
            agent.sample(BestNoise(agent.process.alpha_bars), torch.zeros(1, 3), 400_000, agent.generator)
            .flatten()
            .double()
        )
        betas, bars = agent.process.betas.double().numpy(), agent.process.alpha_bars.double().numpy()
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
