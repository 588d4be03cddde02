"""One run: its folder, its device, and exact resume."""

import contextlib
import dataclasses
import functools
import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from common import checkpoint, files, process, run_folder, start
from common.acting import Agent, eval_policy
from common.arguments import WITH_CUDA, OffPolicyArgs, RunArgs
from common.cuda import device
from common.errors import Finished, InputError, Stopped
from common.evaluate import Act, Episode, EvaluationStopped, stoppable
from common.launch import Launch
from common.logger import Logger, start_wandb
from common.messages import log
from common.onednn import keep_freed_memory, set_products
from common.policy_file import KeptPolicies
from common.provenance import algorithm_file, commit, hardware, sha256_of, versions
from common.room import require_resources
from common.run_folder import CONFIG, LOCK, is_finished, name_and_folder, read_config, state_path
from common.schema import require
from common.timings import Timings
from common.updater import Metrics, Updater

A = TypeVar("A")
R = TypeVar("R")


class Result(NamedTuple):
    """The result of a finished run: its folder, its last step, and the episodes of its last evaluation, if any."""

    folder: Path
    step: int
    episodes: list[Episode]


class FinishedRun(Finished):
    """The run is already complete, with this result."""

    def __init__(self, message: str, result: Result) -> None:
        super().__init__(message)
        self.result = result


def returns_result(train: Callable[[A], Result]) -> Callable[[A], Result]:
    """Wrap `train` so that a run that is already finished returns its result, and the process stays as it was."""

    @functools.wraps(train)
    def wrapped(args: A) -> Result:
        try:
            with process.as_before():
                return train(args)
        except FinishedRun as finished:
            log.info(finished)
            return finished.result

    return wrapped


