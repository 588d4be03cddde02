"""What may be said of several runs: interquartile mean, performance profile, probability of improvement, and their 95 %
stratified bootstrap intervals, by rliable. Its own statistics are these, but too slow to be drawn 2,000 times.

Source: Agarwal et al. 2021, "Deep Reinforcement Learning at the Edge of the Statistical Precipice".
Runs are given as an array [seeds, points] for each task, points being steps, or just one; the tasks' numbers of seeds
may differ.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy.stats
from numpy.typing import ArrayLike, NDArray
from rliable import library

MIN_SEEDS_FOR_CI = 4  # seeds of every task: of fewer an interval misses the truth too often (docs/results.md)
RESAMPLES = 2_000
Values = NDArray[np.float64]
Statistic = Callable[..., Values]  # of one array for each task


class Estimate(NamedTuple):
    """A statistic [points], and the ends of its interval, None where there are too few seeds for one."""

    value: Values
    low: Values | None
    high: Values | None

    def text(self, digits: int = 0) -> str:
        """The first point, and its interval in brackets."""
        interval = ""
        if self.low is not None and self.high is not None:
            interval = f" ({self.low[0]:,.{digits}f} to {self.high[0]:,.{digits}f})"
        return f"{self.value[0]:,.{digits}f}{interval}"


def interquartile_mean(*tasks: Values) -> Values:
    """Of all runs of all tasks, at each point: the mean without the lowest and the highest quarter, rounded down."""
    runs = np.concatenate(tasks)
    cut = len(runs) // 4
    middle = np.partition(runs, (cut, len(runs) - cut - 1), axis=0)[cut : len(runs) - cut]
    return np.asarray(middle.mean(axis=0))


def profile(thresholds: Values) -> Statistic:
    """The share of all runs that score above each threshold; the runs have one point."""
    return lambda *tasks: np.asarray((np.concatenate(tasks) > thresholds).mean(axis=0))


def improvement(*tasks: Values) -> Values:
    """The probability that a run of the first half of the tasks scores higher than one of the second half's on the same
    task, ties counted half, averaged over the tasks; the runs have one point.
    """
    half = len(tasks) // 2
    pairs = zip(tasks[:half], tasks[half:], strict=True)
    return np.array([np.mean([np.mean((ours > theirs.T) + 0.5 * (ours == theirs.T)) for ours, theirs in pairs])])


def estimate(statistic: Statistic, tasks: Sequence[ArrayLike], enough: int = MIN_SEEDS_FOR_CI) -> Estimate:
    """The statistic, and where every task has `enough` seeds its interval: each task's seeds are drawn anew."""
    arrays = [np.asarray(task, np.float64) for task in tasks]
    arrays = [array if array.ndim == 2 else array[:, None] for array in arrays]
    if min(map(len, arrays)) < enough:
        return Estimate(statistic(*arrays), None, None)
    with seeded():
        value, interval = library.get_interval_estimates({"": arrays}, statistic, reps=RESAMPLES)
    return Estimate(value[""], *interval[""])


def mean_difference(ours: Sequence[float], theirs: Sequence[float]) -> Estimate:
    """The mean over seeds of the first less the second of the same seed, and of three seeds or more that differ
    Student's 95 % interval: exact where such differences are normal, which the bootstrap of so few is not even then.
    """
    differences = np.subtract(ours, theirs)
    mean = np.array([differences.mean()])
    if len(differences) < 3 or not np.ptp(differences):
        return Estimate(mean, None, None)
    found = scipy.stats.ttest_1samp(differences, 0.0).confidence_interval(0.95)
    return Estimate(mean, np.array([found.low]), np.array([found.high]))


@contextlib.contextmanager
def seeded() -> Iterator[None]:
    """rliable draws from NumPy's global generator, whatever random_state it is given: fixed here, then put back."""
    before: Any = np.random.get_state()  # noqa: NPY002
    np.random.seed(0)  # noqa: NPY002
    try:
        yield
    finally:
        np.random.set_state(before)  # noqa: NPY002
