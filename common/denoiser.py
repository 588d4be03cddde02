"""The network that tells noise from actions, as IDQL has it (Hansen-Estruch et al. 2023, arXiv 2304.10573)."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.networks import Linear, glorot
from common.onednn import EPSILON, linear


def dense(inputs: Tensor, weight: Tensor, bias: Tensor | None = None, swish: bool = False) -> Tensor:
    """A linear layer, by oneDNN on the CPU where nothing is to be differentiated."""
    if inputs.device.type == "cpu" and not torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return linear(inputs, weight.contiguous(), bias, "swish" if swish else None)
    outputs = F.linear(inputs, weight, bias)
    return F.silu(outputs) if swish else outputs


class Block(nn.Module):
    """What a residual block makes of its stream [..., width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, EPSILON)
        self.up, self.down = Linear(width, 4 * width), Linear(4 * width, width)

    def forward(self, stream: Tensor) -> Tensor:
        hidden = dense(self.norm(stream), self.up.weight, self.up.bias, swish=True)
        return dense(hidden, self.down.weight, self.down.bias).add_(stream)


class Denoiser(nn.Module):
    """What it makes of noisy actions at time t: the noise in them (diffusion), or their velocity (flow matching).

    A residual stream of `width` with `blocks` of layer norm, expansion to four times the width, swish and projection;
    t goes in as cosines and sines of learned frequencies. Shapes: obs [batch, obs_dim], noisy [..., batch, action_dim],
    time [..., batch] or [] to [..., batch, action_dim].
    """

    def __init__(self, obs_dim: int, action_dim: int, width: int, blocks: int, generator: torch.Generator) -> None:
        super().__init__()
        frequencies = max(1, width // 4)
        self.frequencies = nn.Parameter(0.2 * torch.randn(frequencies, generator=generator))
        self.of_time = nn.Sequential(Linear(2 * frequencies, width), nn.SiLU(), Linear(width, width))
        self.first = Linear(action_dim + obs_dim + width, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.last = Linear(width, action_dim)
        glorot(self, generator)

    def forward(self, obs: Tensor, noisy: Tensor, time: Tensor) -> Tensor:
        angles = 2.0 * math.pi * time.unsqueeze(-1) * self.frequencies
        embedding = self.of_time(torch.cat([angles.cos(), angles.sin()], dim=-1))
        # One layer on all three side by side; each part is multiplied only as often as it differs.
        parts = self.first.weight.split([noisy.shape[-1], obs.shape[-1], embedding.shape[-1]], dim=1)
        of_actions, of_obs, of_time = (dense(x, w) for x, w in zip((noisy, obs, embedding), parts, strict=True))
        stream = self.blocks(of_actions.add_(of_obs + (of_time + self.first.bias)))
        return dense(F.silu(stream), self.last.weight, self.last.bias)


def variance_preserving(steps: int) -> tuple[Tensor, Tensor]:
    """β_t and ᾱ_t = Π (1 - β), [steps] each: how much noise is added at a step, and how much of the data is left.

    Source: Xiao et al. 2022 (arXiv 2112.07804), the schedule of Song et al. 2021 (arXiv 2011.13456) between its points,
    from 0.1 to 10.
    """
    t = torch.arange(1, steps + 1, dtype=torch.float64)
    betas = 1.0 - torch.exp(-0.1 / steps - 0.5 * (10.0 - 0.1) * (2.0 * t - 1.0) / steps**2)
    return betas.float(), (1.0 - betas).cumprod(0).float()
