"""FQL: a flow that imitates the data, and a policy of one step that is distilled from it and raises the critics' value.

Park, Li and Levine 2025, "Flow Q-Learning", arXiv 2502.02538. The flow is never differentiated through its steps: the
policy that the critics train has one step, and imitation holds it close to the flow.

    python algos/fql.py --dataset cube-single-play-singletask-task2-v0
    python algos/fql.py --dataset antmaze-large-play-v2 --online-steps 1000000
    python algos/fql.py --dataset data/mine.hdf5 --env Hopper-v4 --alpha 3 --normalize-q
    python algos/fql.py --dataset cube-double-play-singletask-task2-v0 --chunk 5 --extraction best-of-n

With --chunk h it acts in chunks of h actions, and its critics value chunks. This is QC-FQL, and QC with
--extraction best-of-n: Li, Zhou and Levine 2025, "Reinforcement Learning with Action Chunking", arXiv 2507.07969.

Differences from the authors' code, none of which changes a loss:
- Each network has its own Adam. With no parameter in common and no clipping, that equals one Adam over all.
- The target critics follow the critics after their step, not before it.
- Evaluation draws the same noise each time.

docs/chunks.md has the differences from the code of QC.
"""

import common.start

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from common.acting import acting
from common.arguments import BY_DOMAIN, AnyNumber, Fraction, NonNegativeInt
from common.command_line import command_line
from common.diffusion import Flow, Velocity
from common.evaluate import Act
from common.networks import Critic, frozen, glorot, mlp
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

    # Acting
    chunk: int = 1
    """h: actions that the policy plans at once. They are executed open loop, without observing again."""
    extraction: Literal["one-step", "best-of-n"] = "one-step"
    """Which actions are taken. one-step: those of the policy that is distilled from the flow. best-of-n: of several
    samples of the flow, the one that the critics value most (QC)."""
    samples: int = 32
    """With --extraction best-of-n: the number of samples."""

    # Networks
    hidden: tuple[int, ...] = (512, 512, 512, 512)
    """Widths of the hidden layers, for flow, policy and critics."""
    critics: int = 2
    """Number of critics."""
    layer_norm: bool = True
    """Normalise the critics' hidden layers, after their activation."""

    # Learning
    alpha: float = BY_DOMAIN
    """α: weight of the policy's distance from the flow. Tune it first: by decades, then finer."""
    q_aggregation: Literal["mean", "min"] = BY_DOMAIN
    """How targets, and best-of-n, combine the critics. The one-step policy's loss uses their mean."""
    normalize_q: bool = BY_DOMAIN
    """Divide the policy's value by mean |Q|, so that one α suits rewards of any scale."""
    flow_steps: int = 10
    """Euler steps of the flow from noise to an action."""
    gamma: Fraction = BY_DOMAIN
    """Discount factor."""
    tau: Fraction = 0.005
    """Soft-update rate of the target critics, at each update."""
    actor_lr: float = 3e-4
    """Learning rate of flow and policy."""
    critic_lr: float = 3e-4
    """Learning rate of the critics."""
    reward_shift: AnyNumber = BY_DOMAIN
    """Number added to each reward."""


OGBENCH = {
    "offline_steps": 1_000_000, "alpha": 300.0, "q_aggregation": "mean", "normalize_q": False, "gamma": 0.99,
    "reward_shift": 0.0,
}  # fmt: skip
GIANT = OGBENCH | {"alpha": 10.0, "q_aggregation": "min", "gamma": 0.995}
ANTMAZE = OGBENCH | {"offline_steps": 500_000, "alpha": 10.0, "reward_shift": -1.0}
ADROIT = OGBENCH | {"offline_steps": 500_000, "alpha": 3e4, "q_aggregation": "min"}
UNTUNED = OGBENCH | {"alpha": 1.0, "normalize_q": True}  # ours, for domains without a published value
PRESETS: dict[str, dict[str, Any]] = {  # the authors'; docs/fql.md lists other papers' and extrapolated ones
    "locomotion": UNTUNED,
    "adroit-binary": UNTUNED,
    "ogbench": UNTUNED,
    "cube-[tq]*singletask*": OGBENCH | {"alpha": 100.0},  # triple, quadruple
    "cube-*singletask*": OGBENCH,
    "scene-*singletask*": OGBENCH,
    "puzzle-3x3-*sparse-singletask*": OGBENCH,
    "puzzle-4x4-*sparse-singletask*": OGBENCH | {"alpha": 1.0},
    "puzzle-*singletask*": OGBENCH | {"alpha": 1000.0},
    "antmaze-large-navigate-*singletask*": GIANT | {"gamma": 0.99},
    "antmaze-giant-navigate-*singletask*": GIANT,
    "humanoidmaze-*singletask*": OGBENCH | {"alpha": 30.0, "gamma": 0.995},
    "antsoccer-*singletask*": OGBENCH | {"alpha": 10.0, "gamma": 0.995},
    "antmaze": ANTMAZE,
    "antmaze-large-[dp]*-v*": ANTMAZE | {"alpha": 3.0},  # diverse and play, of D4RL
    "adroit": ADROIT,
    "pen-human-v*": ADROIT | {"alpha": 1e4},
    "pen-cloned-v*": ADROIT | {"alpha": 1e4},
    "pen-expert-v*": ADROIT | {"alpha": 3e3},
    "hammer-cloned-v*": ADROIT | {"alpha": 1e4},
    "relocate-human-v*": ADROIT | {"alpha": 1e4},
}
ONLINE: dict[str, dict[str, Any]] = {  # what they change if online steps follow
    "humanoidmaze-*singletask*": {"alpha": 100.0}, "antsoccer-*singletask*": {"alpha": 30.0},
    **{name: {"offline_steps": 1_000_000} for name in ("antmaze", "antmaze-large-[dp]*-v*")},
    **{f"{task}-cloned-v*": ADROIT | {"offline_steps": 1_000_000, "alpha": 1e3} for task in ("pen", "door", "hammer")},
    "relocate-cloned-v*": ADROIT | {"offline_steps": 1_000_000, "alpha": 1e4},
}  # fmt: skip


