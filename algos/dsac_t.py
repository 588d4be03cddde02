"""DSAC-T: SAC whose critics give a normal distribution of the return.

Duan et al. 2023, "Distributional Soft Actor-Critic with Three Refinements", arXiv 2310.05858.

    python algos/dsac_t.py --env HalfCheetah-v4
    python algos/dsac_t.py --env Humanoid-v4 --num-envs 4

What differs from sac.py is what the paper and its authors' code change:
- A critic gives the mean Q and the standard deviation σ of the soft return. The target uses the critic of the smaller
  mean. Q follows the expected target, σ a sampled one, which is clipped to Q ± 3 b.
- The loss of each transition is scaled by b² / σ². b is a running mean of σ, so the rewards' scale matters much less.
- The actor has a target too. Actor, temperature and targets move at every second update, and the actor's loss uses the
  critics from before their step.
- Networks have three hidden layers with GELU. log σ of the policy is clipped to [-20, 0.5].
- α's loss is log α (-log π - H̄), and log α starts at 1.

The authors take 20 environment steps for each update. Here it is one, with the learning rate of their port to
Stable-Baselines3, and the first actions are uniform random.
"""

import common.start

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.acting import acting
from common.arguments import AnyNumber, Fraction, NonNegative, NonNegativeInt, OffPolicyArgs, OnlineArgs
from common.command_line import command_line
from common.networks import Critic, TanhGaussian, frozen, mlp
from common.optim import Adam, SoftUpdate
from common.replay_buffer import Batch, ReplayBuffer
from common.run import Result, Run, returns_result
from common.seeding import generator
from common.updater import Metrics
from envs.rollout import Rollout


@dataclass
class Args(OnlineArgs, OffPolicyArgs):
    # Networks
    hidden: tuple[int, ...] = (256, 256, 256)
    """Widths of the hidden layers, for actor and critics."""
    critics: int = 2
    """Number of critics. Target and actor use the one of the smallest mean."""

    # Learning
    gamma: Fraction = 0.99
    """Discount factor."""
    tau: Fraction = 0.005
    """Soft-update rate of the target networks, at each update of the actor, and of the running mean of σ."""
    actor_lr: float = 3e-4
    """Learning rate of the actor."""
    critic_lr: float = 3e-4
    """Learning rate of the critics."""
    alpha_lr: NonNegative = 3e-4
    """Learning rate of the temperature. With 0 it stays constant."""
    log_alpha: AnyNumber = 1.0
    """Initial logarithm of the temperature."""
    target_entropy: AnyNumber = -1.0
    """Target entropy H̄ for each dimension of the action."""
    batch_size: int = 256
    """Transitions in each update."""
    utd: int = 1
    """Updates for each environment step (update-to-data ratio)."""
    policy_delay: int = 2
    """Updates of the critics for each update of actor, temperature and target networks."""

    # Data
    learning_starts: NonNegativeInt = 10_000
    """Environment steps with uniform random actions before the first update."""
    buffer_size: int = 1_000_000
    """Capacity of the replay buffer, in transitions."""


class Actor(nn.Module):
    """π(a|s): map obs [batch, obs_dim] to a tanh-Gaussian over actions [batch, action_dim]."""

    def __init__(self, obs_dim: int, action_dim: int, hidden: tuple[int, ...], generator: torch.Generator) -> None:
        super().__init__()
        self.net = mlp([obs_dim, *hidden, 2 * action_dim], generator, activation="gelu")

    def forward(self, obs: Tensor) -> TanhGaussian:
        mean, log_std = self.net(obs).chunk(2, dim=-1)
        return TanhGaussian(mean, log_std.clamp(-20.0, 0.5))


