"""Many runs: a suite of algorithms × environments or datasets × seeds, each a command of its own, as Ray tasks.

    make bench SUITE=smoke
    make bench SUITE=online-1m ARGS="--dry-run"                # the commands alone
    RAY_ADDRESS=10.0.0.1:6379 make bench SUITE=online-1m       # on a cluster (docs/sweeps.md)

Finished runs are skipped, stopped ones go on from their last checkpoint: the same command again is how a sweep goes on,
whatever ended it. Results are those of the commands run by hand, bit for bit.
"""

import os
import shlex
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from bench.sweep_task import Job, Outcome, run
from common.command_line import command_line
from common.errors import InputError, RunError

ROOT = Path(__file__).resolve().parents[1]
KEYS = {"name", "algo", "envs", "datasets", "seeds", "flags", "cpus", "gpus"}


@dataclass
class Args:
    """What to run."""

    suite: Annotated[str, tyro.conf.Positional]
    """One of bench/suites, or the path of such a file."""
    folder: Path = Path("runs")
    """Each run goes into <folder>/<suite>/<name>/<environment or dataset>/<seed>."""
    cpus: int | None = None
    """CPUs of this machine to use, where Ray is embedded; all unless given."""
    gpus: int | None = None
    """GPUs of this machine to use, likewise."""
    dry_run: bool = False
    """Print the commands, one a line, and start nothing."""


def read_suite(name: str) -> tuple[str, list[dict[str, Any]]]:
    """A suite's name and its [[runs]]. Raises InputError where the file is missing, damaged or says what nobody reads."""
    path = Path(name) if name.endswith(".toml") else ROOT / "bench" / "suites" / f"{name}.toml"
    try:
        found = tomllib.loads(path.read_text())
    except FileNotFoundError:
        known = ", ".join(sorted(p.stem for p in (ROOT / "bench" / "suites").glob("*.toml")))
        raise InputError(f"there is no suite {path}: give one of {known}, or the path of a .toml file") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path}: {error}") from None
    runs = found.pop("runs", [])
    if found or not runs:
        raise InputError(f"{path}: a suite is [[runs]] and nothing else, at least one")
    for entry in runs:
        if unknown := entry.keys() - KEYS:
            raise InputError(f"{path}: {', '.join(sorted(unknown))}: a run has {', '.join(sorted(KEYS))}")
    return path.stem, runs


def jobs(suite: str, runs: list[dict[str, Any]], folder: Path) -> list[Job]:
    """Every run of a suite, in its order, seeds outermost: what all have with one seed comes before anyone's second.

    Raises InputError where an algorithm is not there, a number makes no sense, or two runs would share a folder.
    """
    found = [job for entry in runs for job in _jobs_of(entry, folder / suite)]
    for job in found:
        if sum(other.folder == job.folder for other in found) > 1:
            raise InputError(f"two runs would go into {job.folder}: give one of them a name")
    return sorted(found, key=lambda job: job.seed)


def _jobs_of(entry: dict[str, Any], folder: Path) -> Iterator[Job]:
    algorithms = [entry["algo"]] if isinstance(entry.get("algo"), str) else entry.get("algo", [])
    seeds = range(1, entry.get("seeds", 1) + 1) if isinstance(entry.get("seeds", 1), int) else entry["seeds"]
    tasks = [("--env", env) for env in entry.get("envs", [])]
    tasks += [("--dataset", dataset) for dataset in entry.get("datasets", [])]
    cpus, gpus = entry.get("cpus", 1), float(entry.get("gpus", 0.0))
    if not (algorithms and tasks and len(seeds) and cpus >= 1 and gpus >= 0):
        raise InputError("a run needs algo, envs or datasets, one seed or more, cpus of 1 or more, gpus of 0 or more")
    for algo in algorithms:
        if not (ROOT / "algos" / f"{algo}.py").exists():
            known = ", ".join(sorted(p.stem for p in (ROOT / "algos").glob("[a-z]*.py")))
            raise InputError(f"there is no algos/{algo}.py: give one of {known}")
        for (flag, task), seed in ((t, s) for t in tasks for s in seeds):
            name = Path(task).stem if task.endswith((".hdf5", ".h5")) else task.replace("/", "_")
            into = folder / entry.get("name", algo) / name / str(seed)
            argv = [sys.executable, str(ROOT / "algos" / f"{algo}.py"), flag, task, "--seed", str(seed)]
            argv += [*shlex.split(entry.get("flags", "")), "--run-dir", str(into)]
            yield Job(argv, into, seed, cpus, gpus)


