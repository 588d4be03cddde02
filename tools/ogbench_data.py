"""Make OGBench's datasets with the scripted oracles of its package: another sample from the same generator.

    make ogbench TASKS="scene-play puzzle-3x3-play cube-single-play" TRANSITIONS=1000000
    python -m tools.ogbench_data pointmaze-medium-navigate --transitions 100000 --jobs 4

The published files were made by the same oracles and rules, with unrecorded random numbers. State this with results on
data made here. Files have the package's names and arrays, and `--dataset` finds them. Validation data have a tenth as
many episodes.

Each episode has a seed of its own, so the number of processes does not change the data. The same command resumes an
interrupted one, which loses at most ten episodes of each process. It does nothing if its result exists.

Source: Park et al. 2025, "OGBench", arXiv 2410.20092, appendix on datasets, and the settings of its repository (MIT).
"""

import common.start

import io
import multiprocessing
import os
import re
import shutil
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import tyro
from filelock import FileLock, Timeout
from tqdm import tqdm

from common.arguments import at_least
from common.command_line import command_line
from common.errors import InputError, RunError
from common.files import replacing, write_json
from common.messages import log
from common.provenance import commit, versions
from common.schema import read_json
from common.seeding import seeds
from envs import ogbench as environments
from envs.ogbench import DATASETS
from offline import ogbench
from offline.download import note_of
from offline.npz import Archive
from tools.inspect_dataset import facts
from tools.ogbench_oracles import Rows, Task, make_episode

SHARD = 10  # episodes in one file of an unfinished dataset
NOTE = {"arguments?": dict, "transitions?": int}  # the description next to a dataset
DAMAGED = "is damaged: give another --folder"
SOURCE = "made here by OGBench's scripted oracles: another sample from the same generator, not the published file"


@dataclass
class Args:
    tasks: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Datasets to make, such as scene-play, cube-double-noisy or pointmaze-medium-navigate."""
    transitions: int = 1_000_000
    """Transitions for training, in episodes of 1,000 (pointmaze-giant: 2,000)."""
    folder: Path = field(default_factory=ogbench.folder)
    """Folder of the files. --dataset looks into $OGBENCH_DATASET_DIR, or ~/.ogbench/data."""
    jobs: int = 2
    """Number of processes, with one thread each."""
    seed: int = 0
    """Random seed."""
    described: Path | None = None
    """Folder for a second copy of the descriptions, such as results/datasets. The first is next to the data."""


def parsed(name: str) -> Task:
    """Return the task of a dataset's name. Raises InputError if it cannot be made here."""
    makes = [each for each in DATASETS if re.search("play|noisy|pointmaze.*navigate", each)]
    if name.removesuffix("-v0") not in makes:
        raise InputError(f"{name} cannot be made here: choose from {', '.join(makes)}")
    env, _, behaviour = name.removesuffix("-v0").rpartition("-")
    return Task(env, behaviour)


class Shard(NamedTuple):
    """Episodes that are made, and kept on the disk, together."""

    task: Task
    split: str
    first: int
    seeds: tuple[int, ...]
    folder: Path

    @property
    def path(self) -> Path:
        return self.folder / f"{self.split}-{self.first:05}-{len(self.seeds)}.npz"


def write_shard(shard: Shard) -> int:
    """Write the episodes of a shard, unless they are there. Return how many there are.

    Raises RunError if an oracle fails, and OSError if the disk is full.
    """
    if not shard.path.exists():
        episodes = [make_episode(shard.task, seed) for seed in shard.seeds]
        save(shard.path, joined(episodes))
    return len(shard.seeds)


def joined(parts: list[Rows]) -> Rows:
    return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}


