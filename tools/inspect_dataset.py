"""Print what is in a dataset, before training on it.

    python -m tools.inspect_dataset hopper-medium-v2
    python -m tools.inspect_dataset data/mine.hdf5 --picture returns.png
    python -m tools.inspect_dataset data/mine.hdf5 --env Humanoid-v5
    python -m tools.inspect_dataset data/mine.hdf5 --reference data/mine-replay.hdf5 --json facts.json

Trajectory quality (TQ) and state-action coverage (SACo) are those of Schweighofer et al. 2022, "A Dataset Perspective
on Offline Reinforcement Learning", arXiv 2111.04714. TQ is the mean return on a scale from 0, a random policy's, to 1,
an expert's. SACo is the number of distinct state-action pairs divided by that of a reference dataset. The authors'
reference is the whole replay buffer of an online run. Continuous pairs in the same cell of a grid count as equal. The
grid has five edges in each dimension over the reference's range, as in the authors' evaluation of D4RL.
"""

import common.start

import json
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from numpy.typing import NDArray

from common.command_line import command_line
from common.errors import InputError
from common.files import prepare_output, replacing
from common.messages import print_result
from offline.dataset import read
from offline.hdf5 import opened
from offline.recording import Array, RawDataset, TransitionBlock, action_box, distance_outside, warn_of_another_box
from offline.scores import normalized

EDGES = 5  # of SACo's grid in each dimension
BARS = " ▁▂▃▄▅▆▇█"


@dataclass
class Args:
    dataset: Annotated[str, tyro.conf.Positional]
    """A D4RL id, an OGBench task, a Minari id, or the path of an HDF5 file in D4RL's layout."""
    reference: str | None = None
    """Dataset relative to which state-action coverage is computed."""
    d4rl_compat: bool = False
    """Convert D4RL files exactly as D4RL's qlearning_dataset does."""
    horizon: int | None = None
    """Time limit in steps, for a file and a --reference that mark no time-outs."""
    env: str | None = None
    """Environment whose action box is used if the file states none, instead of the environment that it names.
    If the file states another box, a warning is printed."""
    picture: Path | None = None
    """Write the distribution of returns to this file (.png, .pdf, .svg; without a suffix, PNG)."""
    json: Path | None = None
    """Also write all numbers to this JSON file. A number that is not finite is null there."""


@np.errstate(over="ignore", invalid="ignore")  # what float32 cannot hold is counted
def facts(recording: RawDataset, reference: RawDataset | None = None, env: str | None = None) -> dict[str, Any]:
    """Return everything that is reported, as plain numbers.

    Reads the data once, block by block, and again if there is a `reference`. `env` is as in `offline.dataset.load`.
    Raise InputError if the action box of `env` is not available, or if the datasets have different widths.
    """
    box = _box(recording, env)
    sums: dict[str, list[Array]] = {name: [] for name in ("obs", "actions", "rewards")}
    origins: dict[str, Array] = {}
    not_finite = dict.fromkeys(TransitionBlock._fields, 0)
    outside = saturated = 0
    hashes, action_hashes, terminations = [], [], []
    for block in recording.blocks():
        for name, values in zip(TransitionBlock._fields, block, strict=True):
            single = values.astype(np.float32)  # as `load` reads it
            not_finite[name] += int((~np.isfinite(single)).reshape(len(values), -1).any(1).sum())
        for name, parts in sums.items():
            values = getattr(block, name).reshape(len(block.rewards), -1).astype(np.float64)
            origin = origins.setdefault(name, np.where(np.isfinite(values[0]), values[0], 0.0))
            parts.append(_sums(values, origin))
        if box is not None:
            distance = distance_outside(block.actions, *box)
            outside += int((distance > 0).any(1).sum())
            saturated += int((distance == 0).any(1).sum())
        hashes.append(_hashes(*block))
        action_hashes.append(_hashes(block.actions))
        terminations.append(block.terminations > 0)
    not_finite["rewards"] = max(not_finite["rewards"], len(recording.bad_reward_rows))  # dropped ones too
    columns = {name: _columns(parts, origins[name]) for name, parts in sums.items()}
    terminated = np.concatenate(terminations)
    episodes, ended = len(recording.ends), int(terminated[recording.ends - 1].sum())
    returns = recording.returns()
    found: dict[str, Any] = {
        "id": recording.id,
        "environment": env or recording.env or recording.untrusted_env,
        "transitions": len(recording),
        "episodes": episodes,
        "obs_dim": recording.obs_dim,
        "action_dim": recording.action_dim,
        "terminated episodes": ended,
        "truncated episodes": episodes - ended,
        "terminations inside episodes": int(terminated.sum()) - ended,
        "last steps without a successor": int((~np.isnan(recording.dropped_final_rewards)).sum()),
        "lengths": _quantiles(recording.lengths),
        "returns": _quantiles(returns),
        "duplicate transitions": _duplicates(hashes),
        "duplicate actions": _duplicates(action_hashes),
        "action box": box and [end.tolist() for end in box],
        "transitions with actions outside their bounds": outside if box else None,
        "transitions with actions at their bounds": saturated if box else None,
        "transitions not finite": not_finite,
        "columns": columns,
        "constant obs columns": sum(map(operator.eq, columns["obs"]["min"], columns["obs"]["max"])),
        "score": None,
        "TQ": None,
        "SACo": None,
    }
    # Kitchen's score counts a solved task once. Its files reward it at every step, so their returns give no score.
    pays_once = "kitchen" in f"{recording.id} {recording.env}"
    if recording.reference is not None and not pays_once:
        found["score"] = float(normalized(returns.mean(), recording.reference))
        found["TQ"] = found["score"] / 100.0
    if reference is not None:
        found["SACo"], found["SACo of"] = coverage(recording, reference), reference.id
    return found


