"""TD3+BC: TD3 on a dataset, whose actor imitates the dataset too; offline and then online.

Fujimoto and Gu 2021, "A Minimalist Approach to Offline Reinforcement Learning", arXiv 2106.06860, section 5. Algorithm
and equation numbers below are TD3's (Fujimoto, van Hoof and Meger 2018, arXiv 1802.09477).

    python algos/td3_bc.py --dataset hopper-medium-v2
    python algos/td3_bc.py --dataset hopper-medium-v2 --d4rl-compat
    python algos/td3_bc.py --dataset hopper-medium-replay-v2 --online-steps 100000

`diff algos/td3.py algos/td3_bc.py` shows what an offline algorithm needs. What differs from the authors' own code:
- the dataset's actions are clipped to ±(1 - 1e-5), and its steps at a time-out are kept where they have a next
  observation; `--d4rl-compat` does neither, as theirs;
- it can go on online, which the paper does not: with TD3's noise on the actions, and the same losses.
"""

from dataclasses import dataclass
from functools import partial

import torch
from gymnasium.spaces import flatdim
from torch import Tensor, nn

from common.acting import acting
from common.checkpoint import restore, state_of
from common.command_line import command_line
from common.evaluate import evaluate
from common.networks import Adam, Polyak, frozen, mlp
from common.normalize import FixedNormalizer
from common.replay_buffer import Batch
from common.run import Result, Run, returns_result
from common.seeding import generator, seeds
from envs.make import make, make_vector
from envs.state import get_states, set_states
from offline.switch import OfflineArgs, Switch, with_presets

Metrics = dict[str, Tensor]  # of any shape: the logger takes their means, when it reads them


@dataclass
class Args(OfflineArgs):
    may_be_zero = ("exploration_noise", "target_noise", "target_noise_clip")

    # Networks
    hidden: tuple[int, ...] = (256, 256)
    """Widths of the hidden layers of actor and critics."""
    critics: int = 2
    """Critics; the target uses the smallest of them, the actor the first."""

    # Learning
    alpha: float = 2.5
    """α: how much the critic's value counts beside the imitation of the batch's actions."""
    gamma: float = 0.99
    """Discount."""
    tau: float = 0.005
    """Step of the targets towards actor and critics, when the actor is updated."""
    actor_lr: float = 3e-4
    """Learning rate of the actor."""
    critic_lr: float = 3e-4
    """Learning rate of the critics."""
    policy_delay: int = 2
    """Critic updates for each update of the actor and the targets."""
    exploration_noise: float = 0.1
    """Standard deviation of the noise on the actions taken online."""
    target_noise: float = 0.2
    """Standard deviation of the noise on the target's actions (policy smoothing)."""
    target_noise_clip: float = 0.5
    """Where that noise is clipped."""
    batch_size: int = 256
    """Transitions in an update."""


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


