"""Building blocks that many papers share: MLP, ensemble, critics, tanh-Gaussian."""

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.layers import EPSILON, IN_PLACE, Activation, Layers
from common.onednn import MIN_ONEDNN_MULTIPLICATIONS, network

LOG_2 = math.log(2.0)
HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)
M = TypeVar("M", bound=nn.Module)


class Linear(nn.Linear):
    """`torch.nn.Linear` with uninitialised weights, so that the global random generator is not used."""

    def reset_parameters(self) -> None: ...


class EnsembleLinear(nn.Module):
    """`ensemble` linear layers, computed in one batched product.

    Shapes: weight [ensemble, outputs, inputs], bias [ensemble, outputs]. Inputs [ensemble, batch, inputs], or
    [batch, inputs] shared by all members, are mapped to [ensemble, batch, outputs].
    """

    def __init__(self, ensemble: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(ensemble, outputs, inputs))
        self.bias = nn.Parameter(torch.empty(ensemble, outputs))

    def forward(self, inputs: Tensor) -> Tensor:
        return _linear(inputs, self.weight, self.bias)


def _linear(inputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    if weight.dim() == 2:
        return F.linear(inputs, weight, bias)
    return torch.baddbmm(bias.unsqueeze(1), inputs.expand(len(weight), -1, -1), weight.mT)


class LayerNorm(nn.Module):
    """Layer normalisation over the last dimension (Ba et al. 2016). Ensemble members have their own scale and shift.

    Shapes: weight and bias [width] or [ensemble, width]. The output has the shape of the input, [batch, width] or
    [ensemble, batch, width].
    """

    def __init__(self, width: int, ensemble: int | None = None) -> None:
        super().__init__()
        shape = (width,) if ensemble is None else (ensemble, width)
        self.weight, self.bias = nn.Parameter(torch.ones(shape)), nn.Parameter(torch.zeros(shape))

    def forward(self, inputs: Tensor) -> Tensor:
        return _layer_norm(inputs, self.weight, self.bias)


def _layer_norm(inputs: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    if scale.dim() == 1:
        return F.layer_norm(inputs, scale.shape, scale, shift, EPSILON)
    return torch.addcmul(shift.unsqueeze(1), F.layer_norm(inputs, scale.shape[1:], eps=EPSILON), scale.unsqueeze(1))


class GELU(nn.GELU):
    """GELU in the tanh form, as `common.layers` computes it."""

    def __init__(self) -> None:
        super().__init__("tanh")


ACTIVATIONS: dict[Activation, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": GELU}


class MLP(nn.Sequential):
    """Linear or ensemble linear layers with activations. `common.onednn` computes large products on the CPU."""

    def __init__(self, activation: Activation, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.activation: Activation = activation
        # A list, because walking the modules at every call takes longer. A layer norm belongs to the layer before it.
        self._layers: list[tuple[Tensor, ...]] = []
        self._norm_last = False
        for before, layer in zip([None, *layers], layers, strict=False):
            if isinstance(layer, LayerNorm):
                self._layers[-1] += (layer.weight, layer.bias)
                self._norm_last = isinstance(before, ACTIVATIONS[activation])
            elif isinstance(layer, nn.Linear | EnsembleLinear):
                self._layers.append((layer.weight, layer.bias))
            elif not isinstance(layer, ACTIVATIONS[activation]):
                raise TypeError(f"MLP computes linear layers, their norms and {activation}: {layer} would be left out")
        self._largest = max(layer[0].shape[-2] * layer[0].shape[-1] for layer in self._layers)
        self._shares_output = self._layers[0][0].dim() == 3 and len(self._layers[0][0]) > len(self._layers[-1][0])

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs [batch, inputs] to [batch, outputs], or [ensemble, batch, outputs]."""
        return self._through(self._each_members_layers(), inputs)

    def _each_members_layers(self) -> Layers:
        if not self._shares_output:
            return self._layers
        *hidden, output = self._layers
        return [*hidden, tuple(part.expand(len(hidden[0][0]), *part.shape[1:]) for part in output)]

    def forward_members(self, index: int | Tensor, inputs: Tensor) -> Tensor:
        """Map inputs [batch, inputs] through some members of the ensemble.

        An integer `index` selects one member and gives [batch, outputs]. A tensor [n] of numbers gives [n, batch,
        outputs].
        """
        return self._through([tuple(part[index] for part in layer) for layer in self._each_members_layers()], inputs)

    def forward_with_dropout(self, inputs: Tensor, share: float, generator: torch.Generator) -> Tensor:
        """Compute `forward` with a share of hidden units dropped and the rest scaled up (Srivastava et al. 2014).

        Units are dropped after their activation, or before a layer norm (Hiraoka et al. 2022, figure 2).
        """
        if not share:
            return self.forward(inputs)
        of_norms = any(isinstance(layer, LayerNorm) for layer in self)
        for layer, following in itertools.pairwise([*self, None]):
            inputs = layer(inputs)
            if isinstance(following, LayerNorm) if of_norms else isinstance(layer, ACTIVATIONS[self.activation]):
                kept = torch.rand(inputs.shape, generator=generator, device=inputs.device) >= share
                inputs = inputs * kept / (1.0 - share)
        return inputs

    def _through(self, layers: Layers, inputs: Tensor) -> Tensor:
        large = inputs.device.type == "cpu" and len(inputs) * self._largest >= MIN_ONEDNN_MULTIPLICATIONS
        if large and inputs.dtype == torch.float32 and not torch.compiler.is_compiling():
            return network(self.activation, inputs, layers, self._norm_last)
        for weight, bias, *norm in layers[:-1]:
            sums = _linear(inputs, weight, bias)
            inputs = IN_PLACE[self.activation](_layer_norm(sums, *norm) if norm and not self._norm_last else sums)
            if norm and self._norm_last:
                inputs = _layer_norm(inputs, *norm)
        return _linear(inputs, *layers[-1])


def mlp(
    sizes: Sequence[int],
    generator: torch.Generator,
    ensemble: int | None = None,
    activation: Activation = "relu",
    layer_norm: bool = False,
    shared_output: bool = False,
    norm_last: bool = False,
) -> MLP:
    """Return a network with `sizes` = [inputs, hidden..., outputs], or a stack of `ensemble` of them.

    With `layer_norm`, each hidden layer is normalised before its activation, or after it with `norm_last`. With
    `shared_output`, the ensemble has one output layer. As in PyTorch, weights and biases are uniform within
    ±1 / √inputs, but drawn from `generator`.
    """
    layers: list[nn.Module] = []
    for i, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
        members = 1 if shared_output and i == len(sizes) - 2 else ensemble
        layer = Linear(inputs, outputs) if members is None else EnsembleLinear(members, inputs, outputs)
        bound = 1.0 / math.sqrt(inputs)
        nn.init.uniform_(layer.weight, -bound, bound, generator=generator)
        nn.init.uniform_(layer.bias, -bound, bound, generator=generator)
        unit, norm = ACTIVATIONS[activation](), [LayerNorm(outputs, ensemble)] if layer_norm else []
        layers += [layer, unit, *norm] if norm_last else [layer, *norm, unit]
    return MLP(activation, *layers[: -2 if layer_norm else -1])


class Critic(nn.Module):
    """Q_i(s, a) of an ensemble of networks, or of those numbered `members`, an int or [members].

    Shapes: obs [batch, obs_dim] and actions [batch, action_dim] are mapped to [critics, batch]. With k actions for each
    observation, [k, batch, action_dim], the values are [critics, k, batch].
    """

    def __init__(self, net: MLP) -> None:
        super().__init__()
        self.net = net

    def forward(self, obs: Tensor, actions: Tensor, members: int | Tensor | None = None) -> Tensor:
        return self.outputs(obs, actions, members).view(-1, *actions.shape[:-1])

    def outputs(self, obs: Tensor, actions: Tensor, members: int | Tensor | None) -> Tensor:
        """Return what the networks give for all pairs of obs and actions: [critics, pairs, outputs]."""
        inputs = torch.cat([obs.expand(*actions.shape[:-1], -1), actions], dim=-1).flatten(0, -2)
        return self.net(inputs) if members is None else self.net.forward_members(members, inputs)


def orthogonal(
    network: MLP,
    generator: torch.Generator,
    last_gain: float = math.sqrt(2.0),
    last_hidden_gain: float = math.sqrt(2.0),
) -> MLP:
    """Make the network's weights orthogonal and its biases zero, and return it.

    The gain is √2, except `last_gain` in the last layer and `last_hidden_gain` in the last hidden layer.
    """
    layers = [layer for layer in network if isinstance(layer, nn.Linear | EnsembleLinear)]
    gains = [*[math.sqrt(2.0)] * (len(layers) - 2), last_hidden_gain, last_gain][-len(layers) :]
    for layer, gain in zip(layers, gains, strict=True):
        for weight in [layer.weight] if isinstance(layer, nn.Linear) else layer.weight:
            nn.init.orthogonal_(weight, gain, generator=generator)
        nn.init.zeros_(layer.bias)
    return network


def glorot(network: M, generator: torch.Generator) -> M:
    """Initialise the network as Glorot and Bengio 2010 do, and return it.

    Weights are uniform within ±√(6 / (inputs + outputs)), biases zero.
    """
    for layer in network.modules():
        if isinstance(layer, nn.Linear | EnsembleLinear):
            bound = math.sqrt(6.0 / sum(layer.weight.shape[-2:]))
            nn.init.uniform_(layer.weight, -bound, bound, generator=generator)
            nn.init.zeros_(layer.bias)
    return network


class TanhGaussian:
    """The distribution of tanh(u), u ~ N(mean, exp(log_std)²), independent in each dimension.

    Source: SAC (Haarnoja et al. 2018, arXiv 1812.05905), appendix C. Shapes: mean, log_std and actions are
    [..., action_dim], log-probabilities [...].
    """

    def __init__(self, mean: Tensor, log_std: Tensor) -> None:
        self.mean, self.log_std = mean, log_std

    def expand(self, count: int) -> "TanhGaussian":
        """Return the distributions repeated to [count, ..., action_dim], to draw `count` actions of each."""
        shape = (count, *self.mean.shape)
        return TanhGaussian(self.mean.expand(shape), self.log_std.expand(shape))

    @property
    def mode(self) -> Tensor:
        """The deterministic action tanh(mean), which is, to be exact, the median."""
        return torch.tanh(self.mean)

    def sample(self, generator: torch.Generator) -> Tensor:
        """Sample actions without their log-probabilities, for acting."""
        noise = torch.randn(self.mean.shape, generator=generator, device=self.mean.device)
        return torch.tanh(self.mean + self.log_std.exp() * noise)

    def rsample(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Sample reparameterised actions, and return them with their log-probabilities."""
        noise = torch.randn(self.mean.shape, generator=generator, device=self.mean.device)
        u = self.mean + self.log_std.exp() * noise
        return torch.tanh(u), self._log_prob(u, noise)

    def log_prob(self, actions: Tensor) -> Tensor:
        """Return the log-probability of the given actions, not of a new sample.

        Actions must lie within [-1, 1]. The density at ±1 is 0 or infinite, so they are clipped to ±(1 - ε), ε the
        machine precision of their type.
        """
        limit = 1.0 - torch.finfo(actions.dtype).eps
        u = torch.atanh(actions.clamp(-limit, limit))
        return self._log_prob(u, (u - self.mean) * torch.exp(-self.log_std))

    def _log_prob(self, u: Tensor, noise: Tensor) -> Tensor:
        # log(1 - tanh(u)²) = 2 (log 2 - u - softplus(-2u)) is exact for every u. The usual log(1 - a² + 1e-6) is not.
        log_slope = 2.0 * (LOG_2 - u - F.softplus(-2.0 * u))
        return (-0.5 * noise.square() - self.log_std - log_slope - HALF_LOG_2PI).sum(-1)


@contextlib.contextmanager
def frozen(network: nn.Module) -> Iterator[None]:
    """Compute no gradient of `network`'s parameters within the block, only of its inputs, which costs less."""
    network.requires_grad_(False)
    try:
        yield
    finally:
        network.requires_grad_(True)
