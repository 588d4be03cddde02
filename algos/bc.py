"""Behaviour cloning: imitation of the dataset's actions, either all of them or those of the best episodes.

This is the baseline of offline papers. Actor and loss are those of TD3+BC (Fujimoto and Gu 2021, arXiv 2106.06860)
without the critic. The best episodes ("10% BC") are chosen as by Chen et al. 2021, "Decision Transformer", arXiv
2106.01345.

    python algos/bc.py --dataset hopper-medium-v2
    python algos/bc.py --dataset hopper-medium-replay-v2 --top-fraction 0.1 --run-dir runs/bc10
    python algos/bc.py --dataset pen-human-v1 --policy flow

With --policy flow or diffusion, the policy samples, and so it can imitate several ways to act in one state. The flow is
that of FQL (Park et al. 2025, arXiv 2502.02538). The diffusion is that of IDQL (Hansen-Estruch et al. 2023, arXiv
2304.10573), as in EXPO, but it acts without an average of its weights, and its learning rate does not decay.

By default there are no online steps: online, the policy would imitate its own actions and gain nothing. The flag exists
because every file that takes a dataset has it. Online actions have no further noise, which would be imitated too.
"""

import common.start

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from common.acting import acting
from common.arguments import Fraction
from common.command_line import command_line
from common.diffusion import Denoiser, Diffusion, Flow, Velocity
from common.evaluate import Act
from common.networks import mlp
from common.normalize import FixedNormalizer
from common.optim import Adam
from common.replay_buffer import Batch
from common.run import Result, Run, returns_result
from common.seeding import generator
from common.updater import Metrics
from offline.offline_to_online import OfflineArgs, OfflineToOnline, with_presets


@dataclass
class Args(OfflineArgs):
    policy: Literal["gaussian", "flow", "diffusion"] = "gaussian"
    """Type of the policy. gaussian: the mean of a Gaussian, without its noise. flow: flow matching with Euler steps.
    diffusion: DDPM."""
    hidden: tuple[int, ...] = (256, 256)
    """With --policy gaussian or flow: widths of the hidden layers."""
    flow_steps: int = 10
    """With --policy flow: Euler steps from noise to an action."""
    denoising_steps: int = 10
    """With --policy diffusion: steps T from noise to an action."""
    width: int = 256
    """With --policy diffusion: width of the residual stream."""
    blocks: int = 3
    """With --policy diffusion: number of residual blocks."""
    normalize_obs: bool = True
    """Normalise observations by the mean and standard deviation of the dataset's."""
    actor_lr: float = 3e-4
    """Learning rate of the actor."""
    top_fraction: Fraction = 1.0
    """Share of the transitions to imitate: those of the episodes with the highest returns."""


WEIGHT_DECAY = 1e-4  # of diffusion, as in EXPO


class Actor(nn.Module):
    """μ(s): map obs [batch, obs_dim] to actions [batch, action_dim]."""

    def __init__(self, obs_dim: int, action_dim: int, hidden: tuple[int, ...], generator: torch.Generator) -> None:
        super().__init__()
        self.net = mlp([obs_dim, *hidden, action_dim], generator)

    def forward(self, obs: Tensor) -> Tensor:
        return torch.tanh(self.net(obs))