class NormalCritic(Critic):
    """Z_i(s, a) ~ N(Q_i, σ_i²): map obs [batch, obs_dim] and actions [batch, action_dim] to Q [critics, batch]."""

    def forward(self, obs: Tensor, actions: Tensor, members: int | Tensor | None = None) -> Tensor:
        return self.outputs(obs, actions, members)[..., 0]

    def distribution(self, obs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Return Q and σ, [critics, batch] each."""
        mean, deviation = self.outputs(obs, actions, None).unbind(-1)
        return mean, F.softplus(deviation)


class DSACT:
    def __init__(self, args: Args, obs_dim: int, action_dim: int, device: torch.device) -> None:
        initializer = generator(args.seed, "networks")
        self.generator = generator(args.seed, "agent", device)
        self.actor = Actor(obs_dim, action_dim, args.hidden, initializer).to(device)
        sizes = [obs_dim + action_dim, *args.hidden, 2]
        self.critic = NormalCritic(mlp(sizes, initializer, args.critics, activation="gelu")).to(device)
        self.target_actor, self.target_critic = copy.deepcopy(self.actor), copy.deepcopy(self.critic)
        self.update_target_actor = SoftUpdate(self.target_actor, self.actor, args.tau)
        self.update_target_critic = SoftUpdate(self.target_critic, self.critic, args.tau)
        self.log_alpha = nn.Parameter(torch.tensor(args.log_alpha, device=device))
        self.mean_sigma = torch.zeros(args.critics, 1, device=device)  # b: 0 before the first update
        self.actor_optimizer = Adam(self.actor.parameters(), args.actor_lr)
        self.critic_optimizer = Adam(self.critic.parameters(), args.critic_lr)
        self.alpha_optimizer = Adam([self.log_alpha], args.alpha_lr)
        self.gamma, self.tau, self.device, self.action_dim = args.gamma, args.tau, device, action_dim
        self.target_entropy = args.target_entropy * action_dim

    @acting
    def act(self, obs: Tensor, deterministic: bool = False) -> Tensor:
        """Return actions [n, action_dim] for obs [n, obs_dim]: samples of the policy, or tanh of its mean."""
        policy = self.actor(obs)
        return policy.mode if deterministic else policy.sample(self.generator)

    @torch.no_grad()
    def targets(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the expected and the sampled soft return, y and y_z [batch], of the critic of the smaller mean."""
        next_actions, next_log_prob = self.target_actor(batch.next_obs).rsample(self.generator)
        means, sigmas = self.target_critic.distribution(batch.next_obs, next_actions)
        noise = torch.randn(means.shape, generator=self.generator, device=self.device).clamp(-3.0, 3.0)
        smallest = means.argmin(0, keepdim=True)
        bonus = -self.log_alpha.exp() * next_log_prob
        # Termination masks the bootstrap. Truncation does not, so it is not even in the batch.
        discounts = self.gamma * (1.0 - batch.terminations)
        y, y_z = (
            batch.rewards + discounts * (values.gather(0, smallest)[0] + bonus)
            for values in (means, means + noise * sigmas)
        )
        return y, y_z

    def critic_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Return the loss of means and deviations with the three refinements, summed over the critics.

        ω_i [H(Q_i, y) + σ_i (σ_i² - H(Q_i, y_b)) / (σ_i + 0.1)], where H is Huber's loss with δ = 50. In the second
        term, only the first σ_i has a gradient. H halves the square, so σ tends to 1/√2 of the deviation.
        """
        y, y_z = self.targets(batch)
        means, sigmas = self.critic.distribution(batch.obs, batch.actions)
        q, sigma = means.detach(), sigmas.detach()
        with torch.no_grad():
            now = sigma.mean(1, keepdim=True)
            self.mean_sigma.copy_(torch.where(self.mean_sigma == 0.0, now, self.mean_sigma.lerp(now, self.tau)))
            bound = 3.0 * self.mean_sigma
            y_b = q + (y_z - q).clamp(-bound, bound)
            weight = (self.mean_sigma.square() / (sigma.square() + 0.1)).clamp(0.1, 10.0)
            of_sigma = (sigma.square() - huber(q, y_b)) / (sigma + 0.1)
        loss = (weight * (huber(means, y.expand_as(means)) + sigmas * of_sigma)).mean(1).sum()
        return loss, {"losses/critic": loss.detach(), "losses/q": q, "losses/sigma": sigma}

    def actor_loss(self, batch: Batch) -> tuple[Tensor, Tensor, Metrics]:
        """Return α log π - min_i Q_i, as in SAC, and log π [batch] for α."""
        actions, log_prob = self.actor(batch.obs).rsample(self.generator)
        with frozen(self.critic):  # the gradient passes through the critics and stops there
            value = self.critic(batch.obs, actions).amin(0)
        loss = (self.log_alpha.exp().detach() * log_prob - value).mean()
        return loss, log_prob.detach(), {"losses/actor": loss.detach(), "losses/entropy": -log_prob.detach()}

    def alpha_loss(self, log_prob: Tensor) -> tuple[Tensor, Metrics]:
        """Return the loss that moves log α until the policy's entropy is H̄."""
        loss = -self.log_alpha * (log_prob.mean() + self.target_entropy)
        return loss, {"losses/alpha": loss.detach(), "charts/alpha": self.log_alpha.detach().exp()}

    def update(self, batch: Batch, with_actor: bool = True) -> Metrics:
        """Take a gradient step with the critics, and if `with_actor` with actor, α and the targets."""
        critic_loss, metrics = self.critic_loss(batch)
        if with_actor:
            actor_loss, log_prob, actor_metrics = self.actor_loss(batch)
            self.actor_optimizer.minimize(actor_loss)
            alpha_loss, alpha_metrics = self.alpha_loss(log_prob)
            self.alpha_optimizer.minimize(alpha_loss)
            metrics |= actor_metrics | alpha_metrics
        self.critic_optimizer.minimize(critic_loss)
        if with_actor:
            self.update_target_actor()
            self.update_target_critic()
        return metrics


def huber(values: Tensor, targets: Tensor) -> Tensor:
    """Return half the squared error, which grows linearly beyond 50."""
    return F.huber_loss(values, targets, reduction="none", delta=50.0)


@returns_result
def train(args: Args) -> Result:
    run = Run("dsac_t", args)
    rollout = Rollout(args.env, args)
    obs_dim, action_dim = rollout.obs_dim, rollout.action_dim
    agent = DSACT(args, obs_dim, action_dim, run.device)
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
