# ruff: noqa: T201
"""Time several programs in alternation on one machine, each stopped while another runs.

A machine's speed drifts by a quarter within minutes, so programs timed one after the other cannot be compared. Here
all programs stay warm, and each runs for a few seconds of every round. Ratios within a round are compared. A file gets
the raw figures of the rounds and the facts about the machine, and a report summarises them.
"""

import os
import random
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

import pandas as pd
import psutil
import torch

from bench.speed.step_counter import COUNTER_FILE, read_steps
from bench.sweep.sweep_task import die_with_parent
from common.provenance import commit, hardware, instructions

ROOT = Path(__file__).resolve().parents[2]
LAST_LINES = 15
ENDING = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
ON_CPU = "the processor"  # the fact `device` of a measurement that uses no GPU
QUIET = 0.1  # cores; PyTorch's threads wait for one another, so a little other work slows it several times
# Packages whose versions are reported with the figures, if they are installed.
PACKAGES = ["torch", "numpy", "gymnasium", "mujoco"]
PACKAGES += ["stable-baselines3", "sbx-rl", "jax", "jaxlib", "flax", "optax", "d3rlpy"]


class ContenderError(Exception):
    """A contender cannot start, ended, did not warm up or did not stop. If it ended, its last log lines follow."""


@dataclass(frozen=True)
class Slice:
    """Figures of the contenders of one side in their few seconds of one round."""

    round: int
    contender: str
    steps: int
    seconds: float
    cores: float  # processor seconds that it used per second
    cores_of_others: float  # those of everything else on the machine, which disturbs it

    @property
    def steps_per_second(self) -> float:
        """Return the steps counted inside the program, divided by the wall time measured outside it."""
        return self.steps / self.seconds


