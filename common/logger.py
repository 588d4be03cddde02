"""Log metrics to CSV and TensorBoard, if asked to Weights & Biases, and show the progress."""

import csv
import io
import math
import os
import socket
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from torch import Tensor

from common import process
from common.checkpoint import RESTORE_OR_RESTART
from common.errors import InputError, RunError, diverged
from common.evaluate import Episode
from common.files import open_regular
from common.messages import keep_errors, log
from common.progress import Progress
from common.run_folder import COLUMNS, EVALUATIONS, crc_of
from common.run_folder import METRICS as METRICS_FILE

EVENTS = "events.out.tfevents.run"  # older runs have their folder's name at its end, which may be too long
METRICS = ("step", "name", "value")  # one row per number: a metric that first appears late needs no new column


class Logger:
    """The logs of one run: `metrics.csv`, `evaluations.csv` and a TensorBoard event file in its folder.

    All three are append-only. `state()` contains their sizes and checksums. Resuming cuts them back to the sizes in the
    checkpoint, and refuses a file whose content differs.
    """

    def __init__(
        self, folder: Path, span: tuple[int, int], state: dict[str, Any] | None, wandb_run: Any = None
    ) -> None:
        """Open the logs of a run whose first and last step are `span`.

        `state` is what `state()` returned at the checkpoint from which the run resumes, or None for a new run.
        """
        self.folder, self.first_step, self.wandb_run = folder, span[0], wandb_run
        process.at_end(self._end_tracking)
        # Gives evaluation episodes their normalised scores, if these are known.
        self.score: Callable[[list[Episode]], NDArray[np.float64]] | None = None
        self._metrics = _AppendedFile(folder / METRICS_FILE, state)
        self._evaluations = _AppendedFile(folder / EVALUATIONS, state)
        self._events = _AppendedFile(folder / _events_name(folder, state), state)
        for file in (self._metrics, self._evaluations, self._events):
            file.cut_back()  # after all were checked, so that a refused command changes nothing
        keep_errors(folder / "errors.log")
        self._event_writer = RecordWriter(self._events)
        if not state:
            self._write_rows(self._metrics, [METRICS])
            self._write_rows(self._evaluations, [COLUMNS])
            self._event_writer.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
        self.progress = Progress(state["step"] if state else span[0], *span)
        # False if a signal stopped this step's evaluation, or if a new run has not made its first one.
        self.is_evaluated: bool = state.get("is_evaluated", True) if state else False
        # This step's values for W&B, which takes a step once. So they wait for those of a stopped evaluation.
        self._unsent: dict[str, float] = dict(state.get("unsent", {})) if state else {}
        self._last_log = (time.perf_counter(), self.step)

    def state(self) -> dict[str, Any]:
        """Write every row so far to the disk, and return what the constructor takes to resume."""
        if self.is_evaluated:
            self._send_to_wandb()
        sizes = {log.path.name: log.sync() for log in (self._metrics, self._evaluations, self._events)}
        state = {"sizes": sizes, "checksums": self.checksums(), "step": self.step}
        return state | {"is_evaluated": self.is_evaluated, "unsent": self._unsent}

    def checksums(self) -> dict[str, str]:
        """Return the checksum of all that was written to each file, as `common.run_folder.checksum` has it."""
        return {log.path.name: f"{log.crc:08x}" for log in (self._metrics, self._evaluations, self._events)}

    @property
    def step(self) -> int:
        return self.progress.step

    def advance(self, steps: int) -> None:
        """Count steps, and show the progress."""
        self._send_to_wandb()
        self.progress.advance(steps)

    def log(self, metrics: Mapping[str, Tensor | float]) -> None:
        """Write the means of metrics, and the speed since the last call, at the current step.

        Metrics leave the device only here. Raises RunError if one is not finite.
        """
        values = {name: float(v.mean() if isinstance(v, Tensor) else v) for name, v in metrics.items()}
        for name, value in values.items():
            if not math.isfinite(value):
                raise diverged(f"{name} is {value}", self.step, self.folder)
        if "charts/episodic_return" in values:
            self.progress.note = f", return {values['charts/episodic_return']:.1f}"
        now = time.perf_counter()
        values["time/steps_per_second"] = (self.step - self._last_log[1]) / (now - self._last_log[0])
        self._last_log = (now, self.step)
        self._write(values)

    def log_evaluation(self, episodes: list[Episode]) -> None:
        """Write one row per episode to `evaluations.csv`, and the episodes' means everywhere else."""
        if not episodes:
            return
        returns = np.array([episode.return_ for episode in episodes])
        scores = self.score(episodes) if self.score else None
        rows = [
            (self.step, i, e.return_, e.length, "" if e.success is None else int(e.success),
             "" if scores is None else float(scores[i]))
            for i, e in enumerate(episodes)
        ]  # fmt: skip
        self._write_rows(self._evaluations, rows)
        values = {"eval/return": float(returns.mean()), "eval/return_std": float(returns.std())}
        values["eval/length"] = float(np.mean([episode.length for episode in episodes]))
        success = [episode.success for episode in episodes if episode.success is not None]
        if success:
            values["eval/success"] = float(np.mean(success))
        if scores is not None:
            values["eval/normalized_score"] = float(scores.mean())
        self._write(values)
        solved = f", {values['eval/success']:.0%} solved" if success else ""
        scored = "" if scores is None else f", score {scores.mean():.1f}"
        log.info(f"step {self.step:,}: return {returns.mean():.1f} ± {returns.std():.1f}{scored}{solved}")

    def close(self) -> None:
        keep_errors(None)
        self.progress.close()
        for rows in (self._metrics, self._evaluations, self._events):
            rows.file.close()
        self._end_tracking(0)

    def _send_to_wandb(self) -> None:
        """Send the values of this step to Weights & Biases, which accepts no negative steps."""
        if self._unsent and self.wandb_run is not None:
            self.wandb_run.log(self._unsent, step=self.step - self.first_step)
        self._unsent = {}

    def _end_tracking(self, exit_code: int = 1) -> None:
        """End the Weights & Biases run, as a failed one by default, so that the next one does not log to it."""
        if (run := self.wandb_run) is not None:
            try:
                if exit_code or self.is_evaluated:
                    self._send_to_wandb()
            finally:
                self.wandb_run = None
                run.finish(exit_code=exit_code)

    def _write(self, values: dict[str, float]) -> None:
        self._write_rows(self._metrics, [(self.step, name, value) for name, value in values.items()])
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        event = Event(wall_time=time.time(), step=self.step, summary=summary)
        self._event_writer.write(event.SerializeToString())
        self._events.file.flush()
        if self.wandb_run is not None:
            self._unsent = self._unsent | values

    @staticmethod
    def _write_rows(log: "_AppendedFile", rows: list[tuple[Any, ...]]) -> None:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(rows)
        log.write(text.getvalue().encode())
        log.file.flush()


