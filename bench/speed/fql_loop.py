"""A straightforward FQL on a dataset: separate critics, PyTorch's layers and optimisers, a loop over Euler steps.

`python bench/speed/fql_loop.py 512 512 512 512 <file in D4RL's layout>` runs until killed and counts its updates. The
update is that of `algos/fql.py` with these widths, and so is the replay buffer. Nothing is evaluated, logged or saved.
"""

import copy
import itertools
import sys

import h5py
import torch
from torch import Tensor, nn

from bench.speed.step_counter import claim_slot
from common.replay_buffer import Batch, ReplayBuffer

BATCH, GAMMA, TAU, ALPHA, STEPS, LR = 256, 0.99, 0.005, 1.0, 10, 3e-4


def mlp(inputs: int, hidden: list[int], outputs: int, norm: bool = False) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise([inputs, *hidden]):
        layers += [nn.Linear(a, b), nn.GELU("tanh"), *([nn.LayerNorm(b, 1e-6)] if norm else [])]
    return nn.Sequential(*layers, nn.Linear(hidden[-1], outputs))


class Loop:
    def __init__(self, obs_dim: int, action_dim: int, hidden: list[int]) -> None:
        self.flow = mlp(obs_dim + action_dim + 1, hidden, action_dim)
        self.actor = mlp(obs_dim + action_dim, hidden, action_dim)
        self.critics = nn.ModuleList(mlp(obs_dim + action_dim, hidden, 1, norm=True) for _ in range(2))
        self.targets = copy.deepcopy(self.critics)
        networks = (self.actor, self.flow, self.critics)
        self.optimizers = [torch.optim.Adam(network.parameters(), LR) for network in networks]

    def critic_loss(self, batch: Batch, noise: Tensor) -> Tensor:
        with torch.no_grad():
            next_actions = self.actor(torch.cat([batch.next_obs, noise], -1)).clamp(-1, 1)
            next_inputs = torch.cat([batch.next_obs, next_actions], -1)
            next_value = torch.stack([target(next_inputs).squeeze(-1) for target in self.targets]).mean(0)
            y = batch.rewards + GAMMA * (1 - batch.terminations) * next_value
        inputs = torch.cat([batch.obs, batch.actions], -1)
        return torch.stack([(critic(inputs).squeeze(-1) - y).square().mean() for critic in self.critics]).mean()

    def flow_loss(self, batch: Batch, noise: Tensor, t: Tensor) -> Tensor:
        x = (1 - t) * noise + t * batch.actions
        velocity: Tensor = self.flow(torch.cat([batch.obs, x, t], -1))
        return (velocity - (batch.actions - noise)).square().mean()

    def actor_loss(self, batch: Batch, noise: Tensor) -> Tensor:
        with torch.no_grad():
            x = noise
            for k in range(STEPS):
                t = torch.full((len(x), 1), k / STEPS)
                x = x + self.flow(torch.cat([batch.obs, x, t], -1)) / STEPS
        actions = self.actor(torch.cat([batch.obs, noise], -1))
        inputs = torch.cat([batch.obs, actions.clamp(-1, 1)], -1)
        self.critics.requires_grad_(False)  # the gradient passes through; that of their weights would be wasted
        value = torch.stack([critic(inputs).squeeze(-1) for critic in self.critics]).mean(0)
        self.critics.requires_grad_(True)
        distance = (actions - x.clamp(-1, 1)).square().mean()
        loss: Tensor = ALPHA * distance - value.mean() / value.detach().abs().mean()
        return loss

    def update(self, batch: Batch) -> None:
        normal, t = torch.randn(3, *batch.actions.shape), torch.rand(len(batch.actions), 1)
        losses = self.actor_loss(batch, normal[2]), self.flow_loss(batch, normal[1], t)
        for optimizer, loss in zip(self.optimizers, (*losses, self.critic_loss(batch, normal[0])), strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(self.targets.parameters(), self.critics.parameters(), strict=True):
                slow.lerp_(fast, TAU)


def main() -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    with h5py.File(sys.argv[-1]) as file:
        names = ("observations", "actions", "rewards", "next_observations", "terminals")
        obs, actions, rewards, next_obs, terminations = (file[name][:] for name in names)
    buffer = ReplayBuffer(len(obs), obs.shape[1], actions.shape[1])
    buffer.add(obs, actions, rewards, next_obs, terminations)
    loop = Loop(obs.shape[1], actions.shape[1], [*map(int, sys.argv[1:-1])])
    count = claim_slot()
    while True:
        loop.update(buffer.sample(BATCH, generator))
        count()


if __name__ == "__main__":
    main()
