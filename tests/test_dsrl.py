"""DSRL against formulas written a second time in float64, what must not change, and a problem whose answer is known."""

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import COMMON, PENDULUM, final_state, long, module, same, stored
from formulas import (
    Array,
    Drawn,
    assert_log_std_is_clamped,
    assert_targets_follow_each_step,
    joined,
    layers,
    log_density,
    make_batch,
    normed,
)
from onnx_file import run
from test_fql import two_modes
from test_resume import assert_kills_change_nothing

from algos.dsrl import DSRL, PRESETS, Args
from common.errors import InputError
from common.networks import TanhGaussian
from common.optim import Adam
from common.replay_buffer import Batch
from common.run_folder import config_text, run_config
from envs.make import make
from envs.rollout import Rollout
from offline.dataset import Dataset, read
from offline.offline_to_online import with_presets
from tools import export
from tools.policies import load_policy

SMALL = COMMON | {
    "time_limit": 50,
    "batch_size": 16, "buffer_size": 10_000, "flow_hidden": (16, 16), "flow_steps": 3, "warmup_steps": 60,
}  # fmt: skip
STEPS, B, H = 4, 1.5, 2  # Euler steps, scale of the noise, actions in a chunk
NETWORKS = ("base", "actor", "critic", "target_critic", "noise_critic")
both_bases = pytest.mark.parametrize("policy", ["flow", "diffusion"])


def networks(agent: DSRL) -> list[str]:
    """Those that this agent has: all, but for the critic of noise with `--recipe sac`."""
    return [name for name in NETWORKS if hasattr(agent, name)]


def make_agent(double: bool = True, action_dim: int = 2, **changed: Any) -> DSRL:
    given = {"dataset": str(PENDULUM), "hidden": (16, 8), "flow_hidden": (16, 8), "flow_steps": STEPS, "chunk": H}
    given |= {"denoising_steps": STEPS}
    agent = DSRL(with_presets(Args(**given | changed), PRESETS), 3, action_dim, torch.device("cpu"))
    if double:
        noise = torch.Generator().manual_seed(7)
        for name in networks(agent):
            network = getattr(agent, name).double()
            for parameter in network.parameters():  # no scale at 1, no shift at 0, targets unlike the critics
                parameter.data += 0.3 * torch.randn(parameter.shape, generator=noise)
            if name != "target_critic":
                setattr(agent, f"{name}_optimizer", Adam(network.parameters(), 1e-3))
        agent.log_alpha.data = torch.tensor(-0.7, dtype=torch.float64)
        agent.alpha_optimizer = Adam([agent.log_alpha], 1e-3)
        draw = agent.normal
        agent.normal = lambda obs: draw(obs).double()
    return agent


def chunks(size: int = 40) -> Batch:
    """Of 3 observations and chunks of 2 actions of 2 dimensions; every third passes the end of its episode."""
    rng = np.random.default_rng(5)
    valid = np.ones((size, H))
    valid[::3, 1] = 0
    actions = torch.from_numpy(rng.uniform(-1, 1, (size, 2 * H)))
    return make_batch(size)._replace(actions=actions, valid=torch.from_numpy(valid))


def tanh_net(inputs: Array, weights: list[list[Array]]) -> Array:
    """Layer norm, then tanh, after each hidden layer."""
    for weight, bias, *norm in weights[:-1]:
        inputs = np.tanh(normed(inputs @ weight + bias, *norm))
    return inputs @ weights[-1][0] + weights[-1][1]


def values(critic: Any, obs: Array, actions: Array) -> Array:
    return np.stack([tanh_net(np.concatenate([obs, actions], -1), layers(critic, i))[:, 0] for i in range(2)])


def ddim_actions(agent: DSRL, obs: Array, noise: Array) -> Array:
    """DDIM in y = x / √ᾱ, whose noise has the scale s: y' = a + (y - a) s' / s, with a clipped at each step."""
    bars = agent.process.alpha_bars.double().numpy()
    scales = np.sqrt((1 - bars) / bars)
    y = noise / np.sqrt(bars[-1])
    for k in reversed(range(len(bars))):
        x, time = torch.from_numpy(y * np.sqrt(bars[k])), torch.tensor(float(k))
        actions = (y - scales[k] * agent.base(torch.from_numpy(obs), x, time).detach().numpy()).clip(-1, 1)
        y = actions + (y - actions) * (scales[k - 1] / scales[k] if k else 0.0)
    return y


