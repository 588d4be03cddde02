"""The matrix products of one update and nothing else, over and over: what no update gets below that makes all of them.

`python bench/speed/matmul_floor.py sac|cql|wsrl <environment id>` runs until killed; it counts updates as a counted
environment counts steps. Activations, losses, biases, sampling, optimiser and target update are left out. What remains
is listed product by product below; for each the fastest of several ways to compute it on this machine is taken.

They are those of the losses as they are written. Where the smallest critic's value alone counts, ours computes the
gradient of that critic's rows alone (`common/onednn.py`), and spares up to 15 % of WSRL's operations on HalfCheetah,
6 % of SAC's.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import gymnasium
import numpy as np
import torch

from bench.speed.step_counter import claim_slot
from common.onednn import AVAILABLE, keep_freed_memory

Call = Callable[[], object]

BATCH, HIDDEN, CRITICS = 256, 256, 2


@dataclass(frozen=True)
class Product:
    """`ensemble` products of an (m, k) by a (k, n) matrix."""

    name: str
    m: int
    k: int
    n: int
    ensemble: int = 1
    fold: str = ""  # the dimension along which an ensemble is one wider product: "m" or "n", or "k" where it is summed

    @property
    def flops(self) -> int:
        """A multiplication and an addition for every term."""
        return 2 * self.ensemble * self.m * self.k * self.n


def _forward(name: str, m: int, inputs: int, outputs: int, ensemble: int = 1) -> list[Product]:
    """`m` rows through the two hidden layers of each network; first layers with one input are one wider product."""
    return [
        Product(f"{name}, first layer", m, inputs, HIDDEN, ensemble, fold="n"),
        Product(f"{name}, hidden layer", m, HIDDEN, HIDDEN, ensemble),
        Product(f"{name}, last layer", m, HIDDEN, outputs, ensemble),
    ]


def _back_to_the_policy(o: int, a: int, b: int = BATCH, e: int = CRITICS) -> list[Product]:
    """The gradient of min Q(s, pi(s)), back to the action's columns only and on through the policy."""
    h = HIDDEN
    return [
        Product("critics at pi, last layer, input gradient", b, 1, h, e),
        Product("critics at pi, hidden layer, input gradient", b, h, h, e),
        Product("critics at pi, first layer, input gradient", b, h, a, e, fold="k"),
        Product("actor, last layer, weight gradient", h, b, 2 * a),
        Product("actor, last layer, input gradient", b, 2 * a, h),
        Product("actor, hidden layer, weight gradient", h, b, h),
        Product("actor, hidden layer, input gradient", b, h, h),
        Product("actor, first layer, weight gradient", o, b, h),
    ]


def _back_to_the_weights(b: int, e: int = CRITICS) -> list[Product]:
    """The gradient of the critics' loss down to their first layer; nothing asks for that of (s, a)."""
    h = HIDDEN
    return [
        Product("critics, last layer, weight gradient", 1, b, h, e),
        Product("critics, last layer, input gradient", b, 1, h, e),
        Product("critics, hidden layer, weight gradient", h, b, h, e),
        Product("critics, hidden layer, input gradient", b, h, h, e),
    ]


def sac_products(o: int, a: int) -> list[Product]:
    """Every product of one update, for `o` observations and `a` actions.

    With `y = x W` for a layer: forward `x W`, weight gradient `x^T dy`, input gradient `dy W^T`.
    """
    b, h, e = BATCH, HIDDEN, CRITICS
    return [
        # The policy on next_obs (for the target) and on obs (for its own loss): the same weights, so one batch of two.
        # Its head gives mean and deviation.
        *_forward("actor", 2 * b, o, 2 * a),
        # L = sum of (Q(s, a) - y)^2, y of min Q'(s', a'): forward and backward.
        *_forward("targets", b, o + a, 1, e),
        *_forward("critics", b, o + a, 1, e),
        *_back_to_the_weights(b),
        Product("critics, first layer, weight gradient", o + a, b, h, e, fold="n"),
        # L = alpha log pi - min Q(s, pi(s)): the updated critics forward, and back.
        *_forward("critics at pi", b, o + a, 1, e),
        *_back_to_the_policy(o, a),
    ]


def cql_products(o: int, a: int) -> list[Product]:
    """SAC's, but that the critics' loss needs 31 actions of each state, three times ten drawn and the dataset's.

    The policy's loss is of the critics before their update, so that its actions are 32nd in the same forward; and the
    first layer's product with an observation is the same for all actions at it.
    """
    b, h, e = BATCH, HIDDEN, CRITICS
    return [
        *_forward("actor", 2 * b, o, 2 * a),
        *_forward("targets", b, o + a, 1, e),
        Product("critics, first layer, observations", b, o, h, e, fold="n"),
        *_forward("critics at actions", 32 * b, a, 1, e),
        *_back_to_the_weights(31 * b),
        Product("critics, first layer, weight gradient, observations", o, b, h, e, fold="n"),
        Product("critics, first layer, weight gradient, actions", a, 31 * b, h, e, fold="n"),
        *_back_to_the_policy(o, a),
    ]


