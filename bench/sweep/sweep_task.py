"""One run of a sweep as a Ray task: a command in its own process group, with its output in a file."""

import contextlib
import ctypes
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from filelock import Timeout

from common.cuda import GPU_SHARE_ENV
from common.files import replacing
from common.provenance import commit, versions
from common.run_folder import CONFIG, DONE, EVALUATIONS, LOCK, lock_of

ROOT = Path(__file__).resolve().parents[2]
KEPT = (CONFIG, EVALUATIONS, DONE)  # DONE is last, so a folder that has it has all
SECONDS_TO_STOP = 60.0
SECONDS_UNTIL_FREE = 90.0  # Ray takes a minute to notice that its head is gone, and to end its tasks
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Job:
    """A command without its Python and its folder, the folder that it writes, and the resources that it may use."""

    command: tuple[str, ...]
    folder: Path
    seed: int
    cpus: int = 1
    gpus: float = 0.0
    memory: float = 0.0  # GiB
    caller: str = field(default_factory=os.getcwd, compare=False)
    """The user's folder, whose modules --env may name, because the command itself runs in ROOT."""

    @property
    def label(self) -> str:
        return "/".join(self.folder.parts[-3:])

    @property
    def argv(self) -> list[str]:
        return [sys.executable, *self.command, "--run-dir", str(self.folder)]

    @property
    def line(self) -> str:
        """Return the command for a shell, to run from the repository's root."""
        program = shlex.join(("python", *self.command, "--run-dir", str(self.folder)))
        return f"{'' if self.gpus else 'CUDA_VISIBLE_DEVICES= '}OMP_NUM_THREADS={self.cpus} {program}"

    @property
    def log(self) -> Path:
        """Return the file of its output, next to its folder, on the machine that it runs on."""
        return self.folder.with_suffix(".log")

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment variables of the command, with as many threads as CPUs.

        A run sees a GPU only if it asked for one, and Ray chooses which. With a part of a GPU it gets at most that
        share of its memory. If the GPU is missing, such a run ends and does not train on the CPU.
        """
        own = {f"{name}_NUM_THREADS": str(self.cpus) for name in ("OMP", "MKL", "OPENBLAS")}
        if Path(self.caller) != ROOT:
            own["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), self.caller)))
        if not self.gpus:
            return own | {"CUDA_VISIBLE_DEVICES": ""}
        return own | {GPU_SHARE_ENV: str(min(self.gpus, 1.0))}


@dataclass(frozen=True)
class Outcome:
    """A command's exit status, its last lines, and after success its small files by name."""

    status: int
    said: str
    files: dict[str, bytes]

    def keep(self, folder: Path) -> None:
        """Write the files to `folder`, because the run may have been on another machine."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            with replacing(folder / name) as file:
                file.write(content)


def facts() -> dict[str, str]:
    """Return what must be equal on every node for runs to be the same: this code, its packages, its Python."""
    return versions() | {"commit": commit()}


def run(job: Job) -> Outcome:
    """Run a job to its end. If Ray cancels it, let the command write a checkpoint before it ends."""
    job.folder.parent.mkdir(parents=True, exist_ok=True)
    _wait_until_free(job.folder)
    with job.log.open("ab") as log:
        before = log.tell()
        process = subprocess.Popen(
            job.argv, cwd=ROOT, env=os.environ | job.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True, preexec_fn=die_with_parent,
        )  # fmt: skip
        try:
            while (status := process.poll()) is None:  # a cancel does not interrupt a wait in the kernel
                time.sleep(0.2)
        except BaseException:
            _stop(process)
            raise
    files = {name: (job.folder / name).read_bytes() for name in KEPT} if status == 0 else {}
    said = job.log.read_bytes()[before:].decode(errors="replace")
    return Outcome(status, "\n".join(said.splitlines()[-5:]), files)


def _wait_until_free(folder: Path) -> None:
    """Wait for a run of a killed sweep that is still ending. If it does not end, the command itself fails."""
    if (folder / LOCK).exists():
        with contextlib.suppress(Timeout), lock_of(folder, SECONDS_UNTIL_FREE):
            pass


def die_with_parent() -> None:
    """Let the kernel kill this process with its parent, because a killed parent cannot stop it (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _stop(process: subprocess.Popen[bytes]) -> None:
    for number, seconds in ((signal.SIGTERM, SECONDS_TO_STOP), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
            return
