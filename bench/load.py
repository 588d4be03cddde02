"""A million transitions from a D4RL file to where they are sampled from, beside d3rlpy and D4RL's own conversion.

    make load

The file has the keys, types, chunks and compression of D4RL's v2 files and random content, which packs as badly as
recorded numbers do. Contenders alternate, each time in a new process. Writes results/loading.csv.
"""

import csv
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import tyro
from numpy.typing import NDArray

from common.provenance import versions

ROOT = Path(__file__).resolve().parents[1]
CONTENDERS = {"ours": ".venv", "d3rlpy": ".venv-d3rlpy", "qlearning_dataset": ".venv-d3rlpy"}


@dataclass
class Args:
    """What to measure."""

    transitions: int = 1_000_000
    """Rows of the file."""
    rounds: int = 5
    """How often each is run."""
    out: Path = ROOT / "results" / "loading.csv"
    """Where the raw figures go."""


def make_file(path: Path, rows: int) -> None:
    """HalfCheetah's shapes: 17 observations, 6 actions."""
    random = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        obs = random.standard_normal((rows + 1, 17), np.float32)
        parts: dict[str, NDArray[Any]] = {"observations": obs[:-1], "next_observations": obs[1:]}
        parts |= {"actions": np.tanh(random.standard_normal((rows, 6), np.float32))}
        parts |= {key: random.standard_normal(rows, np.float32) for key in ("rewards", "infos/action_log_probs")}
        parts |= {f"infos/{key}": random.standard_normal((rows, 9)) for key in ("qpos", "qvel")}
        parts |= {"terminals": np.zeros(rows, bool), "timeouts": np.arange(rows) % 1000 == 999}
        for key, values in parts.items():
            file.create_dataset(key, data=values, compression="gzip")
        file.attrs["action_low"], file.attrs["action_high"] = -1.0, 1.0


def once(contender: str, path: Path) -> tuple[float, int, int]:
    """Seconds, bytes at the peak, transitions."""
    line = [ROOT / CONTENDERS[contender] / "bin" / "python", ROOT / "bench" / "load_once.py", contender, path]
    environment = {"PYTHONPATH": str(ROOT), "D4RL_SUPPRESS_IMPORT_ERROR": "1", "OMP_NUM_THREADS": "1", "HOME": "/"}
    done = subprocess.run(list(map(str, line)), env=environment, capture_output=True, text=True, check=True)
    seconds, peak, transitions = done.stdout.split()[-3:]
    return float(seconds), int(peak), int(transitions)


def main(args: Args) -> None:
    rows: list[tuple[int, str, float, int, int]] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data.hdf5"
        make_file(path, args.transitions)
        for number in range(args.rounds):
            for contender in CONTENDERS:
                rows.append((number, contender, *once(contender, path)))
                sys.stderr.write(f"{rows[-1]}\n")
    with args.out.open("w", newline="") as out:
        out.write(f"# transitions in the file: {args.transitions}\n# versions: {versions()}\n")
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(("round", "contender", "seconds", "peak_bytes", "transitions"))
        writer.writerows(rows)
    for contender in CONTENDERS:
        own = [row for row in rows if row[1] == contender]
        seconds, peak = statistics.median(row[2] for row in own), statistics.median(row[3] for row in own)
        sys.stdout.write(f"{contender}: {seconds:.2f} s, {peak / 1e6:.0f} MB at the peak, {own[0][4]:,} transitions\n")


if __name__ == "__main__":
    main(tyro.cli(Args))
