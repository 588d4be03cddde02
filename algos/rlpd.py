"""RLPD: SAC from scratch, with a dataset in half of every batch, many critics and many updates a step.

Ball, Smith, Kostrikov and Levine 2023, "Efficient Online Reinforcement Learning with Offline Data", arXiv 2302.02948.

    python algos/rlpd.py --dataset halfcheetah-expert-v2
    python algos/rlpd.py --dataset antmaze-large-diverse-v2
    python algos/rlpd.py --dataset data/mine.hdf5 --env Hopper-v4 --utd 4
    python algos/rlpd.py --dataset scene-play-singletask-task2-v0 --chunk 5

With --chunk h it acts in chunks of h actions, and its critics value chunks (RLPD-AC): Li, Zhou and Levine 2025,
"Reinforcement Learning with Action Chunking", arXiv 2507.07969.

The choices are those of the authors' code:
- Each of the 20 critic updates per step has its own batch, half online data and half from the dataset.
- Each target uses the smallest of `target_critics` target critics, drawn without replacement.
- Critics have layer normalisation, the actor has none. Weights start as Glorot uniform, biases as 0.
- Actor and temperature are updated once per step, on the last batch. The actor maximises the mean of all critics.
- The target includes the entropy on locomotion only.
"""

import common.start

import copy
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from common.acting import acting
from common.arguments import BY_DOMAIN, AnyNumber, Fraction, NonNegativeInt
from common.command_line import command_line
from common.errors import InputError
from common.networks import Critic, TanhGaussian, frozen, glorot, mlp
from common.normalize import FixedNormalizer
from common.optim import Adam, SoftUpdate
from common.replay_buffer import Batch
from common.run import Result, Run, returns_result
from common.seeding import generator
from common.updater import Metrics
from offline.offline_to_online import OfflineArgs, OfflineToOnline, with_presets
from offline.rewards import RewardTransform


