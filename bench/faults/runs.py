"""Run commands in forked children with signals, limits of time and memory, and compare the run folders they leave."""

import contextlib
import functools
import importlib
import os
import random
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before PyTorch: a process with threads cannot be forked

from filelock import FileLock

from common import checkpoint, run_folder
from common.command_line import command_line
from common.errors import RunError

ROOT = Path(__file__).resolve().parents[2]
DATASET = ROOT / "tests" / "pendulum-random.hdf5"
ALGORITHMS = tuple(sorted(path.stem for path in (ROOT / "algos").glob("[a-z]*.py")))
SECONDS = 60.0  # that a command may take
SECONDS_TO_STOP = 20.0  # after a signal
STOPPED = (128 + signal.SIGTERM, -signal.SIGTERM)  # the second before a run has begun
MOST_CHARACTERS = 4_000  # of a message
MEMORY = 8 * 2**30  # bytes of addresses of a command
# A run of a second or two. An algorithm gets those flags that it has.
SMALL: dict[str, str] = {
    "env": "Pendulum-v1", "num_envs": "1", "dataset": str(DATASET), "device": "cpu",
    "total_steps": "300", "offline_steps": "100", "online_steps": "200",
    "eval_every": "100", "eval_episodes": "1", "checkpoint_every": "50", "batch_size": "16",
    "buffer_size": "5000", "hidden": "16", "critic_hidden": "16", "learning_starts": "50", "random_steps": "50",
    "warmup_steps": "50", "cql_actions": "2", "flow_steps": "3", "samples": "4", "rollout_steps": "20",
    "minibatch_size": "10", "epochs": "2", "width": "16", "blocks": "1", "denoising_steps": "3", "base_samples": "2",
    "edits": "2", "utd": "2", "critics": "2", "target_critics": "2", "time_limit": "50",
    "improve_steps": "2", "bins": "11",
}  # fmt: skip


class Verdict(NamedTuple):
    """The outcome of a case, one of `faults.OUTCOMES`, and what was seen."""

    outcome: str
    seen: str = ""


class Fault(NamedTuple):
    """A fault in words, and the function that injects it in an empty folder and judges what follows."""

    what: str
    check: Callable[[Path], Verdict]


class Ended(NamedTuple):
    """How a command ended: its status (negative: by that signal), what it printed, and the limit that it broke."""

    status: int
    err: str
    hung: str = ""


class Instant(NamedTuple):
    """A signal at the n-th call of a function in a command, and perhaps again `later` calls after it."""

    number: signal.Signals
    call: int
    later: int = 0


def args_of(algo: str) -> Any:
    """Return an algorithm's class of arguments."""
    return importlib.import_module(f"algos.{algo}").Args


def is_offline(algo: str) -> bool:
    """Return whether the algorithm begins with a dataset."""
    return "dataset" in args_of(algo).__dataclass_fields__


def small_flags(algo: str, **changed: str) -> list[str]:
    """Return the command-line flags of a small run in the folder `run`, with some changed. "" leaves a flag out."""
    known = args_of(algo).__dataclass_fields__
    values = {name: value for name, value in SMALL.items() if name in known} | {"run_dir": "run"} | changed
    return [word for name, value in values.items() if value for word in (f"--{name.replace('_', '-')}", value)]


def train(algo: str, words: Sequence[str], folder: Path, **limits: Any) -> Ended:
    """Run `python algos/<algo>.py` with these words in a folder."""
    module = importlib.import_module(f"algos.{algo}")
    return execute(f"{algo}.py", module.train, module.Args, words, folder, **limits)


def execute(
    program: str,
    main: Callable[[Any], object],
    arguments: Any,
    words: Sequence[str],
    folder: Path,
    instant: Instant | None = None,
    terminate_after: float = 0.0,
    before: Callable[[], None] | None = None,
    seconds: float = SECONDS,
) -> Ended:
    """Run a command in a child of its own process group, and wait until it ends.

    `instant`: a signal that it sends to itself. `terminate_after`: seconds until SIGTERM, which is sent twice if the
    first has no effect. `before`: called in the child first. `seconds`: until it counts as hung.
    """
    log = folder / f"{time.monotonic_ns()}.log"
    child = os.fork()
    if child == 0:
        status = 70
        try:
            status = _child(program, main, arguments, words, folder, log, instant, before)
        finally:
            os._exit(status)
    try:
        return _awaited(child, log, terminate_after, seconds)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        log.unlink(missing_ok=True)


def _child(
    program: str, main: Any, arguments: Any, words: Sequence[str], folder: Path, log: Path, instant: Instant | None,
    before: Callable[[], None] | None,
) -> int:  # fmt: skip
    os.setpgid(0, 0)
    os.chdir(folder)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(output, 2)
    sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace")
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.argv = [program, *words]
    try:
        if before:
            before()
        if instant:
            signal_at(instant)
        command_line(main, arguments)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:  # as Python itself would
        traceback.print_exc()
        return 1
    finally:
        sys.setprofile(None)
    return 0


