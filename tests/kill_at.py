"""Trains, and kills itself (SIGKILL) at the n-th time that it reaches a place: kill_at.py ALGO PLACE N FLAGS..."""

import importlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import envs.state
import envs.vector
import offline.switch
from common.command_line import command_line
from common.networks import Adam

algorithm = importlib.import_module(f"algos.{sys.argv[1]}")
PLACES: dict[str, tuple[Any, str]] = {
    "step": (envs.state.ExactState, "step"),
    "async step": (envs.vector.Processes, "step"),
    "online step": (offline.switch.Switch, "add"),
    "update": (Adam, "descend"),
    "evaluation": (algorithm, "evaluate"),
    "torch.save": (torch, "save"),
    "fsync": (os, "fsync"),
    "rename": (Path, "replace"),
}


def kill_at(place: str, n: int) -> None:
    owner, name = PLACES[place]
    original: Callable[..., Any] = getattr(owner, name)
    reached = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal reached
        reached += 1
        if reached == n:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(owner, name, counted)


if __name__ == "__main__":
    kill_at(sys.argv[2], int(sys.argv[3]))
    sys.argv[1:4] = []
    command_line(algorithm.train, algorithm.Args)
