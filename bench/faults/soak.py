"""Run three commands for hours and interrupt them at random. Their results must equal those of undisturbed commands.

    make soak                                                           # six hours
    make soak ARGS="--hours 0.2 --between 10 60 --length 0.1"           # a short one

The commands are SAC with three processes of environments, IQL from offline to online, and a sweep of TD3 and PPO.
Each runs twice at the same time: undisturbed, and with a SIGKILL, SIGTERM or SIGINT every 1 to 10 minutes, after which
it starts again. When both have ended, their files are compared and the next round begins, with the next seed. Memory
and open files of every process are measured every 5 seconds.

Ctrl-C stops it, and the same command resumes. A soak of another folder or commit is added to the results, so that six
hours may consist of several. The exit status is 1 if a result differs, a command fails or does not
end, or memory or open files grow. The folder then keeps both results.
"""

import common.start

import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from bench.faults.comparison import differences
from bench.faults.runs import ROOT
from bench.report.tables import Table
from bench.sweep.sweep import NO_RAY
from common.arguments import at_least
from common.command_line import command_line
from common.errors import InputError, RunError
from common.files import write_json
from common.messages import log, print_result
from common.provenance import commit, versions
from common.run_folder import DONE
from common.schema import read_json

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
PERIOD = 5.0  # seconds between two measurements
# A process has started up (imported what it needs, filled its replay buffer and compiled) after so many seconds and so
# many of its own CPU, of which a busy machine gives it few. One that never computes has started up after ten minutes.
START_UP, START_UP_CPU, START_UP_IDLE = 60.0, 20.0, 600.0
MOST_GROWTH = 1.1  # from the first to the last third of a process's life after its start-up
STOPPED = {status for number in SIGNALS for status in (-number, 128 + number)}
KINDS = ("memory", "open files")
SUITE = "suite.toml"
JOURNAL = {"settings": dict, "seconds": float}
DAMAGED = "is damaged: restore it, or give another --folder and --json"
PAGE, RESULTS = ROOT / "docs" / "reliability.md", ROOT / "results" / "soak.json"
START, END = "<!-- soak, by make soak -->\n", "<!-- end of soak -->"


@dataclass(frozen=True)
class Args:
    """How long, and how hard."""

    hours: float = 6.0
    """Time in all, also of earlier calls with the same folder."""
    between: tuple[float, float] = (60.0, 600.0)
    """Fewest and most seconds between two signals to a command."""
    length: float = 1.0
    """Length of the commands, relative to a few minutes of an idle core."""
    seed: int = 1
    """Seed of the signals, and of the first round."""
    folder: Path = Path("soak")
    """Where the runs are."""
    json: Path = Path("results/soak.json")
    """File to add the counts to. results/soak.json also remakes docs/reliability.md."""

    def __post_init__(self) -> None:
        at_least(0, hours=self.hours, between=min(self.between), length=self.length, seed=self.seed)


