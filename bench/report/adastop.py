"""AdaStop: find how many seeds separate algorithms, by permutation tests at several interims with one error rate.

Source: Mathieu et al. 2023, "AdaStop: adaptive statistical testing for sound comparisons of Deep RL agents". Two things
differ, and docs/notes/compare.md measures their effect:
- Several comparisons are combined by Holm's step-down (1979) over separate tests, not by the greatest difference of
  all. This is proved for any scores, and an algorithm with a wide spread cannot hide another's difference.
- If too many divisions have equal differences, an interim cannot spend its whole level. The rest is lost and not
  carried over, because the proof needs that.
The authors' package is not used. adastop 0.1.3 compares absolute differences with boundaries of signed ones, so it errs
twice as often as requested.
"""

import itertools
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.arguments import at_least
from common.errors import InputError

Scores = NDArray[np.float64]  # [tasks, seeds]
Pair = tuple[str, str]


@dataclass(frozen=True)
class Design:
    """Design of the test, fixed before the first score is known. Raise InputError if a value is out of range."""

    seeds: int = 5
    """N, new seeds of each algorithm at every interim."""
    interims: int = 5
    """K, maximum number of times that the scores are tested."""
    alpha: float = 0.05
    """Largest probability, over all interims and comparisons, that any two equal algorithms are called different."""
    permutations: int = 10_000
    """B, number of random permutations, if there are more than that."""

    def __post_init__(self) -> None:
        at_least(1, seeds=self.seeds, interims=self.interims, permutations=self.permutations)
        if not 0 < self.alpha < 1:
            raise InputError(f"--alpha is {self.alpha}: give a number between 0 and 1")

    def at_most(self, permutations: int, comparisons: int) -> int:
        """Return how many of `permutations` may cross an interim's boundary while `comparisons` are undecided."""
        return int(self.alpha / self.interims / comparisons * permutations + 1e-9)


class Found(NamedTuple):
    """The decisions of the interims so far."""

    better: dict[Pair, str]
    """The better one of each pair that differs."""
    undecided: list[Pair]
    interims: int
    """Number of interims so far."""


def decide(scores: Mapping[str, Scores], pairs: Sequence[Pair], design: Design) -> Found:
    """Test at interim after interim, with N more seeds each, and return the decisions.

    Stop when all pairs are decided, seeds of the next interim are missing, or K interims are done.

    `scores` holds for each name [tasks, seeds], the seeds in order. A name whose pairs are all decided needs no more.
    Several tasks are one comparison: scores are standardised by the first interim's mean and deviation within the task,
    and permuted within the task. The result is a function of these arguments. Raise InputError if the design can decide
    none of so many pairs, whatever the scores.

    A permutation divides the 2N scores of a pair again, at each interim and on each task. Its statistic at interim k is
    the absolute difference of the two sums so far. With C undecided pairs, the pair's boundary at interim k is the
    smallest that at most α/(KC) of all permutations cross. Permutations that crossed before do not count there. A pair
    whose observed division crosses is decided. Then C is smaller, and boundaries are computed again, until no pair
    crosses.
    """
    undecided, better, done = list(pairs), dict[Pair, str](), 0
    scores = _standardized(scores, sorted({name for pair in pairs for name in pair}), design.seeds)
    first = np.stack([values[:, : design.seeds] for values in scores.values()])  # [names, tasks, N]
    differences: dict[Pair, NDArray[np.float64]] = dict.fromkeys(pairs, np.zeros(1))
    crossed: dict[Pair, NDArray[np.bool_]] = dict.fromkeys(pairs, np.zeros(1, bool))
    for signs in divisions(design, first.shape[1], zlib.crc32(first.tobytes())):
        if design.at_most(len(signs), len(pairs)) < 2:  # a division and its mirror image differ equally
            raise InputError(
                f"whatever the scores, --seeds {design.seeds} with --interims {design.interims} and --alpha "
                f"{design.alpha:g} can decide none of {len(pairs)} pairs: give more --seeds, or fewer names"
            )
        new = slice(done * design.seeds, (done + 1) * design.seeds)
        if not undecided or any(scores[name].shape[1] < new.stop for pair in undecided for name in pair):
            break
        done += 1
        for pair in undecided:
            both = np.concatenate([scores[name][:, new] for name in pair], axis=1)
            differences[pair] = differences[pair] + signs @ both.ravel()
        better |= _step_down(undecided, differences, crossed, design)
        undecided = [pair for pair in undecided if pair not in better]
    return Found(better, undecided, done)


