"""Transitions in a ring of packed float32 rows, on any device, saved by appending what is new."""

import contextlib
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from common.checkpoint import RESTORE_OR_RESTART, Part, read_bytes, sync
from common.errors import InputError, require_finite
from common.memory import free_memory


class Batch(NamedTuple):
    """Transitions: obs and next_obs [batch, obs_dim], actions [batch, action_dim], rewards and terminations [batch].

    All float32. terminations is 1 where the MDP ended at next_obs; a truncated episode has 0, so that it bootstraps.
    returns_to_go [batch], where the buffer holds them, is the discounted sum of rewards to the episode's end (Cal-QL).
    """

    obs: Tensor
    actions: Tensor
    rewards: Tensor
    next_obs: Tensor
    terminations: Tensor
    returns_to_go: Tensor | None = None

    def slices(self, size: int) -> Iterator["Batch"]:
        """Its transitions in order, `size` at a time."""
        for first in range(0, len(self.rewards), size):
            yield Batch._make(None if part is None else part[first : first + size] for part in self)


def pack(widths: Sequence[int], first: int, *transitions: ArrayLike) -> NDArray[np.float32]:
    """Rows [n, sum(widths)] of n transitions, arrays of [n, dim] or [n] in a batch's order, from number `first` on.

    Raises InputError where shapes do not fit, RunError where a number is not finite.
    """
    with np.errstate(over="ignore"):  # what float32 cannot hold is refused below
        parts = [np.asarray(part, np.float32) for part in transitions]
    n = len(parts[0])
    names = Batch._fields[: len(widths)]
    for name, part, width in zip(names, parts, widths, strict=True):
        if part.shape not in ((n, width), (n,) if width == 1 else None):
            raise InputError(f"{name} has shape {part.shape}, the replay buffer needs {(n, width)}")
    rows = np.concatenate([part.reshape(n, -1) for part in parts], axis=1)
    if not np.isfinite(rows).all():
        require_finite(first, **dict(zip(names, parts, strict=True)))
    return rows


