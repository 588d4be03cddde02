# ruff: noqa: T201
"""Profile some steps in the middle of a run of one of our algorithm files, which is not changed.

    python bench/speed/step_time.py 6000 500 algos/sac.py --device cuda --total-steps 10000  # 500 steps from 6000 on

The output is the wall time of a step and of the parts that the run itself times. Acting waits for the device, and an
update is only sent to it. The output also shows how long the device was busy, with how many kernels, and which of them
took longest.
"""

import contextlib
import runpy
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from common.logger import Logger
from common.messages import log_error
from common.run_folder import read_config
from common.timings import Timings


class Watch:
    """A profiler that starts at step `first`, stops `steps` later, and then ends the run."""

    def __init__(self, first: int, steps: int) -> None:
        self.first, self.last = first, first + steps
        self.profiler: Any = None
        self.on_device = False  # whether the run uses the GPU, not whether there is one
        self.parts: dict[str, list[float]] = defaultdict(list)
        self.seconds = 0.0

    def step(self, logger: Logger) -> None:
        if self.profiler is None and logger.step >= self.first:
            arguments = read_config(logger.folder, "is damaged")["arguments"]
            self.on_device = arguments["device"] != "cpu" and torch.cuda.is_available()
            self.profiler = profile(activities=[ProfilerActivity.CUDA if self.on_device else ProfilerActivity.CPU])
            # With several environments, a step may skip the requested numbers.
            self.first, self.last = logger.step, logger.step + self.last - self.first
            if self.on_device:
                torch.cuda.synchronize()  # excludes the work of earlier steps
            self.profiler.start()
            self.seconds = -time.perf_counter()
        elif self.profiler is not None and logger.step >= self.last:
            if self.on_device:
                torch.cuda.synchronize()
            self.last = logger.step
            self.seconds += time.perf_counter()
            self.profiler.stop()
            raise SystemExit

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Time a part of the profiled steps."""
        started = time.perf_counter()
        yield
        if self.profiler is not None:
            self.parts[name].append(1e3 * (time.perf_counter() - started))

    def report(self) -> str:
        """Return a line for each part, and one for each of the ten kernels that took most time."""
        if self.profiler is None or self.seconds < 0:
            return "the run ended before the profile: give it more steps"
        steps = self.last - self.first
        lines = [f"{1e6 * self.seconds / steps:10.1f} µs a step, {steps / self.seconds:,.0f} steps/s while profiled"]
        lines += [f"{1e3 * median(t):10.1f} µs {name} (median)" for name, t in self.parts.items() if t]
        kernels: dict[str, list[float]] = defaultdict(list)
        for event in self.profiler.events():
            if not self.on_device or event.device_type == torch._C._autograd.DeviceType.CUDA:
                kernels[event.name].append(event.device_time if self.on_device else event.self_cpu_time_total)
        total, count = sum(map(sum, kernels.values())), sum(map(len, kernels.values()))
        lines.append(f"{total / steps:10.1f} µs a step in {count / steps:.1f} kernels or operations, of which")
        for name, times in sorted(kernels.items(), key=lambda item: -sum(item[1]))[:10]:
            lines.append(f"{sum(times) / steps:10.1f} µs in {len(times) / steps:.1f} of {name[:80]}")
        return "\n".join(lines)


def main() -> None:
    """Run the program of the command line, and print the profile. Exit with status 2 if the arguments are wrong."""
    try:
        watch, program = Watch(int(sys.argv[1]), int(sys.argv[2])), sys.argv[3]
    except (IndexError, ValueError) as error:
        example = "python bench/speed/step_time.py 6000 500 algos/sac.py --total-steps 10000"
        log_error(f"step_time.py: give the first step, the number of steps and a program, as in {example}", error)
        raise SystemExit(2) from None
    advance, timed = Logger.advance, Timings.__call__

    def watched_advance(self: Logger, steps: int) -> None:
        watch.step(self)  # at the end of the previous step
        advance(self, steps)

    @contextlib.contextmanager
    def timed_here_too(self: Timings, name: str) -> Iterator[None]:
        with timed(self, name), watch.timed(name):
            yield

    Timings.__call__ = timed_here_too  # type: ignore[method-assign]
    Logger.advance = watched_advance  # type: ignore[method-assign]
    sys.argv = sys.argv[3:]
    with tempfile.TemporaryDirectory() as folder:
        sys.argv += ["--run-dir", str(Path(folder) / "run")]
        try:
            runpy.run_path(program, run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise
    print(watch.report())


if __name__ == "__main__":
    main()
