"""Diffusion, flow matching and their networks, against closed forms and networks for which the best answer is known."""

import copy
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from formulas import Array, joined

from common.diffusion import DDIM, Denoiser, Diffusion, Flow, Velocity

CPU = torch.device("cpu")
MEAN, DEVIATION = 0.25, 0.1  # of Gaussian data, for which the best network is known


class BestNoise(torch.nn.Module):
    """E[ε|x, t] of x = √ᾱ a + √(1 - ᾱ) ε where a is normal."""

    def __init__(self, alpha_bars: torch.Tensor) -> None:
        super().__init__()
        self.alpha_bars = alpha_bars.double()

    def forward(self, noisy: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
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

    def forward(self, noisy: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        slope, offset = self.slope_and_offset(time.unsqueeze(-1))
        return slope * noisy + offset


@pytest.mark.parametrize("steps", [5, 10, 50])
def test_schedule_is_variance_preserving(steps: int) -> None:
    """ᾱ_T = exp(-∫ 0.1 + 9.9 t dt) whatever T is; little noise first, most at the end."""
    process = Diffusion.variance_preserving(steps, CPU)
    assert process.alpha_bars[-1].item() == pytest.approx(math.exp(-0.1 - 9.9 / 2), rel=1e-5)
    assert process.alpha_bars[0].item() == pytest.approx(math.exp(-0.1 / steps - 4.95 / steps**2), rel=1e-5)
    torch.testing.assert_close((1 - process.betas).cumprod(0), process.alpha_bars)
    assert (process.betas.diff() > 0).all()


def errors(process: Diffusion | Flow, network: torch.nn.Module) -> float:
    """Return the sum over two dimensions of the mean squared error, on 400,000 normal actions."""
    rng = torch.Generator().manual_seed(0)
    actions, noise = MEAN + DEVIATION * torch.randn(400_000, 2, generator=rng), torch.randn(400_000, 2, generator=rng)
    return process.errors(network, actions, noise, rng).square().sum(-1).mean().item()


def test_denoising_loss_of_the_best_network_is_the_variance_left() -> None:
    """Σ_dim E[Var(ε|x)] = 2 · mean_t ᾱ σ² / (ᾱ σ² + 1 - ᾱ); and a network that is off loses more."""
    process = Diffusion.variance_preserving(10, CPU)
    bar = process.alpha_bars.double()
    expected = 2 * (bar * DEVIATION**2 / (bar * DEVIATION**2 + 1 - bar)).mean().item()
    assert errors(process, BestNoise(process.alpha_bars)) == pytest.approx(expected, rel=0.02)
    assert errors(process, BestNoise(process.alpha_bars * 0.9)) > 1.1 * expected


def test_flow_loss_of_the_best_network_is_the_variance_left() -> None:
    """Σ_dim E[Var(a - ε|x)] = 2 · ∫ σ² / (t² σ² + (1 - t)²) dt, which is π/2 σ and more."""
    t = np.linspace(0, 1, 1_000_001)
    expected = 2 * np.mean(DEVIATION**2 / (t**2 * DEVIATION**2 + (1 - t) ** 2))
    assert errors(Flow(10), BestVelocity(10)) == pytest.approx(expected, rel=0.02)
    assert errors(Flow(10), BestVelocity(9)) > 1.1 * expected  # told another time


@pytest.mark.parametrize("steps", [5, 10])
def test_sampler_transports_a_density_as_computed_on_a_grid(steps: int) -> None:
    """From N(0, 1) back to the data, with the best network, clipped to [-1, 1] on the way."""
    process, rng = Diffusion.variance_preserving(steps, CPU), torch.Generator().manual_seed(0)
    got = process.sample(BestNoise(process.alpha_bars), torch.randn(400_000, 1, generator=rng), rng).double()
    betas, bars = process.betas.double().numpy(), process.alpha_bars.double().numpy()
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


def test_euler_steps_of_the_flow() -> None:
    """With the best velocity each step is affine, and so is the whole."""
    best, rng = BestVelocity(10), torch.Generator().manual_seed(0)
    scale, shift = 1.0, 0.0
    for k in range(10):
        slope, offset = best.slope_and_offset(float(k))
        scale, shift = scale * (1 + slope / 10), shift * (1 + slope / 10) + offset / 10
    noise = torch.randn(1_000, 1, generator=rng)
    got = Flow(10).sample(best, noise, rng)
    torch.testing.assert_close(got, (scale * noise + shift).clamp(-1, 1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("steps", [1, 5, 10])
def test_ddim_maps_noise_by_the_closed_form_for_gaussian_data(steps: int) -> None:
    """With the best network, each step scales the distance from the mean √ᾱ m, and so does the whole."""
    process, rng = DDIM.variance_preserving(steps, CPU), torch.Generator().manual_seed(0)
    bars = [1.0, *process.alpha_bars.double().tolist()]
    scale = 1.0
    for after, bar in itertools.pairwise(bars):
        covariance = math.sqrt(after * bar) * DEVIATION**2 + math.sqrt((1 - after) * (1 - bar))
        scale *= covariance / (bar * DEVIATION**2 + 1 - bar)
    noise = torch.randn(1_000, 1, generator=rng)
    got = process.sample(BestNoise(process.alpha_bars), noise, rng)
    torch.testing.assert_close(got, MEAN + scale * (noise - math.sqrt(bars[-1]) * MEAN), rtol=0, atol=2e-5)
    assert got.std() > 5e-4


def test_ddim_has_the_marginal_of_the_ancestral_sampler() -> None:
    """That of the data, with many steps. With few steps, both are narrower, and DDIM is more so."""
    spreads = {}
    for steps, kind in itertools.product((10, 400), (DDIM, Diffusion)):
        process, rng = kind.variance_preserving(steps, CPU), torch.Generator().manual_seed(0)
        got = process.sample(BestNoise(process.alpha_bars), torch.randn(20_000, 1, generator=rng), rng)
        assert got.mean().item() == pytest.approx(MEAN, abs=0.005)
        spreads[kind, steps] = got.std().item()
    assert spreads[DDIM, 400] == pytest.approx(DEVIATION, rel=0.04)
    assert spreads[Diffusion, 400] == pytest.approx(DEVIATION, rel=0.02)
    assert spreads[DDIM, 10] < spreads[Diffusion, 10] < DEVIATION


def test_ddim_is_a_function_of_its_noise() -> None:
    """It draws nothing, and other noise gives other actions. Data of one action are reached from any noise."""
    process, rng = DDIM.variance_preserving(5, CPU), torch.Generator().manual_seed(0)
    noise, before = torch.randn(50, 2, generator=rng), rng.get_state()
    first, again = (process.sample(BestNoise(process.alpha_bars), noise, rng) for _ in range(2))
    assert torch.equal(first, again)
    assert len(first.flatten().unique()) == 100
    assert torch.equal(rng.get_state(), before)

    def of_one_action(noisy: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        bar = process.alpha_bars[time.long()]
        return (noisy - bar.sqrt() * MEAN) / (1 - bar).sqrt()

    torch.testing.assert_close(process.sample(of_one_action, 3 * noise, rng), torch.full_like(noise, MEAN))


def test_ddim_clips_its_estimates_and_not_the_noise() -> None:
    """A second formula, in y = x / √ᾱ, whose noise has the scale s: y' = a + (y - a) s' / s, a clipped."""
    process, rng = DDIM.variance_preserving(6, CPU), torch.Generator().manual_seed(0)
    noise = 2 * torch.randn(500, 2, generator=rng)
    got = process.sample(lambda noisy, time: 0.8 * noisy + 0.3 * torch.sin(5 * noisy + time), noise, rng)
    bars = process.alpha_bars.double().numpy()
    scales = np.sqrt((1 - bars) / bars)
    y, clipped = noise.double().numpy() / np.sqrt(bars[-1]), 0
    for k in reversed(range(6)):
        noisy = y * np.sqrt(bars[k])
        estimate = y - scales[k] * (0.8 * noisy + 0.3 * np.sin(5 * noisy + k))
        actions = estimate.clip(-1, 1)
        clipped += (actions != estimate).any() * (k > 0)
        y = actions + (y - actions) * (scales[k - 1] / scales[k] if k else 0.0)
    assert clipped == 5
    np.testing.assert_allclose(got.numpy(), y, atol=1e-4)
    assert 0.1 < np.mean(np.abs(y) < 1) < 0.99


PROCESSES = [Diffusion.variance_preserving(10, CPU), DDIM.variance_preserving(10, CPU), Flow(10)]


@pytest.mark.parametrize("process", PROCESSES, ids=["diffusion", "ddim", "flow"])
def test_samples_stay_in_bounds(process: Diffusion | Flow) -> None:
    """Whatever the network makes of them."""
    rng = torch.Generator().manual_seed(0)
    got = process.sample(lambda noisy, time: 9.0 * torch.ones_like(noisy), torch.randn(4, 50, 2, generator=rng), rng)
    assert got.abs().max() == 1


def test_denoiser_is_the_same_with_and_without_autograd() -> None:
    """Of a size where oneDNN multiplies, against float64."""
    net = Denoiser(17, 6, 64, 2, torch.Generator().manual_seed(0))
    obs, noisy, time = torch.randn(300, 17), torch.randn(4, 300, 6), torch.full((), 3.0)
    expected = copy.deepcopy(net).double()(obs.double(), noisy.double(), time.double())
    with torch.no_grad():
        torch.testing.assert_close(net(obs, noisy, time).double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(net(obs, noisy, time).double(), expected, rtol=1e-4, atol=1e-5)


def test_denoiser_is_one_layer_on_all_three_side_by_side() -> None:
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
def test_the_narrowest_denoiser_too_is_told_the_time(width: int) -> None:
    net = Denoiser(3, 2, width, 1, torch.Generator().manual_seed(0))
    first, second = (net(torch.zeros(1, 3), torch.zeros(1, 2), torch.full((), t)) for t in (1.0, 7.0))
    assert not torch.allclose(first, second)


@pytest.mark.parametrize("shape", [(5,), (4, 5)])
def test_velocity_is_a_plain_network_on_state_action_and_time(shape: tuple[int, ...]) -> None:
    """For one action of each state or several, and for one time or one of each; time arrives as t · steps."""
    net = Velocity(3, 2, (16, 8), 4, torch.Generator().manual_seed(0)).double()
    rng = np.random.default_rng(0)
    obs, noisy = rng.normal(size=(5, 3)), rng.normal(size=(*shape, 2))
    for time in (np.float64(3.0), rng.uniform(0, 4, shape)):
        got = net(torch.from_numpy(obs), torch.from_numpy(noisy), torch.as_tensor(time)).detach().numpy()
        states, t = np.broadcast_to(obs, (*shape, 3)), np.broadcast_to(time / 4, shape)[..., None]
        np.testing.assert_allclose(got, joined(net, states, noisy, t), rtol=1e-9)
    for weight, bias in ((layer.weight, layer.bias) for layer in net.net if hasattr(layer, "weight")):
        bound = math.sqrt(6 / sum(weight.shape))  # Glorot's
        assert 0.7 * bound < weight.abs().max() <= bound
        assert not bias.any()
