"""A straightforward EXPO online phase: separate critics, PyTorch's layers and optimisers, a loop over diffusion steps.

`python bench/speed/expo_loop.py <environment id>` runs until killed. Its steps are counted in the environment. The
update is that of `algos/expo.py` at `--size small` with its locomotion preset, and so is the replay buffer. Nothing is
evaluated, logged or saved, and no learning rate decays.
"""

import copy
import itertools
import math
import random

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Normal

from bench.speed.online_loop import run
from common.layers import EPSILON
from common.replay_buffer import Batch

HIDDEN, WIDTH, BLOCKS, CRITICS, DRAWN, STEPS, SAMPLES = 128, 64, 2, 10, 2, 10, 4
UTD, BATCH, GAMMA, TAU, BASE_TAU, LR, SCALE = 4, 256, 0.99, 0.005, 0.001, 3e-4, 0.05


def mlp(inputs: int, outputs: int, norm: bool = False) -> nn.Sequential:
    hidden = [
        [nn.Linear(i, HIDDEN), *([nn.LayerNorm(HIDDEN, EPSILON)] if norm else []), nn.ReLU()] for i in (inputs, HIDDEN)
    ]
    return nn.Sequential(*itertools.chain(*hidden), nn.Linear(HIDDEN, outputs))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, EPSILON)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, stream: Tensor) -> Tensor:
        change: Tensor = self.down(F.silu(self.up(self.norm(stream))))
        return stream + change


