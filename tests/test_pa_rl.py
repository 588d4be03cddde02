"""PA-RL against formulas written a second time in float64, known optima, and what each phase may change."""

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import COMMON, PENDULUM, final_state, module, same
from formulas import Array, Drawn, assert_targets_follow_each_step, forward, joined, layers, log_sum_exp, make_batch
from test_fql import two_modes

from algos.pa_rl import PARL, PRESETS, Args
from common.errors import InputError
from common.replay_buffer import Batch
from offline.offline_to_online import with_presets

SMALL = COMMON | {
    "time_limit": 50,
    "batch_size": 16, "buffer_size": 10_000, "flow_hidden": (16, 16), "flow_steps": 3, "critics": 3, "bins": 11,
    "samples": 4, "candidates": 2, "improve_steps": 1, "cql_actions": 2, "base_steps": 40,
    "calibrated": False,  # so that online transitions are sampled before their episode ends
}  # fmt: skip
E, K, TOP, BINS, N = 3, 6, 4, 11, 2  # critics, samples, candidates, bins, uniform actions


def make_agent(action_dim: int = 2, **changed: Any) -> PARL:
    given = {
        "dataset": str(PENDULUM), "hidden": (16, 8), "flow_hidden": (16, 8), "flow_steps": 3, "critics": E,
        "bins": BINS, "samples": K, "candidates": TOP, "cql_actions": N, "cql_weight": 0.3, "improve_steps": 3,
    }  # fmt: skip
    agent = PARL(with_presets(Args(**given | changed), PRESETS), 3, action_dim, torch.device("cpu"))
    noise = torch.Generator().manual_seed(7)
    for network in (agent.critic, agent.target_critic, agent.state_value):
        for parameter in network.parameters():  # no scale at 1, no shift at 0, targets unlike the critics
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=noise)
    agent.support.set_range(-4.0, 6.0)
    return agent


def batch_of(size: int = 20) -> Batch:
    batch = Batch(*(None if part is None else part.float() for part in make_batch(size)))
    return batch._replace(returns_to_go=torch.linspace(-2.0, 3.0, size))


CENTRES = -4.0 + 10.0 / BINS * (np.arange(BINS) + 0.5)


def histogram(critic: Any, obs: Array, actions: Array, member: int) -> Array:
    logits = forward(np.concatenate([obs, actions], -1), layers(critic, member))
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    return shares / shares.sum(-1, keepdims=True)


def values(critic: Any, obs: Array, actions: Array, members: Any = range(E)) -> Array:
    return np.stack([histogram(critic, obs, actions, member) @ CENTRES for member in members])


def flow_actions(agent: PARL, obs: Array, noise: Array) -> Array:
    x = noise
    for k in range(3):
        x = x + joined(agent.base, obs, x, np.full((len(x), 1), k / 3)) / 3
    return np.clip(x, -1, 1)


def numbers(batch: Batch) -> list[Array]:
    return [part.double().numpy() for part in batch[:6]]


def test_the_best_samples_are_improved_by_the_gradient_of_the_mean_value():
    """Of all critics, by central differences; each candidate is the best point of its path."""
    agent, obs = make_agent(improve_lr=0.5), batch_of().obs
    noise = Drawn(agent.generator).normal(K, 20, 2)
    best, best_values = agent.improve(obs, agent.generator)
    states = obs.double().numpy()

    def value(actions: Array) -> Array:
        return values(agent.critic, states, actions).mean(0)

    drawn = np.stack([flow_actions(agent, states, each) for each in noise])
    order = np.argsort([-value(each) for each in drawn], axis=0)[:TOP]
    for rank in range(TOP):
        actions = drawn[order[rank], np.arange(20)]
        points = [actions]
        for _ in range(3):
            steps = np.eye(2) * 1e-5
            gradient = np.stack([(value(actions + step) - value(actions - step)) / 2e-5 for step in steps], -1)
            actions = np.clip(actions + 0.5 * gradient, -1, 1)
            points.append(actions)
        scores = np.stack([value(point) for point in points])
        np.testing.assert_allclose(best_values[rank].numpy(), scores.max(0), rtol=1e-4, atol=1e-4)
        expected = np.stack(points)[scores.argmax(0), np.arange(20)]
        np.testing.assert_allclose(best[rank].numpy(), expected, atol=1e-3)
    assert not best.requires_grad
    assert all(parameter.requires_grad for parameter in agent.critic.parameters())


