"""Tests leave the user's own files alone, and `.ci/untouched.py` notices if one does not."""

import runpy
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT, module

from common.run_folder import name_and_folder

run_untouched = runpy.run_path(str(ROOT / ".ci" / "untouched.py"))["run_untouched"]


def test_each_test_runs_in_a_folder_of_its_own(tmp_path: Path):
    """A run without --run-dir, as `make train` starts it, is in the test's own folder."""
    assert Path.cwd() == tmp_path
    assert ROOT not in name_and_folder("sac", module("sac").Args())[1].resolve().parents


@pytest.mark.parametrize(
    ("command", "noticed"),
    [
        ("cat runs/sac/config.json", ["read runs/sac/config.json"]),
        ("ls runs/sac", ["read runs/sac"]),
        ("echo more >> runs/sac/config.json", ["wrote, made or deleted runs/sac/config.json"]),
        ("touch -m runs/sac/config.json", ["wrote, made or deleted runs/sac/config.json"]),
        ("cat notes.csv", ["read notes.csv"]),
        ("ls drafts", ["read drafts"]),
        ("mkdir newdir", ["wrote, made or deleted newdir"]),
        ("rmdir drafts/empty", ["wrote, made or deleted drafts/empty"]),
        ("ln -s /etc link", ["wrote, made or deleted link"]),
        ("ln -sfn /usr old_link", ["wrote, made or deleted old_link"]),
        ("mkdir runs/td3 && echo > runs/td3/DONE", [f"wrote, made or deleted runs/td3{x}" for x in ("", "/DONE")]),
        ("rm runs/sac/config.json", ["wrote, made or deleted runs/sac/config.json"]),
        ("echo > report.html", ["wrote, made or deleted report.html"]),
        ("echo >> README.md", ["wrote, made or deleted README.md"]),
        ("cat README.md; mkdir -p tests/__pycache__ .venv && touch tests/__pycache__/a.pyc .venv/installed", []),
    ],
)
def test_use_of_the_checkout_is_noticed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], command: str, noticed: list[str]
):
    """A read, changed, new or missing file, folder or link ends with 1 and is named; tracked files may be read."""
    (tmp_path / "runs" / "sac").mkdir(parents=True)
    (tmp_path / "runs" / "sac" / "config.json").write_text("{}")
    (tmp_path / "tests").mkdir()
    for name, text in {"README.md": "# onramp", ".gitignore": "runs/", "tests/test_a.py": ""}.items():
        (tmp_path / name).write_text(text)
    subprocess.run("git init --quiet . && git add .", shell=True, cwd=tmp_path, check=True)
    (tmp_path / "notes.csv").write_text("step,return")  # neither tracked nor ignored, as drafts/
    (tmp_path / "drafts" / "empty").mkdir(parents=True)
    (tmp_path / "old_link").symlink_to("/nowhere")
    status = run_untouched(tmp_path, ["sh", "-c", command])
    said = capfd.readouterr().err
    if "keeps no access times" in said:
        pytest.skip("this file system keeps no access times")
    assert status == int(bool(noticed))
    assert [line.partition("the command ")[2] for line in said.splitlines()] == noticed


def test_the_status_of_the_command_stays(tmp_path: Path):
    """Failed tests fail the check, whatever else it finds."""
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    assert run_untouched(tmp_path, ["sh", "-c", "exit 3"]) == 3
