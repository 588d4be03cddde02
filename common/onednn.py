"""A network on the CPU, with the fastest matrix products and its whole backward pass in one node of autograd.

PyTorch multiplies float32 matrices with MKL, which leaves AVX-512 unused on AMD processors. oneDNN, which comes with
PyTorch for compiled inference, is twice as fast there. On AMD processors without AVX-512, updates with MKL are a tenth
faster. On Intel's, MKL takes half of oneDNN's time for the product of a transposed matrix, as in every weight gradient.
Its other products take no longer. One node of autograd instead of two for every layer saves a tenth of such a small
network's update.
"""

import ctypes
import itertools
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from common.errors import InputError
from common.layers import EPSILON, IN_PLACE, Activation, Layers

AVAILABLE = torch.backends.mkldnn.is_available()
MIN_ONEDNN_MULTIPLICATIONS = 2**20  # with fewer, oneDNN's fixed 10 µs are more than it saves

_CPUINFO = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""


def _fastest_product(cpuinfo: str) -> Any:
    """Return oneDNN's product, or None if MKL is faster on the processor of /proc/cpuinfo."""
    is_mkl_faster = "GenuineIntel" in cpuinfo or ("AuthenticAMD" in cpuinfo and "avx512f" not in cpuinfo.split())
    return torch.ops.mkldnn._linear_pointwise.default if AVAILABLE and not is_mkl_faster else None


# Each is looked up once, because a lookup at every call would take as long as a small product.
_PRODUCT = _fastest_product(_CPUINFO)
_BACKWARD: dict[str, Any] = {  # from an activation's output, but GELU's from its input
    "relu": partial(torch.ops.aten.threshold_backward.grad_input, threshold=0),
    "tanh": torch.ops.aten.tanh_backward.grad_input,
    "gelu": partial(torch.ops.aten.gelu_backward.grad_input, approximate="tanh"),
}


