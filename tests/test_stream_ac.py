"""Stream AC(λ) against formulas written a second time: traces, bounded steps, the sparse start, and a known answer."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import COMMON
from formulas import Array, make_batch
from test_resume import assert_kills_change_nothing

from algos.stream_ac import STREAMAC, Args, Network, train
from common.normalize import RewardScaler
from common.replay_buffer import Batch
from common.seeding import generator

SMALL = COMMON


def make_agent(**changed: Any) -> STREAMAC:
    """In float64, with weights that are not sparse and observations that are normalised."""
    agent = STREAMAC(Args(**(SMALL | {"sparsity": 0.0} | changed)), 3, 2, torch.device("cpu"))
    agent.actor.double()
    agent.critic.double()
    agent.actor_traces, agent.critic_traces = agent.actor_traces.double(), agent.critic_traces.double()
    agent.obs_normalizer.double().update(torch.from_numpy(np.random.default_rng(1).normal(0.5, 2.0, (50, 3))))
    return agent


def forward(parameters: Array, shapes: list[tuple[int, ...]], inputs: Array) -> Array:
    """Of a network whose weights and biases are joined in one vector."""
    places = np.cumsum([math.prod(shape) for shape in shapes])[:-1]
    parts = [part.reshape(shape) for part, shape in zip(np.split(parameters, places), shapes, strict=True)]
    for i in range(0, len(parts), 2):
        inputs = parts[i] @ inputs + parts[i + 1]
        if i < len(parts) - 2:
            inputs = (inputs - inputs.mean()) / np.sqrt(inputs.var() + 1e-5)
            inputs = np.where(inputs > 0, inputs, 0.01 * inputs)
    return inputs


def gradient_of(function: Any, parameters: Array) -> Array:
    """By central differences."""
    found = np.zeros_like(parameters)
    for i in range(len(parameters)):
        step = np.zeros_like(parameters)
        step[i] = 1e-5
        found[i] = (function(parameters + step) - function(parameters - step)) / 2e-5
    return found


def vector(network: Network) -> tuple[Array, list[tuple[int, ...]]]:
    parameters = [parameter.detach().numpy() for parameter in network.parameters()]
    return np.concatenate([p.ravel() for p in parameters]), [p.shape for p in parameters]


@pytest.mark.parametrize("num_envs", [1, 2])
def test_updates_equal_the_algorithm_by_finite_differences(num_envs: int):
    """Four transitions, one of which terminates, of one environment or of two that take turns."""
    agent, batch = make_agent(num_envs=num_envs, hidden=(4, 4), trace_decay=0.7, gamma=0.9), make_batch(4)
    batch.rewards[2] *= 20.0  # |δ| above 1
    (actor, actor_shapes), (critic, critic_shapes) = vector(agent.actor), vector(agent.critic)
    traces = np.zeros((num_envs, len(actor))), np.zeros((num_envs, len(critic)))
    mean, scale = agent.obs_normalizer.shift.numpy(), agent.obs_normalizer.scale.numpy()
    deltas = []
    for i in range(4):
        obs, action, reward, next_obs, terminated = (part[i].numpy() for part in batch[:5])
        obs, next_obs = ((each - mean) * scale for each in (obs, next_obs))

        def value(parameters: Array, obs: Array = obs) -> float:
            return float(forward(parameters, critic_shapes, obs)[0])

        delta = reward + 0.9 * (1 - terminated) * value(critic, next_obs) - value(critic)

        def objective(parameters: Array, obs: Array = obs, action: Array = action, delta: float = delta) -> float:
            mean, pre = np.split(forward(parameters, actor_shapes, obs), 2)
            sigma = np.logaddexp(0, pre)
            log_prob = -0.5 * ((action - mean) / sigma) ** 2 - np.log(sigma * math.sqrt(2 * math.pi))
            entropy = np.log(sigma * math.sqrt(2 * math.pi * math.e))
            return float((log_prob + 0.01 * np.sign(delta) * entropy).sum())

        changes = []
        for trace, function, parameters, kappa in ((traces[0], objective, actor, 3), (traces[1], value, critic, 2)):
            trace = trace[i % num_envs]
            trace[:] = 0.9 * 0.7 * trace + gradient_of(function, parameters)
            changes.append(delta * trace / max(1, kappa * max(abs(delta), 1) * np.abs(trace).sum()))
        actor, critic = actor + changes[0], critic + changes[1]
        deltas.append(abs(delta))
    found = [
        agent.update(Batch(*(part[i : i + num_envs] for part in batch[:5])))["losses/td_error"]
        for i in range(0, 4, num_envs)
    ]
    assert max(deltas) > 1 > min(deltas)
    np.testing.assert_allclose(torch.cat(found), deltas, rtol=1e-6)
    np.testing.assert_allclose(vector(agent.actor)[0], actor, rtol=0, atol=1e-8)
    np.testing.assert_allclose(vector(agent.critic)[0], critic, rtol=0, atol=1e-8)


def test_a_step_does_not_overshoot():
    """However large the error and the trace are, an update shrinks the critic's error and keeps its sign."""
    for scale in (0.1, 10.0, 1000.0):
        agent, batch = make_agent(gamma=0.5), make_batch(1)
        batch = Batch(*batch[:2], scale * batch.rewards, *batch[3:4], torch.ones(1).double())

        def error(agent: STREAMAC = agent, batch: Batch = batch) -> float:
            return (batch.rewards - agent.critic(agent.obs_normalizer(batch.obs)).squeeze()).item()

        before = error()
        agent.update(batch)
        assert 0 < error() / before < 1