def test_steps_that_go_too_far_are_not_taken(monkeypatch: pytest.MonkeyPatch):
    """Q = -(a - 0.3)². Steps of 2.1 times the gradient pass the optimum, those of 0.25 halve the distance."""
    agent, obs = make_agent(action_dim=1, improve_lr=2.1), torch.zeros(50, 3)
    monkeypatch.setattr(agent, "value", lambda obs, actions: -(actions[..., 0] - 0.3).square())
    state = agent.generator.get_state()
    drawn = agent.sample(obs, K, agent.generator)
    agent.generator.set_state(state)
    best, best_values = agent.improve(obs, agent.generator)
    distance = (drawn[..., 0] - 0.3).abs().sort(dim=0).values[:TOP]
    assert ((best[..., 0] - 0.3).abs() <= distance + 1e-6).all()
    torch.testing.assert_close(best_values, -(best[..., 0] - 0.3).square())
    agent.generator.set_state(state)
    agent.args.improve_lr = 0.25
    best, _ = agent.improve(obs, agent.generator)
    torch.testing.assert_close((best[..., 0] - 0.3).abs(), distance / 8, atol=1e-5, rtol=1e-4)


def test_the_data_action_takes_the_place_of_the_worst_candidate():
    agent, batch = make_agent(improve_steps=0), batch_of()
    state = agent.generator.get_state()
    without, _ = agent.improve(batch.obs, agent.generator)
    agent.generator.set_state(state)
    with_data, found = agent.improve(batch.obs, agent.generator, batch.actions)
    assert torch.equal(with_data[:-1], without[:-1])
    assert torch.equal(with_data[-1], batch.actions)
    torch.testing.assert_close(found[-1], agent.value(batch.obs, batch.actions[None])[0].detach())


def label(value: float) -> Array:
    edges = np.linspace(-4.0, 6.0, BINS + 1)
    below = [0.5 * (1 + math.erf((edge - np.clip(value, -4, 6)) / (0.75 * 10 / BINS) / math.sqrt(2))) for edge in edges]
    return np.diff(below) / (below[-1] - below[0])


def test_cal_ql_loss_equals_an_independent_formula(monkeypatch: pytest.MonkeyPatch):
    """With the operator replaced: OPT(s) is half of the first two observations, within the box."""
    agent, batch = make_agent(gamma=0.9), batch_of()
    monkeypatch.setattr(agent, "improve", lambda obs, rng: ((0.5 * obs[None, :, :2]).tanh(), torch.ones(1, len(obs))))
    obs, actions, rewards, next_obs, terminations, to_go = numbers(batch)
    drawn = Drawn(agent.generator)
    of_target, uniform = drawn.integers(E, 2), drawn.uniform(N, 20, 2)
    of_term = drawn.integers(E, 2)
    following = np.tanh(0.5 * next_obs[:, :2])
    target = rewards + 0.9 * (1 - terminations) * values(agent.target_critic, next_obs, following, of_target).min(0)
    labels = np.stack([label(value) for value in target])
    entropies = [-(labels * np.log(histogram(agent.critic, obs, actions, i))).sum(-1).mean() for i in range(E)]
    terms = []
    for i in of_term:

        def of(chosen: Array, i: int = i) -> Array:
            return values(agent.critic, obs, chosen, [i])[0]

        data, policy = of(actions), [np.maximum(of(np.tanh(0.5 * obs[:, :2])), to_go), np.maximum(of(following), to_go)]
        entries = [*(of(each) for each in uniform), *(policy * N), data]
        assert len(entries) == 3 * N + 1
        terms.append(np.mean([log_sum_exp([entry[row] for entry in entries]) - data[row] for row in range(20)]))
    loss, metrics = agent.cal_ql_loss(batch)
    assert loss.item() == pytest.approx(np.mean(entropies) + 0.3 * np.mean(terms), rel=1e-5)
    assert metrics["charts/clamped"].mean().item() == ((target < -4) | (target > 6)).mean()
    gradients = torch.autograd.grad(loss, [*agent.base.parameters()], allow_unused=True)
    assert all(gradient is None for gradient in gradients)


