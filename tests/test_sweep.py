"""bench/sweep/sweep.py: a suite's commands, and that killing any part of a sweep changes none of its numbers."""

import itertools
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest
from conftest import ROOT, final_state, long, module, same
from filelock import FileLock

from bench.sweep import sweep
from bench.sweep.mps import shared_card
from bench.sweep.suite import SUITES, jobs, read_suite
from bench.sweep.sweep import Args, Sweep, fill, finish, is_done, refuse_other_versions
from bench.sweep.sweep_task import Job, Outcome
from bench.sweep.sweep_task import run as run_job
from common.command_line import parse
from common.errors import InputError

RUN = """
[[runs]]
algo = "sac"
envs = "Pendulum-v1"
flags = "--total-steps {steps} --learning-starts 50 --eval-every 500 --eval-episodes 2 --hidden 8 8 --batch-size 16 --checkpoint-every 100"
seeds = {seeds}
"""  # noqa: E501


@pytest.fixture
def suite(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str, name: str = "mine") -> str:
        path = tmp_path / f"{name}.toml"
        path.write_text(text)
        return str(path)

    return write


def commands(path: str, folder: Path = Path("/runs")) -> list[str]:
    return [shlex.join((*job.command, "--run-dir", str(job.folder))) for job in jobs(*read_suite(path), folder)]


