# ruff: noqa: T201
"""Measure our algorithms' steps per second against Stable-Baselines3, SBX and d3rlpy, in one run.

    python bench/speed/speed.py                    # SAC on HalfCheetah-v4, as `make speed` runs it
    python bench/speed/speed.py --num-envs 4 --peers sb3
    python bench/speed/speed.py --algo cql         # on a dataset, against d3rlpy
    python bench/speed/speed.py --algo after-sac   # our SAC against our algorithms that came after it
    python bench/speed/speed.py --algo stream_ac --script "python ../their/script.py --env ENV"
    python bench/speed/speed.py --variants eager bfloat16   # three forms of our program
    python bench/speed/speed.py --device cuda      # our program with and without CUDA graphs, and SB3 on the GPU

Online programs share environment, networks, batch, number of critics, updates per step and random first steps. Steps
are counted inside the environment (`bench/speed/step_counter.py`). Offline programs share dataset, networks, batch,
number of critics and of sampled actions. They have no Lagrange multiplier and no evaluation. A step is a gradient step,
which includes sampling the batch. Everything else is each program's default, its logging included.

The programs run in alternation (`bench/speed/interleaved_timing.py`). The update's bare matrix products
(`bench/speed/matmul_floor.py`) run as one more contender.
"""

import csv
import json
import os
import platform
import shlex
import statistics
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import h5py
import numpy as np
import tyro

from bench.speed.interleaved_timing import (
    ROOT,
    Contender,
    ContenderError,
    contest,
    machine_facts,
    measure,
    report,
    versions,
    write_rounds,
)
from bench.speed.matmul_floor import PRODUCTS
from bench.speed.step_counter import counted

FOREVER = 100_000_000  # steps: more than any run here makes
LEARNING_STARTS = 2000
ROLLOUT = 2048  # PPO's steps of an iteration, of all environments together
TRANSITIONS = 1_000_000  # of the random dataset, as many as most of D4RL's have
WARM_UPDATES = 150  # more than 100, at which a run traces its update again to check it
WARM_UP_TIMEOUT = 900.0


@dataclass(frozen=True)
class Algorithm:
    """How to start one algorithm: our program as a command, each library's as a class with keyword arguments."""

    ours: str
    warm_steps: int  # compilation is over by then
    peers: tuple[str, ...] = ("sb3", "sbx")
    arguments: dict[str, Any] = field(default_factory=dict)  # of the libraries' class
    dataset: bool = False  # whether it needs one
    loop: str = ""  # our own plain loop, for the peer "loop"
    others: dict[str, str] = field(default_factory=dict)  # programs of ours to compare with, by name

    @property
    def offline(self) -> bool:
        """Return whether gradient steps are counted instead of environment steps."""
        return "count_updates" in self.ours


