"""A run folder: its name and files, how each is read, and the lock that keeps a second process out."""

import contextlib
import csv
import dataclasses
import gzip
import io
import json
import os
import re
import statistics
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any

from filelock import FileLock, Timeout

from common import checkpoint, files
from common.arguments import MAY_DIFFER, NonNegativeInt, RunArgs, json_object
from common.errors import InputError, RunError
from common.evaluate import Episode
from common.messages import keep_errors, log
from common.schema import Schema, require

CONFIG, EVALUATIONS, METRICS, DONE = "config.json", "evaluations.csv", "metrics.csv", "DONE"
COLUMNS = ("step", "episode", "return", "length", "success", "normalized_score")  # of EVALUATIONS, one row per episode
CHECKSUM = "crc32"  # the key of a file's own checksum, in config.json, DONE and the facts of a policy
# "configuration" and "threads" are those of archived runs of other programs. With other keys it is no run's.
CONFIG_KEYS = {
    "algo",
    "arguments",
    "versions",
    "code",
    "commit",
    "hardware",
    "form",
    "time",
    CHECKSUM,
    "configuration",
    "threads",
}
LOCK = ".lock"
RESTORE_FINISHED = "restore it from a copy (the run itself is complete)"
DATASET_FILES = (".hdf5", ".h5")
POLICY_FOLDER = "policy"  # folder of best.safetensors and last.safetensors
# The schemas of config.json and of a checkpoint. A part's own schema is at its class.
# Of the arguments, those are here that a program reads without the algorithm's `Args`, which check themselves.
TRAINED_SCHEMA: Schema = {
    "algo": str,
    "arguments": {
        str: object, "env?": str, "env_kwargs?": str, "time_limit?": int | None, "action_repeat?": int | None,
        "seed?": int, "dataset?": str | None, "init_from?": str | None, "device?": str, "total_steps?": int,
        "offline_steps?": int, "online_steps?": int,
    },
}  # fmt: skip
CONFIG_SCHEMA: Schema = TRAINED_SCHEMA | {
    "versions?": {str: str | None}, "commit?": str | None, "hardware?": {"gpu?": str | None}, "form?": str,
    "code?": {str: str},
}  # fmt: skip
STATE_SCHEMA: Schema = {
    "agent": {str: object}, "rollout": {str: object}, "data?": {"rewards?": (float, float)}, "rewards?": (float, float),
    "logger": {
        "sizes": {str: NonNegativeInt}, "step": int, "checksums?": {str: str}, "is_evaluated?": bool,
        "unsent?": {str: float},
    },
}  # fmt: skip
Curve = dict[int, float]  # mean of an evaluation's episodes, by step


def name_and_folder(algo: str, args: RunArgs) -> tuple[str, Path]:
    """Return the run's name, in characters that every file system takes, and its folder.

    By default the name is <algorithm>__<task>__<label>__<seed>, without a label if all flags have their defaults.
    """
    parts = [algo, re.sub("[^A-Za-z0-9_.-]+", "_", args.task), args.label, str(args.seed)]
    name = args.run_name or "__".join(part for part in parts if part)
    return name, args.run_dir or Path("runs") / name


def state_path(folder: Path) -> Path:
    """Return the path of the last checkpoint's state. Its replay rows are in other files."""
    return folder / "checkpoint" / "state.pt"


def has_checkpoint(folder: Path) -> bool:
    """Return whether there is a checkpoint. Raises InputError if the path cannot be accessed."""
    return files.exists(state_path(folder))


def read_state(folder: Path, agent: object = None, cure: str = checkpoint.RESTORE_OR_RESTART) -> dict[str, Any]:
    """Return the last checkpoint. Raises InputError if it has another schema, FileNotFoundError if absent.

    If the `agent` is given that it is for, the agent's part is compared with that agent's state.
    """
    path = state_path(folder)
    state = checkpoint.load(path)
    schema = STATE_SCHEMA if agent is None else STATE_SCHEMA | {"agent": checkpoint.schema_of(agent)}
    require(state, schema, path, f"is damaged, or of another version: {cure}")
    return state


