"""Decide with AdaStop's sequential test whether A beats B, and how many more seeds that needs.

    python bench/report/compare.py results --names sac td3 --tasks Hopper-v4     # tests the existing runs
    make compare SUITE=online-1m ARGS="--names sac td3 --tasks Hopper-v4"     # runs more seeds until it is decided

Scores are read from <folder>/<name>/<task>/<seed>/evaluations.csv or .csv.gz, or else from the run folders in <folder>.
Seeds 1 to N are the first interim's, N + 1 to 2N the second's, and so on, so no seed is chosen by its score.
docs/compare.md explains what is guaranteed.
"""

import common.start

import dataclasses
import difflib
import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tyro

from bench.pages.runs_page import differing_flags, read_runs
from bench.report.adastop import Design, Found, Pair, Scores, decide
from bench.report.archive_run import KEPT_EVALUATIONS
from bench.report.curves import at
from bench.sweep import sweep
from bench.sweep.suite import jobs, read_suite
from common import run_folder
from common.arguments import at_least
from common.command_line import command_line
from common.errors import InputError, RunError
from common.messages import print_result
from common.run_folder import Curve, mean_by_step

Run = tuple[str, str, int]  # name, task, seed
EVALUATIONS = run_folder.EVALUATIONS, KEPT_EVALUATIONS  # of two that are there, the first


@dataclass(frozen=True)
class Args:
    """Runs to compare, and the design of the test."""

    folder: Annotated[Path, tyro.conf.Positional] = Path("runs")
    """Folder that holds <name>/<task>/<seed>/, or run folders, or with --suite <suite>/<name>/<task>/<seed>/."""
    suite: str | None = None
    """Suite from which to run the seeds that are needed. Without it, they are only printed."""
    names: tuple[str, ...] = ()
    """Two or more names to compare. By default, all names in the folder or the suite."""
    tasks: tuple[str, ...] = ()
    """Tasks to compare on, all in one comparison. By default, those that all names have."""
    against: str | None = None
    """Compare the other names with this name only, not with each other."""
    column: Literal["return", "normalized_score", "success"] = "return"
    """Column of evaluations.csv to compare."""
    step: int | None = None
    """Step of the scores, interpolated linearly. By default, the end of the longest runs."""
    last: int = 1
    """Number of evaluations to average, up to that step."""
    seeds: int = 5
    """N, new seeds of each name at every interim."""
    interims: int = 5
    """K, maximum number of interims: the test ends with K·N seeds."""
    alpha: float = 0.05
    """Largest probability of calling any two equal names different."""

    @property
    def design(self) -> Design:
        return Design(self.seeds, self.interims, self.alpha)


@dataclass(frozen=True)
class Comparison:
    """The decisions so far, and the scores that they are based on."""

    names: tuple[str, ...]
    tasks: tuple[str, ...]
    steps: dict[str, int | None]
    """The step of each task's scores, or None if there are none."""
    scores: dict[Run, float]
    found: Found
    design: Design


def compare(args: Args) -> Comparison:
    """Read the existing scores and apply the test. Raise InputError if names, tasks, design or scores do not fit."""
    there = [] if args.names and args.tasks else runs_in(args.folder)
    names, tasks = chosen(args, str(args.folder), there)
    pairs = [pair for pair in itertools.combinations(names, 2) if args.against in (None, *pair)]
    files = evaluations_in(args.folder)
    scores: dict[Run, float] = {}
    steps: dict[str, int | None] = {}
    for task in tasks:
        read, steps[task] = read_scores(args, files, names, task)
        scores.update(read)
    blocks = {name: _blocks(scores, name, tasks, args.design) for name in names}
    return Comparison(names, tasks, steps, scores, decide(blocks, pairs, args.design), args.design)


def runs_in(folder: Path) -> list[tuple[str, str]]:
    """Return the (name, task) of every run in a folder, sorted. Raise InputError if it holds none or is absent."""
    found = {(name, task) for name, task, _ in evaluations_in(folder)}
    if not found:
        raise InputError(
            f"{folder} holds no run, neither <name>/<task>/<seed>/ nor a run folder: give the folder of a sweep's "
            "suite, or the --suite to run"
        )
    return sorted(found)


def evaluations_in(folder: Path) -> dict[Run, Path]:
    """Return the file of evaluations of each run in a folder. A copy under another name is not one.

    Runs are those of a sweep, <name>/<task>/<seed>. If there are none, they are the run folders that the folder itself
    holds, whose name is the algorithm and the flags in which they differ. Raise InputError if two of these are alike.
    """
    swept = {path.parent: path for name in reversed(EVALUATIONS) for path in folder.glob(f"*/*/*/{name}")}
    if swept:
        seeds = {run: path for run, path in swept.items() if run.name.isdecimal()}
        return {(run.parts[-3], run.parts[-2], int(run.name)): path for run, path in seeds.items()}
    single = {path.parent: path for name in reversed(EVALUATIONS) for path in folder.glob(f"*/{name}")}
    runs = read_runs(sorted(run for run in single if (run / run_folder.CONFIG).exists()))
    flags, found = differing_flags(runs), dict[Run, Path]()
    for run in runs:
        name, seed = ", ".join(filter(None, (run.algo, flags[run.folder]))), run.config["arguments"].get("seed", 0)
        if other := found.get((name, run.task, seed)):
            raise InputError(f"{other.parent} and {run.folder} have the same flags and seed: move one of them away")
        found[name, run.task, seed] = single[run.folder]
    return found