def _sums(values: Array, origin: Array) -> Array:
    """Return minimum, maximum, count, sum and sum of squares of each column's finite numbers: [5, width].

    The sums are of differences from `origin` [width]: squares of large numbers would hide a small deviation.
    """
    finite = np.isfinite(values)
    low, high = np.where(finite, values, np.inf).min(0), np.where(finite, values, -np.inf).max(0)
    values = np.where(finite, values, origin) - origin
    return np.stack([low, high, finite.sum(0), values.sum(0), np.square(values).sum(0)])


def _columns(sums: list[Array], origin: Array) -> dict[str, list[float]]:
    """Return minimum, maximum, mean and standard deviation of each column, from the sums of all blocks."""
    low, high, count, total, squares = np.stack(sums, axis=1)  # [blocks, width] each
    count = np.maximum(count.sum(0), 1)
    mean = total.sum(0) / count
    deviation = np.sqrt(np.maximum(squares.sum(0) / count - np.square(mean), 0.0))
    found = {"min": low.min(0), "max": high.max(0), "mean": mean + origin, "std": deviation}
    return {name: values.tolist() for name, values in found.items()}


def _box(recording: RawDataset, env: str | None) -> tuple[Array, Array] | None:
    """Return the action box, or None if nothing states it, because any file may be inspected.

    Raise InputError if `env` is given and its box is not available.
    """
    try:
        if env:
            warn_of_another_box(recording, env)
        return action_box(recording, env)
    except InputError:
        if env:
            raise
        return None


def coverage(recording: RawDataset, reference: RawDataset) -> float:
    """Return SACo, the number of distinct cells of `recording` divided by that of `reference`.

    Both count the first transitions only, as many as the shorter one has. Raise InputError if their observations or
    actions have different widths.
    """
    if (recording.obs_dim, recording.action_dim) != (reference.obs_dim, reference.action_dim):
        raise InputError(
            f"{recording.id} and {reference.id} have different observations or actions: give another --reference"
        )
    count = min(len(recording), len(reference))
    parts = [part for part in _pairs(reference, count) if len(part)]
    if not parts:
        raise InputError(f"{reference.id} has no finite observations and actions: give another --reference")
    low, high = np.min([part.min(0) for part in parts], axis=0), np.max([part.max(0) for part in parts], axis=0)
    edges = np.linspace(low, high, EDGES)
    return _cells(recording, count, edges) / _cells(reference, count, edges)


