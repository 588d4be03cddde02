"""What `make bench` shows: where the results are, a table in place or changed lines, and a table at the end."""

import json
import os
from collections import Counter
from pathlib import Path

import pytest
from conftest import Terminal

from bench.sweep import sweep
from bench.sweep.sweep import Args, Display, Sweep
from bench.sweep.sweep_task import Job

SUITE = '[[runs]]\nalgo = ["sac", "td3"]\nenvs = "Pendulum-v1"\nflags = "--total-steps 500"\n'


def job_with(folder: Path, step: int, value: float) -> Job:
    """Return a job whose run has one evaluation."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"algo": "sac", "arguments": {"total_steps": 500}}))
    (folder / "evaluations.csv").write_text(
        f"step,episode,return,length,success,normalized_score\n{step},0,{value},9,,\n"
    )
    return Job(("algos/sac.py",), folder, 1)


def screen(text: str) -> list[str]:
    """Return what a terminal shows of a text with line ends, "up" and "clear below"."""
    lines, row = [""], 0
    for part in text.replace("\x1b[J", "\x1b[0J").split("\x1b["):
        digits = len(part) - len(part.lstrip("0123456789"))
        if digits and part[digits] == "A":
            row -= int(part[:digits])
        elif digits and part[digits] == "J":
            lines = lines[: row + 1]
            lines[row] = ""
        for character in part[digits + 1 :] if digits else part:
            if character == "\n":
                row += 1
                lines += [""] * (row + 1 - len(lines))
            else:
                lines[row] += character
    return lines[:-1]


def test_a_table_is_redrawn_in_place(terminal: Terminal, monkeypatch: pytest.MonkeyPatch):
    """What is above it stays, and no line is wider than the terminal or above its top."""
    sizes = iter([os.terminal_size((20, 24))] * 2 + [os.terminal_size((20, 3))])
    monkeypatch.setattr("shutil.get_terminal_size", lambda: next(sizes))
    sweep.log.info("before")
    display = Display()
    tables = [
        "runs a\nruns b\n0 done",
        "runs a\nruns b\n0 done",
        "runs b" + "-" * 40 + "\n1 done",
        "failed\n| x\n| y\n1",
    ]
    seen = []
    for table in tables:
        display.show(table)
        terminal.drawn()
        seen.append(screen(terminal.text))
    assert seen == [
        ["before", "runs a", "runs b", "0 done"],
        ["before", "runs a", "runs b", "0 done"],
        ["before", "runs b-------------", "1 done"],
        ["before", "| y", "1"],
    ]
    assert "\x1b[2J" not in terminal.text


def test_a_file_gets_the_lines_that_changed(capsys: pytest.CaptureFixture[str]):
    display = Display()
    for table in (
        "runs a\nruns b\n0 done",
        "runs a\nruns b\n0 done",
        "runs a, step 5\nruns b\n0 done",
        "runs b\n1 done",
    ):
        display.show(table)
    assert capsys.readouterr().err == "runs a\nruns b\n0 done\nruns a, step 5\n1 done\n"


def test_the_whole_table_has_a_line_for_each_run(tmp_path: Path):
    done, runs = job_with(tmp_path / "sac/Hopper-v4/1", 500, 7.0), job_with(tmp_path / "sac/Walker2d-v4/2", 100, 1234.5)
    failed = Job(("algos/sac.py",), tmp_path / "sac/Ant-v4/1", 1)
    found = Sweep([], [done], {"reference": runs}, [(failed, "ended with 1\nwhy")], Counter())
    assert found.table(whole=True).splitlines() == [
        "done     sac/Hopper-v4/1   step 500 of 500, return 7.0",
        "runs     sac/Walker2d-v4/2 step 100 of 500, return 1,234.5",
        "failed   sac/Ant-v4/1",
        "         | ended with 1",
        "         | why",
        "1 done, 1 running, 0 waiting, 1 failed",
    ]
    assert "Hopper" not in found.table()
    waiting = Job(("algos/sac.py",), tmp_path / "sac/InvertedPendulum-v5/1", 1)
    aligned = Sweep([waiting], [done], {"reference": runs}, [], Counter()).table(whole=True).splitlines()
    assert aligned[0] == f"{'done     sac/Hopper-v4/1':34} step 500 of 500, return 7.0"  # runs that wait set the width


def test_a_sweep_names_its_folder_and_ends_with_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def executed(found: Sweep, args: Args) -> None:
        for job in reversed(found.waiting):  # the order in which they end is another
            found.done.append(job_with(job.folder, 500, 7.0))
        found.waiting.clear()

    monkeypatch.setattr(sweep, "execute", executed)
    (tmp_path / "mine.toml").write_text(SUITE)
    sweep.train(Args(str(tmp_path / "mine.toml"), tmp_path / "runs"))
    out, err = capsys.readouterr()
    assert err == f"2 runs in {tmp_path / 'runs' / 'mine'}, of which 0 are finished\n"
    assert out.splitlines() == [
        "done     sac/Pendulum-v1/1 step 500 of 500, return 7.0",
        "done     td3/Pendulum-v1/1 step 500 of 500, return 7.0",
        "2 done, 0 running, 0 waiting, 0 failed",
        f"results in {tmp_path / 'runs' / 'mine'}",
    ]