class TestSuites:
    def test_every_algorithm_on_every_task_with_every_seed(self, suite):
        path = suite("""
            [[runs]]
            algo = ["sac", "td3"]
            envs = ["Hopper-v4", "module:Own-v0"]
            seeds = 2
            flags = "--total-steps 1000 --hidden 64 64"
            [[runs]]
            algo = "iql"
            name = "iql-mix"
            datasets = ["data/a.hdf5", "D4RL/pen/human-v2"]
            seeds = [7]
            flags = "--retain mix"
        """)
        assert commands(path) == [
            f"algos/{algo}.py --env {env} --total-steps 1000 --hidden 64 64 --seed {seed} "
            f"--run-dir /runs/mine/{algo}/{name}/{seed}"
            for seed in (1, 2)
            for algo in ("sac", "td3")
            for env, name in (("Hopper-v4", "Hopper-v4"), ("module:Own-v0", "module_Own-v0"))
        ] + [
            f"algos/iql.py --dataset {dataset} --retain mix --seed 7 --run-dir /runs/mine/iql-mix/{name}/7"
            for dataset, name in (("data/a.hdf5", "a"), ("D4RL/pen/human-v2", "D4RL_pen_human-v2"))
        ]

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("", r"one or more \[\[runs\]\]"),
            ("[[runs]]\nalgo = 'sac'\nenvs = 'Hopper-v4'\n[other]\na = 1", "nothing else"),
            ("[[runs]\n", "mine.toml"),
            ("[[runs]]\nalgo = 'sac'", "needs algo, envs or datasets"),
            ("[[runs]]\nenvs = 'Hopper-v4'", "needs algo"),
            ("[[runs]]\nalgo = 'sac'\nenvs = 'Hopper-v4'\nseeds = 0", "seeds"),
            ("[[runs]]\nalgo = 'sac'\nenvs = 'Hopper-v4'\nseeds = [-1]", "must be 0 or more"),
            ("[[runs]]\nalgo = 'sac'\nenvs = 'Hopper-v4'\nseeds = '3'", "seeds is '3'"),
            ("[[runs]]\nalgo = 'sac'\nenvs = [4]", "envs is"),
            ("[[runs]]\nalgo = 'sac'\nenvs = 'Hopper-v4'\ncpus = 0", "cpus of 1 or more"),
            ("[[runs]]\nalgo = 'sac'\nenvs = 'Hopper-v4'\ncpus = 1.5", "cpus is 1.5"),
            ("[[runs]]\nalgo = 'sac'\nenvs = 'Hopper-v4'\ngpus = -0.5", "must be 0 or more"),
            ("[[runs]]\nalgo = 'sac'\nenvs = 'Hopper-v4'\nflag = ''", "flag: a run has algo, envs"),
            ("[[runs]]\nalgo = '__init__'\nenvs = 'Hopper-v4'", "no algos/__init__.py: give one of bc, cql"),
            ("[[runs]]\nalgo = '../tools/video'\nenvs = 'Hopper-v4'", "no algos/../tools/video.py: give one of"),
            ("[[runs]]\nalgo = 'sac'\nenvs = 'Hopper-v4'\nname = '/etc/x'", "'/etc/x' cannot name a folder"),
            ("[[runs]]\nalgo = 'sac'\nenvs = 'Hopper-v4'\nname = '../..'", r"'\.\./\.\.' cannot name a folder"),
            ("[[runs]]\nalgo = 'sac'\nenvs = '..'", r"'\.\.' cannot name a folder"),
            ("[[runs]]\nalgo = 'sac'\nenvs = 'Hopper-v4'\nseeds = 1000000", "seeds is 1,000,000: give 100,000 or"),
            ("[[runs]]\nalgo = ['sac', 'td3']\nenvs = 'Hopper-v4'\nseeds = 60000", "the suite has 120,000 runs"),
            (f"[[runs]]\nalgo = 'sac'\nenvs = 'Hopper-v4'\nseeds = [1, {2**63}]", f"--seed is {2**63}: give"),
            ("[[runs]]\nalgo = 'sacc'\nenvs = 'Hopper-v4'", "no algos/sacc.py: give one of bc, cql"),
            ("[[runs]]\nalgo = 'sac'\nenvs = 'Hopper-v4'\nflags = '--criticcs 2'", "perhaps --critics"),
            ("[[runs]]\nalgo = 'sac'\nenvs = 'Hopper-v4'\nflags = '--gamma 2'", "--gamma is 2.0"),
            ("[[runs]]\nalgo = 'sac'\nenvs = 'Hopper-v4'\nflags = '--seed=2'", "--seed in flags"),
            ("[[runs]]\nalgo = 'sac'\nenvs = 'Hopper-v4'\nflags = '--help'", "--help in flags"),
            ("[[runs]]\nalgo = 'sac'\nenvs = 'Hopper-v4'\nflags = '--gamma \"2'", "No closing quotation"),
            ("[[runs]]\nalgo = 'sac'\nenvs = 4", "envs is 4"),
            ("[[runs]]\nalgo = 'sac'\nenvs = 'Hopper-v4'\ngpus = nan", "and finite"),
            (f"[[runs]]\nalgo = 'sac'\nenvs = 'Hopper-v4'\ngpus = {10**400}", "gpus is 1000.*: give a number"),
            ("runs = " + "[" * 5_000, "mine.toml: maximum recursion depth"),
            ("runs = [1, 2]", r"one or more \[\[runs\]\]"),
            ("[[runs]]\nalgo = 'sac'\nenvs = ['Hopper-v4', 'Hopper-v4']", "two runs would go into"),
        ],
    )
    def test_what_cannot_work_is_refused_before_anything_runs(self, suite, text: str, said: str):
        with pytest.raises(InputError, match=said):
            commands(suite(text))

    def test_a_folder_is_no_suite(self, tmp_path: Path):
        (tmp_path / "a.toml").mkdir()
        with pytest.raises(InputError, match="Is a directory"):
            read_suite(str(tmp_path / "a.toml"))

    @pytest.mark.parametrize("flag", ["cpus", "gpus"])
    def test_as_many_of_them_as_nobody_has(self, suite, flag: str):
        with pytest.raises(InputError, match=f"--{flag} is -1"):
            sweep.train(Args(suite(RUN.format(steps=1, seeds=1)), **{flag: -1}))

    def test_two_sweeps_in_one_folder(self, suite, tmp_path: Path):
        """The second is refused at once, and starts nothing."""
        folder = tmp_path / "runs" / "mine"
        folder.mkdir(parents=True)
        with FileLock(folder / ".lock"), pytest.raises(InputError, match=f"another sweep is running in {folder}"):
            sweep.train(Args(suite(RUN.format(steps=1, seeds=1)), tmp_path / "runs"))
        assert [path.name for path in folder.iterdir()] == [".lock"]

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_a_signal_ends_the_sweep_with_its_own_status(
        self, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=Mock(), wait=Mock(), shutdown=Mock()))
        monkeypatch.setattr(sweep, "drive", lambda *_: os.kill(os.getpid(), number))
        with pytest.raises(SystemExit) as stop:
            sweep.execute(Sweep([]), Args("none"))
        assert stop.value.code == 128 + number

    @pytest.mark.parametrize("error", [Exception, ValueError, RuntimeError, ConnectionError])
    def test_ray_that_does_not_start(self, error: type[Exception], monkeypatch: pytest.MonkeyPatch):
        """Ray raises a bare Exception on a machine that is too busy."""
        monkeypatch.setitem(
            sys.modules, "ray", SimpleNamespace(init=Mock(side_effect=error("timed\nout")), shutdown=Mock())
        )
        with pytest.raises(InputError, match=r"^Ray does not start here: timed out: run the same command again$"):
            sweep.execute(Sweep([]), Args("none"))

    def test_sigterm_while_ray_fails_to_start(self, monkeypatch: pytest.MonkeyPatch):
        """The signal counts, and neither the error nor the handler that Ray has set."""

        def init(*_: object, **__: object) -> None:
            signal.signal(signal.SIGTERM, lambda number, _: sys.exit(number))  # as Ray does
            signal.raise_signal(signal.SIGTERM)  # to this thread: those of the tests do not block it
            raise Exception("timed out")

        monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=init, shutdown=Mock()))
        with pytest.raises(SystemExit) as stop:
            sweep.execute(Sweep([]), Args("none"))
        assert stop.value.code == 128 + signal.SIGTERM

    def test_sigterm_while_ray_starts(self):
        """Ray's handlers ignored it, aborted or exited with another status. Ray's own processes still receive it."""
        code = (
            "import os, psutil, ray, signal\nfrom pathlib import Path\n"
            "from bench.sweep.sweep import Args, Sweep, execute\nfrom ray._private.node import Node\n"
            "start = Node.start_ray_processes\n"
            "def signalled(node):\n    os.kill(os.getpid(), signal.SIGTERM)\n    start(node)\n"
            "    for child in psutil.Process().children():\n"
            "        status = Path(f'/proc/{child.pid}/status').read_text()\n"
            "        print(int(status.partition('SigBlk:')[2].split()[0], 16) >> signal.SIGTERM - 1 & 1)\n"
            "Node.start_ray_processes = signalled\nexecute(Sweep([]), Args('none', cpus=1))"
        )
        stopped = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
        assert stopped.returncode == 128 + signal.SIGTERM
        assert stopped.stderr.startswith("stopping the runs")
        assert set(stopped.stdout.split()) == {"0"}

    def test_folders_with_spaces(self, suite):
        path = suite("""
            [[runs]]
            algo = "iql"
            datasets = "a.hdf5"
            flags = "--init-from {suites}/b/{run}"
        """)
        (job,) = jobs(*read_suite(path), Path("/my runs"))
        assert job.command[3:5] == ("--init-from", "/my runs/b/a/1")

    def test_unknown_suites_are_told_with_those_that_are_there(self):
        with pytest.raises(InputError, match=r"give one of .*smoke"):
            read_suite("smokes")

    @pytest.mark.parametrize("path", sorted(SUITES.glob("*.toml")), ids=lambda path: path.stem)
    def test_our_own_suites_are_right(self, path: Path):
        found = commands(path.stem)
        assert len(found) == len(set(found)) > 0

    def test_dry_run_prints_commands_that_a_shell_runs_and_starts_nothing(self, suite, tmp_path: Path, capsys):
        sweep.train(Args(suite(RUN.format(steps=100, seeds=1)), tmp_path / "runs", dry_run=True))
        line = capsys.readouterr().out
        assert not (tmp_path / "runs").exists()
        shell = f"PATH={Path(sys.executable).parent}:$PATH; {line}"
        assert subprocess.run(shell, shell=True, cwd=ROOT, capture_output=True, check=False).returncode == 0
        assert (tmp_path / "runs/mine/sac/Pendulum-v1/1/DONE").exists()

    def test_a_folder_of_another_command_is_refused(self, tmp_path: Path):
        job = Job(("algos/sac.py", "--gamma", "0.9"), tmp_path / "1", 1)
        other = Job(("algos/sac.py", "--gamma", "0.99"), tmp_path / "1", 1)
        moved = Job(job.command, tmp_path.parent / tmp_path.name / "1", 1)
        assert not is_done(job)
        (tmp_path / "1").mkdir()
        (tmp_path / "1" / "DONE").touch()
        (tmp_path / "1.sh").write_text(job.line)
        assert is_done(job)
        assert is_done(moved)
        for different in (other, Job(job.command, job.folder, 1, cpus=2)):
            with pytest.raises(InputError, match=r"made by another command.*0\.9 --run-dir"):
                is_done(different)

    @pytest.mark.parametrize(
        ("before", "now", "continues"),
        [
            ("sac --env Hopper-v4 --total-steps 1000", "sac --env Hopper-v4 --total-steps 1001", True),
            ("sac --env Hopper-v4 --total-steps 1000", "sac --env Hopper-v4", True),  # to the default
            ("iql --dataset a.hdf5 --online-steps 10", "iql --dataset a.hdf5 --online-steps 20", True),
            ("sac --env Hopper-v4 --total-steps 1000", "sac --env Hopper-v4 --total-steps 999", False),
            ("sac --env Hopper-v4 --total-steps 1000", "sac --env Hopper-v4 --total-steps 2000 --gamma 0.9", False),
            ("sac --env Hopper-v4 --total-steps 1000", "td3 --env Hopper-v4 --total-steps 2000", False),
            ("sac --env Hopper-v4 --total-steps 1000 --was-there 1", "sac --env Hopper-v4 --total-steps 2000", False),
            ("ppo --env Hopper-v4 --total-steps 4096", "ppo --env Hopper-v4 --total-steps 8192", False),
            ("iql --dataset a.hdf5 --offline-steps 10", "iql --dataset a.hdf5 --offline-steps 20", False),
            ("iql --dataset a.hdf5", "iql --dataset a.hdf5 --online-steps 9", False),
        ],
    )
    def test_a_finished_run_is_not_done_where_it_has_more_steps_now(
        self, before: str, now: str, continues: bool, tmp_path: Path
    ):
        old, new = (Job((f"algos/{algo}.py", *flags), tmp_path / "1", 1)
                    for algo, *flags in (before.split(), now.split()))  # fmt: skip
        (tmp_path / "1").mkdir()
        (tmp_path / "1" / "DONE").touch()
        (tmp_path / "1.sh").write_text(f"{old.line}\n")
        if continues:
            assert not is_done(new)
        else:
            with pytest.raises(InputError, match="made by another command"):
                is_done(new)