def _cells(recording: RawDataset, count: int, edges: Array) -> int:
    """Return the number of distinct cells of the first `count` pairs.

    A cell is the number of edges that a pair reaches in each dimension.
    """
    cells = [np.sum([pairs >= edge for edge in edges], axis=0) for pairs in _pairs(recording, count)]
    return len(np.unique(np.concatenate([_hashes(cell) for cell in cells])))


def _pairs(recording: RawDataset, count: int) -> Iterator[Array]:
    """Yield the finite ones of the first `count` pairs of observation and action, [n, obs_dim + action_dim] a block."""
    for block in recording.blocks():
        pairs = np.concatenate([block.obs, block.actions], axis=1)[:count].astype(np.float32)
        yield pairs[np.isfinite(pairs).all(1)]
        count -= len(block.rewards)
        if count <= 0:
            return


def _hashes(*parts: Array) -> NDArray[np.uint64]:
    """Return a number for each row of parts [n, dim] or [n] of float32: [n].

    It is the sum modulo 2⁶⁴ of the products of a row's 32-bit words with random odd numbers. Equal rows have equal
    numbers. Unequal rows have equal numbers with a probability of at most 2⁻³².
    """
    rows = [np.asarray(part, np.float32).reshape(len(part), -1) for part in parts]
    words = np.concatenate(rows, axis=1).view(np.uint32).astype(np.uint64)
    factors = np.random.default_rng(0).integers(1, 2**63, words.shape[1], np.uint64) * np.uint64(2) + np.uint64(1)
    return np.asarray(words @ factors)


def _duplicates(hashes: list[NDArray[np.uint64]]) -> int:
    """Return how many hashes equal an earlier one."""
    numbers = np.concatenate(hashes)
    return len(numbers) - len(np.unique(numbers))


def _quantiles(values: Array) -> dict[str, float]:
    names = ("min", "quarter", "median", "three quarters", "max")
    with np.errstate(invalid="ignore"):  # returns may be infinite or NaN
        found = dict(zip(names, np.quantile(values, (0, 0.25, 0.5, 0.75, 1)).tolist(), strict=True))
        return {"mean": float(np.mean(values)), "std": float(np.std(values))} | found


def describe(found: dict[str, Any], returns: NDArray[np.float64]) -> str:
    """Return the output of `facts` as lines for a terminal."""
    n, r, steps = found["transitions"], found["returns"], found["lengths"]
    obs, actions, rewards = (found["columns"][name] for name in ("obs", "actions", "rewards"))
    bounds = "bounds unknown: give --env"
    if found["transitions with actions outside their bounds"] is not None:
        low, high = found["action box"]
        bounds = (
            f"{found['transitions with actions outside their bounds'] / n:.2%} of transitions outside their bounds "
            f"({min(low):.4g} to {max(high):.4g}), {found['transitions with actions at their bounds'] / n:.2%} at them"
        )
    bad = {name: count for name, count in found["transitions not finite"].items() if count}
    lines = [
        f"{found['id']}: {n:,} transitions in {found['episodes']:,} episodes of "
        f"{found['environment'] or 'an unknown environment'}",
        f"episodes   {found['terminated episodes']:,} terminated, {found['truncated episodes']:,} cut; "
        f"{steps['min']:,.0f} to {steps['max']:,.0f} steps, median {steps['median']:,.0f}",
        f"returns    mean {r['mean']:,.1f} ± {r['std']:,.1f}; quartiles "
        f"{r['min']:,.1f} | {r['quarter']:,.1f} | {r['median']:,.1f} | {r['three quarters']:,.1f} | {r['max']:,.1f}",
        f"           {_bars(returns)}",
        f"rewards    {rewards['min'][0]:.4g} to {rewards['max'][0]:.4g}, mean {rewards['mean'][0]:.4g}",
        f"obs        {found['obs_dim']} columns, {min(obs['min']):.4g} to {max(obs['max']):.4g}, deviations "
        f"{min(obs['std']):.3g} to {max(obs['std']):.3g}, {found['constant obs columns']} constant",
        f"actions    {found['action_dim']} columns, {min(actions['min']):.4g} to {max(actions['max']):.4g}; {bounds}",
        f"duplicates {found['duplicate transitions']:,} transitions, {found['duplicate actions']:,} actions",
        f"not finite {', '.join(f'{count:,} {name}' for name, count in bad.items()) or 'none'}",
    ]
    if lost := found["last steps without a successor"]:
        lines.insert(2, f"           {lost:,} last steps have no successor: they count in the returns only")
    if found["terminations inside episodes"]:
        lines.append(f"warning    {found['terminations inside episodes']:,} terminations inside episodes")
    if found["TQ"] is not None:
        lines.append(f"TQ         {found['TQ']:.3f} (normalised score {found['score']:.1f})")
    if found["SACo"] is not None:
        lines.append(f"SACo       {found['SACo']:.3f} of {found['SACo of']}")
    return "\n".join(lines)


