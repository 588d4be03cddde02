"""The progress of a program: what a terminal and a file show, at which times, with which speed and time left."""

import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
from conftest import Terminal, module

from common.progress import Progress


class Clock:
    """A time that passes only if a test moves it."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def at_speed(progress: Progress, clock: Clock, speed: float, seconds: float) -> None:
    """Advance each quarter of a second."""
    for _ in range(round(seconds * 4)):
        clock.now += 0.25
        progress.advance(round(speed / 4))


def test_slow_steps_after_fast_ones_move_the_bar(clock: Clock, terminal: Terminal):
    """Each of them, although thousands were counted between two drawings before."""
    progress = Progress(0, 0, 100_000, clock=clock)
    at_speed(progress, clock, 50_000, 1)
    before = len(terminal.drawn())
    for _ in range(20):
        clock.now += 0.5
        progress.advance(1)
    assert len(terminal.drawn()) - before == 20
    assert "step 50,020 of 100,000" in terminal.drawn()[-1]


def test_a_bar_is_drawn_ten_times_a_second(clock: Clock, terminal: Terminal):
    progress = Progress(0, 0, 100_000, clock=clock)
    for _ in range(10_240):
        clock.now += 1 / 1_024
        progress.advance(1)
    assert len(terminal.drawn()) == 1 + 99


def test_the_time_left_is_that_of_the_last_minute(clock: Clock, capsys: pytest.CaptureFixture[str]):
    """100 steps/s for ten minutes, then 20 steps/s: one minute later the old speed is forgotten."""
    progress = Progress(0, 0, 120_000, clock=clock)
    progress.begin()
    at_speed(progress, clock, 100, 600)
    assert str(progress) == "step 60,000 of 120,000, 100 steps/s, 10:00 left"
    at_speed(progress, clock, 20, 62)
    assert str(progress) == "step 61,240 of 120,000, 20 steps/s, 48:58 left"


def test_random_steps_predict_no_time_left(clock: Clock):
    """The first update begins the prediction, and the speed of the steps before is forgotten at once."""
    progress = Progress(0, 0, 15_000, clock=clock)
    at_speed(progress, clock, 5_000, 2)
    assert str(progress) == "step 10,000 of 15,000, 5,000 steps/s"
    progress.begin()
    assert str(progress) == "step 10,000 of 15,000"
    at_speed(progress, clock, 100, 2)
    progress.begin()
    assert str(progress) == "step 10,200 of 15,000, 100 steps/s, 00:48 left"


def test_a_resumed_run_counts_its_own_steps_alone(clock: Clock):
    progress = Progress(9_000, 0, 10_000, clock=clock)
    progress.begin()
    at_speed(progress, clock, 100, 5)
    assert str(progress) == "step 9,500 of 10,000, 100 steps/s, 00:05 left"


def test_the_speed_on_a_dataset_is_forgotten_at_the_switch(clock: Clock):
    progress = Progress(-1_000, -1_000, 2_000, clock=clock)
    progress.begin()
    at_speed(progress, clock, 500, 2)
    assert str(progress) == "step 0 of -1,000 to 2,000, 500 steps/s, 00:04 left"
    at_speed(progress, clock, 100, 2.25)
    assert str(progress) == "step 225 of -1,000 to 2,000, 100 steps/s, 00:17 left"


def test_a_file_gets_a_line_after_10_s_and_then_each_minute(clock: Clock, capsys: pytest.CaptureFixture[str]):
    """Whole lines with step, speed and time left, and no carriage return."""
    progress = Progress(0, 0, 100_000, clock=clock)
    progress.begin()
    at_speed(progress, clock, 100, 135)
    progress.close()
    assert capsys.readouterr().err.splitlines(keepends=True) == [
        "step 1,000 of 100,000, 100 steps/s, 16:30 left\n",
        "step 7,000 of 100,000, 100 steps/s, 15:30 left\n",
        "step 13,000 of 100,000, 100 steps/s, 14:30 left\n",
    ]


def test_a_terminal_shows_what_takes_the_time(clock: Clock, terminal: Terminal, monkeypatch: pytest.MonkeyPatch):
    """Its seconds are counted while the block does not return, and the speed leaves it out if it is done once."""
    waits = threading.Semaphore(0)
    shown = threading.Semaphore(0)

    class Event(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert timeout == 1.0
            shown.release()
            waits.acquire()
            return self.is_set()

        def set(self) -> None:
            super().set()
            waits.release()

    namespace = types.SimpleNamespace(Event=Event, Thread=threading.Thread)
    monkeypatch.setattr("common.progress.threading", namespace)  # a thread has an event of its own
    progress = Progress(0, 0, 1_000, clock=clock)
    progress.begin()
    at_speed(progress, clock, 100, 2)
    with progress.busy("compiling", once=True):
        shown.acquire()
        for _ in range(3):
            clock.now += 1.0
            waits.release()
            shown.acquire()
    assert [text.split(";")[0] for text in terminal.drawn() if "compiling" in text] == [
        "compiling", "compiling, 1 s", "compiling, 2 s", "compiling, 3 s",
    ]  # fmt: skip
    assert "compiling" not in terminal.drawn()[-1]
    at_speed(progress, clock, 100, 2)
    assert str(progress) == "step 400 of 1,000, 100 steps/s, 00:06 left"
    with progress.busy("evaluating"):
        shown.acquire()
        clock.now += 4.0
    assert str(progress) == "step 400 of 1,000, 33 steps/s, 00:18 left"


def test_a_file_shows_no_seconds_of_what_takes_the_time(clock: Clock, capsys: pytest.CaptureFixture[str]):
    progress = Progress(0, 0, 10, clock=clock)
    before = threading.active_count()
    with progress.busy("evaluating"):
        assert threading.active_count() == before
    progress.close()
    assert capsys.readouterr().err == ""


def test_more_steps_than_the_last_are_shown(clock: Clock, terminal: Terminal):
    """Several environments may step beyond the end."""
    progress = Progress(0, 0, 10, clock=clock)
    clock.now += 1.0
    progress.advance(12)
    progress.close()
    assert "step 12 of 10" in terminal.drawn()[-1]
    assert "100%|" in terminal.text


def test_a_run_predicts_from_its_first_update_on(
    small: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, terminal: Terminal
):
    """And its terminal shows when it evaluates."""
    begun: list[int] = []
    begin = Progress.begin

    def noted(progress: Progress) -> None:
        begun.append(progress.step)
        begin(progress)

    monkeypatch.setattr(Progress, "begin", noted)
    module("sac").train(small(total_steps=30, learning_starts=20))
    assert begun[0] == 21
    assert any(text.startswith("evaluating; step 30 of 30") for text in terminal.drawn())
    assert "step 30 of 30" in terminal.drawn()[-1]
