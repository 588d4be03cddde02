"""Run one of our algorithm files, unchanged, with its gradient steps on a dataset counted (`bench/step_counter.py`).

`python bench/count_updates.py algos/iql.py --dataset ...`: its loop tells the logger of every such step; so does this
another process. To a GPU a step is only sent: there one is counted once no more than AHEAD are unfinished, so that
little is worked off in the time of others.
"""

import itertools
import runpy
import sys

import torch

from bench.step_counter import claim_slot
from common.logger import Logger

AHEAD = 16


def main() -> None:
    count, count_update = claim_slot(), Logger.count_update
    sent = itertools.cycle([torch.cuda.Event() for _ in range(AHEAD)] if torch.cuda.is_available() else [None])

    def counted_update(self: Logger) -> None:
        count_update(self)
        if (event := next(sent)) is not None:
            event.synchronize()  # at once, where it was not recorded yet
            event.record()
        count()

    Logger.count_update = counted_update  # type: ignore[method-assign]
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