@dataclass
class Args(OfflineArgs):
    # From data to online
    offline_steps: NonNegativeInt = 0
    """Updates on the dataset alone. The paper has none."""
    online_steps: NonNegativeInt = BY_DOMAIN
    """Environment steps, summed over all environments."""
    retain: Literal["none", "append", "mix"] = "mix"
    """Data for online updates. none: online transitions. append: dataset and online transitions as one buffer.
    mix: a fixed share of each batch from the dataset."""
    random_steps: NonNegativeInt = 5_000
    """Environment steps with uniform random actions before the first online update."""
    utd: int = 20
    """Critic updates for each environment step, each on a new batch. The actor is updated once, on the last batch."""

    # Acting
    chunk: int = 1
    """h: actions that the policy plans at once. They are executed open loop, without observing again."""

    # Networks
    hidden: tuple[int, ...] = BY_DOMAIN
    """Widths of the hidden layers, for actor and critics."""
    critics: int = 10
    """Number of critics. The actor uses their mean."""
    target_critics: int = BY_DOMAIN
    """Number of critics that a target uses. They are drawn again for each target."""

    # Learning
    gamma: Fraction = 0.99
    """Discount factor."""
    tau: Fraction = 0.005
    """Soft-update rate of the target critics, at each update of the critics."""
    actor_lr: float = 3e-4
    """Learning rate of the actor."""
    critic_lr: float = 3e-4
    """Learning rate of the critics."""
    alpha_lr: float = 3e-4
    """Learning rate of the temperature."""
    batch_size: int = 256
    """Transitions in each update of the critics."""
    backup_entropy: bool = BY_DOMAIN
    """Add the policy's entropy to the target, as SAC does."""
    target_entropy: AnyNumber = -0.5
    """Target entropy H̄ for each dimension of the action."""
    reward_shift: AnyNumber = BY_DOMAIN
    """Number added to each reward."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target_critics is not BY_DOMAIN and self.target_critics > self.critics:
            raise InputError(f"--target-critics is {self.target_critics}: give at most --critics, {self.critics}")


LOCOMOTION = {  # the authors' configurations and README
    "online_steps": 250_000, "hidden": (256, 256), "target_critics": 2, "backup_entropy": True, "reward_shift": 0.0,
}  # fmt: skip
ADROIT = LOCOMOTION | {"online_steps": 1_000_000, "hidden": (256,) * 3, "backup_entropy": False}
ANTMAZE = ADROIT | {"online_steps": 300_000, "target_critics": 1, "reward_shift": -1.0}
PRESETS: dict[str, dict[str, Any]] = {
    "locomotion": LOCOMOTION, "antmaze": ANTMAZE, "maze2d": ANTMAZE, "adroit": ADROIT,
}  # fmt: skip


class Actor(nn.Module):
    """π(a|s): map obs [batch, obs_dim] to a tanh-Gaussian over actions [batch, action_dim]."""

    def __init__(self, obs_dim: int, action_dim: int, args: Args, generator: torch.Generator) -> None:
        super().__init__()
        self.net = glorot(mlp([obs_dim, *args.hidden, 2 * action_dim], generator), generator)

    def forward(self, obs: Tensor) -> TanhGaussian:
        mean, log_std = self.net(obs).chunk(2, dim=-1)
        return TanhGaussian(mean, log_std.clamp(-20.0, 2.0))


class RLPD:
    def __init__(self, args: Args, obs_dim: int, action_dim: int, device: torch.device) -> None:
        initializer = generator(args.seed, "networks")
        self.generator = generator(args.seed, "agent", device)
        action_dim = args.chunk * action_dim  # from here on, an action is a chunk
        self.actor = Actor(obs_dim, action_dim, args, initializer).to(device)
        critic = mlp([obs_dim + action_dim, *args.hidden, 1], initializer, args.critics, layer_norm=True)
        self.critic = Critic(glorot(critic, initializer)).to(device)
        self.target_critic = copy.deepcopy(self.critic)
        self.update_target_critic = SoftUpdate(self.target_critic, self.critic, args.tau)
        self.log_alpha = nn.Parameter(torch.zeros((), device=device))
        self.actor_optimizer = Adam(self.actor.parameters(), args.actor_lr)
        self.critic_optimizer = Adam(self.critic.parameters(), args.critic_lr)
        self.alpha_optimizer = Adam([self.log_alpha], args.alpha_lr)
        self.obs_normalizer = FixedNormalizer(obs_dim).to(device) if args.normalize_obs else nn.Identity()
        self.args, self.device = args, device
        self.target_entropy = args.target_entropy * action_dim

    @acting
    def act(self, obs: Tensor, deterministic: bool = False) -> Tensor:
        """Return actions [n, action_dim] for obs [n, obs_dim]: samples of the policy, or tanh of its mean.

        With --chunk h, action_dim is that of h actions, one after another.
        """
        policy = self.actor(self.obs_normalizer(obs))
        return policy.mode if deterministic else policy.sample(self.generator)

    def subset(self) -> Tensor:
        """Draw the critics of one target: [target_critics], without replacement."""
        order = torch.rand(self.args.critics, generator=self.generator, device=self.device).argsort()
        return order[: self.args.target_critics]

    @torch.no_grad()
    def target(self, batch: Batch) -> Tensor:
        """Return y = r + γ (min_{i ∈ Z} Q̄_i(s', a') - α log π(a'|s')), Z the critics drawn: [batch] (algorithm 1).

        With chunks, r is the sum Σ γⁱ r over h steps, and the discount is γʰ.
        """
        next_actions, next_log_prob = self.actor(batch.next_obs).rsample(self.generator)
        next_value = self.target_critic(batch.next_obs, next_actions, self.subset()).amin(0)
        if self.args.backup_entropy:
            next_value = next_value - self.log_alpha.exp() * next_log_prob
        # Termination masks the bootstrap. Truncation does not, so it is not even in the batch.
        return batch.rewards + self.args.gamma**self.args.chunk * (1.0 - batch.terminations) * next_value

    def critic_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Return the squared Bellman error, the mean over critics and batch.

        Chunks that pass the end of their episode do not count.
        """
        values = self.critic(batch.obs, batch.actions)
        loss = (batch.whole * (values - self.target(batch)).square()).mean()
        return loss, {"losses/critic": loss.detach(), "losses/q": values.detach()}

    def actor_loss(self, batch: Batch) -> tuple[Tensor, Tensor, Metrics]:
        """Return α log π - mean_i Q_i over all critics, and log π [batch] for α."""
        actions, log_prob = self.actor(batch.obs).rsample(self.generator)
        with frozen(self.critic):  # the gradient passes through the critics and stops there
            value = self.critic(batch.obs, actions).mean(0)
        loss = (self.log_alpha.exp().detach() * log_prob - value).mean()
        return loss, log_prob.detach(), {"losses/actor": loss.detach(), "losses/entropy": -log_prob.detach()}

    def alpha_loss(self, log_prob: Tensor) -> tuple[Tensor, Metrics]:
        """Return the loss that moves α until the policy's entropy is H̄."""
        alpha = self.log_alpha.exp()
        loss = -alpha * (log_prob.mean() + self.target_entropy)
        return loss, {"losses/alpha": loss.detach(), "charts/alpha": alpha.detach()}

    def update(self, batch: Batch) -> Metrics:
        """Step the critics on each `batch_size` of the batch in turn, then actor and α on the last (algorithm 1)."""
        batch = batch.map_obs(self.obs_normalizer)
        for part in batch.slices(self.args.batch_size):
            critic_loss, critic_metrics = self.critic_loss(part)
            self.critic_optimizer.minimize(critic_loss)
            self.update_target_critic()
        actor_loss, log_prob, actor_metrics = self.actor_loss(part)
        self.actor_optimizer.minimize(actor_loss)
        alpha_loss, alpha_metrics = self.alpha_loss(log_prob)
        self.alpha_optimizer.minimize(alpha_loss)
        return critic_metrics | actor_metrics | alpha_metrics


@returns_result
def train(args: Args) -> Result:
    args = with_presets(args, PRESETS)
    run = Run("rlpd", args)
    data = OfflineToOnline(
        args, run, RewardTransform(shift=args.reward_shift), online_batch=args.utd * args.batch_size,
        windows=(args.chunk, args.gamma),
    )  # fmt: skip
    rollout = data.rollout()
    agent = RLPD(args, rollout.obs_dim, rollout.action_dim, run.device)
    data.dataset.fit(agent.obs_normalizer)
    policy = run.policy(agent)
    update = run.updater(lambda online: agent.update(data.sample(online, agent.generator)), agent.generator)
    data.load_pretrained(agent)
    run.learns_after(args.random_steps, "--random-steps")
    run.resume(agent=agent, data=data, rollout=rollout, update=update)

    for step in run.steps():
        # Act
        if step > 0:
            random = rollout.steps < args.random_steps
            actions = rollout.random_actions(agent.generator) if random else rollout.act(policy)
            data.add(rollout.step(actions, meanwhile=update.flush))

        # Learn
        for _ in range(0 if 0 < step <= args.random_steps else data.updates_due(step)):
            update(online=step > 0)

        # Report
        run.report(update.metrics)
    return run.finish()


if __name__ == "__main__":
    command_line(train, Args)