def shards(task: Task, args: Args, folder: Path) -> list[Shard]:
    """Return the shards of both splits, those of the training data first."""
    count = -(-args.transitions // (task.steps - 1))
    found = []
    for split, episodes in (("train", count), ("val", -(-count // 10))):
        each = seeds(args.seed, f"{task.env}-{task.behaviour} {split}", episodes)
        found += [Shard(task, split, i, tuple(each[i : i + SHARD]), folder) for i in range(0, episodes, SHARD)]
    return found


def make(task: Task, args: Args) -> None:
    """Write the training and the validation file of a task, with a description, unless they are there."""
    name = f"{task.env}-{task.behaviour}-v0"
    paths = {"train": args.folder / f"{name}.npz", "val": args.folder / f"{name}-val.npz"}
    note, arguments = args.folder / f"{name}.json", {"transitions": args.transitions, "seed": args.seed}
    parts = args.folder / f"{name}.seed{args.seed}.parts"
    before = read_json(note, NOTE, DAMAGED) or read_json(parts / note.name, NOTE, DAMAGED)
    same = all(before.get("arguments", {}).get(key) == value for key, value in arguments.items())
    if not same and (existing := next((path for path in paths.values() if path.exists()), None)):
        made = "was made with other arguments" if before else "was not made by this command"
        raise InputError(f"{existing} exists and {made}: give another --folder")
    if not all(map(Path.exists, paths.values())):
        before = {"arguments": arguments, "source": SOURCE, "versions": versions(), "commit": commit()}
        before["versions"] |= {package: version(package) for package in ("ogbench", "dm-control")}
        _make_files(name, task, args, paths, parts, lambda: write_json(parts / note.name, before))
        (parts / note.name).replace(note)  # only now, because it states that the files were made here
    if "transitions" in before:
        log.info(f"{paths['train']} was already made by the same command")
    else:
        before |= description(task, paths["train"])
        write_json(note, before)
        log.info(f"{before['transitions']:,} transitions are in {paths['train']}")
    if args.described:
        write_json(args.described / note.name, before)
    shutil.rmtree(parts, ignore_errors=True)  # they are left if a kill came after the last file


def _make_files(
    name: str, task: Task, args: Args, paths: dict[str, Path], folder: Path, write_note: Callable[[], None]
) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / "lock", timeout=0):
            parts = shards(task, args, folder)
            generate(name, parts, args.jobs)
            write_note()
            for split, path in paths.items():
                archives = [Archive(part.path) for part in parts if part.split == split]
                note_of(path).unlink(missing_ok=True)  # of an earlier file of this name
                save(path, joined([{key: archive[key] for key in archive.keys} for archive in archives]))
    except Timeout:
        raise InputError(f"another command is making {paths['train']}: wait for it") from None
    except (PermissionError, NotADirectoryError) as error:
        raise InputError(f"{args.folder} cannot be written ({error.strerror}): give another --folder") from None


def description(task: Task, path: Path) -> dict[str, Any]:
    """Return facts of a dataset: those of its default task, and how many states each task counts as solved."""
    prefix = f"{task.env}-{task.behaviour}-singletask"
    recording = ogbench.read(f"{prefix}-v0", path)
    fingerprint = 0
    for block in recording.blocks():
        for part in block:
            fingerprint = zlib.crc32(np.ascontiguousarray(part, np.float32).data, fingerprint)
    solved = {}
    for number in range(1, 6):
        masks = ogbench.relabelled(Archive(path), ogbench.goal_of(f"{task.env}-singletask-task{number}-v0"))[1]
        solved[f"task{number}"] = int((masks == 0).sum())
    found = facts(recording)
    del found["columns"]
    return found | {"id": path.name, "solved rows": solved, "fingerprint": f"{fingerprint:08x}"}


def save(path: Path, rows: Rows) -> None:
    """Write an .npz file in one step. Raises OSError if the disk is full."""
    data = io.BytesIO()  # in memory first: on a full disk, zipfile raises errors of its own
    np.savez_compressed(data, **rows)  # type: ignore[arg-type]
    with replacing(path) as file:
        file.write(data.getbuffer())


def generate(name: str, parts: list[Shard], jobs: int) -> None:
    """Write all shards, in `jobs` processes that end with this one."""
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    total = sum(len(part.seeds) for part in parts)
    with ProcessPoolExecutor(jobs, context, initializer=end_with_parent) as pool, tqdm(total=total, desc=name) as bar:
        try:
            for future in as_completed([pool.submit(write_shard, part) for part in parts]):
                bar.update(future.result())
        except BrokenProcessPool:
            raise RunError("a process was killed (is there enough memory?): run the same command to resume") from None
        finally:
            pool.shutdown(cancel_futures=True)


def end_with_parent() -> None:
    """Start a thread that ends this process when its parent ends, also if that is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main(args: Args) -> None:
    if args.transitions < 1 or args.jobs < 1:
        raise InputError("--transitions and --jobs: give whole numbers of 1 or more")
    at_least(0, seed=args.seed)
    if not args.tasks:
        raise InputError("no dataset is named: give one such as scene-play")
    tasks = [parsed(name) for name in args.tasks]
    for task in tasks:
        environments.register(task.env)
    for task in tasks:
        make(task, args)


if __name__ == "__main__":
    command_line(main, Args)
