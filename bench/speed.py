# ruff: noqa: T201
"""Our algorithms beside Stable-Baselines3 and SBX: environment steps per second, measured in one run.

python bench/speed.py                        # SAC on HalfCheetah-v4, as `make speed` runs it
python bench/speed.py --num-envs 4 --peers sb3

The same environment, networks, batch, number of critics, updates per step and random first steps; everything else is
each program's default, its logging included. Steps are counted inside the environment (`bench/step_counter.py`),
the programs run in alternation (`bench/alternate.py`), and the update's bare matrix products (`bench/floor.py`) run
as one more contender: the time nobody's update gets below.
"""

import csv
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import tyro

from bench.alternate import Contender, ContenderError, Slice, alternate, contest
from bench.rounds import report, write_rounds
from bench.step_counter import counted

ROOT = Path(__file__).resolve().parents[1]
FOREVER = 100_000_000  # steps: more than any run here makes
LEARNING_STARTS = 2000
ROLLOUT = 2048  # PPO's steps of a round, of all environments together
FLOOR_WARM_UPDATES = 100
WARM_UP_TIMEOUT = 900.0
PACKAGES = ["torch", "numpy", "gymnasium", "mujoco", "stable-baselines3", "sbx-rl", "jax", "jaxlib", "flax", "optax"]


@dataclass(frozen=True)
class Algorithm:
    """How one algorithm is started: ours as a command, each peer as a class with keyword arguments."""

    ours: tuple[str, ...]
    peers: dict[str, str]
    peer_arguments: dict[str, Any]
    warm_steps: int  # whatever is compiled is compiled by then
    has_floor: bool = True


OFF_POLICY = {
    "learning_starts": LEARNING_STARTS,
    "batch_size": 256,
    "train_freq": 1,
    "gradient_steps": -1,  # as many updates as environment steps, however many environments there are
}
ALGORITHMS = {
    "sac": Algorithm(
        ours=("algos/sac.py", "--learning-starts", str(LEARNING_STARTS)),
        peers={"sb3": "stable_baselines3:SAC", "sbx": "sbx:SAC"},
        peer_arguments=OFF_POLICY | {"policy_kwargs": {"net_arch": [256, 256], "n_critics": 2}},
        warm_steps=LEARNING_STARTS + 300,
    ),
    "td3": Algorithm(
        ours=("algos/td3.py", "--learning-starts", str(LEARNING_STARTS)),
        peers={"sb3": "stable_baselines3:TD3", "sbx": "sbx:TD3"},
        peer_arguments=OFF_POLICY | {"policy_delay": 2, "policy_kwargs": {"net_arch": [256, 256], "n_critics": 2}},
        warm_steps=LEARNING_STARTS + 300,
        has_floor=False,
    ),
    "ppo": Algorithm(
        ours=(
            "algos/ppo.py",
            "--rollout-steps",
            str(ROLLOUT),
            "--minibatch-size",
            "64",
            "--epochs",
            "10",
            "--normalize-advantages",
            "--no-recompute-advantages",
        ),
        peers={"sb3": "stable_baselines3:PPO", "sbx": "sbx:PPO"},
        peer_arguments={"n_steps": ROLLOUT, "batch_size": 64, "n_epochs": 10, "policy_kwargs": {"net_arch": [64, 64]}},
        warm_steps=3 * ROLLOUT,
        has_floor=False,
    ),
}


@dataclass(frozen=True)
class Args:
    """What is measured, and for how long."""

    algo: Literal["sac", "td3", "ppo"] = "sac"
    """The algorithm."""
    env: str = "HalfCheetah-v4"
    """Any environment that Gymnasium itself registers."""
    num_envs: int = 1
    """Environments in each program."""
    rounds: int = 10
    """Rounds; in each every program runs once, in a new order."""
    slice_seconds: float = 4.0
    """How long each runs in a round."""
    peers: tuple[Literal["sb3", "sbx"], ...] = ("sb3", "sbx")
    """Whom to run beside ours."""
    peers_python: Path = ROOT / ".venv-peers" / "bin" / "python"
    """The Python that has bench/peers-requirements.txt installed."""
    ours: str = ""
    """Our program with its own flags, if not the algorithm's file; the common flags are put behind it."""
    out: Path | None = None
    """Where the raw rounds go; by default results/speed/<algorithm>-<environment>-<time>.csv."""


def environment() -> dict[str, str]:
    """The environment variables of every program: no GPU (the peers' JAX has none) and nobody's thread settings."""
    env = {key: value for key, value in os.environ.items() if not key.endswith("_NUM_THREADS")}
    return {**env, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}


