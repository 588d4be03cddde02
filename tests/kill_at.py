"""Trains again and again, killed (SIGKILL) at the n-th time that it reaches each place in turn.

Each line of its input asks for one such series, in JSON: the algorithm, its flags, the places with their n, the current
folder and the file to which it prints. It answers with the series' exit status: 1 if a training does not end as its
place asks. Each training is a process of its own; all of them share the seconds of imports.

("Ctrl-C", n) is a SIGINT at the n-th report, and ("Ctrl-C in evaluation", n) one at the third action of the n-th
evaluation. Both must end the training with 130. ("any", n) is n kills at random instants, after which it prints the
steps of the checkpoints. ("end", 1) lets the training run to its end.
"""

import importlib
import itertools
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium.envs.mujoco  # noqa: F401 - else each training imports it

import common.run
import common.updater
import envs.rollout
import envs.state
import envs.vector
import offline.offline_to_online
from common import checkpoint
from common.command_line import command_line, parse
from common.optim import Adam

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
    "Ctrl-C in evaluation": (common.run, "eval_policy"),
}
os.fsync = lambda file: None  # the kernel keeps what a killed process wrote
STATUS = {"end": 0, "Ctrl-C": 130, "Ctrl-C in evaluation": 130}  # of a training that no SIGKILL ends


def kill_at(place: str, n: int) -> None:
    owner, name = PLACES[place]
    original: Callable[..., Any] = getattr(owner, name)
    reached = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal reached
        reached += 1
        if reached == n and place == "Ctrl-C in evaluation":
            return interrupted(original(*args, **kwargs))
        if reached == n:
            os.kill(os.getpid(), signal.SIGINT if place == "Ctrl-C" else signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(owner, name, counted)


def interrupted(policy: Callable[..., Any]) -> Callable[..., Any]:
    """Return the policy, which sends SIGINT to this process at its third call."""
    calls = itertools.count(1)

    def act(obs: Any) -> Any:
        if next(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return policy(obs)

    return act


def start(algorithm: ModuleType, place: str = "", n: int = 0) -> int:
    """The training's process, which kills itself at the n-th `place`."""
    child = os.fork()  # nothing has computed yet: no thread is lost
    if child == 0:
        signal.alarm(600)  # one that hangs ends otherwise than its place asks
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


def kill_at_random(algorithm: ModuleType, kills: int) -> None:
    """After no, one or two checkpoints and up to 0.3 s more, but at the next checkpoint at the latest.

    Seconds alone would differ by machine: a fast one would get to the end of the run before its last kill.
    """
    path = parse(algorithm.Args).run_dir / "checkpoint" / "state.pt"
    chance, steps = random.Random(0), []
    for _ in range(kills):
        written, count = modified(path), chance.randint(0, 2)
        child = start(algorithm)
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


def kill_in_turn(algo: str, flags: list[str], places: list[tuple[str, int]]) -> None:
    sys.argv = [f"{algo}.py", *flags]
    algorithm = importlib.import_module(f"algos.{algo}")
    for place, n in places:
        if place == "any":
            kill_at_random(algorithm, n)
        elif place in STATUS:
            if os.waitstatus_to_exitcode(os.waitpid(start(algorithm, place, n), 0)[1]) != STATUS[place]:
                sys.exit("it failed")
        else:
            was_killed(start(algorithm, place, n))


if __name__ == "__main__":
    for line in sys.stdin:
        *series, folder, said = json.loads(line)
        child = os.fork()
        if child == 0:
            os.chdir(folder)
            os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), sys.stderr.fileno())
            kill_in_turn(*series)
            sys.exit()
        sys.stdout.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")
        sys.stdout.flush()
