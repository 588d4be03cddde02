"""Episodes as arrays, one row a step, and what is wrong with those that a user gives."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from common.errors import InputError
from common.messages import log

Array = NDArray[Any]


class Transitions(NamedTuple):
    """Episodes one after another, each in the order of time. The last transition of each is marked as its end.

    obs and next_obs [n, obs_dim] and rewards [n] are float32. actions [n, action_dim] are in the environment's own
    units and precision. terminations, truncations and cuts [n] are bool. `cuts` are ends that the collection made and
    after which the environment would have continued.
    """

    obs: Array
    actions: Array
    rewards: Array
    next_obs: Array
    terminations: Array
    truncations: Array
    cuts: Array

    @property
    def timeouts(self) -> Array:
        timeouts: Array = self.truncations | self.cuts
        return timeouts

    def episodes(self) -> Iterator[slice]:
        """Yield the slice of each episode."""
        ends = np.flatnonzero(self.terminations | self.timeouts) + 1
        yield from map(slice, [0, *ends[:-1].tolist()], ends.tolist())


def checked(
    observations: ArrayLike,
    actions: ArrayLike,
    rewards: ArrayLike,
    terminations: ArrayLike,
    truncations: ArrayLike | None,
    episode_ends: ArrayLike | None,
    next_observations: ArrayLike | None,
) -> Transitions:
    """Return a user's arrays, as `offline.write.write_dataset` describes them. Actions keep their precision.

    If there are no `next_observations`, next_obs is the obs of the next row, and at the end of an episode its own obs.

    Raises InputError if the arrays do not fit together, or hold something else than finite numbers.
    """
    if (truncations is None) == (episode_ends is None):
        raise InputError("give either truncations or episode_ends, since time limits end episodes too")
    obs = _numbers("observations", observations, width=None)
    rows = len(obs)
    if rows == 0:
        raise InputError("observations has no rows: give at least one")
    own_actions, reward = _numbers("actions", actions, None, rows), _numbers("rewards", rewards, 1, rows)
    terminal = _flags("terminations", terminations, rows)
    if truncations is None:
        last = _flags("episode_ends", episode_ends, rows)
        truncated = last & ~terminal
        if inside := int((terminal & ~last).sum()):
            log.warning(f"{inside:,} terminations are not among the episode_ends: an episode ends at each of them too")
    else:
        truncated = _flags("truncations", truncations, rows)
    ends, cuts = terminal | truncated, np.zeros(rows, bool)
    if not ends[-1]:
        log.warning("the last row does not end an episode: it is stored as cut there")
        ends[-1] = cuts[-1] = True
    if next_observations is None:
        next_obs = np.concatenate([obs[1:], obs[-1:]])
        next_obs[ends] = obs[ends]
    else:
        next_obs = _numbers("next_observations", next_observations, obs.shape[1], rows)
        _warn_of_misalignment(obs, next_obs, ends, terminal)
    obs, reward, next_obs = (part.astype(np.float32, copy=False) for part in (obs, reward[:, 0], next_obs))
    return Transitions(obs, own_actions, reward, next_obs, terminal, truncated, cuts)


def with_successors(data: Transitions) -> Transitions:
    """Return the data without the last step of each cut episode, whose own obs then is the last next_obs.

    Raises InputError if no step is left.
    """
    lost = data.timeouts & ~data.terminations
    if lost.all():
        raise InputError("no step has a successor: give next_observations")
    cuts = np.append(lost[1:], False) & ~data.terminations & ~lost
    return Transitions(*(part[~lost] for part in data._replace(cuts=cuts)))


def _numbers(name: str, values: ArrayLike | None, width: int | None, rows: int | None = None) -> Array:
    """Return finite numbers [rows, width]; None allows any size. Raises InputError otherwise."""
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:  # of a tensor with a gradient
        raise InputError(f"{name} is not an array of numbers: {' '.join(str(error).split())[:200]}") from None
    if array.dtype.kind not in "biuf":
        raise InputError(f"{name} holds {array.dtype}: give an array of numbers")
    if width == 1 and array.ndim == 1:
        array = array[:, None]
    if array.ndim != 2 or array.shape[1] == 0 or width not in (None, array.shape[1]):
        needed = "(n,)" if width == 1 else f"(n, {width or 'dim'})"
        raise InputError(f"{name} has shape {array.shape}: give {needed}, one row for each step")
    if rows not in (None, len(array)):
        raise InputError(
            f"{name} has {len(array):,} rows, observations has {rows:,}: give one row for each step "
            "(what follows an episode's last step is in next_observations)"
        )
    with np.errstate(over="ignore"):  # numbers too large for float32 are refused too
        bad = np.flatnonzero(~np.isfinite(array.astype(np.float32)).all(axis=1))
    if len(bad):
        raise InputError(f"{name} of row {bad[0]:,} is not finite: leave out or correct {len(bad):,} such rows")
    return array


def _flags(name: str, values: ArrayLike | None, rows: int) -> NDArray[np.bool_]:
    flags = _numbers(name, values, 1, rows)[:, 0]
    if bad := set(np.unique(flags).tolist()) - {0, 1}:
        raise InputError(f"{name} holds {min(bad):g}: give only 1 (or True) and 0 (or False)")
    return flags.astype(bool)


def _warn_of_misalignment(obs: Array, next_obs: Array, ends: Array, terminal: Array) -> None:
    """Print a warning if next_obs is not the next row's obs inside an episode, or is it where an episode was cut."""
    follows = np.isclose(next_obs[:-1], obs[1:]).all(axis=1)
    breaks = np.flatnonzero(~follows & ~ends[:-1])
    if len(breaks):
        log.warning(
            f"next_observations of {len(breaks):,} rows inside episodes, the first in row {breaks[0]:,}, are not the "
            "observations of the next row: check that all arrays are aligned and every episode's end is marked"
        )
    resets = np.flatnonzero(follows & ends[:-1] & ~terminal[:-1])
    if len(resets):
        log.warning(
            f"next_observations of {len(resets):,} cut episodes, the first in row {resets[0]:,}, are the next "
            "episode's first observations: if the environment was reset there, give its last observations instead"
        )
