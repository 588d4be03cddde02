"""The content of a dataset file before it becomes a replay buffer: facts are read at once, transitions in blocks."""

import difflib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.errors import InputError
from common.messages import log
from envs import make
from envs.settings import RESERVED, settings_in

Array = NDArray[Any]
# float32 rounds a number by at most 6e-8 of its size, and an action was stored and rescaled a few times.
ROUNDING = 1e-6
TRUSTED = ("", "envs.d4rl", "offline.environments")  # files may name environments of these modules


class TransitionBlock(NamedTuple):
    """n consecutive transitions.

    obs and next_obs are [n, obs_dim], actions [n, action_dim] in the environment's own units, rewards and terminations
    [n].
    """

    obs: Array
    actions: Array
    rewards: Array
    next_obs: Array
    terminations: Array


@dataclass(kw_only=True)
class Episodes:
    """The facts of a dataset except its transitions, which are stored one episode after another."""

    id: str
    ends: NDArray[np.int64]
    """[episodes]: one past each episode's last transition, ascending. The last is the number of transitions."""
    dropped_final_rewards: NDArray[np.float64]
    """[episodes]: the reward of an episode's last step if that step is not among the transitions, else NaN. A dropped
    reward that is NaN itself is inf here.
    """
    env: str | None = None
    """The environment that evaluates the dataset, as `envs.make.make` takes it; None if it is unknown."""
    env_kwargs: dict[str, Any] | None = None
    """Its arguments, as `envs.make.make` takes them, or None if the dataset does not state them."""
    untrusted_env: str | None = None
    """The environment (module:Name-v0) that the files name, if `env` is None because it would import a module."""
    reference: tuple[float, float] | None = None
    """Returns that score 0 and 100 (`offline.scores`)."""

    def __len__(self) -> int:
        return int(self.ends[-1])

    @property
    def starts(self) -> NDArray[np.int64]:
        """Return the index of each episode's first transition: [episodes]."""
        return np.concatenate([[0], self.ends[:-1]])

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Return the number of transitions in each episode: [episodes]."""
        return np.diff(self.ends, prepend=0)

    def evaluation_env(self, given: str | None, asked: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Return the environment that evaluates the dataset, `given` or else its own, and the arguments for it.

        `asked` are the user's arguments, and those that the dataset states come next (`envs.settings.settings_in`).
        Raises InputError if there is no environment, or if it is the dataset's with other arguments.
        """
        env = given or self.env
        if not env and self.untrusted_env:
            raise not_imported(self.id, self.untrusted_env)
        if not env:
            raise InputError(f"{self.id} does not name its evaluation environment: give --env")
        return env, settings_in(env, asked, self.env or self.untrusted_env, self.env_kwargs, self.id)

    def returns_of(self, rewards: Array) -> NDArray[np.float64]:
        """Return the undiscounted sum of each episode's `rewards` [n], its dropped one included: [episodes]."""
        lost = np.nan_to_num(self.dropped_final_rewards, posinf=np.inf, neginf=-np.inf)
        return np.add.reduceat(rewards.astype(np.float64), self.starts) + lost


@dataclass(kw_only=True)
class RawDataset(Episodes):
    """Transitions as they were recorded: not scaled, not clipped, and not checked for finiteness."""

    obs_dim: int
    action_dim: int
    blocks: Callable[[], Iterator[TransitionBlock]]
    """Reads all transitions, in order."""
    rewards: Callable[[], Array]
    """Reads their rewards alone."""
    box: tuple[Array, Array] | None = None
    """The lowest and the highest action, [action_dim], or None if only the environment knows them (`action_box`)."""
    version: tuple[Any, ...] = ()
    """Facts of the files that change when the files do."""
    bad_reward_rows: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """Rows of the file whose reward is not finite, including rows that are not among the transitions."""

    def returns(self) -> NDArray[np.float64]:
        """Return the undiscounted return of each episode, its dropped reward included: [episodes]."""
        return self.returns_of(self.rewards())


def nearest(name: str, known: list[str]) -> str:
    """Return the known ids that look like `name`, as the end of an error message."""
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return (
        f": did you mean {', '.join(close)}?"
        if close
        else ": give a D4RL or Minari id, an OGBench task or the path of a file"
    )


