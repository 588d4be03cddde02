"""Show how far a program is: a bar on a terminal, or a line once a minute in a file or pipe."""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from tqdm import tqdm

from common.messages import log

WINDOW = 60.0  # seconds: the speed, and so the time left, is that of the last minute
REDRAW_EVERY = 0.1  # seconds, on a terminal
FIRST_LINE, LINE_EVERY = 10.0, 60.0  # seconds, in a file or pipe


class Progress:
    """The step of a program that ends at step `last`, its speed, and the time left.

    The first steps are often faster than those that follow. So the time left is unknown until `begin` is called.
    """

    def __init__(
        self, step: int, first: int, last: int, unit: str = "step", clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Begin at `step` of the steps from `first` to `last`, for example after a checkpoint."""
        self.step, self.first, self.last, self.unit, self._clock = step, first, last, unit, clock
        self.note = ""  # shown after the time left
        self._began = False
        self._bar = tqdm(
            total=last - first, disable=None, dynamic_ncols=True, bar_format="{percentage:3.0f}%|{bar}| {desc}"
        )
        self._restart()
        self._draw()

    def _restart(self) -> None:
        """Forget the speed so far, because the next steps take another time."""
        now = self._clock()
        self._samples = deque([(now, self.step)])  # at most one each second, from one before the window
        self._drawn, self._next_line = now, now + FIRST_LINE

    def begin(self) -> None:
        """Predict the time left from here on. Only the first call has an effect."""
        if not self._began:
            self._began = True
            self._restart()

    def advance(self, steps: int) -> None:
        """Count steps, and show them if it is time."""
        is_switch = self.step <= 0 < self.step + steps and self.first < 0
        self.step += steps
        now = self._clock()
        if is_switch:  # a gradient step on a dataset alone takes another time than an environment step
            self._restart()
        elif now - self._samples[-1][0] >= 1.0:
            self._samples.append((now, self.step))
            while self._samples[1][0] < now - WINDOW:
                self._samples.popleft()
        if self._bar.disable:
            if now >= self._next_line:
                self._next_line = now + LINE_EVERY
                log.info(str(self))
        elif now - self._drawn >= REDRAW_EVERY:
            self._draw()

    def __str__(self) -> str:
        """Return the step, the speed over the last minute and the time left, as far as they are known."""
        span = f"{self.first:,} to {self.last:,}" if self.first < 0 else f"{self.last:,}"
        text = f"{self.unit} {self.step:,} of {span}"
        since, before = self._samples[0]
        seconds, steps = self._clock() - since, self.step - before
        if seconds >= 1.0 and steps:
            speed = steps / seconds
            text += f", {speed:,.{0 if speed >= 10 else 1}f} {self.unit}s/s"
            if self._began:
                text += f", {tqdm.format_interval(max(0, self.last - self.step) / speed)} left"
        return text + self.note

    @contextlib.contextmanager
    def busy(self, what: str, once: bool = False) -> Iterator[None]:
        """Show `what` takes the time, and its seconds, until the block ends. Leave it out of the speed if it is `once`.

        A thread does that, because the block does not return in the meantime. It runs on a terminal only.
        """
        ended, started = threading.Event(), self._clock()

        def tick() -> None:
            while not ended.wait(1.0):
                self._draw(f"{what}, {self._clock() - started:.0f} s")

        thread = None if self._bar.disable else threading.Thread(target=tick, daemon=True)
        if thread:
            self._draw(what)
            thread.start()
        try:
            yield
        finally:
            if thread:
                ended.set()
                thread.join()
            if once:
                self._restart()
            self._draw()

    def _draw(self, text: str = "") -> None:
        if not self._bar.disable:
            self._drawn, self._bar.n = self._clock(), min(self.step - self.first, self.last - self.first)
            self._bar.set_description_str(f"{text}; {self}" if text else str(self))

    def close(self) -> None:
        """Show the last state. A message that follows is below the bar."""
        self._draw()
        self._bar.close()