def base_actions(agent: DSRL, obs: Array, noise: Array) -> Array:
    """Euler steps at t = 0, 1/4, 2/4, 3/4; clipped once, at the end."""
    if agent.args.policy == "diffusion":
        return ddim_actions(agent, obs, noise)
    x = noise
    for k in range(STEPS):
        x = x + joined(agent.base, obs, x, np.full((len(x), 1), k / STEPS)) / STEPS
    return np.clip(x, -1, 1)


def chosen(agent: DSRL, obs: Array, noise: Array) -> tuple[Array, Array]:
    """The actor's noise in units of b, and its log-density."""
    mean, log_std = np.split(tanh_net(obs, layers(agent.actor)), 2, axis=-1)
    std = np.exp(np.clip(log_std, -20, 2))
    u = mean + std * noise
    return np.tanh(u), log_density(mean, std, u)


@both_bases
def test_critic_loss_equals_an_independent_formula(policy: str):
    """Half the sum over both critics, with γ² of a chunk of two, the entropy, and no chunk that a time limit cut."""
    agent, batch = make_agent(gamma=0.9, policy=policy), chunks()
    obs, actions, rewards, next_obs, terminations = (part.numpy() for part in batch[:5])
    u, log_prob = chosen(agent, next_obs, Drawn(agent.generator).normal(40, 4))
    following = values(agent.target_critic, next_obs, base_actions(agent, next_obs, B * u)).min(0)
    target = rewards + 0.9**2 * (1 - terminations) * (following - math.exp(-0.7) * log_prob)
    is_cut = batch.valid.numpy()[:, 1] == 0
    counts = ~is_cut | (terminations == 1)
    assert {*terminations[is_cut]} == {0.0, 1.0}  # cut by both kinds of ends
    errors = (values(agent.critic, obs, actions) - target) ** 2 * counts
    loss = agent.critic_loss(batch)[0].item()
    assert loss == pytest.approx(0.5 * errors.mean(1).sum(), rel=1e-6)


@both_bases
def test_each_noise_critic_follows_its_own_critic(policy: str):
    """On standard normal noise, also beyond ±b, given to it in units of b."""
    agent, batch = make_agent(policy=policy), chunks()
    obs, noise = batch.obs.numpy(), Drawn(agent.generator).normal(40, 4)
    assert (np.abs(noise) > B).any()
    wanted = values(agent.critic, obs, base_actions(agent, obs, noise))
    errors = (values(agent.noise_critic, obs, noise / B) - wanted) ** 2
    loss, _ = agent.noise_critic_loss(batch)
    assert loss.item() == pytest.approx(0.5 * errors.mean(1).sum(), rel=1e-6)
    others = [*agent.base.parameters(), *agent.critic.parameters()]
    assert all(gradient is None for gradient in torch.autograd.grad(loss, others, allow_unused=True))


def test_actor_loss_passes_through_the_noise_critics_alone():
    agent, batch = make_agent(), chunks()
    obs = batch.obs.numpy()
    u, log_prob = chosen(agent, obs, Drawn(agent.generator).normal(40, 4))
    expected = (math.exp(-0.7) * log_prob - values(agent.noise_critic, obs, u).min(0)).mean()
    loss, returned, _ = agent.actor_loss(batch)
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    np.testing.assert_allclose(returned.numpy(), log_prob, rtol=1e-6)
    others = [p for name in ("base", "critic", "noise_critic") for p in getattr(agent, name).parameters()]
    assert all(gradient is None for gradient in torch.autograd.grad(loss, others, allow_unused=True))


def test_sac_critic_loss_equals_an_independent_formula():
    """SAC's, with noise for actions: no action of the base policy, and no scale b, enters it."""
    agent, batch = make_agent(gamma=0.9, chunk=1, recipe="sac"), make_batch(40)
    obs, noise, rewards, next_obs, terminations = (part.numpy() for part in batch[:5])
    u, log_prob = chosen(agent, next_obs, Drawn(agent.generator).normal(40, 2))
    following = values(agent.target_critic, next_obs, u).min(0) - math.exp(-0.7) * log_prob
    target = rewards + 0.9 * (1 - terminations) * following
    errors = (values(agent.critic, obs, noise) - target) ** 2
    loss = agent.critic_loss(batch)[0].item()
    assert loss == pytest.approx(0.5 * errors.mean(1).sum(), rel=1e-6)


