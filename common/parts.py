"""Compile a traced graph in parts, so that a part that repeats is compiled once.

The updates of WSRL, RLPD and EXPO step their critics on up to twenty slices of a batch. As one graph they would take
minutes to compile. `common.tracing.cut` marks where a step begins.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from common.tracing import storage, written

Compiled = Callable[..., Sequence[Tensor]]


class _Part:
    """Consecutive operations of a graph, as a function of the inputs and other parts' results that it `reads`."""

    def __init__(self, nodes: Sequence[fx.Node]) -> None:
        self.nodes = nodes
        own = {node: f"own {i}" for i, node in enumerate(nodes)}
        self.reads = list(dict.fromkeys(read for node in nodes for read in node.all_input_nodes if read not in own))
        names = own | {node: f"read {i}" for i, node in enumerate(self.reads)}
        calls = [(str(node.target), fx.map_arg((node.args, node.kwargs), names.__getitem__)) for node in nodes]
        layouts = [(value.shape, value.stride(), value.dtype) for value in map(_fake, self.reads)]
        self.code = repr((calls, layouts))  # equal for parts that compute the same

    def graph(self, results: Sequence[int]) -> fx.GraphModule:
        """Return the part as a graph of its own, whose results are those of the nodes with the numbers `results`."""
        graph = fx.Graph()
        copies = {node: graph.placeholder(f"input_{i}") for i, node in enumerate(self.reads)}
        for node in self.nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output([copies[self.nodes[i]] for i in results])
        graph.eliminate_dead_code()
        return fx.GraphModule({}, graph)


def compile_parts(
    graph: fx.GraphModule,
    cuts: Collection[str],
    examples: Sequence[Any],
    compiled: Callable[[fx.GraphModule, list[Any]], Compiled],
) -> Compiled:
    """Return `graph`, cut after the nodes named `cuts`, as a function of its inputs. Equal parts share their code.

    `compiled` compiles a graph for inputs like the given ones, and `examples` are such inputs. The graph stays whole if
    a part would change another's results, or would return memory that another one changes.
    """
    inputs = graph.graph.find_nodes(op="placeholder")
    parts = _parts([node for node in graph.graph.nodes if node.op == "call_function"], cuts)
    if len(parts) == 1 or not _are_independent(parts, inputs):
        return compiled(graph, list(examples))

    # A call numbers the values that parts and results read. Its first values are its inputs.
    outputs = tree_leaves(graph.graph.output_node().args)
    read = dict.fromkeys([*inputs, *(node for part in parts for node in part.reads), *outputs])
    number_of = {node: i for i, node in enumerate(read)}
    given = dict(zip(inputs, examples, strict=True))
    returned: dict[str, set[int]] = {}  # by code: the nodes that the results of any part with that code come from
    for part in parts:
        returned.setdefault(part.code, set()).update(i for i, node in enumerate(part.nodes) if node in number_of)
    functions: dict[str, Compiled] = {}
    calls = []
    for part in parts:
        results = sorted(returned[part.code])
        if part.code not in functions:
            like = [given[node] if node in given else _zeros(_fake(node)) for node in part.reads]
            functions[part.code] = compiled(part.graph(results), like)
        into = [number_of.get(part.nodes[i]) for i in results]
        calls.append((functions[part.code], [number_of[node] for node in part.reads], into))
    last = [number_of[node] for node in outputs]

    def call(*arguments: Tensor) -> list[Tensor]:
        values: dict[int | None, Tensor] = dict(enumerate(arguments))
        for function, reads, into in calls:
            values.update(zip(into, function(*[values[i] for i in reads]), strict=True))
        return [values[i] for i in last]

    return call


def _parts(nodes: Sequence[fx.Node], cuts: Collection[str]) -> list[_Part]:
    groups: list[list[fx.Node]] = [[]]
    for node in nodes:
        groups[-1].append(node)
        if node.name in cuts:
            groups.append([])
    return [_Part(group) for group in groups if group]


def _are_independent(parts: Sequence[_Part], inputs: Collection[fx.Node]) -> bool:
    """Return whether no part changes the memory of a result that another part computed and some part reads."""
    changed = [{storage(tensor) for node in part.nodes for tensor in _changed_by(node)} for part in parts]
    results = {node for part in parts for node in part.reads if node not in inputs}
    if not all(isinstance(node.meta["val"], Tensor) for node in results):
        return False
    return not any(
        storage(_fake(node)) in memory
        for part, memory in zip(parts, changed, strict=True)
        for node in results.difference(part.nodes)
    )


def _changed_by(node: fx.Node) -> Iterator[Tensor]:
    if isinstance(node.target, torch._ops.OpOverload):
        yield from written(node.target, *fx.map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"]))


def _fake(node: fx.Node) -> Tensor:
    """Return the tensor without data that stands for a node's value."""
    value: Tensor = node.meta["val"]
    return value


def _zeros(like: Tensor) -> Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype).zero_()
