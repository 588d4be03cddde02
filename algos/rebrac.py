"""ReBRAC: TD3+BC with a penalty in the critic's target too, layer norm and deeper networks, offline and then online.

Tarasov et al. 2023, "Revisiting the Minimalist Approach to Offline Reinforcement Learning", arXiv 2305.09836; TD3 by
Fujimoto, van Hoof and Meger 2018, arXiv 1802.09477.

    python algos/rebrac.py --dataset hopper-medium-v2
    python algos/rebrac.py --dataset antmaze-medium-play-v2 --online-steps 1000000

β₁ and β₂ are the authors' for each dataset. For another dataset, try several. Online, β₂ is 0 and β₁ falls to a half,
as in CORL's fine-tuning. Differences from the authors' code:
- In the authors' code, β₁ falls to 0 online, and actions have noise of 0.03.
- The target actor moves towards the updated actor. The authors' moves towards the actor from before the update.
- The last transition of a truncated episode is kept. No action follows it, so its target has no penalty.
- The dataset's actions are clipped to ±(1 - 1e-5).
"""

import common.start

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from common.acting import acting
from common.arguments import BY_DOMAIN, AnyNumber, Fraction, NonNegative
from common.command_line import command_line
from common.networks import MLP, Critic, EnsembleLinear, frozen, mlp
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
    retain: Literal["none", "append", "mix"] = "mix"
    """Data for online updates. none: online transitions. append: dataset and online transitions as one buffer.
    mix: a fixed share of each batch from the dataset."""

    # Networks
    hidden: tuple[int, ...] = (256, 256, 256)
    """Widths of the hidden layers, for actor and critics."""
    critics: int = 2
    """Number of critics. Target and actor use the smallest value."""

    # Learning
    actor_penalty: NonNegative = BY_DOMAIN
    """β₁: weight of the squared distance from the dataset's action in the actor's loss."""
    critic_penalty: NonNegative = BY_DOMAIN
    """β₂: weight of the squared distance from the dataset's next action in the target, before the switch."""
    penalty_decay_steps: int = 1_000_000
    """Online steps over which β₁ would decay to 0. The decay stops at half of β₁."""
    gamma: Fraction = BY_DOMAIN
    """Discount factor."""
    tau: Fraction = 0.005
    """Soft-update rate of the target networks, at each update of the actor."""
    actor_lr: float = BY_DOMAIN
    """Learning rate of the actor."""
    critic_lr: float = BY_DOMAIN
    """Learning rate of the critics."""
    batch_size: int = BY_DOMAIN
    """Transitions in each update."""
    policy_delay: int = 2
    """Critic updates for each update of the actor and the target networks."""
    exploration_noise: NonNegative = 0.0
    """Standard deviation of the exploration noise online."""
    target_noise: NonNegative = BY_DOMAIN
    """Standard deviation of the noise on the target's actions (target policy smoothing)."""
    target_noise_clip: NonNegative = 0.5
    """Largest absolute value of the noise on the target's actions."""

    # Rewards
    reward_scale: float = BY_DOMAIN
    """Factor that multiplies each reward."""
    reward_shift: AnyNumber = 0.0
    """Number added to each reward after scaling."""


# Source: the authors (DT6A/ReBRAC, configs/), and for maze2d CORL (configs/offline/rebrac). The β₁ and β₂ here are for
# datasets without their own below: the most frequent ones of the domain, or the middle ones.
LOCOMOTION = {
    "actor_penalty": 0.01, "critic_penalty": 0.01, "gamma": 0.99, "actor_lr": 1e-3, "critic_lr": 1e-3,
    "batch_size": 1024, "target_noise": 0.2, "reward_scale": 1.0}  # fmt: skip
