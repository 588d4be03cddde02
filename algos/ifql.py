"""IFQL: the critics of IQL, a flow that imitates the data, and the best of 32 samples as the action.

The flow version of IDQL (Hansen-Estruch et al. 2023, arXiv 2304.10573), as a baseline of Park, Li and Levine 2025,
"Flow Q-Learning", arXiv 2502.02538. Values are those of IQL (Kostrikov et al. 2021, arXiv 2110.06169), and their
gradients do not reach the policy.

    python algos/ifql.py --dataset scene-play-singletask-task1-v0
    python algos/ifql.py --dataset antmaze-large-play-v2 --online-steps 1000000

Differences from the authors' code, none of which changes a loss:
- Each network has its own Adam. With no parameter in common and no clipping, that equals one Adam over all.
- The target critics follow the critics after their step, not before it.
- Evaluation draws the same noise each time.
"""

import common.start

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from common.acting import acting
from common.arguments import BY_DOMAIN, AnyNumber, Fraction, NonNegativeInt, OpenFraction
from common.command_line import command_line
from common.diffusion import Flow, Velocity
from common.evaluate import Act
from common.networks import MLP, Critic, glorot, mlp
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
    """Updates on the dataset alone. With --init-from, the default is 0."""

    # Networks
    hidden: tuple[int, ...] = (512, 512, 512, 512)
    """Widths of the hidden layers, for flow, value network and critics."""
    critics: int = 2
    """Number of critics."""
    layer_norm: bool = True
    """Normalise the hidden layers of critics and value network, after their activation."""

    # Acting
    samples: int = 32
    """Actions drawn from the flow, of which the critics choose the best."""
    flow_steps: int = 10
    """Euler steps of the flow from noise to an action."""

    # Learning
    expectile: OpenFraction = BY_DOMAIN
    """τ of the expectile regression of V."""
    q_aggregation: Literal["mean", "min"] = "min"
    """How V's target combines the target critics. The choice of an action always uses the smallest value."""
    gamma: Fraction = BY_DOMAIN
    """Discount factor."""
    tau: Fraction = 0.005
    """Soft-update rate of the target critics, at each update."""
    actor_lr: float = 3e-4
    """Learning rate of the flow."""
    critic_lr: float = 3e-4
    """Learning rate of the critics."""
    value_lr: float = 3e-4
    """Learning rate of the value network."""
    reward_shift: AnyNumber = BY_DOMAIN
    """Number added to each reward."""


# The expectile is the default of the authors' code. By pattern, it is the one tuned for ten critics, sparse rewards and
# chunks of actions by Li and Levine 2026 (arXiv 2601.14234, experiments/reproduce.py in ColinQiyangLi/qam).
OGBENCH = {"offline_steps": 1_000_000, "expectile": 0.9, "gamma": 0.99, "reward_shift": 0.0}
D4RL = OGBENCH | {"offline_steps": 500_000}
PRESETS: dict[str, dict[str, Any]] = {
    "locomotion": OGBENCH,
    "ogbench": OGBENCH,
    "puzzle-3x3-*singletask*": OGBENCH | {"expectile": 0.95},
    "cube-triple-*singletask*": OGBENCH | {"expectile": 0.95},
    "cube-quadruple-*singletask*": OGBENCH | {"expectile": 0.95},
    "antmaze-giant-navigate-*singletask*": OGBENCH | {"expectile": 0.8, "gamma": 0.995},
    "humanoidmaze-medium-*singletask*": OGBENCH | {"expectile": 0.7, "gamma": 0.995},
    "humanoidmaze-*singletask*": OGBENCH | {"expectile": 0.8, "gamma": 0.995},
    "antsoccer-*singletask*": OGBENCH | {"gamma": 0.995},
    "antmaze": D4RL | {"reward_shift": -1.0},
    "adroit": D4RL,
    "adroit-binary": OGBENCH,
}


class Value(nn.Module):
    """V(s): map obs [batch, obs_dim] to [batch]."""

    def __init__(self, net: MLP) -> None:
        super().__init__()
        self.net = net

    def forward(self, obs: Tensor) -> Tensor:
        return self.net(obs).squeeze(-1)


