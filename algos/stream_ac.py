"""Stream AC(λ): an actor and a critic that learn from each transition once, when it happens.

Elsayed, Vasan and Mahmood 2024, "Streaming Deep Reinforcement Learning Finally Works", arXiv 2410.14606.

    python algos/stream_ac.py --env HalfCheetah-v4

There is no replay buffer, no batch and no target network. Eligibility traces remember what led here, and ObGD bounds
each step. Running statistics normalise observations and rewards, and nine of ten weights start at 0. This is written
from the equations, because the authors' code may not be copied. docs/stream_ac.md lists the differences.
"""

import common.start

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.acting import acting
from common.arguments import Fraction, NonNegative, OnlineArgs, UnitInterval
from common.command_line import command_line
from common.networks import HALF_LOG_2PI, mlp
from common.normalize import RewardScaler, RunningNormalizer
from common.replay_buffer import Batch
from common.run import Result, Run, returns_result
from common.seeding import generator
from common.updater import Metrics
from envs.rollout import Rollout


@dataclass
class Args(OnlineArgs):
    extendable: ClassVar[tuple[str, ...]] = ("total_steps",)
    worth_compiling: ClassVar[int] = 20_000  # an update at every step

    # Networks
    hidden: tuple[int, ...] = (128, 128)
    """Widths of the hidden layers, for policy and value function."""
    sparsity: UnitInterval = 0.9
    """Share of the weights of each unit that start at 0."""

    # Learning
    gamma: Fraction = 0.99
    """Discount factor."""
    trace_decay: UnitInterval = 0.8
    """λ of the eligibility traces."""
    learning_rate: float = 1.0
    """α: largest step size of ObGD."""
    actor_kappa: float = 3.0
    """κ of the policy: a larger value makes ObGD bound its steps more tightly."""
    critic_kappa: float = 2.0
    """κ of the value function."""
    entropy_coefficient: NonNegative = 0.01
    """τ: weight of the entropy."""


class Network(nn.Module):
    """Map inputs [batch, inputs] to [batch, outputs]: linear layers, layer norms without parameters, leaky ReLUs."""

    def __init__(self, sizes: list[int], sparsity: float, generator: torch.Generator) -> None:
        super().__init__()
        self.net = mlp(sizes, generator)
        self.layers = [layer for layer in self.net if isinstance(layer, nn.Linear)]
        for layer in self.layers:
            zeros = min(int(np.ceil(sparsity * layer.in_features)), layer.in_features - 1)
            order = torch.rand(layer.weight.shape, generator=generator).argsort(1).argsort(1)
            with torch.no_grad():
                layer.weight.mul_(order >= zeros)
                layer.bias.zero_()

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            sums = layer(inputs)
            inputs = F.leaky_relu(F.layer_norm(sums, sums.shape[-1:]))
        return self.layers[-1](inputs)


def obgd(network: Network, trace: Tensor, objective: Tensor, delta: Tensor, args: Args, kappa: float) -> None:
    """Take a step of overshooting-bounded gradient descent: θ += α / max(1, α κ max(|δ|, 1) ‖e‖₁) δ e.

    e ← γ λ e + ∇ objective is the trace [parameters], and δ the TD error.
    """
    gradients = torch.autograd.grad(objective, parameters := tuple(network.parameters()))
    with torch.no_grad():
        trace.mul_(args.gamma * args.trace_decay).add_(torch.cat([gradient.flatten() for gradient in gradients]))
        bound = args.learning_rate * kappa * delta.abs().clamp(min=1.0) * trace.abs().sum()
        change = args.learning_rate / bound.clamp(min=1.0) * delta * trace
        for parameter, part in zip(parameters, change.split([p.numel() for p in parameters]), strict=True):
            parameter.add_(part.view_as(parameter))


