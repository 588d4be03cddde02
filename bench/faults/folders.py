"""Faults of run folders: signals at random instants of a run, and files that change between two commands."""

import functools
import json
import os
import random
import shutil
import signal
from pathlib import Path

from bench.faults.comparison import differences, files_of
from bench.faults.runs import (
    Ended,
    Fault,
    Instant,
    Verdict,
    args_of,
    base,
    chance,
    execute,
    judged,
    more_steps,
    small_flags,
    train,
)
from bench.report import archive_run
from common.run_folder import DONE, LOCK, METRICS
from tools import evaluate

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
FEW = 5_000  # calls, in which a run checks its arguments and makes its folder
TWO = {"num_envs": "2", "vectorizer": "async"}
MUTATIONS = (
    "flip a bit", "flip a bit", "flip a bit", "cut", "append", "empty", "random bytes", "delete", "folder", "fifo",
    "dangling link", "link to another file", "link to its copy", "swap",
)  # fmt: skip
READERS = ("again", "again", "again", "evaluate", "evaluate best", "archive", "more")
# Files that no command has to read after the end of the run: if changed, they may stay as they are.
UNREAD = ("checkpoint/", "policy/")


def kills(algo: str, seed: int, index: int) -> Fault:
    """Return one to three commands that a signal ends, after which the same command runs to the end."""
    luck = chance(seed, "kills", algo, index)
    changed = TWO if luck.random() < 0.15 else {}
    whole = base(algo, "whole", **changed)
    calls = int((whole / "calls").read_text())
    instants = []
    for _ in range(luck.choice((1, 1, 2, 3))):
        last = FEW if luck.random() < 0.25 else calls
        later = luck.randint(1, FEW) if luck.random() < 0.25 else 0
        instants.append(Instant(luck.choice(SIGNALS), luck.randint(1, last), later))
    said = ", ".join(
        f"{each.number.name} at call {each.call}" + f"+{each.later}" * bool(each.later) for each in instants
    )
    return Fault(f"{' '.join(changed.values())} {said}".strip(), functools.partial(_killed, algo, changed, instants))


def _killed(algo: str, changed: dict[str, str], instants: list[Instant], folder: Path) -> Verdict:
    words = small_flags(algo, **changed)
    for instant in instants:
        ended = train(algo, words, folder, instant=instant)
        expected = (-instant.number,) if instant.number == signal.SIGKILL else (128 + instant.number, -instant.number)
        if ended.status not in (0, *expected) or ended.hung or "Traceback (most" in ended.err:
            return Verdict("LOST" if ended.status == 2 else judged(ended, f"{algo}.py").outcome, str(ended))
    ended = train(algo, words, folder)
    found = judged(ended, f"{algo}.py", "continued")
    if found.outcome == "refused":
        return Verdict("LOST", ended.err)
    return compared(found, folder / "run", base(algo, "whole", **changed) / "run")


def compared(found: Verdict, run: Path, whole: Path, may_differ: tuple[str, ...] = ()) -> Verdict:
    """Return WRONG if the run continued, but to other results."""
    if found.outcome != "continued":
        return found
    differ = [name for name in differences(run, whole) if name not in may_differ]
    return Verdict("WRONG", f"{', '.join(differ)} differ") if differ else found


def files(algo: str, seed: int, index: int) -> Fault:
    """Return a change of one file of an interrupted or finished run, and the command that follows."""
    luck = chance(seed, "files", algo, index)
    name = luck.choice(("interrupted", "whole"))
    made = base(algo, name) / "run"
    file, other = luck.choice([LOCK, *sorted(files_of(made))]), luck.choice(sorted(files_of(made)))
    mutation = luck.choice(MUTATIONS)
    reader = luck.choice(READERS) if name == "whole" else "again"
    also = f" with {other}" if mutation in ("swap", "link to another file") else ""
    return Fault(
        f"{name} run, {file}: {mutation}{also}, then {reader}",
        functools.partial(_mutated, algo, made, file, other, mutation, reader, luck.random()),
    )


