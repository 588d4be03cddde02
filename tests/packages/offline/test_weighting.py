"""`--weighting`: how likely each transition is, against brute force, and whole runs with it."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import OFFLINE, assert_same_folder, command, final_state, flags, killed_at, long, module, same
from d4rl_file import make
from test_offline_to_online import transitions

from algos.iql import Args
from common.arguments import RunArgs
from common.errors import InputError
from common.recorded import Recording
from common.replay_buffer import Batch
from common.run import Run
from offline.dataset import load
from offline.offline_to_online import OfflineToOnline
from offline.rewards import IDENTITY, RewardTransform
from offline.sampling import WeightedRows

LENGTHS = (10, 1_000)
RETURNS = (0.0, 1.0)


def two_episodes(path: Path, order: tuple[int, int] = (0, 1), **changed: Any) -> Path:
    """Return a file of two episodes with returns 0 and 1. `order` selects which of the two lengths comes first."""
    lengths = [LENGTHS[i] for i in order]
    ends = "".join("." * (length - 1) + "t" for length in lengths)
    rewards = np.repeat(np.divide(RETURNS, lengths), lengths).astype(np.float32)
    return make(path, ends, **{"rewards": rewards, "actions": np.zeros((sum(lengths), 1))} | changed)


def probabilities_by_hand(returns: list[float], lengths: list[int], temperature: float) -> list[float]:
    """Return the softmax over transitions of normalised return / temperature, one transition at a time."""
    low, high = min(returns), max(returns)
    each = []
    for value, length in zip(returns, lengths, strict=True):
        each += [math.exp((value - low) / (high - low) / temperature)] * length
    return [one / math.fsum(each) for one in each]


class TestProbabilities:
    @pytest.mark.parametrize("order", [(0, 1), (1, 0)])
    def test_odds_do_not_depend_on_the_length(self, order: tuple[int, int], tmp_path: Path) -> None:
        """Returns 0 and 1, temperature 0.1: a transition of the better episode is e¹⁰ times as likely."""
        dataset = load(two_episodes(tmp_path / "a.hdf5", order))
        found = dataset.weights(0.1)
        lengths = [LENGTHS[i] for i in order]
        np.testing.assert_allclose(found, probabilities_by_hand([0.0, 1.0], lengths, 0.1), rtol=1e-12)
        assert found[-1] / found[0] == pytest.approx(math.exp(10), rel=1e-9)

    def test_drawn_rows_have_these_frequencies(self, tmp_path: Path) -> None:
        """At a temperature at which both episodes are drawn: the share of each, and of each of the short one's rows."""
        dataset = load(two_episodes(tmp_path / "a.hdf5", (1, 0)))
        temperature, count = 0.25, 400_000
        rows = WeightedRows(dataset, "return", temperature).draw(count, torch.Generator().manual_seed(0))
        expected = np.array(probabilities_by_hand([0.0, 1.0], [1_000, 10], temperature))
        counts = np.bincount(rows.numpy(), minlength=1_010)
        assert (np.abs(counts - count * expected) <= 5 * np.sqrt(count * expected) + 1).all()
        share = expected[1_000:].sum()
        assert 0.2 < share < 0.5
        assert counts[1_000:].sum() / count == pytest.approx(share, abs=5 * np.sqrt(share * (1 - share) / count))

    def test_a_probability_of_0_is_never_drawn(self, tmp_path: Path) -> None:
        """At 0.001, e^-1000 is 0 in float64, for rows at the start and at the end."""
        for returns in ((0.0, 1.0), (1.0, 0.0)):
            rewards = np.repeat(np.divide(returns, LENGTHS[::-1]), LENGTHS[::-1]).astype(np.float32)
            dataset = load(two_episodes(tmp_path / "a.hdf5", (1, 0), rewards=rewards))
            rows = WeightedRows(dataset, "return", 1e-3).draw(50_000, torch.Generator().manual_seed(1))
            good = range(1_000) if returns[0] else range(1_000, 1_010)
            assert rows.unique().tolist() == [*good]

    def test_advantage_is_the_residual_of_least_squares(self, tmp_path: Path) -> None:
        """Against NumPy's lstsq on returns and first observations that are computed here."""
        rng = np.random.default_rng(5)
        obs = rng.standard_normal((200, 3)).astype(np.float32)
        rewards = rng.standard_normal(200).astype(np.float32) + obs[:, 0]
        lengths = [5, 15] * 10
        ends = "".join("." * (length - 1) + "t" for length in lengths)
        dataset = load(make(tmp_path / "a.hdf5", ends, observations=obs, rewards=rewards))
        starts = np.cumsum([0, *lengths])[:-1]
        returns = np.array([math.fsum(rewards[s : s + n].tolist()) for s, n in zip(starts, lengths, strict=True)])
        matrix = np.c_[np.ones(20), obs[starts].astype(np.float64)]
        solution, squares, rank, _ = np.linalg.lstsq(matrix, returns, rcond=None)
        residuals = returns - matrix @ solution
        assert (rank, float(squares[0])) == (4, pytest.approx((residuals**2).sum()))
        expected = probabilities_by_hand(residuals.tolist(), lengths, 0.1)
        np.testing.assert_allclose(dataset.weights(0.1, baseline=True), expected, rtol=1e-6)
        assert np.abs(dataset.weights(0.1) / expected - 1).max() > 0.5  # another result than return weighting

    def test_an_algorithms_reward_shift_changes_nothing(self, tmp_path: Path) -> None:
        """With r - 1, the longest episode would have the lowest return. A dropped last reward is shifted too."""
        path = make(tmp_path / "a.hdf5", "....t..o.....o", rewards=np.arange(14.0))
        plain = load(path).weights(0.1)
        for transform in (RewardTransform(1.0, -30.0), RewardTransform(10.0, -5.0)):
            assert transform != IDENTITY
            np.testing.assert_allclose(load(path, rewards=transform).weights(0.1), plain, rtol=1e-4)

    @pytest.mark.parametrize("baseline", [False, True])
    def test_episodes_that_do_not_differ(self, baseline: bool, tmp_path: Path) -> None:
        word = "advantage" if baseline else "return"
        with pytest.raises(InputError, match=f"--weighting {word}: the episodes .* all have the same {word}"):
            load(make(tmp_path / "a.hdf5", "..t" * 9, rewards=np.full(27, 0.1))).weights(0.1, baseline)
        with pytest.raises(InputError, match=r"\(1\) all have the same"):
            load(make(tmp_path / "one.hdf5", "........t")).weights(0.1, baseline)

    def test_too_few_episodes_for_a_regression(self, tmp_path: Path) -> None:
        """Three episodes, three coefficients: the line passes through all returns."""
        obs = np.random.default_rng(0).standard_normal((9, 2)).astype(np.float32)
        dataset = load(make(tmp_path / "a.hdf5", "..t" * 3, observations=obs))
        assert np.ptp(dataset.weights(0.1)) > 0
        with pytest.raises(InputError, match="give --weighting return or none"):
            dataset.weights(0.1, baseline=True)


