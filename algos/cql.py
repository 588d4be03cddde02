"""Conservative Q-Learning, CQL(H), and its calibrated form Cal-QL, from offline data to online fine-tuning.

Kumar et al. 2020, "Conservative Q-Learning for Offline Reinforcement Learning", arXiv 2006.04779. It is SAC whose
critic loss also lowers log Σ_a exp Q(s, a) and raises Q at the data's actions. Equation numbers are that paper's.
Nakamoto et al. 2023, "Cal-QL: Calibrated Offline RL Pre-Training for Efficient Online Fine-Tuning", arXiv 2303.05479.
With `--calibrated`, no value is lowered below that of the policy that made the data.

    python algos/cql.py --dataset hopper-medium-v2
    python algos/cql.py --dataset antmaze-medium-play-v2 --calibrated --online-steps 1000000
    python algos/cql.py --dataset data/mine.hdf5 --env Hopper-v4 --offline-steps 100000

These choices follow the authors' code, not the paper (docs/cql.md lists all):
- The Bellman error has no ½, and the target no entropy.
- The log-sum-exp also values actions of π(·|s') at s.
- α's loss is -log α (log π + H̄).

As in Cal-QL's code, all losses, including α's, are computed before any network is updated. The networks follow neither:
they are those of sac.py, without Cal-QL's orthogonal initialisation and its learned scale and offset of log σ.
"""

import common.start

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from common.acting import acting
from common.arguments import BY_DOMAIN, AnyNumber, Fraction, NonNegative, NonNegativeInt, OptionalNumber
from common.command_line import command_line
from common.networks import Critic, TanhGaussian, frozen, mlp
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
    offline_steps: NonNegativeInt = BY_DOMAIN
    """Updates on the dataset alone. With --init-from, the default is 0."""
    retain: Literal["none", "append", "mix"] = "mix"
    """Data for online updates. none: online transitions. append: dataset and online transitions as one buffer.
    mix: a fixed share of each batch from the dataset."""

    # Networks
    hidden: tuple[int, ...] = BY_DOMAIN
    """Widths of the actor's hidden layers."""
    critic_hidden: tuple[int, ...] = BY_DOMAIN
    """Widths of the critics' hidden layers."""
    critics: int = 2
    """Number of critics. Target and actor use the smallest value."""

    # Learning
    gamma: Fraction = 0.99
    """Discount factor."""
    tau: Fraction = 0.005
    """Soft-update rate of the target critics, at each update."""
    actor_lr: float = 1e-4
    """Learning rate of the actor."""
    critic_lr: float = 3e-4
    """Learning rate of the critics and of the Lagrange multiplier."""
    alpha_lr: float = 1e-4
    """Learning rate of the temperature."""
    bc_steps: NonNegativeInt = 0
    """Updates at the start in which the actor imitates the dataset's actions instead (the authors' code: 40,000)."""

    # Bellman target
    max_target_backup: bool = BY_DOMAIN
    """Use the best of --cql-actions next actions in the target, instead of one."""
    backup_entropy: bool = False
    """Add the policy's entropy to the target, as SAC does."""

    # Conservative term
    cql_weight: NonNegative = BY_DOMAIN
    """Weight of the conservative term (min_q_weight in the authors' code)."""
    cql_actions: int = 10
    """Actions n that are sampled from each source: uniform, π(·|s) and π(·|s')."""
    cql_temperature: float = 1.0
    """Temperature of the log-sum-exp."""
    importance_sampling: bool = BY_DOMAIN
    """Divide by the density of each sampled action, CQL(H).
    Otherwise use CQL(ρ), which adds the dataset's action to the samples."""
    cql_clip_min: OptionalNumber = None
    """Lower bound of each transition's conservative term (CORL on AntMaze: -200)."""
    lagrange_gap: NonNegative = BY_DOMAIN
    """Target value of the conservative term, held by a Lagrange multiplier. 0: no multiplier."""
    calibrated: bool = False
    """Use Cal-QL: do not lower values of the policy's actions below the dataset's return-to-go."""

    # Rewards
    reward_scale: float = BY_DOMAIN
    """Factor that multiplies each reward."""
    reward_shift: AnyNumber = BY_DOMAIN
    """Number added to each reward after scaling."""
    failure_reward: OptionalNumber = BY_DOMAIN
    """With --calibrated: raw reward of a step without success.
    Cal-QL's returns-to-go assume that an episode of such steps, or one that is cut while it fails, fails forever."""


