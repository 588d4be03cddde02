"""Launch an agent's updates, at once or while the environments step."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from common.arguments import NonNegativeInt
from common.checkpoint import Part
from common.schema import Schema
from common.timings import Timings

Metrics = dict[str, Tensor]


class Updater(Part):
    """Calls an update, now or at the next `flush`.

    A deferred update runs after the next action is chosen (`--overlap`), so that a GPU learns while the environments
    step. A checkpoint holds the pending updates, so their number and order do not depend on where a run stops.
    """

    schema: ClassVar[Schema] = {"pending": [{str: object}], "count": NonNegativeInt, "metrics?": {str: Tensor}}

    def __init__(self, function: Callable[..., Metrics], should_defer: Callable[[], bool], timings: Timings) -> None:
        self._function, self._should_defer, self._timings = function, should_defer, timings
        self.metrics: Metrics = {}  # the latest of each name since the last log
        self.count = 0  # calls so far, pending ones included
        self.pending: list[dict[str, Any]] = []

    def __call__(self, **constants: Any) -> None:
        """Perform the update with `constants`, or defer it. Each set of `constants` has its own CUDA graph."""
        self.count += 1
        self.pending.append(constants)
        if not self._should_defer():
            self.flush()

    def flush(self) -> None:
        """Perform the pending updates."""
        for constants in self.pending:
            with self._timings("update"):
                self.metrics |= self._function(**constants)
        self.pending.clear()

    def save(self, folder: Path) -> dict[str, Any]:
        """Return what is pending, how many calls there were, and the means of the metrics."""
        metrics = {name: value.detach().mean().cpu() for name, value in self.metrics.items()}
        return {"pending": list(self.pending), "count": self.count, "metrics": metrics}

    def load(self, folder: Path, state: dict[str, Any]) -> None:
        """Restore what `save` returned."""
        self.pending, self.count = list(state["pending"]), state["count"]
        self.metrics = dict(state.get("metrics", {}))