@pytest.mark.parametrize("torn", ["", "algos", "\0\0\0", "OMP_NUM_THREADS=1 python algos/sac.p", "{whole} --env 'a b"])
def test_a_torn_record_of_the_command_is_one_of_another(torn: str, tmp_path: Path):
    whole = Job(("algos/sac.py",), tmp_path / "1", 1).line.partition(" --run-dir")[0]
    (tmp_path / "1.sh").write_text(torn.format(whole=whole))
    with pytest.raises(InputError, match="made by another command"):
        is_done(Job(("algos/sac.py",), tmp_path / "1", 1))


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("0,0,1.0,9,,\n0,1,3.0,9,,\n", "step 0 of 500, return 2.0"),
        ("0,0,1.0,9,,\n500,11,", ""),
        ("0,0,1.0,9,,\n500", ""),
        ("\0\0\0", ""),
        ("", ""),
    ],
)
def test_progress_of_a_run_whose_last_row_is_torn(rows: str, said: str, tmp_path: Path):
    (tmp_path / "config.json").write_text('{"algo": "sac", "arguments": {"total_steps": 500}}')
    (tmp_path / "evaluations.csv").write_text(f"step,episode,return,length,success,normalized_score\n{rows}")
    assert sweep.progress(Job(("algos/sac.py",), tmp_path, 1)) == said