class ReplayBuffer(Part):
    """Ring of `capacity` transitions; when full, the oldest go first.

    A row is obs | action | reward | next_obs | termination, so that a batch is one gather. next_obs is stored, not
    looked up in the next row: the lookup is wrong at time limits, with several environments, and where the ring is
    overwritten. Bytes: 4 · capacity · (2 obs_dim + action_dim + 2), 168 MB for a million of HalfCheetah's.

    Given a `file` of such rows, it maps them instead of loading them: what is read comes from the disk and may go from
    memory again; what is added stays in memory and never reaches the file.
    """

    segment_rows = 100_000  # rows in one file of a checkpoint

    def __init__(
        self,
        capacity: int,
        obs_dim: int,
        action_dim: int,
        device: torch.device | str = "cpu",
        file: Path | None = None,
        returns_to_go: bool = False,
    ) -> None:
        """Raises InputError where the device's free memory does not hold it, or a `file` cannot be mapped there."""
        self.capacity, self.obs_dim, self.action_dim = capacity, obs_dim, action_dim
        self.device = torch.device(device)
        self.widths: tuple[int, ...] = (obs_dim, action_dim, 1, obs_dim, 1) + (1,) * returns_to_go
        self.file = file
        if file is not None:
            self.rows = self._mapped(file)
        else:
            free = free_memory(self.device)
            if self.num_bytes > free:
                raise InputError(
                    f"the replay buffer of {capacity:,} transitions takes {_gigabytes(self.num_bytes)}, "
                    f"{self.device} has {_gigabytes(free)} free: give a smaller --buffer-size "
                    f"(at most {int(free / self.num_bytes * capacity):,}), or where it is a dataset's --device cpu"
                )
            self.rows = torch.zeros(capacity, sum(self.widths), device=self.device)
        self.size = torch.zeros((), dtype=torch.int64, device=self.device)  # len(self), for what runs on the device
        self.added = 0
        self._saved = 0  # of these, how many the checkpoint holds
        self._segments: list[_Segment] = []

    @property
    def num_bytes(self) -> int:
        return 4 * self.capacity * sum(self.widths)

    @property
    def added(self) -> int:
        """Transitions ever added: the next goes to row added % capacity."""
        return self._added

    @added.setter
    def added(self, added: int) -> None:
        self._added = added
        self.size.fill_(len(self))

    def __len__(self) -> int:
        return min(self.added, self.capacity)

    def __str__(self) -> str:
        return f"replay buffer: {self.capacity:,} transitions, {self.num_bytes / 1e6:,.0f} MB on {self.device}"

    def add(
        self,
        obs: ArrayLike,
        actions: ArrayLike,
        rewards: ArrayLike,
        next_obs: ArrayLike,
        terminations: ArrayLike,
        *returns_to_go: ArrayLike,
    ) -> None:
        """Adds n transitions, one from each environment, in order: arrays of [n, dim] or [n].

        Raises InputError where shapes do not fit, RunError where a number is not finite.
        """
        rows = pack(self.widths, self.added, obs, actions, rewards, next_obs, terminations, *returns_to_go)
        self._put(self.added, torch.from_numpy(rows))
        self.added += len(rows)

    def sample(self, batch_size: int, generator: torch.Generator) -> Batch:
        """`batch_size` transitions, uniform with replacement; `generator` is on the buffer's device."""
        return self.at(uniform(self.size, batch_size, generator))

    def at(self, where: Tensor) -> Batch:
        """The transitions in the rows `where` [batch], an integer tensor on the buffer's device."""
        obs, actions, rewards, next_obs, *rest = self.rows.index_select(0, where).split(self.widths, dim=1)
        return Batch(obs, actions, rewards.squeeze(1), next_obs, *(part.squeeze(1) for part in rest))

    def save(self, folder: Path) -> dict[str, Any]:
        """Appends to the files in `folder` what was added since the last save; returns the state that `load` takes.

        Nothing that an earlier state needs is overwritten, so a kill at any instant leaves that state loadable.
        """
        folder.mkdir(parents=True, exist_ok=True)
        row_bytes = 4 * sum(self.widths)
        first = max(self._saved, self.added - self.capacity)
        while first < self.added:
            if not self._segments or first != self._segments[-1].end or self._segments[-1].rows == self.segment_rows:
                self._segments.append(_Segment(first, 0, 0))
            segment = self._segments[-1]
            last = min(self.added, segment.first + self.segment_rows)
            rows = self.rows[self._ring(first, last)].cpu().numpy().tobytes()
            path = folder / segment.name
            with path.open("r+b" if path.exists() else "w+b") as file:
                file.seek(segment.rows * row_bytes)  # over what a killed save may have left there
                file.write(rows)
                file.flush()
                os.fsync(file.fileno())
            self._segments[-1] = _Segment(segment.first, last - segment.first, zlib.crc32(rows, segment.checksum))
            first = last
        sync(folder)
        self._saved = self.added
        self._segments = [segment for segment in self._segments if segment.end > self.added - self.capacity]
        return {"added": self.added, "widths": list(self.widths), "segments": [list(s) for s in self._segments]}

    def drop_old(self, folder: Path) -> None:
        """Deletes the files that only states before the last save need; call it when that save's state is safe."""
        live = {segment.name for segment in self._segments}
        for path in folder.glob("*.rows"):
            if path.name not in live:
                path.unlink()

    def load(self, folder: Path, state: dict[str, Any]) -> None:
        """Restores what `save` returned `state` for. Raises InputError where the files are missing or damaged."""
        if tuple(state["widths"]) != self.widths:
            raise InputError(f"{folder} holds rows of {state['widths']}, this environment gives {list(self.widths)}")
        row_bytes = 4 * sum(self.widths)
        self.added = self._saved = state["added"]
        self._segments = [_Segment(*segment) for segment in state["segments"]]
        for segment in self._segments:
            path = folder / segment.name
            data = b""
            with contextlib.suppress(FileNotFoundError):
                data = read_bytes(path)[: segment.rows * row_bytes]
            if len(data) < segment.rows * row_bytes or zlib.crc32(data) != segment.checksum:
                raise InputError(f"{path} is missing or damaged: {RESTORE_OR_RESTART}")
            first = max(segment.first, self.added - self.capacity)
            kept = np.frombuffer(data, np.float32).reshape(segment.rows, -1)[first - segment.first :]
            self._put(first, torch.from_numpy(kept.copy()))

    def _mapped(self, file: Path) -> Tensor:
        if self.device.type != "cpu":
            raise InputError(f"{file} is mapped from the disk, which {self.device} cannot do: give --device cpu")
        if file.stat().st_size < self.num_bytes:
            os.truncate(file, self.num_bytes)  # room for what is added, which takes no space on the disk
        width = sum(self.widths)
        return torch.from_file(str(file), shared=False, size=self.capacity * width).view(self.capacity, width)

    def _put(self, first: int, rows: Tensor) -> None:
        """Rows of the transitions from number `first` on, of which no more than `capacity` stay."""
        gone = max(0, len(rows) - self.capacity)
        first, rows = (first + gone) % self.capacity, rows[gone:]
        until_end = self.capacity - first
        for place, part in ((first, rows[:until_end]), (0, rows[until_end:])):
            self.rows[place : place + len(part)].copy_(part, non_blocking=True)

    def _ring(self, first: int, last: int) -> Tensor:
        return (torch.arange(first, last) % self.capacity).to(self.device)


class _Segment(NamedTuple):
    """One file of saved rows: `rows` transitions from number `first` on, and the CRC-32 of its bytes."""

    first: int
    rows: int
    checksum: int

    @property
    def end(self) -> int:
        return self.first + self.rows

    @property
    def name(self) -> str:
        return f"{self.first:012d}.rows"


def uniform(size: Tensor | int, count: int, generator: torch.Generator) -> Tensor:
    """[count] integers below `size`, which a CUDA graph reads anew each time where it is a tensor."""
    # The remainder of so wide a range prefers no number by more than size / 2^62.
    return torch.randint(2**62, (count,), generator=generator, device=generator.device) % size


def _gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.2f} GB"
