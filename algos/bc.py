"""Behaviour cloning: regression on the dataset's actions, either all of them or those of the best episodes.

This is the baseline of offline papers. Actor and loss are those of TD3+BC (Fujimoto and Gu 2021, arXiv 2106.06860)
without the critic. The best episodes ("10% BC") are chosen as by Chen et al. 2021, "Decision Transformer", arXiv
2106.01345.

    python algos/bc.py --dataset hopper-medium-v2
    python algos/bc.py --dataset hopper-medium-replay-v2 --top-fraction 0.1 --run-dir runs/bc10

By default there are no online steps: online, the policy would imitate its own actions and gain nothing. The flag exists
because every file that takes a dataset has it. Online actions have no noise, because noise would be imitated too.
"""

import common.start

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from common.acting import acting
from common.arguments import Fraction
from common.command_line import command_line
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
    hidden: tuple[int, ...] = (256, 256)
    """Widths of the actor's hidden layers."""
    normalize_obs: bool = True
    """Normalise observations by the mean and standard deviation of the dataset's."""
    actor_lr: float = 3e-4
    """Learning rate of the actor."""
    top_fraction: Fraction = 1.0
    """Share of the transitions to imitate: those of the episodes with the highest returns."""


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
        self.actor = Actor(obs_dim, action_dim, args.hidden, initializer).to(device)
        self.actor_optimizer = Adam(self.actor.parameters(), args.actor_lr)
        self.obs_normalizer = FixedNormalizer(obs_dim).to(device) if args.normalize_obs else nn.Identity()
        self.device = device

    @acting
    def act(self, obs: Tensor, deterministic: bool = False) -> Tensor:
        """Return actions [n, action_dim] for obs [n, obs_dim]; the policy is always deterministic."""
        return self.actor(self.obs_normalizer(obs))

    def actor_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Return the squared distance from the batch's actions, the mean over transitions and dimensions."""
        loss = (self.actor(batch.obs) - batch.actions).square().mean()
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
    data.load_pretrained(agent)
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
