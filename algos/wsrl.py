"""Warm-Start RL: offline pre-training, a warm-up with the frozen policy, then online learning without the offline data.

Zhou, Peng, Li, Levine and Kumar 2024, "Efficient Online Reinforcement Learning Fine-Tuning Need Not Retain Offline
Data", arXiv 2412.07762. Pre-training is Cal-QL's (Nakamoto et al. 2023, arXiv 2303.05479) or CQL's (Kumar et al. 2020,
arXiv 2006.04779). Critics are a layer-normalised ensemble, and each target draws two of them (REDQ, Chen et al. 2021,
arXiv 2101.05982). Online learning is SAC with four critic updates a step.

    python algos/wsrl.py --dataset antmaze-large-diverse-v2 --online-steps 300000
    python algos/wsrl.py --dataset hopper-medium-v2 --online-steps 100000 --init-from runs/cql

The paper's comparisons are flags:
- data retained: --retain mix                - no warm-up: --warmup-steps 0
- random warm-up: --warmup random            - pessimism kept: --online-cql
- RLPD as that paper runs it: --offline-steps 0 --retain mix, on antmaze also --target-critics 1 (RLPD: algos/rlpd.py)

Three differences from the authors' code matter most (docs/wsrl.md lists all). Critic updates leave π
and α unchanged. Critics are updated first offline too. α's loss is that of sac.py.
"""

import common.start

import copy
import math
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.acting import acting
from common.arguments import BY_DOMAIN, AnyNumber, Fraction, NonNegative, NonNegativeInt, OptionalNumber
from common.command_line import command_line
from common.errors import InputError
from common.messages import log
from common.networks import Critic, TanhGaussian, frozen, mlp, orthogonal
from common.normalize import FixedNormalizer
from common.optim import Adam, SoftUpdate
from common.replay_buffer import Batch
from common.run import Result, Run, returns_result
from common.run_folder import CONFIG, has_checkpoint, name_and_folder, run_config
from common.schema import require
from common.seeding import generator
from common.updater import Metrics
from offline.offline_to_online import OfflineArgs, OfflineToOnline, with_presets
from offline.rewards import RewardTransform


@dataclass
class Args(OfflineArgs):
    # From data to online
    offline_steps: NonNegativeInt = BY_DOMAIN
    """Updates on the dataset alone. With --init-from, the default is 0."""
    retain: Literal["none", "append", "mix"] = "none"
    """Data for online updates. none: online transitions. append: dataset and online transitions as one buffer.
    mix: a fixed share of each batch from the dataset."""
    warmup_steps: NonNegativeInt = 5_000
    """Environment steps before the first online update, for every --retain."""
    warmup: Literal["policy", "random"] = "policy"
    """Actions in the warm-up. policy: those of the frozen policy. random: uniform noise."""
    online_cql: bool = False
    """Keep the conservative term online, and the best of --cql-actions next actions in the target."""
    utd: int = 4
    """Critic updates for each environment step, each on a new batch. The actor is updated once, on all of them."""

    # Networks
    hidden: tuple[int, ...] = BY_DOMAIN
    """Widths of the actor's hidden layers."""
    critic_hidden: tuple[int, ...] = BY_DOMAIN
    """Widths of the critics' hidden layers."""
    critics: int = 10
    """Number of critics. The actor uses the smallest value."""
    target_critics: int = 2
    """Number of critics for a target and for the conservative term, drawn each time with replacement."""
    layer_norm: bool = True
    """Use layer normalisation in each hidden layer of actor and critics."""
    shared_head: bool = False
    """Give all critics one output layer, as the authors' code does."""
    last_scale: float = math.sqrt(2.0)
    """Gain of the orthogonal initialisation of the last hidden layers (authors: 0.01, save on kitchen)."""
    std: Literal["exp", "uniform"] = BY_DOMAIN
    """The policy's standard deviation. exp: a function of the state. uniform: the same in every state."""

    # Learning
    gamma: Fraction = 0.99
    """Discount factor."""
    tau: Fraction = 0.005
    """Soft-update rate of the target critics, at each update of the critics."""
    actor_lr: float = 1e-4
    """Learning rate of the actor."""
    critic_lr: float = 3e-4
    """Learning rate of the critics and of the Lagrange multiplier."""
    alpha_lr: float = 1e-4
    """Learning rate of the temperature."""
    batch_size: int = 256
    """Transitions in each update of the critics."""
    online_max_target_backup: bool = BY_DOMAIN
    """Use the best of --cql-actions next actions in the target online too."""

    # Pre-training
    calibrated: bool = BY_DOMAIN
    """Pre-train with Cal-QL. Otherwise pre-train with CQL."""
    cql_weight: NonNegative = BY_DOMAIN
    """Without --lagrange-gap: weight of the conservative term."""
    lagrange_gap: NonNegative = BY_DOMAIN
    """Target of the conservative term, held by a Lagrange multiplier instead of --cql-weight. 0: no multiplier."""
    cql_actions: int = 10
    """Actions n that are sampled from each source (uniform, π(·|s), π(·|s')) and in a target's maximum."""
    importance_sampling: bool = BY_DOMAIN
    """Divide by the density of each sampled action. Otherwise add the dataset's action to the samples."""

    # Rewards
    reward_scale: float = BY_DOMAIN
    """Factor that multiplies each reward."""
    reward_shift: AnyNumber = BY_DOMAIN
    """Number added to each reward after scaling."""
    failure_reward: OptionalNumber = BY_DOMAIN
    """With --calibrated: raw reward of a step without success.
    Cal-QL's returns-to-go assume that an episode of such steps, or one that is cut while it fails, fails forever."""