OTHER = LOCOMOTION | {"actor_lr": 3e-4, "critic_lr": 3e-4, "batch_size": 256}
MAZE = OTHER | {"gamma": 0.999, "critic_lr": 5e-5, "reward_scale": 100.0}
DOMAINS: dict[str, dict[str, Any]] = {
    "locomotion": LOCOMOTION,
    "antmaze": MAZE | {"actor_penalty": 0.002, "critic_penalty": 0.001},
    "maze2d": OTHER | {"actor_penalty": 0.003, "critic_penalty": 0.001},
    "adroit": OTHER | {"actor_penalty": 0.1},
    "ogbench": OTHER | {"critic_penalty": 0.0},
}
MIXES = ("random", "medium", "medium-replay", "medium-expert", "expert", "full-replay")
MAZES = ("umaze", "umaze-diverse", "medium-play", "medium-diverse", "large-play", "large-diverse")
KINDS = ("human", "cloned", "expert")
D4RL = {  # β₁ of each, then β₂ of each
    "halfcheetah": (MIXES, (0.001, 0.001, 0.01, 0.01, 0.01, 0.001), (0.1, 0.01, 0.001, 0.1, 0.01, 0.1)),
    "hopper": (MIXES, (0.001, 0.01, 0.05, 0.1, 0.1, 0.01), (0.01, 0.01, 0.5, 0.01, 0.1, 0.01)),
    "walker2d": (MIXES, (0.01, 0.05, 0.05, 0.01, 0.01, 0.01), (0.0, 0.1, 0.01, 0.01, 0.5, 0.01)),
    "antmaze": (MAZES, (0.003, 0.003, 0.001, 0.001, 0.002, 0.002), (0.002, 0.001, 0.0005, 0.0, 0.001, 0.002)),
    "pen": (KINDS, (0.1, 0.05, 0.01), (0.5, 0.5, 0.01)), "door": (KINDS, (0.1, 0.01, 0.05), (0.1, 0.1, 0.01)),
    "hammer": (KINDS, (0.01, 0.1, 0.01), (0.5, 0.5, 0.01)), "relocate": (KINDS, (0.1, 0.1, 0.05), (0.01, 0.01, 0.01)),
}  # fmt: skip
OGBENCH = {  # β₁ and the target's noise, with β₂ = 0: ColinQiyangLi/qam; for cube-single, seohongpark/fql with images
    "antmaze-large": (0.01, 0.0), "antmaze-giant": (0.01, 0.0), "humanoidmaze-medium": (0.01, 0.0),
    "humanoidmaze-large": (0.01, 0.1), "scene": (0.03, 0.0), "puzzle-3x3": (0.1, 0.0), "puzzle-4x4": (0.01, 0.2),
    "cube-single": (1.0, 0.2), "cube-double": (0.01, 0.0), "cube-triple": (0.01, 0.2), "cube-quadruple": (0.01, 0.2),
}  # fmt: skip
DOMAIN = {"antmaze": "antmaze", **dict.fromkeys(("pen", "door", "hammer", "relocate"), "adroit")}
PRESETS = DOMAINS | {
    f"{robot}-{kind}-v*": DOMAINS[DOMAIN.get(robot, "locomotion")] | {"actor_penalty": actor, "critic_penalty": critic}
    for robot, (kinds, *penalties) in D4RL.items()
    for kind, actor, critic in zip(kinds, *penalties, strict=True)
} | {
    f"{name}-*singletask*": DOMAINS["ogbench"] | {"actor_penalty": actor, "target_noise": noise}
    | {"gamma": 0.995 if name.startswith(("antmaze-giant", "humanoidmaze")) else 0.99}
    for name, (actor, noise) in OGBENCH.items()
}  # fmt: skip


def initialized(net: MLP, bound: float, generator: torch.Generator) -> MLP:
    """Set the hidden biases to 0.1 and draw the last layer from [-bound, bound], as in the authors' code."""
    *hidden, last = [layer for layer in net if isinstance(layer, nn.Linear | EnsembleLinear)]
    for layer in hidden:
        nn.init.constant_(layer.bias, 0.1)
    for parameter in (last.weight, last.bias):
        nn.init.uniform_(parameter, -bound, bound, generator=generator)
    return net


class Actor(nn.Module):
    """μ(s): map obs [batch, obs_dim] to actions [batch, action_dim]."""

    def __init__(self, obs_dim: int, action_dim: int, hidden: tuple[int, ...], generator: torch.Generator) -> None:
        super().__init__()
        self.net = initialized(mlp([obs_dim, *hidden, action_dim], generator), 1e-3, generator)

    def forward(self, obs: Tensor) -> Tensor:
        return torch.tanh(self.net(obs))


