"""Behaviour cloning against a formula written a second time, a known expert, and episodes of which one is the best."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import COMMON, PENDULUM, final_state, module, same
from d4rl_file import make
from formulas import Drawn, forward, joined, layers, make_batch
from onnx_file import needs_onnx
from onnx_file import run as run_file
from test_fql import two_modes
from test_resume import assert_kills_change_nothing

from algos.bc import BC, Args
from common.checkpoint import restore, state_of
from common.diffusion import Diffusion
from common.errors import InputError
from common.optim import Adam
from common.replay_buffer import ReplayBuffer
from envs.make import make as make_env
from tools import export
from tools.policies import load_policy

SMALL = COMMON | {
    "batch_size": 16, "buffer_size": 10_000, "flow_steps": 3, "denoising_steps": 3, "width": 16, "blocks": 1,
}  # fmt: skip
MEAN, DEVIATION = np.float32([2.0, -30.0, 0.0]), np.float32([0.5, 4.0, 0.0])  # the last is the same everywhere


def make_agent(double: bool = True, **changed: Any) -> BC:
    small = {name: SMALL[name] for name in ("hidden", "batch_size", "width", "blocks")}
    agent = BC(Args(**({"dataset": str(PENDULUM)} | small | changed)), 3, 2, torch.device("cpu"))
    if double:
        agent.actor.double()
        agent.obs_normalizer.double()
        agent.actor_optimizer = Adam(agent.actor.parameters(), 1e-3)
        draw = agent.noise
        agent.noise = lambda *given: draw(*given).double()
    agent.obs_normalizer.set_statistics(MEAN, DEVIATION)
    return agent


def test_loss_is_the_mean_over_transitions_and_dimensions() -> None:
    agent, batch = make_agent(), make_batch(40)
    chosen = np.tanh(forward(batch.obs.numpy(), layers(agent.actor)))
    expected = ((chosen - batch.actions.numpy()) ** 2).sum() / (40 * 2)
    assert agent.actor_loss(batch)[0].item() == pytest.approx(expected, rel=1e-6)


def moved(agent: BC) -> BC:
    """Move the parameters: no bias is at 0."""
    noise = torch.Generator().manual_seed(7)
    for parameter in agent.actor.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=noise)
    return agent


def test_flow_loss_is_the_mean_over_transitions_and_dimensions() -> None:
    """Of (v(s, (1 - t) x + t a, t) - (a - x))²."""
    agent, batch = moved(make_agent(policy="flow", flow_steps=4)), make_batch(40)
    drawn = Drawn(agent.generator)
    noise, t = drawn.normal(40, 2), torch.rand(40, generator=drawn.generator).double().numpy()[:, None]
    found = joined(agent.actor, batch.obs.numpy(), (1 - t) * noise + t * batch.actions.numpy(), t)
    errors = (found - (batch.actions.numpy() - noise)) ** 2
    assert agent.actor_loss(batch)[0].item() == pytest.approx(errors.sum() / (40 * 2), rel=1e-6)


def test_diffusion_loss_is_the_mean_over_transitions_alone() -> None:
    """Of ‖ε(s, √ᾱ a + √(1 - ᾱ) x, k) - x‖², with ᾱ = exp(-∫ 0.1 + 9.9 t dt) up to t = (k + 1) / T."""
    agent, batch = moved(make_agent(policy="diffusion", denoising_steps=5)), make_batch(40)
    agent.process = Diffusion(agent.process.betas.double(), agent.process.alpha_bars.double())
    drawn = Drawn(agent.generator)
    noise, k = drawn.normal(40, 2), np.array(drawn.integers(5, 40))
    t = (k[:, None] + 1) / 5
    bar = np.exp(-0.1 * t - 9.9 * t**2 / 2)
    noisy = np.sqrt(bar) * batch.actions.numpy() + np.sqrt(1 - bar) * noise
    with torch.no_grad():
        found = agent.actor(batch.obs, torch.from_numpy(noisy), torch.from_numpy(k).double()).numpy()
    assert agent.actor_loss(batch)[0].item() == pytest.approx(((found - noise) ** 2).sum() / 40, rel=1e-6)


def test_the_default_draws_nothing_and_has_the_state_of_older_runs() -> None:
    """Neither updates nor actions move the generator, so that checkpoints and numbers are those of before --policy."""
    agent, batch = make_agent(False), make_batch(40)
    batch = type(batch)(*(part.float() for part in batch[:5]))
    assert state_of(agent).keys() == {"generator", "actor", "actor_optimizer", "obs_normalizer"}
    assert state_of(agent)["actor"].keys() == {f"net.{i}.{name}" for i in (0, 2, 4) for name in ("weight", "bias")}
    before, obs = agent.generator.get_state(), batch.obs.numpy()
    agent.update(batch)
    assert np.array_equal(agent.act(obs), agent.eval_policy()(obs))
    assert torch.equal(agent.generator.get_state(), before)


@pytest.mark.parametrize("policy", ["flow", "diffusion"])
def test_evaluations_have_noise_of_their_own(policy: str) -> None:
    """Which differs from step to step, and is the same in each evaluation."""
    agent, obs = make_agent(False, policy=policy), np.tile(MEAN, (30, 1))
    before, evaluated = agent.generator.get_state(), agent.eval_policy()
    first, second = evaluated(obs), evaluated(obs)
    assert not np.array_equal(first, second)
    assert np.array_equal(first, agent.eval_policy()(obs))
    assert np.array_equal(agent.act(obs, deterministic=True), agent.act(obs, deterministic=True))
    assert torch.equal(agent.generator.get_state(), before)
    assert not np.array_equal(agent.act(obs), agent.act(obs))


def test_flow_and_diffusion_sample_both_modes_a_mean_neither() -> None:
    """Actions are near ±0.6, a quarter of them above 0; the mean of all is -0.3."""
    obs, rng, updates = np.ones((5_000, 3), np.float32), torch.Generator().manual_seed(0), 800
    form: dict[str, Any] = {"hidden": (64, 64), "width": 64, "blocks": 1}
    for policy in ("gaussian", "flow", "diffusion"):
        agent = BC(Args(dataset=str(PENDULUM), policy=policy, **form), 3, 1, torch.device("cpu"))
        for update in range(updates):
            agent.actor_optimizer.lr = 3e-3 * (1 - update / updates)
            agent.update(two_modes(256, rng))
        actions = agent.act(obs)
        near = [(np.abs(actions - mode) < 0.35).mean() for mode in (-0.6, 0.6)]
        if policy == "gaussian":
            np.testing.assert_allclose(actions, -0.3, atol=0.1)
        else:
            assert near == [pytest.approx(0.73, abs=0.08), pytest.approx(0.23, abs=0.08)]


@needs_onnx
@pytest.mark.parametrize(("policy", "draws"), [("flow", 1), ("diffusion", 3)])
def test_exported_and_kept_policies_act_as_the_run(
    policy: str, draws: int, small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exported one from noise that it is given: that of the start, and of diffusion that of all steps but one."""
    folder = module("bc").train(small("bc", policy=policy, offline_steps=20, online_steps=0, eval_episodes=1)).folder
    obs, env = np.random.default_rng(1).normal(size=(4, 3)).astype(np.float32), make_env("Pendulum-v1")
    for deterministic in (True, False):
        run, kept = (load_policy(str(folder / path), env, 3, deterministic) for path in ("", "policy/last.safetensors"))
        assert run(obs).tobytes() == kept(obs).tobytes()
    exported = run_file(export.main(export.Args(str(folder))), obs)
    agent, rng = run.act.__self__, np.random.default_rng(0)
    noise = torch.from_numpy(np.stack([rng.standard_normal((draws, 1)) for _ in obs], 1).astype(np.float32))
    monkeypatch.setattr("common.diffusion.normal_like", lambda x, generator, left=[*noise[1:]]: left.pop(0))
    agent.noise = lambda obs, generator: noise[0]
    np.testing.assert_allclose(exported, 2.0 * agent.act(obs), atol=1e-5)


