"""Run a suite of algorithms × environments or datasets × seeds, each a separate command, as Ray tasks.

    make bench SUITE=smoke
    make bench SUITE=online-1m ARGS="--dry-run"                # the commands alone
    RAY_ADDRESS=10.0.0.1:6379 make bench SUITE=online-1m       # on a cluster (docs/sweeps.md)

Run the same command again to resume a sweep, whatever ended it. It skips finished runs and resumes stopped ones from
their last checkpoint. Results are bit-identical to those of the commands run by hand.
"""

import common.start

import contextlib
import functools
import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro
from filelock import Timeout

from bench.sweep.mps import shared_card
from bench.sweep.suite import has_more_steps, jobs, read_suite, refuse_missing_datasets
from bench.sweep.sweep_task import Job, Outcome, facts, run
from common.command_line import command_line
from common.errors import InputError, RunError
from common.files import replacing
from common.messages import log, print_result
from common.process import on_stop
from common.run_folder import (
    DONE,
    EVALUATIONS,
    asked_end,
    is_finished,
    lock_of,
    mean_by_step,
    read_config,
    read_evaluations,
)

NO_RAY = "Ray does not start here"
KILLS = 3  # times that a killed run is resumed; after the loss of a node or worker, it is always resumed


@dataclass
class Args:
    """Suite and resources."""

    suite: Annotated[str, tyro.conf.Positional]
    """Name of a suite in bench/sweep/suites, or path of a suite's file."""
    folder: Path = Path("runs")
    """Folder of the runs. Each run is in <folder>/<suite>/<name>/<environment or dataset>/<seed>."""
    cpus: int | None = None
    """Number of this machine's CPUs to use, without a cluster. By default, all."""
    gpus: int | None = None
    """Number of this machine's GPUs to use, without a cluster. By default, all."""
    dry_run: bool = False
    """Print the commands, one per line, and start nothing."""


def is_done(job: Job) -> bool:
    """Return whether the run has all its steps.

    Raise InputError if another command made its folder, unless the new command only has more steps.
    """
    record = job.folder.with_suffix(".sh")
    if record.exists() and record.read_text("utf-8").split(" --run-dir ")[0] != job.line.split(" --run-dir ")[0]:
        if has_more_steps(record.read_text("utf-8"), job.line):
            return False
        raise InputError(
            f"{job.folder} was made by another command, {record.read_text('utf-8').strip()}\ngive another --folder"
        )
    return is_finished(job.folder)


@dataclass
class Sweep:
    """The runs of a sweep by their state; waiting runs are in the order in which they will start."""

    waiting: list[Job]
    done: list[Job] = field(default_factory=list)
    running: dict[Any, Job] = field(default_factory=dict)  # by Ray's reference
    failed: list[tuple[Job, str]] = field(default_factory=list)
    kills: Counter[Job] = field(default_factory=Counter)

    def table(self, whole: bool = False) -> str:
        """Return a line for each run that is running or failed, if `whole` also for each that is done, and one for all.

        A line has the step and the return of the run's last evaluation.
        """
        done = (
            [("done", job) for job in sorted(self.done, key=lambda job: (job.folder.parent, job.seed))] if whole else []
        )
        shown = [*done, *(("runs", job) for job in self.running.values())]
        jobs = [*self.done, *self.running.values(), *self.waiting]
        width = max((len(job.label) for job in jobs), default=0)
        lines = [f"{state:9}{job.label:{width}} {progress(job)}".rstrip() for state, job in shown]
        for job, why in self.failed:
            lines += [f"failed   {job.label}", *(f"         | {line}" for line in why.splitlines())]
        counts = (len(self.done), len(self.running), len(self.waiting), len(self.failed))
        return "\n".join([*lines, "{} done, {} running, {} waiting, {} failed".format(*counts)])


