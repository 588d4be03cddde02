"""Generative policies: diffusion and flow matching, and the networks that they train.

`Denoiser` is the network of IDQL (Hansen-Estruch et al. 2023, arXiv 2304.10573), for either. `Velocity` is that of Park
et al. 2025 (arXiv 2502.02538), for a flow.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.layers import EPSILON
from common.networks import Linear, glorot, mlp
from common.onednn import linear

# Attributes that may hold an agent's imitating policy. If an agent has several, the last in this order is used.
BASE_NAMES = ("actor", "flow", "base", "base_average")


def dense(inputs: Tensor, weight: Tensor, bias: Tensor | None = None, swish: bool = False) -> Tensor:
    """Apply a linear layer, then swish if asked for. On the CPU, oneDNN computes it if no gradient is needed."""
    if inputs.device.type == "cpu" and not torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return linear(inputs, weight.contiguous(), bias, "swish" if swish else None)
    outputs = F.linear(inputs, weight, bias)
    return F.silu(outputs) if swish else outputs


class Block(nn.Module):
    """A residual block (layer norm, expansion, swish, projection) on a stream [..., width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, EPSILON)
        self.up, self.down = Linear(width, 4 * width), Linear(4 * width, width)

    def forward(self, stream: Tensor) -> Tensor:
        hidden = dense(self.norm(stream), self.up.weight, self.up.bias, swish=True)
        return dense(hidden, self.down.weight, self.down.bias).add_(stream)


class Denoiser(nn.Module):
    """Predicts the noise in noisy actions at time t (diffusion), or their velocity (flow matching).

    The residual stream of `width` passes `blocks` of layer norm, expansion to four times the width, swish and
    projection. t enters as cosines and sines of learned frequencies. Shapes: obs [batch, obs_dim], noisy [..., batch,
    action_dim] and time [..., batch] or [] are mapped to [..., batch, action_dim].
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
        # This equals one layer on all three concatenated, but obs and time are not repeated for every action.
        parts = self.first.weight.split([noisy.shape[-1], obs.shape[-1], embedding.shape[-1]], dim=1)
        of_actions, of_obs, of_time = (dense(x, w) for x, w in zip((noisy, obs, embedding), parts, strict=True))
        stream = self.blocks(of_actions.add_(of_obs + (of_time + self.first.bias)))
        return dense(F.silu(stream), self.last.weight, self.last.bias)


class Velocity(nn.Module):
    """Predicts the velocity v(s, x, t) of a flow of `steps` Euler steps, by a plain MLP with GELU.

    Time is t · steps, as `Flow` gives it. The shapes are those of `Denoiser`.
    """

    def __init__(
        self, obs_dim: int, action_dim: int, hidden: Sequence[int], steps: int, generator: torch.Generator
    ) -> None:
        super().__init__()
        sizes = [obs_dim + action_dim + 1, *hidden, action_dim]
        self.net, self.steps = glorot(mlp(sizes, generator, activation="gelu"), generator), steps

    def forward(self, obs: Tensor, noisy: Tensor, time: Tensor) -> Tensor:
        shape = noisy.shape[:-1]
        t = (time / self.steps).expand(shape).unsqueeze(-1)
        velocity: Tensor = self.net(torch.cat([obs.expand(*shape, -1), noisy, t], dim=-1).flatten(0, -2))
        return velocity.view(noisy.shape)


# Maps noisy actions and time to noise or velocity: a `Denoiser` or `Velocity` with its observations bound.
Network = Callable[[Tensor, Tensor], Tensor]


def normal_like(x: Tensor, generator: torch.Generator) -> Tensor:
    """Return standard normal noise of the shape of `x`."""
    return torch.randn(x.shape, generator=generator, device=x.device)


@dataclass(frozen=True)
class Diffusion:
    """Denoising diffusion in T steps, with the variance-preserving schedule of IDQL.

    `betas` is the noise that each step adds, `alpha_bars` = Π (1 - β) the share of the action that is left: [T] each.
    Source: Xiao et al. 2022 (arXiv 2112.07804), who discretise the schedule of Song et al. 2021 (arXiv 2011.13456),
    with a noise rate from 0.1 to 10.
    """

    betas: Tensor
    alpha_bars: Tensor

    @classmethod
    def variance_preserving(cls, steps: int, device: torch.device) -> Self:
        """Return the process with T = `steps`, its tensors on `device`."""
        t = torch.arange(1, steps + 1, dtype=torch.float64)
        betas = 1.0 - torch.exp(-0.1 / steps - 0.5 * (10.0 - 0.1) * (2.0 * t - 1.0) / steps**2)
        return cls(betas.float().to(device), (1.0 - betas).cumprod(0).float().to(device))

    def sample(self, network: Network, x: Tensor, generator: torch.Generator) -> Tensor:
        """Turn noise `x` into actions in [-1, 1] by the reverse process, clipped after each step."""
        for k in reversed(range(len(self.betas))):
            noise = network(x, x.new_full((), float(k)))
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


class DDIM(Diffusion):
    """The same diffusion with another sampler, which makes actions a function of the first noise, as a flow does.

    Source: Song, Meng and Ermon 2021 (arXiv 2010.02502), equation 12 with η = 0. Networks are trained as before. Each
    step clips its estimate of the actions, and not x, which may be any noise.
    """

    def sample(self, network: Network, x: Tensor, generator: torch.Generator) -> Tensor:
        """Turn noise `x` into actions in [-1, 1] without further noise. `generator` is not used."""
        for k in reversed(range(len(self.betas))):
            noise = network(x, x.new_full((), float(k)))
            alpha_bar = self.alpha_bars[k]
            actions = ((x - (1.0 - alpha_bar).sqrt() * noise) / alpha_bar.sqrt()).clamp(-1.0, 1.0)
            if k > 0:
                noise = (x - alpha_bar.sqrt() * actions) / (1.0 - alpha_bar).sqrt()  # that of the clipped estimate
                x = self.alpha_bars[k - 1].sqrt() * actions + (1.0 - self.alpha_bars[k - 1]).sqrt() * noise
        return actions


@dataclass(frozen=True)
class Flow:
    """Flow matching from noise at t = 0 to actions at t = 1, in `steps` Euler steps. The network gets t · steps."""

    steps: int

    def sample(self, network: Network, x: Tensor, generator: torch.Generator) -> Tensor:
        """Turn noise `x` into actions in [-1, 1] by Euler steps along dx/dt = v(s, x, t)."""
        for k in range(self.steps):
            x = x + network(x, x.new_full((), float(k))) / self.steps
        return x.clamp(-1.0, 1.0)

    def errors(self, network: Network, actions: Tensor, noise: Tensor, generator: torch.Generator) -> Tensor:
        """Return v(s, (1 - t) ε + t a, t) - (a - ε) for actions and noise [batch, action_dim], at random t."""
        t = torch.rand(len(actions), generator=generator, device=actions.device).to(actions.dtype)
        return network(torch.lerp(noise, actions, t.unsqueeze(-1)), t * self.steps) - (actions - noise)
