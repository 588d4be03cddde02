"""Soft Actor-Critic with automatic temperature.

Haarnoja et al. 2018, "Soft Actor-Critic Algorithms and Applications", arXiv 1812.05905 (SAC v2). Equation numbers below
are that paper's.

    python algos/sac.py --env HalfCheetah-v4
    python algos/sac.py --env Hopper-v4 --seed 2 --total-steps 300000
    python algos/sac.py --env Humanoid-v4 --num-envs 4
    python algos/sac.py --preset redq/Hopper-v4
    python algos/sac.py --preset droq/Hopper-v4
    python algos/sac.py --env Hopper-v4 --critic hl-gauss --alpha 0.01

REDQ (Chen et al. 2021, arXiv 2101.05982) and DroQ (Hiraoka et al. 2022, arXiv 2110.02034) are SAC with 20 updates of
the critics a step. REDQ has ten critics, of which a target uses two at random. DroQ has two, with dropout and layer
norms. The actor has one update a step, on the critics' mean. docs/presets.md lists the presets.

Public versions differ. This one follows the SAC baseline of CrossQ (Bhatt et al. 2024), which has the best public
curves on Gymnasium's v4 environments:
- The learning rate is 1e-3 for actor, critics and temperature (paper: 3e-4).
- The first 5,000 actions are uniform random (paper: 1,000 to 10,000, by environment).
- log σ is clipped to [-20, 2] (other versions squash it into [-5, 2]).
- The target uses the smallest of all critics and includes the entropy with the current α, as in the paper.
- α's loss is α (-log π - H̄), so its gradient in log α is scaled by α (eq. 18; other versions drop that α).
- Actions are in [-1, 1] and the environment wrapper rescales them, so H̄ = -|A| means the same in every environment.

The initialisation is PyTorch's instead. CrossQ's, LeCun normal, learned more slowly here (docs/sac.md).
"""

