"""Trace a function of tensors below autograd, into a graph whose inputs are everything that it reads.

The tracer sees the operations that eager PyTorch would execute, gradients and optimiser steps included. Every tensor
that exists before the call becomes an input of the graph, and so does every random draw.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map

if TYPE_CHECKING:  # importing it takes a second, which a run that records nothing does not spend
    from torch.fx import GraphModule

_aten = torch.ops.aten
_DRAWS = {
    _aten.rand.generator,
    _aten.randn.generator,
    _aten.randint.generator,
    _aten.randint.low_generator,
    _aten.randperm.generator,
}
_SCATTERS = (  # see `_index_put`
    *("aten.index_put", "aten.index_add", "aten.index_copy", "aten.scatter", "aten.put"),
    "aten.embedding_dense_backward",
)


class CannotRecord(Exception):
    """The function cannot be traced; the message is the reason."""


class Draw:
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


class Operations(TorchDispatchMode):
    """The operations of a function, in order, and their sources: what they read from outside of it.

    A source is a tensor from outside the function, a draw, or the number of one of the `arguments`. Tensors are
    replaced by fake ones meanwhile, which have shapes but no data, so nothing is computed and nothing changes.
    Raises CannotRecord.
    """

    def __init__(self, function: Callable[..., Any], arguments: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        from torch._subclasses import FakeTensorMode

        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.operations: list[tuple[Any, ...]] = []  # with what each was called and what it returned
        self._replaced: dict[Any, tuple[Any, Tensor]] = {}  # a source and its fake tensor, by the source's memory
        self._views: dict[int, Any] = {}  # the one view of each memory
        self._source_of: dict[int, Any] = {}  # by the identity of the fake tensor
        self._written: set[int] = set()  # storages of fake tensors
        self._order: dict[int, int] = {}  # a storage's number, in the order of their appearance
        self._kept: list[Any] = []  # results, so that no storage gets the identity of an earlier one
        given = [self._fake_of(argument, i) for i, argument in enumerate(arguments)]
        self.spec: TreeSpec  # of the results
        self.numbers: list[Any]  # the results, with the class Tensor for each tensor

        def flat() -> list[Any]:
            with self:
                results, self.spec = tree_flatten(function(*given))
            self.operations.append((self.spec, self._described(tree_map(self._fake_of, results))))
            self.numbers = [Tensor if isinstance(result, Tensor) else result for result in results]
            return [result for result in results if isinstance(result, Tensor)]

        try:
            with self.fake:
                self._call(flat)
        except CannotRecord:
            raise
        except Exception as error:  # whatever the function cannot do without data; eager code raises its own faults
            raise CannotRecord(f"{type(error).__name__}: {error}".splitlines()[0]) from error
        self._kept.clear()

    def _call(self, flat: Callable[[], list[Any]]) -> None:
        flat()

    def equals(self, other: "Operations") -> bool:
        """Return whether both have the same operations on the same memory, with the same generators."""
        sources, others = list(self._source_of.values()), list(other._source_of.values())
        same_operations = self.operations == other.operations and len(sources) == len(others)
        return same_operations and all(map(_same_source, sources, others))

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("generator") is not None:
            return self._draw(operation, args, kwargs)
        if torch.Tag.nondeterministic_seeded in operation.tags:
            raise CannotRecord(f"{operation} draws without a torch.Generator")
        fakes, fake_kwargs = tree_map(self._fake_of, args), tree_map(self._fake_of, kwargs)
        self._written |= {storage(tensor) for tensor in written(operation, fakes, fake_kwargs)}
        given = self._described((fakes, fake_kwargs))
        results = operation(*fakes, **fake_kwargs)
        self.operations.append((operation, given, self._described(results)))
        self._kept.append(results)
        # `x += 1` rebinds x to the result, which must be the tensor itself and not its fake.
        return args[0] if _is_in_place(operation) and isinstance(args[0], Tensor) else results

    def _draw(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        if operation not in _DRAWS:
            raise CannotRecord(f"it draws by {operation}: use torch.rand, randn, randint or randperm")
        with _disable_current_modes():
            draw = Draw(operation, args, kwargs)
        fake: Tensor = self._fake_of(draw.example, draw)
        return fake

    def _fake_of(self, value: Any, source: Any = None) -> Any:
        """Return a tensor's fake, whose source is `source` or the tensor itself. Return any other value as it is."""
        if not isinstance(value, Tensor) or hasattr(value, "fake_mode"):
            return value
        memory = id(source) if source is not None else _memory(value)
        if memory not in self._replaced:
            if source is None and self._views.setdefault(storage(value), memory) != memory:
                raise CannotRecord("two of its tensors are different views of the same memory")
            with _disable_current_modes():
                fake = self.fake.from_tensor(value.detach())
            self._replaced[memory] = value, fake
            self._source_of[id(fake)] = value if source is None else source
            self._order.setdefault(storage(fake), len(self._order))  # at once, or swapped arguments would look equal
        return self._replaced[memory][1]

    def _described(self, values: Any) -> str:
        """Return the values as text, with each tensor as a view of the memory that came n-th."""

        def view(value: Any) -> Any:
            if isinstance(value, torch.ScriptObject):  # of the profiler's marks; its text would be an address
                return type(value)
            if not isinstance(value, Tensor):
                return value
            number, offset, shape, stride, dtype = _memory(value)
            # In a dimension of one element, products by plain operations (`_mm`) have another stride, which means none.
            strides = [0 if n == 1 else s for n, s in zip(shape, stride, strict=True)]
            return self._order.setdefault(number, len(self._order)), offset, shape, strides, dtype

        return repr(tree_map(view, values))


