"""Soft Actor-Critic with automatic temperature.

Haarnoja et al. 2018, "Soft Actor-Critic Algorithms and Applications", arXiv 1812.05905 (SAC v2). Equation numbers below
are that paper's.

    python algos/sac.py --env HalfCheetah-v4
    python algos/sac.py --env Hopper-v4 --seed 2 --total-steps 300000
    python algos/sac.py --env Humanoid-v4 --num-envs 4

Where public versions differ, this one takes the choices behind the best public curves on Gymnasium's v4 environments
(the SAC baseline of CrossQ, Bhatt et al. 2024), but for the networks' start, which is PyTorch's own: theirs, LeCun
normal, learned more slowly here (docs/sac.md). In particular:
- learning rate 1e-3 for actor, critics and temperature (paper: 3e-4);
- 5 000 steps of uniform random actions first (paper: 1 000 to 10 000, by environment);
- log σ is clipped to [-20, 2] (others squash it into [-5, 2]);
- the target backs up entropy with the current α, over the smallest of all critics (as the paper does);
- α's loss is α (-log π - H̄), whose gradient in log α is scaled by α (paper, eq. 18; others drop that α);
- actions live in [-1, 1] and the environment's wrapper rescales them, so that H̄ = -|A| means the same everywhere.
"""

import math
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from gymnasium.spaces import flatdim
from torch import Tensor, nn

from common.acting import acting, uniform_actions
from common.arguments import OffPolicyArgs, OnlineArgs
from common.checkpoint import restore, state_of
from common.command_line import command_line
from common.evaluate import evaluate
from common.networks import Adam, Polyak, TanhGaussian, frozen, mlp
from common.replay_buffer import Batch, ReplayBuffer
from common.run import Result, Run, returns_result
from common.seeding import generator, seeds
from envs.make import make, make_vector
from envs.state import get_states, set_states

Metrics = dict[str, Tensor]  # of any shape: the logger takes their means, when it reads them


@dataclass
class Args(OnlineArgs, OffPolicyArgs):
    may_be_zero = ("learning_starts", "alpha_lr")
    any_sign = ("target_entropy",)

    # Networks
    hidden: tuple[int, ...] = (256, 256)
    """Widths of the hidden layers of actor and critics."""
    critics: int = 2
    """Critics; the target and the actor use the smallest of them."""

    # Learning
    gamma: float = 0.99
    """Discount."""
    tau: float = 0.005
    """Step of the target critics towards the critics, at every update."""
    actor_lr: float = 1e-3
    """Learning rate of the actor."""
    critic_lr: float = 1e-3
    """Learning rate of the critics."""
    alpha_lr: float = 1e-3
    """Learning rate of the temperature; 0: it stays as it is."""
    alpha: float = 1.0
    """Temperature at the start."""
    target_entropy: float = -1.0
    """Entropy that the temperature leads the policy to, for each dimension of the action."""
    batch_size: int = 256
    """Transitions in an update."""
    utd: int = 1
    """Updates for each environment step (update-to-data ratio)."""

    # Data
    learning_starts: int = 5_000
    """Steps with uniform random actions before the first update."""
    buffer_size: int = 1_000_000
    """Transitions that the replay buffer holds."""


class Actor(nn.Module):
    """π(a|s): obs [batch, obs_dim] to a tanh-Gaussian over actions [batch, action_dim]."""

    def __init__(self, obs_dim: int, action_dim: int, hidden: tuple[int, ...], generator: torch.Generator) -> None:
        super().__init__()
        self.net = mlp([obs_dim, *hidden, 2 * action_dim], generator)

    def forward(self, obs: Tensor) -> TanhGaussian:
        mean, log_std = self.net(obs).chunk(2, dim=-1)
        return TanhGaussian(mean, F.hardtanh(log_std, -20.0, 2.0))  # a clamp whose gradient is one operation


