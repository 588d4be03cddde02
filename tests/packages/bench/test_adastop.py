"""AdaStop against brute force on small examples, and its error rate and power on simulated scores."""

import itertools
import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

from bench.report.adastop import Design, decide

Draw = Callable[[np.random.Generator, str, tuple[int, int]], np.ndarray]


def by_hand(a: list[int], b: list[int], n: int, interims: int, alpha: Fraction) -> tuple[str | None, int]:
    """Who is better, and at which interim, by every division of the scores within every interim, in whole numbers."""
    blocks = [a[k * n : (k + 1) * n] + b[k * n : (k + 1) * n] for k in range(interims)]
    orders = list(itertools.product(*(itertools.combinations(block, n) for block in blocks)))
    assert list(orders[0]) == [tuple(block[:n]) for block in blocks]
    crossed = [False] * len(orders)
    for k in range(interims):
        signed = [sum(2 * sum(order[i]) - sum(blocks[i]) for i in range(k + 1)) for order in orders]
        left = [abs(value) for value, gone in zip(signed, crossed, strict=True) if not gone]
        boundary = min(v for v in {-1, *left} if sum(x > v for x in left) <= alpha / interims * len(orders))
        crossed = [gone or abs(value) > boundary for value, gone in zip(signed, crossed, strict=True)]
        if crossed[0]:
            return "a" if signed[0] > 0 else "b", k + 1
    return None, interims


@pytest.mark.parametrize(("n", "interims", "alpha"), [(2, 2, 0.8), (3, 1, 0.1), (2, 3, 0.9), (3, 2, 0.3)])
def test_every_division_counts_as_by_hand(n: int, interims: int, alpha: float):
    random, outcomes = np.random.default_rng(0), []
    for _ in range(30):
        a, b = random.integers(0, 12, n * interims).tolist(), random.integers(4, 16, n * interims).tolist()
        found = decide({"a": np.array([a], float), "b": np.array([b], float)}, [("a", "b")], Design(n, interims, alpha))
        outcomes.append((found.better.get(("a", "b")), found.interims))
        assert outcomes[-1] == by_hand(a, b, n, interims, Fraction(str(alpha)))
    assert len(set(outcomes)) > 1


def test_random_permutations_come_near_to_all():
    """The very p of these scores, 26 of 924 divisions, is met where it is well above or below the level."""
    a, b = [0.0, 1, 2, 3, 5, 9], [4.0, 6, 7, 8, 10, 11]
    differences = [abs(sum(part) - 33) for part in itertools.combinations(a + b, 6)]
    p = np.mean([value >= 13 for value in differences])
    assert abs(sum(a) - 33) == 13
    scores = {"a": np.array([a]), "b": np.array([b])}
    for factor, decided in ((0.6, False), (1.6, True)):
        for permutations in (900, 1_000):  # fewer than all; all
            found = decide(scores, [("a", "b")], Design(6, 1, factor * p, permutations))
            assert (found.better == {("a", "b"): "b"}) == decided


def test_several_tasks_are_permuted_apart_and_count_alike():
    """Two tasks of other units and means: by hand, the sum of differences in each task's own deviations."""
    a = np.array([[1.0, 2.0], [1000.0, 7000.0]])
    b = np.array([[4.0, 9.0], [3000.0, 9000.0]])
    deviations = [np.std([1, 2, 4, 9]), np.std([1000, 7000, 3000, 9000])]
    values = []
    for parts in itertools.product(
        itertools.combinations([1.0, 2, 4, 9], 2), itertools.combinations([1e3, 7e3, 3e3, 9e3], 2)
    ):
        sums = zip(parts, (16, 20e3), deviations, strict=True)
        values.append(abs(sum((2 * sum(part) - whole) / deviation for part, whole, deviation in sums)))
    p = np.mean(np.array(values) >= values[0] - 1e-9)
    assert p == pytest.approx(8 / 36)
    for alpha, better in ((p - 0.01, {}), (p + 0.001, {("a", "b"): "b"})):
        assert decide({"a": a, "b": b}, [("a", "b")], Design(2, 1, alpha)).better == better


def test_step_down_gives_the_level_of_decided_pairs_to_the_others():
    """Four of 70 divisions differ as much as a and b or more, two as much as either and c: at 10 % of three pairs, two
    may cross, of the one left, seven.
    """
    scores = {"a": [0, 1, 2, 5], "b": [4, 6, 7, 8], "c": [100, 101, 102, 103]}
    arrays = {name: np.array([values], float) for name, values in scores.items()}
    pairs = list(itertools.combinations("abc", 2))
    assert decide(arrays, pairs, Design(4, 1, 0.1)).better == {("a", "b"): "b", ("a", "c"): "c", ("b", "c"): "c"}
    arrays["c"] = np.array([[1.0, 3, 5, 7]])  # nothing is decided first: three pairs share the level
    assert ("a", "b") not in decide(arrays, pairs, Design(4, 1, 0.1)).better
    assert decide(arrays, pairs[:1], Design(4, 1, 0.1)).better == {("a", "b"): "b"}


