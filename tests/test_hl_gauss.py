"""HL-Gauss against sums over a fine grid, and what its minimum must be."""

import math

import numpy as np
import pytest
import torch
from formulas import forward, layers

from common.errors import InputError
from common.hl_gauss import HistogramCritic, HLGauss, return_range
from common.networks import mlp

LOW, HIGH, BINS = -10.0, 30.0, 20
WIDTH = (HIGH - LOW) / BINS


def made(bins: int = BINS) -> HLGauss:
    support = HLGauss(bins).double()
    support.set_range(LOW, HIGH)
    return support


@pytest.mark.parametrize("value", [-10.0, -9.9, -3.0, 0.0, 0.7, 17.2, 30.0])
def test_labels_are_the_normal_distribution_within_the_range(value: float):
    """Its density at 200,000 points, summed in each bin, over the sum within the range."""
    points = np.linspace(LOW, HIGH, 200_000, endpoint=False) + 0.5 * (HIGH - LOW) / 200_000
    density = np.exp(-0.5 * ((points - value) / (0.75 * WIDTH)) ** 2).reshape(BINS, -1).sum(1)
    label = made().labels(torch.tensor(value, dtype=torch.float64))
    np.testing.assert_allclose(label.numpy(), density / density.sum(), atol=1e-7)


def test_a_labels_mean_is_its_return():
    """Within 1 % of a bin, at three bins from both ends or more. Beyond the ends, the label is that of the end."""
    support, inside = made(), torch.linspace(LOW + 3 * WIDTH, HIGH - 3 * WIDTH, 101).double()
    labels = support.labels(inside)
    torch.testing.assert_close(labels.sum(-1), torch.ones(101).double())
    assert ((support.mean(labels.log()) - inside).abs() < 0.01 * WIDTH).all()
    ends = support.labels(torch.tensor([LOW, HIGH]).double())
    assert torch.equal(support.labels(torch.tensor([-1e9, 1e9]).double()), ends)
    assert ends.isfinite().all()


def test_float32_is_enough():
    support = HLGauss(128)
    support.set_range(-100.0, 0.0)
    inside = torch.linspace(-97.0, -3.0, 1001)
    assert ((support.mean((support.labels(inside) + 1e-30).log()) - inside).abs() < 0.01 * 100 / 128).all()


def test_loss_is_the_cross_entropy_and_its_gradient_the_difference():
    support, rng = made(), torch.Generator().manual_seed(0)
    logits = torch.randn(4, 5, BINS, generator=rng).double().requires_grad_()
    returns = 10.0 * torch.randn(5, generator=rng).double()
    loss = support.loss(logits, returns)
    labels, shares = support.labels(returns).numpy(), np.exp(logits.detach().numpy())
    shares /= shares.sum(-1, keepdims=True)
    np.testing.assert_allclose(loss.detach().numpy(), -(labels * np.log(shares)).sum(-1), rtol=1e-10)
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    np.testing.assert_allclose(gradient.numpy(), shares - labels, atol=1e-10)


def test_the_mean_counts_each_bin_with_its_centre():
    logits = torch.full((BINS,), -math.inf).double()
    for i in range(BINS):
        one = logits.clone()
        one[i] = 0.0
        assert made().mean(one).item() == pytest.approx(LOW + (i + 0.5) * WIDTH)
    assert made().mean(torch.zeros(BINS).double()).item() == pytest.approx((LOW + HIGH) / 2)


def test_the_range_is_in_the_state():
    other = HLGauss(BINS).double()
    other.load_state_dict(made().state_dict())
    assert torch.equal(other.edges, made().edges)


def test_a_critic_gives_a_histogram_for_each_pair_and_member():
    rng = torch.Generator().manual_seed(0)
    critic = HistogramCritic(mlp([5, 8, BINS], rng, 3)).double()
    obs, actions = torch.randn(4, 3, generator=rng).double(), torch.randn(6, 4, 2, generator=rng).double()
    logits = critic(obs, actions)
    assert logits.shape == (3, 6, 4, BINS)
    for member in range(3):
        inputs = np.concatenate([obs.numpy(), actions[5].numpy()], -1)
        np.testing.assert_allclose(logits[member, 5].detach().numpy(), forward(inputs, layers(critic, member)))
    assert torch.equal(critic(obs, actions, torch.tensor([2, 2])), logits[[2, 2]])
    assert critic(obs, actions[0]).shape == (3, 4, BINS)


@pytest.mark.parametrize(
    ("rewards", "gamma", "given", "expected"),
    [
        ([-1.0, 0.0], 0.99, (None, None), (-100.0, 0.0)),
        ([0.0, 4.0], 0.5, (None, None), (0.0, 8.0)),
        ([-3.0, -1.0], 0.5, (None, None), (-6.0, 0.0)),
        ([-1.0, 2.0], 0.5, (-5.0, None), (-5.0, 4.0)),
        ([0.0], 0.9, (None, 1.0), (0.0, 1.0)),
        ([-1.0, 2.0], 1.0, (-5.0, 7.0), (-5.0, 7.0)),
    ],
)
def test_the_range_is_that_of_the_rewards_for_ever(rewards, gamma, given, expected):
    assert return_range(np.float32(rewards), gamma, *given) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("rewards", "gamma", "given"),
    [([0.0], 0.9, ()), ([1.0], 1.0, ()), ([1.0], 0.9, (5.0, 5.0)), ([1.0], 0.9, (5.0, 1.0))],
)
def test_a_range_that_is_none_is_refused(rewards, gamma, given):
    with pytest.raises(InputError, match="give --q-min and --q-max"):
        return_range(np.float32(rewards), gamma, *given)


@pytest.mark.parametrize(("low", "high"), [(1e8, 1e8 + 1), (-1e6, -999_999.0)])
def test_bins_that_float32_cannot_express_are_refused(low: float, high: float):
    with pytest.raises(InputError, match="too narrow"):
        HLGauss(128).set_range(low, high)
