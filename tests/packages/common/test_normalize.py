"""Running statistics against those of all data at once."""

import numpy as np
import pytest
import torch

from common.normalize import FixedNormalizer, ReturnScaler, RewardScaler, RunningNormalizer


def test_statistics_equal_those_of_all_batches_together():
    rng, normalizer = np.random.default_rng(0), RunningNormalizer(3)
    batches = [rng.normal((5.0, -300.0, 0.0), (0.1, 20.0, 1.0), (n, 4, 3)) for n in (1, 7, 100, 3)]
    for batch in batches:
        normalizer.update(torch.from_numpy(batch))
    together = np.concatenate(batches).reshape(-1, 3)
    np.testing.assert_allclose(normalizer.mean, together.mean(0), rtol=1e-12)
    np.testing.assert_allclose(normalizer.variance, together.var(0), rtol=1e-10)
    assert normalizer.count == len(together)


def test_normalised_data_has_mean_0_and_variance_1_and_is_clipped():
    values = torch.from_numpy(np.random.default_rng(1).normal(7.0, 3.0, (5_000, 2)).astype(np.float32))
    normalizer = RunningNormalizer(2)
    assert torch.equal(normalizer(values), values.clamp(-10, 10))  # nothing is known yet
    normalizer.update(values)
    np.testing.assert_allclose(normalizer(values).mean(0), [0, 0], atol=1e-4)
    np.testing.assert_allclose(normalizer(values).std(0), [1, 1], rtol=1e-3)
    assert normalizer(torch.full((1, 2), 1e9)).tolist() == [[10.0, 10.0]]
    assert normalizer(values).dtype == torch.float32


def test_many_small_updates_lose_nothing():
    """One value at a time, far from 0, where float32 sums would be lost."""
    values = torch.from_numpy(np.random.default_rng(2).normal(1e4, 1.0, (20_000, 1)))
    normalizer = RunningNormalizer(1)
    for value in values:
        normalizer.update(value)
    assert normalizer.variance.item() == pytest.approx(values.var(correction=0).item(), rel=1e-6)


def test_rewards_are_divided_by_the_deviation_of_their_discounted_sum():
    """The sum continues over rollouts, and starts again when an episode ends."""
    scaler, rng, sums, seen = RewardScaler(2, 0.9), np.random.default_rng(2), np.zeros(2), []
    stepped = RewardScaler(2, 0.9)
    for _ in range(3):
        rewards, dones = rng.normal(3.0, 2.0, (20, 2)).astype(np.float32), rng.random((20, 2)) < 0.1
        got = scaler(rewards, dones)
        for t in range(20):
            sums = 0.9 * sums + rewards[t]
            seen.append(sums.copy())
            sums[dones[t]] = 0.0
            one = stepped.step(torch.from_numpy(rewards[t]), torch.from_numpy(dones[t]))
            expected = (rewards[t] / np.sqrt(np.var(seen) + 1e-8)).clip(-10, 10)
            np.testing.assert_allclose(one, expected, rtol=1e-5)
        np.testing.assert_allclose(got, rewards / np.std(seen), rtol=1e-5)
    assert scaler(np.full((1, 2), 1e6, np.float32), np.zeros((1, 2), bool)).max() <= 10.0


def test_fixed_statistics_do_not_move_and_are_part_of_the_state():
    rng = np.random.default_rng(2)
    mean, deviation = np.float32([5.0, -300.0]), np.float32([0.1, 0.0])
    values = torch.from_numpy(rng.normal(mean, 20.0, (100, 2)).astype(np.float32))
    normalizer, other = FixedNormalizer(2), FixedNormalizer(2)
    assert torch.equal(normalizer(values), values)  # nothing is known yet
    normalizer.set_statistics(mean, deviation)
    np.testing.assert_allclose(normalizer(values), (values.numpy() - mean) / (deviation + 1e-3), rtol=1e-6)
    other.load_state_dict(normalizer.state_dict())
    assert torch.equal(other(values), normalizer(values))


@pytest.mark.parametrize("bound", [1.5, 50.0])  # the largest sum decides, or the deviation
def test_rewards_are_scaled_until_returns_fit(bound: float):
    """By the deviation of all discounted sums so far, or more if the largest would leave the bound."""
    rng, scaler = np.random.default_rng(2), ReturnScaler(3, 0.9, bound)
    rewards, dones = rng.normal(1.0, 3.0, (200, 3)), rng.random((200, 3)) < 0.05
    seen, sums = [], np.zeros(3)
    for reward, done in zip(rewards, dones, strict=True):
        scaler.update(torch.from_numpy(reward), torch.from_numpy(done))
        sums = 0.9 * sums + reward
        seen.append(sums)
        sums = np.where(done, 0.0, sums)
        by_deviation = np.sqrt(np.var(seen) + 1e-8)
        divisor = max(by_deviation, np.abs(seen).max() / bound)
        np.testing.assert_allclose(scaler(torch.ones(2)), 1.0 / divisor, rtol=1e-6)
    assert (divisor == by_deviation) == (bound == 50.0)
