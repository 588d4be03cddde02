"""Compute only the matrix products of one update, repeatedly: a lower bound for an update that computes them all.

`python bench/speed/matmul_floor.py sac|cql|wsrl <environment id>` runs until killed. It counts updates as a counted
environment counts steps. Activations, losses, biases, sampling, optimiser and target update are left out. The remaining
products are listed below. Each is computed in the fastest of several ways on this machine.

The products are those of the losses as they are written. If only the smallest critic's value matters, our code computes
the gradient of that critic's rows alone (`common/onednn.py`). On HalfCheetah this saves up to 15 % of WSRL's operations
and 6 % of SAC's.
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
    fold: str = ""  # dimension along which an ensemble is one wider product: "m" or "n", or "k" if it is summed

    @property
    def flops(self) -> int:
        """Return the number of operations, a multiplication and an addition for every term."""
        return 2 * self.ensemble * self.m * self.k * self.n


def _forward(name: str, m: int, inputs: int, outputs: int, ensemble: int = 1) -> list[Product]:
    """Return the products of `m` rows through each network's three layers.

    First layers with one input are one wider product.
    """
    return [
        Product(f"{name}, first layer", m, inputs, HIDDEN, ensemble, fold="n"),
        Product(f"{name}, hidden layer", m, HIDDEN, HIDDEN, ensemble),
        Product(f"{name}, last layer", m, HIDDEN, outputs, ensemble),
    ]


def _back_to_the_policy(o: int, a: int, b: int = BATCH, e: int = CRITICS) -> list[Product]:
    """Return the products of the gradient of min Q(s, pi(s)) to the action's columns only, then through the policy."""
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
    """Return the products of the gradient of the critics' loss down to, and without, the first layer.

    No loss needs the gradient of (s, a).
    """
    h = HIDDEN
    return [
        Product("critics, last layer, weight gradient", 1, b, h, e),
        Product("critics, last layer, input gradient", b, 1, h, e),
        Product("critics, hidden layer, weight gradient", h, b, h, e),
        Product("critics, hidden layer, input gradient", b, h, h, e),
    ]


def sac_products(o: int, a: int) -> list[Product]:
    """Return every product of one update of SAC, for `o` observations and `a` actions.

    For a layer `y = x W`, they are forward `x W`, weight gradient `x^T dy` and input gradient `dy W^T`.
    """
    b, h, e = BATCH, HIDDEN, CRITICS
    return [
        # The policy on next_obs (for the target) and on obs (for its own loss) has the same weights, so both are one
        # batch. Its head gives mean and deviation.
        *_forward("actor", 2 * b, o, 2 * a),
        # L = sum of (Q(s, a) - y)^2, with y from min Q'(s', a'): forward and backward.
        *_forward("targets", b, o + a, 1, e),
        *_forward("critics", b, o + a, 1, e),
        *_back_to_the_weights(b),
        Product("critics, first layer, weight gradient", o + a, b, h, e, fold="n"),
        # L = alpha log pi - min Q(s, pi(s)): forward and backward through the updated critics.
        *_forward("critics at pi", b, o + a, 1, e),
        *_back_to_the_policy(o, a),
    ]


def cql_products(o: int, a: int) -> list[Product]:
    """Return every product of one update of CQL. SAC's critic loss has one action of each state, CQL's 31.

    These are three times ten sampled actions and the dataset's. The policy's loss uses the critics before their update,
    so its actions are the 32nd in the same forward pass. All actions of a state share the first layer's product with
    the observation.
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
    """Return every product of an environment step of WSRL.

    It has four updates of ten critics, each with two targets, and one update of the policy on all four batches.
    """
    b, h, e = BATCH, HIDDEN, 10
    of_an_update = [
        *_forward("targets", b, o + a, 1, 2),
        *_forward("critics", b, o + a, 1, e),
        *_back_to_the_weights(b, e),
        Product("critics, first layer, weight gradient", o + a, b, h, e, fold="n"),
    ]
    return [
        *_forward("actor", 8 * b, o, 2 * a),  # the weights are the same in all four updates: one batch of eight
        *(4 * of_an_update),
        *_forward("critics at pi", 4 * b, o + a, 1, e),
        *_back_to_the_policy(o, a, 4 * b, e),
    ]


PRODUCTS = {"sac": sac_products, "cql": cql_products, "wsrl": wsrl_products}


def _stored(*shape: int) -> Iterator[torch.Tensor]:
    """Yield a random matrix, or a stack of them, stored by rows and then one stored by columns."""
    yield torch.randn(*shape)
    yield torch.randn(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)


def _in_turn(calls: list[Call]) -> Call:
    def compute() -> None:
        for call in calls:
            call()

    return compute


def _onednn(x: torch.Tensor, y: torch.Tensor) -> object:
    """Compute x times the transpose of y; the operation takes no preallocated output."""
    return torch.ops.mkldnn._linear_pointwise(x, y, None, "none", [], "")


def ways(p: Product) -> Iterator[Call]:
    """Yield ways to compute a product, by MKL and by oneDNN, in either order of storage.

    Operands are preallocated.
    """
    e = p.ensemble
    if e == 1 or p.fold:
        m, k, n = (size * e if p.fold == name else size for name, size in (("m", p.m), ("k", p.k), ("n", p.n)))
        for x in _stored(m, k):
            for y in _stored(k, n):
                yield partial(torch.mm, x, y, out=torch.empty(m, n))
                # The transposed problem may be faster, because some libraries divide the work by rows only.
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
    """Return the call with the least time over several alternating tries, because other work only adds time."""
    least = [float("inf")] * len(calls)
    for _ in range(tries):
        for i, call in enumerate(calls):
            call()  # puts its operands in the cache, as for every other candidate
            start = time.perf_counter()
            for _ in range(repeats):
                call()
            least[i] = min(least[i], time.perf_counter() - start)
    return calls[least.index(min(least))]


def main() -> None:
    """Choose the fastest way for every product, then compute all products without end."""
    torch.set_grad_enabled(False)
    keep_freed_memory()
    env = gymnasium.make(sys.argv[2])
    assert env.observation_space.shape is not None
    assert env.action_space.shape is not None
    list_products = PRODUCTS[sys.argv[1]]
    products = list_products(int(np.prod(env.observation_space.shape)), int(np.prod(env.action_space.shape)))
    # A product that takes milliseconds needs no repeats to be timed.
    best = {p: fastest(list(ways(p)), repeats=10 if p.flops < 10**9 else 1) for p in dict.fromkeys(products)}
    chosen = [best[product] for product in products]
    count = claim_slot()
    while True:
        for compute in chosen:
            compute()
        count()


if __name__ == "__main__":
    main()
