"""HL-Gauss: critics that predict a histogram of the return, and learn it by cross-entropy.

Farebrother et al. 2024, "Stop Regressing: Training Value Functions via Classification for Scalable Deep RL", arXiv
2403.03950.
"""

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from common.errors import InputError
from common.networks import Critic


class HLGauss(nn.Module):
    """`bins` bins of equal width ς on [low, high]. A return's label is a normal distribution around it, σ = 0.75 ς.

    `edges` [bins + 1] is a buffer, so a checkpoint and a policy file hold the range.
    """

    edges: Tensor

    def __init__(self, bins: int, smoothing: float = 0.75) -> None:
        super().__init__()
        self.bins, self.smoothing = bins, smoothing
        self.register_buffer("edges", torch.linspace(-1.0, 1.0, bins + 1))

    def set_range(self, low: float, high: float) -> None:
        """Set the smallest and the largest return. Raises InputError if its numbers cannot express the bins."""
        edges = torch.linspace(low, high, self.bins + 1, dtype=torch.float64)
        width = (high - low) / self.bins
        if (edges.to(self.edges.dtype).diff() - width).abs().max() > 0.01 * width:
            raise InputError(f"{self.bins} bins from {low:g} to {high:g} are too narrow: give --q-min and --q-max")
        self.edges.copy_(edges)

    def labels(self, returns: Tensor) -> Tensor:
        """Return the share of each bin [..., bins] for returns [...], which are clamped to the range.

        The normal distribution is cut off at the ends of the range.
        """
        returns = returns.clamp(self.edges[0], self.edges[-1]).unsqueeze(-1)
        below: Tensor = torch.special.ndtr((self.edges - returns) / (self.smoothing * (self.edges[1] - self.edges[0])))
        return below.diff(dim=-1) / (below[..., -1:] - below[..., :1])

    def loss(self, logits: Tensor, returns: Tensor) -> Tensor:
        """Return the cross-entropy [...] of the histograms with logits [..., bins] from the labels of returns [...]."""
        return -(self.labels(returns) * F.log_softmax(logits, dim=-1)).sum(-1)

    def mean(self, logits: Tensor) -> Tensor:
        """Return the means [...] of the histograms with logits [..., bins]: each bin counts with its centre."""
        return logits.softmax(-1) @ (0.5 * (self.edges[1:] + self.edges[:-1]))


class HistogramCritic(Critic):
    """Logits of the histogram of Q_i(s, a). The shapes are those of `Critic`, with [bins] as a last dimension."""

    def forward(self, obs: Tensor, actions: Tensor, members: int | Tensor | None = None) -> Tensor:
        outputs = self.outputs(obs, actions, members)
        return outputs.view(-1, *actions.shape[:-1], outputs.shape[-1])


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
