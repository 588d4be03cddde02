"""Run one of our algorithm files, unchanged, and count its gradient steps on a dataset.

    python bench/speed/count_updates.py algos/iql.py --dataset ...

The file's loop reports every such step to the logger. This program also counts the step for another process
(`bench/speed/step_counter.py`). A step is only sent to a GPU. There it is counted when at most AHEAD steps are
unfinished, so that little work is left for the time of other programs.
"""

import itertools
import runpy
import sys

import torch

from bench.speed.step_counter import claim_slot
from common.logger import Logger

AHEAD = 16


def main() -> None:
    count, advance = claim_slot(), Logger.advance
    sent = itertools.cycle([torch.cuda.Event() for _ in range(AHEAD)] if torch.cuda.is_available() else [None])

    def counted_advance(self: Logger, steps: int) -> None:
        advance(self, steps)
        if self.step > 0:
            return
        if (event := next(sent)) is not None:
            event.synchronize()  # returns at once if it was not recorded yet
            event.record()
        count()

    Logger.advance = counted_advance  # type: ignore[method-assign]
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