class Denoiser(nn.Module):
    """The network of the diffusion's noise, with the names of `common.diffusion.Denoiser`."""

    def __init__(self, obs_dim: int, action_dim: int) -> None:
        super().__init__()
        self.frequencies = nn.Parameter(0.2 * torch.randn(WIDTH // 4))
        self.of_time = nn.Sequential(nn.Linear(WIDTH // 2, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.first, self.last = nn.Linear(action_dim + obs_dim + WIDTH, WIDTH), nn.Linear(WIDTH, action_dim)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))

    def forward(self, obs: Tensor, noisy: Tensor, time: Tensor) -> Tensor:
        """Return the noise [batch, action_dim] in the actions `noisy` of each obs at each time [batch]."""
        angles = 2 * math.pi * time[:, None] * self.frequencies
        embedding = self.of_time(torch.cat([angles.cos(), angles.sin()], -1))
        stream = self.first(torch.cat([noisy, obs, embedding], -1))
        noise: Tensor = self.last(F.silu(self.blocks(stream)))
        return noise


class Loop:
    def __init__(self, obs_dim: int, action_dim: int) -> None:
        self.base, self.edit = Denoiser(obs_dim, action_dim), mlp(obs_dim + action_dim, 2 * action_dim)
        self.base_average = copy.deepcopy(self.base)
        self.critics = nn.ModuleList(mlp(obs_dim + action_dim, 1, norm=True) for _ in range(CRITICS))
        self.targets = copy.deepcopy(self.critics)
        self.log_alpha, self.action_dim = torch.zeros((), requires_grad=True), action_dim
        t = torch.arange(1, STEPS + 1) / STEPS
        self.betas = 1 - torch.exp(-0.1 / STEPS - 4.95 * (2 * t - 1 / STEPS) / STEPS)
        self.alpha_bars = (1 - self.betas).cumprod(0)
        self.base_optimizer = torch.optim.AdamW(self.base.parameters(), LR, weight_decay=1e-4)
        self.edit_optimizer = torch.optim.Adam(self.edit.parameters(), LR)
        self.critic_optimizer = torch.optim.Adam(self.critics.parameters(), LR)
        self.alpha_optimizer = torch.optim.Adam([self.log_alpha], LR)

    @torch.no_grad()
    def sample(self, base: Denoiser, obs: Tensor) -> Tensor:
        """Return an action of the base policy for each obs: [batch, action_dim]."""
        x = torch.randn(len(obs), self.action_dim)
        for k in reversed(range(STEPS)):
            beta, noise = self.betas[k], base(obs, x, torch.full((len(obs),), float(k)))
            x = (x - beta / torch.sqrt(1 - self.alpha_bars[k]) * noise) / torch.sqrt(1 - beta)
            if k > 0:
                x = x + torch.sqrt(beta) * torch.randn_like(x)
            x = x.clamp(-1, 1)
        return x

    def edits(self, obs: Tensor, actions: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return scaled edits [batch, action_dim] and their log-probabilities [batch]."""
        mean, log_std = self.edit(torch.cat([obs, actions], -1)).chunk(2, dim=-1)
        normal = Normal(mean, log_std.clamp(-20, 2).exp())
        u = normal.mean + normal.stddev * noise
        log_prob = normal.log_prob(u) - 2 * (math.log(2) - u - F.softplus(-2 * u)) - math.log(SCALE)
        return SCALE * torch.tanh(u), log_prob.sum(-1)

    @torch.no_grad()
    def candidates(self, base: Denoiser, obs: Tensor) -> Tensor:
        """Return base samples of each obs, then their edits: [2 × SAMPLES, batch, action_dim]."""
        many = obs.repeat(SAMPLES, 1)
        actions = self.sample(base, many)
        edited = actions + self.edits(many, actions, torch.randn_like(actions))[0]
        return torch.cat([actions, edited]).view(-1, len(obs), self.action_dim)

    @torch.no_grad()
    def choose(self, obs: Tensor, candidates: Tensor, targets: list[nn.Module]) -> Tensor:
        """Return the candidate of the highest value for each obs: [batch, action_dim]."""
        inputs = torch.cat([obs.expand(len(candidates), -1, -1), candidates], -1)
        values = torch.stack([target(inputs).squeeze(-1) for target in targets]).amin(0)
        return candidates[values.argmax(0), torch.arange(len(obs))]

    def drawn(self) -> list[nn.Module]:
        return random.sample([*self.targets], DRAWN)

    def act(self, obs: Tensor) -> Tensor:
        return self.choose(obs, self.candidates(self.base_average, obs), self.drawn())

    def critic_loss(self, batch: Batch, next_actions: Tensor, targets: list[nn.Module]) -> Tensor:
        with torch.no_grad():
            next_inputs = torch.cat([batch.next_obs, next_actions], -1)
            next_value = torch.stack([target(next_inputs).squeeze(-1) for target in targets]).amin(0)
            y = batch.rewards + GAMMA * (1 - batch.terminations) * next_value
        inputs = torch.cat([batch.obs, batch.actions], -1)
        return torch.stack([(critic(inputs).squeeze(-1) - y).square().mean() for critic in self.critics]).mean()

    def base_loss(self, batch: Batch, noise: Tensor, t: Tensor) -> Tensor:
        alpha_bar = self.alpha_bars[t, None]
        noisy = alpha_bar.sqrt() * batch.actions + (1 - alpha_bar).sqrt() * noise
        errors: Tensor = self.base(batch.obs, noisy, t.float()) - noise
        return errors.square().sum(-1).mean()

    def edit_loss(self, batch: Batch, noise: Tensor) -> tuple[Tensor, Tensor]:
        edits, log_prob = self.edits(batch.obs, batch.actions, noise)
        inputs = torch.cat([batch.obs, batch.actions + edits], -1)
        self.critics.requires_grad_(False)  # the gradient passes through; that of their weights would be wasted
        value = torch.stack([critic(inputs).squeeze(-1) for critic in self.critics]).mean(0)
        self.critics.requires_grad_(True)
        return (self.log_alpha.exp().detach() * log_prob - value).mean(), log_prob.detach()

    def update(self, batch: Batch) -> None:
        for part in batch.slices(BATCH):
            next_actions = self.choose(part.next_obs, self.candidates(self.base, part.next_obs), self.drawn())
            step(self.critic_optimizer, self.critic_loss(part, next_actions, self.drawn()))
            follow(self.targets, self.critics, TAU)
        t = torch.randint(STEPS, (BATCH,))
        step(self.base_optimizer, self.base_loss(part, torch.randn_like(part.actions), t))
        follow(self.base_average, self.base, BASE_TAU)
        loss, log_prob = self.edit_loss(part, torch.randn_like(part.actions))
        step(self.edit_optimizer, loss)
        step(self.alpha_optimizer, -self.log_alpha.exp() * (log_prob.mean() - 0.5 * self.action_dim))


def step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


@torch.no_grad()
def follow(slow: nn.Module, fast: nn.Module, tau: float) -> None:
    for late, parameter in zip(slow.parameters(), fast.parameters(), strict=True):
        late.lerp_(parameter, tau)


if __name__ == "__main__":
    run(Loop, UTD * BATCH)
