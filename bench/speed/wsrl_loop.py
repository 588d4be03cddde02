"""A straightforward WSRL online phase: a loop over ten separate critics with PyTorch's layers and optimisers.

`python bench/speed/wsrl_loop.py <environment id>` runs until killed. Its steps are counted in the environment. The
update is that of `algos/wsrl.py` with its defaults, and so is the replay buffer. Nothing is evaluated, logged or saved.
"""

import copy
import itertools
import random

import torch
from torch import Tensor, nn

from bench.speed.online_loop import run
from common.replay_buffer import Batch

HIDDEN, CRITICS, DRAWN, UTD, BATCH, GAMMA, TAU = 256, 10, 2, 4, 256, 0.99, 0.005


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    hidden = [[nn.Linear(i, HIDDEN), nn.LayerNorm(HIDDEN), nn.ReLU()] for i in (inputs, HIDDEN)]
    return nn.Sequential(*itertools.chain(*hidden), nn.Linear(HIDDEN, outputs))


class Loop:
    def __init__(self, obs_dim: int, action_dim: int) -> None:
        self.actor, self.action_dim = mlp(obs_dim, 2 * action_dim), action_dim
        self.critics = [mlp(obs_dim + action_dim, 1) for _ in range(CRITICS)]
        self.targets = copy.deepcopy(self.critics)
        self.log_alpha = torch.zeros((), requires_grad=True)
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), 1e-4)
        weights = itertools.chain(*(critic.parameters() for critic in self.critics))
        self.critic_optimizer = torch.optim.Adam(weights, 3e-4)
        self.alpha_optimizer = torch.optim.Adam([self.log_alpha], 1e-4)

    def policy(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Return sampled actions [..., action_dim] and their log-probabilities [...]."""
        mean, log_std = self.actor(obs).chunk(2, dim=-1)
        normal = torch.distributions.Normal(mean, log_std.clamp(-11.5, 2.3).exp())
        u = normal.rsample()
        actions = torch.tanh(u)
        return actions, (normal.log_prob(u) - torch.log(1 - actions.square() + 1e-6)).sum(-1)

    def act(self, obs: Tensor) -> Tensor:
        return self.policy(obs)[0]

    def update(self, batch: Batch) -> None:
        for part in batch.slices(BATCH):
            with torch.no_grad():
                next_inputs = torch.cat([part.next_obs, self.policy(part.next_obs)[0]], -1)
                drawn = random.choices(self.targets, k=DRAWN)
                next_value = torch.stack([target(next_inputs).squeeze(-1) for target in drawn]).amin(0)
                y = part.rewards + GAMMA * (1 - part.terminations) * next_value
            inputs = torch.cat([part.obs, part.actions], -1)
            losses = [(critic(inputs).squeeze(-1) - y).square().mean() for critic in self.critics]
            self.critic_optimizer.zero_grad()
            torch.stack(losses).mean().backward()
            self.critic_optimizer.step()
            with torch.no_grad():
                for target, critic in zip(self.targets, self.critics, strict=True):
                    for slow, fast in zip(target.parameters(), critic.parameters(), strict=True):
                        slow.lerp_(fast, TAU)
        actions, log_prob = self.policy(batch.obs)
        inputs = torch.cat([batch.obs, actions], -1)
        for critic in self.critics:
            critic.requires_grad_(False)  # the gradient passes through; that of their weights would be wasted
        value = torch.stack([critic(inputs).squeeze(-1) for critic in self.critics]).amin(0)
        self.actor_optimizer.zero_grad()
        (self.log_alpha.exp().detach() * log_prob - value).mean().backward()
        self.actor_optimizer.step()
        for critic in self.critics:
            critic.requires_grad_(True)
        self.alpha_optimizer.zero_grad()
        (-self.log_alpha.exp() * (log_prob.detach().mean() - self.action_dim)).backward()
        self.alpha_optimizer.step()


if __name__ == "__main__":
    run(Loop, UTD * BATCH)
