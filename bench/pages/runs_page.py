"""Build a page of your own runs: learning curves and a table, from the run folders in one folder."""

import dataclasses
import importlib
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.report.archive_run import KEPT_EVALUATIONS
from bench.report.figures import STYLES, Line, colours_of, scores_figure
from bench.report.page import Image, ends, template
from bench.report.tables import Table, spread
from common import run_folder
from common.arguments import MAY_DIFFER, RunArgs
from common.errors import InputError
from common.run_folder import (
    CONFIG,
    DATASET_FILES,
    EVALUATIONS,
    Curve,
    is_finished,
    mean_by_step,
    read_config,
    read_evaluations,
)

LEFT_OUT = {"seed", "device", *MAY_DIFFER}


@dataclass(frozen=True)
class OwnRun:
    """A run folder: its config.json, and a row for each evaluation episode so far."""

    folder: Path
    config: dict[str, Any]
    rows: list[dict[str, str]]

    @property
    def algo(self) -> str:
        return str(self.config["algo"])

    @property
    def flags(self) -> dict[str, Any]:
        """Its arguments, without the seed and what does not change what a run computes."""
        arguments = self.config["arguments"]
        kind = arguments_of(self.algo)
        extendable = kind.extendable if kind else ()  # the schedules of others depend on their length
        return {name: value for name, value in arguments.items() if name not in (*LEFT_OUT, *extendable)}

    @property
    def task(self) -> str:
        """The dataset's id or the name of its file, or the environment of a run without a dataset."""
        arguments = self.config["arguments"]
        task = Path(arguments.get("dataset") or arguments.get("env") or "unknown")
        return task.name if task.suffix in DATASET_FILES else str(task)

    @property
    def returns(self) -> Curve:
        return mean_by_step(self.rows, lambda row: float(row["return"]))


def own_runs(given: Iterable[Path]) -> list[OwnRun]:
    """Return every run at or below the paths that was evaluated, once.

    Raises InputError if one of the paths has none, or if a run is damaged.
    """
    folders: dict[Path, None] = {}
    for path in given:
        found = {each.parent for name in (EVALUATIONS, KEPT_EVALUATIONS) for each in path.rglob(name)}
        below = sorted(folder for folder in found if (folder / CONFIG).exists())
        if not below:
            why = "has no run with evaluations" if path.exists() else "matches no run"
            raise InputError(f"{path} {why}: give run folders, or a folder that holds them")
        folders |= dict.fromkeys(below)
    runs = read_runs(list(folders))
    if not runs:
        raise InputError(f"{next(iter(folders))} has no evaluation yet: wait for the first, or give other runs")
    return runs


def read_runs(folders: list[Path]) -> list[OwnRun]:
    """Return the runs of these folders that were evaluated. Raises InputError if one is damaged."""
    runs = []
    for folder in folders:
        run_folder.require_unchanged(folder)
        path = folder / EVALUATIONS
        config = read_config(folder, "does not hold a run's arguments: give a folder of run folders")
        try:
            run = OwnRun(folder, config, read_evaluations(path if path.exists() else folder / KEPT_EVALUATIONS))
            if run.rows and run.returns:
                runs.append(run)
        except (ValueError, KeyError, TypeError):  # the last row may be torn, which the run removes when it resumes
            raise InputError(f"{path} is damaged: resume the run, or leave its folder out") from None
    return runs


def runs_page(runs: list[OwnRun], title: str) -> str:
    """Return the whole page."""
    return template("runs.html").render(folder=title, curves=list(own_curves(runs)), runs=own_table(runs))


def arguments_of(algo: str) -> type[RunArgs] | None:
    """Return the class of an algorithm's arguments, or None if the algorithm is not here."""
    try:
        found: type[RunArgs] = importlib.import_module(f"algos.{algo}").Args
    except (ImportError, AttributeError):
        return None
    return found


def defaults_of(algo: str) -> dict[str, Any]:
    """Return the defaults of an algorithm's flags as config.json holds them, or none if it is not here."""
    kind = arguments_of(algo)
    defaults = {field.name: field.default for field in dataclasses.fields(kind)} if kind else {}
    found: dict[str, Any] = json.loads(json.dumps(defaults, default=str))
    return found


def differing_flags(runs: list[OwnRun]) -> dict[Path, str]:
    """Return for each run's folder the flags in which runs of its algorithm on its task differ, such as "gamma 0.9".

    A flag that an older run does not have counts as its default.
    """
    flags: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    known = set().union(*(run.flags for run in runs))
    flags_of = {run.folder: {k: v for k, v in defaults_of(run.algo).items() if k in known} | run.flags for run in runs}
    for run in runs:
        flags[run.task, run.algo].append(flags_of[run.folder])
    named: dict[Path, str] = {}
    for run in runs:
        alike = flags[run.task, run.algo]
        own = flags_of[run.folder]
        names = [name for name in sorted(own) if all(name in o for o in alike)]
        names = [name for name in names if any(o[name] != own[name] for o in alike)]
        named[run.folder] = ", ".join(f"{name.replace('_', '-')} {own[name]}" for name in names)
    return named


def own_lines(runs: list[OwnRun]) -> dict[str, dict[Line, dict[str, Curve]]]:
    """Return for each task the curves of each line by seed: one line for each algorithm and set of flags.

    An algorithm has one colour. Its line style and label distinguish flags, if runs on the same task differ in them.
    """
    named = differing_flags(runs)
    colours = colours_of({run.algo for run in runs})
    variants = {algo: sorted({named[run.folder] for run in runs if run.algo == algo}) for algo in colours}
    lines: dict[str, dict[Line, dict[str, Curve]]] = {}
    for run in sorted(runs, key=lambda run: (run.task, run.algo, named[run.folder])):
        style = STYLES[variants[run.algo].index(named[run.folder]) % len(STYLES)]
        label = ", ".join(filter(None, (run.algo.upper(), named[run.folder])))
        seeds = lines.setdefault(run.task, {}).setdefault(Line(label, colours[run.algo], style), {})
        seed = str(run.config["arguments"].get("seed"))
        seeds[f"{seed} ({run.folder})" if seed in seeds else seed] = run.returns
    return lines


def own_curves(runs: list[OwnRun]) -> Iterator[Image]:
    """Yield a figure of returns for each task."""
    for task, lines in own_lines(runs).items():
        text = "; ".join(f"{line.name} ends at {ends(seeds)}" for line, seeds in lines.items())
        yield Image(scores_figure(task, "steps", lines, None, "return"), f"Return on {task}: {text}")


def own_table(runs: list[OwnRun]) -> Table:
    """Return a row for each run: folder, algorithm, task, seed, last step, and the returns of its last evaluation.

    A folder is relative to the deepest one that all runs share.
    """
    table = Table(("", "algorithm", "task", "seed", "step", "return: mean ± standard deviation (episodes)", "best", ""))
    above = os.path.commonpath([run.folder.resolve().parent for run in runs])
    for run in runs:
        last = max(run.returns)
        episodes = [float(row["return"]) for row in run.rows if int(row["step"]) == last]
        what = run.algo.upper(), run.task, str(run.config["arguments"].get("seed")), f"{last:,}"
        state = "finished" if is_finished(run.folder) else "unfinished"
        name, best = os.path.relpath(run.folder.resolve(), above), f"{max(run.returns.values()):,.1f}"
        table.rows.append([name, *what, spread(episodes), best, state])
    return table
