"""A small network on the CPU, with oneDNN's matrix products and its whole backward pass in one node of autograd.

PyTorch multiplies float32 matrices with MKL, which leaves AVX-512 unused on AMD processors; oneDNN, which comes with
PyTorch and serves compiled inference, is twice as fast there. And one node of autograd where there were two for every
layer spares what costs such small networks a tenth of their update.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

AVAILABLE = torch.backends.mkldnn.is_available()
WORTHWHILE = 2**20  # multiplications; with fewer, oneDNN's fixed 10 µs are more than it saves

Activation = Literal["relu", "tanh"]
Layers = Sequence[tuple[Tensor, Tensor]]


def network(activation: Activation, inputs: Tensor, *parameters: Tensor) -> Tensor:
    """Linear layers with `activation` between each two: `parameters` are weight, bias, weight, bias, ...

    Shapes: inputs [batch, inputs], weights [outputs, inputs], biases [outputs] to [batch, outputs]; weights and biases
    of an ensemble have one more dimension in front, and so has what it returns. Differentiable once.
    """
    if not torch.is_grad_enabled():
        return _forward(activation, inputs.contiguous(), parameters, None)
    outputs: Tensor = _Network.apply(activation, inputs, *parameters)  # type: ignore[no-untyped-call]
    return outputs


def _forward(
    activation: Activation, inputs: Tensor, parameters: Sequence[Tensor], hidden: list[Tensor] | None
) -> Tensor:
    """The outputs; the activations of the hidden layers, member by member, go into `hidden` where they are wanted."""
    outputs = []
    for layers in _members(parameters):
        activations = inputs
        for weight, bias in layers[:-1]:
            activations = _linear(activations, weight, bias, activation)
            if hidden is not None:
                hidden.append(activations)
        outputs.append(_linear(activations, *layers[-1]))
    return torch.stack(outputs) if _is_ensemble(parameters) else outputs[0]


class _Network(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, activation: Activation, inputs: Tensor, *parameters: Tensor) -> Tensor:
        inputs = inputs.contiguous()  # other strides send oneDNN to kernels that are many times slower
        hidden: list[Tensor] = []
        outputs = _forward(activation, inputs, parameters, hidden)
        ctx.save_for_backward(inputs, *parameters, *hidden)
        ctx.activation, ctx.num_parameters = activation, len(parameters)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, *saved = ctx.saved_tensors
        parameters, hidden = saved[: ctx.num_parameters], iter(saved[ctx.num_parameters :])
        inputs_need_it, parameters_need_it = ctx.needs_input_grad[1], any(ctx.needs_input_grad[2:])
        members = _members(parameters)
        of_inputs: Tensor | None = None
        of_parameters: list[list[Tensor]] = [[] for _ in parameters]
        for layers, upstream in zip(
            members, gradient.unbind() if _is_ensemble(parameters) else [gradient], strict=True
        ):
            delta = upstream.contiguous()
            activations = [inputs, *(next(hidden) for _ in layers[1:])]
            for k, (weight, _) in reversed(list(enumerate(layers))):
                if parameters_need_it:
                    of_parameters[2 * k].append(_weight_gradient(delta, activations[k]))
                    of_parameters[2 * k + 1].append(delta.sum(0))
                if k > 0 or inputs_need_it:
                    delta = _linear(delta, weight.t())
                if k > 0 and ctx.activation == "relu":
                    torch.ops.aten.threshold_backward.grad_input(delta, activations[k], 0, grad_input=delta)
                elif k > 0:
                    torch.ops.aten.tanh_backward.grad_input(delta, activations[k], grad_input=delta)
            if inputs_need_it:
                of_inputs = delta if of_inputs is None else of_inputs + delta
        if not parameters_need_it:
            return None, of_inputs, *(None for _ in parameters)
        together = torch.stack if _is_ensemble(parameters) else operator.itemgetter(0)
        return None, of_inputs, *(together(each) for each in of_parameters)


_IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda outputs: outputs,
    "relu": Tensor.relu_,
    "tanh": Tensor.tanh_,
}


def _linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "none") -> Tensor:
    """activation(inputs [m, k] times the transpose of weight [n, k], plus bias [n])."""
    if AVAILABLE and inputs.dtype == torch.float32 and inputs.numel() * len(weight) >= WORTHWHILE:
        outputs: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, activation, [], "")
        return outputs
    outputs = torch.mm(inputs, weight.t()) if bias is None else torch.addmm(bias, inputs, weight.t())
    return _IN_PLACE[activation](outputs)


def _weight_gradient(delta: Tensor, inputs: Tensor) -> Tensor:
    """deltaᵀ inputs; oneDNN copies its first operand when that is transposed: let it be the smaller one."""
    if inputs.shape[1] < delta.shape[1]:
        return _linear(inputs.t(), delta.t()).t()
    return _linear(delta.t(), inputs.t())


def _is_ensemble(parameters: Sequence[Tensor]) -> bool:
    return parameters[0].dim() == 3


def _members(parameters: Sequence[Tensor]) -> list[Layers]:
    """The layers (weight, bias) of each member of the ensemble, or of the one network."""
    if not _is_ensemble(parameters):
        return [list(zip(parameters[::2], parameters[1::2], strict=True))]
    each = zip(*(parameter.unbind() for parameter in parameters), strict=True)
    return [list(zip(member[::2], member[1::2], strict=True)) for member in each]
