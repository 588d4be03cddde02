"""`bench/speed` counts every step, really stops who is stopped, leaves nothing behind, and has an honest floor."""

import contextlib
import csv
import dataclasses
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import psutil
import pytest
import torch
import tyro
from conftest import PENDULUM, ROOT, flags, long, module
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from algos import expo, fql
from bench.speed import step_time
from bench.speed.expo_loop import Loop as EXPOLoop
from bench.speed.fql_loop import Loop as FQLLoop
from bench.speed.interleaved_timing import (
    Contender,
    ContenderError,
    Slice,
    alternate,
    contest,
    read_rounds,
    report,
    write_rounds,
)
from bench.speed.matmul_floor import BATCH, CRITICS, HIDDEN, PRODUCTS, fastest, sac_products, ways
from bench.speed.speed import ALGORITHMS, Args, commands, environment, form_of, has_losses, make_file, update_times
from bench.speed.step_counter import COUNTER_FILE, counted, read_steps
from bench.speed.wsrl_loop import Loop
from bench.sweep import packing
from common.command_line import parse
from common.cuda import GPU_SHARE_ENV
from common.logger import Logger
from common.provenance import commit
from common.replay_buffer import Batch
from common.timings import Timings
from offline.offline_to_online import with_presets

ENV = {**os.environ, "PYTHONPATH": str(ROOT)}
STEP_ENVS = """
import sys, gymnasium
envs = gymnasium.make_vec(sys.argv[1], num_envs=2, vectorization_mode=sys.argv[2])
envs.action_space.seed(0)
envs.reset(seed=0)
for _ in range(int(sys.argv[3])):
    envs.step(envs.action_space.sample())
envs.close()
"""
# Burns no processor, so that its rate holds on a busy machine; a child that must be stopped with it counts as well.
TICK = """
import os, sys, time
from bench.speed.step_counter import claim_slot
os.fork() or os.setpgrp()  # as the processes of our environments do
count = claim_slot()
while True:
    time.sleep(float(sys.argv[1]))
    count()
"""

# d3rlpy's loop until its eighth update: seven are made.
SEVEN_UPDATES = """
import runpy, sys
import d3rlpy
base = d3rlpy.algos.qlearning.base.QLearningAlgoBase
update, made = base.update, []
def limited(self, batch):
    if len(made) == 7:
        raise SystemExit
    made.append(update(self, batch))
    return made[-1]
base.update = limited
runpy.run_path("bench/speed/peer.py", run_name="__main__")
"""
D3RLPY = ROOT / ".venv-d3rlpy" / "bin" / "python"


def ticking(name: str, seconds: float, folder: Path, warm_steps: int = 4) -> Contender:
    return Contender(name, [sys.executable, "-c", TICK, str(seconds)], ENV, folder, warm_steps)


@pytest.mark.parametrize("env_id", ["HalfCheetah-v4", "Hopper-v4"])
def test_steps_are_counted_across_processes(tmp_path: Path, env_id: str) -> None:
    file = tmp_path / "steps"
    env = {**ENV, COUNTER_FILE: str(file)}
    programs = [
        subprocess.Popen([sys.executable, "-W", "ignore", "-c", STEP_ENVS, counted(env_id), mode, steps], env=env)
        for mode, steps in (("sync", "300"), ("async", "150"))
    ]
    assert [program.wait(60) for program in programs] == [0, 0]
    slots = sorted(memoryview(file.read_bytes()).cast("q"))
    if env_id == "HalfCheetah-v4":  # whose episodes never end so early
        assert [n for n in slots if n] == [150, 150, 300, 300]
        assert read_steps(file) == 900
    else:  # the vector environment spends a turn of an environment on its reset, which is no step
        assert 0 < read_steps(file) < 900


def test_our_gradient_steps_on_a_dataset_are_counted(tmp_path: Path) -> None:
    """They alone: neither what is evaluated nor the online steps behind them."""
    env, run = {**ENV, COUNTER_FILE: str(tmp_path / "steps")}, ["--run-dir", str(tmp_path / "run")]
    line = [
        sys.executable,
        "bench/speed/count_updates.py",
        "algos/iql.py",
        *flags("iql", offline_steps=70, online_steps=30),
    ]
    subprocess.run([*line, *run], cwd=ROOT, env=env, check=True, capture_output=True)
    assert read_steps(tmp_path / "steps") == 70
    assert (tmp_path / "run" / "DONE").exists()


