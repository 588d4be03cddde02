"""Many runs: a suite of algorithms × environments or datasets × seeds, each a command of its own, as Ray tasks.

    make bench SUITE=smoke
    make bench SUITE=online-1m ARGS="--dry-run"                # the commands alone
    RAY_ADDRESS=10.0.0.1:6379 make bench SUITE=online-1m       # on a cluster (docs/sweeps.md)

Finished runs are skipped, stopped ones go on from their last checkpoint: the same command again is how a sweep goes on,
whatever ended it. Results are those of the commands run by hand, bit for bit.
"""

import dataclasses
import importlib
import json
import os
import secrets
import shlex
import signal
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from bench.sweep_task import ROOT, Job, Outcome, facts, run
from common.command_line import command_line, parse
from common.errors import InputError, RunError

SUITES = ROOT / "bench" / "suites"
KILLS = 3  # so often a run goes on after the kernel or somebody killed it; of lost nodes and workers there is no limit


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


@dataclass
class Entry:
    """A [[runs]] of a suite: every algorithm, on every environment and dataset, with every seed."""

    algo: list[str]
    envs: list[str] = field(default_factory=list)
    datasets: list[str] = field(default_factory=list)
    seeds: list[int] = field(default_factory=lambda: [1])
    flags: str = ""
    name: str = ""  # of the folder; that of the algorithm unless given
    cpus: int = 1
    gpus: float = 0.0  # 0.25: four runs share one
    memory: float = 0.0  # GiB to set aside; nobody watches that it is enough

    def __post_init__(self) -> None:
        lists = {"algo": str, "envs": str, "datasets": str, "seeds": int}
        for key, kind in {"flags": str, "name": str, "cpus": int, "gpus": float, "memory": float}.items():
            if not isinstance(getattr(self, key), (kind, int) if kind is float else kind):
                raise InputError(f"{key} is {getattr(self, key)!r}, which is no {kind.__name__}")
        for key, kind in lists.items():
            if not all(isinstance(value, kind) and value != "" for value in getattr(self, key)):
                raise InputError(f"{key} is {getattr(self, key)!r}: give {kind.__name__}s")
        if not (self.algo and self.envs + self.datasets and self.seeds and self.cpus > 0):
            raise InputError("a run needs algo, envs or datasets, seeds, and cpus of 1 or more")
        if min(self.gpus, self.memory, *self.seeds) < 0:
            raise InputError("nothing in a run is below 0")


def read_suite(name: str) -> tuple[str, list[Entry]]:
    """A suite's name and entries. Raises InputError where the file is missing, damaged or says what nobody reads."""
    path = Path(name) if name.endswith(".toml") else SUITES / f"{name}.toml"
    try:
        found = tomllib.loads(path.read_text())
    except FileNotFoundError:
        known = ", ".join(sorted(p.stem for p in SUITES.glob("*.toml")))
        raise InputError(f"there is no suite {path}: give one of {known}, or the path of a .toml file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: {error}") from None
    runs = found.pop("runs", None)
    if found or not isinstance(runs, list) or not runs:
        raise InputError(f"{path}: a suite is [[runs]], one or more, and nothing else")
    try:
        return path.stem, [Entry(**_as_lists(each)) for each in runs]
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _as_lists(given: dict[str, Any]) -> dict[str, Any]:
    """One name stands for a list of one, and seeds = 10 for 1 to 10. Raises InputError for a key that is not read."""
    keys = [f.name for f in dataclasses.fields(Entry)]
    if unknown := given.keys() - set(keys):
        raise InputError(f"{', '.join(sorted(unknown))}: a run has {', '.join(keys)}")
    found = {"algo": []} | given
    if isinstance(found.get("seeds"), int):
        found["seeds"] = list(range(1, found["seeds"] + 1))
    return found | {k: [found[k]] for k in ("algo", "envs", "datasets") if isinstance(found.get(k), str)}


def jobs(suite: str, entries: list[Entry], folder: Path) -> list[Job]:
    """Every run of a suite, seeds outermost: what all have with one seed comes before anyone's second.

    Raises InputError where an algorithm is not there or would refuse its flags, or where two runs share a folder.
    """
    found = [job for entry in entries for job in _jobs_of(entry, folder.absolute() / suite)]
    twice = [str(into) for into, times in Counter(job.folder for job in found).items() if times > 1]
    if twice:
        raise InputError(f"two runs would go into {twice[0]}: give one of them a name")
    return sorted(found, key=lambda job: job.seed)


