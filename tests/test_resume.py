"""The promise: killed at any instant and started again, a run ends bit for bit as if it had never been stopped."""

import csv
import fcntl
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import termios
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from conftest import (
    ALGORITHMS,
    EVERYTHING,
    EXAMPLE,
    OFFLINE,
    ROOT,
    agent_of,
    arguments_of,
    assert_same_folder,
    assert_same_run,
    command,
    final_state,
    flags,
    killed_at,
    long,
    module,
    same,
    small_of,
    some,
    with_flag,
)

import common.run
from common import checkpoint
from common.errors import InputError, RunError
from common.onednn import MIN_ONEDNN_MULTIPLICATIONS
from common.optim import Adam
from common.replay_buffer import ReplayBuffer
from common.run import Run

KILLED_IN = ("crossq", "dsac_t", "simba_v2")  # their own files, in the places where their states differ


def assert_kills_change_nothing(
    algo: str, arguments: dict[str, Any], places: list[tuple[str, int]], tmp_path: Path
) -> str:
    """Train twice, once killed at these places, and compare the runs. Return what the killed one printed."""
    module(algo).train(module(algo).Args(**arguments_of(algo, arguments | {"run_dir": tmp_path / "undisturbed"})))
    killed = killed_at(algo, [*places, ("end", 1)], *flags(algo, **arguments, run_dir=tmp_path / "killed"))
    assert killed.returncode == 0, killed.stderr
    assert_same_folder(tmp_path / "killed", tmp_path / "undisturbed")
    return killed.stderr