@dataclass
class Sweep:
    """Its runs by what became of them, in the order in which they will start."""

    waiting: list[Job]
    done: list[Job] = field(default_factory=list)
    running: dict[Any, Job] = field(default_factory=dict)  # by Ray's reference
    failed: list[tuple[Job, str]] = field(default_factory=list)

    def table(self) -> str:
        """A line for each that runs or failed, and one for all."""
        lines = [f"runs     {job.label}{progress(job)}" for job in self.running.values()]
        for job, why in self.failed:
            lines += [f"failed   {job.label}", *(f"         | {line}" for line in why.splitlines())]
        counts = (len(self.done), len(self.running), len(self.waiting), len(self.failed))
        return "\n".join([*lines, "{} done, {} running, {} waiting, {} failed".format(*counts)])


def progress(job: Job) -> str:
    """Step and return of its last evaluation, where this machine can see its folder."""
    path = job.folder / "evaluations.csv"
    if not path.exists():
        return ""
    last = path.read_text().rstrip().rsplit("\n", 1)[-1].split(",")
    return f"  step {int(last[0]):,}, return {float(last[2]):.1f}" if last[0].lstrip("-").isdigit() else ""


def train(args: Args) -> None:
    """Runs the suite to its end. Raises RunError where a run failed: the others go on to theirs first."""
    suite, runs = read_suite(args.suite)
    found = jobs(suite, runs, args.folder.absolute())
    if args.dry_run:
        for job in found:
            print(f"OMP_NUM_THREADS={job.cpus} {shlex.join(job.argv)}")
        return
    sweep = Sweep([job for job in found if not job.finished], [job for job in found if job.finished])
    if sweep.waiting:
        execute(sweep, args)
    print(sweep.table())
    if sweep.failed:
        raise RunError(f"{len(sweep.failed)} of {len(found)} runs failed; the same command starts them again")


def execute(sweep: Sweep, args: Args) -> None:
    """Starts runs as resources allow, until none waits and none runs; Ctrl-C stops those that run, with a checkpoint."""
    import ray

    address = os.environ.get("RAY_ADDRESS", "local")
    embedded = {"num_cpus": args.cpus, "num_gpus": args.gpus, "object_store_memory": 10**8, "include_dashboard": False}
    ray.init(address=address, log_to_driver=False, **(embedded if address == "local" else {}))
    try:
        check_nodes(ray)
        shown = ""
        while sweep.waiting or sweep.running:
            fill(sweep, ray)
            ready, _ = ray.wait(list(sweep.running), timeout=2.0)
            for reference in ready:
                finish(sweep, reference, ray)
            table = sweep.table()
            if table != shown:
                sys.stderr.write(f"\x1b[2J\x1b[H{table}\n" if sys.stderr.isatty() else f"{table.splitlines()[-1]}\n")
                shown = table
    except KeyboardInterrupt:
        sys.stderr.write("stopping the runs, each with a checkpoint; the same command goes on\n")
        for reference in sweep.running:
            ray.cancel(reference)
        ray.wait(list(sweep.running), num_returns=len(sweep.running), timeout=120.0)
        raise SystemExit(130) from None
    finally:
        ray.shutdown()


def check_nodes(ray: Any) -> None:
    """Raises InputError where a node has another Python or Ray, which Ray itself tells only later and worse."""


def fill(sweep: Sweep, ray: Any) -> None:
    """Starts as many as the cluster has room for now; the others wait here, where they can be counted."""
    total = ray.cluster_resources()
    while sweep.waiting:
        job = sweep.waiting[0]
        used = {"CPU": sum(j.cpus for j in sweep.running.values()), "GPU": sum(j.gpus for j in sweep.running.values())}
        if used["CPU"] + job.cpus > total.get("CPU", 0) or used["GPU"] + job.gpus > total.get("GPU", 0):
            if not sweep.running:
                raise InputError(f"{job.label} needs {job.cpus} CPUs and {job.gpus:g} GPUs; there are {total}")
            return
        # A worker is not used again where a GPU's memory could stay with it; lost nodes and workers are tried anew.
        options = {"num_cpus": job.cpus, "num_gpus": job.gpus, "max_retries": -1, "max_calls": 1}
        sweep.running[ray.remote(**options)(run).remote(job)] = sweep.waiting.pop(0)


def finish(sweep: Sweep, reference: Any, ray: Any) -> None:
    """Takes a run that ended from those that run to those that are done or failed."""
    job = sweep.running.pop(reference)
    try:
        outcome: Outcome = ray.get(reference)
    except ray.exceptions.RayError as error:
        sweep.failed.append((job, str(error)))
        return
    if outcome.status:
        sweep.failed.append((job, f"ended with {outcome.status}; the last lines of {job.log}:\n{outcome.said}"))
    else:
        job.keep(outcome.files)
        sweep.done.append(job)


if __name__ == "__main__":
    command_line(train, Args)
