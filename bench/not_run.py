"""What the comparisons call for, and what of it has not been run."""

from html import escape

from bench.aggregates import STEPS
from bench.curves import Curve, by_updates, online, scores
from bench.intervals import ENOUGH
from bench.offline_report import ALGORITHMS, EXPO, UPDATES, VARIANTS

ONLINE = {"sac": "SAC", "td3": "TD3", "ppo": "PPO"}
ENVIRONMENTS = ("HalfCheetah-v4", "Hopper-v4", "Walker2d-v4", "Ant-v4", "Humanoid-v4")
DATASETS = tuple(
    f"{name}-{kind}" for name in ("halfcheetah", "hopper", "walker2d") for kind in ("medium", "medium-replay")
)
LONGER = {name: VARIANTS[name] for name in ("wsrl", "no-warmup", "mix")}
RETAINED = {"none": "data dropped", "append": "data kept", "mix": "half of each batch data"}
SWITCHES = {
    f"{algo}-{retain}": f"{name}, {how}"
    for algo, name in (("iql", "IQL"), ("cql", "CQL"), ("calql", "Cal-QL"))
    for retain, how in RETAINED.items()
}


def missing_list() -> str:
    """What the comparisons call for, and what of it is not there or is not finished."""
    plans = (
        ("Online", ONLINE, online(), ENVIRONMENTS, 10, STEPS[-1]),
        ("Offline", ALGORITHMS, by_updates(), DATASETS, ENOUGH, UPDATES[-1]),
        ("From offline to online", SWITCHES, scores("online"), ("hopper-medium",), 2, 50_000),
        ("WSRL's comparison", VARIANTS, scores("wsrl"), ("pen-binary", "hopper-sac-200k", "maze2d-medium"), 3, 20_000),
        ("WSRL's comparison, longer", LONGER, scores("wsrl-longer"), ("pen-binary",), 3, 100_000),
        ("EXPO's comparison on the pen", EXPO, scores("expo"), ("pen-binary-time",), 3, 30_000),
        ("EXPO's comparison in the maze", EXPO, scores("expo"), ("maze2d-medium",), 3, 20_000),
    )
    lines = []
    for kind, names, found, tasks, wanted, steps in plans:
        asked = f"{wanted} seeds on each of {', '.join(tasks)}, to {steps:,}"
        lines.append(f"<h3>{kind}</h3>\n<p>Called for: {asked}.</p>\n<ul>")
        for algo, name in names.items():
            text = missing({task: found.get((algo, task), {}) for task in tasks}, wanted, steps)
            lines.append(f"<li><strong>{escape(name)}</strong>: {text}.</li>")
        lines.append("</ul>")
    return "\n".join(lines)


def missing(tasks: dict[str, dict[str, Curve]], wanted: int, steps: int) -> str:
    """In words: the tasks of which fewer than `wanted` seeds got to `steps`."""
    unfinished, unknown = [], [task for task, seeds in tasks.items() if not seeds]
    for task, seeds in tasks.items():
        early = [max(curve) for curve in seeds.values() if max(curve) < steps]
        if seeds and len(seeds) - len(early) < wanted:
            more = f" ({len(early)} more, to {max(early):,} at most)" if early else ""
            unfinished.append(f"{task}: {len(seeds) - len(early)} of {wanted} seeds{more}")
    if len(unknown) == len(tasks):
        return "not run"
    return "; ".join(unfinished + ([f"not run: {', '.join(unknown)}"] if unknown else [])) or "complete"