MODULES = {"sb3": "stable_baselines3", "sbx": "sbx", "d3rlpy": "d3rlpy"}
VENVS = {"sb3": ".venv-peers", "sbx": ".venv-peers", "d3rlpy": ".venv-d3rlpy", "loop": ".venv"}
VARIANTS = {  # of our program, with the flags that make them
    "cpu": {"eager": ["--no-compile"], "bfloat16": ["--products", "bfloat16"]},
    "cuda": {"eager": ["--no-cuda-graph"], "compiled": ["--compile"]},
}
OFF_POLICY = {
    "learning_starts": LEARNING_STARTS,
    "batch_size": 256,
    "train_freq": 1,
    "gradient_steps": -1,  # as many updates as environment steps, with any number of environments
    "policy_kwargs": {"net_arch": [256, 256], "n_critics": 2},
}
DROQ = "--utd 20 --policy-delay 20 --actor-value mean"
AFTER_SAC = {
    "sac-hl-gauss": "sac.py --critic hl-gauss",
    "sac-c51": "sac.py --critic c51",
    "dsac_t": "dsac_t.py",
    "crossq-256": "crossq.py --critic-hidden 256 256",
    "crossq-1024": "crossq.py --critic-hidden 1024 1024",
    "simba_v2-small": "simba_v2.py --size small",
    "droq": f"sac.py {DROQ} --layer-norm --dropout 0.01",
    "redq": f"sac.py {DROQ} --critics 10 --target-critics 2",
    "stream_ac": "stream_ac.py",
}
ALGORITHMS = {
    "sac": Algorithm(
        ours=f"algos/sac.py --learning-starts {LEARNING_STARTS}",
        warm_steps=LEARNING_STARTS + 300,
        arguments=OFF_POLICY,
    ),
    "after-sac": Algorithm(
        ours=f"algos/sac.py --learning-starts {LEARNING_STARTS}",
        warm_steps=LEARNING_STARTS + 300,
        peers=(),
        others={
            name: f"algos/{program}" + (" --learning-starts 900" if name != "stream_ac" else "")
            for name, program in AFTER_SAC.items()
        },
    ),
    "stream_ac": Algorithm(
        ours="algos/stream_ac.py",
        warm_steps=1000,
        peers=(),
    ),
    "td3": Algorithm(
        ours=f"algos/td3.py --learning-starts {LEARNING_STARTS}",
        warm_steps=LEARNING_STARTS + 300,
        arguments=OFF_POLICY | {"policy_delay": 2},
    ),
    "ppo": Algorithm(
        ours=f"algos/ppo.py --rollout-steps {ROLLOUT} --minibatch-size 64 --epochs 10 "
        "--normalize-advantages --no-recompute-advantages",
        warm_steps=3 * ROLLOUT,
        arguments={"n_steps": ROLLOUT, "batch_size": 64, "n_epochs": 10, "policy_kwargs": {"net_arch": [64, 64]}},
    ),
    "iql": Algorithm(
        ours="bench/speed/count_updates.py algos/iql.py --hidden 256 256",
        warm_steps=WARM_UPDATES,
        peers=("d3rlpy",),
        dataset=True,
    ),
    "cql": Algorithm(
        ours="bench/speed/count_updates.py algos/cql.py --hidden 256 256 --critic-hidden 256 256 "
        "--cql-weight 5 --lagrange-gap 0",
        warm_steps=WARM_UPDATES,
        peers=("d3rlpy",),
        arguments={"alpha_learning_rate": 0.0},  # no Lagrange multiplier, as in our program
        dataset=True,
    ),
    "wsrl": Algorithm(  # its online phase, against a loop over separate critics
        ours=f"algos/wsrl.py --offline-steps 0 --online-steps {FOREVER} --warmup-steps 1024",
        warm_steps=1024 + WARM_UPDATES,
        peers=("loop",),
        dataset=True,
        loop="bench/speed/wsrl_loop.py",
    ),
    "fql": Algorithm(
        ours="bench/speed/count_updates.py algos/fql.py",
        warm_steps=WARM_UPDATES,
        peers=("loop",),
        dataset=True,
        loop="bench/speed/fql_loop.py 512 512 512 512",
    ),
    "fql-small": Algorithm(
        ours="bench/speed/count_updates.py algos/fql.py --hidden 256 256 256",
        warm_steps=WARM_UPDATES,
        peers=("loop",),
        dataset=True,
        loop="bench/speed/fql_loop.py 256 256 256",
    ),
    "expo": Algorithm(  # its online phase at --size small, against a loop over separate critics
        ours=f"algos/expo.py --size small --retain none --offline-steps 0 --online-steps {FOREVER} --random-steps 1024",
        warm_steps=1024 + WARM_UPDATES,
        peers=("loop",),
        dataset=True,
        loop="bench/speed/expo_loop.py",
    ),
}


@dataclass(frozen=True)
class Args:
    """Programs and duration of the measurement."""

    algo: Literal["sac", "after-sac", "stream_ac", "td3", "ppo", "iql", "cql", "wsrl", "fql", "fql-small", "expo"] = (
        "sac"
    )
    """Algorithm to measure. iql and cql run on a dataset, compared with d3rlpy. wsrl and expo (online), and fql (on a
    dataset, 512 × 4 or small 256 × 3) are compared with a plain loop."""
    env: str = "HalfCheetah-v4"
    """Any environment that Gymnasium itself registers, or the dataset's."""
    num_envs: int = 1
    """Number of environments of each program, in online learning."""
    dataset: Path | None = None
    """File in D4RL's layout. By default, random numbers in HalfCheetah's shapes."""
    rounds: int = 20
    """Number of rounds. In each, every program runs once, in a new order."""
    slice_seconds: float = 4.0
    """Seconds that each program runs in a round."""
    peers: tuple[Literal["sb3", "sbx", "d3rlpy", "loop"], ...] = ("sb3", "sbx", "d3rlpy", "loop")
    """Libraries to compare with. Those without the algorithm are left out."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device on which all programs compute."""
    variants: tuple[Literal["eager", "bfloat16"], ...] = ()
    """On the CPU, other forms of our program to measure too. On a GPU, eager and compiled are always measured."""
    peers_python: Path | None = None
    """Python that has the peers installed. By default, that of .venv-peers or .venv-d3rlpy."""
    ours: str = ""
    """Our program with its own flags, instead of the algorithm's file. The common flags are appended."""
    script: str = ""
    """Another program to compare with: a command that steps a Gymnasium environment until killed. The word ENV in it
    becomes the environment's id."""
    out: Path | None = None
    """File for the raw rounds. By default, results/speed/<algorithm>-<environment>-<time>.csv."""