class _AppendedFile:
    """An append-only file."""

    def __init__(self, path: Path, state: dict[str, Any] | None) -> None:
        """Open the file. Raises InputError if its content up to the checkpoint is not what the run wrote."""
        self.path = path
        size = state["sizes"].get(path.name, 0) if state else 0
        if size and not path.exists():
            raise InputError(f"{path} is missing: {RESTORE_OR_RESTART}")
        try:
            self.file = open_regular(path, "r+b" if path.exists() else "x+b")  # not through a dangling link
        except OSError as error:
            cure = "correct that, then run the same command again"
            raise InputError(f"{path} cannot be written ({error.strerror}): {cure}") from None
        if self.file.seek(0, os.SEEK_END) < size:
            raise InputError(f"{path} is shorter than its checkpoint requires: {RESTORE_OR_RESTART}")
        self.file.seek(0)
        self.crc = crc_of(self.file, size)
        wanted = state.get("checksums", {}).get(path.name) if state else None  # older runs have none
        if wanted not in (None, f"{self.crc:08x}"):
            raise InputError(f"{path} has changed since its checkpoint: {RESTORE_OR_RESTART}")

    def cut_back(self) -> None:
        """Cut the file back to its size at the checkpoint, or to nothing."""
        self.file.truncate(self.file.tell())

    def write(self, data: bytes) -> None:
        self.crc = zlib.crc32(data, self.crc)
        self.file.write(data)

    def sync(self) -> int:
        """Write everything to the disk, and return the size in bytes.

        Raises RunError if another file, or none, has taken the place of this one: what follows would be lost.
        """
        self.file.flush()
        os.fsync(self.file.fileno())
        if not (self.path.exists() and os.path.samestat(os.fstat(self.file.fileno()), self.path.stat())):
            raise RunError(
                f"{self.path} was moved, deleted or replaced during the run\n"
                "put it back, then run the same command again"
            )
        return self.file.tell()


def _events_name(folder: Path, state: dict[str, Any] | None) -> str:
    """Return the name of the event file: the one that the checkpoint or the folder has, else EVENTS."""
    names = [*(state["sizes"] if state else ()), *sorted(path.name for path in folder.glob("events.out.tfevents.*"))]
    return next((name for name in names if name.startswith("events.out.tfevents.")), EVENTS)


def start_wandb(name: str, folder: Path, config: dict[str, Any]) -> Any:
    """Start a Weights & Biases run, or resume the one of this name, host and folder, and return it.

    Raises InputError if Weights & Biases refuses it.
    """
    import wandb

    identity = f"{name}-{socket.gethostname()}-{zlib.crc32(str(folder.resolve()).encode()):08x}"
    project, group = os.environ.get("WANDB_PROJECT", "onramp"), name.rpartition("__")[0] or None  # the seeds of a task
    names = {"project": project, "group": group, "name": name, "id": identity}
    try:
        return wandb.init(**names, dir=folder, config=config, resume="allow")
    except wandb.Error as error:
        raise InputError(f"--track: {error}: correct that (`wandb login`), or leave --track out") from None