class REBRAC:
    def __init__(self, args: Args, obs_dim: int, action_dim: int, device: torch.device) -> None:
        initializer = generator(args.seed, "networks")
        self.generator = generator(args.seed, "agent", device)
        self.actor = Actor(obs_dim, action_dim, args.hidden, initializer).to(device)
        self.target_actor = Actor(obs_dim, action_dim, args.hidden, initializer).to(device)
        self.target_actor.load_state_dict(self.actor.state_dict())
        self.update_target_actor = SoftUpdate(self.target_actor, self.actor, args.tau)
        sizes = [obs_dim + action_dim, *args.hidden, 1]
        nets = [mlp(sizes, initializer, args.critics, layer_norm=True, norm_last=True) for _ in range(2)]
        self.critic, self.target_critic = (Critic(initialized(net, 3e-3, initializer)).to(device) for net in nets)
        self.target_critic.load_state_dict(self.critic.state_dict())
        self.update_target_critic = SoftUpdate(self.target_critic, self.critic, args.tau)
        self.actor_optimizer = Adam(self.actor.parameters(), args.actor_lr)
        self.critic_optimizer = Adam(self.critic.parameters(), args.critic_lr)
        self.actor_penalty = torch.tensor(args.actor_penalty, device=device)  # compiled updates would freeze a number
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
        """Return the squared Bellman error, summed over the critics: y = r + γ (min Q̄(s', a') - β₂ |a' - â'|²)."""
        with torch.no_grad():
            next_actions = self.target_actor(batch.next_obs)
            limit = self.args.target_noise_clip
            noise = self.noise(next_actions, self.args.target_noise).clamp(-limit, limit)
            next_actions = (next_actions + noise).clamp(-1.0, 1.0)
            next_value = self.target_critic(batch.next_obs, next_actions).amin(0)
            if batch.next_actions is not None:  # before the switch
                distance = (next_actions - batch.next_actions).square().sum(-1)
                next_value = next_value - self.args.critic_penalty * distance.nan_to_num(0.0)  # no â' at an end
            # Termination masks the bootstrap with its penalty. Truncation does not, so it is not even in the batch.
            target = batch.rewards + self.args.gamma * (1.0 - batch.terminations) * next_value
        values = self.critic(batch.obs, batch.actions)
        loss = (values - target).square().mean(1).sum()
        return loss, {"losses/critic": loss.detach(), "losses/q": values.detach()}

    def actor_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Return β₁ |μ(s) - a|² - λ min Q(s, μ(s)): imitation of the data's actions, and value of the policy's."""
        actions = self.actor(batch.obs)
        with frozen(self.critic):  # the gradient passes through the critic and stops there
            value = self.critic(batch.obs, actions).amin(0)
        weight = 1.0 / value.detach().abs().mean()  # λ: one number a batch, without gradient
        imitation = (actions - batch.actions).square().sum(-1).mean()  # the sum over dimensions, unlike TD3+BC
        loss = self.actor_penalty * imitation - weight * value.mean()
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

    def decay(self, step: int) -> None:
        """Set β₁ for the updates of `step`: online it falls linearly, to a half at least."""
        share = max(0.5, 1.0 - max(step, 0) / self.args.penalty_decay_steps)
        self.actor_penalty.fill_(share * self.args.actor_penalty)


@returns_result
def train(args: Args) -> Result:
    args = with_presets(args, PRESETS)
    run = Run("rebrac", args)
    rewards = RewardTransform(args.reward_scale, args.reward_shift)
    data = OfflineToOnline(args, run, rewards, next_actions=args.critic_penalty > 0)
    rollout = data.rollout()
    agent = REBRAC(args, rollout.obs_dim, rollout.action_dim, run.device)
    data.dataset.fit(agent.obs_normalizer)
    policy = run.policy(agent)
    update = run.updater(
        lambda online, with_actor: agent.update(data.sample(online, agent.generator), with_actor), agent.generator
    )
    data.load_pretrained(agent)
    run.resume(agent=agent, data=data, rollout=rollout, update=update)

    for step in run.steps():
        # Act: after pre-training
        if step > 0:
            data.add(rollout.step(policy(rollout.obs), meanwhile=update.flush))

        # Learn
        agent.decay(step)
        for _ in range(data.updates_due(step, args.utd)):
            update(online=step > 0, with_actor=(update.count + 1) % args.policy_delay == 0)

        # Report
        run.report(update.metrics)
    return run.finish()


if __name__ == "__main__":
    command_line(train, Args)
