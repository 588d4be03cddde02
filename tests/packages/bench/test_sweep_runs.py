"""Real sweeps, on Ray: killing any part of one changes none of its numbers."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from conftest import ROOT, assert_same_folder, assert_same_run, long
from stand_ins import RUN, write_suite

from bench.sweep.suite import jobs, read_suite


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


def assert_same(sweep: Path, undisturbed: Path, same_run: Callable[[Path, Path], None] = assert_same_folder) -> None:
    """Every run, by default in all its files."""
    runs = sorted(path.parent.relative_to(undisturbed) for path in undisturbed.glob("**/DONE"))
    assert runs
    assert runs == sorted(path.parent.relative_to(sweep) for path in sweep.glob("**/DONE"))
    for run in runs:
        same_run(sweep / run, undisturbed / run)


def train_without_sweep(path: str, folder: Path) -> Path:
    """Run every command of a suite by hand, but for those of the name `bad`."""
    for job in jobs(*read_suite(path), folder):
        if "bad" not in job.label:
            environment = os.environ | job.environment
            subprocess.run(job.argv, cwd=ROOT, env=environment, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs of 2,500 steps that nothing killed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return train_without_sweep(write_suite(folder, RUN.format(steps=2500, seeds=3)), folder)


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

    def test_numbers_are_those_of_the_commands_and_a_failure_is_told(self, start, tmp_path: Path):
        """Twice the same command: it takes up what failed, and what has more steps now, but not what is finished."""
        absent = "[[runs]]\nalgo = 'sac'\nname = 'bad'\nenvs = 'absent:Own-v0'\n"
        finished = RUN.format(steps=500, seeds=1) + "name = 'finished'\n"
        runs, by_hand, ends = tmp_path / "runs/mine", tmp_path / "by-hand/mine", []
        for steps in (500, 800):
            path = write_suite(tmp_path, finished + absent + RUN.format(steps=steps, seeds=1))
            process = start(path, tmp_path / "runs", "--cpus", "2")
            said = process.communicate(timeout=300)[0]
            assert process.returncode == 1
            assert "| sac.py: The module of absent:Own-v0 cannot be imported" in said
            assert "2 done, 0 running, 0 waiting, 1 failed" in said
            assert "1 of 3 runs failed" in said
            ends.append((runs / "finished/Pendulum-v1/1/DONE").stat().st_mtime_ns)
        assert ends[0] == ends[1]
        assert "resumes from step 500" in (runs / "sac/Pendulum-v1/1.log").read_text()
        train_without_sweep(path, tmp_path / "by-hand")
        assert_same(runs / "finished", by_hand / "finished")
        assert_same(runs / "sac", by_hand / "sac", assert_same_run)  # it logged at its first end too

    @pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGHUP, marks=long)])
    def test_ctrl_c_or_a_closed_terminal_leaves_checkpoints_and_no_process(self, start, number: int, tmp_path: Path):
        process = start(write_suite(tmp_path, RUN.format(steps=100_000, seeds=3)), tmp_path / "runs", "--cpus", "2")
        wait_for(lambda: checkpoints(tmp_path) == 2)
        children = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, number)  # as a terminal does
        said = process.communicate(timeout=120)[0]
        assert process.returncode == 128 + number
        assert "run the same command to resume" in said
        assert "Traceback" not in said
        wait_for(lambda: all(map(ended, children)))
        assert not processes(str(tmp_path))
        for log in (tmp_path / "runs/mine/sac/Pendulum-v1").glob("*.log"):
            assert "run the same command to resume" in log.read_text()

    def test_kills_of_a_run_a_worker_and_the_driver_change_nothing(self, start, undisturbed: Path, tmp_path: Path):
        path = write_suite(tmp_path, RUN.format(steps=2500, seeds=3))
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
    def test_a_cluster_shares_the_runs_and_outlives_a_node(self, start, undisturbed: Path, tmp_path: Path):
        """Two nodes with a CPU each. One is killed in the middle of a run; the other finishes all."""
        path = write_suite(tmp_path, RUN.format(steps=2500, seeds=3))
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