def test_sac_actor_loss_passes_through_the_critics():
    """And its gradient moves the actor alone."""
    agent, batch = make_agent(chunk=1, recipe="sac"), make_batch(40)
    u, log_prob = chosen(agent, batch.obs.numpy(), Drawn(agent.generator).normal(40, 2))
    expected = (math.exp(-0.7) * log_prob - values(agent.critic, batch.obs.numpy(), u).min(0)).mean()
    loss, returned, _ = agent.actor_loss(batch)
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    np.testing.assert_allclose(returned.numpy(), log_prob, rtol=1e-6, atol=1e-6)
    others = [p for name in ("base", "critic", "target_critic") for p in getattr(agent, name).parameters()]
    assert all(gradient is None for gradient in torch.autograd.grad(loss, others, allow_unused=True))


@both_bases
def test_sac_explores_with_noise_in_the_box(policy: str):
    """The actions are G(s, b u): in the warm-up, b u is normal and clipped to ±b, then u is the actor's."""
    agent = make_agent(chunk=1, recipe="sac", policy=policy)
    obs = np.random.default_rng(0).normal(size=(400, 3))
    drawn = Drawn(agent.generator)
    noise = [np.clip(drawn.normal(400, 2) / B, -1, 1), chosen(agent, obs, drawn.normal(400, 2))[0]]
    assert (np.abs(noise[0]) == 1).mean() == pytest.approx(0.1336, abs=0.03)  # 2 Φ(-1.5)
    for agent.steers in (0, 1):
        actions, u = agent.explore(obs)
        np.testing.assert_allclose(u, noise[agent.steers], rtol=1e-6)
        np.testing.assert_allclose(actions, base_actions(agent, obs, B * u), atol=1e-5)


@both_bases
def test_sac_stores_the_noise_that_it_executed(policy: str, small: Callable[..., Any], monkeypatch: pytest.MonkeyPatch):
    """The environment gets G(s, b u) and the buffer u, whose G(s, b u) it is. The base policy stays as it was."""
    executed, step = list[Array](), Rollout.step

    def noted(rollout: Rollout, actions: Any, **kwargs: Any) -> Any:
        executed.extend(actions.copy())
        return step(rollout, actions, **kwargs)

    monkeypatch.setattr(Rollout, "step", noted)
    args = small("dsrl", recipe="sac", policy=policy, num_envs=2, noise_scale=B, denoising_steps=3)
    module("dsrl").train(args)
    rows, state = stored(args.run_dir), final_state(args.run_dir)["agent"]
    agent = DSRL(with_presets(args, PRESETS), 3, 1, torch.device("cpu"))
    agent.base.load_state_dict(state["base"])
    assert {"noise_critic", "noise_critic_optimizer"}.isdisjoint(state)
    steps = [int(state[f"{name}_optimizer"]["state"][0]["step"]) for name in ("base", "critic")]
    assert steps == [args.offline_steps, args.online_steps - args.warmup_steps]
    with torch.no_grad():
        made = agent.base_actions(rows.obs, B * rows.actions)
    np.testing.assert_allclose(np.stack(executed), made, atol=1e-5)
    assert (made - rows.actions).abs().mean() > 0.05
    assert rows.actions.abs().max() <= 1.0


@pytest.mark.parametrize("changed", [{"retain": "mix"}, {"retain": "append"}, {"chunk": 2}])
def test_sac_refuses_what_holds_no_noise(changed: dict[str, Any]):
    with pytest.raises(InputError, match="noise of single steps: give --retain none and --chunk 1"):
        make_agent(recipe="sac", **{"chunk": 1} | changed)


def test_alpha_moves_until_the_entropy_is_the_target():
    """log α falls while log π < 0, which is an entropy above H̄ = 0, and rises otherwise; in 4 dimensions."""
    agent = make_agent()
    for log_prob, expected in ((-2.0, 2.0), (3.0, -3.0)):
        loss, _ = agent.alpha_loss(torch.full((5,), log_prob).double())
        (gradient,) = torch.autograd.grad(loss, agent.log_alpha)
        assert gradient.item() == pytest.approx(expected)
    agent = make_agent(target_entropy=-0.5)
    loss, _ = agent.alpha_loss(torch.full((5,), 2.0).double())
    assert torch.autograd.grad(loss, agent.log_alpha)[0].item() == pytest.approx(-(2.0 - 0.5 * 4))


