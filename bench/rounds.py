"""The rounds of `bench/speed.py`: as raw figures in a file, and in words."""

import csv
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench.alternate import Slice

QUIET = 0.1  # cores; PyTorch's threads wait for one another, so even a little work of others slows it several times


def write_rounds(path: Path, facts: dict[str, str], rounds: Iterable[Iterable[Slice]]) -> None:
    """The raw slices as a CSV; the facts go before them on lines that begin with #."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        file.writelines(f"# {key}: {value}\n" for key, value in facts.items())
        writer = csv.writer(file)
        writer.writerow(["round", "contender", "steps", "seconds", "steps_per_second", "cores", "cores_of_others"])
        for s in (s for slices in rounds for s in slices):
            numbers = (s.seconds, s.steps_per_second, s.cores, s.cores_of_others)
            writer.writerow([s.round, s.contender, s.steps, *(f"{number:.4f}" for number in numbers)])


def read_rounds(path: Path) -> tuple[dict[str, str], dict[str, list[float]]]:
    """The facts, and each contender's steps per second, round by round."""
    text = path.read_text().splitlines()
    facts = dict(line[2:].split(": ", 1) for line in text if line.startswith("#"))
    rates: dict[str, list[float]] = defaultdict(list)
    for row in csv.DictReader(line for line in text if not line.startswith("#")):
        rates[row["contender"]].append(float(row["steps_per_second"]))
    return facts, rates


def spread(values: Sequence[float], digits: int) -> str:
    """Median (least to greatest)."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def report(rounds: Sequence[Sequence[Slice]], updates: Sequence[float]) -> str:
    """The figures: each contender's speed, then ours against each within the rounds."""
    by_name: dict[str, list[Slice]] = {}
    for s in (s for slices in rounds for s in slices):
        by_name.setdefault(s.contender, []).append(s)
    names = [name for name in ("ours", "eager", "compiled", "sb3", "sbx", "d3rlpy", "loop", "floor") if name in by_name]
    rate = {name: [s.steps_per_second for s in by_name[name]] for name in names}
    lines = ["", "median (min-max) over the rounds", f"{'':8}{'steps/s':>24}{'cores used':>20}{'by others':>20}"]
    for name in names:
        cores = spread([s.cores for s in by_name[name]], 2)
        others = spread([s.cores_of_others for s in by_name[name]], 2)
        lines.append(f"{name:8}{spread(rate[name], 1):>24}{cores:>20}{others:>20}")
    lines.append("")
    for name in (name for name in names if name not in ("ours", "floor")):
        ratios = [ours / theirs for ours, theirs in zip(rate["ours"], rate[name], strict=True)]
        lines.append(f"ours / {name}: {spread(ratios, 2)} times as many steps/s")
    if "floor" in rate:
        floor_ms = [1000 / r for r in rate["floor"]]
        above = [floor / ours for ours, floor in zip(rate["ours"], rate["floor"], strict=True)]
        lines.append(f"floor: {spread(floor_ms, 2)} ms for the matrix products of one update")
        lines.append(f"ours / floor: {spread(above, 2)}, whole step with one update")
        if updates:
            alone = statistics.median(updates)
            times = f"{alone:.2f} ms, {alone / statistics.median(floor_ms):.2f} floors"
            lines.append(f"our update alone: {times} (median of {len(updates)} log intervals)")
        else:
            lines.append("our update alone: n/a (no time/update_ms in our metrics during the rounds)")
    disturbed = statistics.median(s.cores_of_others for slices in rounds for s in slices)
    if disturbed > QUIET:
        lines.append(f"NOT TO BE CITED: other work took {disturbed:.2f} cores meanwhile; repeat on a quiet machine")
    return "\n".join(lines)