def commands(args: Args, run_dir: Path) -> dict[str, list[str]]:
    """The command of every contender, ours first and the floor last."""
    algorithm, env_id = ALGORITHMS[args.algo], counted(args.env)
    ours = shlex.split(args.ours) if args.ours else [sys.executable, *algorithm.ours]
    ours += ["--env", env_id, "--total-steps", str(FOREVER), "--eval-every", str(FOREVER)]
    ours += ["--run-dir", str(run_dir), "--seed", "0", "--num-envs", str(args.num_envs)]
    theirs = dict(algorithm.peer_arguments)
    if "n_steps" in theirs:  # theirs are those of each environment
        theirs["n_steps"] //= args.num_envs
    arguments = json.dumps(theirs)
    peers: dict[str, list[str]] = {
        peer: [str(args.peers_python), "bench/peer.py", algorithm.peers[peer], env_id, str(args.num_envs), arguments]
        for peer in args.peers
    }
    floor = {"floor": [sys.executable, "bench/floor.py", args.algo, env_id]} if algorithm.has_floor else {}
    return {"ours": ours, **peers, **floor}


def versions(python: str | Path) -> str:
    """Python's version and those of the packages that matter, as far as they are installed beside it."""
    code = (
        "import sys, platform, importlib.metadata as m\n"
        "have = {d.name.lower().replace('_', '-'): d.version for d in m.distributions()}\n"
        "print('python', platform.python_version(), *(f'{p} {have[p]}' for p in sys.argv[1:] if p in have), sep=', ')"
    )
    result = subprocess.run([str(python), "-c", code, *PACKAGES], capture_output=True, text=True, check=True)
    return result.stdout.strip().replace("python, ", "python ", 1)


def processor() -> str:
    """The processor's name."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def describe(args: Args) -> dict[str, str]:
    """What a reader of the figures must know to judge them."""
    git = subprocess.run(
        ["git", "--no-optional-locks", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    )
    return {
        "algorithm": f"{args.algo} on {args.env}, {args.num_envs} environment(s)",
        "measured": f"{args.rounds} rounds of {args.slice_seconds:g} s each",
        "commit": git.stdout.strip() or "unknown",
        "processor": f"{processor()}, {os.cpu_count()} cores",
        "system": platform.platform(),
        "ours": args.ours or " ".join(ALGORITHMS[args.algo].ours),
        "versions of ours": versions(sys.executable),
        **({"versions of the peers": versions(args.peers_python)} if args.peers else {}),
    }


def has_losses(metrics: Path) -> bool:
    """Whether our run has logged an update."""
    return metrics.exists() and ",losses/" in metrics.read_text()


def update_times(metrics: Path, start: int) -> list[float]:
    """Our own `time/update_ms` rows written behind byte `start` of its metrics, which is where the rounds began."""
    if not metrics.exists():
        return []
    rows = csv.reader(metrics.read_text()[start:].splitlines())
    return [float(row[2]) for row in rows if len(row) == 3 and row[1] == "time/update_ms"]


def main(args: Args) -> None:
    """Warm everyone up alone, alternate, report."""
    if args.peers and not args.peers_python.exists():
        raise ContenderError(
            f"{args.peers_python} is missing: see bench/peers-requirements.txt, or leave --peers empty"
        )
    facts = describe(args)
    for key, value in facts.items():
        print(f"{key}: {value}")
    stamp = time.strftime("%Y-%m-%dT%H%M%S")
    out = args.out or ROOT / "results" / "speed" / f"{args.algo}-{args.env.replace('/', '_')}-{stamp}.csv"
    with contest() as (contenders, folder):
        metrics = folder / "run" / "metrics.csv"
        for name, command in commands(args, folder / "run").items():
            warm = FLOOR_WARM_UPDATES if name == "floor" else ALGORITHMS[args.algo].warm_steps
            # Ours evaluates before it learns, in counted environments: by steps alone it would seem warm too early.
            needs = {"learns": partial(has_losses, metrics)} if name == "ours" else {}
            contenders.append(Contender(name, command, environment(), folder, warm, cwd=ROOT, **needs))
            contenders[-1].warm_up(WARM_UP_TIMEOUT)
            facts[f"threads of {name}"] = str(contenders[-1].threads())
            print(f"threads of {name}: {contenders[-1].threads()}", flush=True)
        start = metrics.stat().st_size if metrics.exists() else 0
        rounds: list[list[Slice]] = []
        for slices in alternate(contenders, args.rounds, args.slice_seconds):
            rounds.append(slices)
            rates = ", ".join(f"{s.contender} {s.steps_per_second:.1f}" for s in slices)
            print(f"round {len(rounds)}: {rates}", flush=True)
            write_rounds(out, facts, rounds)  # after every round, so that an interrupted run leaves what it measured
        updates = update_times(metrics, start)
        if updates:
            facts["our update alone in ms"] = f"{statistics.median(updates):.3f}"
            write_rounds(out, facts, rounds)
        print(report(rounds, updates))
    print(f"\nraw rounds: {out}")


if __name__ == "__main__":
    try:
        main(tyro.cli(Args))
    except ContenderError as error:
        sys.exit(f"speed: {error}")