def test_flow_loss_weighs_each_valid_action():
    agent, batch = make_agent(), chunks()
    drawn = Drawn(agent.generator)
    noise, t = drawn.normal(40, 4), torch.rand(40, generator=drawn.generator).double().numpy()[:, None]
    found = joined(agent.base, batch.obs.numpy(), (1 - t) * noise + t * batch.actions.numpy(), t)
    errors = (found - (batch.actions.numpy() - noise)) ** 2 * np.repeat(batch.valid.numpy(), 2, axis=1)
    assert agent.imitation_loss(batch)[0].item() == pytest.approx(errors.sum() / 160, rel=1e-6)


def test_diffusion_loss_weighs_each_valid_action():
    agent, batch = make_agent(policy="diffusion"), chunks()
    drawn = Drawn(agent.generator)
    noise, times = drawn.normal(40, 4), np.array(drawn.integers(STEPS, 40))
    bar = agent.process.alpha_bars.double().numpy()[times][:, None]
    noisy = torch.from_numpy(np.sqrt(bar) * batch.actions.numpy() + np.sqrt(1 - bar) * noise)
    found = agent.base(batch.obs, noisy, torch.from_numpy(times.astype(np.float64))).detach().numpy()
    errors = (found - noise) ** 2 * np.repeat(batch.valid.numpy(), 2, axis=1)
    assert agent.imitation_loss(batch)[0].item() == pytest.approx(errors.sum() / 160, rel=1e-6)


@both_bases
def test_the_base_policy_is_a_function_of_its_noise(policy: str):
    agent = make_agent(double=False, policy=policy)
    obs, before = np.ones((5, 3), np.float32), agent.generator.get_state()
    for agent.steers in (0, 1):
        assert np.array_equal(agent.act(obs, deterministic=True), agent.act(obs, deterministic=True))
    assert torch.equal(agent.generator.get_state(), before)
    assert not np.array_equal(agent.act(obs), agent.act(obs))


@pytest.mark.parametrize(("policy", "recipe"), [*itertools.product(["flow", "diffusion"], ["na", "sac"])])
def test_each_phase_changes_its_own_networks(policy: str, recipe: str):
    """Offline the base policy alone. Online all but the base policy, on each slice."""
    batch = make_batch(40) if recipe == "sac" else chunks()
    form = {"policy": policy, "recipe": recipe, "chunk": 1 if recipe == "sac" else H}
    agent = make_agent(double=False, batch_size=20, utd=2, **form)
    batch = Batch(*(None if part is None else part.float() for part in batch))
    for online, moving in ((False, {"base"}), (True, set(NETWORKS) - {"base"})):
        before = {name: [p.detach().clone() for p in getattr(agent, name).parameters()] for name in networks(agent)}
        agent.update(batch, online)
        for name, old in before.items():
            now = [*getattr(agent, name).parameters()]
            assert (name not in moving) == all(torch.equal(a, b) for a, b in zip(old, now, strict=True))
    critics = ["critic"] if recipe == "sac" else ["critic", "noise_critic"]
    assert [int(getattr(agent, f"{name}_optimizer").step_count) for name in critics] == [2] * len(critics)


def test_targets_follow_after_each_step():
    agent, batch = make_agent(batch_size=20, utd=2), chunks()
    assert_targets_follow_each_step(agent, 0.005, lambda: agent.update(batch, True))


