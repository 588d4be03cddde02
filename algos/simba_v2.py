"""SimbaV2: SAC with networks on the unit sphere and a distributional critic.

Lee, Lee, Seno, Kim, Stone and Choo 2025, "Hyperspherical Normalization for Scalable Deep Reinforcement Learning", arXiv
2502.15280.

    python algos/simba_v2.py --env Humanoid-v4
    python algos/simba_v2.py --env HalfCheetah-v4 --critics 1 --size small
    python algos/simba_v2.py --env HalfCheetah-v4 --critics 1 --utd 2

What differs from sac.py is what the paper changes, with the settings of the authors' code:
- The features and the weights of each unit have norm 1. Learned scales take the place of norms and biases.
- The critics predict the distribution of the return by C51 (Bellemare et al. 2017), on ±5. Rewards are scaled to fit.
- Observations are normalised by their running statistics.
- γ is 0.995 (episodes of 1,000 steps), α starts at 0.01, H̄ is -|A| / 2, and the learning rate falls from 1e-4 to 5e-5.
- Actor and temperature move before the critics.

The paper's critics are 512 wide, which a CPU takes long for: `--size small` makes them 128.
"""

import common.start

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from common.acting import acting
from common.arguments import AnyNumber, Fraction, NonNegative, NonNegativeInt, OffPolicyArgs, OnlineArgs, UnitInterval
from common.command_line import command_line
from common.hl_gauss import FIT, made_histogram
from common.networks import TanhGaussian, frozen
from common.normalize import ReturnScaler, RunningNormalizer
from common.optim import Adam, SoftUpdate
from common.replay_buffer import Batch, ReplayBuffer
from common.run import Result, Run, returns_result
from common.seeding import generator
from common.sphere import Features, Head, project
from common.updater import Metrics
from envs.rollout import Rollout

CRITIC_HIDDEN = {"paper": (512, 512), "small": (128, 128)}


@dataclass
class Args(OnlineArgs, OffPolicyArgs):
    extendable: ClassVar[tuple[str, ...]] = ()  # the learning rates fall over --total-steps

    # Networks
    hidden: tuple[int, ...] = (128,)
    """Widths of the actor's residual blocks, all the same. Inside, a block is four times as wide."""
    size: Literal["paper", "small"] = "paper"
    """Without --critic-hidden: size of the critics, two blocks 512 wide, or 128 for a CPU."""
    critic_hidden: tuple[int, ...] | None = None
    """Widths of the critics' residual blocks, all the same. Without it, they are those of --size."""
    critics: int = 2
    """Number of critics. Give 1 for a task that never terminates."""
    bins: int = 101
    """Atoms of a return's distribution, from -5 to 5."""
    shift: float = 3.0
    """A constant feature, added to the inputs so that their norm survives the projection onto the sphere."""

    # Learning
    gamma: Fraction = 0.995
    """Discount factor. The authors' rule for episodes of L steps is 1 - 5 / L, within 0.95 and 0.995."""
    tau: Fraction = 0.005
    """Soft-update rate of the target critics, at each update."""
    actor_lr: float = 1e-4
    """Initial learning rate of the actor."""
    critic_lr: float = 1e-4
    """Initial learning rate of the critics."""
    alpha_lr: NonNegative = 1e-4
    """Initial learning rate of the temperature. With 0 it stays constant."""
    final_lr: UnitInterval = 0.5
    """Share of the learning rates that is left after `--total-steps` times `--utd` updates. They fall linearly."""
    alpha: float = 0.01
    """Initial temperature."""
    target_entropy: AnyNumber = -0.5
    """Target entropy H̄ for each dimension of the action."""
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
    """π(a|s): map obs [batch, obs_dim] to a tanh-Gaussian over actions [batch, action_dim]."""

    def __init__(self, obs_dim: int, action_dim: int, args: Args, generator: torch.Generator) -> None:
        super().__init__()
        self.features = Features(1, obs_dim, args.hidden, args.shift, generator)
        self.mean, self.log_std = (Head(1, args.hidden[-1], action_dim, generator) for _ in range(2))

    def forward(self, obs: Tensor) -> TanhGaussian:
        features = self.features(obs)
        mean, log_std = self.mean(features).squeeze(0), self.log_std(features).squeeze(0)
        return TanhGaussian(mean, 6.0 * log_std.tanh() - 4.0)  # log σ is in [-10, 2]


class Critic(nn.Module):
    """Q_i(s, a), the mean of Z_i(s, a), for obs [batch, obs_dim] and actions [batch, action_dim]: [critics, batch]."""

    def __init__(self, obs_dim: int, action_dim: int, args: Args, generator: torch.Generator) -> None:
        super().__init__()
        hidden, returns = args.critic_hidden or CRITIC_HIDDEN[args.size], made_histogram("c51", args.bins, -FIT, FIT)
        assert returns is not None
        self.features = Features(args.critics, obs_dim + action_dim, hidden, args.shift, generator)
        self.head, self.returns = Head(args.critics, hidden[-1], args.bins, generator), returns

    def forward(self, obs: Tensor, actions: Tensor) -> Tensor:
        return self.returns.mean(self.logits(obs, actions))

    def logits(self, obs: Tensor, actions: Tensor) -> Tensor:
        """Return the logits of Z_i(s, a): [critics, batch, bins]."""
        logits: Tensor = self.head(self.features(torch.cat([obs, actions], dim=-1)))
        return logits