@pytest.mark.skipif(not D3RLPY.exists(), reason="make .venv-d3rlpy/installed")
@pytest.mark.parametrize("algo", [name for name, algorithm in ALGORITHMS.items() if algorithm.offline])
def test_d3rlpys_gradient_steps_are_counted(tmp_path: Path, algo: str) -> None:
    """With the very arguments that it is run with; its logs go where they are told to. And they are ours."""
    line = commands(Args(algo=algo, dataset=PENDULUM), tmp_path)["d3rlpy"]
    env = {**ENV, COUNTER_FILE: str(tmp_path / "steps")}
    subprocess.run([line[0], "-c", SEVEN_UPDATES, *line[2:]], cwd=ROOT, env=env, check=True, capture_output=True)
    assert read_steps(tmp_path / "steps") == 7
    [used] = (tmp_path / "d3rlpy").glob("*/params.json")
    theirs = json.loads(used.read_text())["config"]["params"]
    own = commands(Args(algo=algo, dataset=PENDULUM), tmp_path)["ours"]
    ours = with_presets(
        tyro.cli(module(algo).Args, args=own[own.index(f"algos/{algo}.py") + 1 :]), module(algo).PRESETS
    )
    same = {"batch_size": "batch_size", "gamma": "gamma", "tau": "tau", "critics": "n_critics"}
    if algo == "cql":
        same |= {"cql_actions": "n_action_samples", "cql_weight": "conservative_weight"}
        same |= {"max_target_backup": "max_q_backup", "backup_entropy": "soft_q_backup"}
    assert {name: getattr(ours, name) for name in same} == {name: theirs[their] for name, their in same.items()}
    encoders = [theirs[name]["type"] for name in theirs if name.endswith("encoder_factory")]
    assert {*encoders} == {"default"}  # 256 256
    assert {ours.hidden, getattr(ours, "critic_hidden", ours.hidden)} == {(256, 256)}


@pytest.mark.parametrize("algo", ["sac", "ppo"])
def test_on_a_gpu_ours_runs_with_a_graph_without_and_compiled(algo: str, tmp_path: Path) -> None:
    lines = commands(Args(algo=algo, device="cuda"), tmp_path)
    assert list(lines) == ["ours", "eager", "compiled", "sb3"]
    own, eager, compiled = (shlex.join(lines[name]) for name in ("ours", "eager", "compiled"))
    assert "--device cuda" in own
    assert eager.replace("run-eager", "run") == f"{own} --no-cuda-graph"
    assert compiled.replace("run-compiled", "run") == f"{own} --compile"


class Counting:
    """A contender that makes a hundred steps a slice, and notes what it was begun with."""

    made: ClassVar[list[Any]] = []

    def __init__(self, name: str, command: list[str], env: dict[str, str], *_: Any) -> None:
        self.name, self.command, self.env, self.count = name, command, env, 0
        Counting.made.append(self)

    def resume(self) -> None:
        self.count += 100

    def steps(self) -> int:
        return self.count

    def cpu_seconds(self) -> float:
        return 0.0

    def threads(self) -> int:
        return 3

    def warm_up(self, timeout: float) -> None: ...
    def stop(self) -> None: ...
    def kill(self) -> None: ...


@pytest.mark.parametrize("on", ["cpu", "cuda"])
def test_packing_runs_as_many_as_asked_and_one_alone(on: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "Contender", Counting)
    monkeypatch.setattr(packing, "shared_card", lambda: contextlib.nullcontext("by MPS"))
    monkeypatch.setattr("bench.speed.interleaved_timing.accelerator", lambda: "a card")
    monkeypatch.setattr(Counting, "made", [])
    out = tmp_path / "packing.csv"
    packing.main(packing.Args(runs=12, device=on, rounds=3, slice_seconds=0.01, out=out))
    alone, *ours = Counting.made
    assert len(ours) == 12
    for run in ours:
        flags = tyro.cli(module("sac").Args, args=run.command[2:])
        assert (flags.device, run.env["OMP_NUM_THREADS"]) == (on, "1")
        assert float(run.env[GPU_SHARE_ENV]) * 13 == pytest.approx(1)
    assert len({run.command[run.command.index("--run-dir") + 1] for run in Counting.made}) == 13
    assert alone.env["OMP_NUM_THREADS"] == ("1" if on == "cuda" else "12")
    text = out.read_text()
    assert ("# sharing: by MPS" in text) == (on == "cuda")
    known = read_rounds(out)[0]
    assert known["device"] == ("a card" if on == "cuda" else "the processor")
    assert known["threads of ours-11"] == "3"
    assert {"commit", "instructions"} <= known.keys()
    rows = list(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))
    steps = {row["contender"]: {r["steps"] for r in rows if r["contender"] == row["contender"]} for row in rows}
    assert steps == {"ours": {"1200"}, alone.name.removesuffix("-0"): {"100"}}
    assert len(rows) == 6