def keep_freed_memory() -> None:
    """Keep large freed blocks in the process, if the C library is glibc.

    By default glibc returns them to the kernel, and the next update pays for clean pages again. With the 8 MB of each
    layer of CQL's critics, that takes a quarter to nearly half of the whole update.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(-3, 2**25)  # M_MMAP_THRESHOLD, the largest allowed: smaller blocks come from the heap
        mallopt(-1, 2**30)  # M_TRIM_THRESHOLD: free bytes kept at the heap's end


def set_products(kind: str) -> None:
    """Multiply float32 matrices on the CPU in "float32", or with operands rounded to "bfloat16" and float32 sums.

    Raises InputError if the processor has no AMX. With AVX512-BF16 alone, oneDNN would compute in float32.
    """
    if kind == "bfloat16" and "amx_bf16" not in _CPUINFO.split():
        raise InputError("--products bfloat16 needs a processor with AMX: leave --products out")
    setting: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    setting.fp32_precision = "bf16" if kind == "bfloat16" else "ieee"


def network(activation: Activation, inputs: Tensor, layers: Layers, norm_last: bool = False) -> Tensor:
    """Return the outputs of linear `layers` (weight, bias) with `activation` between each two.

    A layer with a layer norm (scale, shift) is normalised before its activation, or after it with `norm_last`. Shapes:
    inputs [batch, inputs], weights [outputs, inputs], and biases, scales and shifts [outputs] give [batch, outputs]. An
    ensemble's parameters and outputs have one more dimension in front. The result can be differentiated once.
    """
    members = _members(layers)
    if not torch.is_grad_enabled():
        outputs = _forward(activation, norm_last, inputs.contiguous(), members, [])
        return torch.stack(outputs) if _is_ensemble(layers[0][0]) else outputs[0]
    parameters = [parameter for layer in layers for parameter in layer]
    joined: Tensor = _Network.apply(activation, norm_last, members, inputs, *parameters)  # type: ignore[no-untyped-call]
    return joined


def _is_ensemble(weight: Tensor) -> bool:
    return weight.dim() == 3


def _members(layers: Layers) -> list[Layers]:
    """Return the layers of each member of an ensemble, or of the one network."""
    if not _is_ensemble(layers[0][0]):
        return [layers]
    with torch.no_grad():
        return list(zip(*(zip(*(part.unbind() for part in layer), strict=True) for layer in layers), strict=True))


def _forward(
    activation: Activation, norm_last: bool, inputs: Tensor, members: list[Layers], hidden: list[Tensor]
) -> list[Tensor]:
    """Return each member's outputs, and append what `_kept_of` counts of its hidden layers to `hidden`.

    That is a layer's result. If it has a layer norm, the norm's input follows, then the mean and inverse standard
    deviation of that input. The activation's input follows last if its gradient needs it.
    """
    outputs = []
    for layers in members:
        result = inputs
        for weight, bias, *norm in layers[:-1]:
            if not norm and activation != "gelu":
                result = linear(result, weight, bias, activation)
                hidden.append(result)
                continue
            result, of_norm = linear(result, weight, bias), []
            if norm and not norm_last:
                result, *of_norm = _normalized(result, *norm)
            of_activation = [result] if activation == "gelu" else []
            result = IN_PLACE[activation](result)
            if norm and norm_last:
                result, *of_norm = _normalized(result, *norm)
            hidden += [result, *of_norm, *of_activation]
        weight, bias = layers[-1]
        outputs.append(linear(result, weight, bias))
    return outputs


def _normalized(inputs: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, ...]:
    """Return the layer norm of `inputs`, then `inputs`, their mean and their inverse standard deviation."""
    result, mean, inverse = torch.native_layer_norm(inputs, inputs.shape[1:], scale, shift, EPSILON)
    return result, inputs, mean, inverse


def _kept_of(activation: str, layer: tuple[Tensor, ...]) -> int:
    """Return how many tensors `_forward` keeps of a hidden layer."""
    return (4 if layer[2:] else 1) + (activation == "gelu")


class _Network(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, activation: Activation, norm_last: bool, members: list[Layers], inputs: Tensor, *parameters: Tensor
    ) -> Tensor:
        inputs = inputs.contiguous()  # with other strides, oneDNN chooses kernels that are many times slower
        hidden: list[Tensor] = []
        outputs = _forward(activation, norm_last, inputs, members, hidden)
        ctx.save_for_backward(inputs, *hidden, *parameters)  # parameters too, so that autograd notices a change
        ctx.form, ctx.members, ctx.ensemble = (activation, norm_last), members, _is_ensemble(parameters[0])
        return torch.stack(outputs) if ctx.ensemble else outputs[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, *saved = ctx.saved_tensors
        hidden, members, (activation, norm_last) = iter(saved), ctx.members, ctx.form
        _, _, _, inputs_need_it, *parameters_need_it = ctx.needs_input_grad
        of_inputs: Tensor | None = None
        of_parameters: list[list[Tensor]] = []
        for layers, upstream in zip(members, gradient.unbind() if ctx.ensemble else [gradient], strict=True):
            delta = upstream.contiguous()
            before = [inputs, *itertools.islice(hidden, sum(_kept_of(activation, layer) for layer in layers[:-1]))]
            if any(parameters_need_it):
                delta, mine = _gradients(activation, norm_last, delta, before, layers, inputs_need_it)
                of_parameters.append(mine)
            elif len(members) > 2:
                parameters = [part for layer in layers for part in layer]
                delta = _opaque_input_gradient(activation, norm_last, delta, before, parameters)
            else:  # rows are worth less than the loops that a recording joins
                delta = _input_gradient(activation, norm_last, delta, before, layers)
            if inputs_need_it:
                of_inputs = delta if of_inputs is None else of_inputs + delta
        if not any(parameters_need_it):
            return None, None, None, of_inputs, *(None for _ in parameters_need_it)
        if not ctx.ensemble:
            return None, None, None, of_inputs, *of_parameters[0]
        return None, None, None, of_inputs, *map(torch.stack, zip(*of_parameters, strict=True))


def _gradients(
    activation: str,
    norm_last: bool,
    delta: Tensor,
    before: Sequence[Tensor],
    layers: Layers,
    to_inputs: bool,
    to_parameters: bool = True,
) -> tuple[Tensor, list[Tensor]]:
    """Return the gradients of one network's inputs and parameters from that of its outputs, `delta` [batch, outputs].

    `before` has the inputs, and what `_forward` kept.
    """
    kept, of_parameters = iter(before), []
    saved = [list(itertools.islice(kept, _kept_of(activation, layers[k - 1]) if k else 1)) for k in range(len(layers))]
    for k in reversed(range(len(layers))):
        result, *rest = saved[k]
        if to_parameters:
            of_parameters += [delta.sum(0), _weight_gradient(delta, result)]
        if k > 0 or to_inputs:
            delta = linear(delta, layers[k][0].t())
        if k == 0:
            break
        norm = layers[k - 1][2:]
        if norm and norm_last:
            delta = _norm_gradients(delta, norm, rest, of_parameters if to_parameters else None)
        of_activation = rest[-1] if activation == "gelu" else rest[0] if norm and norm_last else result
        _BACKWARD[activation](delta, of_activation, grad_input=delta)
        if norm and not norm_last:
            delta = _norm_gradients(delta, norm, rest, of_parameters if to_parameters else None)
    return delta, of_parameters[::-1]


def _norm_gradients(
    delta: Tensor, norm: Sequence[Tensor], kept: Sequence[Tensor], of_parameters: list[Tensor] | None
) -> Tensor:
    """Return the gradient of a layer norm's input. Append those of shift and scale to `of_parameters` if given."""
    inputs, *statistics = kept[:3]
    needed = [True, of_parameters is not None, of_parameters is not None]
    of_inputs, of_scale, of_shift = torch.ops.aten.native_layer_norm_backward(
        delta, inputs, inputs.shape[1:], *statistics, *norm, needed
    )
    if of_parameters is not None:
        of_parameters += [of_shift, of_scale]
    return of_inputs  # type: ignore[no-any-return]


