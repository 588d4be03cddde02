"""`make faults`: a small part of it, and whether it would notice a failure."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

from bench.faults import faults, runs
from bench.faults.comparison import differences
from bench.faults.folders import compared
from bench.faults.runs import Verdict, execute, judged
from common.errors import InputError


def test_a_few_faults_of_each_class_end_well(tmp_path: Path):
    """In a process of its own, because this one may have threads, which a fork loses."""
    line = [sys.executable, str(ROOT / "bench" / "faults" / "faults.py"), "--seed", "7", "--cases", "2"]
    report = tmp_path / "report.json"
    ended = subprocess.run([*line, "--json", str(report)], capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(report.read_text())
    assert found["failures"] == []
    assert found["counts"].keys() == faults.CLASSES.keys()
    assert {outcome for count in found["counts"]["kills"].values() for outcome in count} == {"continued"}


@dataclass
class Args:
    pass


def fails(_: Args) -> None:
    raise ValueError("wrong")


def hangs(_: Args) -> None:
    time.sleep(60)


def says_too_much(_: Args) -> None:
    raise InputError("one\ntwo\nthree")


def leaves(_: Args) -> None:
    raise SystemExit(3)


def refuses(_: Args) -> None:
    raise InputError("--x is 1: give 2")


@pytest.mark.parametrize(
    ("main", "outcome"),
    [
        (fails, "TRACEBACK"),
        (hangs, "HANG"),
        (says_too_much, "MESSAGE"),
        (leaves, "MESSAGE"),
        (refuses, "refused"),
        (lambda _: None, "accepted"),
    ],
)
def test_how_a_command_is_judged(
    main: Callable[[Any], None], outcome: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(runs, "SECONDS", 1.0)
    assert judged(execute("p.py", main, Args, [], tmp_path), "p.py").outcome == outcome


@pytest.mark.parametrize(
    ("file", "changed", "differs"),
    [
        ("metrics.csv", "step,name,value\n1,time/act,9\n1,loss,2\n", False),
        ("metrics.csv", "step,name,value\n1,time/act,5\n1,loss,3\n", True),
        ("evaluations.csv", "step\n2\n", True),
        ("DONE", '{"step": 1, "checksums": {"metrics.csv": "b", "evaluations.csv": "c"}}', False),
        ("DONE", '{"step": 1, "checksums": {"metrics.csv": "b", "evaluations.csv": "d"}}', True),
        ("DONE", "{", True),
        ("config.json.part", "", True),
    ],
)
def test_only_times_may_differ(file: str, changed: str, differs: bool, tmp_path: Path):
    for name in ("run", "whole"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.csv").write_text("step,name,value\n1,time/act,5\n1,loss,2\n")
        (tmp_path / name / "evaluations.csv").write_text("step\n1\n")
        (tmp_path / name / "DONE").write_text('{"step": 1, "checksums": {"metrics.csv": "a", "evaluations.csv": "c"}}')
    (tmp_path / "run" / file).write_text(changed)
    assert differences(tmp_path / "run", tmp_path / "whole") == [file] * differs
    found = compared(Verdict("continued"), tmp_path / "run", tmp_path / "whole")
    assert found.outcome == ("WRONG" if differs else "continued")


def test_a_seed_and_a_name_determine_a_fault():
    draw = faults.CLASSES["flags"][1]
    first, again, other = (draw("sac", seed, 5) for seed in (1, 1, 2))
    assert first.what == again.what != other.what
    assert draw("sac", 1, 10**6) is None


@pytest.mark.parametrize("words", [{"only": ("kill",)}, {"only": ("kills", "dqn")}, {"cases": 0}, {"seed": -1}])
def test_wrong_arguments_are_refused(words: dict[str, Any]):
    with pytest.raises(InputError, match=r"--(only|cases|seed) is "):
        faults.Args(**words)


@pytest.mark.parametrize("name", ["kills", "kills/sac", "kills/dqn/1", "kills/sac/-1", "flags/sac/x"])
def test_an_unknown_case_is_refused(name: str):
    with pytest.raises(InputError, match="--case is "):
        list(faults.cases_of(faults.Args(case=name)))


def test_the_page_has_the_table_of_the_last_run():
    text = faults.PAGE.read_text()
    assert faults.with_table(text, json.loads(faults.RESULTS.read_text())) == text
