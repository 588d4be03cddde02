"""Twin Delayed Deep Deterministic policy gradient.

Fujimoto, van Hoof and Meger 2018, "Addressing Function Approximation Error in Actor-Critic Methods", arXiv 1802.09477.
Algorithm and equation numbers below are that paper's.

    python algos/td3.py --env HalfCheetah-v4
    python algos/td3.py --env Hopper-v4 --seed 2 --total-steps 300000
    python algos/td3.py --env Walker2d-v4 --num-envs 4

Where public versions differ:
- networks and batch are those of the authors' present code (256 × 256, 256; paper: 400 × 300, 100), the learning rate
  is the paper's 1e-3, with which the published curves were made (present code: 3e-4);
- 5 000 steps of uniform random actions first (paper: 1 000 or 10 000, by environment; present code: 25 000);
- the actor and every target move at each second update, as in the paper's algorithm 1;
- actions live in [-1, 1] and the environment's wrapper rescales them, so that every noise is in units of their bound.
"""

from dataclasses import dataclass
from functools import partial

import torch
from gymnasium.spaces import flatdim
from torch import Tensor, nn

from common.acting import acting, uniform_actions
from common.arguments import OffPolicyArgs, OnlineArgs
from common.checkpoint import restore, state_of
from common.command_line import command_line
from common.evaluate import evaluate
from common.networks import Adam, Polyak, frozen, mlp
from common.replay_buffer import Batch, ReplayBuffer
from common.run import Result, Run, returns_result
from common.seeding import generator, seeds
from envs.make import make, make_vector
from envs.state import get_states, set_states

Metrics = dict[str, Tensor]  # of any shape: the logger takes their means, when it reads them


@dataclass
class Args(OnlineArgs, OffPolicyArgs):
    may_be_zero = ("learning_starts", "exploration_noise", "target_noise", "target_noise_clip")

    # Networks
    hidden: tuple[int, ...] = (256, 256)
    """Widths of the hidden layers of actor and critics."""
    critics: int = 2
    """Critics; the target uses the smallest of them, the actor the first."""

    # Learning
    gamma: float = 0.99
    """Discount."""
    tau: float = 0.005
    """Step of the targets towards actor and critics, when the actor is updated."""
    actor_lr: float = 1e-3
    """Learning rate of the actor."""
    critic_lr: float = 1e-3
    """Learning rate of the critics."""
    policy_delay: int = 2
    """Critic updates for each update of the actor and the targets."""
    exploration_noise: float = 0.1
    """Standard deviation of the noise on the actions taken."""
    target_noise: float = 0.2
    """Standard deviation of the noise on the target's actions (policy smoothing)."""
    target_noise_clip: float = 0.5
    """Where that noise is clipped."""
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
    """μ(s): obs [batch, obs_dim] to actions [batch, action_dim]."""

    def __init__(self, obs_dim: int, action_dim: int, hidden: tuple[int, ...], generator: torch.Generator) -> None:
        super().__init__()
        self.net = mlp([obs_dim, *hidden, action_dim], generator)

    def forward(self, obs: Tensor) -> Tensor:
        return torch.tanh(self.net(obs))


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

    def first(self, obs: Tensor, actions: Tensor) -> Tensor:
        """Q_1(s, a) alone: [batch]."""
        return self.net.member(0, torch.cat([obs, actions], dim=-1)).squeeze(-1)