LOCOMOTION = {  # the authors' configurations; maze2d's is ours
    "offline_steps": 250_000, "hidden": (256, 256), "critic_hidden": (256, 256), "std": "exp", "calibrated": False,
    "cql_weight": 5.0, "lagrange_gap": 0.0, "importance_sampling": True, "online_max_target_backup": False,
    "reward_scale": 1.0, "reward_shift": 0.0, "failure_reward": None,
}  # fmt: skip
ANTMAZE = LOCOMOTION | {
    "offline_steps": 1_000_000, "critic_hidden": (256,) * 4, "std": "uniform", "calibrated": True, "lagrange_gap": 0.8,
    "online_max_target_backup": True, "reward_scale": 10.0, "reward_shift": -5.0, "failure_reward": 0.0,
}  # fmt: skip
PRESETS: dict[str, dict[str, Any]] = {
    "locomotion": LOCOMOTION,
    "antmaze": ANTMAZE,
    "maze2d": ANTMAZE | {"critic_hidden": (256, 256)},
    "adroit-binary": LOCOMOTION | {"offline_steps": 20_000, "hidden": (512, 512), "critic_hidden": (512,) * 3,
        "calibrated": True, "cql_weight": 1.0, "reward_scale": 10.0, "reward_shift": 5.0, "failure_reward": -1.0},
    "kitchen": LOCOMOTION | {"hidden": (512,) * 3, "critic_hidden": (512,) * 3, "calibrated": True,
                             "importance_sampling": False, "reward_shift": -4.0},
}  # fmt: skip


class Actor(nn.Module):
    """π(a|s): map obs [batch, obs_dim] to a tanh-Gaussian over actions [batch, action_dim]."""

    def __init__(self, obs_dim: int, action_dim: int, args: Args, generator: torch.Generator) -> None:
        super().__init__()
        outputs = 2 * action_dim if args.std == "exp" else action_dim
        self.net = mlp([obs_dim, *args.hidden, outputs], generator, layer_norm=args.layer_norm)
        orthogonal(self.net, generator, last_hidden_gain=args.last_scale)
        self.log_std = None if args.std == "exp" else nn.Parameter(torch.zeros(action_dim))

    def forward(self, obs: Tensor) -> TanhGaussian:
        outputs = self.net(obs)
        mean, log_std = outputs.chunk(2, -1) if self.log_std is None else (outputs, self.log_std.expand_as(outputs))
        return TanhGaussian(mean, log_std.clamp(math.log(1e-5), math.log(10.0)))