class Display:
    """Shows a table each time that it changes: in place on a terminal, or the changed lines in a file or pipe."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    def show(self, table: str) -> None:
        """Show the table. A terminal gets what fits on it, because a long line would take two."""
        before, self.shown = self.shown, table.splitlines()
        if self.shown == before:
            return
        if sys.stderr.isatty():
            columns, rows = shutil.get_terminal_size()
            self.shown = [line[: columns - 1] for line in self.shown[1 - rows :]]
            up = f"\x1b[{len(before)}A" if before else ""
            if self.shown != before:
                log.info(f"{up}\x1b[J" + "\n".join(self.shown))
        elif changed := [line for line in self.shown if line not in before]:
            log.info("\n".join(changed))


def progress(job: Job) -> str:
    """Return step and mean return of the last evaluation, or "" if this machine cannot read it."""
    try:  # a full disk or a power cut may have torn the last row, which the run removes when it resumes
        curve = mean_by_step(read_evaluations(job.folder / EVALUATIONS), lambda row: float(row["return"]))
        arguments = read_config(job.folder, "is missing or damaged")["arguments"]
        step = max(curve)
        return f"step {step:,} of {asked_end(arguments):,}, return {curve[step]:,.1f}"
    except (FileNotFoundError, InputError, ValueError, KeyError, TypeError):
        return ""


def train(args: Args) -> None:
    """Run the suite to its end. If a run failed, raise RunError after all others have ended."""
    for flag, value, least in (("--cpus", args.cpus, 1), ("--gpus", args.gpus, 0)):
        if value is not None and value < least:
            raise InputError(f"{flag} is {value}: give {least} or more")
    name, entries = read_suite(args.suite)
    found = jobs(name, entries, args.folder)
    if args.dry_run:
        print_result("\n".join(job.line for job in found))
        return
    with alone_in(args.folder / name):
        sweep = Sweep([job for job in found if not is_done(job)], [job for job in found if is_done(job)])
        log.info(f"{len(found)} runs in {args.folder / name}, of which {len(sweep.done)} are finished")
        execute(sweep, args)
    print_result(f"{sweep.table(whole=True)}\nresults in {args.folder / name}")
    if sweep.failed:
        raise RunError(f"{len(sweep.failed)} of {len(found)} runs failed: run the same command to start them again")


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keep other sweeps out of a suite's folder, which is made. Raise InputError if one is running there."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with lock_of(folder):
            yield
    except Timeout:
        raise InputError(f"another sweep is running in {folder}: wait for it or stop it") from None


def execute(sweep: Sweep, args: Args) -> None:
    """Run all waiting runs to their end, on Ray. Ctrl-C, SIGTERM and SIGHUP stop them, each with a checkpoint.

    An InputError stops them too. Raise InputError if the file of a dataset is missing, Ray does not start, no cluster
    answers, or the nodes do not fit.
    """
    refuse_missing_datasets(sweep.waiting)
    address = os.environ.get("RAY_ADDRESS", "local")  # Ray's default may find a cluster that runs here by chance
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address == "local":  # its own token keeps other users of this machine out, and leaves no file in the home folder
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # Ray reads it once
    import ray

    with contextlib.ExitStack() as stack:
        logs = stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True))
        if address == "local" and any(0 < job.gpus < 1 for job in sweep.waiting):
            log.info(stack.enter_context(shared_card()))
        embedded: dict[str, Any] = {
            "num_cpus": args.cpus, "num_gpus": args.gpus, "object_store_memory": 10**8, "include_dashboard": False,
            "_temp_dir": logs,
        } if address == "local" else {}  # fmt: skip
        came: list[int] = []  # signals; Ray raises a KeyboardInterrupt of its own, which does not hold the number

        def interrupt(number: int) -> None:
            came.append(number)
            raise KeyboardInterrupt

        try:
            with _signals_wait():
                hangup = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # Ray's processes and the runs inherit that
                try:
                    _start(ray, address, embedded)
                finally:
                    signal.signal(signal.SIGHUP, hangup)
                    on_stop(interrupt)
            drive(sweep, ray)
        except KeyboardInterrupt:
            log.info(
                "stopping the runs, each with a checkpoint\n"
                "a second signal stops them at once; run the same command to resume"
            )
            stop_runs(sweep, ray)
            raise SystemExit(128 + (came or [signal.SIGINT])[0]) from None
        except (InputError, OSError):  # a node that joined has other versions, none can run what waits, a full disk
            if sweep.running:
                log.info("stopping the runs, each with a checkpoint")
            stop_runs(sweep, ray)
            raise
        finally:
            ray.shutdown()


def stop_runs(sweep: Sweep, ray: Any) -> None:
    """Stop the running runs, and wait until each has written its checkpoint."""
    for reference in sweep.running:
        ray.cancel(reference)
    if sweep.running:
        ray.wait(list(sweep.running), num_returns=len(sweep.running), timeout=120.0)


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
    """Deliver SIGTERM and SIGHUP only after the block: Ray's handlers ignore SIGTERM, abort or exit with 15."""
    unblock = functools.partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGHUP})
    os.register_at_fork(after_in_child=unblock)  # Ray's processes, and so the runs, would inherit the block
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        unblock()