class FakeRay:
    """As much of Ray as the driver asks for nodes; a test says what becomes of a task."""

    class exceptions:
        RayError = ZeroDivisionError

    def __init__(self, *nodes: dict[str, float]) -> None:
        self.resources = nodes

    def nodes(self) -> list[dict[str, object]]:
        return [{"Alive": True, "Resources": resources} for resources in self.resources]


class TestDriver:
    @pytest.fixture
    def ray(self, monkeypatch: pytest.MonkeyPatch) -> FakeRay:
        ray = FakeRay({"CPU": 2.0, "GPU": 1.0}, {"CPU": 1.0, "GPU": 1.0})
        numbers = itertools.count()
        ray.remote = lambda **options: lambda f: type("Task", (), {"remote": lambda self, job: next(numbers)})()
        return ray

    def job(self, folder: Path, seed: int, **needs: float) -> Job:
        return Job(("algos/sac.py",), folder / str(seed), seed, **needs)

    def test_a_node_with_other_versions_is_named(self):
        """Each node is asked once, also one that joins later; a dead one is not."""
        theirs = {"a": sweep.facts(), "b": sweep.facts() | {"torch": "1.0", "commit": "else"}}
        alive = {"a": True, "b": False}

        class At:
            def __init__(self, node: str, soft: bool) -> None:
                self.node = node

        class Task:
            def options(self, num_cpus: int, scheduling_strategy: At) -> "Task":
                self.node = scheduling_strategy.node
                return self

            def remote(self) -> str:
                return self.node

        ray = SimpleNamespace(
            nodes=lambda: [{"NodeID": n, "NodeName": f"host-{n}", "Alive": there} for n, there in alive.items()],
            util=SimpleNamespace(scheduling_strategies=SimpleNamespace(NodeAffinitySchedulingStrategy=At)),
            remote=lambda function: Task(), get=theirs.__getitem__,
        )  # fmt: skip
        assert refuse_other_versions(ray, set()) == {"a"}
        assert refuse_other_versions(ray, {"a"}) == set()
        alive["b"] = True
        with pytest.raises(InputError, match=r"host-b has torch 1\.0, here .*; commit else, here .*"):
            refuse_other_versions(ray, {"a"})

    def test_what_fits_starts_and_does_not_wait_behind_what_does_not(self, ray: FakeRay, tmp_path: Path):
        needs = [{"cpus": 2}, {"cpus": 2}, {"cpus": 1, "gpus": 0.5}, {"cpus": 1}]
        sweep = Sweep([self.job(tmp_path, i, **need) for i, need in enumerate(needs)])
        fill(sweep, ray)
        assert [job.seed for job in sweep.running.values()] == [0, 2]
        assert [job.seed for job in sweep.waiting] == [1, 3]

    @pytest.mark.parametrize("needs", [{"cpus": 3}, {"gpus": 1.5}, {"memory": 1.0}])
    def test_what_fits_nowhere_is_told(self, ray: FakeRay, tmp_path: Path, needs: dict[str, float]):
        with pytest.raises(InputError, match="no node has that much"):
            fill(Sweep([self.job(tmp_path, 1, **needs)]), ray)

    def test_what_is_started_with_more_steps_is_not_done_until_it_ends_again(self, ray: FakeRay, tmp_path: Path):
        """Whatever ends the sweep before the run itself says so."""
        short, long = (Job(("algos/sac.py", "--total-steps", steps), tmp_path / "1", 1) for steps in ("10", "20"))
        (tmp_path / "1").mkdir()
        (tmp_path / "1" / "DONE").touch()
        (tmp_path / "1.sh").write_text(f"{short.line}\n")
        fill(Sweep([long]), ray)
        assert (tmp_path / "1.sh").read_text() == f"{long.line}\n"
        assert not is_done(long)

    def test_a_killed_run_continues_three_times(self, ray: FakeRay, tmp_path: Path):
        sweep = Sweep([self.job(tmp_path, 1)])
        killed = Outcome(-signal.SIGKILL, "step 100", {})
        ray.get = lambda reference: killed
        for _ in range(3):
            fill(sweep, ray)
            finish(sweep, next(iter(sweep.running)), ray)
            assert len(sweep.waiting) == 1
        fill(sweep, ray)
        finish(sweep, next(iter(sweep.running)), ray)
        assert (len(sweep.waiting), len(sweep.failed)) == (0, 1)
        assert "ended with -9" in sweep.table()
        assert "| step 100" in sweep.table()

    def test_results_come_back_from_a_node_that_shares_no_files(self, ray: FakeRay, tmp_path: Path):
        sweep = Sweep([self.job(tmp_path, 1)])
        fill(sweep, ray)
        ray.get = lambda reference: Outcome(0, "", {"evaluations.csv": b"step\n", "DONE": b"{}"})
        (tmp_path / "1").mkdir()
        (tmp_path / "1" / "evaluations.csv").write_bytes(b"of its first steps")
        finish(sweep, next(iter(sweep.running)), ray)
        assert (tmp_path / "1" / "evaluations.csv").read_bytes() == b"step\n"
        assert is_done(sweep.done[0])
        assert sweep.table() == "1 done, 0 running, 0 waiting, 0 failed"


