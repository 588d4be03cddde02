"""Wall times of the parts of a loop."""

import contextlib
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from statistics import median

LAST = 10_000  # times of a block that are kept: steps without a log must not fill the memory


class Timings:
    """Records the last times of named blocks since the last `take`."""

    def __init__(self) -> None:
        self._milliseconds: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=LAST))

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the block."""
        start = time.perf_counter()
        yield
        self._milliseconds[name].append(1e3 * (time.perf_counter() - start))

    def take(self) -> dict[str, float]:
        """Return the median of each block as `time/<name>_ms`, and forget the times. One stall moves no median."""
        medians = {f"time/{name}_ms": median(times) for name, times in self._milliseconds.items()}
        self._milliseconds.clear()
        return medians
