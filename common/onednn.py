"""A network on the CPU, with the fastest matrix products and its whole backward pass in one node of autograd.

PyTorch multiplies float32 matrices with MKL, which leaves AVX-512 unused on AMD processors. oneDNN, which comes with
PyTorch for compiled inference, is twice as fast there. On Intel's, MKL takes half of oneDNN's time for the product of
a transposed matrix, as in every weight gradient. Its other products take no longer. One node of autograd instead of two
for every layer saves a tenth of such a small network's update.
"""

import ctypes
import itertools
import sys
from collections.abc import Sequence
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

# Each is looked up once, because a lookup at every call would take as long as a small product.
_PRODUCT = torch.ops.mkldnn._linear_pointwise.default if AVAILABLE and "GenuineIntel" not in _CPUINFO else None
_RELU_BACKWARD = torch.ops.aten.threshold_backward.grad_input
_TANH_BACKWARD = torch.ops.aten.tanh_backward.grad_input


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
        raise InputError("--products bfloat16 needs a processor with AMX: leave it out")
    setting: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    setting.fp32_precision = "bf16" if kind == "bfloat16" else "ieee"


def network(activation: Activation, inputs: Tensor, layers: Layers) -> Tensor:
    """Return the outputs of linear `layers` (weight, bias) with `activation` between each two.

    A layer with a layer norm (scale, shift) is normalised before its activation. Shapes: inputs [batch, inputs],
    weights [outputs, inputs], and biases, scales and shifts [outputs] give [batch, outputs]. An ensemble's parameters
    and outputs have one more dimension in front. The result can be differentiated once.
    """
    members = _members(layers)
    if not torch.is_grad_enabled():
        outputs = _forward(activation, inputs.contiguous(), members, [])
        return torch.stack(outputs) if _is_ensemble(layers[0][0]) else outputs[0]
    parameters = [parameter for layer in layers for parameter in layer]
    joined: Tensor = _Network.apply(activation, members, inputs, *parameters)  # type: ignore[no-untyped-call]
    return joined


def _is_ensemble(weight: Tensor) -> bool:
    return weight.dim() == 3


def _members(layers: Layers) -> list[Layers]:
    """Return the layers of each member of an ensemble, or of the one network."""
    if not _is_ensemble(layers[0][0]):
        return [layers]
    with torch.no_grad():
        return list(zip(*(zip(*(part.unbind() for part in layer), strict=True) for layer in layers), strict=True))


def _forward(activation: Activation, inputs: Tensor, members: list[Layers], hidden: list[Tensor]) -> list[Tensor]:
    """Return each member's outputs, and append its hidden layers' activations to `hidden`, member by member.

    If a layer has a layer norm, the norm's input follows, then the mean and inverse standard deviation of that input.
    """
    outputs = []
    for layers in members:
        activations = inputs
        for weight, bias, *norm in layers[:-1]:
            if norm:
                sums = linear(activations, weight, bias)
                scale, shift = norm
                activations, *statistics = torch.native_layer_norm(sums, sums.shape[1:], scale, shift, EPSILON)
                IN_PLACE[activation](activations)
                hidden += [activations, sums, *statistics]
            else:
                activations = linear(activations, weight, bias, activation)
                hidden.append(activations)
        weight, bias = layers[-1]
        outputs.append(linear(activations, weight, bias))
    return outputs


class _Network(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, activation: Activation, members: list[Layers], inputs: Tensor, *parameters: Tensor) -> Tensor:
        inputs = inputs.contiguous()  # with other strides, oneDNN chooses kernels that are many times slower
        hidden: list[Tensor] = []
        outputs = _forward(activation, inputs, members, hidden)
        ctx.save_for_backward(inputs, *hidden, *parameters)  # parameters too, so that autograd notices a change
        ctx.activation, ctx.members, ctx.ensemble = activation, members, _is_ensemble(parameters[0])
        return torch.stack(outputs) if ctx.ensemble else outputs[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, *saved = ctx.saved_tensors
        hidden, members = iter(saved), ctx.members
        _, _, inputs_need_it, *parameters_need_it = ctx.needs_input_grad
        of_inputs: Tensor | None = None
        of_parameters: list[list[Tensor]] = []
        for layers, upstream in zip(members, gradient.unbind() if ctx.ensemble else [gradient], strict=True):
            delta = upstream.contiguous()
            before = [inputs, *itertools.islice(hidden, sum(4 if layer[2:] else 1 for layer in layers[:-1]))]
            if any(parameters_need_it):
                delta, mine = _gradients(ctx.activation, delta, before, layers, inputs_need_it)
                of_parameters.append(mine)
            elif len(members) > 2:
                delta = _opaque_input_gradient(
                    ctx.activation, delta, before, [part for layer in layers for part in layer]
                )
            else:  # rows are worth less than the loops that a recording joins
                delta = _input_gradient(ctx.activation, delta, before, layers)
            if inputs_need_it:
                of_inputs = delta if of_inputs is None else of_inputs + delta
        if not any(parameters_need_it):
            return None, None, of_inputs, *(None for _ in parameters_need_it)
        if not ctx.ensemble:
            return None, None, of_inputs, *of_parameters[0]
        return None, None, of_inputs, *map(torch.stack, zip(*of_parameters, strict=True))


def _gradients(
    activation: str,
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
    saved = [list(itertools.islice(kept, 4 if k > 0 and layers[k - 1][2:] else 1)) for k in range(len(layers))]
    for k in reversed(range(len(layers))):
        activations, *normalized = saved[k]
        if to_parameters:
            of_parameters += [delta.sum(0), _weight_gradient(delta, activations)]
        if k > 0 or to_inputs:
            delta = linear(delta, layers[k][0].t())
        if k > 0 and activation == "relu":
            _RELU_BACKWARD(delta, activations, 0, grad_input=delta)
        elif k > 0:
            _TANH_BACKWARD(delta, activations, grad_input=delta)
        if normalized:
            sums, *statistics = normalized
            needed = [True, to_parameters, to_parameters]
            _, _, scale, shift = layers[k - 1]
            delta, of_scale, of_shift = torch.ops.aten.native_layer_norm_backward(
                delta, sums, sums.shape[1:], *statistics, scale, shift, needed
            )
            of_parameters += [of_shift, of_scale] if to_parameters else []
    return delta, of_parameters[::-1]


def _input_gradient(activation: str, delta: Tensor, before: Sequence[Tensor], layers: Layers) -> Tensor:
    """Return the gradient of one network's inputs, computed for the rows that have one if they are few."""
    rows = _rows_with_a_gradient(delta)
    if rows is None:
        return _gradients(activation, delta, before, layers, to_inputs=True, to_parameters=False)[0]
    chosen = [part[rows] for part in before]
    delta, _ = _gradients(activation, delta[rows], chosen, layers, to_inputs=True, to_parameters=False)
    return torch.zeros_like(before[0]).index_add_(0, rows, delta)


@torch.library.custom_op("onramp::input_gradient", mutates_args=())
def _opaque_input_gradient(
    activation: str, delta: Tensor, before: Sequence[Tensor], parameters: Sequence[Tensor]
) -> Tensor:
    """Compute `_input_gradient` as one operation for recordings, as its count of rows depends on data."""
    each = 4 if 2 * len(before) > len(parameters) else 2  # parameters of a hidden layer, with a layer norm or without
    layers = [tuple(parameters[i : i + each]) for i in range(0, len(parameters), each)]
    return _input_gradient(activation, delta, before, layers)


@_opaque_input_gradient.register_fake
def _(activation: str, delta: Tensor, before: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
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
    activation: Activation | Literal["swish"] | None = None,
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
