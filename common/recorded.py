"""Updates on the CPU as compiled code: traced once below autograd, and called as one function.

An update of these networks takes about twice the time of its matrix products. The rest is the dispatch of hundreds of
small operations and autograd's bookkeeping. The compiled code leaves both out. No algorithm file changes for it.

The tracer sees the operations that eager PyTorch would execute, gradients and optimiser steps included. Every tensor
that exists before the update becomes an input of the graph, so the compiled code changes the same memory. Every random
draw becomes an input too: the same generator draws it before each call, in the same order, with the same numbers.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

if TYPE_CHECKING:  # importing them takes a second, which a run that records nothing does not spend
    from torch.fx import GraphModule

R = TypeVar("R")
_aten = torch.ops.aten
_DRAWS = {
    _aten.rand.generator,
    _aten.randn.generator,
    _aten.randint.generator,
    _aten.randint.low_generator,
    _aten.randperm.generator,
}

_SCATTERS = ("aten.index_put", "aten.index_add", "aten.scatter", "aten.index_copy")  # see `_index_put`


class CannotRecord(Exception):
    """The function cannot be traced; the message is the reason."""


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
        key = (*((a.shape, a.dtype) if isinstance(a, Tensor) else a for a in arguments), *constants.items())
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
        with _unchanged(owner):
            trace, again = (_Trace(function, arguments) for _ in range(2))
        if not trace.equals(again):
            raise CannotRecord("two recordings of it differ: it uses Python's or NumPy's random numbers, or counts")
        self.function, self.owner, self.spec = function, owner, trace.spec
        self.changed, self.generators = trace.changed, [draw.kwargs["generator"] for draw in trace.draws]
        # Aliases without autograd, because a leaf that needs a gradient may not be changed in place.
        self.inputs = [source.detach() if isinstance(source, Tensor) else source for source in trace.sources]
        self.drawn = [(i, source) for i, source in enumerate(self.inputs) if isinstance(source, _Draw)]
        self.given = [(i, source) for i, source in enumerate(self.inputs) if isinstance(source, int)]
        examples = [
            arguments[s] if isinstance(s, int) else s.example if isinstance(s, _Draw) else s for s in self.inputs
        ]
        self.compiled = _compiled(trace.graph, examples)

    @torch.no_grad()
    def __call__(self, *arguments: Tensor) -> R:
        inputs = self.inputs.copy()
        for i, number in self.given:
            inputs[i] = arguments[number]
        for i, draw in self.drawn:
            inputs[i] = draw()
        results: R = tree_unflatten(self.compiled(*inputs), self.spec)
        return results

    def check(self, *arguments: Tensor) -> None:
        """Raise CannotCompile if the compiled code's results differ from the function's by more than rounding.

        Compilers have faults: see `_index_put`.
        """
        for start, eager, recorded in self.compare(*arguments):
            moved, error = (eager - start).norm(), (recorded - eager).norm()
            if not error <= 0.05 * moved + 1e-5 * start.norm() + 1e-5:
                raise CannotCompile(f"compiled code gives another result (error {error:.1e}, change {moved:.1e})")

    def compare(self, *arguments: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Call the function and the compiled code from the present state, and restore that state.

        Return each changed tensor before the call, after the function's and after the compiled one. The results follow
        in the same form, with zeros before the call.
        """
        before = [tensor.detach().clone() for tensor in self.changed]
        states = [generator.get_state() for generator in self.generators]
        outcomes = []
        for call in (self.function, self):
            with _unchanged(self.owner):
                results = [leaf.detach().clone() for leaf in tree_leaves(call(*arguments)) if isinstance(leaf, Tensor)]
            outcomes.append([*(tensor.detach().clone() for tensor in self.changed), *results])
            with torch.no_grad():
                for tensor, old in zip(self.changed, before, strict=True):
                    tensor.copy_(old)
            for generator, state in zip(self.generators, states, strict=True):
                generator.set_state(state)
        return list(zip(before + [torch.zeros_like(result) for result in results], *outcomes, strict=True))