def named_environment(name: str) -> dict[str, str]:
    """Return `name` as a `RawDataset`'s env or untrusted_env, or as neither.

    An untrusted_env is a module:Name-v0 that only `--env` allows.
    """
    if name.rpartition(":")[0] in TRUSTED:
        return {"env": name}
    return {"untrusted_env": name} if re.fullmatch(r"[\w.]+:[\w./-]{1,100}", name) else {}


def _text(value: Any) -> str:
    text = value.decode() if isinstance(value, bytes) else value
    if not isinstance(text, str):
        raise TypeError
    return text


def _dict(value: Any) -> dict[str, Any]:
    found = value if isinstance(value, dict) else json.loads(_text(value))
    if not isinstance(found, dict) or not found.keys().isdisjoint(RESERVED):
        raise TypeError
    return found


def _numbers(value: Any) -> Array:
    numbers = np.asarray(value)
    if numbers.dtype.kind not in "iuf" or not np.isfinite(numbers).all():
        raise TypeError
    return numbers.astype(np.float64)  # differences of small integer types overflow


# The attributes that a dataset can have: how each is read, and what it must be.
ATTRIBUTES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "env": (_text, "a text"),
    "env_kwargs": (_dict, f"a dict in JSON without the keys {', '.join(RESERVED)}"),
    "action_low": (_numbers, "finite numbers"),
    "action_high": (_numbers, "finite numbers"),
    "ref_min_score": (lambda value: _numbers(value).item(), "a finite number"),
    "ref_max_score": (lambda value: _numbers(value).item(), "a finite number"),
}


def checked_attributes(source: object, attributes: Mapping[str, Any], action_dim: int) -> dict[str, Any]:
    """Return the fields of a `RawDataset` that `attributes` hold: its environment, box and reference.

    Raises InputError if one is not what it must be, or if two do not fit together.
    """
    found: dict[str, Any] = {}
    for name, (parse, needed) in ATTRIBUTES.items():
        if name not in attributes:
            continue
        value: Any = "unreadable"
        try:
            value = attributes[name]
            found[name] = parse(value)
        except (OSError, RuntimeError, KeyError, ValueError, TypeError, RecursionError):
            text = repr(value.tolist() if isinstance(value, np.ndarray | np.generic) else value)[:100]
            raise InputError(f"{source}: the attribute {name} is {text}: it must be {needed}") from None
    for pair in (("action_low", "action_high"), ("ref_min_score", "ref_max_score")):
        if len(missing := [name for name in pair if name not in found]) == 1:
            raise InputError(f"{source} has only one of the attributes {' and '.join(pair)}: add {missing[0]} too")
    if "env" in found:
        found |= named_environment(found.pop("env"))
    if "action_low" in found:
        found["box"] = _box(source, found.pop("action_low"), found.pop("action_high"), action_dim)
    if "ref_min_score" in found:
        found["reference"] = low, high = float(found.pop("ref_min_score")), float(found.pop("ref_max_score"))
        if low >= high:
            raise InputError(f"{source}: ref_min_score is {low:g} and ref_max_score {high:g}: it must be larger")
    return found


def _box(source: object, low: Array, high: Array, action_dim: int) -> tuple[Array, Array]:
    if low.shape not in ((), (action_dim,)) or high.shape not in ((), (action_dim,)):
        raise InputError(
            f"{source}: action_low and action_high have shapes {low.shape} and {high.shape}: "
            f"an action has {action_dim} numbers, so ({action_dim},) or one number is needed"
        )
    low, high = np.broadcast_to(low, action_dim), np.broadcast_to(high, action_dim)
    with np.errstate(over="ignore"):
        wrong = np.flatnonzero(~((low < high) & np.isfinite((high - low).astype(np.float32))))
    if len(wrong):
        i = int(wrong[0])
        raise InputError(
            f"{source}: action_low is {low[i]:g} and action_high is {high[i]:g} in dimension {i}: "
            "action_low must be the smaller one, and their difference finite"
        )
    return low, high


def not_imported(source: str, env: str) -> InputError:
    """Return the error for a `source` that names the environment `env` of a module, with the way to allow it."""
    return InputError(
        f"{source} names the environment {env}, but modules named in files are not imported\n"
        f"give --env {env} to allow it"
    )


