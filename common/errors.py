"""Exceptions that end a command early. `common.command_line` turns each into a message and an exit status."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


class InputError(Exception):
    """A flag, id, file or folder from the user cannot be used. Exit status 2. The message names the remedy."""


class Finished(Exception):
    """There is nothing to do, because the result exists already. Exit status 0."""


class RunError(Exception):
    """The run itself failed (a non-finite loss, a full disk). Exit status 1. The message names place and remedy."""


class Stopped(SystemExit):
    """A second signal ends the run at once, and so does one during a compilation.

    The environment's own SystemExit, which is an error, is not this one.
    """


def report_unraisable(said: "sys.UnraisableHookArgs") -> None:
    """Print an exception that Python cannot raise, unless it is `Stopped`.

    The second signal may come while an object is freed. Then the run stops as after the first.
    """
    if not isinstance(said.exc_value, Stopped):
        sys.__unraisablehook__(said)


def diverged(what: str, step: int, folder: Path) -> RunError:
    """Return the error of a run in `folder` that computed a non-finite number at `step`; `what` describes it."""
    return RunError(
        f"{what} at step {step:,}: try a smaller learning rate or reward scale\n"
        f"the last checkpoint, if there is one, is in {folder}"
    )


def require_finite_actions(actions: NDArray[Any]) -> None:
    """Raise RunError if `actions` are not finite. A simulator would accept them, or write its own files."""
    if not np.isfinite(actions).all():
        raise RunError("the policy gives non-finite actions: try a smaller learning rate or reward scale")


def require_finite(first: int, **parts: NDArray[Any]) -> None:
    """Raise RunError if a part of these transitions is not finite. `first` is the number of the first transition."""
    bad = [name for name, part in parts.items() if not np.isfinite(part).all()]
    if bad:
        raise RunError(
            f"the environment gave non-finite {' and '.join(bad)} in transition {first:,}: "
            "check whether it diverges (actions, time step), or give another --env or --seed"
        )
