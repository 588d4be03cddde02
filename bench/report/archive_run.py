"""Keep the files of runs that the report needs, and read them.

    python bench/report/archive_run.py runs/iql__hopper-medium__1 results/offline/iql/hopper-medium/1

The files are config.json, without the folders of this machine, and evaluations.csv.gz, with every evaluation episode.
To convert a folder of results that holds evaluations.csv itself, give it twice.
"""

import common.start

import csv
import gzip
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import tyro

from common.command_line import command_line
from common.errors import InputError
from common.files import replacing
from common.run_folder import (
    CONFIG,
    DONE,
    EVALUATIONS,
    METRICS,
    RESTORE_FINISHED,
    is_finished,
    is_unfinished,
    read_config,
    read_evaluations,
    require_unchanged,
    state_path,
    without_folders,
)

KEPT_EVALUATIONS = f"{EVALUATIONS}.gz"


class Kept(NamedTuple):
    """A run in results/: algorithm, task, seed, its config.json, and a row for each evaluation episode."""

    algo: str
    task: str
    seed: str
    config: dict[str, Any]
    rows: list[dict[str, str]]


def keep(run: Path, kept: Path) -> None:
    """Write the files that the report needs of `run` to `kept`.

    The arguments lose the folders of this machine. Of metrics.csv only the run's time stays. If both folders are the
    same, evaluations.csv is deleted after it is compressed. Raise InputError if the run has not reached its last step,
    if config.json is not a run's, if evaluations.csv has an incomplete row, or if a file has changed since the end.
    """
    require_unchanged(run)
    evaluations = (run / EVALUATIONS).read_bytes()
    if not evaluations.endswith(b"\n") or len({row.count(b",") for row in evaluations.splitlines()}) > 1:
        cure = "resume the run, which removes it, or restore the file from a copy"
        raise InputError(f"{run / EVALUATIONS} has an incomplete row: {cure}")
    config = read_config(run, "does not hold a run's arguments: give a run folder")
    config["arguments"] = without_folders(config["arguments"])
    if (run / METRICS).exists():
        config["time"] = time_taken(run / METRICS, -config["arguments"].get("offline_steps", 0))
    in_place = run.resolve() == kept.resolve()
    if in_place and state_path(run).parent.exists():
        raise InputError(f"{run} still has its checkpoint: keep the run in another folder, or delete checkpoint/")
    was_kept = in_place and not (run / METRICS).exists()  # without DONE, by an earlier version
    if is_unfinished(run) or not (was_kept or is_finished(run)):
        raise InputError(f"{run} has not ended: resume it first")  # it would shorten every comparison
    kept.mkdir(parents=True, exist_ok=True)
    for name, data in (
        (CONFIG, (json.dumps(config, indent=2) + "\n").encode()),
        (KEPT_EVALUATIONS, gzip.compress(evaluations, mtime=0)),
    ):
        with replacing(kept / name) as file:
            file.write(data)
    if in_place:
        (run / EVALUATIONS).unlink()
        (run / DONE).unlink(missing_ok=True)  # it has checksums of the files as they were


def time_taken(metrics: Path, first_step: int) -> dict[str, float]:
    """Return wall-clock seconds, evaluations included, and the median of the steps per second.

    Both come from the intervals of the log. Steps that a killed run repeated are not in the log, so they do not count.
    Raise InputError if the log is damaged.
    """
    seconds, rates, before = 0.0, [], first_step
    try:
        with metrics.open(newline="") as file:
            for row in csv.DictReader(file):
                if row["name"] == "time/steps_per_second":
                    step, rate = int(row["step"]), float(row["value"])
                    seconds, before = seconds + (step - before) / rate, step
                    rates.append(rate)
    except (KeyError, ValueError, TypeError, ZeroDivisionError):
        raise InputError(f"{metrics} is damaged: {RESTORE_FINISHED}") from None
    return {"seconds": round(seconds, 1), "steps_per_second": round(statistics.median(rates), 1)} if rates else {}


def kept_runs(folder: Path) -> Iterator[Kept]:
    """Yield all runs in folder/<algorithm>/<environment or dataset>/<seed>/, in order.

    Raise InputError for a run that `keep` did not write, so that none is left out silently.
    """
    for config in sorted(folder.glob(f"*/*/*/{CONFIG}")):
        where, (algo, task, seed) = config.parent, config.parts[-4:-1]
        if not (where / KEPT_EVALUATIONS).exists():
            raise InputError(
                f"{where} has no {KEPT_EVALUATIONS}: run python bench/report/archive_run.py {where} {where}"
            )
        try:  # gzip compares a checksum of its own
            rows = read_evaluations(where / KEPT_EVALUATIONS)
        except ValueError as error:
            raise InputError(f"{where / KEPT_EVALUATIONS} is damaged ({error}): restore it from a copy") from None
        yield Kept(algo, task, seed, read_config(where, "is damaged: restore it from a copy"), rows)


@dataclass(frozen=True)
class Args:
    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run folder, which holds config.json and evaluations.csv."""
    kept: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="KEPT")]
    """Folder to keep it in: results/<...>/<algorithm>/<environment or dataset>/<seed>."""


def main(args: Args) -> None:
    """Keep a run. Raise InputError if a file that this needs is missing."""
    for name in (CONFIG, EVALUATIONS):
        if not (args.run / name).is_file():
            raise InputError(f"{args.run} has no {name}: give a run folder, then the folder to keep it in")
    keep(args.run, args.kept)


if __name__ == "__main__":
    command_line(main, Args)
