"""Updates on the CPU as compiled code: traced once below autograd (`common.tracing`), and called as one function.

An update of these networks takes about twice the time of its matrix products. The rest is the dispatch of hundreds of
small operations and autograd's bookkeeping. The compiled code leaves both out. No algorithm file changes for it.

The compiled code changes the same memory as the eager update. Before each call, the same generator draws the same
random numbers in the same order, and they are inputs of the compiled code.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_unflatten

from common.parts import compile_parts
from common.tracing import CannotRecord, Draw, Operations, Trace

if TYPE_CHECKING:  # importing it takes a second, which a run that records nothing does not spend
    from torch.fx import GraphModule

R = TypeVar("R")


class CannotCompile(Exception):
    """The traced function cannot be compiled; the message is the reason."""


class RecordedFunction(Generic[R]):
    """Calls `function` as compiled code. Each set of constants and shapes has its own, made at its first call.

    `record` makes it: it maps a function of tensors, and the tensors of its first call, to a faster form of the
    function (see `Recording`). The function must work on tensors only and change them in place. Compiled code repeats
    none of its other Python code. Random numbers must come from a `torch.Generator`.
    """

    def __init__(
        self, function: Callable[..., R], record: Callable[[Callable[..., R], Sequence[Tensor]], Callable[..., R]]
    ) -> None:
        self.function, self.record = function, record
        self._recordings: dict[tuple[Any, ...], Callable[..., R]] = {}

    def __call__(self, *arguments: Any, **constants: Any) -> R:
        tensors = [a for a in arguments if isinstance(a, Tensor)]
        key = (*((a.shape, a.stride(), a.dtype) if isinstance(a, Tensor) else a for a in arguments), *constants.items())
        if key not in self._recordings:
            self._recordings[key] = self.record(_of_tensors(partial(self.function, **constants), arguments), tensors)
        return self._recordings[key](*tensors)


def _of_tensors(function: Callable[..., R], arguments: Sequence[Any]) -> Callable[..., R]:
    """Return `function` as a function of the tensors among its arguments."""

    def call(*tensors: Tensor) -> R:
        given = iter(tensors)
        return function(*(next(given) if isinstance(a, Tensor) else a for a in arguments))

    return call


class Recording(Generic[R]):
    """One compiled call of `function` on tensors of the shapes of `arguments`.

    Raises CannotRecord if the function's operations depend on data or change an attribute of `owner`, or if it draws
    from the global generator. Raises CannotCompile if there is no working compiler.
    """

    def __init__(self, function: Callable[..., R], arguments: Sequence[Tensor], owner: object) -> None:
        self.function, self.owner = function, owner
        with _unchanged(owner):
            self.trace = trace = Trace(function, arguments)
        self.examples = [argument.detach() for argument in arguments]  # whose values are not read
        if not self.is_current():
            raise CannotRecord("two recordings of it differ: it uses Python's or NumPy's random numbers, or counts")
        self.spec, self.numbers = trace.spec, trace.numbers
        self.changed, self.generators = trace.changed, [draw.kwargs["generator"] for draw in trace.draws]
        # Aliases without autograd, because a leaf that needs a gradient may not be changed in place.
        self.inputs = [source.detach() if isinstance(source, Tensor) else source for source in trace.sources]
        self.drawn = [(i, source) for i, source in enumerate(self.inputs) if isinstance(source, Draw)]
        self.given = [(i, source) for i, source in enumerate(self.inputs) if isinstance(source, int)]
        examples = [
            arguments[s] if isinstance(s, int) else s.example if isinstance(s, Draw) else s for s in self.inputs
        ]
        self.compiled = compile_parts(trace.graph, trace.cuts, examples, _compiled)

    @torch.no_grad()
    def __call__(self, *arguments: Tensor) -> R:
        inputs = self.inputs.copy()
        for i, number in self.given:
            inputs[i] = arguments[number]
        for i, draw in self.drawn:
            inputs[i] = draw()
        tensors = iter(self.compiled(*inputs))
        leaves = [next(tensors) if number is Tensor else number for number in self.numbers]
        results: R = tree_unflatten(leaves, self.spec)
        return results

    def is_current(self) -> bool:
        """Return whether the function would be recorded in the same way now.

        If not, it depends on something that has changed and that compiled code holds as a constant.
        """
        with _unchanged(self.owner):
            return self.trace.equals(Operations(self.function, self.examples))

    def check(self, *arguments: Tensor) -> None:
        """Raise CannotCompile if the compiled code's results differ from the function's by more than rounding.

        Compilers have faults: see `common.tracing`. Where the difference is large, it is compared with what rounding
        can do: Adam's first step is ±lr however small the gradient, so a gradient of zero but for rounding has a step
        of either sign (as a bias before a batch normalisation has in CrossQ).
        """
        noise: list[Tensor] = []
        for i, (start, eager, recorded) in enumerate(self.compare(*arguments)):
            start, eager, recorded = start.double(), eager.double(), recorded.double()
            moved, error = (eager - start).norm(), (recorded - eager).norm()
            allowed = 0.05 * moved + 1e-5 * start.norm() + 1e-5
            if error <= allowed:
                continue
            noise = noise or self._noise(arguments)
            if not error <= allowed + noise[i]:
                raise CannotCompile(f"compiled code gives another result (error {error:.1e}, change {moved:.1e})")

    def compare(self, *arguments: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Call the function and the compiled code from the present state, and restore that state.

        Return each changed tensor before the call, after the function's and after the compiled one. The results follow
        in the same form, with zeros before the call.
        """
        eager, compiled = self._outcome(self.function, arguments), self._outcome(self, arguments)
        before = [tensor.detach().clone() for tensor in self.changed]
        before += [torch.zeros_like(result) for result in eager[len(before) :]]
        return list(zip(before, eager, compiled, strict=True))

    def _outcome(
        self, call: Callable[..., R], arguments: Sequence[Tensor], nudge: torch.Generator | None = None
    ) -> list[Tensor]:
        """Return each changed tensor after the call, then its results, and restore the state.

        With `nudge`, the call's inputs are first multiplied by 1 ± 1e-6, except whole numbers, which count or choose.
        """
        before = [tensor.detach().clone() for tensor in self.changed]
        states = [generator.get_state() for generator in self.generators]
        given = [argument.clone() for argument in arguments]
        with torch.no_grad():
            for tensor in [*self.changed, *given] if nudge else []:
                if not torch.equal(tensor, tensor.round()):
                    tensor.mul_(1.0 + 1e-6 * torch.randn(tensor.shape, generator=nudge, dtype=tensor.dtype))
        with _unchanged(self.owner):
            leaves = tree_leaves(call(*given))
        results = [leaf.detach().clone() for leaf in leaves if isinstance(leaf, Tensor)]
        outcome = [*(tensor.detach().clone() for tensor in self.changed), *results]
        with torch.no_grad():
            for tensor, old in zip(self.changed, before, strict=True):
                tensor.copy_(old)
        for generator, state in zip(self.generators, states, strict=True):
            generator.set_state(state)
        return outcome

    def _noise(self, arguments: Sequence[Tensor]) -> list[Tensor]:
        """Return how far the function's results move if its inputs move by 1e-6, as rounding moves a sum of products.

        It is the norm of the difference, per tensor of the outcome, and the largest of twenty.
        """
        nudge = torch.Generator().manual_seed(0)
        eager = self._outcome(self.function, arguments)
        nudged = [self._outcome(self.function, arguments, nudge) for _ in range(20)]
        return [torch.stack([(o[i].double() - e.double()).norm() for o in nudged]).max() for i, e in enumerate(eager)]