def chosen(args: Args, where: str, there: Sequence[tuple[str, str]]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names and the tasks to compare: those given, else those that `where` has.

    `there` holds the (name, task) of each of its runs. Raise InputError if they are no comparison.
    """
    names = args.names or tuple(dict.fromkeys(name for name, _ in there))
    if len(set(names)) < 2 or len(set(names)) < len(names):
        found = ("you gave " if args.names else f"{where} has only ") + ", ".join(names)
        raise InputError(f"a comparison needs two or more different --names: {found}")
    if args.against not in (None, *names):
        raise InputError(f"--against is {args.against}: give one of {', '.join(names)}")
    tasks = args.tasks or tuple(
        task for task in dict.fromkeys(task for _, task in there) if {(name, task) for name in names} <= {*there}
    )
    if not tasks:
        raise InputError(f"{where} has no task that {', '.join(names)} all have: give other --names, or --tasks")
    return names, tasks


def read_scores(
    args: Args, files: dict[Run, Path], names: Collection[str], task: str
) -> tuple[dict[Run, float], int | None]:
    """Return the score of each finished run of these names on a task, and the step of the scores.

    Runs that have not reached that step, or that have a checkpoint and no DONE, are left out. Raise InputError if those
    are all runs of a name, and no suite is there to make others.
    """
    curves, ends = {}, []
    for run, path in files.items():
        if run[0] in names and run[1] == task and not run_folder.is_unfinished(path.parent):
            run_folder.require_unchanged(path.parent)
            curve = curves[run] = read_curve(path, args.column)
            ends.append(_end(path.parent, max(curve)))
    if not curves:
        return {}, args.step
    # Of equally long runs, those with several environments may end a little later.
    step = min(max(curve) for curve in curves.values() if max(curve) >= max(ends)) if args.step is None else args.step
    scores = {}
    for run, curve in curves.items():
        evaluations = [curve[s] for s in sorted(curve) if s <= step][-args.last :]
        if (score := at(curve, step)) is not None and len(evaluations) == args.last:
            scores[run] = score if args.last == 1 else float(np.mean(evaluations))
    for name in names:
        own = max((max(curve) for run, curve in curves.items() if run[0] == name), default=step)
        if own < step and args.suite is None:
            raise InputError(f"no run of {name} on {task} reaches step {step:,}: give --step {own}, or train longer")
    return scores, step


def _end(folder: Path, last: int) -> int:
    """Return the step that a run reached, or was asked to reach if that is less."""
    if not (folder / run_folder.CONFIG).exists():
        return last
    return min(last, run_folder.asked_end(run_folder.read_config(folder, "is damaged")["arguments"]))


def read_curve(path: Path, column: str) -> Curve:
    """Return the mean over each evaluation's episodes by step. Raise InputError if the file lacks it."""
    try:
        curve = mean_by_step(run_folder.read_evaluations(path), lambda row: float(row[column]))
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path} does not give {column} as numbers by step ({error}): try another --column") from None
    if not curve or not np.isfinite(list(curve.values())).all():
        raise InputError(
            f"{path} holds no evaluation, or one that is not finite: move that run's folder away and train it again"
        )
    return curve


def _blocks(scores: dict[Run, float], name: str, tasks: Sequence[str], design: Design) -> Scores:
    """Return the name's scores [tasks, seeds] of seeds 1, 2, ... of the interims that are complete on all tasks."""
    there = itertools.takewhile(lambda seed: all((name, t, seed) in scores for t in tasks), itertools.count(1))
    whole = len(list(there)) // design.seeds * design.seeds
    return np.array([[scores[name, task, seed] for seed in range(1, whole + 1)] for task in tasks], float)


def next_seeds(comparison: Comparison) -> list[Run]:
    """Return the missing runs of the next interim, ordered by seed.

    There are none after the last interim, or if all is decided.
    """
    found, design = comparison.found, comparison.design
    if found.interims == design.interims:
        return []
    names = [name for name in comparison.names if any(name in pair for pair in found.undecided)]
    seeds = range(1, (found.interims + 1) * design.seeds + 1)
    runs = [(name, task, seed) for seed in seeds for name in names for task in comparison.tasks]
    return [run for run in runs if run not in comparison.scores]


