"""EXPO's update: who learns when and from what, known answers, and the settings of the paper."""

import copy
import math

import numpy as np
import pytest
import torch
from conftest import PENDULUM, same
from expo_agents import E, float32_agent, float32_batch, make_agent
from formulas import assert_targets_follow_each_step, make_batch, parameters

from algos.expo import PRESETS, SIZES, Args
from common.arguments import Unset
from common.checkpoint import restore, state_of
from common.networks import EnsembleLinear, LayerNorm
from common.replay_buffer import Batch, ReplayBuffer
from offline.dataset import read
from offline.offline_to_online import with_presets


class TestUpdate:
    def test_critics_step_on_each_slice_the_others_on_the_last(self) -> None:
        agent, batch = float32_agent(batch_size=16), float32_batch(64)
        with torch.no_grad():  # so far from the base policy that a step towards it shows
            for parameter in agent.base_average.parameters():
                parameter.add_(1.0)
        seen: list[tuple[str, torch.Tensor]] = []
        for name in ("critic_loss", "base_loss", "edit_loss"):
            loss = getattr(agent, name)
            setattr(agent, name, lambda part, *rest, n=name, f=loss: seen.append((n, part.obs)) or f(part, *rest))
        before = {name: value.clone() for name, value in parameters(agent)}
        agent.update(batch)
        assert [name for name, _ in seen] == ["critic_loss"] * 4 + ["base_loss", "edit_loss"]
        assert torch.equal(torch.cat([obs for _, obs in seen[:4]]), batch.obs)
        assert all(torch.equal(obs, batch.obs[48:]) for _, obs in seen[3:])
        steps = [int(getattr(agent, f"{n}_optimizer").step_count) for n in ("critic", "base", "edit", "alpha")]
        assert steps == [4, 1, 1, 1]
        for name, value in parameters(agent):
            if name.startswith("base_average."):
                learned = dict(parameters(agent))[name.replace("_average", "")]
                torch.testing.assert_close(value, before[name] + 0.001 * (learned - before[name]), rtol=0, atol=1e-6)

    def test_each_slice_has_its_own_candidates_and_fresh_targets(self) -> None:
        """Base samples and edits of its next_obs; the choice among them falls after the step of the slice before."""
        agent, batch = float32_agent(batch_size=16, tau=0.5, critic_lr=1e-2), float32_batch(64)
        agent.sample = lambda base, obs, count, generator: obs[:, :2].expand(count, -1, -1)
        agent.edit_scale = 1e-3
        seen, best, target = (
            [],
            agent.select_action,
            [parameter.clone() for parameter in agent.target_critic.parameters()],
        )

        def chosen(obs: torch.Tensor, candidates: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
            seen.append((obs, candidates, [parameter.clone() for parameter in agent.target_critic.parameters()]))
            return best(obs, candidates, generator)

        agent.select_action = chosen
        agent.update(batch)
        assert [len(obs) for obs, _, _ in seen] == [16] * 4
        for part, (obs, candidates, now) in zip(batch.next_obs.split(16), seen, strict=True):
            assert torch.equal(obs, part)
            torch.testing.assert_close(candidates, part[:, :2].expand(5, -1, -1), rtol=0, atol=1e-3)
            assert same(now, target) is (obs is seen[0][0])

    def test_target_critics_follow_after_each_slice(self) -> None:
        agent = make_agent(batch_size=16, tau=0.1)
        agent.candidates = lambda *_: torch.zeros(5, 64, 2).double()
        assert_targets_follow_each_step(agent, 0.1, lambda: agent.update(make_batch(64)))

    def test_candidates_in_one_batch_are_those_of_each_slice(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """With the same noise: it is only drawn in another order."""
        agent, obs = make_agent(), make_batch(12).next_obs
        noise = {
            True: torch.randn(agent.args.denoising_steps + 1, 3, 12, 2).double(),
            False: torch.randn(1, 2, 12, 2).double(),
        }

        def sampled(rows: slice) -> torch.Tensor:
            calls = {True: iter(noise[True]), False: iter(noise[False])}
            agent.normal = lambda *shape, generator: next(calls[shape[0] == 3])[:, rows]
            monkeypatch.setattr("common.diffusion.normal_like", lambda x, generator: next(calls[True])[:, rows])
            return agent.sample(agent.base, obs[rows], 3, agent.generator)

        together = sampled(slice(None))
        apart = torch.cat([sampled(slice(4 * i, 4 * i + 4)) for i in range(3)], dim=1)
        torch.testing.assert_close(together, apart, rtol=1e-12, atol=1e-12)

    def test_the_base_policys_weights_decay_and_no_others(self) -> None:
        """AdamW: without a gradient a weight shrinks by lr · decay."""
        agent = float32_agent(weight_decay=0.1, actor_lr=1e-2)
        for optimizer, shrunk in ((agent.base_optimizer, 1 - 1e-3), (agent.edit_optimizer, 1.0)):
            parameters = optimizer.param_groups[0]["params"]
            before = [parameter.detach().clone() for parameter in parameters]
            optimizer.minimize(sum((0.0 * parameter).sum() for parameter in parameters))
            for parameter, old in zip(parameters, before, strict=True):
                torch.testing.assert_close(parameter.detach(), shrunk * old)

    def test_start(self) -> None:
        """α at 1; layers as Glorot's; every hidden layer of the critics normalised, none of the edits'."""
        agent = float32_agent(hidden=(256, 256), width=256)
        assert agent.log_alpha.item() == 0
        for layer in (layer for network in (agent.critic, agent.edit, agent.base) for layer in network.modules()):
            if isinstance(layer, torch.nn.Linear | EnsembleLinear):
                bound = math.sqrt(6 / sum(layer.weight.shape[-2:]))
                assert 0.8 * bound < layer.weight.abs().max() <= bound
                assert not layer.bias.any()
        assert [sum(isinstance(layer, LayerNorm) for layer in net.net) for net in (agent.critic, agent.edit)] == [2, 0]

    def test_pre_training_moves_the_base_policy_alone(self) -> None:
        agent, batch = float32_agent(), float32_batch()
        before = copy.deepcopy(state_of(agent))
        agent.imitate(batch)
        after = state_of(agent)
        moved = {name for name in after if not same(before[name], after[name])}
        assert moved == {"base", "base_average", "base_optimizer", "generator"}

    def test_without_edits_no_edit_is_learned(self) -> None:
        agent = float32_agent(edits=0)
        before = copy.deepcopy(state_of(agent))
        metrics = agent.update(float32_batch(64))
        assert same(before["edit"], state_of(agent)["edit"])
        assert same(before["log_alpha"], state_of(agent)["log_alpha"])
        assert "losses/edit" not in metrics

    def test_alpha_stays_finite_if_the_target_is_out_of_reach(self) -> None:
        """β = 0.05: its edits have at most log 0.1 of entropy a dimension, the target is -0.5. α would overflow."""
        agent, batch = float32_agent(edit_scale=0.05, alpha_lr=1.0), float32_batch(64)
        for _ in range(60):
            metrics = agent.update(batch)
        assert agent.log_alpha.item() == metrics["charts/log_alpha"].item() == 20.0
        assert all(torch.isfinite(value).all() for value in metrics.values())
        assert metrics["losses/entropy"].mean() < 2 * math.log(2 * 0.05) + 0.1 < 2 * -0.5

    def test_alpha_falls_as_far_as_it_takes(self) -> None:
        agent = float32_agent(edit_scale=0.7)
        agent.log_alpha.data.fill_(-30.0)
        agent.update(float32_batch(64))
        assert agent.log_alpha < -29

    def test_learning_rates_fall_as_cosines_of_their_own_updates(self) -> None:
        agent = float32_agent(offline_steps=100, decay_updates=1_000, actor_lr=1e-3)
        for step, base, edit in ((-100, 1.0, 1.0), (0, 0.975528, 1.0), (400, 0.5, 0.654508), (2_000, 0.0, 0.0)):
            agent.decay(step)
            assert agent.base_optimizer.param_groups[0]["lr"] == pytest.approx(1e-3 * base, abs=1e-9)
            assert agent.edit_optimizer.param_groups[0]["lr"] == pytest.approx(1e-3 * edit, abs=1e-9)

    def test_critics_reach_the_values_of_a_known_mdp(self) -> None:
        """That of test_off_policy: two states in turn, reward 1 in the first, and one that ends with 5; γ = 0.5."""
        agent = float32_agent(gamma=0.5, tau=0.05, critic_lr=3e-3)
        buffer, rng, states = ReplayBuffer(600, 3, 2), np.random.default_rng(0), np.eye(3)
        for _ in range(200):
            buffer.add(states, rng.uniform(-1, 1, (3, 2)), [1.0, 0.0, 5.0], states[[1, 0, 0]], [0, 0, 1])
        for _ in range(150):
            agent.update(buffer.sample(256, agent.generator))
        batch = buffer.sample(300, agent.generator)
        expected = batch.obs @ torch.tensor([4 / 3, 2 / 3, 5.0])
        torch.testing.assert_close(agent.critic(batch.obs, batch.actions), expected.expand(E, -1), rtol=0, atol=0.15)

    def test_edits_go_where_the_critics_see_more(self) -> None:
        """r = a₁ in a bandit: edits learn to add β to the first dimension of every action."""
        agent = float32_agent(actor_lr=3e-3, alpha_lr=1e-2, critic_lr=3e-3, adjust_target_entropy=True)
        rng = torch.Generator().manual_seed(0)
        for _ in range(300):
            actions = 2 * torch.rand(256, 2, generator=rng) - 1
            batch = Batch(torch.zeros(256, 3), actions, actions[:, 0], torch.zeros(256, 3), torch.ones(256))
            agent.update(batch)
        edits = agent.edit(torch.zeros(256, 3), actions, agent.generator).mode
        assert edits[:, 0].mean() > 0.5
        assert edits[:, 1].abs().mean() < 0.3

    def test_a_restored_agent_continues_bit_for_bit(self) -> None:
        first, second = (float32_agent(dropout=0.1, seed=seed) for seed in (1, 2))
        batch = float32_batch(64)
        first.update(batch)
        first.act(batch.obs.numpy())
        restore(second, copy.deepcopy(state_of(first)))  # as from a file
        for agent in (first, second):
            agent.update(batch)
            agent.act(batch.obs.numpy())
        assert same(state_of(first), state_of(second))


@pytest.mark.parametrize("domain", PRESETS)
@pytest.mark.parametrize("size", SIZES)
def test_presets_fill_what_is_left_open(domain: str, size: str) -> None:
    """Nothing stays at None but what may: the environment's, the device's, and where to begin."""
    assert PRESETS[domain].keys() == PRESETS["locomotion"].keys()
    assert SIZES[size].keys() == SIZES["paper"].keys()
    args = Args(dataset="none.hdf5", online_steps=1, **PRESETS[domain], **SIZES[size])
    assert {name for name, value in vars(args).items() if value is None} == {
        "run_name",
        "run_dir",
        "init_from",
        "horizon",
        "preset",
        "time_limit",
        "action_repeat",
    }
    assert {name for name, value in vars(args).items() if isinstance(value, Unset)} == {"overlap", "compile"}


@pytest.mark.parametrize(
    ("domain", "expected"),
    [
        ("antmaze", (500_000, 0.05, 1, 0, 5000, -1)),
        ("adroit-binary", (0, 0.7, 2, 0.1, 0, 0)),
        ("adroit", (0, 0.7, 2, 0.1, 0, 0)),  # from here on ours
        ("maze2d", (0, 0.2, 1, 0, 5000, -1)),
        ("locomotion", (0, 0.05, 2, 0, 5000, 0)),
    ],
)
def test_presets_are_the_authors(domain: str, expected: tuple[float, ...]) -> None:
    found = PRESETS[domain]
    assert found["gamma"] == 0.99
    names = ("offline_steps", "edit_scale", "target_critics", "dropout", "random_steps", "reward_shift")
    assert tuple(found[name] for name in names) == expected


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [  # β, γ, and one critic for a ρ of 0: experiments/reproduce.py of QAM, FEDIT
        ("puzzle-3x3-play", (0.2, 0.99, 2)),
        ("scene-play", (0.2, 0.99, 2)),
        ("cube-double-play", (0.2, 0.99, 2)),
        ("antmaze-large-navigate", (0.2, 0.99, 2)),
        ("humanoidmaze-medium-navigate", (0.5, 0.995, 1)),
        ("cube-triple-play", (0.3, 0.99, 2)),
        ("cube-quadruple-play", (0.4, 0.99, 2)),
        ("puzzle-4x4-play", (0.8, 0.99, 2)),
        ("antmaze-giant-navigate", (0.3, 0.995, 2)),
        ("humanoidmaze-large-navigate", (0.1, 0.995, 1)),
    ],
)
def test_presets_of_ogbench_are_fedits(
    dataset: str, expected: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    pendulum = read(str(PENDULUM), False, None)
    monkeypatch.setattr("offline.offline_to_online.read", lambda *_: pendulum)  # the names alone choose
    args = with_presets(Args(dataset=f"{dataset}-singletask-task1-v0", **SIZES["wide"]), PRESETS)
    assert (args.edit_scale, args.gamma, args.target_critics) == expected
    assert args.adjust_target_entropy
    assert (args.offline_steps, args.reward_shift, args.random_steps) == (1_000_000, 0, 0)
    assert (args.hidden, args.critics, args.batch_size, args.utd) == ((512,) * 4, 10, 256, 1)


def test_defaults_and_size_are_the_papers() -> None:
    args = Args(dataset="none.hdf5", **SIZES["paper"], gamma=PRESETS["locomotion"]["gamma"])
    assert (args.size, args.policy, args.utd, args.batch_size) == ("paper", "diffusion", 20, 256)
    assert (args.hidden, args.width, args.blocks, args.critics) == ((256, 256, 256), 256, 3, 10)
    assert (args.denoising_steps, args.base_samples, args.edits) == (10, 8, 8)
    assert (args.actor_lr, args.critic_lr, args.alpha_lr) == (3e-4, 3e-4, 3e-4)
    assert (args.decay_updates, args.weight_decay) == (3_000_000, 1e-4)
    assert (args.gamma, args.tau, args.base_tau) == (0.99, 5e-3, 1e-3)
    assert (args.retain, args.offline_ratio) == ("mix", 0.5)
    assert not PRESETS["adroit-binary"]["adjust_target_entropy"]
    assert (args.base_candidates, args.best_backup, args.soft_selection) == (True, True, 0)
    assert float32_agent().target_entropy == -1  # of two actions
    base = float32_agent(**SIZES["paper"]).base
    assert [tuple(layer.weight.shape) for layer in base.of_time if isinstance(layer, torch.nn.Linear)] == [
        (256, 128),
        (256, 256),
    ]
    assert [tuple(block.up.weight.shape) for block in base.blocks] == 3 * [(1024, 256)]
    assert base.frequencies.std().item() == pytest.approx(0.2, rel=0.5)  # of 64
