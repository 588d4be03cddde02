"""The arguments of every algorithm, checked before anything starts.

A number is above 0 unless its annotation has an `Interval`. A default that is an `Unset` is filled in later.
"""

import contextlib
import dataclasses
import enum
import hashlib
import inspect
import json
import math
import os
import re
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, Union, get_args, get_origin, get_type_hints

import numpy as np

from common.errors import InputError
from common.presets import read_preset

# Arguments that do not change what a run computes. A run that diverges ends when it logs a NaN.
MAY_DIFFER = ("run_dir", "run_name", "track", "checkpoint_every", "log_every")
LONGEST_LABEL = 60  # characters
KINDS = {
    int: "a whole number", float: "a number", bool: "True or False", str: "a string", Path: "a path", NoneType: "None",
}  # fmt: skip


class Unset(enum.Enum):
    """Default of an argument that is filled in before use. It has another type, so that a given value is recognised."""

    BY_DOMAIN = "by the dataset's domain"
    BY_SIZE = "by --size"
    WITH_CUDA = "with CUDA"
    IF_IT_PAYS = "on the CPU, if the run is long enough"

    def __str__(self) -> str:
        return self.value


# `Any` for the type checker, because a field has the type of the value that is filled in.
BY_DOMAIN: Any = Unset.BY_DOMAIN
BY_SIZE: Any = Unset.BY_SIZE
WITH_CUDA: Any = Unset.WITH_CUDA
IF_IT_PAYS: Any = Unset.IF_IT_PAYS

LARGEST_FLOAT32 = float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True)
class Interval:
    """Bounds of a number, as metadata of its annotation."""

    low: float = -math.inf
    high: float = math.inf
    has_low: bool = False
    has_high: bool = False

    def __contains__(self, value: float) -> bool:
        above = value >= self.low if self.has_low else value > self.low
        return above and (value <= self.high if self.has_high else value < self.high)

    def __str__(self) -> str:
        if math.isinf(self.high):
            if math.isinf(self.low):
                return "a finite number"
            return f"a number of {self.low:g} or more" if self.has_low else f"a number above {self.low:g}"
        return f"a number in {'[('[not self.has_low]}{self.low:g}, {self.high:g}{')]'[self.has_high]}"


POSITIVE = Interval(0)
NonNegativeInt = Annotated[int, Interval(0, has_low=True)]
NonNegative = Annotated[float, Interval(0, has_low=True)]
AnyNumber = Annotated[float, Interval()]
OptionalNumber = Annotated[float | None, Interval()]
OptionalNonNegativeInt = Annotated[int | None, Interval(0, has_low=True)]
UnitInterval = Annotated[float, Interval(0, 1, has_low=True, has_high=True)]  # [0, 1]
Fraction = Annotated[float, Interval(0, 1, has_high=True)]  # (0, 1]
OpenFraction = Annotated[float, Interval(0, 1)]  # (0, 1)
Probability = Annotated[float, Interval(0, 1, has_low=True)]  # [0, 1)


