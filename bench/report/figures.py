"""Figures of the report, as PNG or SVG: learning curves with intervals, performance profiles, interquartile means.

Each algorithm has one colour everywhere. Most are those of Okabe and Ito, which colour-blind readers can distinguish.
Line styles distinguish variants of one algorithm.
"""

import base64
import io
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from bench.report.curves import Curves, aligned, number_of
from bench.report.intervals import MIN_SEEDS_FOR_CI, Estimate, Values, estimate, interquartile_mean
from bench.report.tables import display_name
from bench.sweep.suite import labels
from common.run_folder import Curve

mpl.use("Agg")
mpl.rcParams["svg.hashsalt"] = "onramp"  # the same figure has the same bytes
mpl.rcParams["svg.fonttype"] = "none"
COLOURS = {
    "sac": "#0072B2",
    "td3": "#D55E00",
    "ppo": "#009E73",
    "iql": "#CC79A7",
    "cql": "#E69F00",
    "td3_bc": "#56B4E9",
    "bc": "#8C564B",
    "wsrl": "#332288",
    "rlpd": "#AA4499",
    "expo": "#117733",
    "fql": "#882255",
    "ifql": "#44AA99",
    "rebrac": "#999933",
}
OTHERS = ("#661100", "#6699CC", "#DDCC77", "#CC6677", "#225555", "#AA3377")  # of algorithms that have no colour yet
STYLES: tuple[Any, ...] = ("-", "--", ":", "-.", (0, (6, 1)), (0, (1, 3)), (0, (4, 1, 1, 1)), (0, (8, 3)))
GREY = "#666666"
SIZE = (4.3, 3.4)  # inches; its letters are still 10 pixels high on a phone 360 pixels wide


def colour_of(algo: str) -> str:
    """Return the colour of an algorithm, or of a variant such as cql-mix or d3rlpy-cql."""
    parts = algo.split("-")
    known = [part for part in parts if part in COLOURS]
    return COLOURS[known[0]] if known else OTHERS[zlib.crc32(parts[0].encode()) % len(OTHERS)]


def styled(names: dict[str, str]) -> dict[str, "Line"]:
    """Return a line for each algorithm of `names`, its label. Variants of one algorithm have different styles."""
    lines: dict[str, Line] = {}
    for algo, label in names.items():
        same = sum(line.colour == colour_of(algo) for line in lines.values())
        lines[algo] = Line(label, colour_of(algo), STYLES[same % len(STYLES)])
    return lines


def colours_of(algos: Iterable[str]) -> dict[str, str]:
    """Return the colour of each algorithm. Two that have no colour of their own get different ones, if there are."""
    found: dict[str, str] = {}
    for algo in sorted(algos, key=lambda algo: (algo not in COLOURS, algo)):
        free = [colour for colour in (colour_of(algo), *OTHERS) if colour not in found.values()]
        found[algo] = free[0] if free else colour_of(algo)
    return found


class Line(NamedTuple):
    """Name, colour and line style of one algorithm, onramp's or published."""

    name: str
    colour: str
    style: Any = "-"

    @property
    def look(self) -> dict[str, Any]:
        """Return colour and line style as Matplotlib's keyword arguments."""
        return {"color": self.colour, "linestyle": self.style}


def draw_curves(axes: Axes, line: Line, seeds: dict[str, Curve], last: int | None = None) -> None:
    """Draw the interquartile mean of four or more seeds and its interval, or a line for each of fewer.

    Seeds that were never evaluated at the same step also have a line each.
    Seeds that were trained longer than the others have lines of their own beyond the interval. Curves end at step
    `last`.
    """
    steps, values = aligned(seeds, last)
    if len(values) >= MIN_SEEDS_FOR_CI and steps:
        found = estimate(interquartile_mean, [values])
        axes.plot(steps, found.value, linewidth=1.6, label=f"{line.name}, {len(values)} seeds", **line.look)
        draw_interval(axes, line, steps, found)
        for curve in seeds.values():
            own, (longer,) = aligned({"": {step: value for step, value in curve.items() if step >= steps[-1]}}, last)
            if len(own) > 1:
                axes.plot(own, longer, linewidth=1.2, **line.look)
        return
    how = f"seed{'s' * (len(seeds) > 1)} {', '.join(sorted(seeds))}"
    if number_of(seeds) > len(seeds):
        how = f"mean of {number_of(seeds)}"
    for i, curve in enumerate(seeds.values()):  # each to its own end
        own, (values,) = aligned({"": curve}, last)
        axes.plot(own, values, linewidth=1.2, label="" if i else f"{line.name}, {how}", **line.look)


def draw_interval(axes: Axes, line: Line, x: Sequence[float] | Values, found: Estimate, **how: Any) -> None:
    """Draw the band between the ends of an interval, if there is one."""
    if found.low is not None and found.high is not None:
        axes.fill_between(x, found.low, found.high, color=line.colour, alpha=0.2, linewidth=0, **how)


