"""Trains again and again, killed (SIGKILL) at the n-th time that it reaches each place in turn.

kill_at.py ALGO "PLACE N, PLACE N, ..." FLAGS... ends with 1 where a training was not killed. Each is a process of its
own; they share the seconds of imports.
"""

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
    places = sys.argv[2].split(", ")
    sys.argv[1:3] = []
    for each in places:
        child = os.fork()  # nothing has computed yet: no thread is lost
        if child == 0:
            kill_at(each.rsplit(" ", 1)[0], int(each.rsplit(" ", 1)[1]))
            command_line(algorithm.train, algorithm.Args)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        if not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL):
            sys.exit(f"not killed at {each}")