def _histogram(returns: NDArray[np.float64]) -> tuple[NDArray[Any], NDArray[np.float64]]:
    """Return the counts of 60 equal bins and their 61 edges, as offsets from the lowest return."""
    # Offsets, because large returns that are nearly equal leave no room for 60 bins between them.
    return np.histogram(returns - returns.min(), 60)


def _bars(returns: NDArray[np.float64]) -> str:
    finite = returns[np.isfinite(returns)]
    if not len(finite):
        return ""
    counts, _ = _histogram(finite)
    return "".join(BARS[int(np.ceil(8 * count / counts.max()))] for count in counts)


def draw(returns: NDArray[np.float64], title: str, path: Path) -> None:
    """Draw the distribution of the finite returns, and the share of episodes with at most each return."""
    from matplotlib.figure import Figure  # takes a second to import

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel="return", ylabel="episodes")
    axes.set_title(title, parse_math=False)  # a path may have two $
    returns = returns[np.isfinite(returns)]
    if len(returns):
        counts, edges = _histogram(returns)
        axes.stairs(counts, returns.min() + edges, fill=True, color="tab:blue", alpha=0.6)
    share = axes.twinx()
    share.plot(np.sort(returns), np.arange(1, len(returns) + 1) / len(returns), color="tab:orange")
    share.set(ylabel="share of episodes with at most this return", ylim=(0, 1.02))
    with replacing(path) as file:
        figure.savefig(file, format=path.suffix.lstrip(".") or "png", dpi=120)


def _without_nan(value: Any) -> Any:
    """Return the value with None in place of numbers that are not finite, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _without_nan(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(each) for each in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value


def _horizon_of_reference(args: Args) -> int | None:
    """Return the time limit that the user gave, if the reference is a file that does not mark its time-outs."""
    if args.horizon is None or not Path(str(args.reference)).is_file():
        return None
    with opened(Path(str(args.reference))) as file:
        return None if "timeouts" in file else args.horizon


def main(args: Args) -> None:
    """Print what `args.dataset` holds, and write the files that are asked for.

    Raise InputError before the data are read if one of these files cannot be written.
    """
    if args.picture is not None and args.picture.suffix not in ("", ".png", ".pdf", ".svg"):
        raise InputError(f"--picture {args.picture}: give a file that ends in .png, .pdf or .svg")
    if args.json is not None and args.json == args.picture:
        raise InputError(f"--json and --picture are both {args.json}: give two files")
    for flag, path in (("--picture", args.picture), ("--json", args.json)):
        if path is not None:
            prepare_output(path, flag)
    recording = read(args.dataset, args.d4rl_compat, args.horizon)
    reference = read(args.reference, args.d4rl_compat, _horizon_of_reference(args)) if args.reference else None
    found, returns = facts(recording, reference, args.env), recording.returns()
    if args.json is not None:
        with replacing(args.json) as file:
            file.write(json.dumps(_without_nan(found), indent=1, allow_nan=False).encode())
    if args.picture is not None:
        draw(returns, f"{recording.id}: {len(returns):,} episodes", args.picture)
    print_result(describe(found, returns))  # after the files: it ends the program if the reader of a pipe has gone


if __name__ == "__main__":
    command_line(main, Args)