class Contender:
    """A program in its own session, so that it and its children are stopped, continued and killed together."""

    def __init__(
        self, name: str, command: Sequence[str], env: Mapping[str, str], folder: Path, warm_steps: int
    ) -> None:
        """Start the program. It is warm after `warm_steps`, once it also `learns`."""
        self.name, self._warm_steps = name, warm_steps
        self.learns: Callable[[], bool] = lambda: True  # set for programs that step before they learn
        self.counter, self._log = folder / f"{name}.steps", folder / f"{name}.log"
        with self._log.open("wb") as log, _held():
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**env, COUNTER_FILE: str(self.counter)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_begin,
            )

    def steps(self) -> int:
        """Return the steps counted so far."""
        return read_steps(self.counter)

    def members(self) -> list[psutil.Process]:
        """Return the program's process and its descendants, or none if the program is gone."""
        try:
            leader = psutil.Process(self.process.pid)
            return [leader, *leader.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def check(self) -> None:
        """Raise ContenderError if the program has ended, because a contender runs until it is killed."""
        status = self.process.poll()
        if status is not None:
            lines = self._log.read_text(errors="replace").splitlines()[-LAST_LINES:]
            raise ContenderError("\n  ".join([f"{self.name} ended with status {status}; its last lines:", *lines]))

    def _send(self, number: signal.Signals) -> None:
        # One by one, because the processes of our environments have their own groups.
        for member in self.members():
            with suppress(psutil.NoSuchProcess):
                member.send_signal(number)

    def stop(self) -> None:
        """Stop the program, and return when none of its processes runs."""
        self.check()
        self._send(signal.SIGSTOP)
        deadline = time.monotonic() + 10
        while any(_status(member) not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE) for member in self.members()):
            self.check()
            if time.monotonic() > deadline:
                raise ContenderError(f"{self.name} does not stop")
            time.sleep(0.0005)
            self._send(signal.SIGSTOP)  # also stops processes started meanwhile

    def resume(self) -> None:
        """Continue the program."""
        self._send(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the program and its children, stopped or not."""
        self._send(signal.SIGKILL)
        with suppress(ProcessLookupError):  # if the program ended by itself, the rest of its group still runs
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def warm_up(self, timeout: float) -> None:
        """Run it alone until it is warm, with random steps and compilation done, then stop it.

        Raise ContenderError if that takes more than `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while self.steps() < self._warm_steps or not self.learns():
            self.check()
            if time.monotonic() > deadline:
                learning = "and learns" if self.learns() else "and does not learn yet"
                steps = f"{self.steps()} of {self._warm_steps} steps"
                raise ContenderError(f"{self.name} made {steps} in {timeout:.0f} s {learning}")
            time.sleep(0.05)
        self.stop()

    def threads(self) -> int:
        """Return the number of threads of all its processes, sleeping ones included."""
        return sum(member.num_threads() for member in self.members())

    def cpu_seconds(self) -> float:
        """Return the processor seconds of all its processes so far."""
        return sum(times.user + times.system for times in (member.cpu_times() for member in self.members()))


@contextmanager
def _held() -> Iterator[None]:
    """Hold signals that end this program until the block is over: Python drops what they raise in a fork."""
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)


def _begin() -> None:
    """Prepare a program's process, which inherits the hold."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    die_with_parent()


def _status(process: psutil.Process) -> str:
    try:
        return str(process.status())
    except psutil.NoSuchProcess:
        return str(psutil.STATUS_ZOMBIE)


def busy_seconds() -> float:
    """Return the processor seconds of all processes on this machine so far."""
    times = psutil.cpu_times()
    return float(times.user + times.system + times.nice)


@contextmanager
def contest() -> Iterator[tuple[list[Contender], Path]]:
    """Yield a list for contenders and a folder for their files; at the end kill and delete them in any case."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(f"ended by {signal.Signals(number).name}; nothing is left running")

    contenders: list[Contender] = []
    # Ctrl-C raises already. The other signals must pass through the cleaning below too.
    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    before[signal.SIGINT] = signal.getsignal(signal.SIGINT)
    folder = Path(tempfile.mkdtemp(prefix="speed-"))
    try:
        yield contenders, folder
    finally:
        for number in before:
            signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C must not interrupt the cleaning
        for contender in contenders:
            contender.kill()
        shutil.rmtree(folder, ignore_errors=True)
        for number, handler in before.items():
            signal.signal(number, handler)


def alternate(sides: Mapping[str, Sequence[Contender]], rounds: int, seconds: float) -> Iterator[list[Slice]]:
    """Yield for each round a slice of every side, whose contenders are warm and stopped, in a new random order."""
    shuffle = random.Random(0).shuffle
    for round_ in range(1, rounds + 1):
        order = list(sides)
        shuffle(order)  # so that no side always follows the same other one, whose cache and clock it inherits
        yield [run_slice(round_, side, sides[side], seconds) for side in order]


def run_slice(round_: int, side: str, contenders: Sequence[Contender], seconds: float) -> Slice:
    """Run all contenders of a side at once, and return the sums of their steps and cores.

    The time is measured from standstill to standstill, so all their work falls within it.
    """

    def so_far() -> tuple[int, float, float]:
        return sum(c.steps() for c in contenders), sum(c.cpu_seconds() for c in contenders), busy_seconds()

    before = so_far()
    start = time.perf_counter()
    for contender in contenders:
        contender.resume()
    time.sleep(seconds)
    for contender in contenders:
        contender.stop()
    wall = time.perf_counter() - start
    steps, own, machine = (now - then for now, then in zip(so_far(), before, strict=True))
    return Slice(round_, side, int(steps), wall, own / wall, max(machine - own, 0.0) / wall)


def measure(
    sides: Mapping[str, Sequence[Contender]], rounds: int, seconds: float, out: Path, facts: dict[str, str]
) -> list[Slice]:
    """Return every slice. Print each round and write `out` after it, so an interrupted run keeps its figures."""
    slices: list[Slice] = []
    for number, made in enumerate(alternate(sides, rounds, seconds), 1):
        slices += made
        print(f"round {number}: {', '.join(f'{s.contender} {s.steps_per_second:.1f}' for s in made)}", flush=True)
        write_rounds(out, facts, slices)
    return slices


def as_table(slices: Sequence[Slice]) -> pd.DataFrame:
    """Return a table with a row for each slice."""
    columns = ["round", "contender", "steps", "seconds", "steps_per_second", "cores", "cores_of_others"]
    return pd.DataFrame([[getattr(s, column) for column in columns] for s in slices], columns=columns)


def write_rounds(path: Path, facts: dict[str, str], slices: Sequence[Slice]) -> None:
    """Write the raw slices as a CSV, after the facts on lines that begin with #."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(f"# {key}: {value}\n" for key, value in facts.items())
    path.write_text(lines + as_table(slices).to_csv(index=False, float_format="%.4f"))


def read_rounds(path: Path) -> tuple[dict[str, str], pd.DataFrame]:
    """Return the facts, and steps per second with a row for each round and a column for each contender."""
    facts = dict(line[2:].split(": ", 1) for line in path.read_text().splitlines() if line.startswith("#"))
    return facts, pd.read_csv(path, comment="#").pivot(index="round", columns="contender", values="steps_per_second")


def spread(values: pd.Series, digits: int) -> str:
    """Return "median (minimum-maximum)"."""
    return f"{values.median():.{digits}f} ({values.min():.{digits}f}-{values.max():.{digits}f})"


def report(slices: Sequence[Slice], updates: Sequence[float]) -> str:
    """Return the report: each contender's speed, then the ratios of our speed to each within the rounds.

    `updates` are the milliseconds of our update alone.
    """
    table = as_table(slices).pivot(index="round", columns="contender")
    rate, cores, others = table["steps_per_second"], table["cores"], table["cores_of_others"]
    between = [name for name in rate if name not in ("ours", "floor")]
    names = ["ours", *between, *({"floor"} & set(rate))]
    width = max(map(len, names))
    lines = ["", "median (min-max) over the rounds", f"{'':{width}}{'steps/s':>24}{'cores used':>20}{'by others':>20}"]
    for name in names:
        used = f"{spread(cores[name], 2):>20}{spread(others[name], 2):>20}"
        lines.append(f"{name:{width}}{spread(rate[name], 1):>24}{used}")
    lines.append("")
    for name in between:
        lines.append(f"ours / {name}: {spread(rate['ours'] / rate[name], 2)} times as many steps/s")
    if "floor" in rate:
        floor_ms = 1000 / rate["floor"]
        lines.append(f"floor: {spread(floor_ms, 2)} ms for the matrix products of one step's updates")
        lines.append(f"ours / floor: {spread(rate['floor'] / rate['ours'], 2)}, whole step with its updates")
        if updates:
            alone = statistics.median(updates)
            times = f"{alone:.2f} ms, {alone / floor_ms.median():.2f} floors"
            lines.append(f"our update alone: {times} (median of {len(updates)} log intervals)")
        else:
            lines.append("our update alone: n/a (no time/update_ms in our metrics during the rounds)")
    disturbed = statistics.median(s.cores_of_others for s in slices)
    if disturbed > QUIET:
        lines.append(f"DO NOT CITE: other work used {disturbed:.2f} cores, so repeat on an idle machine")
    return "\n".join(lines)


def versions(python: str | Path) -> str:
    """Return the versions of a Python and of its installed packages among PACKAGES."""
    code = (
        "import sys, platform, importlib.metadata as m\n"
        "have = {d.name.lower().replace('_', '-'): d.version for d in m.distributions()}\n"
        "print('python', platform.python_version(), *(f'{p} {have[p]}' for p in sys.argv[1:] if p in have), sep=', ')"
    )
    result = subprocess.run([str(python), "-c", code, *PACKAGES], capture_output=True, text=True, check=True)
    return result.stdout.strip().replace("python, ", "python ", 1)


def machine_facts(device: Literal["cpu", "cuda"]) -> dict[str, str]:
    """Return what a measurement ran on, and the commit of our code. Raise ContenderError if there is no such device."""
    machine = hardware(torch.device("cpu"))
    return {
        "device": accelerator() if device == "cuda" else ON_CPU,
        "commit": commit(),
        "processor": f"{machine['cpu']}, {machine['cores']} cores",
        "instructions": " ".join(instructions()),
    }


def accelerator() -> str:
    """Return the name, driver and memory of each GPU, as nvidia-smi prints them. Raise ContenderError if it fails."""
    line = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        found = subprocess.run(line, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        raise ContenderError("nvidia-smi finds no GPU: --device cuda needs one of NVIDIA, with its driver") from None
    return "; ".join(found.splitlines())  # a fact has one line
