"""Proximal Policy Optimization for continuous actions.

Schulman et al. 2017, "Proximal Policy Optimization Algorithms", arXiv 1707.06347 (equation numbers below are that
paper's), with generalised advantage estimation (Schulman et al. 2016, arXiv 1506.02438) and the details that matter for
its results (Huang et al. 2022, "The 37 Implementation Details of Proximal Policy Optimization").

    python algos/ppo.py --env HalfCheetah-v4

Choices where public versions differ (docs/ppo.md lists CleanRL's as flags):
- As in Tianshou, 64 environments share an iteration of 2,048 steps, advantages are recomputed at every epoch and not
  normalised, and V is not clipped.
- Rewards are scaled. Tianshou scales returns (`--return-scaling`).
- The return of a truncated episode bootstraps from its final observation. CleanRL counts it as terminated
  (`--treat-truncation-as-termination`).
- The statistics of observations change between iterations only, so the policy that learns is the one that acted.
- Actions are stored as they were drawn, and clipped to [-1, 1] only for the environment.

`--loss mdpo` is the loss of Mirror Descent Policy Optimization (Tomar et al. 2022, arXiv 2005.09814): instead of
clipping the ratio, it keeps the new policy near the old one by their KL divergence.
"""

import common.start

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from common.acting import acting
from common.arguments import Fraction, NonNegative, NonNegativeInt, OnlineArgs, UnitInterval
from common.command_line import command_line
from common.errors import InputError
from common.layers import Activation
from common.networks import HALF_LOG_2PI, MLP, mlp, orthogonal
from common.normalize import RewardScaler, RunningNormalizer
from common.optim import Adam
from common.run import Result, Run, returns_result
from common.seeding import generator
from common.updater import Metrics
from envs.rollout import Rollout, Transitions

Array = NDArray[np.float32]


