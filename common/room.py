"""Refuse sizes that need more memory than there is, before anything is allocated."""

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from common.arguments import RunArgs
from common.errors import InputError
from common.memory import free_memory

# Bytes, as lower bounds, so that nothing is refused that would fit.
NUMBER = 4
WEIGHT = 4 * NUMBER  # with its gradient and Adam's two moments
ENVIRONMENT, PROCESS = 2**18, 2**26  # MuJoCo's model and data; a Python process of its own
EPISODE = 2**9  # of an evaluation


def require_room(args: RunArgs, device: torch.device) -> None:
    """Raise InputError for the first flags whose sizes alone need more memory than is free on their device."""
    free = {where: free_memory(where) for where in {device, torch.device("cpu")}}
    for flags, need, where in _needs(args, device):
        if need > free[where]:
            raise InputError(
                f"{flags} needs {need / 1e9:,.0f} GB of memory or more, and {free[where] / 1e9:,.1f} GB are free: "
                "give a smaller number"
            )


def _needs(args: RunArgs, device: torch.device) -> Iterator[tuple[str, int, torch.device]]:
    """Yield flags, the bytes that they need at least, and where."""

    def size(name: str) -> Any:
        value = getattr(args, name, 1)
        return value if isinstance(value, int | tuple) else 1  # some come from the dataset's domain, later

    cpu = torch.device("cpu")
    yield "--num-envs", size("num_envs") * (PROCESS if args.vectorizer == "async" else ENVIRONMENT), cpu
    yield "--eval-episodes", size("eval_episodes") * EPISODE, cpu
    widest = 1
    for name in ("hidden", "critic_hidden"):
        layers = size(name) if isinstance(size(name), tuple) else (1,)
        widest = max(widest, *layers)
        weights = sum(a * b for a, b in itertools.pairwise(layers)) + sum(layers)
        yield f"--{name.replace('_', '-')}", weights * WEIGHT, device
        yield "--critics", size("critics") * weights * WEIGHT, device
    yield "--width and --blocks", 8 * size("width") ** 2 * size("blocks") * WEIGHT, device
    for name in ("batch_size", "minibatch_size"):
        rows = size(name) * size("cql_actions")
        yield f"--{name.replace('_', '-')}", rows * max(widest, size("width")) * NUMBER, device
    yield "--rollout-steps", size("rollout_steps") * size("num_envs") * NUMBER, device