def _step_down(
    undecided: list[Pair],
    differences: dict[Pair, NDArray[np.float64]],
    crossed: dict[Pair, NDArray[np.bool_]],
    design: Design,
) -> dict[Pair, str]:
    """Return the better one of each pair decided at one interim.

    Add to `crossed` the permutations that cross the other pairs' boundaries.
    """
    better: dict[Pair, str] = {}
    while left := [pair for pair in undecided if pair not in better]:
        at_most = design.at_most(len(differences[left[0]]), len(left))
        beyond = {pair: beyond_boundary(np.abs(differences[pair]), crossed[pair], at_most) for pair in left}
        decided = [pair for pair in left if beyond[pair][0]]  # the first division is the observed one
        if not decided:
            crossed |= {pair: crossed[pair] | beyond[pair] for pair in left}
            break
        better |= {pair: pair[0] if differences[pair][0] > 0 else pair[1] for pair in decided}
    return better


def _standardized(scores: Mapping[str, Scores], names: Sequence[str], seeds: int) -> dict[str, Scores]:
    """Return the scores of `names` with mean 0 and deviation 1 within each task, over the first `seeds` of all names.

    Return no scores if any of these is missing.
    """
    first = np.concatenate([scores[name][:, :seeds] for name in names], axis=1)
    if first.shape[1] < len(names) * seeds:
        return {name: scores[name][:, :0] for name in names}
    mean, deviation = first.mean(1, keepdims=True), first.std(1, keepdims=True)
    return {name: (scores[name] - mean) / np.where(deviation > 0, deviation, 1.0) for name in names}


def beyond_boundary(statistics: NDArray[np.float64], crossed: NDArray[np.bool_], at_most: int) -> NDArray[np.bool_]:
    """Return which permutations not yet crossed lie beyond the smallest boundary that at most `at_most` cross.

    Equal statistics lie on the same side.
    """
    left: NDArray[np.bool_] = ~crossed & np.ones(len(statistics), bool)
    values = np.sort(statistics[left])
    if at_most >= len(values):
        return left
    boundary = values[-1 - at_most]
    left &= statistics > boundary + 1e-9 * (1.0 + boundary)  # sums in another order round differently
    return left


def divisions(design: Design, tasks: int, seed: int) -> Iterator[NDArray[np.int8]]:
    """Yield signs [permutations, tasks · 2N] for each interim: +1 for N of a pair's 2N scores on each task, else -1.

    These are all permutations over all interims and tasks, or `permutations` random ones if there are more. Row i of
    every interim belongs to one permutation of all scores. The first row is the observed division.
    """
    n = design.seeds
    kinds = math.comb(2 * n, n)
    if kinds ** (design.interims * tasks) > design.permutations:
        random = np.random.default_rng(seed)
        for _ in range(design.interims):
            signs = np.tile(np.repeat(np.array([1, -1], np.int8), n), (design.permutations, tasks, 1))
            signs[1:] = random.permuted(signs[1:], axis=-1)
            yield signs.reshape(design.permutations, -1)
        return
    every = np.full((kinds, 2 * n), -1, np.int8)
    for row, plus in enumerate(itertools.combinations(range(2 * n), n)):
        every[row, list(plus)] = 1
    number = np.arange(kinds ** (design.interims * tasks))
    for interim in range(design.interims):
        parts = range(interim * tasks, (interim + 1) * tasks)
        yield np.concatenate([every[number // kinds**part % kinds] for part in parts], axis=1)
