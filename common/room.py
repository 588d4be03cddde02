"""Refuse sizes that need more memory than there is, or ten years, before anything is allocated."""

import itertools
from collections.abc import Iterator
from functools import partial
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
MOST_PER_SECOND = 10**6  # steps, updates or steps of a flow that follow one another, as an upper bound
TEN_YEARS = 10 * 365 * 24 * 3600  # seconds


def require_resources(args: RunArgs, device: torch.device) -> None:
    """Raise InputError for the first flag whose size alone needs ten years, or more memory than its device has free."""
    for flag, work in _work(args):
        if work / MOST_PER_SECOND > TEN_YEARS:
            raise InputError(
                f"{flag} would make the run last ten years or more, even at a million steps per second: "
                "give a smaller number"
            )
    free = {each: free_memory(each) for each in {device, torch.device("cpu")}}
    for flag, need, holder in _needs(args, device):
        if need > free[holder]:
            raise InputError(
                f"{flag} needs {need / 1e9:,.0f} GB of memory or more, and {free[holder] / 1e9:,.1f} GB are free: "
                "give a smaller number"
            )


def _work(args: RunArgs) -> Iterator[tuple[str, int]]:
    """Yield each flag and a lower bound on the sequential operations it causes."""
    first, last = args.span
    steps = last - first
    size = partial(_size, args)
    for name in ("total_steps", "offline_steps", "online_steps"):
        yield f"--{name.replace('_', '-')}", size(name)
    yield "--utd", max(last, 0) * size("utd")
    for name in ("flow_steps", "denoising_steps", "improve_steps"):
        yield f"--{name.replace('_', '-')}", steps * size(name)
    yield "--epochs", steps // size("rollout_steps") * size("epochs")


def _size(args: RunArgs, name: str) -> Any:
    value = getattr(args, name, 1)
    return value if isinstance(value, int | tuple) else 1  # some come from the dataset's domain, later


def _needs(args: RunArgs, device: torch.device) -> Iterator[tuple[str, int, torch.device]]:
    """Yield a flag, the bytes that it needs at least, and the device that holds them."""
    size = partial(_size, args)
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
    yield "--width", 8 * size("width") ** 2 * size("blocks") * WEIGHT, device
    for name in ("batch_size", "minibatch_size"):
        rows = size(name) * size("cql_actions")
        yield f"--{name.replace('_', '-')}", rows * max(widest, size("width")) * NUMBER, device
    yield "--samples", size("samples") * max(widest, size("width")) * NUMBER, device
    yield "--rollout-steps", size("rollout_steps") * NUMBER, device