class TestBatches:
    @pytest.fixture
    def build(self, tmp_path: Path) -> Callable[..., OfflineToOnline]:
        """Make one over 20 transitions in two episodes, of which the second is better, and 20 online ones."""

        def make_one(**changed: Any) -> OfflineToOnline:
            rewards = np.repeat([0.0, 0.1], 10)
            path = make(tmp_path / "data.hdf5", ".........t" * 2, rewards=rewards, actions=np.zeros((20, 1)))
            args = Args(dataset=str(path), env="Pendulum-v1", run_dir=tmp_path / "run", online_steps=100, **changed)
            made = OfflineToOnline(args, Run("iql", args), wait_for_full_batch=False)
            for i in range(20):
                made.add(transitions(np.full((1, 2), 1000.0 + i), 0.0))
            return made

        return make_one

    @staticmethod
    def sampled(data: OfflineToOnline, count: int, online: bool) -> np.ndarray:
        data._set_batch_sizes(count, count)
        return data.sample(online, torch.Generator().manual_seed(0)).obs[:, 0].numpy()

    @pytest.mark.parametrize("retain", ["none", "append", "mix"])
    def test_offline_batches(self, build: Any, retain: str) -> None:
        """Temperature 1: the better episode has e / (1 + e) of a batch, 73 %."""
        drawn = self.sampled(build(retain=retain, weighting="return", weighting_temperature=1.0), 40_000, False)
        assert (drawn < 20).all()
        assert (drawn >= 10).mean() == pytest.approx(math.e / (1 + math.e), abs=0.012)

    @pytest.mark.parametrize("retain", ["append", "mix"])
    def test_online_batches(self, build: Any, retain: str) -> None:
        """Half is online, as without weighting, and uniform there. The dataset's half is weighted."""
        drawn = self.sampled(build(retain=retain, weighting="return", weighting_temperature=1.0), 40_000, True)
        online = drawn[drawn >= 1000] - 1000
        assert len(online) / 40_000 == pytest.approx(0.5, abs=0.013)
        counts = np.bincount(online.astype(int), minlength=20)
        assert np.abs(counts - 1000).max() < 5 * np.sqrt(1000)
        from_data = drawn[drawn < 1000]
        assert (from_data >= 10).mean() == pytest.approx(math.e / (1 + math.e), abs=0.017)

    def test_a_recorded_update_draws_the_same_rows(self, build: Any) -> None:
        """The draw is part of the compiled code, and its random numbers come from the generator."""
        data = build(retain="append", weighting="return", batch_size=64)

        class Owner:
            generator = torch.Generator().manual_seed(3)

        for online in (False, True):

            def draw(online: bool = online) -> list[torch.Tensor]:
                batch = data.sample(online, Owner.generator)
                return [part for part in batch if part is not None]

            recording = Recording(draw, (), Owner())
            for _ in range(3):
                state = Owner.generator.get_state()
                compiled = [part.clone() for part in recording()]
                after = Owner.generator.get_state()
                Owner.generator.set_state(state)
                assert all(map(torch.equal, draw(), compiled))
                assert torch.equal(Owner.generator.get_state(), after)

    def test_best_fraction_of_behaviour_cloning(self, build: Any, small: Any) -> None:
        """`--top-fraction` selects first, and returns are normalised over the episodes that it keeps."""
        args = small("bc", weighting="return", top_fraction=0.5)
        data = OfflineToOnline(args, Run("bc", args), top=args.top_fraction)
        assert data._weighted is not None
        assert len(data._weighted.cumulative) == len(data.dataset) < len(load(args.dataset))

    def test_without_a_batch_of_the_dataset(self) -> None:
        with pytest.raises(InputError, match="--weighting return: no update uses the dataset"):
            Args(dataset="a.hdf5", weighting="return", retain="none", offline_steps=0, online_steps=10)
        Args(dataset="a.hdf5", weighting="return", retain="mix", offline_steps=0, online_steps=10)


