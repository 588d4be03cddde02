"""How a run computes its updates and actions: eagerly, recorded as compiled code on the CPU, or as CUDA graphs."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.acting import Agent
from common.arguments import IF_IT_PAYS, RunArgs
from common.cuda import GraphedFunction, compiled
from common.errors import InputError, RunError, Stopped
from common.evaluate import Act
from common.recorded import CannotCompile, RecordedFunction, Recording, compiler_version
from common.tracing import CannotRecord

R = TypeVar("R")
Form = Literal["eager", "recorded", "CUDA graphs"]
CURE = "install a working C++ compiler or name one in CXX"
ANOTHER_RUN = "or start another run with --no-compile"
CHECK_EVERY = 60.0  # seconds
CHECK_SHARE = 0.01  # of the time, at most
MANY_ENVS = 16  # they share a call of the policy, of which compiled code saves 20 to 30 µs; loading it takes a second


class Launch:
    """Wraps functions of tensors so that each call is one launch, unless the run's form is eager.

    The form is part of a run, because compiled code rounds differently. It is chosen once and stored in config.json.
    """

    def __init__(self, args: RunArgs, device: torch.device) -> None:
        self.args, self.device = args, device
        self.agent: Agent  # its attributes hold the state of every wrapped function
        self.notify: Callable[[str], None]  # gets messages, after which the form may be another
        self.busy: Callable[..., AbstractContextManager[None]]  # shows what takes the time inside its block
        self.signal: Callable[[], int]  # the signal that asks the run to stop, or 0
        self.versions: dict[str, str] = {}  # of what compiles
        self.is_resumed = False  # from a checkpoint that was made in this form
        self.form = self._chosen_form()
        self._recordings: list[Recording[Any]] = []
        self._reports, self._next_check = 0, time.monotonic() + CHECK_EVERY

    def _chosen_form(self) -> Form:
        """Return the form of a new run. Compiling pays if the run has enough steps to save the time that it takes."""
        if self.device.type == "cuda":
            return "CUDA graphs" if self.args.cuda_graph else "eager"
        if self.args.compile is not IF_IT_PAYS:
            return "recorded" if self.args.compile else "eager"
        first, last = self.args.span
        return "recorded" if last - first >= self.args.worth_compiling else "eager"

    def prepare(self) -> str | None:
        """Stay eager if there is no compiler, and return a message that says so.

        Raises InputError instead if the run is a resumed one.
        """
        if self.form != "recorded":
            return None
        try:
            self.versions["compiler"] = compiler_version()
        except CannotCompile as error:
            if self.is_resumed:
                raise InputError(f"this run's updates are compiled, and {error}: {CURE} to resume it") from None
            return self._stay_eager(error)
        return None

    def _stay_eager(self, reason: Exception) -> str:
        self.form = "eager"
        return f"note: updates stay eager, which is slower: {reason}"

    def __call__(self, function: Callable[..., R], generator: torch.Generator) -> Callable[..., R]:
        """Return the function in the run's form. It draws from `generator`.

        `GraphedFunction` and `RecordedFunction` document what it may do.
        """
        if self.device.type == "cuda" and self.args.compile is True:
            function = compiled(function)
        if self.form == "CUDA graphs":
            return GraphedFunction(function, generator)
        return RecordedFunction(function, self._record) if self.form == "recorded" else function

    def policy(self, agent: Agent) -> Act:
        """Return the agent's `act` in the run's form, but eager if many environments share a recorded call."""
        act: Act = agent.act
        is_shared = self.args.num_envs >= MANY_ENVS and self.args.compile is IF_IT_PAYS
        if self.form == "eager" or (self.form == "recorded" and is_shared):
            return act
        method: Callable[..., Tensor] = act.__wrapped__  # type: ignore[attr-defined]
        actions = self(torch.no_grad()(method), agent.generator)

        def launched(obs: NDArray[Any]) -> NDArray[np.float32]:
            return actions(agent, torch.from_numpy(obs)).to("cpu", copy=self.form == "CUDA graphs").numpy()

        return launched

    def _record(self, function: Callable[..., R], tensors: Sequence[Tensor]) -> Callable[..., R]:
        """Return a recording of the function, or the function itself if it cannot be recorded."""
        if self.form != "recorded":
            return function
        self.notify("compiling an update or action, which takes seconds to minutes (later starts use the cache)")
        started = time.monotonic()
        try:
            with self.busy("compiling", once=True):
                recording = Recording(function, tensors, self.agent)
                recording.check(*tensors)
            self._recordings.append(recording)
            self.notify(f"compiled in {time.monotonic() - started:.1f} s")
            return recording
        except CannotRecord as error:  # so it is again when the run is resumed
            self.notify(f"note: an update or action stays eager, which is slower: {error}")
        except CannotCompile as error:
            if number := self.signal():  # a terminal's Ctrl-C reaches the compiler too
                self.notify("stopped while compiling: run the same command to resume from the last checkpoint, if any")
                raise Stopped(128 + number) from None
            if self.is_resumed or self._recordings:
                raise RunError(f"an update of this run cannot be compiled ({error}): {CURE}, {ANOTHER_RUN}") from None
            self.notify(self._stay_eager(error))
        return function

    def check(self, now: bool) -> None:
        """Raise RunError if a recording is out of date: something that it holds as a constant has changed.

        Call it at each report, and `now` before the run stops. It calls each function on fake tensors, which takes up
        to seconds, so it does that `now`, at the 10th and 100th report, and then once a minute, or more rarely to spend
        a hundredth of the time.
        """
        self._reports += 1
        if not self._recordings:
            return
        started = time.monotonic()
        if not now and self._reports not in (10, 100) and started < self._next_check:
            return
        try:
            current = all(recording.is_current() for recording in self._recordings)
        except CannotRecord:
            current = False
        ended = time.monotonic()
        self._next_check = ended + max(CHECK_EVERY, (ended - started) / CHECK_SHARE)
        if not current:
            raise RunError(
                "an update or action depends on something that changes, and compiled code holds it as a constant\n"
                f"make it a tensor that is changed in place, {ANOTHER_RUN}"
            )