class BC:
    def __init__(self, args: Args, obs_dim: int, action_dim: int, device: torch.device) -> None:
        initializer = generator(args.seed, "networks")
        self.generator = generator(args.seed, "agent", device)
        self.process: Flow | Diffusion | None = None  # from noise to an action, if the policy samples
        self.actor: nn.Module
        if args.policy == "flow":
            self.process = Flow(args.flow_steps)
            self.actor = Velocity(obs_dim, action_dim, args.hidden, args.flow_steps, initializer).to(device)
        elif args.policy == "diffusion":
            self.process = Diffusion.variance_preserving(args.denoising_steps, device)
            self.actor = Denoiser(obs_dim, action_dim, args.width, args.blocks, initializer).to(device)
        else:
            self.actor = Actor(obs_dim, action_dim, args.hidden, initializer).to(device)
        weight_decay = WEIGHT_DECAY if args.policy == "diffusion" else 0.0
        self.actor_optimizer = Adam(self.actor.parameters(), args.actor_lr, weight_decay=weight_decay)
        self.obs_normalizer = FixedNormalizer(obs_dim).to(device) if args.normalize_obs else nn.Identity()
        self.args, self.device = args, device
        self.action_shape = (action_dim,)  # a number would be part of the checkpoint, which older ones lack

    def noise(self, obs: Tensor, generator: torch.Generator) -> Tensor:
        """Draw standard normal noise for each of obs: [batch, action_dim]."""
        return torch.randn((len(obs), *self.action_shape), generator=generator, device=self.device)

    @acting
    def act(self, obs: Tensor, deterministic: bool = False, generator: torch.Generator | None = None) -> Tensor:
        """Return actions [n, action_dim] for obs [n, obs_dim]: μ(s), or samples of a flow or diffusion.

        If `deterministic`, each call draws the same noise unless a generator is given.
        """
        obs = self.obs_normalizer(obs)
        if self.process is None:
            return self.actor(obs)
        generator = generator or (torch.Generator(self.device).manual_seed(0) if deterministic else self.generator)
        return self.process.sample(partial(self.actor, obs), self.noise(obs, generator), generator)

    def eval_policy(self) -> Act:
        """Return the policy. If it samples, its noise is its own and the same in every evaluation."""
        return partial(self.act, deterministic=True, generator=generator(self.args.seed, "eval noise", self.device))

    def actor_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Return the policy's error on the batch's actions, the mean over transitions.

        Gaussian: ‖μ(s) - a‖². Flow: ‖v(s, (1 - t) x + t a, t) - (a - x)‖². Both are divided by the dimensions.
        Diffusion: ‖ε(s, √ᾱ_t a + √(1 - ᾱ_t) x, t) - x‖².
        """
        if self.process is None:
            errors = self.actor(batch.obs) - batch.actions
        else:
            noise = self.noise(batch.obs, self.generator)
            errors = self.process.errors(partial(self.actor, batch.obs), batch.actions, noise, self.generator)
        loss = errors.square().sum(-1).mean() if self.args.policy == "diffusion" else errors.square().mean()
        return loss, {"losses/actor": loss.detach()}

    def update(self, batch: Batch) -> Metrics:
        """Take one gradient step with the actor."""
        actor_loss, metrics = self.actor_loss(batch._replace(obs=self.obs_normalizer(batch.obs)))
        self.actor_optimizer.minimize(actor_loss)
        return metrics


@returns_result
def train(args: Args) -> Result:
    args = with_presets(args, {})  # nothing depends on the domain
    run = Run("bc", args)
    data = OfflineToOnline(args, run, top=args.top_fraction)
    rollout = data.rollout()
    agent = BC(args, rollout.obs_dim, rollout.action_dim, run.device)
    data.dataset.fit(agent.obs_normalizer)
    policy = run.policy(agent)
    update = run.updater(lambda online: agent.update(data.sample(online, agent.generator)), agent.generator)
    form = {"flow": ("flow_steps",), "diffusion": ("denoising_steps",)}.get(args.policy, ())
    data.load_pretrained(agent, must_match=("policy", *form))
    run.resume(agent=agent, data=data, rollout=rollout, update=update)

    for step in run.steps():
        # Act: after pre-training
        if step > 0:
            data.add(rollout.step(policy(rollout.obs), meanwhile=update.flush))

        # Learn
        for _ in range(data.updates_due(step, args.utd)):
            update(online=step > 0)

        # Report
        run.report(update.metrics)
    return run.finish()


if __name__ == "__main__":
    command_line(train, Args)