class Environments(Protocol):
    """The interface of a run's environments (`envs.rollout.Rollout`)."""

    exact: list[bool]
    schema: ClassVar[Any]
    obs: NDArray[Any]

    def reset(self) -> None: ...
    def evaluate(self, policy: Act) -> list[Episode]: ...
    def statistics(self) -> dict[str, float]: ...
    def save(self, folder: Path) -> dict[str, Any]: ...
    def load(self, folder: Path, state: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


class Run:
    """A run and its folder. Nothing is written before `resume`, so bad input leaves no trace."""

    def __init__(self, algo: str, args: RunArgs) -> None:
        """Check the folder and the device.

        Raises InputError if the device or Weights & Biases is missing, or if the folder cannot be used or belongs to
        other arguments. Raises FinishedRun if the run is complete.
        """
        start.end_imports()  # for a program that calls `train` itself
        self.args, self.algo, self._file = args, algo, algorithm_file(args)
        if self._file and self._file.stem != algo:
            raise InputError(f'{self._file.name} calls Run("{algo}", …): call Run("{self._file.stem}", …) there')
        if args.preset:
            used = [f"{k} {v}" for k, v in args.from_preset.items() if getattr(args, k) == v]
            log.info(f"preset {args.preset}: {', '.join(used)}")
        self.first_step, self.last_step = args.span
        self.timings = Timings()
        self.score: Callable[[list[Episode]], NDArray[np.float64]] | None = None  # of evaluation episodes
        # The moments of a dead unit's weights shrink into denormal numbers, on which a CPU is a hundred times slower.
        # That may take half of a run of 200,000 steps. Threads made later inherit this setting.
        torch.set_flush_denormal(True)
        keep_freed_memory()
        set_products(args.products)
        self.name, self.folder = name_and_folder(algo, args)
        self.device = device(args.device, args.tf32)
        require_resources(args, self.device)
        self.launch = Launch(args, self.device)
        if args.track and importlib.util.find_spec("wandb") is None:
            raise InputError("--track needs Weights & Biases: pip install wandb (or leave --track out)")
        self._signal, self._idle_steps = 0, (0, "")
        self._grown: dict[str, Any] | None = None  # the config of a run that is being extended
        arguments = json.loads(json.dumps(dataclasses.asdict(args), default=str))
        code = {f"algos/{self._file.name}": sha256_of(self._file)} if self._file else {}
        self.config = {"algo": algo, "arguments": arguments, "versions": versions(), "code": code}
        self._policies = KeptPolicies(self.folder, {"algo": algo, "arguments": arguments})
        try:
            self._check_folder()
        except OSError as error:
            where = error.filename or self.folder
            cure = "give this user permission to read it, or give" if isinstance(error, PermissionError) else "give"
            raise InputError(f"{where} cannot be read ({error.strerror}): {cure} another --run-dir") from None

    def resume(self, agent: Agent, rollout: Environments, **parts: checkpoint.Part) -> None:
        """Restore everything from the last checkpoint, or make the folder, reset the environments and evaluate.

        Give every part of the run that has state here. `report` saves the same parts under the same names. An
        evaluation that a signal stopped is repeated. After a signal, write a checkpoint and exit.
        Raises InputError if the folder cannot be written, or if the checkpoint is damaged or has other parts.
        """
        if getattr(self.args, "normalize_obs", False) and not hasattr(agent, "obs_normalizer"):
            raise InputError(f"--normalize-obs has no effect on {self.algo}: leave it out")
        wanted, classes = self.algo.upper().replace("_", ""), [each.__name__ for each in type(agent).__mro__]
        if self._file and wanted not in classes:
            raise InputError(f"{self._file.name} has the class {classes[0]}: call it {wanted}, as tools expect")
        self._agent, self._rollout, self._parts = agent, rollout, parts
        self.launch.agent = agent
        steps, flag = self._idle_steps
        if 0 < self.last_step <= steps:
            log.warning(f"nothing is learned in {self.last_step:,} environment steps: {flag} covers {steps:,}")
        if (saved := self._open()) is None:
            rollout.reset()
        else:
            self._restore(saved)
        if not self.logger.is_evaluated:
            self._evaluate()
            self._checkpoint(is_due=saved is not None)

    def _restore(self, saved: dict[str, Any]) -> None:
        checkpoint.restore(self._agent, saved["agent"])
        for name, part in self._parts.items():
            part.load(self._replay, saved[name])
        self._rollout.load(self._replay, saved["rollout"])
        if not all(self._rollout.exact):
            self._warn_inexact()
            holders = [*self._parts.values(), self._agent, *vars(self._agent).values()]
            checkpoint.discard_unfinished_episodes(holders, self._rollout.exact)

    @property
    def _replay(self) -> Path:
        return self.folder / "checkpoint" / "replay"

    def _open(self) -> dict[str, Any] | None:
        """Make or reopen the folder, and return the last checkpoint, if there is one."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._own_folder = run_folder.OwnFolder(self.folder)
            process.at_end(self._rollout.close, self._own_folder.release)
            self._check_folder()  # again: another run may have started and ended here in the meantime
        except OSError as error:
            raise InputError(f"{self.folder} cannot be written ({error.strerror}): give another --run-dir") from None
        saved = None  # read before anything is changed: it may be unreadable
        with contextlib.suppress(FileNotFoundError):
            saved = run_folder.read_state(self.folder, self._agent)
            if differ := saved.keys() ^ {"agent", "rollout", "logger", *self._parts}:
                raise InputError(
                    f"{self.folder} has a checkpoint of another version ({', '.join(sorted(differ))} differ): "
                    "resume it with the commit in its config.json, or give another --run-dir"
                )
            self._policies.require_whole()
            schema = {"rollout": self._rollout.schema} | {name: part.schema for name, part in self._parts.items()}
            require(saved, schema, state_path(self.folder), f"is damaged: {checkpoint.RESTORE_OR_RESTART}")
        if self._grown and saved is None and is_finished(self.folder):
            raise InputError(f"{self.folder} is finished, but its checkpoint is gone: {checkpoint.RESTORE_OR_RESTART}")
        self.launch.is_resumed = saved is not None
        note = self.launch.prepare()
        self.config["versions"] |= self.launch.versions
        wandb_run = start_wandb(self.name, self.folder, self.config) if self.args.track else None
        # A run that starts, or starts over, has what is here now.
        facts = self._grown if saved else self.config | {"commit": commit(), "hardware": hardware(self.device)}
        if facts:
            (self.folder / run_folder.DONE).unlink(missing_ok=True)
            self._write_config(facts)
        self.logger = Logger(self.folder, self.args.span, saved and saved["logger"], wandb_run)
        self._policies.require_best()
        self.logger.score = self.score
        self.launch.notify, self.launch.busy = self._note_form, self.logger.progress.busy
        self.launch.signal = lambda: self._signal
        self._previous_step = self.step
        process.on_stop(self._on_signal)
        if saved is None:
            log.info(f"{self.name}: starts on {self.device}, in {self.folder}")
            if note:
                log.info(note)
            return None
        log.info(f"{self.name}: resumes from step {self.logger.step:,}, on {self.device}, in {self.folder}")
        if self._grown and self._overlap_updates:
            log.info("note: the updates of its last step were made one action earlier than in a run of the new length")
        now = self.config | {"hardware": hardware(self.device)}
        before = now | self._made_by()  # an older run may lack a part
        pairs = [(now[part], before[part]) for part in ("versions", "code", "hardware")]
        changed = [name for now, then in pairs for name in now | then if now.get(name) != then.get(name)]
        unused = ("cores",) if self.launch.form == "recorded" else ("cores", "compiler")  # no result depends on them
        if changed := [name for name in changed if name not in unused]:
            log.warning(f"{', '.join(changed)} changed since the run began: its results may differ")
        return saved

    def _write_config(self, facts: dict[str, Any]) -> None:
        with files.replacing(self.folder / CONFIG) as file:
            file.write(run_folder.config_text(facts | {"form": self.launch.form}).encode())

    def _note_form(self, message: str) -> None:
        """Print what `launch` reports, and store the form, which may have changed."""
        log.info(message)
        self._write_config(self._made_by())

    @property
    def step(self) -> int:
        """Environment steps so far. A negative number counts the gradient steps left on the dataset alone."""
        return self.logger.step

    @property
    def _overlap_updates(self) -> bool:
        """Whether an update waits until the next action is chosen."""
        if not isinstance(self.args, OffPolicyArgs):
            return False
        return self.device.type == "cuda" if self.args.overlap is WITH_CUDA else self.args.overlap

    def steps(self, by: int | None = None) -> Iterator[int]:
        """Yield the `step` that each iteration reaches.

        Up to step 0, an iteration is one gradient step on a dataset alone. After it, an iteration is `by` environment
        steps, by default one of each environment. The last iteration takes only the steps that are left.
        """
        each = self.args.num_envs
        while self.step < self.last_step:
            left = -(-(self.last_step - self.step) // each) * each
            steps = min(1 if self.step < 0 else by or each, left)
            self.logger.advance(steps)
            self._previous_step = self.step - steps
            yield self.step

    def updater(self, function: Callable[..., Metrics], generator: torch.Generator) -> Updater:
        """Return the `Updater` of `function`, which draws from `generator`.

        With `--overlap`, an online update waits for the next action. Those of the last step run at once, because no
        action follows.
        """

        def should_defer() -> bool:
            return self._overlap_updates and 0 < self.step < self.last_step

        return Updater(self.graphed(function, generator), should_defer, self.timings)

    def graphed(self, function: Callable[..., R], generator: torch.Generator) -> Callable[..., R]:
        """Return the function, which draws from `generator`, in the run's form (`common.launch`)."""
        return self.launch(function, generator)

    def policy(self, agent: Agent) -> Act:
        """Return the agent's `act`, for training. Raises InputError if a checkpoint cannot hold the agent."""
        checkpoint.require_saveable(agent)  # now, not at the first checkpoint
        act = self.launch.policy(agent)

        def timed_act(obs: NDArray[Any]) -> NDArray[np.float32]:
            with self.timings("act"):
                return act(obs)

        return timed_act

    def report(self, metrics: Metrics) -> None:
        """Log, evaluate and write a checkpoint, if due at this step. After a signal, write one and exit.

        `metrics` are cleared once they are logged. Raises RunError if an update is out of date (`common.launch`).
        """
        if metrics:
            self.logger.progress.begin()
        self.launch.check(now=bool(self._signal) or self.step >= self.last_step)
        if self._due(self.args.log_every):
            self.logger.log(metrics | self._rollout.statistics() | self.timings.take())
            metrics.clear()
        switch = self.args.switch_step
        if self._due(self.args.eval_every) or (switch is not None and 0 <= self.step - switch <= self.args.num_envs):
            self._evaluate()
        self._checkpoint(is_due=self._due(self.args.checkpoint_every))

    def _checkpoint(self, is_due: bool) -> None:
        """Write a checkpoint if it is due. After a signal, write one and exit."""
        number = self._signal  # once, because a signal may come at any time
        if is_due or number:
            self._save()
        if number:
            log.info(f"stopped at step {self.step:,}: run the same command to resume")
            self._close()
            raise SystemExit(128 + number)

    def _due(self, every: int) -> bool:
        """Return whether this iteration reached a multiple of `every`, or the end."""
        return self.step // every > self._previous_step // every or self.step >= self.last_step

    def _evaluate(self) -> None:
        """Evaluate, log the result and keep the policy. A signal stops the evaluation, and `resume` repeats it."""
        policy, before = eval_policy(self._agent), self._agent.generator.get_state()
        self.logger.is_evaluated = False
        try:
            with self.logger.progress.busy("evaluating"):
                episodes = self._rollout.evaluate(stoppable(policy, lambda: self._signal))
        except EvaluationStopped:
            self._agent.generator.set_state(before)
            return
        self.logger.is_evaluated = True
        self.logger.log_evaluation(episodes)
        if episodes:
            self._own_folder.require()
            self._policies.keep(self._agent, policy, self._rollout.obs, [e.return_ for e in episodes], self.step)

    def _save(self) -> None:
        """Write the replay rows, then the state to a second file, which replaces the last checkpoint by renaming.

        A kill at any point leaves the last checkpoint or this one.
        """
        self._own_folder.require()
        (folder := self.folder / "checkpoint").mkdir(exist_ok=True)
        files.sync(self.folder)
        agent = checkpoint.state_of(self._agent)
        checkpoint.refuse_non_finite({"agent": agent}, self.folder, self.step)
        state = {name: part.save(self._replay) for name, part in self._parts.items()}
        state |= {"agent": agent, "rollout": self._rollout.save(self._replay), "logger": self.logger.state()}
        checkpoint.save(folder / "state.pt", state)
        for part in self._parts.values():
            part.drop_old(self._replay)

    def learns_after(self, steps: int, flag: str) -> None:
        """Note that nothing is learned in the first `steps` environment steps. `resume` warns if these are all."""
        self._idle_steps = max(self._idle_steps, (steps, flag))

    def _warn_inexact(self) -> None:
        if self.args.vectorizer == "envpool":
            cause = "EnvPool cannot save the state of its environments, so they start new episodes"
        else:
            cause = f"{self.args.env or self.args.task} is not reproducible, so it starts a new episode"
        log.warning(f"{cause}, and the results differ from those of a run that was not stopped")

    def finish(self) -> Result:
        """Mark the run as complete and return its last evaluation."""
        self._own_folder.require()
        run_folder.mark_finished(self.folder, self.step, self.logger.checksums())
        self._close()
        log.info(f"done at step {self.step:,}, results in {self.folder}")
        return self._result()

    def _result(self) -> Result:
        step = run_folder.finished_step(self.folder, self.last_step)
        return Result(self.folder, step, run_folder.read_last_evaluation(self.folder))

    def _close(self) -> None:
        self._rollout.close()
        self.logger.close()
        self._own_folder.release()

    def _made_by(self) -> dict[str, Any]:
        return read_config(self.folder, f"is damaged: {checkpoint.RESTORE_OR_RESTART}")

    def _check_folder(self) -> None:
        if self.folder.exists() and not self.folder.is_dir():
            raise InputError(f"{self.folder} is a file: give another --run-dir")
        if not (self.folder / CONFIG).exists():
            if self.folder.exists() and any(f.name not in (LOCK, f"{CONFIG}.part") for f in self.folder.iterdir()):
                raise InputError(f"{self.folder} is not empty and not a run folder: give another --run-dir")
            return
        made_by = self._made_by()
        if run_folder.has_checkpoint(self.folder):
            self.launch.form = made_by.get("form", self.launch.form)
        config = self.config | {"device": self.device.type}
        grown = run_folder.grown_arguments(self.folder, made_by, self.args, config)
        done = is_finished(self.folder) and not grown
        if grown:
            run_folder.require_unchanged(self.folder)
            self._grown = made_by | {"arguments": made_by["arguments"] | grown}
        elif done:
            steps = self.last_step - self.first_step
            raise FinishedRun(f"{self.folder} is finished ({steps:,} steps): nothing to do", self._result())

    def _on_signal(self, number: int) -> None:
        if self._signal:  # at the second signal, at once
            raise Stopped(128 + number)
        self._signal = number
        log.info("stopping after this step, or in this evaluation, with a checkpoint (a second signal stops at once)")