@pytest.mark.parametrize(("text", "fact"), [('{"form": "eager"}', {"form": "eager"}), ("{}", {}), (None, {})])
def test_an_older_version_states_no_form(text: str | None, fact: dict[str, str], tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    assert form_of(tmp_path) == fact


@pytest.mark.parametrize(
    ("program", "status", "said"),
    [
        ("bench/sweep/packing.py --env NoSuch-v0 --runs 1", 1, r"^packing: one run .*\n.*NoSuch-v0"),
        ("bench/sweep/packing.py --device cuda", 1, "^packing: nvidia-smi finds no GPU: .*$"),
        ("bench/speed/speed.py --device cuda --peers", 1, "^speed: nvidia-smi finds no GPU: .*$"),
        ("bench/speed/step_time.py", 2, "^step_time.py: give the first step, .*$"),
        ("bench/speed/step_time.py 10 20", 2, "^step_time.py: give the first step, .*$"),
        ("bench/speed/step_time.py ten 20 algos/sac.py", 2, "^step_time.py: give the first step, .*$"),
    ],
)
def test_what_cannot_be_measured_is_told(program: str, status: int, said: str, tmp_path: Path) -> None:
    """In a message without a traceback, on a machine without nvidia-smi."""
    line = [
        sys.executable,
        *program.split(),
        *(["--out", str(tmp_path / "o.csv")] if "step_time" not in program else []),
    ]
    env = ENV | {"PATH": str(tmp_path)}
    ended = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True)
    assert (ended.returncode, "Traceback" in ended.stderr) == (status, False), ended.stderr
    assert re.search(said, ended.stderr.strip())


def test_packages_that_lie_elsewhere_are_found_by_every_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    assert environment()["PYTHONPATH"] == f"{ROOT}{os.pathsep}elsewhere"
    monkeypatch.delenv("PYTHONPATH")
    assert environment()["PYTHONPATH"] == str(ROOT)


def test_without_git_a_run_knows_no_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert commit() != "unknown"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit() == "unknown"