def _mutated(
    algo: str, made: Path, file: str, other: str, mutation: str, reader: str, seed: float, folder: Path
) -> Verdict:
    run = folder / "run"
    shutil.copytree(made, run)
    mutate(run / file, run / other, folder / "copy", mutation, random.Random(seed))
    if reader == "again":
        found = judged(train(algo, small_flags(algo), folder), f"{algo}.py", "continued")
        changed = (file, other) if mutation == "swap" else (file,)
        finished = made.parent.name.startswith(f"{algo}-whole")
        unread = tuple(each for each in changed if finished and each.startswith(UNREAD))
        if (file, mutation) == (DONE, "empty"):  # it is that of an older run: nothing is compared
            unread += (DONE,)
        if mutation == "delete" and finished and file.startswith((METRICS, "events")):  # what is absent is not missed
            unread += (file,)
        return compared(found, run, base(algo, "whole") / "run", unread)
    if reader == "more":
        longer = more_steps(algo)
        found = judged(train(algo, small_flags(algo, **longer), folder), f"{algo}.py", "continued")
        if not set(longer) <= set(args_of(algo).extendable):
            return found if found.outcome == "refused" else Verdict("MESSAGE", f"not refused: {found}")
        unread = tuple(name for name in (file, other) if name.startswith("policy/best"))  # of an earlier evaluation
        return compared(found, run, base(algo, "longer") / "run", unread)
    ended, program = read(reader, folder)
    found = judged(ended, program, "continued")
    if found.outcome == "continued" and (got := answer(folder)) != (wanted := expected_answer(reader, made)):
        return Verdict("WRONG", f"{got} instead of {wanted}")
    return found


def read(reader: str, folder: Path) -> tuple[Ended, str]:
    """Run a command that reads `folder`/run and writes `folder`/answer."""
    if reader == "archive":
        ended = execute("archive_run.py", archive_run.main, archive_run.Args, ["run", "answer"], folder)
        return ended, "archive_run.py"
    policy = "run/policy/best.safetensors" if reader == "evaluate best" else "run"
    words = [policy, "--episodes", "2", "--json", "answer"]
    return execute("evaluate.py", evaluate.main, evaluate.Args, words, folder), "evaluate.py"


def answer(folder: Path) -> object:
    path = folder / "answer"
    if path.is_file():
        return json.loads(path.read_text())
    config = json.loads((path / "config.json").read_text())
    config.pop("time", None)
    return config, (path / "evaluations.csv.gz").read_bytes()


@functools.cache
def expected_answer(reader: str, made: Path) -> object:
    folder = made.parent.with_name(f"{made.parent.name}-{reader}-{os.getpid()}")
    shutil.copytree(made.parent, folder)
    read(reader, folder)
    return answer(folder)


def mutate(path: Path, other: Path, copy: Path, mutation: str, luck: random.Random) -> None:
    """Change the file at `path`. `other` is another file of the run, `copy` a path outside it."""
    data = path.read_bytes() if path.exists() else b""
    if mutation == "swap":
        theirs = other.read_bytes()
        other.write_bytes(data)
        path.write_bytes(theirs)
        return
    path.unlink(missing_ok=True)
    if mutation == "flip a bit" and data:
        at = luck.randrange(len(data))
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << luck.randrange(8)]) + data[at + 1 :])
    elif mutation == "cut":
        path.write_bytes(data[: luck.randrange(len(data) or 1)])
    elif mutation == "append":
        path.write_bytes(data + (data[-50:] if luck.random() < 0.5 else luck.randbytes(50)))
    elif mutation in ("empty", "flip a bit"):
        path.write_bytes(b"")
    elif mutation == "random bytes":
        path.write_bytes(luck.randbytes(max(1, len(data))))
    elif mutation == "folder":
        path.mkdir()
    elif mutation == "fifo":
        os.mkfifo(path)
    elif mutation == "dangling link":
        path.symlink_to(path.parent / "nowhere")
    elif mutation == "link to another file":
        path.symlink_to(other.absolute())
    elif mutation == "link to its copy":
        copy.write_bytes(data)
        path.symlink_to(copy.absolute())
