"""Read a suite, a TOML file of algorithms × environments or datasets × seeds × flags, and list its runs."""

import dataclasses
import importlib
import itertools
import math
import re
import shlex
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from bench.report.tables import display_name
from bench.sweep.sweep_task import ROOT, Job
from common.arguments import converted, described
from common.command_line import parse
from common.errors import InputError
from common.run_folder import DATASET_FILES
from envs.make import find

SUITES = ROOT / "bench" / "sweep" / "suites"
PEER = "d3rlpy-"  # `make d3rlpy` runs these, not a suite
PEERS = ("iql", "cql")
MOST_RUNS = 100_000


@dataclass
class Entry:
    """One [[runs]] entry of a suite: every algorithm on every environment and dataset, with every seed."""

    algo: tuple[str, ...]
    envs: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (1,)
    flags: str = ""  # {suites}: the folder of all suites, {run}: <task>/<seed>, as in --init-from {suites}/a/b/{run}
    name: str = ""  # of the folder; by default the algorithm's
    label: str = ""  # in the report; by default as its page spells it, or the name in capitals
    cpus: int = 1
    gpus: float = 0.0  # 0.25: four runs share one
    memory: float = 0.0  # GiB to reserve; no limit is enforced

    def __post_init__(self) -> None:
        for key, kind in get_type_hints(Entry).items():
            try:
                setattr(self, key, converted(getattr(self, key), kind))
            except ValueError:
                raise InputError(f"{key} is {getattr(self, key)!r}: give {described(kind)}") from None
        tasks = self.envs + self.datasets
        if not (self.algo and tasks and self.seeds and self.cpus > 0 and all(self.algo + tasks)):
            raise InputError("a run needs algo, envs or datasets, seeds, and cpus of 1 or more")
        if not all(0 <= value < math.inf for value in (self.gpus, self.memory, *self.seeds)):
            raise InputError("gpus, memory and seeds of a run must be 0 or more, and finite")
        for folder in filter(None, (self.name, *map(task_name, tasks))):
            if not re.fullmatch(r"\w[\w.-]*", folder):
                raise InputError(
                    f"{folder!r} cannot name a folder: begin with a letter or digit, then also '.' and '-'"
                )
        try:
            self.words = shlex.split(self.flags)  # split before folders are inserted, which may hold spaces
        except ValueError as error:
            raise InputError(f"flags are {self.flags!r}: {error}") from None