def _input_gradient(
    activation: str, norm_last: bool, delta: Tensor, before: Sequence[Tensor], layers: Layers
) -> Tensor:
    """Return the gradient of one network's inputs, computed for the rows that have one if they are few."""
    rows = _rows_with_a_gradient(delta)
    if rows is None:
        return _gradients(activation, norm_last, delta, before, layers, to_inputs=True, to_parameters=False)[0]
    chosen = [part[rows] for part in before]
    delta, _ = _gradients(activation, norm_last, delta[rows], chosen, layers, to_inputs=True, to_parameters=False)
    return torch.zeros_like(before[0]).index_add_(0, rows, delta)


@torch.library.custom_op("onramp::input_gradient", mutates_args=())
def _opaque_input_gradient(
    activation: str, norm_last: bool, delta: Tensor, before: Sequence[Tensor], parameters: Sequence[Tensor]
) -> Tensor:
    """Compute `_input_gradient` as one operation for recordings, as its count of rows depends on data."""
    each = 4 if len(parameters) > 2 and parameters[2].dim() == 1 else 2  # of a hidden layer, with a layer norm or not
    layers = [tuple(parameters[i : i + each]) for i in range(0, len(parameters), each)]
    return _input_gradient(activation, norm_last, delta, before, layers)


@_opaque_input_gradient.register_fake
def _(
    activation: str, norm_last: bool, delta: Tensor, before: Sequence[Tensor], parameters: Sequence[Tensor]
) -> Tensor:
    return torch.empty_like(before[0])


def _rows_with_a_gradient(delta: Tensor) -> Tensor | None:
    """Return the numbers of the non-zero rows of `delta` [batch, outputs], or None if they are more than half.

    If the loss uses the smallest of many critics, each row of the batch gives a gradient to one critic only. Zero rows
    fill the count up to a multiple of 32, because oneDNN compiles a kernel for each number of rows. A recording cannot
    depend on the count.
    """
    if type(delta) is not Tensor:  # a recording's, without data
        return None
    moves = (delta != 0).any(1)
    count = int(moves.sum())
    count += -count % 32
    return moves.argsort(descending=True, stable=True)[:count] if 2 * count <= len(delta) else None


def linear(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: Literal["relu", "tanh", "swish"] | None = None,  # not gelu, whose tanh form oneDNN would need to know
) -> Tensor:
    """Return activation(inputs [..., k] times the transpose of weight [n, k], plus bias [n]), outside of autograd."""
    if (
        _PRODUCT is not None
        and inputs.dtype == torch.float32
        and inputs.numel() * len(weight) >= MIN_ONEDNN_MULTIPLICATIONS
    ):
        outputs: Tensor = _PRODUCT(inputs, weight, bias, activation or "none", [], "")
        return outputs
    outputs = F.linear(inputs, weight, bias)
    return outputs if activation is None else IN_PLACE[activation](outputs)


def _weight_gradient(delta: Tensor, inputs: Tensor) -> Tensor:
    """Return deltaᵀ inputs. oneDNN copies its first operand if that is transposed, so the smaller one comes first."""
    if inputs.shape[1] < delta.shape[1]:
        return linear(inputs.t(), delta.t()).t()
    return linear(delta.t(), inputs.t())