def test_modules_in_the_callers_folder_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The commands run in the repository's root; --env mine:Mine-v0 is in the folder that the sweep was started in."""
    (tmp_path / "mine.py").write_text("STATUS = 7")
    monkeypatch.chdir(tmp_path)
    job = Job(("-c", "import mine; raise SystemExit(mine.STATUS)"), tmp_path / "1", 1)
    monkeypatch.chdir("/")  # as a worker, which runs elsewhere
    outcome = run_job(job)
    assert outcome.status == 7, outcome.said
    monkeypatch.chdir(ROOT)
    assert "PYTHONPATH" not in Job(("algos/sac.py",), tmp_path, 1).environment


def test_gpus_are_for_those_that_ask_and_threads_are_cpus(tmp_path: Path):
    alone = Job(("algos/sac.py",), tmp_path, 1, cpus=3).environment
    assert (alone["OMP_NUM_THREADS"], alone["MKL_NUM_THREADS"], alone["CUDA_VISIBLE_DEVICES"]) == ("3", "3", "")
    half, whole = (Job(("algos/sac.py",), tmp_path, 1, gpus=gpus).environment for gpus in (0.5, 1.0))
    assert not {"CUDA_VISIBLE_DEVICES"} & (half.keys() | whole.keys())  # Ray says which
    assert half["ONRAMP_GPU_SHARE"] == "0.5"
    assert whole["ONRAMP_GPU_SHARE"] == "1.0"


