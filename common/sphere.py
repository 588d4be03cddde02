"""Networks whose features and weights lie on the unit sphere.

SimbaV2: Lee et al. 2025, "Hyperspherical Normalization for Scalable Deep Reinforcement Learning", arXiv 2502.15280.
Every network here is an ensemble of n members.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.errors import InputError


def unit(values: Tensor) -> Tensor:
    """Return values [..., width] divided by their Euclidean norms."""
    return F.normalize(values, dim=-1, eps=1e-8)


class UnitLinear(nn.Module):
    """W x without bias, from [batch, inputs] or [n, batch, inputs] to [n, batch, outputs].

    weight: [n, outputs, inputs]. The weights of each output have norm 1, at first and after each `project`.
    """

    def __init__(self, n: int, inputs: int, outputs: int, generator: torch.Generator) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n, outputs, inputs))
        for matrix in self.weight:
            nn.init.orthogonal_(matrix, generator=generator)
        self.project()

    @torch.no_grad()
    def project(self) -> None:
        """Make the norms 1 again, after a gradient step."""
        self.weight.copy_(unit(self.weight))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ self.weight.mT


class Scale(nn.Module):
    """s ⊙ x with learned s, [n, 1, width]. It starts at `initial`, and its parameter at `start`.

    The smaller `start` is, the faster s moves.
    """

    def __init__(self, n: int, width: int, initial: float, start: float) -> None:
        super().__init__()
        self.ratio = initial / start
        self.weight = nn.Parameter(torch.full((n, 1, width), start))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.weight * self.ratio * inputs


class Block(nn.Module):
    """h ← unit(h + α ⊙ (unit(W₂ relu(s ⊙ W₁ h)) - h)): a step from h, [n, batch, width], to the output of an MLP."""

    def __init__(self, n: int, width: int, alpha: float, generator: torch.Generator) -> None:
        super().__init__()
        start = math.sqrt(0.5 / width)
        self.w1 = UnitLinear(n, width, 4 * width, generator)
        self.scale = Scale(n, 4 * width, start, start)
        self.w2 = UnitLinear(n, 4 * width, width, generator)
        self.alpha = Scale(n, width, alpha, 1.0 / math.sqrt(width))

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.scale(self.w1(features)).relu() + 1e-8  # so that no vector is zero
        return unit(features + self.alpha(unit(self.w2(hidden)) - features))


class Features(nn.Module):
    """Map inputs [batch, inputs] to points on the sphere: [n, batch, width].

    `hidden` has the width once for each block. The constant `shift` joins the inputs, so that the first projection
    keeps their norm. Raises InputError if the widths differ.
    """

    def __init__(self, n: int, inputs: int, hidden: tuple[int, ...], shift: float, generator: torch.Generator) -> None:
        super().__init__()
        width, *others = hidden
        if any(other != width for other in others):
            raise InputError(f"the widths of a network's blocks are {hidden}: give equal ones")
        self.shift, start = shift, math.sqrt(2.0 / width)
        self.embedding = UnitLinear(n, inputs + 1, width, generator)
        self.scale = Scale(n, width, start, start)
        self.blocks = nn.Sequential(*(Block(n, width, 1.0 / (len(hidden) + 1), generator) for _ in hidden))

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = unit(F.pad(inputs, (0, 1), value=self.shift))
        features: Tensor = self.blocks(unit(self.scale(self.embedding(inputs))))
        return features


class Head(nn.Module):
    """W₂ (s ⊙ W₁ h) + b, from features h [n, batch, width] to [n, batch, outputs]."""

    def __init__(self, n: int, width: int, outputs: int, generator: torch.Generator) -> None:
        super().__init__()
        self.w1, self.scale = UnitLinear(n, width, width, generator), Scale(n, width, 1.0, 1.0)
        self.w2 = UnitLinear(n, width, outputs, generator)
        self.bias = nn.Parameter(torch.zeros(n, 1, outputs))

    def forward(self, features: Tensor) -> Tensor:
        outputs: Tensor = self.w2(self.scale(self.w1(features))) + self.bias
        return outputs


def project(network: nn.Module) -> None:
    """Project the weights of every `UnitLinear` in the network."""
    for layer in network.modules():
        if isinstance(layer, UnitLinear):
            layer.project()
