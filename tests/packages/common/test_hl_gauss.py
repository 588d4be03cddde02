"""HL-Gauss against sums over a fine grid, C51 against loops, and what their minimum must be."""

import math

import numpy as np
import pytest
import torch
from formulas import forward, layers

from common.errors import InputError
from common.hl_gauss import C51, HistogramCritic, HLGauss, made_histogram, return_range
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


def atoms_of(bins: int = 11) -> tuple[C51, np.ndarray]:
    support = C51(bins).double()
    support.set_range(-2.0, 3.0)
    return support, np.linspace(-2.0, 3.0, bins)


def test_c51s_atoms_are_the_ends_of_the_range_and_evenly_between():
    support, atoms = atoms_of()
    np.testing.assert_allclose(support.centres.numpy(), atoms, rtol=1e-12, atol=1e-12)


def test_c51s_projection_equals_loops_over_its_atoms():
    """The floor and the ceiling of each return get what lies nearer to them (algorithm 1 of Bellemare et al.)."""
    support, atoms = atoms_of()
    rng = np.random.default_rng(0)
    shares, returns = rng.dirichlet(np.ones(7), 200), rng.uniform(-4.0, 5.0, (200, 7))
    returns[:, 0] = atoms[rng.integers(0, 11, 200)]  # some exactly on an atom
    expected = np.zeros((200, 11))
    for row in range(200):
        for share, value in zip(shares[row], returns[row], strict=True):
            place = (min(max(value, -2.0), 3.0) + 2.0) / 0.5
            below, above = math.floor(place), math.ceil(place)
            if below == above:
                expected[row, below] += share
            else:
                expected[row, below] += share * (above - place)
                expected[row, above] += share * (place - below)
    found = support.project(torch.from_numpy(shares), torch.from_numpy(returns))
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-12)
    inside = np.clip(returns, -2.0, 3.0)  # where a projection keeps the mean
    np.testing.assert_allclose(found.numpy() @ atoms, (shares * inside).sum(1), atol=1e-12)


def random_target(seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Logits of three critics in 50 states, rewards, discounts of which every fifth is 0, and a bonus."""
    rng = torch.Generator().manual_seed(seed)
    logits = 2.0 * torch.randn(3, 50, 11, generator=rng).double()
    rewards, bonus = (torch.randn(50, generator=rng).double() for _ in range(2))
    return logits, rewards, 0.9 * (torch.arange(50) % 5 != 0).double(), bonus


def test_hl_gausss_target_is_the_label_of_the_smallest_mean():
    support = HLGauss(11).double()
    support.set_range(-2.0, 3.0)
    logits, rewards, discounts, bonus = random_target()
    shares = np.exp(logits.numpy()) / np.exp(logits.numpy()).sum(-1, keepdims=True)
    means = shares @ (np.linspace(-2, 3, 12)[:-1] + 2.5 / 11)
    returns = rewards.numpy() + discounts.numpy() * (means.min(0) + bonus.numpy())
    labels, metrics = support.target(logits, rewards, discounts, bonus)
    torch.testing.assert_close(labels, support.labels(torch.from_numpy(returns)))
    outside = (returns < -2) | (returns > 3)
    assert 0 < outside.sum() < 50
    np.testing.assert_array_equal(metrics["losses/clamped"].numpy(), outside)
    entropy = -(labels * labels.clamp(min=1e-300).log()).sum(-1)
    torch.testing.assert_close(metrics["losses/label_entropy"], entropy)


def test_c51s_target_moves_the_histogram_of_the_critic_with_the_smallest_mean():
    support, atoms = atoms_of()
    logits, rewards, discounts, bonus = random_target()
    labels, metrics = support.target(logits, rewards, discounts, bonus)
    for state in range(50):
        each = [np.exp(critic) / np.exp(critic).sum() for critic in logits[:, state].numpy()]
        shares = min(each, key=lambda share: share @ atoms)
        returns = rewards[state].item() + discounts[state].item() * (atoms + bonus[state].item())
        expected = support.project(torch.from_numpy(shares), torch.from_numpy(returns))
        torch.testing.assert_close(labels[state], expected)
        clamped = shares[(returns < -2) | (returns > 3)].sum()
        assert metrics["losses/clamped"][state].item() == pytest.approx(clamped, abs=1e-12)
    assert len(set(support.mean(logits).argmin(0).tolist())) == 3


@pytest.mark.parametrize(
    ("bins", "low", "high", "wanted"),
    [
        (1, None, None, "--bins is 1: give at least 2"),
        (11, 0.0, None, "--q-min is 0.0 and --q-max is None: give both, the smaller first, or neither"),
        (11, 3.0, 3.0, "--q-min is 3.0 and --q-max is 3.0: give both"),
    ],
)
@pytest.mark.parametrize("kind", ["hl-gauss", "c51"])
def test_a_histogram_without_bins_or_range_is_refused(
    kind: str, bins: int, low: float | None, high: float | None, wanted: str
):
    with pytest.raises(InputError, match=wanted):
        made_histogram(kind, bins, low, high)


def test_a_range_without_a_histogram_is_refused():
    assert made_histogram("mse", 1, None, None) is None
    with pytest.raises(InputError, match=r"^--q-min and --q-max .*: give --critic hl-gauss or c51 too$"):
        made_histogram("mse", 11, None, 3.0)
