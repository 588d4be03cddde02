"""A replay buffer of packed float32 rows on any device. A save appends only what is new."""

import contextlib
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from common.arguments import NonNegativeInt
from common.checkpoint import RESTORE_OR_RESTART, Part
from common.errors import InputError, RunError, require_finite
from common.files import open_regular, read_bytes, sync
from common.memory import free_memory
from common.schema import Schema
from common.tracing import cut
from common.windows import Windows


class Batch(NamedTuple):
    """Transitions: obs and next_obs [batch, obs_dim], actions [batch, action_dim], rewards and terminations [batch].

    All are float32. terminations is 1 if the MDP ended at next_obs. It is 0 for a truncated episode, so that its target
    bootstraps. returns_to_go [batch] is the discounted sum of rewards to the episode's end (Cal-QL), or None if the
    buffer has none. next_actions [batch, action_dim] are the dataset's actions at next_obs (ReBRAC), NaN after an
    episode's last transition, or None if they are not asked for.

    A batch may hold windows of h transitions instead. Then obs is that of the first transition and next_obs that of the
    last, actions are [batch, h · action_dim], rewards are discounted sums, and terminations is 1 if one of the h
    terminated. valid [batch, h] is 0 beyond the episode's end. These places repeat the episode's last transition.
    """

    obs: Tensor
    actions: Tensor
    rewards: Tensor
    next_obs: Tensor
    terminations: Tensor
    returns_to_go: Tensor | None = None
    next_actions: Tensor | None = None
    valid: Tensor | None = None

    @property
    def whole(self) -> Tensor | float:
        """1 for each window that does not pass its episode's end [batch]. 1 if the batch has no windows."""
        return 1.0 if self.valid is None else self.valid[:, -1]

    @property
    def valid_actions(self) -> Tensor | float:
        """1 for each number in `actions` of a valid transition, with their shape. 1 if the batch has no windows."""
        if self.valid is None:
            return 1.0
        return self.valid.repeat_interleave(self.actions.shape[1] // self.valid.shape[1], 1)

    def map_obs(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        """Return the batch with `function` applied to obs and next_obs."""
        return self._replace(obs=function(self.obs), next_obs=function(self.next_obs))

    def slices(self, size: int) -> Iterator["Batch"]:
        """Yield the transitions in order, `size` at a time."""
        firsts = range(0, len(self.rewards), size)
        parts = [Batch._make(None if p is None else p[first : first + size] for p in self) for first in firsts]
        for part in parts:
            cut()
            yield part
        cut()


def pack(widths: Sequence[int], first: int, *transitions: ArrayLike) -> NDArray[np.float32]:
    """Return rows [n, sum(widths)] of n transitions, given as arrays [n, dim] or [n] in a batch's order.

    `first` is the number of the first transition. Raises InputError if shapes do not fit, RunError if a number is not
    finite.
    """
    with np.errstate(over="ignore"):  # an overflow becomes infinite, which is refused below
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
    """Ring of `capacity` transitions. When it is full, the oldest are overwritten.

    A row is obs | action | reward | next_obs | termination, so that a batch is one gather. `returns_to_go` adds a
    column, and so does `starts`, which is 1 for the first transition of an episode. next_obs is stored because a lookup
    in the next row fails in three cases: at time limits, with several environments, and at overwritten rows. Bytes:
    4 · capacity · (2 obs_dim + action_dim + 2), 168 MB for a million transitions of HalfCheetah.

    A `file` of such rows is mapped, not loaded. Rows that are read come from the disk and may leave memory again. Rows
    that are added stay in memory and are never written to the file.
    """

    schema: ClassVar[Schema] = {"added": NonNegativeInt, "widths": [int], "segments": [(NonNegativeInt,) * 3]}
    segment_rows = 100_000  # rows in one file of a checkpoint

    def __init__(
        self,
        capacity: int,
        obs_dim: int,
        action_dim: int,
        device: torch.device | str = "cpu",
        file: Path | None = None,
        returns_to_go: bool = False,
        starts: bool = False,
    ) -> None:
        """Allocate the rows or map `file`. Raises InputError if memory is too small or `device` cannot map files."""
        self.capacity, self.obs_dim, self.action_dim = capacity, obs_dim, action_dim
        self.device = torch.device(device)
        self.widths: tuple[int, ...] = (obs_dim, action_dim, 1, obs_dim, 1) + (1,) * (returns_to_go + starts)
        assert not (returns_to_go and starts)  # no algorithm has both, and a batch of windows has no returns
        self.has_starts = starts
        self.windows: Windows | None = None  # how `at` and `sample` cut windows
        self.file = file
        if file is not None:
            self.rows = self._mapped(file)
        else:
            free = free_memory(self.device)
            if self.num_bytes > free:
                raise InputError(
                    f"the replay buffer of {capacity:,} transitions takes {_gigabytes(self.num_bytes)}, "
                    f"{self.device} has {_gigabytes(free)} free: give a smaller --buffer-size "
                    f"(at most {int(free / self.num_bytes * capacity):,}), or --device cpu for a dataset"
                )
            self.rows = torch.zeros(capacity, sum(self.widths), device=self.device)
        self.size = torch.zeros((), dtype=torch.int64, device=self.device)  # len(self), for code on the device
        self.head = torch.zeros_like(self.size)  # the row that is overwritten next
        self.added = 0
        self._saved = 0  # how many of them the checkpoint holds
        self._segments: list[_Segment] = []

    @property
    def num_bytes(self) -> int:
        return 4 * self.capacity * sum(self.widths)

    @property
    def added(self) -> int:
        """The number of transitions ever added. The next one goes to row added % capacity."""
        return self._added

    @added.setter
    def added(self, added: int) -> None:
        self._added = added
        self.size.fill_(len(self))
        self.head.fill_(added % self.capacity)

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
        *further: ArrayLike,
    ) -> None:
        """Add n transitions in order, one from each environment, as arrays [n, dim] or [n].

        `further` are returns-to-go or starts, if the buffer has them.

        Raises InputError if shapes do not fit, RunError if a number is not finite.
        """
        rows = pack(self.widths, self.added, obs, actions, rewards, next_obs, terminations, *further)
        self._put(self.added, torch.from_numpy(rows))
        self.added += len(rows)

    def sample(self, batch_size: int, generator: torch.Generator) -> Batch:
        """Sample `batch_size` transitions, uniformly with replacement. `generator` is on the buffer's device."""
        return self.at(random_rows(self.size, batch_size, generator))

    def at(self, where: Tensor) -> Batch:
        """Return the transitions in the rows `where` [batch], an integer tensor on the buffer's device.

        With `windows`, they are windows that begin there.
        """
        if self.windows is None:
            return self._rows_at(where)
        # A view that was kept would share its memory with the rows, and such updates cannot be recorded.
        starts = self.rows[:, -1] if self.windows.starts is None else self.windows.starts
        rows, is_valid = self.windows.rows(where, self.head, starts)
        valid, each = is_valid.to(self.rows.dtype), self._rows_at(rows.flatten())
        of_window = [len(where), self.windows.length]
        rewards, terminations = (part.view(of_window) for part in (each.rewards, each.terminations))
        discounted, terminated = self.windows.discounted(rewards, terminations, valid)
        obs, next_obs = (part.view(*of_window, -1) for part in (each.obs, each.next_obs))
        return Batch(obs[:, 0], each.actions.reshape(len(where), -1), discounted, next_obs[:, -1], terminated,
                     valid=valid)  # fmt: skip

    def _rows_at(self, where: Tensor) -> Batch:
        obs, actions, rewards, next_obs, *rest = self.rows.index_select(0, where).split(self.widths, dim=1)
        if self.has_starts:
            rest.pop()
        return Batch(obs, actions, rewards.squeeze(1), next_obs, *(part.squeeze(1) for part in rest))

    def save(self, folder: Path) -> dict[str, Any]:
        """Append what was added since the last save to the files in `folder`, and return the state for `load`.

        Nothing that an earlier state needs is overwritten, so a kill at any point leaves that state loadable.
        """
        folder.mkdir(parents=True, exist_ok=True)
        row_bytes = 4 * sum(self.widths)
        for segment in self._segments:
            path = folder / segment.name
            if not path.exists() or path.stat().st_size < segment.rows * row_bytes:
                raise RunError(
                    f"{path} was deleted, cut or replaced during the run\nput it back, then run the same command again"
                )
        first = max(self._saved, self.added - self.capacity)
        while first < self.added:
            if not self._segments or first != self._segments[-1].end or self._segments[-1].rows == self.segment_rows:
                self._segments.append(_Segment(first, 0, 0))
            segment = self._segments[-1]
            last = min(self.added, segment.first + self.segment_rows)
            rows = self.rows[self._ring(first, last)].cpu().numpy().tobytes()
            path = folder / segment.name
            with open_regular(path, "r+b" if path.exists() else "w+b") as file:
                file.seek(segment.rows * row_bytes)  # overwrite what a killed save may have left there
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
        """Delete the files that only states before the last save need. Call it once that save's state is on disk."""
        live = {segment.name for segment in self._segments}
        for path in folder.glob("*.rows"):
            if path.name not in live:
                path.unlink()

    def load(self, folder: Path, state: dict[str, Any]) -> None:
        """Restore the rows of `state`. Raises InputError if files are missing or damaged, or have other widths."""
        if tuple(state["widths"]) != self.widths:
            raise InputError(
                f"{folder} holds rows of {state['widths']}, this environment gives {list(self.widths)}: "
                "give the run's own environment"
            )
        row_bytes = 4 * sum(self.widths)
        self.added = self._saved = state["added"]
        self._segments = [_Segment(*segment) for segment in state["segments"]]
        bounds = [number for segment in self._segments for number in (segment.first, segment.end)]
        # The first may begin later than 0. Each of the others begins where the one before it ends.
        ends, firsts = bounds[1::2] or [0], [*bounds[2::2], self.added]
        if ends != firsts or (bounds or [0])[0] > max(0, self.added - self.capacity):
            raise InputError(f"the state of {folder} does not fit its rows: {RESTORE_OR_RESTART}")
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
            os.truncate(file, self.num_bytes)  # room for added rows, which takes no space on the disk
        width = sum(self.widths)
        return torch.from_file(str(file), shared=False, size=self.capacity * width).view(self.capacity, width)

    def _put(self, first: int, rows: Tensor) -> None:
        """Write the rows of the transitions from number `first` on. Only the last `capacity` of them stay."""
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


def random_rows(size: Tensor | int, count: int, generator: torch.Generator) -> Tensor:
    """Sample integers [count] below `size`. A CUDA graph reads `size` at each replay if it is a tensor."""
    # With so wide a range, the remainder favours no number by more than size / 2^62.
    return torch.randint(2**62, (count,), generator=generator, device=generator.device) % size


def _gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.2f} GB"
