"""Normalisation of observations and rewards, by running statistics or by those of a dataset."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

EPSILON = 1e-3  # added to a fixed deviation
CLIP = 10.0  # of scaled rewards


class RunningNormalizer(nn.Module):
    """Normalises to mean 0 and variance 1 of all values that `update` got, and clips.

    The statistics are buffers, so a checkpoint of a network that holds this module holds them too. Before the first
    update it only clips.
    """

    mean: Tensor
    variance: Tensor
    count: Tensor
    shift: Tensor
    scale: Tensor

    def __init__(self, dim: int, clip: float = 10.0) -> None:
        super().__init__()
        self.clip = clip
        self.register_buffer("mean", torch.zeros(dim, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(dim, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        # Mean and inverse standard deviation in float32. Computing them at every step would slow down acting.
        self.register_buffer("shift", torch.zeros(dim))
        self.register_buffer("scale", torch.ones(dim))

    def forward(self, values: Tensor) -> Tensor:
        """Return `values` [..., dim], float32, normalised and clipped."""
        return ((values - self.shift) * self.scale).clamp(-self.clip, self.clip)

    @torch.no_grad()
    def update(self, values: Tensor) -> None:
        """Add `values` [..., dim] to the statistics, by the parallel formula of Chan, Golub and LeVeque 1979."""
        values = values.reshape(-1, len(self.mean)).double()
        count = self.count + len(values)
        delta = values.mean(0) - self.mean
        squares = self.variance * self.count + values.var(0, correction=0) * len(values)
        squares += delta.square() * self.count * len(values) / count
        self.mean += delta * len(values) / count
        self.variance.copy_(squares / count)
        self.count.copy_(count)
        self.shift.copy_(self.mean)
        self.scale.copy_((self.variance + 1e-8).rsqrt())


class FixedNormalizer(nn.Module):
    """Normalises to (values - mean) / (deviation + EPSILON) by statistics that are set once.

    Until they are set, values stay unchanged. The statistics are buffers, so a checkpoint holds them. Nothing is
    clipped.
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(dim))
        self.register_buffer("scale", torch.ones(dim))

    def forward(self, values: Tensor) -> Tensor:
        """Return `values` [..., dim], normalised."""
        return (values - self.mean) / self.scale

    def set_statistics(self, mean: NDArray[np.float32], deviation: NDArray[np.float32]) -> None:
        """Set mean and standard deviation, [dim] each."""
        self.mean.copy_(torch.from_numpy(mean))
        self.scale.copy_(torch.from_numpy(deviation) + EPSILON)


class _DiscountedSums(nn.Module):
    """Holds the discounted sum of rewards of each environment's episode so far."""

    sums: Tensor

    def __init__(self, num_envs: int, gamma: float) -> None:
        super().__init__()
        self.gamma, self.normalizer = gamma, RunningNormalizer(1)
        self.register_buffer("sums", torch.zeros(num_envs, dtype=torch.float64))

    def discard_unfinished_episodes(self, exact: list[bool]) -> None:
        """Reset the sums of environments that were not restored exactly (`exact` [num_envs])."""
        self.sums[~torch.tensor(exact)] = 0.0


class RewardScaler(_DiscountedSums):
    """Divides rewards by the running standard deviation of their discounted sum, and clips.

    Source: "The 37 Implementation Details of PPO" (Huang et al. 2022), continuous control, details 8 and 9.
    """

    def forward(self, rewards: NDArray[np.float32], dones: NDArray[np.bool_]) -> NDArray[np.float32]:
        """Add a rollout's rewards [steps, num_envs] to the statistics and return them scaled; `dones` reset sums."""
        sums, seen = self.sums.cpu().numpy(), np.empty(rewards.shape)
        for t, reward in enumerate(rewards):
            seen[t] = self.gamma * sums + reward
            sums = np.where(dones[t], 0.0, seen[t])
        self.sums.copy_(torch.from_numpy(sums))
        self.normalizer.update(torch.from_numpy(seen).to(self.sums.device))
        scale = self.normalizer.scale.cpu().numpy()
        scaled: NDArray[np.float32] = (rewards * scale).clip(-CLIP, CLIP).astype(np.float32)
        return scaled

    @torch.no_grad()
    def step(self, rewards: Tensor, dones: Tensor) -> Tensor:
        """Do the same with the rewards [num_envs] of one step, by tensor operations, which can be recorded."""
        sums = self.gamma * self.sums + rewards
        self.normalizer.update(sums)
        self.sums.copy_(torch.where(dones, 0.0, sums))
        return (rewards * self.normalizer.scale).clamp(-CLIP, CLIP)


class ReturnScaler(_DiscountedSums):
    """Scales rewards so that their discounted sums G stay within ±bound and have a variance of at most 1.

    The divisor is max(√Var G, max |G| / bound), of all G so far. Source: SimbaV2 (Lee et al. 2025, arXiv 2502.15280),
    reward scaling.
    """

    largest: Tensor
    scale: Tensor

    def __init__(self, num_envs: int, gamma: float, bound: float) -> None:
        super().__init__(num_envs, gamma)
        self.bound = bound
        self.register_buffer("largest", torch.zeros((), dtype=torch.float64))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, rewards: Tensor) -> Tensor:
        """Return rewards of any shape, scaled by the statistics so far."""
        return rewards * self.scale

    @torch.no_grad()
    def update(self, rewards: Tensor, dones: Tensor) -> None:
        """Add one step's rewards [num_envs]. `dones` [num_envs] marks the ends of episodes, which reset the sums."""
        sums = self.gamma * self.sums + rewards
        self.normalizer.update(sums.unsqueeze(-1))
        self.largest.copy_(torch.maximum(self.largest, sums.abs().max()))
        bounded = self.bound / self.largest.clamp(min=1e-8)
        self.scale.copy_(torch.minimum(self.normalizer.scale.squeeze(), bounded))
        self.sums.copy_(torch.where(dones, 0.0, sums))
