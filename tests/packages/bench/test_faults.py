"""`make faults`: a small part of it, and whether it would notice a failure."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT, module

from bench.faults import faults
from bench.faults.comparison import _same, differences
from bench.faults.folders import compared
from bench.faults.runs import Verdict, execute, judged
from common.errors import InputError, RunError
from common.run_folder import mark_finished


def test_a_few_faults_of_each_class_end_well(tmp_path: Path):
    """Two cases of each class, of the first algorithms. `make faults` has all of them.

    In a process of its own: PyTorch has computed in this one, and a fork would lose its threads.
    """
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
    time.sleep(300)


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
def test_how_a_command_is_judged(main: Callable[[Any], None], outcome: str, tmp_path: Path):
    seconds = 1.0 if outcome == "HANG" else 60.0
    assert judged(execute("p.py", main, Args, [], tmp_path, seconds=seconds), "p.py").outcome == outcome


@pytest.mark.parametrize(
    ("file", "changed", "differs"),
    [
        ("metrics.csv", "step,name,value\n1,time/act,9\n1,loss,2\n", False),
        ("metrics.csv", "step,name,value\n1,time/act,5\n1,loss,3\n", True),
        ("evaluations.csv", "step\n2\n", True),
        ("DONE", "{", True),
        ("config.json.part", "", True),
    ],
)
def test_only_times_may_differ(file: str, changed: str, differs: bool, tmp_path: Path):
    for name in ("run", "whole"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.csv").write_text("step,name,value\n1,time/act,5\n1,loss,2\n")
        (tmp_path / name / "evaluations.csv").write_text("step\n1\n")
        (tmp_path / name / "config.json").write_text("{}")
        mark_finished(tmp_path / name, 1, {"metrics.csv": "a", "evaluations.csv": "c"})
    (tmp_path / "run" / file).write_text(changed)
    assert differences(tmp_path / "run", tmp_path / "whole") == [file] * differs
    found = compared(Verdict("continued"), tmp_path / "run", tmp_path / "whole")
    assert found.outcome == ("WRONG" if differs else "continued")


@pytest.mark.parametrize(("log", "differs"), [("metrics.csv", False), ("evaluations.csv", True)])
def test_checksums_may_differ_with_the_times_of_a_log(log: str, differs: bool, tmp_path: Path):
    """DONE's own checksum differs in both cases."""
    for name in ("run", "whole"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        mark_finished(tmp_path / name, 1, {log: name})
    assert differences(tmp_path / "run", tmp_path / "whole") == ["DONE"] * differs


def test_the_paths_of_two_runs_may_differ_and_nothing_else(small: Callable[..., Any], tmp_path: Path):
    """As those of a sweep, which gives its runs whole paths."""
    for name, changed in (("run", {}), ("whole", {}), ("other", {"checkpoint_every": 99}), ("seed", {"seed": 2})):
        module("td3").train(small("td3", total_steps=200, run_dir=tmp_path / name, **changed))
    assert differences(tmp_path / "run", tmp_path / "whole") == []
    other = differences(tmp_path / "run", tmp_path / "other")
    assert other == ["config.json", "policy/best.safetensors", "policy/last.safetensors"]
    assert {"evaluations.csv", "checkpoint/state.pt", "DONE"} < set(differences(tmp_path / "run", tmp_path / "seed"))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (np.zeros(2), np.zeros((2, 1))), (np.zeros(1, np.int32), np.zeros(1, np.float32)), (0.0, -0.0), (1, True),
        (torch.zeros(2), torch.zeros(1, 2)), ([1], (1,)), ({"a": 1}, {"a": 1.0}),
    ],
)  # fmt: skip
def test_states_differ_in_type_shape_and_sign(a: object, b: object):
    assert not _same(a, b)
    assert _same(a, a)
    assert _same(float("nan"), float("nan"))


def test_a_case_that_cannot_be_injected_ends_the_program_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The others are not injected first, which took an hour without a word."""

    def draw(algo: str, seed: int, index: int) -> None:
        (tmp_path / str(index)).touch()
        if index == 1:
            raise RunError("no undisturbed run")
        time.sleep(0.1)

    monkeypatch.setattr(faults, "CLASSES", {"kills": (("sac",), draw)})
    with pytest.raises(RunError, match="no undisturbed run"):
        faults.main(faults.Args(cases=40))
    assert 2 <= len(list(tmp_path.iterdir())) < 20


def test_a_seed_and_a_name_determine_a_fault():
    draw = faults.CLASSES["flags"][1]
    first, again, other = (draw("sac", seed, 5) for seed in (1, 1, 2))
    assert first.what == again.what != other.what
    assert draw("sac", 1, 10**6) is None


@pytest.mark.parametrize("words", [
    {"only": ("kill",)}, {"only": ("kills", "dqn")}, {"cases": 0}, {"seed": -1},
    {"only": ("kills",), "json": faults.RESULTS}, {"case": "kills/sac/1", "json": faults.RESULTS},
])  # fmt: skip
def test_wrong_arguments_are_refused(words: dict[str, Any]):
    with pytest.raises(InputError, match=r"--(only|cases|seed|json) is "):
        faults.Args(**words)


@pytest.mark.parametrize("name", ["kills", "kills/sac", "kills/dqn/1", "kills/sac/-1", "flags/sac/x"])
def test_an_unknown_case_is_refused(name: str):
    with pytest.raises(InputError, match="--case is "):
        list(faults.cases_of(faults.Args(case=name)))


def test_the_page_has_the_table_of_the_last_run():
    text = faults.PAGE.read_text()
    assert faults.with_table(text, json.loads(faults.RESULTS.read_text())) == text


def test_the_file_names_a_failure_without_the_paths_of_a_machine():
    text = f'Traceback:\n  File "{faults.ROOT}/envs/make.py"\nValueError: no {faults.ROOT}/tests/a.hdf5\n\n'
    assert faults.last_line(text) == "ValueError: no tests/a.hdf5"
    assert not [each for each in json.loads(faults.RESULTS.read_text())["failures"] if "/site-packages/" in str(each)]