@pytest.mark.parametrize("recipe", ["na", "sac"])
def test_a_steered_flow_takes_the_better_mode(recipe: str):
    """The data are at ±0.6, three quarters at -0.6. The reward is -(a - 0.6)². The flow stays as it was.

    A quarter of the noise, that beyond 0.67, leads to the better mode: a third of the box, of -1.1 nats.
    """
    agent = make_agent(
        double=False, action_dim=1, chunk=1, hidden=(32, 32), flow_hidden=(64, 64), batch_size=128, noise_scale=2.0,
        critic_lr=2e-3, actor_lr=2e-3, alpha_lr=1e-2, target_entropy=-1.0, recipe=recipe,
    )  # fmt: skip
    rng = torch.Generator().manual_seed(0)
    for _ in range(600):
        agent.update(two_modes(256, rng), False)
    obs = np.ones((2_000, 3), np.float32)
    base = agent.act(obs)  # in the warm-up
    assert 0.15 < (base > 0).mean() < 0.35
    before = [p.detach().clone() for p in agent.base.parameters()]
    for _ in range(400):
        if recipe == "sac":
            actions, stored_actions = map(torch.from_numpy, agent.explore(obs[:256]))
        else:
            actions = stored_actions = torch.from_numpy(agent.act(obs[:256]))
        ones = torch.ones(256, 3)
        agent.update(Batch(ones, stored_actions, -(actions[:, 0] - 0.6).square(), ones, torch.ones(256)), True)
    assert all(torch.equal(a, b) for a, b in zip(before, agent.base.parameters(), strict=True))
    agent.steers = 1
    assert (agent.act(obs) > 0).mean() > 0.9
    assert abs(agent.act(obs[:1], deterministic=True).item() - 0.6) < 0.2


@pytest.mark.parametrize(("retain", "first", "evaluations"), [("none", 62, 1), ("append", 2, 2), ("mix", 10, 1)])
def test_the_flow_itself_acts_until_the_first_update_and_is_evaluated_until_then(
    retain: str, first: int, evaluations: int, small: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    """With two environments: then the actor chooses the noise, and is evaluated. The buffer holds actions.

    The first update comes after the warm-up of 60 steps, at once, or after half of a batch of 16.
    """
    unsteered, act, sample = list[bool](), Rollout.act, TanhGaussian.sample
    chosen = list[bool]()

    def noted(rollout: Rollout, policy: Any) -> Any:
        before = len(chosen)
        actions = act(rollout, policy)
        unsteered.append(len(chosen) == before)
        return actions

    monkeypatch.setattr(Rollout, "act", noted)
    monkeypatch.setattr(TanhGaussian, "sample", lambda *given: (chosen.append(True), sample(*given))[1])
    evaluated = list[bool]()
    mode = TanhGaussian.mode.fget
    monkeypatch.setattr(TanhGaussian, "mode", property(lambda policy: (evaluated.append(True), mode(policy))[1]))
    args = small("dsrl", num_envs=2, retain=retain, eval_every=10_000, eval_episodes=1)
    module("dsrl").train(args)
    before, steps = first // 2, args.online_steps // 2
    assert unsteered == [True] * before + [False] * (steps - before)
    # The last one, and that after the switch.
    assert len(evaluated) == (50 + 1) * evaluations  # steps of an episode, and one that finds what acting reads
    assert stored(args.run_dir).actions.abs().max() <= 1.0


def test_an_untrained_actor_is_not_evaluated():
    """After imitation alone, evaluations sample the flow, with the same noise each time. Sampled actions are its."""
    agent, obs = make_agent(double=False), np.ones((500, 3), np.float32)
    first, again = (agent.eval_policy()(obs) for _ in range(2))
    assert np.array_equal(first, again)
    assert first.std(0).min() > 0.1
    agent.actor.net[-1].bias.data.fill_(9.0)  # of an actor that has not learned
    noise = torch.randn(500, 4, generator=torch.Generator().manual_seed(0))
    sampled = agent.act(obs, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        np.testing.assert_array_equal(sampled, agent.base_actions(torch.from_numpy(obs), noise))
    agent.steers = 1
    assert agent.eval_policy()(obs).std(0).max() < 1e-4


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        ("hopper-medium-v2", (1.5, (128,) * 3)), ("walker2d-medium-v2", (2.5, (2048,) * 3)),
        ("mujoco/walker2d/medium-v0", (2.5, (2048,) * 3)), ("halfcheetah-medium-v2", (1.5, (1024,) * 3)),
        ("antmaze-large-diverse-v2", (1.5, (2048,) * 3)),
    ],
)  # fmt: skip
def test_presets_are_the_authors(dataset: str, expected: tuple[float, Any], monkeypatch: pytest.MonkeyPatch):
    """Noise scale and widths, by the name of the dataset."""
    monkeypatch.setattr("offline.offline_to_online.read", lambda *_: read(str(PENDULUM)))
    args = with_presets(Args(dataset=dataset), PRESETS)
    assert (args.noise_scale, args.hidden, args.gamma, args.target_entropy) == (*expected, 0.99, 0.0)


