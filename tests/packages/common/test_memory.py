"""Freed memory stays with the process; what is free is known, within every limit; no allocation ends in a traceback."""

import resource
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from conftest import ROOT, command, flags
from d4rl_file import make

from algos import sac
from common import memory
from common.command_line import command_line
from common.errors import InputError, RunError
from common.memory import free_memory, is_out_of_memory, report_out_of_memory
from offline.dataset import load

PAGES = """
import resource, torch
from common.onednn import keep_freed_memory
keep_freed_memory()
def work():
    return [torch.ones(2**21) for _ in range(8)]  # 8 MB each
work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's own settings")
def test_freed_blocks_are_not_fetched_again():
    """640 MB of blocks are 160 000 pages of 4 kB, nearly all of which came from the kernel; now few may."""
    result = subprocess.run([sys.executable, "-c", PAGES], capture_output=True, text=True, cwd=ROOT, check=True)
    assert int(result.stdout) < 50_000, result.stderr


CPU = torch.device("cpu")
MB = 2**20
MOUNT = "31 23 0:28 {shown} {point} rw,relatime - {kind} {kind} rw,{options}"
# By the type of the file system: the name of the limit, of what is used, and of the pages of files.
NAMES = {
    "cgroup2": ("memory.max", "memory.current", ""),
    "cgroup": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
}


def group(folder: Path, kind: str, limit: int | str, used: int, cache: int) -> None:
    """Write the files of a control group: its limit, what is used of it, and how much of that can be dropped."""
    folder.mkdir(parents=True, exist_ok=True)
    limit_name, used_name, prefix = NAMES[kind]
    (folder / limit_name).write_text(f"{limit}\n")
    (folder / used_name).write_text(f"{used}\n")
    pages = {"anon": used - cache, f"{prefix}inactive_file": cache - cache // 4, f"{prefix}active_file": cache // 4}
    (folder / "memory.stat").write_text("".join(f"{name} {count}\n" for name, count in pages.items()))


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of a file system in which a test writes /proc/self and /sys/fs/cgroup."""
    monkeypatch.setattr(memory, "ROOT", tmp_path / "root")
    (tmp_path / "root/proc/self").mkdir(parents=True)
    return tmp_path / "root"


def place(root: Path, kind: str, path: str, shown: str = "/") -> Path:
    """Write that the process is in the group `path`; the tree, whose mount point is returned, shows it from `shown`."""
    point = "/sys/fs/cgroup" if kind == "cgroup2" else "/sys/fs/cgroup/memory"
    other = MOUNT.format(shown="/", point="/sys/fs/cgroup/cpu", kind="cgroup", options="cpu")
    here = MOUNT.format(shown=shown, point=point, kind=kind, options="memory")
    number = "0::" if kind == "cgroup2" else "4:memory:"
    (root / "proc/self/mountinfo").write_text(f"{other}\n{here}\n")
    (root / "proc/self/cgroup").write_text(f"9:cpu:/elsewhere\n{number}{path}\n")
    return root / point[1:]


