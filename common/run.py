"""One run: its folder, its device, and exact resume."""

import contextlib
import dataclasses
import fcntl
import functools
import importlib.util
import json
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, NamedTuple, TextIO, TypeVar

import torch

from common import checkpoint
from common.acting import Agent
from common.arguments import OffPolicyArgs, RunArgs
from common.cuda import Captured, compiled, device
from common.errors import Finished, InputError
from common.evaluate import Act, Episode
from common.logger import Logger, read_last_evaluation, start_wandb
from common.onednn import keep_freed_memory
from common.provenance import commit, hardware, versions
from common.replay_buffer import ReplayBuffer

A = TypeVar("A")
R = TypeVar("R")
MAY_DIFFER = ("run_dir", "track", "checkpoint_every")  # arguments that do not change what a run computes


def name_and_folder(algo: str, args: RunArgs) -> tuple[str, Path]:
    """<algorithm>__<task>__<seed>, of characters that every file system takes, and where the run is or will be."""
    name = f"{algo}__{re.sub('[^A-Za-z0-9_.-]+', '_', args.task)}__{args.seed}"
    return name, args.run_dir or Path("runs") / name


class Result(NamedTuple):
    """What a finished run gave: its folder, its last step, and the episodes of its last evaluation, if it had one."""

    folder: Path
    step: int
    episodes: list[Episode]


class FinishedRun(Finished):
    """The run is complete. Its result is there already."""

    def __init__(self, message: str, result: Result) -> None:
        super().__init__(message)
        self.result = result


def returns_result(train: Callable[[A], Result]) -> Callable[[A], Result]:
    """Return the result of a run that is finished already, instead of training it again."""

    @functools.wraps(train)
    def wrapped(args: A) -> Result:
        try:
            return train(args)
        except FinishedRun as finished:
            sys.stderr.write(f"{finished}\n")
            return finished.result

    return wrapped