class _Draw:
    """A random draw with a generator, as the function makes it. `example` has its shape and type."""

    def __init__(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.operation, self.args, self.kwargs = operation, args, kwargs
        own = torch.Generator(kwargs["generator"].device)
        self.example: Tensor = operation(*args, **kwargs | {"generator": own})

    def __call__(self) -> Tensor:
        drawn: Tensor = self.operation(*self.args, **self.kwargs)
        return drawn

    @property
    def description(self) -> tuple[Any, ...]:
        return self.operation, self.args, {k: v for k, v in self.kwargs.items() if k != "generator"}


class _Trace(TorchDispatchMode):
    """The operations of a function, as a graph whose inputs are `sources`.

    A source is a tensor from outside the function, a draw, or the number of one of the `arguments`. Tensors are
    replaced by fake ones while tracing, which have shapes but no data, so nothing is computed and nothing changes.
    """

    def __init__(self, function: Callable[..., Any], arguments: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        from torch._subclasses import FakeTensorMode
        from torch.fx.experimental.proxy_tensor import make_fx

        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._replaced: dict[Any, tuple[Any, Tensor]] = {}  # a source and its fake tensor, by the source's memory
        self._views: dict[int, Any] = {}  # the one view of each memory
        self._source_of: dict[int, Any] = {}  # by the identity of the fake tensor
        self._written: set[int] = set()  # storages of fake tensors
        given = [self._fake_of(argument, i) for i, argument in enumerate(arguments)]
        self.spec: TreeSpec

        def flat() -> list[Any]:
            with self:
                results, self.spec = tree_flatten(function(*given))
            return results

        try:
            with self.fake:
                traced = make_fx(
                    flat,
                    tracing_mode="real",
                    decomposition_table={
                        _aten._fused_adamw_.tensor_lr: _adamw,
                        _aten.addmm.default: lambda bias, x, y: torch.mm(x, y) + bias,  # added in the activation's loop
                        _aten.index_put.default: _index_put,
                    },
                    _allow_non_fake_inputs=True,
                )()
            self.graph = self._with_inputs(traced)
        except CannotRecord:
            raise
        except Exception as error:
            raise CannotRecord(f"{type(error).__name__}: {error}".splitlines()[0]) from error

    @property
    def changed(self) -> list[Tensor]:
        """The tensors from outside that the function changes, also through views."""
        tensors = [source for source in self.sources if isinstance(source, Tensor)]
        return [tensor for tensor in tensors if _storage(self._replaced[_memory(tensor)][1]) in self._written]

    @property
    def draws(self) -> list[_Draw]:
        return [source for source in self.sources if isinstance(source, _Draw)]

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("generator") is not None:
            return self._draw(operation, args, kwargs)
        if torch.Tag.nondeterministic_seeded in operation.tags:
            raise CannotRecord(f"{operation} draws without a torch.Generator")
        fakes, fake_kwargs = tree_map(self._fake_of, args), tree_map(self._fake_of, kwargs)
        for i, argument in enumerate(operation._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = fakes[i] if i < len(fakes) else fake_kwargs.get(argument.name)
                self._written |= {_storage(tensor) for tensor in tree_leaves(written)}
        results = operation(*fakes, **fake_kwargs)
        # `x += 1` rebinds x to the result, which must be the tensor itself and not its fake.
        return args[0] if operation._schema.name.endswith("_") and isinstance(args[0], Tensor) else results

    def _draw(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        if operation not in _DRAWS:
            raise CannotRecord(f"it draws by {operation}: use torch.rand, randn, randint or randperm")
        with _disable_current_modes():
            draw = _Draw(operation, args, kwargs)
        fake: Tensor = self._fake_of(draw.example, draw)
        return fake

    def _fake_of(self, value: Any, source: Any = None) -> Any:
        """Return a tensor's fake, whose source is `source` or the tensor itself. Return any other value as it is."""
        if not isinstance(value, Tensor) or hasattr(value, "fake_mode"):
            return value
        memory = id(source) if source is not None else _memory(value)
        if memory not in self._replaced:
            if source is None and self._views.setdefault(_storage(value), memory) != memory:
                raise CannotRecord("two of its tensors are different views of the same memory")
            with _disable_current_modes():
                fake = self.fake.from_tensor(value.detach())
            self._replaced[memory] = value, fake
            self._source_of[id(fake)] = value if source is None else source
        return self._replaced[memory][1]

    def _with_inputs(self, traced: "GraphModule") -> "GraphModule":
        """Return the graph with an input for each tensor from outside, which the tracer made an attribute."""
        graph = traced.graph
        inputs: dict[str, torch.fx.Node] = {}
        if scatters := [str(node.target) for node in graph.nodes if str(node.target).startswith(_SCATTERS)]:
            raise CannotRecord(f"it uses {scatters[0]}, which may be compiled to wrong code")
        first = next(iter(graph.nodes))
        self.sources: list[Any] = []
        for node in graph.find_nodes(op="get_attr"):
            if node.target not in inputs:
                with graph.inserting_before(first):
                    inputs[node.target] = graph.placeholder(f"input_{len(inputs)}")
                value = getattr(traced, node.target)
                self.sources.append(self._source_of.get(id(value), value))
            node.replace_all_uses_with(inputs[node.target])
        graph.eliminate_dead_code(lambda node: node.op != "get_attr")
        graph.set_codegen(torch.fx.graph.CodeGen())
        return torch.fx.GraphModule({}, graph)

    def equals(self, other: "_Trace") -> bool:
        """Return whether both have the same operations on the same memory."""
        same_code = self.graph.code == other.graph.code and len(self.sources) == len(other.sources)
        return same_code and all(map(_same_source, self.sources, other.sources))


def _memory(tensor: Tensor) -> Any:
    """Return what two tensors have in common if they are the same view of the same memory, as x and x.data are."""
    return _storage(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _storage(tensor: Tensor) -> int:
    """Return the identity of the memory that a tensor shares with its views."""
    return int(tensor.untyped_storage()._cdata)


def _same_source(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is b or (a.shape == b.shape and torch.equal(a, b))
    return bool(a.description == b.description if isinstance(a, _Draw) and isinstance(b, _Draw) else a == b)


@contextmanager
def _unchanged(owner: object) -> Iterator[None]:
    """Restore the attributes of `owner` that the block binds anew. Raises CannotRecord if there are some."""
    before = dict(vars(owner))
    try:
        yield
    finally:  # a new attribute is compared with the dictionary itself, which no attribute is
        changed = [name for name, value in vars(owner).items() if before.get(name, before) is not value]
        vars(owner).clear()
        vars(owner).update(before)
    if changed:
        raise CannotRecord(f"it changes {', '.join(changed)} of {type(owner).__name__}, which compiled code cannot")


def _adamw(
    parameters: list[Tensor],
    gradients: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    _: list[Tensor],
    steps: list[Tensor],
    *,
    lr: Tensor,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    amsgrad: bool,
    maximize: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Compute what PyTorch's fused kernel does (Loshchilov and Hutter 2019, algorithm 2), from plain operations."""
    step = steps[0].double()
    rate = (lr / (1.0 - beta1**step)).float()
    root = (1.0 - beta2**step).rsqrt().float()
    for parameter, gradient, mean, square in zip(parameters, gradients, means, squares, strict=True):
        if grad_scale is not None:
            gradient = gradient / grad_scale
        if weight_decay:
            parameter.mul_((1.0 - lr * weight_decay).float())
        mean.lerp_(gradient, 1.0 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
        parameter.sub_(rate * mean / (square.sqrt() * root + eps))


def _index_put(base: Tensor, indices: list[Tensor | None], values: Tensor, accumulate: bool = False) -> Any:
    """Add the rows `values` [k, ...] to rows `indices` [k] of `base` [n, ...] by a sum over k, if both are small.

    This is the gradient of choosing k of n critics. Inductor's own form adds in any order, and it is fused with loops
    that write to the same memory, which gave twice one critic's gradient (compare pytorch issues 171493 and 198270).
    """
    index = indices[0]
    if len(indices) != 1 or index is None or index.dim() != 1 or not accumulate or len(index) * len(base) > 1024:
        return NotImplemented
    chosen = index.unsqueeze(1) == torch.arange(len(base), device=base.device)  # [k, n]
    chosen = chosen.view(*chosen.shape, *(1 for _ in base.shape[1:]))
    return base + torch.where(chosen, values.unsqueeze(1), 0.0).sum(0)


def require_compiler() -> None:
    """Raise CannotCompile if there is no C++ compiler."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception as error:
        raise CannotCompile(f"no C++ compiler was found ({type(error).__name__})") from error


def _compiled(graph: "GraphModule", inputs: list[Any]) -> Callable[..., list[Tensor]]:
    """Compile the graph with Inductor, which keeps its code in a cache on the disk. Raises CannotCompile."""
    from torch._inductor import standalone_compile
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class KeepOneDNN(CustomGraphPass):
        """Call oneDNN's product as eager PyTorch does. Inductor's own form wants constant weights."""

        def __call__(self, graph: torch.fx.Graph) -> None:
            for node in graph.find_nodes(op="call_function", target=torch.ops.mkldnn._linear_pointwise.default):
                node.meta["custom"] = {"fallback_to_eager": True}

        def uuid(self) -> bytes:
            return hashlib.sha256(b"KeepOneDNN 1").digest()

    patches = {
        "cpp_wrapper": True,  # the calls of the kernels are compiled too
        "pattern_matcher": False,  # its oneDNN fusion wants constant weights
        "cpp.vec_isa_ok": True,  # do not spend a second on trying what the processor reports
        "compile_threads": 1,  # no pool of processes for one file
        "post_grad_custom_post_pass": KeepOneDNN(),
    }
    try:
        with torch.no_grad():
            artifact = standalone_compile(
                graph, inputs, dynamic_shapes="from_example_inputs", options={"config_patches": patches}
            )
    except Exception as error:
        raise CannotCompile(f"{type(error).__name__}: {error}".splitlines()[0]) from error
    return artifact