def test_iql_loss_equals_an_independent_formula(monkeypatch: pytest.MonkeyPatch):
    """No action is chosen: the operator is not asked."""
    agent, batch = make_agent(gamma=0.9, critic_loss="iql", expectile=0.8), batch_of()
    monkeypatch.setattr(agent, "improve", None)
    agent.state_value[-1].bias.data += 1.0  # so that it is above some of the values
    state = agent.generator.get_state()
    obs, actions, rewards, next_obs, terminations, _ = numbers(batch)

    def value(states: Array) -> Array:
        return forward(states, layers(SimpleNamespace(net=agent.state_value)))[:, 0]

    labels = np.stack([label(each) for each in rewards + 0.9 * (1 - terminations) * value(next_obs)])
    entropies = [-(labels * np.log(histogram(agent.critic, obs, actions, i))).sum(-1).mean() for i in range(E)]
    above = np.maximum(found := values(agent.target_critic, obs, actions, range(E)).min(0) - value(obs), 0)
    regression = np.mean(0.8 * above**2 + 0.2 * (found - above) ** 2)
    assert (above == found).any()
    assert (above != found).any()
    loss, metrics = agent.iql_loss(batch)
    assert loss.item() == pytest.approx(np.mean(entropies) + regression, rel=1e-5)
    assert metrics["losses/value"].item() == pytest.approx(regression, rel=1e-5)
    of_critics = torch.autograd.grad(loss, agent.critic.parameters(), retain_graph=True)
    assert all(gradient.abs().sum() > 0 for gradient in of_critics)
    gradients = torch.autograd.grad(loss, agent.state_value.parameters())
    agent.generator.set_state(state)
    final, _ = agent.iql_loss(batch._replace(terminations=torch.ones(20)))  # whose label has no V(s')
    alone = torch.autograd.grad(final, agent.state_value.parameters())
    assert all(torch.equal(a, b) and a.abs().sum() > 0 for a, b in zip(gradients, alone, strict=True))


def test_actions_are_distilled_with_the_probability_of_their_values(monkeypatch: pytest.MonkeyPatch):
    """exp Q of candidates of values 0, 1 and 2.5, within three standard deviations in 20,000 states."""
    agent, count = make_agent(), 20_000
    levels, taught = torch.tensor([0.0, 1.0, 2.5]), list[torch.Tensor]()
    candidates = levels.view(3, 1, 1).expand(3, count, 2)
    monkeypatch.setattr(agent, "improve", lambda *_: (candidates, levels[:, None].expand(3, count)))

    def noted(batch: Batch) -> Any:
        taught.append(batch.actions)
        return torch.zeros(()), {}

    monkeypatch.setattr(agent, "imitation_loss", noted)
    _, metrics = agent.distill_loss(batch_of(count))
    shares = levels.exp() / levels.exp().sum()
    for level, share in zip(levels, shares, strict=True):
        found = (taught[0] == level).all(1).float().mean()
        assert abs(found - share) < 3 * math.sqrt(share * (1 - share) / count)
    expected = -(shares * shares.log()).sum()
    torch.testing.assert_close(metrics["losses/choice_entropy"].mean(), expected)


