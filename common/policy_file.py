"""A policy in one file: what an agent reads to act, and how it was trained.

The format is safetensors. It holds tensors and text only, and reading it executes no code.
"""

import json
import math
import statistics
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from common import checkpoint
from common.acting import Agent
from common.checkpoint import state_of
from common.errors import InputError
from common.evaluate import Act
from common.files import read_bytes, replacing
from common.run_folder import (
    CHECKSUM,
    EVALUATIONS,
    POLICY_FOLDER,
    TRAINED_SCHEMA,
    Curve,
    mean_by_step,
    read_evaluations,
    require_trained,
)

SUFFIX = ".safetensors"
FACTS = "onramp"  # the key of the facts in the file's metadata


class PolicyFile(NamedTuple):
    """The tensors by name, and the facts: at least "algo", "arguments", "step" and "return"."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]


def attributes_read(agent: Any, call: Callable[[], object]) -> set[str]:
    """Return the names of the agent's attributes that are read during `call()`."""
    read, own = set(), type(agent)

    class Watched(own):  # type: ignore[valid-type, misc]
        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

    agent.__class__ = Watched
    try:
        call()
    finally:
        agent.__class__ = own
    return read


def names_for_acting(agent: Agent, policy: Act, obs: NDArray[Any]) -> set[str]:
    """Return the names of the attributes that acting on obs [n, obs_dim] reads, with noise and by `policy`.

    The agent's generator is left as it was.
    """
    before = agent.generator.get_state()
    read = attributes_read(agent, lambda: (agent.act(obs), policy(obs)))
    agent.generator.set_state(before)
    return read & vars(agent).keys()


def write_policy(path: Path, agent: object, names: set[str], facts: dict[str, Any]) -> None:
    """Write the state of these attributes of the agent, and the facts, to `path`, which is complete or absent."""
    tensors: dict[str, Tensor] = {}
    for name, state in state_of(agent).items():
        if name in names and not isinstance(vars(agent)[name], torch.Generator):
            for key, value in state.items() if isinstance(state, dict) else [("", state)]:
                tensors[f"{name}.{key}" if key else name] = torch.as_tensor(value).detach().cpu().contiguous().clone()
    facts = facts | {CHECKSUM: _checksum(facts, save(tensors))}
    with replacing(path) as file:  # a second key of the metadata would make their order random
        file.write(save(tensors, {FACTS: json.dumps(facts)}))


def _checksum(facts: dict[str, Any], data: bytes) -> str:
    """Return the CRC-32 of the facts and of the tensors' bytes, which follow the header in a file's data."""
    tensors = data[8 + int.from_bytes(data[:8], "little") :]
    return f"{zlib.crc32(tensors, zlib.crc32(json.dumps(facts).encode())):08x}"


class KeptPolicies:
    """The policies in a run folder: that of the last evaluation, and the one with the highest mean return."""

    def __init__(self, run: Path, facts: dict[str, Any]) -> None:
        """`facts` are stored in each file."""
        self._evaluations, self._folder, self._facts = run / EVALUATIONS, run / POLICY_FOLDER, facts
        self._best: float | None = None  # the highest mean return so far, once it is known
        self._best_path = self._folder / f"best{SUFFIX}"

    def require_whole(self) -> None:
        """Raise InputError if the best policy so far is damaged or gone: the run would end with another one."""
        if self._best_path.exists():
            try:
                read_policy(self._best_path)
            except InputError as error:
                raise InputError(f"{error}\n{checkpoint.RESTORE_OR_RESTART}") from None
        elif (self._folder / f"last{SUFFIX}").exists():  # which is written after the first best one
            raise InputError(f"{self._best_path} is missing: {checkpoint.RESTORE_OR_RESTART}")

    def require_best(self) -> None:
        """Raise InputError if the best policy is that of another evaluation than the best in evaluations.csv.

        It may be a better one: of an evaluation after the checkpoint, which the run repeats.
        """
        if (means := self._means()) and self._best_path.exists():
            facts, best = read_policy(self._best_path).facts, max(means, key=lambda step: (means[step], -step))
            if facts["return"] <= means[best] and (facts["return"], facts["step"]) != (means[best], best):
                where = f"{self._best_path} is the policy of step {facts['step']:,}, and the best is of step {best:,}"
                raise InputError(f"{where}: {checkpoint.RESTORE_OR_RESTART}")

    def _means(self) -> Curve:
        return mean_by_step(read_evaluations(self._evaluations), lambda row: float(row["return"]))

    def keep(self, agent: Agent, policy: Act, obs: NDArray[Any], returns: list[float], step: int) -> None:
        """Write the policy after its evaluation at `step`, which evaluations.csv has already. obs: [n, obs_dim].

        Of equal returns the first is the best. A run that was killed repeats its evaluations, and so these files.
        """
        names = names_for_acting(agent, policy, obs)  # they may change during a run: DSRL's do when it begins to steer
        mean = statistics.mean(returns)
        if self._best is None:
            has_file = self._best_path.exists()
            self._best = max((m for at, m in self._means().items() if at != step and has_file), default=-math.inf)
        facts = self._facts | {"obs_dim": obs.shape[1], "step": step, "return": mean}
        self._folder.mkdir(exist_ok=True)
        for name in ["best", "last"] if mean > self._best else ["last"]:
            write_policy(self._folder / f"{name}{SUFFIX}", agent, names, facts)
        self._best = max(mean, self._best)


def read_policy(path: Path) -> PolicyFile:
    """Read what `write_policy` wrote. Raises InputError if the file is missing, damaged or another program's."""
    try:
        data = read_bytes(path)
        tensors = load(data)
        size = int.from_bytes(data[:8], "little")
        facts = json.loads(json.loads(data[8 : 8 + size])["__metadata__"][FACTS])
        if facts.pop(CHECKSUM, None) not in (None, _checksum(facts, data)):  # older files have none
            raise ValueError("its checksum differs")
    except FileNotFoundError:
        raise InputError(f"there is no file {path}") from None
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{path} is damaged, or not a policy of onramp: {type(error).__name__} {error}") from None
    schema = TRAINED_SCHEMA | {"step": int, "return": float}
    require_trained(facts, schema, path, "is damaged, or not a policy of onramp: give another policy")
    if not all(tensor.isfinite().all() for tensor in tensors.values() if tensor.is_floating_point()):
        raise InputError(f"{path} holds weights that are not finite: give another policy")
    return PolicyFile(tensors, facts)


def load_into(agent: object, tensors: dict[str, Tensor]) -> None:
    """Restore a policy's tensors into an agent of the same shapes. Raises InputError if they do not fit."""
    state: dict[str, Any] = {}
    for key, tensor in tensors.items():
        name, _, rest = key.partition(".")
        value = vars(agent).get(name)
        if isinstance(value, nn.Module):
            state.setdefault(name, {})[rest] = tensor
        elif isinstance(value, np.ndarray):
            state[name] = tensor.numpy()
        else:
            state[name] = tensor.item() if isinstance(value, int | float) and tensor.numel() == 1 else tensor
    checkpoint.restore(agent, state_of(agent) | state, otherwise="give another policy")