def test_a_flow_resumes_bit_for_bit(tmp_path: Path) -> None:
    """Killed before the switch, after it and in the last evaluation."""
    arguments = {"policy": "flow", "checkpoint_every": 30, "eval_episodes": 1}
    places = [("update", 75), ("online step", 50), ("evaluation", 1)]
    assert_kills_change_nothing("bc", arguments, places, tmp_path)


def test_a_run_starts_from_its_own_kind_of_policy(small: Any, tmp_path: Path) -> None:
    short = {"offline_steps": 2, "online_steps": 0, "eval_episodes": 1}
    module("bc").train(small("bc", policy="diffusion", run_dir=tmp_path / "first", **short))
    for changed, there in (({}, "policy"), ({"policy": "diffusion", "denoising_steps": 4}, "denoising-steps")):
        with pytest.raises(InputError, match=f"was trained with --{there} (diffusion|3): give the same here$"):
            module("bc").train(small("bc", init_from=tmp_path / "first", **short, **changed))
    module("bc").train(small("bc", init_from=tmp_path / "first", policy="diffusion", **short))
    module("bc").train(small("bc", policy="flow", denoising_steps=4, run_dir=tmp_path / "flow", **short))
    own = {"policy": "flow", "run_dir": tmp_path / "second"}  # a flow has no denoising steps
    module("bc").train(small("bc", init_from=tmp_path / "flow", **own, **short))


