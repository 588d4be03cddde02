"""Runs a command, and fails if it reads or writes what a user keeps in the checkout.

    .venv/bin/python .ci/untouched.py make test

Before the command, every algorithm trains half way into `runs/`, where a user's own runs are. After the command:
- every file has its size, time and bytes, every link its target, and no file, link or folder is new or missing;
- no file or folder that git does not track was read, by its access time, whether git ignores it or not.

Virtual environments, caches and git's own folder are left out. The runs made here are removed at the end.
"""

import contextlib
import fnmatch
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OURS = (".git", ".venv*", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info")  # of git, make setup, lint and test


@contextlib.contextmanager
def runs_of_every_algorithm() -> Iterator[None]:
    """Train each into its folder in `runs/` and kill it after its first checkpoint. A user's own run stays."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    from conftest import ALGORITHMS, OFFLINE, arguments_of, flags, killed_at, module

    from common.run_folder import name_and_folder

    made: list[Path] = []
    try:
        for algo in ALGORITHMS:
            task = {"time_limit": 50} | ({} if algo in OFFLINE else {"env": "HalfCheetah-v4"})
            folder = ROOT / name_and_folder(algo, module(algo).Args(**arguments_of(algo, task)))[1]
            if not folder.exists():
                made.append(folder)
                with contextlib.chdir(ROOT):
                    stopped = killed_at(algo, [("save", 2)], *flags(algo, **task))
                assert stopped.returncode == 0, stopped.stderr
                assert (folder / "checkpoint" / "state.pt").exists()
        yield
    finally:
        for folder in made:
            shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            (ROOT / "runs").rmdir()  # if it is empty


def is_ours(name: str) -> bool:
    """Return whether a file or folder of this name is an environment, a cache or git's."""
    return any(fnmatch.fnmatch(name, each) for each in OURS)


def entries(root: Path) -> Iterator[Path]:
    """Yield every file, link and folder below `root`, without environments and caches."""
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not is_ours(name)]
        yield from (Path(folder, name) for name in (*folders, *names) if not is_ours(name))


def tracked(root: Path) -> set[Path]:
    """Return the files that git tracks, and their folders."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True).stdout
    paths = {root / name for name in listed.split("\0") if name}
    return paths | {parent for path in paths for parent in path.parents}


def states(root: Path) -> dict[Path, tuple[object, ...]]:
    """Return of each file its size, time of the last change and hash, of a link its target, of a folder nothing."""
    found: dict[Path, tuple[object, ...]] = {}
    for path in entries(root):
        if path.is_symlink():
            found[path] = (os.readlink(path),)
        elif path.is_file():
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            found[path] = path.stat().st_size, path.stat().st_mtime_ns, digest
        else:
            found[path] = ()
    return found


def reset_access_times(paths: Iterable[Path]) -> None:
    """Set them to 0, so that any later read shows."""
    for path in paths:
        os.utime(path, ns=(0, path.stat().st_mtime_ns))


def run_untouched(root: Path, command: list[str]) -> int:
    """Run `command` in this folder and return its exit status, or 1 if it read or wrote what it must not."""
    before = states(root)
    private = {path for path in before.keys() - tracked(root) if not path.is_symlink()}
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
