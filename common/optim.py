"""Update parameters: `Adam` follows a gradient, `SoftUpdate` moves a target network towards the online one."""

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

for _name in ("add_param_group", "state_dict", "load_state_dict"):
    # At their first call these would import the compiler to exempt themselves: a second of every program's start.
    _method = inspect.unwrap(vars(torch.optim.Optimizer)[_name])
    _method.__dynamo_disable = _method


class Adam(torch.optim.Adam):
    """`torch.optim.Adam` with backward pass and update in one method, which costs no more than its kernels.

    PyTorch's `zero_grad`, `backward` and `step` spend a tenth of a SAC update on the CPU on bookkeeping. The numbers
    here are bit-identical, and the state has the same form.
    """

    gradient_norm: Tensor

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
    ) -> None:
        """Set up the state. `weight_decay` is AdamW's (Loshchilov and Hutter 2019, arXiv 1711.05101), times `lr`."""
        super().__init__(parameters, lr, betas, eps, weight_decay, fused=True, decoupled_weight_decay=True)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = {"step": torch.zeros((), device=parameter.device)}
            self.state[parameter] |= {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        self._take_state()

    def _take_state(self) -> None:
        """Share one step count among all parameters, and list the state's tensors for the fused kernel."""
        states = [self.state[parameter] for parameter in self.param_groups[0]["params"]]
        self.step_count = states[0]["step"]
        for state in states:
            state["step"] = self.step_count
        self._means, self._squares = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq"))
        # The rate is a tensor in the kernels' precision. A CUDA graph reads it at each step, and a scheduler writes to
        # it in place.
        precision = torch.float64 if self.step_count.device.type == "cpu" else torch.float32
        group = self.param_groups[0]
        group["lr"] = torch.as_tensor(group["lr"], dtype=precision, device=self.step_count.device)
        self._opt_called = True  # otherwise schedulers warn that `step` was never called

    @property
    def lr(self) -> float:
        """The learning rate."""
        return float(self.param_groups[0]["lr"])

    @lr.setter
    def lr(self, rate: float) -> None:
        group = self.param_groups[0]
        group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], Tensor) else rate

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._take_state()

    def minimize(self, loss: Tensor, max_gradient_norm: float | None = None) -> None:
        """Take one step down the gradient of `loss`, in this optimiser's parameters and in no others.

        No gradient is computed for another network that the loss passes through (the critic in the actor's loss). With
        `max_gradient_norm`, the gradient of all parameters together is scaled down to that norm if it is longer.
        `gradient_norm` is then its norm before scaling.
        """
        group = self.param_groups[0]
        parameters, (beta1, beta2) = group["params"], group["betas"]
        # The fused kernel reads memory in order: a transposed gradient would move the wrong weights.
        gradients = [gradient.contiguous() for gradient in torch.autograd.grad(loss, parameters)]
        scale = None
        if max_gradient_norm is not None:
            self.gradient_norm = torch.linalg.vector_norm(torch.cat([gradient.flatten() for gradient in gradients]))
            scale = ((self.gradient_norm + 1e-6) / max_gradient_norm).clamp(min=1.0).float()
        with torch.no_grad():
            self.step_count += 1
            torch._fused_adamw_(
                parameters, gradients, self._means, self._squares, [], [self.step_count] * len(parameters),
                lr=group["lr"], beta1=beta1, beta2=beta2, eps=group["eps"],
                weight_decay=group["weight_decay"], amsgrad=False, maximize=False, grad_scale=scale,
            )  # fmt: skip


class SoftUpdate:
    """The soft update target ← (1 - tau) target + tau online, in one fused operation at each call."""

    def __init__(self, target: nn.Module, online: nn.Module, tau: float) -> None:
        self.target: list[Tensor] = list(target.parameters())
        self.online: list[Tensor] = list(online.parameters())
        self.tau = tau

    @torch.no_grad()
    def __call__(self) -> None:
        torch._foreach_lerp_(self.target, self.online, self.tau)