import common.start

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from common.acting import acting
from common.arguments import (
    AnyNumber,
    Fraction,
    NonNegative,
    NonNegativeInt,
    OffPolicyArgs,
    OnlineArgs,
    OptionalNumber,
    Probability,
)
from common.command_line import command_line
from common.errors import InputError
from common.hl_gauss import FIT, Histogram, HistogramCritic, made_histogram
from common.networks import Critic, TanhGaussian, frozen, mlp
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
    """Number of critics."""
    target_critics: NonNegativeInt = 0
    """Critics drawn at random for each target, which uses their smallest value. 0 uses all."""
    actor_value: Literal["min", "mean"] = "min"
    """What the actor maximises: the smallest value of all critics, or their mean."""
    layer_norm: bool = False
    """Layer normalisation in the critics."""
    dropout: Probability = 0.0
    """Share of the critics' hidden units that are dropped, also in targets and for the actor."""
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
    """Soft-update rate of the target critics, at each update."""
    actor_lr: float = 1e-3
    """Learning rate of the actor."""
    critic_lr: float = 1e-3
    """Learning rate of the critics."""
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
    policy_delay: int = 1
    """Updates of the critics for each update of actor and temperature."""

    # Data
    learning_starts: NonNegativeInt = 5_000
    """Environment steps with uniform random actions before the first update."""
    buffer_size: int = 1_000_000
    """Capacity of the replay buffer, in transitions."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target_critics > self.critics:
            raise InputError(f"--target-critics is {self.target_critics}: give at most --critics, {self.critics}")


class Actor(nn.Module):
    """π(a|s): map obs [batch, obs_dim] to a tanh-Gaussian over actions [batch, action_dim]."""

    def __init__(self, obs_dim: int, action_dim: int, hidden: tuple[int, ...], generator: torch.Generator) -> None:
        super().__init__()
        self.net = mlp([obs_dim, *hidden, 2 * action_dim], generator)

    def forward(self, obs: Tensor) -> TanhGaussian:
        mean, log_std = self.net(obs).chunk(2, dim=-1)
        return TanhGaussian(mean, log_std.clamp(-20.0, 2.0))


class SAC:
    def __init__(self, args: Args, obs_dim: int, action_dim: int, device: torch.device) -> None:
        initializer = generator(args.seed, "networks")
        self.generator = generator(args.seed, "agent", device)
        self.actor = Actor(obs_dim, action_dim, args.hidden, initializer).to(device)
        histogram = made_histogram(args.critic, args.bins, args.q_min, args.q_max)
        self.histogram = histogram and histogram.to(device)
        sizes = [obs_dim + action_dim, *args.hidden, args.bins if histogram else 1]
        kind = HistogramCritic if histogram else Critic
        self.critic, self.target_critic = (
            kind(mlp(sizes, initializer, args.critics, layer_norm=args.layer_norm)).to(device) for _ in range(2)
        )
        self.target_critic.load_state_dict(self.critic.state_dict())
        self.update_target_critic = SoftUpdate(self.target_critic, self.critic, args.tau)
        self.log_alpha = nn.Parameter(torch.tensor(math.log(args.alpha), device=device))
        self.actor_optimizer = Adam(self.actor.parameters(), args.actor_lr)
        self.critic_optimizer = Adam(self.critic.parameters(), args.critic_lr)
        self.alpha_optimizer = Adam([self.log_alpha], args.alpha_lr)
        self.obs_normalizer = RunningNormalizer(obs_dim).to(device) if args.normalize_obs else nn.Identity()
        is_scaled = histogram and args.q_min is None
        self.reward_scaler = ReturnScaler(args.num_envs, args.gamma, FIT).to(device) if is_scaled else nn.Identity()
        self.args, self.gamma, self.device, self.action_dim = args, args.gamma, device, action_dim
        self.target_entropy = args.target_entropy * action_dim

    def observe(self, obs: NDArray[Any], rewards: NDArray[Any], dones: NDArray[np.bool_]) -> None:
        """Add a step of each environment to the running statistics."""
        if isinstance(self.obs_normalizer, RunningNormalizer):
            self.obs_normalizer.update(torch.from_numpy(obs).to(self.device))
        if isinstance(self.reward_scaler, ReturnScaler):
            self.reward_scaler.update(*(torch.from_numpy(part).to(self.device) for part in (rewards, dones)))

    @acting
    def act(self, obs: Tensor, deterministic: bool = False) -> Tensor:
        """Return actions [n, action_dim] for obs [n, obs_dim]: samples of the policy, or tanh of its mean."""
        policy = self.actor(self.obs_normalizer(obs))
        return policy.mode if deterministic else policy.sample(self.generator)

    def outputs(self, critic: Critic, obs: Tensor, actions: Tensor, members: Tensor | None = None) -> Tensor:
        """Return Q_i(s, a) of all critics, or of those numbered `members`: [critics, batch], or [..., bins] logits."""
        if not self.args.dropout:
            return critic(obs, actions, members)
        inputs = torch.cat([obs, actions], dim=-1)
        outputs = critic.net.forward_with_dropout(inputs, self.args.dropout, self.generator)
        outputs = outputs if self.histogram else outputs.squeeze(-1)
        return outputs if members is None else outputs[members]

    def subset(self) -> Tensor | None:
        """Draw the critics of one target, without replacement (REDQ, algorithm 1). None stands for all."""
        if not self.args.target_critics:
            return None
        order = torch.rand(self.args.critics, generator=self.generator, device=self.device).argsort()
        return order[: self.args.target_critics]

    def critic_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Return the soft Bellman residual, summed over the critics (eq. 5 and 6)."""
        if self.histogram:
            return self.histogram_loss(batch, self.histogram)
        with torch.no_grad():
            next_actions, next_log_prob = self.actor(batch.next_obs).rsample(self.generator)
            next_values = self.outputs(self.target_critic, batch.next_obs, next_actions, self.subset())
            next_value = next_values.amin(0) - self.log_alpha.exp() * next_log_prob
            # Termination masks the bootstrap. Truncation does not, so it is not even in the batch.
            target = batch.rewards + self.gamma * (1.0 - batch.terminations) * next_value
        values = self.outputs(self.critic, batch.obs, batch.actions)
        loss = (values - target).square().mean(1).sum()
        return loss, {"losses/critic": loss.detach(), "losses/q": values.detach()}

    def histogram_loss(self, batch: Batch, histogram: Histogram) -> tuple[Tensor, Metrics]:
        """Return the cross-entropy between the target's and the critics' histograms, summed over the critics."""
        with torch.no_grad():
            next_actions, next_log_prob = self.actor(batch.next_obs).rsample(self.generator)
            next_logits = self.outputs(self.target_critic, batch.next_obs, next_actions, self.subset())
            rewards, discounts = self.reward_scaler(batch.rewards), self.gamma * (1.0 - batch.terminations)
            labels, metrics = histogram.target(next_logits, rewards, discounts, -self.log_alpha.exp() * next_log_prob)
        logits = self.outputs(self.critic, batch.obs, batch.actions)
        loss = histogram.cross_entropy(logits, labels).mean(1).sum()
        return loss, metrics | {"losses/critic": loss.detach(), "losses/q": histogram.mean(logits.detach())}

    def actor_loss(self, batch: Batch) -> tuple[Tensor, Tensor, Metrics]:
        """Return the KL divergence from the policy to exp(Q / α) (eq. 7 and 9), and log π [batch] for α."""
        actions, log_prob = self.actor(batch.obs).rsample(self.generator)
        with frozen(self.critic):  # the gradient passes through the critics and stops there
            outputs = self.outputs(self.critic, batch.obs, actions)
        values = self.histogram.mean(outputs) if self.histogram else outputs
        value = values.amin(0) if self.args.actor_value == "min" else values.mean(0)
        loss = (self.log_alpha.exp().detach() * log_prob - value).mean()
        return loss, log_prob.detach(), {"losses/actor": loss.detach(), "losses/entropy": -log_prob.detach()}

    def alpha_loss(self, log_prob: Tensor) -> tuple[Tensor, Metrics]:
        """Return the loss that moves α until the policy's entropy is H̄ (eq. 18)."""
        alpha = self.log_alpha.exp()
        loss = -alpha * (log_prob.mean() + self.target_entropy)
        return loss, {"losses/alpha": loss.detach(), "charts/alpha": alpha.detach()}

    def update(self, batch: Batch, with_actor: bool = True) -> Metrics:
        """Take a gradient step with the critics, and with actor and α if `with_actor` (the loop of algorithm 1)."""
        batch = batch.map_obs(self.obs_normalizer)
        critic_loss, metrics = self.critic_loss(batch)
        self.critic_optimizer.minimize(critic_loss)
        if with_actor:
            actor_loss, log_prob, actor_metrics = self.actor_loss(batch)
            self.actor_optimizer.minimize(actor_loss)
            alpha_loss, alpha_metrics = self.alpha_loss(log_prob)
            self.alpha_optimizer.minimize(alpha_loss)
            metrics |= actor_metrics | alpha_metrics
        self.update_target_critic()
        return metrics


@returns_result
def train(args: Args) -> Result:
    run = Run("sac", args)
    rollout = Rollout(args.env, args)
    obs_dim, action_dim = rollout.obs_dim, rollout.action_dim
    agent = SAC(args, obs_dim, action_dim, run.device)
    buffer = ReplayBuffer(min(args.buffer_size, args.total_steps + args.num_envs), obs_dim, action_dim, run.device)
    policy = run.policy(agent)
    update = run.updater(  # updates that an older checkpoint holds have no `with_actor`
        lambda with_actor=True: agent.update(buffer.sample(args.batch_size, agent.generator), with_actor),
        agent.generator,
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