@pytest.mark.parametrize(
    ("status", "client", "said"),
    [
        (0, "true", "share it by MPS"),
        (0, "false", "serves no process"),
        (0, "sleep 60", "serves no process"),
        (1, "true", "no card here): the runs on one card take"),
    ],
)
def test_runs_on_one_card_share_it_by_a_service_that_ends_with_the_sweep(
    status: int, client: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """With stand-ins for NVIDIA's program, which writes down how it was called, and for one that uses the card."""
    monkeypatch.setattr("bench.sweep.mps.CLIENT", tuple(client.split()))
    monkeypatch.setattr("bench.sweep.mps.PATIENCE", 2)
    program, calls = tmp_path / "nvidia-cuda-mps-control", tmp_path / "calls"
    program.write_text(f'#!/bin/sh\n[ "$1" ] || read -r line\necho "$1$line $CUDA_MPS_PIPE_DIRECTORY" >> {calls}\n'
                       f'[ "$1" ] && sleep 30 &\n'  # the service, which keeps what it was given to write to
                       f'echo "no card here" >&2; exit {status}\n')  # fmt: skip
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    started = time.monotonic()
    with shared_card() as message:
        assert said in message
        inside = os.environ.get("CUDA_MPS_PIPE_DIRECTORY")
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    lines = [line.split() for line in calls.read_text().splitlines()]
    if status:
        assert inside is None
        assert [line[0] for line in lines] == ["-d"]
    else:
        assert [line[0] for line in lines] == ["-d", "quit"]
        assert (lines[0][1] == inside == lines[1][1]) == (client == "true")
        assert (inside is None) == (client != "true")
    assert time.monotonic() - started < 15


def test_without_the_service_runs_take_turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with shared_card() as message:
        assert "not installed" in message
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "theirs")
    with shared_card() as message:
        assert "already running" in message
    assert os.environ["CUDA_MPS_PIPE_DIRECTORY"] == "theirs"