# Sources: young-geng/CQL for locomotion, Cal-QL for antmaze and adroit-binary, CORL for maze2d and adroit. Kitchen has
# WSRL's settings and Cal-QL's number of steps.
LOCOMOTION = {
    "offline_steps": 1_000_000, "hidden": (256, 256), "critic_hidden": (256, 256), "max_target_backup": False,
    "cql_weight": 5.0, "lagrange_gap": 0.0, "importance_sampling": True, "reward_scale": 1.0, "reward_shift": 0.0,
    "failure_reward": None,
}  # fmt: skip
DEEPER = {"hidden": (256,) * 3, "critic_hidden": (256,) * 3}
WIDE = LOCOMOTION | {"hidden": (512,) * 3, "critic_hidden": (512,) * 3, "max_target_backup": True}
PRESETS: dict[str, dict[str, Any]] = {
    "locomotion": LOCOMOTION,
    "antmaze": LOCOMOTION | {"critic_hidden": (256,) * 4, "max_target_backup": True, "lagrange_gap": 0.8,
                             "reward_scale": 10.0, "reward_shift": -5.0, "failure_reward": 0.0},
    "maze2d": LOCOMOTION | DEEPER | {"cql_weight": 10.0, "lagrange_gap": 5.0},
    "adroit": LOCOMOTION | DEEPER | {"cql_weight": 1.0},
    "adroit-binary": WIDE | {"offline_steps": 20_000, "hidden": (512, 512), "cql_weight": 1.0,
                             "reward_scale": 10.0, "reward_shift": 5.0, "failure_reward": -1.0},
    "kitchen": WIDE | {"offline_steps": 500_000, "reward_shift": -4.0, "importance_sampling": False},
}  # fmt: skip


class Actor(nn.Module):
    """π(a|s): map obs [batch, obs_dim] to a tanh-Gaussian over actions [batch, action_dim]."""

    def __init__(self, obs_dim: int, action_dim: int, args: Args, generator: torch.Generator) -> None:
        super().__init__()
        self.net = mlp([obs_dim, *args.hidden, 2 * action_dim], generator)

    def forward(self, obs: Tensor) -> TanhGaussian:
        mean, log_std = self.net(obs).chunk(2, dim=-1)
        return TanhGaussian(mean, log_std.clamp(-20.0, 2.0))


