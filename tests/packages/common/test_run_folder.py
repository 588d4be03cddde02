"""A run folder's files are read whole or refused, and its lock keeps other processes out."""

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT, module
from filelock import Timeout

from common.arguments import RunArgs
from common.errors import InputError
from common.evaluate import Episode
from common.run_folder import (
    COLUMNS,
    config_text,
    lock_of,
    read_config,
    read_evaluations,
    read_last_evaluation,
    warn_of_init_from,
)

HOLD = "import sys, time; from pathlib import Path; from common.run_folder import lock_of\n"
HOLD += "with lock_of(Path(sys.argv[1])): print('held', flush=True); time.sleep(600)"
HEADER = ",".join(COLUMNS) + "\n"


@pytest.mark.parametrize(
    "text", [None, "", "{", "[]", "[" * 100_000, '{"algo": "sac"}', '{"algo": 1, "arguments": {}}']
)
def test_config_that_is_not_a_runs_is_refused(tmp_path: Path, text: str | None):
    """The message has the path and what the caller wants said."""
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match=r"config\.json is no good(\n|$)"):
        read_config(tmp_path, "is no good")


def test_no_bit_of_a_config_may_change(tmp_path: Path):
    """Nor of the facts that no program reads. A config without a checksum is an older one."""
    config = {"algo": "sac", "arguments": {"seed": 1, "gamma": 0.99}, "hardware": {"cpu": "µ"}}
    path, text = tmp_path / "config.json", config_text(config).encode()
    refusal = r"config\.json (has changed since the run wrote it|is no good|is of another version)"
    for at in range(len(text)):
        path.write_bytes(text[:at] + bytes([text[at] ^ 1]) + text[at + 1 :])
        if json_or_none(path.read_bytes()) != json.loads(text):  # a blank between two entries means nothing
            with pytest.raises(InputError, match=refusal):
                read_config(tmp_path, "is no good")
    for older in (text, json.dumps(config).encode()):
        path.write_bytes(older)
        assert read_config(tmp_path, "is no good") == config


@pytest.mark.parametrize("more", [0, 100])
def test_a_run_that_starts_over_says_with_what(small: Callable[..., RunArgs], more: int):
    """It was killed before its first checkpoint, and may have more steps now. An eager form is not taken over."""
    args = small(total_steps=100, compile=False)
    module("sac").train(args)
    path = args.run_dir / "config.json"
    first = read_config(args.run_dir, "is no good")
    for name in ("DONE", "checkpoint", "policy"):
        gone = args.run_dir / name
        shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    path.write_text(config_text(first | {"commit": "old", "form": "recorded", "versions": {"torch": "1.0"}}))
    module("sac").train(small(total_steps=100 + more, compile=False))
    now = read_config(args.run_dir, "is no good")
    assert now.pop("arguments") == first.pop("arguments") | {"total_steps": 100 + more}
    assert now == first


def json_or_none(data: bytes) -> object:
    try:
        return json.loads(data)
    except ValueError:
        return None


def test_last_evaluation_is_read(tmp_path: Path):
    """Rows of earlier evaluations are left out."""
    (tmp_path / "evaluations.csv").write_text(f"{HEADER}0,0,1.0,5,,\n9,0,2.5,6,1,\n9,1,3.5,7,0,50\n")
    assert read_last_evaluation(tmp_path) == [Episode(2.5, 6, True), Episode(3.5, 7, False)]


@pytest.mark.parametrize("text", [None, "", "step,return\n1,2\n", f"{HEADER}9,0\n", f"{HEADER}9,0,x,6,1,\n"])
def test_damaged_evaluations_are_refused(tmp_path: Path, text: str | None):
    """Missing, empty, of other columns, cut or not numbers."""
    if text is not None:
        (tmp_path / "evaluations.csv").write_text(text)
    with pytest.raises(InputError, match="missing or damaged"):
        read_last_evaluation(tmp_path)


def test_compressed_evaluations(tmp_path: Path):
    """Equal to the plain ones; a damaged file raises ValueError, also one with a field that is too long for csv."""
    data = gzip.compress(b"step,return\n1,2.0\n")
    path = tmp_path / "evaluations.csv.gz"
    path.write_bytes(data)
    assert read_evaluations(path) == [{"step": "1", "return": "2.0"}]
    for damaged in (data[:-9], b"text", data[:12] + b"\xff" + data[13:], gzip.compress(b"1" * 131_073)):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r".+"):
            read_evaluations(path)


def test_lock_refuses_another_process_until_it_is_killed(tmp_path: Path):
    """The lock of a killed process is free, and a process may take its own again."""
    line, env = [sys.executable, "-c", HOLD, str(tmp_path)], os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(line, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(Timeout):
            lock_of(tmp_path).acquire()
        process.send_signal(signal.SIGKILL)
    failed = lock_of(tmp_path)
    failed.acquire()
    again = lock_of(tmp_path)
    again.acquire()
    again.release(force=True)
    assert not failed.is_locked


def test_the_result_has_the_step_that_the_run_reached(small):
    """Three environments make 201 steps of 200."""
    assert [module("sac").train(small(num_envs=3)).step for _ in range(2)] == [201, 201]


@pytest.mark.parametrize(("was", "here", "told"), [
    ({"env": "A-v0", "gamma": 0.9}, {"env": "A-v0", "gamma": 0.9}, ""),
    ({"env": "A-v0", "gamma": 0.9}, {"env": "A-v0", "gamma": 0.99}, "with --gamma 0.9, and this run has --gamma 0.99:"),
    ({"env": "A-v0", "gamma": 0.9}, {"env": "B-v0", "gamma": 0.5},
     "with --env A-v0 --gamma 0.9, and this run has --env B-v0 --gamma 0.5:"),
    ({"env": "A-v0", "gamma": 0.9}, {"env": "A-v0"}, ""),  # BC has no gamma
    ({"env": "A-v0", "gamma": 0.9}, {}, ""),  # only the base policy is taken
])  # fmt: skip
def test_init_from_another_task_or_gamma_is_told_of(was, here, told: str, tmp_path: Path, capsys):
    (tmp_path / "DONE").touch()
    warn_of_init_from(tmp_path, was, here)
    err = capsys.readouterr().err
    assert told in err
    assert bool(err) == bool(told)


def test_a_run_from_another_gamma_is_told_of(small, tmp_path: Path, capsys):
    short = {"offline_steps": 3, "online_steps": 0}
    module("iql").train(small("iql", gamma=0.9, run_dir=tmp_path / "first", **short))
    module("iql").train(small("iql", gamma=0.8, init_from=tmp_path / "first", **short))
    assert f"{tmp_path / 'first'} learned with --gamma 0.9, and this run has --gamma 0.8" in capsys.readouterr().err