class TD3BC:
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
        self.obs_normalizer = FixedNormalizer(obs_dim, epsilon=1e-3).to(device)
        self.args, self.device = args, device
        self.updates = 0

    def noise(self, actions: Tensor, scale: float) -> Tensor:
        """Gaussian noise of the actions' shape."""
        return scale * torch.randn(actions.shape, generator=self.generator, device=self.device)

    @acting
    def act(self, obs: Tensor, deterministic: bool = False) -> Tensor:
        """Actions [n, action_dim] for obs [n, obs_dim]: the policy's, with noise for exploration or without."""
        actions: Tensor = self.actor(self.obs_normalizer(obs))
        if deterministic:
            return actions
        return (actions + self.noise(actions, self.args.exploration_noise)).clamp(-1.0, 1.0)

    def critic_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Squared Bellman error of every critic; clipped double Q (eq. 10), target policy smoothing (eq. 15)."""
        with torch.no_grad():
            next_actions = self.actor_target(batch.next_obs)
            limit = self.args.target_noise_clip
            noise = self.noise(next_actions, self.args.target_noise).clamp(-limit, limit)
            next_actions = (next_actions + noise).clamp(-1.0, 1.0)
            next_value = self.critic_target(batch.next_obs, next_actions).amin(0)
            # Termination masks the bootstrap; truncation does not (it is not in the batch at all).
            target = batch.rewards + self.args.gamma * (1.0 - batch.terminations) * next_value
        values = self.critic(batch.obs, batch.actions)
        loss = (values - target).square().mean(1).sum()
        return loss, {"losses/critic": loss.detach(), "losses/q": values.detach()}

    def actor_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """-λ Q_1(s, μ(s)) + (μ(s) - a)²: the first critic's value of the policy's actions, and their imitation."""
        actions = self.actor(batch.obs)
        with frozen(self.critic):  # the gradient passes through the critic and stops there
            value = self.critic.first(batch.obs, actions)
        # λ = α / mean |Q_1| keeps the balance whatever the scale of rewards: one number a batch, without a gradient.
        weight = self.args.alpha / value.detach().abs().mean()
        imitation = (actions - batch.actions).square().mean()  # over dimensions too, which α is tuned for
        loss = imitation - weight * value.mean()
        return loss, {"losses/actor": loss.detach(), "losses/imitation": imitation.detach(), "charts/weight": weight}

    def actor_is_due(self) -> bool:
        """Counts an update; at every `policy_delay`-th the actor moves too."""
        self.updates += 1
        return self.updates % self.args.policy_delay == 0

    def update(self, batch: Batch, with_actor: bool) -> Metrics:
        """One gradient step of the critics, and where it is due of the actor (TD3's algorithm 1)."""
        batch = batch._replace(obs=self.obs_normalizer(batch.obs), next_obs=self.obs_normalizer(batch.next_obs))
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
    args = with_presets(args, {})  # the paper has one setting for all domains
    run = Run("td3_bc", args)
    switch = Switch(args, run, full_batch=args.batch_size)
    envs = make_vector(switch.env, args.num_envs, args.seed, vectorizer=args.vectorizer, **switch.env_kwargs)
    eval_envs = [make(switch.env, **switch.env_kwargs) for _ in range(args.eval_episodes)]
    eval_seeds = seeds(args.seed, "evaluation", args.eval_episodes)
    obs_dim, action_dim = flatdim(envs.single_observation_space), flatdim(envs.single_action_space)
    agent = TD3BC(args, obs_dim, action_dim, run.device)
    update = run.accelerated(
        lambda online, with_actor: agent.update(switch.sample(args.batch_size, online, agent.generator), with_actor),
        agent.generator,
    )
    act = run.acting(agent)

    switch.begin(agent, obs_dim, action_dim)
    saved = switch.open(run)
    if saved:
        restore(agent, saved["agent"])
        obs, exact = set_states(envs, saved["envs"])
        run.warn_inexact(exact)
    else:
        if args.init_from is None:  # which brings the statistics that its networks learned with
            agent.obs_normalizer.set_statistics(*switch.dataset.obs_statistics())
        obs, _ = envs.reset()
        run.logger.log_evaluation(evaluate(partial(agent.act, deterministic=True), eval_envs, eval_seeds))

    metrics: Metrics = {}

    def learn() -> None:
        """The updates that belong to the last step."""
        if not (updates := switch.updates(run.step)):
            metrics.clear()
        for _ in range(updates):
            with run.logger.timed("update"):
                metrics.update(update(run.step > 0, agent.actor_is_due()))

    while run.step < args.online_steps:
        # Act
        if run.step < 0:
            run.logger.count_update()
        else:
            with run.logger.timed("act"):
                actions = act(obs)
            if run.claim_updates(before_step=True):
                learn()
            with run.logger.timed("env_step"):
                next_obs, rewards, terminations, truncations, _ = envs.step(actions)
            switch.add(obs, actions, rewards, next_obs, terminations, truncations)
            dones = terminations | truncations
            run.logger.count(rewards, dones)
            obs = envs.reset(options={"reset_mask": dones})[0] if dones.any() else next_obs

        # Learn
        if run.claim_updates():
            learn()

        # Report
        if run.due(1_000):
            run.logger.log(metrics)
        if switch.evaluates(run):
            run.logger.log_evaluation(evaluate(partial(agent.act, deterministic=True), eval_envs, eval_seeds))
        run.save_if_due(lambda: switch.state() | {"agent": state_of(agent), "envs": get_states(envs)}, switch.online)
    envs.close()
    return run.finish()


if __name__ == "__main__":
    command_line(train, Args)