def make_file(path: Path, rows: int) -> None:
    """Write a dataset of random numbers in D4RL's layout, with HalfCheetah's 17 observations and 6 actions."""
    random = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        obs = random.standard_normal((rows + 1, 17), np.float32)
        file["observations"], file["next_observations"] = obs[:-1], obs[1:]
        file["actions"] = np.tanh(random.standard_normal((rows, 6), np.float32))
        file["rewards"] = random.standard_normal(rows, np.float32)
        file["terminals"], file["timeouts"] = np.zeros(rows, bool), np.arange(rows) % 1000 == 999
        file.attrs["action_low"], file.attrs["action_high"] = -1.0, 1.0


def environment(device: str = "cpu") -> dict[str, str]:
    """Return the environment variables of every program: no thread settings, and on the CPU no GPU."""
    env = {key: value for key, value in os.environ.items() if not key.endswith("_NUM_THREADS")}
    hidden = {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"} if device == "cpu" else {}
    return env | {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), env.get("PYTHONPATH"))))} | hidden


def peers(args: Args) -> list[str]:
    """Return the peers to run; on a GPU only Stable-Baselines3, which uses the GPU by default."""
    asked = [peer for peer in args.peers if peer in ALGORITHMS[args.algo].peers]
    return [peer for peer in asked if args.device == "cpu" or peer == "sb3"]


def python_of_peers(args: Args) -> Path:
    """Return the path of the Python that has the peers installed."""
    first = ALGORITHMS[args.algo].peers[:1] or ("loop",)
    return args.peers_python or ROOT / VENVS[first[0]] / "bin" / "python"


def commands(args: Args, folder: Path) -> dict[str, list[str]]:
    """Return the command of every contender by name, our program first and the floor last."""
    algorithm = ALGORITHMS[args.algo]
    data = str((args.dataset or folder / "data.hdf5").resolve())
    env_id = args.env if algorithm.offline else counted(args.env)
    ours = shlex.split(args.ours) if args.ours else [sys.executable, *shlex.split(algorithm.ours)]
    ours += ["--env", env_id, *(["--dataset", data] if algorithm.dataset else ["--total-steps", str(FOREVER)])]
    ours += ["--offline-steps", str(FOREVER)] if algorithm.offline else []
    ours += ["--eval-every", str(FOREVER), "--run-dir", str(folder / "run"), "--seed", "0"]
    ours += ["--num-envs", str(args.num_envs), "--device", args.device]
    lines = {"ours": ours}
    for name, flags in VARIANTS[args.device].items():
        if args.device == "cuda" or name in args.variants:
            lines[name] = [*ours, *flags]
            lines[name][ours.index("--run-dir") + 1] = str(run_of(name, folder))
    for name, other in algorithm.others.items():
        common = ours[ours.index("--env") :]
        lines[name] = [sys.executable, *shlex.split(other), *common]
        lines[name][lines[name].index("--run-dir") + 1] = str(run_of(name, folder))
    if args.script:
        lines["script"] = [env_id if word == "ENV" else word for word in shlex.split(args.script)]
    for peer in peers(args):
        if peer == "loop":
            lines[peer] = [sys.executable, *shlex.split(algorithm.loop), data if algorithm.offline else env_id]
            continue
        theirs = dict(algorithm.arguments)
        if "n_steps" in theirs:  # the libraries count the steps of each environment
            theirs["n_steps"] //= args.num_envs
        places = [data, str(folder / "d3rlpy")] if algorithm.offline else [env_id, str(args.num_envs)]
        program = [str(python_of_peers(args)), "bench/speed/peer.py", f"{MODULES[peer]}:{args.algo.upper()}"]
        lines[peer] = [*program, *places, json.dumps(theirs)]
    if args.algo in PRODUCTS and args.device == "cpu":
        lines["floor"] = [sys.executable, "bench/speed/matmul_floor.py", args.algo, env_id]
    return lines


