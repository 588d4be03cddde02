"""Windows of consecutive transitions, cut out of rows when they are sampled."""

from typing import NamedTuple

import torch
from torch import Tensor


class Windows(NamedTuple):
    """How rows become windows of `length` transitions. `gamma` is the discount factor.

    The next transition of an environment is `stride` rows later. `starts` [capacity] is 1 for the first transition of
    an episode. It is None if the rows have such a column.
    """

    length: int
    gamma: float
    stride: int
    starts: Tensor | None

    def rows(self, first: Tensor, head: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows of the windows from the rows `first` [batch] on, and which are `valid`: [batch, length] each.

        A window ends with its episode, and at the newest transition of its environment. `head` is the number of the row
        that is overwritten next. Invalid places repeat the last valid row.
        """
        capacity = len(starts)
        rows, valid = [first], [torch.ones_like(first, dtype=torch.bool)]
        for _ in range(self.length - 1):
            following = (rows[-1] + self.stride) % capacity
            newer = (head - 1 - rows[-1]) % capacity  # transitions that were added after it
            valid.append(valid[-1] & (newer >= self.stride) & (starts[following] == 0))
            rows.append(torch.where(valid[-1], following, rows[-1]))
        return torch.stack(rows, 1), torch.stack(valid, 1)

    def discounted(self, rewards: Tensor, terminations: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Return Σ γⁱ r of each window, and whether it has a termination: [batch], from [batch, length].

        A termination ends the sum, also one inside an episode (OGBench).
        """
        lasting = valid * (1.0 - terminations)
        before = torch.cat([torch.ones_like(lasting[:, :1]), lasting[:, :-1]], 1).cumprod(1)
        powers = self.gamma ** torch.arange(self.length, device=rewards.device)
        return (powers * valid * before * rewards).sum(1), (valid * terminations).amax(1)
