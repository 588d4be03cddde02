"""One run of a sweep, as a Ray task does it: a command in a process group of its own, its words in a file."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

KEPT = ("config.json", "evaluations.csv", "DONE")
SECONDS_TO_STOP = 60.0
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Job:
    """A command, the folder it writes, and what it may use."""

    argv: list[str]
    folder: Path
    seed: int
    cpus: int
    gpus: float

    @property
    def label(self) -> str:
        return "/".join(self.folder.parts[-3:])

    @property
    def log(self) -> Path:
        """What it says, on the machine that it runs on; beside its folder, which is its own."""
        return self.folder.with_suffix(".log")

    @property
    def finished(self) -> bool:
        return (self.folder / "DONE").exists()

    def keep(self, files: dict[str, bytes]) -> None:
        """Writes what came back from another machine; DONE, which is last, by rename."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            if not (self.folder / name).exists():
                part = self.folder / f"{name}.part"
                part.write_bytes(content)
                part.replace(self.folder / name)


@dataclass(frozen=True)
class Outcome:
    """How a command ended, its last lines, and, where it ended well, its small files by name."""

    status: int
    said: str
    files: dict[str, bytes]


def run(job: Job) -> Outcome:
    """Runs a job to its end. Interrupted (Ray's cancel), it lets the command write a checkpoint before it ends."""
    job.folder.parent.mkdir(parents=True, exist_ok=True)
    threads = {f"{name}_NUM_THREADS": str(job.cpus) for name in ("OMP", "MKL", "OPENBLAS")}
    with job.log.open("ab") as log:
        process = subprocess.Popen(
            job.argv, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=os.environ | threads,
            start_new_session=True, preexec_fn=_die_with_parent if sys.platform == "linux" else None,
        )  # fmt: skip
        try:
            status = process.wait()
        except BaseException:
            _stop(process)
            raise
    files = {name: (job.folder / name).read_bytes() for name in KEPT} if status == 0 else {}
    return Outcome(status, "\n".join(job.log.read_text(errors="replace").splitlines()[-5:]), files)


def _die_with_parent() -> None:
    """A worker killed at once cannot stop its command: the kernel does."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _stop(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(SECONDS_TO_STOP)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