def presets_for(args: Args) -> dict[str, dict[str, Any]]:
    """Return the presets of a run that ends offline, or of one with online steps."""
    changed = ONLINE if args.online_steps else {}
    return PRESETS | {name: PRESETS.get(name, {}) | values for name, values in changed.items()}


class Actor(nn.Module):
    """μ(s, z): map obs [batch, obs_dim] and noise [batch, action_dim] to actions in one step, not clipped."""

    def __init__(self, obs_dim: int, action_dim: int, hidden: tuple[int, ...], generator: torch.Generator) -> None:
        super().__init__()
        sizes = [obs_dim + action_dim, *hidden, action_dim]
        self.net = glorot(mlp(sizes, generator, activation="gelu"), generator)

    def forward(self, obs: Tensor, noise: Tensor) -> Tensor:
        return self.net(torch.cat([obs, noise], dim=-1))


class FQL:
    def __init__(self, args: Args, obs_dim: int, action_dim: int, device: torch.device) -> None:
        initializer = generator(args.seed, "networks")
        self.generator = generator(args.seed, "agent", device)
        action_dim = args.chunk * action_dim  # from here on, an action is a chunk
        self.process = Flow(args.flow_steps)
        self.flow = Velocity(obs_dim, action_dim, args.hidden, args.flow_steps, initializer).to(device)
        self.actor = Actor(obs_dim, action_dim, args.hidden, initializer).to(device)
        sizes = [obs_dim + action_dim, *args.hidden, 1]
        form: dict[str, Any] = {"activation": "gelu", "layer_norm": args.layer_norm, "norm_last": True}
        self.critic = Critic(glorot(mlp(sizes, initializer, args.critics, **form), initializer)).to(device)
        self.target_critic = Critic(mlp(sizes, initializer, args.critics, **form)).to(device)
        self.target_critic.load_state_dict(self.critic.state_dict())
        self.update_target_critic = SoftUpdate(self.target_critic, self.critic, args.tau)
        self.flow_optimizer = Adam(self.flow.parameters(), args.actor_lr)
        self.actor_optimizer = Adam(self.actor.parameters(), args.actor_lr)
        self.critic_optimizer = Adam(self.critic.parameters(), args.critic_lr)
        self.obs_normalizer = FixedNormalizer(obs_dim).to(device) if args.normalize_obs else nn.Identity()
        self.args, self.device, self.action_dim = args, device, action_dim

    def noise(self, obs: Tensor, generator: torch.Generator, *samples: int) -> Tensor:
        """Draw standard normal noise for each of obs: [*samples, batch, action_dim]."""
        return torch.randn((*samples, len(obs), self.action_dim), generator=generator, device=self.device)

    def aggregated(self, values: Tensor) -> Tensor:
        """Return one value [batch] of the critics' [critics, batch]."""
        return values.amin(0) if self.args.q_aggregation == "min" else values.mean(0)

    def choose(self, obs: Tensor, generator: torch.Generator) -> Tensor:
        """Return actions [batch, action_dim], clipped: of the one-step policy, or the best of the flow's."""
        if self.args.extraction == "one-step":
            chosen: Tensor = self.actor(obs, self.noise(obs, generator))
            return chosen.clamp(-1.0, 1.0)
        noise = self.noise(obs, generator, self.args.samples)
        actions = self.process.sample(partial(self.flow, obs), noise, generator)
        best = self.aggregated(self.critic(obs, actions)).argmax(0).view(1, -1, 1).expand(1, -1, self.action_dim)
        return actions.gather(0, best).squeeze(0)

    @acting
    def act(self, obs: Tensor, deterministic: bool = False, generator: torch.Generator | None = None) -> Tensor:
        """Return actions [n, action_dim] for obs [n, obs_dim], which are always samples.

        With --chunk h, action_dim is that of h actions, one after another. If `deterministic`, each call draws the same
        noise unless a generator is given.
        """
        generator = generator or (torch.Generator(self.device).manual_seed(0) if deterministic else self.generator)
        return self.choose(self.obs_normalizer(obs), generator)

    def eval_policy(self) -> Act:
        """Return the policy, which samples, with noise of its own that is the same in every evaluation."""
        return partial(self.act, deterministic=True, generator=generator(self.args.seed, "eval noise", self.device))

    def critic_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Return the squared Bellman error, with the policy's next actions (L_Q).

        Chunks: Q(s, a₁…a_h) ← Σ γⁱ r + γʰ Q̄(s₊ₕ, ·). Chunks that pass the end of their episode do not count.
        """
        with torch.no_grad():
            next_actions = self.choose(batch.next_obs, self.generator)
            next_value = self.aggregated(self.target_critic(batch.next_obs, next_actions))
            # Termination masks the bootstrap. Truncation does not, so it is not even in the batch.
            target = batch.rewards + self.args.gamma**self.args.chunk * (1.0 - batch.terminations) * next_value
        values = self.critic(batch.obs, batch.actions)
        loss = (batch.whole * (values - target).square()).mean()
        return loss, {"losses/critic": loss.detach(), "losses/q": values.detach()}

    def flow_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Return the flow's error on the batch's actions: ‖v(s, (1 - t) x + t a, t) - (a - x)‖² (L_Flow)."""
        noise = self.noise(batch.obs, self.generator)
        errors = self.process.errors(partial(self.flow, batch.obs), batch.actions, noise, self.generator)
        loss = (batch.valid_actions * errors.square()).mean()  # over dimensions too: α is tuned for it
        return loss, {"losses/flow": loss.detach()}

    def actor_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Return α ‖μ(s, z) - flow(s, z)‖² - mean_i Q_i(s, μ(s, z)) of the same noise z (L_Distill and L_Q)."""
        noise = self.noise(batch.obs, self.generator)
        with torch.no_grad():  # nothing is learned through the flow's steps
            flow_actions = self.process.sample(partial(self.flow, batch.obs), noise, self.generator)
        actions = self.actor(batch.obs, noise)
        distillation = (actions - flow_actions).square().mean()  # not clipped, so that it pulls actions back into ±1
        with frozen(self.critic):  # the gradient passes through the critics and stops there
            value = self.critic(batch.obs, actions.clamp(-1.0, 1.0)).mean(0)
        weight = 1.0 / value.detach().abs().mean() if self.args.normalize_q else 1.0
        loss = self.args.alpha * distillation - weight * value.mean()
        return loss, {"losses/actor": loss.detach(), "losses/distillation": distillation.detach()}

    def update(self, batch: Batch) -> Metrics:
        """Take one gradient step with each network, then move the target critics (algorithm 1)."""
        batch = batch.map_obs(self.obs_normalizer)
        # As in the authors' code, all losses are those of the networks before the update. The critics
        # move last, because the policy's backward pass needs their weights.
        critic_loss, critic_metrics = self.critic_loss(batch)
        flow_loss, flow_metrics = self.flow_loss(batch)
        actor_metrics: Metrics = {}
        if self.args.extraction == "one-step":
            actor_loss, actor_metrics = self.actor_loss(batch)
            self.actor_optimizer.minimize(actor_loss)
        self.flow_optimizer.minimize(flow_loss)
        self.critic_optimizer.minimize(critic_loss)
        self.update_target_critic()
        return critic_metrics | flow_metrics | actor_metrics


@returns_result
def train(args: Args) -> Result:
    args = with_presets(args, presets_for(args))
    run = Run("fql", args)
    data = OfflineToOnline(args, run, RewardTransform(shift=args.reward_shift), windows=(args.chunk, args.gamma))
    rollout = data.rollout()
    agent = FQL(args, rollout.obs_dim, rollout.action_dim, run.device)
    data.dataset.fit(agent.obs_normalizer)
    policy = run.policy(agent)
    update = run.updater(lambda online: agent.update(data.sample(online, agent.generator)), agent.generator)
    trained = ("extraction",) if args.extraction == "one-step" else ()  # best-of-n trains no one-step policy
    data.load_pretrained(agent, must_match=trained)
    run.resume(agent=agent, data=data, rollout=rollout, update=update)

    for step in run.steps():
        # Act: after pre-training
        if step > 0:
            data.add(rollout.step(rollout.act(policy), meanwhile=update.flush))

        # Learn
        for _ in range(data.updates_due(step, args.utd)):
            update(online=step > 0)

        # Report
        run.report(update.metrics)
    return run.finish()


if __name__ == "__main__":
    command_line(train, Args)