class IFQL:
    def __init__(self, args: Args, obs_dim: int, action_dim: int, device: torch.device) -> None:
        initializer = generator(args.seed, "networks")
        self.generator = generator(args.seed, "agent", device)
        self.process = Flow(args.flow_steps)
        self.flow = Velocity(obs_dim, action_dim, args.hidden, args.flow_steps, initializer).to(device)
        form: dict[str, Any] = {"activation": "gelu", "layer_norm": args.layer_norm, "norm_last": True}
        sizes = [obs_dim + action_dim, *args.hidden, 1]
        self.critic = Critic(glorot(mlp(sizes, initializer, args.critics, **form), initializer)).to(device)
        self.target_critic = Critic(mlp(sizes, initializer, args.critics, **form)).to(device)
        self.target_critic.load_state_dict(self.critic.state_dict())
        self.update_target_critic = SoftUpdate(self.target_critic, self.critic, args.tau)
        self.value = Value(glorot(mlp([obs_dim, *args.hidden, 1], initializer, **form), initializer)).to(device)
        self.flow_optimizer = Adam(self.flow.parameters(), args.actor_lr)
        self.critic_optimizer = Adam(self.critic.parameters(), args.critic_lr)
        self.value_optimizer = Adam(self.value.parameters(), args.value_lr)
        self.obs_normalizer = FixedNormalizer(obs_dim).to(device) if args.normalize_obs else nn.Identity()
        self.args, self.device, self.action_dim = args, device, action_dim

    def normal(self, *shape: int, generator: torch.Generator) -> Tensor:
        return torch.randn(shape, generator=generator, device=self.device)

    @acting
    def act(self, obs: Tensor, deterministic: bool = False, generator: torch.Generator | None = None) -> Tensor:
        """Return actions [n, action_dim] for obs [n, obs_dim]: of the flow's samples, those of the highest value.

        If `deterministic`, each call draws the same noise unless a generator is given.
        """
        generator = generator or (torch.Generator(self.device).manual_seed(0) if deterministic else self.generator)
        obs = self.obs_normalizer(obs)
        noise = self.normal(self.args.samples, len(obs), self.action_dim, generator=generator)
        actions = self.process.sample(partial(self.flow, obs), noise, generator)
        chosen = self.critic(obs, actions).amin(0).argmax(0).view(1, -1, 1).expand(1, -1, self.action_dim)
        return actions.gather(0, chosen).squeeze(0)

    def eval_policy(self) -> Act:
        """Return the policy, which samples, with noise of its own that is the same in every evaluation."""
        return partial(self.act, deterministic=True, generator=generator(self.args.seed, "eval noise", self.device))

    def value_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Return the expectile regression of V on Q of the batch's actions: L₂^τ(u) = |τ - 1(u < 0)| u²."""
        with torch.no_grad():
            targets = self.target_critic(batch.obs, batch.actions)
            target = targets.amin(0) if self.args.q_aggregation == "min" else targets.mean(0)
        value = self.value(batch.obs)
        u = target - value
        loss = (torch.where(u < 0, 1.0 - self.args.expectile, self.args.expectile) * u.square()).mean()
        return loss, {"losses/value": loss.detach(), "losses/v": value.detach()}

    def critic_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Return the Bellman residual with V as the next value. Termination masks V; truncation does not."""
        with torch.no_grad():
            target = batch.rewards + self.args.gamma * (1.0 - batch.terminations) * self.value(batch.next_obs)
        values = self.critic(batch.obs, batch.actions)
        loss = (values - target).square().mean(1).sum()
        return loss, {"losses/critic": loss.detach(), "losses/q": values.detach()}

    def flow_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Return the flow's error on the batch's actions: ‖v(s, (1 - t) x + t a, t) - (a - x)‖²."""
        noise = self.normal(*batch.actions.shape, generator=self.generator)
        errors = self.process.errors(partial(self.flow, batch.obs), batch.actions, noise, self.generator)
        loss = errors.square().mean()
        return loss, {"losses/flow": loss.detach()}

    def update(self, batch: Batch) -> Metrics:
        """Take one gradient step with each network, then move the target critics."""
        batch = batch.map_obs(self.obs_normalizer)
        # As in the authors' code, the critics learn from V before its step (algos/iql.py has V after it).
        critic_loss, critic_metrics = self.critic_loss(batch)
        self.critic_optimizer.minimize(critic_loss)
        value_loss, value_metrics = self.value_loss(batch)
        self.value_optimizer.minimize(value_loss)
        flow_loss, flow_metrics = self.flow_loss(batch)
        self.flow_optimizer.minimize(flow_loss)
        self.update_target_critic()
        return value_metrics | critic_metrics | flow_metrics


@returns_result
def train(args: Args) -> Result:
    args = with_presets(args, PRESETS)
    run = Run("ifql", args)
    data = OfflineToOnline(args, run, RewardTransform(shift=args.reward_shift))
    rollout = data.rollout()
    agent = IFQL(args, rollout.obs_dim, rollout.action_dim, run.device)
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