@pytest.mark.parametrize(
    ("algo", "env", "num_envs", "vectorizer"),
    [
        *(
            pytest.param(
                algo, "Pendulum-v1" if algo in OFFLINE else "Hopper-v4", 2, "sync", marks=[long] * (algo in KILLED_IN)
            )
            for algo in ALGORITHMS
        ),
        *((algo, "Pendulum-v1", 1, "sync") for algo in some(EXAMPLE) if algo not in OFFLINE),
        (EXAMPLE, "Hopper-v4", 2, "async"),
    ],
)
def test_kills_in_every_place_and_at_random_instants(
    algo: str, tmp_path: Path, env: str, num_envs: int, vectorizer: str, capsys: pytest.CaptureFixture[str]
):
    """One run: killed in each place in turn, stopped by Ctrl-C in and outside evaluations, and killed at random.

    Ctrl-C in an evaluation stops at once. The resumed run repeats the evaluation, and is killed in it too.

    SAC and WSRL are killed at every write of a checkpoint, and 8 times at random. Others, and SAC with one environment
    or with `async`, are killed at one write, and twice at random. The logs have each step once.
    """
    is_thorough = algo in some("sac", "wsrl") and (EVERYTHING or (num_envs, vectorizer) == (2, "sync"))
    kills = 4 if is_thorough else 1
    phase = (small_of(algo).get("warmup_steps", 0) or small_of(algo).get("random_steps", 0)) // num_envs
    total = 1_500 if is_thorough else 1_000 if algo in with_flag("rollout_steps") else 300  # PPO saves more rarely
    arguments = {"env": env, "num_envs": num_envs, "vectorizer": vectorizer, "total_steps": total, "eval_every": 100,
                 "eval_episodes": 1, "checkpoint_every": 25, "log_every": 20}  # fmt: skip
    if algo in (EXAMPLE, OFFLINE[0]):  # the smallest networks whose products oneDNN computes
        assert MIN_ONEDNN_MULTIPLICATIONS == 128 * 128 * 64
        arguments |= {"hidden": (128, 128), "batch_size": 64}
    if algo in with_flag("overlap"):  # what waits at a checkpoint is done after it
        arguments["overlap"] = vectorizer == "sync"
    step, early, late = ("async step", 75, 33) if vectorizer == "async" else ("step", 75 * num_envs, 83)
    places = [(step, early), ("update", 75), ("fsync", 5)]
    if is_thorough:
        places = [(step, early), ("update", 75), ("evaluation", 1), *(("fsync", n) for n in range(1, 10)), ("save", 1),
                  ("rename", 1), ("rename", 2), (step, late), ("update", 62), ("evaluation", 2)]  # fmt: skip
    if phase:  # in the random steps or the warm-up, with its last and with the first after it
        places = [*(("online step", n) for n in (phase // 2, phase, phase + 1)), *places]
    elif algo in OFFLINE:  # at the switch, and where a checkpoint holds online transitions
        places += [("online step", 1), ("online step", 100)]
    if algo in OFFLINE:
        arguments |= (
            {"offline_steps": 400, "online_steps": 900} if is_thorough else {"offline_steps": 100, "online_steps": 350}
        )
    if not any(isinstance(value, Adam) for value in vars(agent_of(algo)).values()):
        places = [(place, n) for place, n in places if place != "update"]  # which is a call of Adam
    begin = [("evaluation", 1), ("Ctrl-C in evaluation", 1), ("evaluation", 1), ("any", kills)]
    places = [*begin, *places, ("Ctrl-C", 10), ("any", kills)]
    said = assert_kills_change_nothing(algo, arguments, places, tmp_path)
    parts = re.split(r"stopped at (step \S+): run the same command to resume", said)
    steps, between = parts[1::2], parts[::2]
    assert len(steps) == 2
    assert steps[0] == f"step {-arguments.get('offline_steps', 0)}"
    for step, before, after in zip(steps, between[:-1], between[1:], strict=True):
        assert before.endswith("(a second signal stops at once)\n")  # no result of an evaluation follows
        assert f"resumes from {step}," in after
    rows = [line.split(",")[:2] for line in (tmp_path / "killed" / "metrics.csv").read_text().splitlines()[1:]]
    assert len(rows) == len({tuple(row) for row in rows})
    counts = [line for line in said.splitlines() if line.startswith("killed at random")]
    assert len(counts) == 2
    with capsys.disabled():
        sys.stderr.write(f"\n{algo}: {'; '.join(counts)}: equal bit for bit\n")


@pytest.mark.parametrize(
    ("algo", "num_envs"),
    [
        *((algo, 2) for algo in some("cql", "wsrl") if algo in OFFLINE),
        pytest.param("wsrl", 1, marks=long),
    ],
)
def test_kills_with_what_else_may_be_retained(algo: str, tmp_path: Path, num_envs: int):
    """Before the switch, at it, in the warm-up or what stands in its place, and after it."""
    others = [each for each in ("none", "append", "mix") if each != module(algo).Args.retain]
    retain = others[num_envs - 1]
    arguments = {"num_envs": num_envs, "retain": retain, "warmup_steps": 120, "offline_steps": 200, "online_steps": 500}
    places = [("update", 150), ("online step", 1), ("online step", 110 // num_envs), ("online step", 240 // num_envs)]
    assert_kills_change_nothing(algo, arguments, places, tmp_path)


@pytest.mark.parametrize(
    ("algo", "num_envs"),
    [*((algo, 3) for algo in some("sac", "wsrl") if algo in with_flag("overlap")), (EXAMPLE, 1)],
)
def test_kills_between_a_step_and_its_pending_updates(algo: str, tmp_path: Path, num_envs: int):
    """The checkpoint of step 120 holds the updates that wait for the next action, with their arguments."""
    arguments = {"num_envs": num_envs, "overlap": True, "checkpoint_every": 10, "total_steps": 400}
    if algo in with_flag("calibrated"):  # else nothing is learned before the first episode is finished
        arguments["calibrated"] = False
    undisturbed, run = (
        module(algo).Args(**arguments_of(algo, arguments | {"run_dir": tmp_path / name}))
        for name in ("undisturbed", "killed")
    )
    module(algo).train(undisturbed)
    flushes = 120 // num_envs + 1  # one before each step of the environments, and one for each offline update
    if algo in OFFLINE:
        flushes += 200
    killed = killed_at(algo, [("flush", flushes)], *flags(algo, **arguments, run_dir=tmp_path / "killed"))
    assert killed.returncode == 0, killed.stderr
    state = final_state(tmp_path / "killed")
    assert (state["logger"]["step"], state["rollout"]["steps"]) == (120, 120)
    pending = state["update"]["pending"]
    assert len(pending) == num_envs
    assert all([*each] == [*pending[0]] for each in pending)
    assert pending[0].get("online", True)
    assert ("online" in pending[0]) == (algo in OFFLINE)
    module(algo).train(run)
    assert_same_folder(tmp_path / "killed", tmp_path / "undisturbed")
    assert final_state(tmp_path / "killed")["update"]["pending"] == []


@pytest.mark.parametrize(
    ("algo", "part", "missing"), [("sac", "update", True), ("iql", "data", True), ("sac", "extra", False)]
)
def test_a_checkpoint_with_other_parts_is_refused(algo: str, part: str, missing: bool, small):
    """That of another version: the message names what differs, and the checkpoint stays as it is."""
    module(algo).train(args := small(algo, total_steps=100))
    (args.run_dir / "DONE").unlink()
    path = args.run_dir / "checkpoint" / "state.pt"
    state = checkpoint.load(path)
    if missing:
        del state[part]
    else:
        state[part] = {"count": 1}
    checkpoint.save(path, state)
    kept = [path, *(args.run_dir / name for name in ("config.json", "evaluations.csv", "metrics.csv"))]
    before = [file.read_bytes() for file in kept]
    with pytest.raises(InputError, match=rf"checkpoint of another version \({part} differ\): .*another --run-dir"):
        module(algo).train(args)
    assert [file.read_bytes() for file in kept] == before
    assert not (args.run_dir / "DONE").exists()


@pytest.mark.parametrize(
    ("algo", "number", "status", "vectorizer"),
    [
        (EXAMPLE, signal.SIGINT, 130, "async"),
        (OFFLINE[0], signal.SIGTERM, 143, "sync"),
        pytest.param(EXAMPLE, signal.SIGTERM, 143, "sync", marks=long),
    ],
)
def test_a_signal_saves_a_checkpoint_that_the_command_resumes(
    algo: str, tmp_path: Path, number: int, status: int, vectorizer: str
):
    arguments = {"checkpoint_every": 100_000, "total_steps": 1_400, "vectorizer": vectorizer}
    module(algo).train(module(algo).Args(**arguments_of(algo, arguments | {"run_dir": tmp_path / "undisturbed"})))
    line = [sys.executable, str(ROOT / "algos" / f"{algo}.py"), *flags(algo, **arguments, run_dir=tmp_path / "stopped")]
    process = subprocess.Popen(line, stderr=subprocess.PIPE, text=True, start_new_session=True)
    for said in process.stderr:
        if said.startswith("step 200:"):
            os.killpg(process.pid, number)  # as a terminal does: to all processes of the command
            break
    rest = process.stderr.read()
    assert process.wait() == status
    assert "run the same command to resume" in rest
    assert "Traceback" not in rest
    result = command(*flags(algo, **arguments, run_dir=tmp_path / "stopped"), algo=algo)
    assert result.returncode == 0
    assert "resumes from step" in result.stderr
    assert_same_folder(tmp_path / "stopped", tmp_path / "undisturbed")


@pytest.mark.parametrize("algo", some(EXAMPLE, *OFFLINE[:1]))
def test_a_signal_in_each_evaluation(algo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Stop each evaluation once, also the last one and the one at the switch. Extending the run repeats none of them.

    The policy draws from the generator that updates use too.
    """
    train, original, size = module(algo).train, common.run.eval_policy, {"eval_episodes": 1, "eval_every": 50}
    whole, stopped = (
        module(algo).Args(**arguments_of(algo, size | {"run_dir": tmp_path / name})) for name in ("whole", "stopped")
    )
    number, stop_at = 0, 0

    def eval_policy(agent: Any) -> Any:
        nonlocal number
        number += 1
        policy, is_stopped, calls = original(agent), number == stop_at, itertools.count(1)

        def act(obs: Any) -> Any:
            torch.rand(1, generator=agent.generator)
            if is_stopped and next(calls) == 3:
                os.kill(os.getpid(), signal.SIGINT)
            return policy(obs)

        return act

    monkeypatch.setattr(common.run, "eval_policy", eval_policy)
    train(whole)
    for nth in [1] + [2] * (number - 1):  # each but the first process repeats an evaluation
        number, stop_at = 0, nth
        with pytest.raises(SystemExit, match="130"):
            train(stopped)
    stop_at = 0
    train(stopped)
    assert_same_folder(stopped.run_dir, whole.run_dir)
    name = "online_steps" if algo in OFFLINE else "total_steps"
    for args in (whole, stopped):
        train(replace(args, **{name: getattr(args, name) + 50}))
    assert_same_folder(stopped.run_dir, whole.run_dir)


def test_a_closed_terminal_saves_a_checkpoint_that_the_command_resumes(tmp_path: Path):
    """The kernel sends SIGHUP to the session of a terminal that is gone, and refuses what the run prints."""
    arguments = {"checkpoint_every": 100_000, "total_steps": 1_400, "run_dir": tmp_path / "run"}
    master, terminal = os.openpty()
    line = [sys.executable, str(ROOT / "algos" / f"{EXAMPLE}.py"), *flags(EXAMPLE, **arguments)]
    process = subprocess.Popen(
        line, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(terminal)
    said = b""
    while b"step 200:" not in said:
        said += os.read(master, 1_000)
    os.close(master)
    assert process.wait(timeout=60) == 128 + signal.SIGHUP
    assert (tmp_path / "run" / "checkpoint" / "state.pt").exists()
    result = command(*flags(EXAMPLE, **arguments), algo=EXAMPLE)
    assert result.returncode == 0
    assert "resumes from step" in result.stderr


@pytest.mark.parametrize("algo", some("sac", "ppo", "iql"))
def test_a_finished_run_returns_its_result(algo: str, small, capsys: pytest.CaptureFixture[str]):
    """The last evaluation, that of the run which made it; and it says why nothing was trained."""
    args = small(algo, eval_episodes=2)
    first = module(algo).train(args)
    assert "nothing to do" not in capsys.readouterr().err
    before = (args.run_dir / "evaluations.csv").read_bytes()
    again = module(algo).train(args)
    assert "is finished (200 steps): nothing to do" in capsys.readouterr().err
    assert first == again
    rows = list(csv.DictReader(before.decode().splitlines()))
    last = [(float(row["return"]), int(row["length"])) for row in rows if row["step"] == rows[-1]["step"]]
    assert [(episode.return_, episode.length) for episode in again.episodes] == last
    assert (again.folder, again.step, len(last)) == (args.run_dir, int(rows[-1]["step"]), 2)
    assert (args.run_dir / "evaluations.csv").read_bytes() == before


@pytest.mark.parametrize("algo", some("sac", "ppo", "cql", "wsrl", "expo", "stream_ac"))
def test_a_finished_run_continues_with_more_steps(algo: str, tmp_path: Path):
    """As if it had been given all of them at once; three environments end after the last of their first steps."""
    name = "online_steps" if algo in OFFLINE else "total_steps"
    arguments = {"num_envs": 3, "eval_every": 50, "eval_episodes": 1, "checkpoint_every": 50, "buffer_size": 90}
    if algo in OFFLINE:
        arguments |= {"offline_steps": 50, "retain": "append", "warmup_steps": 35, "buffer_size": 10_000}  # it grows
    if name not in module(algo).Args.extendable:
        arguments = {"num_envs": 1}
    arguments = {key: value for key, value in arguments.items() if hasattr(module(algo).Args, key)}
    first, whole = (
        module(algo).Args(**arguments_of(algo, arguments | {name: steps, "run_dir": tmp_path / folder}))
        for steps, folder in ((100, "run"), (200, "whole"))
    )
    more = replace(first, **{name: 200})
    module(algo).train(first)
    commit = json.loads((first.run_dir / "config.json").read_text())["commit"]
    if name not in module(algo).Args.extendable:  # as PPO's, whose learning rate has fallen to 0
        with pytest.raises(InputError, match=f"{name} \\(100 there, 200 here\\)"):
            module(algo).train(more)
        return
    module(algo).train(more)
    module(algo).train(whole)
    assert_same_run(first.run_dir, whole.run_dir)
    config = json.loads((first.run_dir / "config.json").read_text())
    assert (config["arguments"][name], config["commit"]) == (200, commit)
    assert json.loads((first.run_dir / "DONE").read_text())["step"] == 201
    with pytest.raises(InputError, match=f"{name} \\(200 there, 100 here\\)"):
        module(algo).train(first)


@pytest.mark.parametrize(
    "damage",
    [lambda text: text[:-9], lambda text: "", lambda text: text.replace("return", "r"), lambda text: "\udc80"],
    ids=["cut", "empty", "column", "bytes"],
)
def test_a_finished_run_without_its_evaluations(damage: Callable[[str], str], small):
    """The message names the file; the run itself is whole. Without evaluations asked for, there are none."""
    result = module("sac").train(small(total_steps=60, eval_episodes=0))
    assert (result.step, result.episodes) == (60, [])
    args = small(total_steps=60, run_dir=result.folder.with_name("other"))
    module("sac").train(args)
    path = args.run_dir / "evaluations.csv"
    path.write_text(damage(path.read_text()), errors="surrogateescape")
    with pytest.raises(InputError, match=r"evaluations\.csv has changed since the run ended: restore it from a copy"):
        module("sac").train(args)
    (args.run_dir / "DONE").write_text("{}")  # that of an older run, which has no checksums
    with pytest.raises(InputError, match=r"evaluations\.csv is missing or damaged: restore it from a copy"):
        module("sac").train(args)


@pytest.mark.parametrize("reason", ["is damaged", "of another version", "its checkpoint is gone"])
def test_a_longer_run_with_a_refused_checkpoint_changes_nothing(reason: str, small):
    """The finished run stays finished: in version 0.1, DONE was gone and config.json rewritten."""
    module("sac").train(args := small(total_steps=100))
    path = args.run_dir / "checkpoint" / "state.pt"
    if "gone" in reason:
        shutil.rmtree(path.parent)
    elif reason == "is damaged":
        path.write_bytes(path.read_bytes()[:-100])
    else:
        state = checkpoint.load(path)
        del state["update"]
        checkpoint.save(path, state)
    kept = [args.run_dir / name for name in ("config.json", "DONE", "evaluations.csv", "metrics.csv")]
    before = [path.read_bytes() for path in kept]
    with pytest.raises(InputError, match=reason):
        module("sac").train(small(total_steps=200))
    assert [path.read_bytes() for path in kept] == before


def test_a_run_begins_again_in_the_process_that_it_failed_in(small, monkeypatch: pytest.MonkeyPatch):
    """As a notebook keeps the failed one alive."""
    add = ReplayBuffer.add

    def failing(buffer: ReplayBuffer, *transitions: Any) -> None:
        if buffer.added == 150:
            raise RunError("failed")
        add(buffer, *transitions)

    monkeypatch.setattr(ReplayBuffer, "add", failing)
    with pytest.raises(RunError) as kept:
        module("sac").train(small())
    monkeypatch.setattr(ReplayBuffer, "add", add)
    assert kept.traceback
    module("sac").train(small(checkpoint_every=25))  # what does not change the result may change
    assert (small().run_dir / "DONE").exists()
    module("sac").train(small(run_dir=small().run_dir.with_name("other")))
    assert same(final_state(small().run_dir), final_state(small().run_dir.with_name("other")))


def test_a_run_on_auto_continues_where_it_was(small, monkeypatch: pytest.MonkeyPatch):
    """And not on another device, whose numbers are others."""
    module("sac").train(small(device="auto", total_steps=100))
    path = small().run_dir / "config.json"
    module("sac").train(small(device="cpu"))
    text = path.read_text().replace('"gpu": null', '"gpu": "a card"').replace('"cpu",', '"auto",')
    config = json.loads(text)
    del config["crc32"]  # the checksum, which would refuse the change
    path.write_text(json.dumps(config))
    (path.parent / "DONE").write_text("{}")
    with pytest.raises(InputError, match=r"device \(cuda there, cpu here\)"):
        module("sac").train(small(device="auto", total_steps=300))
    before = (small().run_dir / "evaluations.csv").read_bytes()
    assert module("sac").train(small(device="auto")).step == 200
    assert (small().run_dir / "evaluations.csv").read_bytes() == before


def test_a_flag_that_is_newer_than_the_run_counts_as_its_default(small):
    module("sac").train(small())
    path = small().run_dir / "config.json"
    config = json.loads(path.read_text())
    del config["arguments"]["vectorizer"], config["crc32"]
    path.write_text(json.dumps(config))
    (path.parent / "DONE").write_text("{}")
    with pytest.raises(InputError, match="vectorizer \\(sync there, async here\\)"):
        module("sac").train(small(vectorizer="async"))
    assert module("sac").train(small()).step == 200
    assert json.loads(path.read_text()) == config


def test_a_list_newer_than_the_run_counts_as_its_default_too(small):
    module("td3").train(small("td3", hidden=(256, 256), total_steps=2))
    path = small().run_dir / "config.json"
    config = json.loads(path.read_text())
    del config["arguments"]["hidden"], config["crc32"]
    path.write_text(json.dumps(config))
    (path.parent / "DONE").write_text("{}")
    assert module("td3").train(small("td3", hidden=(256, 256), total_steps=2)).step == 2
    assert json.loads(path.read_text()) == config


def test_a_run_made_meanwhile_by_another_command_is_kept(small):
    """Between the first look at the folder and its lock, environments and datasets are made."""
    waiting = Run("sac", small(gamma=0.9))
    module("sac").train(small(gamma=0.5))
    with pytest.raises(InputError, match=r"gamma \(0.5 there, 0.9 here\)"):
        waiting.resume(agent=type("SAC", (), {})(), rollout=Mock())


def test_what_a_checkpoint_needs_is_on_the_disk_before_it(small, monkeypatch: pytest.MonkeyPatch):
    """Also that its files are there: a folder forgets new ones in a power cut until it is synced itself."""
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.readlink(f"/proc/self/fd/{file}")))
    args = small()
    module("sac").train(args)
    before = synced[: synced.index(str(args.run_dir / "checkpoint" / "state.pt.part"))]
    for needed in ("checkpoint/replay", "checkpoint/replay/000000000000.rows", "metrics.csv", "evaluations.csv"):
        assert str(args.run_dir / needed) in before
    assert any("events.out.tfevents" in name for name in before)
    assert before.count(str(args.run_dir)) == 2  # with config.json alone, and with the logs and checkpoint/


def test_replay_files_are_deleted_once_no_checkpoint_needs_them(small, monkeypatch: pytest.MonkeyPatch):
    """Not before: until the new state is there, the old one is what a kill leaves."""
    monkeypatch.setattr(ReplayBuffer, "segment_rows", 20)
    args = small(buffer_size=50, checkpoint_every=20)
    folder, write, loaded = args.run_dir / "checkpoint", checkpoint.save, []

    def save(path: Path, state: dict[str, Any]) -> None:
        if path.exists():
            before = checkpoint.load(path)["buffer"]
            ReplayBuffer(50, 3, 1).load(folder / "replay", before)  # refuses where a file is missing
            loaded.append(before["added"])
        write(path, state)

    monkeypatch.setattr(checkpoint, "save", save)
    module("sac").train(args)
    assert loaded == list(range(20, 200, 20))
    assert len(list((folder / "replay").glob("*.rows"))) == 3