def converted(value: Any, wanted: Any) -> Any:
    """Return `value` as the type `wanted`, a field's annotation: "700" and 7e2 as 700, a string as a path.

    NumPy's scalars and arrays count as Python's numbers and lists. A type that is not in `KINDS` takes every value.
    Raises ValueError if a conversion would change the value.
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
            with contextlib.suppress(OverflowError):  # a whole number too large for a float
                return whole_number(value) if wanted is int else float(value)
    elif wanted not in KINDS or isinstance(value, wanted):
        return value
    raise ValueError(f"{value!r} is not {described(wanted)}")


def whole_number(value: float | str | np.number[Any]) -> int:
    """Return 100000 for 1e5, "1e5" and 100000.0. Raises ValueError for 1.5."""
    if isinstance(value, int | np.integer) or (isinstance(value, str) and value.strip("+-").isdecimal()):
        return int(value)  # exact at any size: a float holds 53 bits only
    with contextlib.suppress(ValueError):
        if float(value).is_integer():
            return int(float(value))
    raise ValueError(f"{value!r} is not a whole number")


def described(wanted: Any) -> str:
    """Return a type in words, for an error message."""
    origin, parts = get_origin(wanted), get_args(wanted)
    if origin in (Union, UnionType):
        *first, last = " or ".join(map(described, parts)).split(" or ")
        return f"{', '.join(first)} or {last}"
    if origin is Literal:
        return f"one of {', '.join(map(repr, parts))}"
    return f"a list of {described(parts[0])[2:]}s" if origin is tuple else KINDS.get(wanted, str(wanted))


def at_least(lowest: int, **given: float | None) -> None:
    """Raise InputError for the first flag that is below `lowest` or not finite. None is a flag that was not given."""
    for name, value in given.items():
        if value is not None and not lowest <= value < math.inf:
            raise InputError(f"--{name.replace('_', '-')} is {value}: give a number of {lowest} or more")


def checked(flag: str, given: Any, wanted: Any, bounds: Interval = POSITIVE) -> Any:
    """Convert the value to its type and return it. Raises InputError if that fails, or if it is out of bounds."""
    try:
        value = converted(given, wanted)
    except (ValueError, OverflowError):
        raise InputError(f"{flag} is {given!r}: give {described(wanted)}") from None
    if isinstance(value, tuple) and not (value and min(value) > 0):
        raise InputError(f"{flag} is {value}: give one or more numbers above 0")
    if isinstance(value, int) and value >= 2**63:
        raise InputError(f"{flag} is {value}: give a number below 2^63")
    if isinstance(value, float) and not math.isinf(value) and abs(value) > LARGEST_FLOAT32:
        raise InputError(f"{flag} is {value}: give a number that float32 can hold, below {LARGEST_FLOAT32:.2g}")
    if isinstance(value, int | float) and not isinstance(value, bool) and value not in bounds:
        raise InputError(f"{flag} is {value}: give {bounds}")
    return value


def checked_as(hint: Any, flag: str, given: Any) -> Any:
    """Return the value as `checked` does, with the type and the bounds of a field's annotation."""
    bare, *bounds = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    return checked(flag, given, bare, *bounds)


def json_object(flag: str, value: object) -> str:
    """Return a dict, or its JSON, as JSON with sorted keys. Raises InputError for anything else."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
        if isinstance(found, dict):
            return json.dumps(found, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        pass
    raise InputError(f"""{flag} is {value!r}: give a dict in JSON, such as '{{"frame_skip": 2}}'""")


def env_settings(
    env_kwargs: str = "{}", time_limit: int | None = None, action_repeat: int | None = None, **_: Any
) -> dict[str, Any]:
    """Return what `envs.make.make` gets besides the id. An older run's arguments lack these flags."""
    settings: dict[str, Any] = json.loads(env_kwargs)
    if time_limit:
        settings["max_episode_steps"] = time_limit
    if action_repeat:
        settings["action_repeat"] = action_repeat
    return settings


def label_of(args: "RunArgs") -> str:
    """Return the flags that differ from the preset's or their defaults: "actor-lr-0.0003_no-layer-norm".

    Task and seed are left out, which the name states itself, as are `MAY_DIFFER` and what a resumed run may increase.
    A label that is long, or has characters that not every file system takes, ends in a hash.
    """
    left_out = {"seed", "dataset", *MAY_DIFFER, *args.extendable, *(["env"] if args.task == args.env else [])}
    words, is_plain = [], True
    for field in sorted(dataclasses.fields(args), key=lambda field: field.name):
        value, flag = getattr(args, field.name), field.name.replace("_", "-")
        if field.name in left_out or value == args.from_preset.get(field.name, field.default):
            continue
        if field.name == "preset" and re.fullmatch(r"[\w.]+/[\w.-]+", value):
            value = value.replace("/", "-")  # tuned-Hopper-v4
        if isinstance(value, bool):
            words.append(flag if value else f"no-{flag}")
        else:
            text = "-".join(map(str, value if isinstance(value, tuple) else [value]))
            is_plain &= re.fullmatch("[A-Za-z0-9.-]+", text) is not None
            words.append(f"{flag}-{text}")
    text = "_".join(words)
    if is_plain and len(text) <= LONGEST_LABEL:
        return text
    safe = re.sub("[^A-Za-z0-9_.-]+", "-", text)[: LONGEST_LABEL - 9]
    return f"{safe}-{hashlib.sha256(repr(words).encode()).hexdigest()[:8]}"


