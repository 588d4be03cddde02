"""A minute's check that an installation works, such as that of a container: make test ARGS="-k smoke"."""

import csv
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, command, every_algorithm, flags, module

from common.recorded import CannotCompile, compiler_version


def steps_of(folder: Path) -> set[int]:
    """Return the steps of a run's evaluations."""
    return {int(row["step"]) for row in csv.DictReader((folder / "evaluations.csv").open())}


@every_algorithm
def test_every_algorithm_trains(algo: str, small: Callable[..., Any]) -> None:
    """From Python, to the end of a small run, with evaluations at both ends."""
    args = small(algo, total_steps=60)
    result = module(algo).train(args)
    first, last = args.span
    assert {first, last} <= steps_of(result.folder)
    assert len(result.episodes) == args.eval_episodes


def test_a_compiled_run_is_resumed(tmp_path: Path) -> None:
    """On the command line, with the compiler of the machine."""
    try:
        compiler_version()
    except CannotCompile as error:
        pytest.skip(str(error))
    for steps in (300, 400):
        done = command(*flags(total_steps=steps, learning_starts=50, compile=True, run_dir=tmp_path / "run"))
        assert done.returncode == 0, done.stderr
    assert "resumes from step 300" in done.stderr
    assert json.loads((tmp_path / "run" / "config.json").read_text())["form"] == "recorded"
    assert 400 in steps_of(tmp_path / "run")


def test_a_mujoco_run_makes_a_video(small: Callable[..., Any], tmp_path: Path) -> None:
    """Without a display, with the renderer of the machine."""
    pytest.importorskip("imageio_ffmpeg", reason="make .venv/video installs what writes videos")
    folder = module("sac").train(small("sac", env="InvertedPendulum-v5", total_steps=60, hidden=(16, 16))).folder
    line = [sys.executable, str(ROOT / "tools" / "video.py"), str(folder), "--output", str(tmp_path / "v.mp4")]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "v.mp4").stat().st_size > 1_000
