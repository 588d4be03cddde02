"""Batch normalisation and batch renormalisation of a network's inputs and hidden layers.

Ioffe and Szegedy 2015, "Batch Normalization", arXiv 1502.03167, and Ioffe 2017, "Batch Renormalization", arXiv
1702.03275, with the constants of CrossQ's code (Bhatt et al. 2024, arXiv 1902.05605).
"""

import torch
from torch import Tensor, nn

from common.networks import EnsembleLinear, mlp


class BatchRenorm(nn.Module):
    """Normalises by the statistics of a batch, or by running ones.

    After `renorm_after` passes by the batch, its statistics are corrected towards the running ones (algorithm 1 of
    Ioffe 2017). Shapes: inputs [batch, width] or [ensemble, batch, width]. The output has the ensemble's dimension if
    there is an ensemble. The running statistics are buffers, so a checkpoint holds them.
    """

    mean: Tensor
    variance: Tensor
    passes: Tensor
    MOMENTUM, EPSILON, LARGEST_R, LARGEST_D = 0.99, 1e-3, 3.0, 5.0

    def __init__(self, width: int, ensemble: int | None, renorm_after: int) -> None:
        super().__init__()
        shape = (1, width) if ensemble is None else (ensemble, 1, width)
        self.weight, self.bias = nn.Parameter(torch.ones(shape)), nn.Parameter(torch.zeros(shape))
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("variance", torch.ones(shape))
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        self.renorm_after = renorm_after

    def forward(self, inputs: Tensor, by_batch: bool) -> Tensor:
        """Normalise by the batch's statistics, which the running ones follow, or by the running ones alone."""
        running = (self.variance + self.EPSILON).sqrt()
        if not by_batch:
            return (inputs - self.mean) / running * self.weight + self.bias
        variance, mean = torch.var_mean(inputs, dim=-2, keepdim=True, correction=0)
        deviation = (variance + self.EPSILON).sqrt()
        with torch.no_grad():
            begun = self.passes >= self.renorm_after
            r = torch.where(begun, (deviation / running).clamp(1.0 / self.LARGEST_R, self.LARGEST_R), 1.0)
            d = torch.where(begun, ((mean - self.mean) / running).clamp(-self.LARGEST_D, self.LARGEST_D), 0.0)
            self.mean.lerp_(mean.expand_as(self.mean), 1.0 - self.MOMENTUM)
            self.variance.lerp_(variance.expand_as(self.variance), 1.0 - self.MOMENTUM)
            self.passes += 1
        return ((inputs - mean) / deviation * r + d) * self.weight + self.bias


class NormalizedMLP(nn.Module):
    """Linear layers, or an ensemble of them, each with normalised inputs: norm, linear, ReLU, norm, linear, …"""

    def __init__(
        self, sizes: list[int], renorm_after: int, generator: torch.Generator, ensemble: int | None = None
    ) -> None:
        super().__init__()
        self.net = mlp(sizes, generator, ensemble)
        self.norms = nn.ModuleList(BatchRenorm(width, ensemble, renorm_after) for width in sizes[:-1])

    def forward(self, inputs: Tensor, by_batch: bool) -> Tensor:
        layers = [layer for layer in self.net if isinstance(layer, nn.Linear | EnsembleLinear)]
        outputs = inputs
        for i, (norm, layer) in enumerate(zip(self.norms, layers, strict=True)):
            outputs = layer(norm(outputs.relu() if i else outputs, by_batch))
        return outputs
