"""bench/sweep/sweep.py: a suite's commands, what is refused, and what the driver starts, counts and takes up again."""

import errno
import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from conftest import ROOT, long
from filelock import FileLock
from stand_ins import RUN, write_suite

from bench.sweep import sweep
from bench.sweep.mps import shared_card
from bench.sweep.suite import SUITES, jobs, read_suite
from bench.sweep.sweep import Args, Sweep, fill, finish, is_done, refuse_other_versions
from bench.sweep.sweep_task import Job, Outcome
from bench.sweep.sweep_task import run as run_job
from common.errors import InputError


@pytest.fixture
def suite(tmp_path: Path) -> Callable[[str], str]:
    return partial(write_suite, tmp_path)


def table(page: str) -> list[list[str]]:
    """Return the cells of every table's row on a page."""
    lines = (ROOT / "docs" / f"{page}.md").read_text().splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]


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
            ("[[runs]]\nalgo = 'sac'\nenvs = 'Pendulum-v9'", r"no environment Pendulum-v9\. Did you mean Pendulum-v1"),
            ("[[runs]]\nalgo = 'iql'\ndatasets = 'a.hdf5'\nflags = '--env Hoper-v4'", "no environment Hoper-v4"),
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

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
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

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
    def test_a_signal_while_ray_fails_to_start(self, number: int, monkeypatch: pytest.MonkeyPatch):
        """The signal counts, and neither the error nor the handler that Ray has set."""

        def init(*_: object, **__: object) -> None:
            signal.signal(signal.SIGTERM, lambda number, _: sys.exit(number))  # as Ray does
            signal.raise_signal(number)  # to this thread: those of the tests do not block it
            raise Exception("timed out")

        monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=init, shutdown=Mock()))
        with pytest.raises(SystemExit) as stop:
            sweep.execute(Sweep([]), Args("none"))
        assert stop.value.code == 128 + number

    @long
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

    def test_a_file_that_does_not_exist_is_refused_before_anything_runs(self, suite, tmp_path: Path, capsys):
        """A dry run lists its commands, because the file may be on another machine. Ids are no files."""
        path = suite("""
            [[runs]]
            algo = "iql"
            datasets = ["D4RL/pen/human-v2", "tests/pendulum-random.hdf5", "data/armm.hdf5"]
            flags = "--env Pendulum-v1"
        """)
        sweep.train(Args(path, tmp_path / "runs", dry_run=True))
        assert len(capsys.readouterr().out.splitlines()) == 3
        with pytest.raises(InputError, match=r"^iql/armm/1: there is no file .*/data/armm\.hdf5: make that dataset"):
            sweep.train(Args(path, tmp_path / "runs"))
        assert not [path for path in tmp_path.glob("runs/mine/*") if path.name != ".lock"]

    def test_unknown_suites_are_told_with_those_that_are_there(self):
        with pytest.raises(InputError, match=r"give one of .*smoke"):
            read_suite("smokes")

    @pytest.mark.parametrize("path", sorted(SUITES.glob("*.toml")), ids=lambda path: path.stem)
    def test_our_own_suites_are_right(self, path: Path):
        """The page lists each, with its number of runs."""
        found = commands(path.stem)
        assert len(found) == len(set(found)) > 0
        (row,) = [row for row in table("sweeps") if f"`{path.stem}`" in row[0]]
        names, counts = re.findall(r"`([\w-]+)`", row[0]), row[1].split(", ")
        assert counts[names.index(path.stem)] == str(len(found))

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
        ray.exceptions, alive["b"], alive["c"] = SimpleNamespace(RayError=KeyError), False, True
        with pytest.raises(InputError, match="node host-c cannot be asked for its versions: 'c'"):
            refuse_other_versions(ray, set())  # it has no Python, for example

        def gone(node: str) -> dict[str, str]:
            alive["c"] = False
            return theirs[node]

        ray.get = gone  # it left before it answered
        assert refuse_other_versions(ray, set()) == {"a"}

    def test_what_fits_starts_and_does_not_wait_behind_what_does_not(self, ray: FakeRay, tmp_path: Path):
        needs = [{"cpus": 2}, {"cpus": 2}, {"cpus": 1, "gpus": 0.5}, {"cpus": 1}]
        sweep = Sweep([self.job(tmp_path, i, **need) for i, need in enumerate(needs)])
        fill(sweep, ray)
        assert [job.seed for job in sweep.running.values()] == [0, 2]
        assert [job.seed for job in sweep.waiting] == [1, 3]

    def test_memory_that_runs_reserve_is_not_free(self, tmp_path: Path, ray: FakeRay):
        ray.resources = ({"CPU": 4.0, "memory": 3.0 * 2**30},)
        sweep = Sweep([self.job(tmp_path, i, cpus=1, memory=memory) for i, memory in enumerate((2.0, 2.0, 1.0))])
        fill(sweep, ray)
        assert [job.seed for job in sweep.running.values()] == [0, 2]

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


@pytest.mark.parametrize("error", [InputError("node c has torch 1.0"), OSError(errno.ENOSPC, "the disk is full")])
def test_an_error_of_the_driver_stops_the_runs_with_checkpoints(
    error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Ray's end would kill them. The error is raised after they have ended."""
    did: list[str] = []
    ray = SimpleNamespace(
        init=lambda *_, **__: None, shutdown=lambda: did.append("shutdown"), cancel=did.append,
        wait=lambda runs, num_returns, timeout: did.append(f"wait for {num_returns}"),
    )  # fmt: skip

    def drive(sweep: Sweep, _: object) -> None:
        sweep.running = {name: Job(("algos/sac.py",), tmp_path / name, 1) for name in "ab"}
        raise error

    monkeypatch.setenv("RAY_ADDRESS", "a-cluster:6379")
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(sweep, "drive", drive)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    with pytest.raises(type(error), match=r"node c|is full"):
        sweep.execute(Sweep([]), sweep.Args("smoke"))
    assert did == ["a", "b", "wait for 2", "shutdown"]


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
