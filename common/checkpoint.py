"""Collect, save and restore the state of a run, in files that are either complete or absent."""

import dataclasses
import io
import pickle
import zipfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from common.errors import InputError, diverged
from common.files import does_not_fit, read_bytes, replacing
from common.schema import Schema, mismatch

_STATEFUL = (nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
# Deleting a run is never the cure: a copy of the damaged file may exist.
RESTORE_OR_RESTART = "restore the run folder from a copy, or give another --run-dir to start from scratch"
_CONSTANTS = (int, float, str, bool, type(None), torch.device, torch.dtype)


class Part:
    """A part of a run with state, other than its agent: replay buffer, environments, pending updates."""

    schema: ClassVar[Schema] = {str: object}  # of the state

    def save(self, folder: Path) -> dict[str, Any]:
        """Return the state. Large data may be written into `folder`, but an earlier state must stay loadable."""
        raise NotImplementedError

    def load(self, folder: Path, state: dict[str, Any]) -> None:
        """Restore what `save` returned and wrote."""
        raise NotImplementedError

    def drop_old(self, folder: Path) -> None:
        """Delete the files in `folder` that only earlier states need."""

    def discard_unfinished_episodes(self, exact: list[bool]) -> None:
        """Forget the unfinished episode of each environment whose `exact` [num_envs] is False: it was not restored."""


def discard_unfinished_episodes(parts: Iterable[object], exact: list[bool]) -> None:
    """Let each part that knows of episodes forget those of environments whose `exact` [num_envs] is False."""
    for part in parts:
        if hasattr(part, "discard_unfinished_episodes"):
            part.discard_unfinished_episodes(exact)


def state_of(agent: object) -> dict[str, Any]:
    """Return the state of every attribute of `agent`.

    Attributes may be networks, optimisers, learning-rate schedulers, generators, tensors, arrays and numbers. One that
    is added later is saved without further code. Other constants (strings, devices, tuples), dataclasses and callables
    have no state. Raises InputError for any other type, so that nothing is left out silently.
    """
    state: dict[str, Any] = {}
    for name, value in vars(agent).items():
        if isinstance(value, _STATEFUL):
            if held := value.state_dict():  # nn.Identity holds nothing
                state[name] = held
        elif isinstance(value, torch.Generator):
            state[name] = value.get_state()
        elif isinstance(value, Tensor):
            state[name] = value.detach()
        elif isinstance(value, np.number | np.bool_):
            state[name] = value.item()
        elif isinstance(value, (np.ndarray, int | float)):
            state[name] = value
        elif not (_is_constant(value) or dataclasses.is_dataclass(value) or callable(value)):
            raise _not_saveable(agent, name, f"is a {type(value).__name__}")
    return state


def schema_of(agent: object) -> Schema:
    """Return the schema of what `state_of` returns. Which names there are, and shapes, are left to `restore`."""
    is_schedule = {name: isinstance(value, torch.optim.lr_scheduler.LRScheduler) for name, value in vars(agent).items()}
    return {f"{name}?": dict if is_schedule[name] else _schema_of(state) for name, state in state_of(agent).items()}


def _schema_of(state: object, in_list: bool = False) -> Schema:
    if isinstance(state, dict) and not isinstance(state, Counter):
        numbered = [{int: _schema_of(value)} for key, value in state.items() if isinstance(key, int)]
        parts = {key: _schema_of(value) for key, value in state.items()}
        # An optimiser fills in a switch that an older group of parameters lacks, and no number.
        named = {key if in_list and part is not object else f"{key}?": part for key, part in parts.items()}
        return numbered[0] if numbered else named
    if isinstance(state, tuple):
        return tuple(map(_schema_of, state))
    if isinstance(state, list):
        return [_schema_of(state[0], in_list=True)] if state else list
    if isinstance(state, int | float | Tensor) and not isinstance(state, bool):  # a learning rate is either
        return Tensor if isinstance(state, Tensor) and state.ndim else Tensor | float
    return np.ndarray if isinstance(state, np.ndarray) else object


def _is_constant(value: object) -> bool:
    return all(map(_is_constant, value)) if isinstance(value, tuple) else isinstance(value, _CONSTANTS)


def _not_saveable(agent: object, name: str, what: str) -> InputError:
    return InputError(
        f"{type(agent).__name__}.{name} {what}, which a checkpoint cannot hold\n"
        "make it a tensor, an array, a number or an attribute of a network"
    )


def require_saveable(agent: object) -> None:
    """Raise InputError for an attribute of `agent` whose state would not come back from a checkpoint.

    `state_of` checks types only. This function writes and reads each state, because a network or a scheduler may hold
    anything. It also refuses a scheduler that cycles the momentum.
    """
    for name, state in state_of(agent).items():
        if getattr(vars(agent)[name], "cycle_momentum", False):
            raise InputError(
                f"{type(agent).__name__}.{name} cycles the momentum, which a captured update would not see\n"
                "give it cycle_momentum=False"
            )
        data = io.BytesIO()
        try:
            torch.save(_as_tensors(state), data)
            data.seek(0)
            torch.load(data, weights_only=True)
        except Exception as error:
            kind = f"{type(error).__name__} {error}".splitlines()[0][:100]
            raise _not_saveable(agent, name, f"has a state ({kind})") from None


def restore(
    agent: object, state: dict[str, Any], otherwise: str = "give another --run-dir to start from scratch"
) -> None:
    """Restore what `state_of` returned into the same objects, so that an optimiser stays bound to its parameters.

    Raises InputError, whose message ends with `otherwise`, if names or shapes differ.
    """
    expected = state_of(agent).keys()
    if expected != state.keys():
        raise InputError(
            f"the checkpoint was made by other code: {sorted(expected ^ state.keys())} differ; {otherwise}"
        )
    if wrong := mismatch(state, schema_of(agent)):
        raise InputError(f"the checkpoint does not fit: {wrong}; {otherwise}")
    try:
        for name, value in vars(agent).items():
            if isinstance(value, _STATEFUL):
                value.load_state_dict(state.get(name, {}))
            elif isinstance(value, torch.Generator):
                value.set_state(state[name].cpu())
            elif name in state:
                _require_like(value, state[name])
                if isinstance(value, Tensor | np.ndarray):
                    with torch.no_grad():
                        value[...] = state[name]
                else:
                    number = state[name]
                    setattr(agent, name, type(value)(number) if isinstance(value, np.generic) else number)
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError) as error:
        message = (str(error).splitlines() or [type(error).__name__])[-1].strip()
        raise InputError(f"the checkpoint does not fit {name}: {message}; {otherwise}") from None


