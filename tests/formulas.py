"""A fixed batch, and networks computed in NumPy, one critic at a time: what the algorithms' tests compare with."""

import numpy as np
import torch
from numpy.typing import NDArray

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


def layers(network: torch.nn.Module, member: int | None = None) -> list[tuple[Array, Array]]:
    """(weight [inputs, outputs], bias) of each layer of `network.net`, or of one member of its ensemble."""
    found = []
    for layer in network.net:
        if hasattr(layer, "weight"):
            weight, bias = layer.weight.detach().numpy(), layer.bias.detach().numpy()
            found.append((weight.T, bias) if member is None else (weight[member].T, bias[member]))
    return found


def forward(inputs: Array, weights: list[tuple[Array, Array]]) -> Array:
    for i, (weight, bias) in enumerate(weights):
        inputs = inputs @ weight + bias
        inputs = np.maximum(inputs, 0) if i < len(weights) - 1 else inputs
    return inputs


def values(critic: torch.nn.Module, obs: Array, actions: Array, critics: int) -> list[Array]:
    return [forward(np.concatenate([obs, actions], -1), layers(critic, i))[:, 0] for i in range(critics)]


def parameters(agent: object) -> list[tuple[str, torch.Tensor]]:
    """Every parameter of every network of an agent, by name."""
    networks = {name: value for name, value in vars(agent).items() if isinstance(value, torch.nn.Module)}
    return [(f"{n}.{p}", value) for n, network in networks.items() for p, value in network.named_parameters()]
