"""Seeds and random generators, so that no two purposes share a stream of random numbers."""

import zlib
from typing import TYPE_CHECKING

import numpy as np

from common.errors import InputError

if TYPE_CHECKING:
    import torch


def seeds(seed: int, purpose: str, n: int) -> list[int]:
    """Return `n` seeds in [0, 2³²) for a purpose, such as "training" or "evaluation".

    They are the same in every process, and the first ones do not depend on `n`. Raises InputError on a negative seed.
    """
    if seed < 0:
        raise InputError(f"--seed is {seed}: give 0 or a larger whole number")
    streams = np.random.SeedSequence([seed, zlib.crc32(purpose.encode())]).spawn(n)
    return [int(stream.generate_state(1)[0]) for stream in streams]


def generator(seed: int, purpose: str, device: "torch.device | str" = "cpu") -> "torch.Generator":
    """Return PyTorch's generator on `device`, seeded for one purpose of a run with this seed."""
    import torch  # here, because environments' processes only need `seeds` and start a second earlier without torch

    return torch.Generator(device).manual_seed(seeds(seed, purpose, 1)[0])