@contextmanager
def _unchanged(owner: object) -> Iterator[None]:
    """Restore attributes of `owner` that the block rebinds, and numbers and arrays that it changes.

    The numbers are those of `owner`, of its attributes and of their submodules. Raises CannotRecord if any changed.
    """
    attributes = dict(vars(owner))
    arrays = [(name, value, value.copy()) for name, value in attributes.items() if isinstance(value, np.ndarray)]
    numbers = [(name, part, _numbers_of(part)) for name, part in _parts(owner)]
    try:
        yield
    finally:  # a new attribute is compared with the dictionary itself, which no attribute is
        changed = {name for name, value in vars(owner).items() if attributes.get(name, attributes) is not value}
        changed |= {name for name, array, old in arrays if array.tobytes() != old.tobytes()}
        changed |= {name for name, part, old in numbers if _numbers_of(part) != old}
        vars(owner).clear()
        vars(owner).update(attributes)
        for _, array, old_array in arrays:
            array[...] = old_array
        for _, part, old in numbers:
            vars(part).update(old)
    if changed:
        listed = ", ".join(sorted(changed))
        raise CannotRecord(f"it changes {listed} of {type(owner).__name__}, which compiled code cannot")


def _parts(owner: object) -> Iterator[tuple[str, object]]:
    """Yield each attribute of `owner` that has attributes itself, and its submodules, with the attribute's name."""
    for name, value in vars(owner).items():
        if isinstance(value, torch.nn.Module):
            yield from ((name, module) for module in value.modules())
        elif hasattr(value, "__dict__") and not isinstance(value, type | Tensor):
            yield name, value