@pytest.mark.parametrize(
    ("dataset", "scale", "gamma"),
    [
        ("scene-play", 0.4, 0.99), ("puzzle-3x3-play", 1.0, 0.99), ("puzzle-4x4-play", 1.0, 0.99),
        ("cube-double-play", 1.0, 0.99), ("cube-triple-play", 1.4, 0.99), ("cube-quadruple-play", 1.4, 0.99),
        ("antmaze-large-navigate", 0.8, 0.99), ("antmaze-giant-navigate", 1.2, 0.995),
        ("humanoidmaze-medium-navigate", 0.6, 0.995), ("humanoidmaze-large-navigate", 0.8, 0.995),
    ],
)  # fmt: skip
def test_presets_of_ogbench_are_li_and_levines(
    dataset: str, scale: float, gamma: float, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("offline.offline_to_online.read", lambda *_: read(str(PENDULUM)))
    args = with_presets(Args(dataset=f"{dataset}-singletask-task2-v0", env="scene-singletask-v0"), PRESETS)
    assert (args.noise_scale, args.gamma, args.target_entropy, args.hidden) == (scale, gamma, -0.5, (512,) * 4)


def test_the_first_temperature_is_1_and_log_std_is_bounded():
    agent = DSRL(with_presets(Args(dataset=str(PENDULUM), hidden=(16,)), PRESETS), 3, 2, torch.device("cpu"))
    assert agent.log_alpha.exp().item() == 1.0
    assert_log_std_is_clamped(agent.actor, -20.0, 2.0)


FORMS: dict[str, dict[str, Any]] = {  # of base policies
    "bc": {"policy": "flow", "hidden": (16, 16)}, "fql": {"hidden": (16, 16)},
    "fql chunk": {"hidden": (16, 16), "chunk": 2}, "ifql": {"hidden": (16, 16)}, "dsrl": {"chunk": 2},
    "pa_rl": {},
    "dsrl diffusion": {"policy": "diffusion", "chunk": 2},
    "bc diffusion": {"policy": "diffusion", "width": 256, "blocks": 3},
    "expo diffusion": {"policy": "diffusion", "width": 256, "blocks": 3},
}  # fmt: skip


@pytest.mark.parametrize(
    "base", [pytest.param(base, marks=[long] if base == "expo diffusion" else []) for base in FORMS]
)
def test_a_trained_base_policy_is_loaded_and_stays(base: str, small: Callable[..., Any], tmp_path: Path):
    """With the statistics of the observations that it learned from."""
    algo, is_flow, chunk = base.split()[0], "diffusion" not in base, FORMS[base].get("chunk", 1)
    trained, steps = tmp_path / algo, "flow_steps" if is_flow else "denoising_steps"
    module(algo).train(
        small(algo, offline_steps=30, online_steps=0, run_dir=trained, normalize_obs=True, **FORMS[base] | {steps: 3})
    )
    same_form = {"init_from": trained, "chunk": chunk, "normalize_obs": True, steps: 3}
    same_form |= {"policy": "flow" if is_flow else "diffusion"}
    args = small("dsrl", offline_steps=0, online_steps=150, **same_form)
    with pytest.MonkeyPatch.context() as patch:  # those of another dataset
        patch.setattr(Dataset, "obs_statistics", lambda _: (np.ones(3, np.float32), np.ones(3, np.float32)))
        module("dsrl").train(args)
    of_base, of_run = final_state(trained)["agent"], final_state(args.run_dir)["agent"]
    # EXPO acts by the average of its weights.
    name = {"bc": "actor", "dsrl": "base", "expo": "base_average", "pa_rl": "base"}.get(algo, "flow")
    assert same(of_base[name], of_run["base"])
    assert same(of_base["obs_normalizer"], of_run["obs_normalizer"])
    assert algo == "bc" or not same(of_base["critic"], of_run["critic"])  # BC has none
    flag = f"--{steps.replace('_', '-')}"
    for changed, message in (({"chunk": 3}, "do not fit"), ({steps: 4}, f"{flag} 3: give the same here")):
        other = small("dsrl", **same_form | {"run_dir": tmp_path / "other"} | changed)
        with pytest.raises(InputError, match=message):
            module("dsrl").train(other)
        assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("policy", ["gaussian", "flow", "diffusion"])
def test_a_policy_of_another_type_is_refused(policy: str, small: Callable[..., Any], tmp_path: Path):
    """Also a run of BC that is older than --policy and has a mean. The message names the flag; no folder is made."""
    trained, here = tmp_path / "bc", "diffusion" if policy == "flow" else "flow"
    module("bc").train(small("bc", policy=policy, offline_steps=2, online_steps=0, eval_episodes=1, run_dir=trained))
    args = small("dsrl", policy=here, init_from=trained, run_dir=tmp_path / "other")
    cure = "another --init-from" if policy == "gaussian" else "the same here"  # which DSRL does not have
    with pytest.raises(InputError, match=f"with --policy {policy}: give {cure}$"):
        module("dsrl").train(args)
    config = run_config(trained)
    for name in ("policy", "flow_steps", "denoising_steps"):
        del config["arguments"][name]
    (trained / "config.json").write_text(config_text(config))
    older = small("dsrl", policy=here, init_from=trained, flow_steps=10, denoising_steps=10, normalize_obs=True,
                  run_dir=tmp_path / "other")  # fmt: skip
    with pytest.raises(InputError, match="by bc: give --init-from a run of dsrl or an algorithm with --policy"):
        module("dsrl").train(older)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("algo", ["dsrl", "pa_rl"])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_base_policy_that_is_never_trained_is_told(
    algo: str, steps: int, small: Callable[..., Any], capsys: pytest.CaptureFixture[str]
):
    """Neither on the dataset nor in another run."""
    module(algo).train(small(algo, offline_steps=steps, online_steps=2, eval_episodes=0))
    assert ("the base policy is never trained: give --init-from" in capsys.readouterr().err) == (steps == 0)


def test_a_flow_is_refused_where_a_diffusion_is_asked_for(small: Callable[..., Any], tmp_path: Path):
    """FQL has neither --policy nor --denoising-steps."""
    trained = tmp_path / "fql"
    module("fql").train(small("fql", offline_steps=2, online_steps=0, eval_episodes=1, run_dir=trained))
    args = small("dsrl", policy="diffusion", init_from=trained, run_dir=tmp_path / "other")
    with pytest.raises(InputError, match=r"by fql: .* an algorithm with --policy or --denoising-steps$"):
        module("dsrl").train(args)
    assert not (tmp_path / "other").exists()


NEW_FORMS = [
    {"policy": "diffusion", "recipe": "sac"},  # both differences at once
    pytest.param({"policy": "diffusion"}, marks=long),
    pytest.param({"recipe": "sac"}, marks=long),
]


@pytest.mark.parametrize("form", [{"recipe": "sac"}, pytest.param({"policy": "diffusion"}, marks=long)])
def test_kills_change_nothing(form: dict[str, Any], tmp_path: Path):
    """Before the switch, in the warm-up and while the actor steers, in two environments."""
    arguments = form | {"num_envs": 2, "denoising_steps": 2, "offline_steps": 60, "online_steps": 240,
                        "warmup_steps": 60, "checkpoint_every": 20, "eval_episodes": 1}  # fmt: skip
    places = [("update", 30), ("online step", 15), ("online step", 31), ("update", 40), ("any", 2)]
    assert_kills_change_nothing("dsrl", arguments, places, tmp_path)


@pytest.mark.parametrize("form", NEW_FORMS)
def test_a_steered_policy_of_each_form_is_exported(form: dict[str, Any], small: Callable[..., Any]):
    """As a function of the observation, which equals the agent's mode."""
    pytest.importorskip("onnxruntime")
    folder = module("dsrl").train(small("dsrl", total_steps=200, denoising_steps=3, eval_episodes=1, **form)).folder
    path, obs = export.main(export.Args(str(folder))), np.random.default_rng(1).normal(size=(20, 3))
    policy = load_policy(str(folder), make("Pendulum-v1"), 0, deterministic=True)
    np.testing.assert_allclose(run(path, obs.astype(np.float32)), 2 * policy(obs.astype(np.float32)), atol=2e-5)


@pytest.mark.usefixtures("interpreted", "checked_once")
@pytest.mark.parametrize("form", NEW_FORMS)
def test_updates_of_each_form_are_recorded(
    form: dict[str, Any], small: Callable[..., Any], capsys: pytest.CaptureFixture[str]
):
    module("dsrl").train(small("dsrl", compile=True, total_steps=200, eval_episodes=1, denoising_steps=3, **form))
    said = capsys.readouterr().err
    assert said.count("compiled in ") >= 2
    assert "eager" not in said