@dataclass
class Args(OnlineArgs):
    num_envs: int = 64
    """Number of environments stepped together. They share an iteration's steps."""
    eval_every: int = 20_000
    """Environment steps between evaluations. An evaluation takes place at the end of an iteration."""

    # Networks
    hidden: tuple[int, ...] = (64, 64)
    """Widths of the hidden layers, for policy and value function."""
    activation: Activation = "tanh"
    """Activation of the hidden layers."""
    initial_std: float = 0.6
    """Initial standard deviation of the policy."""
    orthogonal: bool = True
    """Initialise weights orthogonally. Without it, they are uniform within ±1 / √inputs."""
    actor_gain: float = 0.01
    """With --orthogonal: gain of the policy's last layer."""
    critic_gain: float = 1.0
    """With --orthogonal: gain of the value function's last layer."""

    # Learning
    rollout_steps: int = 2_048
    """Environment steps in an iteration, summed over all environments."""
    epochs: int = 10
    """Epochs: passes over the steps of an iteration."""
    minibatch_size: int = 64
    """Environment steps in each minibatch."""
    learning_rate: float = 3e-4
    """Initial learning rate. It decays linearly to 0."""
    decay_steps: NonNegativeInt = 0
    """Environment steps after which the learning rate is 0. With 0, this is --total-steps."""
    adam_epsilon: float = 1e-5
    """ε of Adam."""
    gamma: Fraction = 0.99
    """Discount factor."""
    gae_lambda: UnitInterval = 0.95
    """λ of the advantage estimate."""
    loss: Literal["clip", "mdpo"] = "clip"
    """Loss of the policy: with a clipped ratio, or with the KL divergence from the old policy (MDPO).
    MDPO's t falls over --total-steps, and only its --value-clip uses --clip."""
    clip: float = 0.2
    """ε: the ratio of new to old probability is clipped to 1 ± ε."""
    value_clip: bool = False
    """Also clip the change of the value function, by the same ε."""
    value_coefficient: float = 0.25
    """Weight of the value function's loss."""
    entropy_coefficient: NonNegative = 0.0
    """Weight of the entropy bonus."""
    max_gradient_norm: float = 0.5
    """Largest norm of the gradient of all parameters. A larger gradient is scaled down to it."""
    normalize_advantages: bool = False
    """Normalise advantages to mean 0 and variance 1 in every minibatch."""
    recompute_advantages: bool = True
    """Compute advantages again at every epoch, with the current value function."""
    return_scaling: bool = False
    """Divide the value function's targets by the returns' standard deviation, instead of scaling rewards."""
    treat_truncation_as_termination: bool = False
    """Count a truncated episode as terminated, as CleanRL does."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rollout_steps < self.num_envs:
            raise InputError(f"--rollout-steps is {self.rollout_steps}: give at least --num-envs, {self.num_envs}")


class Minibatch(NamedTuple):
    """Steps of an iteration: obs [batch, obs_dim], actions [batch, action_dim], the others [batch]."""

    obs: Tensor  # normalised
    actions: Tensor
    log_probs: Tensor  # of the policy that acted
    values: Tensor  # by the value function that gave the advantages
    advantages: Tensor
    returns: Tensor  # λ-returns, the targets of the value function


def network(sizes: list[int], args: Args, last_gain: float, generator: torch.Generator) -> MLP:
    """Return a network with layers of `sizes`, initialised as asked for."""
    net = mlp(sizes, generator, activation=args.activation)
    return orthogonal(net, generator, last_gain) if args.orthogonal else net


class Actor(nn.Module):
    """π(a|s) = N(μ(s), σ²) with the same σ in every state: `net` maps obs [batch, obs_dim] to μ [batch, action_dim]."""

    def __init__(self, obs_dim: int, action_dim: int, args: Args, generator: torch.Generator) -> None:
        super().__init__()
        self.net = network([obs_dim, *args.hidden, action_dim], args, args.actor_gain, generator)
        self.log_std = nn.Parameter(torch.full((action_dim,), math.log(args.initial_std)))

    def log_prob(self, obs: Tensor, actions: Tensor) -> Tensor:
        """Return log π(a|s) of the actions: [batch]."""
        noise = (actions - self.net(obs)) * torch.exp(-self.log_std)
        return -0.5 * noise.square().sum(-1) - (self.log_std + HALF_LOG_2PI).sum()

    def entropy(self) -> Tensor:
        """Return the entropy, which is the same in every state."""
        return (self.log_std + HALF_LOG_2PI + 0.5).sum()

    def kl(self, other: "Actor", obs: Tensor) -> Tensor:
        """Return KL(π(·|s) ‖ other(·|s)): [batch]."""
        ratio = torch.exp(self.log_std - other.log_std)
        distance = (self.net(obs) - other.net(obs)) * torch.exp(-other.log_std)
        return 0.5 * (ratio.square() + distance.square() - 1.0).sum(-1) - ratio.log().sum()


class Critic(nn.Module):
    """V(s): map obs [batch, obs_dim] to [batch]."""

    def __init__(self, obs_dim: int, args: Args, generator: torch.Generator) -> None:
        super().__init__()
        self.net = network([obs_dim, *args.hidden, 1], args, args.critic_gain, generator)

    def forward(self, obs: Tensor) -> Tensor:
        return self.net(obs).squeeze(-1)


class PPO:
    def __init__(self, args: Args, obs_dim: int, action_dim: int, device: torch.device) -> None:
        initializer = generator(args.seed, "networks")
        self.generator = generator(args.seed, "agent", device)
        self.actor = Actor(obs_dim, action_dim, args, initializer).to(device)
        self.critic = Critic(obs_dim, args, initializer).to(device)
        parameters = [*self.actor.parameters(), *self.critic.parameters()]
        self.optimizer = Adam(parameters, args.learning_rate, eps=args.adam_epsilon)
        self.obs_normalizer = RunningNormalizer(obs_dim).to(device)
        self.reward_scaler = RewardScaler(args.num_envs, args.gamma).to(device)
        self.return_normalizer = RunningNormalizer(1).to(device) if args.return_scaling else None
        self.old_actor = deepcopy(self.actor).requires_grad_(False) if args.loss == "mdpo" else None
        self.step_size = torch.ones((), device=device) if args.loss == "mdpo" else None  # t_k of MDPO
        self.args, self.device = args, device

    @acting
    def act(self, obs: Tensor, deterministic: bool = False) -> Tensor:
        """Return actions [n, action_dim] for obs [n, obs_dim]: samples, maybe outside [-1, 1], or the clipped mean."""
        mean: Tensor = self.actor.net(self.obs_normalizer(obs))
        if deterministic:
            return mean.clamp(-1.0, 1.0)
        noise = torch.randn(mean.shape, generator=self.generator, device=self.device)
        return mean + self.actor.log_std.exp() * noise

    def policy_loss(self, batch: Minibatch) -> Tensor:
        """Return minus the clipped surrogate objective (eq. 7), or that of MDPO with the penalty KL(π ‖ π_old) / t."""
        ratio = (self.actor.log_prob(batch.obs, batch.actions) - batch.log_probs).exp()
        advantages = batch.advantages
        if self.args.normalize_advantages:
            advantages = (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)
        if self.old_actor and self.step_size is not None:
            return (self.actor.kl(self.old_actor, batch.obs) / self.step_size - ratio * advantages).mean()
        clipped = ratio.clamp(1.0 - self.args.clip, 1.0 + self.args.clip)
        return -torch.min(ratio * advantages, clipped * advantages).mean()

    def value_loss(self, batch: Minibatch) -> Tensor:
        """Return the squared error of V against the λ-return (eq. 9), or the larger of it and the clipped V's."""
        returns, values = batch.returns, self.critic(batch.obs)
        if not self.args.value_clip:
            return F.mse_loss(values, returns)
        clipped = batch.values + (values - batch.values).clamp(-self.args.clip, self.args.clip)
        return torch.max((values - returns).square(), (clipped - returns).square()).mean()

    def step(self, batch: Minibatch) -> Metrics:
        """Take one gradient step on the sum of the losses (eq. 9)."""
        policy_loss, value_loss = self.policy_loss(batch), self.value_loss(batch)
        loss = policy_loss.add(value_loss, alpha=self.args.value_coefficient)
        if self.args.entropy_coefficient:
            loss = loss - self.args.entropy_coefficient * self.actor.entropy()
        self.optimizer.minimize(loss, self.args.max_gradient_norm)
        metrics = {"losses/policy": policy_loss.detach(), "losses/value": value_loss.detach()}
        return metrics | {"losses/gradient_norm": self.optimizer.gradient_norm}

    def decay(self, step: int) -> None:
        """Set the learning rate, and MDPO's t, of the iteration that starts at `step`. They decay linearly."""
        passed = step / (self.args.decay_steps or self.args.total_steps)
        self.optimizer.lr = self.args.learning_rate * max(0.0, 1.0 - passed)
        if self.step_size is not None:  # at least 0.01, because the loss divides by it
            self.step_size.fill_(max(0.01, 1.0 - step / self.args.total_steps))

    def update(self, rollout: Transitions, step: Callable[..., Metrics] | None = None) -> Metrics:
        """Run all epochs of minibatch steps on an iteration's transitions, [steps, num_envs, ...] (algorithm 1).

        `step` is `self.step` in the run's form. It takes a minibatch's fields as arguments.
        """
        dones = rollout.terminations | rollout.truncations
        args = self.args
        rewards = rollout.rewards.astype(np.float32)
        rewards = rewards if args.return_scaling else self.reward_scaler(rewards, dones)
        obs, next_obs = (
            self.obs_normalizer(torch.from_numpy(part).to(self.device)).flatten(0, 1)
            for part in (rollout.obs, rollout.next_obs)
        )
        actions = torch.from_numpy(rollout.actions).to(self.device).flatten(0, 1)
        with torch.no_grad():
            log_probs = self.actor.log_prob(obs, actions)
        if self.old_actor:
            self.old_actor.load_state_dict(self.actor.state_dict())
        terminations = dones if args.treat_truncation_as_termination else rollout.terminations
        metrics: Metrics = {}
        norms = []
        for epoch in range(args.epochs):
            if epoch == 0 or args.recompute_advantages:
                with torch.no_grad():
                    values, next_values = self.critic(obs), self.critic(next_obs)
                scale = 1.0 / self.return_normalizer.scale.item() if self.return_normalizer else 1.0
                old, new = (scale * v.view(rewards.shape).cpu().numpy() for v in (values, next_values))
                advantages = torch.from_numpy(
                    generalized_advantages(rewards, old, new, terminations, dones, args.gamma, args.gae_lambda)
                )
                advantages = advantages.to(self.device).flatten()
                returns = advantages / scale + values
                if self.return_normalizer:
                    self.return_normalizer.update(scale * returns.unsqueeze(-1))
            data = obs, actions, log_probs, values, advantages, returns
            order = torch.randperm(len(obs), generator=self.generator, device=self.device)
            shuffled = (part[order].split(args.minibatch_size) for part in data)
            for minibatch in zip(*shuffled, strict=True):
                metrics = step(*minibatch) if step else self.step(Minibatch(*minibatch))
                norms.append(metrics["losses/gradient_norm"].clone())
        self.obs_normalizer.update(torch.from_numpy(rollout.obs).to(self.device))
        with torch.no_grad():
            log_ratio = self.actor.log_prob(obs, actions) - log_probs
            return metrics | {
                "losses/approx_kl": log_ratio.exp() - 1.0 - log_ratio,
                "losses/clipfrac": ((log_ratio.exp() - 1.0).abs() > self.args.clip).float(),
                "losses/entropy": self.actor.entropy(),
                "losses/gradient_norm": torch.stack(norms),
                "losses/gradients_clipped": (torch.stack(norms) > args.max_gradient_norm).float(),
            }


