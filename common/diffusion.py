"""Generative policies: diffusion and flow matching, and the network of IDQL (Hansen-Estruch et al. 2023, arXiv
2304.10573) that either learns."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.layers import EPSILON
from common.networks import Linear, glorot
from common.onednn import linear


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


# What a network makes of noisy actions at a time: `Denoiser` for given observations.
Network = Callable[[Tensor, Tensor], Tensor]


def normal_like(x: Tensor, generator: torch.Generator) -> Tensor:
    """Return standard normal noise of the shape of `x`."""
    return torch.randn(x.shape, generator=generator, device=x.device)


@dataclass(frozen=True)
class Diffusion:
    """Denoising diffusion in T steps, with the variance-preserving schedule of IDQL.

    β_t is how much noise a step adds, ᾱ_t = Π (1 - β) how much of the action is left: [T] each. Source: Xiao et al.
    2022 (arXiv 2112.07804), the schedule of Song et al. 2021 (arXiv 2011.13456) between its points, from 0.1 to 10.
    """

    betas: Tensor
    alpha_bars: Tensor

    @classmethod
    def variance_preserving(cls, steps: int, device: torch.device) -> "Diffusion":
        """Return the process with this many steps."""
        t = torch.arange(1, steps + 1, dtype=torch.float64)
        betas = 1.0 - torch.exp(-0.1 / steps - 0.5 * (10.0 - 0.1) * (2.0 * t - 1.0) / steps**2)
        return cls(betas.float().to(device), (1.0 - betas).cumprod(0).float().to(device))

    def sample(self, network: Network, x: Tensor, generator: torch.Generator) -> Tensor:
        """Return actions in [-1, 1] from noise `x`: the reverse process, clipped after each step."""
        for k in reversed(range(len(self.betas))):
            noise = network(x, torch.full((), float(k), device=x.device))
            beta, alpha_bar = self.betas[k], self.alpha_bars[k]
            x = (x - beta / (1.0 - alpha_bar).sqrt() * noise) / (1.0 - beta).sqrt()
            if k > 0:
                x = x + beta.sqrt() * normal_like(x, generator)
            x = x.clamp(-1.0, 1.0)
        return x

    def errors(self, network: Network, actions: Tensor, noise: Tensor, generator: torch.Generator) -> Tensor:
        """Return ε(s, √ᾱ_t a + √(1 - ᾱ_t) ε, t) - ε for actions and noise [batch, action_dim], at random t."""
        t = torch.randint(len(self.betas), (len(actions),), generator=generator, device=actions.device)
        alpha_bar = self.alpha_bars[t].unsqueeze(-1)
        return network(alpha_bar.sqrt() * actions + (1.0 - alpha_bar).sqrt() * noise, t.float()) - noise


@dataclass(frozen=True)
class Flow:
    """Flow matching from noise at time 0 to actions at 1, in `steps` Euler steps; the network sees time times steps."""

    steps: int

    def sample(self, network: Network, x: Tensor, generator: torch.Generator) -> Tensor:
        """Return actions in [-1, 1] from noise `x`: dx/dt = v(s, x, t) by Euler."""
        for k in range(self.steps):
            x = x + network(x, torch.full((), float(k), device=x.device)) / self.steps
        return x.clamp(-1.0, 1.0)

    def errors(self, network: Network, actions: Tensor, noise: Tensor, generator: torch.Generator) -> Tensor:
        """Return v(s, (1 - t) ε + t a, t) - (a - ε) for actions and noise [batch, action_dim], at random t."""
        t = torch.rand(len(actions), generator=generator, device=actions.device)
        return network(torch.lerp(noise, actions, t.unsqueeze(-1)), t * self.steps) - (actions - noise)
