"""Behaviour cloning: a policy regresses on the dataset's actions, all of them or those of the best episodes.

The baseline of offline papers: actor and loss are those of TD3+BC (Fujimoto and Gu 2021, arXiv 2106.06860) without the
critic; the best episodes ("10% BC") are chosen as Chen et al. 2021 do, "Decision Transformer", arXiv 2106.01345.

    python algos/bc.py --dataset hopper-medium-v2
    python algos/bc.py --dataset hopper-medium-replay-v2 --top 0.1 --run-dir runs/bc10__hopper-medium-replay-v2__1

Imitation gains nothing online, where the policy's own actions are what it would imitate: online steps are 0 by default.
They are there because every file that takes a dataset takes them; actions are then the policy's, without noise, which
would be imitated too.
"""

from dataclasses import dataclass
from functools import partial

import torch
from gymnasium.spaces import flatdim
from torch import Tensor, nn

from common.acting import acting
from common.checkpoint import restore, state_of
from common.command_line import command_line
from common.evaluate import evaluate
from common.networks import Adam, mlp
from common.normalize import FixedNormalizer
from common.replay_buffer import Batch
from common.run import Result, Run, returns_result
from common.seeding import generator, seeds
from envs.make import make, make_vector
from envs.state import get_states, set_states
from offline.switch import OfflineArgs, Switch, with_presets

Metrics = dict[str, Tensor]  # of any shape: the logger takes their means, when it reads them


@dataclass
class Args(OfflineArgs):
    hidden: tuple[int, ...] = (256, 256)
    """Widths of the hidden layers of the actor."""
    actor_lr: float = 3e-4
    """Learning rate of the actor."""
    batch_size: int = 256
    """Transitions in an update."""
    top: float = 1.0
    """Imitate only the episodes of highest return, those that together hold this share of the transitions."""


class Actor(nn.Module):
    """μ(s): obs [batch, obs_dim] to actions [batch, action_dim]."""

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
        self.obs_normalizer = FixedNormalizer(obs_dim, epsilon=1e-3).to(device)
        self.device = device

    @acting
    def act(self, obs: Tensor, deterministic: bool = False) -> Tensor:
        """Actions [n, action_dim] for obs [n, obs_dim]; the policy is deterministic anyway."""
        return self.actor(self.obs_normalizer(obs))

    def actor_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Squared distance from the batch's actions, the mean over transitions and dimensions."""
        loss = (self.actor(batch.obs) - batch.actions).square().mean()
        return loss, {"losses/actor": loss.detach()}

    def update(self, batch: Batch) -> Metrics:
        """One gradient step of the actor."""
        actor_loss, metrics = self.actor_loss(batch._replace(obs=self.obs_normalizer(batch.obs)))
        self.actor_optimizer.descend(actor_loss)
        return metrics


@returns_result
def train(args: Args) -> Result:
    args = with_presets(args, {})  # nothing depends on the domain
    run = Run("bc", args)
    switch = Switch(args, run, top=args.top, full_batch=args.batch_size)
    envs = make_vector(switch.env, args.num_envs, args.seed, vectorizer=args.vectorizer, **switch.env_kwargs)
    eval_envs = [make(switch.env, **switch.env_kwargs) for _ in range(args.eval_episodes)]
    eval_seeds = seeds(args.seed, "evaluation", args.eval_episodes)
    obs_dim, action_dim = flatdim(envs.single_observation_space), flatdim(envs.single_action_space)
    agent = BC(args, obs_dim, action_dim, run.device)
    update = run.accelerated(
        lambda online: agent.update(switch.sample(args.batch_size, online, agent.generator)), agent.generator
    )
    act = run.acting(agent)

    switch.begin(agent, obs_dim, action_dim)
    saved = switch.open(run)
    if saved:
        restore(agent, saved["agent"])
        obs, exact = set_states(envs, saved["envs"])
        run.warn_inexact(exact)
    else:
        if args.init_from is None:  # which brings the statistics that its networks learned with
            agent.obs_normalizer.set_statistics(*switch.dataset.obs_statistics())
        obs, _ = envs.reset()
        run.logger.log_evaluation(evaluate(partial(agent.act, deterministic=True), eval_envs, eval_seeds))

    metrics: Metrics = {}

    def learn() -> None:
        """The updates that belong to the last step."""
        nonlocal metrics
        metrics = {}
        for _ in range(switch.updates(run.step)):
            with run.logger.timed("update"):
                metrics = update(run.step > 0)

    while run.step < args.online_steps:
        # Act
        if run.step < 0:
            run.logger.count_update()
        else:
            with run.logger.timed("act"):
                actions = act(obs)
            if run.claim_updates(before_step=True):
                learn()
            with run.logger.timed("env_step"):
                next_obs, rewards, terminations, truncations, _ = envs.step(actions)
            switch.add(obs, actions, rewards, next_obs, terminations, truncations)
            dones = terminations | truncations
            run.logger.count(rewards, dones)
            obs = envs.reset(options={"reset_mask": dones})[0] if dones.any() else next_obs

        # Learn
        if run.claim_updates():
            learn()

        # Report
        if run.due(1_000):
            run.logger.log(metrics)
        if switch.evaluates(run):
            run.logger.log_evaluation(evaluate(partial(agent.act, deterministic=True), eval_envs, eval_seeds))
        run.save_if_due(lambda: switch.state() | {"agent": state_of(agent), "envs": get_states(envs)}, switch.online)
    envs.close()
    return run.finish()


if __name__ == "__main__":
    command_line(train, Args)