def box_cure(recording: RawDataset, env: str | None = None) -> str:
    """Return what to do about a box of actions that is unknown or wrong. `env` is what the user gave as `--env`."""
    is_file = Path(recording.id).is_file()
    if recording.box:
        return "check action_low and action_high" if is_file else "check its action space"
    given = "another --env" if env and env != recording.env else "--env"
    return f"give its attributes action_low and action_high, or {given}" if is_file else f"give {given}"


def action_box(
    recording: RawDataset, env: str | None = None, asked: dict[str, Any] | None = None
) -> tuple[Array, Array]:
    """Return the lowest and the highest action, [action_dim] each.

    They are those that the dataset states, else those of `env`, else those of the environment that the dataset names.
    `asked`: the user's arguments for the environment.

    Raises InputError if neither states them, or if the environment's actions have another size.
    """
    return recording.box or environment_box(recording, env, asked)


def environment_box(
    recording: RawDataset, env: str | None = None, asked: dict[str, Any] | None = None
) -> tuple[Array, Array]:
    """Return the lowest and the highest action, [action_dim] each, of `env` or else of the dataset's environment.

    Raises InputError if there is none, if it does not start, or if its actions have another size.
    """
    cure = box_cure(recording, env)
    if not (env or recording.env or recording.untrusted_env):
        raise InputError(f"{recording.id} specifies neither the box of its actions nor an environment: {cure}")
    name, kwargs = recording.evaluation_env(env, asked or {})
    try:
        box = make.action_box(name, **kwargs)
    except InputError as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"{recording.id}: {name} does not give the box of its actions, so {cure}\n{reason}") from None
    if box.shape != (recording.action_dim,):
        raise InputError(f"{recording.id} has {recording.action_dim} actions, {name} has {box.shape[0]}: {cure}")
    return box.low.astype(np.float64), box.high.astype(np.float64)


def warn_of_another_box(recording: RawDataset, env: str | None = None, asked: dict[str, Any] | None = None) -> None:
    """Print a warning if the dataset's stated box is not that of `env`, or else of the environment that it names.

    Raises InputError as `environment_box` does.
    """
    if recording.box is None:
        return
    (low, high), (known_low, known_high) = recording.box, environment_box(recording, env, asked)
    difference = np.maximum(np.abs(low - known_low), np.abs(high - known_high)) / (known_high - known_low)
    i = int(difference.argmax())
    if difference[i] > ROUNDING:
        log.warning(
            f"{recording.id} states the box {low[i]:g} to {high[i]:g} for its actions, "
            f"{env or recording.env} has {known_low[i]:g} to {known_high[i]:g} (dimension {i}): the stated box "
            "is used, which is right if the actions have their own units"
        )


def warn_of_actions_outside(
    recording: RawDataset, env: str | None, box: tuple[Array, Array], count: int, farthest: Array, kept: bool
) -> None:
    """Print a warning if `count`, the number of transitions with actions outside the box, is not 0.

    The warning is about the dimension that is worst, relative to its width. `farthest` [action_dim]: the largest
    distance outside the box. `env`: as in `action_box`. `kept`: whether those actions are not clipped.
    """
    if not count:
        return
    low, high = box
    i = int((farthest / (high - low)).argmax())
    log.warning(
        f"{recording.id}: {count / len(recording):.2%} of its transitions have actions outside the box "
        f"{low[i]:g} to {high[i]:g} of dimension {i}, by up to {farthest[i]:.3g}: they are "
        f"{'kept' if kept else 'clipped'} (if that is wrong, {box_cure(recording, env)})"
    )


def distance_outside(actions: Array, low: Array, high: Array) -> Array:
    """Return how far each number of actions [n, action_dim] is above `high` or below `low`; it is negative inside.

    It is 0 at a bound and within ROUNDING of it.
    """
    actions = actions.astype(np.float64, copy=False)  # unsigned integers wrap around
    distance = np.maximum(low - actions, actions - high)
    return np.where(np.abs(distance) <= ROUNDING * np.maximum(np.abs(low), np.abs(high)), 0.0, distance)