class TestRuns:
    @pytest.mark.parametrize("retain", [pytest.param("append", marks=long), "mix"])
    def test_killed_in_the_middle_resumes_bit_for_bit(self, retain: str, small: Any, tmp_path: Path) -> None:
        changed = {"weighting": "advantage", "retain": retain, "compile": False, "total_steps": 400}
        module("iql").train(small("iql", **changed, run_dir=tmp_path / "whole"))
        lines = flags("iql", **changed, run_dir=tmp_path / "killed")
        assert killed_at("iql", [("step", 150), ("online step", 130)], *lines).returncode == 0
        assert not (tmp_path / "killed" / "DONE").exists()
        assert command(*lines, algo="iql").returncode == 0
        assert_same_folder(tmp_path / "killed", tmp_path / "whole")

    @pytest.mark.parametrize("algo", OFFLINE)
    def test_every_file_takes_it(self, algo: str, small: Callable[..., RunArgs], tmp_path: Path) -> None:
        """And learns other networks than without it."""
        changed = {"offline_steps": 30, "online_steps": 0, "eval_episodes": 0}
        for name in ("none", "return"):
            module(algo).train(small(algo, weighting=name, run_dir=tmp_path / name, **changed))
        states = [final_state(tmp_path / name)["agent"] for name in ("none", "return")]
        assert not same(*states)

    @pytest.mark.parametrize("temperature", ["0", "-1", "nan"])
    def test_a_temperature_that_is_none(self, temperature: str) -> None:
        lines = flags("bc", weighting="return", weighting_temperature=temperature)
        ended = command(*lines, algo="bc")
        assert ended.returncode == 2
        assert "--weighting-temperature is" in ended.stderr
        assert len(ended.stderr.splitlines()) <= 2

    def test_a_dataset_without_differences_leaves_no_folder(self, tmp_path: Path) -> None:
        path = make(tmp_path / "a.hdf5", "..t" * 9, rewards=np.zeros(27), actions=np.zeros((27, 1)))
        lines = flags("bc", dataset=str(path), weighting="return", run_dir=tmp_path / "run")
        ended = command(*lines, algo="bc")
        assert (ended.returncode, (tmp_path / "run").exists()) == (2, False)
        assert "all have the same return" in ended.stderr


def test_a_batch_without_weighting_is_what_it_was(tmp_path: Path) -> None:
    """Against the draws of earlier versions, written out: one `randint` offline, and `uniform`'s online."""
    path = make(tmp_path / "data.hdf5", ".........t" * 2, actions=np.zeros((20, 1)))
    found: dict[str, Batch] = {}
    for retain in ("append", "mix"):
        args = Args(dataset=str(path), env="Pendulum-v1", run_dir=tmp_path / "run", online_steps=50, retain=retain)
        data = OfflineToOnline(args, Run("iql", args), wait_for_full_batch=False)
        for i in range(7):
            data.add(transitions(np.full((1, 2), 1000.0 + i), 0.0))
        data._set_batch_sizes(64, 64)
        offline = data.sample(False, torch.Generator().manual_seed(4)).obs[:, 0]
        assert offline.tolist() == torch.randint(20, (64,), generator=torch.Generator().manual_seed(4)).tolist()
        found[retain] = data.sample(True, torch.Generator().manual_seed(4))
    generator = torch.Generator().manual_seed(4)
    where = torch.randint(2**62, (64,), generator=generator) % 27
    assert found["append"].obs[:, 0].tolist() == torch.where(where < 20, where, where - 20 + 1000).tolist()
    generator = torch.Generator().manual_seed(4)
    from_data = torch.randint(20, (32,), generator=generator)
    online = 1000 + torch.randint(2**62, (32,), generator=generator) % 7
    assert found["mix"].obs[:, 0].tolist() == torch.stack([from_data, online], 1).flatten().tolist()
