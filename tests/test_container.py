"""The Dockerfile installs what is pinned, copies what exists, and its check selects tests that run something."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from conftest import ROOT

TEXT = (ROOT / "Dockerfile").read_text()
STEPS = [line for line in TEXT.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]
IGNORED = (ROOT / ".dockerignore").read_text().splitlines()


def step(word: str) -> list[str]:
    """Return what follows this instruction, each time that the Dockerfile has it."""
    return [line.partition(" ")[2] for line in STEPS if line.startswith(f"{word} ")]


def test_what_is_copied_exists() -> None:
    for copied in step("COPY"):
        _, *sources, _ = copied.split()
        assert all((ROOT / source).exists() for source in sources), copied


def test_the_image_leaves_out_what_git_ignores() -> None:
    """A virtual environment, runs and data of the user do not get into an image."""
    assert ".git" in IGNORED
    for line in (ROOT / ".gitignore").read_text().split():
        assert f"**/{line.rstrip('/')}" in IGNORED, line


def installing() -> str:
    """Return the step that installs the requirements, with sh's words for one space."""
    (found,) = (" ".join(run.split()) for run in step("RUN") if "requirements.txt" in run)
    return found


@pytest.mark.parametrize(("device", "by_uv"), [("cpu", True), ("cuda", False), ("tpu", None)])
def test_the_device_chooses_the_build_of_torch(device: str, by_uv: bool | None, tmp_path: Path) -> None:
    """Without installing: pip and uv are programs that print their arguments. Another device is refused."""
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("pip", "uv"):
        (programs / name).write_text(f'#!/bin/sh\necho "{name} $*"\n[ "$2" != --requirement ] || cat\n')
        (programs / name).chmod(0o755)
    (tmp_path / "requirements.txt").write_text((ROOT / "requirements.txt").read_text())
    script = installing().replace("python3 -m venv .venv", "true").replace("/dev/stdin", "-")
    line = ["sh", "-c", script]
    done = subprocess.run(line, cwd=tmp_path, env={"PATH": "/usr/bin:/bin", "DEVICE": device}, capture_output=True,
                          text=True, check=False)  # fmt: skip
    if by_uv is None:
        assert (done.returncode, done.stderr) == (2, "DEVICE is tpu: give cpu or cuda\n")
        return
    assert done.returncode == 0, done.stderr
    torch = re.search(r"^torch==\S+$", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    assert torch
    printed = done.stdout.splitlines()
    chosen = f"uv pip install --python .venv/bin/python --torch-backend cpu {torch[0]}"
    assert (printed[0].startswith("pip install uv==") and printed[1] == chosen) == by_uv
    pinned = [each for each in (ROOT / "requirements.txt").read_text().splitlines() if each != "-e ."]
    assert printed[-len(pinned) :] == pinned


def test_the_image_has_a_python_that_the_project_takes() -> None:
    """Debian 12 has Python 3.11. No step after the folder is made runs as root."""
    assert step("FROM") == ["debian:bookworm-slim"]
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert wanted.startswith(">=3.11,")
    words = [line.split()[0] for line in STEPS]
    assert step("USER") == ["onramp"]
    assert words.index("USER") < words.index("WORKDIR") < words.index("COPY")


def test_smoke_selects_a_training_of_each_algorithm() -> None:
    """With the command of the page and of the Dockerfile's head. What make exports reaches no other test's make."""
    page = (ROOT / "docs" / "containers.md").read_text()
    assert all('docker run --rm onramp make test ARGS="-k smoke"' in text for text in (page, TEXT))
    files = [str(ROOT / "tests" / name) for name in ("test_smoke.py", "packages/docs/test_commands.py")]
    line = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-k", "smoke", *files]
    exported = {"ARGS": "-k smoke", "MAKEFLAGS": r" -- ARGS=-k\ smoke"}
    done = subprocess.run(line, cwd=ROOT, env=os.environ | exported, capture_output=True, text=True, check=False)
    assert " -k smoke]" not in done.stdout
    selected = set(re.findall(r"test_smoke\.py::test_every_algorithm_trains\[(\w+)\]", done.stdout))
    assert selected == {path.stem for path in (ROOT / "algos").glob("*.py")} - {"__init__"}
