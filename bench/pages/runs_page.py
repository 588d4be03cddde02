"""Build a page of your own runs: learning curves and a table, from the run folders in one folder."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.report.figures import Line, colour_of, scores_figure
from bench.report.page import Image, ends, template
from bench.report.tables import Table, spread
from common.errors import InputError
from common.run_folder import CONFIG, EVALUATIONS, Curve, is_finished, mean_by_step, read_config, read_evaluations


@dataclass(frozen=True)
class OwnRun:
    """A run folder: its config.json, and a row for each evaluation episode so far."""

    folder: Path
    config: dict[str, Any]
    rows: list[dict[str, str]]

    @property
    def task(self) -> str:
        """The dataset, or the environment of a run without one."""
        arguments = self.config["arguments"]
        return Path(arguments.get("dataset") or arguments["env"]).name

    @property
    def returns(self) -> Curve:
        return mean_by_step(self.rows, lambda row: float(row["return"]))


def own_runs(folder: Path) -> list[OwnRun]:
    """Return the runs in the folders of `folder` that were evaluated. Raises InputError if there is none."""
    runs = [
        OwnRun(
            path.parent,
            read_config(path.parent, "does not hold a run's arguments: give a folder of run folders"),
            read_evaluations(path),
        )
        for path in sorted(folder.glob(f"*/{EVALUATIONS}"))
        if (path.parent / CONFIG).exists()
    ]
    runs = [run for run in runs if run.rows]
    if not runs:
        raise InputError(f"{folder} has no run with evaluations: give the folder that holds your run folders")
    return runs


def runs_page(folder: Path) -> str:
    """Return the whole page. Raises InputError if `folder` has no runs, or if one is damaged."""
    runs = own_runs(folder)
    return template("runs.html").render(folder=folder.name, curves=list(own_curves(runs)), runs=own_table(runs))


def own_curves(runs: list[OwnRun]) -> Iterator[Image]:
    """Yield a figure of returns for each task, with a line for each algorithm."""
    by_task: dict[str, dict[str, dict[str, Curve]]] = defaultdict(lambda: defaultdict(dict))
    for run in runs:
        by_task[run.task][run.config["algo"]][run.folder.name] = run.returns
    for task, found in sorted(by_task.items()):
        lines = {Line(algo.upper(), colour_of(algo)): seeds for algo, seeds in found.items()}
        text = "; ".join(f"{algo.upper()} ends at {ends(seeds)}" for algo, seeds in found.items())
        yield Image(scores_figure(task, "steps", lines, None, "return"), f"Return on {task}: {text}")


def own_table(runs: list[OwnRun]) -> Table:
    """Return a row for each run: folder, algorithm, task, seed, last step, and the returns of its last evaluation."""
    table = Table(("", "algorithm", "task", "seed", "step", "return: mean ± standard deviation (episodes)", "best", ""))
    for run in runs:
        last = max(run.returns)
        episodes = [float(row["return"]) for row in run.rows if int(row["step"]) == last]
        what = run.config["algo"].upper(), run.task, str(run.config["arguments"]["seed"]), f"{last:,}"
        state = "finished" if is_finished(run.folder) else "unfinished"
        table.rows.append([run.folder.name, *what, spread(episodes), f"{max(run.returns.values()):,.1f}", state])
    return table