class SIMBAV2:
    def __init__(self, args: Args, obs_dim: int, action_dim: int, device: torch.device) -> None:
        initializer = generator(args.seed, "networks")
        self.generator = generator(args.seed, "agent", device)
        self.actor = Actor(obs_dim, action_dim, args, initializer).to(device)
        self.critic, self.target_critic = (Critic(obs_dim, action_dim, args, initializer).to(device) for _ in range(2))
        self.target_critic.load_state_dict(self.critic.state_dict())
        self.update_target_critic = SoftUpdate(self.target_critic, self.critic, args.tau)
        self.log_alpha = nn.Parameter(torch.tensor(math.log(args.alpha), device=device))
        self.actor_optimizer = Adam(self.actor.parameters(), args.actor_lr)
        self.critic_optimizer = Adam(self.critic.parameters(), args.critic_lr)
        self.alpha_optimizer = Adam([self.log_alpha], args.alpha_lr)
        self.obs_normalizer = RunningNormalizer(obs_dim, clip=math.inf).to(device)
        self.reward_scaler = ReturnScaler(args.num_envs, args.gamma, FIT).to(device)
        self.args, self.gamma, self.device, self.action_dim = args, args.gamma, device, action_dim
        self.target_entropy = args.target_entropy * action_dim

    def observe(self, obs: NDArray[Any], rewards: NDArray[Any], dones: NDArray[np.bool_]) -> None:
        """Add a step of each environment to the running statistics."""
        self.obs_normalizer.update(torch.from_numpy(obs).to(self.device))
        self.reward_scaler.update(*(torch.from_numpy(part).to(self.device) for part in (rewards, dones)))

    @acting
    def act(self, obs: Tensor, deterministic: bool = False) -> Tensor:
        """Return actions [n, action_dim] for obs [n, obs_dim]: samples of the policy, or tanh of its mean."""
        policy = self.actor(self.obs_normalizer(obs))
        return policy.mode if deterministic else policy.sample(self.generator)

    def actor_loss(self, batch: Batch) -> tuple[Tensor, Tensor, Metrics]:
        """Return the loss of SAC's actor, α log π - min Q, and log π [batch] for α."""
        actions, log_prob = self.actor(batch.obs).rsample(self.generator)
        with frozen(self.critic):
            value = self.critic(batch.obs, actions).amin(0)
        loss = (self.log_alpha.exp().detach() * log_prob - value).mean()
        return loss, log_prob.detach(), {"losses/actor": loss.detach(), "losses/entropy": -log_prob.detach()}

    def alpha_loss(self, log_prob: Tensor) -> tuple[Tensor, Metrics]:
        """Return the loss that moves α until the policy's entropy is H̄."""
        alpha = self.log_alpha.exp()
        loss = -alpha * (log_prob.mean() + self.target_entropy)
        return loss, {"losses/alpha": loss.detach(), "charts/alpha": alpha.detach()}

    def critic_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Return the cross-entropy from r + γ (Z̄(s', a') - α log π), Z̄ of the smallest mean, summed over critics."""
        with torch.no_grad():
            next_actions, next_log_prob = self.actor(batch.next_obs).rsample(self.generator)
            next_logits = self.target_critic.logits(batch.next_obs, next_actions)
            rewards, discounts = self.reward_scaler(batch.rewards), self.gamma * (1.0 - batch.terminations)
            labels, metrics = self.critic.returns.target(
                next_logits, rewards, discounts, -self.log_alpha.exp() * next_log_prob
            )
        logits, returns = self.critic.logits(batch.obs, batch.actions), self.critic.returns
        loss = returns.cross_entropy(logits, labels).mean(1).sum()
        return loss, metrics | {"losses/critic": loss.detach(), "losses/q": returns.mean(logits.detach())}

    def update(self, batch: Batch) -> Metrics:
        """Take a gradient step with actor, α and critics, project their weights, and move the target critics."""
        batch = batch.map_obs(self.obs_normalizer)
        actor_loss, log_prob, actor_metrics = self.actor_loss(batch)
        self.actor_optimizer.minimize(actor_loss)
        alpha_loss, alpha_metrics = self.alpha_loss(log_prob)
        self.alpha_optimizer.minimize(alpha_loss)
        project(self.actor)
        critic_loss, metrics = self.critic_loss(batch)
        self.critic_optimizer.minimize(critic_loss)
        project(self.critic)
        self.update_target_critic()  # a mean of two unit vectors, which is not projected
        return metrics | actor_metrics | alpha_metrics

    def decay(self, passed: float) -> None:
        """Set the learning rates for a share `passed` of the run's updates."""
        share = 1.0 - passed * (1.0 - self.args.final_lr)
        for name in ("actor", "critic", "alpha"):
            getattr(self, f"{name}_optimizer").lr = share * getattr(self.args, f"{name}_lr")


@returns_result
def train(args: Args) -> Result:
    run = Run("simba_v2", args)
    rollout = Rollout(args.env, args)
    obs_dim, action_dim = rollout.obs_dim, rollout.action_dim
    agent = SIMBAV2(args, obs_dim, action_dim, run.device)
    buffer = ReplayBuffer(min(args.buffer_size, args.total_steps + args.num_envs), obs_dim, action_dim, run.device)
    policy = run.policy(agent)
    update = run.updater(lambda: agent.update(buffer.sample(args.batch_size, agent.generator)), agent.generator)
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
        agent.decay(update.count / (args.utd * args.total_steps))
        for _ in range(args.utd * args.num_envs if step > args.learning_starts else 0):
            update()

        # Report
        run.report(update.metrics)
    return run.finish()


if __name__ == "__main__":
    command_line(train, Args)