def test_a_name_that_is_decided_needs_no_more_seeds():
    random = np.random.default_rng(0)
    scores = {"a": random.normal(size=(1, 25)), "b": random.normal(size=(1, 25)), "c": random.normal(50, 1, (1, 15))}
    found = decide(scores, list(itertools.combinations("abc", 2)), Design())
    assert found.better == {("a", "c"): "c", ("b", "c"): "c"}
    assert (found.undecided, found.interims) == ([("a", "b")], 5)
    assert decide(scores | {"b": scores["b"][:, :12]}, [("a", "b")], Design()).interims == 2


def test_neither_units_nor_order_matter():
    random = np.random.default_rng(1)
    a, b = random.normal(size=(1, 25)), random.normal(1.1, 1, (1, 25))
    found = decide({"a": a, "b": b}, [("a", "b")], Design())
    assert found == decide({"a": 1e4 + 300 * a, "b": 1e4 + 300 * b}, [("a", "b")], Design())
    assert found.better == {("a", "b"): "b"}
    other = decide({"a": a, "b": b}, [("b", "a")], Design())
    assert (other.better, other.interims) == ({("b", "a"): "b"}, found.interims)


def normal(random: np.random.Generator, name: str, shape: tuple[int, int]) -> np.ndarray:
    return random.normal(size=shape)


def of_two_kinds(random: np.random.Generator, name: str, shape: tuple[int, int]) -> np.ndarray:
    """Runs that learn to walk, and runs that stand still."""
    return 300 * random.normal(size=shape) + np.where(random.random(shape) < 0.3, 500, 3500)


def beside_others(random: np.random.Generator, name: str, shape: tuple[int, int]) -> np.ndarray:
    """a and b equal and spread wide, c and d otherwise."""
    return random.normal(size=shape) * (4 if name in "ab" else 1) + {"c": 3, "d": 12}.get(name, 0)


def rates(names: str, draw: Draw, simulations: int, tasks: int = 1) -> tuple[int, int, float]:
    """In how many simulations equal ones are said to differ, and in how many all others are; mean interims used."""
    design, pairs = Design(permutations=2_000 if len(names) > 2 else 1_000), list(itertools.combinations(names, 2))
    equal = [("a", "b")] if draw is beside_others else pairs
    false, all_others, interims = 0, 0, []
    for simulation in range(simulations):
        random = np.random.default_rng(simulation)
        found = decide({name: draw(random, name, (tasks, 25)) for name in names}, pairs, design)
        false += any(pair in found.better for pair in equal)
        all_others += all(pair in found.better for pair in pairs if pair not in equal)
        interims.append(found.interims)
    return false, all_others, float(np.mean(interims))


def most_by_chance(n: int, p: float) -> int:
    """More events of probability p than this happen in n trials with probability less than 0.001."""
    tail = itertools.accumulate(math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(n))
    return next(k for k, below in enumerate(tail) if below > 0.999)


@pytest.mark.parametrize(
    ("names", "draw", "simulations", "tasks"),
    [
        ("ab", normal, 1_000, 1),
        ("ab", of_two_kinds, 1_000, 1),
        ("abcde", normal, 500, 1),
        ("abcd", beside_others, 500, 1),
        ("ab", normal, 500, 3),
    ],
)
def test_family_wise_error_is_at_most_the_level(names: str, draw: Draw, simulations: int, tasks: int):
    false, _, _ = rates(names, draw, simulations, tasks)
    assert false <= most_by_chance(simulations, 0.05)
    assert false > 0.01 * simulations  # and the level is made use of


def test_power():
    """A difference of two deviations is nearly always seen, mostly by 10 seeds; of one, mostly by 25."""

    def ahead(by: float) -> tuple[int, float]:
        found = [
            decide(
                {"a": r.normal(by, 1, (1, 25)), "b": r.normal(size=(1, 25))}, [("a", "b")], Design(permutations=1_000)
            )
            for r in map(np.random.default_rng, range(100))
        ]
        return sum(f.better == {("a", "b"): "a"} for f in found), float(np.mean([f.interims for f in found]))

    right, interims = ahead(2.0)
    assert right == 100
    assert interims < 2.2
    assert 70 <= ahead(1.0)[0] < 100