def signal_at(instant: Instant) -> None:
    """Send this process the signal at its n-th call, of functions in C too, such as those that write and rename."""
    calls, times = 0, {instant.call, instant.call + instant.later}

    def counted(frame: FrameType, event: str, of: Any) -> None:
        nonlocal calls
        if event in ("call", "c_call"):
            calls += 1
            if calls in times:
                os.kill(os.getpid(), instant.number)

    sys.setprofile(counted)


def count_calls(into: Path) -> None:
    """Count this process's calls, and write their number at each report, the last of which is at its end."""
    calls = 0

    def counted(frame: FrameType, event: str, of: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    def write(path: Path, *rest: Any) -> None:
        into.write_text(str(calls))
        mark(path, *rest)

    mark = run_folder.mark_finished
    run_folder.mark_finished = write  # type: ignore[assignment]
    sys.setprofile(counted)


def kill_at_save(n: int) -> None:
    """Kill this process when it begins to write its n-th checkpoint."""
    save, saves = checkpoint.save, 0

    def counted(path: Path, state: dict[str, Any]) -> None:
        nonlocal saves
        saves += 1
        if saves == n:
            os.kill(os.getpid(), signal.SIGKILL)
        save(path, state)

    checkpoint.save = counted


def _awaited(child: int, log: Path, terminate_after: float, seconds: float) -> Ended:
    """Wait until the child ends. Send it SIGTERM, twice, if it is to be stopped, and SIGKILL at last."""
    hung = ""
    end = time.monotonic() + (terminate_after or seconds)
    signals = [signal.SIGTERM, signal.SIGTERM] if terminate_after else []
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return Ended(os.waitstatus_to_exitcode(status), text_of(log), hung)
        if time.monotonic() > end:
            number = signals.pop(0) if signals else signal.SIGKILL
            if number == signal.SIGKILL:
                hung = f"no end after {'two signals' if terminate_after else f'{seconds:.0f} s'}"
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, number)
            end = time.monotonic() + SECONDS_TO_STOP
        time.sleep(0.01)


def text_of(log: Path) -> str:
    return log.read_text(errors="replace") if log.exists() else ""


def judged(ended: Ended, program: str, if_done: str = "accepted", stopped: bool = False) -> Verdict:
    """Judge a command: `if_done` after status 0, or also after 143 if it was `stopped`."""
    said = ended.err[ended.err.find(f"{program}: ") :] if f"{program}: " in ended.err else ""
    if ended.hung:
        return Verdict("HANG", f"{ended.hung}; {ended.err[-500:]}")
    if ended.status == 0 or (stopped and ended.status in STOPPED):
        return Verdict(if_done)
    if "Traceback (most recent call last)" in ended.err or ended.status < 0:
        return Verdict("TRACEBACK", f"status {ended.status}; {ended.err[-1_500:]}")
    if ended.status in (1, 2) and said and len(said.strip().splitlines()) <= 2 and len(said) <= MOST_CHARACTERS:
        return Verdict("refused", said.strip())
    return Verdict("MESSAGE", f"status {ended.status}; {ended.err[-1_500:]}")


@functools.cache
def place() -> Path:
    """Return the folder of this harness's runs, which `faults.main` makes and deletes."""
    return Path(os.environ["ONRAMP_FAULTS"])


def base(algo: str, name: str, **changed: str) -> Path:
    """Return a folder with an undisturbed run, `name` "whole", "longer" or "interrupted", made at the first call."""
    key = "-".join([algo, name, *changed.values()])
    folder = place() / "base" / key
    folder.parent.mkdir(exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if not folder.exists():
            made = folder.with_name(f"{key}.part")
            made.mkdir()
            _make_base(algo, name, made, changed)
            made.rename(folder)
    return folder


def _make_base(algo: str, name: str, folder: Path, changed: dict[str, str]) -> None:
    if name == "longer":
        shutil.copytree(base(algo, "whole", **changed) / "run", folder / "run")
        ended = train(algo, small_flags(algo, **changed | more_steps(algo)), folder)
    elif name == "interrupted":
        ended = train(algo, small_flags(algo, **changed), folder, before=functools.partial(kill_at_save, 4))
    else:
        counting = functools.partial(count_calls, folder / "calls")
        ended = train(algo, small_flags(algo, **changed), folder, before=counting, seconds=10 * SECONDS)
    if ended.status != (-signal.SIGKILL if name == "interrupted" else 0):
        raise RunError(f"{algo}, {name}, failed without a fault: {ended}")


def more_steps(algo: str) -> dict[str, str]:
    """Return the flag that makes a small run longer."""
    return {"online_steps": "260"} if is_offline(algo) else {"total_steps": "360"}


def chance(*parts: object) -> random.Random:
    """Return the random numbers of a case, by the seed and by its name."""
    return random.Random("/".join(map(str, parts)))
