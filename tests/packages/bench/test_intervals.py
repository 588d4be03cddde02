"""Interquartile means, profiles and probabilities of improvement, and their intervals."""

from itertools import product
from statistics import mean

import numpy as np
import pytest
from rliable import library, metrics

from bench.report import intervals
from bench.report.intervals import estimate, improvement, interquartile_mean, mean_difference, profile


def trimmed(values: list[float]) -> float:
    values = sorted(values)
    return mean(values[len(values) // 4 : len(values) - len(values) // 4])


def test_interquartile_mean_by_hand_and_by_rliable():
    for values, expected in (([9, 1, 5, 3], 4.0), ([1, 100, 3, 4, 5, 6, -50, 7], 4.5), ([2, 30, 5, 5, -7], 4.0)):
        runs = np.array(values, float)[:, None]
        assert interquartile_mean(runs) == pytest.approx([expected])
        assert metrics.aggregate_iqm(runs) == pytest.approx(expected)
    both = np.stack([[9.0, 1, 5, 3], [0.0, 2, 4, 6]], axis=1)  # each point by itself
    assert interquartile_mean(both) == pytest.approx([4.0, 3.0])
    assert interquartile_mean(both[:1], both[1:]) == pytest.approx([4.0, 3.0])


def test_interval_by_hand():
    """Of ten runs, one of which scores 1, a draw has K ~ B(10, 0.1) ones; without the lowest and the highest two, K - 2
    of six stay. P(K >= 3) is 7.0 %, P(K >= 4) 1.3 %: the interval is from 0 to 1/6.
    """
    assert estimate(interquartile_mean, [[0.0] * 9 + [1.0]]) == pytest.approx((0.0, 0.0, 1 / 6))
    assert estimate(interquartile_mean, [[3.0] * 5]) == pytest.approx((3.0, 3.0, 3.0))


def test_interval_is_drawn_within_each_task():
    """Against every draw of two tasks far apart, of which the one's seeds never take the other's place: a fortieth of
    them lie beyond each end, but for what 2 000 draws may miss.
    """
    tasks = [[0.0, 1.0, 5.0, 6.0], [100.0, 104.0, 105.0, 112.0]]
    found = estimate(interquartile_mean, tasks)
    assert found.value == trimmed([*tasks[0], *tasks[1]])
    one, other = (list(product(task, repeat=4)) for task in tasks)
    draws = np.array([trimmed([*a, *b]) for a in one for b in other])
    assert np.mean(draws < found.low) <= 0.035
    assert np.mean(draws <= found.low) >= 0.015
    assert np.mean(draws > found.high) <= 0.035
    assert np.mean(draws >= found.high) >= 0.015


def test_no_interval_of_fewer_than_four_seeds_of_any_task():
    assert estimate(interquartile_mean, [[1.0] * 9, [1.0, 2.0, 4.0]]).low is None
    assert estimate(interquartile_mean, [[1.0, 2.0, 4.0]]).text(1) == "2.3"
    assert estimate(interquartile_mean, [[2.0] * 4, [2.0] * 5]).text(1) == "2.0 (2.0 to 2.0)"


def test_mean_difference_by_the_tables_of_students_t():
    found = mean_difference([3.0, 6.0, 9.0], [2.0, 3.0, 4.0])  # 1, 3, 5: a standard error of 2 / √3
    assert found.value == pytest.approx([3.0])
    assert (found.low, found.high) == (
        pytest.approx([3 - 4.302653 * 2 / 3**0.5]),
        pytest.approx([3 + 4.302653 * 2 / 3**0.5]),
    )
    for ours, theirs in (([3.0], [1.0]), ([4.0, 2.0], [1.0, 1.0]), ([3.0, 3.0, 3.0], [1.0, 1.0, 1.0])):
        assert mean_difference(ours, theirs).text(1) == "2.0"  # too few, or they do not differ: no interval


def test_profile_is_the_share_above_each_threshold():
    """K ~ B(4, 1/4) of four drawn runs score 1: P(K = 0) is 32 %, P(K >= 3) 5.1 %, P(K = 4) 0.4 %."""
    thresholds = np.array([-1.0, 0.0, 0.5, 1.0])
    found = estimate(profile(thresholds), [[0.0, 0.0, 0.0, 1.0]])
    assert found.value == pytest.approx([1.0, 0.25, 0.25, 0.0])  # above, not at
    assert (found.low, found.high) == (pytest.approx([1.0, 0.0, 0.0, 0.0]), pytest.approx([1.0, 0.75, 0.75, 0.0]))
    random = np.random.default_rng(0)
    tasks = [random.normal(size=n) for n in (2, 5, 3)]
    brute = [sum(score > tau for task in tasks for score in task) / 10 for tau in thresholds]
    assert estimate(profile(thresholds), tasks).value == pytest.approx(brute)
    assert library.score_distributions(np.concatenate(tasks)[:, None], thresholds) == pytest.approx(brute)


def test_probability_of_improvement_is_over_all_pairs_of_a_task():
    ours, theirs = [[1.0, 2.0, 2.0], [5.0, 7.0]], [[2.0, 0.0, 2.0, 3.0], [6.0]]
    brute = mean(mean((x > y) + 0.5 * (x == y) for x in a for y in b) for a, b in zip(ours, theirs, strict=True))
    assert estimate(improvement, [*ours, *theirs]).value == pytest.approx(brute)
    assert estimate(improvement, [*theirs, *ours]).value == pytest.approx(1 - brute)
    same = [[1.0, 2.0, 3.0]]
    assert estimate(improvement, [*same, *same]).value == pytest.approx(0.5)
    one, other = (np.array(tasks[0])[:, None] for tasks in (ours, theirs))
    assert improvement(one, other) == pytest.approx(metrics.probability_of_improvement(one, other))
    found = estimate(improvement, [[0.0, 0.0, 0.0, 1.0], [0.5] * 4])  # K / 4, K as above
    assert found == pytest.approx((0.25, 0.0, 0.75))


def test_same_data_same_interval_and_the_generator_of_others_is_left_alone():
    scores = np.random.default_rng(0).normal(size=7)
    np.random.seed(5)  # noqa: NPY002
    first = estimate(interquartile_mean, [scores])
    after = np.random.random()  # noqa: NPY002
    assert estimate(interquartile_mean, [scores]) == first
    np.random.seed(5)  # noqa: NPY002
    assert np.random.random() == after  # noqa: NPY002
    assert intervals.RESAMPLES >= 1_000
