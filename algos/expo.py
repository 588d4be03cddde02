"""EXPO: a diffusion policy that only imitates, a learned policy that edits its actions, and critics that choose.

Dong, Li, Sadigh and Finn 2025, "EXPO: Stable Reinforcement Learning with Expressive Policies", arXiv 2507.07986. The
base policy is a DDPM (Ho et al. 2020, arXiv 2006.11239) as in IDQL (Hansen-Estruch et al. 2023, arXiv 2304.10573); the
critics, and the data's share of each batch, are RLPD's (Ball et al. 2023, arXiv 2302.02948).

    python algos/expo.py --dataset antmaze-large-diverse-v2 --offline-steps 500000 --online-steps 200000  # fine-tuning
    python algos/expo.py --dataset data/pen-binary-time.hdf5 --online-steps 20000 --size small  # online, with data

Here log α is at most 20. With β below 0.303, edits cannot reach the target entropy -|A| / 2, so α would grow forever.
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
from common.arguments import BY_DOMAIN, BY_SIZE, AnyNumber, Fraction, NonNegative, NonNegativeInt, Probability
from common.command_line import command_line
from common.diffusion import Denoiser, Diffusion, Flow
from common.errors import InputError
from common.evaluate import Act
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
    offline_steps: NonNegativeInt = BY_DOMAIN
    """Updates of the base policy alone, on the dataset. With --init-from, the default is 0."""
    retain: Literal["none", "append", "mix"] = "mix"
    """Data for online updates. none: online transitions. append: dataset and online transitions as one buffer.
    mix: a fixed share of each batch from the dataset."""
    random_steps: NonNegativeInt = BY_DOMAIN
    """Environment steps with uniform random actions before the first update; 0 after offline steps or --init-from."""
    utd: int = BY_SIZE
    """Critic updates for each environment step. Base and edit policy are updated once, on the last batch."""

    # Networks
    size: Literal["paper", "small", "wide"] = "paper"
    """Size of networks and updates: the paper's, one for a laptop, or that of published runs on OGBench.
    It sets the flags whose default is by --size."""
    policy: Literal["diffusion", "flow"] = "diffusion"
    """Type of the base policy. diffusion: DDPM. flow: flow matching with Euler steps."""
    hidden: tuple[int, ...] = BY_SIZE
    """Widths of the hidden layers, for critics and edit policy."""
    width: int = BY_SIZE
    """Width of the base policy's residual stream."""
    blocks: int = BY_SIZE
    """Number of residual blocks of the base policy."""
    critics: int = 10
    """Number of critics."""
    target_critics: int = BY_DOMAIN
    """Critics drawn to choose an action, and drawn again to value it, each time without replacement."""
    dropout: Probability = BY_DOMAIN
    """Dropout rate of the edit policy's hidden layers."""

    # Acting
    denoising_steps: int = 10
    """Steps T of the base policy from noise to an action."""
    base_samples: int = BY_SIZE
    """Number N of base samples among the candidates of each choice."""
    edits: NonNegativeInt = BY_SIZE
    """Number M of base samples that are also edited."""
    edit_scale: float = BY_DOMAIN
    """Largest change β that an edit makes to an action in [-1, 1]."""
    base_candidates: bool = True
    """Choose among base samples and edited samples. Otherwise choose among the edited samples alone."""
    best_backup: bool = True
    """Use the best candidate in the target. Otherwise use one sample, which is edited if there are edits."""
    soft_selection: NonNegative = 0.0
    """κ: choose a candidate with probability ∝ exp(κ Q). With 0, choose the best."""

    # Learning
    gamma: Fraction = BY_DOMAIN
    """Discount factor."""
    tau: Fraction = 0.005
    """Soft-update rate of the target critics, at each update of the critics."""
    base_tau: Fraction = 0.001
    """Soft-update rate of the averaged base policy, which acts, at each update of the base policy."""
    actor_lr: float = 3e-4
    """Initial learning rate of base and edit policy. It decays to 0 along a cosine."""
    decay_updates: int = 3_000_000
    """Steps over which that learning rate decays to 0. For edits, only online steps count."""
    weight_decay: NonNegative = 1e-4
    """Weight decay of the base policy."""
    critic_lr: float = 3e-4
    """Learning rate of the critics."""
    alpha_lr: float = 3e-4
    """Learning rate of the temperature."""
    adjust_target_entropy: bool = BY_DOMAIN
    """Use a target entropy that every edit scale can reach: that of the edits before scaling."""
    reward_shift: AnyNumber = BY_DOMAIN
    """Number added to each reward."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.edits is not BY_SIZE and self.base_samples is not BY_SIZE:
            most, edits = self.base_samples, self.edits
            if edits > most or not (edits or self.base_candidates):
                raise InputError(
                    f"--edits is {edits}: give at most --base-samples, {most} (without base candidates, at least 1)"
                )
        if self.target_critics is not BY_DOMAIN and self.target_critics > self.critics:
            raise InputError(f"--target-critics is {self.target_critics}: give at most --critics, {self.critics}")


SIZES: dict[str, dict[str, Any]] = {
    "paper": {"utd": 20, "hidden": (256, 256, 256), "width": 256, "blocks": 3, "base_samples": 8, "edits": 8},
    "small": {"utd": 4, "hidden": (128, 128), "width": 64, "blocks": 2, "base_samples": 4, "edits": 4},
    "wide": {"utd": 1, "hidden": (512, 512, 512, 512), "width": 256, "blocks": 3, "base_samples": 8, "edits": 8},
}
LOCOMOTION = {
    "offline_steps": 0, "random_steps": 5_000, "target_critics": 2, "dropout": 0.0, "edit_scale": 0.05,
    "gamma": 0.99, "adjust_target_entropy": False, "reward_shift": 0.0}  # fmt: skip
ADROIT = LOCOMOTION | {"dropout": 0.1, "edit_scale": 0.7, "random_steps": 0}
# FEdit of Li and Levine 2026 (arXiv 2601.14234, experiments/reproduce.py in ColinQiyangLi/qam) is EXPO's edit policy on
# a flow, with the target mean - ρ σ of ten critics. The smaller of two drawn critics is 0.56 σ below the mean on
# average, which stands for their ρ of 0.5, and one critic for their ρ of 0. Their target entropy is that of the edits
# before scaling.
OGBENCH = LOCOMOTION | {
    "offline_steps": 1_000_000, "random_steps": 0, "edit_scale": 0.2, "adjust_target_entropy": True}  # fmt: skip
HUMANOID = OGBENCH | {"target_critics": 1, "edit_scale": 0.1, "gamma": 0.995}
PRESETS: dict[str, dict[str, Any]] = {  # the authors' scripts; they have no locomotion, maze2d or dense adroit
    "locomotion": LOCOMOTION,
    "antmaze": LOCOMOTION | {"offline_steps": 500_000, "target_critics": 1, "reward_shift": -1.0},
    "maze2d": LOCOMOTION | {"target_critics": 1, "edit_scale": 0.2, "reward_shift": -1.0},
    "adroit": ADROIT,
    "adroit-binary": ADROIT,
    "ogbench": OGBENCH,
    "cube-triple-*singletask*": OGBENCH | {"edit_scale": 0.3},
    "cube-quadruple-*singletask*": OGBENCH | {"edit_scale": 0.4},
    "puzzle-4x4-*singletask*": OGBENCH | {"edit_scale": 0.8},
    "antmaze-giant-navigate-*singletask*": OGBENCH | {"edit_scale": 0.3, "gamma": 0.995},
    "humanoidmaze-medium-*singletask*": HUMANOID | {"edit_scale": 0.5},
    "humanoidmaze-*singletask*": HUMANOID,
}


BASE = ("base", "base_average", "base_optimizer", "obs_normalizer")
BASE_ARGS = ("policy", "denoising_steps", "width", "blocks")


class EditPolicy(nn.Module):
    """π(ê|s, a): map obs and actions [..., batch, ·] to a tanh-Gaussian over edits [..., batch, action_dim]."""

    def __init__(self, obs_dim: int, action_dim: int, args: Args, generator: torch.Generator) -> None:
        super().__init__()
        sizes = [obs_dim + action_dim, *args.hidden, 2 * action_dim]
        self.net = glorot(mlp(sizes, generator), generator)

    def forward(self, obs: Tensor, actions: Tensor, generator: torch.Generator, dropout: float = 0.0) -> TanhGaussian:
        inputs = torch.cat([obs.expand(*actions.shape[:-1], -1), actions], dim=-1).flatten(0, -2)
        outputs = self.net.forward_with_dropout(inputs, dropout, generator).unflatten(0, actions.shape[:-1])
        mean, log_std = outputs.chunk(2, dim=-1)
        return TanhGaussian(mean, log_std.clamp(-20.0, 2.0))


class EXPO:
    def __init__(self, args: Args, obs_dim: int, action_dim: int, device: torch.device) -> None:
        initializer = generator(args.seed, "networks")
        self.generator = generator(args.seed, "agent", device)
        self.base = Denoiser(obs_dim, action_dim, args.width, args.blocks, initializer).to(device)
        self.base_average = Denoiser(obs_dim, action_dim, args.width, args.blocks, initializer).to(device)  # it acts
        self.base_average.load_state_dict(self.base.state_dict())
        self.edit = EditPolicy(obs_dim, action_dim, args, initializer).to(device)
        critic = mlp([obs_dim + action_dim, *args.hidden, 1], initializer, args.critics, layer_norm=True)
        self.critic = Critic(glorot(critic, initializer)).to(device)
        self.target_critic = copy.deepcopy(self.critic)
        self.update_average_base = SoftUpdate(self.base_average, self.base, args.base_tau)
        self.update_target_critic = SoftUpdate(self.target_critic, self.critic, args.tau)
        self.log_alpha = nn.Parameter(torch.zeros((), device=device))
        self.base_optimizer = Adam(self.base.parameters(), args.actor_lr, weight_decay=args.weight_decay)
        self.edit_optimizer = Adam(self.edit.parameters(), args.actor_lr)
        self.critic_optimizer = Adam(self.critic.parameters(), args.critic_lr)
        self.alpha_optimizer = Adam([self.log_alpha], args.alpha_lr)
        self.obs_normalizer = FixedNormalizer(obs_dim).to(device) if args.normalize_obs else nn.Identity()
        self.args, self.device, self.action_dim = args, device, action_dim
        self.base_samples, self.edits, self.edit_scale = args.base_samples, args.edits, args.edit_scale
        self.target_critics, self.dropout = args.target_critics, args.dropout
        self.log_scale = action_dim * math.log(args.edit_scale)  # log π(β ê) = log π(ê) - this
        self.target_entropy = -0.5 * action_dim + (self.log_scale if args.adjust_target_entropy else 0.0)
        steps = args.denoising_steps
        self.process = Flow(steps) if args.policy == "flow" else Diffusion.variance_preserving(steps, device)

    def normal(self, *shape: int, generator: torch.Generator | None = None) -> Tensor:
        return torch.randn(shape, generator=generator or self.generator, device=self.device)

    @acting
    def act(self, obs: Tensor, deterministic: bool = False, generator: torch.Generator | None = None) -> Tensor:
        """Return the best candidates [n, action_dim] for obs [n, obs_dim]; they may lie outside [-1, 1].

        If `deterministic`, they are clipped, and unless a generator is given, each call draws the same noise.
        """
        generator = generator or (torch.Generator(self.device).manual_seed(0) if deterministic else self.generator)
        obs = self.obs_normalizer(obs)
        actions = self.select_action(obs, self.candidates(self.base_average, obs, generator), generator)
        return actions.clamp(-1.0, 1.0) if deterministic else actions

    def eval_policy(self) -> Act:
        """Return the policy, which samples, with noise of its own that is the same in every evaluation."""
        return partial(self.act, deterministic=True, generator=generator(self.args.seed, "eval noise", self.device))

    @torch.no_grad()
    def sample(self, base: Denoiser, obs: Tensor, count: int, generator: torch.Generator) -> Tensor:
        """Draw `count` actions of the base policy for each state: [count, batch, action_dim]."""
        noise = self.normal(count, len(obs), self.action_dim, generator=generator)
        return self.process.sample(partial(base, obs), noise, generator)

    @torch.no_grad()
    def candidates(self, base: Denoiser, obs: Tensor, generator: torch.Generator) -> Tensor:
        """Draw N base samples for each state, and edit M of them: [N + M, batch, action_dim], not clipped."""
        actions = self.sample(base, obs, self.base_samples, generator)
        edited = actions[: self.edits]
        edited = edited + self.edit_scale * self.edit(obs, edited, generator).sample(generator)
        return torch.cat([actions, edited]) if self.args.base_candidates else edited

    def subset(self, generator: torch.Generator) -> Tensor:
        """Draw the critics of one choice or value: [target_critics], without replacement."""
        return torch.rand(self.args.critics, generator=generator, device=self.device).argsort()[: self.target_critics]

    @torch.no_grad()
    def select_action(self, obs: Tensor, candidates: Tensor, generator: torch.Generator) -> Tensor:
        """Return a candidate for each state, [batch, action_dim] (the on-the-fly policy): the one of highest value.

        Candidates are [k, batch, action_dim]. A value is that of the smallest target critic drawn. With
        --soft-selection κ, a candidate is sampled ∝ exp(κ Q) instead.
        """
        values = self.target_critic(obs, candidates, self.subset(generator)).amin(0)
        if self.args.soft_selection:  # the largest of κ Q plus Gumbel noise is a sample of the softmax
            uniform = torch.rand(values.shape, generator=generator, device=self.device)
            values = self.args.soft_selection * values - torch.log(-torch.log(uniform.clamp(1e-20)))
        chosen = values.argmax(0).view(1, -1, 1).expand(1, -1, self.action_dim)
        return candidates.gather(0, chosen).squeeze(0)

    @torch.no_grad()
    def target(self, batch: Batch, candidates: Tensor) -> Tensor:
        """Return y = r + γ min_{i ∈ S₂} Q̄_i(s', a*): [batch]. S₂ is not the subset that chose a*."""
        if self.args.best_backup:
            next_actions = self.select_action(batch.next_obs, candidates, self.generator)
        else:
            next_actions = candidates[self.base_samples if self.edits and self.args.base_candidates else 0]
        next_value = self.target_critic(batch.next_obs, next_actions, self.subset(self.generator)).amin(0)
        # Termination masks the bootstrap. Truncation does not, so it is not even in the batch.
        return batch.rewards + self.args.gamma * (1.0 - batch.terminations) * next_value

    def critic_loss(self, batch: Batch, candidates: Tensor) -> tuple[Tensor, Metrics]:
        """Return the squared Bellman error; `candidates` [k, batch, action_dim] are those of next_obs."""
        values = self.critic(batch.obs, batch.actions)
        loss = (values - self.target(batch, candidates)).square().mean()
        return loss, {"losses/critic": loss.detach(), "losses/q": values.detach()}

    def base_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Return the error of the base policy on the batch's actions.

        Diffusion: ‖ε(s, √ᾱ_t a + √(1 - ᾱ_t) ε, t) - ε‖². Flow matching: ‖v(s, (1 - t) ε + t a, t) - (a - ε)‖².
        """
        noise = self.normal(*batch.actions.shape)
        errors = self.process.errors(partial(self.base, batch.obs), batch.actions, noise, self.generator)
        loss = errors.square().sum(-1).mean()
        return loss, {"losses/base": loss.detach()}

    def edit_loss(self, batch: Batch) -> tuple[Tensor, Tensor, Metrics]:
        """Return α log π(β ê|s, a) - mean_i Q_i(s, a + β ê), a the batch's action, and log π [batch] for α."""
        edits, log_prob = self.edit(batch.obs, batch.actions, self.generator, self.dropout).rsample(self.generator)
        log_prob = log_prob - self.log_scale
        with frozen(self.critic):  # the gradient passes through the critics and stops there
            value = self.critic(batch.obs, batch.actions + self.edit_scale * edits).mean(0)
        loss = (self.log_alpha.exp().detach() * log_prob - value).mean()
        return loss, log_prob.detach(), {"losses/edit": loss.detach(), "losses/entropy": -log_prob.detach()}

    def alpha_loss(self, log_prob: Tensor) -> tuple[Tensor, Metrics]:
        """Return the loss that moves α until the entropy of the edits is H̄."""
        loss = -self.log_alpha.exp() * (log_prob.mean() + self.target_entropy)
        return loss, {"losses/alpha": loss.detach(), "charts/log_alpha": self.log_alpha.detach().clone()}

    def imitate(self, batch: Batch) -> Metrics:
        """Take one gradient step with the base policy, which no critic influences."""
        base_loss, metrics = self.base_loss(batch)
        self.base_optimizer.minimize(base_loss)
        self.update_average_base()
        return metrics

    def update(self, batch: Batch, online: bool = True) -> Metrics:
        """Step the critics on each `batch_size` of the batch in turn, then base policy, edits and α on the last."""
        batch = batch.map_obs(self.obs_normalizer)
        if not online:  # pre-training
            return self.imitate(batch)
        candidates = self.candidates(self.base, batch.next_obs, self.generator)
        parts = zip(batch.slices(self.args.batch_size), candidates.split(self.args.batch_size, dim=1), strict=True)
        for part, for_part in parts:
            critic_loss, critic_metrics = self.critic_loss(part, for_part)
            self.critic_optimizer.minimize(critic_loss)
            self.update_target_critic()
        metrics = critic_metrics | self.imitate(part)
        if not self.edits:
            return metrics
        edit_loss, log_prob, edit_metrics = self.edit_loss(part)
        self.edit_optimizer.minimize(edit_loss)
        alpha_loss, alpha_metrics = self.alpha_loss(log_prob)
        self.alpha_optimizer.minimize(alpha_loss)
        self.log_alpha.data.clamp_(max=20.0)
        return metrics | edit_metrics | alpha_metrics

    def decay(self, step: int) -> None:
        """Set the learning rates of base and edit policy for the update that ends at `step`."""
        done = {self.base_optimizer: step - self.args.span[0], self.edit_optimizer: max(step, 0)}
        for optimizer, updates in done.items():
            passed = min(1.0, updates / self.args.decay_updates)
            optimizer.lr = 0.5 * self.args.actor_lr * (1.0 + math.cos(math.pi * passed))


@returns_result
def train(args: Args) -> Result:
    args = with_presets(args, {domain: preset | SIZES[args.size] for domain, preset in PRESETS.items()})
    run = Run("expo", args)
    rewards, online_batch = RewardTransform(shift=args.reward_shift), args.utd * args.batch_size
    data = OfflineToOnline(args, run, rewards, online_batch=online_batch, wait_for_full_batch=False)
    rollout = data.rollout()
    agent = EXPO(args, rollout.obs_dim, rollout.action_dim, run.device)
    data.dataset.fit(agent.obs_normalizer)
    policy = run.policy(agent)
    update = run.updater(lambda online: agent.update(data.sample(online, agent.generator), online), agent.generator)
    data.load_pretrained(agent, only=BASE, must_match=BASE_ARGS)
    random_steps = 0 if args.offline_steps or args.init_from else args.random_steps
    run.learns_after(random_steps, "--random-steps")
    run.resume(agent=agent, data=data, rollout=rollout, update=update)

    for step in run.steps():
        pre_training, collecting = step <= 0, 0 < step <= random_steps
        # Act
        if not pre_training:
            actions = rollout.random_actions(agent.generator) if rollout.steps < random_steps else policy(rollout.obs)
            data.add(rollout.step(actions, meanwhile=update.flush))  # actions as they were chosen, not clipped

        # Learn: the base policy alone in pre-training
        agent.decay(step)
        for _ in range(0 if collecting else data.updates_due(step)):
            update(online=not pre_training)

        # Report
        run.report(update.metrics)
    return run.finish()


if __name__ == "__main__":
    command_line(train, Args)