class CQL:
    def __init__(self, args: Args, obs_dim: int, action_dim: int, device: torch.device) -> None:
        initializer = generator(args.seed, "networks")
        self.generator = generator(args.seed, "agent", device)
        self.actor = Actor(obs_dim, action_dim, args, initializer).to(device)
        sizes = [obs_dim + action_dim, *args.critic_hidden, 1]
        self.critic = Critic(mlp(sizes, initializer, args.critics)).to(device)
        self.target_critic = Critic(mlp(sizes, initializer, args.critics)).to(device)
        self.target_critic.load_state_dict(self.critic.state_dict())
        self.update_target_critic = SoftUpdate(self.target_critic, self.critic, args.tau)
        self.log_alpha = nn.Parameter(torch.zeros((), device=device))
        self.log_lagrange = nn.Parameter(torch.ones((), device=device))  # Lagrange multiplier of the term, log
        self.actor_optimizer = Adam(self.actor.parameters(), args.actor_lr)
        self.critic_optimizer = Adam(self.critic.parameters(), args.critic_lr)
        self.alpha_optimizer = Adam([self.log_alpha], args.alpha_lr)
        self.lagrange_optimizer = Adam([self.log_lagrange], args.critic_lr)
        self.obs_normalizer = FixedNormalizer(obs_dim).to(device) if args.normalize_obs else nn.Identity()
        self.cql_weight, self.lagrange_gap = args.cql_weight, args.lagrange_gap
        self.args, self.device, self.action_dim = args, device, action_dim
        self.target_entropy = -float(action_dim)

    @acting
    def act(self, obs: Tensor, deterministic: bool = False) -> Tensor:
        """Return actions [n, action_dim] for obs [n, obs_dim]: samples of the policy, or tanh of its mean."""
        policy = self.actor(self.obs_normalizer(obs))
        return policy.mode if deterministic else policy.sample(self.generator)

    @torch.no_grad()
    def target(self, batch: Batch) -> Tensor:
        """Return y = r + γ min_i Q̄_i(s', a'), or its maximum over several a' (max_target_backup): [batch]."""
        count = self.args.cql_actions if self.args.max_target_backup else 1
        actions, log_prob = self.actor(batch.next_obs).expand(count).rsample(self.generator)
        next_value, best = self.target_critic(batch.next_obs, actions).amin(0).max(0)
        if self.args.backup_entropy:
            next_value = next_value - self.log_alpha.exp() * log_prob.gather(0, best.unsqueeze(0)).squeeze(0)
        # Termination masks the bootstrap. Truncation does not, so it is not even in the batch.
        return batch.rewards + self.args.gamma * (1.0 - batch.terminations) * next_value

    @torch.no_grad()
    def sampled_actions(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Draw n uniform actions, n of π(·|s) and n of π(·|s') for each state: [3n, batch, action_dim].

        Also return the log-densities that they were drawn with, [3n, batch]. There is no gradient, because the term
        trains the critics alone.
        """
        shape = (self.args.cql_actions, *batch.actions.shape)
        uniform = 2.0 * torch.rand(shape, generator=self.generator, device=self.device) - 1.0
        current, log_prob = self.actor(batch.obs).expand(self.args.cql_actions).rsample(self.generator)
        following, following_log_prob = self.actor(batch.next_obs).expand(self.args.cql_actions).rsample(self.generator)
        log_density = torch.full_like(log_prob, self.action_dim * math.log(0.5))
        return torch.cat([uniform, current, following]), torch.cat([log_density, log_prob, following_log_prob])

    def conservative_term(self, values: Tensor, log_density: Tensor, returns_to_go: Tensor | None) -> Tensor:
        """Return log Σ_a exp Q_i(s, a) - Q_i(s, a_data) of every critic (eq. 4): [critics].

        `values` [critics, 3n + 1, batch] are those of the sampled actions and, last, of the data's actions.
        """
        proposed, data = values[:, :-1], values[:, -1]
        if self.args.calibrated:
            if returns_to_go is None:
                raise ValueError("Cal-QL (calibrated) needs batches with returns_to_go")
            # Cal-QL's max(Q, G) has no gradient in Q below G(s). Uniform actions and the data's have no bound.
            uniform, by_policy = proposed.tensor_split([self.args.cql_actions], dim=1)
            proposed = torch.cat([uniform, torch.maximum(by_policy, returns_to_go)], dim=1)
        if self.args.importance_sampling:  # a sum over all actions: samples, each over its density (appendix F)
            entries = proposed - log_density
        else:
            entries = torch.cat([proposed, data.unsqueeze(1)], dim=1)
        temperature = self.args.cql_temperature
        difference = temperature * torch.logsumexp(entries / temperature, dim=1) - data
        if self.args.cql_clip_min is not None:
            difference = difference.clamp(min=self.args.cql_clip_min)
        return difference.mean(1)

    def critic_loss(self, batch: Batch) -> tuple[Tensor, Tensor, Metrics]:
        """Return Bellman error plus conservative term, summed over the critics (eq. 4), and the term for α'."""
        target = self.target(batch)
        proposals, log_density = self.sampled_actions(batch)
        # One forward pass for the 3n + 1 actions of every state.
        values = self.critic(batch.obs, torch.cat([proposals, batch.actions.unsqueeze(0)]))
        bellman_error = (values[:, -1] - target).square().mean(1)
        term = self.conservative_term(values, log_density, batch.returns_to_go)
        weight = self.cql_weight * (self.log_lagrange.exp().detach() if self.lagrange_gap > 0 else 1.0)
        loss = (bellman_error + weight * term).sum()
        metrics = {"losses/critic": loss, "losses/bellman": bellman_error, "losses/conservative": term}
        metrics |= {"losses/q": values[:, -1], "losses/q_proposed": values[:, :-1]}
        return loss, term.detach(), {name: value.detach() for name, value in metrics.items()}

    def actor_loss(self, batch: Batch, imitate: bool = False) -> tuple[Tensor, Tensor, Metrics]:
        """Return SAC's α log π - min_i Q_i, and log π [batch]. With `imitate`, log π(a_data|s) replaces Q."""
        policy = self.actor(batch.obs)
        actions, log_prob = policy.rsample(self.generator)
        if imitate:
            value = policy.log_prob(batch.actions)  # of the data's actions, not of the samples
        else:
            with frozen(self.critic):  # the gradient passes through the critics and stops there
                value = self.critic(batch.obs, actions).amin(0)
        loss = (self.log_alpha.exp().detach() * log_prob - value).mean()
        return loss, log_prob.detach(), {"losses/actor": loss.detach(), "losses/entropy": -log_prob.detach()}

    def alpha_loss(self, log_prob: Tensor) -> tuple[Tensor, Metrics]:
        """Return the loss that moves α until the policy's entropy is H̄."""
        loss = -self.log_alpha * (log_prob.mean() + self.target_entropy)
        return loss, {"losses/alpha": loss.detach(), "charts/alpha": self.log_alpha.detach().exp()}

    def lagrange_loss(self, term: Tensor) -> tuple[Tensor, Metrics]:
        """Return the loss that raises the multiplier α' if the term exceeds the gap, else lowers it (appendix F)."""
        alpha_prime = self.log_lagrange.exp()
        loss = -(alpha_prime * self.cql_weight * (term - self.lagrange_gap)).mean()
        return loss, {"losses/alpha_prime": loss.detach(), "charts/alpha_prime": alpha_prime.detach()}

    def update(self, batch: Batch, imitate: bool = False) -> Metrics:
        """Take one gradient step with each network. All losses are computed before the first step."""
        batch = batch.map_obs(self.obs_normalizer)
        actor_loss, log_prob, metrics = self.actor_loss(batch, imitate)
        critic_loss, term, critic_metrics = self.critic_loss(batch)
        self.actor_optimizer.minimize(actor_loss)  # before the critics move: its gradient passes through them
        self.critic_optimizer.minimize(critic_loss)
        alpha_loss, alpha_metrics = self.alpha_loss(log_prob)
        self.alpha_optimizer.minimize(alpha_loss)
        if self.lagrange_gap > 0:
            lagrange_loss, alpha_prime_metrics = self.lagrange_loss(term)
            self.lagrange_optimizer.minimize(lagrange_loss)
            # α' <= 1e6. A clamp inside the loss would have no gradient there, and α' would never return.
            self.log_lagrange.detach().clamp_(max=math.log(1e6))
            metrics |= alpha_prime_metrics
        self.update_target_critic()
        return metrics | critic_metrics | alpha_metrics


@returns_result
def train(args: Args) -> Result:
    args = with_presets(args, PRESETS)
    run = Run("cql", args)
    rewards, discount = RewardTransform(args.reward_scale, args.reward_shift), args.gamma if args.calibrated else None
    data = OfflineToOnline(args, run, rewards, discount=discount, failure=args.failure_reward)
    rollout = data.rollout()
    agent = CQL(args, rollout.obs_dim, rollout.action_dim, run.device)
    data.dataset.fit(agent.obs_normalizer)
    policy = run.policy(agent)
    update = run.updater(
        lambda online, imitate: agent.update(data.sample(online, agent.generator), imitate),
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
            update(online=step > 0, imitate=update.count < args.bc_steps)

        # Report
        run.report(update.metrics)
    return run.finish()


if __name__ == "__main__":
    command_line(train, Args)
