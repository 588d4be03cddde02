"""Trains again and again, killed (SIGKILL) at the n-th time that it reaches each place in turn.

kill_at.py ALGO "PLACE N, PLACE N, ..." FLAGS... ends with 1 if a training does not end as its place asks. Each is a
process of its own; they share the seconds of imports. "Ctrl-C N" is a SIGINT at the N-th report, which must end it with
130. "any N" is N kills at random instants, after which it prints the steps of the checkpoints. "end 1" lets the
training run to its end.
"""

import importlib
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common.run
import common.updater
import envs.rollout
import envs.state
import envs.vector
import offline.offline_to_online
from common import checkpoint
from common.command_line import command_line, parse
from common.optim import Adam

algorithm = importlib.import_module(f"algos.{sys.argv[1]}")
PLACES: dict[str, tuple[Any, str]] = {
    "step": (envs.state.ExactState, "step"),
    "async step": (envs.vector.AsyncEnvs, "step_async"),
    "online step": (offline.offline_to_online.OfflineToOnline, "add"),
    "flush": (common.updater.Updater, "flush"),
    "update": (Adam, "minimize"),
    "evaluation": (envs.rollout, "evaluate"),
    "save": (checkpoint, "save"),
    "fsync": (os, "fsync"),
    "rename": (Path, "replace"),
    "Ctrl-C": (common.run.Run, "report"),
}
os.fsync = lambda file: None  # the kernel keeps what a killed process wrote
STATUS = {"end": 0, "Ctrl-C": 130}  # of a training that no SIGKILL ends


def kill_at(place: str, n: int) -> None:
    owner, name = PLACES[place]
    original: Callable[..., Any] = getattr(owner, name)
    reached = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal reached
        reached += 1
        if reached == n:
            os.kill(os.getpid(), signal.SIGINT if place == "Ctrl-C" else signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(owner, name, counted)


def start(place: str = "", n: int = 0) -> int:
    """The training's process, which kills itself at the n-th `place`."""
    child = os.fork()  # nothing has computed yet: no thread is lost
    if child == 0:
        if place in PLACES:
            kill_at(place, n)
        command_line(algorithm.train, algorithm.Args)
        os._exit(0)
    return child


def was_killed(child: int, options: int = 0) -> bool:
    """Whether it ended so; False where it still runs and `options` are not to wait. Exits where it ended otherwise."""
    pid, status = os.waitpid(child, options)
    if pid and not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL):
        sys.exit("it ended before it was killed")
    return pid != 0


def kill_at_random(kills: int) -> None:
    """After no, one or two checkpoints and up to 0.3 s more, but at the next checkpoint at the latest.

    Seconds alone would differ by machine: a fast one would get to the end of the run before its last kill.
    """
    path = parse(algorithm.Args).run_dir / "checkpoint" / "state.pt"
    chance, steps = random.Random(0), []
    for _ in range(kills):
        written, count = modified(path), chance.randint(0, 2)
        child = start()
        while count and not was_killed(child, os.WNOHANG):
            time.sleep(0.002)
            count, written = count - (modified(path) != written), modified(path)
        latest = time.monotonic() + chance.uniform(0.0, 0.3)
        while time.monotonic() < latest and modified(path) == written:
            time.sleep(0.002)
        os.kill(child, signal.SIGKILL)
        was_killed(child)
        steps.append(checkpoint.load(path)["logger"]["step"] if path.exists() else 0)
    sys.stderr.write(f"\nkilled at random, with checkpoints of steps {steps}\n")


def modified(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


if __name__ == "__main__":
    places = [(each.rsplit(" ", 1)[0], int(each.rsplit(" ", 1)[1])) for each in sys.argv[2].split(", ")]
    sys.argv[1:3] = []
    for place, n in places:
        if place == "any":
            kill_at_random(n)
        elif place in STATUS:
            if os.waitstatus_to_exitcode(os.waitpid(start(place, n), 0)[1]) != STATUS[place]:
                sys.exit("it failed")
        else:
            was_killed(start(place, n))