@pytest.mark.parametrize("kind", NAMES)
class TestControlGroups:
    def test_the_limit_of_the_own_group(self, root: Path, kind: str) -> None:
        """What is left of it, and the pages of files in it, which the kernel drops when memory is short."""
        group(place(root, kind, "/job") / "job", kind, 700 * MB, used=300 * MB, cache=40 * MB)
        assert free_memory(CPU) == 440 * MB

    def test_the_least_of_all_groups_around_it(self, root: Path, kind: str) -> None:
        """A limit of any group above it holds too."""
        point = place(root, kind, "/user/session/job")
        group(point / "user/session/job", kind, 900 * MB, used=100 * MB, cache=0)
        group(point / "user/session", kind, 600 * MB, used=350 * MB, cache=50 * MB)
        group(point / "user", kind, 2**62 if kind == "cgroup" else "max", used=2000 * MB, cache=0)
        assert free_memory(CPU) == 300 * MB

    @pytest.mark.parametrize(("path", "shown"), [("/docker/abc", "/docker/abc"), ("/docker/abc", "/other"),
                                                 ("/", "/"), ("/../abc", "/")])  # fmt: skip
    def test_a_container_sees_its_group_as_the_root(self, root: Path, kind: str, path: str, shown: str) -> None:
        """Whatever name it has outside."""
        group(place(root, kind, path, shown), kind, 500 * MB, used=100 * MB, cache=0)
        assert free_memory(CPU) == 400 * MB

    def test_a_group_that_is_full_has_nothing_left(self, root: Path, kind: str) -> None:
        """Not less than nothing."""
        group(place(root, kind, "/"), kind, 100 * MB, used=120 * MB, cache=0)
        assert free_memory(CPU) == 0

    def test_without_limits_the_machine_decides(self, root: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Also if files are missing, or are not as they should be."""
        available = type("Memory", (), {"available": 123 * MB})
        monkeypatch.setattr(psutil, "virtual_memory", lambda: available)
        assert free_memory(CPU) == 123 * MB
        point = place(root, kind, "/")
        assert free_memory(CPU) == 123 * MB
        group(point, kind, "max", used=10, cache=0)
        assert free_memory(CPU) == 123 * MB
        group(point, kind, "nonsense", used=10, cache=0)
        assert free_memory(CPU) == 123 * MB

    @pytest.mark.parametrize("stat", ["nonsense", "anon 5\n", None])
    def test_a_limit_holds_whatever_memory_stat_holds(self, root: Path, kind: str, stat: str | None) -> None:
        """What can be dropped counts as nothing if it is not known."""
        point = place(root, kind, "/")
        group(point, kind, 700 * MB, used=300 * MB, cache=40 * MB)
        (point / "memory.stat").unlink() if stat is None else (point / "memory.stat").write_text(stat)
        assert free_memory(CPU) == 400 * MB

    def test_a_load_that_would_be_killed_is_mapped(
        self, root: Path, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A container of 1 MB, a dataset of 1.2 MB; one that may not be mapped is refused."""
        monkeypatch.setenv("ONRAMP_CACHE", str(tmp_path / "cache"))
        path = make(tmp_path / "a.hdf5", "." * 999 + "t", observations=np.zeros((1_000, 150), np.float32))
        assert load(path).buffer.file is None
        group(place(root, kind, "/job") / "job", kind, 5 * MB, used=4 * MB, cache=0)
        assert load(path).buffer.file is not None
        with pytest.raises(InputError, match=r"takes 0\.00 GB, cpu has 0\.00 GB free"):
            load(path, mapped=False)


LIMITED = """
import resource, sys
import psutil, torch
from common.errors import InputError, RunError
from common.memory import free_memory
from offline.dataset import load
limit = psutil.Process().memory_info().vms + int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
assert free_memory(torch.device("cpu")) <= int(sys.argv[2])
try:
    print(len(load(sys.argv[1])))
except (InputError, RunError) as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("left", "said"),
    [
        (200 * MB, "50000\n"),
        (100 * MB, "RunError there is not enough memory"),  # for a copy of a part, while it is read
        (40 * MB, "InputError the dataset takes 60,600,000 bytes, in memory or mapped from the disk"),
    ],
)
def test_a_limit_on_addresses(tmp_path: Path, left: int, said: str) -> None:
    """RLIMIT_AS for real: what fits is loaded, the rest ends in one line and not in a kill.

    With less than half a megabyte left, HDF5 itself crashes at its first use.
    """
    rows = {
        "observations": np.zeros((50_000, 150), np.float32),
        "next_observations": np.zeros((50_000, 150), np.float32),
    }
    path = make(tmp_path / "a.hdf5", "." * 49_999 + "t", **rows)
    environ = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ONRAMP_CACHE": str(tmp_path / "cache")}
    line = [sys.executable, "-c", LIMITED, str(path), str(left)]
    done = subprocess.run(line, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(said)
    assert len(done.stdout.splitlines()) == 1


def test_the_message_of_a_failed_allocation_is_short() -> None:
    """Two sentences of at most 25 words: what failed, and what to do."""

    @report_out_of_memory
    def allocate() -> None:
        raise MemoryError("Unable to allocate 72.8 TiB for an array with shape (10000000000000,) and type float64")

    with pytest.raises(
        RunError, match=r"memory \(Unable to allocate .*\)\. Free some, raise .* --buffer-size$"
    ) as caught:
        allocate()
    sentences = str(caught.value).split("). ")
    assert len(sentences) == 2
    assert all(len(sentence.split()) <= 25 for sentence in sentences)


def test_a_network_that_gets_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What no estimate foresaw: the command ends in one line with status 1, and leaves no folder."""
    monkeypatch.setattr("common.run.require_resources", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["sac.py", *flags(run_dir=tmp_path / "run", hidden=(60_000, 60_000))])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + 2**31, before[1]))
    try:
        with pytest.raises(SystemExit) as stop:
            command_line(sac.train, sac.Args)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert stop.value.code == 1
    assert "sac.py: there is not enough memory" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "run").exists()


def test_a_network_beyond_the_limit_of_the_process(tmp_path: Path) -> None:
    """`ulimit -v` counts: the estimate is compared with what it leaves."""
    limit = partial(resource.setrlimit, resource.RLIMIT_AS, (8 * 2**30, 8 * 2**30))
    done = command(*flags(run_dir=tmp_path / "run", hidden=(60_000, 60_000)), preexec_fn=limit)
    assert done.returncode == 2, done.stderr
    assert "sac.py: --hidden needs 58 GB of memory or more, and" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (MemoryError(), True),
        (np._core._exceptions._ArrayMemoryError((2, 2), np.dtype(float)), True),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
            True,
        ),
        (RuntimeError("unable to mmap 9 bytes: Cannot allocate memory (12)"), True),
        (OSError(12, "Cannot allocate memory"), True),
        (OSError("Can't synchronously read data (memory allocation failed for chunk)"), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), False),
        (RuntimeError("shapes do not fit"), False),
        (OSError(28, "No space left on device"), False),
    ],
)
def test_which_errors_are_failed_allocations(error: Exception, is_one: bool) -> None:
    """Those of Python, NumPy, PyTorch and HDF5; a card's have a message of their own."""

    def fail() -> None:
        raise error

    assert is_out_of_memory(error) is is_one
    with pytest.raises(RunError if is_one else type(error)) as caught:
        report_out_of_memory(fail)()
    assert len(str(caught.value).splitlines()) <= 1 or not is_one