def processes(word: str) -> list[psutil.Process]:
    """Those whose command line has a part that begins so."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(part.startswith(word) for part in process.info["cmdline"] or ()):
            found.append(process)
    return found


def wait_for(happened: Callable[[], object], seconds: float = 120.0) -> None:
    until = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < until, "did not happen"
        time.sleep(0.1)


def ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def checkpoints(folder: Path) -> int:
    return len(list(folder.glob("**/checkpoint/state.pt")))


def assert_same(sweep: Path, undisturbed: Path) -> None:
    """Every run's evaluations and final weights, bit for bit."""
    runs = sorted(path.parent.relative_to(undisturbed) for path in undisturbed.glob("**/DONE"))
    assert runs
    assert runs == sorted(path.parent.relative_to(sweep) for path in sweep.glob("**/DONE"))
    for run in runs:
        assert (sweep / run / "evaluations.csv").read_bytes() == (undisturbed / run / "evaluations.csv").read_bytes()
        assert same(final_state(sweep / run), final_state(undisturbed / run))


def train_without_sweep(path: str, folder: Path) -> Path:
    """Train every run of a suite in this process, one after another, on the CPU as the sweep does."""
    arguments = module("sac").Args
    for job in jobs(*read_suite(path), folder):
        module("sac").train(parse(arguments, [*job.argv[2:], "--device", "cpu"]))
    return folder


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs of 4,000 steps that nothing killed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "mine.toml").write_text(RUN.format(steps=4000, seeds=3))
    return train_without_sweep(str(folder / "mine.toml"), folder)