class Origin:
    """How arguments came to their values. It is no part of `vars`, which are the values alone."""

    __slots__ = ("_given", "_label", "from_preset")

    if TYPE_CHECKING:
        _given: set[str]  # the arguments that the object was made with
        _label: str | None  # the label before others were filled in
        from_preset: dict[str, Any]  # the values of --preset, also those that a flag overrides


@dataclasses.dataclass
class RunArgs(Origin):
    """Arguments of every algorithm."""

    extendable: ClassVar[tuple[str, ...]] = ()  # arguments that may be larger when a run is resumed
    worth_compiling: ClassVar[int] = 200_000  # steps that save the time of compiling (docs/cpu.md)
    switch_step: ClassVar[int | None] = None  # the last step on a dataset alone, with an evaluation on both sides
    task_flag: ClassVar[str] = "env"  # which argument a preset's task is

    env: str = "HalfCheetah-v4"
    """Gymnasium id of the environment."""
    env_kwargs: str = "{}"
    """Arguments of the environment's constructor, as a dict in JSON: '{"use_contact_forces": false}'."""
    time_limit: int | None = None
    """Environment steps after which an episode is truncated. Replaces the environment's limit."""
    action_repeat: int | None = None
    """Steps of the environment for each action (frame skip), whose rewards are summed.
    None means 1, or that of the dataset."""
    seed: NonNegativeInt = 1
    """Random seed of networks, exploration, environments and batches."""
    preset: str | None = None
    """Values of other flags, by NAME/TASK, such as tuned/Swimmer-v4 (docs/presets.md). NAME may be your own .toml file.
    A flag that is given overrides its preset."""
    num_envs: int = 1
    """Number of environments stepped together."""
    vectorizer: Literal["sync", "async", "envpool"] = "sync"
    """How environments are stepped (docs/environments.md).
    sync: one after another. async: each in its own process. envpool: in EnvPool's threads."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of networks and replay buffer. auto selects CUDA if it is available, else the CPU."""
    compile: bool = IF_IT_PAYS
    """On the CPU, record and compile the updates (docs/cpu.md). On CUDA, use torch.compile besides graphs."""
    cuda_graph: bool = True
    """On CUDA, run updates and policy as CUDA graphs, which launch all their kernels at once."""
    tf32: bool = False
    """On CUDA, multiply matrices with 10 bits of mantissa instead of 23, as JAX does. Faster for large networks."""
    products: Literal["float32", "bfloat16"] = "float32"
    """Number type of matrix products on the CPU. bfloat16 has 8 bits of mantissa (docs/cpu.md)."""
    run_name: str | None = None
    """Name of the run, and of its folder in runs/. None means <algorithm>__<env or dataset>__<seed>,
    with the flags that differ from their defaults before the seed."""
    run_dir: Path | None = None
    """Run folder. None means runs/<name of the run>."""
    eval_every: int = 5_000
    """Environment steps between evaluations."""
    eval_episodes: NonNegativeInt = 10
    """Episodes in each evaluation, with the same seeds each time; 0 turns evaluation off.
    The policy is deterministic, unless it can only sample actions (docs/offline-to-online.md)."""
    checkpoint_every: int = 10_000
    """Environment steps between checkpoints."""
    log_every: int = 1_000
    """Steps between log entries, in metrics.csv and TensorBoard."""
    track: bool = False
    """Also log to Weights & Biases."""

    @property
    def task(self) -> str:
        """The environment or dataset, for the run's name."""
        return self.env

    @property
    def span(self) -> tuple[int, int]:
        """The first and the last step. Environment steps are positive, gradient steps on a dataset alone negative."""
        raise NotImplementedError

    def __new__(cls, *values: Any, **named: Any) -> Self:
        """Note which arguments are given, because a preset fills in only the others."""
        self = super().__new__(cls)
        self._given = {field.name for field in dataclasses.fields(cls)[: len(values)]} | named.keys()
        self._label, self.from_preset = None, {}
        return self

    def __post_init__(self) -> None:
        """Fill in the preset, then convert and check every value.

        Raises InputError for the first of a wrong type or out of bounds.
        """
        hints = get_type_hints(type(self), include_extras=True)
        if isinstance(self.preset, str):
            self._fill_in(self.preset, hints)
        self.env_kwargs = json_object("--env-kwargs", self.env_kwargs)
        for name, wanted in hints.items():
            value, default = getattr(self, name), getattr(type(self), name, None)
            if isinstance(default, Unset) and value == str(default):  # as config.json has it
                setattr(self, name, value := default)
            if get_origin(wanted) is not ClassVar and not isinstance(value, Unset):
                setattr(self, name, checked_as(wanted, f"--{name.replace('_', '-')}", value))
        if self.run_name is not None and not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*", self.run_name):
            raise InputError(f"--run-name is {self.run_name!r}: give letters, digits, '_', '-' and '.'")

    def _fill_in(self, preset: str, hints: dict[str, Any]) -> None:
        """Give every argument that was not given the preset's value. Raises InputError as `read_preset` does."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        values = read_preset(preset, Path(inspect.getfile(type(self))), defaults)
        values = {self.task_flag: values.pop("task")} | values
        if "env_kwargs" in values:
            values["env_kwargs"] = json_object(f"env_kwargs of --preset {preset}", values["env_kwargs"])
        values = {k: checked_as(hints[k], f"{k} of --preset {preset}", value) for k, value in values.items()}
        changing = [k for k, v in values.items() if k != self.task_flag and v != defaults[k]]
        is_unused = all(getattr(self, name) == defaults[name] for name in changing)
        if changing and is_unused and self._given >= defaults.keys():
            raise InputError(f"--preset {preset} came too late: give it to Args, not to dataclasses.replace")
        self.from_preset = values
        vars(self).update({name: value for name, value in values.items() if name not in self._given})

    @classmethod
    def allows(cls, name: str, value: object) -> bool:
        """Return whether the argument may have this value."""
        try:
            checked_as(get_type_hints(cls, include_extras=True)[name], name, value)
        except InputError:
            return False
        return True

    @property
    def env_settings(self) -> dict[str, Any]:
        """What `envs.make.make` gets besides the id: `env_kwargs`, and the other flags of the environment if given."""
        return env_settings(self.env_kwargs, self.time_limit, self.action_repeat)

    @property
    def label(self) -> str:
        """The flags that differ from their defaults, for the run's name (`label_of`)."""
        return label_of(self) if self._label is None else self._label

    def filled_in(self, **values: Any) -> Self:
        """Return a copy with values that no flag gave, which therefore leave the run's name unchanged."""
        filled = dataclasses.replace(self, **values | {"preset": None})
        filled.preset, filled.from_preset, filled._label = self.preset, self.from_preset, self.label
        return filled


@dataclasses.dataclass
class OffPolicyArgs(RunArgs):
    """Arguments of every algorithm that learns while it acts."""

    worth_compiling: ClassVar[int] = 20_000  # an update at every step saves more
    # A run can be extended, because only --overlap's last updates depend on where it ends.
    extendable: ClassVar[tuple[str, ...]] = ("total_steps", "online_steps")

    overlap: bool = WITH_CUDA
    """Choose each action before the previous step's updates, so that the device learns while the environments step."""


@dataclasses.dataclass
class OnlineArgs(RunArgs):
    """Arguments of every algorithm that learns from its environment alone."""

    total_steps: int = 1_000_000
    """Environment steps, summed over all environments."""

    @property
    def span(self) -> tuple[int, int]:
        return 0, self.total_steps