class Trace(Operations):
    """The operations of a function as a graph, whose inputs are `sources`."""

    def _call(self, flat: Callable[[], list[Any]]) -> None:
        from torch.fx.experimental.proxy_tensor import make_fx

        self.cuts: list[str] = []  # names of the nodes after which `cut` was called
        traced = make_fx(
            flat,
            tracing_mode="real",
            decomposition_table={
                _aten._fused_adamw_.tensor_lr: _adamw,
                _aten.addmm.default: lambda bias, x, y: torch.mm(x, y) + bias,  # added in the activation's loop
                _aten.index_put.default: _index_put,
                _aten.mm.default: _mm,
                _aten.tanh_.default: _tanh_,  # of hidden layers; an actor's squashing is not in place
                _aten.gelu.default: _gelu,
                _aten.gelu_backward.default: _gelu_backward,
                _aten.gelu_backward.grad_input: _gelu_backward,
            },
            _allow_non_fake_inputs=True,
        )()
        self.graph = self._with_inputs(traced)

    @property
    def changed(self) -> list[Tensor]:
        """The tensors from outside that the function changes, also through views."""
        tensors = [source for source in self.sources if isinstance(source, Tensor)]
        return [tensor for tensor in tensors if storage(self._replaced[_memory(tensor)][1]) in self._written]

    @property
    def draws(self) -> list[Draw]:
        return [source for source in self.sources if isinstance(source, Draw)]

    def _with_inputs(self, traced: "GraphModule") -> "GraphModule":
        """Return the graph with an input for each tensor from outside, which the tracer made an attribute."""
        graph = traced.graph
        inputs: dict[str, torch.fx.Node] = {}
        if scatters := [str(node.target) for node in graph.nodes if str(node.target).startswith(_SCATTERS)]:
            raise CannotRecord(f"it uses {scatters[0]}, which may be compiled to wrong code")
        first = next(iter(graph.nodes))
        self.sources: list[Any] = []
        outside = graph.find_nodes(op="get_attr")
        for node in outside:
            if node.target not in inputs:
                with graph.inserting_before(first):
                    inputs[node.target] = graph.placeholder(f"input_{len(inputs)}")
                value = getattr(traced, node.target)
                inputs[node.target].meta["val"] = value
                self.sources.append(self._source_of.get(id(value), value))
            node.replace_all_uses_with(inputs[node.target])
        for node in outside:
            graph.erase_node(node)
        for node in graph.nodes:  # the result of `x.add_(y)` is x
            if node.op == "call_function" and _is_in_place(node.target) and isinstance(node.args[0], torch.fx.Node):
                node.replace_all_uses_with(node.args[0])
        graph.set_codegen(torch.fx.graph.CodeGen())
        return torch.fx.GraphModule({}, graph)


def cut() -> None:
    """Mark the border of a step that the traced function repeats, so that it is compiled once (`common.parts`)."""
    if torch.compiler.is_compiling():  # torch.compile cannot look at modes, and compiles the whole update anyway
        return
    trace = _get_current_dispatch_mode()
    if isinstance(trace, Trace):
        from torch.fx.experimental.proxy_tensor import get_proxy_mode

        mode = get_proxy_mode()
        assert mode is not None
        trace.cuts += [node.name for node in list(mode.tracer.graph.nodes)[-1:]]


def _is_in_place(operation: Any) -> bool:
    return isinstance(operation, torch._ops.OpOverload) and operation._schema.name.endswith("_")


