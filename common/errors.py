"""The ways in which a command ends early, which `common.command_line` turns into one message and an exit status."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


class InputError(Exception):
    """What the user gave cannot work (a flag, an id, a file, a folder). Exit status 2; the message names the cure."""


class Finished(Exception):
    """There is nothing to do: what was asked for is there already. Exit status 0."""


class RunError(Exception):
    """The run itself failed (a non-finite loss, a full disk). Exit status 1; the message says where and what to do."""


def diverged(what: str, step: int, folder: Path) -> RunError:
    """Return the error of a run in `folder` that learned a number that is not finite: `what` describes the number."""
    return RunError(
        f"{what} at step {step:,}: try a smaller learning rate or reward scale; "
        f"the last checkpoint before it, if there was one, is in {folder}"
    )


def require_finite_actions(actions: NDArray[Any]) -> None:
    """Raise RunError if `actions` are not finite. A simulator would accept them, or write files of its own."""
    if not np.isfinite(actions).all():
        raise RunError("the policy gives non-finite actions: try a smaller learning rate or reward scale")


def require_finite(first: int, **parts: NDArray[Any]) -> None:
    """Raises RunError where one of these parts of transitions, of which the first is number `first`, is not finite."""
    bad = [name for name, part in parts.items() if not np.isfinite(part).all()]
    if bad:
        raise RunError(
            f"the environment gave non-finite {' and '.join(bad)} in transition {first:,}: "
            "see whether it diverges (actions, time step), or give another --env or --seed"
        )
