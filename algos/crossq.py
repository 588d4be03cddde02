"""CrossQ: SAC without target networks, with batch normalisation and wide critics.

Bhatt, Palenicek, Belousov, Argus, Amiranashvili, Brox and Peters 2024, "CrossQ: Batch Normalization in Deep
Reinforcement Learning for Greater Sample Efficiency and Simplicity", arXiv 1902.05605.

    python algos/crossq.py --env HalfCheetah-v4
    python algos/crossq.py --env Hopper-v4 --critic-hidden 256 256

What differs from sac.py is what the paper changes, with the settings of the authors' code:
- There are no target critics. One forward pass gives the values of (s, a) and of (s', a'), so both share the statistics
  of the batch. Gradients pass through these statistics, not through the target.
- Inputs and hidden layers are normalised, by batch renormalisation (Ioffe 2017, arXiv 1702.03275). Its corrections
  begin after 100,000 passes of a network. Until then it is batch normalisation.
- Acting, targets and evaluation use the actor's running statistics. The actor's loss uses the batch's statistics in
  the actor, and running ones in the critics.
- The critics are 2,048 wide. On a CPU this takes long: give --critic-hidden 512 512.
- Adam's β₁ is 0.5 for actor and critics. Actor and temperature move at every third update.

The initialisation is PyTorch's, as in sac.py. The authors' is LeCun normal.
"""

import common.start

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from common.acting import acting
from common.arguments import AnyNumber, Fraction, NonNegative, NonNegativeInt, OffPolicyArgs, OnlineArgs
from common.batch_renorm import NormalizedMLP
from common.command_line import command_line
from common.networks import TanhGaussian, frozen
from common.optim import Adam
from common.replay_buffer import Batch, ReplayBuffer
from common.run import Result, Run, returns_result
from common.seeding import generator
from common.updater import Metrics
from envs.rollout import Rollout


@dataclass
class Args(OnlineArgs, OffPolicyArgs):
    # Networks
    hidden: tuple[int, ...] = (256, 256)
    """Widths of the actor's hidden layers."""
    critic_hidden: tuple[int, ...] = (2048, 2048)
    """Widths of the critics' hidden layers."""
    critics: int = 2
    """Number of critics. Target and actor use the smallest value."""
    renorm_after: NonNegativeInt = 100_000
    """Training passes of a network before batch renormalisation replaces batch normalisation."""

    # Learning
    gamma: Fraction = 0.99
    """Discount factor."""
    actor_lr: float = 1e-3
    """Learning rate of the actor."""
    critic_lr: float = 1e-3
    """Learning rate of the critics."""
    beta1: Fraction = 0.5
    """β₁ of Adam, for actor and critics."""
    alpha_lr: NonNegative = 1e-3
    """Learning rate of the temperature. With 0 it stays constant."""
    alpha: float = 1.0
    """Initial temperature."""
    target_entropy: AnyNumber = -1.0
    """Target entropy H̄ for each dimension of the action."""
    batch_size: int = 256
    """Transitions in each update."""
    utd: int = 1
    """Updates for each environment step (update-to-data ratio)."""
    policy_delay: int = 3
    """Updates of the critics for each update of actor and temperature."""

    # Data
    learning_starts: NonNegativeInt = 5_000
    """Environment steps with uniform random actions before the first update."""
    buffer_size: int = 1_000_000
    """Capacity of the replay buffer, in transitions."""


class Actor(nn.Module):
    """π(a|s): map obs [batch, obs_dim] to a tanh-Gaussian over actions [batch, action_dim]."""

    def __init__(self, obs_dim: int, action_dim: int, args: Args, generator: torch.Generator) -> None:
        super().__init__()
        self.net = NormalizedMLP([obs_dim, *args.hidden, 2 * action_dim], args.renorm_after, generator)

    def forward(self, obs: Tensor, by_batch: bool) -> TanhGaussian:
        mean, log_std = self.net(obs, by_batch).chunk(2, dim=-1)
        return TanhGaussian(mean, log_std.clamp(-20.0, 2.0))


class Critic(nn.Module):
    """Q_i(s, a): map obs [batch, obs_dim] and actions [batch, action_dim] to [critics, batch]."""

    def __init__(self, obs_dim: int, action_dim: int, args: Args, generator: torch.Generator) -> None:
        super().__init__()
        sizes = [obs_dim + action_dim, *args.critic_hidden, 1]
        self.net = NormalizedMLP(sizes, args.renorm_after, generator, args.critics)

    def forward(self, obs: Tensor, actions: Tensor, by_batch: bool = False) -> Tensor:
        values: Tensor = self.net(torch.cat([obs, actions], dim=-1), by_batch)
        return values.squeeze(-1)