def read_suite(name: str) -> tuple[str, list[Entry]]:
    """Return a suite's name and entries. Raise InputError if the file is missing, damaged or has unknown keys."""
    path = Path(name) if name.endswith(".toml") else SUITES / f"{name}.toml"
    try:
        found = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        known = ", ".join(sorted(p.stem for p in SUITES.glob("*.toml")))
        raise InputError(f"there is no suite {path}: give one of {known}, or the path of a .toml file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError, OSError) as error:
        raise InputError(f"{path}: {error}") from None
    runs = found.pop("runs", None)
    if found or not isinstance(runs, list) or not runs or not all(isinstance(each, dict) for each in runs):
        raise InputError(f"{path}: a suite must hold one or more [[runs]] and nothing else")
    try:
        return path.stem, [Entry(**_as_lists(each)) for each in runs]
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _as_lists(given: dict[str, Any]) -> dict[str, Any]:
    """Return the keys with a single name as a list of one, and seeds = 10 as 1 to 10.

    Raise InputError if a key is unknown.
    """
    keys = [f.name for f in dataclasses.fields(Entry)]
    if unknown := given.keys() - set(keys):
        raise InputError(f"{', '.join(sorted(unknown))}: a run has {', '.join(keys)}")
    found = {"algo": []} | given
    if isinstance(found.get("seeds"), int):
        if found["seeds"] > MOST_RUNS:
            raise InputError(f"seeds is {found['seeds']:,}: give {MOST_RUNS:,} or fewer")
        found["seeds"] = list(range(1, found["seeds"] + 1))
    return found | {k: [found[k]] for k in ("algo", "envs", "datasets") if isinstance(found.get(k), str)}


class Planned(NamedTuple):
    """The number of planned seeds, and the last step."""

    seeds: int
    step: int


def labels(suite: str) -> dict[str, str]:
    """Return the label of each name in a suite, in its order. In offline-own, d3rlpy's labels follow onramp's."""
    own = {entry.name or algo: entry.label for entry in read_suite(suite)[1] for algo in entry.algo}
    found: dict[str, str] = {}
    for name, label in own.items():
        found[name] = label or display_name(name)
        if suite == "offline-own" and name in PEERS:
            found[f"{PEER}{name}"] = f"d3rlpy's {found[name]}"
    return found


def planned(suite: str) -> dict[str, dict[str, Planned]]:
    """Return the plan of each name in `labels` on each task."""
    found: dict[str, dict[str, Planned]] = {name: {} for name in labels(suite)}
    for entry in read_suite(suite)[1]:
        flags = dict(itertools.pairwise(entry.words))
        steps = next(flags[key] for key in ("--total-steps", "--online-steps", "--offline-steps") if key in flags)
        plan = Planned(len(entry.seeds), int(steps))
        for name in [entry.name] if entry.name else entry.algo:
            found[name] |= {task_name(task): plan for task in entry.envs + entry.datasets}
    return {name: tasks or found[name.removeprefix(PEER)] for name, tasks in found.items()}


def jobs(suite: str, entries: list[Entry], folder: Path) -> list[Job]:
    """Return every run of a suite, ordered by seed: every configuration runs seed 1 before any runs seed 2.

    Raise InputError if an algorithm or an environment does not exist, an algorithm would refuse its flags, or two runs
    share a folder.
    """
    count = sum(len(entry.algo) * len(entry.envs + entry.datasets) * len(entry.seeds) for entry in entries)
    if count > MOST_RUNS:
        raise InputError(f"the suite has {count:,} runs: give {MOST_RUNS:,} or fewer")
    found = [job for entry in entries for job in _jobs_of(entry, folder.absolute() / suite)]
    twice = [str(into) for into, times in Counter(job.folder for job in found).items() if times > 1]
    if twice:
        raise InputError(f"two runs would go into {twice[0]}: give one of them a name")
    return sorted(found, key=lambda job: job.seed)


def task_name(task: str) -> str:
    """Return the folder name of an environment's or dataset's id, or of a dataset's file."""
    return Path(task).stem if task.endswith((".hdf5", ".h5")) else task.replace("/", "_").replace(":", "_")


def _jobs_of(entry: Entry, folder: Path) -> Iterator[Job]:
    tasks = [("--env", env) for env in entry.envs] + [("--dataset", dataset) for dataset in entry.datasets]
    for algo, (flag, task) in itertools.product(entry.algo, tasks):
        command, name = (f"algos/{algo}.py", flag, task), task_name(task)
        refuse_wrong_flags(algo, (*command, *entry.words), max(entry.seeds))  # once, because their flags are alike
        for seed in entry.seeds:
            flags = [w.replace("{suites}", str(folder.parent)).replace("{run}", f"{name}/{seed}") for w in entry.words]
            into = folder / (entry.name or algo) / name / str(seed)
            yield Job((*command, *flags, "--seed", str(seed)), into, seed, entry.cpus, entry.gpus, entry.memory)


def refuse_wrong_flags(algo: str, command: tuple[str, ...], seed: int) -> None:
    """Raise InputError now if the command would refuse its flags or the seed, because it may start hours later.

    The same holds for an environment that does not exist, unless a module of the user registers it.
    """
    known = sorted(p.stem for p in (ROOT / "algos").glob("[a-z]*.py"))
    if algo not in known:
        raise InputError(f"there is no {command[0]}: give one of {', '.join(known)}")
    if owned := {"--seed", "--run-dir", "--help", "-h"} & {word.split("=")[0] for word in command}:
        raise InputError(f"{' and '.join(sorted(owned))} in flags: remove them, because the sweep sets them")
    try:
        args = parse(importlib.import_module(f"algos.{algo}").Args, (*command[1:], "--seed", str(seed)))
        if args.env and ":" not in args.env:  # a module may be on the cluster's nodes alone
            find(args.env)
    except InputError as error:
        raise InputError(f"{shlex.join(command)}: {error}") from None


def refuse_missing_datasets(found: Iterable[Job]) -> None:
    """Raise InputError if a job's dataset is a file that does not exist on this machine."""
    for job in found:
        _, flag, dataset, *_ = job.command
        if flag == "--dataset" and dataset.endswith(DATASET_FILES) and not (ROOT / dataset).exists():
            raise InputError(
                f"{job.label}: there is no file {ROOT / dataset}: make that dataset (docs/data.md), or give another one"
            )


def has_more_steps(before: str, now: str) -> bool:
    """Return whether `now` is the `Job.line` of `before` with more steps, which the algorithm allows (`extendable`)."""
    old_line, new_line = (line.split(" --run-dir ")[0] for line in (before, now))
    (head, _, was), (other_head, _, becomes) = old_line.partition(".py "), new_line.partition(".py ")
    if head != other_head:
        return False
    kind = importlib.import_module(f"algos.{Path(head).name}").Args
    try:
        old, new = (dataclasses.asdict(parse(kind, shlex.split(flags))) for flags in (was, becomes))
    except (InputError, ValueError):  # removed flags, or a torn line
        return False
    grown = [key for key in kind.extendable if 0 < old.get(key, 0) < new.get(key, 0)]
    return bool(grown) and all(old[key] == new[key] for key in old if key not in grown)
