"""Implicit Q-Learning, offline and then online.

Kostrikov, Nair and Levine 2021, "Offline Reinforcement Learning with Implicit Q-Learning", arXiv 2110.06169. Equation
numbers below are that paper's.

    python algos/iql.py --dataset hopper-medium-v2
    python algos/iql.py --dataset antmaze-medium-play-v2 --online-steps 1000000
    python algos/iql.py --dataset data/mine.hdf5 --env Hopper-v4 --offline-steps 100000

Public versions differ. This one follows the authors' code:
- The policy is a Gaussian with a tanh mean and the same σ in every state. Samples are clipped, not squashed.
- On each batch, V is updated first, then the policy and Q with the new V, then the target critics.
- If no online steps follow, the policy's learning rate decays to 0 along a cosine.
- Online transitions are appended to the dataset (`--retain append`).
- Observations are not normalised (`--normalize-obs` does that).

Two things differ. Layers are initialised as PyTorch does (docs/iql.md compares that with the authors' `--orthogonal`).
Online rewards are scaled like the dataset's. The authors' script for AntMaze and Adroit does not scale them.
"""

import common.start

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from common.acting import acting
from common.arguments import BY_DOMAIN, AnyNumber, Fraction, OpenFraction, Probability
from common.command_line import command_line
from common.networks import HALF_LOG_2PI, MLP, Critic, mlp, orthogonal
from common.normalize import FixedNormalizer
from common.optim import Adam, SoftUpdate
from common.replay_buffer import Batch
from common.run import Result, Run, returns_result
from common.seeding import generator
from common.updater import Metrics
from offline.offline_to_online import OfflineArgs, OfflineToOnline, with_presets
from offline.rewards import RewardTransform


@dataclass
class Args(OfflineArgs):
    # Networks
    hidden: tuple[int, ...] = (256, 256)
    """Widths of the hidden layers, for actor, critics and value network."""
    critics: int = 2
    """Number of critics. V and the policy use the smallest target critic."""
    orthogonal: bool = False
    """Initialise every layer orthogonally with gain √2 and zero biases, as the authors do, not as PyTorch does."""
    dropout: Probability = BY_DOMAIN
    """Dropout rate of the actor's hidden layers."""

    # Learning
    expectile: OpenFraction = BY_DOMAIN
    """τ of the expectile regression (eq. 5)."""
    temperature: float = BY_DOMAIN
    """β of the policy's weights (eq. 7)."""
    max_weight: float = 100.0
    """Largest weight of the policy's regression."""
    gamma: Fraction = 0.99
    """Discount factor."""
    tau: Fraction = 0.005
    """Soft-update rate of the target critics, at each update."""
    actor_lr: float = 3e-4
    """Learning rate of the actor."""
    critic_lr: float = 3e-4
    """Learning rate of the critics."""
    value_lr: float = 3e-4
    """Learning rate of the value network."""

    # Rewards
    normalize_returns: bool = BY_DOMAIN
    """Multiply rewards by 1000 / (best - worst return of the dataset)."""
    reward_shift: AnyNumber = BY_DOMAIN
    """Number added to each reward."""


# Appendix B, and the authors' configurations.
LOCOMOTION = {
    "expectile": 0.7, "temperature": 3.0, "dropout": 0.0, "normalize_returns": True, "reward_shift": 0.0,
}  # fmt: skip
ANTMAZE = LOCOMOTION | {"expectile": 0.9, "temperature": 10.0, "normalize_returns": False, "reward_shift": -1.0}
ADROIT = LOCOMOTION | {"temperature": 0.5, "dropout": 0.1, "normalize_returns": False}
PRESETS: dict[str, dict[str, Any]] = {
    "locomotion": LOCOMOTION,
    "antmaze": ANTMAZE,
    "ogbench": ANTMAZE | {"reward_shift": 0.0},  # of FQL's authors, whose networks have four hidden layers of 512
    "adroit": ADROIT,
    "kitchen": ADROIT,
}