def _start(ray: Any, address: str, embedded: dict[str, Any]) -> None:
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **embedded)
    except Exception as error:  # Ray raises a bare Exception on a machine that is too busy
        if address == "local":
            raise InputError(f"{NO_RAY}: {' '.join(str(error).split())}: run the same command again") from error
        raise InputError(f"no Ray cluster answers at {address}, or not to our token: see docs/sweeps.md") from error


def drive(sweep: Sweep, ray: Any) -> None:
    """Start runs, collect those that ended, and print the table when it changes, until all have ended."""
    nodes: set[str] = set()
    display = Display()
    while sweep.waiting or sweep.running:
        nodes |= refuse_other_versions(ray, nodes)
        fill(sweep, ray)
        ready, _ = ray.wait(list(sweep.running), timeout=2.0)
        for reference in ready:
            finish(sweep, reference, ray)
        if sweep.waiting or sweep.running:
            display.show(sweep.table())


def refuse_other_versions(ray: Any, known: set[str]) -> set[str]:
    """Return the ids of the nodes that joined. Raise InputError if one has other code or packages.

    Its runs would not be the same.
    """
    joined = {node["NodeID"]: node["NodeName"] for node in ray.nodes() if node["Alive"] and node["NodeID"] not in known}
    at = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    told = {n: ray.remote(facts).options(num_cpus=0, scheduling_strategy=at(n, soft=False)).remote() for n in joined}
    for node, reference in told.items():
        try:
            there, here = ray.get(reference), facts()
        except ray.exceptions.RayError as error:
            if any(each["NodeID"] == node and each["Alive"] for each in ray.nodes()):
                raise InputError(f"node {joined[node]} cannot be asked for its versions: {error}") from None
            del joined[node]  # it is gone again
            continue
        if other := [f"{key} {there[key]}, here {here[key]}" for key in here if there[key] != here[key]]:
            raise InputError(f"node {joined[node]} has {'; '.join(other)}: install the same there, or stop Ray there")
    return set(joined)


def fill(sweep: Sweep, ray: Any) -> None:
    """Start the runs for which resources are free. The others wait here instead of in Ray, so they can be counted.

    Raise InputError if a run needs more than any node has, and RunError if no node is left.
    """
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not alive:
        raise RunError("Ray has no node left: start one, then run the same command to resume")
    for job in list(sweep.waiting):
        needs = {"CPU": job.cpus, "GPU": job.gpus, "memory": job.memory * 2**30}
        if not any(all(node.get(key, 0) >= need for key, need in needs.items()) for node in alive):
            raise InputError(f"{job.label} needs {needs}, and no node has that much: {alive}")
        running = sweep.running.values()
        used = {"CPU": sum(j.cpus for j in running), "GPU": sum(j.gpus for j in running)}
        used["memory"] = sum(j.memory for j in running) * 2**30
        if any(used[key] + needs[key] > sum(node.get(key, 0) for node in alive) for key in used):
            continue
        sweep.waiting.remove(job)
        job.folder.parent.mkdir(parents=True, exist_ok=True)
        (job.folder / DONE).unlink(missing_ok=True)  # the run may resume with more steps
        with replacing(job.folder.with_suffix(".sh")) as file:
            file.write(f"{job.line}\n".encode())
        # A task whose node or worker is lost is retried without limit. A worker runs one task, to free GPU memory.
        options = {"num_cpus": job.cpus, "num_gpus": job.gpus, "memory": needs["memory"] or None}
        task = ray.remote(max_retries=-1, max_calls=1, **options)(run)
        sweep.running[task.remote(job)] = job


def finish(sweep: Sweep, reference: Any, ray: Any) -> None:
    """Move a run that ended to the done, failed or waiting ones. A killed run waits again, KILLS times at most."""
    job = sweep.running.pop(reference)
    try:
        outcome: Outcome = ray.get(reference)
    except ray.exceptions.RayError as error:
        sweep.failed.append((job, str(error)))
        return
    if outcome.status == -signal.SIGKILL and sweep.kills[job] < KILLS:
        sweep.kills[job] += 1
        sweep.waiting.insert(0, job)
    elif outcome.status:
        sweep.failed.append((job, f"ended with {outcome.status}; the last lines of {job.log}:\n{outcome.said}"))
    else:
        outcome.keep(job.folder)
        sweep.done.append(job)


if __name__ == "__main__":
    command_line(train, Args)
