"""PPO against brute force and formulas written a second time."""

import json
import os
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import COMMON, module
from numpy.typing import NDArray
from test_resume import assert_kills_change_nothing

from algos import ppo
from algos.ppo import PPO, Args, Minibatch, generalized_advantages
from common.checkpoint import state_of
from common.optim import Adam
from envs.rollout import Transitions

SMALL = COMMON | {"num_envs": 1, "rollout_steps": 20, "minibatch_size": 10, "epochs": 10}
Array = NDArray[np.float64]


def make_agent(**changed: Any) -> PPO:
    agent = PPO(Args(**(SMALL | changed)), 3, 2, torch.device("cpu"))
    agent.actor.double()
    agent.critic.double()
    agent.optimizer = Adam([*agent.actor.parameters(), *agent.critic.parameters()], 3e-4, eps=1e-5)
    with torch.no_grad():
        agent.actor.log_std.copy_(torch.tensor([-0.3, 0.2]))
        agent.actor.net[-1].weight.mul_(50.0)
    return agent


def make_batch(size: int = 40) -> Minibatch:
    rng = np.random.default_rng(0)
    parts = [rng.normal(size=s) for s in ((size, 3), (size, 2), size, size, size, size)]
    parts[2] -= 2.5
    return Minibatch(*map(torch.from_numpy, parts))


def forward(net: torch.nn.Module, inputs: Array) -> Array:
    weights = [
        (layer.weight.detach().numpy(), layer.bias.detach().numpy()) for layer in net if hasattr(layer, "weight")
    ]
    for weight, bias in weights[:-1]:
        inputs = np.tanh(inputs @ weight.T + bias)
    return inputs @ weights[-1][0].T + weights[-1][1]


def brute_force(rewards: Array, values: Array, next_values: Array, terminations: Array, dones: Array) -> Array:
    """Â_t = Σ_k (γλ)^k δ_{t+k} until the episode ends, or the rollout; for each environment by itself."""
    advantages = np.zeros_like(rewards)
    for i in range(rewards.shape[1]):
        for t in range(len(rewards)):
            for k in range(len(rewards) - t):
                u = t + k
                bootstrap = 0.0 if terminations[u, i] else 0.9 * next_values[u, i]
                advantages[t, i] += (0.9 * 0.8) ** k * (rewards[u, i] + bootstrap - values[u, i])
                if dones[u, i]:
                    break
    return advantages


@pytest.mark.parametrize("num_envs", [1, 3])
def test_advantages_equal_brute_force(num_envs: int):
    """With terminated and truncated episodes, in the middle, one after the other, and at the end of the rollout."""
    rng = np.random.default_rng(1)
    rewards, values, next_values = rng.normal(size=(3, 30, num_envs)).astype(np.float32)
    terminations, truncations = np.zeros((2, 30, num_envs), bool)
    terminations[[4, 5, 20], 0] = truncations[[9, 29], -1] = True
    arguments = rewards, values, next_values, terminations, terminations | truncations
    got = generalized_advantages(*arguments, gamma=0.9, gae_lambda=0.8)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, brute_force(*arguments), rtol=1e-4, atol=1e-5)


def test_advantages_with_lambda_1_are_returns_less_values():
    """And they bootstrap from a truncated episode's final observation, not from a terminated one's."""
    rewards = np.ones((3, 2), np.float32)
    values, next_values = np.full((3, 2), 0.5, np.float32), np.full((3, 2), 10.0, np.float32)
    terminations = np.array([[0, 0], [0, 0], [1, 0]], bool)  # the first environment terminates, the second is truncated
    dones = np.array([[0, 0], [0, 0], [1, 1]], bool)
    got = generalized_advantages(rewards, next_values, next_values, terminations, dones, 0.5, 1.0)
    np.testing.assert_allclose(got[:, 0] + 10.0, [1.75, 1.5, 1.0])
    np.testing.assert_allclose(got[:, 1] + 10.0, [1.75 + 1.25, 1.5 + 2.5, 1.0 + 5.0])
    assert values.shape == rewards.shape


