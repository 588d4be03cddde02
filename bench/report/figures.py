"""Figures of the report, as PNG or SVG: learning curves with intervals, performance profiles, interquartile means.

Colours are those of Okabe and Ito, which colour-blind readers can distinguish. Line styles differ too.
"""

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.report.curves import Curve, aligned, number_of
from bench.report.intervals import MIN_SEEDS_FOR_CI, Estimate, Values, estimate, interquartile_mean
from bench.sweep.suite import labels

mpl.use("Agg")
mpl.rcParams["svg.hashsalt"] = "onramp"  # the same figure has the same bytes
mpl.rcParams["svg.fonttype"] = "none"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
GREY = "#666666"
SIZE = (4.3, 3.4)  # inches; its letters are still 10 pixels high on a phone 360 pixels wide


class Line(NamedTuple):
    """Name, colour and line style of one algorithm, ours or published."""

    name: str
    colour: str
    style: str = "-"

    @property
    def look(self) -> dict[str, Any]:
        """Return colour and line style as Matplotlib's keyword arguments."""
        return {"color": self.colour, "linestyle": self.style}


def draw_curves(axes: Axes, line: Line, seeds: dict[str, Curve], last: int | None = None) -> None:
    """Draw the interquartile mean of four or more seeds and its interval, or a line for each of fewer.

    Curves end at step `last`.
    """
    steps, values = aligned(seeds, last)
    if len(values) >= MIN_SEEDS_FOR_CI:
        found = estimate(interquartile_mean, [values])
        axes.plot(steps, found.value, linewidth=1.6, label=f"{line.name}, {len(values)} seeds", **line.look)
        draw_interval(axes, line, steps, found)
        return
    how = f"seed{'s' * (len(seeds) > 1)} {', '.join(sorted(seeds))}"
    if number_of(seeds) > len(seeds):
        how = f"mean of {number_of(seeds)}"
    for i, curve in enumerate(values):
        axes.plot(steps, curve, linewidth=1.2, label="" if i else f"{line.name}, {how}", **line.look)


def draw_interval(axes: Axes, line: Line, x: Sequence[float] | Values, found: Estimate, **how: Any) -> None:
    """Draw the band between the ends of an interval, if there is one."""
    if found.low is not None and found.high is not None:
        axes.fill_between(x, found.low, found.high, color=line.colour, alpha=0.2, linewidth=0, **how)


def learning_figure(
    algo: str, env: str, ours: dict[str, Curve], published: dict[str, Curve], size: tuple[float, float] = SIZE
) -> Figure:
    """Return the figure of our and the published returns over environment steps, up to our last step."""
    names = labels("online-1m")
    figure, axes = _figure(f"{algo.upper()}, {env}", "environment steps", "return", size)
    if published:
        draw_curves(axes, Line("published", GREY, "--"), published, max(map(max, ours.values())))
    draw_curves(axes, Line("onramp", COLOURS[list(names).index(algo) if algo in names else 0]), ours)
    return _with_legend(figure)


def scores_figure(title: str, steps: str, lines: dict[Line, dict[str, Curve]], behaviour: float | None) -> Figure:
    """Return the figure of several algorithms' scores over steps on one dataset, with the score of its own episodes."""
    figure, axes = _figure(title, steps, "score", SIZE)
    if behaviour is not None:
        axes.axhline(behaviour, color=GREY, linestyle=":", linewidth=1.2, label="the dataset's episodes")
    for line, seeds in lines.items():
        draw_curves(axes, line, seeds)
    if any(step < 0 for seeds in lines.values() for curve in seeds.values() for step in curve):
        axes.axvline(0, color="#bbbbbb", linewidth=1, zorder=0)
    return _with_legend(figure)


def profile_figure(title: str, label: str, thresholds: Values, profiles: dict[Line, Estimate]) -> Figure:
    """Return the figure of the share of runs above each score."""
    figure, axes = _figure(title, label, "share of runs above it", SIZE)
    for line, found in profiles.items():
        axes.step(thresholds, found.value, where="post", linewidth=1.6, label=line.name, **line.look)
        draw_interval(axes, line, thresholds, found, step="post")
    axes.set_ylim(-0.02, 1.02)
    return _with_legend(figure)


def points_figure(title: str, label: str, points: Sequence[tuple[Line, Estimate]]) -> Figure:
    """Return the figure of one statistic of several algorithms, each a point with a bar for its interval."""
    figure, axes = _figure(title, label, "", (SIZE[0], 1.3 + 0.3 * len(points)))
    for i, (line, found) in enumerate(points):
        if found.low is not None and found.high is not None:
            axes.plot([found.low[0], found.high[0]], [i, i], color=line.colour, linewidth=7, alpha=0.35)
        axes.plot([found.value[0]], [i], color=line.colour, marker="o", markersize=6)
    axes.set_yticks(range(len(points)), [line.name for line, _ in points])
    axes.set_ylim(len(points) - 0.5, -0.5)
    ends = [float(end[0]) for _, found in points for end in found if end is not None]
    axes.set_xlim(min(0.0, *ends), 1.08 * max(ends))
    return figure


def png(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=110, metadata={"Software": None})


def data_uri(figure: Figure) -> str:
    """Return the figure as the data URI of an SVG image, which a page can contain."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = text.getvalue()
    return "data:image/svg+xml;base64," + base64.b64encode(svg[svg.index("<svg") :].encode()).decode()


def _figure(title: str, x: str, y: str, size: tuple[float, float]) -> tuple[Figure, Axes]:
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    axes.set(xlabel=x, ylabel=y)
    axes.set_title(title, fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#eeeeee")
    axes.xaxis.set_major_formatter(mpl.ticker.FuncFormatter(_short))
    axes.xaxis.set_major_locator(mpl.ticker.MaxNLocator(6))
    return figure, axes


def _short(number: float, _: int) -> str:
    return f"{number / 1e6:g}M" if abs(number) >= 1e6 else f"{number / 1e3:g}k" if abs(number) >= 1e3 else f"{number:g}"


def _with_legend(figure: Figure) -> Figure:
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9, handlelength=1.6, columnspacing=1.2)
    return figure
