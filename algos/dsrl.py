"""DSRL: SAC over the noise from which a frozen flow or diffusion policy makes its actions.

Wagenmaker et al. 2025, "Steering Your Diffusion Policy with Latent Space Reinforcement Learning", arXiv 2506.15799. A
flow, or a diffusion sampled by DDIM, is a function a = G(s, w) of its noise w. The actor chooses w, so the steered
policy stays close to what this base policy has imitated, and the base policy never changes.

    python algos/dsrl.py --dataset hopper-medium-v2 --chunk 4 --gamma 0.9975
    python algos/dsrl.py --dataset scene-play-singletask-task2-v0 --init-from runs/fql

Steps before the switch imitate. --init-from takes the base policy of a run of bc, dsrl, expo, fql, ifql or pa_rl.
DSRL-NA distils critics of noise from critics of actions. DSRL-SAC is SAC whose action is the noise.
It was written from a description, because the authors' code has no licence. docs/dsrl.md lists the differences.
"""

import common.start

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from common.acting import acting
from common.arguments import BY_DOMAIN, AnyNumber, Fraction, NonNegativeInt
from common.command_line import command_line
from common.diffusion import BASE_NAMES, DDIM, Denoiser, Flow, Velocity
from common.errors import InputError
from common.evaluate import Act
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
    # From data to online
    offline_steps: NonNegativeInt = BY_DOMAIN
    """Updates of the base policy, by imitation of the dataset. With --init-from, the default is 0."""
    online_steps: NonNegativeInt = 300_000
    """Environment steps after the switch, summed over all environments."""
    retain: Literal["none", "append", "mix"] = "none"
    """Data for online updates. none: online ones. append: the dataset's too. mix: a fixed share from the dataset."""
    warmup_steps: NonNegativeInt = 8_000
    """With --retain none: environment steps with the unsteered base policy before the first online update."""

    # The base policy
    policy: Literal["flow", "diffusion"] = "flow"
    """Type of the base policy. flow: flow matching with Euler steps. diffusion: sampled by DDIM, without noise."""
    chunk: int = 1
    """h: actions that the policy plans at once. They are executed open loop, without observing again."""
    flow_hidden: tuple[int, ...] = (512, 512, 512, 512)
    """With --policy flow: widths of its hidden layers."""
    flow_steps: int = 10
    """With --policy flow: Euler steps from noise to an action."""
    denoising_steps: int = 10
    """With --policy diffusion: steps T from noise to an action, in training and in DDIM. The network is EXPO's."""

    # Learning
    recipe: Literal["na", "sac"] = "na"
    """How critics of noise learn. na: from critics of actions (DSRL-NA). sac: from rewards alone (DSRL-SAC)."""
    noise_scale: float = BY_DOMAIN
    """b: the actor chooses noise in [-b, b]. Tune it first."""
    hidden: tuple[int, ...] = BY_DOMAIN
    """Widths of the hidden layers, for actor and critics."""
    critics: int = 2
    """Number of critics of each kind. The smallest is used."""
    gamma: Fraction = BY_DOMAIN
    """Discount factor of a step."""
    tau: Fraction = 0.005
    """Soft-update rate of the target critics, at each update."""
    actor_lr: float = 3e-4
    """Learning rate of base policy and actor."""
    critic_lr: float = 3e-4
    """Learning rate of the critics of both kinds."""
    alpha_lr: float = 3e-4
    """Learning rate of the temperature."""
    target_entropy: AnyNumber = BY_DOMAIN
    """Target entropy H̄ for each dimension of the noise."""
    reward_shift: AnyNumber = BY_DOMAIN
    """Number added to each reward."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.recipe == "sac" and (self.retain != "none" or self.chunk > 1):
            raise InputError("--recipe sac learns from the noise of single steps: give --retain none and --chunk 1")


# Widths and b are the authors', and LARGE has their advice for other tasks. OGBench's rows are those of Li and Levine
# 2026 (arXiv 2601.14234, experiments/reproduce.py in ColinQiyangLi/qam). The other values are ours.
OURS = {"offline_steps": 500_000, "reward_shift": 0.0, "gamma": 0.99}
LARGE = OURS | {"noise_scale": 1.5, "hidden": (2048,) * 3, "target_entropy": 0.0}
OGBENCH = OURS | {"noise_scale": 1.0, "hidden": (512,) * 4, "target_entropy": -0.5}
SCALES = ("scene", 0.4, 0.99), ("cube-[tq]", 1.4, 0.99), ("antmaze-giant", 1.2, 0.995), ("antmaze", 0.8, 0.99), (
    "humanoidmaze-medium", 0.6, 0.995), ("humanoidmaze", 0.8, 0.995)  # fmt: skip
PRESETS: dict[str, dict[str, Any]] = {
    "locomotion": LARGE, "antmaze": LARGE | {"reward_shift": -1.0}, "*walker2d-*": LARGE | {"noise_scale": 2.5},
    "*halfcheetah-*": LARGE | {"hidden": (1024,) * 3}, "*hopper-*": LARGE | {"hidden": (128,) * 3}, "ogbench": OGBENCH,
} | {f"{env}*singletask*": OGBENCH | {"noise_scale": b, "gamma": gamma} for env, b, gamma in SCALES}  # fmt: skip


class Actor(nn.Module):
    """π(u|s): map obs [batch, obs_dim] to a tanh-Gaussian over noise in units of b [batch, action_dim]."""

    def __init__(self, obs_dim: int, action_dim: int, hidden: tuple[int, ...], generator: torch.Generator) -> None:
        super().__init__()
        self.net = mlp([obs_dim, *hidden, 2 * action_dim], generator, activation="tanh", layer_norm=True)

    def forward(self, obs: Tensor) -> TanhGaussian:
        mean, log_std = self.net(obs).chunk(2, dim=-1)
        return TanhGaussian(mean, log_std.clamp(-20.0, 2.0))


class DSRL:
    def __init__(self, args: Args, obs_dim: int, action_dim: int, device: torch.device) -> None:
        initializer = generator(args.seed, "networks")
        self.generator = generator(args.seed, "agent", device)
        self.args, self.device, self.b, self.is_na = args, device, args.noise_scale, args.recipe == "na"
        action_dim = args.chunk * action_dim  # from here on, an action is a chunk
        is_flow, steps = args.policy == "flow", args.denoising_steps
        self.process = Flow(args.flow_steps) if is_flow else DDIM.variance_preserving(steps, device)
        flow = Velocity(obs_dim, action_dim, args.flow_hidden, args.flow_steps, initializer) if is_flow else None
        self.base = (flow or Denoiser(obs_dim, action_dim, 256, 3, initializer)).to(device)  # EXPO's sizes
        self.actor = Actor(obs_dim, action_dim, args.hidden, initializer).to(device)
        net = partial(mlp, [obs_dim + action_dim, *args.hidden, 1], initializer, args.critics, "tanh", layer_norm=True)
        self.critic = Critic(net()).to(device)
        self.target_critic = copy.deepcopy(self.critic)
        if self.is_na:
            self.noise_critic = Critic(net()).to(device)
            self.noise_critic_optimizer = Adam(self.noise_critic.parameters(), args.critic_lr)
        self.update_target_critic = SoftUpdate(self.target_critic, self.critic, args.tau)
        self.log_alpha = nn.Parameter(torch.zeros((), device=device))
        self.base_optimizer = Adam(self.base.parameters(), args.actor_lr)
        self.actor_optimizer = Adam(self.actor.parameters(), args.actor_lr)
        self.critic_optimizer = Adam(self.critic.parameters(), args.critic_lr)
        self.alpha_optimizer = Adam([self.log_alpha], args.alpha_lr)
        self.obs_normalizer = FixedNormalizer(obs_dim).to(device) if args.normalize_obs else nn.Identity()
        self.action_dim, self.steers = action_dim, 0  # steers: 1 once the actor chooses the noise

    def normal(self, obs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw standard normal noise for each of obs: [batch, action_dim]."""
        return torch.randn((len(obs), self.action_dim), generator=generator or self.generator, device=self.device)

    def base_actions(self, obs: Tensor, noise: Tensor) -> Tensor:
        """Return G(s, w) [batch, action_dim]: the base policy's actions from this noise."""
        return self.process.sample(partial(self.base, obs), noise, self.generator)

    @acting
    def act(self, obs: Tensor, deterministic: bool = False, generator: torch.Generator | None = None) -> Tensor:
        """Return chunks [n, h · action_dim] for obs [n, obs_dim], from noise that π samples, or from its mode.

        Before it steers, the base policy acts. If `deterministic` and no generator is given, its noise is always equal.
        """
        obs = self.obs_normalizer(obs)
        if not self.steers:
            generator = generator or (torch.Generator(self.device).manual_seed(0) if deterministic else self.generator)
            return self.base_actions(obs, self.normal(obs, generator))
        noise = self.actor(obs).mode if deterministic else self.actor(obs).sample(self.generator)
        return self.base_actions(obs, self.b * noise)

    @acting
    def explore(self, obs: Tensor) -> Tensor:
        """Return actions and their noise u [2, n, action_dim] for DSRL-SAC. In the warm-up, b u is clipped N(0, I)."""
        obs = self.obs_normalizer(obs)
        noise = (self.actor(obs).sample(self.generator) if self.steers else self.normal(obs) / self.b).clamp(-1.0, 1.0)
        return torch.stack([self.base_actions(obs, self.b * noise), noise])

    def eval_policy(self) -> Act:
        """Return the policy that acts now. The base policy's noise is the same in every evaluation."""
        return partial(self.act, deterministic=True, generator=generator(self.args.seed, "eval noise", self.device))

    def imitation_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Return the mean (v(s, (1 - t) x + t a, t) - (a - x))² of a flow, or (ε(s, √ᾱ a + √(1 - ᾱ) x, t) - x)²."""
        noise = self.normal(batch.obs)
        errors = self.process.errors(partial(self.base, batch.obs), batch.actions, noise, self.generator)
        loss = (batch.valid_actions * errors.square()).mean()
        return loss, {"losses/base": loss.detach()}

    def critic_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Return the squared error of Q(s, a) from Σ γⁱ r + γʰ (min_j Q̄_j(s', G(s', b u')) - α log π(u'|s')).

        Of chunks that an episode's end cuts, only those that terminate count. DSRL-SAC has noise u for all actions.
        """
        with torch.no_grad():
            next_noise, next_log_prob = self.actor(batch.next_obs).rsample(self.generator)
            next_actions = self.base_actions(batch.next_obs, self.b * next_noise) if self.is_na else next_noise
            next_value = self.target_critic(batch.next_obs, next_actions).amin(0) - self.log_alpha.exp() * next_log_prob
            # Termination masks the bootstrap. Truncation does not, so it is not even in the batch.
            target = batch.rewards + self.args.gamma**self.args.chunk * (1.0 - batch.terminations) * next_value
        values = self.critic(batch.obs, batch.actions)
        known = 1.0 if batch.valid is None else torch.maximum(batch.valid[:, -1], batch.terminations)
        loss = 0.5 * (known * (values - target).square()).mean(1).sum()
        return loss, {"losses/critic": loss.detach(), "losses/q": values.detach()}

    def noise_critic_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Return the squared error of each Q_w(s, w / b) from its Q(s, G(s, w)), with w ~ N(0, I), not clipped."""
        noise = self.normal(batch.obs)
        with torch.no_grad():
            target = self.critic(batch.obs, self.base_actions(batch.obs, noise))
        loss = 0.5 * (self.noise_critic(batch.obs, noise / self.b) - target).square().mean(1).sum()
        return loss, {"losses/noise_critic": loss.detach()}

    def actor_loss(self, batch: Batch) -> tuple[Tensor, Tensor, Metrics]:
        """Return α log π - min_j Q_w,j(s, u), and log π [batch] for α. No gradient enters G. In DSRL-SAC, Q_w is Q."""
        noise, log_prob = self.actor(batch.obs).rsample(self.generator)
        with frozen(critic := self.noise_critic if self.is_na else self.critic):
            value = critic(batch.obs, noise).amin(0)
        loss = (self.log_alpha.exp().detach() * log_prob - value).mean()
        return loss, log_prob.detach(), {"losses/actor": loss.detach(), "losses/entropy": -log_prob.detach()}

    def alpha_loss(self, log_prob: Tensor) -> tuple[Tensor, Metrics]:
        """Return the loss that moves log α until the policy's entropy is H̄ for each of its dimensions."""
        loss = -self.log_alpha * (log_prob.mean() + self.args.target_entropy * self.action_dim)
        return loss, {"losses/alpha": loss.detach(), "charts/alpha": self.log_alpha.detach().exp()}

    def update(self, batch: Batch, online: bool) -> Metrics:
        """Offline, step the base policy. Online, step all other networks on each `batch_size` of the batch in turn."""
        batch = batch.map_obs(self.obs_normalizer)
        if not online:
            base_loss, metrics = self.imitation_loss(batch)
            self.base_optimizer.minimize(base_loss)
            return metrics
        for part in batch.slices(self.args.batch_size):
            critic_loss, critic_metrics = self.critic_loss(part)
            self.critic_optimizer.minimize(critic_loss)
            actor_loss, log_prob, actor_metrics = self.actor_loss(part)
            self.actor_optimizer.minimize(actor_loss)
            alpha_loss, alpha_metrics = self.alpha_loss(log_prob)
            self.alpha_optimizer.minimize(alpha_loss)
            self.update_target_critic()
            metrics = critic_metrics | actor_metrics | alpha_metrics
            if self.is_na:
                noise_critic_loss, noise_critic_metrics = self.noise_critic_loss(part)
                self.noise_critic_optimizer.minimize(noise_critic_loss)
                metrics |= noise_critic_metrics
        return metrics