def is_finished(folder: Path) -> bool:
    """Return whether the run reached its last step."""
    return (folder / DONE).exists()


def is_unfinished(folder: Path) -> bool:
    """Return whether the run has a checkpoint, but did not reach its last step. A run in results/ has neither."""
    return state_path(folder).parent.exists() and not is_finished(folder)


def crc_of(file: IO[bytes], size: int) -> int:
    """Return the CRC-32 of the next `size` bytes of a file, or of those that are left."""
    crc = 0
    while block := file.read(min(size, 2**20)):
        crc, size = zlib.crc32(block, crc), size - len(block)
    return crc


def checksum(path: Path) -> str:
    """Return the CRC-32 of a file in eight hexadecimal digits."""
    with files.open_regular(path, "rb") as file:
        return f"{crc_of(file, path.stat().st_size):08x}"


def mark_finished(folder: Path, step: int, checksums: dict[str, str]) -> None:
    """Write DONE, with the run's last step and the checksums of its logs, of config.json and of DONE itself."""
    facts = {"step": step, "checksums": checksums | {CONFIG: checksum(folder / CONFIG)}}
    with files.replacing(folder / DONE) as file:
        file.write(json.dumps(facts | {CHECKSUM: _checksum_of(facts)}).encode())


def finished_step(folder: Path, otherwise: int) -> int:
    """Return the last step of a finished run. The DONE of an older run may not state it."""
    with contextlib.suppress(ValueError, TypeError, LookupError):
        return int(json.loads(files.read_bytes(folder / DONE))["step"])
    return otherwise


def _checksum_of(facts: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(facts).encode()):08x}"


def require_unchanged(folder: Path) -> None:
    """Raise InputError if a file of a finished run is not what the run wrote.

    Files that are absent are not missed. The DONE of an older run may hold no checksums. An unfinished run is checked
    when it resumes.
    """
    path = folder / DONE
    if not files.exists(path):
        return
    try:
        facts = json.loads(files.read_bytes(path) or "{}")
        own = facts.pop(CHECKSUM, None)
        if not facts.keys() <= {"step", "checksums"} or own not in (None, _checksum_of(facts)):
            raise ValueError
        wanted = dict(facts.get("checksums", {}))
    except (ValueError, AttributeError, TypeError, RecursionError):
        raise InputError(f"{path} is damaged: {RESTORE_FINISHED}") from None
    for name, written in wanted.items():
        path = folder / name
        # A link to nothing is no absence.
        is_changed = checksum(path) != written if files.exists(path) else path.is_symlink()
        if is_changed:
            raise InputError(f"{path} has changed since the run ended: {RESTORE_FINISHED}")


def read_config(folder: Path, otherwise: str) -> dict[str, Any]:
    """Return config.json: "algo", "arguments" by name, and the facts of the first start.

    Raises InputError if it is missing, damaged or not a run's. The message is the path, then `otherwise`.
    """
    path = folder / CONFIG
    try:
        config: dict[str, Any] = json.loads(files.read_bytes(path))
        if unknown := config.keys() - CONFIG_KEYS:
            raise InputError(f"{path} is of another version, with {', '.join(sorted(unknown))}, or damaged")
        if config.pop(CHECKSUM, None) not in (None, _checksum_of(config)):  # older runs have none
            raise InputError(f"{path} has changed since the run wrote it: {checkpoint.RESTORE_OR_RESTART}")
    except (FileNotFoundError, ValueError, TypeError, AttributeError, RecursionError):
        raise InputError(f"{path} {otherwise}") from None
    require_trained(config, CONFIG_SCHEMA, path, otherwise)
    return config


