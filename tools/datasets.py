"""Our own suite of datasets: halfcheetah, hopper, walker2d × medium, medium-replay, expert, 200,000 transitions each.

    make datasets                                  # writes data/, and descriptions to results/datasets/ or to data/
    make datasets ARGS="--experts path/to/zips"    # reads the experts' policies from there instead of the web

The datasets are made as D4RL's (Fu et al. 2020, section 5). An online run stops near a third of the expert's return.
Samples of its policy give medium, and its whole replay buffer gives medium-replay. Another agent gives expert. The
networks of the runs are small on purpose: learning must take all of the 200,000 steps that the replay buffer holds.
Each command does nothing if its result exists, so the same command resumes a suite that was stopped.
"""

import common.start

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from common.arguments import at_least
from common.command_line import command_line
from common.errors import InputError, RunError
from common.files import write_json
from common.messages import log
from common.provenance import sha256_of
from common.schema import read_json
from offline.dataset import load
from offline.download import download
from tools import inspect_dataset

ROOT = Path(__file__).resolve().parents[1]
AGENTS = "https://github.com/DLR-RM/rl-trained-agents/raw/master/tqc"  # MIT licence
TRANSITIONS = 200_000


class Robot(NamedTuple):
    """How to make a robot's datasets: its environment, the flags of the medium run, the SHA-256 of the expert."""

    env: str
    medium: str
    sha256: str


SUITE = {
    "halfcheetah": Robot(
        "HalfCheetah-v4",
        "--hidden 64 64 --actor-lr 1e-4 --critic-lr 1e-4 --alpha-lr 1e-4",
        "836e9f4d641c68c06e6dbe6c06f907eda943627ef1cece324bac4d007a757b9f",
    ),
    "hopper": Robot("Hopper-v4", "--hidden 64 64", "ad04cf1b354adb8810cd2a98f45f3c5179bd5c6d9fa83a1a7b8c1157094417e3"),
    "walker2d": Robot(
        "Walker2d-v4",
        "--hidden 128 128 --actor-lr 4e-4 --critic-lr 4e-4 --alpha-lr 4e-4",
        "329d4c4e0983a53e67c27cd3f69a2d3a8bb3e93aeb2de639ba68f9b6af5eb7e1",
    ),
}


@dataclass
class Args:
    """Folders and number of processes."""

    folder: Path = ROOT / "data"
    """Folder of the datasets and of the runs that make them."""
    experts: Path = ROOT / "data" / "policies"
    """Folder of tqc-<robot>-v3.zip, Stable-Baselines3's trained agents. Missing ones are downloaded."""
    jobs: int = 2
    """Number of commands that run at once, with one thread each."""


def build(name: str, args: Args) -> None:
    """Make the three datasets of one robot."""
    robot = SUITE[name]
    run, expert = args.folder / "runs" / name, args.experts / f"tqc-{name}-v3.zip"
    if not expert.exists():
        trained_on = robot.env.replace("v4", "v3")
        download(f"{AGENTS}/{trained_on}_1/{trained_on}.zip", expert, lambda part: _check(part, robot.sha256))
    _check(expert, robot.sha256)
    train = f"algos/sac.py --env {robot.env} --seed 1 --total-steps {TRANSITIONS} --eval-every 10000 {robot.medium}"
    _run(f"{train} --run-dir", str(run))
    collect = f"-m tools.collect --env {robot.env} --transitions {TRANSITIONS}"
    _run(f"{collect} --policy", str(run), "--output", str(args.folder / f"{name}-medium.hdf5"))
    _run("-m tools.collect --replay", str(run), "--output", str(args.folder / f"{name}-medium-replay.hdf5"))
    _run(f"{collect} --policy", str(expert), "--output", str(args.folder / f"{name}-expert.hdf5"))


def describe(name: str, kind: str, folder: Path, described: Path = ROOT / "results" / "datasets") -> None:
    """Write what a dataset holds to results/datasets/. Coverage is relative to the robot's replay buffer.

    If another dataset of this name is described there already, the description stays next to the dataset.
    """
    path, reference = folder / f"{name}-{kind}.hdf5", folder / f"{name}-medium-replay.hdf5"
    written, out = path.with_suffix(".json"), described / f"{name}-{kind}.json"
    inspect_dataset.main(inspect_dataset.Args(str(path), reference=str(reference), json=written))
    found = json.loads(written.read_text())
    del found["columns"]
    found |= {"id": path.name, "SACo of": reference.name, "fingerprint": load(str(path)).fingerprint()}
    published = read_json(out, {"fingerprint": str}, "is damaged: restore it, then run the same command again")
    if published and published["fingerprint"] != found["fingerprint"]:
        out = written
        log.info(f"{path} differs from the dataset of the published results: its description is in {out}")
    write_json(out, found)


def _check(path: Path, sha256: str) -> None:
    if sha256_of(path) != sha256:
        raise InputError(f"{path} is not the suite's expert: give other --experts (SHA-256 {sha256})")


def _run(line: str, *paths: str) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *line.split(), *paths], check=False, cwd=ROOT, env=environment)
    if done.returncode:
        raise RunError(f"python {line.partition(' --')[0]} failed: see above")


def main(args: Args) -> None:
    """Build and describe all datasets."""
    at_least(1, jobs=args.jobs)
    args.folder, args.experts = args.folder.resolve(), args.experts.resolve()
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(lambda name: build(name, args), SUITE))
    for name in SUITE:
        for kind in ("medium", "medium-replay", "expert"):
            describe(name, kind, args.folder)


if __name__ == "__main__":
    command_line(main, Args)
