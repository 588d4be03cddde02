"""What every algorithm can be told on the command line, checked before anything starts."""

import contextlib
import dataclasses
import math
import os
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np

from common.errors import InputError

KINDS = {
    int: "a whole number", float: "a number", bool: "True or False", str: "a string", Path: "a path", NoneType: "None",
}  # fmt: skip


def converted(value: Any, wanted: Any) -> Any:
    """Return `value` as the type `wanted`, a field's annotation: "700" and 7e2 as 700, a string as a path.

    NumPy's scalars and arrays count as Python's. Raises ValueError if a conversion would change the value. A type not
    in `KINDS` takes every value.
    """
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    origin, parts = get_origin(wanted), get_args(wanted)
    if origin in (Union, UnionType):
        for part in sorted(parts, key=lambda part: type(value) is not part):  # its own type first
            try:
                return converted(value, part)
            except ValueError:
                pass
    elif origin is Literal:
        if value in parts:
            return value
    elif origin is tuple and parts[-1] is ...:
        if isinstance(value, list | tuple):
            return tuple(converted(each, parts[0]) for each in value)
    elif wanted in (str, Path):
        if isinstance(value, str | os.PathLike) and (value or wanted is str):  # Path("") is the current folder
            return wanted(value)
    elif wanted in (int, float):
        if isinstance(value, int | float | str | np.number) and not isinstance(value, bool):
            return whole_number(value) if wanted is int else float(value)
    elif wanted not in KINDS or isinstance(value, wanted):
        return value
    raise ValueError(f"{value!r} is not {described(wanted)}")


def whole_number(value: float | str | np.number[Any]) -> int:
    """Return 100000 for 1e5, "1e5" and 100000.0. Raises ValueError for 1.5."""
    if isinstance(value, int | np.integer) or (isinstance(value, str) and value.strip("+-").isdecimal()):
        return int(value)  # of any size: a float holds 53 bits
    with contextlib.suppress(ValueError):
        if float(value).is_integer():
            return int(float(value))
    raise ValueError(f"{value!r} is not a whole number")


def described(wanted: Any) -> str:
    """Return a type in the reader's words."""
    origin, parts = get_origin(wanted), get_args(wanted)
    if origin in (Union, UnionType):
        *first, last = " or ".join(map(described, parts)).split(" or ")
        return f"{', '.join(first)} or {last}"
    if origin is Literal:
        return f"one of {', '.join(map(repr, parts))}"
    return f"a list of {described(parts[0])[2:]}s" if origin is tuple else KINDS.get(wanted, str(wanted))


def at_least(lowest: int, **given: float | None) -> None:
    """Raise InputError for the first flag that is below `lowest`, or not finite. None is a flag not given."""
    for name, value in given.items():
        if value is not None and not lowest <= value < math.inf:
            raise InputError(f"--{name.replace('_', '-')} is {value}: give a number from {lowest} up")


@dataclasses.dataclass
class RunArgs:
    """What every algorithm takes. Numbers are above 0, but for those that a class says may be 0, or of any sign."""

    may_be_zero: ClassVar[tuple[str, ...]] = ("seed", "eval_episodes")
    any_sign: ClassVar[tuple[str, ...]] = ()
    may_grow: ClassVar[
        tuple[str, ...]
    ] = ()  # what a run can be given more of: only --overlap's last updates depend on its end

    env: str = "HalfCheetah-v4"
    """Gymnasium id of the environment."""
    seed: int = 1
    """Fixes everything random: networks, exploration, environments, batches."""
    num_envs: int = 1
    """Environments stepped together."""
    vectorizer: Literal["sync", "async", "envpool"] = "sync"
    """How: one after another, each in a process of its own, or in the threads of EnvPool (docs/environments.md)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where networks and replay buffer live; auto takes CUDA when it is there."""
    compile: bool = False
    """Run the update through torch.compile."""
    cuda_graph: bool = True
    """On CUDA, run the update, and acting, as captured graphs, which launch all their kernels at once."""
    tf32: bool = False
    """On CUDA, multiply matrices with 10 bits of mantissa instead of 23, as JAX does: faster for large networks."""
    run_dir: Path | None = None
    """Run folder; runs/<algorithm>__<env or dataset>__<seed> unless given."""
    eval_every: int = 5_000
    """Environment steps between evaluations."""
    eval_episodes: int = 10
    """Episodes of an evaluation, from the same starts each time, or 0; the policy is deterministic, but for EXPO's."""
    checkpoint_every: int = 10_000
    """Environment steps between checkpoints."""
    track: bool = False
    """Log to Weights & Biases too."""

    @property
    def task(self) -> str:
        """What is learned, for the run's name."""
        return self.env

    @property
    def span(self) -> tuple[int, int]:
        """The first step and the last; environment steps are positive, gradient steps on a dataset alone negative."""
        raise NotImplementedError

    def __post_init__(self) -> None:
        allowed = {name for base in type(self).__mro__ for name in vars(base).get("may_be_zero", ())}
        wanted = get_type_hints(type(self))
        for field in dataclasses.fields(self):
            flag = "--" + field.name.replace("_", "-")
            try:
                value = converted(given := getattr(self, field.name), wanted[field.name])
            except (ValueError, OverflowError):
                raise InputError(f"{flag} is {given!r}: give {described(wanted[field.name])}") from None
            setattr(self, field.name, value)
            if isinstance(value, tuple) and not (value and min(value) > 0):
                raise InputError(f"{flag} is {value}: give one or more numbers above 0")
            if isinstance(value, int) and value >= 2**63:
                raise InputError(f"{flag} is {value}: give a number below 2^63")
            if isinstance(value, int | float) and not isinstance(value, bool):
                if field.name in self.any_sign:
                    if not math.isfinite(value):
                        raise InputError(f"{flag} is {value}: give a finite number")
                    continue
                if field.name in allowed:
                    at_least(0, **{field.name: value})
                elif not 0 < value < math.inf:
                    raise InputError(f"{flag} is {value}: give a number above 0")
                if value > 1 and field.name in ("gamma", "tau", "base_tau", "gae_lambda", "top"):
                    raise InputError(f"{flag} is {value}: give a number in (0, 1]")
                if value >= 1 and field.name in ("dropout", "expectile"):
                    raise InputError(f"{flag} is {value}: give a number below 1")


@dataclasses.dataclass
class OffPolicyArgs(RunArgs):
    """What every algorithm takes that learns while it acts."""

    may_grow: ClassVar[tuple[str, ...]] = ("total_steps", "online_steps")

    overlap: bool | None = None
    """Act before the last step's updates instead of behind them, so that the device learns while the environment
    steps: on CUDA unless given."""


@dataclasses.dataclass
class OnlineArgs(RunArgs):
    """What every algorithm takes that learns from its environment alone."""

    total_steps: int = 1_000_000
    """Environment steps, those of all environments added up."""

    @property
    def span(self) -> tuple[int, int]:
        return 0, self.total_steps
