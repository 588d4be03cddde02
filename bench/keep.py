"""Keeps what the tables need of a run: config.json, without the folders of this machine, and evaluations.csv.

python bench/keep.py runs/iql__hopper-medium__1 results/offline/iql/hopper-medium/1
"""

import json
import sys
from pathlib import Path

from common.checkpoint import replacing

PATHS = ("dataset", "run_dir", "init_from")


def keep(run: Path, kept: Path) -> None:
    """Of a path only the last part stays, of the run's own folder nothing."""
    config = json.loads((run / "config.json").read_text())
    arguments = config["arguments"]
    arguments |= {name: Path(arguments[name]).name for name in PATHS if arguments.get(name)}
    arguments.pop("run_dir", None)
    kept.mkdir(parents=True, exist_ok=True)
    for name, data in (
        ("config.json", (json.dumps(config, indent=2) + "\n").encode()),
        ("evaluations.csv", (run / "evaluations.csv").read_bytes()),
    ):
        with replacing(kept / name) as file:
            file.write(data)


if __name__ == "__main__":
    keep(*map(Path, sys.argv[1:]))