@pytest.mark.skipif(sys.platform != "linux", reason="a killed worker's run ends by Linux's means")
class TestSweeps:
    """Real ones, on Ray."""

    @pytest.fixture
    def start(self, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
        """`python bench/sweep/sweep.py` in a process group of its own."""
        pytest.importorskip("ray", reason="needs Ray: pip install -r requirements.txt")
        started: list[subprocess.Popen[str]] = []

        def start(suite: str, folder: Path, *flags: str, **environment: str) -> subprocess.Popen[str]:
            line = [sys.executable, str(ROOT / "bench" / "sweep" / "sweep.py"), suite, "--folder", str(folder), *flags]
            process = subprocess.Popen(
                line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | environment,
                start_new_session=True,
            )  # fmt: skip
            started.append(process)
            return process

        yield start
        for process in started:
            process.kill()
        wait_for(lambda: not processes(str(tmp_path)))

    def test_numbers_are_those_of_the_commands_and_a_failure_is_told(self, start, suite, tmp_path: Path):
        path = suite(RUN.format(steps=600, seeds=2) + "[[runs]]\nalgo = 'sac'\nname = 'bad'\nenvs = 'Pendulum-v7'\n")
        done: list[int] = []
        for _ in range(2):  # the same command again takes up what failed, alone
            process = start(path, tmp_path / "runs", "--cpus", "2")
            said = process.communicate(timeout=300)[0]
            assert process.returncode == 1
            assert "| sac.py: There is no environment Pendulum-v7" in said
            assert "2 done, 0 running, 0 waiting, 1 failed" in said
            assert "1 of 3 runs failed" in said
            done += [path.stat().st_mtime_ns for path in sorted(tmp_path.glob("runs/**/metrics.csv"))]
        assert done[:2] == done[2:]
        by_hand = jobs(*read_suite(path), tmp_path / "by-hand")
        for job in (each for each in by_hand if "bad" not in each.label):
            environment = os.environ | job.environment
            subprocess.run(job.argv, cwd=ROOT, env=environment, check=True, capture_output=True)
        assert_same(tmp_path / "runs/mine/sac", tmp_path / "by-hand/mine/sac")

    def test_a_suite_with_more_steps_continues_to_them(self, start, suite, tmp_path: Path):
        for steps in (500, 800):
            path = suite(RUN.format(steps=steps, seeds=1))
            assert start(path, tmp_path / "runs", "--cpus", "1").wait(timeout=300) == 0
        assert_same(tmp_path / "runs", train_without_sweep(path, tmp_path / "from-the-start"))
        assert "resumes from step 500" in (tmp_path / "runs/mine/sac/Pendulum-v1/1.log").read_text()

    def test_ctrl_c_leaves_checkpoints_and_no_process(self, start, suite, tmp_path: Path):
        process = start(suite(RUN.format(steps=100_000, seeds=3)), tmp_path / "runs", "--cpus", "2")
        wait_for(lambda: checkpoints(tmp_path) == 2)
        children = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        said = process.communicate(timeout=120)[0]
        assert process.returncode == 130
        assert "run the same command to resume" in said
        assert "Traceback" not in said
        wait_for(lambda: all(map(ended, children)))
        assert not processes(str(tmp_path))
        for log in (tmp_path / "runs/mine/sac/Pendulum-v1").glob("*.log"):
            assert "run the same command to resume" in log.read_text()

    def test_kills_of_a_run_a_worker_and_the_driver_change_nothing(
        self, start, suite, undisturbed: Path, tmp_path: Path
    ):
        path = suite(RUN.format(steps=4000, seeds=3))
        folder = tmp_path / "runs"
        process = start(path, folder, "--cpus", "2")
        wait_for(lambda: checkpoints(folder))
        victim = processes(str(folder / "mine" / "sac"))[0]
        victim.kill()
        wait_for(lambda: ended(victim))
        wait_for(lambda: checkpoints(folder) >= 2 and len(processes(str(folder / "mine" / "sac"))) == 2)
        children = psutil.Process(process.pid).children(recursive=True)
        worker = next(child for child in children if "ray::run" in " ".join(child.cmdline()))
        (its_run,) = worker.children()
        its_folder = its_run.cmdline()[-1]
        worker.kill()
        wait_for(lambda: ended(its_run), 5.0)  # the kernel's doing, at once
        wait_for(lambda: processes(its_folder))  # it resumes in the same sweep
        wait_for(lambda: len(processes(str(folder / "mine" / "sac"))) == 2)
        process.kill()
        assert process.wait() == -signal.SIGKILL
        assert not (folder / "mine/sac/Pendulum-v1/3/DONE").exists(), "over too soon: make the runs longer"
        assert start(path, folder, "--cpus", "2").wait(timeout=300) == 0
        assert_same(folder, undisturbed)

    @long
    def test_a_cluster_shares_the_runs_and_outlives_a_node(self, start, suite, undisturbed: Path, tmp_path: Path):
        """Two nodes with a CPU each. One is killed in the middle of a run; the other finishes all."""
        path = suite(RUN.format(steps=4000, seeds=3))
        temporary = tempfile.mkdtemp(prefix="ray-")  # a socket's path may not be long
        ray = [str(Path(sys.executable).with_name("ray")), "start", "--num-cpus=1", "--disable-usage-stats"]
        port = free_port()
        head = [*ray, "--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={temporary}"]
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "of-this-test" * 4}
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": os.environ | token}
        nodes = [subprocess.Popen([*head, "--block"], **quiet)]
        try:
            wait_for(lambda: listens(port))
            nodes.append(subprocess.Popen([*ray, f"--address=127.0.0.1:{port}", "--block"], **quiet))
            second = psutil.Process(nodes[1].pid)
            wait_for(lambda: "raylet" in [part.name() for part in second.children(recursive=True)])
            folder = tmp_path / "runs"
            process = start(path, folder, RAY_ADDRESS=f"127.0.0.1:{port}", **token)
            wait_for(lambda: all(len(runs_below(node, folder)) == 1 for node in nodes))  # one on each
            its_folder = Path(runs_below(nodes[1], folder)[0].cmdline()[-1])
            wait_for(lambda: checkpoints(its_folder))
            assert not (its_folder / "DONE").exists(), "over too soon: make the runs longer"
            for part in (*second.children(recursive=True), second):
                part.kill()
            assert process.wait(timeout=300) == 0, process.stdout.read()
            assert "resumes from step" in its_folder.with_suffix(".log").read_text()
        finally:
            for node in nodes:
                for part in psutil.Process(node.pid).children(recursive=True) if node.poll() is None else ():
                    part.kill()
                node.kill()
                node.wait()
            shutil.rmtree(temporary, ignore_errors=True)
        assert_same(folder, undisturbed)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def listens(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def runs_below(node: subprocess.Popen[bytes], folder: Path) -> list[psutil.Process]:
    """The runs that are processes of this node."""
    return [run for run in processes(str(folder / "mine")) if node.pid in (parent.pid for parent in run.parents())]
