"""common/process.py: a process is after a run as it was before, also if the run failed or was stopped."""

import multiprocessing
import signal

import numpy as np
import pytest
import torch
from conftest import module
from filelock import FileLock

from common import process, run
from common.errors import RunError, Stopped
from common.replay_buffer import ReplayBuffer


@pytest.fixture
def state():
    """What a run changes. Two threads, because PPO takes one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield lambda: (
        [signal.getsignal(number) for number in process.STOPS],
        torch.get_num_threads(),
        np.float64(5e-324) * 1.0,
        torch.backends.mkldnn.matmul.fp32_precision,
        torch.get_deterministic_debug_mode(),
        multiprocessing.active_children(),
    )
    torch.set_num_threads(threads)


def test_after_a_run(small, state, monkeypatch: pytest.MonkeyPatch):
    """With deterministic algorithms, as on CUDA."""
    before = state()
    prepared = run.device
    monkeypatch.setattr(run, "device", lambda *args: torch.use_deterministic_algorithms(True) or prepared(*args))
    module("ppo").train(small("ppo"))
    assert state() == before


def test_after_a_run_that_failed(small, state, monkeypatch: pytest.MonkeyPatch):
    """The error is kept alive, as in a notebook. Another process may resume the run."""

    def failing(*_: object) -> None:
        raise RunError("failed")

    before = state()
    monkeypatch.setattr(ReplayBuffer, "add", failing)
    with pytest.raises(RunError, match="failed") as kept:
        module("sac").train(args := small(num_envs=2, vectorizer="async"))
    assert kept.traceback
    assert state() == before
    with FileLock(args.run_dir / ".lock", timeout=0) as lock:
        assert lock.is_locked


def test_a_second_signal_waits_for_nothing(state):
    """An environment that does not answer would keep the process."""
    before, called = state(), []

    def stopped() -> None:
        with process.as_before():
            process.at_end(lambda: called.append("close"))
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            raise Stopped(130)

    with pytest.raises(Stopped):
        stopped()
    assert (called, state()) == ([], before)


@pytest.mark.parametrize(("sent", "counted"), [
    ([signal.SIGHUP, signal.SIGHUP], [signal.SIGHUP]),
    ([signal.SIGINT, signal.SIGHUP], [signal.SIGINT]),
    ([signal.SIGHUP, signal.SIGTERM], [signal.SIGHUP, signal.SIGTERM]),
    ([signal.SIGTERM, signal.SIGTERM], [signal.SIGTERM, signal.SIGTERM]),
])  # fmt: skip
def test_a_hangup_is_no_second_signal(sent: list[int], counted: list[int]):
    came: list[int] = []
    with process.as_before():
        process.on_stop(came.append)
        for number in sent:
            signal.raise_signal(number)
    assert came == counted


def test_under_nohup_a_closed_terminal_stops_nothing():
    came: list[int] = []
    with process.as_before():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        process.on_stop(came.append)
        signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    assert came == []


def test_what_fails_at_the_end_hides_no_error():
    called = []

    def failed() -> None:
        with process.as_before():
            process.at_end(lambda: 1 / 0, lambda: called.append("lock"))
            raise RunError("first")

    with pytest.raises(RunError, match="first"):
        failed()
    assert called == ["lock"]
