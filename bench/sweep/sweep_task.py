"""One run of a sweep, as a Ray task does it: a command in a process group of its own, its words in a file."""

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

from common.checkpoint import replacing
from common.cuda import GPU_SHARE_ENV
from common.provenance import commit, versions
from common.run_folder import CONFIG, DONE, EVALUATIONS, LOCK, lock_of

ROOT = Path(__file__).resolve().parents[2]
KEPT = (CONFIG, EVALUATIONS, DONE)  # in this order: what is done has all of them
SECONDS_TO_STOP = 60.0
SECONDS_UNTIL_FREE = 90.0  # Ray takes a minute to see that its head is gone, and to end what it had started
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Job:
    """A command, without its Python and its folder, the folder it writes, and what it may use."""

    command: tuple[str, ...]
    folder: Path
    seed: int
    cpus: int = 1
    gpus: float = 0.0
    memory: float = 0.0  # GiB
    caller: str = field(default_factory=os.getcwd, compare=False)
    """The user's folder, whose modules --env may name: the command itself runs in ROOT."""

    @property
    def label(self) -> str:
        return "/".join(self.folder.parts[-3:])

    @property
    def argv(self) -> list[str]:
        return [sys.executable, *self.command, "--run-dir", str(self.folder)]

    @property
    def line(self) -> str:
        """The same for a shell, from the repository's root."""
        program = shlex.join(("python", *self.command, "--run-dir", str(self.folder)))
        return f"{'' if self.gpus else 'CUDA_VISIBLE_DEVICES= '}OMP_NUM_THREADS={self.cpus} {program}"

    @property
    def log(self) -> Path:
        """What it says, on the machine that it runs on; beside its folder, which is the run's own."""
        return self.folder.with_suffix(".log")

    @property
    def environment(self) -> dict[str, str]:
        """As many threads as CPUs; a GPU only for those that asked for one, which Ray chooses, and of a part of one no
        more of its memory than that. Without the GPU they end, and do not train on the CPU.
        """
        own = {f"{name}_NUM_THREADS": str(self.cpus) for name in ("OMP", "MKL", "OPENBLAS")}
        if Path(self.caller) != ROOT:
            own["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), self.caller)))
        if not self.gpus:
            return own | {"CUDA_VISIBLE_DEVICES": ""}
        return own | {GPU_SHARE_ENV: str(min(self.gpus, 1.0))}


@dataclass(frozen=True)
class Outcome:
    """How a command ended, its last lines, and, where it ended well, its small files by name."""

    status: int
    said: str
    files: dict[str, bytes]

    def keep(self, folder: Path) -> None:
        """Writes the files: the run may have been on another machine."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            with replacing(folder / name) as file:
                file.write(content)


def facts() -> dict[str, str]:
    """What has to be the same on every node for a run to be the same on any: this code, its packages, its Python."""
    return versions() | {"commit": commit()}


def run(job: Job) -> Outcome:
    """Runs a job to its end. Interrupted (Ray's cancel), it lets the command write a checkpoint before it ends."""
    job.folder.parent.mkdir(parents=True, exist_ok=True)
    _wait_until_free(job.folder)
    with job.log.open("ab") as log:
        before = log.tell()
        process = subprocess.Popen(
            job.argv, cwd=ROOT, env=os.environ | job.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True, preexec_fn=_die_with_parent if sys.platform == "linux" else None,
        )  # fmt: skip
        try:
            while (status := process.poll()) is None:  # a cancel does not wake what waits in the kernel
                time.sleep(0.2)
        except BaseException:
            _stop(process)
            raise
    files = {name: (job.folder / name).read_bytes() for name in KEPT} if status == 0 else {}
    said = job.log.read_bytes()[before:].decode(errors="replace")
    return Outcome(status, "\n".join(said.splitlines()[-5:]), files)


def _wait_until_free(folder: Path) -> None:
    """Wait for a run of a killed sweep that is still ending. The command itself refuses one that does not end."""
    if (folder / LOCK).exists():
        with contextlib.suppress(Timeout), lock_of(folder, SECONDS_UNTIL_FREE):
            pass


def _die_with_parent() -> None:
    """A worker killed at once cannot stop its command: the kernel does."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _stop(process: subprocess.Popen[bytes]) -> None:
    for number, seconds in ((signal.SIGTERM, SECONDS_TO_STOP), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
            return