def wsrl_products(o: int, a: int) -> list[Product]:
    """Those of an environment step: four updates of ten critics, each with two targets, and one of the policy on all
    four batches.
    """
    b, h, e = BATCH, HIDDEN, 10
    of_an_update = [
        *_forward("targets", b, o + a, 1, 2),
        *_forward("critics", b, o + a, 1, e),
        *_back_to_the_weights(b, e),
        Product("critics, first layer, weight gradient", o + a, b, h, e, fold="n"),
    ]
    return [
        *_forward("actor", 8 * b, o, 2 * a),  # the same weights in all four, so that it is one batch of eight
        *(4 * of_an_update),
        *_forward("critics at pi", 4 * b, o + a, 1, e),
        *_back_to_the_policy(o, a, 4 * b, e),
    ]


PRODUCTS = {"sac": sac_products, "cql": cql_products, "wsrl": wsrl_products}


def _stored(*shape: int) -> Iterator[torch.Tensor]:
    """A random matrix (or a stack of them), stored by rows and stored by columns."""
    yield torch.randn(*shape)
    yield torch.randn(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)


def _in_turn(calls: list[Call]) -> Call:
    def compute() -> None:
        for call in calls:
            call()

    return compute


def _onednn(x: torch.Tensor, y: torch.Tensor) -> object:
    """x times the transpose of y; it has no place to be told for its output."""
    return torch.ops.mkldnn._linear_pointwise(x, y, None, "none", [], "")


def ways(p: Product) -> Iterator[Call]:
    """Ways to compute a product, each with preallocated operands, in either order of storage: by MKL and by oneDNN."""
    e = p.ensemble
    if e == 1 or p.fold:
        m, k, n = (size * e if p.fold == name else size for name, size in (("m", p.m), ("k", p.k), ("n", p.n)))
        for x in _stored(m, k):
            for y in _stored(k, n):
                yield partial(torch.mm, x, y, out=torch.empty(m, n))
                # The transposed problem: some libraries divide the work by rows only.
                yield partial(torch.mm, y.T, x.T, out=torch.empty(n, m))
                if AVAILABLE:
                    yield partial(_onednn, x, y.T)
                    yield partial(_onednn, y.T, x)
    if e == 1:
        return
    for x in _stored(e, p.m, p.k):
        for y in _stored(e, p.k, p.n):
            out = torch.empty(e, p.m, p.n)
            yield partial(torch.bmm, x, y, out=out)
            yield _in_turn([partial(torch.mm, x[i], y[i], out=out[i]) for i in range(e)])
            if AVAILABLE:
                yield _in_turn([partial(_onednn, x[i], y[i].T) for i in range(e)])
                yield _in_turn([partial(_onednn, y[i].T, x[i]) for i in range(e)])
            if p.n == 1:
                yield _in_turn([partial(torch.mv, x[i], y[i, :, 0].clone(), out=torch.empty(p.m)) for i in range(e)])
            if p.m == 1:
                yield _in_turn([partial(torch.mv, y[i].T, x[i, 0].clone(), out=torch.empty(p.n)) for i in range(e)])
            if p.k == 1:
                yield partial(torch.mul, x, y, out=out)


def fastest(calls: Sequence[Call], tries: int = 10, repeats: int = 10) -> Call:
    """The call with the least time over several tries in alternation: other work on the machine only ever adds."""
    least = [float("inf")] * len(calls)
    for _ in range(tries):
        for i, call in enumerate(calls):
            call()  # its operands are in the cache, as for every other candidate
            start = time.perf_counter()
            for _ in range(repeats):
                call()
            least[i] = min(least[i], time.perf_counter() - start)
    return calls[least.index(min(least))]


def main() -> None:
    """Choose the fastest way for every product, then compute them all, forever."""
    torch.set_grad_enabled(False)
    keep_freed_memory()
    env = gymnasium.make(sys.argv[2])
    assert env.observation_space.shape is not None
    assert env.action_space.shape is not None
    list_products = PRODUCTS[sys.argv[1]]
    products = list_products(int(np.prod(env.observation_space.shape)), int(np.prod(env.action_space.shape)))
    # What takes milliseconds is timed well enough by itself.
    best = {p: fastest(list(ways(p)), repeats=10 if p.flops < 10**9 else 1) for p in dict.fromkeys(products)}
    chosen = [best[product] for product in products]
    count = claim_slot()
    while True:
        for compute in chosen:
            compute()
        count()


if __name__ == "__main__":
    main()