@pytest.mark.parametrize(
    "form", [{"policy": "flow"}, {"policy": "diffusion"}, {"critic_loss": "iql"}], ids=["flow", "diffusion", "iql"]
)
def test_each_phase_changes_its_own_networks(form: dict[str, str]):
    agent, batch = make_agent(batch_size=10, **form), batch_of()
    networks = ("base", "critic", "target_critic", "support", *(["state_value"] if "critic_loss" in form else []))
    learning = {*networks} - {"base", "support"}
    for online, imitate, moving in (
        (False, True, {"base"}), (False, False, learning), (True, False, {"base", *learning}),
    ):  # fmt: skip
        before = {name: {k: v.clone() for k, v in getattr(agent, name).state_dict().items()} for name in networks}
        agent.update(batch, online, imitate)
        for name in networks:
            assert (name not in moving) == same(before[name], getattr(agent, name).state_dict())
    assert [int(agent.critic_optimizer.step_count), int(agent.base_optimizer.step_count)] == [4, 2]


def test_targets_follow_after_each_step():
    torch.set_default_dtype(torch.float64)
    try:
        agent, batch = make_agent(batch_size=10), make_batch(20)
        batch = batch._replace(returns_to_go=torch.linspace(-2.0, 3.0, 20))
        assert_targets_follow_each_step(agent, 0.005, lambda: agent.update(batch, True, False))
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("critic_loss", ["cal-ql", "iql"])
def test_a_base_policy_with_two_modes_comes_to_act_in_the_better_one(critic_loss: str):
    """The data are at ±0.6, three quarters at -0.6, and the reward is -(a - 0.6)². The base policy has both modes.

    With the critics, the better one is chosen, although the base policy stays as it was. Distilled, it moves there.
    """
    agent = make_agent(
        action_dim=1, hidden=(32, 32), flow_hidden=(64, 64), critics=2, bins=51, samples=16, candidates=2,
        cql_weight=0.005, critic_lr=2e-3, actor_lr=2e-3, distill_lr=1e-3, improve_steps=1, critic_loss=critic_loss,
    )  # fmt: skip
    agent.support.set_range(-2.0, 0.5)
    rng, obs = torch.Generator().manual_seed(0), np.ones((1_000, 3), np.float32)

    def learn(steps: int, size: int, online: bool, imitate: bool) -> float:
        """Return the share of positive actions."""
        agent.begin(imitate)
        for _ in range(steps):
            batch = two_modes(size, rng)
            agent.update(batch._replace(returns_to_go=batch.rewards), online, imitate)
        return float((agent.act(obs) > 0).mean())

    share = learn(600, 256, online=False, imitate=True)
    assert 0.15 < share < 0.35
    before = [parameter.detach().clone() for parameter in agent.base.parameters()]
    assert learn(250, 64, online=False, imitate=False) > 0.9
    assert all(torch.equal(a, b) for a, b in zip(before, agent.base.parameters(), strict=True))
    learn(150, 64, online=True, imitate=False)
    assert learn(0, 0, online=False, imitate=True) > share + 0.2  # by the base policy alone


def test_with_the_loss_of_iql_values_are_those_of_the_data():
    """A chain s → s' → end. V(s') is the 0.5-expectile, so the mean, of rewards 0 and 1, and Q(s, a) is γ V(s')."""
    agent = make_agent(
        critic_loss="iql", expectile=0.5, gamma=0.8, tau=0.05, critic_lr=3e-3, hidden=(32, 32), bins=51, critics=2
    )
    agent.support.set_range(-0.5, 1.5)
    rng, first, second = torch.Generator().manual_seed(0), torch.tensor([1.0, 0, 0]), torch.tensor([0, 1.0, 0])
    is_last = torch.arange(128) % 2
    obs, next_obs = (torch.where(is_last[:, None] == flag, second, first) for flag in (1, 0))
    for _ in range(600):
        rewards = is_last * torch.randint(2, (128,), generator=rng)
        actions = torch.rand((128, 2), generator=rng) * 2 - 1
        agent.update(Batch(obs, actions, rewards.float(), next_obs, is_last.float()), online=False)
    found = agent.state_value(torch.stack([first, second])).flatten()
    torch.testing.assert_close(found, torch.tensor([0.4, 0.5]), atol=0.05, rtol=0)
    on_first = agent.value(first.expand(128, 3), actions[None])
    torch.testing.assert_close(on_first, torch.full_like(on_first, 0.4), atol=0.1, rtol=0)


