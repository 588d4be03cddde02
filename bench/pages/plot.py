"""Draw the learning curves of your own runs, as a picture and as a page.

    make plot RUNS="runs/sac* runs/td3*"
    make plot RUNS=runs/lr ARGS="--output lr.png"

A folder stands for all runs below it, for example those of a sweep.
"""

import common.start

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from bench.pages.runs_page import own_lines, own_runs, runs_page
from bench.report.figures import panels_figure, save
from common.command_line import command_line
from common.errors import InputError
from common.files import prepare_output
from common.messages import print_result


@dataclass(frozen=True)
class Args:
    """Runs and output."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Run folders, or folders with run folders at any depth below them."""
    output: Path = Path("runs/plot.png")
    """The picture to write (.png, .pdf, .svg). The page has the same name and ends in .html."""

    def __post_init__(self) -> None:
        if self.output.suffix not in (".png", ".pdf", ".svg"):
            raise InputError(f"--output is {self.output}: give a path that ends in .png, .pdf or .svg")


def main(args: Args) -> None:
    """Write the picture and the page.

    Raises InputError if there is nothing to draw, if a run is damaged, or if the picture cannot be written.
    """
    if not args.runs:
        raise InputError('no run is given: make plot RUNS="runs/sac* runs/td3*"')
    prepare_output(args.output, "--output")
    runs = own_runs(args.runs)
    lines = own_lines(runs)
    for task, of_task in lines.items():
        for line, seeds in of_task.items():
            ends = sorted(max(curve) for curve in seeds.values())
            span = f"{ends[0]:,}" if ends[0] == ends[-1] else f"{ends[0]:,} to {ends[-1]:,}"
            print_result(f"{task}: {line.name}, {len(seeds)} seed{'s' * (len(seeds) > 1)}, to step {span}")
    page = args.output.with_suffix(".html")
    save(panels_figure(lines), args.output)
    page.write_text(runs_page(runs, args.output.stem), "utf-8")
    print_result(f"written to {args.output} and {page}")


if __name__ == "__main__":
    command_line(main, Args)
