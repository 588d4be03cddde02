"""Definitions of layers that plain PyTorch (`common.networks`) and `common.onednn` share."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Activation = Literal["relu", "tanh", "gelu"]
Layers = Sequence[tuple[Tensor, ...]]  # weight, bias, and the scale and shift of a layer norm
EPSILON = 1e-6  # of layer norms: Flax's default, which the published networks use

# Each is looked up once, because a lookup at every call would take as long as a small product. GELU has the tanh form
# (Hendrycks and Gimpel 2016), as in JAX. It alone is not in place, because its gradient needs its input.
IN_PLACE: dict[str, Callable[[Tensor], Tensor]]
IN_PLACE = {"relu": torch.relu_, "tanh": torch.tanh_, "swish": partial(F.silu, inplace=True)}
IN_PLACE["gelu"] = partial(F.gelu, approximate="tanh")
