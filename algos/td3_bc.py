"""TD3+BC: TD3 on a dataset with an actor that also imitates the dataset, offline and then online.

Fujimoto and Gu 2021, "A Minimalist Approach to Offline Reinforcement Learning", arXiv 2106.06860, section 5. Algorithm
and equation numbers below are TD3's (Fujimoto, van Hoof and Meger 2018, arXiv 1802.09477).

    python algos/td3_bc.py --dataset hopper-medium-v2
    python algos/td3_bc.py --dataset hopper-medium-v2 --d4rl-compat
    python algos/td3_bc.py --dataset hopper-medium-replay-v2 --online-steps 100000

`diff algos/td3.py algos/td3_bc.py` shows what an offline algorithm needs. Differences from the authors' code:
- The dataset's actions are clipped to ±(1 - 1e-5). Steps at a time-out are kept if they have a next observation.
  `--d4rl-compat` switches off both.
- Training can continue online, with TD3's exploration noise and the same losses. The paper has no online phase.
"""

import common.start

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from common.acting import acting
from common.arguments import Fraction, NonNegative
from common.command_line import command_line
from common.networks import Critic, frozen, mlp
from common.normalize import FixedNormalizer
from common.optim import Adam, SoftUpdate
from common.replay_buffer import Batch
from common.run import Result, Run, returns_result
from common.seeding import generator
from common.updater import Metrics
from offline.offline_to_online import OfflineArgs, OfflineToOnline, with_presets


@dataclass
class Args(OfflineArgs):
    # Networks
    hidden: tuple[int, ...] = (256, 256)
    """Widths of the hidden layers, for actor and critics."""
    critics: int = 2
    """Number of critics. The target uses the smallest value, the actor the first critic."""

    normalize_obs: bool = True
    """Normalise observations by the mean and standard deviation of the dataset's."""

    # Learning
    alpha: float = 2.5
    """α: weight of the critic's value relative to the imitation of the dataset's actions."""
    gamma: Fraction = 0.99
    """Discount factor."""
    tau: Fraction = 0.005
    """Soft-update rate of the target networks, at each update of the actor."""
    actor_lr: float = 3e-4
    """Learning rate of the actor."""
    critic_lr: float = 3e-4
    """Learning rate of the critics."""
    policy_delay: int = 2
    """Critic updates for each update of the actor and the target networks."""
    exploration_noise: NonNegative = 0.1
    """Standard deviation of the exploration noise online."""
    target_noise: NonNegative = 0.2
    """Standard deviation of the noise on the target's actions (target policy smoothing)."""
    target_noise_clip: NonNegative = 0.5
    """Largest absolute value of the noise on the target's actions."""


class Actor(nn.Module):
    """μ(s): map obs [batch, obs_dim] to actions [batch, action_dim]."""

    def __init__(self, obs_dim: int, action_dim: int, hidden: tuple[int, ...], generator: torch.Generator) -> None:
        super().__init__()
        self.net = mlp([obs_dim, *hidden, action_dim], generator)

    def forward(self, obs: Tensor) -> Tensor:
        return torch.tanh(self.net(obs))