def _require_like(value: Any, saved: Any) -> None:
    """Raise ValueError or TypeError if `saved` has another shape, which might be broadcast, or another type."""
    if np.shape(saved) != np.shape(value):
        raise ValueError(f"its shape is {list(np.shape(saved))}, not {list(np.shape(value))}")
    kind = next((kind for kind in (Tensor, np.ndarray) if isinstance(value, kind)), int | float)
    if not isinstance(saved, kind):
        raise TypeError(f"it is a {type(saved).__name__}")


def refuse_non_finite(state: dict[str, Any], folder: Path, step: int) -> None:
    """Raise RunError if a tensor of the state, at `step` of the run in `folder`, is not finite."""
    for name, value in state.items():
        if isinstance(value, dict):
            refuse_non_finite(value, folder, step)
        elif isinstance(value, torch.Tensor) and value.is_floating_point() and not value.isfinite().all():
            raise diverged(f"{name} is not finite", step, folder)


def save(path: Path, state: dict[str, Any]) -> None:
    """Write tensors, arrays, numbers, strings, lists and dicts, which `load` reads without unpickling any code."""
    data = io.BytesIO()  # in memory first: on a full disk torch.save raises an error that does not name the disk
    torch.save(_as_tensors(state), data)
    with replacing(path) as file:
        file.write(data.getbuffer())


def load(path: Path) -> dict[str, Any]:
    """Read what `save` wrote, with tensors on the CPU.

    Raises InputError if the file is damaged or cannot be read, FileNotFoundError if there is none.
    """
    data = read_bytes(path)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:  # torch.load itself does not compare the checksums
            if part := archive.testzip():
                raise zipfile.BadZipFile(f"the checksum of {part} differs")
        state: dict[str, Any] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        return {key: _as_arrays(value) for key, value in state.items()}
    except pickle.UnpicklingError:  # PyTorch's message advises to load it unsafely
        reason = "it holds more than tensors and plain data"
    except Exception as error:  # any error may mean damage, except a lack of memory
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            raise does_not_fit(path) from None
        reason = " ".join(f"{type(error).__name__} {error}".split())[:120]
    raise InputError(f"{path} is damaged ({reason}): {RESTORE_OR_RESTART}")


def _as_tensors(state: Any) -> Any:
    """Replace arrays by {"ndarray": tensor}, because PyTorch does not read NumPy's own pickles as plain data."""
    if isinstance(state, np.ndarray):
        return {"ndarray": torch.from_numpy(state)}
    if isinstance(state, dict) and not isinstance(state, Counter):
        return {key: _as_tensors(value) for key, value in state.items()}
    return [_as_tensors(value) for value in state] if isinstance(state, list) else state


def _as_arrays(state: Any) -> Any:
    if isinstance(state, dict) and not isinstance(state, Counter):
        if state.keys() == {"ndarray"}:
            return state["ndarray"].numpy()
        return {key: _as_arrays(value) for key, value in state.items()}
    return [_as_arrays(value) for value in state] if isinstance(state, list) else state
