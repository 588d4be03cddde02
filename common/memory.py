"""Measure the memory that this process may still use, and explain an allocation that fails."""

import contextlib
import functools
import re
import resource
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple, ParamSpec, TypeVar

import psutil
import torch

from common.cuda import share_of_memory
from common.errors import RunError

P = ParamSpec("P")
T = TypeVar("T")

ROOT = Path("/")  # tests set another, with their own files


class _Group(NamedTuple):
    """Names in a memory control group: the files of its limits and use, and droppable pages in memory.stat."""

    limits: tuple[str, ...]
    used: str
    cache: tuple[str, ...]


# The keys are types of file system.
_GROUPS = {
    "cgroup2": _Group(("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file")),
    "cgroup": _Group(("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
}


def free_memory(device: torch.device) -> int:
    """Return the bytes that this process may still use on `device`.

    On a GPU, they are the free bytes within this process's share of the card. On the CPU, they are the least of what
    the machine, every control group around the process and its address space have left.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return min(free, int(share_of_memory() * total) - torch.cuda.memory_reserved(device))
    return max(0, min(psutil.virtual_memory().available, free_address_space(), *_free_in_groups()))


def free_address_space() -> int:
    """Return the bytes that `ulimit -v` (RLIMIT_AS) leaves, for memory and mapped files together."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return 2**63 - 1
    return max(0, limit - psutil.Process().memory_info().vms)


def _free_in_groups() -> Iterator[int]:
    """Yield the bytes that each visible control group of this process has left below its limit."""
    yield 2**63 - 1
    for kind, folder in _groups():
        group = _GROUPS[kind]
        with contextlib.suppress(OSError, ValueError):  # the group has no limit
            limits = [(folder / name).read_text().strip() for name in group.limits if (folder / name).exists()]
            limit = min(int(text) for text in limits if text != "max")
            used = int((folder / group.used).read_text())
            yield limit - used + _droppable(folder / "memory.stat", group.cache)


def _droppable(stat: Path, names: tuple[str, ...]) -> int:
    """Return the bytes of the entries `names` in the file `stat`; 0 if it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        found = dict(line.split() for line in stat.read_text().splitlines())
        return sum(int(found.get(name, 0)) for name in names)
    return 0


def _groups() -> Iterator[tuple[str, Path]]:
    """Yield type and folder of this process's control groups, from the innermost to the outermost that is mounted."""
    try:
        groups = [line.split(":", 2) for line in (ROOT / "proc/self/cgroup").read_text().splitlines()]
        mounts = (ROOT / "proc/self/mountinfo").read_text().splitlines()
    except OSError:  # this kernel has no control groups
        return
    own = {"cgroup2" if number == "0" else "cgroup": path for number, names, path in groups
           if number == "0" or "memory" in names.split(",")}  # fmt: skip
    for line in mounts:
        mount, _, (kind, *_, options) = (part.split() for part in line.partition(" - "))
        if kind not in own or (kind == "cgroup" and "memory" not in options.split(",")):
            continue
        path, shown, point = PurePosixPath(own[kind]), mount[3], ROOT / mount[4].lstrip("/")
        # A container sees a part of the tree. A path outside of that part belongs to the part's root.
        inside = path.relative_to(shown) if path.is_relative_to(shown) and ".." not in path.parts else PurePosixPath()
        folder = point / inside
        while True:
            yield kind, folder
            if folder == point:
                break
            folder = folder.parent


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` means that the machine, not a GPU, is out of memory."""
    words = r"allocate memory|allocation failed|not enough memory|bad_alloc"
    return not isinstance(error, torch.OutOfMemoryError) and (
        isinstance(error, MemoryError) or bool(re.search(words, str(error), re.IGNORECASE))
    )


def report_out_of_memory(function: Callable[P, T]) -> Callable[P, T]:
    """Wrap a function so that it raises RunError with advice if the machine, not a GPU, is out of memory."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except (MemoryError, RuntimeError, OSError) as error:
            if not is_out_of_memory(error):
                raise
            reason = " ".join(str(error).split())[:150]
            raise RunError(
                f"there is not enough memory ({reason}). Free some, raise the limit of this process (ulimit -v) or of "
                "its container, or give smaller networks, batches or --buffer-size"
            ) from None

    return wrapped
