"""A CUDA graph's like on the CPU: what is recorded can be found wrong where there is no GPU.

As a CUDA graph does, it notes every operation on tensors below autograd, with the memory it read and wrote, and replays
them into that very memory; Python is not run again. What would break a capture, because it waits for a number or takes
one from the host, raises.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

R = TypeVar("R")
# They read a number from the device, give results whose shape depends on one, or bring one from the host.
SHAPES = ("squeeze_", "unsqueeze_", "transpose_", "t_")  # these change no memory
# Of floats these raise on CUDA under torch.use_deterministic_algorithms, whose documentation lists them.
NEVER_THE_SAME = ("put", "histc", "bincount", "median", "nanmedian", "cumsum")
BREAK_A_CAPTURE = ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "equal", "lift_fresh")


class CPUGraph:
    """As `common.cuda.CUDAGraph`."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.noted: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def warm_up(self, function: Callable[[], R]) -> R:
        return function()

    def record(self, function: Callable[[], R]) -> R:
        """Unlike CUDA this does what it notes: all that the operations changed, and the generator, is put back."""
        state = self.generator.get_state()
        with _Notes() as notes:
            results = function()
        for tensor, before in reversed(notes.before.values()):
            tensor.detach().copy_(before)
        self.generator.set_state(state)
        self.noted = notes.noted
        return results

    def replay(self) -> None:
        with torch.no_grad():
            for operation, args, kwargs, results in self.noted:
                for old, new in zip(tree_leaves(results), tree_leaves(operation(*args, **kwargs)), strict=True):
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():  # else a view, or changed in place
                        old.copy_(new.reshape(old.shape))  # which may have been squeezed since


class _Notes(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self.before: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # what is changed in place, as it was

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = operation.overloadpacket.__name__
        by_mask = name == "index" and any(t is not None and t.dtype == torch.bool for t in args[1])
        if name in BREAK_A_CAPTURE or by_mask:
            raise RuntimeError(f"a CUDA graph cannot capture {name}")
        of_floats = any(isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in tree_leaves(args))
        if name.removesuffix("_") in NEVER_THE_SAME and of_floats:
            raise RuntimeError(f"{name} has no deterministic algorithm on CUDA")
        if name in SHAPES:
            return operation(*args, **kwargs)  # once is enough
        for place, argument in enumerate(operation._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in tree_leaves(kwargs.get(argument.name, args[place : place + 1])):
                    if isinstance(tensor, Tensor):
                        key = tensor.data_ptr(), tensor.numel()
                        if key not in self.before:
                            self.before[key] = tensor, tensor.detach().clone()
        results = operation(*args, **kwargs)
        self.noted.append((operation, args, kwargs, results))
        return results
