"""Twin Delayed Deep Deterministic policy gradient.

Fujimoto, van Hoof and Meger 2018, "Addressing Function Approximation Error in Actor-Critic Methods", arXiv 1802.09477.
Algorithm and equation numbers below are that paper's.

    python algos/td3.py --env HalfCheetah-v4
    python algos/td3.py --env Hopper-v4 --seed 2 --total-steps 300000
    python algos/td3.py --env Walker2d-v4 --num-envs 4
    python algos/td3.py --env Hopper-v4 --critic hl-gauss

Choices where public versions differ:
- Networks of 256 × 256 and a batch of 256 are those of the authors' current code (paper: 400 × 300 and 100).
- The learning rate is the paper's 1e-3, which made the published curves (current code: 3e-4).
- The first 5,000 actions are uniform random. In the paper, these are 1,000 or 10,000, in the current code 25,000.
- The actor and every target network are updated at each second update, as in the paper's algorithm 1.
- Actions are in [-1, 1] and the environment wrapper rescales them, so noise is in units of the action bound.
"""

import common.start

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from common.acting import acting
from common.arguments import Fraction, NonNegative, NonNegativeInt, OffPolicyArgs, OnlineArgs, OptionalNumber
from common.command_line import command_line
from common.hl_gauss import FIT, Histogram, HistogramCritic, made_histogram
from common.networks import Critic, frozen, mlp
from common.normalize import ReturnScaler, RunningNormalizer
from common.optim import Adam, SoftUpdate
from common.replay_buffer import Batch, ReplayBuffer
from common.run import Result, Run, returns_result
from common.seeding import generator
from common.updater import Metrics
from envs.rollout import Rollout


@dataclass
class Args(OnlineArgs, OffPolicyArgs):
    # Networks
    hidden: tuple[int, ...] = (256, 256)
    """Widths of the hidden layers, for actor and critics."""
    critics: int = 2
    """Number of critics. The target uses the smallest value, the actor the first critic."""
    critic: Literal["mse", "hl-gauss", "c51"] = "mse"
    """Loss of the critics. mse: squared error of values. Others: cross-entropy of histograms of the return."""
    bins: int = 101
    """With --critic hl-gauss or c51: bins of a histogram."""
    q_min: OptionalNumber = None
    """Smallest return of a histogram. Without it and --q-max, rewards are scaled until returns fit into ±5."""
    q_max: OptionalNumber = None
    """Largest return of a histogram."""

    normalize_obs: bool = False
    """Normalise observations by their running mean and standard deviation."""

    # Learning
    gamma: Fraction = 0.99
    """Discount factor."""
    tau: Fraction = 0.005
    """Soft-update rate of the target networks, at each update of the actor."""
    actor_lr: float = 1e-3
    """Learning rate of the actor."""
    critic_lr: float = 1e-3
    """Learning rate of the critics."""
    policy_delay: int = 2
    """Critic updates for each update of the actor and the target networks."""
    exploration_noise: NonNegative = 0.1
    """Standard deviation of the exploration noise."""
    target_noise: NonNegative = 0.2
    """Standard deviation of the noise on the target's actions (target policy smoothing)."""
    target_noise_clip: NonNegative = 0.5
    """Largest absolute value of the noise on the target's actions."""
    batch_size: int = 256
    """Transitions in each update."""
    utd: int = 1
    """Updates for each environment step (update-to-data ratio)."""

    # Data
    learning_starts: NonNegativeInt = 5_000
    """Environment steps with uniform random actions before the first update."""
    buffer_size: int = 1_000_000
    """Capacity of the replay buffer, in transitions."""


class Actor(nn.Module):
    """μ(s): map obs [batch, obs_dim] to actions [batch, action_dim]."""

    def __init__(self, obs_dim: int, action_dim: int, hidden: tuple[int, ...], generator: torch.Generator) -> None:
        super().__init__()
        self.net = mlp([obs_dim, *hidden, action_dim], generator)

    def forward(self, obs: Tensor) -> Tensor:
        return torch.tanh(self.net(obs))