class Critic(nn.Module):
    """Q_i(s, a) of all critics at once: [critics, batch]."""

    def __init__(
        self, obs_dim: int, action_dim: int, hidden: tuple[int, ...], critics: int, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.net = mlp([obs_dim + action_dim, *hidden, 1], generator, ensemble=critics)

    def forward(self, obs: Tensor, actions: Tensor) -> Tensor:
        values: Tensor = self.net(torch.cat([obs, actions], dim=-1))
        return values.squeeze(-1)


class SAC:
    def __init__(self, args: Args, obs_dim: int, action_dim: int, device: torch.device) -> None:
        initializer = generator(args.seed, "networks")
        self.generator = generator(args.seed, "agent", device)
        self.actor = Actor(obs_dim, action_dim, args.hidden, initializer).to(device)
        self.critic = Critic(obs_dim, action_dim, args.hidden, args.critics, initializer).to(device)
        self.critic_target = Critic(obs_dim, action_dim, args.hidden, args.critics, initializer).to(device)
        self.critic_target.load_state_dict(self.critic.state_dict())
        self.follow_critic = Polyak(self.critic_target, self.critic, args.tau)
        self.log_alpha = nn.Parameter(torch.tensor(math.log(args.alpha), device=device))
        self.actor_optimizer = Adam(self.actor.parameters(), args.actor_lr)
        self.critic_optimizer = Adam(self.critic.parameters(), args.critic_lr)
        self.alpha_optimizer = Adam([self.log_alpha], args.alpha_lr)
        self.gamma, self.device, self.action_dim = args.gamma, device, action_dim
        self.target_entropy = args.target_entropy * action_dim

    @acting
    def act(self, obs: Tensor, deterministic: bool = False) -> Tensor:
        """Actions [n, action_dim] for obs [n, obs_dim]: samples of the policy, or tanh of its mean."""
        policy = self.actor(obs)
        return policy.mode if deterministic else policy.sample(self.generator)

    def critic_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Soft Bellman residual of every critic, eq. 5 and 6."""
        with torch.no_grad():
            next_actions, next_log_prob = self.actor(batch.next_obs).rsample(self.generator)
            next_value = self.critic_target(batch.next_obs, next_actions).amin(0) - self.log_alpha.exp() * next_log_prob
            # Termination masks the bootstrap; truncation does not (it is not in the batch at all).
            target = batch.rewards + self.gamma * (1.0 - batch.terminations) * next_value
        values = self.critic(batch.obs, batch.actions)
        loss = (values - target).square().mean(1).sum()
        return loss, {"losses/critic": loss.detach(), "losses/q": values.detach()}

    def actor_loss(self, batch: Batch) -> tuple[Tensor, Tensor, Metrics]:
        """KL divergence from the policy to exp(Q / α), eq. 7 and 9; also the log-probabilities [batch], for α."""
        actions, log_prob = self.actor(batch.obs).rsample(self.generator)
        with frozen(self.critic):  # the gradient passes through the critics and stops there
            value = self.critic(batch.obs, actions).amin(0)
        loss = (self.log_alpha.exp().detach() * log_prob - value).mean()
        return loss, log_prob.detach(), {"losses/actor": loss.detach(), "losses/entropy": -log_prob.detach()}

    def alpha_loss(self, log_prob: Tensor) -> tuple[Tensor, Metrics]:
        """Moves α until the policy's entropy is H̄, eq. 18."""
        alpha = self.log_alpha.exp()
        loss = -alpha * (log_prob.mean() + self.target_entropy)
        return loss, {"losses/alpha": loss.detach(), "charts/alpha": alpha.detach()}

    def update(self, batch: Batch) -> Metrics:
        """One gradient step of each network (the paper's algorithm 1, its inner loop)."""
        critic_loss, critic_metrics = self.critic_loss(batch)
        self.critic_optimizer.descend(critic_loss)
        actor_loss, log_prob, actor_metrics = self.actor_loss(batch)
        self.actor_optimizer.descend(actor_loss)
        alpha_loss, alpha_metrics = self.alpha_loss(log_prob)
        self.alpha_optimizer.descend(alpha_loss)
        self.follow_critic()
        return critic_metrics | actor_metrics | alpha_metrics


@returns_result
def train(args: Args) -> Result:
    run = Run("sac", args)
    envs = make_vector(args.env, args.num_envs, args.seed, vectorizer=args.vectorizer)
    eval_envs = [make(args.env) for _ in range(args.eval_episodes)]
    eval_seeds = seeds(args.seed, "evaluation", args.eval_episodes)
    obs_dim, action_dim = flatdim(envs.single_observation_space), flatdim(envs.single_action_space)
    agent = SAC(args, obs_dim, action_dim, run.device)
    buffer = ReplayBuffer(min(args.buffer_size, args.total_steps + args.num_envs), obs_dim, action_dim, run.device)
    update = run.accelerated(lambda: agent.update(buffer.sample(args.batch_size, agent.generator)), agent.generator)
    act, explore = run.acting(agent), partial(uniform_actions, args.num_envs, action_dim, agent.generator)

    saved = run.open()
    run.logger.say(str(buffer))
    run.warn_if_idle(args.learning_starts, "--learning-starts")
    if saved:
        restore(agent, saved["agent"])
        buffer.load(run.folder / "checkpoint" / "replay", saved["buffer"])
        obs, exact = set_states(envs, saved["envs"])
        run.warn_inexact(exact)
    else:
        obs, _ = envs.reset()
        run.logger.log_evaluation(evaluate(partial(agent.act, deterministic=True), eval_envs, eval_seeds))

    metrics: Metrics = {}

    def learn() -> None:
        """The updates that belong to the last step."""
        nonlocal metrics
        for _ in range(args.utd * args.num_envs if run.step > args.learning_starts else 0):
            with run.logger.timed("update"):
                metrics = update()

    while run.step < args.total_steps:
        # Act
        with run.logger.timed("act"):
            actions = explore() if run.step < args.learning_starts else act(obs)
        if run.claim_updates(before_step=True):
            learn()
        with run.logger.timed("env_step"):
            next_obs, rewards, terminations, truncations, _ = envs.step(actions)
        buffer.add(obs, actions, rewards, next_obs, terminations)
        dones = terminations | truncations
        run.logger.count(rewards, dones)
        obs = envs.reset(options={"reset_mask": dones})[0] if dones.any() else next_obs

        # Learn
        if run.claim_updates():
            learn()

        # Report
        if run.due(1_000):
            run.logger.log(metrics)
        if run.due(args.eval_every):
            run.logger.log_evaluation(evaluate(partial(agent.act, deterministic=True), eval_envs, eval_seeds))
        run.save_if_due(lambda: {"agent": state_of(agent), "envs": get_states(envs)}, buffer)
    envs.close()
    return run.finish()


if __name__ == "__main__":
    command_line(train, Args)
