"""Check that our D4RL reader equals D4RL's package: ids, addresses, reference scores, and both conversions bit for bit.

    make d4rl

The files are random, in D4RL's layout, with and without the columns that some of its versions left out. D4RL's
environments need mujoco-py; its tables, reader and conversions do not.
"""

import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import h5py
import numpy as np

from offline import d4rl
from offline.recording import TransitionBlock

HORIZON = 7


def make_file(path: Path, seed: int, timeouts: bool, next_observations: bool, terminals: float) -> None:
    """Write random transitions, of which a share of `terminals` ends an episode."""
    random = np.random.default_rng(seed)
    rows = 200 + seed
    with h5py.File(path, "w") as file:
        file["observations"] = random.standard_normal((rows, 3))
        file["actions"] = random.uniform(-1, 1, (rows, 2)).astype(np.float32)
        file["rewards"] = random.standard_normal(rows)
        file["terminals"] = random.random(rows) < terminals
        file["infos/qpos"] = random.standard_normal((rows, 2))
        if timeouts:
            file["timeouts"] = random.random(rows) < 0.1
        if next_observations:
            file["next_observations"] = random.standard_normal((rows, 3)).astype(np.float32)


def check_ids(answers: dict[str, dict[str, list[float | None] | str]]) -> None:
    """Check that ids, addresses and reference scores are equal."""
    os.environ.pop("D4RL_MIRROR", None)
    assert answers["urls"] == {name: d4rl.url(name) for name in d4rl.IDS}, "ids or addresses differ"
    for name, entry in d4rl.IDS.items():
        assert answers["scores"][name] == list(entry.reference or (None, None)), f"{name}: reference scores differ"


def check_conversions(path: Path) -> int:
    """Check `qlearning_dataset` and `sequence_dataset` of one file, and return the number of compared transitions."""
    theirs = np.load(path.with_suffix(".qlearning.npz"))
    with h5py.File(path) as file:
        horizon = None if "timeouts" in file else HORIZON
    recording = d4rl.read(str(path), compat=True, horizon=horizon)
    ours = TransitionBlock(
        *(np.concatenate(parts).astype(np.float32) for parts in zip(*recording.blocks(), strict=True))
    )
    keys = ("observations", "actions", "rewards", "next_observations", "terminals")
    for key, part in zip(keys, ours, strict=True):
        assert np.array_equal(part, theirs[key].astype(np.float32)), f"{path.name}: {key} differ"
    episodes = list(d4rl.trajectories(str(path), compat=True, horizon=horizon))
    lengths, *parts = np.load(path.with_suffix(".sequences.npz")).values()
    assert [len(episode["rewards"]) for episode in episodes] == lengths.tolist(), f"{path.name}: episodes differ"
    for key, part in zip(episodes[0], parts, strict=True):
        joined = np.concatenate([episode[key] for episode in episodes])
        assert np.array_equal(joined, part), f"{path.name}: sequences of {key} differ"
    return len(recording)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cases = list(itertools.product((True, False), (True, False), (0.0, 0.02, 0.3)))
        for seed, case in enumerate(cases * 3):
            make_file(folder / f"{seed}.hdf5", seed, *case)
        line = [".venv-d4rl/bin/python", str(Path(__file__).with_name("d4rl_answers.py")), name, str(HORIZON)]
        subprocess.run(
            line, check=True, env=os.environ | {"D4RL_SUPPRESS_IMPORT_ERROR": "1"}, stderr=subprocess.DEVNULL
        )
        check_ids(json.loads((folder / "ids.json").read_text()))
        files = sorted(folder.glob("*.hdf5"))
        compared = sum(map(check_conversions, files))
    sys.stdout.write(
        f"equal to D4RL's package: {len(d4rl.IDS)} ids with addresses and reference scores; "
        f"{compared:,} transitions and all episodes of {len(files)} files\n"
    )


if __name__ == "__main__":
    main()