def written(operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that a call of `operation` changes."""
    named = dict(zip((argument.name for argument in operation._schema.arguments), args, strict=False)) | kwargs
    for argument in operation._schema.arguments:
        # Batch norm's schema does not declare that it changes the running statistics.
        if "batch_norm" in operation._schema.name or (argument.alias_info is not None and argument.alias_info.is_write):
            yield from (leaf for leaf in tree_leaves(named.get(argument.name)) if isinstance(leaf, Tensor))


def storage(tensor: Tensor) -> int:
    """Return the identity of the memory that a tensor shares with its views."""
    return int(tensor.untyped_storage()._cdata)


def _memory(tensor: Tensor) -> Any:
    """Return what two tensors have in common if they are the same view of the same memory, as x and x.data are."""
    return storage(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _same_source(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return bool(_memory(a) == _memory(b))
    if isinstance(a, Draw) and isinstance(b, Draw):
        # PyTorch wraps a generator again at each call, so its state tells which one it is.
        states = [draw.kwargs["generator"].get_state() for draw in (a, b)]
        return a.description == b.description and torch.equal(*states)
    return bool(a == b)


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
    power1, power2 = (torch.full_like(step, beta) ** step for beta in (beta1, beta2))  # see `common.recorded`
    rate = (lr / (1.0 - power1)).float()
    root = (1.0 - power2).rsqrt().float()
    for parameter, gradient, mean, square in zip(parameters, gradients, means, squares, strict=True):
        if grad_scale is not None:
            gradient = gradient / grad_scale
        if weight_decay:
            parameter.mul_((1.0 - lr * weight_decay).float())
        mean.lerp_(gradient, 1.0 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
        parameter.sub_(rate * mean / (square.sqrt() * root + eps))


def _mm(x: Tensor, y: Tensor) -> Any:
    """Compute a product of rows and columns by plain operations, which the loops before and after it take in."""
    if x.shape[1] == 1:
        return x * y
    if y.shape[1] == 1:
        return (x * y.t()).sum(1, keepdim=True)
    if x.shape[0] == 1:
        return (x.t() * y).sum(0, keepdim=True)
    return NotImplemented


def _tanh_(x: Tensor) -> Tensor:
    """Compute tanh x as 2σ(2x) - 1, with an absolute error of 1e-7. A compiled tanh takes longer than a sigmoid."""
    return x.copy_(2.0 * torch.sigmoid(2.0 * x) - 1.0)


def _gelu(x: Tensor, *, approximate: str = "none") -> Any:
    """Compute GELU's tanh form, x (1 + tanh u) / 2 with u = √(2/π) (x + 0.044715 x³), as x σ(2u)."""
    return x * torch.sigmoid(_twice_u(x)) if approximate == "tanh" else NotImplemented


def _gelu_backward(gradient: Tensor, x: Tensor, *, approximate: str = "none", grad_input: Tensor | None = None) -> Any:
    """Compute `gradient` times the derivative of `_gelu`, σ + x σ (1 - σ) ∂(2u)/∂x, into `grad_input` if given."""
    if approximate != "tanh":
        return NotImplemented
    share, slope = torch.sigmoid(_twice_u(x)), 2.0 * math.sqrt(2.0 / math.pi) * (1.0 + 3.0 * 0.044715 * x * x)
    of_x = gradient * (share + x * share * (1.0 - share) * slope)  # in this order, as x (1 - σ) may be infinite
    return of_x if grad_input is None else grad_input.copy_(of_x)


def _twice_u(x: Tensor) -> Tensor:
    """Return 2u of `_gelu`."""
    return 2.0 * math.sqrt(2.0 / math.pi) * x * (1.0 + 0.044715 * x * x)


def _index_put(base: Tensor, indices: list[Tensor | None], values: Tensor, accumulate: bool = False) -> Any:
    """Add the rows `values` [k, ...] to rows `indices` [k] of `base` [n, ...] by a sum over k, if both are small.

    This is the gradient of choosing k of n critics. Inductor's own form adds in any order. Inductor fused it with loops
    that write to the same memory, and one critic's gradient came out twice (compare pytorch issues 171493 and 198270).
    """
    index = indices[0]
    if len(indices) != 1 or index is None or index.dim() != 1 or not accumulate or len(index) * len(base) > 1024:
        return NotImplemented
    chosen = (index % len(base)).unsqueeze(1) == torch.arange(len(base), device=base.device)  # [k, n]
    chosen = chosen.view(*chosen.shape, *(1 for _ in base.shape[1:]))
    return base + torch.where(chosen, values.unsqueeze(1), 0.0).sum(0)
