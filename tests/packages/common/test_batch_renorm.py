"""Batch renormalisation against its algorithm, written a second time, and its running statistics."""

import numpy as np
import pytest
import torch
from formulas import Array

from common.batch_renorm import BatchRenorm, NormalizedMLP
from common.seeding import generator


def made(width: int = 3, ensemble: int | None = None, renorm_after: int = 1000) -> BatchRenorm:
    """With an affine part and running statistics that are not those of the start."""
    norm, rng = BatchRenorm(width, ensemble, renorm_after).double(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=rng))
    norm.mean += torch.randn(norm.mean.shape, generator=rng).double()
    norm.variance.mul_(torch.rand(norm.variance.shape, generator=rng).double() + 0.1)
    return norm


def affine(norm: BatchRenorm, normalised: Array) -> Array:
    return normalised * norm.weight.detach().numpy() + norm.bias.detach().numpy()


@pytest.mark.parametrize("ensemble", [None, 2])
def test_batch_normalisation_until_renormalisation_begins(ensemble: int | None):
    norm, rng = made(ensemble=ensemble), np.random.default_rng(0)
    inputs = rng.normal(2.0, 5.0, (7, 3) if ensemble is None else (ensemble, 7, 3))
    found = norm(torch.from_numpy(inputs), by_batch=True).detach().numpy()
    mean, deviation = inputs.mean(-2, keepdims=True), np.sqrt(inputs.var(-2, keepdims=True) + 1e-3)
    np.testing.assert_allclose(found, affine(norm, (inputs - mean) / deviation), rtol=1e-12)


def test_renormalisation_corrects_by_bounded_statistics():
    """x̂ = (x - μ_B) / σ_B · r + d, r = σ_B / σ in [1/3, 3], d = (μ_B - μ) / σ in [-5, 5]."""
    norm, rng, seen = made(width=300, renorm_after=0), np.random.default_rng(0), set()
    mean, variance = norm.mean.numpy().copy(), norm.variance.numpy().copy()
    inputs = rng.normal(0.0, 10 ** rng.uniform(-1, 1, 300), (7, 300)) + rng.normal(0, 3, 300)
    found = norm(torch.from_numpy(inputs), by_batch=True).detach().numpy()
    for column in range(300):
        x, running = inputs[:, column], np.sqrt(variance[0, column] + 1e-3)
        deviation = np.sqrt(x.var() + 1e-3)
        r, d = deviation / running, (x.mean() - mean[0, column]) / running
        seen |= {("r", int(r > 1 / 3) + int(r > 3)), ("d", int(d > -5) + int(d > 5))}
        expected = (x - x.mean()) / deviation * min(max(r, 1 / 3), 3) + min(max(d, -5), 5)
        weight, bias = (part[0, column].item() for part in (norm.weight, norm.bias))
        np.testing.assert_allclose(found[:, column], weight * expected + bias, rtol=1e-10)
    assert seen == {(name, place) for name in "rd" for place in range(3)}  # within and beyond both bounds


def test_within_the_bounds_renormalisation_is_by_the_running_statistics():
    """That is what r and d are for."""
    norm, rng = made(renorm_after=0), np.random.default_rng(0)
    deviation = norm.variance.sqrt().numpy()
    inputs = torch.from_numpy(norm.mean.numpy() + deviation * rng.normal(0.2, 1.2, (40, 3)))
    expected = norm(inputs, by_batch=False)
    torch.testing.assert_close(norm(inputs, by_batch=True), expected)


def test_running_statistics_forget_at_a_rate_of_a_hundredth():
    """After k equal batches, what is left of the start is 0.99^k. Passes by the running ones change nothing."""
    norm = made()
    mean, variance = norm.mean.clone(), norm.variance.clone()
    inputs = torch.from_numpy(np.random.default_rng(0).normal(2.0, 5.0, (7, 3)))
    for _ in range(50):
        norm(inputs, by_batch=True)
        norm(-inputs, by_batch=False)
    left = 0.99**50
    torch.testing.assert_close(norm.mean, left * mean + (1 - left) * inputs.mean(0))
    torch.testing.assert_close(norm.variance, left * variance + (1 - left) * inputs.var(0, correction=0))
    assert norm.passes == 50


@pytest.mark.parametrize("renorm_after", [0, 1000])
def test_the_gradient_passes_through_the_statistics_of_the_batch(renorm_after: int):
    """But not through the corrections, which finite differences hold constant."""
    norm = made(renorm_after=renorm_after)
    inputs = torch.from_numpy(np.random.default_rng(0).normal(0.5, 1.5, (5, 3))).requires_grad_()
    weights = torch.from_numpy(np.random.default_rng(1).normal(size=(5, 3)))
    mean, variance = norm.mean.clone(), norm.variance.clone()
    running = (variance + 1e-3).sqrt()
    (gradient,) = torch.autograd.grad((weights * norm(inputs, by_batch=True)).sum(), inputs)
    x = inputs.detach().numpy()
    r = np.sqrt(x.var(0) + 1e-3) / running.numpy() if renorm_after == 0 else np.ones((1, 3))
    d = (x.mean(0) - mean.numpy()) / running.numpy() if renorm_after == 0 else np.zeros((1, 3))
    r, d = np.clip(r, 1 / 3, 3), np.clip(d, -5, 5)

    def loss(x: Array) -> float:
        return float((weights.numpy() * affine(norm, (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-3) * r + d)).sum())

    for place in np.ndindex(5, 3):
        step = np.zeros((5, 3))
        step[place] = 1e-6
        assert gradient[place].item() == pytest.approx((loss(x + step) - loss(x - step)) / 2e-6, rel=1e-5, abs=1e-8)


def test_members_of_an_ensemble_are_networks_of_their_own():
    """Their outputs and statistics equal those of a lone network with the same weights."""
    ensemble = NormalizedMLP([3, 8, 2], 1000, generator(0, "a"), 2).double()
    inputs = torch.from_numpy(np.random.default_rng(0).normal(2.0, 5.0, (7, 3)))
    outputs = ensemble(inputs, by_batch=True)
    for member in range(2):
        alone = NormalizedMLP([3, 8, 2], 1000, generator(0, "b")).double()
        state = {k: v[member] if v.dim() else v for k, v in NormalizedMLP.state_dict(ensemble).items()}
        before = {k: v for k, v in alone.state_dict().items() if k.rpartition(".")[2] in ("mean", "variance", "passes")}
        alone.load_state_dict(state | before)
        torch.testing.assert_close(alone(inputs, by_batch=True), outputs[member])
        for mine, theirs in zip(alone.norms, ensemble.norms, strict=True):
            torch.testing.assert_close(mine.mean, theirs.mean[member])
            torch.testing.assert_close(mine.variance, theirs.variance[member])