class STREAMAC:
    def __init__(self, args: Args, obs_dim: int, action_dim: int, device: torch.device) -> None:
        initializer = generator(args.seed, "networks")
        self.generator = generator(args.seed, "agent", device)
        self.actor = Network([obs_dim, *args.hidden, 2 * action_dim], args.sparsity, initializer).to(device)
        self.critic = Network([obs_dim, *args.hidden, 1], args.sparsity, initializer).to(device)
        self.actor_traces, self.critic_traces = (
            torch.zeros(args.num_envs, sum(p.numel() for p in network.parameters()), device=device)
            for network in (self.actor, self.critic)
        )
        self.obs_normalizer = RunningNormalizer(obs_dim).to(device)
        self.reward_scaler = RewardScaler(args.num_envs, args.gamma).to(device)
        self.args, self.device, self.action_dim = args, device, action_dim

    def policy(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Return μ and σ, [batch, action_dim] each, for obs [batch, obs_dim]."""
        mean, deviation = self.actor(self.obs_normalizer(obs)).chunk(2, dim=-1)
        return mean, F.softplus(deviation)

    @acting
    def act(self, obs: Tensor, deterministic: bool = False) -> Tensor:
        """Return actions [n, action_dim] for obs [n, obs_dim]: samples, maybe outside [-1, 1], or the clipped mean."""
        mean, deviation = self.policy(obs)
        if deterministic:
            return mean.clamp(-1.0, 1.0)
        return mean + deviation * torch.randn(mean.shape, generator=self.generator, device=self.device)

    def update(self, batch: Batch) -> Metrics:
        """Learn from one transition of each environment in turn. Row i is that of environment i."""
        found = []
        for i in range(self.args.num_envs):
            obs, action, next_obs = (part[i : i + 1] for part in (batch.obs, batch.actions, batch.next_obs))
            value, next_value = (self.critic(self.obs_normalizer(each)).squeeze() for each in (obs, next_obs))
            # Termination masks the bootstrap. Truncation does not.
            target = batch.rewards[i] + self.args.gamma * (1.0 - batch.terminations[i]) * next_value
            delta = (target - value).detach()
            mean, deviation = self.policy(obs)
            log_prob = (-0.5 * ((action - mean) / deviation).square() - deviation.log() - HALF_LOG_2PI).sum()
            entropy = (deviation.log() + HALF_LOG_2PI + 0.5).sum()
            objective = log_prob + self.args.entropy_coefficient * delta.sign() * entropy  # δ follows as a factor
            actor_trace, critic_trace = (traces[i] for traces in (self.actor_traces, self.critic_traces))
            obgd(self.actor, actor_trace, objective, delta, self.args, self.args.actor_kappa)
            obgd(self.critic, critic_trace, value, delta, self.args, self.args.critic_kappa)
            found.append(torch.stack([delta.abs(), entropy.detach()]))
        return dict(zip(("losses/td_error", "losses/entropy"), torch.stack(found).unbind(1), strict=True))

    def step(self, batch: Batch, dones: Tensor) -> Metrics:
        """Add a transition of each environment to the running statistics, learn, and end the traces of `dones` [n]."""
        self.obs_normalizer.update(batch.obs)
        metrics = self.update(batch._replace(rewards=self.reward_scaler.step(batch.rewards, dones)))
        for traces in (self.actor_traces, self.critic_traces):
            traces.mul_((~dones).unsqueeze(-1))
        return metrics

    def discard_unfinished_episodes(self, exact: list[bool]) -> None:
        """End the traces of those environments [num_envs] that were not restored exactly."""
        for traces in (self.actor_traces, self.critic_traces):
            traces[~torch.tensor(exact)] = 0.0


@returns_result
def train(args: Args) -> Result:
    torch.set_num_threads(1)  # such small products take longer on several threads
    run = Run("stream_ac", args)
    rollout = Rollout(args.env, args)
    agent = STREAMAC(args, rollout.obs_dim, rollout.action_dim, run.device)
    learn = run.graphed(lambda dones, *parts: agent.step(Batch(*parts), dones), agent.generator)
    policy = run.policy(agent)
    run.resume(agent=agent, rollout=rollout)

    for _ in run.steps():
        # Act
        obs, actions, rewards, next_obs, terminations, truncations = rollout.step(policy(rollout.obs))

        # Learn
        numbers = (part.astype(np.float32) for part in (obs, actions, rewards, next_obs, terminations))
        with run.timings("update"):
            metrics = learn(*(torch.from_numpy(p).to(run.device) for p in (terminations | truncations, *numbers)))

        # Report
        run.report(metrics)
    return run.finish()


if __name__ == "__main__":
    command_line(train, Args)