def _jobs_of(entry: Entry, folder: Path) -> Iterator[Job]:
    tasks = [("--env", env) for env in entry.envs] + [("--dataset", dataset) for dataset in entry.datasets]
    for algo in entry.algo:
        for flag, task in tasks:
            fixed = (f"algos/{algo}.py", flag, task, *shlex.split(entry.flags))
            refuse_wrong_flags(algo, fixed)
            name = Path(task).stem if task.endswith((".hdf5", ".h5")) else task.replace("/", "_").replace(":", "_")
            for seed in entry.seeds:
                into = folder / (entry.name or algo) / name / str(seed)
                yield Job((*fixed, "--seed", str(seed)), into, seed, entry.cpus, entry.gpus, entry.memory)


def refuse_wrong_flags(algo: str, command: tuple[str, ...]) -> None:
    """Raises InputError now, where the command would say so when its turn comes, hours later."""
    if not (ROOT / command[0]).exists():
        known = ", ".join(sorted(p.stem for p in (ROOT / "algos").glob("[a-z]*.py")))
        raise InputError(f"there is no {command[0]}: give one of {known}")
    if owned := {"--seed", "--run-dir"} & {word.split("=")[0] for word in command}:
        raise InputError(f"{' and '.join(sorted(owned))} in flags: the sweep itself says which")
    try:
        parse(importlib.import_module(f"algos.{algo}").Args, command[1:])
    except InputError as error:
        raise InputError(f"{shlex.join(command)}: {error}") from None


def is_done(job: Job) -> bool:
    """Raises InputError where its folder was made by another command."""
    record = job.folder.with_suffix(".sh")
    if record.exists() and record.read_text().split(" --run-dir ")[0] != job.line.split(" --run-dir ")[0]:
        raise InputError(
            f"{job.folder} was made by another command, {record.read_text().strip()}\n"
            f"give another --folder, or delete {job.folder} and {record.name} to start afresh"
        )
    return (job.folder / "DONE").exists()


@dataclass
class Sweep:
    """Its runs by what became of them, in the order in which they will start."""

    waiting: list[Job]
    done: list[Job] = field(default_factory=list)
    running: dict[Any, Job] = field(default_factory=dict)  # by Ray's reference
    failed: list[tuple[Job, str]] = field(default_factory=list)
    kills: Counter[Job] = field(default_factory=Counter)

    def table(self) -> str:
        """A line for each that runs or failed, and one for all."""
        lines = [f"runs     {job.label:40}{progress(job)}" for job in self.running.values()]
        for job, why in self.failed:
            lines += [f"failed   {job.label}", *(f"         | {line}" for line in why.splitlines())]
        counts = (len(self.done), len(self.running), len(self.waiting), len(self.failed))
        return "\n".join([*lines, "{} done, {} running, {} waiting, {} failed".format(*counts)])


def progress(job: Job) -> str:
    """Step and mean return of its last evaluation, where this machine can see its folder."""
    path = job.folder / "evaluations.csv"
    rows = [line.split(",") for line in path.read_text().splitlines()[1:]] if path.exists() else []
    if not rows:
        return ""
    arguments = json.loads((job.folder / "config.json").read_text())["arguments"]
    end = arguments.get("total_steps", arguments.get("online_steps", 0))
    returns = [float(row[2]) for row in rows if row[0] == rows[-1][0]]
    return f" step {int(rows[-1][0]):,} of {end:,}, return {sum(returns) / len(returns):,.1f}"


def train(args: Args) -> None:
    """Runs the suite to its end. Raises RunError where a run failed: the others go on to theirs first."""
    found = jobs(*read_suite(args.suite), args.folder)
    if args.dry_run:
        sys.stdout.write("".join(f"{job.line}\n" for job in found))
        return
    sweep = Sweep([job for job in found if not is_done(job)], [job for job in found if is_done(job)])
    execute(sweep, args)
    print(sweep.table())  # noqa: T201
    if sweep.failed:
        raise RunError(f"{len(sweep.failed)} of {len(found)} runs failed; the same command starts them again")