class Run:
    """The folder of a run and what happens in it. Nothing is written before `open`, so bad input leaves no trace."""

    _locks: ClassVar[dict[Path, TextIO]] = {}  # this process's: a run that it began again may be one that failed here

    def __init__(self, algo: str, args: RunArgs, steps_between: int | None = None) -> None:
        """`steps_between`: environment steps from one call of `due` or `save_if_due` to the next; num_envs if None.

        Raises InputError if the folder belongs to other arguments, FinishedRun if the run is complete.
        """
        self.args, self.steps_between = args, steps_between or args.num_envs
        self.first_step, self.last_step = args.span
        # The moments of a dead unit's weights shrink into denormal numbers, on which a CPU is a hundred times slower:
        # of a run of 200 000 steps that may be half of all. Threads made later inherit it.
        torch.set_flush_denormal(True)
        keep_freed_memory()
        self.name, self.folder = name_and_folder(algo, args)
        self.device = device(args.device, args.tf32)
        if args.track and importlib.util.find_spec("wandb") is None:
            raise InputError("--track needs Weights & Biases: pip install wandb (or leave --track out)")
        self._signal = 0
        self._handlers: dict[int, Any] = {}  # of signals, as they were before
        self._grown: dict[str, Any] | None = None  # the config of a run that is to be longer than it was
        arguments = json.loads(json.dumps(dataclasses.asdict(args), default=str))
        self.config = {"algo": algo, "arguments": arguments, "versions": versions()}
        try:
            self._check_folder()
        except OSError as error:
            where = error.filename or self.folder
            cure = "permit this user to read it, or give" if isinstance(error, PermissionError) else "give"
            raise InputError(f"{where} cannot be read ({error.strerror}): {cure} another --run-dir") from None

    def open(self) -> dict[str, Any] | None:
        """Makes the folder or takes it up again; returns the state of its last checkpoint, if there is one."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock()
            self._check_folder()  # again: another run may have begun and ended here meanwhile
        except OSError as error:
            raise InputError(f"{self.folder} cannot be written ({error.strerror}): give another --run-dir") from None
        saved = None  # read before anything is changed: it may be unreadable
        with contextlib.suppress(FileNotFoundError):
            saved = checkpoint.load(self.folder / "checkpoint" / "state.pt")
        config = self.folder / "config.json"
        if self._grown or not config.exists():
            (self.folder / "DONE").unlink(missing_ok=True)
            facts = self._grown or self.config | {"commit": commit(), "hardware": hardware(self.device)}
            with checkpoint.replacing(config) as file:
                file.write(json.dumps(facts, indent=2).encode())
        wandb_run = start_wandb(self.name, self.folder, self.config) if self.args.track else None
        self.logger = Logger(self.folder, self.args.span, self.args.num_envs, saved and saved["logger"], wandb_run)
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(ValueError):  # signals reach the main thread only
                handler = signal.signal(number, self._on_signal)
                failed = getattr(handler, "__self__", None)  # a run of this process that came to no end
                self._handlers[number] = failed._handlers[number] if isinstance(failed, Run) else handler
        self._updated_to = saved.get("updated_to", self.step - self._overlaps) if saved else self.step
        if saved is None:
            self.logger.say(f"{self.name}: on {self.device}, into {self.folder}")
            return None
        self.logger.say(f"{self.name}: goes on from step {self.logger.step:,}, on {self.device}, in {self.folder}")
        if self._grown and self._overlaps:
            self.logger.say(
                "note: the updates of its last step are done already, one action earlier than in a longer run"
            )
        before = json.loads(config.read_text())["versions"]
        if before != self.config["versions"]:
            changed = [name for name, version in versions().items() if before.get(name) != version]
            self.logger.say(f"warning: {', '.join(changed)} changed since it began; it is not bit for bit the same run")
        return saved

    @property
    def step(self) -> int:
        """Environment steps so far, or less than zero: gradient steps to go on the dataset alone."""
        return self.logger.step

    @property
    def _overlaps(self) -> bool:
        """Whether the updates of the present step wait until the next action is chosen."""
        asked = self.args.overlap if isinstance(self.args, OffPolicyArgs) else False
        return self.step > 0 and (self.device.type == "cuda" if asked is None else asked)

    def claim_updates(self, before_step: bool = False) -> bool:
        """Return whether the updates of the present step are to be performed here, and note them as performed.

        `before_step`: between the choice of an action and the environment's step, where overlapped updates belong. The
        last step has no such place after it, so its updates are never put off.
        """
        if self._updated_to >= self.step:
            return False
        here = before_step or not self._overlaps or self.step >= self.last_step
        if here:
            self._updated_to = self.step
        return here

    def accelerated(self, function: Callable[..., R], generator: torch.Generator) -> Callable[..., R]:
        """The function, compiled where that is asked for, and as CUDA graphs where there is CUDA.

        `common.cuda.Captured` says what it may do. `generator` is the one that it draws from.
        """
        if self.args.compile:
            function = compiled(function)
        return Captured(function, generator) if self._captures else function

    def acting(self, agent: Agent) -> Act:
        """Return the agent's `act`, for training. Raises InputError if a checkpoint cannot hold the agent."""
        checkpoint.require_saveable(agent)  # here, not at the first checkpoint
        act: Act = agent.act
        if not self._captures:
            return act
        method: Callable[..., torch.Tensor] = act.__wrapped__  # type: ignore[attr-defined]
        actions = Captured(torch.no_grad()(method), agent.generator)
        return lambda obs: actions(agent, torch.from_numpy(obs)).to("cpu", copy=True).numpy()

    @property
    def _captures(self) -> bool:
        return self.device.type == "cuda" and self.args.cuda_graph

    def due(self, every: int) -> bool:
        """Whether a multiple of `every` was reached since the loop's last turn, or the end."""
        step = self.step
        before = step - (self.steps_between if step > 0 else 1)
        return step // every > before // every or step >= self.last_step

    def warn_if_idle(self, steps: int, flag: str) -> None:
        """Says so where the whole run is within the environment steps before anything is learned."""
        if 0 < self.last_step <= steps:
            self.logger.say(
                f"warning: nothing is learned in {self.last_step:,} environment steps: {flag} are {steps:,}"
            )

    def warn_inexact(self, exact: list[bool]) -> None:
        """Says so, and counts anew, where an environment [num_envs] is not back in the very state that was saved."""
        if all(exact):
            return
        self.logger.count_anew([not each for each in exact])
        if self.args.vectorizer == "envpool":
            cause = "EnvPool cannot save the state of its environments: they begin new episodes here"
        else:
            cause = f"{self.args.env or self.args.task} does not replay bit for bit: it begins a new episode here"
        self.logger.say(f"warning: {cause}, and the run is not exactly the one that was stopped")

    def save_if_due(self, snapshot: Callable[[], dict[str, Any]], buffer: ReplayBuffer | None = None) -> None:
        """A checkpoint, when one is due or the user asked to stop; then it stops, and the same command goes on.

        Written aside and renamed, the replay rows before the state that needs them: a kill at any instant leaves the
        checkpoint before, or this one.
        """
        if not (self.due(self.args.checkpoint_every) or self._signal):
            return
        folder = self.folder / "checkpoint"
        folder.mkdir(exist_ok=True)
        checkpoint.sync(self.folder)
        state = snapshot() | {"logger": self.logger.state(), "updated_to": self._updated_to}
        checkpoint.refuse_non_finite(state, self.folder, self.step)
        if buffer is not None:
            state["buffer"] = buffer.save(folder / "replay")
        checkpoint.save(folder / "state.pt", state)
        if buffer is not None:
            buffer.drop_old(folder / "replay")
        if self._signal:
            self.logger.say(f"stopped at step {self.step:,}; the same command goes on from there")
            self._close()
            raise SystemExit(128 + self._signal)

    def finish(self) -> Result:
        """Mark the run as complete and return its last evaluation."""
        with checkpoint.replacing(self.folder / "DONE") as file:
            file.write(json.dumps({"step": self.step}).encode())
        self._close()
        self.logger.say(f"done at step {self.step:,}, results in {self.folder}")
        return self._result()

    def _result(self) -> Result:
        return Result(self.folder, self.last_step, read_last_evaluation(self.folder / "evaluations.csv"))

    def _close(self) -> None:
        """Leaves the process as it was."""
        self.logger.close()
        self._locks.pop(self.folder.resolve()).close()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _check_folder(self) -> None:
        config = self.folder / "config.json"
        if self.folder.exists() and not self.folder.is_dir():
            raise InputError(f"{self.folder} is a file: give another --run-dir")
        if not config.exists():
            if self.folder.exists() and any(f.name not in (".lock", "config.json.part") for f in self.folder.iterdir()):
                raise InputError(f"{self.folder} is not empty and not a run folder: give another --run-dir")
            return
        try:
            made_by = json.loads(config.read_text())
            # An argument that did not exist yet did what its default does.
            defaults = {field.name: field.default for field in dataclasses.fields(self.args)}
            defaults = json.loads(json.dumps(defaults, default=str))
            before = defaults | made_by["arguments"] | {"algorithm": made_by["algo"]}
        except (ValueError, KeyError, TypeError):
            raise InputError(f"{config} is damaged: {checkpoint.RESTORE_OR_RESTART}") from None
        now = self.config["arguments"] | {"algorithm": self.config["algo"], "device": self.device.type}
        if before["device"] == "auto":  # what that was
            before["device"] = "cuda" if made_by.get("hardware", {}).get("gpu") else "cpu"
        grown = {k: now[k] for k in self.args.may_grow if 0 < before.get(k, 0) < now.get(k, 0)}
        done = (self.folder / "DONE").exists() and not grown
        may_differ = (*MAY_DIFFER, *grown, *(("device",) if done else ()))
        differ = [k for k in sorted(before.keys() | now.keys()) if before.get(k) != now.get(k) and k not in may_differ]
        if differ:
            listed = ", ".join(f"{k} ({before.get(k)} there, {now.get(k)} here)" for k in differ)
            raise InputError(
                f"{self.folder} was made by other arguments: {listed}\n"
                "give the same arguments to resume it, or another --run-dir"
            )
        if grown:
            self._grown = made_by | {"arguments": made_by["arguments"] | grown}
        elif done:
            steps = self.last_step - self.first_step
            raise FinishedRun(f"{self.folder} is finished ({steps:,} steps): nothing to do", self._result())

    def _lock(self) -> None:
        folder = self.folder.resolve()
        if folder in self._locks:
            self._locks.pop(folder).close()
        self._locks[folder] = (folder / ".lock").open("w")
        try:
            fcntl.flock(self._locks[folder], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._locks.pop(folder).close()
            raise InputError(f"another process is running in {self.folder}: wait for it or stop it") from None

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self._signal:  # asked twice: at once
            raise SystemExit(128 + number)
        self._signal = number
        self.logger.say("stopping after this step and a checkpoint (again: at once)")
