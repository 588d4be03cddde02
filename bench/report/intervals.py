"""Statistics of several runs: interquartile mean, performance profile, probability of improvement, and intervals.

These are 95 % stratified bootstrap intervals by rliable. Its own statistics have the same values, but are too slow to
be computed 2,000 times.

Source: Agarwal et al. 2021, "Deep Reinforcement Learning at the Edge of the Statistical Precipice".
Runs are given as an array [seeds, points] for each task. Points are steps, or just one. The tasks' numbers of seeds may
differ.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy.stats
from numpy.typing import ArrayLike, NDArray
from rliable import library

MIN_SEEDS_FOR_CI = 4  # of every task; intervals of fewer seeds miss the truth too often (docs/results.md)
RESAMPLES = 2_000
Values = NDArray[np.float64]
Statistic = Callable[..., Values]  # of one array for each task


class Estimate(NamedTuple):
    """A statistic [points], and the ends of its interval, None if there are too few seeds for one."""

    value: Values
    low: Values | None
    high: Values | None

    def text(self, digits: int = 0) -> str:
        """Return the first point, and its interval in parentheses."""
        interval = ""
        if self.low is not None and self.high is not None:
            interval = f" ({self.low[0]:,.{digits}f} to {self.high[0]:,.{digits}f})"
        return f"{self.value[0]:,.{digits}f}{interval}"


def interquartile_mean(*tasks: Values) -> Values:
    """Return at each point the mean of all tasks' runs without the lowest and the highest quarter, rounded down."""
    runs = np.concatenate(tasks)
    cut = len(runs) // 4
    middle = np.partition(runs, (cut, len(runs) - cut - 1), axis=0)[cut : len(runs) - cut]
    return np.asarray(middle.mean(axis=0))


def profile(thresholds: Values) -> Statistic:
    """Return the statistic "share of all runs that score above each threshold", for runs with one point."""
    return lambda *tasks: np.asarray((np.concatenate(tasks) > thresholds).mean(axis=0))


def improvement(*tasks: Values) -> Values:
    """Return the probability that a run of the first half of `tasks` scores higher than one of the second half.

    Runs of the same task are compared, ties count half, and the tasks' probabilities are averaged. The runs have one
    point.
    """
    half = len(tasks) // 2
    pairs = zip(tasks[:half], tasks[half:], strict=True)
    return np.array([np.mean([np.mean((ours > theirs.T) + 0.5 * (ours == theirs.T)) for ours, theirs in pairs])])


def estimate(statistic: Statistic, tasks: Sequence[ArrayLike], enough: int = MIN_SEEDS_FOR_CI) -> Estimate:
    """Return the statistic, and its interval if every task has `enough` seeds. Each task's seeds are resampled."""
    arrays = [np.asarray(task, np.float64) for task in tasks]
    arrays = [array if array.ndim == 2 else array[:, None] for array in arrays]
    if min(map(len, arrays)) < enough:
        return Estimate(statistic(*arrays), None, None)
    with seeded():
        value, interval = library.get_interval_estimates({"": arrays}, statistic, reps=RESAMPLES)
    return Estimate(value[""], *interval[""])


def mean_difference(ours: Sequence[float], theirs: Sequence[float]) -> Estimate:
    """Return the mean over seeds of `ours` minus `theirs`, paired by seed, with Student's 95 % interval.

    The interval needs three or more seeds, whose differences are not all equal. It is exact if the differences are
    normal. A bootstrap of so few seeds is not exact even then.
    """
    differences = np.subtract(ours, theirs)
    mean = np.array([differences.mean()])
    if len(differences) < 3 or not np.ptp(differences):
        return Estimate(mean, None, None)
    found = scipy.stats.ttest_1samp(differences, 0.0).confidence_interval(0.95)
    return Estimate(mean, np.array([found.low]), np.array([found.high]))


@contextlib.contextmanager
def seeded() -> Iterator[None]:
    """Seed NumPy's global generator, and restore it after the block.

    rliable draws from it, whatever random_state it is given.
    """
    before: Any = np.random.get_state()  # noqa: NPY002
    np.random.seed(0)  # noqa: NPY002
    try:
        yield
    finally:
        np.random.set_state(before)  # noqa: NPY002