def until_decided(args: Args, run: Callable[[list[Run]], None]) -> Comparison:
    """Call `run` with the runs that are needed, until all is decided or the limit is reached.

    Raise RunError if `run` returned and some of its runs still have no score.
    """
    asked: list[Run] = []
    while True:
        comparison = compare(args)
        print_result(report(comparison).rstrip())
        needed = next_seeds(comparison)
        if lacking := set(needed) & set(asked):
            listed = ", ".join(f"{name}/{task}/{seed}" for name, task, seed in sorted(lacking))
            raise RunError(f"{listed} ended before the step that is compared: give --step, or the same steps to all")
        if not needed:
            return comparison
        run(needed)
        asked = needed


def report(comparison: Comparison) -> str:
    """Return a line for each pair, and one for each name and task whose seeds are still needed."""
    found, design = comparison.found, comparison.design
    at = ", ".join(task if step is None else f"{task} at step {step:,}" for task, step in comparison.steps.items())
    lines = [f"{at}: {found.interims} of {design.interims} interims of {design.seeds} seeds"]
    for pair in itertools.combinations(comparison.names, 2):
        if pair in found.better or pair in found.undecided:
            lines.append(f"  {pair[0]} against {pair[1]}: {_decision(pair, comparison)}")
    needed = next_seeds(comparison)
    for name, task in dict.fromkeys((name, task) for name, task, _ in needed):
        seeds = " ".join(str(seed) for n, t, seed in needed if (n, t) == (name, task))
        lines.append(f"  next: {name} on {task}, seeds {seeds}")
    return "\n".join(lines) + "\n"


def _decision(pair: Pair, comparison: Comparison) -> str:
    found, design = comparison.found, comparison.design
    if pair in found.better:
        decision = "better" if found.better[pair] == pair[0] else "worse"
    elif found.interims == design.interims:
        decision = f"equal within the limit: no difference shown by {design.interims * design.seeds} seeds"
    else:
        decision = "undecided"
    means = []
    for task in comparison.tasks:  # a mean over tasks would depend on how many runs each has
        texts = []
        for name in pair:
            values = [score for (n, t, _), score in comparison.scores.items() if (n, t) == (name, task)]
            texts.append(f"{np.mean(values):,.1f} ({len(values)} runs)" if values else "not run")
        means.append(f"mean{f' on {task}' if len(comparison.tasks) > 1 else ''} {' and '.join(texts)}")
    return "; ".join([decision, *means])


def of_suite(args: Args, name: str) -> tuple[Args, Callable[[list[Run]], None]]:
    """Return the arguments completed by a suite, and the function that makes its runs.

    Raise InputError if the design is wrong, or if the suite does not have the names and tasks.
    """
    design = args.design
    suite, entries = read_suite(name)
    seeds = tuple(range(1, design.seeds * design.interims + 1))
    found = jobs(suite, [dataclasses.replace(entry, seeds=seeds) for entry in entries], args.folder)
    by_run = {(job.folder.parts[-3], job.folder.parts[-2], job.seed): job for job in found}
    there = list(dict.fromkeys((name, task) for name, task, _ in by_run))
    refuse_unknown(args, f"suite {suite}", there, "to run a new one, add it to that suite")
    names, tasks = chosen(args, f"suite {suite}", there)
    if lacking := [f"{name} on {task}" for name in names for task in tasks if (name, task, 1) not in by_run]:
        raise InputError(f"suite {suite} does not run {', '.join(lacking)}: give other --names or --tasks")

    def run(needed: list[Run]) -> None:
        with sweep.alone_in(args.folder / suite):
            of_now = sweep.Sweep([by_run[one] for one in needed if not sweep.is_done(by_run[one])])
            sweep.execute(of_now, sweep.Args(name, args.folder))
        if of_now.failed:
            raise RunError(
                f"{len(of_now.failed)} runs failed: run the same command to start them again\n{of_now.table()}"
            )

    return dataclasses.replace(args, folder=args.folder / suite, names=names, tasks=tasks), run


def refuse_unknown(args: Args, where: str, there: Sequence[tuple[str, str]], cure: str) -> None:
    """Raise InputError for the first of --names and --tasks that no run in `there` has, which may be a typing error."""
    for flag, given, column in (("--names", args.names, 0), ("--tasks", args.tasks, 1)):
        known = sorted({pair[column] for pair in there})
        for each in given:
            if each not in known:
                close = difflib.get_close_matches(each, known, n=3)
                hint = f"did you mean {', '.join(close)}?" if close else f"there are {', '.join(known)}"
                raise InputError(f"{where} has no run of {each}, which {flag} names: {hint}\n{cure}")


def main(args: Args) -> None:
    at_least(1, last=args.last)
    if args.suite is None:
        new = "to run a new one, add it to a suite and give that --suite"
        refuse_unknown(args, str(args.folder), runs_in(args.folder), new)
        print_result(report(compare(args)).rstrip())
    else:
        until_decided(*of_suite(args, args.suite))


if __name__ == "__main__":
    command_line(main, Args)