class CROSSQ:
    def __init__(self, args: Args, obs_dim: int, action_dim: int, device: torch.device) -> None:
        initializer = generator(args.seed, "networks")
        self.generator = generator(args.seed, "agent", device)
        self.actor = Actor(obs_dim, action_dim, args, initializer).to(device)
        self.critic = Critic(obs_dim, action_dim, args, initializer).to(device)
        self.log_alpha = nn.Parameter(torch.tensor(math.log(args.alpha), device=device))
        self.actor_optimizer = Adam(self.actor.parameters(), args.actor_lr, betas=(args.beta1, 0.999))
        self.critic_optimizer = Adam(self.critic.parameters(), args.critic_lr, betas=(args.beta1, 0.999))
        self.alpha_optimizer = Adam([self.log_alpha], args.alpha_lr)
        self.gamma, self.device, self.action_dim = args.gamma, device, action_dim
        self.target_entropy = args.target_entropy * action_dim

    @acting
    def act(self, obs: Tensor, deterministic: bool = False) -> Tensor:
        """Return actions [n, action_dim] for obs [n, obs_dim]: samples of the policy, or tanh of its mean."""
        policy = self.actor(obs, by_batch=False)
        return policy.mode if deterministic else policy.sample(self.generator)

    def critic_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Return half the soft Bellman residual, summed over the critics.

        y has no gradient. The batch's statistics, to which (s', a') contributes, have one.
        """
        with torch.no_grad():
            next_actions, next_log_prob = self.actor(batch.next_obs, by_batch=False).rsample(self.generator)
        obs, actions = torch.cat([batch.obs, batch.next_obs]), torch.cat([batch.actions, next_actions])
        values, next_values = self.critic(obs, actions, by_batch=True).chunk(2, dim=-1)
        next_value = next_values.detach().amin(0) - self.log_alpha.exp().detach() * next_log_prob
        # Termination masks the bootstrap. Truncation does not, so it is not even in the batch.
        target = batch.rewards + self.gamma * (1.0 - batch.terminations) * next_value
        loss = 0.5 * (values - target).square().mean(1).sum()
        return loss, {"losses/critic": loss.detach(), "losses/q": values.detach()}

    def actor_loss(self, batch: Batch) -> tuple[Tensor, Tensor, Metrics]:
        """Return α log π - min_i Q_i, as in SAC, and log π [batch] for α."""
        actions, log_prob = self.actor(batch.obs, by_batch=True).rsample(self.generator)
        with frozen(self.critic):  # the gradient passes through the critics and stops there
            value = self.critic(batch.obs, actions, by_batch=False).amin(0)
        loss = (self.log_alpha.exp().detach() * log_prob - value).mean()
        return loss, log_prob.detach(), {"losses/actor": loss.detach(), "losses/entropy": -log_prob.detach()}

    def alpha_loss(self, log_prob: Tensor) -> tuple[Tensor, Metrics]:
        """Return the loss that moves α until the policy's entropy is H̄."""
        alpha = self.log_alpha.exp()
        loss = -alpha * (log_prob.mean() + self.target_entropy)
        return loss, {"losses/alpha": loss.detach(), "charts/alpha": alpha.detach()}

    def update(self, batch: Batch, with_actor: bool = True) -> Metrics:
        """Take a gradient step with the critics, and with actor and α if `with_actor`."""
        critic_loss, metrics = self.critic_loss(batch)
        self.critic_optimizer.minimize(critic_loss)
        if with_actor:
            actor_loss, log_prob, actor_metrics = self.actor_loss(batch)
            self.actor_optimizer.minimize(actor_loss)
            alpha_loss, alpha_metrics = self.alpha_loss(log_prob)
            self.alpha_optimizer.minimize(alpha_loss)
            metrics |= actor_metrics | alpha_metrics
        return metrics


@returns_result
def train(args: Args) -> Result:
    run = Run("crossq", args)
    rollout = Rollout(args.env, args)
    obs_dim, action_dim = rollout.obs_dim, rollout.action_dim
    agent = CROSSQ(args, obs_dim, action_dim, run.device)
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
        obs, actions, rewards, next_obs, terminations, _ = rollout.step(actions, meanwhile=update.flush)
        buffer.add(obs, actions, rewards, next_obs, terminations)

        # Learn
        for _ in range(args.utd * args.num_envs if step > args.learning_starts else 0):
            update(with_actor=(update.count + 1) % args.policy_delay == 0)

        # Report
        run.report(update.metrics)
    return run.finish()


if __name__ == "__main__":
    command_line(train, Args)
