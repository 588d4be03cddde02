"""Check that Minari, d3rlpy and TorchRL read what `tools.collect` writes, and that we act as Stable-Baselines3 does.

    make libraries

The same transitions are collected as HDF5 files and as Minari datasets. `bench/checks/library_answers.py` compares them
in the libraries' own environment, and trains a policy under a VecNormalize there. That policy must be refused without
its statistics. With those that the lines in docs/data.md export, our actions must be the library's.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import gymnasium as gym
import numpy as np

from common.errors import InputError
from tools.collect import Args, collect
from tools.policies import load_policy

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-libraries" / "bin" / "python"
ENVIRONMENTS = ("HalfCheetah-v4", "AdroitHandPen-v1", "PointMaze_UMaze-v3")  # time limit, success, dict observations


def export_lines() -> str:
    """Return the lines of docs/data.md that export a VecNormalize's statistics."""
    blocks = re.findall(r"(?:^    .*\n|^\n)+", (ROOT / "docs" / "data.md").read_text(), re.MULTILINE)
    (block,) = [block for block in blocks if "vecnormalize.pkl" in block]
    return re.sub(r"^    ", "", block, flags=re.MULTILINE)


def run_library(folder: Path, *arguments: str) -> str:
    """Return what Python printed in the libraries' environment; end the program if it failed."""
    done = subprocess.run([str(PYTHON), *arguments], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.stderr.write(done.stderr)
        raise SystemExit(1)
    return done.stdout


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["MINARI_DATASETS_PATH"] = str(folder / "minari")
        for env in ENVIRONMENTS:
            for output in (f"minari:mine/{env}", str(folder / f"{env}.hdf5")):
                collect(Args(output, env, ("random",), transitions=2_000, num_envs=2))
        obs = np.random.default_rng(0).normal(size=(200, 3)).astype(np.float32)
        np.save(folder / "obs.npy", obs)
        answers = run_library(folder, str(ROOT / "bench" / "checks" / "library_answers.py"), name)
        sys.stdout.writelines(f"{line}\n" for line in answers.splitlines() if line.startswith("ok "))
        source, pendulum = str(folder / "policy.zip"), gym.make("Pendulum-v1")
        try:
            load_policy(source, pendulum, 0, deterministic=True)
            raise AssertionError("the policy was not refused without its statistics")
        except InputError:
            pass
        run_library(folder, "-c", export_lines())
        policy = load_policy(source, pendulum, 0, deterministic=True)
        difference = float(
            np.abs(2.0 * policy(obs) - np.load(folder / "actions.npy")).max()
        )  # Pendulum's are in [-2, 2]
        assert difference < 1e-5, f"actions under a VecNormalize differ by {difference}"
    sys.stdout.write(f"ok a Stable-Baselines3 policy under VecNormalize: actions differ by at most {difference:.1e}\n")


if __name__ == "__main__":
    main()