def network(sizes: list[int], args: Args, generator: torch.Generator, ensemble: int | None = None) -> MLP:
    """Return an MLP, or a stack of `ensemble` of them."""
    net = mlp(sizes, generator, ensemble)
    return orthogonal(net, generator) if args.orthogonal else net


class Actor(nn.Module):
    """π(a|s) = N(μ(s), σ²), σ the same in every state: map obs [batch, obs_dim] to μ [batch, action_dim] in [-1, 1]."""

    def __init__(self, obs_dim: int, action_dim: int, args: Args, generator: torch.Generator) -> None:
        super().__init__()
        self.net = network([obs_dim, *args.hidden, action_dim], args, generator)
        self.log_std = nn.Parameter(torch.zeros(action_dim))
        self.dropout = args.dropout

    def forward(self, obs: Tensor) -> Tensor:
        return torch.tanh(self.net(obs))

    def forward_with_dropout(self, obs: Tensor, generator: torch.Generator) -> Tensor:
        """Return μ with dropout in the hidden layers."""
        return torch.tanh(self.net.forward_with_dropout(obs, self.dropout, generator))

    @property
    def clipped_log_std(self) -> Tensor:
        """log σ, clipped to [-5, 2]. Without a bound, a large β would lower it without limit."""
        return self.log_std.clamp(-5.0, 2.0)

    def log_prob(self, mean: Tensor, actions: Tensor) -> Tensor:
        """Return log N(a; μ, σ²) of the actions: [batch]."""
        log_std = self.clipped_log_std
        noise = (actions - mean) * torch.exp(-log_std)
        return (-0.5 * noise.square() - log_std - HALF_LOG_2PI).sum(-1)


class Value(nn.Module):
    """V(s): map obs [batch, obs_dim] to [batch]."""

    def __init__(self, obs_dim: int, args: Args, generator: torch.Generator) -> None:
        super().__init__()
        self.net = network([obs_dim, *args.hidden, 1], args, generator)

    def forward(self, obs: Tensor) -> Tensor:
        return self.net(obs).squeeze(-1)