@pytest.mark.usefixtures("interpreted", "checked_once")
def test_updates_with_the_loss_of_iql_are_recorded_and_need_no_finished_episode(
    small: Callable[..., Any], capsys: pytest.CaptureFixture[str]
):
    form = {"critic_loss": "iql", "calibrated": True, "flow_steps": 1, "base_steps": 1, "improve_steps": 0}
    module("pa_rl").train(small("pa_rl", compile=True, total_steps=40, eval_episodes=0, **form))
    said = capsys.readouterr().err
    assert said.count("compiled in ") >= 2
    assert "eager" not in said


def test_base_steps_are_half_of_the_offline_steps_or_none_with_a_base_policy(tmp_path: Path):
    given = {"dataset": str(PENDULUM), "offline_steps": 100}
    assert Args(**given).last_base_step == -50
    assert Args(**given, base_steps=10).last_base_step == -90
    assert Args(**given, base_steps=200).last_base_step == 0
    assert Args(**given, init_from=tmp_path).last_base_step == -100


def test_all_samples_are_candidates_if_there_are_few():
    agent, obs = make_agent(samples=2), batch_of().obs
    assert len(agent.improve(obs, agent.generator)[0]) == 2


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"samples": 1}, "must be 2 or more"),
        ({"candidates": 1}, "must be 2 or more"),
        ({"bins": 1}, "must be 2 or more"),
        ({"base_steps": 0}, "the base policy is never trained"),
    ],
)
def test_what_cannot_choose_or_learn_is_refused(changed: dict[str, int], message: str):
    """The data's action takes the place of one candidate, and one bin has no values to tell apart."""
    with pytest.raises(InputError, match=message):
        Args(dataset=str(PENDULUM), **changed)


FORMS: dict[str, dict[str, Any]] = {
    "bc": {"policy": "flow", "flow_steps": 3, "normalize_obs": False},
    "fql": {"hidden": (16, 16), "flow_steps": 3}, "ifql": {"hidden": (16, 16), "flow_steps": 3},
    "dsrl": {}, "expo": {"width": 256, "blocks": 3, "denoising_steps": 3},
}  # fmt: skip


@pytest.mark.parametrize("algo", FORMS)
def test_a_trained_base_policy_is_loaded(algo: str, small: Callable[..., Any], tmp_path: Path):
    """And frozen while the critics learn. Another form of it is refused, before there is a folder."""
    trained = tmp_path / algo
    module(algo).train(small(algo, offline_steps=30, online_steps=0, run_dir=trained, **FORMS[algo]))
    form: dict[str, Any] = {"policy": "diffusion", "denoising_steps": 3} if algo == "expo" else {}
    form |= {"calibrated": True, "base_steps": None}
    args = small("pa_rl", init_from=trained, offline_steps=20, online_steps=0, **form)
    module("pa_rl").train(args)
    name = {"bc": "actor", "dsrl": "base", "expo": "base_average"}.get(algo, "flow")
    assert same(final_state(trained)["agent"][name], final_state(args.run_dir)["agent"]["base"])
    wrong = {"denoising_steps": 4} if algo == "expo" else {"flow_steps": 4}
    other = small("pa_rl", init_from=trained, offline_steps=20, run_dir=tmp_path / "no", **form | wrong)
    with pytest.raises(InputError, match="give the same here"):
        module("pa_rl").train(other)
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("algo", "policy", "message"), [("bc", "gaussian", "with --policy gaussian"), ("expo", "flow", "do not fit")]
)
def test_a_base_policy_of_another_kind_is_refused(
    algo: str, policy: str, message: str, small: Callable[..., Any], tmp_path: Path
):
    """A mean that cannot be sampled, and a flow with another network."""
    trained = tmp_path / algo
    module(algo).train(small(algo, policy=policy, offline_steps=2, online_steps=0, eval_episodes=1, run_dir=trained))
    other = small("pa_rl", init_from=trained, run_dir=tmp_path / "no", normalize_obs=algo == "bc")
    with pytest.raises(InputError, match=f"{message}.*: give another --init-from"):
        module("pa_rl").train(other)
    assert not (tmp_path / "no").exists()