@pytest.mark.parametrize(("first", "last"), [pytest.param(100, 200, marks=long), (1_000, 1_050), (1_000, 200)])
def test_where_the_time_goes_is_told_of_the_steps_asked_for(
    first: int, last: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the run itself logs its times, and starts them again, when they begin."""
    for owner, name in ((Logger, "advance"), (Timings, "__call__")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # so that they are put back
    words = [str(first), "40", str(ROOT / "algos" / "sac.py"), *flags(total_steps=last, checkpoint_every=10_000)]
    monkeypatch.setattr(sys, "argv", ["step_time.py", *words])
    step_time.main()
    said = capsys.readouterr().out
    assert ("steps/s while profiled" if last > first else "ended before the profile") in said
    if last > first:
        assert {word for word in ("act", "env_step", "update") if f"µs {word} (median)" in said} == {
            "act", "env_step", "update"
        }  # fmt: skip
        assert len(said.split("operations, of which\n")[1].splitlines()) == 10


def test_time_is_divided_by_the_steps_that_were_made(tmp_path: Path) -> None:
    """Of 64 environments a turn is 64 steps, whatever number was asked for."""
    (tmp_path / "config.json").write_text('{"algo": "sac", "arguments": {"device": "cpu"}}')
    watch, logger = step_time.Watch(100, 100), SimpleNamespace(step=0, folder=tmp_path)
    for logger.step in (64, 128, 192):
        watch.step(logger)
    logger.step = 256
    with pytest.raises(SystemExit):
        watch.step(logger)
    assert (watch.first, watch.last) == (128, 256)
    assert f"{128 / watch.seconds:,.0f} steps/s while profiled" in watch.report()


def test_a_counted_environment_says_what_it_needs() -> None:
    env = {key: value for key, value in ENV.items() if key != COUNTER_FILE}
    command = [sys.executable, "-W", "ignore", "-c", STEP_ENVS, counted("HalfCheetah-v4"), "sync", "1"]
    result = subprocess.run(command, env=env, capture_output=True, text=True)
    assert f"needs {COUNTER_FILE}=" in result.stderr


def test_alternation_finds_the_ratio_and_stops_the_stopped() -> None:
    with contest() as (contenders, folder):
        contenders += [ticking("fast", 0.01, folder), ticking("slow", 0.02, folder)]
        for contender in contenders:
            contender.warm_up(20)
            assert {member.status() for member in contender.members()} == {psutil.STATUS_STOPPED}
            assert len(contender.members()) == 2
        before = [contender.steps() for contender in contenders]
        time.sleep(0.3)
        assert [contender.steps() for contender in contenders] == before
        rounds = list(alternate({c.name: [c] for c in contenders}, rounds=4, seconds=0.5))
        after = [contender.steps() for contender in contenders]
    by_name = {name: [s for r in rounds for s in r if s.contender == name] for name in ("fast", "slow")}
    # No step is lost between the slices, and none is made outside of them.
    assert [sum(s.steps for s in by_name[name]) for name in by_name] == [
        a - b for a, b in zip(after, before, strict=True)
    ]
    rates = [sum(s.steps for s in by_name[name]) / sum(s.seconds for s in by_name[name]) for name in by_name]
    assert 1.5 < rates[0] / rates[1] < 2.5
    assert all(0.5 <= s.seconds < 1.5 for r in rounds for s in r)


def fail_with_one_stopped_and_one_running(left: list[psutil.Process]) -> None:
    with contest() as (contenders, folder):
        contenders += [ticking("stopped", 0.01, folder), ticking("running", 0.01, folder)]
        contenders[0].warm_up(20)
        while contenders[1].steps() < 4:
            time.sleep(0.01)
        left += [member for contender in contenders for member in contender.members()]
        raise KeyError(folder)


def test_nothing_is_left_after_an_exception() -> None:
    left: list[psutil.Process] = []
    with pytest.raises(KeyError) as error:
        fail_with_one_stopped_and_one_running(left)
    assert len(left) == 4
    assert psutil.wait_procs(left, timeout=5)[1] == []
    assert not error.value.args[0].exists()


def cmdline(process: psutil.Process) -> list[str]:
    """Its command line; none if it has ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_after_a_signal(tmp_path: Path, number: int) -> None:
    ours = [sys.executable, "-c", TICK.replace("sys.argv[1]", "'0.01'")]
    quoted = " ".join([ours[0], "-c", f'"{ours[2]}"'])
    command = [sys.executable, "bench/speed/speed.py", "--peers", "--out", str(tmp_path / "o.csv"), "--ours", quoted]
    program = subprocess.Popen(command, cwd=ROOT, env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    parent, members = psutil.Process(program.pid), list[psutil.Process]()
    deadline = time.monotonic() + 30
    while not any("time.sleep" in " ".join(cmdline(member)) for member in members):
        assert time.monotonic() < deadline
        time.sleep(0.05)
        members = parent.children(recursive=True)
    program.send_signal(number)
    assert program.wait(10) != 0
    assert psutil.wait_procs(members, timeout=5)[1] == []


def test_a_ctrl_c_while_a_program_starts_is_not_lost(tmp_path: Path) -> None:
    """Python ignores an exception within a fork. It is raised after the start, and the program can be interrupted."""
    code = f"""
import os, pathlib, signal, sys, time
from bench.speed.interleaved_timing import Contender
def start(code):
    return Contender("a", [sys.executable, "-c", code], os.environ, pathlib.Path({str(tmp_path)!r}), 1)
contender = start("import time; print('ready', flush=True); time.sleep(30)")
while "ready" not in contender._log.read_text():
    time.sleep(0.01)
os.kill(contender.process.pid, signal.SIGINT)
print(contender.process.wait(20))
os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGINT))
start("")
print("lost")
"""
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=ENV, capture_output=True, text=True)
    assert ended.stdout.split() == [str(-signal.SIGINT)], ended.stderr
    assert "KeyboardInterrupt" in ended.stderr


def test_a_contender_that_dies_shows_its_last_lines(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('no such thing'); raise SystemExit(3)"]
    contender = Contender("broken", command, ENV, tmp_path, 1)
    with pytest.raises(ContenderError, match=r"(?s)^broken ended with status 3; its last lines:.*no such thing"):
        contender.warm_up(20)


def test_a_contender_is_not_warm_before_it_learns() -> None:
    """Ours evaluates its untrained policy in counted environments, which alone exceeds the warm-up's steps."""
    with contest() as (contenders, folder):
        metrics = folder / "metrics.csv"
        command = [sys.executable, "-c", TICK, "0.001"]
        contenders.append(Contender("ours", command, ENV, folder, 4))
        contenders[0].learns = lambda: has_losses(metrics)
        while contenders[0].steps() < 4:
            time.sleep(0.01)
        with pytest.raises(ContenderError, match="does not learn yet"):
            contenders[0].warm_up(0.2)
        metrics.write_text("step,name,value\n3000,losses/critic,1.0\n")
        contenders[0].warm_up(10)


@pytest.mark.parametrize("algo", PRODUCTS)
def test_floor_has_the_flops_of_the_losses_by_autograd(algo: str) -> None:
    """PyTorch's own counter over the two losses, written plainly, one critic at a time."""
    o, a, h, b = 17, 6, HIDDEN, BATCH

    def layers(*sizes: int) -> list[torch.Tensor]:
        return [torch.randn(m, n, requires_grad=True) for m, n in pairwise(sizes)]

    def mlp(x: torch.Tensor, w: list[torch.Tensor]) -> torch.Tensor:
        return F.relu(F.relu(x @ w[0]) @ w[1]) @ w[2]

    def values(states: torch.Tensor, actions: torch.Tensor, w: list[torch.Tensor]) -> torch.Tensor:
        """From the first layer's product with the observations: autograd too asks for the action's columns only."""
        return F.relu(F.relu(states + actions @ w[0][o:]) @ w[1]) @ w[2]

    actor, obs, next_obs, actions = layers(o, h, h, 2 * a), torch.randn(b, o), torch.randn(b, o), torch.randn(b, a)
    if algo == "cql":  # ten times three, and the dataset's
        actions = torch.randn(31, b, a)
    count, drawn, slices = (10, 2, 4) if algo == "wsrl" else (CRITICS, CRITICS, 1)
    critics = [layers(o + a, h, h, 1) for _ in range(count)]
    with FlopCounterMode(display=False) as counter:
        for _ in range(slices):
            with torch.no_grad():
                next_actions = mlp(next_obs, actor)[:, :a].tanh()
                inputs = torch.cat([next_obs, next_actions], 1)
                target = torch.stack([mlp(inputs, w) for w in critics[:drawn]]).amin(0)
            states = [obs @ w[0][:o] for w in critics]
            sum(((values(s, actions, w) - target) ** 2).mean() for s, w in zip(states, critics, strict=True)).backward()
        obs = obs.repeat(slices, 1)
        pi = mlp(obs, actor)[:, :a].tanh()
        frozen = [[x.detach() for x in w] for w in critics]
        # SAC's critics have moved by now; CQL's have not.
        states = [s.detach() for s in states] if algo == "cql" else [obs @ w[0][:o] for w in frozen]
        q = torch.stack([values(s, pi, w) for s, w in zip(states, frozen, strict=True)]).amin(0)
        (-q.mean()).backward()
    assert sum(product.flops for product in PRODUCTS[algo](o, a)) == counter.get_total_flops()


def test_the_fastest_way_to_a_product_is_chosen() -> None:
    for product in sac_products(3, 2):
        for compute in ways(product):
            compute()
    quick, slow = (lambda: None), (lambda: time.sleep(0.001))
    assert fastest([slow, quick, slow], tries=2, repeats=2) is quick


def test_report_and_csv(tmp_path: Path) -> None:
    rates = {"ours": 200, "sb3": 100, "simba_v2-small": 50, "floor": 400}
    rounds = [Slice(i, name, n * i, float(i), 2.0, 0.0) for name, n in rates.items() for i in (1, 2, 3)]
    text = report(rounds, [3.0, 5.0, 100.0])
    assert "ours / sb3: 2.00 (2.00-2.00)" in text
    assert "ours / simba_v2-small: 4.00 (4.00-4.00)" in text
    assert "floor: 2.50 (2.50-2.50) ms" in text
    assert "ours / floor: 2.00" in text
    assert "our update alone: 5.00 ms, 2.00 floors" in text
    assert "DO NOT CITE" not in text
    disturbed = report([Slice(1, name, n, 1.0, 2.0, 0.5) for name, n in rates.items()], [])
    assert "n/a" in disturbed
    assert "DO NOT CITE: other work used 0.50 cores" in disturbed
    write_rounds(tmp_path / "a" / "rounds.csv", {"processor": "p"}, rounds)
    lines = (tmp_path / "a" / "rounds.csv").read_text().split()
    assert lines[:3] == ["#", "processor:", "p"]
    assert len(lines) == 4 + 12
    facts, read = read_rounds(tmp_path / "a" / "rounds.csv")
    assert (facts, read["sb3"].tolist()) == ({"processor": "p"}, [100.0] * 3)


def test_only_updates_within_the_rounds_are_read(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.csv"
    assert update_times(metrics, 0) == []
    before = "step,name,value\n1000,time/update_ms,9.0\n"
    metrics.write_text(before + "2000,time/update_ms,4.5\n2000,losses/critic,1.0\n3000,time/upd")
    assert update_times(metrics, len(before)) == [4.5]


def test_all_get_the_same_environment_and_number_of_it(tmp_path: Path) -> None:
    lines = commands(Args(env="Hopper-v4", num_envs=3), tmp_path)
    assert list(lines) == ["ours", "sb3", "sbx", "floor"]
    assert all(counted("Hopper-v4") in line for line in lines.values())
    assert lines["ours"][-4:] == ["--num-envs", "3", "--device", "cpu"]
    assert lines["sb3"][4] == lines["sbx"][4] == "3"


def test_what_came_after_sac_gets_its_environment_and_flags_that_it_takes(tmp_path: Path) -> None:
    """Each in a folder of its own; only DroQ and REDQ make more than one update for each step."""
    lines = commands(Args(algo="after-sac", env="Hopper-v4"), tmp_path)
    assert len(lines) == 10
    folders = set()
    for line in lines.values():
        _, file, *words = line
        args = parse(module(Path(file).stem).Args, words)
        folders.add(args.run_dir)
        assert args.env == counted("Hopper-v4")
        assert getattr(args, "utd", 1) == (20 if args.run_dir.name in ("run-droq", "run-redq") else 1)
    assert len(folders) == 10


def test_a_script_gets_the_counted_environment(tmp_path: Path) -> None:
    """And no other flag: it is a program of its own."""
    script = "python ../their/script.py --env ENV --seed 1"
    lines = commands(Args(algo="stream_ac", env="Hopper-v4", script=script), tmp_path)
    assert list(lines) == ["ours", "script"]
    assert lines["script"] == ["python", "../their/script.py", "--env", counted("Hopper-v4"), "--seed", "1"]


def test_the_loop_gets_our_environment_and_does_our_products(tmp_path: Path) -> None:
    """Its update costs the floor's FLOPs, and those of the first layers' gradients with respect to (s, π(s))'s s."""
    lines = commands(Args(algo="wsrl"), tmp_path)
    assert list(lines) == ["ours", "loop", "floor"]
    assert all(counted("HalfCheetah-v4") in line for line in lines.values())
    assert str(tmp_path / "data.hdf5") in lines["ours"]
    o, a, n = 17, 6, 4 * BATCH
    loop = Loop(o, a)
    batch = Batch(torch.randn(n, o), torch.rand(n, a), torch.randn(n), torch.randn(n, o), torch.zeros(n))
    with FlopCounterMode(display=False) as counter:
        loop.update(batch)
    of_observations = 2 * 10 * n * HIDDEN * o
    assert counter.get_total_flops() == sum(p.flops for p in PRODUCTS["wsrl"](o, a)) + of_observations


@pytest.mark.parametrize(("algo", "hidden"), [("fql", [512] * 4), ("fql-small", [256] * 3)])
def test_fqls_loop_gets_our_dataset_and_computes_our_losses(algo: str, hidden: list[int], tmp_path: Path) -> None:
    """With the same weights and noise, with the preset for random data."""
    lines = commands(Args(algo=algo), tmp_path)
    assert list(lines) == ["ours", "loop"]
    assert lines["loop"][1:] == ["bench/speed/fql_loop.py", *map(str, hidden), str(tmp_path / "data.hdf5")]
    assert str(tmp_path / "data.hdf5") in lines["ours"]
    found = fql.Args(dataset="none.hdf5", **fql.PRESETS["locomotion"])
    assert (found.hidden if algo == "fql" else tuple(hidden)) == tuple(hidden)
    agent, loop = (
        fql.FQL(dataclasses.replace(found, hidden=(16, 16)), 17, 6, torch.device("cpu")),
        FQLLoop(17, 6, [16, 16]),
    )
    for ours, theirs in ((agent.flow.net, loop.flow), (agent.actor.net, loop.actor)):
        theirs.load_state_dict(ours.state_dict())
    for ours, theirs in ((agent.critic, loop.critics), (agent.target_critic, loop.targets)):
        for i, net in enumerate(theirs):
            net.load_state_dict({name: value[i] for name, value in ours.net.state_dict().items()})
    batch = Batch(torch.randn(40, 17), torch.rand(40, 6), torch.randn(40), torch.randn(40, 17), torch.zeros(40))
    draw, state = agent.generator, agent.generator.get_state()
    noise = torch.randn(40, 6, generator=draw)
    t = torch.rand(40, 1, generator=draw)
    expected = loop.critic_loss(batch, noise), loop.flow_loss(batch, noise, t), loop.actor_loss(batch, noise)
    for loss, by_loop in zip((agent.critic_loss, agent.flow_loss, agent.actor_loss), expected, strict=True):
        draw.set_state(state)
        torch.testing.assert_close(loss(batch)[0], by_loop)


def test_expos_loop_gets_our_environment_and_computes_our_losses(tmp_path: Path) -> None:
    """With the same weights and noise, with the preset and the size that our program gets."""
    lines = commands(Args(algo="expo"), tmp_path)
    assert list(lines) == ["ours", "loop"]
    assert all(counted("HalfCheetah-v4") in line for line in lines.values())
    make_file(tmp_path / "data.hdf5", 2_000)
    presets = {domain: preset | expo.SIZES["small"] for domain, preset in expo.PRESETS.items()}
    args = with_presets(parse(expo.Args, lines["ours"][2:]), presets)
    assert (args.utd, args.batch_size, args.critics, args.edits) == (4, 256, 10, args.base_samples)
    agent, loop, n = expo.EXPO(args, 17, 6, torch.device("cpu")), EXPOLoop(17, 6), args.batch_size
    torch.manual_seed(0)
    networks = (agent.base, agent.edit, agent.critic, agent.target_critic)
    for parameter in itertools.chain(*(net.parameters() for net in networks)):
        parameter.data += 0.03 * torch.randn_like(parameter)  # so that biases and norms count
    loop.base.load_state_dict(agent.base.state_dict())
    loop.edit.load_state_dict(agent.edit.net.state_dict())
    for ours, theirs in ((agent.critic, loop.critics), (agent.target_critic, loop.targets)):
        for i, net in enumerate(theirs):
            net.load_state_dict({name: value[i] for name, value in ours.net.state_dict().items()})
    batch = Batch(torch.randn(n, 17), torch.rand(n, 6) - 0.5, torch.randn(n), torch.randn(n, 17), torch.zeros(n))
    draw = agent.generator.manual_seed(0)
    torch.manual_seed(0)
    candidates = agent.candidates(agent.base, batch.next_obs, draw)
    torch.testing.assert_close(loop.candidates(loop.base, batch.next_obs), candidates, atol=1e-4, rtol=1e-4)
    state = draw.get_state()
    chooser, judge = ([loop.targets[i] for i in agent.subset(draw)] for _ in range(2))
    chosen = loop.choose(batch.next_obs, candidates, chooser)
    noise = torch.randn(n, 6, generator=draw.set_state(state))
    t = torch.randint(10, (n,), generator=draw)
    expected = loop.critic_loss(batch, chosen, judge), loop.base_loss(batch, noise, t), *loop.edit_loss(batch, noise)
    found = []
    for loss in (partial(agent.critic_loss, candidates=candidates), agent.base_loss, agent.edit_loss):
        draw.set_state(state)
        found += loss(batch)[:-1]
    torch.testing.assert_close(found, [*expected], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("algo", ["iql", "cql"])
def test_all_get_the_same_dataset_and_no_counted_environment(tmp_path: Path, algo: str) -> None:
    lines = commands(Args(algo=algo), tmp_path)
    assert list(lines) == ["ours", "d3rlpy", *(["floor"] if algo in PRODUCTS else [])]
    assert all(str(tmp_path / "data.hdf5") in lines[name] for name in ("ours", "d3rlpy"))
    assert not any(counted("HalfCheetah-v4") in line for line in lines.values())