def run_of(name: str, folder: Path) -> Path:
    """Return the run folder of a program of ours."""
    return folder / ("run" if name == "ours" else f"run-{name}")


def describe(args: Args) -> dict[str, str]:
    """Return the facts that a reader needs to judge the figures."""
    offline = ALGORITHMS[args.algo].offline
    where = f"a dataset of {args.env}" if offline else f"{args.env}, {args.num_envs} environment(s)"
    dataset = args.dataset.name if args.dataset else f"{TRANSITIONS:,} random transitions"
    return {
        "algorithm": f"{args.algo} on {where}",
        **({"dataset": dataset} if offline else {}),
        "measured": f"{args.rounds} rounds of {args.slice_seconds:g} s each",
        **machine_facts(args.device),
        "system": platform.platform(),
        "ours": args.ours or ALGORITHMS[args.algo].ours,
        "versions of ours": versions(sys.executable),
        **({"script": args.script} if args.script else {}),
        **({"versions of the peers": versions(python_of_peers(args))} if peers(args) else {}),
    }


def form_of(run: Path) -> dict[str, str]:
    """Return the form of a run's updates as a fact, or none if its config.json is missing or of an older version."""
    config = run / "config.json"
    form = json.loads(config.read_text()).get("form") if config.exists() else None
    return {"form": form} if form else {}


def has_losses(metrics: Path) -> bool:
    """Return whether our run has logged an update."""
    return metrics.exists() and ",losses/" in metrics.read_text()


def update_times(metrics: Path, start: int) -> list[float]:
    """Return our `time/update_ms` values written after byte `start` of the metrics, the beginning of the rounds."""
    if not metrics.exists():
        return []
    rows = csv.reader(metrics.read_text()[start:].splitlines())
    return [float(row[2]) for row in rows if len(row) == 3 and row[1] == "time/update_ms"]


def main(args: Args) -> None:
    """Warm up each contender alone, run all in alternation, and print the report.

    Raise ContenderError if the peers' Python is missing or a contender fails.
    """
    algorithm = ALGORITHMS[args.algo]
    if peers(args) and not python_of_peers(args).exists():
        cure = f"make {VENVS[algorithm.peers[0]]}/installed, or give --peers without a value"
        raise ContenderError(f"{python_of_peers(args)} is missing: {cure}")
    facts = describe(args)
    for key, value in facts.items():
        print(f"{key}: {value}")
    stamp = time.strftime("%Y-%m-%dT%H%M%S")
    out = args.out or ROOT / "results" / "speed" / f"{args.algo}-{args.env.replace('/', '_')}-{stamp}.csv"
    with contest() as (contenders, folder):
        if algorithm.dataset and not args.dataset:
            make_file(folder / "data.hdf5", TRANSITIONS)
        for name, command in commands(args, folder).items():
            warm = WARM_UPDATES if name == "floor" else algorithm.warm_steps
            contender = Contender(name, command, environment(args.device), folder, warm)
            of_ours = name in ("ours", *VARIANTS[args.device], *algorithm.others)
            if of_ours and not algorithm.offline:
                # A run evaluates in counted environments before it learns, so its steps do not show that it is warm.
                contender.learns = partial(has_losses, run_of(name, folder) / "metrics.csv")
            contenders.append(contender)
            contender.warm_up(WARM_UP_TIMEOUT)
            facts[f"threads of {name}"] = str(contender.threads())
            print(f"threads of {name}: {contender.threads()}", flush=True)
        facts |= form_of(run_of("ours", folder))
        metrics = run_of("ours", folder) / "metrics.csv"
        start = metrics.stat().st_size if metrics.exists() else 0
        slices = measure({c.name: [c] for c in contenders}, args.rounds, args.slice_seconds, out, facts)
        updates = update_times(metrics, start) if args.device == "cpu" else []  # on a GPU this is only the launch
        if updates:
            facts["our update alone in ms"] = f"{statistics.median(updates):.3f}"
            write_rounds(out, facts, slices)
        print(report(slices, updates))
    print(f"\nraw rounds: {out}")


if __name__ == "__main__":
    try:
        main(tyro.cli(Args))
    except ContenderError as error:
        sys.exit(f"speed: {error}")
