"""Critics that predict a histogram of the return, and learn it by cross-entropy: HL-Gauss and C51.

HL-Gauss: Farebrother et al. 2024, "Stop Regressing: Training Value Functions via Classification for Scalable Deep RL",
arXiv 2403.03950. C51: Bellemare, Dabney and Munos 2017, "A Distributional Perspective on Reinforcement Learning", arXiv
1707.06887.
"""

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from common.errors import InputError
from common.networks import Critic


class Histogram(nn.Module):
    """`bins` bins of equal width ς. `edges` [bins + 1] is a buffer, so checkpoints and policy files hold the range."""

    edges: Tensor

    def __init__(self, bins: int) -> None:
        super().__init__()
        self.bins = bins
        self.register_buffer("edges", torch.linspace(-1.0, 1.0, bins + 1))

    def set_range(self, low: float, high: float) -> None:
        """Set the first and the last edge. Raises InputError if its numbers cannot express the bins."""
        edges = torch.linspace(low, high, self.bins + 1, dtype=torch.float64)
        width = (high - low) / self.bins
        if (edges.to(self.edges.dtype).diff() - width).abs().max() > 0.01 * width:
            raise InputError(f"{self.bins} bins from {low:g} to {high:g} are too narrow: give --q-min and --q-max")
        self.edges.copy_(edges)

    @property
    def centres(self) -> Tensor:
        """The centre of each bin: [bins]."""
        return 0.5 * (self.edges[1:] + self.edges[:-1])

    def mean(self, logits: Tensor) -> Tensor:
        """Return the means [...] of the histograms with logits [..., bins]: each bin counts with its centre."""
        return logits.softmax(-1) @ self.centres

    def cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the cross-entropy [...] of the histograms with logits [..., bins] from labels [..., bins]."""
        return -(labels * F.log_softmax(logits, dim=-1)).sum(-1)

    def target(
        self, next_logits: Tensor, rewards: Tensor, discounts: Tensor, bonus: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the labels of r + γ (Q̄(s', a') + bonus), and metrics.

        Q̄ is the critic of the smallest mean in each state. Shapes: next_logits [critics, batch, bins], the labels
        [batch, bins], all others [batch]. `discounts` is γ, or 0 after a termination. The metrics are the share of
        returns that are clamped to the range, and the entropy of the labels in nats.
        """
        labels, clamped = self._target(next_logits, rewards, discounts, bonus)
        entropy = self.cross_entropy(labels.clamp(min=1e-30).log(), labels)
        return labels, {"losses/clamped": clamped, "losses/label_entropy": entropy}

    def _target(self, next_logits: Tensor, rewards: Tensor, discounts: Tensor, bonus: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


class HLGauss(Histogram):
    """On [low, high]. A return's label is a normal distribution around it, σ = 0.75 ς."""

    def labels(self, returns: Tensor) -> Tensor:
        """Return the share of each bin [..., bins] for returns [...], which are clamped to the range.

        The normal distribution is cut off at the ends of the range.
        """
        returns = returns.clamp(self.edges[0], self.edges[-1]).unsqueeze(-1)
        below: Tensor = torch.special.ndtr((self.edges - returns) / (0.75 * (self.edges[1] - self.edges[0])))
        return below.diff(dim=-1) / (below[..., -1:] - below[..., :1])

    def loss(self, logits: Tensor, returns: Tensor) -> Tensor:
        """Return the cross-entropy [...] of the histograms with logits [..., bins] from the labels of returns [...]."""
        return self.cross_entropy(logits, self.labels(returns))

    def _target(self, next_logits: Tensor, rewards: Tensor, discounts: Tensor, bonus: Tensor) -> tuple[Tensor, Tensor]:
        """The return is a number, from Q̄'s mean."""
        returns = rewards + discounts * (self.mean(next_logits).amin(0) + bonus)
        return self.labels(returns), ((returns < self.edges[0]) | (returns > self.edges[-1])).float()


class C51(Histogram):
    """Atoms from low to high, the centres of the bins. A return is shared between its two neighbours."""

    def set_range(self, low: float, high: float) -> None:
        """Set the first and the last atom. Raises InputError if its numbers cannot express the bins."""
        half = 0.5 * (high - low) / (self.bins - 1)
        super().set_range(low - half, high + half)

    def project(self, shares: Tensor, returns: Tensor) -> Tensor:
        """Return the histogram [..., bins] of returns [..., n] that have these shares (eq. 7 of Bellemare et al.)."""
        atoms, width = self.centres, self.edges[1] - self.edges[0]
        returns = returns.clamp(atoms[0], atoms[-1]).unsqueeze(-1)
        return (shares.unsqueeze(-1) * (1.0 - (returns - atoms).abs() / width).clamp(min=0.0)).sum(-2)

    def _target(self, next_logits: Tensor, rewards: Tensor, discounts: Tensor, bonus: Tensor) -> tuple[Tensor, Tensor]:
        """Each atom of Q̄ has a return of its own."""
        smallest = self.mean(next_logits).argmin(0)
        shares = next_logits.softmax(-1)[smallest, torch.arange(len(smallest), device=smallest.device)]
        returns = rewards.unsqueeze(-1) + discounts.unsqueeze(-1) * (self.centres + bonus.unsqueeze(-1))
        outside = (returns < self.centres[0]) | (returns > self.centres[-1])
        return self.project(shares, returns), (shares * outside).sum(-1)


class HistogramCritic(Critic):
    """Logits of the histogram of Q_i(s, a). The shapes are those of `Critic`, with [bins] as a last dimension."""

    def forward(self, obs: Tensor, actions: Tensor, members: int | Tensor | None = None) -> Tensor:
        outputs = self.outputs(obs, actions, members)
        return outputs.view(-1, *actions.shape[:-1], outputs.shape[-1])


FIT = 5.0  # SimbaV2's range of returns, which `common.normalize.ReturnScaler` fits rewards into


def made_histogram(kind: str, bins: int, low: float | None, high: float | None) -> Histogram | None:
    """Return the histogram of `--critic`, on [low, high] or on ±FIT, or None for "mse". Raises InputError."""
    if kind == "mse":
        if (low, high) != (None, None):
            raise InputError("--q-min and --q-max are the range of a histogram: give --critic hl-gauss or c51 too")
        return None
    if bins < 2:
        raise InputError(f"--bins is {bins}: give at least 2")
    if (low is None) != (high is None) or (low is not None and high is not None and low >= high):
        raise InputError(f"--q-min is {low} and --q-max is {high}: give both, the smaller first, or neither")
    histogram = HLGauss(bins) if kind == "hl-gauss" else C51(bins)
    histogram.set_range(*(-FIT, FIT) if low is None or high is None else (low, high))
    return histogram


def return_range(
    rewards: NDArray[np.float32], gamma: float, low: float | None = None, high: float | None = None
) -> tuple[float, float]:
    """Return `low` and `high`, or for None the return of the smallest and largest of rewards [n], paid for ever.

    A return of 0 is in the range unless a bound excludes it. Raises InputError if the range is empty or unbounded.
    """
    rest = max(1.0 - gamma, 1e-12)
    low = min(0.0, float(rewards.min())) / rest if low is None else low
    high = max(0.0, float(rewards.max())) / rest if high is None else high
    if not 0.0 < high - low < 1e9:
        raise InputError(f"returns would range from {low:g} to {high:g}: give --q-min and --q-max")
    return low, high