def generalized_advantages(
    rewards: Array,
    values: Array,
    next_values: Array,
    terminations: NDArray[np.bool_],
    dones: NDArray[np.bool_],
    gamma: float,
    gae_lambda: float,
) -> Array:
    """Return Â_t = δ_t + γλ Â_{t+1} within an episode, with δ_t = r_t + γ V(s_{t+1}) - V(s_t): [steps, num_envs].

    Source: arXiv 1506.02438, eq. 16. A termination masks V(s_{t+1}). Both kinds of episode end mask Â_{t+1}.
    """
    advantages = rewards + np.float32(gamma) * np.where(terminations, np.float32(0), next_values) - values
    carried = np.where(dones, np.float32(0), np.float32(gamma * gae_lambda))
    for t in reversed(range(len(rewards) - 1)):
        advantages[t] += carried[t] * advantages[t + 1]
    return advantages.astype(np.float32)


@returns_result
def train(args: Args) -> Result:
    if args.minibatch_size * max(args.hidden) ** 2 < 2**20:  # such small products take longer on several threads
        torch.set_num_threads(1)
    run = Run("ppo", args)
    rollout = Rollout(args.env, args)
    agent = PPO(args, rollout.obs_dim, rollout.action_dim, run.device)
    gradient_step = run.graphed(lambda *parts: agent.step(Minibatch(*parts)), agent.generator)
    policy = run.policy(agent)
    run.resume(agent=agent, rollout=rollout)

    steps_per_env = -(-args.rollout_steps // args.num_envs)
    for step in run.steps(by=steps_per_env * args.num_envs):
        # Act
        agent.decay(rollout.steps)
        steps = []
        while rollout.steps < step:
            steps.append(rollout.step(policy(rollout.obs)))

        # Learn
        with run.timings("update"):
            metrics = agent.update(Transitions(*map(np.stack, zip(*steps, strict=True))), gradient_step)

        # Report
        run.report(metrics)
    return run.finish()


if __name__ == "__main__":
    command_line(train, Args)
