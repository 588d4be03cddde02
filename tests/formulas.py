"""A fixed batch, and networks computed in NumPy, one critic at a time: what the algorithms' tests compare with."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from common.networks import LayerNorm
from common.replay_buffer import Batch

Array = NDArray[np.float64]


def make_batch(size: int = 5) -> Batch:
    """Of obs_dim 3 and action_dim 2, in float64; every second transition terminates."""
    rng = np.random.default_rng(3)
    parts = [
        rng.normal(size=(size, 3)),
        rng.uniform(-1, 1, (size, 2)),
        rng.normal(size=size),
        rng.normal(size=(size, 3)),
    ]
    return Batch(*(torch.from_numpy(part) for part in [*parts, (np.arange(size) % 2).astype(np.float64)]))


def layers(network: torch.nn.Module, member: int | None = None) -> list[list[Array]]:
    """Of each layer of `network.net`, or of one member of its ensemble: weight [inputs, outputs], bias, and of a
    normalised one scale and shift."""
    found: list[list[Array]] = []
    for layer in network.net:
        if hasattr(layer, "weight"):
            weight, bias = layer.weight.detach().numpy(), layer.bias.detach().numpy()
            if member is not None:
                weight, bias = weight[member % len(weight)], bias[member % len(bias)]  # an output layer may be shared
            if isinstance(layer, LayerNorm):
                found[-1] += [weight, bias]
            else:
                found.append([weight.T, bias])
    return found


def forward(
    inputs: Array, weights: list[list[Array]], kept: list[Array] | None = None, norm_last: bool = False
) -> Array:
    """`kept`: with dropout, what each hidden layer's units are multiplied by. `norm_last`: norms follow activations."""
    for i, (weight, bias, *norm) in enumerate(weights):
        inputs = inputs @ weight + bias
        inputs = normed(inputs, *norm) if norm and not norm_last else inputs
        if i < len(weights) - 1:
            inputs = np.maximum(inputs, 0) * (kept[i] if kept else 1.0)
        inputs = normed(inputs, *norm) if norm and norm_last else inputs
    return inputs


def normed(inputs: Array, scale: Array, shift: Array) -> Array:
    """Layer normalisation."""
    centred = inputs - inputs.mean(-1, keepdims=True)
    return scale * centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6) + shift


def gelu_forward(inputs: Array, weights: list[list[Array]]) -> Array:
    """GELU in its tanh form after each hidden layer, then the layer norm if there is one."""
    for weight, bias, *norm in weights[:-1]:
        x = inputs @ weight + bias
        inputs = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
        inputs = normed(inputs, *norm) if norm else inputs
    return inputs @ weights[-1][0] + weights[-1][1]


def joined(network: torch.nn.Module, *parts: Array, member: int | None = None) -> Array:
    """The outputs of a network with GELU, or of one member of its ensemble, for inputs side by side."""
    return gelu_forward(np.concatenate(parts, -1), layers(network, member))


def values(critic: torch.nn.Module, obs: Array, actions: Array, critics: int, norm_last: bool = False) -> list[Array]:
    inputs = np.concatenate([obs, actions], -1)
    return [forward(inputs, layers(critic, i), norm_last=norm_last)[:, 0] for i in range(critics)]


def parameters(agent: object) -> list[tuple[str, torch.Tensor]]:
    """Every parameter of every network of an agent, by name."""
    networks = {name: value for name, value in vars(agent).items() if isinstance(value, torch.nn.Module)}
    return [(f"{n}.{p}", value) for n, network in networks.items() for p, value in network.named_parameters()]


class Drawn:
    """What an agent is about to draw; its generator stays where it is."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = torch.Generator()
        self.generator.set_state(generator.get_state())

    def normal(self, *shape: int) -> Array:
        return torch.randn(shape, generator=self.generator).double().numpy()

    def uniform(self, *shape: int) -> Array:
        return 2 * torch.rand(shape, generator=self.generator).double().numpy() - 1

    def kept(self, share: float, *shape: int) -> Array:
        """Of units of which dropout leaves out a share: 0, or what scales up the others."""
        return (torch.rand(shape, generator=self.generator) >= share).double().numpy() / (1 - share)

    def integers(self, below: int, count: int) -> list[int]:
        return torch.randint(below, (count,), generator=self.generator).tolist()


def log_density(mean: Array, std: Array, u: Array) -> Array:
    """Return the log-density of tanh(u), u ~ N(mean, std): the Gaussian's over tanh's slope, 1 / cosh(u)²."""
    log_normal = -0.5 * ((u - mean) / std) ** 2 - np.log(std * math.sqrt(2 * math.pi))
    log_cosh = np.logaddexp(u, -u) - math.log(2)  # finite where cosh is not
    return (log_normal + 2 * log_cosh).sum(-1)


def log_sum_exp(entries: list[float]) -> float:
    top = max(entries)
    return top + math.log(sum(math.exp(entry - top) for entry in entries))


def assert_log_std_is_clamped(actor: Any, low: float, high: float) -> None:
    """The last layer's outputs within the bounds stay as they are, those beyond are the bounds."""
    half = len(actor.net[-1].bias) // 2
    for log_std in (low - 10, low + 1, high - 0.1, high + 3):
        with torch.no_grad():
            actor.net[-1].weight.zero_()
            actor.net[-1].bias[half:] = log_std
        expected = torch.full((1, half), min(max(log_std, low), high))
        torch.testing.assert_close(actor(torch.zeros(1, 3)).log_std, expected)


def assert_targets_follow_each_step(agent: Any, tau: float, update: Callable[[], Any]) -> None:
    """The target critics after `update` are averages, made by hand, of the critics behind each of their own steps."""
    expected = [target.detach().clone() for target in agent.target_critic.parameters()]
    descend = agent.critic_optimizer.minimize

    def followed(loss: torch.Tensor) -> None:
        descend(loss)
        for target, learned in zip(expected, agent.critic.parameters(), strict=True):
            target += tau * (learned.detach() - target)

    agent.critic_optimizer.minimize = followed
    update()
    for target, by_hand in zip(agent.target_critic.parameters(), expected, strict=True):
        torch.testing.assert_close(target.detach(), by_hand, rtol=0, atol=4e-15)  # 16 roundings of numbers below 2