def _numbers_of(part: object) -> dict[str, float]:
    """Return the attributes that are Python's numbers."""
    return {name: value for name, value in vars(part).items() if isinstance(value, int | float)}


def compiler_version() -> str:
    """Return the name and version of the C++ compiler that Inductor will choose. Raises CannotCompile if there is none.

    Importing Inductor to ask it would delay a run's first step by more than a second.
    """
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    try:
        output = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise CannotCompile(f"no C++ compiler was found ({type(error).__name__})") from error
    return output.partition("\n")[0]


def _compiled(graph: "GraphModule", inputs: list[Any]) -> Callable[..., list[Tensor]]:
    """Compile the graph with Inductor, which keeps its code in a cache on the disk. Raises CannotCompile."""
    from torch._inductor import standalone_compile
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class CallEagerly(CustomGraphPass):
        """Call two kinds of operations as eager PyTorch does, instead of compiling them."""

        def __call__(self, graph: torch.fx.Graph) -> None:
            # Inductor's own form of oneDNN's product wants constant weights.
            eager = graph.find_nodes(op="call_function", target=torch.ops.mkldnn._linear_pointwise.default)
            # Adam's βᵗ is one number. A compiled loop would compute it again for every 16 weights. Eager PyTorch has a
            # form of this operation that compiled code can call if both operands are tensors.
            powers = graph.find_nodes(op="call_function", target=torch.ops.aten.pow.Tensor_Tensor)
            eager += [node for node in powers if node.meta["val"].dim() == 0]
            for node in eager:
                node.meta["custom"] = {"fallback_to_eager": True}

        def uuid(self) -> bytes:
            return get_hash_for_files((__file__,))  # another version of this file compiles again

    patches = {
        "cpp_wrapper": True,  # the calls of the kernels are compiled too
        "cpp_wrapper_build_separate": True,  # without most of the optimisation, which only the kernels need
        "pattern_matcher": False,  # its oneDNN fusion wants constant weights
        "cpp.vec_isa_ok": True,  # do not spend a second on trying what the processor reports
        "size_asserts": False,  # the inputs are always the same tensors
        "compile_threads": 1,  # no pool of processes for one file
        "post_grad_custom_post_pass": CallEagerly(),
    }
    try:
        with torch.no_grad():
            artifact = standalone_compile(
                graph, inputs, dynamic_shapes="from_example_inputs", options={"config_patches": patches}
            )
    except Exception as error:  # a compiler fails in many ways, and the run prints which
        raise CannotCompile(f"{type(error).__name__}: {error}".splitlines()[0]) from error
    return artifact