def grown_arguments(folder: Path, made_by: dict[str, Any], args: RunArgs, config: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that extend the run in `folder`: those of `args.extendable` that are larger now.

    `made_by` is the run's config, and `config` the one of the same command now, with the name of its device. Raises
    InputError if they are of two algorithms, or if arguments that matter differ.
    """
    another = f"another --{'run-dir' if args.run_dir else 'run-name'}"
    if made_by["algo"] != config["algo"]:
        raise InputError(f"{folder} is a run of {made_by['algo']}, not of {config['algo']}: give {another}")
    # An argument that is newer than the run had the effect of its default.
    defaults = {field.name: field.default for field in dataclasses.fields(args)}
    before = json.loads(json.dumps(defaults, default=str)) | made_by["arguments"]
    now = config["arguments"] | {"device": config["device"]}
    if before["device"] == "auto":  # the device that "auto" meant there
        before["device"] = "cuda" if made_by.get("hardware", {}).get("gpu") else "cpu"
    grown = {k: now[k] for k in args.extendable if 0 < before.get(k, 0) < now.get(k, 0)}
    may_differ = (*MAY_DIFFER, *grown, *(("device",) if is_finished(folder) and not grown else ()))
    differ = [k for k in sorted(before.keys() | now.keys()) if before.get(k) != now.get(k) and k not in may_differ]
    if differ:
        listed = ", ".join(f"{k} ({before.get(k)} there, {now.get(k)} here)" for k in differ)
        cure = f"give the same arguments to resume it, or {another}"
        if "online_steps" in differ and before["online_steps"] == 0 and is_finished(folder):
            cure = f"to continue it online, give --init-from {folder} and {another}"
        raise InputError(f"{folder} was made with other arguments: {listed}\n{cure}")
    return grown


def require_trained(config: dict[str, Any], schema: Schema, path: Path, otherwise: str) -> None:
    """Raise InputError if what was read does not have this schema, or if its environment's arguments are not a dict."""
    require(config, schema, path, otherwise)
    if "env_kwargs" in config["arguments"]:
        json_object(f"{path}: arguments.env_kwargs", config["arguments"]["env_kwargs"])


def config_text(config: dict[str, Any]) -> str:
    """Return the text of config.json, which ends with its own checksum."""
    return json.dumps(config | {CHECKSUM: _checksum_of(config)}, indent=2)


def without_folders(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a run's arguments without the folders of this machine.

    A path is shortened to its last part, or to the last three if that part is a seed. The run's own folder is left out.
    """
    paths = {name: Path(str(arguments[name])) for name in ("dataset", "init_from") if arguments.get(name)}
    if "dataset" in paths and paths["dataset"].suffix not in DATASET_FILES:
        del paths["dataset"]  # an id
    short = {k: "/".join(path.parts[-3:]) if path.name.isdecimal() else path.name for k, path in paths.items()}
    return {name: value for name, value in arguments.items() if name != "run_dir"} | short


def asked_end(arguments: dict[str, Any]) -> int:
    """Return the step that a run was asked to reach. With several environments it may end a little later."""
    return int(arguments.get("total_steps", arguments.get("online_steps", 0)))


def task_name(arguments: dict[str, Any]) -> str:
    """Return a run's environment or dataset as the names of folders and policies have it."""
    dataset = Path(arguments.get("dataset") or "")
    task = (
        dataset.stem
        if dataset.suffix in DATASET_FILES
        else arguments.get("dataset") or arguments.get("env") or "unknown"
    )
    return re.sub("[^A-Za-z0-9_.-]+", "_", task)


def read_evaluations(path: Path) -> list[dict[str, str]]:
    """Return a row for each episode in evaluations.csv or evaluations.csv.gz.

    Raises ValueError if the file is damaged, FileNotFoundError if there is none.
    """
    data = files.read_bytes(path)
    try:
        data = gzip.decompress(data) if path.suffix == ".gz" else data
        return list(csv.DictReader(io.StringIO(data.decode(), newline="")))
    except (gzip.BadGzipFile, EOFError, zlib.error, csv.Error) as error:
        raise ValueError(str(error)) from None


def mean_by_step(rows: Iterable[dict[str, str]], of: Callable[[dict[str, str]], float]) -> Curve:
    """Return the mean of `of` over each evaluation's episodes; a row of evaluations.csv is an episode."""
    episodes: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        episodes[int(row["step"])].append(of(row))
    return {step: statistics.mean(values) for step, values in episodes.items()}


def read_last_evaluation(folder: Path) -> list[Episode]:
    """Return the episodes of a finished run's last evaluation. Raises InputError if a file of the run is damaged."""
    require_unchanged(folder)
    path, successes = folder / EVALUATIONS, {"": None, "0": False, "1": True}
    try:
        rows = read_evaluations(path)
        if any(tuple(row) != COLUMNS for row in rows) or not (rows or files.read_bytes(path)):
            raise ValueError
        last = [row for row in rows if row["step"] == rows[-1]["step"]]
        return [Episode(float(row["return"]), int(row["length"]), successes[row["success"]]) for row in last]
    except (ValueError, KeyError, TypeError, FileNotFoundError):
        raise InputError(f"{path} is missing or damaged: {RESTORE_FINISHED}") from None


def lock_of(folder: Path, timeout: float = 0) -> FileLock:
    """Return the lock of a run folder. Acquiring it raises filelock.Timeout after `timeout` seconds.

    The system releases the lock of a killed process. A process has one lock for each folder, so a failed run does not
    block the next one in the same process.
    """
    path = folder.resolve() / LOCK
    return FileLock(path, timeout, thread_local=False, is_singleton=True, fallback_to_soft=False)


class OwnFolder:
    """The lock that a run holds on its folder. It also shows whether the folder is still the run's."""

    def __init__(self, folder: Path) -> None:
        """Take the lock. Raises InputError if another process has it, or if it cannot be taken."""
        self._folder, self._lock = folder, lock_of(folder)
        self._lock.release(force=True)  # a failed run of this process may hold it, in a folder that is gone
        try:
            self._lock.acquire()
            self._locked = os.stat(self._lock.lock_file)
        except Timeout:
            raise InputError(f"another process is running in {folder}: wait for it or stop it") from None
        except OSError as error:
            reason = "it is a symbolic link" if (folder / LOCK).is_symlink() else error.strerror
            where = f"{folder / LOCK} cannot be locked ({reason})"
            raise InputError(f"{where}: correct that, or give another --run-dir") from None

    def require(self) -> None:
        """Raise RunError if the folder was moved, deleted or replaced since the lock was taken."""
        with contextlib.suppress(OSError):
            if os.path.samestat(self._locked, os.stat(self._folder / LOCK)):  # what is locked keeps its inode
                return
        keep_errors(None)  # what is there now is not this run's
        raise RunError(
            f"{self._folder} is no longer the folder that this run locked: it was moved, deleted or replaced\n"
            "put it back, then run the same command again"
        )

    def release(self) -> None:
        self._lock.release(force=True)


def run_config(folder: Path) -> dict[str, Any]:
    """Return the config.json of `--init-from`. Raises InputError if it is not a run folder with a checkpoint."""
    if not has_checkpoint(folder):
        raise InputError(f"{folder} is not a run folder with a checkpoint: give another --init-from")
    return read_config(folder, "is missing or damaged: give another --init-from")


def warn_of_init_from(folder: Path, was: dict[str, Any], arguments: dict[str, Any]) -> None:
    """Warn of a run of `--init-from` that is not finished, or that had another environment or gamma.

    `was`: its arguments. `arguments`: those of the run that starts from it.
    """
    if not is_finished(folder):
        log.warning(f"{folder} is not finished: this run starts from its last checkpoint")
    both = [name for name in ("env", "gamma") if was.get(name) and name in arguments]
    if others := [name for name in both if was[name] != arguments[name]]:
        there, here = (" ".join(f"--{name} {each[name]}" for name in others) for each in (was, arguments))
        log.warning(f"{folder} learned with {there}, and this run has {here}: its values may be of another scale")
