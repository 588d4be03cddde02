"""Set-up happens once, and again when its inputs change. A program needs that of its own checkout."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from conftest import ROOT


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["make", *arguments], cwd=folder, capture_output=True, text=True, check=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkout's set-up files, with an environment that looks installed."""
    for name in ("Makefile", "requirements.txt", "requirements.lock", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "installed").touch()
    return tmp_path


@pytest.mark.parametrize("target", ["setup", "train", "test", "lint"])
def test_nothing_is_installed_again_when_nothing_changed(folder: Path, target: str):
    assert "pip install" not in make(folder, "--dry-run", target).stdout
    for changed in ("requirements.txt", "pyproject.toml"):
        assert "pip install" in make(folder, "--dry-run", "--what-if", changed, target).stdout


@pytest.mark.parametrize(
    ("arguments", "peers"),
    [("", {"peers"}), ("--algo ppo", {"peers"}), ("--algo cql", {"d3rlpy"}), ("--algo wsrl", set())],
)
def test_speed_installs_only_those_it_runs_beside(folder: Path, arguments: str, peers: set[str]):
    (folder / "bench" / "speed").mkdir(parents=True)
    for name in ("peers", "d3rlpy"):
        (folder / "bench" / "speed" / f"{name}-requirements.txt").touch()
    said = make(folder, "--dry-run", "speed", f"ARGS={arguments}").stdout
    assert {name for name in ("peers", "d3rlpy") if f"-r bench/speed/{name}-requirements.txt" in said} == peers


def test_video_installs_what_it_needs_once(folder: Path):
    assert "-e '.[video]'" in make(folder, "--dry-run", "video", "RUN=runs/x").stdout
    (folder / ".venv" / "video").touch()
    said = make(folder, "--dry-run", "video", "RUN=runs/x", "ARGS=--episodes 2").stdout
    assert "pip install" not in said
    assert "tools/video.py runs/x --episodes 2" in said
    assert "tools/video.py runs/x --play" in make(folder, "--dry-run", "play", "RUN=runs/x").stdout


def test_another_python_is_refused_with_the_cure(folder: Path):
    (folder / ".venv" / "installed").unlink()
    (folder / "python").write_text("#!/bin/sh\n[ \"$1\" = --version ] && echo 'Python 3.9.1' || exit 1\n")
    (folder / "python").chmod(0o755)
    result = make(folder, "setup", "PYTHON=./python")
    assert result.returncode == 2
    assert "needs Python 3.11 to 3.13, but this is Python 3.9.1: use make PYTHON=" in result.stderr
    assert not (folder / ".venv" / "installed").exists()


def test_help_lists_every_target(folder: Path):
    said = make(folder, "help").stdout
    for target in ("help", "setup", "train", "test", "lint", "speed", "report", "compare", "video", "play"):
        assert f"make {target} " in said


def test_requirements_are_pinned_and_end_with_the_project():
    lines = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if line and line[0] != "#"]
    assert lines[-1] == "-e ."
    assert all("==" in line for line in lines[:-1])


def test_the_lock_file_has_every_pinned_version_with_hashes():
    """A requirement that changed needs a new requirements.lock, whose first lines say how it is made."""
    pinned = re.findall(r"^([\w-]+==\S+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    locked = (ROOT / "requirements.lock").read_text()
    packages = re.split(r"^(?=[\w.-]+==)", locked, flags=re.MULTILINE)[1:]
    assert len(pinned) > 20
    assert set(pinned) <= {package.split()[0] for package in packages}
    assert all("--hash=sha256:" in package for package in packages)


def test_what_running_needs_is_declared():
    """`pip install .` brings the packages under the first heading of requirements.txt."""
    first = (ROOT / "requirements.txt").read_text().partition("\n\n")[0]
    needed = set(re.findall(r"^([\w-]+)==", first, re.MULTILINE))
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {re.match(r"[\w-]+", each)[0] for each in declared} == needed


def test_the_program_of_another_checkout_is_refused(tmp_path: Path):
    """Where Python imports the packages of this one, as after `pip install -e`. With its own, the program starts."""
    for name in ("algos", "common", "envs", "offline"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    line = [sys.executable, str(tmp_path / "algos" / "sac.py"), "--help"]
    refused, started = (
        subprocess.run(line, env=os.environ | {"PYTHONPATH": str(root)}, capture_output=True, text=True, check=False)
        for root in (ROOT, tmp_path)
    )
    assert (refused.returncode, started.returncode) == (2, 0)
    assert refused.stderr == (
        f"sac.py: it belongs to {tmp_path}, but Python imports `common` from {ROOT}: run `make setup` in {tmp_path} "
        f"and use its .venv, or set PYTHONPATH={tmp_path}\n"
    )
