"""What a network's layers are, for all that compute them: plain PyTorch (`common.networks`) and `common.onednn`."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Activation = Literal["relu", "tanh"]
Layers = Sequence[tuple[Tensor, ...]]  # weight, bias, and of a normalised layer its scale and shift
EPSILON = 1e-6  # of layer norms: Flax's, whose networks of this kind are the published ones

# Each looked up once: at every call that would take as long as a small product.
IN_PLACE: dict[str, Callable[[Tensor], Tensor]]
IN_PLACE = {"relu": torch.relu_, "tanh": torch.tanh_, "swish": partial(F.silu, inplace=True)}