class TD3BC:
    def __init__(self, args: Args, obs_dim: int, action_dim: int, device: torch.device) -> None:
        initializer = generator(args.seed, "networks")
        self.generator = generator(args.seed, "agent", device)
        self.actor = Actor(obs_dim, action_dim, args.hidden, initializer).to(device)
        self.target_actor = Actor(obs_dim, action_dim, args.hidden, initializer).to(device)
        self.target_actor.load_state_dict(self.actor.state_dict())
        self.update_target_actor = SoftUpdate(self.target_actor, self.actor, args.tau)
        sizes = [obs_dim + action_dim, *args.hidden, 1]
        self.critic = Critic(mlp(sizes, initializer, args.critics)).to(device)
        self.target_critic = Critic(mlp(sizes, initializer, args.critics)).to(device)
        self.target_critic.load_state_dict(self.critic.state_dict())
        self.update_target_critic = SoftUpdate(self.target_critic, self.critic, args.tau)
        self.actor_optimizer = Adam(self.actor.parameters(), args.actor_lr)
        self.critic_optimizer = Adam(self.critic.parameters(), args.critic_lr)
        self.obs_normalizer = FixedNormalizer(obs_dim).to(device) if args.normalize_obs else nn.Identity()
        self.args, self.device = args, device

    def noise(self, actions: Tensor, scale: float) -> Tensor:
        """Return Gaussian noise of the same shape as the actions, with standard deviation `scale`."""
        return scale * torch.randn(actions.shape, generator=self.generator, device=self.device)

    @acting
    def act(self, obs: Tensor, deterministic: bool = False) -> Tensor:
        """Return the policy's actions [n, action_dim] for obs [n, obs_dim], with exploration noise or without."""
        actions: Tensor = self.actor(self.obs_normalizer(obs))
        if deterministic:
            return actions
        return (actions + self.noise(actions, self.args.exploration_noise)).clamp(-1.0, 1.0)

    def critic_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Return the squared Bellman error, summed over the critics: clipped double Q (eq. 10), smoothing (eq. 15)."""
        with torch.no_grad():
            next_actions = self.target_actor(batch.next_obs)
            limit = self.args.target_noise_clip
            noise = self.noise(next_actions, self.args.target_noise).clamp(-limit, limit)
            next_actions = (next_actions + noise).clamp(-1.0, 1.0)
            next_value = self.target_critic(batch.next_obs, next_actions).amin(0)
            # Termination masks the bootstrap. Truncation does not, so it is not even in the batch.
            target = batch.rewards + self.args.gamma * (1.0 - batch.terminations) * next_value
        values = self.critic(batch.obs, batch.actions)
        loss = (values - target).square().mean(1).sum()
        return loss, {"losses/critic": loss.detach(), "losses/q": values.detach()}

    def actor_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Return -λ Q_1(s, μ(s)) + (μ(s) - a)²: value of the policy's actions, and imitation of the data's."""
        actions = self.actor(batch.obs)
        with frozen(self.critic):  # the gradient passes through the critic and stops there
            value = self.critic(batch.obs, actions, 0)
        # λ = α / mean |Q_1| makes the balance independent of the rewards' scale. One number a batch, without gradient.
        weight = self.args.alpha / value.detach().abs().mean()
        imitation = (actions - batch.actions).square().mean()  # the mean over dimensions too: α is tuned for it
        loss = imitation - weight * value.mean()
        return loss, {"losses/actor": loss.detach(), "losses/imitation": imitation.detach(), "charts/weight": weight}

    def update(self, batch: Batch, with_actor: bool) -> Metrics:
        """Take a gradient step with the critics, and one with the actor if `with_actor` (TD3's algorithm 1)."""
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
    args = with_presets(args, {})  # the paper has one setting for all domains
    run = Run("td3_bc", args)
    data = OfflineToOnline(args, run)
    rollout = data.rollout()
    agent = TD3BC(args, rollout.obs_dim, rollout.action_dim, run.device)
    data.dataset.fit(agent.obs_normalizer)
    policy = run.policy(agent)
    update = run.updater(
        lambda online, with_actor: agent.update(data.sample(online, agent.generator), with_actor),
        agent.generator,
    )
    data.load_pretrained(agent)
    run.resume(agent=agent, data=data, rollout=rollout, update=update)

    for step in run.steps():
        # Act: after pre-training
        if step > 0:
            data.add(rollout.step(policy(rollout.obs), meanwhile=update.flush))

        # Learn
        for _ in range(data.updates_due(step, args.utd)):
            update(online=step > 0, with_actor=(update.count + 1) % args.policy_delay == 0)

        # Report
        run.report(update.metrics)
    return run.finish()


if __name__ == "__main__":
    command_line(train, Args)