class WSRL:
    def __init__(self, args: Args, obs_dim: int, action_dim: int, device: torch.device) -> None:
        initializer = generator(args.seed, "networks")
        self.generator = generator(args.seed, "agent", device)
        self.actor = Actor(obs_dim, action_dim, args, initializer).to(device)
        sizes = [obs_dim + action_dim, *args.critic_hidden, 1]
        critic = mlp(sizes, initializer, args.critics, layer_norm=args.layer_norm, shared_output=args.shared_head)
        self.critic = Critic(orthogonal(critic, initializer, last_hidden_gain=args.last_scale)).to(device)
        self.target_critic = copy.deepcopy(self.critic)
        self.update_target_critic = SoftUpdate(self.target_critic, self.critic, args.tau)
        self.log_alpha = nn.Parameter(torch.zeros((), device=device))
        self.raw_lagrange = nn.Parameter(torch.tensor(math.log(math.e - 1.0), device=device))  # softplus: α' = 1
        self.actor_optimizer = Adam(self.actor.parameters(), args.actor_lr)
        self.critic_optimizer = Adam(self.critic.parameters(), args.critic_lr)
        self.alpha_optimizer = Adam([self.log_alpha], args.alpha_lr)
        self.raw_lagrange_optimizer = Adam([self.raw_lagrange], args.critic_lr)
        self.obs_normalizer = FixedNormalizer(obs_dim).to(device) if args.normalize_obs else nn.Identity()
        self.args, self.device, self.action_dim = args, device, action_dim
        self.target_entropy = -float(action_dim)

    @acting
    def act(self, obs: Tensor, deterministic: bool = False) -> Tensor:
        """Return actions [n, action_dim] for obs [n, obs_dim]: samples of the policy, or tanh of its mean."""
        policy = self.actor(self.obs_normalizer(obs))
        return policy.mode if deterministic else policy.sample(self.generator)

    def subset(self) -> Tensor:
        """Draw the critics of one target: [target_critics], with replacement as in the authors' code (not in REDQ)."""
        shape = (self.args.target_critics,)
        return torch.randint(self.args.critics, shape, generator=self.generator, device=self.device)

    @torch.no_grad()
    def target(self, batch: Batch, count: int) -> Tensor:
        """Return y = r + γ max over `count` next actions of the smallest target critic drawn: [batch]."""
        actions, _ = self.actor(batch.next_obs).expand(count).rsample(self.generator)
        next_value = self.target_critic(batch.next_obs, actions, self.subset()).amin(0).amax(0)
        # Termination masks the bootstrap. Truncation does not, so it is not even in the batch.
        return batch.rewards + self.args.gamma * (1.0 - batch.terminations) * next_value

    @torch.no_grad()
    def sampled_actions(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Draw n uniform actions, n of π(·|s) and n of π(·|s') for each state: [3n, batch, action_dim].

        Also return the log-densities that they were drawn with, [3n, batch].
        """
        shape = (self.args.cql_actions, *batch.actions.shape)
        uniform = 2.0 * torch.rand(shape, generator=self.generator, device=self.device) - 1.0
        current, log_prob = self.actor(batch.obs).expand(self.args.cql_actions).rsample(self.generator)
        following, following_log_prob = self.actor(batch.next_obs).expand(self.args.cql_actions).rsample(self.generator)
        log_density = torch.full_like(log_prob, self.action_dim * math.log(0.5))
        return torch.cat([uniform, current, following]), torch.cat([log_density, log_prob, following_log_prob])

    def conservative_term(self, batch: Batch, data: Tensor) -> Tensor:
        """Return log Σ_a exp Q(s, a) - Q(s, a_data), the mean over the critics drawn and the batch.

        `data` [critics, batch] are all critics' values of the batch's actions.
        """
        proposals, log_density = self.sampled_actions(batch)
        chosen = self.subset()
        proposed, data = self.critic(batch.obs, proposals, chosen), data[chosen]
        if self.args.calibrated:
            if batch.returns_to_go is None:
                raise ValueError("Cal-QL (calibrated) needs batches with returns_to_go")
            # Cal-QL's max(Q, G) of the policy's actions: no value is lowered below G(s).
            uniform, by_policy = proposed.tensor_split([self.args.cql_actions], dim=1)
            proposed = torch.cat([uniform, torch.maximum(by_policy, batch.returns_to_go)], dim=1)
        if self.args.importance_sampling:
            entries = proposed - log_density
        else:  # the data's action is one more sample, and the sum is a mean
            entries = torch.cat([proposed, data.unsqueeze(1)], dim=1) - math.log(proposed.shape[1] + 1)
        return (torch.logsumexp(entries, dim=1) - data).mean()

    def critic_loss(self, batch: Batch, online: bool) -> tuple[Tensor, Tensor | None, Metrics]:
        """Return the Bellman error plus the conservative term, if that is used, and the term alone for α'."""
        args = self.args
        with_cql = args.online_cql or not online
        target = self.target(batch, args.cql_actions if with_cql or args.online_max_target_backup else 1)
        values = self.critic(batch.obs, batch.actions)
        loss = bellman_error = (values - target).square().mean()
        metrics, term = {"losses/bellman": bellman_error, "losses/q": values}, None
        if with_cql:
            term = self.conservative_term(batch, values)
            weight = F.softplus(self.raw_lagrange).detach() if args.lagrange_gap else args.cql_weight
            loss = bellman_error + weight * term
            metrics |= {"losses/conservative": term}
        return loss, term, {name: value.detach() for name, value in (metrics | {"losses/critic": loss}).items()}

    def actor_loss(self, batch: Batch) -> tuple[Tensor, Tensor, Metrics]:
        """Return SAC's α log π - min_i Q_i over all critics, and log π [batch] for α."""
        actions, log_prob = self.actor(batch.obs).rsample(self.generator)
        with frozen(self.critic):  # the gradient passes through the critics and stops there
            value = self.critic(batch.obs, actions).amin(0)
        loss = (self.log_alpha.exp().detach() * log_prob - value).mean()
        return loss, log_prob.detach(), {"losses/actor": loss.detach(), "losses/entropy": -log_prob.detach()}

    def alpha_loss(self, log_prob: Tensor) -> tuple[Tensor, Metrics]:
        """Return the loss that moves α until the policy's entropy is H̄."""
        alpha = self.log_alpha.exp()
        loss = -alpha * (log_prob.mean() + self.target_entropy)
        return loss, {"losses/alpha": loss.detach(), "charts/alpha": alpha.detach()}

    def lagrange_loss(self, term: Tensor) -> tuple[Tensor, Metrics]:
        """Return the loss that raises the multiplier α' while the term exceeds the gap, and else lowers it."""
        alpha_prime = F.softplus(self.raw_lagrange)
        loss = -alpha_prime * (term.detach() - self.args.lagrange_gap)
        return loss, {"losses/alpha_prime": loss.detach(), "charts/alpha_prime": alpha_prime.detach()}

    def update(self, batch: Batch, online: bool) -> Metrics:
        """Step the critics on each `batch_size` of the batch in turn, then everything else once on all of it."""
        metrics: Metrics = {}
        batch = batch.map_obs(self.obs_normalizer)
        for part in batch.slices(self.args.batch_size):
            critic_loss, term, critic_metrics = self.critic_loss(part, online)
            self.critic_optimizer.minimize(critic_loss)
            self.update_target_critic()
            metrics |= critic_metrics
        if term is not None and self.args.lagrange_gap:
            if len(batch.obs) > self.args.batch_size:  # one step, on all slices together
                with torch.no_grad():
                    term = self.conservative_term(batch, self.critic(batch.obs, batch.actions))
            lagrange_loss, alpha_prime_metrics = self.lagrange_loss(term)
            self.raw_lagrange_optimizer.minimize(lagrange_loss)
            metrics |= alpha_prime_metrics
        actor_loss, log_prob, actor_metrics = self.actor_loss(batch)
        self.actor_optimizer.minimize(actor_loss)
        alpha_loss, alpha_metrics = self.alpha_loss(log_prob)
        self.alpha_optimizer.minimize(alpha_loss)
        return metrics | actor_metrics | alpha_metrics


def with_networks(args: Args) -> Args:
    """Return the arguments with the network shapes of `--init-from`, a run of cql.py, iql.py or this file.

    Raises InputError if it is another file's run.
    """
    if args.init_from is None:
        return args
    _, own = name_and_folder("wsrl", args)  # for a resumed run, because the folder of --init-from may be gone
    folder = own if has_checkpoint(own) else args.init_from
    theirs = run_config(folder)
    if (algo := theirs["algo"]) not in ("cql", "iql", "wsrl"):
        raise InputError(f"{args.init_from} was trained by {algo}: give --init-from a run of cql, iql or wsrl")
    schema = {"hidden": [int], "critics": int}
    require(theirs["arguments"], schema, folder / CONFIG, "is damaged: restore it from a copy")
    was: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in theirs["arguments"].items()}
    plain = {"critic_hidden": was["hidden"], "layer_norm": False, "shared_head": False}
    was = plain | {"std": "uniform" if algo == "iql" else "exp"} | was
    shapes = {k: was[k] for k in ("hidden", "critic_hidden", "critics", "layer_norm", "shared_head", "std")}
    defaults = {field.name: field.default for field in fields(args)}
    is_copy = args._given >= defaults.keys()  # made by dataclasses.replace, which gives every argument
    for name, value in shapes.items():
        given = getattr(args, name)
        if name in args._given and given != value and not (is_copy and given == defaults[name]):
            flag = name.replace("_", "-")
            raise InputError(f"--{flag} is {given}, but {args.init_from} has {value}: leave --{flag} out")
    log.info(f"networks of {args.init_from}: {', '.join(f'{k} {v}' for k, v in shapes.items())}")
    return args.filled_in(**shapes)


@returns_result
def train(args: Args) -> Result:
    args = with_presets(with_networks(args), PRESETS)
    run = Run("wsrl", args)
    rewards, discount = RewardTransform(args.reward_scale, args.reward_shift), args.gamma if args.calibrated else None
    data = OfflineToOnline(args, run, rewards, discount=discount, failure=args.failure_reward,
                           online_returns=args.online_cql, online_batch=args.utd * args.batch_size)  # fmt: skip
    rollout = data.rollout()
    agent = WSRL(args, rollout.obs_dim, rollout.action_dim, run.device)
    data.dataset.fit(agent.obs_normalizer)
    policy = run.policy(agent)
    update = run.updater(lambda online: agent.update(data.sample(online, agent.generator), online), agent.generator)
    data.load_pretrained(agent, from_algos=("cql", "iql"))
    run.learns_after(args.warmup_steps, "--warmup-steps")
    run.resume(agent=agent, data=data, rollout=rollout, update=update)

    for step in run.steps():
        pre_training, warm_up = step <= 0, 0 < step <= args.warmup_steps
        # Act
        if not pre_training:
            random = args.warmup == "random" and rollout.steps < args.warmup_steps
            actions = rollout.random_actions(agent.generator) if random else policy(rollout.obs)
            data.add(rollout.step(actions, meanwhile=update.flush))

        # Learn: in the warm-up the policy is frozen
        for _ in range(0 if warm_up else data.updates_due(step)):
            update(online=not pre_training)

        # Report
        run.report(update.metrics)
    return run.finish()


if __name__ == "__main__":
    command_line(train, Args)
