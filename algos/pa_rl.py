"""PA-RL: critics improve the actions of any policy that can be sampled, and the policy imitates the improved actions.

Mark et al. 2024, "Policy Agnostic RL: Offline RL and Online RL Fine-Tuning of Any Class and Backbone",
arXiv 2412.06685. Candidates are drawn from a base policy. Critics rank them, and gradient steps on the actions improve
the best. No gradient passes through the base policy, which learns by its own imitation loss alone. The critics are
those of Cal-QL (Nakamoto et al. 2023, arXiv 2303.05479) or IQL (Kostrikov et al. 2021, arXiv 2110.06169), with
histograms (Farebrother et al. 2024, arXiv 2403.03950).

    python algos/pa_rl.py --dataset antmaze-large-diverse-v2 --online-steps 200000
    python algos/pa_rl.py --dataset scene-play-singletask-task2-v0 --init-from runs/fql --critic-loss iql

Half of the steps before the switch train the base policy by imitation. With --init-from, it is that of a run of bc,
dsrl, expo, fql or ifql. Then it is frozen, and the critics learn. After the switch, both learn. This was written from
a description of the paper and of the authors' code, which has no licence. docs/pa_rl.md lists the differences.
"""

import common.start

import copy
import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from common.acting import acting
from common.arguments import (
    BY_DOMAIN,
    AnyNumber,
    Fraction,
    NonNegative,
    NonNegativeInt,
    OpenFraction,
    OptionalNonNegativeInt,
    OptionalNumber,
)
from common.command_line import command_line
from common.diffusion import BASE_NAMES, Denoiser, Diffusion, Flow, Velocity
from common.errors import InputError
from common.evaluate import Act
from common.hl_gauss import HistogramCritic, HLGauss, return_range
from common.networks import frozen, mlp, orthogonal
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
    base_steps: OptionalNonNegativeInt = None
    """Steps before the switch that train the base policy alone, by imitation, before the critics learn.
    None means half of --offline-steps, or 0 with --init-from."""
    retain: Literal["none", "append", "mix"] = "mix"
    """Data for online updates. none: online transitions. append: dataset and online transitions as one buffer.
    mix: a fixed share of each batch from the dataset."""

    # Networks
    policy: Literal["flow", "diffusion"] = "flow"
    """Type of the base policy. flow: flow matching with Euler steps. diffusion: DDPM."""
    flow_hidden: tuple[int, ...] = (512, 512, 512, 512)
    """With --policy flow: widths of its hidden layers."""
    flow_steps: int = 10
    """With --policy flow: Euler steps from noise to an action."""
    denoising_steps: int = 5
    """With --policy diffusion: steps T from noise to an action. Its network is EXPO's."""
    hidden: tuple[int, ...] = BY_DOMAIN
    """Widths of the critics' hidden layers."""
    critics: int = 10
    """Number of critics. With cal-ql, two of them are drawn for a target, and two for the conservative term."""
    bins: int = 128
    """Number of bins of the critics' histograms."""
    q_min: OptionalNumber = None
    """Smallest return of the histograms. None means that of the smallest reward (at most 0), paid for ever."""
    q_max: OptionalNumber = None
    """Largest return of the histograms. None means that of the largest reward (at least 0), paid for ever."""

    # The action operator
    samples: int = 32
    """K: actions drawn from the base policy for each state."""
    candidates: int = 10
    """k: the best of these, which gradient steps improve; all of them if there are fewer."""
    improve_steps: NonNegativeInt = 10
    """Gradient steps on each candidate."""
    improve_lr: float = 3e-4
    """Step size: an action moves by this times the gradient."""

    # Learning
    critic_loss: Literal["cal-ql", "iql"] = "cal-ql"
    """Loss of the critics. cal-ql: critics choose the next action, and a conservative term lowers other actions.
    iql: the next value is V(s'), which learns from the data's actions alone."""
    expectile: OpenFraction = 0.7
    """With --critic-loss iql: τ of the expectile regression of V."""
    gamma: Fraction = 0.99
    """Discount factor."""
    tau: Fraction = 0.005
    """Soft-update rate of the target critics, at each update."""
    actor_lr: float = 3e-4
    """Learning rate of the base policy until the critics learn."""
    distill_lr: float = 5e-5
    """Learning rate of the base policy after the switch."""
    critic_lr: float = 3e-4
    """Learning rate of the critics, and of V."""
    cql_weight: NonNegative = 0.005
    """With --critic-loss cal-ql: weight of the conservative term. It is small, as cross-entropies are."""
    cql_actions: int = 10
    """With --critic-loss cal-ql: number n of uniform actions in that term. Each policy action is weighted n times."""
    reward_shift: AnyNumber = BY_DOMAIN
    """Number added to each reward."""
    calibrated: bool = True
    """With --critic-loss cal-ql: use its bound. Otherwise use CQL's term, without returns-to-go."""
    failure_reward: OptionalNumber = BY_DOMAIN
    """With --critic-loss cal-ql: raw reward of a step without success, for --calibrated.
    Returns-to-go assume that an episode of such steps fails forever."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.candidates, self.samples, self.bins) < 2:
            raise InputError("--candidates, --samples and --bins must be 2 or more")
        if self.base_steps == 0 and not self.init_from:
            raise InputError("--base-steps is 0, so the base policy is never trained: give --init-from")

    @property
    def last_base_step(self) -> int:
        """The step that ends the imitation, at the latest the switch."""
        default = 0 if self.init_from else self.offline_steps // 2
        return min(0, (default if self.base_steps is None else self.base_steps) - self.offline_steps)


PRESETS: dict[str, dict[str, Any]] = {  # the authors' for antmaze; the others are ours
    "locomotion": {"hidden": (256, 256), "reward_shift": 0.0, "failure_reward": None},
    "antmaze": {"hidden": (256,) * 4, "reward_shift": -1.0, "failure_reward": 0.0},
}


class PARL:
    def __init__(self, args: Args, obs_dim: int, action_dim: int, device: torch.device) -> None:
        initializer = generator(args.seed, "networks")
        self.generator = generator(args.seed, "agent", device)
        is_flow, steps = args.policy == "flow", args.denoising_steps
        self.process = Flow(args.flow_steps) if is_flow else Diffusion.variance_preserving(steps, device)
        flow = Velocity(obs_dim, action_dim, args.flow_hidden, args.flow_steps, initializer) if is_flow else None
        self.base = (flow or Denoiser(obs_dim, action_dim, 256, 3, initializer)).to(device)  # EXPO's sizes
        critic = mlp([obs_dim + action_dim, *args.hidden, args.bins], initializer, args.critics, layer_norm=True)
        self.critic = HistogramCritic(orthogonal(critic, initializer, last_gain=0.01)).to(device)
        self.target_critic = copy.deepcopy(self.critic)
        sizes, is_iql = [obs_dim, *args.hidden, 1], args.critic_loss == "iql"
        self.state_value = (mlp(sizes, initializer, layer_norm=True) if is_iql else nn.Identity()).to(device)
        self.support = HLGauss(args.bins).to(device)
        self.update_target_critic = SoftUpdate(self.target_critic, self.critic, args.tau)
        self.base_optimizer = Adam(self.base.parameters(), args.actor_lr)
        self.critic_optimizer = Adam([*self.critic.parameters(), *self.state_value.parameters()], args.critic_lr)
        self.obs_normalizer = FixedNormalizer(obs_dim).to(device) if args.normalize_obs else nn.Identity()
        self.args, self.device, self.action_dim = args, device, action_dim
        self.ranks = 0  # 1 once the critics choose the actions

    def begin(self, imitate: bool) -> None:
        """Set who chooses the actions, and the base policy's learning rate."""
        self.ranks = int(not imitate)
        self.base_optimizer.lr = self.args.actor_lr if imitate else self.args.distill_lr

    @torch.no_grad()
    def sample(self, obs: Tensor, count: int, generator: torch.Generator) -> Tensor:
        """Draw `count` actions of the base policy for each state: [count, batch, action_dim]."""
        noise = torch.randn((count, len(obs), self.action_dim), generator=generator, device=self.device)
        return self.process.sample(partial(self.base, obs), noise, generator)

    def value(self, obs: Tensor, actions: Tensor) -> Tensor:
        """Return the mean over all critics of Q_i(s, a) [k, batch], for actions [k, batch, action_dim]."""
        return self.support.mean(self.critic(obs, actions)).mean(0)

    @torch.no_grad()
    def improve(
        self, obs: Tensor, generator: torch.Generator, data_actions: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return k candidates [k, batch, action_dim] for each state, and their values [k, batch].

        They are the best of K samples. Each is then the best point of a path of gradient steps on Q, within [-1, 1].
        `data_actions` [batch, action_dim] take the place of the worst candidate.
        """
        drawn = self.sample(obs, self.args.samples, generator)
        order = self.value(obs, drawn).topk(min(self.args.candidates, self.args.samples), dim=0).indices
        actions = drawn.gather(0, order.unsqueeze(-1).expand(-1, -1, self.action_dim))
        if data_actions is not None:
            actions = torch.cat([actions[:-1], data_actions.unsqueeze(0)])
        best, best_values = actions, torch.full_like(actions[..., 0], -math.inf)
        for _ in range(self.args.improve_steps + 1):
            with torch.enable_grad(), frozen(self.critic):
                values = self.value(obs, points := actions.detach().requires_grad_())
                (gradient,) = torch.autograd.grad(values.sum(), points)
            is_better = values > best_values
            best = torch.where(is_better.unsqueeze(-1), actions, best)
            best_values = torch.where(is_better, values, best_values)
            actions = (actions + self.args.improve_lr * gradient).clamp(-1.0, 1.0)
        return best, best_values

    def choose(self, candidates: Tensor, values: Tensor) -> Tensor:
        """Return the candidate of the largest value for each state: [batch, action_dim]."""
        chosen = values.argmax(0).view(1, -1, 1).expand(1, -1, self.action_dim)
        return candidates.gather(0, chosen).squeeze(0)

    @acting
    def act(self, obs: Tensor, deterministic: bool = False, generator: torch.Generator | None = None) -> Tensor:
        """Return the best improved candidates [n, action_dim] for obs [n, obs_dim]; before the critics learn, samples.

        If `deterministic` and no generator is given, each call draws the same noise.
        """
        generator = generator or (torch.Generator(self.device).manual_seed(0) if deterministic else self.generator)
        obs = self.obs_normalizer(obs)
        if not self.ranks:
            return self.sample(obs, 1, generator).squeeze(0)
        return self.choose(*self.improve(obs, generator))

    def eval_policy(self) -> Act:
        """Return the policy, which samples, with noise of its own that is the same in every evaluation."""
        return partial(self.act, deterministic=True, generator=generator(self.args.seed, "eval noise", self.device))

    def imitation_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Return the base policy's own loss, the mean square of its error on the batch's actions."""
        noise = torch.randn(batch.actions.shape, generator=self.generator, device=self.device)
        loss = self.process.errors(partial(self.base, batch.obs), batch.actions, noise, self.generator).square().mean()
        return loss, {"losses/base": loss.detach()}

    def pair(self) -> Tensor:
        """Draw the numbers of two critics, with replacement."""
        return torch.randint(self.args.critics, (2,), generator=self.generator, device=self.device)

    def conservative_term(self, batch: Batch, next_actions: Tensor) -> Tensor:
        """Return Cal-QL's log Σ_a exp Q_i(s, a) - Q_i(s, a_data) of two critics [2].

        The sum is over n uniform actions, n times OPT(s), n times OPT(s') (`next_actions`) and the data's action. The
        policy's actions have at least the return-to-go as their value, if it is known.
        """
        n = self.args.cql_actions
        uniform = torch.rand((n, *batch.actions.shape), generator=self.generator, device=self.device)
        actions = self.choose(*self.improve(batch.obs, self.generator))
        proposals = torch.cat([2.0 * uniform - 1.0, torch.stack([actions, next_actions, batch.actions])])
        values = self.support.mean(self.critic(batch.obs, proposals, self.pair()))
        of_uniform, by_policy, data = values.split([n, 2, 1], dim=1)
        if batch.returns_to_go is not None:
            by_policy = torch.maximum(by_policy, batch.returns_to_go)
        return (torch.cat([of_uniform, by_policy + math.log(n), data], dim=1).logsumexp(1) - data.squeeze(1)).mean(1)

    def cross_entropy(self, batch: Batch, next_values: Tensor) -> tuple[Tensor, Metrics]:
        """Return the cross-entropy of each critic's histogram from the label of y = r + γ V', given V' [batch]."""
        # Termination masks the bootstrap. Truncation does not, so it is not even in the batch.
        target = batch.rewards + self.args.gamma * (1.0 - batch.terminations) * next_values
        logits = self.critic(batch.obs, batch.actions)
        loss = self.support.loss(logits, target).mean()
        is_clamped = (target < self.support.edges[0]) | (target > self.support.edges[-1])
        metrics = {"losses/cross_entropy": loss.detach(), "losses/q": self.support.mean(logits).detach()}
        return loss, metrics | {"charts/clamped": is_clamped.float()}

    @torch.no_grad()
    def target_values(self, obs: Tensor, actions: Tensor, members: Tensor | None = None) -> Tensor:
        """Return min_i Q̄_i(s, a) over all target critics, or over those numbered `members`: [batch]."""
        return self.support.mean(self.target_critic(obs, actions, members)).amin(0)

    def cal_ql_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Return the cross-entropy, with V' = min_i Q̄_i(s', OPT(s')), plus the conservative term."""
        next_actions = self.choose(*self.improve(batch.next_obs, self.generator))
        next_values = self.target_values(batch.next_obs, next_actions, self.pair())
        cross_entropy, metrics = self.cross_entropy(batch, next_values)
        term = self.conservative_term(batch, next_actions)
        loss = cross_entropy + self.args.cql_weight * term.mean()
        return loss, metrics | {"losses/critic": loss.detach(), "losses/conservative": term.detach()}

    def iql_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Return the cross-entropy, with V' = V(s') (IQL, eq. 6), plus V's loss.

        That is the expectile regression of V on min_i Q̄_i of the data's actions (IQL, eq. 5): |τ - 1(u < 0)| u².
        """
        values, next_values = self.state_value(torch.cat([batch.obs, batch.next_obs])).squeeze(-1).chunk(2)
        u = self.target_values(batch.obs, batch.actions) - values
        value_loss = (torch.where(u < 0, 1.0 - self.args.expectile, self.args.expectile) * u.square()).mean()
        cross_entropy, metrics = self.cross_entropy(batch, next_values.detach())
        loss = cross_entropy + value_loss
        metrics |= {"losses/critic": loss.detach(), "losses/value": value_loss.detach(), "losses/v": values.detach()}
        return loss, metrics

    def distill_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Return the imitation loss on candidates drawn with probability ∝ exp Q, one of them the batch's action."""
        candidates, values = self.improve(batch.obs, self.generator, batch.actions)
        uniform = torch.rand(values.shape, generator=self.generator, device=self.device)
        gumbel = -torch.log(-torch.log(uniform.clamp(1e-20)))  # the largest of Q plus Gumbel noise is such a sample
        loss, metrics = self.imitation_loss(batch._replace(actions=self.choose(candidates, values + gumbel)))
        shares = values.softmax(0)
        return loss, metrics | {"losses/choice_entropy": -(shares * shares.clamp(min=1e-20).log()).sum(0)}

    def update(self, batch: Batch, online: bool, imitate: bool = False) -> Metrics:
        """Step the base policy on the data (`imitate`), or the critics on each `batch_size` of the batch in turn.

        Online, step the base policy after them, on the last of these.
        """
        batch = batch.map_obs(self.obs_normalizer)
        if imitate:
            base_loss, metrics = self.imitation_loss(batch)
            self.base_optimizer.minimize(base_loss)
            return metrics
        loss_of = self.iql_loss if self.args.critic_loss == "iql" else self.cal_ql_loss
        for part in batch.slices(self.args.batch_size):
            critic_loss, metrics = loss_of(part)
            self.critic_optimizer.minimize(critic_loss)
            self.update_target_critic()
        if online:
            base_loss, base_metrics = self.distill_loss(part)
            self.base_optimizer.minimize(base_loss)
            metrics = metrics | base_metrics
        return metrics


@returns_result
def train(args: Args) -> Result:
    args = with_presets(args, PRESETS)
    run = Run("pa_rl", args)
    rewards, failure, size = RewardTransform(shift=args.reward_shift), args.failure_reward, args.utd * args.batch_size
    discount = args.gamma if args.calibrated and args.critic_loss == "cal-ql" else None
    data = OfflineToOnline(args, run, rewards, discount=discount, failure=failure, online_batch=size)
    rollout = data.rollout()
    agent = PARL(args, rollout.obs_dim, rollout.action_dim, run.device)
    data.dataset.fit(agent.obs_normalizer)
    agent.support.set_range(*return_range(data.dataset.column("rewards"), args.gamma, args.q_min, args.q_max))
    policy = run.policy(agent)
    sample = partial(data.sample, generator=agent.generator)
    update = run.updater(lambda online, imitate: agent.update(sample(online), online, imitate), agent.generator)
    form = ("policy", "flow_steps" if args.policy == "flow" else "denoising_steps")
    data.load_pretrained(agent, only=("base", "obs_normalizer"), must_match=form, base_names=BASE_NAMES)
    run.resume(agent=agent, data=data, rollout=rollout, update=update)

    for step in run.steps():
        # Act
        agent.begin(imitate := step <= args.last_base_step)
        if step > 0:
            data.add(rollout.step(policy(rollout.obs), meanwhile=update.flush))

        # Learn: the base policy, then the critics, and after the switch both
        for _ in range(data.updates_due(step)):
            update(online=step > 0, imitate=imitate)

        # Report
        run.report(update.metrics)
    return run.finish()


if __name__ == "__main__":
    command_line(train, Args)
