"""Draw rows of a dataset by the return of their episode (`--weighting`), and join batches of two sources."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from common.errors import InputError
from common.messages import log
from common.replay_buffer import Batch, ReplayBuffer
from common.windows import Windows
from offline.dataset import Dataset


class WeightedRows:
    """Draws rows of a dataset with the probabilities of `Dataset.weights`."""

    def __init__(self, dataset: Dataset, weighting: str, temperature: float) -> None:
        """Prepare the weights, and print how concentrated they are. Raises InputError as `Dataset.weights` does."""
        weights = dataset.weights(temperature, baseline=weighting == "advantage")
        self.cumulative = torch.from_numpy(np.cumsum(weights)).to(dataset.buffer.device)
        effective = 1.0 / np.square(weights).sum()  # of n equal weights it is n
        log.info(f"--weighting {weighting}: an effective {effective:,.0f} of {len(dataset):,} transitions")

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Return rows [count], drawn independently. `generator` is on the dataset's device."""
        device = self.cumulative.device
        uniform = torch.rand(count, dtype=torch.float64, generator=generator, device=device)
        rows = torch.searchsorted(self.cumulative, uniform * self.cumulative[-1], right=True)
        return rows.clamp(max=len(self.cumulative) - 1)


def weighted_rows(dataset: Dataset, weighting: str, temperature: float) -> WeightedRows | None:
    """Return what draws the dataset's rows, or None for `--weighting none`. Raises InputError as `Dataset.weights`."""
    return None if weighting == "none" else WeightedRows(dataset, weighting, temperature)


def cut_windows(
    dataset: Dataset, online: ReplayBuffer, length: int, gamma: float, num_envs: int, longest_online: int | None
) -> None:
    """Make both give windows of `length` transitions. `online` has a column of starts.

    `longest_online`: actions in the longest episode of the environment, or None. Raises InputError if that is shorter
    than a window, or if every episode of the dataset is.
    """
    for whose, longest in ((dataset.id, int(dataset.lengths.max())), ("the environment", longest_online or length)):
        if longest < length:
            raise InputError(f"no episode of {whose} has {length} transitions: give a --chunk of at most {longest}")
    data = dataset.buffer
    starts = torch.zeros(data.capacity, device=data.device)
    starts[torch.from_numpy(dataset.starts).to(data.device)] = 1.0
    data.windows = Windows(length, gamma, 1, starts)
    online.windows = Windows(length, gamma, num_envs, None)


def even_order(*counts: int) -> Tensor:
    """Return an order of rows in groups of `counts`, in which each slice has nearly the same share of each group."""
    return torch.cat([(torch.arange(n) + 0.5) / n for n in counts]).argsort(stable=True)


def concatenated(first: Batch, second: Batch, order: Tensor) -> Batch:
    """Return the transitions of both batches in the given order."""
    return _joined(first, second, lambda a, b: torch.cat([a, b]).index_select(0, order))


def selected(is_first: Tensor, first: Batch, second: Batch) -> Batch:
    """Return, in each place, the transition of `first` if `is_first` [batch], else that of `second`."""
    return _joined(first, second, lambda a, b: torch.where(is_first.view(-1, *[1] * (a.dim() - 1)), a, b))


def _joined(first: Batch, second: Batch, join: Callable[[Tensor, Tensor], Tensor]) -> Batch:
    pairs = zip(first, second, strict=True)
    return Batch._make(None if a is None or b is None else join(a, b) for a, b in pairs)