def learning_figure(
    algo: str, env: str, ours: dict[str, Curve], published: dict[str, Curve], size: tuple[float, float] = SIZE
) -> Figure:
    """Return the figure of our and the published returns over environment steps, up to our last step."""
    figure, axes = _figure(f"{display_name(algo)}, {env}", "environment steps", "return", size)
    if published:
        draw_curves(axes, Line("published", GREY, "--"), published, max(map(max, ours.values())))
    draw_curves(axes, Line("onramp", colour_of(algo)), ours)
    return _with_legend(figure)


def overview_figure(ours: Curves, published: Curves) -> Figure:
    """Return a figure with a panel for each environment: our returns and the published ones over environment steps."""
    names = list(labels("online-1m"))
    envs = sorted({env for _, env in ours})
    figure = Figure(figsize=(3.7 * len(envs), 3.4), layout="constrained")
    handles: dict[str, Line2D] = {}
    for i, env in enumerate(envs):
        axes = figure.add_subplot(1, len(envs), i + 1)
        _set_up(axes, env, "environment steps", "return" if i == 0 else "")
        for algo in (algo for algo in names if (algo, env) in ours):
            colour, seeds = colour_of(algo), ours[algo, env]
            theirs = published.get((algo, env), {})
            if theirs:
                draw_curves(axes, Line("", colour, "--"), theirs, max(map(max, seeds.values())))
            draw_curves(axes, Line("", colour), seeds)
            handles[display_name(algo)] = Line2D([], [], color=colour)
    handles["published"] = Line2D([], [], color=GREY, linestyle="--")
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=len(handles), frameon=False)
    return figure


def panels_figure(panels: dict[str, dict[Line, dict[str, Curve]]], columns: int = 3) -> Figure:
    """Return a figure with a panel for each task: the returns of several algorithms over steps, in one legend."""
    rows = -(-len(panels) // columns)
    columns = min(columns, len(panels))
    figure = Figure(figsize=(max(SIZE[0], 3.7 * columns), 3.1 * rows + 0.6), layout="constrained")
    handles: dict[str, Line2D] = {}
    for i, (task, lines) in enumerate(panels.items()):
        axes = figure.add_subplot(rows, columns, i + 1)
        _set_up(axes, task, "steps", "return" if i % columns == 0 else "")
        for line, seeds in lines.items():
            draw_curves(axes, line, seeds)
            handles[line.name] = Line2D([], [], **line.look)
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    return figure


def scores_figure(
    title: str, steps: str, lines: dict[Line, dict[str, Curve]], behaviour: float | None, label: str = "score"
) -> Figure:
    """Return the figure of several algorithms' scores over steps on one dataset, with the score of its own episodes."""
    figure, axes = _figure(title, steps, label, SIZE)
    if behaviour is not None:
        axes.axhline(behaviour, color=GREY, linestyle=":", linewidth=1.2, label="the dataset's episodes")
    for line, seeds in lines.items():
        draw_curves(axes, line, seeds)
    if any(step < 0 for seeds in lines.values() for curve in seeds.values() for step in curve):
        axes.axvline(0, color="#bbbbbb", linewidth=1, zorder=0)
    return _with_legend(figure)


def profile_figure(title: str, label: str, thresholds: Values, profiles: dict[Line, Estimate]) -> Figure:
    """Return the figure of the share of runs above each score."""
    figure, axes = _figure(title, label, "share of runs above this value", SIZE)
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


def save(figure: Figure, path: Path) -> None:
    """Write the figure in the format of the path's suffix."""
    figure.savefig(path, dpi=110, metadata={"Software": None} if path.suffix == ".png" else {})


def data_uri(figure: Figure) -> str:
    """Return the figure as the data URI of an SVG image, which a page can contain."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = text.getvalue()
    return "data:image/svg+xml;base64," + base64.b64encode(svg[svg.index("<svg") :].encode()).decode()


def _figure(title: str, x: str, y: str, size: tuple[float, float]) -> tuple[Figure, Axes]:
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    _set_up(axes, title, x, y)
    return figure, axes


def _set_up(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set(xlabel=x, ylabel=y)
    axes.set_title(title, fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#eeeeee")
    axes.xaxis.set_major_formatter(mpl.ticker.FuncFormatter(_short))
    axes.xaxis.set_major_locator(mpl.ticker.MaxNLocator(6))


def _short(number: float, _: int) -> str:
    return f"{number / 1e6:g}M" if abs(number) >= 1e6 else f"{number / 1e3:g}k" if abs(number) >= 1e3 else f"{number:g}"


def _with_legend(figure: Figure) -> Figure:
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9, handlelength=1.6, columnspacing=1.2)
    return figure