def execute(sweep: Sweep, args: Args) -> None:
    """Runs what waits, on Ray, to the end. Ctrl-C and SIGTERM stop what runs, each with a checkpoint."""
    address = os.environ.get("RAY_ADDRESS", "local")  # never one that happens to be there
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address == "local":  # a token of its own: nobody else on this machine gets in, and none is left in the home
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # which Ray reads once
    import ray

    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as logs:
        embedded = {
            "num_cpus": args.cpus, "num_gpus": args.gpus, "object_store_memory": 10**8, "include_dashboard": False,
            "_temp_dir": logs,
        }  # fmt: skip
        try:
            ray.init(address, log_to_driver=False, logging_level="error", **(embedded if address == "local" else {}))
        except ConnectionError as error:
            raise InputError(f"no Ray cluster answers at {address}, or not to our token: see docs/sweeps.md") from error
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler)
        try:
            drive(sweep, ray)
        except KeyboardInterrupt:
            sys.stderr.write("stopping the runs, each with a checkpoint (again: at once); the same command goes on\n")
            for reference in sweep.running:
                ray.cancel(reference)
            ray.wait(list(sweep.running), num_returns=max(1, len(sweep.running)), timeout=120.0)
            raise SystemExit(130) from None
        finally:
            ray.shutdown()


def drive(sweep: Sweep, ray: Any) -> None:
    """Starts runs, takes in those that ended, and shows what is, until all ended."""
    nodes: set[str] = set()
    shown = ""
    while sweep.waiting or sweep.running:
        nodes |= refuse_other_versions(ray, nodes)
        fill(sweep, ray)
        ready, _ = ray.wait(list(sweep.running), timeout=2.0)
        for reference in ready:
            finish(sweep, reference, ray)
        if (table := sweep.table()) != shown:
            sys.stderr.write(f"\x1b[2J\x1b[H{table}\n" if sys.stderr.isatty() else f"{table.splitlines()[-1]}\n")
            shown = table


def refuse_other_versions(ray: Any, known: set[str]) -> set[str]:
    """The nodes that joined. Raises InputError where one has other code or packages: its runs would not be the same."""
    joined = {node["NodeID"]: node["NodeName"] for node in ray.nodes() if node["Alive"] and node["NodeID"] not in known}
    at = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    told = {n: ray.remote(facts).options(num_cpus=0, scheduling_strategy=at(n, soft=False)).remote() for n in joined}
    for node, reference in told.items():
        there, here = ray.get(reference), facts()
        if other := [f"{key} {there[key]}, here {here[key]}" for key in here if there[key] != here[key]]:
            raise InputError(f"node {joined[node]} has {'; '.join(other)}: bring it to the same, or stop Ray there")
    return set(joined)


def fill(sweep: Sweep, ray: Any) -> None:
    """Starts what there is room for now; the rest waits here, where it can be counted.

    Raises InputError where a run asks for more than any node has, and RunError where no node is left.
    """
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not alive:
        raise RunError("Ray has no node left: the same command goes on")
    for job in list(sweep.waiting):
        needs = {"CPU": job.cpus, "GPU": job.gpus, "memory": job.memory * 2**30}
        if not any(all(node.get(key, 0) >= need for key, need in needs.items()) for node in alive):
            raise InputError(f"{job.label} needs {needs}, and no node has that much: {alive}")
        used = {"CPU": sum(j.cpus for j in sweep.running.values()), "GPU": sum(j.gpus for j in sweep.running.values())}
        if any(used[key] + needs[key] > sum(node.get(key, 0) for node in alive) for key in used):
            continue
        sweep.waiting.remove(job)
        job.folder.parent.mkdir(parents=True, exist_ok=True)
        job.folder.with_suffix(".sh").write_text(f"{job.line}\n")
        # Lost nodes and workers are tried anew, for ever; none is used again, where a GPU's memory could stay with it.
        options = {"num_cpus": job.cpus, "num_gpus": job.gpus, "memory": needs["memory"] or None}
        task = ray.remote(max_retries=-1, max_calls=1, **options)(run)
        sweep.running[task.remote(job)] = job


def finish(sweep: Sweep, reference: Any, ray: Any) -> None:
    """Takes a run that ended to those that are done, that failed, or that go on."""
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
