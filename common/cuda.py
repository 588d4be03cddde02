"""Select the device. On CUDA, also make runs repeatable, limit their memory, and launch an update as one graph.

These networks are small. Launching the hundred or more kernels of an update one by one takes several times as long as
the kernels themselves. A CUDA graph launches all of them at once.
"""

import gc
import os
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Generic, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from common.errors import InputError
from common.optim import Adam

GPU_SHARE_ENV = "ONRAMP_GPU_SHARE"  # a number in (0, 1]: the largest share of the card's memory that a run takes
P = ParamSpec("P")
R = TypeVar("R")
WARM_UP = 3  # eager calls before the capture, in which libraries choose their kernels and the compiler compiles


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function with `torch.compile`, except `Adam.minimize`, whose call of the fused kernel it cannot trace.

    A decorator of `Adam.minimize` would import the compiler, which delays the start of every program by a second.
    """
    if not hasattr(Adam.minimize, "_torchdynamo_disable"):
        Adam.minimize = torch.compiler.disable(Adam.minimize)  # type: ignore[method-assign]
    return torch.compile(function)


def device(name: str, tf32: bool = False) -> torch.device:
    """Return the device of that name, ready for use. "auto" is CUDA if it is available, else the CPU.

    On CUDA, float32 matrices are multiplied with 23 bits of mantissa, or with 10 if `tf32`. Raises InputError if CUDA
    is missing although `name` or a share in ONRAMP_GPU_SHARE asks for it.
    """
    shares = f"{GPU_SHARE_ENV} is set" if GPU_SHARE_ENV in os.environ else ""
    meant = "--device is cuda" if name == "cuda" else shares
    if name != "cpu" and meant and not torch.cuda.is_available():
        raise InputError(f"{meant}, but PyTorch sees no CUDA device here: give --device cpu")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    # Without these settings, some CUDA kernels add in an order that differs from run to run.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # none is read
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.cuda.set_per_process_memory_fraction(share_of_memory())
    return torch.device("cuda")


def share_of_memory() -> float:
    """Return the value of ONRAMP_GPU_SHARE, by default 1. Raises InputError if it is no number in (0, 1]."""
    text = os.environ.get(GPU_SHARE_ENV, "1")
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0.0 < share <= 1.0:
        raise InputError(f"{GPU_SHARE_ENV} is {text!r}: give a number in (0, 1]")
    return share


class Graph(Protocol):
    """The interface of a graph in `GraphedFunction`: `CUDAGraph`, and in the tests one on the CPU."""

    def __init__(self, generator: torch.Generator) -> None: ...

    def warm_up(self, function: Callable[[], R]) -> R:
        """Call the function on the stream on which it will be recorded."""

    def record(self, function: Callable[[], R]) -> R:
        """Record what the function does on the device, without doing it. Return its results, which `replay` fills."""

    def replay(self) -> None:
        """Do what was recorded."""


class CUDAGraph:
    """PyTorch's CUDA graph. Each replay draws its random numbers from the current state of `generator`."""

    stream: ClassVar[torch.cuda.Stream | None] = None  # PyTorch requires a separate one for warm-ups and captures

    def __init__(self, generator: torch.Generator) -> None:
        CUDAGraph.stream = CUDAGraph.stream or torch.cuda.Stream()
        self.graph = torch.cuda.CUDAGraph()
        self.graph.register_generator_state(generator)

    def warm_up(self, function: Callable[[], R]) -> R:
        current, own = torch.cuda.current_stream(), CUDAGraph.stream
        assert own is not None
        own.wait_stream(current)
        with torch.cuda.stream(own):
            results = function()
        current.wait_stream(own)
        return results

    def record(self, function: Callable[[], R]) -> R:
        gc.collect()
        gc.disable()  # collecting an old graph during the capture would end it
        try:
            with torch.cuda.graph(self.graph, stream=CUDAGraph.stream):
                return function()
        finally:
            gc.enable()

    def replay(self) -> None:
        self.graph.replay()


class GraphedFunction(Generic[R]):
    """Calls `function` eagerly `WARM_UP` times, then as a graph. Each set of constants and shapes has its own graph.

    Tensors among the arguments are copied to where the graph reads them. Results stay where the graph writes them, so
    the next call of the same kind overwrites them. The function must work on the device only, change tensors in place,
    and wait for no number. A graph does not repeat any other Python code of the function.
    """

    def __init__(self, function: Callable[..., R], generator: torch.Generator, graph: type[Graph] = CUDAGraph) -> None:
        self.function, self.generator, self.graph = function, generator, graph
        self._entries: dict[tuple[Any, ...], _GraphEntry[R]] = {}

    def __call__(self, *arguments: Any, **constants: Any) -> R:
        key = (*(a.shape if isinstance(a, Tensor) else a for a in arguments), *constants.items())
        if key not in self._entries:
            # Copies, because the graph reads the same memory at every replay.
            own = [a.to(self.generator.device, copy=True) if isinstance(a, Tensor) else a for a in arguments]
            tensors = [a for a in own if isinstance(a, Tensor)]
            self._entries[key] = _GraphEntry(
                partial(self.function, *own, **constants), tensors, self.graph(self.generator)
            )
        return self._entries[key]([a for a in arguments if isinstance(a, Tensor)])


class _GraphEntry(Generic[R]):
    """The calls with one set of constants and shapes."""

    def __init__(self, call: Callable[[], R], inputs: list[Tensor], graph: Graph) -> None:
        self.call, self.inputs, self.graph = call, inputs, graph
        self.calls = 0
        self.results: R

    def __call__(self, inputs: list[Tensor]) -> R:
        for own, given in zip(self.inputs, inputs, strict=True):
            own.copy_(given, non_blocking=True)
        self.calls += 1
        if self.calls <= WARM_UP:
            return self.graph.warm_up(self.call)
        if self.calls == WARM_UP + 1:
            self.results = self.graph.record(self.call)
        self.graph.replay()
        results: R = tree_map(lambda leaf: leaf, self.results)  # a dict of the caller's own, who may change it
        return results
