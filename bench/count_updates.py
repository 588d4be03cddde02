"""Run one of our algorithm files, unchanged, with its gradient steps on a dataset counted (`bench/step_counter.py`).

`python bench/count_updates.py algos/iql.py --dataset ...`: its loop tells the logger of every such step; so does this
another process.
"""

import runpy
import sys

from bench.step_counter import claim_slot
from common.logger import Logger


def main() -> None:
    count, count_update = claim_slot(), Logger.count_update

    def counted_update(self: Logger) -> None:
        count_update(self)
        count()

    Logger.count_update = counted_update  # type: ignore[method-assign]
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
