"""Messages and results: where they go, and what happens if no program reads them."""

import io
import logging
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import ROOT

from common.command_line import command_line
from common.errors import Stopped
from common.messages import log

TRAIN = ("algos/sac.py", "--env", "Pendulum-v1", "--total-steps", "30", "--eval-every", "10", "--eval-episodes", "1")


def test_messages_go_to_stderr_with_a_mark_for_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    log.info("step %d", 5)
    log.warning("slow")
    assert capsys.readouterr() == ("", "step 5\nwarning: slow\n")


def test_a_long_line_loses_its_middle(capsys: pytest.CaptureFixture[str]) -> None:
    """A value of 100,000 characters hides neither its flag nor the cure."""
    log.error(f"--env is {'x' * 100_000}: give an id\nsee --help")
    said = capsys.readouterr().err
    assert said.startswith("--env is xxx")
    assert said.endswith(": give an id\nsee --help\n")
    assert len(said) < 2_000


def test_a_level_hides_messages(capsys: pytest.CaptureFixture[str]) -> None:
    log.setLevel("WARNING")
    log.info("step")
    log.warning("slow")
    log.setLevel("INFO")
    assert capsys.readouterr().err == "warning: slow\n"


def test_a_program_with_handlers_of_its_own_prints_nothing_twice(capsys: pytest.CaptureFixture[str]) -> None:
    root, stream = logging.getLogger(), io.StringIO()
    handler = logging.StreamHandler(stream)
    root.addHandler(handler)
    log.warning("once")
    root.removeHandler(handler)
    assert stream.getvalue() == ""
    assert capsys.readouterr().err == "warning: once\n"


def unread(*words: str, cwd: Path = ROOT, **streams: int) -> subprocess.CompletedProcess[str]:
    """Run a command whose `stdout` or `stderr` is a pipe without a reader."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        line = [sys.executable, *words]
        return subprocess.run(
            line, cwd=cwd, text=True, check=False, env=os.environ | {"PYTHONPATH": str(ROOT)},
            **({"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | dict.fromkeys(streams, writer)),
        )  # fmt: skip
    finally:
        os.close(writer)


@pytest.mark.parametrize(
    "words", [("algos/sac.py", "--help"), ("-m", "bench.sweep.sweep", "smoke", "--dry-run")], ids=["help", "result"]
)
def test_a_result_that_no_program_reads_ends_without_a_traceback(words: tuple[str, ...]) -> None:
    done = unread(*words, stdout=True)
    assert done.stderr == ""
    assert done.returncode == 1


def test_a_run_whose_messages_no_program_reads_continues(tmp_path: Path) -> None:
    done = unread(*TRAIN, "--run-dir", str(tmp_path / "run"), stderr=True)
    assert done.returncode == 0
    assert (tmp_path / "run" / "DONE").exists()


def test_a_run_whose_terminal_was_closed_continues(tmp_path: Path) -> None:
    """Started with setsid, it gets no SIGHUP. The kernel then refuses every write with EIO."""
    master, terminal = os.openpty()
    line = [sys.executable, *TRAIN, "--run-dir", str(tmp_path / "run")]
    run = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=terminal, cwd=ROOT, start_new_session=True)
    os.close(terminal)
    os.read(master, 1)
    os.close(master)
    assert run.wait(timeout=120) == 0
    assert (tmp_path / "run" / "DONE").exists()


def test_a_fork_that_is_killed_while_it_prints_does_not_stop_others() -> None:
    program = (
        "import os, signal\nfrom tqdm import tqdm\nfrom common.messages import log\n"
        "log.info('one')\nchild = os.fork()\n"
        "if not child:\n    tqdm.get_lock().acquire()\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "os.waitpid(child, 0)\nlog.info('two')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert done.stderr == "one\ntwo\n"


@dataclass(frozen=True)
class NoArgs:
    """No arguments."""


@pytest.mark.parametrize(("raised", "said"), [(Stopped(143), ""), (ValueError("wrong"), "ValueError: wrong")])
def test_a_second_signal_while_an_object_is_freed_prints_no_traceback(
    raised: BaseException, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python cannot raise it there. Another exception is an error to see."""

    class Freed:
        def __del__(self) -> None:
            raise raised

    def train(_: NoArgs) -> None:
        freed = Freed()
        del freed

    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)  # to restore it
    command_line(train, NoArgs)
    err = capsys.readouterr().err
    assert said in err
    assert bool(err) == bool(said)
