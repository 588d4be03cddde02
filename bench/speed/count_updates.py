"""Run one of our algorithm files, unchanged, with its gradient steps on a dataset counted.

`python bench/speed/count_updates.py algos/iql.py --dataset ...`: its loop tells the logger of every such step; so does
this another process (`bench/speed/step_counter.py`). To a GPU a step is only sent: there one is counted once no more
than AHEAD are unfinished, so that little is worked off in the time of others.
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
            event.synchronize()  # at once, where it was not recorded yet
            event.record()
        count()

    Logger.advance = counted_advance  # type: ignore[method-assign]
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