class TD3:
    def __init__(self, args: Args, obs_dim: int, action_dim: int, device: torch.device) -> None:
        initializer = generator(args.seed, "networks")
        self.generator = generator(args.seed, "agent", device)
        self.actor = Actor(obs_dim, action_dim, args.hidden, initializer).to(device)
        self.target_actor = Actor(obs_dim, action_dim, args.hidden, initializer).to(device)
        self.target_actor.load_state_dict(self.actor.state_dict())
        self.update_target_actor = SoftUpdate(self.target_actor, self.actor, args.tau)
        histogram = made_histogram(args.critic, args.bins, args.q_min, args.q_max)
        self.histogram = histogram and histogram.to(device)
        sizes = [obs_dim + action_dim, *args.hidden, args.bins if histogram else 1]
        kind = HistogramCritic if histogram else Critic
        self.critic, self.target_critic = (kind(mlp(sizes, initializer, args.critics)).to(device) for _ in range(2))
        self.target_critic.load_state_dict(self.critic.state_dict())
        self.update_target_critic = SoftUpdate(self.target_critic, self.critic, args.tau)
        self.actor_optimizer = Adam(self.actor.parameters(), args.actor_lr)
        self.critic_optimizer = Adam(self.critic.parameters(), args.critic_lr)
        self.obs_normalizer = RunningNormalizer(obs_dim).to(device) if args.normalize_obs else nn.Identity()
        is_scaled = histogram and args.q_min is None
        self.reward_scaler = ReturnScaler(args.num_envs, args.gamma, FIT).to(device) if is_scaled else nn.Identity()
        self.gamma, self.device, self.action_dim = args.gamma, device, action_dim
        self.exploration_noise = args.exploration_noise
        self.target_noise, self.target_noise_clip = args.target_noise, args.target_noise_clip

    def noise(self, actions: Tensor, scale: float) -> Tensor:
        """Return Gaussian noise of the same shape as the actions, with standard deviation `scale`."""
        return scale * torch.randn(actions.shape, generator=self.generator, device=self.device)

    def observe(self, obs: NDArray[Any], rewards: NDArray[Any], dones: NDArray[np.bool_]) -> None:
        """Add a step of each environment to the running statistics."""
        if isinstance(self.obs_normalizer, RunningNormalizer):
            self.obs_normalizer.update(torch.from_numpy(obs).to(self.device))
        if isinstance(self.reward_scaler, ReturnScaler):
            self.reward_scaler.update(*(torch.from_numpy(part).to(self.device) for part in (rewards, dones)))

    @acting
    def act(self, obs: Tensor, deterministic: bool = False) -> Tensor:
        """Return the policy's actions [n, action_dim] for obs [n, obs_dim], with exploration noise or without."""
        actions: Tensor = self.actor(self.obs_normalizer(obs))
        if deterministic:
            return actions
        return (actions + self.noise(actions, self.exploration_noise)).clamp(-1.0, 1.0)

    def smoothed_actions(self, obs: Tensor) -> Tensor:
        """Return the target policy's actions with clipped noise (eq. 15)."""
        actions = self.target_actor(obs)
        noise = self.noise(actions, self.target_noise).clamp(-self.target_noise_clip, self.target_noise_clip)
        return (actions + noise).clamp(-1.0, 1.0)

    def critic_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Return the squared Bellman error, summed over the critics: clipped double Q (eq. 10), smoothing (eq. 15)."""
        if self.histogram:
            return self.histogram_loss(batch, self.histogram)
        with torch.no_grad():
            next_actions = self.smoothed_actions(batch.next_obs)
            next_value = self.target_critic(batch.next_obs, next_actions).amin(0)
            # Termination masks the bootstrap. Truncation does not, so it is not even in the batch.
            target = batch.rewards + self.gamma * (1.0 - batch.terminations) * next_value
        values = self.critic(batch.obs, batch.actions)
        loss = (values - target).square().mean(1).sum()
        return loss, {"losses/critic": loss.detach(), "losses/q": values.detach()}

    def histogram_loss(self, batch: Batch, histogram: Histogram) -> tuple[Tensor, Metrics]:
        """Return the cross-entropy between the target's and the critics' histograms, summed over the critics."""
        with torch.no_grad():
            next_logits = self.target_critic(batch.next_obs, self.smoothed_actions(batch.next_obs))
            rewards, discounts = self.reward_scaler(batch.rewards), self.gamma * (1.0 - batch.terminations)
            labels, metrics = histogram.target(next_logits, rewards, discounts, torch.zeros_like(rewards))
        logits = self.critic(batch.obs, batch.actions)
        loss = histogram.cross_entropy(logits, labels).mean(1).sum()
        return loss, metrics | {"losses/critic": loss.detach(), "losses/q": histogram.mean(logits.detach())}

    def actor_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Return minus the first critic's value of the policy's actions: deterministic policy gradient, algorithm 1."""
        actions = self.actor(batch.obs)
        with frozen(self.critic):  # the gradient passes through the critic and stops there
            outputs = self.critic(batch.obs, actions, 0)
        value = self.histogram.mean(outputs) if self.histogram else outputs
        loss = -value.mean()
        return loss, {"losses/actor": loss.detach()}

    def update(self, batch: Batch, with_actor: bool = True) -> Metrics:
        """Take a gradient step with the critics, and one with the actor if `with_actor` (algorithm 1)."""
        batch = batch.map_obs(self.obs_normalizer)
        critic_loss, metrics = self.critic_loss(batch)
        self.critic_optimizer.minimize(critic_loss)
        if with_actor:
            actor_loss, actor_metrics = self.actor_loss(batch)
            self.actor_optimizer.minimize(actor_loss)
            self.update_target_actor()
            self.update_target_critic()
            metrics |= actor_metrics
        return metrics


@returns_result
def train(args: Args) -> Result:
    run = Run("td3", args)
    rollout = Rollout(args.env, args)
    obs_dim, action_dim = rollout.obs_dim, rollout.action_dim
    agent = TD3(args, obs_dim, action_dim, run.device)
    buffer = ReplayBuffer(min(args.buffer_size, args.total_steps + args.num_envs), obs_dim, action_dim, run.device)
    policy = run.policy(agent)
    update = run.updater(
        lambda with_actor: agent.update(buffer.sample(args.batch_size, agent.generator), with_actor), agent.generator
    )
    run.learns_after(args.learning_starts, "--learning-starts")
    run.resume(agent=agent, buffer=buffer, rollout=rollout, update=update)

    for step in run.steps():
        # Act
        random = rollout.steps < args.learning_starts
        actions = rollout.random_actions(agent.generator) if random else policy(rollout.obs)
        obs, actions, rewards, next_obs, terminations, truncations = rollout.step(actions, meanwhile=update.flush)
        buffer.add(obs, actions, rewards, next_obs, terminations)
        agent.observe(obs, rewards, terminations | truncations)

        # Learn
        for _ in range(args.utd * args.num_envs if step > args.learning_starts else 0):
            update(with_actor=(update.count + 1) % args.policy_delay == 0)

        # Report
        run.report(update.metrics)
    return run.finish()


if __name__ == "__main__":
    command_line(train, Args)