def test_log_probabilities_and_entropy_equal_the_gaussians():
    agent, batch = make_agent(), make_batch()
    normal = torch.distributions.Normal(agent.actor.net(batch.obs), agent.actor.log_std.exp())
    got = agent.actor.log_prob(batch.obs, batch.actions)
    torch.testing.assert_close(got, normal.log_prob(batch.actions).sum(-1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(agent.actor.entropy().double(), normal.entropy()[0].sum(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("normalize_advantages", [True, False])
def test_policy_loss_equals_an_independent_formula(normalize_advantages: bool):
    agent, batch = make_agent(normalize_advantages=normalize_advantages), make_batch()
    obs, actions, old, _, advantages, _ = (part.numpy() for part in batch)
    std = np.exp(agent.actor.log_std.detach().numpy())
    z = (actions - forward(agent.actor.net, obs)) / std
    ratio = np.exp((-0.5 * z**2 - np.log(std) - 0.5 * np.log(2 * np.pi)).sum(1) - old)
    if normalize_advantages:
        advantages = (advantages - advantages.mean()) / advantages.std()
    each = [min(a * r, a * min(max(r, 0.8), 1.2)) for a, r in zip(advantages, ratio, strict=True)]
    loss = agent.policy_loss(batch)
    assert loss.item() == pytest.approx(-np.mean(each), rel=1e-5)
    bound = ((ratio < 0.8) & (advantages < 0)) | ((ratio > 1.2) & (advantages > 0))
    assert 0.1 < bound.mean() < 0.9


def make_mdpo(**changed: Any) -> PPO:
    """With an old policy that differs from the present one."""
    agent = make_agent(**{"loss": "mdpo", "total_steps": 400} | changed)
    agent.old_actor.double().load_state_dict(agent.actor.state_dict())
    with torch.no_grad():
        agent.actor.log_std += torch.tensor([0.3, -0.2])
        agent.actor.net[-1].bias += 0.4
    return agent


def test_mdpo_s_loss_equals_an_independent_formula():
    """minus E[ρ Â] plus KL(new ‖ old) / t, which is not KL(old ‖ new)."""
    agent, batch = make_mdpo(), make_batch()
    agent.decay(step=300)  # of 400
    obs, _, old, _, advantages, _ = (part.numpy() for part in batch)
    new_mean, old_mean = (forward(actor.net, obs) for actor in (agent.actor, agent.old_actor))
    new_std, old_std = (np.exp(actor.log_std.detach().numpy()) for actor in (agent.actor, agent.old_actor))
    normal = torch.distributions.Normal
    new, before = (normal(*map(torch.as_tensor, two)) for two in ((new_mean, new_std), (old_mean, old_std)))
    kl, reverse = (torch.distributions.kl_divergence(*two).sum(-1).numpy() for two in ((new, before), (before, new)))
    ratio = np.exp(new.log_prob(batch.actions).sum(-1).numpy() - old)
    assert agent.policy_loss(batch).item() == pytest.approx((kl / 0.25 - ratio * advantages).mean(), rel=1e-5)
    assert abs(kl.mean() - reverse.mean()) > 0.01


def test_mdpo_s_divergence_integrates_the_log_ratio():
    """By samples of the new policy: the mean of log π - log π_old is the divergence, state by state."""
    agent, obs = make_mdpo(), make_batch(4).obs
    noise = torch.randn(200_000, 4, 2, generator=torch.Generator().manual_seed(0)).double()
    with torch.no_grad():
        actions = agent.actor.net(obs) + agent.actor.log_std.exp() * noise
        ratios = agent.actor.log_prob(obs, actions) - agent.old_actor.log_prob(obs, actions)
        np.testing.assert_allclose(ratios.mean(0), agent.actor.kl(agent.old_actor, obs), atol=0.01)


def test_mdpo_s_step_size_falls_linearly_to_a_hundredth():
    agent = make_mdpo()
    for step, t in ((0, 1.0), (200, 0.5), (399, 0.01), (400, 0.01)):
        agent.decay(step)
        assert agent.step_size.item() == pytest.approx(t)


def test_mdpo_s_old_policy_is_the_one_that_acted(small):
    """It is copied once for an iteration, and stays while the policy learns."""
    agent = module("ppo").PPO(small("ppo", loss="mdpo", learning_rate=0.01), 3, 1, torch.device("cpu"))
    steps = np.random.default_rng(0).normal(size=(20, 1, 3)).astype(np.float32)
    ends = np.zeros((20, 1), bool)
    rollout = Transitions(steps, agent.act(steps[:, 0])[:, None], ends.astype(np.float32) + 1, steps, ends, ends)
    for _ in range(2):
        acted = deepcopy(agent.actor.state_dict())
        agent.update(rollout)
        assert all(torch.equal(value, acted[name]) for name, value in agent.old_actor.state_dict().items())
        assert not torch.equal(agent.actor.net[0].weight, acted["net.0.weight"])


def test_mdpo_resumes_exactly_and_clipping_has_no_state_of_it(tmp_path: Path):
    places = [("step", 70), ("update", 30), ("save", 2)]
    assert_kills_change_nothing("ppo", {"loss": "mdpo", "num_envs": 2}, places, tmp_path)
    assert not {"old_actor", "step_size"} & state_of(make_agent()).keys()


@pytest.mark.parametrize("value_clip", [True, False])
def test_value_loss_equals_an_independent_formula(value_clip: bool):
    agent, batch = make_agent(value_clip=value_clip), make_batch()
    obs, _, _, old, _, returns = (part.numpy() for part in batch)
    values = forward(agent.critic.net, obs)[:, 0]
    errors = (values - returns) ** 2
    if value_clip:
        near = np.clip(values, old - 0.2, old + 0.2)
        assert (near != values).any()
        errors = np.maximum(errors, (near - returns) ** 2)
    assert agent.value_loss(batch).item() == pytest.approx(errors.mean(), rel=1e-5)


@pytest.mark.parametrize("entropy_coefficient", [0.0, 3.0])
def test_step_clips_the_gradient_over_all_parameters(entropy_coefficient: float):
    """Against torch's own clipping, Adam and entropy, which is a bonus."""
    agent, batch = make_agent(value_coefficient=0.5, entropy_coefficient=entropy_coefficient), make_batch()
    ours = [*agent.actor.parameters(), *agent.critic.parameters()]
    normal = torch.distributions.Normal(torch.zeros(2), agent.actor.log_std.exp())
    loss = agent.policy_loss(batch) + 0.5 * agent.value_loss(batch) - entropy_coefficient * normal.entropy().sum()
    copies = [torch.nn.Parameter(parameter.detach().clone()) for parameter in ours]
    for copy, gradient in zip(copies, torch.autograd.grad(loss, ours), strict=True):
        copy.grad = gradient
    norm = torch.nn.utils.clip_grad_norm_(copies, 0.5)
    assert norm > 0.5
    torch.optim.Adam(copies, 3e-4, eps=1e-5).step()
    agent.step(batch)
    for got, expected in zip(ours, copies, strict=True):
        torch.testing.assert_close(got.detach(), expected.detach(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("recompute", "return_scaling"), [(True, False), (False, False), (True, True)])
def test_what_a_gradient_step_gets_of_a_round(recompute: bool, return_scaling: bool):
    """Normalised observations, scaled rewards or returns, and advantages by the critic as each epoch finds it, or the
    first."""
    rng = np.random.default_rng(3)
    agent = PPO(Args(**(SMALL | {"num_envs": 2, "epochs": 2, "minibatch_size": 10, "gamma": 0.9,
                     "gae_lambda": 0.8, "recompute_advantages": recompute, "return_scaling": return_scaling})),
                3, 2, torch.device("cpu"))  # fmt: skip
    earlier = rng.normal(2.0, 3.0, (500, 3)).astype(np.float32)
    agent.obs_normalizer.update(torch.from_numpy(earlier))
    no_dones = np.zeros((50, 2), bool)
    agent.reward_scaler(rng.normal(0.0, 20.0, (50, 2)).astype(np.float32), no_dones)
    agent.optimizer.lr = 0.05
    obs, next_obs = rng.normal(2.0, 3.0, (2, 15, 2, 3)).astype(np.float32)
    actions = rng.normal(size=(15, 2, 2)).astype(np.float32)
    rewards = rng.normal(0.0, 20.0, (15, 2)).astype(np.float32)
    terminations, truncations = np.zeros((2, 15, 2), bool)
    terminations[4, 0] = truncations[9, 1] = True
    scaled = rewards if return_scaling else deepcopy(agent.reward_scaler)(rewards, terminations | truncations)
    assert return_scaling or np.abs(scaled).max() < 0.5 * np.abs(rewards).max()
    deviation, seen = 1.0, []  # of the raw λ-returns so far; 1 before there are any
    got: list[Minibatch] = []
    critics = []

    def step(*parts: torch.Tensor) -> ppo.Metrics:
        if len(got) % 3 == 0:
            critics.append(deepcopy(agent.critic.net))
        got.append(batch := Minibatch(*parts))
        return agent.step(batch)

    agent.update(Transitions(obs, actions, rewards, next_obs, terminations, truncations), step)
    assert len(got) == 6

    def normalized(part: Array) -> Array:
        return np.clip((part - earlier.mean(0)) / earlier.std(0), -10, 10).reshape(-1, 3)

    for epoch in range(2):
        parts = [torch.cat(part).numpy() for part in zip(*got[3 * epoch : 3 * epoch + 3], strict=True)]
        place = np.argsort(parts[1][:, 0])[np.argsort(np.argsort(actions.reshape(-1, 2)[:, 0]))]
        by = critics[epoch if recompute else 0]
        values, new = (forward(by, normalized(part)).reshape(15, 2) for part in (obs, next_obs))
        raw, next_raw = deviation * values, deviation * new  # in the rewards' own units
        expected = brute_force(scaled, raw, next_raw, terminations, terminations | truncations)
        returns = (expected + raw) / deviation
        if return_scaling:
            seen.append(expected + raw)
            deviation = np.std(seen)
            assert abs(deviation - 1.0) > 0.5
        for found, wanted in ((parts[1], actions.reshape(-1, 2)), (parts[0], normalized(obs)),
                              (parts[3], values.ravel()), (parts[4], expected.ravel()),
                              (parts[5], returns.ravel())):  # fmt: skip
            np.testing.assert_allclose(found[place], wanted, rtol=2e-3, atol=2e-3)
    assert not np.allclose(forward(critics[0], normalized(obs)), forward(critics[1], normalized(obs)), atol=0.02)


def test_statistics_of_observations_move_between_rounds_only(small, monkeypatch: pytest.MonkeyPatch):
    """The policy that learns is the one that acted: every ratio is 1 before a round's first step."""
    seen = []

    class Spied(PPO):
        def step(self, batch: Minibatch) -> ppo.Metrics:
            with torch.no_grad():
                change = self.actor.log_prob(batch.obs, batch.actions) - batch.log_probs
            seen.append((self.obs_normalizer.count.item(), change.abs().max().item()))
            return super().step(batch)

    monkeypatch.setattr(ppo, "PPO", Spied)
    ppo.train(small("ppo", rollout_steps=50, epochs=4))
    rounds, steps = 4, 4 * 5
    assert [count for count, _ in seen[::steps]] == [50.0 * k for k in range(rounds)]
    assert max(change for _, change in seen[::steps]) < 1e-5
    assert max(change for _, change in seen) > 1e-3


def test_metrics_of_a_round_tell_how_far_the_policy_moved():
    """Against the old and the new Gaussian, over all of the round's steps."""
    agent, rng = make_agent(rollout_steps=30, clip=0.2), np.random.default_rng(5)
    agent.actor.float(), agent.critic.float()
    agent.optimizer = Adam([*agent.actor.parameters(), *agent.critic.parameters()], 1e-2)
    obs, next_obs = rng.normal(size=(2, 30, 1, 3)).astype(np.float32)
    actions, ends = rng.normal(size=(30, 1, 2)).astype(np.float32), np.zeros((30, 1), bool)

    def log_prob() -> torch.Tensor:
        with torch.no_grad():
            normal = torch.distributions.Normal(agent.actor.net(torch.from_numpy(obs[:, 0])), agent.actor.log_std.exp())
            return normal.log_prob(torch.from_numpy(actions[:, 0])).sum(-1).double()

    norms: list[float] = []

    def step(*parts: torch.Tensor) -> ppo.Metrics:
        """Note the length of the gradient of the sum of the losses."""
        batch = Minibatch(*parts)
        loss = agent.policy_loss(batch) + 0.25 * agent.value_loss(batch)
        gradients = torch.autograd.grad(loss, [*agent.actor.parameters(), *agent.critic.parameters()])
        norms.append(float(sum(gradient.double().square().sum() for gradient in gradients)) ** 0.5)
        return agent.step(batch)

    before = log_prob()
    metrics = agent.update(Transitions(obs, actions, np.ones((30, 1), np.float32), next_obs, ends, ends), step)
    ratio = (log_prob() - before).exp()
    assert 0.1 < (ratio - 1.0).abs().gt(0.2).double().mean() < 1.0
    got = {name: value.double().mean().item() for name, value in metrics.items()}
    assert got["losses/gradients_clipped"] == pytest.approx(np.mean([norm > 0.5 for norm in norms]))
    assert 0.0 < got["losses/gradients_clipped"] < 1.0
    assert got["losses/gradient_norm"] == pytest.approx(np.mean(norms), rel=1e-3)
    assert got["losses/clipfrac"] == pytest.approx((ratio - 1.0).abs().gt(0.2).double().mean().item())
    assert got["losses/approx_kl"] == pytest.approx((ratio - 1.0 - ratio.log()).mean().item(), rel=1e-3)


def test_evaluation_uses_the_statistics_and_leaves_them(small):
    agent = PPO(Args(**SMALL), 3, 1, torch.device("cpu"))
    agent.obs_normalizer.update(torch.full((50, 3), 4.0) + torch.randn(50, 3, generator=torch.Generator()))
    before = {k: v.clone() for k, v in agent.obs_normalizer.state_dict().items()}
    obs = np.full((2, 3), 4.0, np.float32)
    expected = agent.actor.net(agent.obs_normalizer(torch.from_numpy(obs))).clamp(-1, 1).detach().numpy()
    np.testing.assert_array_equal(agent.act(obs, deterministic=True), expected)
    assert all(torch.equal(before[k], v) for k, v in agent.obs_normalizer.state_dict().items())
    assert {"obs_normalizer", "reward_scaler", "generator"} <= state_of(agent).keys()


@pytest.mark.parametrize(
    ("decay_steps", "shares"),
    [(0, [1.0, 0.75, 0.5, 0.25]), (400, [1.0, 0.875, 0.75, 0.625]), (100, [1.0, 0.5, 0.0, 0.0])],
)
def test_learning_rate_falls_linearly(small, monkeypatch: pytest.MonkeyPatch, decay_steps: int, shares: list[float]):
    rates, update = [], PPO.update
    monkeypatch.setattr(PPO, "update", lambda self, *args: rates.append(self.optimizer.lr) or update(self, *args))
    ppo.train(small("ppo", total_steps=200, rollout_steps=50, decay_steps=decay_steps))
    np.testing.assert_allclose(rates, 3e-4 * np.array(shares))


def test_version_0_1_s_checkpoints_still_fit():
    """The returns' statistics are part of the state only if they are used."""
    assert "return_normalizer" not in state_of(PPO(Args(**SMALL), 3, 2, torch.device("cpu")))
    scaled = PPO(Args(**(SMALL | {"return_scaling": True})), 3, 2, torch.device("cpu"))
    assert "return_normalizer" in state_of(scaled)


def test_gains_and_epsilon_are_what_was_asked_for():
    """An orthogonal layer with fewer outputs than inputs has rows of the gain's length."""
    agent = PPO(Args(**(SMALL | {"actor_gain": 0.5, "critic_gain": 3.0, "adam_epsilon": 1e-3})), 3, 2,
                torch.device("cpu"))  # fmt: skip
    for network, gain in ((agent.actor, 0.5), (agent.critic, 3.0)):
        np.testing.assert_allclose(network.net[-1].weight.detach().norm(dim=1), gain, rtol=1e-5)
    assert agent.optimizer.param_groups[0]["eps"] == 1e-3


@pytest.mark.parametrize(("num_envs", "total_steps", "sizes"), [(1, 120, [50, 50, 20]), (4, 120, [52, 52, 16])])
def test_steps_of_every_round(
    small, monkeypatch: pytest.MonkeyPatch, num_envs: int, total_steps: int, sizes: list[int]
):
    rounds, update = [], PPO.update
    monkeypatch.setattr(PPO, "update", lambda self, r, step: rounds.append(r) or update(self, r, step))
    ppo.train(small("ppo", total_steps=total_steps, num_envs=num_envs, rollout_steps=50))
    assert [r.rewards.size for r in rounds] == sizes
    joined = np.concatenate([r.next_obs for r in rounds])[:-1] == np.concatenate([r.obs for r in rounds])[1:]
    assert joined.all()  # Pendulum's episodes are longer: not a step is lost between rounds


def test_truncated_episodes_bootstrap_unless_told_otherwise(small, monkeypatch: pytest.MonkeyPatch):
    """Pendulum only ever times out, after 200 steps."""
    masks = []
    monkeypatch.setattr(
        ppo, "generalized_advantages", lambda *a: masks.append((a[3].sum(), a[4].sum())) or generalized_advantages(*a)
    )
    for flag, expected in ((False, (0, 1)), (True, (1, 1))):
        masks.clear()
        ppo.train(
            small(
                "ppo",
                treat_truncation_as_termination=flag,
                rollout_steps=50,
                epochs=1,
                run_dir=small().run_dir / str(flag),
            )
        )
        assert masks[3] == expected
        assert masks[0] == (0, 0)


def test_relu_networks_without_orthogonal_weights():
    """RL Zoo's: hidden layers of max(0, x), all weights and biases uniform within ±1 / √inputs, no gains."""
    agent = PPO(
        Args(**(SMALL | {"hidden": (64, 64), "activation": "relu", "orthogonal": False})), 3, 2, torch.device("cpu")
    )
    obs = torch.randn(10, 3, generator=torch.Generator().manual_seed(1))
    for net in (agent.actor.net, agent.critic.net):
        linear = [layer for layer in net if hasattr(layer, "weight")]
        for layer in linear:
            bound = layer.weight.shape[1] ** -0.5
            for part in (layer.weight, layer.bias):
                assert 0.0 < part.abs().max() <= bound
            assert 0.5 * bound < layer.weight.std() < 0.66 * bound  # bound / √3 in expectation
        outputs = obs.double().numpy()
        for layer in linear:
            outputs = outputs @ layer.weight.detach().double().numpy().T + layer.bias.detach().double().numpy()
            outputs = outputs if layer is linear[-1] else np.maximum(outputs, 0.0)
        np.testing.assert_allclose(net(obs).detach().numpy(), outputs, rtol=1e-5, atol=1e-6)


def test_learns_pendulum(small):
    """From about -1 200 (random) to better than -400 in 80 000 steps."""
    args = small("ppo", hidden=(64, 64), rollout_steps=2_048, minibatch_size=256, epochs=10, num_envs=8, gamma=0.9,
                 normalize_advantages=True, learning_rate=1e-3, total_steps=80_000, eval_every=80_000, eval_episodes=10,
                 checkpoint_every=80_000)  # fmt: skip
    module("ppo").train(args)
    step, returns = np.loadtxt(args.run_dir / "evaluations.csv", delimiter=",", skiprows=1, usecols=(0, 2)).T
    assert returns[step == 0].mean() < -800
    assert returns[step == step.max()].mean() > -400


@pytest.mark.parametrize(("hidden", "threads"), [(64, 1), (256, 2)])
def test_small_networks_take_one_thread(tmp_path: Path, hidden: int, threads: int):
    code = (
        "from pathlib import Path; from algos.ppo import Args, train\n"
        f"train(Args(env='Pendulum-v1', num_envs=1, hidden=({hidden}, {hidden}), rollout_steps=64, total_steps=64,"
        f" eval_episodes=1, device='cpu', run_dir=Path({str(tmp_path / 'run')!r})))\n"
    )
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"OMP_NUM_THREADS": "2"}, check=True, timeout=120)
    assert json.loads((tmp_path / "run" / "config.json").read_text())["hardware"]["threads"] == threads
