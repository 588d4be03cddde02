"""Map arrays of observations to arrays of actions, by methods that are written for tensors."""

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.evaluate import Act

P = ParamSpec("P")


class OnDevice(Protocol):
    device: torch.device


class Agent(Protocol):
    """An agent whose `act` is wrapped by `acting`. It draws all its random numbers from `generator`."""

    generator: torch.Generator

    @property
    def act(self) -> Any: ...


def eval_policy(agent: Agent) -> Act:
    """Return the policy for evaluation: the agent's own `eval_policy()` if it has one, else deterministic."""
    own: Callable[[], Act] | None = getattr(agent, "eval_policy", None)
    return own() if own else functools.partial(agent.act, deterministic=True)


A = TypeVar("A", bound=OnDevice)


def acting(
    method: Callable[Concatenate[A, Tensor, P], Tensor],
) -> Callable[Concatenate[A, NDArray[Any], P], NDArray[np.float32]]:
    """Wrap a method from obs [n, obs_dim] to actions [n, action_dim] so that it takes and returns arrays.

    The method itself takes and returns tensors on the agent's device. No gradient is kept. `__wrapped__` is the method.
    """

    @functools.wraps(method)
    @torch.no_grad()
    def act(agent: A, obs: NDArray[Any], /, *args: P.args, **kwargs: P.kwargs) -> NDArray[np.float32]:
        actions: NDArray[np.float32] = (
            method(agent, torch.from_numpy(obs).to(agent.device), *args, **kwargs).cpu().numpy()
        )
        return actions

    return act


def uniform_actions(num_envs: int, action_dim: int, generator: torch.Generator) -> NDArray[np.float32]:
    """Sample uniform actions [num_envs, action_dim] in [-1, 1]."""
    actions = 2.0 * torch.rand((num_envs, action_dim), generator=generator, device=generator.device) - 1.0
    array: NDArray[np.float32] = actions.cpu().numpy()
    return array
