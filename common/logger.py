"""Where numbers go: CSV and TensorBoard always, Weights & Biases when asked, a progress bar on a terminal."""

import contextlib
import csv
import io
import math
import os
import socket
import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from torch import Tensor
from tqdm import tqdm

from common.checkpoint import RESTORE_OR_RESTART, read_bytes
from common.errors import InputError, RunError
from common.evaluate import Episode

EVALUATIONS = ("step", "episode", "return", "length", "success", "normalized_score")
METRICS = ("step", "name", "value")  # one row a number: a metric that first appears late needs no new column


class Logger:
    """The logs of one run: `metrics.csv`, `evaluations.csv` and a TensorBoard event file in its folder.

    All three are append-only, so that `state()` is their sizes and resuming cuts them back to a checkpoint's.
    """

    def __init__(
        self, folder: Path, span: tuple[int, int], num_envs: int, state: dict[str, Any] | None, wandb_run: Any = None
    ) -> None:
        """`span`: the first step and the last. `state` is what `state()` gave at the checkpoint that the run goes on
        from, None for a new run.
        """
        self.folder, self.first_step, self.wandb_run = folder, span[0], wandb_run
        self.score: Callable[[NDArray[np.float64]], NDArray[np.float64]] | None = None  # of returns, where one is known
        sizes = state["sizes"] if state else {}
        self._metrics = _AppendedFile(folder / "metrics.csv", sizes)
        self._evaluations = _AppendedFile(folder / "evaluations.csv", sizes)
        self._events = _AppendedFile(folder / f"events.out.tfevents.{folder.name}", sizes)
        self._event_writer = RecordWriter(self._events.file)
        if not state:
            self._write_rows(self._metrics, [METRICS])
            self._write_rows(self._evaluations, [EVALUATIONS])
            self._event_writer.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
        self.step = state["step"] if state else span[0]
        self._returns = np.asarray(state["returns"]) if state else np.zeros(num_envs)
        self._lengths = np.asarray(state["lengths"]) if state else np.zeros(num_envs, np.int64)
        self._finished: list[tuple[float, int]] = [tuple(e) for e in state["finished"]] if state else []
        self._timings: dict[str, list[float]] = defaultdict(list)
        self._last_log = (time.perf_counter(), self.step)
        self._bar = tqdm(
            total=span[1] - span[0], initial=self.step - span[0], unit="step", disable=None, dynamic_ncols=True
        )

    def state(self) -> dict[str, Any]:
        """Sizes of the files, and the episodes under way; every row so far is on disk when this returns."""
        return {
            "sizes": {log.path.name: log.sync() for log in (self._metrics, self._evaluations, self._events)},
            "step": self.step,
            "returns": self._returns.tolist(),
            "lengths": self._lengths.tolist(),
            "finished": [list(episode) for episode in self._finished],
        }

    def count_anew(self, episodes: list[bool]) -> None:
        """Forgets the episodes under way where [num_envs] is True: they were given up, and others begun."""
        self._returns[episodes] = 0.0
        self._lengths[episodes] = 0

    def count(self, rewards: NDArray[np.float64], dones: NDArray[np.bool_]) -> None:
        """One step of every environment: rewards [num_envs], dones [num_envs] (terminated or truncated)."""
        self.step += len(rewards)
        self._returns += rewards
        self._lengths += 1
        self._bar.update(len(rewards))
        if dones.any():
            for i in np.flatnonzero(dones):
                self._finished.append((float(self._returns[i]), int(self._lengths[i])))
            self._bar.set_postfix({"return": f"{self._finished[-1][0]:.1f}"}, refresh=False)
            self._returns[dones] = 0.0
            self._lengths[dones] = 0

    def count_update(self) -> None:
        """One gradient step on the dataset alone."""
        self.step += 1
        self._bar.update()

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Measures the block; the median of the log interval becomes `time/<name>_ms`."""
        start = time.perf_counter()
        yield
        self._timings[name].append(1e3 * (time.perf_counter() - start))

    def log(self, metrics: Mapping[str, Tensor | float]) -> None:
        """Writes the means of metrics, and the training episodes and speed since the last call, at the present step.

        The one place where metrics leave the device. Raises RunError where one is not finite.
        """
        values = {name: float(v.mean() if isinstance(v, Tensor) else v) for name, v in metrics.items()}
        for name, value in values.items():
            if not math.isfinite(value):
                raise RunError(
                    f"{name} is {value} at step {self.step:,}: try a smaller learning rate or reward scale; "
                    f"{self.folder} keeps the last checkpoint before it"
                )
        if self._finished:
            values["charts/episodic_return"] = float(np.mean([episode[0] for episode in self._finished]))
            values["charts/episodic_length"] = float(np.mean([episode[1] for episode in self._finished]))
            self._finished.clear()
        now = time.perf_counter()
        values["time/steps_per_second"] = (self.step - self._last_log[1]) / (now - self._last_log[0])
        self._last_log = (now, self.step)
        values |= {f"time/{name}_ms": median(timings) for name, timings in self._timings.items()}
        self._timings.clear()
        self._write(values)

    def log_evaluation(self, episodes: list[Episode]) -> None:
        """Writes one row an episode to `evaluations.csv`, and their means everywhere else.

        Raises RunError where a return is not finite.
        """
        if not episodes:
            return
        returns = np.array([episode.return_ for episode in episodes])
        if not np.isfinite(returns).all():
            raise RunError(f"a return in the evaluation at step {self.step:,} is not finite: the environment's rewards")
        scores = self.score(returns) if self.score else None
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
        self.say(f"step {self.step:,}: return {returns.mean():.1f} ± {returns.std():.1f}{scored}{solved}")

    def say(self, message: str) -> None:
        """One line for the user, above the progress bar."""
        tqdm.write(message, file=sys.stderr)

    def close(self) -> None:
        self._bar.close()
        for log in (self._metrics, self._evaluations, self._events):
            log.file.close()
        if self.wandb_run is not None:
            self.wandb_run.finish()

    def _write(self, values: dict[str, float]) -> None:
        self._write_rows(self._metrics, [(self.step, name, value) for name, value in values.items()])
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        event = Event(wall_time=time.time(), step=self.step, summary=summary)
        self._event_writer.write(event.SerializeToString())
        self._events.file.flush()
        if self.wandb_run is not None:
            self.wandb_run.log(values, step=self.step - self.first_step)  # it knows no negative steps

    @staticmethod
    def _write_rows(log: "_AppendedFile", rows: list[tuple[Any, ...]]) -> None:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(rows)
        log.file.write(text.getvalue().encode())
        log.file.flush()


class _AppendedFile:
    """A file that grows at its end, cut back to the size that it had at the checkpoint, or to nothing."""

    def __init__(self, path: Path, sizes: dict[str, int]) -> None:
        self.path = path
        size = sizes.get(path.name, 0)
        self.file = path.open("r+b" if path.exists() else "w+b")
        if self.file.seek(0, os.SEEK_END) < size:
            raise InputError(f"{path} is shorter than its checkpoint says: {RESTORE_OR_RESTART}")
        self.file.truncate(size)
        self.file.seek(size)

    def sync(self) -> int:
        """Size in bytes, all of them on disk."""
        self.file.flush()
        os.fsync(self.file.fileno())
        return self.file.tell()


def read_last_evaluation(path: Path) -> list[Episode]:
    """Return the episodes of the last evaluation in `evaluations.csv`. Raises InputError if the file is damaged."""
    successes = {"": None, "0": False, "1": True}
    try:
        table = csv.DictReader(io.StringIO(read_bytes(path).decode()))
        rows = list(table)
        if table.fieldnames != list(EVALUATIONS):
            raise ValueError
        last = [row for row in rows if row["step"] == rows[-1]["step"]]
        return [Episode(float(row["return"]), int(row["length"]), successes[row["success"]]) for row in last]
    except (ValueError, KeyError, TypeError, FileNotFoundError):
        raise InputError(f"{path} is missing or damaged: the run is complete, but not its evaluations") from None


def start_wandb(name: str, folder: Path, config: dict[str, Any]) -> Any:
    """A Weights & Biases run that goes on under the same name after a resume."""
    import wandb

    identity = f"{name}-{socket.gethostname()}-{zlib.crc32(str(folder.resolve()).encode()):08x}"
    project, group = os.environ.get("WANDB_PROJECT", "onramp"), name.rpartition("__")[0]  # the seeds of a task
    return wandb.init(project=project, group=group, name=name, id=identity, dir=folder, config=config, resume="allow")