def test_traces_end_with_their_episode_and_others_stay():
    agent, same = make_agent(num_envs=2), make_agent(num_envs=2)
    same.step(make_batch(2), torch.tensor([False, False]))
    agent.step(make_batch(2), torch.tensor([True, False]))
    for was, traces in ((same.critic_traces, agent.critic_traces), (same.actor_traces, agent.actor_traces)):
        assert was.abs().sum(1).min() > 0
        assert traces[0].abs().max() == 0
        assert torch.equal(traces[1], was[1])


def test_a_step_counts_its_transitions_in_the_statistics_before_it_learns():
    agent, same, batch = make_agent(num_envs=2), make_agent(num_envs=2), make_batch(2)
    agent.reward_scaler, same.reward_scaler = RewardScaler(2, 0.99), RewardScaler(2, 0.99)
    for dones in ([False, False], [True, False], [False, False]):
        agent.step(batch, torch.tensor(dones))
        same.obs_normalizer.update(batch.obs)
        scaled = same.reward_scaler(batch.rewards.numpy()[None].astype(np.float32), np.array(dones)[None])[0]
        same.update(batch._replace(rewards=torch.from_numpy(scaled)))
        for traces in (same.actor_traces, same.critic_traces):
            traces[dones] = 0.0
    assert agent.obs_normalizer.count == 50 + 6
    np.testing.assert_allclose(vector(agent.actor)[0], vector(same.actor)[0], rtol=0, atol=1e-8)
    np.testing.assert_allclose(vector(agent.critic)[0], vector(same.critic)[0], rtol=0, atol=1e-8)


@pytest.mark.parametrize(("sparsity", "zeros"), [(0.9, (27, 116, 116)), (0.5, (15, 64, 64)), (0.0, (0, 0, 0))])
def test_weights_start_sparse_in_every_unit(sparsity: float, zeros: tuple[int, ...]):
    """The number of zeros is rounded up, each unit has its own, and the others are within ±1 / √inputs.

    With few inputs, each unit keeps one.
    """
    few = Network([3, 8, 1], sparsity, generator(0, "networks")).layers[0].weight
    assert ((few != 0).sum(1) == max(1, 3 - math.ceil(3 * sparsity))).all()
    network = Network([30, 128, 128, 4], sparsity, generator(0, "networks"))
    for layer, expected in zip(network.layers, zeros, strict=True):
        empty = layer.weight == 0
        assert (empty.sum(1) == expected).all()
        assert layer.bias.abs().max() == 0
        bound = 1 / math.sqrt(layer.in_features)
        assert 0.8 * bound < layer.weight.abs().max() <= bound
        if sparsity:
            assert len({tuple(row) for row in empty.tolist()}) > 0.9 * len(empty)


def test_acting_and_evaluating_learn_nothing():
    agent = STREAMAC(Args(**SMALL), 3, 2, torch.device("cpu"))
    before = [value.clone() for value in (agent.obs_normalizer.mean, *agent.actor.parameters(), agent.actor_traces)]
    for deterministic in (False, True):
        agent.act(np.ones((4, 3), np.float32), deterministic=deterministic)
    after = (agent.obs_normalizer.mean, *agent.actor.parameters(), agent.actor_traces)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_policy_finds_the_optimum_of_a_known_bandit():
    """One step with the reward -(a - 0.4)² in each dimension, whose best action is 0.4."""
    agent, rng = STREAMAC(Args(**SMALL), 3, 2, torch.device("cpu")), np.random.default_rng(0)
    for _ in range(6_000):
        obs = np.float32(rng.normal(size=(1, 3)))
        actions = agent.act(obs)
        reward = -((actions - 0.4) ** 2).sum(1)
        batch = Batch(*map(torch.from_numpy, (obs, actions, reward, obs, np.ones(1, np.float32))))
        agent.step(batch, torch.tensor([True]))
    actions = agent.act(np.float32(rng.normal(size=(200, 3))), deterministic=True)
    np.testing.assert_allclose(actions.mean(0), [0.4, 0.4], atol=0.1)


def test_defaults_are_the_papers():
    args = Args()
    assert (args.gamma, args.trace_decay, args.learning_rate) == (0.99, 0.8, 1.0)
    assert (args.actor_kappa, args.critic_kappa, args.entropy_coefficient) == (3.0, 2.0, 0.01)
    assert (args.hidden, args.sparsity, args.num_envs) == ((128, 128), 0.9, 1)


def test_kills_change_nothing_in_the_middle_of_an_episode(tmp_path: Path):
    """Traces, statistics and sums of rewards are in the checkpoint. Two environments."""
    changed = {"num_envs": 2, "env": "Hopper-v4", "checkpoint_every": 20}
    assert_kills_change_nothing("stream_ac", changed, [("step", 130), ("fsync", 3), ("any", 3)], tmp_path)


def test_a_finished_run_is_extended(tmp_path: Path) -> None:
    """No schedule depends on the number of steps."""
    for steps in (100, 150):
        assert train(Args(**SMALL | {"total_steps": steps, "run_dir": tmp_path / "run"})).step == steps
