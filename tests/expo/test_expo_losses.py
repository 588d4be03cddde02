"""EXPO's choice among candidates and its losses, against brute force and formulas written a second time."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from expo_agents import E, S, drawn_subset, edited, float32_agent, float32_batch, make_agent
from formulas import Drawn, make_batch, parameters, values

from common.checkpoint import restore, state_of

NO_BEST_BACKUP: list[dict[str, Any]] = [{}, {"edits": 0}, {"base_candidates": False}]


class TestSelection:
    def test_best_is_that_of_brute_force_over_all_candidates(self) -> None:
        agent, obs = make_agent(), make_batch().obs
        candidates = torch.from_numpy(np.random.default_rng(1).uniform(-1.4, 1.4, (7, 5, 2)))
        chosen = drawn_subset(Drawn(agent.generator))
        got = agent.select_action(obs, candidates, agent.generator)
        for b in range(5):
            scores = []
            for candidate in candidates[:, b].numpy():
                by_all = values(agent.target_critic, obs[b : b + 1].numpy(), candidate[None], E)
                scores.append(min(by_all[i][0] for i in chosen))
            assert torch.equal(got[b], candidates[int(np.argmax(scores)), b])

    @pytest.mark.parametrize("base_candidates", [True, False])
    def test_candidates_are_base_samples_and_unclipped_edits(self, base_candidates: bool) -> None:
        agent, obs = make_agent(base_candidates=base_candidates, dropout=0.5), make_batch().obs  # none of it here
        base = torch.from_numpy(np.random.default_rng(1).choice([-0.9, 0.9], (3, 5, 2)))
        agent.sample = lambda *_: base
        noise = Drawn(agent.generator).normal(2, 5, 2)
        got = agent.candidates(agent.base, obs, agent.generator).numpy()
        expected = [base[j].numpy() + 0.4 * edited(agent, obs.numpy(), base[j].numpy(), noise[j])[0] for j in range(2)]
        np.testing.assert_allclose(got[-2:], expected, rtol=1e-9)
        assert np.abs(expected).max() > 1
        assert np.array_equal(got[:-2], base.numpy() if base_candidates else base.numpy()[:0])

    def test_soft_selection_draws_as_the_softmax_of_values(self) -> None:
        agent = make_agent(soft_selection=2.0)
        obs = make_batch().obs[:1].expand(20_000, -1)
        candidates = torch.from_numpy(np.random.default_rng(1).uniform(-1, 1, (4, 1, 2))).expand(4, 20_000, 2)
        chosen = drawn_subset(Drawn(agent.generator))
        got = agent.select_action(obs, candidates, agent.generator)
        by_all = [values(agent.target_critic, obs[:4].numpy(), candidates[:, 0].numpy(), E)[i] for i in chosen]
        weights = np.exp(2.0 * np.min(by_all, axis=0))
        counts = np.array([(got == candidates[k, 0]).all(1).sum().item() for k in range(4)])
        expected = 20_000 * weights / weights.sum()
        assert (np.abs(counts - expected) < 5 * np.sqrt(expected)).all()
        assert counts.sum() == 20_000

    def test_subsets_are_drawn_without_replacement_and_independently(self) -> None:
        """S₁ chooses and S₂ values: the same critics for both would be biased upward."""
        agent, batch = float32_agent(), float32_batch()
        drawn: list[tuple[int, ...]] = []
        subset = agent.subset
        agent.subset = lambda generator: drawn.append(tuple(sorted((s := subset(generator)).tolist()))) or s
        candidates = agent.candidates(agent.base, batch.next_obs, agent.generator)
        for _ in range(2_000):
            agent.target(batch, candidates)
        assert all(len(set(s)) == S for s in drawn)
        pairs = Counter(zip(drawn[::2], drawn[1::2], strict=True))
        assert len(pairs) == 100  # every S₁ with every S₂, 20 times each
        assert max(abs(count - 20) for count in pairs.values()) < 5 * math.sqrt(20)

    def test_evaluation_has_its_own_noise_and_stays_in_bounds(self) -> None:
        """The same in each evaluation, another at each of its steps; without it, the same at each call."""
        agent, obs = float32_agent(edit_scale=3.0), float32_batch(50).obs.numpy()
        before = agent.generator.get_state()
        policy = agent.eval_policy()
        first, second = policy(obs), policy(obs)
        assert not np.array_equal(first, second)
        assert np.array_equal(first, agent.eval_policy()(obs))
        assert np.array_equal(agent.act(obs, deterministic=True), agent.act(obs, deterministic=True))
        assert torch.equal(agent.generator.get_state(), before)
        other = float32_agent(edit_scale=3.0, seed=2)
        restore(other, state_of(agent))
        assert not np.array_equal(first, other.eval_policy()(obs))  # of another seed, with the same weights
        assert np.abs(first).max() <= 1
        assert np.abs(agent.act(obs)).max() > 1

    def test_soft_selection_too_draws_on_evaluations_noise_alone(self) -> None:
        agent, obs = float32_agent(soft_selection=1.0), float32_batch(50).obs.numpy()
        before = agent.generator.get_state()
        assert np.array_equal(agent.eval_policy()(obs), agent.eval_policy()(obs))
        assert torch.equal(agent.generator.get_state(), before)

    def test_the_averaged_base_policy_acts_but_is_not_backed_up(self) -> None:
        agent, batch = float32_agent(), float32_batch(64)
        asked: list[Any] = []
        candidates = agent.candidates
        agent.candidates = lambda base, *rest: asked.append(base) or candidates(base, *rest)
        agent.act(batch.obs.numpy())
        agent.eval_policy()(batch.obs.numpy())
        agent.update(batch)
        assert [base is agent.base_average for base in asked] == [True, True, False]
        assert asked[2] is agent.base


class TestLosses:
    @pytest.mark.parametrize("variant", [{}, *({"best_backup": False} | v for v in NO_BEST_BACKUP)], ids=str)
    def test_critic_loss_equals_an_independent_formula(self, variant: dict[str, Any]) -> None:
        agent, batch = make_agent(**variant), make_batch()
        obs, actions, rewards, next_obs, terminations = (part.numpy() for part in batch[:5])
        rng = np.random.default_rng(1)
        first_edited = 3 if agent.edits and agent.args.base_candidates else 0
        candidates = rng.uniform(-1, 1, (first_edited + (2 if agent.edits else 3), 5, 2))
        drawn = Drawn(agent.generator)
        if variant:  # the first sample, or the first edited one
            best = candidates[first_edited]
        else:
            choosers, best = drawn_subset(drawn), np.empty((5, 2))
            for b in range(5):
                by_all = values(agent.target_critic, next_obs[b : b + 1].repeat(5, 0), candidates[:, b], E)
                best[b] = candidates[np.argmax(np.min([by_all[i] for i in choosers], axis=0)), b]
        valuers = drawn_subset(drawn)
        next_value = np.min([values(agent.target_critic, next_obs, best, E)[i] for i in valuers], axis=0)
        target = rewards + 0.99 * (1 - terminations) * next_value
        expected = np.mean([(q - target) ** 2 for q in values(agent.critic, obs, actions, E)])
        assert agent.critic_loss(batch, torch.from_numpy(candidates))[0].item() == pytest.approx(expected, rel=1e-6)

    @pytest.mark.parametrize(("adjusted", "dropout"), [(False, 0.0), (True, 0.0), (False, 0.3)])
    def test_edit_and_alpha_loss_equal_an_independent_formula(self, adjusted: bool, dropout: float) -> None:
        """The mean of all critics; the entropy is that of β ê, lower by log β in each dimension."""
        agent, batch = make_agent(adjust_target_entropy=adjusted, dropout=dropout), make_batch()
        obs, actions = batch.obs.numpy(), batch.actions.numpy()
        drawn = Drawn(agent.generator)
        kept = [drawn.kept(dropout, 5, width) for width in (16, 8)] if dropout else None
        edits, log_prob = edited(agent, obs, actions, drawn.normal(5, 2), kept)
        scaled = log_prob - 2 * math.log(0.4)
        value = np.mean(values(agent.critic, obs, actions + 0.4 * edits, E), axis=0)
        loss, returned, _ = agent.edit_loss(batch)
        assert loss.item() == pytest.approx((math.exp(-0.7) * scaled - value).mean(), rel=1e-6)
        np.testing.assert_allclose(returned.numpy(), scaled, rtol=1e-6)
        target_entropy = -1.0 + (2 * math.log(0.4) if adjusted else 0.0)
        expected = math.exp(-0.7) * (-scaled.mean() - target_entropy)
        assert agent.alpha_loss(returned)[0].item() == pytest.approx(expected, rel=1e-6)

    @pytest.mark.parametrize(("bias", "bound"), [(-30.0, -20.0), (-12.0, None), (5.0, 2.0)])
    def test_deviation_of_edits_is_held_in_wide_bounds(self, bias: float, bound: float | None) -> None:
        agent = float32_agent()
        with torch.no_grad():
            agent.edit.net[-1].bias[2:] = bias
        found = agent.edit(torch.zeros(1, 3), torch.zeros(1, 2), agent.generator).log_std
        torch.testing.assert_close(found, torch.full((1, 2), bias if bound is None else bound))

    def test_dropout_leaves_out_that_share_of_units_in_learning_alone(self) -> None:
        agent = float32_agent(dropout=0.5, hidden=(400,))
        obs, actions = torch.randn(1, 3).expand(500, -1), torch.zeros(500, 2)
        means = agent.edit(obs, actions, agent.generator, 0.5).mean
        exact = agent.edit(obs, actions, agent.generator).mean
        assert means[:, 0].unique().numel() > 400
        torch.testing.assert_close(means.mean(0), exact[0], atol=5 * means.std().item() / math.sqrt(500), rtol=0)
        assert torch.equal(exact, exact[:1].expand(500, -1))

    def test_each_loss_reaches_its_own_network_and_no_other(self) -> None:
        agent, batch = make_agent(), make_batch()
        named = {**dict(parameters(agent)), "log_alpha": agent.log_alpha}
        candidates = torch.zeros(4, 5, 2).double()
        losses = {
            "critic.": agent.critic_loss(batch, candidates)[0],
            "base.": agent.base_loss(batch)[0],
            "edit.": agent.edit_loss(batch)[0],
            "log_alpha": agent.alpha_loss(torch.zeros(5).double())[0],
        }
        for owner, loss in losses.items():
            gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
            reached = {name for name, gradient in zip(named, gradients, strict=True) if gradient is not None}
            assert reached == {n for n in named if (n.startswith(owner) if owner[-1] == "." else n == owner)}