@returns_result
def train(args: Args) -> Result:
    args = with_presets(args, PRESETS)
    run = Run("dsrl", args)
    rewards, size = RewardTransform(shift=args.reward_shift), args.utd * args.batch_size
    data = OfflineToOnline(args, run, rewards, online_batch=size, windows=(args.chunk, args.gamma))
    rollout = data.rollout()
    agent = DSRL(args, rollout.obs_dim, rollout.action_dim, run.device)
    data.dataset.fit(agent.obs_normalizer)
    policy = run.policy(agent)
    update = run.updater(lambda online: agent.update(data.sample(online, agent.generator), online), agent.generator)
    form = ("policy", "flow_steps" if args.policy == "flow" else "denoising_steps")
    data.load_pretrained(agent, only=("base", "obs_normalizer"), must_match=form, base_names=BASE_NAMES)
    run.resume(agent=agent, data=data, rollout=rollout, update=update)

    for step in run.steps():
        # Act
        if step > 0 and args.recipe == "sac":
            actions, noise = agent.explore(rollout.obs)
            data.add(rollout.step(actions, meanwhile=update.flush)._replace(actions=noise))
        elif step > 0:
            data.add(rollout.step(rollout.act(policy if agent.steers else agent.act), meanwhile=update.flush))

        # Learn: the base policy before the switch, then the other networks. The actor steers once it has learned.
        for _ in range(data.updates_due(step)):
            update(online=step > 0)
            agent.steers = int(step > 0)

        # Report
        run.report(update.metrics)
    return run.finish()


if __name__ == "__main__":
    command_line(train, Args)
