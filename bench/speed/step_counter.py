"""Register a twin of every Gymnasium environment whose steps are counted in a file that other processes can read.

`gymnasium.make("bench.speed.step_counter:Counted/HalfCheetah-v4")` imports this module, which registers the ids. So any
program that takes an id is counted in the same way, and no line of it is changed.
"""

import dataclasses
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
from gymnasium.envs.registration import WrapperSpec

COUNTER_FILE = "ONRAMP_STEP_COUNTER"  # the environment variable that names the file
SLOT_BYTES = 8


def claim_slot() -> Callable[[], None]:
    """Claim a slot in the counter file, and return a function that adds one to it.

    Several environments, perhaps in several processes, count into one file. Each has its own int64, because an
    increment of a shared one is not atomic and would lose steps. Raise RuntimeError if the environment variable is not
    set.
    """
    if COUNTER_FILE not in os.environ:
        raise RuntimeError(f"a counted environment needs {COUNTER_FILE}=<file to count in>")
    file = os.open(os.environ[COUNTER_FILE], os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(file, bytes(SLOT_BYTES))  # an append is atomic, so two processes never claim the same slot
        size = os.lseek(file, 0, os.SEEK_CUR)
        slots = memoryview(mmap.mmap(file, size)).cast("q")
    finally:
        os.close(file)
    mine = size // SLOT_BYTES - 1

    def count() -> None:
        slots[mine] += 1

    return count


def read_steps(file: Path) -> int:
    """Return the steps counted so far in all slots of `file`."""
    if not file.exists():
        return 0
    data = file.read_bytes()
    return sum(memoryview(data[: len(data) // SLOT_BYTES * SLOT_BYTES]).cast("q"))


class CountSteps(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A wrapper that adds one to the counter for every step of the environment."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self._count = claim_slot()

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step, then count, so that a step that fails is not counted."""
        result = self.env.step(action)
        self._count()
        return result


def counted(env_id: str) -> str:
    """Return the id of the counted twin of a registered environment, for any program that takes an id."""
    return f"{__name__}:Counted/{env_id}"


def register_counted(env_id: str) -> None:
    """Register the counted twin of `env_id`: the same specification with one more wrapper around it."""
    spec = gymnasium.registry[env_id]
    counter = WrapperSpec("CountSteps", f"{__name__}:CountSteps", kwargs={})
    wrappers = (*spec.additional_wrappers, counter)
    twin = dataclasses.replace(spec, id=f"Counted/{env_id}", additional_wrappers=wrappers, vector_entry_point=None)
    gymnasium.registry[twin.id] = twin


for _env_id in [env_id for env_id in gymnasium.registry if "/" not in env_id]:
    register_counted(_env_id)