@dataclass
class Counts:
    """What is known of a command after all its rounds."""

    rounds: int = 0
    """Rounds whose two results were equal."""
    runs: int = 0
    """Runs in them."""
    signals: dict[str, int] = field(default_factory=dict)
    processes: int = 0
    """Processes that lived for long enough to measure their growth."""
    growth: dict[str, float] = field(default_factory=dict)
    """The largest growth of a process, by kind."""

    def __add__(self, other: "Counts") -> "Counts":
        signals, growth = dict(self.signals), dict(self.growth)
        for name, count in other.signals.items():
            signals[name] = signals.get(name, 0) + count
        for kind, ratio in other.growth.items():
            growth[kind] = max(ratio, growth.get(kind, 0.0))
        processes = self.processes + other.processes
        return Counts(self.rounds + other.rounds, self.runs + other.runs, signals, processes, growth)

    def add(self, rows: list[tuple[float, ...]]) -> None:
        """Add a process's measurements: age and CPU time in s, resident bytes, open files."""
        settled = [row[2:] for row in rows if has_started_up(row[0] - rows[0][0], row[1])]
        if (third := len(settled) // 3) < 10:
            return
        self.processes += 1
        for kind, column in zip(KINDS, zip(*settled, strict=True), strict=True):
            ratio = statistics.median(column[-third:]) / statistics.median(column[:third])
            self.growth[kind] = max(ratio, self.growth.get(kind, 0.0))


def has_started_up(age: float, cpu: float) -> bool:
    """Return whether a process is beyond its start-up, at this age and CPU time in s."""
    return age > START_UP and (cpu > START_UP_CPU or age > START_UP_IDLE)


class Side:
    """A command of which every round runs once."""

    def __init__(self, words: list[str], folder: Path, counts: Counts, luck: random.Random | None, args: Args) -> None:
        self.words, self.folder, self.counts, self.luck, self.args = words, folder, counts, luck, args
        self.measured = defaultdict[tuple[int, float], list[tuple[float, ...]]](list)
        self.next_signal = time.monotonic() + self._interval()
        self.start()

    def start(self) -> None:
        """Start or resume the round's run."""
        self.folder.mkdir(parents=True, exist_ok=True)  # the same names in both, because a config holds them
        words = (word.format(root=ROOT, seed=self.args.seed + self.counts.rounds) for word in self.words)
        with (self.folder / "output.txt").open("ab") as output:
            self.process = psutil.Popen(
                [sys.executable, *words], cwd=self.folder, env=os.environ | {"PYTHONPATH": str(ROOT)},
                stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip
        self.signals = 0

    def _interval(self) -> float:
        return self.luck.uniform(*self.args.between) if self.luck else float("inf")

    def has_ended(self) -> bool:
        """Measure the command, send it a signal if one is due, start it again after one. Return whether it has ended.

        Raises RunError if it failed.
        """
        status = self.process.poll()
        if status is None:
            self._measure()
            if self.luck and time.monotonic() > self.next_signal:
                self._send(self.luck.choice(SIGNALS))
            return False
        if status == 0:
            return True
        text = (self.folder / "output.txt").read_text(errors="replace")[-1000:]
        is_too_busy = NO_RAY in text.rstrip().rpartition("\n")[2]  # Ray waits for 30 seconds
        if not (self.signals and status in STOPPED) and not is_too_busy:
            raise RunError(f"{self.folder} ended with status {status}: {' '.join(text.split())}")
        self.start()
        return False

    def _send(self, number: signal.Signals) -> None:
        if self.signals == 2:  # the second stops a command at once
            raise RunError(f"{self.folder} did not end after two signals")
        self.signals, self.next_signal = self.signals + 1, time.monotonic() + self._interval()
        self.counts.signals[number.name] = self.counts.signals.get(number.name, 0) + 1
        if number == signal.SIGKILL:
            self.kill()
        else:
            self.process.send_signal(number)

    def kill(self) -> None:
        """Kill the command and its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _measure(self) -> None:
        for process in (self.process, *_children(self.process)):
            with contextlib.suppress(psutil.Error):  # it has just ended
                cpu = sum(process.cpu_times()[:2])  # in user and system mode
                row = time.monotonic(), cpu, float(process.memory_info().rss), float(process.num_fds())
                self.measured[process.pid, process.create_time()].append(row)

    def summarize(self) -> None:
        """Add the measurements to the counts."""
        for rows in self.measured.values():
            self.counts.add(rows)
        self.measured.clear()


def _children(process: psutil.Popen) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


class Pair:
    """The undisturbed and the disturbed side of a command, in the same round."""

    def __init__(self, name: str, words: list[str], counts: Counts, args: Args) -> None:
        self.counts, self.folder = counts, args.folder / name
        chance = random.Random(f"{args.seed} {name} {counts}")
        shutil.rmtree(self.folder / "undisturbed", ignore_errors=True)  # the end of an earlier call disturbed it
        self.sides = [
            Side(words, self.folder / side, counts, luck, args)
            for side, luck in (("undisturbed", None), ("disturbed", chance))
        ]

    def advance(self) -> None:
        """Look after both sides. Compare them after their round, and start the next one.

        Raises RunError if a side failed or their results differ.
        """
        ended = [side.has_ended() for side in self.sides]
        if not all(ended):
            return
        whole, cut = (side.folder for side in self.sides)
        runs = [done.parent.relative_to(whole) for done in whole.rglob(DONE)]
        for run in runs or [Path("no run")]:
            if differ := differences(cut / run, whole / run):
                raise RunError(f"{cut / run} differs from {whole / run}: {', '.join(differ)}")
        for side in self.sides:
            side.summarize()
        self.counts.rounds, self.counts.runs = self.counts.rounds + 1, self.counts.runs + len(runs)
        shutil.rmtree(self.folder)
        for side in self.sides:
            side.start()


def commands(length: float) -> dict[str, list[str]]:
    """Return the commands by name, with places for the repository's root and the seed."""
    steps = int(20_000 * length)
    run = "--seed {seed} --run-dir run --buffer-size 5000 --checkpoint-every 2000 --hidden 64 64"
    phases = f"--retain mix --offline-steps {steps} --online-steps {steps}"
    lines = {
        "sac": f"algos/sac.py --env Hopper-v4 --num-envs 3 --vectorizer async --total-steps {steps} {run}",
        "iql": f"algos/iql.py --dataset {{root}}/tests/pendulum-random.hdf5 {phases} {run}",
        "sweep": f"bench/sweep/sweep.py ../../{SUITE} --folder run --cpus 1",
    }
    return {name: f"{{root}}/{line}".split(" ") for name, line in lines.items()}


def suite(length: float) -> str:
    """Return the sweep's suite, as TOML."""
    flags = f"--total-steps {int(20_000 * length)} --hidden 64 64 --checkpoint-every 1000"
    return (
        f'[[runs]]\nalgo = "td3"\nenvs = ["Pendulum-v1"]\nseeds = 1\nflags = "{flags} --buffer-size 5000"\n'
        f'[[runs]]\nalgo = "ppo"\nenvs = ["Hopper-v4"]\nseeds = 1\nflags = "{flags}"\n'
    )


def with_table(text: str, parts: list[dict[str, Any]]) -> str:
    """Return the page with a new table of all soaks between its markers."""
    before, rest = text.split(START)
    heads = "command", "equal pairs", "runs compared", *(s.name for s in SIGNALS), "processes measured", *KINDS
    table = Table(heads)
    for name in commands(1.0):
        known = sum((Counts(**part[name]) for part in parts), Counts())
        growth = [f"{known.growth[kind]:.3f}" if kind in known.growth else "" for kind in KINDS]
        signals = [known.signals.get(number.name, 0) for number in SIGNALS]
        table.rows.append((name, *map(str, (known.rounds, known.runs, *signals, known.processes)), *growth))
    each = (f"{part['seconds'] / 3600:.1f} hours, commit `{part['settings']['commit'][:8]}`" for part in parts)
    run = f"{'; '.join(each)}:\n\n"
    return f"{before}{START}{run}{table.markdown()}\n{END}{rest.split(END, 1)[1]}"


def main(args: Args) -> None:
    """Run, interrupt, measure and compare, until the time is over. Write the counts.

    Raises RunError if a result differs, a command fails, or memory or open files grow.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    args = replace(args, folder=args.folder.resolve())
    args.folder.mkdir(parents=True, exist_ok=True)
    journal = args.folder / "soak.json"
    settings: dict[str, Any] = {"seed": args.seed, "between": list(args.between), "length": args.length}
    settings |= {"commit": commit(), "folder": args.folder.name}
    before = read_json(journal, JOURNAL, DAMAGED) or {"settings": settings, "seconds": 0}
    if before["settings"] != settings:
        raise InputError(f"{args.folder} was made by other arguments or another commit: give another --folder")
    lines = commands(args.length)
    (args.folder / SUITE).write_text(suite(args.length))
    counts = {name: Counts(**before.get(name, {})) for name in lines}
    began, pairs = time.monotonic() - before["seconds"], list[Pair]()
    try:
        pairs.extend(Pair(name, words, counts[name], args) for name, words in lines.items())
        while (seconds := time.monotonic() - began) < 3600 * args.hours:
            time.sleep(PERIOD)
            for pair in pairs:
                pair.advance()
            before |= {"seconds": round(seconds)} | {name: vars(known) for name, known in counts.items()}
            write_json(journal, before)
    finally:
        for side in (side for pair in pairs for side in pair.sides):
            side.kill()
            side.summarize()
    before["versions"] = versions()
    parts = read_json(args.json, {"parts": [JOURNAL]}, DAMAGED).get("parts", [])
    parts = [*(part for part in parts if part["settings"] != settings), before]
    write_json(args.json, {"parts": parts})
    if args.json.resolve() == RESULTS:
        PAGE.write_text(with_table(PAGE.read_text(), parts))
    print_result(json.dumps(before, indent=1))
    if grown := [name for name, known in counts.items() if max(known.growth.values(), default=0) > MOST_GROWTH]:
        raise RunError(f"memory or open files of {', '.join(grown)} grew by more than {MOST_GROWTH - 1:.0%}")
    log.info(f"{sum(known.rounds for known in counts.values())} rounds are equal")


if __name__ == "__main__":
    command_line(main, Args)
