"""Runs a command, and fails if it reads or writes what a user keeps in the checkout.

    .venv/bin/python .ci/untouched.py make test

Before the command, every algorithm trains half way into `runs/`, where a user's own runs are. After the command:
- every file has its size, time and bytes, and no other file is there: both what git tracks and what it does not;
- no file or folder that git ignores was read, by its access time.

Virtual environments and caches are left out. The runs made here are removed at the end.
"""

import contextlib
import fnmatch
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OURS = (".venv*", "__pycache__", ".*_cache", "*.egg-info")  # of make setup, lint and test themselves


@contextlib.contextmanager
def runs_of_every_algorithm() -> Iterator[None]:
    """Put a run of each, killed after its first checkpoint, where the command line would. A user's own run stays."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    from conftest import OFFLINE, SMALL, arguments_of, flags, killed_at, module

    from common.run import name_and_folder

    made: list[Path] = []
    try:
        for algo in sorted(SMALL):
            task = {} if algo in OFFLINE else {"env": "HalfCheetah-v4"}
            folder = ROOT / name_and_folder(algo, module(algo).Args(**arguments_of(algo, task)))[1]
            if not folder.exists():
                made.append(folder)
                stopped = killed_at(algo, [("torch.save", 2)], *flags(algo, **task), cwd=ROOT)
                assert stopped.returncode == 0, stopped.stderr
                assert (folder / "checkpoint" / "state.pt").exists()
        yield
    finally:
        for folder in made:
            shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            (ROOT / "runs").rmdir()  # if it is empty


def files(root: Path, *options: str) -> set[Path]:
    """Those that `git ls-files` lists, without environments and caches."""
    listed = subprocess.run(["git", "ls-files", "-z", *options], cwd=root, capture_output=True, text=True, check=True)
    paths = [Path(name) for name in listed.stdout.split("\0") if name]
    ours = {path for path in paths if any(fnmatch.fnmatch(part, each) for part in path.parts for each in OURS)}
    return {root / path for path in paths if path not in ours and (root / path).is_file()}


def states(root: Path) -> dict[Path, tuple[int, int, str]]:
    """Size, time of the last change and a hash of each file, tracked or not."""
    found = {}
    for path in files(root) | files(root, "--others"):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        found[path] = path.stat().st_size, path.stat().st_mtime_ns, digest
    return found


def reset_access_times(paths: set[Path]) -> None:
    for path in paths:
        os.utime(path, ns=(0, path.stat().st_mtime_ns))


def run_untouched(root: Path, command: list[str]) -> int:
    """Run `command` in this folder and return its exit status, or 1 if it read or wrote what it must not."""
    before = states(root)
    private = files(root, "--others", "--ignored", "--exclude-standard")
    tracked = {parent for path in files(root) for parent in path.parents}
    private |= {parent for path in private for parent in path.parents if root in parent.parents} - tracked
    reset_access_times(private)
    for path in [path for path in private if path.is_file()][:1]:
        path.read_bytes()
        if path.stat().st_size and path.stat().st_atime_ns == 0:
            sys.stderr.write("untouched.py: this file system keeps no access times: only writing is checked\n")
        reset_access_times({path})
    status = subprocess.run(command, cwd=root, check=False).returncode
    read = sorted(path for path in private if path.exists() and path.stat().st_atime_ns)
    after = states(root)
    written = sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
    for what, paths in (("read", read), ("wrote, made or deleted", written)):
        for path in paths:
            sys.stderr.write(f"untouched.py: the command {what} {path.relative_to(root)}\n")
    return status or int(bool(read or written))


if __name__ == "__main__":
    with runs_of_every_algorithm():
        status = run_untouched(ROOT, sys.argv[1:])
    sys.exit(status)