def test_updates_and_actions_normalise_and_a_restored_agent_too() -> None:
    """By (s - mean) / (std + 1e-3)."""
    agent, other, batch = make_agent(), make_agent(seed=2), make_batch(40)
    other.obs_normalizer.set_statistics(0 * MEAN, DEVIATION + 1)
    obs = (batch.obs.numpy() - MEAN.astype(np.float64)) / (DEVIATION + 1e-3)
    by_hand = agent.actor_loss(batch._replace(obs=torch.from_numpy(obs)))[0].item()
    assert agent.update(batch)["losses/actor"].item() == pytest.approx(by_hand, rel=1e-6)
    restore(other, copy.deepcopy(state_of(agent)))
    for each in (agent, other):
        for deterministic in (True, False):
            found = each.act(batch.obs.numpy(), deterministic=deterministic)
            np.testing.assert_allclose(found, np.tanh(forward(obs, layers(agent.actor))), rtol=1e-6)


def test_it_recovers_a_known_expert() -> None:
    """a = tanh(W s + b) of observations far from the unit cube, in states that it has not seen."""
    rng = np.random.default_rng(0)
    weight, bias = rng.normal(size=(3, 2)), rng.normal(size=2)
    unit = rng.normal(size=(4_000, 3)).astype(np.float32)
    obs, actions = MEAN + unit * (DEVIATION + 1e-3), np.tanh(0.7 * unit @ weight + bias)
    agent, buffer = make_agent(False, hidden=(64, 64), actor_lr=3e-3), ReplayBuffer(3_000, 3, 2)
    buffer.add(obs[:3_000], actions[:3_000], np.zeros(3_000), obs[:3_000], np.zeros(3_000))
    for _ in range(1_500):
        agent.update(buffer.sample(128, agent.generator))
    assert np.abs(agent.act(obs[3_000:].astype(np.float32)) - actions[3_000:]).mean() < 0.02


@pytest.mark.parametrize(("top", "expected"), [(0.1, 0.5), (1.0, -0.4)])
def test_10_percent_bc_imitates_the_best_episodes_only(small: Any, tmp_path: Path, top: float, expected: float) -> None:
    """Nine episodes do -0.5, the fourth does 0.5 and has the highest return; online too, where it imitates itself."""
    best = np.repeat(np.arange(10) == 3, 10)
    obs = np.random.default_rng(0).normal(np.where(best, 3.0, 0.0)[:, None], 1.0, (100, 3)).astype(np.float32)
    actions, rewards = np.where(best, 0.5, -0.5)[:, None], np.where(best, 2.0, 1.0)
    path = make(tmp_path / "data.hdf5", ".........t" * 10, observations=obs, actions=actions, rewards=rewards)
    args = small(
        "bc", dataset=str(path), offline_steps=400, online_steps=20, top_fraction=top, actor_lr=3e-3, hidden=(1,)
    )
    module("bc").train(args)
    agent = BC(args, 3, 1, torch.device("cpu"))
    restore(agent, final_state(args.run_dir)["agent"])
    chosen = obs[best] if top < 1 else obs
    np.testing.assert_allclose(agent.obs_normalizer.mean, chosen.mean(0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(agent.obs_normalizer.scale, chosen.std(0) + 1e-3, rtol=1e-4)
    assert agent.act(chosen).mean() == pytest.approx(expected, abs=0.1)


def test_a_restored_agent_continues_bit_for_bit() -> None:
    agent, other = make_agent(False), make_agent(False, seed=2)
    buffer, rng = ReplayBuffer(100, 3, 2), np.random.default_rng(0)
    parts = rng.normal(size=(100, 3)), rng.uniform(-1, 1, (100, 2)), rng.normal(size=100), rng.normal(size=(100, 3))
    buffer.add(*parts, np.zeros(100))
    for _ in range(3):
        agent.update(buffer.sample(16, agent.generator))
    restore(other, copy.deepcopy(state_of(agent)))  # as from a file: nothing shared
    for each in (agent, other):
        for _ in range(3):
            each.update(buffer.sample(16, each.generator))
    assert same(state_of(agent), state_of(other))