class TD3:
    def __init__(self, args: Args, obs_dim: int, action_dim: int, device: torch.device) -> None:
        initializer = generator(args.seed, "networks")
        self.generator = generator(args.seed, "agent", device)
        self.actor = Actor(obs_dim, action_dim, args.hidden, initializer).to(device)
        self.actor_target = Actor(obs_dim, action_dim, args.hidden, initializer).to(device)
        self.actor_target.load_state_dict(self.actor.state_dict())
        self.follow_actor = Polyak(self.actor_target, self.actor, args.tau)
        self.critic = Critic(obs_dim, action_dim, args.hidden, args.critics, initializer).to(device)
        self.critic_target = Critic(obs_dim, action_dim, args.hidden, args.critics, initializer).to(device)
        self.critic_target.load_state_dict(self.critic.state_dict())
        self.follow_critic = Polyak(self.critic_target, self.critic, args.tau)
        self.actor_optimizer = Adam(self.actor.parameters(), args.actor_lr)
        self.critic_optimizer = Adam(self.critic.parameters(), args.critic_lr)
        self.gamma, self.device, self.action_dim = args.gamma, device, action_dim
        self.exploration_noise, self.policy_delay = args.exploration_noise, args.policy_delay
        self.target_noise, self.target_noise_clip = args.target_noise, args.target_noise_clip
        self.updates = 0

    def noise(self, actions: Tensor, scale: float) -> Tensor:
        """Gaussian noise of the actions' shape."""
        return scale * torch.randn(actions.shape, generator=self.generator, device=self.device)

    @acting
    def act(self, obs: Tensor, deterministic: bool = False) -> Tensor:
        """Actions [n, action_dim] for obs [n, obs_dim]: the policy's, with noise for exploration or without."""
        actions: Tensor = self.actor(obs)
        if deterministic:
            return actions
        return (actions + self.noise(actions, self.exploration_noise)).clamp(-1.0, 1.0)

    def critic_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Squared Bellman error of every critic; clipped double Q (eq. 10), target policy smoothing (eq. 15)."""
        with torch.no_grad():
            next_actions = self.actor_target(batch.next_obs)
            noise = self.noise(next_actions, self.target_noise).clamp(-self.target_noise_clip, self.target_noise_clip)
            next_actions = (next_actions + noise).clamp(-1.0, 1.0)
            next_value = self.critic_target(batch.next_obs, next_actions).amin(0)
            # Termination masks the bootstrap; truncation does not (it is not in the batch at all).
            target = batch.rewards + self.gamma * (1.0 - batch.terminations) * next_value
        values = self.critic(batch.obs, batch.actions)
        loss = (values - target).square().mean(1).sum()
        return loss, {"losses/critic": loss.detach(), "losses/q": values.detach()}

    def actor_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Deterministic policy gradient (algorithm 1): the first critic's value of the policy's actions."""
        actions = self.actor(batch.obs)
        with frozen(self.critic):  # the gradient passes through the critic and stops there
            value = self.critic.first(batch.obs, actions)
        loss = -value.mean()
        return loss, {"losses/actor": loss.detach()}

    def actor_is_due(self) -> bool:
        """Counts an update; at every `policy_delay`-th the actor moves too."""
        self.updates += 1
        return self.updates % self.policy_delay == 0

    def update(self, batch: Batch, with_actor: bool) -> Metrics:
        """One gradient step of the critics, and where it is due of the actor (the paper's algorithm 1)."""
        critic_loss, metrics = self.critic_loss(batch)
        self.critic_optimizer.descend(critic_loss)
        if with_actor:
            actor_loss, actor_metrics = self.actor_loss(batch)
            self.actor_optimizer.descend(actor_loss)
            self.follow_actor()
            self.follow_critic()
            metrics |= actor_metrics
        return metrics


@returns_result
def train(args: Args) -> Result:
    run = Run("td3", args)
    envs = make_vector(args.env, args.num_envs, args.seed, vectorizer=args.vectorizer)
    eval_envs = [make(args.env) for _ in range(args.eval_episodes)]
    eval_seeds = seeds(args.seed, "evaluation", args.eval_episodes)
    obs_dim, action_dim = flatdim(envs.single_observation_space), flatdim(envs.single_action_space)
    agent = TD3(args, obs_dim, action_dim, run.device)
    buffer = ReplayBuffer(min(args.buffer_size, args.total_steps + args.num_envs), obs_dim, action_dim, run.device)
    update = run.accelerated(
        lambda with_actor: agent.update(buffer.sample(args.batch_size, agent.generator), with_actor), agent.generator
    )
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
        for _ in range(args.utd * args.num_envs if run.step > args.learning_starts else 0):
            with run.logger.timed("update"):
                metrics.update(update(agent.actor_is_due()))

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