class IQL:
    def __init__(self, args: Args, obs_dim: int, action_dim: int, device: torch.device) -> None:
        initializer = generator(args.seed, "networks")
        self.generator = generator(args.seed, "agent", device)
        self.actor = Actor(obs_dim, action_dim, args, initializer).to(device)
        sizes = [obs_dim + action_dim, *args.hidden, 1]
        self.critic = Critic(network(sizes, args, initializer, args.critics)).to(device)
        self.target_critic = Critic(network(sizes, args, initializer, args.critics)).to(device)
        self.target_critic.load_state_dict(self.critic.state_dict())
        self.value = Value(obs_dim, args, initializer).to(device)
        self.update_target_critic = SoftUpdate(self.target_critic, self.critic, args.tau)
        self.actor_optimizer = Adam(self.actor.parameters(), args.actor_lr)
        self.critic_optimizer = Adam(self.critic.parameters(), args.critic_lr)
        self.value_optimizer = Adam(self.value.parameters(), args.value_lr)
        self.obs_normalizer = FixedNormalizer(obs_dim).to(device) if args.normalize_obs else nn.Identity()
        self.expectile, self.temperature, self.max_weight = args.expectile, args.temperature, args.max_weight
        self.args, self.device = args, device

    @acting
    def act(self, obs: Tensor, deterministic: bool = False) -> Tensor:
        """Return actions [n, action_dim] for obs [n, obs_dim]: clipped samples, or the mean."""
        actions: Tensor = self.actor(self.obs_normalizer(obs))
        if deterministic:
            return actions
        noise = torch.randn(actions.shape, generator=self.generator, device=self.device)
        return (actions + self.actor.clipped_log_std.exp() * noise).clamp(-1.0, 1.0)

    def value_loss(self, batch: Batch, target_values: Tensor) -> tuple[Tensor, Metrics]:
        """Return the expectile regression of V on Q of the dataset's actions (eq. 5): L₂^τ(u) = |τ - 1(u < 0)| u²."""
        value = self.value(batch.obs)
        u = target_values - value
        loss = (torch.where(u < 0, 1.0 - self.expectile, self.expectile) * u.square()).mean()
        return loss, {"losses/value": loss.detach(), "losses/v": value.detach()}

    def actor_loss(self, batch: Batch, advantages: Tensor) -> tuple[Tensor, Metrics]:
        """Return the advantage-weighted regression (eq. 7). The weight is bounded and has no gradient."""
        weights = (self.temperature * advantages).exp().clamp(max=self.max_weight)
        mean = self.actor.forward_with_dropout(batch.obs, self.generator)
        loss = -(weights * self.actor.log_prob(mean, batch.actions)).mean()
        return loss, {
            "losses/actor": loss.detach(),
            "charts/weight": weights,
            "charts/log_std": self.actor.log_std.detach(),
        }

    def critic_loss(self, batch: Batch, next_values: Tensor) -> tuple[Tensor, Metrics]:
        """Return the Bellman residual with V as the next value (eq. 6). Termination masks V; truncation does not."""
        target = batch.rewards + self.args.gamma * (1.0 - batch.terminations) * next_values
        values = self.critic(batch.obs, batch.actions)
        loss = (values - target).square().mean(1).sum()
        return loss, {"losses/critic": loss.detach(), "losses/q": values.detach()}

    def update(self, batch: Batch) -> Metrics:
        """Take one gradient step with each network (algorithm 1, interleaved as in the authors' code)."""
        batch = batch.map_obs(self.obs_normalizer)
        with torch.no_grad():
            target_values = self.target_critic(batch.obs, batch.actions).amin(0)
        value_loss, value_metrics = self.value_loss(batch, target_values)
        self.value_optimizer.minimize(value_loss)
        with torch.no_grad():  # the new V of both observations, in one forward pass
            values, next_values = self.value(torch.cat([batch.obs, batch.next_obs])).chunk(2)
        actor_loss, actor_metrics = self.actor_loss(batch, target_values - values)
        self.actor_optimizer.minimize(actor_loss)
        critic_loss, critic_metrics = self.critic_loss(batch, next_values)
        self.critic_optimizer.minimize(critic_loss)
        self.update_target_critic()
        return value_metrics | actor_metrics | critic_metrics

    def decay(self, step: int) -> None:
        """Set the actor's learning rate for the update that ends at `step`: a cosine to 0 if no online steps follow."""
        if not self.args.online_steps:
            passed = 1.0 + (step - 1) / self.args.offline_steps
            self.actor_optimizer.lr = self.args.actor_lr * 0.5 * (1.0 + math.cos(math.pi * passed))


@returns_result
def train(args: Args) -> Result:
    args = with_presets(args, PRESETS)
    run = Run("iql", args)
    rewards = RewardTransform(shift=args.reward_shift)
    data = OfflineToOnline(args, run, rewards, normalize_returns=args.normalize_returns)
    rollout = data.rollout()
    agent = IQL(args, rollout.obs_dim, rollout.action_dim, run.device)
    data.dataset.fit(agent.obs_normalizer)
    policy = run.policy(agent)
    update = run.updater(lambda online: agent.update(data.sample(online, agent.generator)), agent.generator)
    data.load_pretrained(agent)
    run.resume(agent=agent, data=data, rollout=rollout, update=update)

    for step in run.steps():
        # Act: after pre-training
        if step > 0:
            data.add(rollout.step(policy(rollout.obs), meanwhile=update.flush))

        # Learn
        agent.decay(step)
        for _ in range(data.updates_due(step, args.utd)):
            update(online=step > 0)

        # Report
        run.report(update.metrics)
    return run.finish()


if __name__ == "__main__":
    command_line(train, Args)
